"""Bounds of |computed − exact| for the gradient of a stage, box by box.

An engine computes, for a head with the weights p_k, the average A and the values u_k = v_k + V_k·x,

    d_k = p_k (u_k − A),   ∂_i A = Σ_k d_k a_ki + Σ_k p_k V_ki,

with a_ki or a_ki − ā_i, and any order of products and sums. An engine may also centre v and every V_i by their own
averages, and add up Σ p_k (v_k − E[v]) a_k and the x_i·Σ p_k (V_ki − E[V_i]) a_k: then D_k below counts the sizes of
these terms in the sums. It does so for automatic differentiation, forwards and backwards, and for a loop over keys.
The weights are those of the value: q_k = p_k(1 + η_k)/Σ p_l(1 + η_l), |η_k| ≤ τ_k, see `stage`.

Theorem.  Let τ̄ ≥ Σ p_k τ_k, s = 1 − τ̄ > 0, |u_k − A| ≤ D_k, |a_ki − ā_i| ≤ α_ki, |a_ki| ≤ S_ki, the sums of absolute
          values of the products that make up a_ki. Then, with C_k = p_k(1 + τ_k)/s,
              weights  |cov_q(u, a_i) − cov_p(u, a_i)| ≤ Σ p_k τ_k (D_k α_ki + G_i)/s + ΔA·Δa_i,  G_i = Σ p_k D_k α_ki,
                       ΔA = Σ p_k τ_k D_k/s,  Δa_i = Σ p_k τ_k α_ki/s,
              sums     e_A·Ā_i + Σ C_k e_k T_ki + (γ_n + small) Σ C_k (D_k + ΔA + e_A + e_k) T_ki,
                       Ā_i = Σ C_k S_ki,  T_ki = S_ki + Ā_i, e_k the rounding of u_k, e_A that of A.
Proof.    cov_q(u, a) = E_q[(u − A)(a − ā)] − (A_q − A)(ā_q − ā) with the exact A and ā, and for
          X_k = (u_k − A)(a_k − ā) we have (E_q − E_p)[X] = Σ p_k η_k (X_k − E_p X)/(1 + Σ p_k η_k), E_p X = cov_p. For
          b = 0 or the computed ā, Σ q_k (u_k + e_k − Â)(a_k − b) is cov_q + (A_q − Â)(ā_q − b) + Σ q_k e_k (a_k − b).
          Each product meets n roundings at most, and |a_k − b| ≤ T_k. Sums over keys count as in `stage`: keys with
          C_k ≤ u/8 cost at most twice their share, and the others count by their number. Backwards, sums over keys are
          products of matrices, so they are in no blocks.

Over a box c ± r, p_k(x) ≤ p_k(c) e^{ρ_k} with ρ_k = Σ_i α_ki r_i about the mean slope at c (Jensen), and
|A(x) − A(c)| ≤ Σ p_k(x) |u_k(x) − A(c)|.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.limits import spend
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF
from attnc.proofs.margins import SLOPE_ROUNDING
from attnc.proofs.rounding.program import HeadRoundings, Roundings, sizes_at
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.box import Box

U = UNIT_ROUNDOFF["float64"]
NEGLIGIBLE_SLOPES = 2.0**-11
"""Share of the goal below which the bound on the whole box is added to every cell, instead of a bound of its own."""
ROUNDINGS_OF_TERM = 16
"""Roundings of a term besides those of its factors and of the sum over keys: the two differences, the division by the
sum of weights, the products of p, d and a, the sum with that of the V_k, and a read-out of both; a few to spare."""
NUMBERS_AT_A_TIME = 2**20  # numbers of a table of boxes × keys that are held together: 8 MB
ALIGNED = 2.0**-9
"""The share by which products through the scores of a deep program may exceed those of a head along t alone."""
PAIR_SECONDS = 1e-7  # counted seconds for a box and a key


@dataclass(frozen=True, eq=False)
class SlopeRounding:
    """Bounds of the rounding of gradients, with room for the checker. The outputs are ordered by o, then by i."""

    stage: OneStage
    roundings: Roundings
    box: Box
    lost: float = 0.0  # by products that underflow, anywhere in the network
    further: int = 0  # roundings of every product of slopes in other layers, for a head of a deep program
    level: float = 0.0  # about the largest rounding at points; this part of the goal is left to rounding
    unit: float = 1.0  # bounds are returned in this unit

    def over(self, centres: np.ndarray, radii: np.ndarray, goal: float) -> Float[np.ndarray, "boxes outputs"]:
        """Return bounds over cells of the box: that of the box itself if it is negligible beside the goal."""
        if self.whole.max() <= NEGLIGIBLE_SLOPES * goal < math.inf:
            return np.repeat(self.whole, len(centres), axis=0)
        keys = max((head.num_keys for head in self.stage.heads), default=1)
        step = max(1, NUMBERS_AT_A_TIME // keys)
        parts = [slice(i, i + step) for i in range(0, len(centres), step)]
        return np.concatenate([self.on(centres[rows], radii[rows]) for rows in parts])

    @functools.cached_property
    def whole(self) -> Float[np.ndarray, "1 outputs"]:
        middle = self.box.lo / 2 + self.box.hi / 2
        return self.on(middle[None], (self.box.widths / 2 * (1 + 2.0**-40) + 2.0**-40 * self.box.magnitude)[None])

    def on(self, centres: np.ndarray, radii: np.ndarray) -> Float[np.ndarray, "boxes outputs"]:
        """Return bounds over boxes."""
        rounds, d = self.roundings, centres.shape[1]
        reach = (np.abs(centres) + radii) * (1 + 4 * rounds.unit)
        n = rounds.count + ROUNDINGS_OF_TERM
        found = np.zeros((len(centres), len(self.stage.constant.mid), d))
        affine = rounds.sizes[:, :-1] if rounds.sizes.shape[1] > 1 else np.zeros((found.shape[1], d))
        found += affine * (n * rounds.unit / (1 - n * rounds.unit)) + rounds.underflow + self.lost
        with quiet():
            for head, own in zip(self.stage.heads, rounds.heads, strict=True):
                found += _head_bounds(head, own, rounds.dtype, n, self.further, centres, radii, reach)
        found = np.where(np.isfinite(found), found, np.inf)
        return found.reshape(len(centres), -1) * (SLOPE_ROUNDING / self.unit * (1 + 2.0**-40))


def _head_bounds(
    head: SoftHead[Enclosed],
    rounds: HeadRoundings,
    dtype: str,
    after: int,
    further: int,
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    reach: Float[np.ndarray, "boxes d"],
) -> Float[np.ndarray, "boxes outputs d"]:
    """Return the bound of one head, by the theorem. A margin of 2^−20 covers the rounding of this computation."""
    keys, d, u = head.num_keys, centres.shape[1], UNIT_ROUNDOFF[dtype]
    spend(PAIR_SECONDS * len(centres) * keys)
    slopes = head.slopes.mid
    scores = centres @ slopes.T + head.offsets.mid
    lead = scores - scores.max(axis=1, keepdims=True)
    w = np.exp(lead)
    whole = w.sum(axis=1, keepdims=True)
    w /= whole
    mean = w @ slopes
    alpha = np.abs(slopes[None] - mean[:, None]) + 2 * head.slopes.radius.max()  # (boxes, keys, d)
    rho = (alpha * radii[:, None]).sum(axis=2)
    # The errors of scores as computed here, and of the mean slope, whose exponent is then not exactly 0.
    size = np.abs(head.offsets.mid).max() + reach @ np.abs(slopes).max(axis=0)
    unsure = 4 * (head.offsets.radius.max() + reach @ head.slopes.radius.max(axis=0)) + (d + keys + 16) * 4 * U * size
    margin = (1 + 2.0**-20) * np.exp(2 * unsure)[:, None]
    with np.errstate(under="ignore"):
        p = np.minimum(np.exp(np.minimum(lead - np.log(whole) + rho, 0.0)) * margin, 1.0)  # p·e^ρ; ρ may be thousands
    behind = rho - lead + np.max(lead + rho, axis=1, keepdims=True) + unsure[:, None]
    delta = sizes_at(rounds.score_errors, reach) + rounds.score_underflow * (1 + reach.sum(axis=1))[:, None]
    exponent = delta * (1 + u) + u * (behind + delta + delta.max(axis=1, keepdims=True))
    ulps = 2 * ENGINE_ULPS[dtype] * u
    tau = (np.expm1(np.minimum(exponent, 600.0)) * (1 + ulps) + ulps) * (1 + 2.0**-20)
    total = np.minimum((p * tau).sum(axis=1), tau.max(axis=1))
    s = np.where(total < 0.5, 1 - total, np.nan)[:, None]  # otherwise nothing is known about the weights
    computed = np.minimum(p * (1 + tau) / s, 1.0)

    sizes = np.maximum(rounds.slope_sizes(u), np.abs(slopes) + head.slopes.radius)  # S_ki
    alpha = alpha + np.einsum("bk,bki->bi", p, alpha)[:, None]  # about the mean slope anywhere on the box
    mean_size = np.einsum("bk,ki->bi", computed, sizes)
    reached = sizes[None] + mean_size[:, None]  # T_ki
    is_big = (computed > u / 8) | (keys * u > 0.1)
    n = 2 * is_big.sum(axis=1)[:, None] + rounds.count + after + ROUNDINGS_OF_TERM + 2 * d
    gamma = _gamma(n, u)
    of_products = (1 + ALIGNED) * _gamma(n + further, u) if further else gamma
    lost = 4 * keys * (math.exp(NEGLIGIBLE[dtype]) + np.finfo(dtype).smallest_normal)
    of_slopes = rounds.score_errors[:, :d]  # the roundings of a_ki

    outputs = head.num_outputs
    found = np.zeros((len(centres), outputs, d))
    for o in range(outputs):
        values, gates = head.values.mid[:, o], np.zeros((keys, d))
        off = np.full(keys, head.values.radius[:, o].max())
        if head.carried is not None:
            gates = head.carried.mid[:, o]
            off = off + head.carried.radius[:, o].max(axis=0) @ reach.max(axis=0)
        here = values + centres @ gates.T
        average = (w * here).sum(axis=1, keepdims=True)
        swing = np.abs(gates[None] * radii[:, None]).sum(axis=2) + off
        apart = np.abs(here - average) + swing + 2.0**-40 * np.abs(here)
        D = apart + np.minimum((p * apart).sum(axis=1), apart.max(axis=1))[:, None]
        split = np.abs(values - w @ values[:, None]) + off  # engines may also centre v and every V_i on their own
        for i in range(d if head.carried is not None else 0):
            split = split + np.abs(gates[:, i] - w @ gates[:, i, None]) * reach[:, i, None]
        D_split = split + np.minimum((p * split).sum(axis=1), split.max(axis=1))[:, None]
        forms = rounds.value_sizes[:, o]
        value_size = forms[:, -1] + (reach @ forms[:, :-1].T if forms.shape[1] > 1 else np.zeros((len(centres), 1)))
        e_k = gamma * value_size
        mean_value = (computed * value_size).sum(axis=1, keepdims=True)
        small = 2 * np.where(is_big, 0.0, computed)
        e_A = gamma * mean_value + (small * (value_size + mean_value)).sum(axis=1)[:, None]
        dA = (p * tau * D).sum(axis=1, keepdims=True) / s
        distance = np.maximum(D + dA, 2 * D_split) + e_A + e_k
        for i in range(d):
            a, T = alpha[:, :, i], reached[:, :, i]
            G = (p * D * a).sum(axis=1, keepdims=True)
            weights = (p * tau * (D * a + G)).sum(axis=1) / s[:, 0] + dA[:, 0] * (p * tau * a).sum(axis=1) / s[:, 0]
            sums = e_A[:, 0] * mean_size[:, i] + (computed * e_k * T).sum(axis=1)
            sums += (computed * distance * of_slopes[:, i]).sum(axis=1)
            sums += ((of_products * computed + small) * distance * T).sum(axis=1)
            if not float((distance * T).max()) < float(np.finfo(dtype).max) / 4:
                found[:, o, i] = np.inf  # a product may overflow
                continue
            size = np.abs(gates[:, i])
            if size.any():
                mean_gate = (p * size).sum(axis=1, keepdims=True)
                weights += (p * tau * (size + mean_gate)).sum(axis=1) / s[:, 0]
                of_values = np.maximum(rounds.value_sizes[:, o, i], size)
                sums += ((of_products * computed + small) * of_values).sum(axis=1)
            sums += lost * (1 + distance.max(axis=1) * T.max(axis=1) + size.max())
            found[:, o, i] = (weights + sums) * (1 + 2.0**-20) + rounds.underflow[o] * (1 + T.max(axis=1))
    return found


def _gamma(n: Int[np.ndarray, " boxes 1"], u: float) -> Float[np.ndarray, " boxes 1"]:
    return np.where(n * u < 0.5, n * u / (1 - np.minimum(n * u, 0.5)), np.nan)
