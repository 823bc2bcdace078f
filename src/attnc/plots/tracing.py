"""Heat maps of activation patching: channels and heads against layers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.plots import style
from attnc.plots.drawing import write_figure
from attnc.wording import one_line, plural, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnc.interventions import Trace

MOST_TRACED_ROWS, MOST_COLUMNS = 60, 24
"""Maximum numbers of rows and layers of a heat map, so that its numbers can be read on a page."""
LEAST_WIDTH = 7.4  # inches, which the lines of the header need
DARK = 0.6
"""Cells whose share is further from 0 than this are dark, and get white numbers."""


def plot_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the heat map of a trace."""
    write_figure(path, lambda: trace_figure(trace))


def trace_figure(trace: Trace) -> Figure:
    """Draw the restored share of every site that has an effect: layers across, channels and heads down.

    The number is the measured share; the one in brackets below it is the exact share, if it is stated.
    """
    sites = trace.effective
    if not sites:
        raise InputError("no site has an effect: there is nothing to draw")
    layers = list(dict.fromkeys(site.layer for site in trace.sites))
    rows = list(dict.fromkeys(_row(site.part, site.layer, is_head=site.is_head) for site in sites))
    rows.sort(key=lambda row: row[0])  # channels first, then heads
    if len(rows) > MOST_TRACED_ROWS or len(layers) > MOST_COLUMNS:
        raise InputError(
            f"the heat map would have {plural(len(rows), 'row')} and {plural(len(layers), 'layer')}, more than "
            f"{MOST_TRACED_ROWS} and {MOST_COLUMNS}. Use trace.table() or trace.to_dict()."
        )
    shares = np.full((len(rows), len(layers)), np.nan)
    texts: dict[tuple[int, int], str] = {}
    holds: dict[int, str] = {}
    for site in sites:
        place = rows.index(_row(site.part, site.layer, is_head=site.is_head)), layers.index(site.layer)
        shares[place] = site.restored
        texts[place] = _signed(site.restored) + ("" if site.exact is None else f"\n({_signed(site.exact)})")
        if site.holds is not None:
            holds[place[0]] = site.holds
    most = max(1.0, float(np.nanmax(np.abs(shares))))
    width = max(LEAST_WIDTH, 2.6 + 1.15 * len(layers))
    notes = [f"share of the difference that a site restores from the clean points; {plural(len(trace.clean), 'pair')}"]
    if any(site.exact is not None for site in sites):
        notes.append("in brackets: the exact share, by the expression")
    picture = style.new_figure(width, 0.8 + 0.5 * len(rows), shortened(one_line(trace.title), 48), *notes)
    axes = picture.subplots()
    drawn = axes.imshow(shares, aspect="auto", cmap=style.ERRORS, vmin=-most, vmax=most, interpolation="nearest")
    for (row, column), text in texts.items():
        colour = "white" if abs(shares[row, column]) > DARK * most else style.INK
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=colour, linespacing=1.15)
    labels = [
        name + (f"  = {shortened(one_line(holds[i]), 28)}" if i in holds else "") for i, (_, name) in enumerate(rows)
    ]
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.set_xticks(range(len(layers)), [shortened(one_line(name), 16) for name in layers], parse_math=False)
    axes.tick_params(
        colors=style.INK, labelsize=9.5, length=0, top=True, labeltop=True, bottom=False, labelbottom=False
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(np.arange(len(layers) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=style.FAINT, linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    style.add_colorbar(axes, drawn, "restored share", 0.3 / width)
    return picture


def _row(part: str, layer: str, *, is_head: bool) -> tuple[int, str]:
    """Return the row of a site: a channel has one row for all layers, a head has one of its own."""
    return (1, f"{layer}.{part}") if is_head else (0, part)


def _signed(share: float) -> str:
    return f"{share + 0.0:.3f}".replace("-", "−")
