"""Ridge and least squares by attention: within the bound of exact gradient descent, layer by layer, and of sklearn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.datasets import load_diabetes, load_wine, make_regression
from sklearn.exceptions import ConvergenceWarning

from attnc.engines.prompt import run
from attnc.errors import BoundNotMet, InputError
from attnc.incontext import run_recorded
from attnc.incontext.acceleration import METHODS, Schedule
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import Differences, Sizes
from attnc.incontext.errors import Norms, plan_least_squares
from attnc.incontext.linear_models import LinearRegression, Ridge
from attnc.incontext.prompt import Prompt
from incontext.exact_descent import assert_same_weights, exact_path, one_gradient, squared, standardised


def problem(rows: int, features: int, seed: int = 0, penalty: float = 0.3):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) @ np.diag(np.linspace(0.5, 2, features))
    y = X @ rng.normal(size=features) + rng.normal(size=rows)
    eigenvalues = np.linalg.eigvalsh(X.T @ X + penalty * np.eye(features))
    norms = Norms(np.linalg.norm(X, axis=1).max(), np.linalg.norm(y), eigenvalues[-1] * 1.001, eigenvalues[0] * 0.999)
    return X, y, np.full(features, penalty), norms


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("eps", [0.25, 1.0, 4.0])
def test_a_coarse_spacing_that_lets_the_steps_run_away_has_no_bound(method, eps):
    """Residuals that leave what the heads were made for grow like sinh: then nothing may be promised."""
    rng = np.random.default_rng(2)
    runaways = 0
    for _ in range(10):
        X = np.linalg.qr(rng.normal(size=(2, 2)))[0] * [1.0, rng.uniform(0.05, 1)]
        y = 2 * rng.normal(size=2)
        values = np.linalg.eigvalsh(X.T @ X)
        norms = Norms(1.01, np.linalg.norm(y) * 1.01, values[-1] * 1.01, values[0] * 0.99)
        plan = plan_least_squares(Prompt(2, 2), norms, (0.0, 0.0), steps=60, heads=1, eps=eps, method=method)
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
    values = np.linalg.eigvalsh(columns.T @ columns)
    norms = Norms(np.linalg.norm(columns, axis=1).max(), np.linalg.norm(y), values[-1] * 1.001, values[0] * 0.999)
    plan = plan_least_squares(Prompt(35, 2, intercept=True), norms, (0.0,) * 3, accuracy=1e-7)
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


@pytest.mark.parametrize("max_rows", [None, 600])
def test_ridge_on_diabetes(max_rows):
    X, y = standardised(load_diabetes)
    ours, theirs = Ridge(max_rows=max_rows).fit(X, y), linear_model.Ridge().fit(X, y)
    assert_same_weights(ours, theirs, 1e-9)
    assert np.linalg.norm((ours.coef_ - theirs.coef_) * ours.units_.scale) <= ours.bound_.value
    in_numpy = ours.program_(ours.start_[None], ours.prompt_[None])[0]
    assert np.linalg.norm(in_numpy - ours.trajectory_[-1]) <= ours.bound_.value
    assert ours.trajectory_.shape == (ours.n_iter_ + 1, 10)


def test_linear_regression_well_conditioned():
    rng = np.random.default_rng(7)
    X = rng.normal(size=(64, 8))
    y = X @ rng.normal(size=8) + rng.normal(size=64)
    ours, theirs = LinearRegression().fit(X, y), linear_model.LinearRegression().fit(X, y)
    assert_same_weights(ours, theirs, 1e-10)
    assert np.abs(ours.predict(X) - theirs.predict(X)).max() <= 1e-9


def test_other_data():
    X, y = load_wine(return_X_y=True)
    assert_same_weights(Ridge().fit(X, y), linear_model.Ridge().fit(X, y), 1e-9)
    X, y = make_regression(30, 50, noise=3.0, random_state=0)
    assert_same_weights(LinearRegression().fit(X, y), linear_model.LinearRegression().fit(X, y), 1e-8)


def test_constant_columns_warn_and_get_zero():
    X, y = standardised(load_diabetes)
    X[:, 3] = 0.1
    with pytest.warns(UserWarning, match="column 3 of X is constant"):
        ours = Ridge().fit(X, y)
    assert ours.coef_[3] == 0


def test_steps_cut_short_warn():
    X, y = standardised(load_diabetes)
    with pytest.warns(ConvergenceWarning, match="7 steps of chebyshev"):
        assert Ridge(max_iter=7).fit(X, y).n_iter_ == 7


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"alpha": -1}, "alpha"),
        ({"method": "newton"}, "method"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": 0}, "tol"),
        ({"max_rows": 10}, "max_rows=10"),
        ({"method": "plain", "learning_rate": 1.0}, "largest eigenvalue"),
    ],
)
def test_parameters_that_do_not_fit(parameters, complaint):
    X, y = standardised(load_diabetes)
    with pytest.raises(ValueError, match=complaint):
        Ridge(**parameters).fit(X, y)
