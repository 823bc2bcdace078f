"""What people see: panels and tables on a terminal, JSON, and a bar while they wait."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from attnc.network import Network

SHOW_PROGRESS_AFTER = 0.5
"""Seconds."""
WIDEST = 200
"""Columns of a line that is not folded."""


def print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console() -> Console:
    """In a pipe there is no width to fit; a hundred columns keep tables in shape."""
    from rich.console import Console

    is_fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    found = Console(highlight=False)
    return Console(highlight=False, width=max(40, found.width) if is_fitted else 100)


def print_parts(*parts: RenderableType) -> None:
    """Tables are wider than the terminal where they would lose digits: lines that are folded can still be read."""
    from rich.table import Table

    for part in parts:
        found = console()
        if isinstance(part, Table):
            found.width = max(found.width, _least_width(found, part))
        found.print(part)


def _least_width(found: Console, table: Table) -> int:
    """That at which no column is cut that is not to be wrapped."""
    from rich.measure import Measurement

    room = found.options.update(max_width=WIDEST)
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(found, room, cell).maximum for cell in cells)
    return Measurement.get(found, room, table).minimum


def panel(network: Network, more: Sequence[tuple[str, str]]) -> RenderableType:
    """The network in a few lines. The bound and the observed error are two figures, each with its kind."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from attnc.model_card import (
        ceiling,
        elsewhere,
        one_line,
        plural,
        proved_how,
        rounding_where,
        shown,
        without_expression,
    )

    program, certificate = network.program, network.certificate
    parameters = ", ".join(f"{name} {shown(value)}" for name, value in network.parameters.items())
    at_points = f"at the table's {plural(certificate.num_points, 'point')}"
    if certificate.bound is None and certificate.is_of_table:
        bound = Text(f"none proven {at_points}, and none between them", "yellow")
    elif certificate.bound is None:
        bound = Text(f"none: nothing was proved ({one_line(certificate.method)})", "yellow")
    else:
        asked = "" if network.eps is None else f"; eps {network.eps}"
        where = "on the whole box" if certificate.norm == "inf" else f"of the L{certificate.norm} norm over the box"
        how = f"{rounding_where(certificate)}, {proved_how(certificate)}"
        if certificate.is_of_table:
            where, how = at_points, "rounding included; none between them"
        kind = one_line(f"proven {where} in {certificate.dtype}, {how}{asked}")
        bound = Text.assemble((ceiling(certificate.bound), "bold green"), (f"  {kind}", "dim"))
    observed = Text("not measured", "dim")
    if certificate.observed is not None:
        where = f"the largest {at_points}, all checked" if certificate.is_of_table else "at samples; no proof"
        observed = Text.assemble((f"{certificate.observed:.3g}", "bold"), (f"  {where}", "dim"))
    layers = f"{plural(len(program.all_layers), 'layer')} ({program.num_attention_layers} attention)"
    sizes = (plural(program.num_heads, "head"), plural(network.num_anchors, "anchor"))
    rows: list[tuple[str, Text]] = [
        ("function", Text(one_line(network.expression or without_expression(network)), "bold")),
        ("box", Text(one_line(str(network.box)))),
        ("construction", Text(one_line(network.construction + (f" ({parameters})" if parameters else "")))),
        ("network", Text(", ".join((layers, *sizes, plural(network.num_parameters, "parameter"))))),
        ("arithmetic", Text(network.dtype)),
        ("bound", bound),
        ("observed", observed),
        *((f"in {dtype}", Text(claim)) for dtype, claim in elsewhere(network)),
        *((name, Text(one_line(value))) for name, value in more),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return Panel(table, box=box.ROUNDED, border_style="dim", expand=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on the terminal for work that lasts; None in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("compiling", total=None)
    timer = threading.Timer(SHOW_PROGRESS_AFTER, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what, fraction: bar.update(task, description=what, total=1.0, completed=fraction)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
