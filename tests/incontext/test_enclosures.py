"""Bounds of fitted coefficients in the units of the data: they hold, and they are close to the true distance."""

from __future__ import annotations

import flint
import numpy as np
import pytest

from attnc.incontext import Lasso, LinearRegression, LogisticRegression, PoissonRegressor, Ridge
from attnc.incontext.enclosures import Fit, enclose, enclose_sparse, mean_of, objective_gap

pytest.importorskip("sklearn")

DIGITS = 120


def newton(loss: str, X: np.ndarray, y: np.ndarray, penalty: float, start: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """The optimum with an intercept, by Newton's method in 120 digits."""
    n, d = X.shape
    before, flint.ctx.dps = flint.ctx.dps, DIGITS
    try:
        A = flint.arb_mat(n, d + 1, [flint.arb(v) for row in X.tolist() for v in (*row, 1.0)])
        w = flint.arb_mat(d + 1, 1, [flint.arb(v) for v in start.tolist()])
        pen = [flint.arb(penalty)] * d + [flint.arb(0)]
        for _ in range(12):
            z = A * w
            mean = [mean_of(loss, z[i, 0]) for i in range(n)]
            slope = {"squared": lambda m: flint.arb(1), "poisson": lambda m: m, "logistic": lambda m: m * (1 - m)}[loss]
            weights = [flint.arb(v) for v in omega.tolist()]
            g = A.transpose() * flint.arb_mat(
                n, 1, [(m - flint.arb(t)) * o for m, t, o in zip(mean, y, weights, strict=True)]
            )
            S = flint.arb_mat(n, d + 1, [slope(mean[i]) * weights[i] * A[i, c] for i in range(n) for c in range(d + 1)])
            H = A.transpose() * S
            for c in range(d + 1):
                H[c, c] = H[c, c] + pen[c]
                g[c, 0] = g[c, 0] + pen[c] * w[c, 0]
            step = H.solve(g)
            w = flint.arb_mat(d + 1, 1, [(w[c, 0] - step[c, 0]).mid() for c in range(d + 1)])
        return np.array([[float(w[c, 0]), float(w[c, 0] - flint.arb(start[c]))] for c in range(d + 1)])
    finally:
        flint.ctx.dps = before


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(30, 3)) * [1.0, 50.0, 0.02] + [5.0, -80.0, 1.0]
    return X, rng.normal(size=30) + X[:, 0]


CASES = {
    "squared": (lambda y: y, Ridge(alpha=0.3, method="chebyshev"), 0.3),
    "newton": (lambda y: y, LinearRegression(), 0.0),
    "logistic": (lambda y: (y > 5).astype(float), LogisticRegression(C=2.0), 0.5),
    "poisson": (lambda y: np.round(np.clip(y, 0, 9)), PoissonRegressor(alpha=0.1), 0.1),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bounds_hold_and_are_tight(name: str, weighted: bool) -> None:
    of_target, model, penalty = CASES[name]
    X, y = data(1)
    y = of_target(y)
    omega = np.random.default_rng(2).uniform(0.2, 3.0, size=30) if weighted else np.ones(30)
    model.fit(X, y, sample_weight=omega if weighted else None)
    loss = {"newton": "squared"}.get(name, name)
    found = np.append(np.ravel(model.coef_), model.intercept_)
    total = float(omega.sum()) if loss == "poisson" else 1.0
    off = np.abs(newton(loss, X, y, penalty * total, found, omega)[:, 1])
    bounds = np.append(np.ravel(model.coef_bound_), model.intercept_bound_)
    slack = 1e-15 * total * np.abs(found)  # the penalty of the mean is rounded once here
    assert (off <= bounds + slack).all()
    assert np.linalg.norm(bounds) <= 20 * np.linalg.norm(off) + 1e-14 * np.linalg.norm(found)
    assert (model.predict_bound(X) < 1e-8).all()


def test_bounds_of_weights_that_are_far() -> None:
    """Away from the optimum the bound of a curved loss is larger than the distance, or infinite, but never smaller."""
    X, y = data(3)
    y = (y > 5).astype(float)
    scale = X.std(axis=0) * np.sqrt(30)
    optimum = newton("logistic", X, y, 0.5, np.zeros(4), np.ones(30))[:, 0]
    finite = 0
    for size in (1e-12, 1e-8, 1e-4, 1e-2, 1.0):
        moved = optimum + size * np.append(1 / scale, 1.0)
        fit = Fit("logistic", X, y, moved[:3], float(moved[3]), np.full(3, 0.5), mean=X.mean(axis=0), scale=scale)
        found = enclose(fit)
        assert (np.abs(moved[:3] - optimum[:3]) <= found.coef + 1e-14 * np.abs(optimum[:3])).all()
        finite += bool(np.isfinite(found.coef).all())
    assert 3 <= finite < 5


def test_lasso_with_more_columns_than_rows() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 40))
    y = X[:, 0] - 2 * X[:, 5] + 0.1 * rng.normal(size=20)
    model = Lasso(0.1).fit(X, y)
    assert np.isfinite(model.coef_bound_).all()
    assert model.coef_bound_.max() <= 1e-6
    assert 0 <= model.objective_bound_ <= 1e-7
    worse = model.coef_ + 0.01
    fit = Fit("squared", X, y, worse, float(model.intercept_), np.zeros(40), is_mean=True)

    def objective(w: np.ndarray) -> float:
        off = y - X @ w
        return float(((off - off.mean()) ** 2).mean() / 2 + 0.1 * np.abs(w).sum())

    gap = objective_gap(fit, np.full(40, 0.1))
    assert objective(worse) - objective(model.coef_) <= gap <= 20 * (objective(worse) - objective(model.coef_))
    assert np.isinf(enclose_sparse(fit, np.full(40, 0.1)).coef).all()  # its support is not that of the optimum


@pytest.mark.parametrize(("fit_intercept", "weighted"), [(True, True), (False, False)])
def test_bounds_of_several_classes(fit_intercept: bool, weighted: bool) -> None:
    X, y = data(5)
    labels = np.digitize(y, np.quantile(y, [0.4, 0.7]))
    omega = np.random.default_rng(6).uniform(0.2, 2.0, size=len(X)) if weighted else np.ones(len(X))
    model = LogisticRegression(C=0.7, fit_intercept=fit_intercept).fit(X, labels, sample_weight=omega)
    A = np.column_stack([X, np.ones(len(X))]) if fit_intercept else X
    K, D, d = 3, A.shape[1], X.shape[1]
    penalty = np.append(np.full(d, 1 / 0.7), np.zeros(int(fit_intercept)))
    W = np.column_stack([model.coef_, model.intercept_])[:, :D]
    for _ in range(6):  # Newton's method. The intercepts of the optimum add up to 0
        P = np.exp(A @ W.T)
        P /= P.sum(axis=1, keepdims=True)
        g = ((P - np.eye(K)[labels]) * omega[:, None]).T @ A + penalty * W
        H = np.zeros((K, D, K, D))
        for k in range(K):
            for other in range(K):
                H[k, :, other] = (A.T * (omega * P[:, k] * ((k == other) - P[:, other]))) @ A
                H[k, :, other] += np.diag(penalty) * (k == other)
                H[k, d:, other, d:] += 1.0
        W = W - np.linalg.solve(H.reshape(K * D, K * D), g.ravel()).reshape(K, D)
    error, rounding = np.abs(model.coef_ - W[:, :d]), 1e-13
    assert (error <= model.coef_bound_ + rounding).all()
    assert (model.coef_bound_ <= 3 * error + rounding).all()
    assert model.bound_.value < 1e-7
    if fit_intercept:
        assert (np.abs(model.intercept_ - W[:, d]) <= model.intercept_bound_ + rounding).all()
    off = np.abs(A @ W.T - model.decision_function(X))
    assert model.predict_bound(X).shape == (len(X), K)
    assert (off <= model.predict_bound(X) + 10 * rounding).all()


def test_predictions_of_a_lasso_with_several_optima() -> None:
    """Two columns are equal, so that weights have no bound. Predictions of combinations of the examples have one."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(8, 12))
    X = np.column_stack([X, X[:, :2]])
    y = X[:, 0] + 0.1 * rng.normal(size=8)
    model = Lasso(0.05).fit(X, y)
    assert np.isinf(model.coef_bound_).all()
    mixed = np.vstack([X, X[:3].mean(axis=0), 2 * X[1] - X[2]])
    bound = model.predict_bound(mixed)
    assert (bound < 1e-4).all()
    from sklearn.linear_model import Lasso as Theirs

    exact = Theirs(0.05, tol=1e-14, max_iter=10**6).fit(X, y)
    assert (np.abs(model.predict(mixed) - exact.predict(mixed)) <= bound).all()
    outside = model.predict_bound(rng.normal(size=(2, 14)))
    assert np.isfinite(outside).all()
    assert (outside > 1e-3).all()
    assert model.predict_bound(X).max() ** 2 >= model.objective_bound_  # not below what duality allows
