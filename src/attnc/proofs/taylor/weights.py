"""The weights of keys about the centres of boxes, as floats, and how far they may be off over the boxes.

On the box {c + rτ : τ ∈ [−1, 1]^d} the weights, up to a factor that all keys share, are
    ω_k(τ) = e^{s_k(c + rτ) − ā·rτ − reference} = w_k e^{z_k·τ},   w_k = e^{s_k(c) − reference},   z_k = (a_k − ā)·r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.jet_balls import U, above
from attnc.numerics.rounding import LIBM_ULPS
from attnc.proofs.taylor.polynomials import Layout
from attnc.proofs.taylor.scores import score_gaps

if TYPE_CHECKING:
    from jaxtyping import Float

EXP_ERROR = LIBM_ULPS * 2.0**-52
FAINT = -45.0
"""A key whose weight stays below e^FAINT on a box is left out there, and counted as unknown."""
STEEP = 80.0
"""With a key of a larger ρ that is not faint no bound would be of use. Otherwise what underflows in products of
weights and powers of z is below 2⁻¹⁰⁷⁴·e^STEEP a term, which TINY·max(1, |u|) covers."""


RULING = 0.9


@dataclass(frozen=True, eq=False)
class Weights:
    """w_k and z_k as floats: |ω_k − w_k e^{z_k·τ}(1 + ε)| ≤ most·error, w_k e^{z_k·τ} ≤ most, Σ ω_k ≤ everything.

    |ε| ≤ EXP_ERROR, that of the machine's exponential; ρ_k = Σ_i |z_ki|. Of faint keys all is 0 but `most` and `error`.
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
        steep: float = STEEP,
    ) -> Weights:
        scores = score_gaps(slopes, offsets, c)
        w = np.exp(scores.gaps)
        mean = (w @ slopes) / w.sum(axis=1, keepdims=True)  # ā; any number would do, this one makes the z small
        z = (slopes.T[:, None] - mean.T[:, :, None]) * r.T[:, :, None]
        rho = np.abs(z).sum(axis=0)
        top = scores.gaps + rho
        faint = top < FAINT
        # The exponent is off by fewer than 2⁸·2⁻⁵³(2·STEEP − FAINT) where it matters: `above` covers it.
        most = np.where(faint | (rho <= steep), above(np.exp(top)), np.inf)
        exponent = _to_reference(unsure + scores.slack + U * np.abs(scores.gaps) + 3 * U * rho, w)
        error = relative_error(exponent, faint)
        if faint.any():
            w, z, rho = np.where(faint, 0.0, w), np.where(faint, 0.0, z), np.where(faint, 0.0, rho)
        return cls(w, z, rho, most, error, above((most * (1 + error)).sum(axis=1)))


def _to_reference(exponent: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The errors of the exponents relative to that of the heaviest key, where it has most of the weight.

    An average does not change when all weights are divided by one factor, e^{the error of that key}: then it has none,
    and the others have theirs and this one. A gate of a steep slope is proved by that away from its kink.
    """
    rows, heaviest = np.arange(len(w)), np.argmax(w, axis=1)
    rules = w[rows, heaviest] > RULING * w.sum(axis=1)
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
    """Σ w_k e^{z_k·τ} ≥ W·exp(−Σ_i |Σ_k w_k z_ki|/W), W = Σ w_k, by Jensen's inequality; less what is unknown of the w.

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
