"""How far the weights that a program returns are from the optimum, and how many steps and heads an accuracy takes.

For Σ ½(w·x_i − y_i)² + ½ Σ λ_c w_c², started at w₀ (0 unless told), with eigenvalues of its Hessian in [μ, L]:

    |w_T − w*| ≤ contraction·(‖y‖/√μ + |w₀|)  +  amplification·(δ + rounding of the updates),

δ the error of one gradient (`differences`), contraction and amplification those of the method (`acceleration`). Every
residual of exact steps is ≤ R = overshoot·(‖y‖ + √L|w₀|): so δ's norm bounds need no look at the examples beyond ‖y‖
and max|x_i|. The heads are made for residuals up to r̄ = (1 + h)·R. As long as these are met, v is within swing·(δ +
rounding) of the exact one, and the next residual within √L times that of its own; if this is ≤ h·R, all are ≤ r̄ by
induction. If it is not, the steps may run away (e grows like sinh), and nothing is proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import BoundNotMet, InputError
from attnc.incontext.acceleration import Schedule, steps_for
from attnc.incontext.differences import MAX_HEADS, SLACK, Differences, Sizes, choose
from attnc.incontext.prompt import Prompt
from attnc.incontext.task import Task
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

if TYPE_CHECKING:
    from jaxtyping import Float


HEADROOM = 0.25
"""h: what the errors of the gradients may add to the residuals."""


@dataclass(frozen=True)
class Norms:
    """What the program may know of the examples: max |x̃_i|₂, |y|₂ over all, and the Hessian's eigenvalues."""

    x: float
    y: float
    L: float
    mu: float

    @property
    def weights(self) -> float:
        """|w*| ≤ ‖y‖/√μ, since μ|w*|² ≤ ‖y‖²."""
        return self.y / math.sqrt(self.mu) if self.mu else math.inf


@dataclass(frozen=True)
class Plan:
    """What was chosen, and the bound of |w_T − w*|₂ with it."""

    task: Task
    gradient: Bound  # δ, of one gradient
    bound: Bound
    weights: float  # a bound of |w*|
    start: float  # and of |w₀|


def plan_least_squares(
    prompt: Prompt,
    norms: Norms,
    penalty: tuple[float, ...],
    *,
    accuracy: float | None = None,
    steps: int | None = None,
    heads: int | None = None,
    eps: float | None = None,
    method: str = "chebyshev",
    eta: float | None = None,
    start: float = 0.0,
    dtype: str = "float64",
    max_steps: int = 100_000,
) -> Plan:
    """The steps, heads and ε that bring |w_T − w*|₂ to `accuracy`, or the bound that given ones have.

    ε balances truncation against rounding for each number of heads; the fewest heads whose bound suffices are taken.
    `start` bounds |w₀|. Raises BoundNotMet where no number of heads suffices: rounding in `dtype` is the limit then.
    """
    if accuracy is not None and not accuracy > 0:
        raise InputError(f"the accuracy is a positive number, found {accuracy!r}")
    if accuracy is None and steps is None:
        raise InputError("give an accuracy, or a number of steps")
    if steps is None:
        assert accuracy is not None
        wanted = accuracy / (2 * (norms.weights + start)) if norms.weights + start else 1.0
        steps = steps_for(method, norms.L, norms.mu, wanted, max_steps, eta)
        if steps > max_steps:
            best = Schedule(method, max_steps, norms.L, norms.mu, eta).contraction * (norms.weights + start)
            raise BoundNotMet(
                f"cannot reach accuracy {accuracy:g} in {max_steps:,} steps of {method}: at L={norms.L:.6g}, "
                f"mu={norms.mu:.6g} they leave {best:.3g}. Allow more steps, or condition the problem better.",
                eps=accuracy,
                bound=best,
            )
    schedule = Schedule(method, steps, norms.L, norms.mu, eta)
    tried = []
    for count in (heads,) if heads is not None else range(1, MAX_HEADS + 1):
        plan = _with_heads(prompt, norms, penalty, schedule, count, eps, start, dtype)
        if accuracy is not None and plan.bound.value <= accuracy:
            return plan
        tried.append(plan)
    best_plan = min(tried, key=lambda plan: plan.bound.value)
    if accuracy is not None:
        raise BoundNotMet(
            f"cannot bring the bound to {accuracy:g}: with {best_plan.task.differences.heads} pairs of heads and "
            f"eps={best_plan.task.differences.eps:g} it is {best_plan.bound.value:.3g} = {best_plan.bound}. A smaller "
            f"eps trades truncation for rounding in {dtype}; here they balance.",
            eps=accuracy,
            bound=best_plan.bound.value,
        )
    return best_plan


def _with_heads(
    prompt: Prompt,
    norms: Norms,
    penalty: tuple[float, ...],
    schedule: Schedule,
    heads: int,
    eps: float | None,
    start: float,
    dtype: str,
) -> Plan:
    # Residuals at the start are at most ‖y‖ + √L·|w₀|; |v| on the way: |w*|, and what the first error may swing to.
    exact = max(schedule.overshoot * (norms.y + math.sqrt(norms.L) * start), 2.0**-800)  # targets may be zero
    reach = (1 + HEADROOM) * exact
    size = (1 + HEADROOM) * (1 + schedule.overshoot) * (norms.weights + start)
    parts = size * norms.x + norms.y if math.isfinite(size) else 4 * reach
    sizes = Sizes(prompt.rows, prompt.num_weights + 1, norms.x, reach, parts)
    differences = choose(sizes, heads, dtype) if eps is None else Differences(heads, eps)
    gradient = differences.bound(sizes, dtype)
    task = Task(prompt, schedule, differences, reach, penalty)
    amplification, u = schedule.amplification, UNIT_ROUNDOFF[dtype]
    per_step = gamma(8, u) * (4 * size + max(schedule.etas) * norms.L * size) / min(schedule.etas)
    terms = [
        ("convergence", schedule.contraction * (norms.weights + start), f"{schedule.steps} steps of {schedule.method}")
    ]
    terms += [(t.name, amplification * t.value, f"{t.reason}, over all steps") for t in gradient.terms]
    terms += [("updates", amplification * per_step, f"the affine maps in {dtype}, over all steps")]
    if not float(up(math.sqrt(norms.L) * schedule.swing * (gradient.value + per_step), SLACK)) <= HEADROOM * exact:
        terms += [("residuals", math.inf, f"errors of this size may drive them beyond the {reach:.3g} provided for")]
    rounded = (Term(name, float(up(value, SLACK)), reason) for name, value, reason in terms)
    return Plan(task, gradient, Bound(tuple(rounded)), norms.weights, start)


def gradient_bound(task: Task, x: float, weights: float, dtype: str = "float64") -> Bound:
    """δ: |g of one gradient layer − the exact sum (mean) over the prompt|₂ for |x̃_i| ≤ x, |v| ≤ weights.

    Squared loss: that of the difference heads. Poisson: e^{v·x̃_i} is summed as it is, rounding and the examples' share
    of the denominator apart; the difference heads make the moment Σ y_i x̃_i.
    """
    rows, width = task.prompt.rows, task.prompt.num_weights + 1
    if task.loss == "squared":
        sizes = Sizes(rows, width, x, task.reach, task.reach + 2 * x * weights, task.mean)
        return task.differences.bound(sizes, dtype)
    u, C = UNIT_ROUNDOFF[dtype], task.sink(dtype)
    grown = (1 if task.mean else rows) * x * math.exp(task.reach)
    off = gamma(width + 3, u) * x * weights + 2 * u * (C + task.reach) + 2 * LIBM_ULPS * u + gamma(task.keys + 8, u)
    moment = task.differences.bound(Sizes(rows, 2, x, task.targets, task.targets, task.mean), dtype)
    terms = (
        Term("exponentials", float(up(grown * off, SLACK)), f"their sum in {dtype}"),
        Term("shares", float(up(grown * task.keys * math.exp(task.reach - C), SLACK)), "of the denominator"),
    )
    return Bound((*terms, *(Term(f"moment: {t.name}", t.value, t.reason) for t in moment.terms)))


def proximal_step(
    weights: Float[np.ndarray, " d"], gradient: Float[np.ndarray, " d"], l1: Float[np.ndarray, " d"], L: float
) -> Float[np.ndarray, " d"]:
    """w − prox(w − ∇/L): zero at the optimum."""
    moved = weights - gradient / L
    kept: np.ndarray = weights - np.sign(moved) * np.maximum(np.abs(moved) - l1 / L, 0.0)
    return kept


def proximal_bound(
    weights: Float[np.ndarray, " d"],
    gradient: Float[np.ndarray, " d"],
    l1: Float[np.ndarray, " d"],
    L: float,
    mu: float,
) -> Bound:
    """|w − w*|₂ from what is left at w, for F = smooth + Σ l1_c|w_c|, strongly convex with μ, smooth part with L.

    With s the proximal step, w⁺ = w − s has a subgradient of norm ≤ L|s| + |∇f(w⁺) − ∇f(w)| ≤ 2L|s|, so that
    |w⁺ − w*| ≤ 2L|s|/μ. Nothing is known for μ = 0. With l1 = 0 it is |∇F(w)|/μ in another guise.
    """
    step = float(np.linalg.norm(proximal_step(weights, gradient, l1, L)))
    value = step * (1 + 2 * L / mu) if mu else math.inf
    return Bound((Term("optimality", float(up(value, 2**20)), "from the proximal gradient at the weights found"),))
