"""Scores and weights of keys about the centres of boxes, as floats, with bounds of their errors over the boxes.

On the box {c + rτ : τ ∈ [−1, 1]^d} the weights, up to a factor that all keys share, are
    ω_k(τ) = e^{s_k(c + rτ) − ā·rτ − reference} = w_k e^{z_k·τ},   w_k = e^{s_k(c) − reference},   z_k = (a_k − ā)·r.

Scores of hundreds cancel to differences of a few, and the relative error of a weight is the absolute error of its
score. So scores s_k(x) = a_k·x + c_k are computed to within a unit roundoff of their distance from the largest: the
leading halves of a, x and c are multiplied and added exactly, and the rest, 2²⁵ times smaller, is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.ir.soft_head import Enclosed
from attnc.numerics.arrays import Float
from attnc.numerics.jet_balls import U, above
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.cells.intervals import around, centred, hull
from attnc.proofs.taylor.polynomials import Layout, gamma

LEFT_OUT_BELOW = -50.0
"""A key whose score is this far behind everywhere is left out of the sums. Its leak, e⁻⁵⁰ = 2·10⁻²² of the weight at
most, is counted; it is 10⁶ times smaller than the rounding of the sums."""
EXP_ERROR = LIBM_ULPS * 2.0**-52
"""Relative error of the machine's exponential."""
FAINT_EXPONENT = -45.0
"""A key whose weight stays below e⁻⁴⁵ = 3·10⁻²⁰ on a box is left out there, and all of its weight counted as error."""
STEEP = 80.0
"""Largest ρ of a key that is not faint: with a larger one no bound would be of use. Up to it, the terms that underflow
in products of weights and powers of z are below 2⁻¹⁰⁷⁴·e^STEEP each, which TINY·max(1, |u|) covers."""
RULING_SHARE = 0.9
"""Share of the weight from which on errors are counted relative to the heaviest key: the others then lose little."""


def score_gaps(
    slopes: Float[np.ndarray, "keys d"], offsets: Float[np.ndarray, " keys"], points: Float[np.ndarray, "boxes d"]
) -> tuple[Float[np.ndarray, "boxes keys"], float]:
    """(gaps, slack): s_k(x) − reference(x) is within u·|gap| + slack of the gap, at every point x.

    The reference is near the largest score at x.
    The leading parts a′, x′, c′ are multiples of powers of two q_a, q_x, q, with q_a·q_x = q on every axis, such that
    every partial sum of a′·x′ + c′ is a multiple of q below 2⁵³q: computed exactly, in any order. The remainder
    (a − a′)·x + a′·(x − x′) + (c − c′) is computed with an error of γ_{2d+3} times the sum of its absolute values; for
    slopes of 1e10 it may itself be hundreds. So the reference is the score, as computed, of the key that leads: both
    parts are taken relative to its own, the second with one more rounding.
    """
    d = slopes.shape[1]
    bits = (52 - int(d + 1).bit_length()) // 2  # d + 1 terms below 2^(2·bits)·q, and the roundings of a′ and x′
    slope_unit = _unit(np.abs(slopes).max(axis=0), bits)
    q = max(
        float((slope_unit * _unit(np.abs(points).max(axis=0), bits)).max()),
        float(_unit(np.abs(offsets).max(), 2 * bits)),
    )
    point_unit = q / slope_unit
    a, x, c = _leading(slopes, slope_unit), _leading(points, point_unit), _leading(offsets, np.asarray(q))
    leading = x @ a.T + c
    rest = np.concatenate([points, points - x], axis=1) @ np.concatenate([slopes - a, a], axis=1).T + (offsets - c)
    first = np.argmax(leading + rest, axis=1)[:, None]
    leading -= np.take_along_axis(leading, first, 1)
    rest -= np.take_along_axis(rest, first, 1)
    size = np.abs(points).max(axis=0) @ slope_unit + np.abs(a).max(axis=0) @ point_unit + q
    return leading + rest, float(above(gamma(2 * d + 4) * size))


def _unit(size: np.ndarray, bits: int) -> np.ndarray:
    """A power of two that is at least 2^−bits times `size`."""
    exponent = np.frexp(np.where((size > 0) & np.isfinite(size), size, 1.0))[1]
    return np.ldexp(1.0, np.maximum(exponent - bits, -400))


def _leading(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.rint(x / unit) * unit


def box_around(centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Enclosed:
    """The smallest box around boxes, by its centre and half-widths."""
    return Enclosed(*centred(hull(around(centres, radii))))[0]


def magnitude(box: Enclosed) -> Float[np.ndarray, " d"]:
    """The largest |x_i| in a box."""
    return up(np.abs(box.mid) + box.radius)


def leaks(
    slopes: Float[np.ndarray, "keys d"], offsets: Float[np.ndarray, " keys"], unsure: np.ndarray, box: Enclosed
) -> Float[np.ndarray, " keys"]:
    """Bound log(w_k/w_*) over the box from above, where * is the key that leads at its centre (and has 0).

    Each score is known to within `unsure`.
    """
    scores = slopes @ box.mid + offsets
    error = gamma(slopes.shape[1] + 1) * (np.abs(slopes) @ np.abs(box.mid) + np.abs(offsets)) + unsure
    first = int(np.argmax(scores))
    lag = scores - scores[first]
    lag = up(lag + above(np.abs(slopes - slopes[first]) @ box.radius + error + error[first] + U * np.abs(lag)))
    lag[first] = 0.0
    return np.where(np.isnan(lag), np.inf, lag)


@dataclass(frozen=True, eq=False)
class Weights:
    """w_k and z_k as floats: |ω_k − w_k e^{z_k·τ}(1 + ε)| ≤ most·error, w_k e^{z_k·τ} ≤ most, Σ ω_k ≤ everything.

    |ε| ≤ EXP_ERROR, that of the machine's exponential; ρ_k = Σ_i |z_ki|. Faint keys have only `most` and `error`, and 0
    for all else.
    """

    w: Float[np.ndarray, "boxes keys"]
    z: Float[np.ndarray, "axes boxes keys"]
    rho: Float[np.ndarray, "boxes keys"]
    most: Float[np.ndarray, "boxes keys"]
    error: Float[np.ndarray, "boxes keys"]
    everything: Float[np.ndarray, " boxes"]

    @classmethod
    def of(
        cls,
        slopes: Float[np.ndarray, "keys d"],
        offsets: Float[np.ndarray, " keys"],
        unsure: Float[np.ndarray, " keys"] | float,
        c: Float[np.ndarray, "boxes d"],
        r: Float[np.ndarray, "boxes d"],
    ) -> Weights:
        gaps, slack = score_gaps(slopes, offsets, c)
        w = np.exp(gaps)
        mean = (w @ slopes) / w.sum(axis=1, keepdims=True)  # ā; any number would do, this one makes the z small
        z = (slopes.T[:, None] - mean.T[:, :, None]) * r.T[:, :, None]
        rho = np.abs(z).sum(axis=0)
        top = gaps + rho
        faint = top < FAINT_EXPONENT
        # The exponent is off by fewer than 2⁸·2⁻⁵³(2·STEEP − FAINT_EXPONENT) where it matters: `above` covers it.
        most = np.where(faint | (rho <= STEEP), above(np.exp(top)), np.inf)
        exponent = _to_reference(unsure + slack + U * np.abs(gaps) + 3 * U * rho, w)
        error = relative_error(exponent, faint)
        if faint.any():
            w, z, rho = np.where(faint, 0.0, w), np.where(faint, 0.0, z), np.where(faint, 0.0, rho)
        return cls(w, z, rho, most, error, above((most * (1 + error)).sum(axis=1)))


def _to_reference(exponent: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The errors of the exponents relative to that of the heaviest key, where it has most of the weight.

    An average does not change when all weights are divided by one factor, e^{the error of that key}: then it has none,
    and the others have theirs and this one. This is how a gate of a steep slope is proved away from its kink.
    """
    rows, heaviest = np.arange(len(w)), np.argmax(w, axis=1)
    rules = w[rows, heaviest] > RULING_SHARE * w.sum(axis=1)
    if not rules.any():
        return exponent
    moved = exponent + exponent[rows, heaviest][:, None]
    moved[rows, heaviest] = 0.0
    return np.where(rules[:, None], moved, exponent)


def relative_error(exponent: np.ndarray, is_unknown: np.ndarray | bool = False) -> np.ndarray:
    """|ω − we^{z·τ}| ≤ this times the bound of we^{z·τ}, if their exponents differ by `exponent`.

    e^t − 1 ≤ t/(1 − t/2) for 0 ≤ t < 2. For w = 0 the bound is that of e^{gap + ρ}, and ω at most e^½ < 2 times it.
    """
    error = np.where(exponent < 1, above(exponent / (1 - 0.5 * np.minimum(exponent, 1.0))), np.inf)
    return np.where(is_unknown, np.where(exponent < 0.5, 2.0, np.inf), error)


def least_denominator(space: Layout, delta: np.ndarray, rounding: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """Σ w_k e^{z_k·τ} ≥ W·exp(−Σ_i |Σ_k w_k z_ki|/W), W = Σ w_k, by Jensen's inequality; less the errors of the w.

    The factor 1 − 2⁻⁴⁰ is for the roundings here and for those of the exponentials, which are relative to the sum.
    """
    first = np.abs(delta[:, space.degree(1)]).sum(axis=1) + space.d * rounding
    whole = delta[:, 0] - rounding
    return whole * np.exp(-above(first / whole)) * (1 - 2.0**-40) - above(unknown)


def powers(z: np.ndarray, order: int) -> np.ndarray:
    """z^j/j! for j = 0 … order, (boxes, order + 1, keys): j + 1 roundings."""
    result = np.empty((z.shape[0], order + 1, z.shape[1]))
    result[:, 0] = 1.0
    power = np.ones(z.shape)
    for j in range(1, order + 1):
        power *= z
        np.multiply(power, 1 / math.factorial(j), out=result[:, j])
    return result
