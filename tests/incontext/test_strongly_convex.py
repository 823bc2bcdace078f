"""Gradient steps on logistic and Poisson regression: the bound is the tolerance, and it is not vacuous."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from attnc.errors import InputError
from attnc.incontext import (
    ExampleBounds,
    Norms,
    Plan,
    Prompt,
    compose,
    descent_program,
    learn_start,
    plan_least_squares,
    plan_strongly_convex,
    run_recorded,
    start_variance,
)
from attnc.incontext.strongly_convex import MOST_EXPONENT

ROWS, FEATURES = 24, 3
MEANS = {"logistic": lambda z: 1 / (1 + np.exp(-z)), "poisson": np.exp}
PENALTY = {"logistic": 0.5, "poisson": 0.2}


class Case:
    """A problem whose optimum is found by many steps, with the bounds of its own examples."""

    def __init__(self, loss: str, seed: int) -> None:
        rng = np.random.default_rng([seed, len(loss)])
        self.loss, self.penalty = loss, PENALTY[loss]
        self.X = rng.normal(size=(ROWS, FEATURES))
        self.X /= np.linalg.norm(self.X, axis=1).max() * (1 + 1e-12)
        mean = MEANS[loss](2 * self.X @ rng.normal(size=FEATURES))
        self.y = rng.binomial(1, mean).astype(float) if loss == "logistic" else rng.poisson(mean).astype(float)
        self.share = 1 / ROWS if loss == "poisson" else 1.0
        values = np.linalg.eigvalsh(self.share * self.X.T @ self.X)
        w = np.zeros(FEATURES)
        for _ in range(4000):
            w = w - self.gradient(w) / (4 * values[-1] + self.penalty)
        self.best = w
        norm = np.linalg.norm(w) + np.linalg.norm(self.gradient(w)) / self.penalty + 1e-12
        most, least = values[-1] * (1 + 1e-12), max(0.0, values[0] * (1 - 1e-12))
        self.examples = ExampleBounds(1.0, float(norm), float(most), float(least), float(self.y.max()))

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.share * self.X.T @ (MEANS[self.loss](self.X @ w) - self.y) + self.penalty * w

    def plan(self, steps: int, start: float = 0.0, method: str = "plain") -> Plan:
        return plan_strongly_convex(
            Prompt(ROWS, FEATURES),
            self.examples,
            self.penalty,
            loss=self.loss,
            steps=steps,
            start=start,
            method=method,
        )

    def exact(self, plan: Plan, start: np.ndarray) -> np.ndarray:
        w = start
        for eta in plan.task.schedule.etas:
            w = w - eta * self.gradient(w)
        return w


def errors_of(plan: Plan) -> float:
    return math.fsum(term.value for term in plan.bound.terms[1:])


def test_momentum_takes_fewer_steps() -> None:
    """With a weak penalty, Nesterov's bound is far below that of as many plain steps."""
    given = {"examples": ExampleBounds(x=1.0, weights=3.0, most=8.0), "penalty": 1e-2, "loss": "logistic", "steps": 600}
    plain, momentum = (plan_strongly_convex(Prompt(16, 2), method=method, **given) for method in ("plain", "nesterov"))
    assert momentum.bound.value < 1e-7 < 1e-3 < plain.bound.value
    with pytest.raises(InputError, match="plain or nesterov"):
        plan_strongly_convex(Prompt(16, 2), method="heavy_ball", **given)


@pytest.mark.parametrize("loss", ["logistic", "poisson"])
@pytest.mark.parametrize(
    ("steps", "method"), [(1, "plain"), (7, "plain"), (300, "plain"), (7, "nesterov"), (99, "nesterov")]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_the_tolerance(loss: str, steps: int, method: str, seed: int) -> None:
    case = Case(loss, seed)
    start = np.zeros(FEATURES)
    try:
        plan = case.plan(steps, method=method)
    except InputError:
        assert (loss, method) == ("poisson", "nesterov")  # its ball is larger
        case.X, case.examples = case.X / 4, replace(case.examples, x=0.25, most=case.examples.most / 16, least=0.0)
        plan = case.plan(steps, method=method)
        for _ in range(4000):
            case.best = case.best - case.gradient(case.best)
        assert np.linalg.norm(case.best) <= case.examples.weights
    task = plan.task
    inputs = task.inputs(start, case.X, case.y)
    weights, path = run_recorded(task.program(), inputs, start, task.iterate, task.token)
    assert len(path) == steps + 1
    assert np.linalg.norm(weights - case.best) <= plan.bound.value
    assert errors_of(plan) < 1e-7
    if method == "plain":
        assert np.linalg.norm(weights - case.exact(plan, start)) <= errors_of(plan)
    if steps == 1:
        assert plan.bound.value <= 10 * np.linalg.norm(weights - case.best)  # not vacuous


def test_a_poor_gradient_has_an_infinite_bound() -> None:
    """In float32 with a tiny ball, the errors of gradients may lead out of it."""
    examples = ExampleBounds(1.0, 1e-9, 1.0)
    plan = plan_strongly_convex(Prompt(4, 2), examples, 0.1, loss="logistic", steps=5, dtype="float32")
    assert math.isinf(plan.bound.value)


def test_two_tasks() -> None:
    one, two = Case("poisson", 1), Case("poisson", 2)
    first = one.plan(50)
    second = two.plan(50, start=first.reached)
    program, bound = compose(first, second)
    start = np.zeros(FEATURES)
    prompts = np.concatenate([plan.task.prompt.tokens(c.X, c.y) for plan, c in ((first, one), (second, two))])
    weights = program(start[None], prompts[None])[0]
    exact = two.exact(second, one.exact(first, start))
    assert np.linalg.norm(weights - exact) <= bound.value < 1e-8
    with pytest.raises(InputError, match=r"start=first\.reached"):
        compose(first, two.plan(50))
    small = plan_strongly_convex(
        Prompt(ROWS, FEATURES),
        ExampleBounds(x=0.1, weights=0.1, most=0.01),
        1.0,
        loss="poisson",
        steps=5,
        start=first.reached,
        method="nesterov",
    )
    with pytest.raises(InputError, match="plain steps"):
        compose(first, small)
    with pytest.raises(InputError, match="start it at the result"):
        descent_program([Case("logistic", 0).plan(2).task, first.task])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": "hinge"}, "logistic or poisson"),
        ({"penalty": 0.0}, "above 0"),
        ({"start": math.inf}, "finite"),
        ({"examples": ExampleBounds(10.0, 10.0, 1.0), "loss": "poisson"}, f"above {MOST_EXPONENT:g}"),
    ],
)
def test_requests_that_make_no_sense(changed: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "penalty": 1.0,
        "loss": "logistic",
        "steps": 2,
        "examples": ExampleBounds(1.0, 1.0, 1.0),
    }
    with pytest.raises(InputError, match=message):
        plan_strongly_convex(Prompt(4, 2), **(given | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("numbers", [(1.0, math.nan, 1.0), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0, 2.0)])
def test_bounds_that_make_no_sense(numbers: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="bounds of examples"):
        ExampleBounds(*numbers)


def quadratics(count: int, seed: int, sigma: float) -> tuple[list[Plan], list[tuple[np.ndarray, np.ndarray]]]:
    rng = np.random.default_rng(seed)
    plans, tasks = [], []
    for _ in range(count):
        basis, _ = np.linalg.qr(rng.normal(size=(2 * FEATURES, FEATURES)))
        X = basis * np.sqrt(rng.uniform(0.5, 1.0, FEATURES))
        y = X @ (np.ones(FEATURES) + sigma * rng.uniform(-1, 1, FEATURES))
        norms = Norms(1.0, float(np.linalg.norm(y)) * (1 + 1e-12), 1 + 1e-12, 0.5 - 1e-12)
        prompt, penalty = Prompt(*X.shape), (0.0,) * FEATURES
        plans.append(plan_least_squares(prompt, norms, penalty, steps=4, method="plain", start=8.0))
        tasks.append((X, y))
    return plans, tasks


def learned(plans: list[Plan], tasks: list[tuple[np.ndarray, np.ndarray]], rates: list[float]) -> np.ndarray:
    start = np.zeros(FEATURES)
    for plan, (X, y), rate in zip(plans, tasks, rates, strict=True):
        w = start
        for eta in plan.task.schedule.etas:
            w = w - eta * X.T @ (X @ w - y)
        start = (1 - rate) * start + rate * w
    return start


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_learned_start(count: int) -> None:
    plans, tasks = quadratics(count, 5, 0.4)
    rates = [1 / (k + 1) for k in range(count)]
    program, bound = learn_start(plans, rates)
    prompts = np.concatenate([plan.task.prompt.tokens(*task) for plan, task in zip(plans, tasks, strict=True)])
    found = program(np.zeros((1, FEATURES)), prompts[None])[0]
    assert np.linalg.norm(found - learned(plans, tasks, rates)) <= bound.value < 1e-8


def test_a_learned_start_with_rate_one_is_a_chain_of_tasks() -> None:
    plans, tasks = quadratics(3, 6, 0.4)
    prompts = np.concatenate([plan.task.prompt.tokens(*task) for plan, task in zip(plans, tasks, strict=True)])
    inputs = (np.zeros((1, FEATURES)), prompts[None])
    chain = descent_program([plan.task for plan in plans])(*inputs)
    assert np.array_equal(learn_start(plans, [1.0] * 3)[0](*inputs), chain)


def test_the_variance_of_a_learned_start() -> None:
    """The mean over many trials is at most the bound, and the bound is at most three times the mean."""
    sigma, rates = 0.4, [1 / (k + 1) for k in range(6)]
    trials = [quadratics(6, 100 + trial, sigma) for trial in range(60)]
    squares = [((learned(*trial, rates) - 1) ** 2).sum() for trial in trials]
    spread = sigma * math.sqrt(FEATURES / 3)
    bound = start_variance(trials[0][0], rates, math.sqrt(FEATURES), spread)
    assert np.mean(squares) - 4 * np.std(squares) / math.sqrt(len(squares)) <= bound <= 3 * np.mean(squares)


def test_a_learned_start_refuses() -> None:
    plans, _ = quadratics(2, 7, 0.4)
    for rates, message in (([1.0], "a rate in"), ([1.0, 2.0], "a rate in")):
        with pytest.raises(InputError, match=message):
            learn_start(plans, rates)
    norms = Norms(1.0, 1.0, 1.0, 0.5)
    for options, message in (({"method": "nesterov"}, "plain steps"), ({"method": "plain"}, "plan it with this start")):
        other = plan_least_squares(Prompt(6, FEATURES), norms, (0.0,) * FEATURES, steps=4, **options)
        with pytest.raises(InputError, match=message):
            learn_start([plans[0], other], [1.0, 1.0])
    safe = plan_least_squares(
        Prompt(6, FEATURES), norms, (0.0,) * FEATURES, steps=4, method="plain", start=8.0, safeguard=True
    )
    with pytest.raises(InputError, match="without a safeguard"):
        learn_start([safe], [1.0])
