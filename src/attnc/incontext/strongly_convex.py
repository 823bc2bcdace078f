"""Bounds for T gradient steps on logistic and Poisson regression with a ridge penalty, by inexact gradient descent.

Theorem.  Let F be twice differentiable, with eigenvalues of its Hessian in [μ, L] on the ball B of radius R around its
          optimum w*. Let |w₀ − w*| ≤ R, and let every step be w ← w − η(∇F(w) + e), |e| ≤ δ, ηδ ≤ (1−ρ)R, where
          ρ = max(|1−ηL|, |1−ημ|) < 1. Then no iterate leaves B, and
              |w_T − w*| ≤ ρ^T·R + ηδ(1−ρ^T)/(1−ρ),   |w_T − exact w_T| ≤ ηδ(1−ρ^T)/(1−ρ) ≤ δ/μ.
          For η = 2/(L+μ) the last bound is for every T: errors do not accumulate.
Proof.    For v, w in B the mean Hessian H = ∫∇²F(w + s(v−w))ds has its eigenvalues in [μ, L], as B is convex, and
          (v − η∇F(v)) − (w − η∇F(w)) = (I − ηH)(v − w). So the exact step contracts by ρ on B. With v = w_t and
          w = w* the next distance is ≤ ρR + ηδ ≤ R. With w the exact iterate, distances obey d ← ρd + ηδ, d₀ = 0. ∎

The constants.  Let |w*| ≤ D and |w₀| ≤ S, so that R = D + S, and |w| ≤ V = 2D + S on B. There |w·x̃_i| ≤ z = Vx.
    logistic    F = Σ log(1 + e^{w·x̃}) − y·w·x̃ + ½λ|w|²:  L = G/4 + λ,    μ = λ + g·σ(z)σ(−z)
    Poisson     F = mean of e^{w·x̃} − y·w·x̃, + ½λ|w|²:     L = e^z·G + λ,  μ = λ + e^{−z}·g
where [g, G] contains the eigenvalues of Σ x̃x̃ᵀ (of its mean for Poisson). δ is the proven error of one gradient
(`Task.gradient_bound`) for |w| ≤ V, and of the rounding of one update.

Nesterov's steps  x' = v − (∇F(v) + e)/L,  v' = x' + β(x' − x),  β = (1−q)/(1+q),  q = √(μ/L),  from v₀ = x₀ = w₀.
Theorem.  Let L₀ bound the Hessian on the segment from w₀ to w*. Let its eigenvalues be in [μ, L] on the ball of radius
          B about w*, with |e| ≤ δ and  √((L₀+μ)/μ)·R + A·δ ≤ B,  A = 2/(√(Lμ)·(1−√(1−q))). Then
              |x_T − w*| ≤ √((L₀+μ)/μ)·(1−q)^{T/2}·R + A·δ.
Proof.    Let z_t = x_{t−1} + (x_t − x_{t−1})/q, z₀ = x₀. The steps are  v = (x + qz)/(1+q),  x' = v − (g+e)/L,
          z' = (1−q)z + qv − (g+e)/(qL),  g = ∇F(v). Let V = F(x) − F* + ½μ|z − w*|². Smoothness gives F(x') ≤ F(v) −
          |g|²/2L + |e|²/2L, and strong convexity from v to x and to w* then gives V' ≤ (1−q)V for e = 0. With e, the
          square of z' − w* grows by at most 2δ|ẑ − w*|/(qL) + δ²/(qL)², where ẑ is z' for e = 0. So V' ≤ (1−q)V +
          δ·√(2(1−q)V/L) + δ²/L, and √V' ≤ √(1−q)·√V + √2·δ/√L. Since V₀ ≤ ½(L₀+μ)R² and ½μ|x − w*|² ≤ V, the bound
          follows. By the same inequalities x, z and so v, which is between them, and x' stay in the ball. ∎
The ball has B = 1.01·√((L₀+λ)/λ)·R. A rounding ε of v or p counts as e ≤ 2Lε and Lε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnc.errors import InputError
from attnc.incontext.acceleration import SUM_SLACK, Schedule
from attnc.incontext.descent import GLMTask, Task
from attnc.incontext.differences import Sizes, choose, rounded_up
from attnc.incontext.errors import Plan
from attnc.incontext.prompt import Prompt
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up

SMOOTH_LOSSES = ("logistic", "poisson")
CURVATURE_SLACK = 1 + 1e-12
"""The factor by which curvatures are widened. It covers the roundings of the few operations that compute them."""
RESIDUAL_SLACK = 1 + 1e-9
"""A bound of |μ − y| for the logistic loss, with μ from the attention layer. Its error is far below 1e-9."""
STEP_KINDS = ("plain", "nesterov")
BALL_ROOM = 1.01
"""The room of the ball for errors of gradients. They are far below a hundredth of the distance at the start."""
MOST_EXPONENT = 30.0
"""Largest |w·x̃| on the ball for which a Poisson plan is made. e^30 is 1e13: no step of this size would move w."""


@dataclass(frozen=True)
class ExampleBounds:
    """The bounds of the examples on which a plan of logistic or Poisson regression depends.

    Parameters
    ----------
    x : float
        A bound of the 2-norm of every example x̃_i, including the 1 of an intercept.
    weights : float
        A bound of |w*|₂, the norm of the optimum.
    most : float
        A bound of the eigenvalues of Σ x̃_i x̃_iᵀ; for the Poisson loss, of the mean of x̃_i x̃_iᵀ.
    least : float
        A lower bound of the same eigenvalues. 0 is always one.
    y : float
        A bound of every |y_i|. Labels of the logistic loss are 0 and 1.

    Examples
    --------
    >>> from attnc.incontext import ExampleBounds
    >>> ExampleBounds(x=1.0, weights=2.0, most=10.0).least
    0.0
    """

    x: float
    weights: float
    most: float
    least: float = 0.0
    y: float = 1.0

    def __post_init__(self) -> None:
        numbers = (self.x, self.weights, self.most, self.least, self.y)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not 0 < self.most >= self.least:
            raise InputError(f"bounds of examples are finite and ≥ 0, with least ≤ most and most > 0; found {self}")


def plan_strongly_convex(
    prompt: Prompt,
    examples: ExampleBounds,
    penalty: float,
    *,
    loss: str,
    steps: int,
    method: str = "plain",
    heads: int = 4,
    start: float = 0.0,
    dtype: str = "float64",
) -> Plan:
    """Plan gradient steps of logistic or Poisson regression with a ridge penalty, and bound |w_T − w*|₂.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt.
    examples : ExampleBounds
        Bounds of the examples.
    penalty : float
        The penalty λ > 0 of every weight. The Poisson loss is a mean over the examples, the logistic loss a sum.
    loss : {"logistic", "poisson"}
        The loss.
    steps : int
        Number of steps T.
    method : {"plain", "nesterov"}
        The kind of steps. Errors shrink by about μ/L in a plain step, and by its root in one of Nesterov's. Its ball is
        larger by the root of L/μ, which limits it to smaller examples for the Poisson loss.
    heads : int
        Number of pairs of heads that compute the gradient.
    start : float
        A bound of |w₀|₂, the norm of the first weights.
    dtype : {"float64", "float32"}
        The arithmetic of the program.

    Returns
    -------
    Plan
        The task and its bound. The first term of the bound is the convergence of exact steps. For plain steps the
        others together bound the distance to exact gradient descent. If errors of gradients may lead out of the ball
        of the theorem, the bound is infinite.

    Raises
    ------
    InputError
        If a parameter is out of range, or the ball is too large for the Poisson loss.

    Examples
    --------
    >>> from attnc.incontext import ExampleBounds, Prompt, plan_strongly_convex
    >>> examples = ExampleBounds(x=1.0, weights=1.0, most=4.0)
    >>> plan = plan_strongly_convex(Prompt(rows=8, features=2), examples, 1.0, loss="logistic", steps=50)
    >>> plan.bound.value < 1e-9
    True
    """
    if loss not in SMOOTH_LOSSES:
        raise InputError(f"the loss is {' or '.join(SMOOTH_LOSSES)}, found {loss!r}")
    if not (math.isfinite(penalty) and penalty > 0):
        raise InputError(f"a strongly convex loss needs a penalty above 0, found {penalty!r}")
    if not (math.isfinite(start) and start >= 0):
        raise InputError(f"the norm of the first weights is finite and ≥ 0, found {start!r}")
    if method not in STEP_KINDS:
        raise InputError(f"the method is {' or '.join(STEP_KINDS)}, found {method!r}")
    radius = (examples.weights + start) * CURVATURE_SLACK
    curvature = _Curvature(loss, examples, penalty)
    first = curvature.most(max(examples.weights, start) * CURVATURE_SLACK)
    ball = radius if method == "plain" else BALL_ROOM * math.sqrt((first + penalty) / penalty) * radius
    largest = (examples.weights + ball) * CURVATURE_SLACK
    schedule = Schedule(method, steps, curvature.most(largest), curvature.least(largest))
    penalties = (float(penalty),) * prompt.num_weights
    task: Task
    if loss == "logistic":
        sizes = Sizes(prompt.rows, 2, examples.x, RESIDUAL_SLACK, 2 * RESIDUAL_SLACK)
        task = GLMTask(prompt, schedule, choose(sizes, heads, dtype), RESIDUAL_SLACK, penalties)
    else:
        sizes = Sizes(prompt.rows, 2, examples.x, examples.y, examples.y, mean=True)
        reached, moment = curvature.reached(largest), choose(sizes, heads, dtype)
        task = Task(prompt, schedule, moment, reached, penalties, mean=True, loss="poisson", targets=examples.y)
    bounded = _plain if method == "plain" else _nesterov
    gradient, bound = bounded(task, examples.x, radius, largest, first, dtype)
    return Plan(task, gradient, bound, examples.weights, start)


@dataclass(frozen=True)
class _Curvature:
    """Bounds of the Hessian's eigenvalues for weights up to a norm."""

    loss: str
    examples: ExampleBounds
    penalty: float

    def reached(self, weights: float) -> float:
        """Return a bound of |w·x̃|."""
        found = weights * self.examples.x * CURVATURE_SLACK
        if self.loss == "poisson" and found > MOST_EXPONENT:
            raise InputError(
                f"on the ball |w| ≤ {weights:.4g} of the Poisson loss, w·x̃ may reach {found:.4g}, above "
                f"{MOST_EXPONENT:g}: e^(w·x̃) is too large there. Scale the columns down, or bound the weights better."
            )
        return found

    def most(self, weights: float) -> float:
        slope = 0.25 if self.loss == "logistic" else math.exp(self.reached(weights))
        return (slope * self.examples.most + self.penalty) * CURVATURE_SLACK

    def least(self, weights: float) -> float:
        z = self.reached(weights)
        slope = _least_slope(z) if self.loss == "logistic" else math.exp(-z)
        return (self.penalty + slope * self.examples.least) / CURVATURE_SLACK


def _plain(task: Task, x: float, radius: float, largest: float, first: float, dtype: str) -> tuple[Bound, Bound]:
    """Return the bounds of one gradient and of the weights after plain steps."""
    schedule, gradient = task.schedule, task.gradient_bound(x, largest, dtype)
    eta = schedule.etas[0]
    updates = gamma(8, UNIT_ROUNDOFF[dtype]) * (2 / eta + schedule.L) * 2 * largest
    terms = _terms(task, gradient, schedule.contraction * radius, schedule.amplification, updates, dtype)
    if eta * (gradient.value + updates) * CURVATURE_SLACK > (1 - schedule.rho) * radius:
        terms.append(("ball", math.inf, f"errors of gradients may lead out of the ball of radius {radius:.3g}"))
    return gradient, rounded_up(*terms)


def _nesterov(task: Task, x: float, radius: float, largest: float, first: float, dtype: str) -> tuple[Bound, Bound]:
    """Return the bounds of one gradient and of the weights after Nesterov's steps."""
    schedule, gradient = task.schedule, task.gradient_bound(x, largest, dtype)
    L, mu = schedule.L, schedule.mu
    rate = math.sqrt(1 - math.sqrt(mu / L))
    # The terms of an update add up to at most 12·largest, as |g| ≤ 3L·largest. It has two roundings, as in the theorem.
    updates = 3 * L * gamma(8, UNIT_ROUNDOFF[dtype]) * 12 * largest
    amplification = 2 / (math.sqrt(L * mu) * (1 - rate))
    begin = math.sqrt((first + mu) / mu) * radius
    powers = float(up(rate**schedule.steps, SUM_SLACK))
    terms = _terms(task, gradient, begin * powers, amplification, updates, dtype)
    if amplification * (gradient.value + updates) * CURVATURE_SLACK > (BALL_ROOM - 1) / 2 * begin:
        terms.append(("ball", math.inf, f"errors of gradients may lead out of the ball of radius {begin:.3g}"))
    return gradient, rounded_up(*terms)


def _terms(
    task: Task, gradient: Bound, convergence: float, amplification: float, updates: float, dtype: str
) -> list[tuple[str, float, str]]:
    return [
        ("convergence", convergence, f"{task.schedule.steps} {task.schedule.method} steps"),
        *((t.name, amplification * t.value, f"{t.reason}, over all steps") for t in gradient.terms),
        ("updates", amplification * updates, f"the affine maps in {dtype}, over all steps"),
    ]


def _least_slope(z: float) -> float:
    """Return a lower bound of σ(t)σ(−t) for |t| ≤ z: it is 1/(2 + e^z + e^{−z})."""
    return 1 / (3 + math.exp(z)) if z < 700 else 0.0
