"""The estimators: scikit-learn's own checks, its coefficients, support and predictions; warnings; and refusals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn import linear_model as theirs
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_iris,
    load_wine,
    make_classification,
    make_regression,
)
from sklearn.exceptions import ConvergenceWarning, SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator

from attnc import incontext as ours

SHARP_L1 = {"tol": 1e-14, "max_iter": 10**6}
SHARP = {"tol": 1e-12, "max_iter": 10**5, "solver": "newton-cholesky"}


def standardised(load) -> tuple[np.ndarray, np.ndarray]:
    """A data set of scikit-learn with columns of mean 0 and variance 1."""
    X, y = load(return_X_y=True)
    return (X - X.mean(axis=0)) / X.std(axis=0), y


def well_conditioned() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    X = rng.normal(size=(64, 8))
    return X, X @ rng.normal(size=8) + rng.normal(size=64)


def named_classes() -> tuple[np.ndarray, np.ndarray]:
    X, y = make_classification(80, 5, random_state=0)
    return X, np.array(["no", "yes"])[y]


DATA = {
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "standardised diabetes": lambda: standardised(load_diabetes),
    "cancer": lambda: standardised(load_breast_cancer),
    "wine": lambda: load_wine(return_X_y=True),
    "well conditioned": well_conditioned,
    "more columns than rows": lambda: make_regression(30, 50, noise=3.0, random_state=0),
    "few of many columns": lambda: make_regression(20, 30, n_informative=4, noise=1.0, random_state=0),
    "named classes": named_classes,
}
IN_NUMPY = {"Ridge", "ElasticNet", "named classes"}
"""Estimators and data sets whose program also runs in plain numpy."""
CASES = [
    (ours.Ridge(), theirs.Ridge(), "standardised diabetes", 1e-9),
    (ours.Ridge(max_rows=600), theirs.Ridge(), "standardised diabetes", 1e-9),
    (ours.Ridge(), theirs.Ridge(), "wine", 1e-9),
    (ours.LinearRegression(), theirs.LinearRegression(), "well conditioned", 1e-10),
    (ours.LinearRegression(), theirs.LinearRegression(), "more columns than rows", 1e-8),
    (ours.Lasso(), theirs.Lasso(**SHARP_L1), "diabetes", 1e-6),
    (ours.Lasso(0.1), theirs.Lasso(0.1, **SHARP_L1), "diabetes", 1e-6),
    (ours.Lasso(max_rows=500), theirs.Lasso(**SHARP_L1), "diabetes", 1e-6),
    (ours.ElasticNet(0.05), theirs.ElasticNet(0.05, **SHARP_L1), "wine", 1e-9),
    pytest.param(ours.Lasso(2.0), theirs.Lasso(2.0, **SHARP_L1), "few of many columns", 1e-6, marks=pytest.mark.slow),
    (ours.PoissonRegressor(), theirs.PoissonRegressor(**SHARP), "standardised diabetes", 1e-9),
    (ours.PoissonRegressor(0.0), theirs.PoissonRegressor(alpha=0.0, **SHARP), "standardised diabetes", 1e-9),
    (ours.LogisticRegression(), theirs.LogisticRegression(**SHARP), "cancer", 1e-5),
    (
        ours.LogisticRegression(fit_intercept=False, max_rows=100),
        theirs.LogisticRegression(fit_intercept=False, **SHARP),
        "named classes",
        1e-6,
    ),
]


@pytest.mark.parametrize(("model", "reference", "data", "tolerance"), CASES)
def test_agrees_with_scikit_learn(model, reference, data, tolerance):
    X, y = DATA[data]()
    name = type(model.fit(X, y)).__name__
    reference.fit(X, y)
    assert np.abs(model.coef_ - reference.coef_).max() <= tolerance
    assert np.abs(model.intercept_ - reference.intercept_).max() <= tolerance
    assert model.trajectory_.shape == (model.n_iter_ + 1, model.task_.prompt.num_weights)
    found, wanted = model.predict(X), reference.predict(X)
    if name == "LogisticRegression":
        assert (found == wanted).all()
        assert np.abs(model.predict_proba(X) - reference.predict_proba(X)).max() <= 1e-6
    elif name == "PoissonRegressor":
        assert np.abs(found / wanted - 1).max() <= 1e-9
    elif data == "well conditioned":
        assert np.abs(found - wanted).max() <= 1e-9
    if name in ("Lasso", "ElasticNet"):
        assert ((model.coef_ != 0) == (reference.coef_ != 0)).all()
    if (name, data) == ("Lasso", "diabetes"):
        assert model.bound_.value < 1e-6
    allowed = 1e-9
    if name in ("Ridge", "ElasticNet"):
        # scikit-learn's ElasticNet stops before the optimum, and its Ridge has the rounding of a solver.
        allowed = model.bound_.value + {"ElasticNet": 1e-10, "Ridge": 1e-12}[name]
        assert np.linalg.norm((model.coef_ - reference.coef_) * model.units_.scale / model.units_.spread) <= allowed
    if {name, data} & IN_NUMPY:
        inputs = [model.start_, model.prompt_][-len(model.program_.input_shapes) :]
        in_numpy = model.program_(*(given[None] for given in inputs))[0]
        assert np.linalg.norm(in_numpy - model.trajectory_[-1]) <= allowed


def test_constant_columns_warn_and_get_zero():
    X, y = DATA["standardised diabetes"]()
    X[:, 3] = 0.1
    with pytest.warns(UserWarning, match="column 3 of X is constant"):
        assert ours.Ridge().fit(X, y).coef_[3] == 0


def test_steps_that_do_not_suffice_warn():
    X, y = DATA["diabetes"]()
    with pytest.warns(ConvergenceWarning, match="7 steps of chebyshev"):
        assert ours.Ridge(method="chebyshev", max_iter=7).fit(X, y).n_iter_ == 7
    with pytest.warns(ConvergenceWarning, match="7 turns are too few"):
        assert ours.LinearRegression(max_iter=7).fit(X, y).n_iter_ == 7
    with pytest.warns(ConvergenceWarning, match="proximal gradient|steps of nesterov"):
        ours.Lasso(0.01, max_iter=3).fit(X, y)
    X, y = load_iris(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="gradient of norm .* separable"):
        assert (
            ours.LogisticRegression(C=1e6, method="nesterov", max_iter=200).fit(X[y < 2], y[y < 2]).gradient_norm_ > 0
        )


def test_columns_that_depend_on_others_do_not_pass_for_converged():
    """The gradient is small, and yet the weights are off by more than a hundredth: only curvature tells."""
    X, y = make_classification(300, 10, n_informative=4, random_state=1, flip_y=0.1)
    with pytest.warns(ConvergenceWarning, match="may be .* from the optimum"):
        ours.LogisticRegression(method="nesterov", max_iter=400).fit(100 * X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.LogisticRegression().fit(X, y)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (ours.Ridge(alpha=-1), "alpha"),
        (ours.Ridge(method="steepest"), "method"),
        (ours.Ridge(learning_rate=0.1), "belongs to gradient steps"),
        (ours.Ridge(max_iter=0), "max_iter"),
        (ours.Ridge(tol=0), "tol"),
        (ours.Ridge(max_rows=10), "max_rows=10"),
        (ours.Ridge(method="plain", learning_rate=1.0), "largest eigenvalue"),
        (ours.Lasso(-1.0), "alpha"),
        (ours.Lasso(method="chebyshev"), "plain or nesterov"),
        (ours.ElasticNet(l1_ratio=2.0), "l1_ratio"),
        (ours.LogisticRegression(C=0), "C is"),
        (ours.LogisticRegression(method="chebyshev"), "method"),
        (ours.PoissonRegressor(), "counts"),
        (ours.NadarayaWatson(gamma=-1.0), "gamma"),
        (ours.KernelRidge(alpha=0.0), "alpha"),
        (ours.KernelRidge(method="newton"), "method"),
        (ours.KNeighborsRegressor(0), "n_neighbors"),
        (ours.KNeighborsRegressor(max_rows=100), "max_rows=100"),
    ],
)
def test_what_an_estimator_refuses(model, complaint):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=complaint):
        model.fit(X, 1.0 - y)


ESTIMATORS = sorted(ours._ESTIMATORS)
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "Ridge")) for name in ESTIMATORS]


@pytest.mark.parametrize("name", NAMES)
def test_check_estimator(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(getattr(ours, name)())


def test_unknown_names():
    with pytest.raises(AttributeError, match="Perceptron"):
        ours.Perceptron  # noqa: B018
