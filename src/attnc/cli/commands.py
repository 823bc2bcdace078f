"""The commands on functions, networks and models. Each loads its slow imports when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.options import (
    Arithmetic,
    Eps,
    ExpressionCommand,
    Json,
    Norm,
    Ranges,
    Saved,
    check_writable,
    command_line,
    optional,
    read_box,
    read_norm,
    read_point,
)
from attnc.cli.output import console, ledger_table, panel, plain_table, print_json, print_parts, progress_bar
from attnc.cli.tables import read_source, read_text
from attnc.errors import FileError, InputError
from attnc.wording import one_line, printable, value_note

if TYPE_CHECKING:
    import numpy as np

    from attnc.converting.report import Report

COMPILE_OPTIONS = ("eps", "dtype", "also", "construction", "criterion", "centres", "heads", "max_anchors", "max_bytes")
"""The options of `attnc compile` that attnc.compile takes as they are."""
PLAN_FIELDS = ("name", "anchors", "heads", "layers", "parameters", "multiply_adds", "error", "why_not")
MAX_TEXT_BYTES = 2**20
"""The longest file of texts for `convert`, which bounds the time of measuring."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Compiles mathematics into softmax attention, and proves how far off the result can be.",
    epilog="Example:\n\nattnc compile 'sin(x)+cos(y)' --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n"
    "Exit codes: 0 done, 1 the bound was not met or not re-proved, 2 bad input or usage.",
)


@app.command(
    "compile",
    cls=ExpressionCommand,
    epilog='Examples:\n\nattnc compile "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n'
    'attnc compile "-x**2" --box x=-pi:pi --eps 0.1 --json\n\n'
    "attnc compile --csv table.csv --inputs x,y --output z --eps 1e-3 --out net",
)
def compile_command(
    context: typer.Context,
    expression: Annotated[
        str | None,
        typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y' or '(x+y, x*y)'.", show_default=False),
    ] = None,
    box: Ranges = None,
    csv: Annotated[Path | None, optional("A table instead of an expression: a CSV file.")] = None,
    inputs: Annotated[str | None, optional("The table's input columns.", metavar="X,Y")] = None,
    output: Annotated[str | None, optional("The table's output column, or columns.", metavar="Z")] = None,
    eps: Eps = 1e-2,
    dtype: Arithmetic = "float64",
    also: Annotated[str | None, optional("A second arithmetic to certify the same weights for.")] = None,
    construction: Annotated[str, typer.Option(help="The theorem to build by.")] = "auto",
    criterion: Annotated[
        str, typer.Option(help="The cost that auto minimises: multiply_adds, anchors, parameters or layers.")
    ] = "multiply_adds",
    norm: Norm = "inf",
    centres: Annotated[str | None, optional("The places of the cells: grid, or adaptive.")] = None,
    heads: Annotated[int | None, optional("The heads of the first layer, for two layers.")] = None,
    max_anchors: Annotated[int | None, optional("Refuse to build more anchors.")] = None,
    max_bytes: Annotated[int | None, optional("Refuse to use more memory.")] = None,
    out: Annotated[Path | None, optional("Save the network as this folder.")] = None,
    json_output: Json = False,
) -> None:
    """Build a network for an expression, with a proven bound on its error, or for a table."""
    from attnc import compile as compile_network
    from attnc.exports.directory import NETWORK
    from attnc.model_card import summary

    source, ranges = read_source(expression, box or [], csv, inputs, output)
    if out is not None:
        check_writable(out, NETWORK)
    names = [param.name for param in context.command.params if param.name not in (None, "expression", "json_output")]
    given = {name: context.params[name] for name in names if name in context.params}  # there is no value for --help
    options = {name: given[name] for name in COMPILE_OPTIONS if given[name] is not None} | {"norm": read_norm(norm)}
    with progress_bar() as progress:
        command = command_line(expression, given)
        network = compile_network(source, box=ranges, progress=progress, command=command, **options)
        if out is not None:
            network.save(out)
    if json_output:
        print_json(summary(network) | {"out": None if out is None else str(out)})
    else:
        print_parts(panel(network, [] if out is None else [("saved", str(out))]))


@app.command(
    "plan",
    cls=ExpressionCommand,
    epilog='Example:\n\nattnc plan "exp(sin(x)*y)" --box x=-2:2 --box y=-2:2 --eps 1e-6',
)
def plan_command(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y'.")],
    box: Ranges = None,
    eps: Eps = 1e-2,
    dtype: Arithmetic = "float64",
    norm: Norm = "inf",
    json_output: Json = False,
) -> None:
    """Show the cost of every construction for an eps, the cheapest first. Nothing is certified or written."""
    from attnc import plan

    with progress_bar():
        rows = plan(expression, box=read_box(box or []), eps=eps, dtype=dtype, norm=read_norm(norm))
    if json_output:
        print_json([{name: getattr(row, name) for name in PLAN_FIELDS} for row in rows])
        return
    from rich.text import Text

    sizes = ("anchors", "heads", "layers", "parameters", "multiply-\nadds", "expected\nerror")
    table = plain_table("construction", *sizes, is_tight=True)
    able = [row for row in rows if row.why_not is None]
    for row in able:
        counts = (row.anchors, row.heads, row.layers, row.parameters, row.multiply_adds)
        error = "" if row.error is None else f"{row.error:.2g}"
        table.add_row(row.name, *(f"{count:,}" for count in counts), error, style="bold" if row is able[0] else "")
    if able:
        print_parts(table)
    for row in rows:
        if row.why_not is not None:
            print_parts(Text.assemble((f"{row.name}: ", "cyan"), (row.why_not, "dim")))


@app.command("eval", epilog="Example:\n\nattnc eval net x=0.5 y=pi/4")
def eval_command(
    net: Saved,
    assignments: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="A value for every variable.")],
    outside: Annotated[str, typer.Option(help="For a point outside the box: raise, clamp or allow.")] = "raise",
    dtype: Annotated[str | None, optional("The arithmetic, if not that of the stored weights.")] = None,
    json_output: Json = False,
) -> None:
    """Evaluate a saved network at a point: value ± bound."""
    import numpy as np

    from attnc import load
    from attnc.ir.program import split_columns

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
    is_claimed = is_inside or (outside == "clamp" and not network.certificate.is_of_table)
    claim = value_note(network.certificate, is_claimed=is_claimed, is_rounding_counted=is_rounding_counted)
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
        Path | None, optional("Draw the ledger, and where on the domain the error sits: .svg, .pdf, .png.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Show a saved network: its layers, its size, and where its bound comes from."""
    from rich.text import Text

    from attnc import load
    from attnc.ir.text import describe, layer_rows
    from attnc.model_card import summary
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


@app.command("verify", epilog="Example:\n\nattnc verify net")
def verify_command(net: Saved, json_output: Json = False) -> None:
    """Re-prove a saved network's bound by a separate program that shares no code with this one.

    Exit code 0 only if the bound is re-proved; 1 if it is not; 2 if the files cannot be read.
    """
    from attnc.exports.directory import require_folder

    require_folder(net)
    command = [sys.executable, "-m", "attnc_checker", str(net), *(["--json"] if json_output else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


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


@app.command("convert", epilog="Example:\n\nattnc convert all-MiniLM-L6-v2 --out converted --texts sentences.txt")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face model folder, with safetensors.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    eps: Annotated[float, typer.Option(help="The largest error of each activation, proven.")] = 1e-6,
    texts: Annotated[Path | None, optional("A file of texts, one per line, to measure on.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if anything cannot be converted.")] = False,
    json_output: Json = False,
) -> None:
    """Replace every activation of a pretrained model by attention, and measure what that changes."""
    from attnc.converting import need_torch

    need_torch()
    from attnc.converting.huggingface import CONVERTED, convert_directory

    check_writable(out, CONVERTED)
    lines = None if texts is None else _texts(texts)
    with progress_bar():
        report = convert_directory(source, out, eps, texts=lines, strict=strict)
    if json_output:
        print_json(report.as_json() | {"out": str(out)})
    else:
        _print_conversion(report, out)


def _texts(path: Path) -> list[str]:
    lines = read_text(path, MAX_TEXT_BYTES, "leave some texts out").splitlines()
    kept = [line.strip() for line in lines if line.strip()]
    if not kept:
        raise FileError(f"{path}: there is no text in it; write one on each line")
    return kept


def _print_conversion(report: Report, out: Path) -> None:
    from rich.text import Text

    from attnc.converting.report import HEADERS

    table = plain_table(*HEADERS, left=2)
    for column in table.columns:
        column.overflow = "fold"
    for row in report.rows():
        table.add_row(*(Text(one_line(cell)) for cell in row))
    print_parts(table, *(Text(one_line(line)) for line in report.remarks()), Text(f"saved {out}"))


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
