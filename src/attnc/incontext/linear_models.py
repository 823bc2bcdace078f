"""Least squares, ridge, lasso, elastic net and Poisson regression, fitted by attention programs."""

from __future__ import annotations

import math
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning

from attnc.incontext.acceleration import Schedule
from attnc.incontext.descent import Task, descent_program
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.errors import Norms, gradient_bound, plan_least_squares, proximal_bound, proximal_step
from attnc.incontext.estimators import LEFT_OVER, LinearEstimator, check_penalty, with_ones
from attnc.incontext.fitting import ColumnUnits, FitError, eigenvalue_bounds

if TYPE_CHECKING:
    from jaxtyping import Float

ASSUMED = 1e-4
"""Where the smallest eigenvalue is zero, momentum is chosen for this part of the largest (not tuned); the
proximal gradient that is reached is measured after the fit."""
RAISES = 12
"""Most attempts of Poisson regression with a larger bound of the means: each at least doubles it."""


@dataclass(eq=False, repr=False, kw_only=True)
class LinearRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """A linear model of numbers."""

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict w·x + b for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).
        """
        predicted: np.ndarray = self._queries(X) @ self.coef_ + self.intercept_
        return predicted


@dataclass(eq=False, repr=False, kw_only=True)
class LeastSquares(LinearRegressor):
    """argmin Σ (w·x_i + b − y_i)² + alpha·|w|², by T layers of attention over the prompt."""

    method: str = "chebyshev"
    max_iter: int = 20_000
    learning_rate: float | None = None

    def _fit_quadratic(self, X: np.ndarray, y: np.ndarray, alpha: float) -> None:
        self._check_method()
        centred, damping = self.fit_intercept, alpha / len(X)
        units = ColumnUnits.of(X, y, centred=centred, centred_y=centred, damping=damping)
        if not alpha and np.linalg.matrix_rank(units.prompt(X)) < X.shape[1]:
            units = units.uniform()
        columns, targets = units.prompt(X), y - units.centre
        penalty = alpha / units.scale**2
        L, mu = eigenvalue_bounds(columns.T @ columns + np.diag(penalty))
        norms = Norms(_longest(columns), _up(np.linalg.norm(targets)), L, mu)
        self.n_iter_ = self._steps(L, mu, self.learning_rate)
        prompt = self._room(X)
        plan = plan_least_squares(
            prompt,
            norms,
            tuple(penalty),
            steps=self.n_iter_,
            heads=self.heads,
            method=self.method,
            eta=self.learning_rate,
        )
        self.task_, self.bound_, self.gradient_bound_ = plan.task, plan.bound, plan.gradient
        start, tokens = np.zeros(X.shape[1]), prompt.tokens(columns, targets)
        weights = self._run(descent_program([plan.task]), [start, tokens], start, plan.task.iterate)
        self.coef_, self.intercept_ = self._in_units(units, weights)


@dataclass(eq=False, repr=False)
class Ridge(LeastSquares):
    """argmin Σ (w·x_i + b − y_i)² + alpha·|w|², by T layers of attention over the prompt.

    The columns are centred (fit_intercept) and divided by √(mean square + alpha/n) before they enter the prompt. The
    targets are centred. `coef_` and `intercept_` are in the user's units.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    fit_intercept : bool
        Whether to fit b.
    method : {"chebyshev", "nesterov", "heavy_ball", "plain"}
        The kind of steps.
    tol : float
        T is the number of steps after which the starting error has shrunk to this part.
    max_iter : int
        Maximum number of steps.
    heads : int
        Maximum number of heads that make the gradient.
    learning_rate : float or None
        The length of plain steps; None chooses it.
    max_rows : int or None
        Maximum number of rows in the prompt; the rest is padding. None takes the rows of X.

    Attributes
    ----------
    coef_, intercept_
        The weights.
    program_ : attnc.Program
        Its inputs are start_ and prompt_.
    trajectory_ : array of shape (steps + 1, features)
        The weights of the prompt's columns at the start and after every step.
    bound_ : Bound
        Of |trajectory_[-1] − optimum|₂.
    n_iter_ : int
        T.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Ridge(alpha=0.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> bool(abs(model.predict([[3.0]])[0] - 7.0) < 1e-9)
    True
    """

    alpha: float = 1.0

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        check_penalty(self.alpha)
        self._fit_quadratic(X, y, float(self.alpha))


@dataclass(eq=False, repr=False, kw_only=True)
class LinearRegression(LeastSquares):
    """argmin Σ (w·x_i + b − y_i)²; if there are several, the shortest w.

    Eigenvalues that are zero up to rounding are taken for zero: steps and bound_ are for the shortest w without them.

    Parameters
    ----------
    fit_intercept, method, tol, max_iter, heads, learning_rate, max_rows
        As for `Ridge`, which also lists the attributes.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> [round(float(w), 6) for w in (*model.coef_, model.intercept_)]
    [2.0, 1.0]
    """

    tol: float = 1e-13

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self._fit_quadratic(X, y, 0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class ProximalRegressor(LinearRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·(l1_ratio·|w|₁ + ½(1 − l1_ratio)·|w|²), by proximal gradient steps."""

    methods: ClassVar[tuple[str, ...]] = ("plain", "nesterov")

    def _fit_composite(self, X: np.ndarray, y: np.ndarray, alpha: float, l1_ratio: float) -> None:
        check_penalty(alpha)
        self._check_method()
        centred, damping = self.fit_intercept, alpha * (1 - l1_ratio)
        units = ColumnUnits.of(X, y, centred=centred, centred_y=centred, damping=damping)
        columns, targets = units.prompt(X), y - units.centre
        l1, penalty = alpha * l1_ratio / units.scale, alpha * (1 - l1_ratio) / units.scale**2
        gram = columns.T @ columns / len(X) + np.diag(penalty)
        L, mu = eigenvalue_bounds(gram)
        if np.linalg.matrix_rank(gram) < len(gram):
            mu = 0.0
        pace = mu or ASSUMED * L  # the gradient that is reached is measured below
        self.n_iter_ = steps = self._steps(L, pace)
        schedule = Schedule(self.method, steps, L, pace)
        size, norm = _weight_bound(targets, l1, mu), _up(np.linalg.norm(targets))
        reach, prompt, x = schedule.overshoot * norm, self._room(X), _longest(columns)
        sizes = Sizes(prompt.rows, X.shape[1] + 1, x, reach, 3 * size * x + norm, mean=True)
        thresholds = tuple(l1) if l1.any() else ()
        differences = choose(sizes, self.heads, "float64")
        task = Task(prompt, schedule, differences, reach, tuple(penalty), thresholds, 3 * size, mean=True)
        self.task_, self.gradient_bound_ = task, gradient_bound(task, x, 3 * size)
        start, tokens = np.zeros(X.shape[1]), prompt.tokens(columns, targets)
        weights = self._run(descent_program([task]), [start, tokens], start, task.iterate)
        self.coef_, self.intercept_ = self._in_units(units, weights)
        gradient = columns.T @ (columns @ weights - targets) / len(X) + penalty * weights
        self.bound_ = proximal_bound(weights, gradient, l1, L, mu)
        left = L * float(np.linalg.norm(proximal_step(weights, gradient, l1, L)))
        if left > LEFT_OVER * max(L * float(np.linalg.norm(weights)), norm):
            warnings.warn(
                f"after {steps} steps the proximal gradient is still {left:.3g}: raise max_iter",
                ConvergenceWarning,
                stacklevel=4,
            )


@dataclass(eq=False, repr=False)
class ElasticNet(ProximalRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·(l1_ratio·|w|₁ + ½(1 − l1_ratio)·|w|²), by proximal gradient steps.

    A step is four layers: the gradient, an affine map, the gates of the soft threshold, an affine map. bound_ is of
    |trajectory_[-1] − optimum|₂, computed after the fit from the proximal gradient there and the smallest eigenvalue.
    It is infinite where that eigenvalue is zero.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    l1_ratio : float
        The part of the penalty that is |w|₁, between 0 and 1.
    method : {"nesterov", "plain"}
        The kind of steps.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`, which also lists the attributes.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.ElasticNet(alpha=0.1).fit([[-1.0], [0.0], [1.0]], [-2.0, 0.0, 2.0])
    >>> bool(1.5 < model.coef_[0] < 2.0)
    True
    """

    alpha: float = 1.0
    _: KW_ONLY
    l1_ratio: float = 0.5

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        if not 0 <= self.l1_ratio <= 1:
            raise FitError(f"l1_ratio is between 0 and 1, found {self.l1_ratio!r}")
        self._fit_composite(X, y, self.alpha, float(self.l1_ratio))


@dataclass(eq=False, repr=False)
class Lasso(ProximalRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·|w|₁: an elastic net with l1_ratio = 1.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    fit_intercept, method, tol, max_iter, heads, max_rows
        As for `ElasticNet`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Lasso(alpha=5.0).fit([[-1.0], [0.0], [1.0]], [-2.0, 0.0, 2.0])
    >>> bool(abs(model.coef_[0]) < 1e-6)  # the penalty is above the largest correlation
    True
    """

    alpha: float = 1.0

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self._fit_composite(X, y, self.alpha, 1.0)


@dataclass(eq=False, repr=False)
class PoissonRegressor(LinearRegressor):
    """argmin Σ (e^{w·x_i + b} − y_i·(w·x_i + b))/n + alpha·½|w|² for counts y_i ≥ 0; one head sums the exponentials.

    The columns are centred (fit_intercept) and divided by √(mean square + alpha/mean y) before they enter the prompt.
    The intercept starts at log(mean y). The loss has no largest curvature: the program is built for means up to a
    bound, twice the largest count at first, and built again for a larger one where the steps went beyond.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    method : {"nesterov", "heavy_ball", "plain", "chebyshev"}
        The kind of steps.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`.

    Attributes
    ----------
    coef_, intercept_, program_, start_, prompt_, trajectory_, n_iter_
        As for `Ridge`; the weight of the intercept comes last.
    most_ : float
        The bound of the means for which the program was built.
    gradient_norm_ : float
        The norm of the gradient at the last weights.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.PoissonRegressor(alpha=0.0).fit([[0.0], [0.0], [1.0]], [1.0, 3.0, 4.0])
    >>> [round(float(mean), 4) for mean in model.predict([[0.0], [1.0]])]
    [2.0, 4.0]
    """

    alpha: float = 1.0
    _: KW_ONLY
    tol: float = 1e-11

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        check_penalty(self.alpha)
        self._check_method()
        if (y < 0).any() or not y.any():
            raise FitError(f"counts are ≥ 0 and not all zero, found values from {y.min():g} to {y.max():g}")
        units = ColumnUnits.of(
            X, y, centred=self.fit_intercept, centred_y=False, damping=float(self.alpha) / float(y.mean())
        )
        most = 2 * float(y.max())
        for _ in range(RAISES):
            found = self._fit_up_to(most, units, X, y)
            if found <= most:
                return
            most = 2 * min(max(most, found), 1e3 * most)
        raise FitError(f"the steps went to means of {found:.3g}; scale the columns, or raise alpha")

    def _fit_up_to(self, most: float, units: ColumnUnits, X: np.ndarray, y: np.ndarray) -> float:
        """Fits with steps for means up to `most`; returns the largest mean on the way."""
        columns, prompt = units.prompt(X), self._room(X, intercept=self.fit_intercept)
        extended = with_ones(columns, self.fit_intercept)
        penalty = np.append(self.alpha / units.scale**2, [0.0] * self.fit_intercept)
        square = extended.T @ extended / len(X)
        L, _ = eigenvalue_bounds(most * square + np.diag(penalty))
        least = eigenvalue_bounds(float(y.mean()) / 8 * square + np.diag(penalty))[1]
        pace, self.n_iter_ = self._paced(L, min(least, L))
        x, largest_count = _longest(extended), float(y.max())
        sizes = Sizes(prompt.rows, 2, x, largest_count, largest_count, mean=True)
        task = Task(
            prompt,
            Schedule(self.method, self.n_iter_, L, pace),
            choose(sizes, self.heads, "float64"),
            max(0.0, math.log(most)),
            tuple(penalty),
            mean=True,
            loss="poisson",
            targets=largest_count,
        )
        start = np.append(np.zeros(X.shape[1]), [math.log(y.mean())] * self.fit_intercept)
        tokens = prompt.tokens(columns, y)
        weights = self._run(descent_program([task]), [start, tokens], start, task.iterate)
        self.task_ = task
        self.gradient_bound_ = gradient_bound(task, x, 3 * float(np.linalg.norm(self.trajectory_, axis=1).max()))
        path = self.trajectory_[:: max(1, len(self.trajectory_) // 200)]
        with np.errstate(over="ignore", invalid="ignore"):
            largest = float(np.nan_to_num(np.exp((path @ extended.T).max()), nan=math.inf, posinf=1e300))
            means = np.exp(extended @ weights)
        gradient = extended.T @ (means - y) / len(X) + penalty * weights
        self.gradient_norm_, self.most_ = float(np.linalg.norm(gradient)), most
        self.coef_, self.intercept_ = self._in_units(units, weights)
        if largest <= most and self.gradient_norm_ > LEFT_OVER * x * float(y.mean()):
            warnings.warn(
                f"stopped after {self.n_iter_} steps with a gradient of norm {self.gradient_norm_:.3g}: raise max_iter",
                ConvergenceWarning,
                stacklevel=4,
            )
        return largest

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict the mean e^{w·x + b} for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).
        """
        return np.asarray(np.exp(super().predict(X)))


def _weight_bound(targets: np.ndarray, l1: np.ndarray, mu: float) -> float:
    """|w| ≤ this at every iterate, since F(w) ≤ F(0) = |y|²/2n there."""
    start = float(targets @ targets) / (2 * len(targets))
    bounds = [2 * np.sqrt(2 * start / mu)] if mu else []
    bounds += [np.sqrt(len(l1)) * start / l1.min()] if l1.min() > 0 else []
    return _up(min(bounds)) if bounds else 1e3 * _up(np.linalg.norm(targets))


def _longest(rows: Float[np.ndarray, "rows columns"]) -> float:
    """The largest 2-norm of a row, rounded up."""
    return _up(np.sqrt((rows**2).sum(axis=1).max()))


def _up(value: Any) -> float:
    """A norm, rounded up: its sums have far fewer roundings than 1e-12 allows."""
    return float(value) * (1 + 1e-12)
