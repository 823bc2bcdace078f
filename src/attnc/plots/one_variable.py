"""A network along lines: outputs, the error with the bound on both sides, and the weights of every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.normal_form import SoftmaxStage
from attnc.numerics.arrays import Float
from attnc.plots import style
from attnc.plots.selectors import LayerSoftmaxes, Selector, last_layer, read_layer, run_places, spread, zoom
from attnc.plots.subject import PICTURE_SCORES, PlotLine, PlotSubject
from attnc.wording import headline, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_STEPS = 400
"""Maximum number of cells on a line for which the error is drawn as a curve. With more, it is drawn as a band."""
MOST_POINTS = 40_000
"""Maximum number of points of a curve: about 30 per pixel, so that no peak of the error is missed."""
SHOWN_LAYERS = 4
"""Maximum number of layers whose weights are shown. With more, the picture would not fit on a page."""
THIN_BOUND = 1e-3
"""Smallest bound that is drawn, as a share of the scale. A smaller one would lie on the zero line."""
MOST_BAND_ROWS = 120
"""Maximum number of rows of all bands together. With more keys, neighbouring keys share a row, so that rows stay
visible."""
POINTS_ALONG = 1200
"""Number of points along the line at which weights are drawn: about one per pixel."""
MOST_BANDS = 12
"""Maximum number of heads or queries of one layer that are shown. More would be too thin for their names."""
MOST_TICKS = 120
"""Maximum number of anchors that are drawn as ticks. More would run together."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One output along its line."""

    output: int
    line: PlotLine
    t: Float[np.ndarray, " points"]
    network: Float[np.ndarray, " points"]
    target: Float[np.ndarray, " points"] | None


def draw_lines(subject: PlotSubject, lines: list[tuple[int, PlotLine]]) -> Figure:
    """Draw the outputs, each over its own line, and the weights along the line of the chosen output."""
    line = next(line for output, line in lines if output == subject.output)
    layers = [read_layer(subject.form, stage, subject.output) for stage in range(len(subject.form.stages))]
    layers = [layer for layer in layers if layer]
    has_many_steps = bool(layers) and layers[-1].count_along(line.share) > MANY_STEPS
    curves = _curves(subject, lines, has_many_steps)
    chosen = next(curve for curve in curves if curve.output == subject.output)
    shown = spread(layers, SHOWN_LAYERS)

    columns = 1 if len(curves) == 1 else 2 if len(curves) in (2, 4) else 3
    num_rows = -(-len(curves) // columns)
    heights = [2.9 if columns == 1 else 2.5] * num_rows + [2.9] * (chosen.target is not None)
    heights += [2.9 + 0.25 * max(0, min(len(layer), MOST_BANDS) - 5) for layer in shown]
    notes = [line.note] * bool(line.note) + [""] * (len(curves) > 1)  # the last line is for the legend
    title = subject.title if len(curves) > 1 else subject.entry_title
    picture = style.new_figure(9.6 if columns < 3 else 11.5, sum(heights), title, *subject.header, *notes)
    grid = picture.add_gridspec(len(heights), columns, height_ratios=heights)

    marked = []
    for i, curve in enumerate(curves):
        axes = picture.add_subplot(grid[divmod(i, columns)])
        _draw_curve(axes, subject, curve, is_only=len(curves) == 1)
        marked += [axes] * (curve is chosen)
    if len(curves) > 1:
        style.add_header_legend(picture, len(subject.header) + len(notes), *marked[0].get_legend_handles_labels())
    worst = (line.lo + line.hi) / 2
    if chosen.target is not None:
        axes = picture.add_subplot(grid[num_rows, :])
        _draw_errors(axes, subject, curves, has_many_steps)
        marked.append(axes)
        worst = float(chosen.t[int(np.nanargmax(np.abs(chosen.network - chosen.target)))])
    for i, layer in enumerate(shown):
        axes = picture.add_subplot(grid[len(heights) - len(shown) + i, :])
        _draw_weights(axes, layer, line, worst, marked, is_only=len(layers) == 1)
    return picture


def _curves(subject: PlotSubject, lines: list[tuple[int, PlotLine]], has_many_steps: bool) -> list[Curve]:
    found: list[Curve] = []
    known: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}  # outputs may share a line
    count = int(
        np.clip(PICTURE_SCORES // (subject.work_per_point * len({id(line) for _, line in lines})), 2_000, MOST_POINTS)
    )
    for output, line in lines:
        if id(line) not in known:
            t = _samples(line, count, has_many_steps, has_ends=subject.network.certificate.norm == "inf")
            points = line.at(t)
            target = None if subject.function is None else subject.target_at(points)
            known[id(line)] = t, subject.network_at(points), target
        t, network, target = known[id(line)]
        found.append(Curve(output, line, t, network[:, output], None if target is None else target[:, output]))
    return found


def _samples(line: PlotLine, count: int, scatter: bool, has_ends: bool) -> Float[np.ndarray, " count"]:
    """Return points along a line, with or without the ends.

    They are scattered if a lattice would interfere with the cells.
    """
    middles = line.lo + (line.hi - line.lo) * (np.arange(count) + 0.5) / count
    t = np.linspace(line.lo, line.hi, count) if has_ends else middles
    if scatter:
        t[1:-1] += (np.random.default_rng(0).random(count - 2) - 0.5) * (line.hi - line.lo) / count
    return t


def _draw_curve(axes: Axes, subject: PlotSubject, curve: Curve, is_only: bool) -> None:
    line = curve.line
    ticks, note = _anchor_ticks(last_layer(subject.form, curve.output), line)
    if is_only:
        style.set_title(axes, "network" if curve.target is None else "target and network", note)
        style.set_labels(axes, line.name, f"f({line.name})" if line.box.d == 1 else "output")
    else:
        style.set_title(axes, subject.entry(curve.output))
        style.set_labels(axes, line.name)
    if curve.target is not None:
        label = "target, read from the weights" if subject.is_read else "target"
        axes.plot(curve.t, curve.target, color=style.ORANGE, linewidth=2.4, label=label, solid_capstyle="round")
    axes.plot(curve.t, curve.network, color=style.BLUE, linewidth=1.4, label="network")
    at_axis = axes.get_xaxis_transform()
    for places, colour in ticks:
        axes.plot(places, np.zeros(len(places)), "|", color=colour, markersize=9, transform=at_axis)
    axes.set_xlim(*line.axis)
    _shade_unreached(axes, line)
    style.set_plain(axes)
    if is_only and curve.target is not None:
        style.add_legend_above(axes, 2, fontsize=10)


def _draw_errors(axes: Axes, subject: PlotSubject, curves: list[Curve], has_many_steps: bool) -> None:
    """Draw curves.

    If the network has more steps than the picture has columns, draw bands from smallest to largest error.
    """
    style.set_title(axes, "error", headline(subject.network.certificate))
    colours = [style.BLUE] if len(curves) == 1 else list(style.distinct_colours(len(curves)))
    errors = [curve.network - curve.target for curve in curves if curve.target is not None]
    for i, (curve, colour) in enumerate(zip(curves, colours, strict=True)):
        error, label = errors[i], subject.entry(curve.output)
        if not has_many_steps:
            width = 1.2 + 0.7 * (len(curves) - 1 - i)  # so that lines that coincide are all visible
            axes.plot(curve.t, error, color=colour, linewidth=width, label=label)
            continue
        bins = np.array_split(np.flatnonzero(np.isfinite(error)), 250)
        least, largest = ([float(end(error[part])) for part in bins if len(part)] for end in (np.min, np.max))
        middles = [float(curve.t[part].mean()) for part in bins if len(part)]
        opacity = 1.0 if len(curves) == 1 else 0.6
        axes.fill_between(middles, least, largest, color=colour, linewidth=0, alpha=opacity, label=label)
    axes.axhline(0, color=style.GREY, linewidth=0.8)
    reach, bound = subject.error_reach(np.concatenate(errors)), subject.network.certificate.pointwise_bound
    edges, leaf_bounds = subject.leaf_steps()
    if len(curves) == 1 and bound is not None and subject.network.box.d == 1 and len(leaf_bounds):
        band = axes.stairs(leaf_bounds, edges, baseline=-leaf_bounds, fill=True, color=style.ORANGE, alpha=0.12)
        band.set(linewidth=0, zorder=0)
    if bound is not None and THIN_BOUND * reach < bound <= reach:
        for sign, text, side in ((1, "+ bound", "bottom"), (-1, "− bound", "top")):
            axes.axhline(sign * bound, color=style.ORANGE, linewidth=1.4, linestyle=(0, (5, 3)))
            place = (1, sign * bound), (-4, sign * 4), ("axes fraction", "data"), "offset points"
            axes.annotate(text, *place, ha="right", va=side, fontsize=9, color=style.ORANGE)
    axes.set_ylim(-1.35 * reach, 1.35 * reach)
    axes.set_xlim(min(c.line.axis[0] for c in curves), max(c.line.axis[1] for c in curves))
    is_one_line = len({c.line.name for c in curves}) == 1
    style.set_labels(axes, curves[0].line.name if is_one_line else "u = w·x + t", "network − target")
    style.set_plain(axes)
    if len(curves) > 1:
        style.add_legend_above(axes, len(curves))


# --- the weights of a layer: one row per key, one band per head or query ----------------------------------------------


def _draw_weights(
    axes: Axes, layer: LayerSoftmaxes, line: PlotLine, worst: float, marked: list[Axes], is_only: bool
) -> None:
    """Draw the weights of a layer.

    `worst` is the point to zoom in on, and `marked` are the panels that show the window.
    """
    window = line
    if len(layer.queries) == 1:
        ends = (np.array([end]) for end in (worst, line.lo, line.hi))
        lows, highs = zoom(lambda t: layer.cells_at(line.at(t[:, 0])), *ends)
        window = replace(line, lo=float(lows[0]), hi=float(highs[0]))
    lo, hi = window.lo, window.hi
    is_zoomed = lo > line.lo or hi < line.hi
    bands = _bands(layer, window)
    u = layer.state(window.at(np.linspace(lo, hi, POINTS_ALONG)))
    shown = [_rows(band, u, layer.stage) for band in bands.members]
    shared = max(1, -(-max(len(rows) for _, rows in shown) * len(shown) // MOST_BAND_ROWS)) if len(shown) > 1 else 1

    kind = "softmax weights" if isinstance(layer.form.stages[layer.stage], SoftmaxStage) else "attention weights"
    note = f"weight of each key at each {line.name}"
    if is_zoomed:
        note = f"{one_line(line.name)} ∈ [{style.number(lo)}, {style.number(hi)}] (shaded above)"
    for name, drawn, all_ in (("queries", bands.queries, layer.queries), ("heads", bands.heads, layer.heads)):
        note += f", {len(drawn)} of {len(all_)} {name}" if len(drawn) < len(all_) else ""
    if shared > 1:
        note += f", one row for {shared} keys: the largest of their weights"
    place = "" if is_only else f", layer {layer.name}"
    style.set_title(axes, f"{kind}{', zoomed' if is_zoomed else ''}{place}", note)
    for i, (rank, weights) in enumerate(shown):
        rows = (rank - 0.5, rank + len(weights) - 0.5) if len(shown) == 1 else (i + 0.04, i + 0.96)
        merged = np.maximum.reduceat(weights, np.arange(0, len(weights), shared), axis=0)
        image = style.draw_image(axes, merged, (lo, hi, *rows), style.WEIGHTS, (0, 1))
    style.add_colorbar(axes, image, "weight", 0.014)
    style.set_plain(axes, grid=False)
    axes.set_xlim(*((lo, hi) if is_zoomed else line.axis))
    if not is_zoomed:
        _shade_unreached(axes, line)
    if len(shown) == 1:
        is_ordered = layer.stage == 0 and line.box.d == 1
        style.set_labels(axes, line.name, "key, counted from the left" if is_ordered else "key")
        axes.locator_params(axis="y", integer=True)
    else:
        style.set_labels(axes, line.name)
        _name_bands(axes, layer, bands)
    if is_zoomed:
        for other in marked:
            other.axvspan(lo, hi, facecolor=style.FAINT, edgecolor=style.GREY, linewidth=0.8, zorder=0)


def _shade_unreached(axes: Axes, line: PlotLine) -> None:
    """Shade the parts of the axis beyond the box."""
    for start, stop in ((line.axis[0], line.lo), (line.hi, line.axis[1])):
        if stop > start:
            axes.axvspan(start, stop, color=style.FAINT, linewidth=0)


def _bands(layer: LayerSoftmaxes, line: PlotLine) -> LayerSoftmaxes:
    """Return the softmaxes of the layer. If there are many, return some whose winning key changes along the line."""
    if len(layer) <= MOST_BANDS:
        return layer
    points = line.share(np.linspace(0, 1, 200))
    alone = [replace(layer, members=[member]) for member in layer.members]
    busy = [one.members[0] for one in alone if len(np.unique(one.cells_at(points))) > 1] or layer.members
    if len(layer.queries) > 1:
        shown = spread(sorted({member.query for member in busy}), max(1, MOST_BANDS // len(layer.heads)))
        busy = [member for member in layer.members if member.query in shown]
    return replace(layer, members=busy if len(busy) <= MOST_BANDS else spread(busy, MOST_BANDS))


def _name_bands(axes: Axes, layer: LayerSoftmaxes, bands: LayerSoftmaxes) -> None:
    """Draw a strip of colour beside each band, and the numbers of its query and head if the layer has several."""
    kinds = [kind for kind, numbers in (("query", layer.queries), ("head", layer.heads)) if len(numbers) > 1]
    names = [", ".join(f"{kind} {getattr(band, kind)}" for kind in kinds) for band in bands.members]
    axes.set_ylim(0, len(bands))
    axes.set_yticks(np.arange(len(bands)) + 0.5, names)
    axes.tick_params(axis="y", length=0, pad=14)
    axes.spines["left"].set_visible(False)
    strip = axes.inset_axes((-0.014, 0, 0.009, 1))
    for i, band in enumerate(bands.members):
        strip.axhspan(i + 0.04, i + 0.96, color=layer.colour_of(band), linewidth=0)
    strip.set_ylim(0, len(bands))
    strip.set_axis_off()


def _rows(
    band: Selector, u: Float[np.ndarray, "points variables"], stage: int
) -> tuple[int, Float[np.ndarray, "rows points"]]:
    """Return the rank of the first key that counts somewhere, and the weights of all such keys along the line."""
    near = band.near(u.min(axis=0), u.max(axis=0))
    weights = band.weights(u, near).T
    rank = np.arange(len(band))
    if band.soft is not None and stage == 0:  # u is a straight line, so the slopes of the scores along it give the rank
        rank = np.argsort(np.argsort(band.soft.slopes @ (u[-1] - u[0]), kind="stable"))
    rank = rank[near]
    used = weights.max(axis=1) > min(1e-3, float(weights.max()) / 2)
    order = np.argsort(rank[used])
    return int(rank[used].min()), weights[used][order]


# --- anchors as ticks on a line, in the colours of their heads --------------------------------------------------------


def _anchor_ticks(layer: LayerSoftmaxes, line: PlotLine) -> tuple[list[tuple[np.ndarray, Any]], str]:
    """Return [(places, colour)] of every head or query, and a note that explains them."""
    if not layer:
        return [], ""
    by = "head" if len(layer.heads) > 1 else "query" if len(layer.queries) > 1 else ""
    ticks = []
    for member in layer.members:
        places = _places(layer, member, line, has_heads=by == "head")
        ticks.append((places, layer.colour_of(member) if by else style.INK))
        if sum(len(drawn) for drawn, _ in ticks) > MOST_TICKS:
            return [], "more anchors than ticks could show"
    return ticks, f"ticks: the anchors{by and f', in the colour of the {by}'}"


def _places(layer: LayerSoftmaxes, member: Selector, line: PlotLine, has_heads: bool) -> Float[np.ndarray, " anchors"]:
    """Return the anchors without sentinels.

    They are exact if scores are squared distances, else the middles of cells.
    """
    places = layer.anchors_along(member, line.origin, line.direction) if layer.stage == 0 else None
    if places is not None:
        places = np.unique(places[~member.is_sentinel] if has_heads else places)
        slack = 1e-6 * (line.hi - line.lo)
        return np.asarray(places[(places >= line.lo - slack) & (places <= line.hi + slack)])
    t = np.linspace(line.lo, line.hi, 4000)
    return run_places(t, replace(layer, members=[member]).cells_at(line.at(t)))
