"""Logistic, Poisson and any smooth loss: one gradient within δ, paths of exact descent, scikit-learn's coefficients."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import make_classification

from attnc.engines.prompt import run
from attnc.errors import ExpressionError, InputError
from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import GLMTask, Task, glm_program
from attnc.incontext.differences import Differences, Sizes, choose
from attnc.incontext.losses import mean_function
from attnc.incontext.prompt import Prompt
from incontext.exact_descent import exact_path, one_gradient

ONE_STEP = Schedule("plain", 1, 1.0, 1.0)
SHARP = {"tol": 1e-12, "max_iter": 10**5, "solver": "newton-cholesky"}


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
    found = run(glm_program(model), [tokens])
    wide = columns.astype(np.longdouble)
    exact = exact_path(schedule, lambda v: wide.T @ (sigmoid(wide @ v) - y) + penalty * v, np.zeros(5))[-1]
    delta = model.gradient_bound(sizes.x, 10.0).value
    assert np.linalg.norm(found - exact) <= 10 * schedule.amplification * delta
    assert np.linalg.norm(found - glm_program(model)(tokens[None])[0]) <= 10 * schedule.amplification * delta


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
    """Where all counts are at their limit, what the moment is off by is the bound."""
    X, y = np.tile([1.2, 0.9], (12, 1)), np.full(12, 6.0)
    task = poisson_task(Prompt(12, 2), Differences(heads, 0.125), 1.0, 6.0)
    start = np.array([-1.0, 0.3])
    error = np.linalg.norm(one_gradient(task, X, y, start) - X.T @ (np.exp(X @ start) - y))
    assert error <= task.gradient_bound(1.5, 1.05).value <= 10 * error
