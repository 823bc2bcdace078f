"""The values of the keys that can matter on boxes, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.leaves.deviations import affine_range, interval
from attnc.proofs.leaves.near_keys import Scores, clusters, near_pairs

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FAR = 40.0
"""Keys that are behind by this and log(number of keys) have together a weight of at most e^−40, below 10⁻¹⁷."""
GAPS = (1.0, 4.0, 10.0)
"""Behind by how much a key may be counted by its leak, where that is better than to have its value in the hull."""
CROWD = 3072
"""With more near keys than this a cluster of boxes is taken as a whole, if halving it sheds none."""
PAIRS_PER_BATCH = 2**16


@dataclass(frozen=True, eq=False)
class Pairs:
    """Near keys, box by box: `row` numbers the boxes of the batch, `lead` is max over the box of s_k − s_j.

    j is the best key at the centre of the box.
    """

    boxes: Int[np.ndarray, " boxes"]
    row: Int[np.ndarray, " pairs"]
    key: Int[np.ndarray, " pairs"]
    lead: Float[np.ndarray, " pairs"]

    @property
    def starts(self) -> Int[np.ndarray, " boxes"]:
        return np.searchsorted(self.row, np.arange(len(self.boxes)))


@dataclass(frozen=True, eq=False)
class NearValues:
    """A head over boxes, for weights of scores within `score_error` of the exact ones.

    Keys that are behind by `far` + log(number of keys) are not looked at one by one.
    """

    head: SoftHead[Enclosed]
    centres: Float[np.ndarray, "boxes d"]
    radii: Float[np.ndarray, "boxes d"]
    score_error: float
    far: float = FAR

    @cached_property
    def scores(self) -> Scores:
        return Scores(self.head, self.centres, self.radii)

    @cached_property
    def constants(self) -> Interval:
        """(keys, outputs): the v_k."""
        return interval(self.head.values)

    @cached_property
    def carried(self) -> Interval | None:
        """(keys, outputs, d): the V_k."""
        return None if self.head.carried is None else interval(self.head.carried)

    @cached_property
    def slack(self) -> float:
        return self.scores.slack + 2 * self.score_error

    @cached_property
    def gap(self) -> float:
        return self.far + math.log(self.scores.num_keys)

    @property
    def rest(self) -> float:
        """The weight of all keys that are behind by `gap`."""
        # num_keys·e^{−gap}; the logarithm and the exponential are good to far more than 0.1 %
        return 1.001 * math.exp(-self.far)

    @cached_property
    def all_values(self) -> Interval:
        """(1, outputs): every value, anywhere on the boxes."""
        lo, hi = (self.centres - self.radii).min(axis=0), (self.centres + self.radii).max(axis=0)
        everywhere = Interval(-up(-lo), up(hi))
        every = self.values(np.arange(self.scores.num_keys), everywhere[None])
        return Interval(every.lo.min(axis=0, keepdims=True), every.hi.max(axis=0, keepdims=True))

    def values(self, keys: np.ndarray, cells: Interval) -> Interval:
        """(keys, outputs) over cells (keys, d), or one cell for all."""
        if self.carried is None:
            return self.constants[keys]
        return affine_range(self.constants[keys], self.carried[keys], cells)

    def batches(self) -> Iterator[Pairs | tuple[np.ndarray, np.ndarray]]:
        """Pairs of boxes and near keys; or (boxes, keys) of a cluster that has too many to look at each box."""
        yield from self._batches(CROWD)

    def pairs(self) -> Iterator[Pairs]:
        """Pairs of boxes and near keys, however many."""
        for found in self._batches(None):
            assert isinstance(found, Pairs)
            yield found

    def _batches(self, crowd: int | None) -> Iterator[Pairs | tuple[np.ndarray, np.ndarray]]:
        held: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        count = num_boxes = 0
        for boxes, keys in clusters(self.scores, self.gap + 2 * self.score_error, crowd):
            if crowd is not None and len(keys) > crowd:
                yield boxes, keys
                continue
            row, key, lead = near_pairs(self.scores, boxes, keys, self.gap + 2 * self.score_error)
            held.append((boxes, num_boxes + row, key, lead))
            count, num_boxes = count + len(row), num_boxes + len(boxes)
            if count >= PAIRS_PER_BATCH:
                yield Pairs(*(np.concatenate(part) for part in zip(*held, strict=True)))
                held, count, num_boxes = [], 0, 0
        if held:
            yield Pairs(*(np.concatenate(part) for part in zip(*held, strict=True)))

    def hull(self, pairs: Pairs) -> Interval:
        """(boxes of the batch, outputs): the values of the near keys, on their boxes."""
        values, starts = self._pair_values(pairs), pairs.starts
        return Interval(np.minimum.reduceat(values.lo, starts), np.maximum.reduceat(values.hi, starts))

    def _pair_values(self, pairs: Pairs) -> Interval:
        if self.carried is None:
            return self.constants[pairs.key]
        centres, radii = self.centres[pairs.boxes[pairs.row]], self.radii[pairs.boxes[pairs.row]]
        return self.values(pairs.key, Interval(-up(radii - centres), up(centres + radii)))

    def _hull_and_leaks(self, pairs: Pairs) -> Interval:
        """The same, of the keys that are behind by less than a gap, moved by the leaks of the others.

        p_k ≤ e^{s_k − s_j} =: w_k, so A ≤ max of the near values + Σ w_k·(v_k − that maximum)⁺ over the others.
        """
        values, starts, row = self._pair_values(pairs), pairs.starts, pairs.row
        lead = pairs.lead + self.slack
        with np.errstate(under="ignore"):
            weights = up(np.exp(np.minimum(lead, 0.0)), LIBM_ULPS)[:, None]
        margin = 1 + 2.0**-50 * (len(row) + 8)
        lo, hi = np.minimum.reduceat(values.lo, starts), np.maximum.reduceat(values.hi, starts)
        for gap in GAPS:
            near = (lead > -gap)[:, None]
            least = np.minimum.reduceat(np.where(near, values.lo, np.inf), starts)
            most = np.maximum.reduceat(np.where(near, values.hi, -np.inf), starts)
            below = np.add.reduceat(np.where(near, 0.0, weights * np.maximum(least[row] - values.lo, 0.0)), starts)
            above = np.add.reduceat(np.where(near, 0.0, weights * np.maximum(values.hi - most[row], 0.0)), starts)
            lo, hi = np.maximum(lo, -up(below * margin - least)), np.minimum(hi, up(most + above * margin))
        return Interval(lo, hi)

    def crowd_hull(self, boxes: np.ndarray, keys: np.ndarray) -> Interval:
        lo = (self.centres[boxes] - self.radii[boxes]).min(axis=0)
        hi = (self.centres[boxes] + self.radii[boxes]).max(axis=0)
        values = self.values(keys, Interval(-up(-lo), up(hi))[None])
        return Interval(values.lo.min(axis=0, keepdims=True), values.hi.max(axis=0, keepdims=True))

    def with_rest(self, hull: Interval) -> Interval:
        """A convex combination of the hull, and of all values with a weight of `rest`."""
        everything = self.all_values
        low, high = up(up(hull.lo - everything.lo) * self.rest), up(up(everything.hi - hull.hi) * self.rest)
        return Interval(-up(low - hull.lo), up(hull.hi + high))

    def hulls(self) -> Interval:
        """(boxes, outputs): what the head can say on each box."""
        lo, hi = np.empty((2, len(self.centres), self.head.values.mid.shape[1]))
        for batch in self.batches():
            if isinstance(batch, Pairs):
                boxes, hull = batch.boxes, self._hull_and_leaks(batch)
            else:
                boxes, hull = batch[0], self.crowd_hull(*batch)
            hull = self.with_rest(hull)
            lo[boxes], hi[boxes] = hull.lo, hull.hi
        return Interval(lo, hi)
