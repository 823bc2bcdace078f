"""Bounds of the distance from a program's weights to the optimum, and the steps and heads that an accuracy needs.

For Σ ½(w·x_i − y_i)² + ½ Σ λ_c w_c², started at w₀, with eigenvalues of its Hessian in [μ, L]:

    |w_T − w*| ≤ contraction·(‖y‖/√μ + |w₀|)  +  amplification·(δ + rounding of the updates),

where δ is the error of one gradient (`differences`), and `acceleration` gives contraction and amplification. Every
residual of exact steps is ≤ R = overshoot·(‖y‖ + √L|w₀|), so that δ depends on the examples only through ‖y‖ and
max|x_i|. The heads are made for residuals up to r̄ = (1 + h)·R. As long as no residual is larger, v is within
swing·(δ + rounding) of the exact v, and the next residual is within √L times that of the exact residual. If this is
≤ h·R, all residuals are ≤ r̄ by induction. Otherwise the steps may diverge (e grows like sinh), and nothing is proved.

Two tasks in one program (`compose`), where the second starts from the result of the first:
Theorem.  Let task k be a quadratic with plan k (or a loss of `strongly_convex`, with plain steps). Let task 2 start at
          the result of task 1 with v = p. Then the program is within  contraction₂·ε₁ + ε₂  of exact descent on both,
          ε_k = amplification_k·(δ_k + updates).
Proof.    The steps of task 2 are the same polynomial in the Hessian for every start with v = p. From two starts they
          lead to results that differ by at most contraction₂ times the distance between the starts. Plain steps on a
          strongly convex loss contract by ρ each, on the ball that holds both starts. Within task 2
          errors add up as before, with residuals bounded for the start |w| ≤ |w₁*| + |w₁ − w₁*|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.errors import BoundNotMet, InputError
from attnc.incontext.acceleration import Schedule, steps_for
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import CLOSED_FORM_SLACK, MAX_HEADS, Differences, Sizes, choose, rounded_up
from attnc.incontext.prompt import Prompt
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

HEADROOM = 0.25
"""The largest growth h of residuals caused by errors of the gradients, as a fraction of the exact residuals. Measured:
with a quarter the bound is 5 % larger than with a hundredth, and with 1 it is twice as large."""


@dataclass(frozen=True)
class Norms:
    """The bounds of the examples on which a program may depend.

    Parameters
    ----------
    x : float
        A bound of the 2-norm of every example x̃_i, including the 1 of an intercept.
    y : float
        A bound of the 2-norm of all targets together.
    L, mu : float
        Bounds of the Hessian's eigenvalues: all of them lie in [mu, L].

    Attributes
    ----------
    weights : float
        A bound of |w*|₂, the norm of the optimum.

    Examples
    --------
    >>> from attnc.incontext import Norms
    >>> Norms(x=1.0, y=6.0, L=9.0, mu=4.0).weights
    3.0
    """

    x: float
    y: float
    L: float
    mu: float

    @property
    def weights(self) -> float:
        """A bound of |w*|: it is at most ‖y‖/√μ, since μ|w*|² ≤ ‖y‖².

        Examples
        --------
        >>> from attnc.incontext import Norms
        >>> Norms(x=1.0, y=6.0, L=9.0, mu=4.0).weights
        3.0
        """
        return self.y / math.sqrt(self.mu) if self.mu else math.inf


@dataclass(frozen=True)
class Plan:
    """A task with chosen steps and heads, and its bound of |w_T − w*|₂.

    Attributes
    ----------
    task : Task
        The task, for `descent_program`.
    gradient : Bound
        A bound of the error δ of one gradient.
    bound : Bound
        A bound of |w_T − w*|₂, term by term.
    weights : float
        A bound of |w*|₂.
    start : float
        A bound of |w₀|₂, the norm of the first weights.
    reached : float
        A bound of |w_T|₂, for a second task that starts there.

    Examples
    --------
    >>> from attnc.incontext import Norms, Prompt, plan_least_squares
    >>> norms = Norms(x=1.0, y=2.0, L=4.0, mu=1.0)
    >>> plan = plan_least_squares(Prompt(rows=8, features=2), norms, penalty=(0.0, 0.0), accuracy=1e-3)
    >>> plan.bound.value <= 1e-3 and plan.weights == 2.0
    True
    """

    task: Task
    gradient: Bound
    bound: Bound
    weights: float
    start: float

    @property
    def reached(self) -> float:
        """A bound of |w_T|₂, for a second task that starts there.

        Examples
        --------
        >>> from attnc.incontext import Norms, Prompt, plan_least_squares
        >>> norms = Norms(x=1.0, y=2.0, L=4.0, mu=1.0)
        >>> plan = plan_least_squares(Prompt(rows=8, features=2), norms, penalty=(0.0, 0.0), accuracy=1e-3)
        >>> plan.weights + plan.bound.value <= plan.reached
        True
        """
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
    safeguard: bool = False,
) -> Plan:
    """Choose the steps, heads and ε that bring |w_T − w*|₂ to `accuracy`, or bound it for given steps.

    For each number of heads, ε balances truncation against rounding. The plan has the fewest heads whose bound
    suffices.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt.
    norms : Norms
        Bounds of the examples.
    penalty : tuple of float
        The penalty λ_c of every weight, at least 0.
    accuracy : float, optional
        The bound of |w_T − w*|₂ to reach. Without it, give `steps`.
    steps : int, optional
        Number of steps; None takes the fewest that suffice.
    heads : int, optional
        Number of pairs of heads that compute the gradient; None takes the fewest that suffice.
    eps : float, optional
        The spacing of the difference heads, a power of two; None takes the best.
    method : {"chebyshev", "nesterov", "heavy_ball", "plain"}
        The kind of steps.
    eta : float, optional
        The length of plain steps; None chooses it.
    start : float
        A bound of |w₀|₂, the norm of the first weights.
    dtype : {"float64", "float32"}
        The arithmetic of the program.
    max_steps : int
        Maximum number of steps.
    safeguard : bool
        Whether every weight is kept within the size that it can have in the domain, so that no prompt makes the
        steps diverge. It takes one more attention layer per step.

    Returns
    -------
    Plan

    Raises
    ------
    BoundNotMet
        If no number of steps or heads suffices: with enough steps, rounding in `dtype` is the limit.
    InputError
        If neither accuracy nor steps are given, or a parameter is out of range.

    Examples
    --------
    >>> from attnc.incontext import Norms, Prompt, plan_least_squares
    >>> norms = Norms(x=1.0, y=2.0, L=4.0, mu=1.0)
    >>> plan = plan_least_squares(Prompt(rows=8, features=2), norms, penalty=(0.0, 0.0), accuracy=1e-3)
    >>> plan.task.schedule.steps, plan.task.differences.heads
    (9, 1)
    """
    if accuracy is not None and not accuracy > 0:
        raise InputError(f"the accuracy is a positive number, found {accuracy!r}")
    distance = norms.weights + start  # |w₀ − w*| is at most this
    if steps is None:
        if accuracy is None:
            raise InputError("give an accuracy, or a number of steps")
        wanted = accuracy / (2 * distance) if distance else 1.0
        steps = steps_for(method, norms.L, norms.mu, wanted, max_steps, eta)
        if steps > max_steps:
            best = Schedule(method, max_steps, norms.L, norms.mu, eta).contraction * distance
            raise BoundNotMet(
                f"cannot reach accuracy {accuracy:g} in {max_steps:,} steps of {method}: at L={norms.L:.6g}, "
                f"mu={norms.mu:.6g} they leave {best:.3g}. Allow more steps, or condition the problem better.",
                eps=accuracy,
                bound=best,
            )
    schedule = Schedule(method, steps, norms.L, norms.mu, eta)

    def with_heads(count: int) -> Plan:
        # Residuals at the start are at most ‖y‖ + √L·|w₀|. During the steps |v| ≤ |w*| + the swing of the first error.
        exact = max(schedule.overshoot * (norms.y + math.sqrt(norms.L) * start), 2.0**-800)  # targets may be zero
        reach = (1 + HEADROOM) * exact
        size = (1 + HEADROOM) * (1 + schedule.overshoot) * distance
        parts = size * norms.x + norms.y if math.isfinite(size) else 4 * reach
        sizes = Sizes(prompt.rows, prompt.num_weights + 1, norms.x, reach, parts)
        differences = choose(sizes, count, dtype) if eps is None else Differences(count, eps)
        gradient = differences.bound(sizes, dtype)
        amplification = schedule.amplification
        per_step = gamma(8, UNIT_ROUNDOFF[dtype]) * (4 * size + max(schedule.etas) * norms.L * size)
        per_step /= min(schedule.etas)
        terms = [
            ("convergence", schedule.contraction * distance, f"{schedule.steps} steps of {method}"),
            *((t.name, amplification * t.value, f"{t.reason}, over all steps") for t in gradient.terms),
            ("updates", amplification * per_step, f"the affine maps in {dtype}, over all steps"),
        ]
        off = float(up(math.sqrt(norms.L) * schedule.swing * (gradient.value + per_step), CLOSED_FORM_SLACK))
        if not off <= HEADROOM * exact:
            reason = f"errors of this size may make residuals larger than the heads allow, {reach:.3g}"
            terms.append(("residuals", math.inf, reason))
        task = Task(prompt, schedule, differences, reach, penalty, clip=_kept_within(size) if safeguard else 0.0)
        return Plan(task, gradient, rounded_up(*terms), norms.weights, start)

    tried = []
    for count in (heads,) if heads is not None else range(1, MAX_HEADS + 1):
        tried.append(with_heads(count))
        if accuracy is not None and tried[-1].bound.value <= accuracy:
            return tried[-1]
    plan = min(tried, key=lambda plan: plan.bound.value)
    if accuracy is None:
        return plan
    differences, bound = plan.task.differences, plan.bound
    raise BoundNotMet(
        f"cannot bring the bound to {accuracy:g}: with {differences.heads} pairs of heads and eps={differences.eps:g} "
        f"it is {bound.value:.3g} = {bound}. A smaller eps trades truncation for rounding in {dtype}; here they "
        "balance.",
        eps=accuracy,
        bound=bound.value,
    )


def _kept_within(size: float) -> float:
    """Return a power of two that no weight exceeds in the domain."""
    if not math.isfinite(size):
        raise InputError("a safeguard needs a bound of the weights: mu > 0")
    return math.ldexp(1.0, math.frexp(size)[1])


def compose(first: Plan, second: Plan, dtype: str = "float64") -> tuple[Program, Bound]:
    """Return the program of both tasks, and a bound of |program − exact descent|₂.

    Its prompt has the rows of the first task above those of the second. Plan the second with start=first.reached.

    Parameters
    ----------
    first, second : Plan
        The plans of the tasks: least squares with any steps, or Poisson regression with plain steps.
    dtype : {"float64", "float32"}
        The arithmetic of the program.

    Returns
    -------
    program : Program
        Its inputs are the first weights and the prompts, one below the other. Its output is the last weights.
    bound : Bound
        A bound of the distance to exact descent on both tasks, one after the other.

    Raises
    ------
    InputError
        If the second task is planned for a smaller start than the first may return, or a task of Poisson regression has
        other than plain steps.

    Examples
    --------
    >>> from attnc.incontext import Norms, Prompt, compose, plan_least_squares
    >>> norms = Norms(x=1.0, y=2.0, L=1.0, mu=0.5)
    >>> first = plan_least_squares(Prompt(4, 2), norms, (0.0, 0.0), accuracy=1e-3)
    >>> second = plan_least_squares(Prompt(4, 2), norms, (0.0, 0.0), accuracy=1e-3, start=first.reached)
    >>> program, bound = compose(first, second)
    >>> program.input_shapes[1], bound.value < 1e-3
    ((8, 4), True)
    """
    if second.start < first.reached:
        raise InputError(
            f"the second task is planned for a start of norm ≤ {second.start:.3g}, but the first may return weights of "
            f"norm {first.reached:.3g}: plan it with start=first.reached"
        )
    for plan in (first, second):
        if plan.task.loss != "squared" and plan.task.schedule.method != "plain":
            raise InputError(f"tasks of the {plan.task.loss} loss are composed with plain steps")
    program = descent_program([first.task, second.task], dtype)
    contraction = second.task.schedule.contraction
    terms = [(f"first: {t.name}", contraction * t.value, t.reason) for t in first.bound.terms[1:]]
    return program, rounded_up(*terms, *((f"second: {t.name}", t.value, t.reason) for t in second.bound.terms[1:]))


def proximal_step(
    weights: Float[np.ndarray, " d"], gradient: Float[np.ndarray, " d"], l1: Float[np.ndarray, " d"], L: float
) -> float:
    """Return the norm of the proximal step w − prox(w − ∇/L), which is zero at the optimum."""
    moved = weights - gradient / L
    return float(np.linalg.norm(weights - np.sign(moved) * np.maximum(np.abs(moved) - l1 / L, 0.0)))
