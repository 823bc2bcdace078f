"""Max-affine partitions that are not grids: cells are small where the function varies, and large where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, require
from attnc.constructions.construction import Request, round_above
from attnc.constructions.fitting.cell_head import CellHead, NearestCentresBuilder
from attnc.constructions.fitting.grid_partition import check_cells
from attnc.constructions.fitting.leaves import GradedLattice, LatticeLeaves, Profile, profile, winning_pieces
from attnc.constructions.fitting.positions import Positions, bytes_per_anchor, num_positions
from attnc.constructions.fitting.search import Bracket
from attnc.constructions.fitting.selection import CellSelection, round_up, score_error
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.numerics.bound import Bound, Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Regions:
    """The ranges of f on R_k, the places where the score of leaf k is near the best, for some k."""

    keys: Int[np.ndarray, " keys"]
    cells: Interval  # in x, (keys, d): boxes around the R_k
    ranges: Interval  # (keys, outputs)
    near: int  # how many of these scores can be near in one point
    size: float  # the largest size of one that is near
    into_larger: tuple[np.ndarray, np.ndarray]  # (j, k): k is near on a part of leaf j, which is larger

    @property
    def radii(self) -> Float[np.ndarray, " keys"]:
        return np.asarray(((self.ranges.hi - self.ranges.lo) / 2).max(axis=1))


def regions(
    target: Target, leaves: LatticeLeaves, gap: float, enough: float, keys: Int[np.ndarray, " keys"]
) -> Regions:
    """Enclose f on the hull of leaf k and its pieces; if that is wider than 2·enough, on each of them by itself."""
    lattice, low, high = leaves.lattice, leaves.bottom.copy(), leaves.top.copy()
    met, size = np.ones(leaves.count, np.int64), float(leaves.size(keys, leaves.reach[keys]).max())
    j_larger, k_larger = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for each in winning_pieces(leaves, gap, keys):
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
        found = target.enclosure(lattice.preimage(each.lo, each.hi))
        np.minimum.at(lo, place[each.k], found.lo)
        np.maximum.at(hi, place[each.k], found.hi)
    into_larger = np.concatenate(j_larger), np.concatenate(k_larger)
    return Regions(keys, cells, Interval(lo, hi), int(met.max()), size, into_larger)


@dataclass(frozen=True, eq=False)
class AdaptivePartition:
    """Leaves with a value each, a temperature, and the proof of `bound`.

    Theorem.  Let R_k hold every x with score_k(x) > max_j score_j(x) − g, in the program's own arithmetic, and let v_k
              be the middle of an interval that holds f(R_k). Then
              |out − f| ≤ max_k radius of f(R_k) + (G−1)e^{−g}·spread + rounding.
    Proof.    All keys behind by g or more have together at most (G−1)e^{−g} of the weight of the best. Every other k
              has x in R_k, so |f(x) − v_k| ≤ radius of f(R_k): an average of such v_k is no farther off, whatever
              their weights. That is why neither ties nor errors of near scores matter. The R_k: `winning_pieces`.
    """

    target: Target
    leaves: LatticeLeaves
    regions: Regions
    beta: float
    g: float
    positions: Positions

    @cached_property
    def values(self) -> Float[np.ndarray, "leaves outputs"]:
        ranges = self.regions.ranges
        return np.where(ranges.is_bounded, ranges.mid, self.target(self.regions.cells.mid))

    @cached_property
    def radii(self) -> Float[np.ndarray, " leaves"]:
        ranges = self.regions.ranges
        return np.asarray(np.maximum(up(ranges.hi - self.values), up(self.values - ranges.lo)).max(axis=1))

    @cached_property
    def stored_values(self) -> Float[np.ndarray, "keys outputs_per_position"]:
        return self.positions.stored(self.values)

    @cached_property
    def bound(self) -> Bound:
        leaves, positions = self.leaves, self.positions
        leak = min(1.0, 1.01 * (leaves.count - 1) * math.exp(-self.g))  # 1 %: exponentials are good to a few ulp
        delta = leaves.relative_error * (self.beta * self.regions.size + positions.margin)
        selection = CellSelection(delta, leak, self.regions.near * positions.n)
        variation, stored = float(self.radii.max()), self.stored_values
        all_values = np.concatenate([stored, self.values.reshape(len(stored), -1)])
        spread = float(np.ptp(all_values, axis=0).max()) + variation
        terms = (
            Term("leak", leak * spread, f"weight of all cells behind by g = {self.g:.3g} or more"),
            *positions.value_terms(self.values, selection, leaves.lattice.dtype),
        )
        reason = f"half the range of f where a cell can win, the largest of {leaves.count:,}"
        rounded = (Term(t.name, round_up(t.value), t.reason) for t in terms)
        return Bound((Term("variation", variation, reason), *rounded))

    @property
    def worst_box(self) -> dict[str, tuple[float, float]]:
        cells, worst = self.regions.cells, int(np.argmax(self.radii))
        return Box(self.target.box.names, cells.lo[worst], cells.hi[worst]).as_dict()

    @property
    def head(self) -> CellHead:
        lattice, leaves = self.leaves.lattice, self.leaves
        cells = SoftHead(2 * leaves.anchors, leaves.bias, self.stored_values)
        return CellHead(self.target, lattice.dtype, lattice.scale, lattice.offset, cells, self.beta, self.positions)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        sizes = ", ".join(f"{count:,} of size {m}" for m, count in zip(*np.unique_counts(self.leaves.m), strict=True))
        return (("centres", "adaptive"), ("cells", self.leaves.count), ("sizes", sizes), ("beta", self.beta))


NOMINAL = 4
"""Lattice cells per side of the smallest planned leaf; repairs may go down to one."""
ETA = 1 / 128
"""The distance beyond the smallest leaf, in its widths, at which its score may still be near the best."""


def build_cells(target: Target, request: Request, name: str, program: Callable[[CellHead], Program]) -> Built:
    """Build on a grid of cells, or on cells of many sizes if request.centres is "adaptive"."""
    if request.centres not in (None, "grid", "adaptive"):
        raise InputError(f"centres must be 'grid' or 'adaptive', found {request.centres!r}")
    if request.centres == "adaptive":
        return build_adaptive(target, request, name, program)
    return NearestCentresBuilder(target, request, name, program).build()


def build_adaptive(target: Target, request: Request, name: str, program: Callable[[CellHead], Program]) -> Built:
    """An adaptive partition with bound ≤ eps as a program, or BoundNotMet."""
    check_cells(request)
    if request.eps is None or request.beta is not None:
        raise InputError("centres='adaptive' needs eps; it chooses the centres and beta itself, so leave those out")
    if request.p != math.inf:
        raise InputError(f"centres='adaptive' bounds the largest error: norm must be 'inf', found {request.p}")
    if not target.is_continuous:
        raise DomainError(f"{target.describe()} jumps: no bound on the largest error can be small")

    def build(partition: AdaptivePartition) -> Built:
        made = program(partition.head)
        return Built(made, name, partition.bound, partition.worst_box, partition.parameters)

    search = LeafSearch(target, request)
    try:
        partition = search.partition(request.eps)
    except _TooMany as reached:
        raise search.refusal(request.eps, reached, build) from None
    return require(build(partition), request.eps, target)


class _TooMany(Exception):
    """More cells than allowed are needed: about how many, and the accuracy within reach."""

    def __init__(self, needed: float, eps: float) -> None:
        self.needed, self.eps = needed, eps


@dataclass(frozen=True, eq=False)
class _Grown:
    leaves: LatticeLeaves
    worst: float  # the radius of f on leaves of the smallest planned size, but for the few that repairs may split
    planned: int  # how many leaves there are once those that do not do are split


class LeafSearch:
    """Chooses lattice and leaves for a target: everything here guides, and `AdaptivePartition.bound` proves."""

    def __init__(self, target: Target, request: Request) -> None:
        assert request.eps is not None
        self.target, self.request = target, request
        self.positions = Positions(num_positions(target), request.margin)
        n, d = self.positions.n, target.box.d
        self.limit = min(request.max_anchors, request.max_bytes // bytes_per_anchor(target)) // n
        if self.limit < 1:
            raise InputError(
                f"max_anchors={request.max_anchors:,} and max_bytes={request.max_bytes:,} do not allow even one cell"
            )
        places = np.random.default_rng(0).random((1000, d))
        largest = float(np.abs(target(target.box.lo + places * target.box.widths)).max())
        rounding = gamma(6 * n * 3**d + 16, UNIT_ROUNDOFF[request.dtype]) * largest
        self.share = 0.99 - min(0.2, rounding / request.eps)  # of eps, for the variation
        self.profiles: list[Profile] = [profile(target, axis, request.eps / d / 2) for axis in range(d)]
        self.num_query_axes = math.prod(target.input_shapes[0])

    def partition(self, eps: float) -> AdaptivePartition:
        """From coarse to fine: each halving of eps starts from the density that was enough for the one before."""
        d, factor, counts = self.target.box.d, 1.0, []
        halvings = max(0, math.ceil(math.log2(max(1.0, math.prod(self._needed(eps)))) / d) - 12 // d)
        for halving in reversed(range(halvings + 1)):
            coarse = eps * 2**halving
            grown, factor = self._fit(coarse, factor, is_coarse=halving > 0)
            counts.append(grown.leaves.count)
            rate = min(2.0**d, max(1.5, counts[-1] / counts[-2])) if len(counts) > 1 else 2.0**d
            needed = counts[-1] * rate**halving
            if counts[-1] > self.limit or (len(counts) > 1 and needed > 1.25 * self.limit):
                raise _TooMany(needed, coarse * (counts[-1] / (0.9 * self.limit)) ** (1 / d))
            if self.request.progress:
                self.request.progress("placing centres", 0.5**halving)
        sparser = (self._grow(eps, factor * share) for share in (0.84, 0.71, 0.6))
        return self._repair(min((grown, *sparser), key=lambda each: each.planned).leaves, eps)

    def _needed(self, eps: float) -> list[float]:
        """Cells per axis, if each axis gets an equal share of eps."""
        return [max(1.0, min(1e12, each.total * self.target.box.d / (2 * eps))) for each in self.profiles]

    def _fit(self, eps: float, factor: float, is_coarse: bool) -> tuple[_Grown, float]:
        """The sparsest lattice found whose smallest planned leaves do, and its factor over `_needed`."""
        bracket = Bracket()
        best: tuple[_Grown, float] | None = None
        for _ in range(12):
            grown = self._grow(eps, factor)
            if grown.worst <= self.share * eps:
                if best is None or grown.leaves.count <= best[0].leaves.count:
                    best = grown, factor
                if grown.worst >= 0.97 * self.share * eps or (is_coarse and grown.leaves.count < 64):
                    break
            ratio = grown.worst / (0.99 * self.share * eps) if math.isfinite(grown.worst) else 2.0
            factor = bracket.next(factor, grown.worst <= self.share * eps, min(2.0, max(ratio, 0.5)))
            if bracket.is_within(1.02):
                break
        return best if best is not None else (grown, factor)

    def _grow(self, eps: float, factor: float) -> _Grown:
        """Halves boxes, all that are too large at once, from the whole lattice down to the smallest planned size."""
        target, d = self.target, self.target.box.d
        counts = [NOMINAL * math.ceil(need * factor) for need in self._needed(eps)]
        lattice = GradedLattice.make(target.box, self.profiles, counts, self.request.dtype)
        m = 2 ** max(0, math.ceil(math.log2(lattice.counts.max())))
        level = LatticeLeaves(lattice, np.zeros((1, d), np.int64), np.array([m]), self.num_query_axes)
        done_lo, done_m = [], []
        while True:
            bounds = self._radii(lattice, *level.widened(ETA * NOMINAL**2))
            if m <= NOMINAL:
                break
            fits = bounds <= self.share * eps
            done_lo.append(level.lo[fits])
            done_m.append(level.m[fits])
            m //= 2
            level = LatticeLeaves(lattice, level.lo[~fits], level.m[~fits], self.num_query_axes)
            level = level.split(np.ones(level.count, bool))
            if sum(map(len, done_m)) + level.count > 2 * self.limit or level.count == 0:
                bounds = np.zeros(level.count)
                break
        lo, sizes = np.concatenate([*done_lo, level.lo]), np.concatenate([*done_m, level.m])
        leaves = LatticeLeaves(lattice, lo, sizes, self.num_query_axes)
        few = int(0.02 * leaves.count / (2**d - 1))
        worst = float(np.sort(bounds)[-1 - few]) if few < len(bounds) else 0.0
        return _Grown(leaves, worst, leaves.count + (2**d - 1) * int(np.count_nonzero(bounds > self.share * eps)))

    def _radii(self, lattice: GradedLattice, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        found = self.target.enclosure(lattice.preimage(lo, hi))
        return np.asarray(((found.hi - found.lo) / 2).max(axis=1))

    def _repair(self, leaves: LatticeLeaves, eps: float) -> AdaptivePartition:
        """Splits leaves until all regions do: a leaf that wins too much of a larger one has that one split.

        After a split only the new leaves and those that won some of the old ones are checked; at the end all are.
        """
        keys = np.arange(leaves.count)
        while True:
            made = self._select(leaves, eps, keys)
            which, touched = self._to_split(made.leaves, made.regions, eps)
            if not which.any():
                if len(keys) == leaves.count:
                    return made
                keys = np.arange(leaves.count)
                continue
            leaves = leaves.split(which)
            num_kept = int(np.count_nonzero(~which))  # these come first, in their old order
            kept = (np.cumsum(~which) - 1)[touched & ~which]
            keys = np.concatenate([kept, np.arange(num_kept, leaves.count)])
            if leaves.count > self.limit:
                raise _TooMany(leaves.count, 1.1 * eps)

    def _to_split(self, leaves: LatticeLeaves, found: Regions, eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Which leaves to split, and which others win a part of those."""
        bad, has_larger, which, touched = np.zeros((4, leaves.count), bool)
        bad[found.keys] = found.radii > self.share * eps
        j, k = found.into_larger
        has_larger[k] = True
        which[j[bad[k]]] = True
        # Where rounding blurs the borders by more than 5 % of a leaf, halves would be worse.
        which |= bad & ~has_larger & (leaves.m > 1) & (leaves.errors < 0.05 * leaves.m.astype(np.float64) ** 2)
        touched[k[which[j]]] = True
        return which, touched

    def _select(self, leaves: LatticeLeaves, eps: float, keys: np.ndarray) -> AdaptivePartition:
        """β: a power of two, so that 2βL is exact, with which a lead of g is reached ETA beyond the smallest leaf."""
        values = self.target(leaves.lattice.preimage(leaves.bottom, leaves.top).mid)
        spread = float(np.ptp(values, axis=0).max()) + 2 * eps
        harm = spread + 5 * float(np.abs(values).max())  # of one unit of leak: see `selection.average_error`
        g = math.log(max(2.0, leaves.count * harm / (0.002 * eps)))
        beta = 2.0 ** math.ceil(math.log2(g / (ETA * float(leaves.m.min()) ** 2)))
        most = beta * leaves.largest_size + self.positions.margin
        score_error(leaves.d, most, UNIT_ROUNDOFF[self.request.dtype])  # refuses scores that overflow
        gap = (g + 2 * leaves.relative_error * self.positions.margin) / beta
        found = regions(self.target, leaves, gap, self.share * eps, keys)
        return AdaptivePartition(self.target, leaves, found, beta, g, self.positions)

    def refusal(self, eps: float, reached: _TooMany, build: Callable[[AdaptivePartition], Built]) -> BoundNotMet:
        """The refusal with the anchors that eps needs and the bound within reach; its network is built on demand."""
        target, request = self.target, self.request
        bound = max(reached.eps, 1.01 * eps)

        def best() -> Built:
            goal = bound
            while True:
                try:
                    return build(self.partition(goal))
                except _TooMany:
                    goal *= 1.2

        return BoundNotMet(
            f"cannot bring the bound to eps={eps:g} for {target.describe()} on {target.box} with adaptive centres: it "
            f"needs about {self.positions.n * reached.needed:,.0f} anchors, more than max_anchors="
            f"{request.max_anchors:,} and max_bytes={request.max_bytes:,} allow. Within the limit "
            f"({self.limit:,} centres) the bound is about {bound:.3g}. Choose eps ≥ {round_above(bound):.2g}, a "
            "smaller box, or raise max_anchors and max_bytes.",
            eps=eps,
            bound=bound,
            worst_box=target.box.as_dict(),
            build=best,
        )
