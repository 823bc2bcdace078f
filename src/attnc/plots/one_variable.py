"""A network along lines: outputs, the error with the bound on both sides, and the weights of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.plots.cells import count_along
from attnc.plots.lines import PlotLine
from attnc.plots.selectors import read_selectors
from attnc.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    add_header_legend,
    distinct_colours,
    new_figure,
    set_plain,
    set_title,
)
from attnc.plots.subject import PICTURE_SCORES, PlotSubject
from attnc.plots.weights import MOST_BANDS, anchor_ticks, draw_weights, shade_unreached

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_STEPS = 400
"""Most cells on a line at which the error is drawn as a curve; with more, it is drawn as a band."""
MOST_POINTS = 40_000
"""Most points of a curve: some 30 per pixel, so that no peak of the error is missed."""
SHOWN_LAYERS = 4
"""Most layers whose weights are shown: with more, the picture would not fit on a page."""
THIN_BOUND = 1e-3
"""Smallest bound that is drawn, as a share of the scale: a smaller one would lie on the zero line."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One output along its line."""

    output: int
    line: PlotLine
    t: Float[np.ndarray, " points"]
    network: Float[np.ndarray, " points"]
    target: Float[np.ndarray, " points"] | None


def draw_lines(make: type[Figure], subject: PlotSubject, lines: list[tuple[int, PlotLine]]) -> Figure:
    """Draw the outputs, each over its own line, and the weights along the line of the chosen output."""
    line = next(line for output, line in lines if output == subject.output)
    layers = [read_selectors(subject.form, stage, subject.output) for stage in range(len(subject.form.stages))]
    layers = [found for found in layers if found]
    has_many_steps = bool(layers) and count_along(subject.form, layers[-1], line.share) > MANY_STEPS
    curves = _curves(subject, lines, has_many_steps)
    chosen = next(curve for curve in curves if curve.output == subject.output)
    some = np.unique(np.linspace(0, len(layers) - 1, SHOWN_LAYERS).round().astype(int))
    shown = [layers[i] for i in some] if layers else []

    columns = 1 if len(curves) == 1 else 2 if len(curves) in (2, 4) else 3
    num_rows = -(-len(curves) // columns)
    heights = [2.9 if columns == 1 else 2.5] * num_rows + [2.9] * (chosen.target is not None)
    heights += [2.9 + 0.25 * max(0, min(len(found), MOST_BANDS) - 5) for found in shown]
    notes = [line.note] * bool(line.note) + [""] * (len(curves) > 1)  # the last one is the legend's
    title = subject.title if len(curves) > 1 else subject.entry_title
    picture = new_figure(make, 9.6 if columns < 3 else 11.5, sum(heights), title, *subject.header, *notes)
    grid = picture.add_gridspec(len(heights), columns, height_ratios=heights)

    marked = []
    for i, curve in enumerate(curves):
        axes = picture.add_subplot(grid[divmod(i, columns)])
        _draw_curve(axes, subject, curve, is_only=len(curves) == 1)
        marked += [axes] * (curve is chosen)
    if len(curves) > 1:
        add_header_legend(picture, len(subject.header) + len(notes), *marked[0].get_legend_handles_labels())
    worst = (line.lo + line.hi) / 2
    if chosen.target is not None:
        axes = picture.add_subplot(grid[num_rows, :])
        _draw_errors(axes, subject, curves, has_many_steps)
        marked.append(axes)
        worst = float(chosen.t[int(np.nanargmax(np.abs(chosen.network - chosen.target)))])
    for i, found in enumerate(shown):
        axes = picture.add_subplot(grid[len(heights) - len(shown) + i, :])
        draw_weights(picture, axes, subject.form, found, line, worst, marked, is_only=len(layers) == 1)
        _label(axes, line)
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
    """Points along a line: scattered if a lattice would make a pattern with the cells, and with the ends or without."""
    middles = line.lo + (line.hi - line.lo) * (np.arange(count) + 0.5) / count
    t = np.linspace(line.lo, line.hi, count) if has_ends else middles
    if scatter:
        t[1:-1] += (np.random.default_rng(0).random(count - 2) - 0.5) * (line.hi - line.lo) / count
    return t


def _label(axes: Axes, line: PlotLine) -> None:
    axes.set_xlabel(line.name, color=INK, parse_math=False)


def _draw_curve(axes: Axes, subject: PlotSubject, curve: Curve, is_only: bool) -> None:
    line, last = curve.line, len(subject.form.stages) - 1
    found = read_selectors(subject.form, last, curve.output) if last >= 0 else []
    ticks, note = anchor_ticks(subject.form, found, line)
    if is_only:
        set_title(axes, "network" if curve.target is None else "target and network", note)
        axes.set_ylabel(f"f({line.name})" if line.box.d == 1 else "output", color=INK, parse_math=False)
    else:
        set_title(axes, subject.entry(curve.output))
    if curve.target is not None:
        label = subject.target_label
        axes.plot(curve.t, curve.target, color=ORANGE, linewidth=2.4, label=label, solid_capstyle="round")
    axes.plot(curve.t, curve.network, color=BLUE, linewidth=1.4, label="network")
    at_axis = axes.get_xaxis_transform()
    for places, colour in ticks:
        axes.plot(places, np.zeros(len(places)), "|", color=colour, markersize=9, transform=at_axis)
    axes.set_xlim(*line.axis)
    shade_unreached(axes, line)
    _label(axes, line)
    set_plain(axes)
    if is_only and curve.target is not None:
        axes.legend(frameon=False, fontsize=10, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)


def _draw_errors(axes: Axes, subject: PlotSubject, curves: list[Curve], has_many_steps: bool) -> None:
    """Draw curves, or bands between least and largest error if the network has more steps than the picture columns."""
    set_title(axes, "error", subject.claims)
    colours = [BLUE] if len(curves) == 1 else list(distinct_colours(len(curves)))
    errors = [curve.network - curve.target for curve in curves if curve.target is not None]
    for i, (curve, colour) in enumerate(zip(curves, colours, strict=True)):
        error, label = errors[i], subject.entry(curve.output)
        if not has_many_steps:
            width = 1.2 + 0.7 * (len(curves) - 1 - i)  # lines that coincide are all seen
            axes.plot(curve.t, error, color=colour, linewidth=width, label=label)
            continue
        bins = np.array_split(np.flatnonzero(np.isfinite(error)), 250)
        least, largest = ([float(end(error[part])) for part in bins if len(part)] for end in (np.min, np.max))
        middles = [float(curve.t[part].mean()) for part in bins if len(part)]
        opacity = 1.0 if len(curves) == 1 else 0.6
        axes.fill_between(middles, least, largest, color=colour, linewidth=0, alpha=opacity, label=label)
    axes.axhline(0, color=GREY, linewidth=0.8)
    reach = subject.error_reach(np.concatenate(errors))
    if len(curves) == 1:
        _draw_leaves(axes, subject, curves[0].line)
    if subject.bound is not None and THIN_BOUND * reach < subject.bound <= reach:
        for sign, text in ((1, "+ bound"), (-1, "− bound")):
            axes.axhline(sign * subject.bound, color=ORANGE, linewidth=1.4, linestyle=(0, (5, 3)))
            axes.annotate(
                text,
                (1, sign * subject.bound),
                (-4, sign * 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="bottom" if sign > 0 else "top",
                fontsize=9,
                color=ORANGE,
            )
    axes.set_ylim(-1.35 * reach, 1.35 * reach)
    axes.set_xlim(min(c.line.axis[0] for c in curves), max(c.line.axis[1] for c in curves))
    axes.set_ylabel("network − target", color=INK)
    axes.set_xlabel(curves[0].line.name if len({c.line.name for c in curves}) == 1 else "u = w·x + t", color=INK)
    set_plain(axes)
    if len(curves) > 1:
        axes.legend(
            frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(curves), borderaxespad=0.1
        )


def _draw_leaves(axes: Axes, subject: PlotSubject, line: PlotLine) -> None:
    """Draw the bounds of the leaves as a band."""
    claim, box = subject.network.certificate, subject.network.box
    if box.d > 1 or subject.bound is None or not len(claim.leaf_bounds):
        return
    lo, hi = (ends[:, 0] for ends in claim.cells(box))
    if len(claim.leaf_bounds) != len(lo):
        return
    order = np.argsort(lo)
    edges = np.column_stack([lo[order], hi[order]]).ravel()
    bounds = np.repeat(np.asarray(claim.leaf_bounds)[order], 2)
    is_shown = (edges >= line.lo) & (edges <= line.hi)
    axes.fill_between(
        edges[is_shown], -bounds[is_shown], bounds[is_shown], color=ORANGE, alpha=0.12, linewidth=0, zorder=0
    )
