"""Cells that are dyadic boxes of a lattice whose spacing follows the function, and the regions where each can win.

Such a cell is called a leaf. Its score is a sum of chords of convex functions. `winning_pieces` finds, from the stored
scores, where the score of a leaf can be near the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

PROFILE_LINES = 48
"""Number of lines along an axis on which the change of f is measured, in several variables. Measured
with two functions: 24 and 96 take 293 cells instead of 288, and as many for the other."""


@dataclass(frozen=True, eq=False)
class Profile:
    """The change of f on each piece of one axis: the largest change on a few lines along the axis."""

    ends: Float[np.ndarray, " pieces_and_one"]
    changes: Float[np.ndarray, " pieces"]

    @property
    def total(self) -> float:
        return float(self.changes.sum())

    def edges(self, count: int, uniform: float) -> Float[np.ndarray, " edges"]:
        """Return the edges of at most `count` intervals with equal shares of the change.

        A share is (1 − uniform) times the part of the change plus `uniform` times the part of the length.
        """
        lengths = np.diff(self.ends)
        share = uniform * lengths / lengths.sum() + (1 - uniform) * self.changes / (self.total or 1.0)
        reached = np.concatenate([[0.0], np.cumsum(share)])
        edges = np.interp(np.linspace(0, reached[-1], count + 1), reached, self.ends)
        edges[0], edges[-1] = self.ends[0], self.ends[-1]
        return np.unique(edges)


def profile(target: Target, axis: int, change: float) -> Profile:
    """Return pieces on which f changes by at most `change` on each line, or by a small part of the whole change.

    Nothing is proved from these lines: they only guide the choice of the lattice.
    """
    box = target.box
    num_lines, most_pieces = (1, 2**16) if box.d == 1 else (PROFILE_LINES, 2**9)
    rng = np.random.default_rng(0)
    places = np.stack([rng.permutation(num_lines) for _ in range(box.d)], axis=1)  # a Latin square: no gaps on any axis
    lines = box.lo + (places + 0.5) / num_lines * box.widths
    ends = np.linspace(box.lo[axis], box.hi[axis], 65)
    changes = _changes(target, axis, lines, ends[:-1], ends[1:])
    for _ in range(50):
        large = changes > max(change, float(changes.sum()) / most_pieces)
        if not large.any() or len(changes) > 4 * most_pieces:
            break
        where, lo, hi = np.flatnonzero(large), ends[:-1][large], ends[1:][large]
        middles = lo / 2 + hi / 2
        changes[where] = _changes(target, axis, lines, lo, middles)
        changes = np.insert(changes, where + 1, _changes(target, axis, lines, middles, hi))
        ends = np.insert(ends, where + 1, middles)
    return Profile(ends, changes)


def _changes(target: Target, axis: int, lines: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    low = np.repeat(lines, len(lo), axis=0)
    high = low.copy()
    low[:, axis], high[:, axis] = np.tile(lo, len(lines)), np.tile(hi, len(lines))
    found = target.enclosure(Interval(low, np.maximum(low, high)))
    widths = np.minimum((found.hi - found.lo).max(axis=1), 1e100)
    return np.asarray(widths.reshape(len(lines), len(lo)).max(axis=0))


@dataclass(frozen=True, eq=False)
class GradedAxis:
    """Edges in y = scale·x + offset, and a convex φ that is linear between them.

    At each edge the slope of φ grows by 1/(width of the narrower neighbour). So the chords of neighbours differ by
    t/width at a distance t from their border: distances count in units of the local cell.
    """

    scale: float
    offset: float
    edges: Float[np.ndarray, " count_and_one"]

    @classmethod
    def make(cls, x_edges: Float[np.ndarray, " edges"], dtype: str) -> GradedAxis:
        """Make an axis with y = 0 where cells are narrowest, since scores differ least there. scale is a power of 2."""
        widths = np.diff(x_edges)
        exponent = -round(math.log2(float(widths.min())))
        if abs(exponent) > math.log2(float(np.finfo(dtype).max)) / 2:
            raise InputError(
                f"cells {widths.min():.3g} wide are too small or too large for {dtype}: rescale the variables"
            )
        scale = 2.0**exponent
        narrowest = int(np.argmin(widths)) if widths.min() < 0.25 * np.median(widths) else len(widths) // 2
        offset = float(np.asarray(-x_edges[narrowest] * scale, dtype))
        edges = np.unique(x_edges * scale + offset)
        # The slack exceeds `GradedLattice.query_error`, so every computed y lies inside.
        slack = 8 * UNIT_ROUNDOFF[dtype] * (scale * float(np.abs(x_edges).max()) + abs(offset))
        edges[0] -= slack
        edges[-1] += slack
        return cls(scale, offset, edges)

    @property
    def count(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def slopes(self) -> Float[np.ndarray, " count"]:
        """The slope of φ on each cell. It is 0 at y = 0: an affine function common to all scores changes no weight."""
        widths = np.diff(self.edges)
        bends = 1 / np.minimum(widths[:-1], widths[1:])
        slopes = np.concatenate([[0.0], np.cumsum(bends)])
        return slopes - slopes[self._origin]

    @cached_property
    def phi(self) -> Float[np.ndarray, " count_and_one"]:
        """The values of φ at the edges."""
        phi = np.concatenate([[0.0], np.cumsum(self.slopes * np.diff(self.edges))])
        return phi - phi[self._origin]

    @property
    def _origin(self) -> int:
        return int(np.clip(np.searchsorted(self.edges, 0.0, "right") - 1, 0, self.count - 1))

    @cached_property
    def phi_error(self) -> float:
        """The distance of the stored values of φ from a convex function. They are sums of `count` products."""
        return 8 * self.count * UNIT_ROUNDOFF["float64"] * float(np.ptp(self.phi))

    def chords(self, lo: Int[np.ndarray, " n"], hi: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Return the slope and the value at 0 of the chord of φ over edges lo … hi."""
        slope = (self.phi[hi] - self.phi[lo]) / (self.edges[hi] - self.edges[lo])
        return slope, self.phi[lo] - slope * self.edges[lo]

    def sag(self, lo: Int[np.ndarray, " n"], hi: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the largest distance of φ below that chord, bounded by the point where the end tangents meet."""
        slope, _ = self.chords(lo, hi)
        left, right = slope - self.slopes[lo], self.slopes[hi - 1] - slope
        with quiet():
            sag = left * right / (left + right) * (self.edges[hi] - self.edges[lo])
        return np.maximum(np.nan_to_num(sag, posinf=0.0, neginf=0.0), 0.0) * (1 + 2.0**-20)

    def reach(self, lo: np.ndarray, hi: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges on either side beyond which φ is more than `depth` above the chord over lo … hi.

        φ minus the chord is convex and 0 at lo and hi, so it grows outward from there. Bisection finds the edges.
        """
        slope, at_0 = self.chords(lo, hi)
        ends = []
        for inner, outer in ((lo, np.zeros_like(lo)), (hi, np.full_like(hi, self.count))):
            for _ in range(self.count.bit_length() + 1):
                middle = np.where(np.abs(outer - inner) <= 1, outer, (inner + outer) // 2)
                is_far = self.phi[middle] - (slope * self.edges[middle] + at_0) > depth
                inner, outer = np.where(is_far, inner, middle), np.where(is_far, middle, outer)
            ends.append(outer)
        return ends[0], ends[1]


@dataclass(frozen=True, eq=False)
class GradedLattice:
    """A graded axis for every variable of a box."""

    box: Box
    axes: tuple[GradedAxis, ...]
    dtype: str
    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]

    @classmethod
    def make(cls, box: Box, profiles: list[Profile], counts: list[int], dtype: str) -> GradedLattice:
        """Make a lattice of about `counts` cells per axis.

        With two axes or more, the length counts for 5 % of a cell's share of the change, so that no cell is very long.
        """
        uniform = 1e-3 if box.d == 1 else 0.05
        edges = (p.edges(count, uniform) for p, count in zip(profiles, counts, strict=True))
        axes = tuple(GradedAxis.make(each, dtype) for each in edges)
        return cls(box, axes, dtype, np.array([axis.scale for axis in axes]), np.array([axis.offset for axis in axes]))

    @cached_property
    def counts(self) -> Int[np.ndarray, " d"]:
        return np.array([axis.count for axis in self.axes])

    @cached_property
    def size(self) -> Float[np.ndarray, " d"]:
        """The largest scale·|x| + |offset| on each axis."""
        return np.asarray(up(self.scale * self.box.magnitude + np.abs(self.offset), 2))

    @cached_property
    def query_error(self) -> Float[np.ndarray, " d"]:
        """A bound on |computed y − (scale·x + offset)|: four roundings, for a cast, a product and a sum."""
        return np.asarray(up(gamma(4, UNIT_ROUNDOFF[self.dtype]) * self.size))

    def ys(self, index: Int[np.ndarray, "cells d"]) -> Float[np.ndarray, "cells d"]:
        return np.stack([axis.edges[index[:, i]] for i, axis in enumerate(self.axes)], axis=1)

    def preimage(self, lo: Float[np.ndarray, "cells d"], hi: Float[np.ndarray, "cells d"]) -> Interval:
        """Enclose all x of the box whose computed y can lie in [lo, hi]."""
        y = Interval(-up(self.query_error - lo), up(hi + self.query_error))
        x = (y - Interval.point(self.offset)) / Interval.point(self.scale)
        return Interval(np.clip(x.lo, self.box.lo, self.box.hi), np.clip(x.hi, self.box.lo, self.box.hi))


PLACING = "placing centres"
"""The name of this search in progress reports and in the message that the time ran out."""
PAIRS_PER_BLOCK = 2**19
"""Pairs of leaves that are examined at once: about 50 MB of arrays."""


@dataclass(frozen=True, eq=False)
class LatticeLeaves:
    """Leaf j covers m_j lattice cells from lo_j on, on every axis (fewer at the end). Its score is 2L_j·y + bias_j.

    The score interpolates Φ = Σ_i φ_i at the leaf's corners (it is the sum of its chords), minus lift(m_j). Among
    leaves of one size, the leaf that holds y has the largest score. Where sizes meet this cannot hold exactly. The lift
    lets small leaves win a little of large ones, where f is flat, rather than the other way round.
    """

    lattice: GradedLattice
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
    def scores(self) -> SoftHead[np.ndarray]:
        """The slopes 2L_j and offsets bias_j, without values. `relative_error` covers their cast to the dtype."""
        slopes, bias = np.empty(self.lo.shape), -self.lift(self.m)
        for i, axis in enumerate(self.lattice.axes):
            slopes[:, i], at_0 = axis.chords(self.lo[:, i], self.hi[:, i])
            bias += at_0
        return SoftHead(slopes, bias, np.zeros((self.count, 0)))

    def lift(self, m: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return (d−1)m²/12: half of the lift at which a leaf of size m beside leaves of size m/2 wins up to its face.

        In units of a cell φ is t²/2. Let the large leaf be centred at 0 and the small ones at (¾, ±¼, …)·m. At the
        middle of the face, t = (½, 0, …)·m, the scores are d·m²/8 − lift(m) and m²/8 − lift(m/2), equal for
        lift = (d−1)m²/6. Half of it needed the fewest leaves in practice. The bound holds for any lift.
        """
        return (self.d - 1) / 12 * np.asarray(m, np.float64) ** 2

    @cached_property
    def reach(self) -> Float[np.ndarray, "leaves d"]:
        """The largest |y| on the leaf.

        On axes of the second input 2L(scale·x + offset) is multiplied out, so the sizes of both parts count.
        """
        reach = np.maximum(np.abs(self.bottom), np.abs(self.top))
        reach[:, self.num_query_axes :] = self.lattice.size[self.num_query_axes :]
        return reach

    def size(self, keys: np.ndarray, reach: np.ndarray) -> Float[np.ndarray, " n"]:
        """Return the sum of the absolute values of the terms of a score, for these keys and |y| ≤ reach."""
        terms = np.abs(self.scores.slopes[keys]) * reach
        return np.asarray(terms.sum(axis=1) + np.abs(self.scores.offsets[keys]))

    @cached_property
    def largest_size(self) -> float:
        """The largest size of any score on the box."""
        return float(self.size(np.arange(self.count), self.reach.max(axis=0)[None]).max())

    @cached_property
    def relative_error(self) -> float:
        """The error of a score per unit of size: casts, products and sums of the program, and the sums made here."""
        u = UNIT_ROUNDOFF[self.lattice.dtype]
        return gamma(self.d + 12, u) + gamma(4 * self.d + 24, UNIT_ROUNDOFF["float64"])

    @cached_property
    def errors(self) -> Float[np.ndarray, " leaves"]:
        """The error of the score of each leaf minus the score of a similar neighbour, on the leaf."""
        return 2 * self.relative_error * self.size(np.arange(self.count), self.reach)

    def widened(self, gap: float) -> tuple[np.ndarray, np.ndarray]:
        """Estimate the regions on which the scores of leaves are within `gap` of the best, for equal neighbours."""
        share = np.minimum((gap + self.errors) / self.m.astype(np.float64) ** 2, 0.5)[:, None]
        width = share * (self.top - self.bottom)
        return self.bottom - width, self.top + width

    def split(self, which: np.ndarray) -> LatticeLeaves:
        """Return the leaves with these leaves halved along every axis."""
        half = self.m[which] // 2
        corners = np.array(list(itertools.product((0, 1), repeat=self.d)))
        lo = (self.lo[which][:, None] + half[:, None, None] * corners).reshape(-1, self.d)
        m = np.repeat(half, len(corners))
        inside = (lo < self.lattice.counts).all(axis=1)
        lo, m = np.concatenate([self.lo[~which], lo[inside]]), np.concatenate([self.m[~which], m[inside]])
        return replace(self, lo=lo, m=m)


@dataclass(frozen=True, eq=False)
class WinningPieces:
    """Boxes in y. Each holds all points of leaf j where k ≠ j can be near."""

    j: Int[np.ndarray, " n"]
    k: Int[np.ndarray, " n"]
    lo: Float[np.ndarray, "n d"]
    hi: Float[np.ndarray, "n d"]
    sizes: Float[np.ndarray, " n"]  # of the score of k there


def winning_pieces(leaves: LatticeLeaves, gap: float, keys: Int[np.ndarray, " keys"]) -> Iterator[WinningPieces]:
    """Yield, for these keys k, every place outside leaf k where the computed s_k is above the computed max s − gap.

    Proof.  Let y be in leaf j. Where s_k < s_j − gap − errors, k is not near. The difference is affine, so the rest
            of leaf j lies in a smaller box.
            Which leaves j are possible: Φ is convex, so s_j ≥ Φ − lift_j on leaf j. Where k is near,
            Φ − (sum of its chords) ≤ gap + lift_j − lift_k + errors. On each axis φ_i − chord ≥ −sag. So on one axis
            φ_i − chord is at most this right side plus the sags of the other axes. As φ_i − chord grows outward, y lies
            within `GradedAxis.reach`.
    """
    for j, k in _pairs(leaves, gap, keys):
        slope, rise = (part[k] - part[j] for part in (leaves.scores.slopes, leaves.scores.offsets))
        bottom, top, reach = leaves.bottom[j], leaves.top[j], leaves.reach[j]
        sizes = leaves.size(k, reach)
        errors = leaves.relative_error * (sizes + leaves.size(j, reach))
        most = np.maximum(slope * bottom, slope * top).sum(axis=1) + rise
        slack = (most + gap + errors) * (1 + 2.0**-30)
        near = slack >= 0
        slope, slack, bottom, top = slope[near], slack[near, None], bottom[near], top[near]
        with quiet():
            depth = up(slack / np.abs(slope))  # from the side of leaf j that is best for k; not used where slope is 0
        lo = np.where(slope > 0, np.maximum(bottom, -up(depth - top)), bottom)
        hi = np.where(slope < 0, np.minimum(top, up(bottom + depth)), top)
        yield WinningPieces(j[near], k[near], lo, hi, sizes[near])


def _pairs(leaves: LatticeLeaves, gap: float, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of pairs (j, k), j ≠ k. They contain every pair for which k can be near somewhere on leaf j."""
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
        first, last = np.stack(ends, axis=-1)
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


@dataclass(frozen=True, eq=False)
class Regions:
    """The ranges of f on R_k, the places where the score of leaf k is near the best, for some k."""

    keys: Int[np.ndarray, " keys"]
    cells: Interval  # in x, (keys, d): boxes around the R_k
    ranges: Interval  # (keys, outputs)
    near: int  # the largest number of these scores that can be near at one point
    size: float  # the largest size of a score that is near
    into_larger: tuple[np.ndarray, np.ndarray]  # (j, k): k is near on a part of leaf j, which is larger

    @property
    def radii(self) -> Float[np.ndarray, " keys"]:
        return np.asarray(((self.ranges.hi - self.ranges.lo) / 2).max(axis=1))


def regions(
    target: Target, leaves: LatticeLeaves, gap: float, enough: float, keys: Int[np.ndarray, " keys"]
) -> Regions:
    """Enclose f on the hull of leaf k and its pieces. If that is wider than 2·enough, enclose f on each of them."""
    lattice, low, high = leaves.lattice, leaves.bottom.copy(), leaves.top.copy()
    met, size = np.ones(leaves.count, np.int64), float(leaves.size(keys, leaves.reach[keys]).max())
    j_larger, k_larger = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for each in winning_pieces(leaves, gap, keys):
        check_time(PLACING)
        np.minimum.at(low, each.k, each.lo)
        np.maximum.at(high, each.k, each.hi)
        met += np.bincount(each.j, minlength=leaves.count)
        size = max(size, float(each.sizes.max(initial=0.0)))
        larger = leaves.m[each.j] > leaves.m[each.k]
        j_larger.append(each.j[larger])
        k_larger.append(each.k[larger])
    cells = lattice.preimage(low[keys], high[keys])
    ranges = target.enclosure(cells)
    wide = np.flatnonzero((ranges.hi - ranges.lo).max(axis=1) > 2 * enough)
    own = target.enclosure(lattice.preimage(leaves.bottom[keys[wide]], leaves.top[keys[wide]]))
    lo, hi = ranges.lo.copy(), ranges.hi.copy()
    lo[wide], hi[wide] = own.lo, own.hi
    place = np.zeros(leaves.count, np.int64)
    place[keys] = np.arange(len(keys))
    for each in winning_pieces(leaves, gap, keys[wide]):
        check_time(PLACING)
        found = target.enclosure(lattice.preimage(each.lo, each.hi))
        np.minimum.at(lo, place[each.k], found.lo)
        np.maximum.at(hi, place[each.k], found.hi)
    into_larger = np.concatenate(j_larger), np.concatenate(k_larger)
    return Regions(keys, cells, Interval(lo, hi), int(met.max()), size, into_larger)
