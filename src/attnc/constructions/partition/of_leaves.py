"""A partition into leaves of many sizes: what it makes of a target, and the proof of its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.partition.leaves import Leaves, winning_pieces
from attnc.constructions.partition.positions import Positions
from attnc.constructions.partition.selection import average_error, round_up, underflow
from attnc.constructions.partition.weights import Cells
from attnc.numerics.bound import Bound, Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, up
from attnc.targets.box import Box
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Regions:
    """What f is on R_k, the places where the score of leaf k is near the best, for some k."""

    keys: Int[np.ndarray, " keys"]
    cells: Interval  # in x, (keys, d): boxes around the R_k
    ranges: Interval  # (keys, outputs)
    near: int  # how many of these scores can be near in one point
    size: float  # the largest size of one that is near
    into_larger: tuple[np.ndarray, np.ndarray]  # (j, k): k is near on a part of leaf j, which is larger

    @property
    def radii(self) -> Float[np.ndarray, " keys"]:
        return np.asarray(((self.ranges.hi - self.ranges.lo) / 2).max(axis=1))


def regions(target: Target, leaves: Leaves, gap: float, enough: float, keys: Int[np.ndarray, " keys"]) -> Regions:
    """Of f on the hull of leaf k and its pieces; where that is wider than 2·enough, on each of them by itself."""
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
    leaves: Leaves
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
        by_position = self.values.reshape(self.leaves.count, self.positions.n, -1)
        return self.positions.undo_leak(by_position).reshape(self.leaves.count * self.positions.n, -1)

    @cached_property
    def bound(self) -> Bound:
        leaves, n, dtype = self.leaves, self.positions.n, self.leaves.lattice.dtype
        leak = min(1.0, 1.01 * (leaves.count - 1) * math.exp(-self.g))  # 1 %: exponentials are good to a few ulp
        stored, num_keys = self.stored_values, leaves.count * n
        variation = float(self.radii.max())
        all_values = np.concatenate([stored, self.values.reshape(num_keys, -1)])
        spread = float(np.ptp(all_values, axis=0).max()) + variation
        cast = float(np.abs(stored - stored.astype(dtype)).max())
        near = self.regions.near * n
        rounding = average_error(num_keys, near, leak, UNIT_ROUNDOFF[dtype]) * float(np.abs(stored).max())
        rounding += cast + underflow(num_keys, dtype)
        terms = [
            Term("variation", variation, f"half the range of f where a cell can win, the largest of {leaves.count:,}"),
            Term("leak", round_up(leak * spread), f"weight of all cells behind by g = {self.g:.3g} or more"),
        ]
        if n > 1:
            by_position = self.values.reshape(leaves.count, n, -1)
            off, undone = self.positions.residue(by_position, stored.reshape(by_position.shape))
            rounding += undone
            delta = leaves.relative_error * (self.beta * self.regions.size + self.positions.margin)
            wrong = math.expm1(2 * delta) if delta < 300 else math.inf
            terms.append(Term("position", round_up(wrong * off), "weights of other positions, not undone"))
        reason = f"{dtype} sums over {num_keys:,} keys in any order, {near} of them near"
        return Bound((*terms, Term("rounding", round_up(rounding), reason)))

    @property
    def worst_box(self) -> dict[str, tuple[float, float]]:
        cells, worst = self.regions.cells, int(np.argmax(self.radii))
        return Box(self.target.box.names, cells.lo[worst], cells.hi[worst]).as_dict()

    @property
    def cells(self) -> Cells:
        lattice, leaves = self.leaves.lattice, self.leaves
        return Cells(
            self.target,
            lattice.dtype,
            lattice.scale,
            lattice.offset,
            leaves.anchors,
            leaves.bias,
            self.beta,
            self.positions,
            self.stored_values,
        )

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        sizes = ", ".join(f"{count:,} of size {m}" for m, count in zip(*np.unique_counts(self.leaves.m), strict=True))
        return (("centres", "adaptive"), ("cells", self.leaves.count), ("sizes", sizes), ("beta", self.beta))
