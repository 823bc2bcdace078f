"""The weights of a head over boxes, exact and computed, and what their errors make of its average.

On a box, with weights p_k at its centre, ā their mean slope and ρ_k = |a_k − ā|·r: p_k(x) ≤ p_k e^{ρ_k} (Jensen: the
sum of all weights, relative to the centre's, is at least exp of the mean exponent, which is 0), and
|A(x) − A(c)| ≤ Σ p_k (e^{ρ_k} − 1)|v_k − A(c)|. Neither average leaves the hull of the values of the near keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.certificates.near_values import NearValues, Pairs
from attnc.certificates.program_roundings import HeadRoundings
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, up

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
        pairs: Pairs,
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
            self.log_p = below - np.log(total)[row]  # where p itself underflows, p·e^ρ need not
            self.p = np.exp(self.log_p)
        self.rho, lean = np.full(len(row), 2 * scores.slack), np.zeros(len(pairs.boxes))
        for axis in range(d):
            slopes = scores.slopes[pairs.key, axis]
            alpha = slopes - self.sums(self.p * slopes)[row]
            self.rho += np.abs(alpha) * near.radii[boxes, axis]
            mean = np.abs(self.sums(self.p * alpha)) + (self.margin - 1) * self.sums(self.p * np.abs(alpha))
            lean += mean * near.radii[pairs.boxes, axis]
        self.lean = lean[row]
        with np.errstate(over="ignore", under="ignore"):
            most = np.minimum(self.log_p + self.rho + self.lean, pairs.lead + scores.slack)
            self.exact = np.exp(np.minimum(most, 0.0)) * self.margin
            highest = np.maximum.reduceat(at_centre + self.rho, pairs.starts)
            gap = highest[row] - at_centre + self.rho + scores.slack
            delta = deltas(rounds, reach, pairs.key, boxes)
            exponent = delta * (1 + u) + u * (gap + near.score_error)
            ulps = 2 * LIBM_ULPS * u
            self.tau = (np.expm1(np.minimum(exponent, _LARGEST_EXPONENT)) * (1 + ulps) + ulps) * self.margin
            self.mean_tau = self.sums(self.exact * self.tau)
            computed = np.where(
                self.mean_tau[row] < 0.5, self.exact * (1 + self.tau) / (1 - np.minimum(self.mean_tau, 0.5)[row]), 1.0
            )
            behind = np.exp(np.minimum(pairs.lead + near.slack, 0.0)) * self.margin
            # The computed weights are at most this; `near.slack` holds what the scores may be off by.
            self.most = behind if for_any_weights else np.minimum(computed, behind)

    def sums(self, terms: np.ndarray) -> Float[np.ndarray, " rows"]:
        return np.bincount(self.pairs.row, terms, len(self.pairs.boxes))

    def error(self, output: int) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """What the errors of the weights make of one output: the theorem above, or the width of the hull; and |A|."""
        pairs, row = self.pairs, self.pairs.row
        value, spread, wide = self._values(output)
        average = self.sums(self.p * value)
        off = value - average[row]
        with np.errstate(over="ignore", invalid="ignore"):
            growth = np.where(self.rho < 1, self.p * np.expm1(np.minimum(self.rho, 1.0)), np.exp(self.log_p + self.rho))
            moved = self.sums(growth * np.exp(self.lean) * np.abs(off))
            moved += self.sums(self.exact * spread) + (self.margin - 1) * self.sums(self.p * np.abs(value))
            errors = self.sums(self.exact * self.tau * (np.abs(off) + spread)) + self.mean_tau * moved
            errors = np.where(self.mean_tau < 0.5, errors / (1 - np.minimum(self.mean_tau, 0.5)), np.inf)
        hull = np.maximum.reduceat(value + wide, pairs.starts) - np.minimum.reduceat(value - wide, pairs.starts)
        largest = np.maximum.reduceat(np.abs(value) + wide, pairs.starts)
        return np.fmin(errors, hull), np.fmin(np.abs(average) + moved + self.sums(self.exact * wide), largest)

    def _values(self, output: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values at the centres; how far each moves against the others over the box; how far it moves at all."""
        head, pairs = self.near.head, self.pairs
        value, radius = head.values.mid[pairs.key, output], head.values.radius[pairs.key, output]
        if head.value_slopes is None:
            return value, radius, radius
        boxes = pairs.boxes[pairs.row]
        slopes, radii = head.value_slopes.mid[pairs.key, output], self.near.radii[boxes]
        value = value + (slopes * self.near.centres[boxes]).sum(axis=1)
        radius = radius + (head.value_slopes.radius[pairs.key, output] * self.reach[boxes]).sum(axis=1)
        mean = np.stack([self.sums(self.p * slope) for slope in slopes.T], axis=1)[pairs.row]
        own, against = np.abs(slopes), np.abs(slopes - mean)
        return value, radius + (against * radii).sum(axis=1), radius + (own * radii).sum(axis=1)
