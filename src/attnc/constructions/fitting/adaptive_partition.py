"""Max-affine partitions that are not grids: cells are small where the function varies, and large where it does not.

`AdaptivePartition` has the bound. `LeafSearch` chooses the lattice and the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.constructions.built import Built, require, too_many_anchors
from attnc.constructions.construction import Construction, Estimate, Request, Requirement, refuse
from attnc.constructions.fitting.cell_head import CellHead
from attnc.constructions.fitting.grid_partition import CELL_CONDITIONS, check_cells
from attnc.constructions.fitting.lattice_leaves import (
    PLACING,
    GradedLattice,
    LatticeLeaves,
    Profile,
    Regions,
    profile,
    regions,
)
from attnc.constructions.fitting.nearest_centres import NearestCentresBuilder
from attnc.constructions.fitting.search import Bracket
from attnc.constructions.fitting.selection import CellSelection, Positions, allowed_anchors, positions_of, score_error
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound, Term
from attnc.numerics.limits import check_time
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

NOMINAL = 4
"""Lattice cells per side of the smallest planned leaf. Repairs may split it down to one cell. Measured with two
functions: 2 and 8 take as many cells."""
ETA = 1 / 128
"""The distance beyond the smallest leaf, in its widths, at which its score may be near the best. As CELL_OVERHANG."""


@dataclass(frozen=True, eq=False)
class AdaptivePartition:
    """Leaves with a value each, a temperature, and the proof of `bound`.

    Theorem.  Let R_k hold every x with score_k(x) > max_j score_j(x) − g, in the program's own arithmetic, and let v_k
              be the middle of an interval that holds f(R_k). Then
              |out − f| ≤ max_k radius of f(R_k) + (G−1)e^{−g}·spread + rounding.
    Proof.    All keys behind by g or more have together at most (G−1)e^{−g} times the weight of the best. Every other k
              has x in R_k, so |f(x) − v_k| ≤ radius of f(R_k). An average of such v_k is no farther off, whatever
              their weights, so neither ties nor errors of near scores matter. `winning_pieces` finds the R_k.
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
    def bound(self) -> Bound:
        leaves, positions = self.leaves, self.positions
        leak = min(1.0, 1.01 * (leaves.count - 1) * math.exp(-self.g))  # 1 %: exponentials are good to a few ulp
        delta = leaves.relative_error * (self.beta * self.regions.size + positions.margin)
        selection = CellSelection(delta, leak, self.regions.near * positions.n)
        variation, stored = float(self.radii.max()), positions.stored(self.values)
        all_values = np.concatenate([stored, self.values.reshape(len(stored), -1)])
        spread = float(np.ptp(all_values, axis=0).max()) + variation
        leaked = Term("leak", leak * spread, f"weight of all cells behind by g = {self.g:.3g} or more")
        reason = f"half the range of f where a cell can win, largest of {leaves.count:,} cells"
        terms = [Term("variation", variation, reason)]
        return positions.bound(terms, leaked, self.values, selection, leaves.lattice.dtype)

    @property
    def worst_box(self) -> dict[str, tuple[float, float]]:
        cells, worst = self.regions.cells, int(np.argmax(self.radii))
        return Box(self.target.box.names, cells.lo[worst], cells.hi[worst]).as_dict()

    @property
    def head(self) -> CellHead:
        lattice, leaves = self.leaves.lattice, self.leaves
        cells = replace(leaves.scores, values=self.positions.stored(self.values))
        return CellHead(self.target, lattice.dtype, lattice.scale, lattice.offset, cells, self.beta, self.positions)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        sizes = ", ".join(f"{count:,} of size {m}" for m, count in zip(*np.unique_counts(self.leaves.m), strict=True))
        return (("centres", "adaptive"), ("cells", self.leaves.count), ("sizes", sizes), ("beta", self.beta))


def cell_construction(
    name: str,
    program: Callable[[CellHead], Program],
    conditions: tuple[Requirement, ...],
    suits: Callable[[Target, Request], bool],
) -> Construction:
    """Return the construction whose head selects a cell of a grid, or of many sizes for centres="adaptive"."""

    def build(target: Target, request: Request) -> Built:
        refuse(name, target, request, *conditions)
        if request.centres not in (None, "grid", "adaptive"):
            raise InputError(f"centres must be 'grid' or 'adaptive', found {request.centres!r}")
        if request.centres != "adaptive":
            return NearestCentresBuilder(target, request, name, program).build()
        check_cells(request)
        if request.eps is None or request.beta is not None:
            raise InputError("centres='adaptive' needs eps; it chooses the centres and beta itself, so leave those out")
        if request.p != math.inf:
            raise InputError(f"centres='adaptive' bounds the largest error: norm must be 'inf', found {request.p}")
        if not target.is_continuous:
            raise DomainError(f"{target.describe()} jumps, so no bound on its largest error can be small")
        return require(LeafSearch(target, request, name, program).build(request.eps), request.eps, target)

    def estimate(target: Target, request: Request) -> Estimate:
        return NearestCentresBuilder(target, request, name, program).estimate()

    options = frozenset({"centres", "norm", "beta", "points_per_axis"})
    return Construction(name, build, (*conditions, *CELL_CONDITIONS), suits, estimate, options)


@dataclass(frozen=True, eq=False)
class _Grown:
    leaves: LatticeLeaves
    worst: float  # the largest radius of f on leaves of the smallest planned size, without the few for repairs
    planned: int  # the number of leaves after those that are too coarse are split


class LeafSearch:
    """Chooses lattice and leaves for a target. Nothing here is proved: `AdaptivePartition.bound` has the proof."""

    def __init__(self, target: Target, request: Request, name: str, program: Callable[[CellHead], Program]) -> None:
        self.target, self.request, self.name, self.program = target, request, name, program
        self.positions = positions_of(target, request)
        n, d = self.positions.n, target.box.d
        self.limit = allowed_anchors(target, request) // n
        if self.limit < 1:
            raise InputError(
                f"max_anchors={request.max_anchors:,} and max_bytes={request.max_bytes:,} do not allow even one cell"
            )
        places = np.random.default_rng(0).random((1000, d))
        largest = float(np.abs(target(target.box.lo + places * target.box.widths)).max())
        rounding = gamma(6 * n * 3**d + 16, UNIT_ROUNDOFF[request.dtype]) * largest
        self.share = 0.99 - min(0.2, rounding / request.goal)  # the share of eps for the variation
        self.profiles: list[Profile] = [profile(target, axis, request.goal / d / 2) for axis in range(d)]
        self.num_query_axes = math.prod(target.input_shapes[0])

    def build(self, eps: float) -> Built:
        made = self.partition(eps)
        return Built(self.program(made.head), self.name, made.bound, made.worst_box, made.parameters)

    def partition(self, eps: float) -> AdaptivePartition:
        """Return the partition for eps, from coarse to fine. Each halving of eps starts from the last density."""
        d, factor, counts = self.target.box.d, 1.0, []
        halvings = max(0, math.ceil(math.log2(max(1.0, math.prod(self._needed(eps)))) / d) - 12 // d)
        for halving in reversed(range(halvings + 1)):
            coarse = eps * 2**halving
            grown, factor = self._fit(coarse, factor, is_coarse=halving > 0)
            counts.append(grown.leaves.count)
            rate = min(2.0**d, max(1.5, counts[-1] / counts[-2])) if len(counts) > 1 else 2.0**d
            needed = counts[-1] * rate**halving
            if counts[-1] > self.limit or (len(counts) > 1 and needed > 1.25 * self.limit):
                raise self._too_many(needed, coarse * (counts[-1] / (0.9 * self.limit)) ** (1 / d))
            self.request.report(PLACING, 0.5**halving)
        sparser = (self._grow(eps, factor * share) for share in (0.84, 0.71, 0.6))
        return self._repair(min((grown, *sparser), key=lambda each: each.planned).leaves, eps)

    def _needed(self, eps: float) -> list[float]:
        """Return the cells per axis if each axis gets an equal share of eps."""
        return [max(1.0, min(1e12, each.total * self.target.box.d / (2 * eps))) for each in self.profiles]

    def _fit(self, eps: float, factor: float, is_coarse: bool) -> tuple[_Grown, float]:
        """Return the sparsest lattice found with small enough planned leaves, and its factor over `_needed`."""
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
        """Halve boxes from the whole lattice down to the smallest planned size, all that are too large at once."""
        target, d = self.target, self.target.box.d
        counts = [NOMINAL * math.ceil(need * factor) for need in self._needed(eps)]
        lattice = GradedLattice.make(target.box, self.profiles, counts, self.request.dtype)
        m = 2 ** max(0, math.ceil(math.log2(lattice.counts.max())))
        level = LatticeLeaves(lattice, np.zeros((1, d), np.int64), np.array([m]), self.num_query_axes)
        done_lo, done_m = [], []
        while True:
            check_time(PLACING)
            found = target.enclosure(lattice.preimage(*level.widened(ETA * NOMINAL**2)))
            bounds = ((found.hi - found.lo) / 2).max(axis=1)
            if m <= NOMINAL:
                break
            fits = bounds <= self.share * eps
            done_lo.append(level.lo[fits])
            done_m.append(level.m[fits])
            m //= 2
            level = replace(level, lo=level.lo[~fits], m=level.m[~fits])
            level = level.split(np.ones(level.count, bool))
            if sum(map(len, done_m)) + level.count > 2 * self.limit or level.count == 0:
                bounds = np.zeros(level.count)
                break
        leaves = replace(level, lo=np.concatenate([*done_lo, level.lo]), m=np.concatenate([*done_m, level.m]))
        few = int(0.02 * leaves.count / (2**d - 1))
        worst = float(np.sort(bounds)[-1 - few]) if few < len(bounds) else 0.0
        return _Grown(leaves, worst, leaves.count + (2**d - 1) * int(np.count_nonzero(bounds > self.share * eps)))

    def _repair(self, leaves: LatticeLeaves, eps: float) -> AdaptivePartition:
        """Split leaves until f varies little enough on all regions. If one wins too much of a larger leaf, split that.

        After a split, check only the new leaves and those that won a part of the old ones. At the end check all.
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
                raise self._too_many(leaves.count, 1.1 * eps)

    def _to_split(self, leaves: LatticeLeaves, found: Regions, eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Return which leaves to split, and which others win a part of those."""
        bad, has_larger, which, touched = np.zeros((4, leaves.count), bool)
        bad[found.keys] = found.radii > self.share * eps
        j, k = found.into_larger
        has_larger[k] = True
        which[j[bad[k]]] = True
        # Where rounding moves the borders by more than 5 % of a leaf, do not split: halves would be worse.
        which |= bad & ~has_larger & (leaves.m > 1) & (leaves.errors < 0.05 * leaves.m.astype(np.float64) ** 2)
        touched[k[which[j]]] = True
        return which, touched

    def _select(self, leaves: LatticeLeaves, eps: float, keys: np.ndarray) -> AdaptivePartition:
        """Choose β so that the lead is g at the distance ETA beyond the smallest leaf. A power of two has exact 2βL."""
        values = self.target(leaves.lattice.preimage(leaves.bottom, leaves.top).mid)
        spread = float(np.ptp(values, axis=0).max()) + 2 * eps
        harm = spread + 5 * float(np.abs(values).max())  # the error per unit of leak: see `selection.average_error`
        g = math.log(max(2.0, leaves.count * harm / (0.002 * eps)))
        beta = 2.0 ** math.ceil(math.log2(g / (ETA * float(leaves.m.min()) ** 2)))
        most = beta * leaves.largest_size + self.positions.margin
        score_error(leaves.d, most, UNIT_ROUNDOFF[self.request.dtype])  # refuses scores that overflow
        gap = (g + 2 * leaves.relative_error * self.positions.margin) / beta
        found = regions(self.target, leaves, gap, self.share * eps, keys)
        return AdaptivePartition(self.target, leaves, found, beta, g, self.positions)

    def _too_many(self, needed: float, reachable: float) -> BoundNotMet:
        """Return the refusal, with the cells that eps needs and the reachable bound. Its network is built on demand."""
        request = self.request
        bound = max(reachable, 1.01 * request.goal)

        def best() -> Built:
            goal = bound
            while True:
                try:
                    return self.build(goal)
                except BoundNotMet:
                    goal *= 1.2

        limit = f"max_anchors={request.max_anchors:,} and max_bytes={request.max_bytes:,}"
        anchors = f"about {self.positions.n * needed:,.0f} anchors"
        box = self.target.box.as_dict()
        return too_many_anchors(self.target, request.goal, "adaptive centres", anchors, limit, bound, box, best)
