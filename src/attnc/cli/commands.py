"""The commands. What is slow to load is loaded inside the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.output import console, panel, print_json, print_parts, progress_bar
from attnc.cli.reading import ExpressionCommand, check_writable, command_line, read_norm, read_point
from attnc.cli.tables import read_source
from attnc.errors import InputError

if TYPE_CHECKING:
    import numpy as np


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Compiles mathematics into softmax attention, and proves how far off the result can be.",
    epilog="Example:\n\nattnc compile 'sin(x)+cos(y)' --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n"
    "Exit codes: 0 done, 1 the bound was not met or not re-proved, 2 bad input or usage.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Saved = Annotated[Path, typer.Argument(metavar="NET", help="The folder of a saved network.")]


@app.command(
    "compile",
    cls=ExpressionCommand,
    epilog='Examples:\n\nattnc compile "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n'
    'attnc compile "-x**2" --box x=-pi:pi --eps 0.1 --json\n\n'
    "attnc compile --csv table.csv --inputs x,y --output z --eps 1e-3 --out net",
)
def compile_command(
    expression: Annotated[
        str | None,
        typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y' or '(x+y, x*y)'.", show_default=False),
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option("--box", metavar="NAME=LO:HI", help="The range of a variable; once for each.", show_default=False),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", help="A table instead of an expression: a CSV file.", show_default=False)
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="X,Y", help="The table's input columns.", show_default=False)
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="Z", help="The table's output column, or columns.", show_default=False)
    ] = None,
    eps: Annotated[float, typer.Option(help="The largest error allowed on the box, or at a table's points.")] = 1e-2,
    dtype: Annotated[str, typer.Option(help="The arithmetic: float64 or float32.")] = "float64",
    also: Annotated[
        str | None, typer.Option(help="A second arithmetic to certify the same weights for.", show_default=False)
    ] = None,
    construction: Annotated[str, typer.Option(help="The theorem to build by.")] = "auto",
    criterion: Annotated[
        str, typer.Option(help="What auto makes least: multiply_adds, anchors, parameters or layers.")
    ] = "multiply_adds",
    norm: Annotated[str, typer.Option(help="The norm of the error: inf, or a number p ≥ 1 for L_p.")] = "inf",
    centres: Annotated[str | None, typer.Option(help="Where cells are: grid, or adaptive.", show_default=False)] = None,
    heads: Annotated[
        int | None, typer.Option(help="Heads of the first layer, for two layers.", show_default=False)
    ] = None,
    max_anchors: Annotated[int | None, typer.Option(help="Refuse to build more anchors.", show_default=False)] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Refuse to use more memory.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Save the network as this folder.", show_default=False)] = None,
    json_output: Json = False,
) -> None:
    """Build a network for an expression, with a proven bound on its error, or for a table."""
    from attnc import compile as compile_network
    from attnc.model_card import summary

    source, ranges = read_source(expression, box or [], table, inputs, output)
    if out is not None:
        check_writable(out)
    options_given = {"centres": centres, "heads": heads, "max_anchors": max_anchors, "max_bytes": max_bytes}
    given: dict[str, Any] = {name: value for name, value in options_given.items() if value is not None}
    options: list[tuple[str, Any]] = [("box", text) for text in box or []]
    named = (("csv", table), ("inputs", inputs), ("output", output))
    options += [(name, value) for name, value in named if value is not None]
    options += [("eps", eps), ("dtype", dtype), ("construction", construction), ("norm", norm), *given.items()]
    options += [] if also is None else [("also", also)]
    options += [] if criterion == "multiply_adds" else [("criterion", criterion)]
    options += [] if out is None else [("out", out)]
    with progress_bar() as progress:
        network = compile_network(
            source,
            box=ranges,
            eps=eps,
            dtype=dtype,
            also=also,
            construction=construction,
            criterion=criterion,
            norm=read_norm(norm),
            progress=progress,
            command=command_line(expression, options),
            **given,
        )
        if out is not None:
            network.save(out)
    if json_output:
        print_json(summary(network) | {"out": None if out is None else str(out)})
    else:
        print_parts(panel(network, [] if out is None else [("saved", str(out))]))


@app.command("eval", epilog="Example:\n\nattnc eval net x=0.5 y=pi/4")
def eval_command(
    net: Saved,
    assignments: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="A value for every variable.")],
    outside: Annotated[str, typer.Option(help="For a point outside the box: raise, clamp or allow.")] = "raise",
    dtype: Annotated[
        str | None, typer.Option(help="The arithmetic, if not that of the stored weights.", show_default=False)
    ] = None,
    json_output: Json = False,
) -> None:
    """Evaluate a saved network at a point: value ± bound."""
    import numpy as np

    from attnc import load
    from attnc.ir.program import split_columns
    from attnc.model_card import ceiling, plural

    network = load(net) if dtype is None else load(net).astype(dtype)
    given = read_point(network, assignments)
    point = np.array([[given[name] for name in network.variables]])
    is_inside = bool(network.box.contains(point)[0])
    if outside == "raise" and not is_inside:
        raise InputError(
            f"the point is outside the box ({network.box}), where nothing is claimed. Use --outside clamp or "
            "--outside allow to go on."
        )
    values = network(*split_columns(point, network.program.input_shapes), outside=outside)[0]
    met = np.clip(point, network.box.lo, network.box.hi) if outside == "clamp" else point
    bound = network.certificate.pointwise_bound if is_inside or outside == "clamp" else None
    core = network.certificate.core
    is_rounding_counted = core is None or bool(core[0] <= met[0, 0] <= core[1])
    rows = [{"name": name, "value": float(values[i]), "bound": bound} for name, i in _output_names(values)]
    if json_output:
        scalars = {"value": values.astype(float).tolist(), "bound": bound, "dtype": network.dtype, "inside": is_inside}
        scalars |= {"rounding_included": None if bound is None else is_rounding_counted}
        if network.certificate.is_of_table:
            scalars |= {"points": network.certificate.num_points, "bound_at_points": network.certificate.bound}
        at = dict(zip(network.variables, met[0].tolist(), strict=True))
        print_json(scalars | {"point": at, "outputs": rows})
        return
    unproved = f"(not certified in {network.dtype})" if network.certificate.bound is None else "(no bound)"
    claim = unproved if bound is None else f"± {ceiling(bound)}"
    certificate = network.certificate
    if certificate.is_of_table and certificate.bound is not None and is_inside:
        those = f"the table's {plural(certificate.num_points, 'point')}"
        claim = f"(± {ceiling(certificate.bound)} at {those}; nothing is claimed between them)"
    if certificate.bound is not None and certificate.norm != "inf":
        norm = f"the L{certificate.norm} norm of the error over the box is at most {ceiling(certificate.bound)}"
        claim = f"(no bound at a single point: {norm})"
    if bound is not None and core is not None and not is_rounding_counted:
        claim = f"(± {ceiling(bound)} in exact arithmetic, rounding beyond [{core[0]:g}, {core[1]:g}] not counted)"
    for name, i in _output_names(values):
        print(f"{name + ' = ' if values.ndim else ''}{values[i]!s} {claim}")
    if not is_inside and outside == "clamp":
        moved = ", ".join(f"{name} = {x:.6g}" for name, x in zip(network.variables, met[0], strict=True))
        print(f"note: the point was moved into the box, to {moved}", file=sys.stderr)
    elif not is_inside:
        print("note: the point is outside the box; nothing is claimed there", file=sys.stderr)


def _output_names(values: np.ndarray) -> list[tuple[str, tuple[int, ...]]]:
    import numpy as np

    if not values.ndim:
        return [("out", ())]
    return [(f"out[{', '.join(map(str, index))}]", index) for index in np.ndindex(values.shape)]


@app.command("info")
def info_command(
    net: Saved,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw the ledger, and where on the domain the error sits: .svg, .pdf, .png.", show_default=False
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show a saved network: its layers, its size, and where its bound comes from."""
    from rich.text import Text

    from attnc import load
    from attnc.cli.ledger import ledger_table
    from attnc.ir.text import describe, layer_rows
    from attnc.model_card import one_line, printable, summary
    from attnc.proofs.error_tree import error_tree

    network = load(net)
    if figure is not None:
        network.plot_certificate(figure)
    tree = error_tree(network.certificate, network.box)
    if json_output:
        facts = summary(network)
        total = tree.adds or 1.0
        facts["terms"] = [row | {"share": row["value"] / total} for row in facts["terms"]]
        print_json(facts | {"ledger": tree.as_json(), "layers": layer_rows(network.program)})
        return
    print_parts(panel(network, []), Text("\nLayers", "bold"))
    console().print(Text(printable(describe(network.program))), soft_wrap=True)
    if tree.children:
        print_parts(Text("\nWhere the bound comes from", "bold"), ledger_table(tree, width=console().width))
    if network.certificate.assumptions:
        print_parts(Text("Assumptions", "bold"))
        for sentence in network.certificate.assumptions:
            print_parts(Text(f"• {one_line(sentence)}"))


@app.command("export", epilog="Example:\n\nattnc export net --to onnx --out net.onnx")
def export_command(
    net: Saved,
    to: Annotated[str, typer.Option("--to", help="The format: onnx.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    json_output: Json = False,
) -> None:
    """Write a saved network for another runtime, and compare the two on a sample."""
    from attnc import load

    if to != "onnx":
        raise InputError(f"--to {to}: networks are exported to onnx")
    parity = load(net).export_onnx(out)
    if json_output:
        print_json({"out": str(out), "to": to, **parity._asdict()})
    else:
        print(
            f"wrote {out}: on {parity.num_points:,} points ONNX Runtime and the reference differ by "
            f"{parity.difference:.3g}; rounding allows {parity.allowed:.3g}"
            + ("" if parity.is_within else ", which is EXCEEDED: do not use this file")
        )


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="The folder for the pictures.")] = Path("demo"),
    json_output: Json = False,
) -> None:
    """Compile sin(x)+cos(y) at two accuracies, show a table, and draw pictures."""
    from attnc.demo import run_demo

    run_demo(out, json_output=json_output, progress=progress_bar())


def _show_version(wanted: bool) -> None:
    if wanted:
        from attnc import __version__

        print(f"attnc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass
