"""The attention weights of one layer along a line: one row a key, one band a head or query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.normal_form import NormalForm, SoftmaxStage
from attnc.plots.bands import bands_of, colours_of, name_of, part_of
from attnc.plots.cells import NEGLIGIBLE, Cells, line_tiles, zoom
from attnc.plots.flow import state_before
from attnc.plots.lines import Line
from attnc.plots.selectors import Selector
from attnc.plots.style import (
    FAINT,
    GREY,
    INK,
    WEIGHTS,
    add_colorbar,
    interval,
    set_plain,
    set_title,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 120
"""Where all bands have more keys, neighbouring keys share a row."""
COLUMNS = 1200


def draw_weights(
    picture: Figure,
    axes: Axes,
    form: NormalForm,
    found: list[Selector],
    line: Line,
    worst: float,
    marked: list[Axes],
    is_only: bool,
) -> None:
    """`worst` is where to zoom in, `marked` the panels in which the window is shaded."""
    lo, hi = line.lo, line.hi
    is_one_query = len({s.query for s in found}) == 1
    if is_one_query:
        cells = Cells(form, found)
        lows, highs = zoom(
            lambda t: cells.at(line.at(t[:, 0]), line_tiles(len(t)))[0],
            np.array([worst]),
            np.array([lo]),
            np.array([hi]),
        )
        lo, hi = float(lows[0]), float(highs[0])
    is_zoomed = lo > line.lo or hi < line.hi
    window = Line(line.name, lo, hi, line.origin, line.direction, line.box)
    bands = bands_of(form, found, window)
    x = np.linspace(lo, hi, COLUMNS)
    u = state_before(form, found[0].stage, window.at(x))
    shown = [_rows(band, u) for band in bands]
    shared = max(1, -(-max(len(rows) for _, rows in shown) * len(shown) // ROWS)) if len(shown) > 1 else 1

    stage = form.stages[found[0].stage]
    kind = "softmax weights" if isinstance(stage, SoftmaxStage) else "attention weights"
    note = (
        interval(line.name, lo, hi) + " (shaded above)"
        if is_zoomed
        else f"how much each key counts at each {line.name}"
    )
    if len(bands) < len(found):
        note += f", {part_of(found, bands)}"
    if shared > 1:
        note += f", one row for {shared} keys: the largest of their weights"
    layer = "" if is_only else f", layer {found[0].layer}"
    set_title(axes, f"{kind}{', zoomed' if is_zoomed else ''}{layer}", note)
    for i, (rank, weights) in enumerate(shown):
        drawn = axes.imshow(
            _merged(weights, shared),
            origin="lower",
            extent=(lo, hi, rank - 0.5, rank + len(weights) - 0.5) if len(shown) == 1 else (lo, hi, i + 0.04, i + 0.96),
            aspect="auto",
            cmap=WEIGHTS,
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
    add_colorbar(picture, axes, drawn, "weight", 0.014)
    set_plain(axes, grid=False)
    axes.set_xlim(*((lo, hi) if is_zoomed else line.axis))
    if not is_zoomed:
        shade_unreached(axes, line)
    if len(shown) == 1:
        is_ordered = found[0].stage == 0 and line.box.d == 1
        axes.set_ylabel("key, counted from the left" if is_ordered else "key", color=INK)
        axes.locator_params(axis="y", integer=True)
    else:
        _name_bands(axes, found, bands)
    if is_zoomed:
        for other in marked:
            other.axvspan(lo, hi, facecolor=FAINT, edgecolor=GREY, linewidth=0.8, zorder=0)


def shade_unreached(axes: Axes, line: Line) -> None:
    """Grey where the box ends before the axis does."""
    for start, stop in ((line.axis[0], line.lo), (line.hi, line.axis[1])):
        if stop > start:
            axes.axvspan(start, stop, color=FAINT, linewidth=0)


def _name_bands(axes: Axes, found: list[Selector], bands: list[Selector]) -> None:
    """A strip of colour and a name beside each band."""
    colours = colours_of(found)
    axes.set_ylim(0, len(bands))
    axes.set_yticks(np.arange(len(bands)) + 0.5, [name_of(band, found) for band in bands])
    axes.tick_params(axis="y", length=0, pad=14)
    axes.spines["left"].set_visible(False)
    strip = axes.inset_axes((-0.014, 0, 0.009, 1))
    for i, band in enumerate(bands):
        strip.axhspan(i + 0.04, i + 0.96, color=colours[band.query, band.head], linewidth=0)
    strip.set_ylim(0, len(bands))
    strip.set_axis_off()


def _rows(band: Selector, u: Float[np.ndarray, "points variables"]) -> tuple[int, Float[np.ndarray, "rows points"]]:
    """The weights of the keys that count somewhere, in their order along the line, and the rank of the first."""
    near = band.near(u.min(axis=0), u.max(axis=0), NEGLIGIBLE)
    weights = band.weights(u, near).T
    rank = _ranks(band, u)[near]
    used = weights.max(axis=1) > min(1e-3, float(weights.max()) / 2)
    order = np.argsort(rank[used])
    return int(rank[used].min()), weights[used][order]


def _ranks(band: Selector, u: Float[np.ndarray, "points variables"]) -> Int[np.ndarray, " keys"]:
    """The keys by the slope of their scores, where u is a straight line; else as the network has them."""
    if band.a is None or band.stage > 0:
        return np.arange(len(band))
    rank = np.empty(len(band), np.int64)
    rank[np.argsort(band.a @ (u[-1] - u[0]), kind="stable")] = np.arange(len(band))
    return rank


def _merged(weights: Float[np.ndarray, "rows points"], shared: int) -> Float[np.ndarray, "merged points"]:
    if shared == 1:
        return weights
    starts = np.arange(0, len(weights), shared)
    return np.asarray(np.maximum.reduceat(weights, starts, axis=0))
