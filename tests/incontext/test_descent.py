"""Descent by attention: one gradient within δ, every layer within the bound of exact steps, and linear memory.

The losses are squared, with and without l1, logistic, Poisson, and any smooth one.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.datasets import make_classification

from attnc.engines.prompt import run
from attnc.errors import BoundNotMet, ExpressionError, InputError
from attnc.incontext.acceleration import METHODS, Schedule
from attnc.incontext.descent import GLMTask, Task, descent_program, gate_slope, run_recorded
from attnc.incontext.differences import Differences, Sizes, choose
from attnc.incontext.errors import Norms, compose, plan_least_squares
from attnc.incontext.losses import mean_function
from attnc.incontext.prompt import Prompt
from incontext.exact_descent import exact_path, one_gradient, squared

ONE_STEP = Schedule("plain", 1, 1.0, 1.0)


def norms_of(X: np.ndarray, y: np.ndarray, penalty: float = 0.0) -> Norms:
    """Bounds of the examples, with room for rounding."""
    values = np.linalg.eigvalsh(X.T @ X + penalty * np.eye(X.shape[1]))
    return Norms(np.linalg.norm(X, axis=1).max(), np.linalg.norm(y), values[-1] * 1.001, values[0] * 0.999)


def problem(rows: int, features: int, seed: int = 0, penalty: float = 0.3):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) @ np.diag(np.linspace(0.5, 2, features))
    y = X @ rng.normal(size=features) + rng.normal(size=rows)
    return X, y, np.full(features, penalty), norms_of(X, y, penalty)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("eps", [0.25, 1.0, 4.0])
def test_a_coarse_spacing_that_lets_the_steps_run_away_has_no_bound(method, eps):
    """Residuals beyond the range of the heads grow like sinh: then nothing may be promised."""
    rng = np.random.default_rng(2)
    runaways = 0
    for _ in range(10):
        X = np.linalg.qr(rng.normal(size=(2, 2)))[0] * [1.0, rng.uniform(0.05, 1)]
        y = 2 * rng.normal(size=2)
        plan = plan_least_squares(Prompt(2, 2), norms_of(X, y), (0.0, 0.0), steps=60, heads=1, eps=eps, method=method)
        with np.errstate(all="ignore"):
            found = run(descent_program([plan.task]), [np.zeros(2), plan.task.prompt.tokens(X, y)])
        error = np.linalg.norm(found - np.linalg.solve(X, y))
        assert error <= plan.bound.value
        runaways += bool(error > 1e6)
    assert eps < 1 or runaways


@pytest.mark.parametrize("method", METHODS)
def test_every_layer_is_within_the_bound_of_exact_descent(method):
    X, y, penalty, norms = problem(40, 4)
    plan = plan_least_squares(Prompt(50, 4), norms, tuple(penalty), steps=25, heads=2, method=method)
    inputs = [np.zeros(4), plan.task.prompt.tokens(X, y)]
    path = run_recorded(descent_program([plan.task]), inputs, np.zeros(4), plan.task.iterate)[1]
    exact = exact_path(plan.task.schedule, squared(X, y, penalty), np.zeros(4))
    per_step = plan.gradient.value + plan.bound.terms[-1].value / plan.task.schedule.amplification
    for t, (found, wanted) in enumerate(zip(path[1:], exact[1:], strict=True), start=1):
        allowed = Schedule(method, t, norms.L, norms.mu).amplification  # fewer steps are the beginning of more
        assert np.linalg.norm(found - wanted) <= allowed * per_step
    assert len(path) == 26


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_gradient_is_within_delta_and_delta_is_not_vacuous(heads):
    """The worst prompt within the norm bounds: all examples alike, all residuals at their limit."""
    rows, features, x, r = 30, 3, 1.7, 2.0
    differences = Differences(heads, 0.25)
    sizes = Sizes(rows, features + 1, x, r, 3 * r)
    delta = differences.bound(sizes, "float64").value
    X = np.tile(x * np.array([0.6, 0.0, 0.8]), (rows, 1))
    worst = 0.0
    for y in (np.full(rows, -r), np.full(rows, r), np.random.default_rng(1).uniform(-r, r, rows)):
        task = Task(Prompt(rows, features), Schedule("plain", 1, 1.0, 1.0), differences, r, (0.0,) * features)
        error = np.linalg.norm(one_gradient(task, X, y, np.zeros(features)) + X.astype(np.longdouble).T @ y)
        worst = max(worst, float(error))
        assert error <= delta
    assert delta <= 10 * worst


def test_one_program_serves_every_prompt_up_to_its_length():
    X, y, penalty, norms = problem(40, 3, seed=2)
    plan = plan_least_squares(Prompt(60, 3), norms, tuple(penalty), steps=60, heads=4)
    program = descent_program([plan.task])
    for rows in (40, 25, 7):
        found = run(program, [np.zeros(3), plan.task.prompt.tokens(X[:rows], y[:rows])])
        wanted = linear_model.Ridge(alpha=0.3, fit_intercept=False).fit(X[:rows], y[:rows]).coef_
        if rows == 40:
            assert np.linalg.norm(found - wanted) <= plan.bound.value
        exact = exact_path(plan.task.schedule, squared(X[:rows], y[:rows], penalty), np.zeros(3))[-1]
        assert np.linalg.norm(found - exact) <= plan.bound.value
    reference = program(np.zeros((1, 3)), plan.task.prompt.tokens(X[:7], y[:7])[None])[0]
    assert np.linalg.norm(found - reference) <= plan.bound.value


def test_an_intercept_rides_on_the_presence_flag():
    X, y, _, _ = problem(30, 2)
    y = y + 3.0
    columns = np.column_stack([X, np.ones(30)])
    plan = plan_least_squares(Prompt(35, 2, intercept=True), norms_of(columns, y), (0.0,) * 3, accuracy=1e-7)
    found = run(descent_program([plan.task]), [np.zeros(3), plan.task.prompt.tokens(X, y)])
    model = linear_model.LinearRegression().fit(X, y)
    assert np.linalg.norm(found - [*model.coef_, model.intercept_]) <= plan.bound.value <= 1e-7


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("accuracy", [1e-1, 1e-3, 1e-6])
def test_an_accuracy_asked_for_is_reached_or_refused(dtype, accuracy):
    X, y, penalty, norms = problem(20, 3, seed=5)
    if dtype == "float32" and accuracy < 1e-1:
        with pytest.raises(BoundNotMet, match="rounding in float32"):
            plan_least_squares(Prompt(20, 3), norms, tuple(penalty), accuracy=accuracy, dtype=dtype)
        return
    plan = plan_least_squares(Prompt(20, 3), norms, tuple(penalty), accuracy=accuracy, dtype=dtype)
    assert plan.bound.value <= accuracy
    found = run(descent_program([plan.task], dtype), [np.zeros(3), plan.task.prompt.tokens(X, y)])
    wanted = linear_model.Ridge(alpha=0.3, fit_intercept=False).fit(X, y).coef_
    assert np.linalg.norm(found - wanted) <= plan.bound.value


def test_too_few_steps_are_refused():
    _, _, penalty, norms = problem(20, 3)
    with pytest.raises(BoundNotMet, match="steps of plain"):
        plan_least_squares(Prompt(20, 3), norms, tuple(penalty), accuracy=1e-6, method="plain", max_steps=3)


@pytest.mark.parametrize(
    ("X", "y", "complaint"),
    [
        (np.zeros((3, 2)), np.zeros(3), "built for 4 features, the prompt has 2"),
        (np.zeros((9, 4)), np.zeros(9), "at most 5 rows"),
        (np.full((2, 4), np.nan), np.zeros(2), "NaN"),
        (np.zeros((2, 4)), np.zeros(3), "shapes"),
    ],
)
def test_prompts_that_do_not_fit(X, y, complaint):
    with pytest.raises(InputError, match=complaint):
        Prompt(5, 4).tokens(X, y)


@pytest.mark.parametrize("methods", [(a, b) for a in METHODS for b in ("nesterov", "chebyshev")])
def test_two_tasks_in_one_program(methods):
    plans, prompts, exact, start = [], [], np.zeros(3), 0.0
    for rows, steps, method in ((30, 20, methods[0]), (20, 7, methods[1])):
        X, y, penalty, norms = problem(rows, 3, seed=rows, penalty=0.5)
        plan = plan_least_squares(
            Prompt(rows + 3, 3), norms, tuple(penalty), steps=steps, heads=3, method=method, start=start
        )
        exact, start = exact_path(plan.task.schedule, squared(X, y, penalty), exact)[-1], plan.reached
        plans.append(plan)
        prompts.append(plan.task.prompt.tokens(X, y))
    program, bound = compose(*plans)
    prompt = np.vstack(prompts)
    assert np.linalg.norm(run(program, [np.zeros(3), prompt]) - exact) <= bound.value
    assert np.linalg.norm(program(np.zeros((1, 3)), prompt[None])[0] - exact) <= bound.value
    with pytest.raises(InputError, match="start"):
        compose(plans[0], plan_least_squares(Prompt(9, 3), norms, (0.5,) * 3, steps=3, heads=2))


@pytest.mark.parametrize("rows", [30, 45])
def test_plain_steps_stay_within_the_bound_of_exact_ones(rows):
    """The proximal map does not expand: errors add up as without it, ηδ and the gates' own a step."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4)), rng.normal(size=30)
    penalty, l1 = np.full(4, 0.05), np.array([0.1, 0.2, 0.3, 0.05])
    values = np.linalg.eigvalsh(X.T @ X / 30 + np.diag(penalty))
    schedule = Schedule("plain", 30, values[-1] * 1.01, values[0] * 0.99)
    reach, x = np.linalg.norm(y), np.linalg.norm(X, axis=1).max()
    sizes = Sizes(rows, 5, x, reach, 3 * reach, mean=True)
    task = Task(
        Prompt(rows, 4), schedule, choose(sizes, 3, "float64"), reach, tuple(penalty), tuple(l1), 4.0, mean=True
    )
    inputs = [np.zeros(4), task.prompt.tokens(X, y)]
    path = run_recorded(descent_program([task]), inputs, np.zeros(4), task.iterate)[1]
    wide, targets = X.astype(np.longdouble), y.astype(np.longdouble)
    exact = exact_path(
        schedule,
        lambda v: wide.T @ (wide @ v - targets) / 30 + penalty * v,
        np.zeros(4),
        lambda u, eta: np.sign(u) * np.maximum(np.abs(u) - eta * l1, 0),
    )
    eta = schedule.etas[0]
    # A soft threshold has two gates, and sup |x·σ(βx) − relu(x)| = W(1/e)/β < 0.2785/β.
    gate = 2 * np.sqrt(4) * 0.2785 / gate_slope(task.size + eta * max(l1), "float64") + 1e-15
    a_step = task.differences.bound(sizes, "float64").value + gate / eta
    for t, (found, wanted) in enumerate(zip(path[1:], exact[1:], strict=True), start=1):
        allowed = Schedule("plain", t, schedule.L, schedule.mu).amplification * a_step
        assert np.linalg.norm(found - wanted) <= allowed


def test_objectives_that_a_task_refuses():
    differences = choose(Sizes(3, 3, 1, 1, 1), 2, "float64")
    for penalty, l1, complaint in (((0, 0), (1, 1), "plain or nesterov"), ((0, -1), (), "penalties")):
        with pytest.raises(InputError, match=complaint):
            Task(Prompt(3, 2), Schedule("heavy_ball", 3, 1.0, 0.5), differences, 1.0, penalty, l1)


def sigmoid(z):
    return 1 / (1 + np.exp(-z.astype(np.longdouble)))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_logistic_gradient_is_within_delta_and_delta_is_not_vacuous(heads, mean):
    rows, x, weights = 24, 1.5, 60.0
    prompt = Prompt(rows, 2, intercept=True)
    model = GLMTask(prompt, ONE_STEP, Differences(heads, 0.5), 1.0, (0.0,) * 3, mean=mean)
    delta, worst = model.gradient_bound(x, weights).value, 0.0
    rng = np.random.default_rng(0)
    for trial in range(4):
        start = np.array([weights, 0, 0]) if trial == 0 else rng.normal(size=3)
        X = np.tile([np.sqrt(x**2 - 1), 0.0], (rows, 1)) if trial == 0 else rng.uniform(-0.7, 0.7, (rows, 2))
        y = np.zeros(rows) if trial == 0 else rng.integers(0, 2, rows)
        columns = np.column_stack([X, np.ones(rows)])
        exact = columns.T @ (sigmoid(columns @ start) - y) / (rows if mean else 1)
        error = float(np.linalg.norm(one_gradient(model, X, y, start) - exact))
        assert error <= delta
        worst = max(worst, error)
    assert delta <= 10 * worst


@pytest.mark.parametrize(
    ("loss", "reach"), [("exp(z)", 3.0), ("softplus(z)", 8.0), ("log(cosh(z))", 5.0), ("z**2/2", 4.0)]
)
def test_a_loss_given_as_an_expression(loss, reach):
    """The keys are within the proven error, and one gradient within δ with it."""
    found = mean_function(loss, reach, 1e-7)
    z = np.linspace(-reach, reach, 4001)
    assert np.abs(found.keys(z[:, None])[:, 0] - found(z)).max() <= found.error <= 1e-6
    slopes = np.abs(np.diff(found(z)) / np.diff(z))
    assert slopes.max() <= found.curvature <= 1.1 * slopes.max()
    rng = np.random.default_rng(1)
    X, y, start = rng.uniform(-1, 1, (20, 2)), rng.normal(size=20), np.array([0.6, -0.5]) * reach
    size = float(np.abs(found.keys.values).max()) + np.abs(y).max()
    differences = choose(Sizes(25, 2, 1.5, size, size), 4, "float64")
    model = GLMTask(
        *(Prompt(25, 2), ONE_STEP, differences, size, (0.0, 0.0)),
        loss="other",
        mean_keys=found.keys,
        keys_error=found.error,
    )
    error = np.linalg.norm(one_gradient(model, X, y, start) - X.T @ (found(X @ start) - y))
    assert error <= model.gradient_bound(np.sqrt(2), reach).value


@pytest.mark.parametrize("wrong", ["relu(z)", "abs(z)", "z + y", "3*z", "(z, z**2)", "z**2 +"])
def test_losses_that_do_not_serve(wrong):
    with pytest.raises((InputError, ExpressionError)):
        mean_function(wrong, 1.0, 1e-6)


@pytest.mark.parametrize("method", ["plain", "heavy_ball", "nesterov"])
def test_logistic_paths_follow_exact_descent(method):
    X, y = make_classification(40, 4, random_state=1)
    columns = np.column_stack([X, np.ones(40)])
    penalty = np.array([0.5] * 4 + [0.2])
    L = np.linalg.eigvalsh(columns.T @ columns / 4 + np.diag(penalty))[-1]
    prompt = Prompt(50, 4, intercept=True)
    sizes = Sizes(50, 2, np.linalg.norm(columns, axis=1).max(), 1.0, 2.0)
    schedule = Schedule(method, 40, L, 0.2)
    model = GLMTask(prompt, schedule, choose(sizes, 4, "float64"), 1.0, tuple(penalty))
    (tokens,) = model.inputs(np.zeros(5), X, y)
    found = run(model.program(), [tokens])
    wide = columns.astype(np.longdouble)
    exact = exact_path(schedule, lambda v: wide.T @ (sigmoid(wide @ v) - y) + penalty * v, np.zeros(5))[-1]
    delta = model.gradient_bound(sizes.x, 10.0).value
    assert np.linalg.norm(found - exact) <= 10 * schedule.amplification * delta
    assert np.linalg.norm(found - model.program()(tokens[None])[0]) <= 10 * schedule.amplification * delta


def poisson_task(prompt: Prompt, differences: Differences, reach: float, targets: float, mean: bool = False) -> Task:
    penalty = (0.0,) * prompt.num_weights
    return Task(prompt, ONE_STEP, differences, reach, penalty, mean=mean, loss="poisson", targets=targets)


@pytest.mark.parametrize("mean", [False, True])
def test_one_poisson_gradient(mean):
    rng = np.random.default_rng(4)
    X, y, start = rng.uniform(-1, 1, (15, 3)), rng.poisson(2.0, 15), np.array([0.5, -1.0, 0.7])
    sizes = Sizes(20, 2, 2.0, float(y.max()), float(y.max()), mean)
    task = poisson_task(Prompt(20, 3), choose(sizes, 4, "float64"), 2.2, float(y.max()), mean)
    exact = X.T @ (np.exp(X @ start) - y) / (15 if mean else 1)
    assert np.linalg.norm(one_gradient(task, X, y, start) - exact) <= task.gradient_bound(2.0, 2.0).value


@pytest.mark.parametrize("heads", [1, 3])
def test_the_bound_of_a_poisson_gradient_is_not_vacuous(heads):
    """Where all counts are at their limit, the error of the moment is the bound."""
    X, y = np.tile([1.2, 0.9], (12, 1)), np.full(12, 6.0)
    task = poisson_task(Prompt(12, 2), Differences(heads, 0.125), 1.0, 6.0)
    start = np.array([-1.0, 0.3])
    error = np.linalg.norm(one_gradient(task, X, y, start) - X.T @ (np.exp(X @ start) - y))
    assert error <= task.gradient_bound(1.5, 1.05).value <= 10 * error


def prepared(rows: int, kind: str, steps: int = 3):
    prompt, schedule = Prompt(rows, 5), Schedule("nesterov", steps, 1e6, 1e5)
    differences = choose(Sizes(rows, 6, 3.0, 1.0, 2.0), 4, "float64")
    if kind == "logistic":
        task: Task = GLMTask(prompt, schedule, differences, 1.0, (0.1,) * 5)
    else:
        task = Task(prompt, schedule, differences, 10.0, (0.1,) * 5, mean=kind == "mean")
    X = np.random.default_rng(0).uniform(-1, 1, (rows, 5))
    return task.program(), task.inputs(np.zeros(5), X, np.ones(rows))


@pytest.mark.parametrize("kind", ["sum", "mean", "logistic"])
def test_memory_is_linear_in_the_prompt(kind):
    peaks = []
    for rows in (4_000, 16_000):
        program, inputs = prepared(rows, kind)
        run(program, inputs)
        tracemalloc.start()
        run(program, inputs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 5 * peaks[0]


@pytest.mark.parametrize("kind", ["sum", "logistic"])
def test_steps_share_what_they_store(kind):
    program, _ = prepared(50, kind, steps=200)
    stored = {id(layer.weight if hasattr(layer, "weight") else layer.heads) for layer in program.all_layers}
    assert len(program.all_layers) > 400
    assert len(stored) <= 6
