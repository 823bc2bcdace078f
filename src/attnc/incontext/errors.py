"""Bounds of the distance from a program's weights to the optimum; the steps and heads that an accuracy takes.

For Σ ½(w·x_i − y_i)² + ½ Σ λ_c w_c², started at w₀, with eigenvalues of its Hessian in [μ, L]:

    |w_T − w*| ≤ contraction·(‖y‖/√μ + |w₀|)  +  amplification·(δ + rounding of the updates),

with δ the error of one gradient (`differences`), contraction and amplification those of the method (`acceleration`).
Every residual of exact steps is ≤ R = overshoot·(‖y‖ + √L|w₀|), so that δ depends on the examples through ‖y‖ and
max|x_i| alone. The heads are made for residuals up to r̄ = (1 + h)·R. As long as no residual is larger, v is within
swing·(δ + rounding) of the exact one, and the next residual within √L times that of its own. If this is ≤ h·R, all
residuals are ≤ r̄ by induction. If it is not, the steps may run away (e grows like sinh), and nothing is proved.

Two tasks in one program (`compose`), the second from where the first ended:
Theorem.  Let task k be a quadratic with plan k, and task 2 start at the result of task 1 with v = p. Then the program
          is within  contraction₂·ε₁ + ε₂  of exact descent on the two, ε_k = amplification_k·(δ_k + updates).
Proof.    The steps of task 2 are the same polynomial in the Hessian for every start with v = p. From two starts they
          lead to results that differ by contraction₂ times the distance of the starts. Within task 2 errors add up as
          before, with residuals bounded for the start |w| ≤ |w₁*| + |w₁ − w₁*|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import BoundNotMet, InputError
from attnc.incontext.acceleration import Schedule, steps_for
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import CLOSED_FORM_SLACK, MAX_HEADS, Differences, Sizes, choose, rounded_up
from attnc.incontext.prompt import Prompt
from attnc.ir.program import Program
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

if TYPE_CHECKING:
    from jaxtyping import Float

HEADROOM = 0.25
"""The part h of the exact residuals by which errors of the gradients may raise them: a quarter costs the heads
little accuracy, and errors stay far below it unless the spacing is too coarse."""


@dataclass(frozen=True)
class Norms:
    """Bounds of the examples on which a program may depend: max |x̃_i|₂, |y|₂, and the Hessian's eigenvalues."""

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
    """A task whose steps and heads were chosen, and its bound of |w_T − w*|₂."""

    task: Task
    gradient: Bound  # the error δ of one gradient
    bound: Bound
    weights: float  # a bound of |w*|
    start: float  # a bound of |w₀|

    @property
    def reached(self) -> float:
        """A bound of the norm of the weights that the steps return, at which a second task starts."""
        return float(up(self.weights + self.bound.value, CLOSED_FORM_SLACK))


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
    """Choose the steps, heads and ε that bring |w_T − w*|₂ to `accuracy`, or bound it for given ones.

    For each number of heads, ε balances truncation against rounding. The plan has the fewest heads whose bound
    suffices. `start` bounds |w₀|. Raises BoundNotMet if no number of heads suffices: rounding in `dtype` is the limit
    then.
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
    # Residuals at the start are at most ‖y‖ + √L·|w₀|. On the way |v| ≤ |w*| + the swing of the first error.
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
        ("convergence", schedule.contraction * (norms.weights + start), f"{schedule.steps} steps of {schedule.method}"),
        *((t.name, amplification * t.value, f"{t.reason}, over all steps") for t in gradient.terms),
        ("updates", amplification * per_step, f"the affine maps in {dtype}, over all steps"),
    ]
    if (
        not float(up(math.sqrt(norms.L) * schedule.swing * (gradient.value + per_step), CLOSED_FORM_SLACK))
        <= HEADROOM * exact
    ):
        terms += [("residuals", math.inf, f"errors of this size may drive them beyond the {reach:.3g} provided for")]
    return Plan(task, gradient, rounded_up(*terms), norms.weights, start)


def compose(first: Plan, second: Plan, dtype: str = "float64") -> tuple[Program, Bound]:
    """The program of both tasks, and a bound of |program − exact descent|₂.

    Its prompt has the rows of the first task above those of the second. Plan the second with start=first.reached.
    """
    if second.start < first.reached:
        raise InputError(
            f"the second task is planned for a start of norm ≤ {second.start:.3g}, but the first may return weights of "
            f"norm {first.reached:.3g}: plan it with start=first.reached"
        )
    program = descent_program([first.task, second.task], dtype)
    contraction = second.task.schedule.contraction
    terms = [(f"first: {t.name}", contraction * t.value, t.reason) for t in first.bound.terms[1:]]
    return program, rounded_up(*terms, *((f"second: {t.name}", t.value, t.reason) for t in second.bound.terms[1:]))


def gradient_bound(task: Task, x: float, weights: float, dtype: str = "float64") -> Bound:
    """A bound δ of |g of one gradient layer − the exact sum or mean|₂, for |x̃_i| ≤ x and |v| ≤ weights.

    For the squared loss it is the bound of the difference heads. For Poisson the head sums e^{v·x̃_i} itself, off by
    rounding and by the examples' share of the denominator; difference heads make the moment Σ y_i x̃_i.
    """
    rows, width = task.prompt.rows, task.prompt.num_weights + 1
    if task.loss == "squared":
        sizes = Sizes(rows, width, x, task.reach, task.reach + 2 * x * weights, task.mean)
        return task.differences.bound(sizes, dtype)
    u, C = UNIT_ROUNDOFF[dtype], task.sink(dtype)
    grown = (1 if task.mean else rows) * x * math.exp(task.reach)
    off = gamma(width + 3, u) * x * weights + 2 * u * (C + task.reach) + 2 * LIBM_ULPS * u + gamma(task.keys + 8, u)
    moment = task.differences.bound(Sizes(rows, 2, x, task.targets, task.targets, task.mean), dtype)
    sums = rounded_up(
        ("exponentials", grown * off, f"their sum in {dtype}"),
        ("shares", grown * task.keys * math.exp(task.reach - C), "of the denominator"),
    )
    return Bound((*sums.terms, *(Term(f"moment: {t.name}", t.value, t.reason) for t in moment.terms)))


def proximal_step(
    weights: Float[np.ndarray, " d"], gradient: Float[np.ndarray, " d"], l1: Float[np.ndarray, " d"], L: float
) -> Float[np.ndarray, " d"]:
    """The step w − prox(w − ∇/L), which is zero at the optimum."""
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
    """A bound of |w − w*|₂ from the proximal step at w, for F = smooth + Σ l1_c|w_c|, μ-strongly convex.

    The gradient of the smooth part is L-Lipschitz. With s the proximal step, w⁺ = w − s has a subgradient of norm
    ≤ L|s| + |∇f(w⁺) − ∇f(w)| ≤ 2L|s|, so that |w⁺ − w*| ≤ 2L|s|/μ. For μ = 0 the bound is infinite.
    """
    step = float(np.linalg.norm(proximal_step(weights, gradient, l1, L)))
    value = step * (1 + 2 * L / mu) if mu else math.inf
    return Bound((Term("optimality", float(up(value, 2**20)), "from the proximal gradient at the weights found"),))
