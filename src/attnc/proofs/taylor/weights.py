"""Scores and weights of keys about the centres of boxes, as floats, with bounds of their errors over the boxes.

On the box {c + rτ : τ ∈ [−1, 1]^d} the weights, up to a factor that all keys share, are
    ω_k(τ) = e^{s_k(c + rτ) − ā·rτ − reference} = w_k e^{z_k·τ},   w_k = e^{s_k(c) − reference},   z_k = (a_k − ā)·r.

Scores may be hundreds while their differences are small, and the relative error of a weight is the absolute error of
its score. So scores s_k(x) = a_k·x + c_k are computed to within a unit roundoff of their distance from the largest. The
leading halves of a, x and c are multiplied and added exactly. Only the rest, 2²⁵ times smaller, is rounded.
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
"""A key whose score is this far behind on all boxes is left out of the sums. Its weight, at most e⁻⁵⁰ = 2·10⁻²² of the
whole, is counted as an error. It is 10⁶ times smaller than the rounding of the sums."""
EXP_ERROR = LIBM_ULPS * 2.0**-52
"""Relative error of the machine's exponential."""
FAINT_EXPONENT = -45.0
"""A key whose weight is below e⁻⁴⁵ = 3·10⁻²⁰ on a box is left out there. Its weight is counted as an error, which is
3·10³ times smaller than the rounding of the sums."""
STEEP = 80.0
"""Largest ρ of a key that is not faint. With a larger one the bound would be useless. Below it, the terms that
underflow in products of weights and powers of z are below 2⁻¹⁰⁷⁴·e^STEEP each, which TINY·max(1, |u|) covers."""
RULING_SHARE = 0.9
"""If the heaviest key has at least this share of the weight, errors are counted relative to it."""


def score_gaps(
    slopes: Float[np.ndarray, "keys d"], offsets: Float[np.ndarray, " keys"], points: Float[np.ndarray, "boxes d"]
) -> tuple[Float[np.ndarray, "boxes keys"], float]:
    """Return (gaps, slack): s_k(x) − reference(x) is within u·|gap| + slack of the gap, at every point x.

    The reference is near the largest score at x.
    The leading parts a′, x′, c′ are multiples of powers of two q_a, q_x, q, with q_a·q_x = q on every axis, such that
    every partial sum of a′·x′ + c′ is a multiple of q below 2⁵³q. So it is computed exactly, in any order. The
    remainder (a − a′)·x + a′·(x − x′) + (c − c′) is computed with an error of γ_{2d+3} times the sum of its absolute
    values. For slopes of 1e10 the remainder may itself be hundreds. So the reference is the computed score of the
    leading key: its two parts are subtracted from those of every key, the second with one more rounding.
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
    """Return a power of two that is at least 2^−bits times `size`."""
    exponent = np.frexp(np.where((size > 0) & np.isfinite(size), size, 1.0))[1]
    return np.ldexp(1.0, np.maximum(exponent - bits, -400))


def _leading(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.rint(x / unit) * unit


def box_around(centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Enclosed:
    """Return the smallest box around boxes, by its centre and half-widths."""
    return Enclosed(*centred(hull(around(centres, radii))))[0]


def magnitude(box: Enclosed) -> Float[np.ndarray, " d"]:
    """Return the largest |x_i| in a box."""
    return up(np.abs(box.mid) + box.radius)


def leaks(
    slopes: Float[np.ndarray, "keys d"], offsets: Float[np.ndarray, " keys"], unsure: np.ndarray, box: Enclosed
) -> Float[np.ndarray, " keys"]:
    """Bound log(w_k/w_*) over the box from above, where * is the key that leads at its centre. Its own bound is 0.

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

    |ε| ≤ EXP_ERROR is the error of the machine's exponential, and ρ_k = Σ_i |z_ki|. Faint keys have only `most` and
    `error`. Their other entries are 0.
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
        mean = (w @ slopes) / w.sum(axis=1, keepdims=True)  # ā; any number is sound, and this one makes the z small
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
    """Return the errors of the exponents relative to that of the heaviest key, if it has most of the weight.

    An average does not change if all weights are divided by the same factor. Dividing by e^{the error of the heaviest
    key} leaves that key without an error, and adds its error to those of the others. A gate of a steep slope is proved
    in this way, except near its kink.
    """
    rows, heaviest = np.arange(len(w)), np.argmax(w, axis=1)
    rules = w[rows, heaviest] > RULING_SHARE * w.sum(axis=1)
    if not rules.any():
        return exponent
    moved = exponent + exponent[rows, heaviest][:, None]
    moved[rows, heaviest] = 0.0
    return np.where(rules[:, None], moved, exponent)


def relative_error(exponent: np.ndarray, is_unknown: np.ndarray | bool = False) -> np.ndarray:
    """Return the factor r with |ω − we^{z·τ}| ≤ r times the bound of we^{z·τ}, if their exponents differ by `exponent`.

    e^t − 1 ≤ t/(1 − t/2) for 0 ≤ t < 2. For w = 0 the bound is that of e^{gap + ρ}, and ω at most e^½ < 2 times it.
    """
    error = np.where(exponent < 1, above(exponent / (1 - 0.5 * np.minimum(exponent, 1.0))), np.inf)
    return np.where(is_unknown, np.where(exponent < 0.5, 2.0, np.inf), error)


def least_denominator(space: Layout, delta: np.ndarray, rounding: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """Return a lower bound of Σ ω_k: that of Jensen's inequality, minus the errors of the w.

    Σ w_k e^{z_k·τ} ≥ W·exp(−Σ_i |Σ_k w_k z_ki|/W), W = Σ w_k. The factor 1 − 2⁻⁴⁰ covers the roundings here and those
    of the exponentials, which are relative to the sum.
    """
    first = np.abs(delta[:, space.degree(1)]).sum(axis=1) + space.d * rounding
    whole = delta[:, 0] - rounding
    return whole * np.exp(-above(first / whole)) * (1 - 2.0**-40) - above(unknown)


def powers(z: np.ndarray, order: int) -> np.ndarray:
    """Return z^j/j! for j = 0 … order, (boxes, order + 1, keys), each with j + 1 roundings."""
    result = np.empty((z.shape[0], order + 1, z.shape[1]))
    result[:, 0] = 1.0
    power = np.ones(z.shape)
    for j in range(1, order + 1):
        power *= z
        np.multiply(power, 1 / math.factorial(j), out=result[:, j])
    return result
