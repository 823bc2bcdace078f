"""Where the first stage of a program turns: points at which to cut cells, axis by axis.

A head of hard temperature that reads one input is flat nearly everywhere, and steep in between. A cell that holds a
steep part has all that lies on both sides of it in its enclosure, and f is held against all of that on the whole cell.
Cut at the ends of the steep part, each piece is held against what can be said there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.proofs.deep.enclosures import StageEnclosure
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PARTS = (64, 8, 8, 8)
"""Into how many parts the box is cut along an axis, and its outermost steep parts again: to 2⁻¹⁵ of it."""
FLAT = 0.01
"""Of what an output changes by over the whole box: less than that is flat."""


def axis_breaks(stage: StageEnclosure, box: Box, axis: int) -> Float[np.ndarray, " breaks"]:
    """Where outputs that read this input alone begin to turn, and cease to; in ascending order."""
    parts = (part for part in stage.parts if np.flatnonzero(part.reads).tolist() == [axis])
    return np.unique(np.concatenate([np.zeros(0), *(_steep_ends(part.enclosure, box, axis) for part in parts)]))


def _steep_ends(enclosure: Callable[[Interval], Interval], box: Box, axis: int) -> Float[np.ndarray, " ends"]:
    """The box is cut into parts along the axis, and the first and the last that are not flat again."""
    edges = np.array([box.lo[axis], box.hi[axis]])[None]
    whole = enclosure(Interval(box.lo[None], box.hi[None]))
    flat = FLAT * (whole.hi - whole.lo)
    for num_parts in PARTS:
        steps = edges[:, :1] + (edges[:, 1:] - edges[:, :1]) * np.arange(num_parts + 1) / num_parts
        steps[:, -1] = edges[:, 1]
        edges = np.stack([steps[:, :-1].ravel(), steps[:, 1:].ravel()], axis=1)
        lo, hi = np.repeat(box.lo[None], len(edges), axis=0), np.repeat(box.hi[None], len(edges), axis=0)
        lo[:, axis], hi[:, axis] = edges.T
        found = enclosure(Interval(lo, hi))
        edges = edges[(found.hi - found.lo > flat).any(axis=1)]
        if not len(edges):
            return np.zeros(0)
        edges = np.unique(edges[[0, -1]], axis=0)
    ends = np.array([edges[0, 0], edges[-1, 1]])
    return ends[(ends > box.lo[axis]) & (ends < box.hi[axis])]


def cut_at(
    breaks: Sequence[Float[np.ndarray, " breaks"]], cells: Interval
) -> tuple[Interval, Int[np.ndarray, " pieces"]]:
    """The pieces of cells, cut at the breaks of every axis that are inside; and the cell of each."""
    lo, hi, cell = cells.lo, cells.hi, np.arange(len(cells))
    for axis, points in enumerate(breaks):
        first, last = np.searchsorted(points, lo[:, axis], "right"), np.searchsorted(points, hi[:, axis], "left")
        counts = np.maximum(last - first, 0) + 1
        row = np.repeat(np.arange(len(lo)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        padded = np.concatenate([points, [np.inf]])
        place = first[row] + number
        start = np.where(number > 0, padded[np.maximum(place - 1, 0)], lo[row, axis])
        stop = np.where(number < counts[row] - 1, padded[place], hi[row, axis])
        lo, hi, cell = lo[row], hi[row], cell[row]
        lo[:, axis], hi[:, axis] = start, stop
    return Interval(lo, hi), cell
