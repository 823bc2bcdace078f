"""The commands on functions, networks and models. Each imports slow modules when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.children import run_child
from attnc.cli.options import (
    Arithmetic,
    Cluster,
    Command,
    Criterion,
    Decimal,
    Duplicates,
    ExpressionCommand,
    Force,
    Group,
    Inputs,
    Json,
    MaxAnchors,
    Norm,
    Output,
    OwnTable,
    Quiet,
    Ranges,
    Saved,
    Seconds,
    Shards,
    SkipMissing,
    Table,
    Verbose,
    check_writable,
    command_line,
    completed,
    one_of,
    optional,
    read_counts,
    read_norm,
    read_point,
    read_shard,
)
from attnc.cli.output import (
    Volume,
    console,
    ledger_table,
    note,
    panel,
    plain_table,
    print_json,
    print_parts,
    progress_bar,
    say,
    step_lines,
    volume,
)
from attnc.cli.tables import TableReading, read_source, read_text, rows_of_table, table_remarks
from attnc.constructions.catalogue import CATALOGUE
from attnc.constructions.construction import DEFAULT_EPS
from attnc.errors import FileError, InputError, MissingExtra, positive_number
from attnc.network import BEYOND, OUTSIDE
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.wording import ceiling, one_line, plural, printable, value_note

if TYPE_CHECKING:
    import numpy as np

    from attnc.converting.report import Report
    from attnc.network import Network

CONSTRUCTIONS = ("auto", *(construction.name for construction in CATALOGUE))
COMPILE_OPTIONS = (
    *("eps", "dtype", "also", "construction", "criterion", "centres", "heads", "beta", "max_anchors", "max_bytes"),
    *("gradient_eps", "seconds"),
)
"""The options of `attnc compile` that are passed to attnc.compile unchanged."""
NOT_REPEATED = (None, "expression", "json_output", "plot", "force", "help", "cluster", "shards", "no_proof")
"""The parameters of `attnc compile` that do not change the network. The stored command leaves them out."""
PLAN_FIELDS = ("name", "anchors", "heads", "layers", "parameters", "multiply_adds", "error", "why_not")
MAX_TEXT_BYTES = 2**20
"""Size limit of the file of texts for `convert`, in bytes. It bounds the time of the measurement."""

app = typer.Typer(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Compiles mathematics into softmax attention, and proves how far off the result can be.",
    epilog="Example:\n\nattnc compile 'sin(x)+cos(y)' --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n"
    "Exit codes: 0 done, 1 the bound was not met or not re-proved, 2 bad input or usage, 130 interrupted.",
)


@app.command(
    "compile",
    cls=ExpressionCommand,
    epilog='Examples:\n\nattnc compile "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.05 --out net\n\n'
    'attnc compile "-x**2" --box x=-pi:pi --eps 0.1 --json\n\n'
    "attnc compile --csv table.csv --inputs x,y --output z --eps 1e-3 --out net\n\n"
    'attnc compile "sin(x)" --box x=-3:3 --construction max_affine --points-per-axis 9 --beta 50 --plot net.svg',
)
def compile_command(
    context: typer.Context,
    expression: Annotated[
        str | None,
        typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y' or '(x+y, x*y)'.", show_default=False),
    ] = None,
    box: Ranges = None,
    csv: Table = None,
    inputs: Inputs = None,
    output: Output = None,
    skip_missing: SkipMissing = False,
    duplicates: Duplicates = "error",
    decimal: Decimal = ".",
    eps: Annotated[
        float | None,
        optional("The largest error allowed on the box, or at the points of a table. By default 0.01.", metavar="E"),
    ] = None,
    points_per_axis: Annotated[
        str | None,
        optional(
            "The number of cells per axis, instead of --eps. The bound is then reported, not enforced.",
            metavar="N or N,M",
        ),
    ] = None,
    beta: Annotated[
        float | None,
        optional(
            "The inverse temperature, for distances in widths of a cell. Chosen automatically by default.", metavar="B"
        ),
    ] = None,
    dtype: Arithmetic = "float64",
    also: Annotated[
        str | None,
        one_of(
            "A second arithmetic in which the network is certified, with its weights rounded to it",
            tuple(UNIT_ROUNDOFF),
            default=False,
        ),
    ] = None,
    construction: Annotated[
        str, one_of("The construction. auto tries those that suit the function, the cheapest first", CONSTRUCTIONS)
    ] = "auto",
    criterion: Criterion = "multiply_adds",
    norm: Annotated[
        str,
        typer.Option(
            metavar="P",
            help="The norm of the error: inf for the largest error, a number p ≥ 1 for L_p, or C1 for the largest "
            "errors of values and partial derivatives.",
        ),
    ] = "inf",
    gradient_eps: Annotated[
        float | None,
        optional(
            "For --norm C1: the largest error of a partial derivative. By default 100·eps divided by the smallest "
            "half-width of the box.",
            metavar="G",
        ),
    ] = None,
    centres: Annotated[
        str | None, one_of("How max_affine places its cells", ("grid", "adaptive"), default=False)
    ] = None,
    heads: Annotated[
        int | None, optional("The number of heads in the first layer of two_layer and attention_softmax.", metavar="H")
    ] = None,
    max_anchors: MaxAnchors = None,
    max_bytes: Annotated[
        int | None, optional("Refuse to build a network of more bytes than this.", metavar="N")
    ] = None,
    seconds: Seconds = None,
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Leave the proof to `attnc prove`: only the error at samples is found.")
    ] = False,
    cluster: Cluster = None,
    shards: Shards = None,
    out: Annotated[Path | None, optional("Save the network as this folder.", metavar="NET")] = None,
    force: Force = False,
    plot: Annotated[
        Path | None, optional("Draw the network into this file: .svg, .pdf or .png.", metavar="FILE")
    ] = None,
    json_output: Json = False,
) -> None:
    """Build a network for an expression or a table, and prove how far off it can be."""
    from attnc import compile as compile_network
    from attnc.exports.directory import NETWORK
    from attnc.model_card import summary
    from attnc.scheduling import require_cluster
    from attnc.sharding import proved_on, why_not_in_shards

    reading = TableReading(decimal, skip_missing, duplicates, tolerance=DEFAULT_EPS if eps is None else eps)
    source, ranges = read_source(expression, box or [], csv, inputs, output, reading)
    if out is not None:
        check_writable(out, NETWORK, force=force)
    if plot is not None:
        _check_picture(plot)
    given = {name: value for name, value in context.params.items() if name not in NOT_REPEATED}
    if eps is None and points_per_axis is None:
        given["eps"] = DEFAULT_EPS
    options = {name: given[name] for name in COMPILE_OPTIONS if given[name] is not None} | {"norm": read_norm(norm)}
    if points_per_axis is not None:
        options["points_per_axis"] = read_counts(points_per_axis)
    if cluster is None and shards is not None:
        raise InputError("--shards is for --cluster, which proves all shards")
    in_one_piece = None
    if cluster is not None:
        if out is None:
            raise InputError("--cluster needs --out: shards are kept beside this folder until all are proved")
        require_cluster(cluster)
    with progress_bar("compiling") as progress:
        command = command_line(expression, given)
        options["proof"] = not no_proof and cluster is None
        network = compile_network(source, box=ranges, progress=progress, command=command, **options)
        if cluster is not None and out is not None:
            if (in_one_piece := why_not_in_shards(network)) is not None:
                network = compile_network(
                    source, box=ranges, progress=progress, command=command, **options | {"proof": True}
                )
            else:
                network = proved_on(cluster, network, Path(f"{out}.proof"), shards, progress)
        if out is not None:
            progress("saving", 0.0)
            network.save(out)
        if plot is not None:
            progress("drawing", 0.0)
            _draw(network, plot, source)
    if in_one_piece is not None:
        note(f"{in_one_piece}, so the cluster was not used")
    written = [(name, str(path)) for name, path in (("saved", out), ("picture", plot)) if path is not None]
    if json_output:
        files = {"out": None if out is None else str(out), "plot": None if plot is None else str(plot)}
        remarks = table_remarks(source, network)
        print_json(summary(network) | files | ({"remarks": list(remarks)} if remarks else {}))
    else:
        print_parts(panel(network, written))
        for remark in table_remarks(source, network):
            note(remark)


def _check_picture(path: Path) -> None:
    """Raise before the work if a picture cannot be written after it."""
    from attnc.plots.drawing import check_picture

    check_picture(path)


def _draw(network: Network, path: Path, source: object = None, output: int = 0) -> None:
    """Draw a network, beside its target where only the source of the command has it."""
    network.plot(path, None if network.expression is not None or isinstance(source, str) else source, output=output)


@app.command(
    "plan",
    cls=ExpressionCommand,
    epilog='Examples:\n\nattnc plan "exp(sin(x)*y)" --box x=-2:2 --box y=-2:2 --eps 1e-6\n\n'
    "attnc plan --csv table.csv --inputs x,y --output z --eps 1e-3 --criterion anchors",
)
def plan_command(
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y'.", show_default=False)
    ] = None,
    box: Ranges = None,
    csv: Table = None,
    inputs: Inputs = None,
    output: Output = None,
    skip_missing: SkipMissing = False,
    duplicates: Duplicates = "error",
    decimal: Decimal = ".",
    eps: Annotated[
        float, typer.Option(metavar="E", help="The largest error allowed on the box, or at a table's points.")
    ] = DEFAULT_EPS,
    dtype: Arithmetic = "float64",
    criterion: Criterion = "multiply_adds",
    norm: Norm = "inf",
    max_anchors: MaxAnchors = None,
    seconds: Seconds = None,
    json_output: Json = False,
) -> None:
    """Show the cost of every construction for an eps, the cheapest first. Nothing is certified or saved."""
    from attnc import plan

    reading = TableReading(decimal, skip_missing, duplicates, tolerance=eps)
    source, ranges = read_source(expression, box or [], csv, inputs, output, reading)
    asked = {"max_anchors": max_anchors, "seconds": seconds}
    limits: dict[str, Any] = {name: limit for name, limit in asked.items() if limit is not None}
    p = read_norm(norm)
    with progress_bar("planning") as progress:
        rows = plan(source, ranges, eps, dtype=dtype, criterion=criterion, norm=p, progress=progress, **limits)
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


@app.command(
    "eval",
    cls=Command,
    epilog="Examples:\n\nattnc eval net x=0.5 y=pi/4\n\nattnc eval net --csv points.csv --out values.csv",
)
def eval_command(
    net: Saved,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="A value for every variable.", show_default=False),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="A table of points instead: a CSV file with a column for every variable; - is standard input.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        optional(
            "Write the values at these points to this file, a row per point; - is standard output.", metavar="FILE"
        ),
    ] = None,
    outside: Annotated[
        str,
        one_of(
            "For a point outside the box: raise refuses it, clamp moves it to the box, allow computes without a bound.",
            OUTSIDE,
        ),
    ] = "raise",
    dtype: Annotated[
        str | None, one_of("Another arithmetic than that of the stored weights", tuple(UNIT_ROUNDOFF), default=False)
    ] = None,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Print the derivatives of the network by all variables, too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Print the value of a saved network at a point, and its bound. With --quiet, print the value alone.

    With --csv, write the values at all points of a table.
    """
    import numpy as np

    from attnc import load
    from attnc.model_card import standing

    _require_one_source(assignments or [], csv, out)
    if csv is not None and gradient:
        raise InputError("--gradient takes one point. For a table, call net.gradient(points) in Python.")
    network = load(net) if dtype is None else load(net).astype(dtype)
    if csv is not None:
        _evaluate_table(network, csv, Path("-") if out is None else out, outside, json_output)
        return
    given = read_point(network, assignments or [])
    point = np.array([[given[name] for name in network.variables]])
    is_inside = bool(network.box.contains(point)[0])
    if outside == "raise" and not is_inside:
        raise InputError(
            f"the point is outside the box ({network.box}), where nothing is claimed. Use --outside clamp or "
            "--outside allow to go on."
        )
    values = network.at(point, outside=outside).reshape(network.program.output_shape)
    met = np.clip(point, network.box.lo, network.box.hi) if outside == "clamp" else point
    bound, with_rounding = network.certificate.pointwise_bound, network.certificate.bound_at(float(met[0, 0]))
    bound = (bound if with_rounding is None else with_rounding) if is_inside or outside == "clamp" else None
    rows = [{"name": name, "value": float(values[i]), "bound": bound} for name, i in _output_names(values)]
    slopes = _derivatives(network, point, outside) if gradient else None
    slope_bound = network.certificate.gradient_bound if bound is not None else None
    if json_output:
        scalars = {"value": values.astype(float).tolist(), "bound": bound, "dtype": network.dtype, "inside": is_inside}
        scalars |= {"standing": standing(network.certificate)}
        scalars |= {"rounding_included": None if bound is None else with_rounding is not None}
        if network.certificate.is_of_table:
            scalars |= {"points": network.certificate.num_points, "bound_at_points": network.certificate.bound}
        if slopes is not None:
            scalars |= {"gradient": slopes.tolist(), "gradient_bound": slope_bound}
        at = dict(zip(network.variables, met[0].tolist(), strict=True))
        print_json(scalars | {"point": at, "outputs": rows})
        return
    is_claimed = is_inside or (outside == "clamp" and not network.certificate.is_of_table)
    claim = value_note(network.certificate, is_claimed=is_claimed, at=float(met[0, 0]))
    for name, i in _output_names(values):
        if volume() is Volume.QUIET:
            print(values[i])
        else:
            print(f"{name + ' = ' if values.ndim else ''}{values[i]!s} {claim}")
    known = f" ± {ceiling(slope_bound)}" if slope_bound is not None else " (of the network; no bound)"
    for (name, _), row in zip(_output_names(values), () if slopes is None else slopes, strict=False):
        for variable, slope in zip(network.variables, row, strict=True):
            print(f"∂{name}/∂{variable} = {slope!s}{'' if volume() is Volume.QUIET else known}")
    if not is_inside and outside == "clamp":
        moved = ", ".join(f"{name} = {x:.6g}" for name, x in zip(network.variables, met[0], strict=True))
        note(f"the point was moved into the box, to {moved}")
    elif not is_inside:
        note("the point is outside the box; nothing is claimed there")


def _require_one_source(assignments: Sequence[str], csv: Path | None, out: Path | None) -> None:
    if csv is None and out is not None:
        raise InputError("--out is for the values of a table: give the table, too, with --csv FILE")
    if csv is not None and assignments:
        raise InputError(f"{assignments[0]!r:.60} and --csv {csv}: give a point or a table, not both")


def _evaluate_table(network: Network, csv: Path, out: Path, outside: str, json_output: bool) -> None:
    from attnc.cli.evaluating import evaluate_table, output_names

    if json_output and str(out) == "-":
        raise InputError("--json prints a summary: give the values a file of their own, with --out FILE")
    with progress_bar("evaluating") as progress:
        rows = evaluate_table(network, csv, out, outside, progress)
    bound = network.certificate.pointwise_bound if outside != "allow" else None
    if json_output:
        names = [{"name": name} for name in output_names(network)]
        print_json({"rows": rows, "out": str(out), "bound": bound, "dtype": network.dtype, "outputs": names})
    elif str(out) != "-":
        claim = "" if bound is None else f", each within {ceiling(bound)} of the function"
        note(f"{plural(rows, 'value')} written to {out}{claim}")


def _derivatives(network: Network, point: np.ndarray, outside: str) -> np.ndarray:
    """Return the derivatives (outputs, variables) at one point."""
    from attnc.ir.program import split_columns

    return network.gradient(*split_columns(point, network.program.input_shapes), outside=outside)[0]


def _output_names(values: np.ndarray) -> list[tuple[str, tuple[int, ...]]]:
    import numpy as np

    if not values.ndim:
        return [("out", ())]
    return [(f"out[{', '.join(map(str, index))}]", index) for index in np.ndindex(values.shape)]


@app.command("info", cls=Command, epilog="Example:\n\nattnc info net --plot bound.svg")
def info_command(
    net: Saved,
    plot: Annotated[
        Path | None,
        optional(
            "Draw the sources of the bound, and the error over the box, into this file: .svg, .pdf or .png.",
            metavar="FILE",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the layers of a saved network, its size, and where its bound comes from."""
    from rich.text import Text

    from attnc import load
    from attnc.ir.text import describe, layer_rows
    from attnc.model_card import summary
    from attnc.proofs.error_tree import error_tree, gradient_tree

    network = load(net)
    if plot is not None:
        network.plot_certificate(plot)
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
    slopes = gradient_tree(network.certificate)
    if slopes is not None:
        print_parts(Text("Where the bound of partial derivatives comes from", "bold"))
        print_parts(ledger_table(slopes, width=console().width))
    if network.certificate.assumptions:
        print_parts(Text("Assumptions", "bold"))
        for sentence in network.certificate.assumptions:
            print_parts(Text(f"• {one_line(sentence)}"))


@app.command("plot", cls=Command, epilog="Example:\n\nattnc plot net --out net.svg")
def plot_command(
    net: Saved,
    out: Annotated[
        Path | None,
        optional("The file to write: .svg, .pdf or .png. By default NET.svg, beside the folder.", metavar="FILE"),
    ] = None,
    output_index: Annotated[int, typer.Option(metavar="K", help="The output to draw, counted from 0.")] = 0,
    json_output: Json = False,
) -> None:
    """Draw a saved network: the function, the network, the error, and where each key dominates."""
    from attnc import load

    folder = net if net.name else net.resolve()  # "." has no name
    path = folder.with_name(f"{folder.name}.svg") if out is None else out
    _check_picture(path)
    with progress_bar("loading") as progress:
        network = load(net)
        progress("drawing", 0.0)
        _draw(network, path, output=output_index)
    if json_output:
        print_json({"name": str(net), "out": str(path)})
    else:
        say(f"wrote {path}")


@app.command("verify", cls=Command, epilog="Example:\n\nattnc verify net")
def verify_command(
    net: Saved,
    processes: Annotated[
        int | None, optional("The number of processes. By default, one per core.", metavar="N")
    ] = None,
    seconds: Annotated[float | None, optional("The time limit in seconds. By default, 600.", metavar="S")] = None,
    memory: Annotated[
        int | None,
        optional("The memory limit of all processes together, in MB. By default, 1000 for each.", metavar="MB"),
    ] = None,
    shard: Annotated[
        str | None,
        optional("Prove only shard K of N, and write its verdict into NET/verdicts.", metavar="K/N"),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Decide by the verdicts of all shards, and prove a sample of them again.")
    ] = False,
    csv: OwnTable = None,
    inputs: Inputs = None,
    output: Output = None,
    skip_missing: SkipMissing = False,
    duplicates: Duplicates = "error",
    decimal: Decimal = ".",
    json_output: Json = False,
) -> None:
    """Re-prove the bound of a saved network with a separate program, which shares no code with this one.

    The exit code is 0 only if the bound is re-proved, 1 if not or if a limit is reached, and 2 if files cannot be read.

    If it is re-proved, `info`, `eval` and `plot` call it re-proved from then on, on this machine and for these files.
    """
    from attnc.exports.directory import refuse_in_context, require_folder
    from attnc.verifying import checker_command, fingerprints, remember

    part = None if shard is None else read_shard(shard)
    if part is not None or merge:
        refuse_in_context(str(net))
    if part is not None and merge:
        raise InputError("--shard proves one shard, and --merge decides about all of them: give one of the two")
    limits = (processes, seconds, memory)
    is_silent = volume() is Volume.QUIET and not json_output
    before = fingerprints(net)
    reading = TableReading(decimal, skip_missing, duplicates)
    with (
        rows_of_table(net, csv, inputs, output, reading) as table,
        step_lines("re-proving the bound in a separate process"),
    ):
        command = checker_command(
            require_folder(net), *limits, as_json=json_output, shard=part, merge=merge, table=table
        )
        code = run_child(command, is_silent=is_silent)  # which shows its progress itself
    is_whole = part is None and not merge
    if code == 0 and is_whole and not remember(net, before):
        note("other commands will not show this: it cannot be recorded in the user's cache folder")
    raise typer.Exit(code)


@app.command(
    "prove",
    cls=Command,
    epilog="Examples:\n\nattnc prove net --cluster local\n\nattnc prove net --shard 3/64\n\nattnc prove net --merge",
)
def prove_command(
    net: Saved,
    shard: Annotated[str | None, optional("Prove only shard K of N, and write its file.", metavar="K/N")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Make the certificate of the network from the files of all shards.")
    ] = False,
    cluster: Cluster = None,
    shards: Shards = None,
    processes: Annotated[
        int | None, optional("The number of processes on this machine. By default, one per core.", metavar="N")
    ] = None,
    out: Annotated[
        Path | None, optional("The folder of the shards. By default, NET.proof beside the network.", metavar="DIR")
    ] = None,
    csv: OwnTable = None,
    inputs: Inputs = None,
    output: Output = None,
    skip_missing: SkipMissing = False,
    duplicates: Duplicates = "error",
    decimal: Decimal = ".",
    json_output: Json = False,
) -> None:
    """Prove the bound of a saved network in shards, each of which is a file.

    Shards that are there already are kept, so the same command goes on after an interruption.

    A merge fails unless all shards of one division are there and belong to the network.

    Then the network is saved with its certificate, and `attnc verify` proves it again.
    """
    from attnc.exports.directory import refuse_in_context, require_folder
    from attnc.model_card import summary
    from attnc.sharding import merge_shards, prove_all, write_shard

    refuse_in_context(str(net))
    folder = require_folder(net)
    place = Path(f"{folder.rstrip('/')}.proof") if out is None else out
    if sum((shard is not None, merge, cluster is not None)) != 1:
        raise InputError(
            "give one of --shard K/N, for one shard, --merge, for their certificate, and --cluster, for all at once"
        )
    if cluster is None and (shards is not None or processes is not None):
        raise InputError("--shards and --processes are for --cluster, which proves all shards")
    reading = TableReading(decimal, skip_missing, duplicates)
    with (
        rows_of_table(net, csv, inputs, output, reading) as table,
        progress_bar("proving") as progress,
    ):
        if shard is not None:
            path = write_shard(folder, place, *read_shard(shard), table, progress)
        elif cluster is None:
            network = merge_shards(folder, place, table)
        else:
            network = prove_all(folder, place, shards, cluster, processes, progress, table)
        if shard is None:
            network.save(folder)
    if shard is not None:
        if json_output:
            print_json({"name": str(net), "shard": path})
        else:
            say(f"wrote {path}")
        return
    if json_output:
        print_json(summary(network) | {"out": folder})
    else:
        print_parts(panel(network, [("saved", folder), ("shards", str(place))]))
    if network.eps is not None and (network.certificate.bound or 0.0) > network.eps:
        note(f"the bound {network.certificate.bound:.3g} is above the eps={network.eps:g} that was asked for")
        raise typer.Exit(1)


FORMATS = ("onnx", "hf")
"""The formats of `attnc export`."""


@app.command("export", cls=Command, epilog="Example:\n\nattnc export net --to onnx --out net.onnx")
def export_command(
    net: Saved,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="The format: onnx, a file, or hf, the folder of a checkpoint for plain transformers.",
            autocompletion=completed(FORMATS),
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="The file or folder to write. One of this name is replaced.")
    ],
    outside: Annotated[
        str,
        one_of(
            "For a point outside the box: clamp moves it to the box, nan returns NaN, allow computes without a bound.",
            BEYOND,
        ),
    ] = "allow",
    json_output: Json = False,
) -> None:
    """Write a saved network for another runtime: an ONNX file, or a checkpoint with a certificate of its own.

    An ONNX file is compared with the network on a sample.
    """
    from attnc import load

    if to not in FORMATS:
        raise InputError(f"--to {to}: the formats are {' and '.join(FORMATS)}")
    if to == "hf" and outside != "allow":
        raise InputError(f"--outside {outside}: a checkpoint computes outside the box, too, without a bound")
    with progress_bar("loading") as progress:
        network = load(net)
        if to == "hf":
            claim = network.export_hf(out, progress=progress)
            if json_output:
                facts = {"bound": claim.bound, "observed": claim.observed, "dtype": claim.dtype}
                print_json({"out": str(out), "to": to, "outside": outside, **facts})
            else:
                bound = "no bound" if claim.bound is None else f"an error of at most {ceiling(claim.bound)}"
                say(f"wrote {out}: in {claim.dtype} {bound} on the box, proven. README.md shows how to load it.")
            return
        progress("writing and comparing", 0.0)
        parity = network.export_onnx(out, outside=outside)
    if json_output:
        print_json({"out": str(out), "to": to, "outside": outside, **parity._asdict()})
    else:
        say(
            f"wrote {out}: on {parity.num_points:,} points ONNX Runtime and the reference differ by "
            f"{parity.difference:.3g}; rounding allows {parity.allowed:.3g}"
        )


@app.command(
    "convert", cls=Command, epilog="Example:\n\nattnc convert all-MiniLM-L6-v2 --out converted --texts sentences.txt"
)
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face model folder, with safetensors.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder to write, or the file for --to onnx.")],
    eps: Annotated[float, typer.Option(metavar="E", help="The largest error of each activation. It is proven.")] = 1e-6,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Write one file: onnx.",
            autocompletion=completed(("onnx",)),
            show_default=False,
        ),
    ] = None,
    texts: Annotated[
        Path | None, optional("A file of texts, one per line, on which both models are compared.", metavar="FILE")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any activation cannot be converted.")] = False,
    page: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as an HTML page.")
    ] = None,
    force: Force = False,
    json_output: Json = False,
) -> None:
    """Replace every activation of a pretrained model by attention, and measure how much the outputs change."""
    from attnc.converting.model_folder import CONVERTED, ModelFolder

    positive_number("eps", eps)  # bad arguments are refused before torch is imported, which takes seconds
    ModelFolder.read(source)
    if to not in (None, "onnx"):
        raise InputError(f"--to {to}: the only format is onnx. Without --to, a folder is written.")
    if to == "onnx":
        _check_file(out, force=force)
    else:
        check_writable(out, CONVERTED, force=force)
    lines = None if texts is None else _texts(texts)
    if find_spec("transformers") is None:
        raise MissingExtra("Hugging Face models need", "transformers", "models")
    if page is not None and find_spec("jinja2") is None:
        raise MissingExtra("the report needs", "jinja2", "lab")
    with progress_bar("importing torch") as progress:
        from attnc.converting import need_torch

        need_torch()
        exported = None
        if to == "onnx":
            from attnc.converting.onnx_model import convert_to_onnx

            exported = convert_to_onnx(source, out, eps, texts=lines, strict=strict, progress=progress)
            report = exported.report
        else:
            from attnc.converting.huggingface import convert_directory

            report = convert_directory(source, out, eps, texts=lines, strict=strict, progress=progress)
        if page is not None:
            from attnc.exports.safe_files import write_file_whole

            write_file_whole(str(page), report.html().encode())
    if json_output:
        print_json((report if exported is None else exported).as_json() | {"out": str(out)})
    else:
        _print_conversion(report, out, *([] if exported is None else exported.remarks()))


def _texts(path: Path) -> list[str]:
    lines = read_text(path, MAX_TEXT_BYTES, "leave some texts out").splitlines()
    kept = [line.strip() for line in lines if line.strip()]
    if not kept:
        raise FileError(f"{path}: the file has no text. Write one text per line.")
    return kept


def _check_file(out: Path, *, force: bool) -> None:
    """Raise FileError before the work if the file cannot be written, or if one would be replaced."""
    from attnc.exports.onnx_file import checked_target

    checked_target(out)
    if out.exists() and not force:
        raise FileError(f"--out: {str(out)!r} exists. Add --force to replace it, or choose another name.")


def _print_conversion(report: Report, out: Path, *more: str) -> None:
    from rich.text import Text

    from attnc.converting.report import HEADERS

    table = plain_table(*HEADERS, left=2)
    for column in table.columns:
        column.overflow = "fold"
    for row in report.rows():
        table.add_row(*(Text(one_line(cell)) for cell in row))
    print_parts(table, *(Text(one_line(line)) for line in (*report.remarks(), *more)), Text(f"saved {out}"))


@app.command("doctor", cls=Command, epilog="Example:\n\nattnc doctor")
def doctor_command(json_output: Json = False) -> None:
    """Measure whether the engines on this machine keep the assumptions of certificates.

    The exit code is 0 if all installed engines keep them, and 1 if one does not.
    """
    from rich.text import Text

    from attnc.doctor import COLUMNS, examine, missing, remarks

    with progress_bar("measuring") as progress:
        examined = examine(progress)
    if json_output:
        facts = {"holds": all(each.holds for each in examined), "missing": missing()}
        print_json(facts | {"engines": [each.as_json() for each in examined]})
    else:
        table = plain_table("engine", "version", "arithmetic", *COLUMNS, left=3, is_tight=True)
        for each in examined[:-1]:  # the prover is last, and has a sentence
            style = "" if each.holds else "bold red"
            table.add_row(each.name, one_line(each.version), each.dtype, *each.cells(), style=style)
        print_parts(table, *(Text(sentence) for sentence in remarks(examined)))
    raise typer.Exit(0 if all(each.holds for each in examined) else 1)


@app.command("demo", cls=Command, epilog="Example:\n\nattnc demo --out demo")
def demo_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the pictures.")] = Path("demo"),
    json_output: Json = False,
) -> None:
    """Compile sin(x)+cos(y) at two accuracies, show a table, and draw pictures."""
    from attnc.demo import run_demo

    run_demo(out, json_output=json_output, progress=progress_bar("compiling"))


def _show_version(wanted: bool) -> None:
    if wanted:
        from attnc import __version__

        print(f"attnc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    pass
