"""Dyadic boxes of a graded lattice, their scores, and where each score can win."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.partition.lattice import Lattice
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PAIRS_PER_BLOCK = 2**19


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaf j covers m_j lattice cells from lo_j on, on every axis (fewer at the end). Its score is 2L_j·y + bias_j:

    Φ = Σ_i φ_i interpolated at the leaf's corners (the sum of its chords), less lift(m_j). Among leaves of one size
    this selects exactly the leaves. Where sizes meet it cannot; the lift lets small leaves win a little of large ones,
    where f is flat, rather than the other way round.
    """

    lattice: Lattice
    lo: Int[np.ndarray, "leaves d"]
    m: Int[np.ndarray, " leaves"]
    num_query_axes: int  # axes from here on belong to the second input

    @property
    def d(self) -> int:
        return self.lo.shape[1]

    @property
    def count(self) -> int:
        return len(self.lo)

    @cached_property
    def hi(self) -> Int[np.ndarray, "leaves d"]:
        return np.minimum(self.lo + self.m[:, None], self.lattice.counts)

    @cached_property
    def bottom(self) -> Float[np.ndarray, "leaves d"]:
        return self.lattice.ys(self.lo)

    @cached_property
    def top(self) -> Float[np.ndarray, "leaves d"]:
        return self.lattice.ys(self.hi)

    @cached_property
    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        slopes, bias = np.empty(self.lo.shape), -self.lift(self.m)
        for i, axis in enumerate(self.lattice.axes):
            slopes[:, i], at_0 = axis.chords(self.lo[:, i], self.hi[:, i])
            bias += at_0
        return slopes / 2, bias

    @property
    def anchors(self) -> Float[np.ndarray, "leaves d"]:
        """L_j; `relative_error` covers the cast to the program's dtype."""
        return self._scores[0]

    @property
    def bias(self) -> Float[np.ndarray, " leaves"]:
        return self._scores[1]

    def lift(self, m: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """(d−1)m²/12: half of what would keep a leaf of size m, beside leaves of size m/2, from passing its own face.

        In units of a cell φ is t²/2. Let the large leaf be centred at 0 and the small ones at (¾, ±¼, …)·m. At the
        middle of the face, t = (½, 0, …)·m, the scores are d·m²/8 − lift(m) and m²/8 − lift(m/2), equal for
        lift = (d−1)m²/6. Half of it needs the fewest leaves in practice; the bound holds for any.
        """
        return (self.d - 1) / 12 * np.asarray(m, np.float64) ** 2

    @cached_property
    def reach(self) -> Float[np.ndarray, "leaves d"]:
        """|y| on the leaf; on axes of the second input, where 2L(scale·x + offset) is multiplied out, of both parts."""
        reach = np.maximum(np.abs(self.bottom), np.abs(self.top))
        reach[:, self.num_query_axes :] = self.lattice.size[self.num_query_axes :]
        return reach

    def size(self, keys: np.ndarray, reach: np.ndarray) -> Float[np.ndarray, " n"]:
        """The sum of the absolute values of a score's terms, for these keys and |y| ≤ reach."""
        offsets = 2 * np.abs(self.anchors[keys]) * reach
        return np.asarray(offsets.sum(axis=1) + np.abs(self.bias[keys]))

    @cached_property
    def largest_size(self) -> float:
        """Of any score anywhere."""
        return float(self.size(np.arange(self.count), self.reach.max(axis=0)[None]).max())

    @cached_property
    def relative_error(self) -> float:
        """Of a score, per unit of size: the program's (casts, products, a sum in any order), and that of sums here."""
        u = UNIT_ROUNDOFF[self.lattice.dtype]
        return gamma(self.d + 12, u) + gamma(4 * self.d + 24, UNIT_ROUNDOFF["float64"])

    @cached_property
    def errors(self) -> Float[np.ndarray, " leaves"]:
        """Of the difference of the scores of a leaf and of a neighbour like it, on the leaf."""
        return 2 * self.relative_error * self.size(np.arange(self.count), self.reach)

    def widened(self, gap: float) -> tuple[np.ndarray, np.ndarray]:
        """About the regions on which leaves come within `gap` of the best, if neighbours are of the same size."""
        share = np.minimum((gap + self.errors) / self.m.astype(np.float64) ** 2, 0.5)[:, None]
        width = share * (self.top - self.bottom)
        return self.bottom - width, self.top + width

    def split(self, which: np.ndarray) -> Leaves:
        """These leaves halved along every axis, the others as they are."""
        half = self.m[which] // 2
        corners = np.array(list(itertools.product((0, 1), repeat=self.d)))
        lo = (self.lo[which][:, None] + half[:, None, None] * corners).reshape(-1, self.d)
        m = np.repeat(half, len(corners))
        inside = (lo < self.lattice.counts).all(axis=1)
        lo, m = np.concatenate([self.lo[~which], lo[inside]]), np.concatenate([self.m[~which], m[inside]])
        return Leaves(self.lattice, lo, m, self.num_query_axes)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Boxes in y: within leaf j, all points where k ≠ j can be near."""

    j: Int[np.ndarray, " n"]
    k: Int[np.ndarray, " n"]
    lo: Float[np.ndarray, "n d"]
    hi: Float[np.ndarray, "n d"]
    sizes: Float[np.ndarray, " n"]  # of the score of k there


def winning_pieces(leaves: Leaves, gap: float, keys: Int[np.ndarray, " keys"]) -> Iterator[Pieces]:
    """For these keys k, in blocks, every place outside leaf k where the computed s_k is above the computed max s − gap.

    Proof.  Let y be in leaf j. Where s_k < s_j − gap − errors, k is not near. The difference is affine, so what is left
            of leaf j shrinks to a box.
            Which j there are: Φ is convex, so s_j ≥ Φ − lift_j on leaf j, and where k is near Φ − (sum of its chords)
            ≤ gap + lift_j − lift_k + errors. On each axis φ_i − chord ≥ −sag. So along one axis it is at most that
            plus the other axes' sags, and as it grows outward y lies within `Axis.reach`.
    """
    for j, k in _pairs(leaves, gap, keys):
        slope = 2 * (leaves.anchors[k] - leaves.anchors[j])
        bottom, top, reach = leaves.bottom[j], leaves.top[j], leaves.reach[j]
        sizes = leaves.size(k, reach)
        errors = leaves.relative_error * (sizes + leaves.size(j, reach))
        most = np.maximum(slope * bottom, slope * top).sum(axis=1) + (leaves.bias[k] - leaves.bias[j])
        slack = (most + gap + errors) * (1 + 2.0**-30)
        near = slack >= 0
        slope, slack, bottom, top = slope[near], slack[near, None], bottom[near], top[near]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            depth = up(slack / np.abs(slope))  # from the side of leaf j that is best for k; not used where slope is 0
        lo = np.where(slope > 0, np.maximum(bottom, -up(depth - top)), bottom)
        hi = np.where(slope < 0, np.minimum(top, up(bottom + depth)), top)
        yield Pieces(j[near], k[near], lo, hi, sizes[near])


def _pairs(leaves: Leaves, gap: float, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of (j, k), j ≠ k, with every pair for which k can be near somewhere on leaf j."""
    from scipy.spatial import cKDTree

    if len(keys) == 0:
        return
    axes, lo, hi = leaves.lattice.axes, leaves.lo[keys], leaves.hi[keys]
    errors = 4 * leaves.relative_error * leaves.largest_size + sum(axis.phi_error for axis in axes)
    sags = np.stack([axis.sag(lo[:, i], hi[:, i]) for i, axis in enumerate(axes)], axis=1)
    for m in np.unique(leaves.m):
        depth = gap + errors + leaves.lift(m) - leaves.lift(leaves.m[keys])
        depths = np.maximum(depth[:, None] + sags.sum(axis=1, keepdims=True) - sags, 0.0)
        ends = [axis.reach(lo[:, i], hi[:, i], depths[:, i]) for i, axis in enumerate(axes)]
        first, last = np.stack([e[0] for e in ends], axis=1), np.stack([e[1] for e in ends], axis=1)
        of_size_m = np.flatnonzero(leaves.m == m)
        tree = cKDTree(leaves.lo[of_size_m] + m / 2)
        most = np.minimum(((last - first) / m + 2.0).prod(axis=1), len(of_size_m))
        radius = (last - first).max(axis=1) / 2 + m / 2
        order = np.argsort(radius)  # blocks of keys with about the same radius
        block = np.floor(np.cumsum(most[order]) / PAIRS_PER_BLOCK) + np.floor(4 * np.log2(radius[order]))
        for part in np.split(order, np.flatnonzero(np.diff(block)) + 1):
            near = cKDTree((first[part] + last[part]) / 2)
            found = near.sparse_distance_matrix(tree, radius[part[-1]], p=math.inf, output_type="ndarray")
            of_key, j = part[found["i"]], of_size_m[found["j"]]
            touch = ((leaves.lo[j] <= last[of_key]) & (leaves.hi[j] >= first[of_key])).all(axis=1) & (j != keys[of_key])
            yield j[touch], keys[of_key[touch]]
