"""Newton–Schulz programs: tens of layers, accurate where columns are nearly collinear, with a bound that is tight."""

from __future__ import annotations

import warnings

import flint
import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext import LinearRegression, Prompt, Ridge
from attnc.incontext.enclosures import prompt_bound
from attnc.incontext.newton import NewtonTask

datasets = pytest.importorskip("sklearn.datasets")


def exact(X: np.ndarray, y: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """The optimum of Σ (w·x_i − y_i)² + Σ penalty_c w_c², solved in rational numbers and rounded once."""

    def rational(a: np.ndarray) -> flint.fmpq_mat:
        flat = [flint.fmpq(*float(number).as_integer_ratio()) for number in a.ravel()]
        return flint.fmpq_mat(*a.shape, flat)

    A, b = rational(X), rational(y[:, None])
    found = (A.transpose() * A + rational(np.diag(penalty))).solve(A.transpose() * b)
    return np.array([int(found[i, 0].p) / int(found[i, 0].q) for i in range(X.shape[1])])


def nearly_collinear(apart: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 5))
    X[:, 4] = X[:, 3] + apart * generator.normal(size=60)
    return X, X @ [1.0, 2.0, 3.0, 4.0, 5.0] + 0.1 * generator.normal(size=60)


def diabetes() -> tuple[np.ndarray, np.ndarray]:
    X, y = datasets.load_diabetes(return_X_y=True)
    return X - X.mean(axis=0), y - y.mean()


def trend() -> tuple[np.ndarray, np.ndarray]:
    """Years and a constant column: the condition is about 1e5 squared."""
    years = np.arange(1947.0, 1963.0)
    X = np.column_stack([years, np.ones(16), np.random.default_rng(1).normal(size=16)])
    return X, 300 * (years - 1950) + np.random.default_rng(2).normal(size=16)


CASES = {
    "diabetes": (diabetes, 40, 1e-9),
    "collinear to 1e-3": (lambda: nearly_collinear(1e-3), 75, 1e-7),
    "collinear to 1e-5": (lambda: nearly_collinear(1e-5), 100, 1e-3),
    "a trend and a constant": (trend, 90, 1e-7),
}


@pytest.mark.parametrize("name", CASES)
def test_few_layers_suffice(name: str) -> None:
    data, layers, accuracy = CASES[name]
    X, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = LinearRegression(fit_intercept=False).fit(X, y)
    wanted = exact(X, y, np.zeros(X.shape[1]))
    assert model.program_.depth <= layers
    assert np.abs(model.coef_ - wanted).max() <= accuracy * np.abs(wanted).max()
    columns, targets = model.prompt_[:, : X.shape[1]], model.prompt_[:, -1]
    off = np.linalg.norm(model.trajectory_[-1] - exact(columns, targets, np.zeros(X.shape[1])))
    rounding = 4 * np.finfo(float).eps * np.linalg.norm(model.trajectory_[-1])  # of the numbers that are compared
    assert off <= model.bound_.value + rounding
    assert model.bound_.value <= 20 * off + rounding


def test_one_program_fits_two_data_sets() -> None:
    """Its weights depend on the sizes and the condition, and on no number of the examples, penalties included."""
    generator = np.random.default_rng(3)
    fitted = []
    for alpha in (0.5, 0.7):
        X = generator.normal(size=(30, 3)) * [1.0, 20.0, 0.1] + 5
        fitted.append(Ridge(alpha=alpha).fit(X, X @ [1.0, 2.0, 3.0] + generator.normal(size=30)))
    first, second = fitted
    assert first.task_ == second.task_
    swapped = run(first.program_.program, [second.start_, second.prompt_])
    assert (swapped == second.trajectory_[-1]).all()
    assert np.abs(second.coef_ - first.coef_).max() > 0.01
    first.program_.check(second.prompt_)


@pytest.mark.parametrize("alpha", [0.01, 10.0])
def test_penalties_are_rows_of_the_prompt(alpha: float) -> None:
    X, y = diabetes()
    model = Ridge(alpha=alpha, fit_intercept=False, max_rows=500).fit(X, y)
    wanted = exact(X, y, np.full(10, alpha))
    assert np.abs(model.coef_ - wanted).max() <= 1e-11 * np.abs(wanted).max()
    assert (model.prompt_[-10:, 10] == 0).all()
    assert model.prompt_.shape == (510, 12)


def test_columns_that_depend_on_others_share_their_weight() -> None:
    X = np.random.default_rng(4).normal(size=(20, 2))
    X = np.column_stack([X, X[:, 0]])
    model = LinearRegression(fit_intercept=False).fit(X, X @ [1.0, 2.0, 1.0])
    assert np.abs(model.coef_ - [1.0, 2.0, 1.0]).max() <= 1e-8
    assert model.bound_.value == np.inf


def test_the_bound_holds_at_any_weights() -> None:
    X, y = nearly_collinear(0.1)
    columns = X / np.linalg.norm(X, axis=0)
    tokens = Prompt(60, 5).tokens(columns, y)
    optimum = exact(columns, y, np.zeros(5))
    for size in (1e-12, 1e-6, 1.0):
        weights = optimum + size * np.random.default_rng(5).normal(size=5)
        distance = np.linalg.norm(weights - optimum)
        found = prompt_bound(NewtonTask(Prompt(60, 5), 4.0), tokens, weights).value
        assert distance * (1 - 1e-3) <= found <= 1.02 * distance + 1e-12


@pytest.mark.parametrize("condition", [0.5, 1e30, float("nan")])
def test_conditions_that_are_refused(condition: float) -> None:
    with pytest.raises(InputError, match="the condition is a number from 1"):
        NewtonTask(Prompt(3, 1), condition)
