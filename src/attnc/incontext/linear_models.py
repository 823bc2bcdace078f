"""Least squares, ridge, lasso and elastic net in the manner of scikit-learn, fitted by an attention program."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.incontext.acceleration import Schedule
from attnc.incontext.checking import LEFT_OVER, check_penalty, checked_steps, room
from attnc.incontext.descent import descent_program
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.errors import Norms, gradient_bound, plan_least_squares, proximal_bound, proximal_step
from attnc.incontext.fitting import FitError, Units, eigenvalue_bounds, run_recorded
from attnc.incontext.task import Task

if TYPE_CHECKING:
    from jaxtyping import Float

ASSUMED = 1e-4
"""Where the smallest eigenvalue is zero, momentum is chosen for this part of the largest."""


class Linear(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """`predict` of all linear models."""

    coef_: Float[np.ndarray, " features"]
    intercept_: float

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        predicted: np.ndarray = X @ self.coef_ + self.intercept_
        return predicted


class Ridge(Linear):
    """argmin Σ (w·x_i + b − y_i)² + alpha·|w|², by T layers of attention over the prompt.

    The columns are centred (fit_intercept) and divided by √(mean square + alpha/n) before they enter the prompt, the
    targets centred; `coef_` and `intercept_` are in the user's units. `method` is plain, heavy_ball, nesterov or
    chebyshev; T is the number of steps after which the starting error has shrunk to `tol`, at most max_iter;
    `learning_rate` (plain only) sets the step. `max_rows` is the prompt's room; the rest is padding.

    After `fit`: program_ (an attnc.Program), prompt_ and start_ (its inputs), trajectory_ (the weights of the prompt's
    columns at the start and after every step), bound_ (of |trajectory_[-1] − optimum|₂), n_iter_.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        method: str = "chebyshev",
        tol: float = 1e-12,
        max_iter: int = 20_000,
        heads: int = 4,
        learning_rate: float | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.heads = heads
        self.learning_rate = learning_rate
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        y = np.asarray(y, np.float64)
        check_penalty(self.alpha)
        self._fit_quadratic(X, y, float(self.alpha))
        return self

    def _fit_quadratic(self, X: np.ndarray, y: np.ndarray, alpha: float) -> None:
        centred, damping = self.fit_intercept, alpha / len(X)
        units = Units.of(X, y, centred=centred, centred_y=centred, damping=damping)
        if not alpha and np.linalg.matrix_rank(units.prompt(X)) < X.shape[1]:
            units = units.uniform()
        columns, targets = units.prompt(X), y - units.centre
        penalty = alpha / units.scale**2
        L, mu = eigenvalue_bounds(columns.T @ columns + np.diag(penalty))
        norms = Norms(_up(np.sqrt((columns**2).sum(axis=1).max())), _up(np.linalg.norm(targets)), L, mu)
        steps = checked_steps(self.method, L, mu, self.tol, self.max_iter, self.learning_rate)
        prompt = room(X, self.max_rows)
        plan = plan_least_squares(
            prompt, norms, tuple(penalty), steps=steps, heads=self.heads, method=self.method, eta=self.learning_rate
        )
        self.task_, self.program_ = plan.task, descent_program([plan.task])
        self.prompt_, self.start_ = prompt.tokens(columns, targets), np.zeros(X.shape[1])
        weights, self.trajectory_ = run_recorded(
            self.program_, [self.start_, self.prompt_], self.start_, plan.task.iterate
        )
        self.bound_, self.gradient_bound_, self.units_ = plan.bound, plan.gradient, units
        self.n_iter_ = steps
        self.coef_, self.intercept_ = units.undo(weights)


class LinearRegression(Ridge):
    """argmin Σ (w·x_i + b − y_i)²; among several the shortest w. See Ridge for the parameters.

    Eigenvalues that are zero up to rounding are taken for zero: steps and bound_ are for the shortest w without them.
    """

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        method: str = "chebyshev",
        tol: float = 1e-13,
        max_iter: int = 20_000,
        heads: int = 4,
        learning_rate: float | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.fit_intercept = fit_intercept
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.heads = heads
        self.learning_rate = learning_rate
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        self._fit_quadratic(X, np.asarray(y, np.float64), 0.0)
        return self


class ElasticNet(Linear):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·(l1_ratio·|w|₁ + ½(1 − l1_ratio)·|w|²), by proximal gradient steps.

    A step is four layers: the gradient, an affine map, the gates of the soft threshold, an affine map. `method` is
    nesterov or plain. What is proved is said after the fit: bound_ is of |trajectory_[-1] − optimum|₂, from the
    proximal gradient there and the smallest eigenvalue (infinite where that is zero). See Ridge for the rest.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        method: str = "nesterov",
        tol: float = 1e-12,
        max_iter: int = 10_000,
        heads: int = 4,
        max_rows: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.heads = heads
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        if not 0 <= self.l1_ratio <= 1:
            raise FitError(f"l1_ratio is between 0 and 1, found {self.l1_ratio!r}")
        self._fit_composite(X, np.asarray(y, np.float64), float(self.l1_ratio))
        return self

    def _fit_composite(self, X: np.ndarray, y: np.ndarray, l1_ratio: float) -> None:
        check_penalty(self.alpha)
        if self.method not in ("plain", "nesterov"):
            raise FitError(f"a proximal step is plain or nesterov, found method {self.method!r}")
        centred, damping = self.fit_intercept, float(self.alpha) * (1 - l1_ratio)
        units = Units.of(X, y, centred=centred, centred_y=centred, damping=damping)
        columns, targets = units.prompt(X), y - units.centre
        l1 = self.alpha * l1_ratio / units.scale
        penalty = self.alpha * (1 - l1_ratio) / units.scale**2
        gram = columns.T @ columns / len(X) + np.diag(penalty)
        L, mu = eigenvalue_bounds(gram)
        if np.linalg.matrix_rank(gram) < len(gram):
            mu = 0.0
        pace = mu or ASSUMED * L  # the steps' idea of the smallest eigenvalue; what is reached is measured below
        steps = checked_steps(self.method, L, pace, self.tol, self.max_iter)
        schedule = Schedule(self.method, steps, L, pace)
        size, norm = _weight_bound(targets, l1, mu), _up(np.linalg.norm(targets))
        reach, prompt = schedule.overshoot * norm, room(X, self.max_rows)
        x = _up(np.sqrt((columns**2).sum(axis=1).max()))
        differences = choose(
            Sizes(prompt.rows, X.shape[1] + 1, x, reach, 3 * size * x + norm, mean=True), self.heads, "float64"
        )
        task = Task(
            prompt, schedule, differences, reach, tuple(penalty), tuple(l1) if l1.any() else (), 3 * size, mean=True
        )
        self.task_, self.program_ = task, descent_program([task])
        self.prompt_, self.start_ = prompt.tokens(columns, targets), np.zeros(X.shape[1])
        weights, self.trajectory_ = run_recorded(self.program_, [self.start_, self.prompt_], self.start_, task.iterate)
        self.units_, self.n_iter_, self.gradient_bound_ = units, steps, gradient_bound(task, x, 3 * size)
        self.coef_, self.intercept_ = units.undo(weights)
        gradient = columns.T @ (columns @ weights - targets) / len(X) + penalty * weights
        self.bound_ = proximal_bound(weights, gradient, l1, L, mu)
        left = L * float(np.linalg.norm(proximal_step(weights, gradient, l1, L)))
        if left > LEFT_OVER * max(L * float(np.linalg.norm(weights)), norm):
            warnings.warn(
                f"after {steps} steps the proximal gradient is still {left:.3g}: raise max_iter",
                ConvergenceWarning,
                stacklevel=3,
            )


class Lasso(ElasticNet):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·|w|₁: an elastic net with l1_ratio = 1."""

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        method: str = "nesterov",
        tol: float = 1e-12,
        max_iter: int = 10_000,
        heads: int = 4,
        max_rows: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.heads = heads
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        self._fit_composite(X, np.asarray(y, np.float64), 1.0)
        return self


def _weight_bound(targets: np.ndarray, l1: np.ndarray, mu: float) -> float:
    """|w| ≤ this at every iterate, since F(w) ≤ F(0) = |y|²/2n there."""
    start = float(targets @ targets) / (2 * len(targets))
    bounds = [2 * np.sqrt(2 * start / mu)] if mu else []
    bounds += [np.sqrt(len(l1)) * start / l1.min()] if l1.min() > 0 else []
    return _up(min(bounds)) if bounds else 1e3 * _up(np.linalg.norm(targets))


def _up(value: Any) -> float:
    """A norm, rounded up."""
    return float(value) * (1 + 1e-12)
