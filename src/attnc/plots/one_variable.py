"""A network along lines: outputs, error, and the weights of every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.plots.anchors import anchor_ticks
from attnc.plots.bands import BANDS
from attnc.plots.cells import count_along
from attnc.plots.error_curves import Curve, draw_errors
from attnc.plots.lines import Line
from attnc.plots.reading import read_selectors
from attnc.plots.style import BLUE, INK, ORANGE, add_header_legend, new_figure, set_plain, set_title
from attnc.plots.subject import SCORES, Subject
from attnc.plots.weights import draw_weights, shade_unreached

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_STEPS = 400
"""With more anchors than this on a line, the error is drawn as a band."""
MOST_POINTS = 40_000
LAYERS = 4
"""So many layers' weights are shown."""


def draw_lines(make: type[Figure], subject: Subject, lines: list[tuple[int, Line]]) -> Figure:
    """Curves of the outputs, each over its own line; the weights are those along the line of the chosen output."""
    line = next(line for output, line in lines if output == subject.output)
    layers = [read_selectors(subject.form, stage, subject.output) for stage in range(len(subject.form.stages))]
    layers = [found for found in layers if found]
    has_many_steps = bool(layers) and count_along(subject.form, layers[-1], line.share) > MANY_STEPS
    curves = _curves(subject, lines, has_many_steps)
    chosen = next(curve for curve in curves if curve.output == subject.output)
    shown = (
        [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, LAYERS).round().astype(int))] if layers else []
    )

    columns = 1 if len(curves) == 1 else 2 if len(curves) in (2, 4) else 3
    num_rows = -(-len(curves) // columns)
    heights = [2.9 if columns == 1 else 2.5] * num_rows + [2.9] * (chosen.target is not None)
    heights += [2.9 + 0.25 * max(0, min(len(found), BANDS) - 5) for found in shown]
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
        draw_errors(axes, subject, curves, has_many_steps)
        marked.append(axes)
        worst = float(chosen.t[int(np.nanargmax(np.abs(chosen.network - chosen.target)))])
    for i, found in enumerate(shown):
        axes = picture.add_subplot(grid[len(heights) - len(shown) + i, :])
        draw_weights(picture, axes, subject.form, found, line, worst, marked, is_only=len(layers) == 1)
        _label(axes, line)
    return picture


def _curves(subject: Subject, lines: list[tuple[int, Line]], has_many_steps: bool) -> list[Curve]:
    found: list[Curve] = []
    known: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}  # outputs may share a line
    count = int(np.clip(SCORES // (subject.work_per_point * len({id(line) for _, line in lines})), 2_000, MOST_POINTS))
    for output, line in lines:
        if id(line) not in known:
            t = _samples(line, count, has_many_steps, has_ends=subject.network.certificate.norm == "inf")
            points = line.at(t)
            target = None if subject.function is None else subject.target_at(points)
            known[id(line)] = t, subject.network_at(points), target
        t, network, target = known[id(line)]
        found.append(Curve(output, line, t, network[:, output], None if target is None else target[:, output]))
    return found


def _samples(line: Line, count: int, scatter: bool, has_ends: bool) -> Float[np.ndarray, " count"]:
    """Off the lattice where that could make a pattern with the cells; without ends where these mean nothing."""
    middles = line.lo + (line.hi - line.lo) * (np.arange(count) + 0.5) / count
    t = np.linspace(line.lo, line.hi, count) if has_ends else middles
    if scatter:
        t[1:-1] += (np.random.default_rng(0).random(count - 2) - 0.5) * (line.hi - line.lo) / count
    return t


def _label(axes: Axes, line: Line) -> None:
    axes.set_xlabel(line.name, color=INK, parse_math=False)


def _draw_curve(axes: Axes, subject: Subject, curve: Curve, is_only: bool) -> None:
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
