"""Selection by a softmax: the weight of far centres on a lattice of spacing 1, with rounding, and output positions.

A score bonus separates the positions in one head, and the stored values undo the leak between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.constructions.construction import Request
from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound, Term
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, gamma
from attnc.targets.target import Target


@dataclass(frozen=True)
class CellSelection:
    """The quality of a softmax over cells that selects the widened cells that hold x."""

    delta: float  # the largest error of a score
    leak: float  # the weight of all other cells, with score errors
    near: int  # the largest number of keys whose widened cells hold x


def far_weight(beta: float, rho: float, count: int, delta: float = 0.0, overhang: float = 0.0) -> float:
    """Bound the weight, on one axis of `count` centres, of all centres farther than rho ≥ ½ from y.

    Let r be the distance of y to the nearest centre. Scores are −β·dist² up to a constant, each off by at most δ. Take
    a far centre, n steps from the nearest one. On the other side of y its score is lower by
    β(dist² − r²) = βn(dist − r) ≥ βn·max(n − 1 − 2·overhang, 2ρ − n), since r ≤ ½ + overhang if y has a centre on that
    side, and dist > ρ. On the same side it is lower by βn(n + 2r) ≥ βn·max(n, 2ρ − n) for every r. Errors of δ in two
    scores cost a factor e^{2δ}.
    """
    if count == 1:
        return 0.0
    n = np.arange(1, count, dtype=np.float64)
    with quiet():
        other_side = beta * n * np.maximum(n - 1 - 2 * overhang, 2 * rho - n)
        same_side = beta * n * np.maximum(n, 2 * rho - n)
        total = float((np.exp(2 * delta - other_side) + np.exp(2 * delta - same_side)).sum())
    return min(1.0, round_up(total))


def score_error(num_terms: int, size: float, u: float) -> float:
    """Return δ: a bound on the error of a computed score minus the computed maximum.

    A score is a sum of `num_terms` products whose absolute values sum to at most `size`. Each product has at most two
    roundings (the key's projection and the product), and the sum has one per term, in any order: γ_{num_terms+2}. The
    difference from the maximum is at most 2·size and is rounded. Weights are exact to K = ENGINE_ULPS, at most
    2Ku, and the bound has twice that: 2u·size + 4Ku.
    """
    dtype = next(name for name, unit in UNIT_ROUNDOFF.items() if unit == u)
    largest = float(np.finfo(dtype).max)
    if not size < largest / 8:
        raise InputError(
            f"scores reach {size:.3g}, more than the arithmetic holds ({largest:.3g}): choose a smaller beta"
        )
    return round_up(gamma(num_terms + 2, u) * size + 2 * u * size + 4 * ENGINE_ULPS[dtype] * u)


def average_error(num_keys: int, num_near: int, far: float, u: float) -> float:
    """Bound the rounding of Σ w_k v_k / Σ w_k, relative to max |v|, for sums over num_keys terms in any order.

    It is at most γ_{2·num_keys + 16}: products, the division and projections have fewer than 16 roundings. But rounding
    a + b costs at most min(|a|, |b|), so adding a sum of far terms to a near term costs at most that sum. Hence only
    additions of near terms count. The far terms add twice their weight to the numerator and twice to the denominator.
    """
    plain = gamma(2 * num_keys + 16, u)
    if far > 0.01:  # the 5 below is 4, and 1 for the terms of second order in `far`
        return plain
    return min(plain, gamma(2 * num_near + 16, u) + 5 * far)


def underflow(num_keys: int, dtype: str) -> float:
    """Bound the error that γ does not cover. Results below the least normal number may be taken for zero."""
    return (4 * num_keys + 16) * float(np.finfo(dtype).smallest_normal)


def round_up(x: float) -> float:
    """Return x·(1 + 2⁻³⁰), which covers the roundings of a short formula or a sum of positive numbers that gave x."""
    return x * (1 + 2.0**-30)


def mean_distance(beta: float, count: int, delta: float = 0.0) -> float:
    """Return κ: a bound, for every real y, on the softmax-weighted average distance of the centres from clip(y).

    The lattice has `count` centres L_k of spacing 1. Weights are ∝ exp(−β(y − L_k)²), and each score is off by at most
    δ. clip(y) is y truncated to the lattice. So |Σ w_k L_k − clip(y)| ≤ κ, and κ → ½ as β grows.

    Between two centres let r ≤ ½ be the distance to the nearest, and divide all weights by its weight. The nearest
    contributes r − ½ to (average − ½), the second at most (½ − r)·e^{−β(1−2r)}, and each other centre n + r − ½ or
    n − r − ½ times e^{−βn(n±2r)}. This depends on r alone. It is bounded on many pieces of [0, ½] by their ends.
    A score error multiplies a ratio of weights by e^{2δ}. The first two terms, divided by their own weights, are then
    (½ − r)·tanh(δ − β(½ − r)) at most: positive only for ½ − r < δ/β, so at most δ/β.
    Beyond an end at distance r, the average distance to that end is at most Σ n e^{−βn²}.
    """
    if count == 1 or beta < 0.01:
        return float(count - 1)  # the width of the lattice; for a β this small there is hardly a better bound
    n = np.arange(1, min(count, 2 + int(np.sqrt((750 + 2 * delta) / beta))), dtype=np.float64)[:, None]
    edges = np.linspace(0.0, 0.5, 1 + (1024 if len(n) < 100 else 64))
    lo, hi = edges[:-1], edges[1:]
    with quiet():
        same_side = ((n + hi - 0.5) * np.exp(2 * delta - beta * n * (n + 2 * lo))).sum(axis=0)
        other = np.maximum(n[1:] - lo - 0.5, 0.0) * np.exp(2 * delta - beta * n[1:] * (n[1:] - 2 * hi))
        pair = -(0.5 - hi) * -np.expm1(np.minimum(0.0, 2 * delta - beta * (1 - 2 * hi)))
        beyond_end = float((n * np.exp(2 * delta - beta * n * n)).sum())
    excess = float((pair + same_side + other.sum(axis=0)).max())
    left_out = 1e-300 if len(n) + 1 < count else 0.0  # terms with βn² > 750 + 2δ: their sum is below this
    return min(float(count - 1), round_up(max(0.5 + max(0.0, excess) + delta / beta, beyond_end) + left_out))


def mean_error(beta: float, count: int, delta: float = 0.0) -> float:
    """Bound |Σ w_k L_k − clip(y)| for every real y, in the setting of `mean_distance`.

    At moderate β the centres on both sides of y balance each other, and the error is far below ½: 0.062 at β = 2.7.
    E(y) = Σ w_k L_k has E′ = 2β·Var, so |E − y| has slope at most max(1, 2β·Var − 1). So its maximum exceeds the
    maximum over samples by at most this slope times half a step. Samples go from one end to 2K + 1 steps inside with
    K = √(40/β) + 2. Elsewhere the lattice looks the same up to weights of e^{−40}. Beyond an end E is monotone in y, so
    it is closer to the end than E at the end. A score error multiplies weights by e^{±2δ}.
    """
    coarse = mean_distance(beta, count, delta)
    if count == 1 or beta > 64 or beta < 0.05:
        return coarse  # a large β gains nothing here, and a small β is of no use
    K = int(np.sqrt(40 / beta)) + 2
    num_seen, is_cut = min(count, 4 * K + 2), count > 4 * K + 2
    # Between neighbouring centres there are `steps` samples at the same distances t from the left one. So a centre m
    # steps to the left of it is m + t from the sample, and all samples together need few exponentials.
    steps, gaps = 4096, min(num_seen - 1, 2 * K + 1)
    m = np.arange(-num_seen, gaps + 1)
    off = m[:, None] + np.arange(steps) / steps
    weights = np.exp(-beta * off**2)
    number = np.arange(gaps + 1)[:, None] - m  # of the centre that is m steps to the left of a sample in each gap
    is_seen = (number >= 0) & (number < num_seen)
    total, first, second = (is_seen.astype(np.float64) @ part for part in (weights, weights * off, weights * off**2))
    total, first, second = (np.append(part[:-1].ravel(), part[-1, 0]) for part in (total, first, second))
    error, second_moment = float(np.abs(first / total).max()), float((second / total).max())
    # Between samples, half a step apart, ratios of weights of centres within K of y change by e^{±4βK/(2·steps)}.
    slope = max(1.0, 2 * beta * second_moment * float(np.exp(4 * beta * K / steps)) + 1e-9)
    perturbed = np.expm1(2 * delta) * (coarse + error)  # × Σ w|L − E| ≤ Σ w|L − y| + |y − E|
    unseen = 4 * count * np.exp(-40.0) if is_cut else 0.0
    return min(coarse, round_up(error + slope / (2 * steps) + float(perturbed) + float(unseen) + 2.0**-40))


@dataclass(frozen=True)
class Positions:
    """n output positions, separated by a score bonus of M; a = e^M − 1.

    The weights of a query at position i over the positions of the keys are row i of C = (aI + 11ᵀ)/(a + n). So the
    stored values C⁻¹f return f exactly, for every M > 0.
    """

    n: int
    M: float

    @property
    def a(self) -> float:
        return math.expm1(self.M)

    @property
    def margin(self) -> float:
        return self.M if self.n > 1 else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The channels of the positions; none for a single position."""
        return tuple(f"position.{i}" for i in range(self.n)) if self.n > 1 else ()

    def stored(self, values: Float[np.ndarray, "cells outputs"]) -> Float[np.ndarray, "keys outputs_per_position"]:
        """Return the values C⁻¹f = ((a+n) f_i − Σ f)/a of the keys (j, i), ordered by cell j and then by position i."""
        f = values.reshape(len(values), self.n, -1)
        if self.n > 1:
            f = f + (self.n * f - f.sum(axis=1, keepdims=True)) / self.a
        return f.reshape(len(values) * self.n, -1)

    def bound(
        self,
        variation: Sequence[Term],
        leak: Term,
        values: Float[np.ndarray, "cells outputs"],
        selection: CellSelection,
        dtype: str,
        volume: float = 1.0,
    ) -> Bound:
        """Return the ledger: the variation, plus `volume` times the leak of the selection and the errors of values."""
        constants = (leak, *self._value_terms(values, selection, dtype))
        return Bound((*variation, *(Term(t.name, round_up(t.value * volume), t.reason) for t in constants)))

    def _value_terms(self, values: np.ndarray, selection: CellSelection, dtype: str) -> Iterator[Term]:
        """Yield the errors of the stored values: the rest of the leak between positions, and rounding."""
        stored, delta, near = self.stored(values), selection.delta, selection.near
        largest = float(np.abs(stored).max(initial=0.0))
        cast = float(np.abs(stored - stored.astype(dtype)).max(initial=0.0))
        average = average_error(len(stored), near, selection.leak, UNIT_ROUNDOFF[dtype])
        rounding = average * largest + cast + underflow(len(stored), dtype)
        if self.n > 1:
            by_position = values.reshape(len(values), self.n, -1)
            off, undone = self._residue(by_position, stored.reshape(by_position.shape))
            rounding += undone
            wrong = math.expm1(2 * delta) if delta < 300 else math.inf
            yield Term("position", wrong * off, "weights of other positions, not undone")
        reason = f"{dtype} sums over {len(stored):,} keys in any order, {near} of them near"
        yield Term("rounding", rounding, reason)

    def _residue(self, f: np.ndarray, stored: np.ndarray) -> tuple[float, float]:
        """Return (max Σ_i' C_ii'|stored_i' − f_i|, the rounding of `stored`).

        Without absolute values the sum is 0. If the weights are off by factors e^{±2δ}, the error is at most e^{2δ} − 1
        times the first figure.
        """
        own = float(np.abs(stored - f).max())
        elsewhere = float(max(stored.max() - f.min(), f.max() - stored.min()))
        off = (self.a + 1) / (self.a + self.n) * own + (self.n - 1) / (self.a + self.n) * elsewhere
        return off, 4 * UNIT_ROUNDOFF["float64"] * self.n * float(np.abs(f).max()) * (1 + 1 / self.a)


def num_positions(target: Target) -> int:
    """Return the number of tokens of the output: n for the shape (n, k), one for (k,) and ()."""
    return target.output_shape[0] if len(target.output_shape) == 2 else 1


def positions_of(target: Target, request: Request) -> Positions:
    """Return the positions that channels of keys separate: one if only the read-out distinguishes positions."""
    return Positions(num_positions(target) if request.position_channels else 1, request.margin)


def bytes_per_anchor(target: Target, request: Request) -> int:
    """Return the bytes per anchor. A number takes 16 (index and value), and is copied, folded and copied again."""
    n = positions_of(target, request).n
    return 64 * (target.box.d + 1 + target.num_outputs // n + (n > 1))


def allowed_anchors(target: Target, request: Request) -> int:
    """Return the number of anchors that max_anchors and max_bytes allow."""
    return min(request.max_anchors, request.max_bytes // bytes_per_anchor(target, request))
