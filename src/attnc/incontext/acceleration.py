"""Gradient steps with momentum: affine maps of two states, with bounds on how much they shrink and amplify errors.

The state is (v, p), and the gradient ∇ is taken at v.

    plain, heavy ball, Chebyshev    v' = v − η_t ∇ + β_t (v − p),  p' = v;            the iterate x is v
    Nesterov                        p' = v − η ∇,                  v' = p' + β_t (p' − p);  the iterate x is p

For a quadratic F with eigenvalues in [μ, L], started at x₀, in the 2-norm and per eigenvector:
    |x_T − x*| ≤ contraction·|x₀ − x*|, and if the error of gradients is ≤ δ: |x_T − exact x_T| ≤ amplification·δ.
Plain: ρ = max |1 − ηλ|, errors add up to ηδ(1−ρ^T)/(1−ρ). Heavy ball and Nesterov: the response to an impulse is
ρ^t·U_t(cos θ), |U_t| ≤ t+1. Chebyshev: T_t(ξ₀)·e_t obeys the Chebyshev recurrence in ξ ∈ [−1, 1], so an impulse at
step t grows to at most (T−t)·T_{t+1}(ξ₀)/T_T(ξ₀), ξ₀ = (L+μ)/(L−μ).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import up

Penalty = float | np.ndarray
"""The penalty of the weights: one number for all, or one for each."""
METHODS = ("plain", "heavy_ball", "nesterov", "chebyshev")
SUM_SLACK = 2**14
"""Units in the last place by which powers and sums of positive terms are rounded up. Up to 10⁴ steps make fewer
roundings."""


@dataclass(frozen=True)
class Schedule:
    """T steps of one method for a gradient whose Jacobian has eigenvalues in [μ, L]."""

    method: str
    steps: int
    L: float
    mu: float
    eta: float | None = None  # the length of plain steps; None takes 2/(L + μ)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"the method is one of {', '.join(METHODS)}, found {self.method!r}")
        if self.steps < 1:
            raise InputError(f"a program needs at least one step, found {self.steps}")
        if not (math.isfinite(self.L) and 0 <= self.mu <= self.L and self.L > 0):
            raise InputError(f"eigenvalue bounds are 0 ≤ mu ≤ L, found mu={self.mu!r}, L={self.L!r}")
        if self.eta is not None and not (self.method == "plain" and 0 < self.eta * self.L < 2):
            raise InputError(
                f"a step size of {self.eta:g} would diverge: the largest eigenvalue is at most L = {self.L:.6g}, so "
                f"that plain steps need less than 2/L = {2 / self.L:.6g} (steps with momentum follow from L and mu)"
            )
        if self.mu == 0 and self.method in ("heavy_ball", "chebyshev"):
            raise InputError(f"{self.method} needs mu > 0, the smallest eigenvalue; use nesterov or plain")

    @property
    def iterate(self) -> str:
        """The state that holds the iterate. It is v, except for Nesterov, whose v is extrapolated from p."""
        return "p" if self.method == "nesterov" else "v"

    def check_steady(self) -> None:
        """Raise InputError if the lengths of steps vary.

        It is for programs whose step moves every token of the prompt.
        """
        if len(set(self.pairs)) > 1:
            raise InputError(
                "a step moves every token, and is stored once: choose plain, heavy_ball, or nesterov with mu > 0"
            )

    def step(self, t: int, penalty: Penalty) -> dict[tuple[str, str], Penalty]:
        """Return the coefficients of step t by (new, old).

        They give v and p from v, p and g, where ∇ = g + penalty·v.
        """
        eta, beta = self.pairs[t]
        damped = 1 - eta * penalty
        if self.method == "nesterov":
            made = {("p", "v"): damped, ("p", "g"): -eta, ("v", "v"): (1 + beta) * damped}
            return made | {("v", "g"): -(1 + beta) * eta, ("v", "p"): -beta}
        return {("p", "v"): 1.0, ("v", "v"): damped + beta, ("v", "g"): -eta, ("v", "p"): -beta}

    @cached_property
    def rho(self) -> float:
        """The rate: an error shrinks like ρ^t (times t for heavy ball and Nesterov)."""
        if self.method == "plain":
            eta = self.pairs[0][0]
            return max(abs(1 - eta * self.L), abs(1 - eta * self.mu))
        if self.method == "nesterov":
            return math.sqrt(self._root_rate * (1 - self.mu / self.L)) if self.mu else 1.0
        return self._root_rate

    @property
    def _root_rate(self) -> float:
        """(√L − √μ)/(√L + √μ), the best rate of momentum."""
        root = math.sqrt(self.mu / self.L)
        return (1 - root) / (1 + root)

    @cached_property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """The length η_t and the momentum β_t of every step. Nesterov's momenta are t/(t + 3) if μ = 0.

        Chebyshev: ω_{t+1} = 2ξ₀·T_t(ξ₀)/T_{t+1}(ξ₀), with T_n(ξ₀) = (ρ^{−n} + ρ^n)/2.
        """
        L, mu, rho, steps = self.L, self.mu, self._root_rate, range(self.steps)
        if self.method == "plain":
            return ((self.eta or (2 / (L + mu) if mu else 1 / L), 0.0),) * self.steps
        if self.method == "heavy_ball":
            return ((4 / (math.sqrt(L) + math.sqrt(mu)) ** 2, rho**2),) * self.steps
        if self.method == "nesterov":
            return tuple((1 / L, rho if mu else t / (t + 3)) for t in steps)
        omegas = [(1 + rho**2) * (1 + rho ** (2 * t)) / (1 + rho ** (2 * t + 2)) if t else 1.0 for t in steps]
        return tuple((2 * omega / (L + mu), omega - 1) for omega in omegas)

    @property
    def etas(self) -> tuple[float, ...]:
        """The lengths η_t of the steps."""
        return tuple(eta for eta, _ in self.pairs)

    @cached_property
    def contraction(self) -> float:
        """The factor with |x_T − x*| ≤ contraction·|x₀ − x*| for a quadratic. It is 1 for μ = 0."""
        rho, T = self.rho, self.steps
        if not self.mu:
            return 1.0
        if self.method == "plain":
            return float(up(rho**T, SUM_SLACK))
        if self.method == "chebyshev":
            return float(up(2 * rho**T / (1 + rho ** (2 * T)), SUM_SLACK))
        return float(up(rho**T * (1 + T * (1 + rho)), SUM_SLACK))

    @cached_property
    def amplification(self) -> float:
        """The factor with |x_T − exact x_T| ≤ amplification·δ, for a quadratic, or for plain steps that contract by ρ.

        It is infinite for momentum that varies (Nesterov with μ = 0), because nothing is proved there.
        """
        rho, T, etas = self.rho, self.steps, self.etas
        if self.method == "plain":
            total = etas[0] * (T if rho >= 1 else (1 - rho**T) / (1 - rho))
        elif self.method == "chebyshev":
            ratios = (rho ** (T - t - 1) * (1 + rho ** (2 * t + 2)) / (1 + rho ** (2 * T)) for t in range(T))
            total = math.fsum((T - t) * ratio * etas[t] for t, ratio in enumerate(ratios))
        else:
            total = etas[0] * math.fsum((t + 1) * rho**t for t in range(T)) if self.mu else math.inf
        return float(up(total, SUM_SLACK))

    @cached_property
    def swing(self) -> float:
        """The factor with |v_t − exact v_t| ≤ swing·δ for every step t.

        Plain and heavy ball: x_t is v_t, and the sums grow with t. Nesterov: v = x + β(x − x₋), β ≤ 1. Chebyshev: the
        terms of the sum for t are at most 2·max η/min η ≤ 4 times those for T.
        """
        return {"nesterov": 3.0, "chebyshev": 4.0}.get(self.method, 1.0) * self.amplification

    @cached_property
    def overshoot(self) -> float:
        """A bound of the residuals after any step, divided by those at the start, in the 2-norm over the examples.

        Chebyshev and plain polynomials stay below 1. Heavy ball swings like its impulse response. For Nesterov, on
        any convex F and with any proximal map, F(x') + L/2·|x'−x|² ≤ F(x) + L/2·|v−x|² and β ≤ 1 give F(x_t) ≤ F(x₀),
        so that residuals at v = x + β(x − x₋) are at most 3 times the first.
        """
        if self.method == "nesterov":
            return 3.0
        if self.method == "heavy_ball":
            return max(1.0, max(self.rho**t * (1 + t * (1 + self.rho)) for t in range(self.steps))) * (1 + 1e-9)
        return 1.0


def steps_for(method: str, L: float, mu: float, tol: float, max_steps: int, eta: float | None = None) -> int:
    """Return the smallest number of steps with contraction ≤ tol, or max_steps + 1 if max_steps is not enough."""
    return 1 + bisect_left(
        range(1, max_steps + 1), True, key=lambda steps: Schedule(method, steps, L, mu, eta).contraction <= tol
    )


def eigenvalue_bounds(gram: Float[np.ndarray, "d d"]) -> tuple[float, float]:
    """Return (L, μ) such that [μ, L] contains all eigenvalues that are not zero up to rounding."""
    values = np.linalg.eigvalsh(gram)
    slack = 4 * len(gram) * np.finfo(float).eps * float(max(values[-1], np.finfo(float).tiny))
    kept = values[values > 2 * slack]
    if not len(kept):
        return 1.0, 1.0  # every gradient is zero
    return float(values[-1] + slack), float(kept[0] - slack)
