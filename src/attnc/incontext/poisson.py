"""Poisson regression in the manner of scikit-learn, fitted by an attention program with one head a step."""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.incontext.acceleration import Schedule
from attnc.incontext.checking import LEFT_OVER, check_penalty, paced, room
from attnc.incontext.descent import descent_program
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.errors import gradient_bound
from attnc.incontext.fitting import FitError, Units, eigenvalue_bounds, run_recorded
from attnc.incontext.linear_models import Linear
from attnc.incontext.task import Task

ATTEMPTS = 12


class PoissonRegressor(Linear):
    """argmin Σ (e^{w·x_i + b} − y_i·(w·x_i + b))/n + alpha·½|w|², counts y_i ≥ 0; a head sums the exponentials.

    The columns are centred (fit_intercept) and divided by √(mean square + alpha/mean y) before they enter the prompt;
    the intercept starts at log(mean y). The loss has no largest curvature: the program is built for means up to `most`
    (twice the largest count at first), and once more for twice as many where the steps went beyond.

    After `fit`: program_, start_ and prompt_ (its inputs), trajectory_ (the intercept last), most_, gradient_norm_,
    n_iter_.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        method: str = "nesterov",
        tol: float = 1e-11,
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        y = np.asarray(y, np.float64)
        check_penalty(self.alpha)
        if (y < 0).any() or not y.any():
            raise FitError(f"counts are ≥ 0 and not all zero, found values from {y.min():g} to {y.max():g}")
        units = Units.of(X, y, centred=self.fit_intercept, centred_y=False, damping=float(self.alpha) / float(y.mean()))
        most = 2 * float(y.max())
        for _ in range(ATTEMPTS):
            found = self._fit(units, X, y, most)
            if found <= most:
                return self
            most = 2 * min(max(most, found), 1e3 * most)
        raise FitError(f"the steps went to means of {found:.3g}; scale the columns, or raise alpha")

    def _fit(self, units: Units, X: np.ndarray, y: np.ndarray, most: float) -> float:
        """Fits with steps for means up to `most`; the largest mean met on the way."""
        columns, prompt = units.prompt(X), room(X, self.max_rows, intercept=self.fit_intercept)
        extended = np.column_stack([columns, np.ones(len(X))]) if self.fit_intercept else columns
        penalty = np.append(self.alpha / units.scale**2, [0.0] * self.fit_intercept)
        square = extended.T @ extended / len(X)
        L, _ = eigenvalue_bounds(most * square + np.diag(penalty))
        least = eigenvalue_bounds(float(y.mean()) / 8 * square + np.diag(penalty))[1]
        pace, steps = paced(self.method, L, min(least, L), self.tol, self.max_iter)
        x = float(np.sqrt((extended**2).sum(axis=1).max())) * (1 + 1e-12)
        sizes = Sizes(prompt.rows, 2, x, float(y.max()), float(y.max()), mean=True)
        task = Task(
            prompt,
            Schedule(self.method, steps, L, pace),
            choose(sizes, self.heads, "float64"),
            max(0.0, math.log(most)),
            tuple(penalty),
            mean=True,
            loss="poisson",
            targets=float(y.max()),
        )
        self.task_, self.program_ = task, descent_program([task])
        self.start_ = np.append(np.zeros(X.shape[1]), [math.log(y.mean())] * self.fit_intercept)
        self.prompt_ = prompt.tokens(columns, y)
        weights, self.trajectory_ = run_recorded(self.program_, [self.start_, self.prompt_], self.start_, task.iterate)
        self.gradient_bound_ = gradient_bound(task, x, 3 * float(np.linalg.norm(self.trajectory_, axis=1).max()))
        path = self.trajectory_[:: max(1, len(self.trajectory_) // 200)]
        with np.errstate(over="ignore", invalid="ignore"):
            largest = float(np.nan_to_num(np.exp((path @ extended.T).max()), nan=math.inf, posinf=1e300))
            means = np.exp(extended @ weights)
        gradient = extended.T @ (means - y) / len(X) + penalty * weights
        self.gradient_norm_, self.most_, self.units_, self.n_iter_ = float(np.linalg.norm(gradient)), most, units, steps
        self.coef_, self.intercept_ = units.undo(
            weights[: X.shape[1]], float(weights[-1]) if self.fit_intercept else 0.0
        )
        if largest <= most and self.gradient_norm_ > LEFT_OVER * x * float(y.mean()):
            warnings.warn(
                f"stopped after {steps} steps with a gradient of norm {self.gradient_norm_:.3g}: raise max_iter",
                ConvergenceWarning,
                stacklevel=4,
            )
        return largest

    def predict(self, X: Any) -> np.ndarray:
        """The means e^{w·x + b}."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return np.asarray(np.exp(X @ self.coef_ + self.intercept_))
