"""Attention along a line: the weights of one layer, one row per key and one band per head or query, and its anchors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.normal_form import NormalForm, SoftmaxStage
from attnc.plots.cells import INVISIBLE, WinningCells, line_tiles, zoom
from attnc.plots.lines import PlotLine
from attnc.plots.selectors import SCORE_ROUNDING, Selector, gaussian_places, run_places, state_before
from attnc.plots.style import (
    FAINT,
    GREY,
    INK,
    WEIGHTS,
    add_colorbar,
    distinct_colours,
    draw_image,
    number,
    set_labels,
    set_plain,
    set_title,
)
from attnc.wording import one_line

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from matplotlib.axes import Axes

MOST_ROWS = 120
"""Most rows of all bands together: with more keys, neighbouring keys share a row, so that rows stay visible."""
COLUMNS = 1200
"""Points along the line at which weights are drawn: about one per pixel."""
MOST_BANDS = 12
"""Most heads or queries of one layer that are shown: more would be too thin for their names."""
MOST_TICKS = 120
"""Most anchors that are drawn as ticks: more would run together."""


def draw_weights(
    axes: Axes,
    form: NormalForm,
    found: list[Selector],
    line: PlotLine,
    worst: float,
    marked: list[Axes],
    is_only: bool,
) -> None:
    """Draw the weights of a layer; `worst` is the point to zoom in on, `marked` the panels that show the window."""
    lo, hi = line.lo, line.hi
    is_one_query = len({s.query for s in found}) == 1
    if is_one_query:
        cells = WinningCells(form, found)
        lows, highs = zoom(
            lambda t: cells.at(line.at(t[:, 0]), line_tiles(len(t)))[0],
            np.array([worst]),
            np.array([lo]),
            np.array([hi]),
        )
        lo, hi = float(lows[0]), float(highs[0])
    is_zoomed = lo > line.lo or hi < line.hi
    window = PlotLine(line.name, lo, hi, line.origin, line.direction, line.box)
    bands = bands_of(form, found, window)
    x = np.linspace(lo, hi, COLUMNS)
    u = state_before(form, found[0].stage, window.at(x))
    shown = [_rows(band, u) for band in bands]
    shared = max(1, -(-max(len(rows) for _, rows in shown) * len(shown) // MOST_ROWS)) if len(shown) > 1 else 1

    stage = form.stages[found[0].stage]
    kind = "softmax weights" if isinstance(stage, SoftmaxStage) else "attention weights"
    note = f"how much each key counts at each {line.name}"
    if is_zoomed:
        note = f"{one_line(line.name)} ∈ [{number(lo)}, {number(hi)}] (shaded above)"
    if len(bands) < len(found):
        note += f", {part_of(found, bands)}"
    if shared > 1:
        note += f", one row for {shared} keys: the largest of their weights"
    layer = "" if is_only else f", layer {found[0].layer}"
    set_title(axes, f"{kind}{', zoomed' if is_zoomed else ''}{layer}", note)
    for i, (rank, weights) in enumerate(shown):
        rows = (rank - 0.5, rank + len(weights) - 0.5) if len(shown) == 1 else (i + 0.04, i + 0.96)
        drawn = draw_image(axes, _merged(weights, shared), (lo, hi, *rows), WEIGHTS, (0, 1))
    add_colorbar(axes, drawn, "weight", 0.014)
    set_plain(axes, grid=False)
    axes.set_xlim(*((lo, hi) if is_zoomed else line.axis))
    if not is_zoomed:
        shade_unreached(axes, line)
    if len(shown) == 1:
        is_ordered = found[0].stage == 0 and line.box.d == 1
        set_labels(axes, line.name, "key, counted from the left" if is_ordered else "key")
        axes.locator_params(axis="y", integer=True)
    else:
        set_labels(axes, line.name)
        _name_bands(axes, found, bands)
    if is_zoomed:
        for other in marked:
            other.axvspan(lo, hi, facecolor=FAINT, edgecolor=GREY, linewidth=0.8, zorder=0)


def shade_unreached(axes: Axes, line: PlotLine) -> None:
    """Shade the parts of the axis beyond the box."""
    for start, stop in ((line.axis[0], line.lo), (line.hi, line.axis[1])):
        if stop > start:
            axes.axvspan(start, stop, color=FAINT, linewidth=0)


def _name_bands(axes: Axes, found: list[Selector], bands: list[Selector]) -> None:
    """Draw a strip of colour and a name beside each band."""
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
    near = band.near(u.min(axis=0), u.max(axis=0), INVISIBLE)
    weights = band.weights(u, near).T
    rank = _ranks(band, u)[near]
    used = weights.max(axis=1) > min(1e-3, float(weights.max()) / 2)
    order = np.argsort(rank[used])
    return int(rank[used].min()), weights[used][order]


def _ranks(band: Selector, u: Float[np.ndarray, "points variables"]) -> Int[np.ndarray, " keys"]:
    """The keys in the order of the slopes of their scores if u is a straight line; else in that of the network."""
    if band.soft is None or band.stage > 0:
        return np.arange(len(band))
    rank = np.empty(len(band), np.int64)
    rank[np.argsort(band.soft.slopes @ (u[-1] - u[0]), kind="stable")] = np.arange(len(band))
    return rank


def _merged(weights: Float[np.ndarray, "rows points"], shared: int) -> Float[np.ndarray, "merged points"]:
    if shared == 1:
        return weights
    starts = np.arange(0, len(weights), shared)
    return np.asarray(np.maximum.reduceat(weights, starts, axis=0))


# --- which softmaxes of a layer are shown, in which colours, under which names ----------------------------------------


def bands_of(form: NormalForm, found: list[Selector], line: PlotLine) -> list[Selector]:
    """All softmaxes of the layer; if there are many, some whose winning key changes along the line."""
    heads, queries = _numbers(found)
    if len(found) <= MOST_BANDS:
        return found
    points = line.share(np.linspace(0, 1, 200))
    is_busy = [len(np.unique(WinningCells(form, [s]).at(points, line_tiles(200))[0])) > 1 for s in found]
    busy = [s for s, is_one in zip(found, is_busy, strict=True) if is_one] or found
    if len(queries) > 1:
        shown = _spread(sorted({s.query for s in busy}), max(1, MOST_BANDS // len(heads)))
        busy = [s for s in found if s.query in shown]
    return busy if len(busy) <= MOST_BANDS else _spread(busy, MOST_BANDS)


def colours_of(found: list[Selector]) -> dict[tuple[int, int | None], Float[np.ndarray, " rgb"]]:
    """A colour for each head, or for each query if the layer has one head."""
    heads, queries = _numbers(found)
    if len(heads) == 1:
        colours = dict(zip(queries, distinct_colours(len(queries)), strict=True))
        return {(s.query, s.head): colours[s.query] for s in found}
    colours = dict(zip(heads, distinct_colours(len(heads)), strict=True))
    return {(s.query, s.head): colours[s.head or 0] for s in found}


def part_of(found: list[Selector], bands: list[Selector]) -> str:
    """A note on how many of the queries and heads are shown; empty if all are."""
    counted = [*zip(("heads", "queries"), _numbers(bands), _numbers(found), strict=True)][::-1]
    parts = [f"{len(shown)} of {len(all_)} {name}" for name, shown, all_ in counted if len(shown) < len(all_)]
    return ", ".join(parts)


def name_of(band: Selector, found: list[Selector]) -> str:
    """The query and the head of a band, as far as the layer has several."""
    heads, queries = _numbers(found)
    names = [f"query {band.query}"] * (len(queries) > 1) + [f"head {band.head}"] * (len(heads) > 1)
    return ", ".join(names)


def _spread(items: list[Any], count: int) -> list[Any]:
    """Some of the items, evenly."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, count).round().astype(int))]


def _numbers(found: list[Selector]) -> tuple[list[int], list[int]]:
    """The heads and the queries of softmaxes, in their order."""
    return sorted({s.head or 0 for s in found}), sorted({s.query for s in found})


# --- anchors as ticks on a line, in the colours of their heads --------------------------------------------------------


def anchor_ticks(form: NormalForm, found: list[Selector], line: PlotLine) -> tuple[list[tuple[np.ndarray, Any]], str]:
    """[(places, colour)] of every head or query, and a note that explains them."""
    if not found:
        return [], ""
    has_heads, has_queries = (len(numbers) > 1 for numbers in _numbers(found))
    colours = colours_of(found)
    ticks = []
    for selector in found:
        places = _places(form, selector, line, has_heads)
        ticks.append((places, colours[selector.query, selector.head] if has_heads or has_queries else INK))
        if sum(len(drawn) for drawn, _ in ticks) > MOST_TICKS:
            return [], "more anchors than ticks could show"
    by = ", in the colour of the head" if has_heads else ", in the colour of the query" if has_queries else ""
    return ticks, f"ticks: the anchors{by}"


def _places(form: NormalForm, selector: Selector, line: PlotLine, has_heads: bool) -> Float[np.ndarray, " anchors"]:
    """The anchors, exact if the scores are a squared distance, else the middles of cells. Sentinels are left out."""
    scores = selector.on_line(line.origin, line.direction) if selector.stage == 0 else None
    if scores is not None:
        places = gaussian_places(*scores, SCORE_ROUNDING[form.output.linear.dtype])
        if places is not None:
            places = np.unique(places[~selector.is_sentinel] if has_heads else places)
            slack = 1e-6 * (line.hi - line.lo)
            return np.asarray(places[(places >= line.lo - slack) & (places <= line.hi + slack)])
    t = np.linspace(line.lo, line.hi, 4000)
    cells, _ = WinningCells(form, [selector]).at(line.at(t), line_tiles(len(t)))
    return run_places(t, cells)
