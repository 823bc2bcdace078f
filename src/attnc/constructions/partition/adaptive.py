"""Max-affine partitions that are not grids: cells are small where the function varies, and large where it does not.

Here their places are searched for; what is proved of them is in `of_leaves`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnc.constructions.built import Built, require
from attnc.constructions.limits import bytes_per_anchor
from attnc.constructions.partition.lattice import Lattice, Profile, profile
from attnc.constructions.partition.leaves import Leaves
from attnc.constructions.partition.of_leaves import AdaptivePartition, Regions, regions
from attnc.constructions.partition.positions import Positions, num_positions
from attnc.constructions.partition.request import Request
from attnc.constructions.partition.selection import score_error
from attnc.constructions.partition.weights import Cells
from attnc.constructions.unary.request import round_above
from attnc.errors import BoundNotMet, DomainError, InputError
from attnc.ir.program import Program
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma
from attnc.targets.target import Target

NOMINAL = 4
"""The lattice cells on a side of the smallest leaf that is planned; repairs may go down to one."""
ETA = 1 / 128
"""How far beyond the smallest leaf its score may still be near the best, in widths of it."""


def check_centres(centres: str) -> None:
    if centres not in ("grid", "adaptive"):
        raise InputError(f"centres must be 'grid' or 'adaptive', found {centres!r}")


def build_adaptive(target: Target, request: Request, name: str, program: Callable[[Cells], Program]) -> Built:
    """An adaptive partition with bound ≤ eps as a program, or BoundNotMet."""
    if request.eps is None or request.beta is not None:
        raise InputError("centres='adaptive' needs eps; it chooses the centres and beta itself, so leave those out")
    if request.p != math.inf:
        raise InputError(f"centres='adaptive' bounds the largest error: norm must be 'inf', found {request.p}")
    if not target.is_continuous:
        raise DomainError(f"{target.describe()} jumps: no bound on the largest error can be small")

    def build(partition: AdaptivePartition) -> Built:
        made = program(partition.cells)
        return Built(made, name, partition.bound, partition.worst_box, partition.parameters)

    search = Search(target, request)
    try:
        partition = search.partition(request.eps)
    except _TooMany as reached:
        raise search.refusal(request.eps, reached, build) from None
    return require(build(partition), request.eps, target)


class _TooMany(Exception):
    """More cells than allowed are needed: about how many, and what accuracy is within reach."""

    def __init__(self, needed: float, eps: float) -> None:
        self.needed, self.eps = needed, eps


@dataclass(frozen=True, eq=False)
class _Grown:
    leaves: Leaves
    worst: float  # the radius of f on leaves of the smallest planned size, but for the few that repairs may split
    planned: int  # how many leaves there are once those that do not do are split


class Search:
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
        self.share = 0.99 - min(0.2, rounding / request.eps)  # what the variation may use of eps
        self.profiles: list[Profile] = [profile(target, axis, request.eps / d / 2) for axis in range(d)]
        self.num_query_axes = math.prod(target.input_shapes[0])

    def partition(self, eps: float) -> AdaptivePartition:
        """From coarse to fine: each halving of eps starts from the density that served the one before."""
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
        """Cells an axis, if each axis gets an equal share of eps."""
        return [max(1.0, min(1e12, each.total * self.target.box.d / (2 * eps))) for each in self.profiles]

    def _fit(self, eps: float, factor: float, is_coarse: bool) -> tuple[_Grown, float]:
        """The sparsest lattice found whose smallest planned leaves do, and its factor over `_needed`."""
        misses, meets = 0.0, math.inf
        best: tuple[_Grown, float] | None = None
        for _ in range(12):
            grown = self._grow(eps, factor)
            if grown.worst <= self.share * eps:
                meets = factor
                if best is None or grown.leaves.count <= best[0].leaves.count:
                    best = grown, factor
                if grown.worst >= 0.97 * self.share * eps or (is_coarse and grown.leaves.count < 64):
                    break
            else:
                misses = factor
            if misses > 0 and meets / misses < 1.02:
                break
            if misses > 0 and meets < math.inf:
                factor = math.sqrt(misses * meets)
            else:
                ratio = grown.worst / (0.99 * self.share * eps) if math.isfinite(grown.worst) else 2.0
                factor *= min(2.0, max(ratio, 0.5))
        return best if best is not None else (grown, factor)

    def _grow(self, eps: float, factor: float) -> _Grown:
        """Halves boxes, all that are too large at once, from the whole lattice down to the smallest planned size."""
        target, d = self.target, self.target.box.d
        counts = [NOMINAL * math.ceil(need * factor) for need in self._needed(eps)]
        lattice = Lattice.make(target.box, self.profiles, counts, self.request.dtype)
        m = 2 ** max(0, math.ceil(math.log2(lattice.counts.max())))
        level = Leaves(lattice, np.zeros((1, d), np.int64), np.array([m]), self.num_query_axes)
        done_lo, done_m = [], []
        while True:
            bounds = self._radii(lattice, *level.widened(ETA * NOMINAL**2))
            if m <= NOMINAL:
                break
            fits = bounds <= self.share * eps
            done_lo.append(level.lo[fits])
            done_m.append(level.m[fits])
            m //= 2
            level = Leaves(lattice, level.lo[~fits], level.m[~fits], self.num_query_axes)
            level = level.split(np.ones(level.count, bool))
            if sum(map(len, done_m)) + level.count > 2 * self.limit or level.count == 0:
                bounds = np.zeros(level.count)
                break
        lo, sizes = np.concatenate([*done_lo, level.lo]), np.concatenate([*done_m, level.m])
        leaves = Leaves(lattice, lo, sizes, self.num_query_axes)
        few = int(0.02 * leaves.count / (2**d - 1))
        worst = float(np.sort(bounds)[-1 - few]) if few < len(bounds) else 0.0
        return _Grown(leaves, worst, leaves.count + (2**d - 1) * int(np.count_nonzero(bounds > self.share * eps)))

    def _radii(self, lattice: Lattice, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        found = self.target.enclosure(lattice.preimage(lo, hi))
        return np.asarray(((found.hi - found.lo) / 2).max(axis=1))

    def _repair(self, leaves: Leaves, eps: float) -> AdaptivePartition:
        """Splits leaves until all regions do: a leaf that wins too much of a larger one has that one split.

        After a split only what is new and what won some of the old is looked at; at the end everything is.
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

    def _to_split(self, leaves: Leaves, found: Regions, eps: float) -> tuple[np.ndarray, np.ndarray]:
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

    def _select(self, leaves: Leaves, eps: float, keys: np.ndarray) -> AdaptivePartition:
        """β: a power of two, so that 2βL is exact, with which a lead of g is reached ETA beyond the smallest leaf."""
        values = self.target(leaves.lattice.preimage(leaves.bottom, leaves.top).mid)
        spread = float(np.ptp(values, axis=0).max()) + 2 * eps
        harm = spread + 5 * float(np.abs(values).max())  # of one unit of leak: see `selection.average_error`
        g = math.log(max(2.0, leaves.count * harm / (0.002 * eps)))
        beta = 2.0 ** math.ceil(math.log2(g / (ETA * float(leaves.m.min()) ** 2)))
        most = beta * leaves.largest_size + self.positions.margin
        score_error(leaves.d, most, UNIT_ROUNDOFF[self.request.dtype])  # refuses what the arithmetic cannot hold
        gap = (g + 2 * leaves.relative_error * self.positions.margin) / beta
        found = regions(self.target, leaves, gap, self.share * eps, keys)
        return AdaptivePartition(self.target, leaves, found, beta, g, self.positions)

    def refusal(self, eps: float, reached: _TooMany, build: Callable[[AdaptivePartition], Built]) -> BoundNotMet:
        """What eps needs, and what can be reached; the network for that is searched for when it is asked for."""
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
