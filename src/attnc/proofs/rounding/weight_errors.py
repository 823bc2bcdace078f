"""The weights of a head over boxes, exact and computed, and the resulting error of its average.

On a box c ± r, with weights p_k at its centre, α_k = a_k − ā the slopes about their mean and ρ_k = |α_k|·r:
p_k(c + t) = p_k e^{α_k·t}/M, M ≥ 1 (Jensen: at least exp of the mean exponent, which is 0). So p_k(x) ≤ p_k e^{ρ_k},
and any average G = Σ p_k(x) g_k by these weights, of values as of their errors, is close to that at the centre, G_0:

    |G − G_0| = |Σ p_k (g_k − G_0)(e^{α_k·t} − 1)|/M
              ≤ Σ_i r_i |Σ_k p_k (g_k − G_0) α_ki| + Σ p_k |g_k − G_0|(e^{ρ_k} − 1 − ρ_k).

No average leaves the hull of what is averaged. Σ p_k τ_k |v_k − A| is convex in A: for |A − A_0| ≤ a it is largest at
A_0 ± a.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, up
from attnc.proofs.cells.near_keys import NearPairs, NearValues
from attnc.proofs.rounding.program import HeadRoundings

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
_LARGEST_EXPONENT = 60.0  # a weight that is off by e^60 is not known at all


def deltas(rounds: HeadRoundings, reach: np.ndarray, keys: np.ndarray | slice, rows: np.ndarray | int) -> np.ndarray:
    """δ of keys on boxes, for index arrays of one shape."""
    size = np.square(1 + reach.sum(axis=1))[rows]
    total = rounds.score_offsets[keys] + rounds.score_underflow[keys] * size
    for axis in range(reach.shape[1]):
        total = total + rounds.score_slopes[keys, axis] * reach[rows, axis]
    return up(total, reach.shape[1] + 4)


class WeightErrors:
    """Over the boxes of pairs: `exact` ≥ p_k(x), `most` ≥ the computed weight, and τ_k.

    `p` are the p_k(c), off by a factor e^{±2·slack}, which ρ holds; `lean` is the mean exponent left to Jensen's
    inequality, as ā is rounded.
    """

    def __init__(
        self,
        near: NearValues,
        pairs: NearPairs,
        rounds: HeadRoundings,
        reach: Float[np.ndarray, "boxes d"],
        u: float,
        *,
        for_any_weights: bool,
    ) -> None:
        self.near, self.pairs, self.reach = near, pairs, reach
        scores = near.scores
        row, boxes, d = pairs.row, pairs.boxes[pairs.row], near.centres.shape[1]
        longest = int(np.bincount(row).max(initial=1))
        # All that is summed here has fewer than `longest` terms, and some dozens of roundings beside the sums.
        self.margin = 1 + 4 * U * (longest + 64)
        at_centre = scores.at(boxes, pairs.key)
        top = np.maximum.reduceat(at_centre, pairs.starts)
        below = at_centre - top[row]
        with np.errstate(under="ignore"):
            total = self.sums(np.exp(below))
            log_p = below - np.log(total)[row]  # where p itself underflows, p·e^ρ need not
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
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            most = np.minimum(log_p + rho + self.lean[row], pairs.lead + scores.slack)
            self.exact = np.exp(np.minimum(most, 0.0)) * self.margin
            grown = np.expm1(rho)
            # p_k·bend_k ≥ p_k |e^{z} − 1 − α·t|, z within `unsure` of α·t; the sums over α·t are rounded, too.
            bend = grown - rho + 32 * U * grown + (self.margin - 1) * rho + unsure
            self.bent = np.where(log_p > -600, self.p * bend, np.exp(log_p + rho))
            highest = np.maximum.reduceat(at_centre + rho, pairs.starts)
            gap = highest[row] - at_centre + rho + scores.slack
            delta = self._deltas(rounds, at_centre, u)
            exponent = delta * (1 + u) + u * (gap + near.score_error)
            ulps = 2 * ENGINE_ULPS * u
            self.tau = (np.expm1(np.minimum(exponent, _LARGEST_EXPONENT)) * (1 + ulps) + ulps) * self.margin
            self.mean_tau = self.mean(self.tau)
            self.unsettled = ~(self.mean_tau < 0.5)
            self.settled = 1 - np.minimum(self.mean_tau, 0.5)
            computed = np.where(self.unsettled[row], 1.0, self.exact * (1 + self.tau) / self.settled[row])
            behind = np.exp(np.minimum(pairs.lead + near.slack, 0.0)) * self.margin
            # The computed weights are at most this; `near.slack` holds what the scores may be off by.
            self.most = behind if for_any_weights else np.minimum(computed, behind)

    def _deltas(self, rounds: HeadRoundings, at_centre: np.ndarray, u: float) -> np.ndarray:
        """The error of each score without the part that all keys of a box share, if `ScoreRoundings` are given.

        It is left out for all keys or for none: otherwise two errors would not bound the distance of two scores.
        """
        fine, row = rounds.scores, self.pairs.row
        boxes, key = self.pairs.boxes, self.pairs.key
        if fine is None:
            return deltas(rounds, self.reach, key, boxes[row])
        at = np.concatenate([self.reach, np.ones((len(self.reach), 1))], axis=1)
        known = rounds.score_underflow[key] * np.square(at[boxes].sum(axis=1))[row]
        of_query, score = at[boxes] @ fine.query.T, np.abs(at_centre) + self.near.scores.slack
        for j in np.flatnonzero(fine.query.any(axis=1)):
            part = fine.keys[key, j]
            known += np.abs(part - self.sums(self.p * part)[row]) * of_query[row, j]
            score += np.abs(part) * of_query[row, j]  # the rounded sum includes the common part
        sizes = np.zeros(len(row))
        for i in range(at.shape[1]):
            known += fine.own[key, i] * at[boxes, i][row]
            sizes += fine.sizes[key, i] * at[boxes, i][row]
        for axis, slopes in enumerate(self.near.scores.slopes[key].T):
            score += np.abs(slopes) * self.near.radii[boxes, axis][row]
        n = fine.num_terms
        score = score + known
        added = (max(0, n - 2) * (sizes + score) / 2 + score) * (u / (1 - n * u)) if n > 1 else 0.0
        return (known + added) * self.margin

    def sums(self, terms: np.ndarray) -> Float[np.ndarray, " rows"]:
        return np.bincount(self.pairs.row, terms, len(self.pairs.boxes))

    def _moved(self, terms: np.ndarray, average: np.ndarray) -> Float[np.ndarray, " rows"]:
        """How far an average of terms may be from that at the centre."""
        row, boxes = self.pairs.row, self.pairs.boxes
        off = terms - average[row]
        with np.errstate(over="ignore", invalid="ignore"):
            moved = self.sums(self.bent * np.abs(off))
            for axis, alpha in enumerate(self.alpha):
                moved += np.abs(self.sums(self.p * off * alpha)) * self.near.radii[boxes, axis]
            return moved * np.exp(self.lean) + 4 * (self.margin - 1) * self.sums(self.p * np.abs(terms))

    def mean(self, terms: np.ndarray) -> Float[np.ndarray, " rows"]:
        """Above Σ p_k(x) terms_k on the box, for terms ≥ 0."""
        average = self.sums(self.p * terms)
        largest = np.maximum.reduceat(terms, self.pairs.starts)
        direct = np.fmin(self.sums(self.exact * terms), largest)
        return np.fmin(average + self._moved(terms, average), direct)

    def computed_mean(self, sizes: np.ndarray) -> Float[np.ndarray, " rows"]:
        """The same by the computed weights, which are p_k(1 + η_k)/Σ p_l(1 + η_l), |η| ≤ τ."""
        found = np.where(self.unsettled, np.inf, self.mean(sizes * (1 + self.tau)) / self.settled)
        return np.fmin(np.fmin(found, self.sums(self.most * sizes)), np.maximum.reduceat(sizes, self.pairs.starts))

    def error(self, output: int) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """The error of one output that errors of the weights cause, by the theorem above or by the hull; and |A|."""
        pairs, row = self.pairs, self.pairs.row
        value, spread, wide = self._values(output)
        average = self.sums(self.p * value)
        moved = self._moved(value, average) + self.mean(spread)
        with np.errstate(over="ignore", invalid="ignore"):
            ends = [average + moved, average - moved]
            errors = np.fmax(*(self.mean(self.tau * (np.abs(value - end[row]) + spread)) for end in ends))
            errors = np.where(self.unsettled, np.inf, errors / self.settled)
        hull = np.maximum.reduceat(value + spread, pairs.starts) - np.minimum.reduceat(value - spread, pairs.starts)
        largest = np.maximum.reduceat(np.abs(value) + wide, pairs.starts)
        return np.fmin(errors, hull), np.fmin(np.abs(average) + moved + self.mean(wide), largest)

    def _values(self, output: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values at the centres; how far each moves against the others over the box; how far it moves at all."""
        head, pairs = self.near.head, self.pairs
        value, radius = head.values.mid[pairs.key, output], head.values.radius[pairs.key, output]
        if head.carried is None:
            return value, radius, radius
        boxes = pairs.boxes[pairs.row]
        slopes, radii = head.carried.mid[pairs.key, output], self.near.radii[boxes]
        value = value + (slopes * self.near.centres[boxes]).sum(axis=1)
        radius = radius + (head.carried.radius[pairs.key, output] * self.reach[boxes]).sum(axis=1)
        mean = np.stack([self.sums(self.p * slope) for slope in slopes.T], axis=1)[pairs.row]
        own, against = np.abs(slopes), np.abs(slopes - mean)
        return value, radius + (against * radii).sum(axis=1), radius + (own * radii).sum(axis=1)
