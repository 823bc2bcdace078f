"""Kernels on the prompt against plain numpy and scikit-learn; the universal bound."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.kernel_ridge import KernelRidge as TheirKernelRidge
from sklearn.neighbors import KNeighborsRegressor as TheirNeighbours

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext import KernelRidge, KNeighborsRegressor, NadarayaWatson
from attnc.incontext.acceleration import Schedule
from attnc.incontext.kernels import (
    Kernel,
    average_error,
    kernel_ridge,
    nadaraya_watson,
    nearest,
    universal_bound,
)
from attnc.incontext.prompt import Prompt


def points(rows=40, features=3, queries=12, seed=0):
    rng = np.random.default_rng(seed)
    X, asked = rng.normal(size=(rows, features)), rng.normal(size=(queries, features))
    size = float(np.linalg.norm(np.vstack([X, asked]), axis=1).max())
    return X, np.sin(X).sum(axis=1), asked, size


@pytest.mark.parametrize("beta", [0.1, 2.0, 50.0])
@pytest.mark.parametrize("room", [40, 55])
def test_nadaraya_watson(beta, room):
    X, y, asked, size = points()
    kernel = Kernel(Prompt(room, 3), beta, size, 12)
    program, tokens = nadaraya_watson(kernel), kernel.prompt.tokens(X, y)
    found = run(program, [asked, tokens])
    weights = np.exp(-beta * (((asked[:, None] - X) ** 2).sum(axis=-1)).astype(np.longdouble))
    exact = weights @ y / weights.sum(axis=1)
    allowed = average_error(kernel, np.ptp(y)) + 1e-13 * (1 + beta * size**2)
    assert np.abs(found - exact).max() <= allowed
    assert np.abs(program(asked[None], tokens[None])[0] - exact).max() <= allowed


@pytest.mark.parametrize("method", ["plain", "heavy_ball", "nesterov"])
def test_kernel_ridge(method):
    X, y, asked, size = points()
    kernel, penalty = Kernel(Prompt(50, 3), 0.7, size, 12), 0.5
    K = np.exp(-0.7 * ((X[:, None] - X) ** 2).sum(axis=-1))
    L = K.sum(axis=1).max() + penalty
    program = kernel_ridge(kernel, penalty, Schedule(method, 600, L, penalty))
    tokens = kernel.prompt.tokens(X, y)
    found = run(program, [asked, tokens])
    theirs = TheirKernelRidge(kernel="rbf", gamma=0.7, alpha=penalty).fit(X, y).predict(asked)
    left = Schedule(method, 600, L, penalty).contraction * np.linalg.norm(y) / penalty * np.sqrt(len(X))
    assert np.abs(found - theirs).max() <= 1e-10 + left
    short = kernel_ridge(kernel, penalty, Schedule(method, 3, L, penalty))
    in_numpy = short(asked[None], tokens[None])[0]
    assert np.abs(run(short, [asked, tokens]) - in_numpy).max() <= 1e-12


@pytest.mark.parametrize("neighbours", [1, 2, 5])
def test_nearest_in_rounds(neighbours):
    X, y, asked, size = points()
    kernel = Kernel(Prompt(45, 3), 1.0, size, 12)
    program, tokens = nearest(kernel, neighbours, 1e-9 * size**2), kernel.prompt.tokens(X, y)
    theirs = TheirNeighbours(neighbours).fit(X, y).predict(asked)
    assert np.abs(run(program, [asked, tokens]) - theirs).max() <= 1e-13
    assert np.abs(program(asked[None], tokens[None])[0] - theirs).max() <= 1e-13


def test_among_equals_the_first_wins():
    X = np.array([[1.0], [-1.0], [1.0], [3.0]])
    kernel = Kernel(Prompt(4, 1), 1.0, 4.0, 1)
    tokens = kernel.prompt.tokens(X, np.array([10.0, 20.0, 30.0, 40.0]))
    for count, wanted in ((1, 10.0), (2, 15.0), (3, 20.0), (4, 25.0)):
        assert run(nearest(kernel, count, 1e-6), [np.zeros((1, 1)), tokens])[0] == pytest.approx(wanted, abs=1e-12)


def test_refusals():
    kernel = Kernel(Prompt(4, 1), 1.0, 4.0, 1)
    for count, resolution in ((0, 1e-6), (5, 1e-6), (1, 0.0)):
        with pytest.raises(InputError):
            nearest(kernel, count, resolution)
    with pytest.raises(InputError, match="one-hot"):
        nearest(Kernel(Prompt(5000, 1), 1.0, 4.0, 1), 1, 1e-6)
    with pytest.raises(InputError, match="positive"):
        Kernel(Prompt(4, 1), -1.0, 4.0)
    with pytest.raises(InputError, match="stored once"):
        kernel_ridge(kernel, 1.0, Schedule("chebyshev", 9, 5.0, 1.0))
    X, y = load_diabetes(return_X_y=True)
    with pytest.raises(ValueError, match="n_samples_fit"):
        KNeighborsRegressor(9).fit(X[:5], y[:5]).predict(X)


def test_estimators_on_diabetes():
    X, y = load_diabetes(return_X_y=True)
    X = X / X.std(axis=0)  # its columns are centred
    ours, theirs = KernelRidge().fit(X[:300], y[:300]), TheirKernelRidge(kernel="rbf").fit(X[:300], y[:300])
    assert np.abs(ours.dual_coef_ - theirs.dual_coef_).max() <= 1e-8
    assert np.abs(ours.predict(X) - theirs.predict(X)).max() <= 1e-8
    near, their_near = KNeighborsRegressor().fit(X[:300], y[:300]), TheirNeighbours().fit(X[:300], y[:300])
    assert np.abs(near.predict(X) - their_near.predict(X)).max() <= 1e-10
    average = NadarayaWatson(gamma=0.3).fit(X[:300], y[:300])
    weights = np.exp(-0.3 * ((X[:, None] - X[:300]) ** 2).sum(axis=-1))
    assert np.abs(average.predict(X) - weights @ y[:300] / weights.sum(axis=1)).max() <= 1e-9
    far = 10 * X[:3]  # beyond the box that the program was built for
    assert np.abs(ours.predict(far) - theirs.predict(far)).max() <= 1e-8


@pytest.mark.parametrize(("features", "rows", "eps"), [(1, 60, 0.2), (2, 900, 0.6)])
def test_universal_in_context(features, rows, eps):
    """The same program for two functions: each within the bound, everywhere on the box."""
    each = round(rows ** (1 / features))
    axis = (2 * np.arange(each) + 1) / each - 1  # the centres of the cells of a grid
    X = np.stack(np.meshgrid(*[axis] * features), axis=-1).reshape(rows, features)
    fill = np.sqrt(features) / each
    asked = np.random.default_rng(0).uniform(-1, 1, (64, features))
    beta = np.log(rows + 20) / (0.99 * (eps**2 - fill**2))
    kernel = Kernel(Prompt(rows + 20, features), beta, np.sqrt(features), 64)
    program, worst = nadaraya_watson(kernel), 0.0
    for f in (lambda x: np.sin(x).sum(axis=1) / np.sqrt(features), lambda x: np.abs(x - 0.3).max(axis=1)):
        y = f(X)
        bound = universal_bound(kernel, lambda t: t, fill, np.ptp(y))
        error = np.abs(run(program, [asked, kernel.prompt.tokens(X, y)]) - f(asked)).max()
        assert error <= bound.value <= eps * 1.01
        worst = max(worst, error)
    assert bound.value <= 20 * worst


def test_exponents_without_digits_are_refused():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 2)) * [1.0, 1e8]
    for model in (KernelRidge(), NadarayaWatson(gamma=1.0)):
        with pytest.raises(ValueError, match="lower gamma"):
            model.fit(X, X[:, 0])
    assert np.isfinite(KernelRidge(gamma=1e-12).fit(X, X[:, 0]).predict(X)).all()
