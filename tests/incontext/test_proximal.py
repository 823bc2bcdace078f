"""Lasso and elastic net: exact proximal steps layer by layer, scikit-learn's support and coefficients."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.datasets import load_diabetes, load_wine, make_regression
from sklearn.exceptions import ConvergenceWarning

from attnc.errors import InputError
from attnc.incontext import run_recorded
from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import GATE_ERROR, Task, descent_program, gate_slope
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.linear_models import ElasticNet, Lasso
from attnc.incontext.prompt import Prompt
from incontext.exact_descent import assert_same_weights, exact_path

SHARP = {"tol": 1e-14, "max_iter": 10**6}


def soft(u, t):
    return np.sign(u) * np.maximum(np.abs(u) - t, 0)


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
        lambda u, eta: soft(u, eta * l1),
    )
    eta = schedule.etas[0]
    gate = 2 * np.sqrt(4) * GATE_ERROR / gate_slope(task, eta, "float64") + 1e-15
    a_step = task.differences.bound(sizes, "float64").value + gate / eta
    for t, (found, wanted) in enumerate(zip(path[1:], exact[1:], strict=True), start=1):
        allowed = Schedule("plain", t, schedule.L, schedule.mu).amplification * a_step
        assert np.linalg.norm(found - wanted) <= allowed


@pytest.mark.parametrize(("alpha", "max_rows"), [(1.0, None), (0.1, None), (1.0, 500)])
def test_lasso_on_diabetes(alpha, max_rows):
    X, y = load_diabetes(return_X_y=True)
    ours, theirs = Lasso(alpha, max_rows=max_rows).fit(X, y), linear_model.Lasso(alpha, **SHARP).fit(X, y)
    assert_same_weights(ours, theirs, 1e-6, support=True)
    assert ours.bound_.value < 1e-6


def test_elastic_net_and_the_program_in_plain_numpy():
    X, y = load_wine(return_X_y=True)
    ours = ElasticNet(0.05).fit(X, y)
    theirs = linear_model.ElasticNet(0.05, **SHARP).fit(X, y)
    assert_same_weights(ours, theirs, 1e-9, support=True)
    in_numpy = ours.program_(ours.start_[None], ours.prompt_[None])[0]
    assert np.linalg.norm(in_numpy - ours.trajectory_[-1]) <= ours.bound_.value + 1e-10
    assert np.linalg.norm((ours.coef_ - theirs.coef_) * ours.units_.scale) <= ours.bound_.value + 1e-10


@pytest.mark.slow
def test_more_columns_than_rows():
    X, y = make_regression(20, 30, n_informative=4, noise=1.0, random_state=0)
    ours, theirs = Lasso(2.0).fit(X, y), linear_model.Lasso(2.0, **SHARP).fit(X, y)
    assert_same_weights(ours, theirs, 1e-6, support=True)


def test_refusals():
    X, y = load_diabetes(return_X_y=True)
    for model, complaint in (
        (Lasso(-1.0), "alpha"),
        (Lasso(method="chebyshev"), "plain or nesterov"),
        (ElasticNet(l1_ratio=2.0), "l1_ratio"),
    ):
        with pytest.raises(ValueError, match=complaint):
            model.fit(X, y)
    with pytest.warns(ConvergenceWarning, match="proximal gradient|steps of nesterov"):
        Lasso(0.01, max_iter=3).fit(X, y)
    differences = choose(Sizes(3, 3, 1, 1, 1), 2, "float64")
    for penalty, l1, complaint in (((0, 0), (1, 1), "plain or nesterov"), ((0, -1), (), "penalties")):
        with pytest.raises(InputError, match=complaint):
            Task(Prompt(3, 2), Schedule("heavy_ball", 3, 1.0, 0.5), differences, 1.0, penalty, l1)
