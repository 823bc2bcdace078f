"""The error along lines, with the bound on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.plots.lines import Line
from attnc.plots.style import BLUE, GREY, INK, ORANGE, distinct_colours, set_plain, set_title
from attnc.plots.subject import Subject

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

NOTHING = 1e-3
"""A bound that is less than this part of the picture would be drawn on the zero line."""
SMALLEST = 1e-290
"""An axis needs numbers whose tenths and squares are not zero."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One output along its line."""

    output: int
    line: Line
    t: Float[np.ndarray, " points"]
    network: Float[np.ndarray, " points"]
    target: Float[np.ndarray, " points"] | None


def draw_errors(axes: Axes, subject: Subject, curves: list[Curve], has_many_steps: bool) -> None:
    """Lines; where the network has more steps than the picture columns, bands between least and largest."""
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
    reach = error_reach(subject, np.concatenate(errors))
    if len(curves) == 1:
        _draw_leaves(axes, subject, curves[0].line)
    if subject.bound is not None and NOTHING * reach < subject.bound <= reach:
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


def _draw_leaves(axes: Axes, subject: Subject, line: Line) -> None:
    """What was proved cell by cell: a band between the bounds of the leaves."""
    claim, box = subject.network.certificate, subject.network.box
    if box.d > 1 or subject.bound is None or not len(claim.leaf_bounds):
        return
    lo, hi = (ends[:, 0] for ends in claim.cells(box))
    if len(claim.leaf_bounds) != len(lo):
        return
    order = np.argsort(lo)
    edges = np.column_stack([lo[order], hi[order]]).ravel()
    bounds = np.repeat(claim.leaf_bounds[order], 2)
    is_shown = (edges >= line.lo) & (edges <= line.hi)
    axes.fill_between(
        edges[is_shown], -bounds[is_shown], bounds[is_shown], color=ORANGE, alpha=0.12, linewidth=0, zorder=0
    )


def error_reach(subject: Subject, error: Float[np.ndarray, "*shape"]) -> float:
    """The bound where the error is of its size, so that the scale says how much of it is used; else the error."""
    largest, bound = float(np.nanmax(np.abs(error))), subject.bound
    if bound is not None and (bound < 5 * largest or (largest == 0 and bound > SMALLEST)):
        return max(largest, bound)
    return largest or 1.0
