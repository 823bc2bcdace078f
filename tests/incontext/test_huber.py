"""Huber regression: the optimum, its bound, outliers, and turns that never raise the objective."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.incontext import Huber, OutsideDomain
from attnc.incontext.enclosures import Fit, enclose
from attnc.incontext.progress import Objective

theirs = pytest.importorskip("sklearn.linear_model")


def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    X = rng.normal(size=(60, 4)) * [1.0, 30.0, 0.1, 1.0] + [0.0, 100.0, 3.0, 0.0]
    if kind == "collinear":
        X[:, 3] = X[:, 0] + 1e-3 * rng.normal(size=60)
    if kind == "wide":
        X = rng.normal(size=(15, 30))
    y = 2 * X[:, 0] - X[:, -1] + 0.1 * rng.normal(size=len(X))
    if kind != "plain":
        y[::9] += 1e4
    if kind == "leverage":
        X[3] *= 50
    return X, y


def optimum(X: np.ndarray, y: np.ndarray, alpha: float, threshold: float, omega: np.ndarray) -> np.ndarray:
    """Return the weights and the intercept, by reweighted least squares, and Newton steps with a search along each."""
    A, penalty = np.column_stack([X, np.ones(len(X))]), np.append(np.full(X.shape[1], alpha), 0.0)

    def value(w: np.ndarray) -> float:
        r = np.abs(A @ w - y)
        losses = np.where(r <= threshold, r**2 / 2, threshold * r - threshold**2 / 2)
        return float(omega @ losses + penalty @ w**2 / 2)

    w = np.zeros(A.shape[1])
    for turn in range(600):
        r = A @ w - y
        g = A.T @ (omega * np.clip(r, -threshold, threshold)) + penalty * w
        near = threshold / np.maximum(np.abs(r), threshold)  # reweighted least squares, and Newton steps at last
        inner = near if turn < 500 else np.abs(r) < threshold
        step = np.linalg.lstsq((A.T * (omega * inner)) @ A + np.diag(penalty), g, rcond=1e-15)[0]
        w = w - step * min(0.5 ** np.arange(40), key=lambda t: value(w - t * step))
    return w


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["plain", "outliers", "collinear", "leverage", "wide"])
def test_the_optimum_is_within_the_bound(kind: str, weighted: bool) -> None:
    X, y = data(kind)
    omega = np.random.default_rng(1).uniform(0.2, 3.0, len(X)) if weighted else np.ones(len(X))
    alpha = 0.5 if kind == "wide" else 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Huber(alpha, threshold=0.2).fit(X, y, sample_weight=omega if weighted else None)
    wanted = optimum(X, y, alpha, 0.2, omega)
    sizes = np.abs(wanted[:-1]).max()
    assert (np.abs(model.coef_ - wanted[:-1]) <= model.coef_bound_ + 1e-6 * sizes).all()  # the reference stops there
    assert model.coef_bound_.max() <= 1e-8 * sizes
    assert (model.outliers_ == (np.abs(X @ wanted[:-1] + wanted[-1] - y) > 0.2)).all()
    assert (model.predict_bound(X[:3]) < 1e-6).all()
    path = [Objective.of(model.task_, model.prompt_[-model.task_.prompt.rows :])(w) for w in model.trajectory_]
    assert (np.diff(path) <= 1e-9 * path[0]).all()  # no turn raises the objective


def test_scikit_learn_finds_the_same_weights_at_its_own_scale() -> None:
    X, y = data("plain")
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y[::9] += 10.0
    found = theirs.HuberRegressor(epsilon=1.5, alpha=0.01, tol=1e-12, max_iter=10**5).fit(X, y)
    model = Huber(0.01 * found.scale_, threshold=1.5 * found.scale_).fit(X, y)
    assert np.abs(model.coef_ - found.coef_).max() <= 1e-5 * np.abs(found.coef_).max()
    assert (model.outliers_ == found.outliers_).all()


def test_bounds_of_weights_that_are_far_are_never_smaller_than_the_distance() -> None:
    X, y = data("outliers")
    wanted = optimum(X, y, 0.01, 0.2, np.ones(60))
    finite = 0
    for size in (1e-9, 1e-6, 1e-3, 1e-1, 10.0):
        moved = wanted + size * np.array([1.0, 0.03, 10.0, 1.0, 1.0])
        fit = Fit("huber", X, y, moved[:4], float(moved[4]), np.full(4, 0.01), mean=X.mean(axis=0), scale=X.std(axis=0))
        found = enclose(Fit(**{**vars(fit), "threshold": 0.2}))
        assert (np.abs(moved[:4] - wanted[:4]) <= found.coef + 1e-7).all()
        finite += bool(np.isfinite(found.coef).all())
    assert 2 <= finite < 5


def test_one_program_serves_other_prompts_of_its_domain() -> None:
    X, y = data("outliers")
    model = Huber(0.01, threshold=0.2).fit(X, y)
    program = model.program_
    program.check(model.prompt_)
    changed = model.prompt_.copy()
    changed[[1, 2, 4], -1] += 0.25  # other targets, some across the threshold
    program.check(changed)
    exact = model.task_.steps.path(program.domain.examples(changed[1:]))[0][-1]
    assert np.abs(run(program.program, [changed]) - exact).max() <= 1e-8 * np.abs(exact).max()
    changed[1, -1] = 1e9
    with pytest.raises(OutsideDomain, match="the largest absolute target"):
        program.check(changed)


def test_a_threshold_follows_from_the_targets() -> None:
    X, y = data("plain")
    few, many = Huber().fit(X, y), Huber().fit(X, 1e6 * y)
    assert many.threshold_ == pytest.approx(1e6 * few.threshold_)
    assert np.allclose(many.coef_, 1e6 * few.coef_, rtol=1e-7)
    one = Huber(alpha=1.0).fit([[1.0, 2.0]], [3.0])
    assert one.intercept_ == pytest.approx(3.0)
    assert (one.coef_ == 0).all()
    assert Huber().fit(X, np.full(60, 7.0)).intercept_ == pytest.approx(7.0)
    with pytest.raises(ValueError, match="threshold is a positive number"):
        Huber(threshold=0.0).fit(X, y)
