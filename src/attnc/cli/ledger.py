"""The ledger on a terminal: a tree with the amount that every source adds to the bound, and its share as a bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attnc.model_card import ceiling, one_line, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnc.proofs.error_tree import ErrorNode

BAR, WHAT, WITH_BARS = 12, 20, 90
"""Columns of a bar, the least columns of the description of a source, and those of a terminal with room for bars."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


def ledger_table(tree: ErrorNode, *, width: int = WITH_BARS) -> RenderableType:
    """For a staged proof with each head's own error and how much larger it is at the output; in a narrow terminal
    without bars."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    has_heads = any(node.children or node.own is not None for node in tree.children)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", no_wrap=True)
    table.add_column("what", overflow="fold", min_width=WHAT)
    headers = ("own error", "grows", "adds", "share") if has_heads else ("at most", "share")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    has_bars = width >= WITH_BARS
    if has_bars:
        table.add_column("", no_wrap=True)
    for stem, node in _lines(tree):
        own = "" if node.own is None else ceiling(node.own)
        grows = "" if node.grows is None else f"× {node.grows:.3g}"
        cells = [ceiling(node.adds), percent(node.share)]
        cells = [own, grows, *cells] if has_heads else cells
        style = "bold" if node.children else ""
        what = one_line(node.what)
        where = "" if node.interval is None else f" on {_shown(*node.interval)}"
        table.add_row(
            Text.assemble((stem, "dim"), (one_line(node.name), style)),
            Text.assemble(what, (where, "dim")),
            *(Text(cell, style) for cell in cells),
            *([Text("" if node is tree else bar(node.share), "green")] if has_bars else []),
        )
    return table


def _shown(lo: float, hi: float) -> str:
    """With three digits; an end that rounding moved off 0 is 0."""
    ends = (0.0 if abs(end) < 1e-9 * (hi - lo) else end for end in (lo, hi))
    return f"[{', '.join(f'{end:.3g}' for end in ends)}]"


def bar(share: float) -> str:
    full, part = divmod(round(8 * BAR * min(1.0, max(0.0, share))), 8)
    return ("█" * full + EIGHTHS[part]).strip()


def _lines(node: ErrorNode, stem: str = "", under: str = "") -> Iterator[tuple[str, ErrorNode]]:
    yield stem, node
    for child in node.children:
        is_last = child is node.children[-1]
        yield from _lines(child, under + ("└─ " if is_last else "├─ "), under + ("   " if is_last else "│  "))
