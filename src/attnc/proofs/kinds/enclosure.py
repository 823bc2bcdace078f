"""Enclosure leaves: f against all values that a chain of stages can take on a cell, as any engine computes them.

The output of a head is a convex combination of its values. A key that is behind another one by a gap on the whole box
has a weight below e^{−gap}. So up to that leak, the head lies in the hull of the values of the other keys, for any
weights of these. The rounding of the sums is added. A deep program is a chain of stages: the enclosure of one stage is
the box of the next. On a cell, sup |f − network| is at most the distance of the enclosures of f and of the last stage.

On a wide box the leading keys change from place to place, and no key is behind on the whole box. Such a box is cut in
halves along the inputs that change the scores most. The stage is enclosed on each half, and the hull is taken.

Cells are cut at points where the first stage becomes steep. A head of hard temperature that reads one input is flat
nearly everywhere, and steep in between. On a cell with a steep part, the enclosure holds the values on both sides of
it, and f is compared with all of them on the whole cell. If the cell is cut at the ends of the steep part, f is
compared on each piece with the values that are possible there. Any cuts are sound, and they need not be dyadic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.ir.program import Program
from attnc.numerics.arrays import Bool, Float, Int
from attnc.numerics.intervals import Interval, halved
from attnc.numerics.limits import check_time, spend
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import PROVING
from attnc.proofs.cells.intervals import affine_range, cells_within, centred, distance, interval
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.cells.near_keys import NearValues
from attnc.proofs.rounding.program import Roundings, roundings
from attnc.proofs.rounding.stage import rounding_of_sums, score_errors
from attnc.proofs.stages.enclosed_sparse import expanded
from attnc.proofs.stages.extraction import OneStage, ProgramStage, stages
from attnc.targets.box import Box
from attnc.targets.target import Target

MOST_CUTS = 4  # a wide box is cut along at most this many inputs, into at most 2⁴ pieces
CUT_ABOVE = 8.0  # a change of scores against each other, over a box; below it the keys keep their order, or nearly so
LEAK = 1e-9  # the weight that keys far behind may have together, unless another one is asked for
ENCLOSURE_SECONDS = 2e-3  # counted for each enclosure of a query token, besides its keys; measured with 85 tokens
AXIS_PARTS = (64, 8, 8, 8)
"""The numbers of parts into which the box is cut along an axis, and its outermost steep parts again: to 2⁻¹⁵ of it."""
FLAT_PART = 0.01  # a part is flat if outputs change there by less than this part of their change over the box


@dataclass(frozen=True, eq=False)
class EnclosureKind(Kind):
    """A chain of stages, enclosed one after the other on the pieces of a cell between the cuts."""

    stages: tuple[StageEnclosure, ...]
    target: Target
    cuts: tuple[Float[np.ndarray, " cuts"], ...]
    leak: float = LEAK  # for the last stage
    truncation: float = 0.0
    name = "enclosure"

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        upper = np.zeros((len(centres), self.target.num_outputs))
        pieces, cell = cut_at(self.cuts, cells_within(self.target.box, centres, radii))
        *before, last = self.stages
        state = pieces
        for stage in before:
            state = stage(state)
        off = up(distance(self.target.enclosure(pieces), last(state, self.leak)) + self.truncation)
        np.maximum.at(upper, cell, off)
        return Bounds(upper)


@dataclass(frozen=True, eq=False)
class StageEnclosure:
    """The outputs of a program of one stage over boxes, in parts by query token."""

    parts: tuple[QueryEnclosure, ...]
    num_outputs: int

    @property
    def span(self) -> float:
        """The largest difference of two values of one output."""
        heads = (head for part in self.parts for head in part.stage.heads)
        return max((float(np.ptp(head.values.mid, axis=0).max()) for head in heads), default=0.0)

    @classmethod
    def of(cls, program: Program | ProgramStage, *, is_first: bool) -> StageEnclosure:
        """Read the stage off a program. Raise ProgramError if its scores are not affine.

        The input of the first stage is cast to the dtype, and its box is not cut.
        """
        rounds = roundings(program, casts_input=None if is_first else False)
        parts = tuple(
            QueryEnclosure(stage, outputs, found, 0 if is_first else MOST_CUTS)
            for (stage, outputs), found in zip(stages(program), rounds, strict=True)
        )
        return cls(parts, sum(len(part.outputs) for part in parts))

    def __call__(self, boxes: Interval, leak: float = LEAK) -> Interval:
        """Enclose the outputs (boxes, outputs) over boxes (boxes, inputs).

        Keys that weigh together less than `leak` are left out.
        """
        lo, hi = np.empty((2, len(boxes), self.num_outputs))
        views: dict[bytes, tuple[Interval, np.ndarray]] = {}
        for part in self.parts:
            read = part.reads.tobytes()
            if read not in views:
                views[read] = _distinct(boxes, part.reads)
            distinct, number = views[read]
            found = part.enclosure(distinct, leak)
            lo[:, part.outputs], hi[:, part.outputs] = found.lo[number], found.hi[number]
        return Interval(lo, hi)


@dataclass(frozen=True, eq=False)
class QueryEnclosure:
    """The outputs that are read from one set of query tokens."""

    stage: OneStage
    outputs: Int[np.ndarray, " outputs"]
    roundings: Roundings
    most_cuts: int

    def enclosure(self, boxes: Interval, leak: float = LEAK) -> Interval:
        """Enclose the outputs of this part over boxes."""
        spend(ENCLOSURE_SECONDS)
        check_time(PROVING)
        spreads = np.max([np.ptp(head.slopes.mid, axis=0) for head in self.stage.heads], axis=0)
        pieces, parent = cut_wide(boxes, spreads, self.most_cuts)
        found = self._hulls(pieces, leak)
        lo, hi = np.full((2, len(boxes), len(self.outputs)), np.inf)
        np.minimum.at(lo, parent, found.lo)
        np.minimum.at(hi, parent, -found.hi)
        return Interval(lo, -hi)

    @cached_property
    def reads(self) -> Bool[np.ndarray, " inputs"]:
        """The inputs on which the outputs depend. Weights whose midpoint is 0 do not count."""
        heads = self.stage.heads
        arrays = (self.stage.linear, *(head.slopes for head in heads), *(head.carried for head in heads))
        moving = [(array.mid != 0).reshape(-1, array.mid.shape[-1]) for array in arrays if array is not None]
        return np.asarray(np.concatenate(moving).any(axis=0))

    def _hulls(self, boxes: Interval, leak: float) -> Interval:
        centres, radii = centred(boxes)
        total, linear = interval(self.stage.constant)[None], self.stage.linear
        if linear.mid.any() or linear.radius.any():
            total = affine_range(total[0], interval(linear)[None], boxes)
        far = -math.log(leak)
        errors = score_errors(self.roundings, centres, radii)
        for head, error in zip(self.stage.heads, errors, strict=True):
            total = total + NearValues(head, centres, radii, float(error), far).hulls()
        rounding = rounding_of_sums(self.roundings, up(np.abs(centres) + radii))
        return Interval(-up(rounding - total.lo), up(total.hi + rounding))


def cut_wide(
    boxes: Interval, spreads: Float[np.ndarray, " inputs"], most_cuts: int
) -> tuple[Interval, Int[np.ndarray, " pieces"]]:
    """Cut boxes in halves along the inputs that change the scores most. Return the pieces, and the box of each."""
    parent, effects = np.arange(len(boxes)), spreads * (boxes.hi - boxes.lo)
    for _ in range(min(most_cuts, len(spreads))):
        axis, wide = np.argmax(effects, axis=1), effects.max(axis=1) > CUT_ABOVE
        if not wide.any():
            break
        effects[wide, axis[wide]] = 0.0  # once along each input
        boxes = Interval.joined(boxes[~wide], halved(boxes[wide], axis[wide]))
        effects, parent = (np.concatenate([of[~wide], of[wide], of[wide]]) for of in (effects, parent))
    return boxes, parent


def _distinct(boxes: Interval, reads: Bool[np.ndarray, " inputs"]) -> tuple[Interval, Int[np.ndarray, " boxes"]]:
    """Return boxes that differ in the inputs that are read, and for every given box the number of its own.

    Along the other inputs they are as wide as all of the given boxes together.
    """
    ends: Float[np.ndarray, "boxes ends"] = np.concatenate([boxes.lo[:, reads], boxes.hi[:, reads]], axis=1)
    _, first, number = np.unique(ends, axis=0, return_index=True, return_inverse=True)
    lo, hi = boxes.lo[first], boxes.hi[first]
    lo[:, ~reads], hi[:, ~reads] = boxes.lo[:, ~reads].min(axis=0), boxes.hi[:, ~reads].max(axis=0)
    return Interval(lo, hi), number.reshape(-1)


def axis_breaks(stage: StageEnclosure, box: Box, axis: int) -> Float[np.ndarray, " breaks"]:
    """Return the ends of the steep parts of outputs that read this input alone, in ascending order."""
    parts = (part for part in stage.parts if np.flatnonzero(part.reads).tolist() == [axis])
    return np.unique(np.concatenate([np.zeros(0), *(_steep_ends(part.enclosure, box, axis) for part in parts)]))


def _steep_ends(enclosure: Callable[[Interval], Interval], box: Box, axis: int) -> Float[np.ndarray, " ends"]:
    """Return the first and the last point of the axis at which the enclosure is not flat.

    The box is cut into parts along the axis. The first and the last part that are not flat are cut again.
    """
    edges = np.array([box.lo[axis], box.hi[axis]])[None]
    whole = enclosure(Interval(box.lo[None], box.hi[None]))
    flat = FLAT_PART * (whole.hi - whole.lo)
    for num_parts in AXIS_PARTS:
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
    """Cut cells at the breaks of every axis that lie inside. Return the pieces, and the number of the cell of each."""
    lo, hi, cell = cells.lo, cells.hi, np.arange(len(cells))
    for axis, points in enumerate(breaks):
        first, last = np.searchsorted(points, lo[:, axis], "right"), np.searchsorted(points, hi[:, axis], "left")
        last = np.maximum(first, last)
        row, place = expanded(first, last + 1)
        padded = np.concatenate([points, [np.inf]])
        start = np.where(place > first[row], padded[np.maximum(place - 1, 0)], lo[row, axis])
        stop = np.where(place < last[row], padded[place], hi[row, axis])
        lo, hi, cell = lo[row], hi[row], cell[row]
        lo[:, axis], hi[:, axis] = start, stop
    return Interval(lo, hi), cell
