"""What the outputs of a stage can be, as any engine computes them, over boxes of what the stage is given.

A head says a convex combination of its values. On a box every key that is behind another by a gap all over the box has
a weight below e^{−gap}; so the head lies in the hull of the values of the others, up to that leak, however the others
share the weight. Rounding of the sums is added. That is one stage; a deep program is a chain of them, the box of one
being the enclosure of the one before it: nothing is composed by constants, and no error has to be told from a value.

Where a box is wide the keys that lead change inside it, and none is behind all over it. It is then cut in halves along
what changes the scores most, the stage enclosed on each, and the hull taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.program import Program
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import gamma, up
from attnc.proofs.leaves.deviations import affine_range, interval
from attnc.proofs.leaves.near_values import NearValues
from attnc.proofs.rounding.program import Roundings, roundings
from attnc.proofs.rounding.stage import score_errors
from attnc.proofs.stages.extraction import ProgramStage, stages
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MOST_CUTS = 4
"""Of a box, along as many inputs: at most 2⁴ pieces."""
CUT_ABOVE = 8.0
"""Scores that change less than this against each other over a box leave its keys in order, or nearly so."""
LEAK = 1e-9
"""What the weights of keys that are far behind may add up to, unless it is told."""


@dataclass(frozen=True, eq=False)
class StageEnclosure:
    """The outputs of a program of one stage, over boxes; query token by query token."""

    parts: tuple[Part, ...]
    num_outputs: int

    @property
    def span(self) -> float:
        """The most that a value of any output differs from another."""
        heads = (head for part in self.parts for head in part.stage.heads)
        return max((float(np.ptp(head.values.mid, axis=0).max()) for head in heads), default=0.0)

    @classmethod
    def of(cls, program: Program | ProgramStage, *, is_first: bool) -> StageEnclosure:
        """ProgramError where the scores are not affine. `is_first`: its input is cast to the dtype, and not cut."""
        rounds = roundings(program, casts_input=None if is_first else False)
        parts = tuple(
            Part(stage, outputs, found, 0 if is_first else MOST_CUTS)
            for (stage, outputs), found in zip(stages(program), rounds, strict=True)
        )
        return cls(parts, sum(len(part.outputs) for part in parts))

    def __call__(self, boxes: Interval, leak: float = LEAK) -> Interval:
        """(boxes, outputs) for boxes (boxes, inputs); keys of a weight below `leak` in all are not looked at."""
        lo, hi = np.empty((2, len(boxes), self.num_outputs))
        views: dict[bytes, tuple[Interval, np.ndarray]] = {}
        for part in self.parts:
            what = part.reads.tobytes()
            if what not in views:
                views[what] = _distinct(boxes, part.reads)
            distinct, number = views[what]
            found = part.enclosure(distinct, leak)
            lo[:, part.outputs], hi[:, part.outputs] = found.lo[number], found.hi[number]
        return Interval(lo, hi)


@dataclass(frozen=True, eq=False)
class Part:
    stage: OneStage
    outputs: Int[np.ndarray, " outputs"]
    roundings: Roundings
    most_cuts: int

    def enclosure(self, boxes: Interval, leak: float = LEAK) -> Interval:
        """(boxes, outputs of this part)."""
        spreads = np.max([np.ptp(head.slopes.mid, axis=0) for head in self.stage.heads], axis=0)
        pieces, parent = cut_wide(boxes, spreads, self.most_cuts)
        found = self._hulls(pieces, leak)
        lo, hi = np.full((2, len(boxes), len(self.outputs)), np.inf)
        np.minimum.at(lo, parent, found.lo)
        np.minimum.at(hi, parent, -found.hi)
        return Interval(lo, -hi)

    @cached_property
    def reads(self) -> Bool[np.ndarray, " inputs"]:
        """Which inputs it depends on, but for what is within the radius of a weight."""
        heads = self.stage.heads
        arrays = (self.stage.linear, *(head.slopes for head in heads), *(head.carried for head in heads))
        return np.any([_moves(array) for array in arrays if array is not None], axis=0)

    def _hulls(self, boxes: Interval, leak: float) -> Interval:
        centres = boxes.mid
        radii = up(np.maximum(boxes.hi - centres, centres - boxes.lo))
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
    """Halves along what changes the scores most, and the box that each is a piece of."""
    parent, effects = np.arange(len(boxes)), spreads * (boxes.hi - boxes.lo)
    for _ in range(most_cuts):
        axis = np.argmax(effects, axis=1)
        (wide,) = np.nonzero(effects[np.arange(len(boxes)), axis] > CUT_ABOVE)
        if not len(wide):
            break
        effects[wide, axis[wide]] = 0.0  # once along each input
        effects = np.concatenate([effects, effects[wide]])
        middle = boxes.mid[wide, axis[wide]]
        left, right = boxes.hi.copy(), boxes.lo[wide]
        left[wide, axis[wide]] = middle
        right[np.arange(len(wide)), axis[wide]] = middle
        boxes = Interval(np.concatenate([boxes.lo, right]), np.concatenate([left, boxes.hi[wide]]))
        parent = np.concatenate([parent, parent[wide]])
    return boxes, parent


def rounding_of_sums(rounds: Roundings, reach: Float[np.ndarray, "boxes inputs"]) -> Float[np.ndarray, "boxes outputs"]:
    """Of sums, whatever the weights are and however many keys have them: γ_{2p+3+n} of the largest value.

    Exponentials below e^NEGLIGIBLE may be taken for zero. Where numbers may overflow it is ∞.
    """
    unit = rounds.unit
    reach = up(reach * (1 + 2 * unit), 2)
    n = up(1 + reach.sum(axis=1), reach.shape[1])[:, None]
    inputs = reach.shape[1] + 2
    total = up(gamma(rounds.count, unit) * up(rounds.sizes + reach @ rounds.size_slopes.T, inputs))
    total = up(total + 2 * rounds.underflow * n, 2)
    for head in rounds.heads:
        p = len(head.value_sizes)
        largest = head.value_sizes.max(axis=0)[None]
        if head.value_size_slopes is not None:
            largest = up(largest + reach @ head.value_size_slopes.max(axis=0).T, inputs)
        share = gamma(2 * p + 3 + head.count, unit) + 2 * p * math.exp(NEGLIGIBLE[rounds.dtype])
        total = up(total + up(up(share) * largest) + up(head.underflow * n), 2)
    with np.errstate(over="ignore"):
        overflows = ~(up(rounds.peak * np.square(n), 2) < np.finfo(rounds.dtype).max / 4)
    return np.where(overflows, np.inf, total)


def _moves(array: Enclosed) -> Bool[np.ndarray, " inputs"]:
    return np.asarray((array.mid != 0).reshape(-1, array.mid.shape[-1]).any(axis=0))


def _distinct(boxes: Interval, reads: Bool[np.ndarray, " inputs"]) -> tuple[Interval, Int[np.ndarray, " boxes"]]:
    """The boxes that differ in what is read, with all that they are elsewhere; and which of them each box is."""
    ends: Float[np.ndarray, "boxes ends"] = np.concatenate([boxes.lo[:, reads], boxes.hi[:, reads]], axis=1)
    _, first, number = np.unique(ends, axis=0, return_index=True, return_inverse=True)
    lo, hi = boxes.lo[first], boxes.hi[first]
    lo[:, ~reads], hi[:, ~reads] = boxes.lo[:, ~reads].min(axis=0), boxes.hi[:, ~reads].max(axis=0)
    return Interval(lo, hi), number.reshape(-1)
