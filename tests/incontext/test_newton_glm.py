"""Newton programs of logistic and Poisson regression: few layers, exact turns, penalties and weights in the prompt."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext import LogisticRegression, OutsideDomain, PoissonRegressor, Prompt
from attnc.incontext.differences import Products
from attnc.incontext.newton_glm import CurvedTask

datasets = pytest.importorskip("sklearn.datasets")


def cancer(standardised: bool) -> tuple[np.ndarray, np.ndarray]:
    X, y = datasets.load_breast_cancer(return_X_y=True)
    return ((X - X.mean(axis=0)) / X.std(axis=0) if standardised else X), y


@pytest.mark.parametrize(("standardised", "layers"), [(True, 150), (False, 200)])
def test_few_layers_suffice(standardised: bool, layers: int) -> None:
    X, y = cancer(standardised)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = LogisticRegression().fit(X, y)
    assert model.program_.depth <= layers
    assert model.coef_bound_.max() <= 1e-9 * np.abs(model.coef_).max()  # proven, in the units of the data
    exact = model.task_.steps.path(model.program_.domain.examples(model.prompt_[1:]))[0]
    assert np.abs(exact[-1] - model.trajectory_[-1]).max() <= 1e-9 * np.abs(exact[-1]).max()


def collinear(rng: np.random.Generator) -> np.ndarray:
    X = rng.normal(size=(60, 4))
    X[:, 3] = X[:, 2] + 1e-3 * rng.normal(size=60)
    return X


def outlier(rng: np.random.Generator) -> np.ndarray:
    X = rng.normal(size=(60, 4))
    X[7] *= 30
    return X


DATA = {"collinear": collinear, "more columns than rows": lambda rng: rng.normal(size=(12, 20)), "outlier": outlier}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("intercept", [True, False])
def test_data_that_are_hard(data: str, intercept: bool) -> None:
    rng = np.random.default_rng(0)
    X = DATA[data](rng)
    y = (X[:, 0] + rng.normal(size=len(X)) > 0).astype(int)
    model = LogisticRegression(C=3.0, fit_intercept=intercept).fit(X, y)
    assert model.coef_bound_.max() <= 1e-9 * (1 + np.abs(model.coef_).max())
    counts = rng.poisson(np.exp(0.3 * np.clip(X[:, 0], -3, 3) + 1))
    model = PoissonRegressor(alpha=0.1, fit_intercept=intercept).fit(X, counts)
    assert model.coef_bound_.max() <= 1e-9 * (1 + np.abs(model.coef_).max())


def test_one_program_fits_two_data_sets() -> None:
    fitted = []
    for seed, C in ((0, 1.0), (1, 2.0)):
        X = np.random.default_rng(seed).normal(size=(40, 3)) * [1.0, 100.0, 0.01] + 7
        fitted.append(LogisticRegression(C=C).fit(X, X[:, 0] + np.sin(9 * X[:, 1]) > 7))
    first, second = fitted
    assert first.task_ == second.task_
    assert (run(first.program_.program, [second.prompt_]) == second.trajectory_[-1]).all()


def test_prompts_on_which_turns_diverge_are_refused() -> None:
    X, y = cancer(True)
    model = LogisticRegression().fit(X, y)
    model.program_.check(model.prompt_)
    other = model.prompt_.copy()
    other[-31:] = 0  # without penalties the classes are separable, and the optimum is far
    with pytest.raises(OutsideDomain, match="do not converge"):
        model.program_.check(other)


@pytest.mark.parametrize("found", [Products.best(4, "float64"), Products(1, 0.25), Products(3, 0.5)])
def test_products_of_two_numbers(found: Products) -> None:
    """The theorem's error of a product holds, and is reached at the corners."""
    rng = np.random.default_rng(0)
    a, b = np.append(rng.uniform(-1, 1, (2, 500)), [[1, 1, -1], [1, -1, -1]], axis=1)
    steps = np.arange(1, found.heads + 1)
    weights = np.array([4 * found.product_weight(int(j)) for j in steps])
    scaled = found.eps * steps
    made = (np.sinh(np.multiply.outer(a, scaled)) * np.sinh(np.multiply.outer(b, scaled))) @ weights
    allowed = found.product_truncation
    assert np.abs(made - a * b).max() <= allowed + 1e-13  # rounding of the products
    assert np.abs(made - a * b).max() >= allowed / 3


@pytest.mark.parametrize(("loss", "turns"), [("hinge", 20), ("logistic", 3), ("logistic", 999)])
def test_tasks_that_are_refused(loss: str, turns: int) -> None:
    with pytest.raises(InputError, match=r"the loss is|the number of turns"):
        CurvedTask(Prompt(9, 2), loss, turns)
