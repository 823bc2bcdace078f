"""A network along lines: outputs, the error with the bound on both sides, and the weights of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.plots.cells import count_along
from attnc.plots.lines import PlotLine
from attnc.plots.selectors import read_selectors
from attnc.plots.style import (
    BLUE,
    GREY,
    ORANGE,
    add_header_legend,
    add_legend_above,
    distinct_colours,
    new_figure,
    set_labels,
    set_plain,
    set_title,
)
from attnc.plots.subject import PICTURE_SCORES, PlotSubject
from attnc.plots.weights import MOST_BANDS, anchor_ticks, draw_weights, shade_unreached
from attnc.wording import headline

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


def draw_lines(subject: PlotSubject, lines: list[tuple[int, PlotLine]]) -> Figure:
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
    picture = new_figure(9.6 if columns < 3 else 11.5, sum(heights), title, *subject.header, *notes)
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
        draw_weights(axes, subject.form, found, line, worst, marked, is_only=len(layers) == 1)
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


def _draw_curve(axes: Axes, subject: PlotSubject, curve: Curve, is_only: bool) -> None:
    line, last = curve.line, len(subject.form.stages) - 1
    found = read_selectors(subject.form, last, curve.output) if last >= 0 else []
    ticks, note = anchor_ticks(subject.form, found, line)
    if is_only:
        set_title(axes, "network" if curve.target is None else "target and network", note)
        set_labels(axes, line.name, f"f({line.name})" if line.box.d == 1 else "output")
    else:
        set_title(axes, subject.entry(curve.output))
        set_labels(axes, line.name)
    if curve.target is not None:
        label = "target, read from the weights" if subject.is_read else "target"
        axes.plot(curve.t, curve.target, color=ORANGE, linewidth=2.4, label=label, solid_capstyle="round")
    axes.plot(curve.t, curve.network, color=BLUE, linewidth=1.4, label="network")
    at_axis = axes.get_xaxis_transform()
    for places, colour in ticks:
        axes.plot(places, np.zeros(len(places)), "|", color=colour, markersize=9, transform=at_axis)
    axes.set_xlim(*line.axis)
    shade_unreached(axes, line)
    set_plain(axes)
    if is_only and curve.target is not None:
        add_legend_above(axes, 2, fontsize=10)


def _draw_errors(axes: Axes, subject: PlotSubject, curves: list[Curve], has_many_steps: bool) -> None:
    """Draw curves, or bands between least and largest error if the network has more steps than the picture columns."""
    set_title(axes, "error", headline(subject.network.certificate))
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
    reach, bound = subject.error_reach(np.concatenate(errors)), subject.network.certificate.pointwise_bound
    edges, leaf_bounds = subject.leaf_steps()
    if len(curves) == 1 and bound is not None and len(leaf_bounds):
        axes.stairs(leaf_bounds, edges, baseline=-leaf_bounds, fill=True, color=ORANGE, alpha=0.12, lw=0, zorder=0)
    if bound is not None and THIN_BOUND * reach < bound <= reach:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 9, "color": ORANGE}
        for sign, text, side in ((1, "+ bound", "bottom"), (-1, "− bound", "top")):
            axes.axhline(sign * bound, color=ORANGE, linewidth=1.4, linestyle=(0, (5, 3)))
            place = (1, sign * bound), (-4, sign * 4), ("axes fraction", "data")
            axes.annotate(text, *place, va=side, **style)
    axes.set_ylim(-1.35 * reach, 1.35 * reach)
    axes.set_xlim(min(c.line.axis[0] for c in curves), max(c.line.axis[1] for c in curves))
    is_one_line = len({c.line.name for c in curves}) == 1
    set_labels(axes, curves[0].line.name if is_one_line else "u = w·x + t", "network − target")
    set_plain(axes)
    if len(curves) > 1:
        add_legend_above(axes, len(curves))
