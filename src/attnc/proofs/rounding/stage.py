"""Bounds of |result of an engine − exact result|, box by box.

Let δ_k bound the error of score k on the box. Let g_k be the distance of s_k to the largest score, K the error of an
exponential in ulps, and u the unit roundoff. A computed weight is the exact one times 1 + η_k, |η_k| ≤ τ_k, times a
factor that all keys share:

    τ_k = exp(δ_k + u(g_k + δ_k + max_j δ_j))·(1 + 2Ku) − 1,     τ̄ = Σ p_k τ_k,
    weights     |Â − A| = |Σ p_k η_k (v_k − A)| / Σ p_k(1 + η_k) ≤ Σ p_k τ_k |v_k − A| / (1 − τ̄);
    sums        γ_{B+3+n}·Σ p̂_k|v_k| + γ_B·|Â|, p̂_k ≤ p_k(1 + τ_k)/(1 − τ̄), n the roundings of values and read-out.

The numerator and the denominator of the average are sums, computed by trees of additions. B is one more than the
largest number of additions that a term passes through: `depth` in a tree of blocks (`ir.summing`), and one more for
engines that divide weights by their sum. For any order of summation, B may also be the number of big keys, those with
p_k > u/8. The reason: if a partial sum of small keys is added to another sum, the rounding is at most that partial sum,
because the other sum is itself a float. So the terms of big keys pass through at most B − 1 other additions, and all
small keys together cost twice their share, in either sum.

On a box c ± r let p_k be the weights at its centre, α_k = a_k − ā the slopes about their mean, and ρ_k = |α_k|·r. Then
p_k(c + t) = p_k e^{α_k·t}/M with M ≥ 1 (by Jensen M is at least exp of the mean exponent, which is 0). So
p_k(x) ≤ p_k e^{ρ_k}. Any average G = Σ p_k(x) g_k, of values or of their errors, is close to its value G_0 at the
centre:

    |G − G_0| = |Σ p_k (g_k − G_0)(e^{α_k·t} − 1)|/M
              ≤ Σ_i r_i |Σ_k p_k (g_k − G_0) α_ki| + Σ p_k |g_k − G_0|(e^{ρ_k} − 1 − ρ_k).

An average lies in the hull of the numbers that it averages. Σ p_k τ_k |v_k − A| is convex in A, so for |A − A_0| ≤ a it
is largest at A_0 + a or at A_0 − a.

Rounding changes slowly from place to place, but its bound over a box grows with the box. A box whose bound is too large
is divided into parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import LARGEST_BATCH
from attnc.proofs.cells.near_keys import NearPairs, NearValues
from attnc.proofs.rounding.program import HeadRoundings, Roundings, sizes_at
from attnc.proofs.stages.extraction import OneStage

U = UNIT_ROUNDOFF["float64"]
LARGEST_SCORE_ERROR = 600.0
"""A computed weight may be e^δ times the exact one, for a score that is off by δ up to this number, and e^600 is far
from overflow. With a larger δ the rounding is bounded by the distance of the values."""
LOST_WEIGHT = math.exp(-100)
"""A weight that underflows here is below e^−700 and so, times e^LARGEST_SCORE_ERROR, below this."""
MOST_ROUNDINGS = 0.1  # keys·u up to which small keys cost twice their share in a sum; see the checker's `summation`
DEPTH = 2
"""Maximum number of halvings of a box along every axis: each multiplies the cost by 2^d. Measured: without halvings one
proof in float32 has 75 % more leaves. The second one lowers the rounding of a wide box by 1 to 2 %, the third one
changes nothing."""

RoundingOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function of (centres, radii) that returns bounds (boxes, outputs)."""


def rounding_bounds(
    stage: OneStage,
    roundings: Roundings,
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    *,
    truncation: float = 0.0,
    for_any_weights: bool = False,
    enough: float | Float[np.ndarray, " boxes"] = np.inf,
) -> Float[np.ndarray, "boxes outputs"]:
    """Return upper bounds of |computed − exact| over the boxes centre ± radius, for every engine.

    The engines are the reference, numpy and compiled loops, torch, JAX and ONNX Runtime. `roundings` are those of the
    stage (`program.roundings`). `truncation` is a further error of engines, in any output. With `for_any_weights` the
    error of the weights is left out. This is for selection leaves with `score_errors`, whose bounds of |f − stage| hold
    for any weights. A box whose bound is above `enough` is divided into parts. If numbers may overflow, the bound is ∞.
    """

    def bounds(centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
        reach, dtype = np.minimum(np.abs(centres) + radii, roundings.farthest), roundings.dtype
        reach = up(reach * (1 + 2 * roundings.unit), 2)
        heads = zip(stage.heads, roundings.heads, strict=True)
        of_heads = (_head_bounds(*head, dtype, centres, radii, reach, for_any_weights) for head in heads)
        total = _with_heads(roundings, reach, of_heads)
        return np.asarray(up(total + truncation)) if truncation else total

    if not len(centres):
        return np.zeros((0, len(stage.constant.mid)))
    return _in_parts(bounds, centres, radii, np.broadcast_to(enough, len(centres)))


def rounding_of_sums(
    rounds: Roundings,
    reach: Float[np.ndarray, "boxes inputs"],
    near: int | None = None,
    far: float = 0.0,
    keys: int | None = None,
) -> Float[np.ndarray, "boxes outputs"]:
    """Bound the rounding of sums for any weights of the keys: γ_{2p+3+n} times the largest value.

    p is `keys`, or the number of keys in the roundings. If all keys but `near` have together a computed weight of at
    most `far`, near replaces p, and 4·far is added: see the sums of small keys above. Engines may replace exponentials
    below e^NEGLIGIBLE by zero. If numbers may overflow, the bound is ∞.
    """
    unit, found = rounds.unit, []
    reach = up(reach * (1 + 2 * unit), 2)
    for head in rounds.heads:
        p, largest = keys or len(head.value_sizes), sizes_at(head.value_sizes.max(axis=0), reach)
        share = gamma(2 * p + 3 + head.count, unit)
        if near is not None and near < p and p * unit <= MOST_ROUNDINGS and far < 0.1:
            below = gamma(near, unit)
            few = gamma(near + 3 + head.count, unit) * (1 + below) + (below + 4 * far) * (1 + gamma(head.count, unit))
            share = min(share, few / (1 - below - 2 * far) * (1 + 16 * U))
        share += 2 * p * math.exp(NEGLIGIBLE[rounds.dtype])
        found.append(up(share, 2) * largest + up(head.underflow * (1 + reach.sum(axis=1))[:, None], reach.shape[1] + 2))
    return _with_heads(rounds, reach, found)


def _with_heads(
    roundings: Roundings, reach: Float[np.ndarray, "boxes d"], of_heads: Iterable[Float[np.ndarray, "boxes outputs"]]
) -> Float[np.ndarray, "boxes outputs"]:
    """Return the rounding of a stage for |x| ≤ reach, that of its heads included. It is ∞ if numbers may overflow."""
    n = up(1 + reach.sum(axis=1), reach.shape[1])[:, None]
    total = up(gamma(roundings.count, roundings.unit) * sizes_at(roundings.sizes, reach), 4)
    total = up(total + 2 * roundings.underflow * n, 2)
    for found in of_heads:
        total = up(total + up(found, 2))
    with quiet():
        overflows = ~(up(roundings.peak * n**roundings.degree, 2) < np.finfo(roundings.dtype).max / 4)
    return np.where(overflows, np.inf, total)


def score_errors(
    roundings: Roundings, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]
) -> Float[np.ndarray, " heads"]:
    """Return, for each head, the δ with which selection leaves also cover the computed weights, on all of the boxes.

    A computed weight is the exponential of (ŝ_k − max ŝ)(1 + θ), |θ| ≤ u, with an error of K ulps. A key must be behind
    by g + 2δ to have a weight of at most e^{−g}. For g < 80 this costs u(g + 2K + 1) besides the errors of two scores.
    Half of that is added to δ.
    """
    if not len(centres):
        return np.zeros(len(roundings.heads))
    reach = up((np.abs(centres) + radii).max(axis=0) * (1 + 2 * roundings.unit), 2)[None]
    largest = [largest_score_error(rounds, reach) for rounds in roundings.heads]
    return up(np.array(largest) + _weight_room(roundings.dtype))


def _weight_room(dtype: str) -> float:
    """Return a bound of u(g + 2K + 1)/2 for g = 80, with 19u for terms of second order: see `score_errors`."""
    return (60 + ENGINE_ULPS[dtype]) * UNIT_ROUNDOFF[dtype]


def _in_parts(
    bounds: RoundingOf,
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    enough: Float[np.ndarray, " boxes"],
    depth: int = DEPTH,
) -> Float[np.ndarray, "boxes outputs"]:
    """Return the bounds of boxes. A box with a bound above `enough` gets that of its parts, if it is smaller."""
    upper = bounds(centres, radii)
    rows = np.flatnonzero(upper.max(axis=1) > enough)
    if not depth or not 0 < len(rows) << centres.shape[1] <= LARGEST_BATCH:
        return upper
    centres, radii, wanted = centres[rows], radii[rows], enough[rows]
    for axis in range(centres.shape[1]):
        step = np.zeros_like(radii)
        step[:, axis] = radii[:, axis] / 2
        centres, radii = np.concatenate([centres - step, centres + step]), np.concatenate([radii - step] * 2)
        radii[:, axis] = up(radii[:, axis] + 4 * U * (np.abs(centres[:, axis]) + radii[:, axis]), 4)
        wanted = np.tile(wanted, 2)
    parts = _in_parts(bounds, centres, radii, wanted, depth - 1)
    upper[rows] = np.minimum(upper[rows], parts.reshape(-1, len(rows), parts.shape[1]).max(axis=0))
    return upper


def _head_bounds(
    head: SoftHead[Enclosed],
    rounds: HeadRoundings,
    dtype: str,
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    reach: Float[np.ndarray, "boxes d"],
    for_any_weights: bool,
) -> Float[np.ndarray, "boxes outputs"]:
    """Return the part of the bounds that one head adds."""
    sizes = sizes_at(rounds.value_sizes.max(axis=0), reach)
    near = NearValues(head, centres, radii, largest_score_error(rounds, reach.max(axis=0)[None]) + _weight_room(dtype))
    found = np.empty((len(centres), sizes.shape[1]))
    for pairs in near.pairs():
        found[pairs.boxes] = _WeightErrors(near, pairs, rounds, reach, dtype, for_any_weights).bounds()
    # Exponentials below e^NEGLIGIBLE may be zero, and keys that are behind by the gap are left out.
    unseen = 2 * near.num_keys * (math.exp(NEGLIGIBLE[dtype]) + LOST_WEIGHT) + 8 * near.rest
    spent = up(rounds.underflow * (1 + reach.sum(axis=1))[:, None], 4)
    return up(found + up(unseen * sizes, 2) + spent)


def largest_score_error(rounds: HeadRoundings, reach: Float[np.ndarray, "1 d"]) -> float:
    """Return the largest δ of all keys on a box."""
    return float(_deltas(rounds, reach, slice(None), 0).max())


def _deltas(rounds: HeadRoundings, reach: np.ndarray, keys: np.ndarray | slice, rows: np.ndarray | int) -> np.ndarray:
    """Return δ of keys on boxes, for index arrays of one shape."""
    size = (1 + reach.sum(axis=1))[rows]
    total = rounds.score_errors[keys, -1] + rounds.score_underflow[keys] * size
    for axis in range(reach.shape[1]):
        total = total + rounds.score_errors[keys, axis] * reach[rows, axis]
    return up(total, reach.shape[1] + 4)


class _WeightErrors:
    """Bounds of the weights over the boxes of pairs: `exact` ≥ p_k(x), `most` ≥ the computed weight, and τ_k.

    `p` are the p_k(c), off by a factor e^{±2·slack}, which is included in ρ. The mean exponent in Jensen's inequality
    is not exactly 0, because ā is rounded: `lean` bounds it.
    """

    def __init__(
        self,
        near: NearValues,
        pairs: NearPairs,
        rounds: HeadRoundings,
        reach: Float[np.ndarray, "boxes d"],
        dtype: str,
        for_any_weights: bool,
    ) -> None:
        u = UNIT_ROUNDOFF[dtype]
        self.near, self.pairs, self.reach, self.rounds, self.u = near, pairs, reach, rounds, u
        self.for_any_weights, scores = for_any_weights, near
        row, boxes, d = pairs.row, pairs.boxes[pairs.row], near.centres.shape[1]
        longest = int(np.bincount(row).max(initial=1))
        # Every sum here has at most `longest` terms, and there are some dozens of roundings besides.
        self.margin = 1 + 4 * U * (longest + 64)
        at_centre = scores.at(boxes, pairs.key)
        top = np.maximum.reduceat(at_centre, pairs.starts)
        below = at_centre - top[row]
        with quiet():
            total = self.sums(np.exp(below))
            log_p = below - np.log(total)[row]  # if p underflows, p·e^ρ may still be a normal number
            self.p = np.exp(log_p)
        unsure = 2 * scores.slack
        self.alpha = [slopes - self.sums(self.p * slopes)[row] for slopes in scores.slopes[pairs.key].T]
        rho, self.lean = np.full(len(row), unsure), np.zeros(len(pairs.boxes))
        for axis in range(d):
            alpha, radii = self.alpha[axis], near.radii[:, axis]
            rho += np.abs(alpha) * radii[boxes]
            mean = np.abs(self.sums(self.p * alpha))
            mean += (self.margin - 1 + 4 * unsure) * self.sums(self.p * np.abs(alpha))
            self.lean += mean * radii[pairs.boxes]
        with quiet():
            most = np.minimum(log_p + rho + self.lean[row], pairs.lead + scores.slack)
            self.exact = np.exp(np.minimum(most, 0.0)) * self.margin
            grown = np.expm1(rho)
            # p_k·bend_k ≥ p_k |e^{z} − 1 − α·t| for z within `unsure` of α·t. The rounding of sums over α·t is added.
            bend = grown - rho + 32 * U * grown + (self.margin - 1) * rho + unsure
            self.bent = np.where(log_p > -600, self.p * bend, np.exp(log_p + rho))
            highest = np.maximum.reduceat(at_centre + rho, pairs.starts)
            gap = highest[row] - at_centre + rho + scores.slack
            delta = self._score_errors(at_centre)
            exponent = delta * (1 + u) + u * (gap + near.score_error)
            ulps = 2 * ENGINE_ULPS[dtype] * u
            self.tau = (np.expm1(np.minimum(exponent, LARGEST_SCORE_ERROR)) * (1 + ulps) + ulps) * self.margin
            self.mean_tau = self.mean(self.tau)
            is_large = np.maximum.reduceat(exponent, pairs.starts) > LARGEST_SCORE_ERROR
            self.unsettled = is_large | ~(self.mean_tau < 0.5)
            self.settled = 1 - np.minimum(self.mean_tau, 0.5)
            computed = np.where(self.unsettled[row], 1.0, self.exact * (1 + self.tau) / self.settled[row])
            behind = np.exp(np.minimum(pairs.lead + near.unsure, 0.0)) * self.margin
            # The computed weights are at most this; `near.unsure` includes the errors of the scores.
            self.most = behind if for_any_weights else np.minimum(computed, behind)

    def _score_errors(self, at_centre: np.ndarray) -> np.ndarray:
        """Return the error of each score. With `ScoreRoundings` the part that all keys of a box share is left out.

        It must be left out for all keys or for none. Otherwise two errors would not bound the distance of two scores.
        """
        rounds, u, row, boxes, key = self.rounds, self.u, self.pairs.row, self.pairs.boxes, self.pairs.key
        fine = rounds.scores
        if fine is None:
            return _deltas(rounds, self.reach, key, boxes[row])
        at = np.concatenate([self.reach, np.ones((len(self.reach), 1))], axis=1)
        known = rounds.score_underflow[key] * at[boxes].sum(axis=1)[row]
        of_query, score = at[boxes] @ fine.query.T, np.abs(at_centre) + self.near.slack
        for j in np.flatnonzero(fine.query.any(axis=1)):
            part = fine.keys[key, j]
            known += np.abs(part - self.sums(self.p * part)[row]) * of_query[row, j]
            score += np.abs(part) * of_query[row, j]  # the rounded sum includes the common part
        sizes = np.zeros(len(row))
        for i in range(at.shape[1]):
            known += fine.own[key, i] * at[boxes, i][row]
            sizes += fine.sizes[key, i] * at[boxes, i][row]
        for axis, slopes in enumerate(self.near.slopes[key].T):
            score += np.abs(slopes) * self.near.radii[boxes, axis][row]
        n = fine.num_terms
        score = score + known
        added = (max(0, n - 2) * (sizes + score) / 2 + score) * (u / (1 - n * u)) if n > 1 else 0.0
        return (known + added) * self.margin

    def bounds(self) -> Float[np.ndarray, "rows outputs"]:
        """Return the errors of all outputs, without those of underflow and of keys far behind."""
        pairs, u = self.pairs, self.u
        # With more keys the factor 2 below is too small.
        is_big = (self.most > u / 8) | (self.near.num_keys * u > MOST_ROUNDINGS)
        num_big = self.sums(is_big)
        columns = []
        for output in range(self.rounds.value_sizes.shape[1]):
            size = self._sizes(output)
            top = np.maximum.reduceat(size, pairs.starts)
            by_weights, average = self.error(output)
            mean = top if self.for_any_weights else self.computed_mean(size)
            average = np.fmin(average + by_weights, mean)
            small = 2 * self.sums(np.where(is_big, 0.0, self.most * (size + top[pairs.row])))
            in_blocks = self._of_sums(self.rounds.depth + 1, mean, average)
            sums = np.fmin(self._of_sums(num_big, mean, average) + small, in_blocks)
            columns.append(sums if self.for_any_weights else by_weights + sums)
        return up(np.stack(columns, axis=1) * self.margin)

    def _of_sums(self, B: np.ndarray | int, mean: np.ndarray, average: np.ndarray) -> np.ndarray:
        """Return the rounding of sums by the theorem, for mean ≥ Σ p̂_k|v_k|, average ≥ |Â|. It is ∞ if Bu ≥ 1."""
        roundings = np.stack(np.broadcast_arrays(B, B + 3 + self.rounds.count)) * self.u
        below, above = np.where(roundings < 1, roundings / np.maximum(1 - roundings, U), np.inf)
        return np.asarray(above * (1 + below) * mean + below * average)

    def _sizes(self, output: int) -> Float[np.ndarray, " pairs"]:
        """Return the sizes of the values of one output."""
        forms = self.rounds.value_sizes[self.pairs.key, output]
        if forms.shape[1] == 1:
            return forms[:, 0]
        return forms[:, -1] + (forms[:, :-1] * self.reach[self.pairs.boxes[self.pairs.row]]).sum(axis=1)

    def sums(self, terms: np.ndarray) -> Float[np.ndarray, " rows"]:
        return np.asarray(np.add.reduceat(terms, self.pairs.starts, dtype=np.float64))

    def _moved(self, terms: np.ndarray, average: np.ndarray) -> Float[np.ndarray, " rows"]:
        """Bound the distance of an average of terms from its value at the centre."""
        row, boxes = self.pairs.row, self.pairs.boxes
        off = terms - average[row]
        with quiet():
            moved = self.sums(self.bent * np.abs(off))
            for axis, alpha in enumerate(self.alpha):
                moved += np.abs(self.sums(self.p * off * alpha)) * self.near.radii[boxes, axis]
            return moved * np.exp(self.lean) + 4 * (self.margin - 1) * self.sums(self.p * np.abs(terms))

    def mean(self, terms: np.ndarray) -> Float[np.ndarray, " rows"]:
        """Bound Σ p_k(x) terms_k on the box from above, for terms ≥ 0."""
        average = self.sums(self.p * terms)
        largest = np.maximum.reduceat(terms, self.pairs.starts)
        direct = np.fmin(self.sums(self.exact * terms), largest)
        return np.fmin(average + self._moved(terms, average), direct)

    def computed_mean(self, sizes: np.ndarray) -> Float[np.ndarray, " rows"]:
        """Bound the same average with the computed weights p_k(1 + η_k)/Σ p_l(1 + η_l), |η| ≤ τ."""
        found = np.where(self.unsettled, np.inf, self.mean(sizes * (1 + self.tau)) / self.settled)
        return np.fmin(np.fmin(found, self.sums(self.most * sizes)), np.maximum.reduceat(sizes, self.pairs.starts))

    def error(self, output: int) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """Bound the error of one output that errors of the weights cause, by the theorem or by the hull; and |A|."""
        pairs, row = self.pairs, self.pairs.row
        value, spread, wide = self._values(output)
        average = self.sums(self.p * value)
        moved = self._moved(value, average) + self.mean(spread)
        with quiet():
            ends = [average + moved, average - moved]
            errors = np.fmax(*(self.mean(self.tau * (np.abs(value - end[row]) + spread)) for end in ends))
            errors = np.where(self.unsettled, np.inf, errors / self.settled)
        hull = np.maximum.reduceat(value + spread, pairs.starts) - np.minimum.reduceat(value - spread, pairs.starts)
        largest = np.maximum.reduceat(np.abs(value) + wide, pairs.starts)
        return np.fmin(errors, hull), np.fmin(np.abs(average) + moved + self.mean(wide), largest)

    def _values(self, output: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values at the centres, and how far each moves over the box: relative to their mean, and in all."""
        head, pairs = self.near.head, self.pairs
        value, radius = head.values.mid[pairs.key, output], head.values.radius[pairs.key, output]
        if head.carried is None:
            return value, radius, radius
        boxes = pairs.boxes[pairs.row]
        slopes, radii = head.carried.mid[pairs.key, output], self.near.radii[boxes]
        value = value + (slopes * self.near.centres[boxes]).sum(axis=1)
        radius = radius + (head.carried.radius[pairs.key, output] * (np.abs(self.near.centres[boxes]) + radii)).sum(
            axis=1
        )
        mean = np.stack([self.sums(self.p * slope) for slope in slopes.T], axis=1)[pairs.row]
        own, against = np.abs(slopes), np.abs(slopes - mean)
        return value, radius + (against * radii).sum(axis=1), radius + (own * radii).sum(axis=1)
