"""Which keys can matter on which boxes, and their values there.

For keys k and j, the largest s_k − s_j on a box is (s_k − s_j)(c) + |a_k − a_j|·r, c its centre and r its half-widths.
With j the best key at c, a key whose difference is ≤ −gap has a weight of at most e^{−gap} on the whole box. The boxes
are divided into clusters, again and again. A cluster keeps only the keys that are near on the box around it. So no
array of size boxes × keys is made unless that number of keys is near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import spend
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.intervals import affine_range, around, centred, hull, interval

PAIR_SECONDS = 4e-8  # counted for a box and a key that may be near it; measured, within a factor of 2
FAR_BEHIND = 40.0  # keys behind by this plus log(number of keys) weigh together at most e^−40, below 10⁻¹⁷
LEAK_GAPS = (1.0, 4.0, 10.0)
"""Gaps that are tried: a key farther behind counts by its leak, not as a value of the hull. Measured on 16 cases: with
4 alone one bound is 0.2 % larger, and six gaps between 0.5 and 20 lower none."""
PAIRS_PER_BATCH = 2**16  # pairs of a box and a key that are held together: 0.5 MB per array


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a head over boxes, and a bound of the errors of their computed differences."""

    head: SoftHead[Enclosed]
    centres: Float[np.ndarray, "boxes d"]
    radii: Float[np.ndarray, "boxes d"]

    @property
    def slopes(self) -> Float[np.ndarray, "keys d"]:
        return self.head.slopes.mid

    @property
    def num_keys(self) -> int:
        return self.head.num_keys

    @cached_property
    def cells(self) -> Interval:
        return around(self.centres, self.radii)

    @cached_property
    def slack(self) -> float:
        """A bound of the error of every difference of two scores as computed here, on any of the boxes.

        The error of a score is that of its radii, and the rounding of a_k·c + c_k, of the difference, and of
        |a_k − a_j|·r: γ times the sum of the sizes of all summands.
        """
        head, d = self.head, self.centres.shape[1]
        reach = (np.abs(self.centres) + self.radii).max(axis=0)
        radius = head.offsets.radius.max() + head.slopes.radius.max(axis=0) @ reach
        size = np.abs(head.offsets.mid).max() + np.abs(head.slopes.mid).max(axis=0) @ reach
        return float(4 * (radius + gamma(2 * d + 16, UNIT_ROUNDOFF["float64"]) * size) + 1e-300)

    def at(self, boxes: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return scores at the centres, for index arrays that broadcast."""
        scores = self.head.offsets.mid[keys]
        for axis in range(self.centres.shape[1]):
            scores = scores + self.slopes[keys, axis] * self.centres[boxes, axis]
        return np.asarray(scores)

    def leads(self, boxes: np.ndarray, keys: np.ndarray) -> Float[np.ndarray, "boxes keys"]:
        """Return the largest s_k − s_j over each box, to within the slack. j is the best of the keys at its centre."""
        spend(PAIR_SECONDS * len(boxes) * len(keys))
        slopes, radii = self.slopes[keys], self.radii[boxes]
        at_centre = self.centres[boxes] @ slopes.T + self.head.offsets.mid[keys]
        best = np.argmax(at_centre, axis=1)
        lead = at_centre - at_centre[np.arange(len(boxes)), best][:, None]
        for axis in range(radii.shape[1]):
            lead += np.abs(slopes[:, axis] - slopes[best, axis][:, None]) * radii[:, axis][:, None]
        return lead

    def clusters(self, gap: float) -> Iterator[tuple[Int[np.ndarray, " boxes"], Int[np.ndarray, " keys"]]]:
        """Yield (boxes, keys), few of both. On each box every other key is behind the best one by more than `gap`."""
        pending = [(np.arange(len(self.centres)), np.arange(self.num_keys))]
        while pending:
            boxes, keys = pending.pop()
            whole = Scores(self.head, *centred(hull(self.cells[boxes])))  # the box around all these boxes
            near = keys[~(whole.leads(np.zeros(1, int), keys)[0] <= -gap - self.slack)]  # near also if not a number
            if len(boxes) == 1 or len(boxes) * len(near) <= PAIRS_PER_BATCH:
                yield boxes, near
                continue
            centres = self.centres[boxes]
            axis = int(np.argmax(np.ptp(centres, axis=0)))
            order = np.argpartition(centres[:, axis], len(boxes) // 2)
            pending += [(boxes[order[: len(boxes) // 2]], near), (boxes[order[len(boxes) // 2 :]], near)]


@dataclass(frozen=True, eq=False)
class NearPairs:
    """The near keys of every box of a batch. `row` numbers the boxes of the batch.

    `lead` is the maximum of s_k − s_j over the box, where j is the best key at its centre.
    """

    boxes: Int[np.ndarray, " boxes"]
    row: Int[np.ndarray, " pairs"]
    key: Int[np.ndarray, " pairs"]
    lead: Float[np.ndarray, " pairs"]

    @cached_property
    def starts(self) -> Int[np.ndarray, " boxes"]:
        """The number of the first pair of every box."""
        return np.searchsorted(self.row, np.arange(len(self.boxes)))


@dataclass(frozen=True, eq=False)
class NearValues(Scores):
    """A head over boxes, for weights of scores within `score_error` of the exact ones.

    Keys that are behind by `far` + log(number of keys) are bounded together, by `rest`.
    """

    score_error: float = 0.0
    far: float = FAR_BEHIND

    @cached_property
    def constants(self) -> Interval:
        """(keys, outputs): the v_k."""
        return interval(self.head.values)

    @cached_property
    def carried(self) -> Interval | None:
        """(keys, outputs, d): the V_k."""
        return None if self.head.carried is None else interval(self.head.carried)

    @property
    def unsure(self) -> float:
        """A bound of the error of every difference of two scores, the errors of the scores included."""
        return self.slack + 2 * self.score_error

    @property
    def gap(self) -> float:
        return self.far + math.log(self.num_keys)

    @property
    def rest(self) -> float:
        """A bound of the weight of all keys together that are behind by `gap`."""
        # num_keys·e^{−gap}. The errors of the logarithm and of the exponential are far below 0.1 %.
        return 1.001 * math.exp(-self.far)

    @cached_property
    def all_values(self) -> Interval:
        """(1, outputs): a range of all values on all boxes."""
        return hull(self._values(np.arange(self.num_keys), hull(self.cells)))

    def _values(self, keys: np.ndarray, cells: Interval) -> Interval:
        """Return the values (keys, outputs) over cells (keys, d), or over one cell for all keys."""
        if self.carried is None:
            return self.constants[keys]
        return affine_range(self.constants[keys], self.carried[keys], cells)

    def pairs(self) -> Iterator[NearPairs]:
        """Yield pairs of boxes and near keys, in batches."""
        gap = self.gap + 2 * self.score_error
        held: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        count = num_boxes = 0
        for boxes, keys in self.clusters(gap):
            lead = self.leads(boxes, keys)
            row, column = np.nonzero(~(lead <= -gap - self.slack))
            held.append((boxes, num_boxes + row, keys[column], lead[row, column]))
            count, num_boxes = count + len(row), num_boxes + len(boxes)
            if count >= PAIRS_PER_BATCH:
                yield NearPairs(*(np.concatenate(part) for part in zip(*held, strict=True)))
                held, count, num_boxes = [], 0, 0
        if held:
            yield NearPairs(*(np.concatenate(part) for part in zip(*held, strict=True)))

    def hull(self, pairs: NearPairs) -> Interval:
        """Return the range (boxes of the batch, outputs) of the values of the near keys, on their boxes."""
        values = self._pair_values(pairs)
        return Interval(np.minimum.reduceat(values.lo, pairs.starts), np.maximum.reduceat(values.hi, pairs.starts))

    def _pair_values(self, pairs: NearPairs) -> Interval:
        return self._values(pairs.key, self.cells[pairs.boxes[pairs.row]])

    def _hull_and_leaks(self, pairs: NearPairs) -> Interval:
        """Return the hull of the values of keys that are behind by less than a gap, enlarged by the other keys' leaks.

        p_k ≤ e^{s_k − s_j} =: w_k, so A ≤ max of the near values + Σ w_k·(v_k − that maximum)⁺ over the others.
        """
        values, starts, row = self._pair_values(pairs), pairs.starts, pairs.row
        lead = pairs.lead + self.unsure
        with quiet():
            weights = up(np.exp(np.minimum(lead, 0.0)), LIBM_ULPS)[:, None]
        margin = 1 + 2.0**-50 * (len(row) + 8)
        found = self.hull(pairs)
        for gap in LEAK_GAPS:
            near = (lead > -gap)[:, None]
            least = np.minimum.reduceat(np.where(near, values.lo, np.inf), starts)
            most = np.maximum.reduceat(np.where(near, values.hi, -np.inf), starts)
            below = np.add.reduceat(np.where(near, 0.0, weights * np.maximum(least[row] - values.lo, 0.0)), starts)
            above = np.add.reduceat(np.where(near, 0.0, weights * np.maximum(values.hi - most[row], 0.0)), starts)
            found = found.intersect(Interval(-up(below * margin - least), up(most + above * margin)))
        return found

    def hulls(self) -> Interval:
        """Return the range (boxes, outputs) of the head on each box. Keys far behind weigh together at most `rest`."""
        lo, hi = np.empty((2, len(self.centres), self.head.values.mid.shape[1]))
        everything = self.all_values
        for pairs in self.pairs():
            found = self._hull_and_leaks(pairs)
            low, high = up(up(found.lo - everything.lo) * self.rest), up(up(everything.hi - found.hi) * self.rest)
            lo[pairs.boxes], hi[pairs.boxes] = -up(low - found.lo), up(found.hi + high)
        return Interval(lo, hi)
