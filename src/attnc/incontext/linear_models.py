"""Least squares, ridge, lasso and elastic net in the manner of scikit-learn, fitted by an attention program."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.errors import InputError
from attnc.incontext.acceleration import METHODS, steps_for
from attnc.incontext.descent import descent_program
from attnc.incontext.errors import Norms, plan_least_squares
from attnc.incontext.fitting import FitError, Units, eigenvalue_bounds, run_recorded
from attnc.incontext.prompt import Prompt

if TYPE_CHECKING:
    from jaxtyping import Float


class _Linear(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """`predict` of all linear models."""

    coef_: Float[np.ndarray, " features"]
    intercept_: float

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        predicted: np.ndarray = X @ self.coef_ + self.intercept_
        return predicted


class Ridge(_Linear):
    """argmin Σ (w·x_i + b − y_i)² + alpha·|w|², by T layers of attention over the prompt.

    The columns are centred (fit_intercept) and divided by their root mean square before they enter the prompt, the
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
        if not self.alpha >= 0:
            raise FitError(f"alpha is a penalty ≥ 0, found {self.alpha!r}")
        self._fit_quadratic(X, y, float(self.alpha))
        return self

    def _fit_quadratic(self, X: np.ndarray, y: np.ndarray, alpha: float) -> None:
        units = Units.of(X, y, centred=self.fit_intercept, centred_y=self.fit_intercept)
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
        self.program_ = descent_program([plan.task])
        self.prompt_, self.start_ = prompt.tokens(columns, targets), np.zeros(X.shape[1])
        weights, self.trajectory_ = run_recorded(
            self.program_, [self.start_, self.prompt_], self.start_, plan.task.iterate
        )
        self.bound_, self.gradient_bound_, self.units_ = plan.bound, plan.gradient, units
        self.n_iter_ = steps
        self.coef_, self.intercept_ = units.undo(weights)


class LinearRegression(Ridge):
    """argmin Σ (w·x_i + b − y_i)²; among several the shortest w. See Ridge for the parameters."""

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


def room(X: np.ndarray, max_rows: int | None, intercept: bool = False) -> Prompt:
    """A prompt that holds X, or FitError."""
    if max_rows is not None and len(X) > max_rows:
        raise FitError(f"X has {len(X)} rows, more than max_rows={max_rows}: the program has no room for them")
    return Prompt(max_rows or len(X), X.shape[1], intercept)


def checked_steps(method: str, L: float, mu: float, tol: float, max_iter: int, eta: float | None = None) -> int:
    """The number of steps, with a ConvergenceWarning where max_iter cuts it short."""
    if method not in METHODS:
        raise FitError(f"method {method!r} is none of {', '.join(METHODS)}")
    if not (isinstance(max_iter, int | np.integer) and max_iter >= 1):
        raise FitError(f"max_iter is a whole number ≥ 1, found {max_iter!r}")
    if not 0 < tol < 1:
        raise FitError(f"tol is between 0 and 1, found {tol!r}")
    try:
        steps = steps_for(method, L, mu, tol, int(max_iter), eta)
    except InputError as error:
        raise FitError(str(error)) from None
    if steps <= max_iter:
        return steps
    warnings.warn(
        f"{max_iter} steps of {method} do not bring the error to tol={tol:g} of its start: the eigenvalues lie between "
        f"mu={mu:.3g} and L={L:.3g}. Raise max_iter, or alpha, or drop columns that nearly depend on others.",
        ConvergenceWarning,
        stacklevel=4,
    )
    return int(max_iter)


def _up(value: Any) -> float:
    """A norm, rounded up."""
    return float(value) * (1 + 1e-12)
