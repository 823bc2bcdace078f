"""`attnc plan`: the cost of every construction for a function and an eps."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attnc.cli.commands import Json, app
from attnc.cli.output import print_json, print_parts, progress_bar
from attnc.cli.reading import ExpressionCommand, read_box, read_norm

FIELDS = ("name", "anchors", "heads", "layers", "parameters", "multiply_adds", "error", "why_not")


@app.command(
    "plan",
    cls=ExpressionCommand,
    epilog='Example:\n\nattnc plan "exp(sin(x)*y)" --box x=-2:2 --box y=-2:2 --eps 1e-6',
)
def plan_command(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="The function, e.g. 'sin(x)*y'.")],
    box: Annotated[
        list[str] | None,
        typer.Option("--box", metavar="NAME=LO:HI", help="The range of a variable; once for each.", show_default=False),
    ] = None,
    eps: Annotated[float, typer.Option(help="The largest error allowed anywhere on the box.")] = 1e-2,
    dtype: Annotated[str, typer.Option(help="The arithmetic: float64 or float32.")] = "float64",
    norm: Annotated[str, typer.Option(help="The norm of the error: inf, or a number p ≥ 1 for L_p.")] = "inf",
    json_output: Json = False,
) -> None:
    """Show the cost of every construction for an eps, the cheapest first. Nothing is certified or written."""
    from attnc import plan

    with progress_bar():
        rows = plan(expression, box=read_box(box or []), eps=eps, dtype=dtype, norm=read_norm(norm))
    if json_output:
        print_json([{name: getattr(row, name) for name in FIELDS} for row in rows])
        return
    _print_table(rows)


def _print_table(rows: list[Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("construction", no_wrap=True)
    for header in ("anchors", "heads", "layers", "parameters", "multiply-\nadds", "expected\nerror"):
        table.add_column(header, justify="right", no_wrap=True)
    able = [row for row in rows if row.why_not is None]
    for number, row in enumerate(able):
        sizes = (row.anchors, row.heads, row.layers, row.parameters, row.multiply_adds)
        error = "" if row.error is None else f"{row.error:.2g}"
        table.add_row(row.name, *(f"{size:,}" for size in sizes), error, style="bold" if number == 0 else "")
    if able:
        print_parts(table)
    for row in rows:
        if row.why_not is not None:
            print_parts(Text.assemble((f"{row.name}: ", "cyan"), (row.why_not, "dim")))
