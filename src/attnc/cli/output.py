"""The output of commands: panels, tables and ledgers on a terminal, JSON, notes, and a bar during long work.

rich prints colours, except in a pipe or if the environment has NO_COLOR.
"""

from __future__ import annotations

import enum
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from attnc.errors import InputError
from attnc.wording import (
    bound_note,
    ceiling,
    elsewhere,
    function_of,
    gradient_note,
    observed_note,
    one_line,
    percent,
    plural,
    remarks,
    shortened,
    shown,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from attnc.constructions.built import Progress
    from attnc.network import Network
    from attnc.proofs.error_tree import ErrorNode

SHOW_PROGRESS_AFTER = 0.5
"""Seconds of work before the bar appears. Shorter work needs no bar."""
WIDEST = 200
"""Columns of the widest table that is printed without folding: a large screen shows it in one line."""
PIPE_COLUMNS = 100
"""Columns of a table in a pipe, whose width is not defined."""
BAR_COLUMNS, SOURCE_COLUMNS, BARS_FROM = 12, 20, 90
"""Columns of a bar; fewest columns of the description of a source; fewest columns of a terminal that shows bars."""
MAX_FUNCTION = 1000
"""Letters of a function that are shown: ten lines of a pipe. JSON has all of them."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Volume(enum.IntEnum):
    """How much a command prints besides errors and JSON."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


_volume = ContextVar("volume", default=Volume.USUAL)


def volume() -> Volume:
    """Return how much is printed."""
    return _volume.get()


def set_volume(chosen: Volume) -> None:
    """Set how much is printed. Raise InputError if --quiet and --verbose were both given."""
    if {chosen, volume()} == {Volume.QUIET, Volume.VERBOSE}:
        raise InputError("--quiet and --verbose contradict each other: give only one of them")
    _volume.set(chosen)


def reset_volume() -> None:
    """Print the usual amount again. A program may run several commands, one after the other."""
    _volume.set(Volume.USUAL)


def note(text: str) -> None:
    """Print a remark to stderr, unless --quiet was given."""
    if volume() > Volume.QUIET:
        print(f"note: {text}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line of the result, unless --quiet was given."""
    if volume() > Volume.QUIET:
        print(text)


def print_json(value: Any) -> None:
    """Print a value as JSON, with null for infinity and NaN, which JSON does not have."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console() -> Console:
    """Return a console as wide as the terminal, or PIPE_COLUMNS in a pipe."""
    from rich.console import Console

    is_fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    found = Console(highlight=False)
    width = max(40, found.width) if is_fitted else PIPE_COLUMNS
    return Console(highlight=False, width=width, quiet=volume() is Volume.QUIET)


def print_parts(*parts: RenderableType) -> None:
    """Print texts and tables. A table is made wider than the terminal rather than cut."""
    from rich.table import Table

    for part in parts:
        found = console()
        if isinstance(part, Table):
            found.width = max(found.width, _least_width(found, part))
        found.print(part)


def _least_width(found: Console, table: Table) -> int:
    """Return the least width at which no unwrapped column is cut."""
    from rich.measure import Measurement

    room = found.options.update(max_width=WIDEST)
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(found, room, cell).maximum for cell in cells)
    return Measurement.get(found, room, table).minimum


def plain_table(*columns: str, left: int = 1, is_tight: bool = False) -> Table:
    """Return an empty table with these columns, the first `left` of them aligned to the left.

    A tight table has narrower gaps between its columns, and does not fold them.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0 if is_tight else 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=is_tight)
    return table


def panel(network: Network, more: Sequence[tuple[str, str]]) -> RenderableType:
    """Return the network in a few lines. The bound and the observed error are two figures, each with its kind."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    program, claim = network.program, network.certificate
    parameters = ", ".join(f"{name} {shown(value)}" for name, value in network.parameters.items())
    bound, observed = Text(bound_note(claim, network.eps), "yellow"), Text("not measured", "dim")
    if claim.bound is not None:
        bound = Text.assemble((ceiling(claim.bound), "bold green"), (f"  {bound_note(claim, network.eps)}", "dim"))
    if claim.observed is not None:
        observed = Text.assemble((f"{claim.observed:.3g}", "bold"), (f"  {observed_note(claim)}", "dim"))
    layers = f"{plural(len(program.all_layers), 'layer')} ({program.num_attention_layers} attention)"
    sizes = (plural(program.num_heads, "head"), plural(network.num_anchors, "anchor"))
    rows: list[tuple[str, Text]] = [
        ("function", Text(shortened(function_of(network), MAX_FUNCTION), "bold")),
        ("box", Text(one_line(str(network.box)))),
        ("construction", Text(one_line(network.construction + (f" ({parameters})" if parameters else "")))),
        ("network", Text(", ".join((layers, *sizes, plural(network.num_parameters, "parameter"))))),
        ("arithmetic", Text(network.dtype)),
        ("bound", bound),
        ("observed", observed),
        *([] if (slopes := gradient_note(claim)) is None else [("gradient", Text(slopes))]),
        *((f"in {dtype}", Text(claim)) for dtype, claim in elsewhere(network)),
        *((name, Text(one_line(value))) for name, value in more),
        *(("note", Text(sentence)) for sentence in remarks(network)),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return Panel(table, box=box.ROUNDED, border_style="dim", expand=False)


def ledger_table(tree: ErrorNode, *, width: int = BARS_FROM) -> RenderableType:
    """Return the ledger of a bound as a tree, with the amount that every source adds and its share as a bar.

    For a staged proof, the row of a head shows its own error and the factor by which this grows up to the output. A
    narrow terminal shows no bars.
    """
    from rich.text import Text

    has_heads = any(node.children or node.own is not None for node in tree.children)
    has_bars = width >= BARS_FROM
    headers = ("own error", "grows", "adds", "share") if has_heads else ("at most", "share")
    table = plain_table("source", "what", *headers, left=2, is_tight=True)
    what = table.columns[1]
    what.no_wrap, what.overflow, what.min_width = False, "fold", SOURCE_COLUMNS
    if has_bars:
        table.add_column("", no_wrap=True)
    for stem, node in _lines(tree):
        own = "" if node.own is None else ceiling(node.own)
        grows = "" if node.grows is None else f"× {node.grows:.3g}"
        cells = [ceiling(node.adds), percent(node.share)]
        cells = [own, grows, *cells] if has_heads else cells
        style = "bold" if node.children else ""
        where = "" if node.interval is None else f" on {_shown(*node.interval)}"
        table.add_row(
            Text.assemble((stem, "dim"), (one_line(node.name), style)),
            Text.assemble(one_line(node.what), (where, "dim")),
            *(Text(cell, style) for cell in cells),
            *([Text("" if node is tree else bar(node.share), "green")] if has_bars else []),
        )
    return table


def _shown(lo: float, hi: float) -> str:
    """Return an interval with three digits. An end that differs from 0 by rounding only is shown as 0."""
    ends = (0.0 if abs(end) < 1e-9 * (hi - lo) else end for end in (lo, hi))
    return f"[{', '.join(f'{end:.3g}' for end in ends)}]"


def bar(share: float) -> str:
    """Return a share of 1 as a bar of blocks, to an eighth of a column."""
    full, part = divmod(round(8 * BAR_COLUMNS * min(1.0, max(0.0, share))), 8)
    return ("█" * full + EIGHTHS[part]).strip()


def _lines(node: ErrorNode, stem: str = "", under: str = "") -> Iterator[tuple[str, ErrorNode]]:
    yield stem, node
    for child in node.children:
        is_last = child is node.children[-1]
        yield from _lines(child, under + ("└─ " if is_last else "├─ "), under + ("   " if is_last else "│  "))


@contextmanager
def step_lines(first: str) -> Iterator[Progress]:
    """Yield a function that reports steps. With --verbose it prints a line per step, with the seconds so far."""
    start, last = time.monotonic(), ""

    def report(step: str, fraction: float) -> None:
        nonlocal last
        if step != last and volume() is Volume.VERBOSE:
            last = step
            print(f"{time.monotonic() - start:8.2f} s  {step}", file=sys.stderr, flush=True)

    report(first, 0.0)
    yield report
    report("done", 1.0)


@contextmanager
def progress_bar(first: str) -> Iterator[Progress]:
    """Yield a function that reports steps: as a bar on a terminal if the work is long, or as lines with --verbose.

    In a pipe and with --quiet it prints nothing. `first` is the name of the first step.
    """
    if volume() is not Volume.USUAL or not sys.stderr.isatty():
        with step_lines(first) as report:
            yield report
        return
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(first, total=None)
    timer = threading.Timer(SHOW_PROGRESS_AFTER, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda step, fraction: bar.update(task, description=step, total=1.0, completed=fraction)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
