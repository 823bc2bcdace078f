"""The in-context programs against scikit-learn on real data, one gradient against its bound, and a layer's time.

python docs/builders/incontext_figures.py
"""

from __future__ import annotations

import time

import numpy as np
from sklearn import linear_model
from sklearn.datasets import load_breast_cancer, load_diabetes
from threadpoolctl import threadpool_limits

from attnc.engines.prompt import run
from attnc.incontext import Lasso, LinearRegression, LogisticRegression, Ridge
from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.prompt import Prompt


def standardised(X: np.ndarray) -> np.ndarray:
    return (X - X.mean(axis=0)) / X.std(axis=0)


def ridge_of_diabetes() -> tuple[Ridge, linear_model.Ridge]:
    X, y = load_diabetes(return_X_y=True)
    return Ridge().fit(standardised(X), y), linear_model.Ridge().fit(standardised(X), y)


def agreement() -> None:
    ours, theirs = ridge_of_diabetes()
    print(f"ridge, diabetes          {np.abs(ours.coef_ - theirs.coef_).max():.1e}  ({ours.n_iter_} steps)")
    rng = np.random.default_rng(0)
    A = rng.normal(size=(64, 8))
    b = A @ rng.normal(size=8) + rng.normal(size=64)
    ours, theirs = LinearRegression().fit(A, b), linear_model.LinearRegression().fit(A, b)
    print(f"linear, 64 × 8           {np.abs(ours.coef_ - theirs.coef_).max():.1e}  ({ours.n_iter_} steps)")
    X, y = load_diabetes(return_X_y=True)
    ours, theirs = Lasso().fit(X, y), linear_model.Lasso(tol=1e-14, max_iter=10**6).fit(X, y)
    same = ((ours.coef_ != 0) == (theirs.coef_ != 0)).all()
    print(f"lasso, diabetes          {np.abs(ours.coef_ - theirs.coef_).max():.1e}  (same support: {same})")
    X, y = load_breast_cancer(return_X_y=True)
    X = standardised(X)
    ours = LogisticRegression().fit(X, y)
    theirs = linear_model.LogisticRegression(tol=1e-12, solver="newton-cholesky").fit(X, y)
    same = (ours.predict(X) == theirs.predict(X)).all()
    difference = np.abs(ours.coef_ - theirs.coef_).max()
    print(f"logistic, breast cancer  {difference:.1e}  ({ours.n_iter_} steps, same predictions: {same})")


def a_layer(rows: int = 10_000, features: int = 20, repeats: int = 200) -> None:
    """The least time of a gradient layer with its update, over that of the same step in numpy."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, features))
    y = X @ rng.normal(size=features) + rng.normal(size=rows)
    L = float(np.linalg.eigvalsh(X.T @ X)[-1])
    reach = 3 * float(np.linalg.norm(y))
    sizes = Sizes(rows, features + 1, float(np.linalg.norm(X, axis=1).max()), reach, 2 * reach)
    task = Task(
        Prompt(rows, features),
        Schedule("nesterov", repeats, L, L / 10),
        choose(sizes, 4, "float64"),
        reach,
        (0.0,) * features,
    )
    marks: list[float] = []
    tokens = task.prompt.tokens(X, y)
    run(descent_program([task]), [np.zeros(features), tokens], lambda layer, state: marks.append(time.perf_counter()))
    by_attention = np.min(np.diff(marks[1:-1:2]))  # the least disturbed
    w, numpy_times = np.zeros(features), []
    with threadpool_limits(1):
        for _ in range(repeats):
            began = time.perf_counter()
            w = w - (X.T @ (X @ w - y)) / L
            numpy_times.append(time.perf_counter() - began)
    print(f"a layer over {rows:,} × {features}    {by_attention / min(numpy_times):.1f} × the numpy step")


if __name__ == "__main__":
    agreement()
    a_layer()
