"""A start that is learned in context: gradient steps on K tasks, and after each the start moves towards its result.

a_{k+1} = (1−κ_k)·a_k + κ_k·w_T(a_k; task k): every task starts at the learned start a_k and makes T plain steps. In the
program all steps are attention layers, and the move of the start is an affine map.

Theorem.  Let c_k be the contraction of T exact steps on task k, and ε_k the error of T steps by attention.
    attention   |a_K − exact a_K| ≤ E_K with E_0 = 0, E_{k+1} = (1−κ_k(1−c_k))·E_k + κ_k·ε_k. So E_K ≤ max ε_k/(1−c_k)
                for every number of tasks.
    learning    Let the tasks be quadratics with optima m + ξ_k. Let the ξ_k have mean 0 and E|ξ_k|² ≤ σ², and be
                independent of each other and of all Hessians. Let b_k = 1 if no eigenvalue of P_k (below) is negative,
                else 1 + c_k. Then E|a_K − m|² ≤ V_K with V_0 = |a_0 − m|², V_{k+1} = (1−κ_k(1−c_k))²·V_k + κ_k²b_k²σ².
    a new task  After T steps from a_K: E|w_T − w*|² ≤ c²·(V_K + σ²). From a_0 it is c²·(|a_0 − m|² + σ²) at most.
Proof.    T exact steps map w to w* + P(w − w*) with |P| ≤ c for a quadratic, and from two starts they lead to results
          that differ by at most c times the difference. So a step of learning contracts by (1−κ) + κc, and adds κε:
          the first claim. For quadratics a_{k+1} − m = (I − κ(I−P_k))(a_k − m) + κ(I−P_k)ξ_k. The two summands are
          uncorrelated, |I − κ(I−P)| ≤ 1 − κ(1−c), and |I−P| ≤ b: the second. A new task has
          w_T − w* = P(a_K − m − ξ), with a_K and ξ independent: the third. ∎
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnc.errors import InputError
from attnc.incontext.descent import descent_program
from attnc.incontext.differences import CLOSED_FORM_SLACK, rounded_up
from attnc.incontext.errors import Plan
from attnc.ir.program import Program
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up


def learn_start(plans: Sequence[Plan], rates: Sequence[float], dtype: str = "float64") -> tuple[Program, Bound]:
    """Return the program that learns a start over K tasks, and a bound of |program − the same with exact steps|₂.

    Parameters
    ----------
    plans : sequence of Plan
        The plans of the tasks, with plain steps. Each is planned for a start of the norm that the learned start may
        have: at least the first start, and `reached` of every plan before it.
    rates : sequence of float
        For each task, the rate κ in [0, 1] at which the start moves towards the result of the task.
    dtype : {"float64", "float32"}
        The arithmetic of the program.

    Returns
    -------
    program : Program
        Its inputs are the first start and the prompts, one below the other. Its output is the learned start.
    bound : Bound
        The bound of the theorem. It does not grow with the number of tasks.

    Raises
    ------
    InputError
        If the rates do not fit the plans, a plan has momentum, or a plan allows no start of the norm it may get.

    Examples
    --------
    >>> import numpy as np
    >>> from attnc.incontext import Norms, Prompt, learn_start, plan_least_squares
    >>> norms = Norms(x=1.0, y=1.0, L=1.0, mu=1.0)
    >>> plan = plan_least_squares(Prompt(1, 1), norms, (0.0,), steps=2, method="plain", eta=0.5, start=3.0)
    >>> program, bound = learn_start([plan, plan], rates=[1.0, 0.5])
    >>> prompt = plan.task.prompt
    >>> tokens = np.concatenate([prompt.tokens([[1.0]], [1.0]), prompt.tokens([[1.0]], [0.0])])
    >>> start = program(np.zeros((1, 1)), tokens[None])[0, 0]  # 0 → 0.75 → ½·0.75 + ½·0.1875
    >>> bool(abs(start - 0.46875) <= bound.value)
    True
    """
    if len(rates) != len(plans) or not plans or not all(0 <= rate <= 1 for rate in rates):
        raise InputError(f"{len(plans)} plans need a rate in [0, 1] each, found {tuple(rates)}")
    allowed = 0.0
    for number, plan in enumerate(plans):
        if plan.task.schedule.method != "plain":
            raise InputError(f"a learned start takes plain steps, found {plan.task.schedule.method} in task {number}")
        if plan.start < allowed:
            raise InputError(
                f"task {number} is planned for a start of norm ≤ {plan.start:.3g}, but the learned start may have norm "
                f"{allowed:.3g}: plan it with this start"
            )
        allowed = max(allowed, plan.start if number == 0 else 0.0, plan.reached)
    program = descent_program([plan.task for plan in plans], dtype, rates=rates)
    steps = {"attention": 0.0, "learning": 0.0}
    move = 4 * gamma(4, UNIT_ROUNDOFF[dtype]) * allowed  # rounding of (1−κ)a + κw
    for plan, rate in zip(plans, rates, strict=True):
        kept = 1 - rate * (1 - plan.task.schedule.contraction)
        error = math.fsum(term.value for term in plan.bound.terms[1:])  # all but the convergence of exact steps
        steps["attention"] = float(up(kept * steps["attention"] + rate * error, CLOSED_FORM_SLACK))
        steps["learning"] = float(up(kept * steps["learning"] + move, CLOSED_FORM_SLACK))
    return program, rounded_up(
        ("attention", steps["attention"], f"the steps of {len(plans)} tasks"),
        ("learning", steps["learning"], f"the moves of the start in {dtype}"),
    )


def start_variance(plans: Sequence[Plan], rates: Sequence[float], distance: float, sigma: float) -> float:
    """Return the bound V_K of E|a_K − m|² for exact steps on quadratics.

    Parameters
    ----------
    plans : sequence of Plan
        The plans of the tasks, with plain steps.
    rates : sequence of float
        The rate κ of each task.
    distance : float
        A bound of |a_0 − m|, the distance of the first start from the mean of the optima.
    sigma : float
        A bound of √E|ξ|², the spread of the optima.

    Returns
    -------
    float
        V_K. Its square root bounds the root mean square distance.

    Examples
    --------
    >>> from attnc.incontext import Norms, Prompt, plan_least_squares, start_variance
    >>> norms = Norms(x=1.0, y=1.0, L=1.0, mu=0.9)
    >>> plan = plan_least_squares(Prompt(1, 1), norms, (0.0,), steps=8, method="plain", start=3.0)
    >>> start_variance([plan] * 100, [1 / (k + 1) for k in range(100)], distance=2.0, sigma=0.3) < 0.001
    True
    """
    variance = distance**2
    for plan, rate in zip(plans, rates, strict=True):
        schedule = plan.task.schedule
        c = schedule.contraction
        is_positive = schedule.steps % 2 == 0 or schedule.etas[0] * schedule.L <= 1
        variance = (1 - rate * (1 - c)) ** 2 * variance + (rate * (1.0 if is_positive else 1 + c) * sigma) ** 2
        variance = float(up(variance, CLOSED_FORM_SLACK))
    return variance
