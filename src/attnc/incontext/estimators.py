"""The base of all estimators, in the manner of scikit-learn: parameters, checked data, a program, a run on the prompt.

An estimator states its parameters as dataclass fields, from which `__init__`, `get_params` and `clone` follow, and
implements `_fit`. Linear models share the columns made ready (`ColumnUnits`), the recorded run, and `predict`.
"""

from __future__ import annotations

import abc
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.errors import InputError
from attnc.incontext.acceleration import METHODS, steps_for
from attnc.incontext.fitting import ColumnUnits, FitError, run_recorded
from attnc.incontext.prompt import Prompt
from attnc.ir.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float

LEFT_OVER = 1e-7
"""A gradient larger than this part of the terms that cancel in it is worth a warning; the limit is not tuned."""


@dataclass(eq=False, repr=False, kw_only=True)
class InContextEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
    """Fits by a program that reads the examples from its prompt."""

    max_rows: int | None = None

    takes_numbers: ClassVar[bool] = True  # False for a classifier, whose targets are labels

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the model to examples X (rows, features) and targets y (rows,).

        Parameters
        ----------
        X : array-like of shape (rows, features)
            The examples.
        y : array-like of shape (rows,)
            Their targets.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        FitError
            If the data or a parameter cannot be used; it is a ValueError, too.
        """
        if self.takes_numbers:
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
            y = np.asarray(y, np.float64)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
        self._fit(X, y)
        return self

    @abc.abstractmethod
    def _fit(self, X: Float[np.ndarray, "rows features"], y: np.ndarray) -> None:
        """Sets the fitted attributes. Warnings raised here or one call deeper point at the caller of `fit`."""

    def _queries(self, X: Any) -> Float[np.ndarray, "rows features"]:
        """Points to predict at, checked against the examples of the fit."""
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, reset=False, dtype=np.float64))

    def _room(self, X: np.ndarray, *, intercept: bool = False) -> Prompt:
        """A prompt that holds X, or FitError."""
        if self.max_rows is not None and len(X) > self.max_rows:
            raise FitError(f"X has {len(X)} rows, more than max_rows={self.max_rows}: the program has no room for them")
        return Prompt(self.max_rows or len(X), X.shape[1], intercept)


@dataclass(eq=False, repr=False, kw_only=True)
class SteppingEstimator(InContextEstimator):
    """Weights are found by steps of descent, each made by layers of attention."""

    method: str = "nesterov"
    tol: float = 1e-12
    max_iter: int = 10_000

    methods: ClassVar[tuple[str, ...]] = METHODS

    def _check_method(self) -> None:
        if self.method not in self.methods:
            *others, last = self.methods
            raise FitError(f"the method is {', '.join(others)} or {last}, found {self.method!r}")

    def _steps(self, L: float, mu: float, eta: float | None = None) -> int:
        """The number of steps that bring the error to tol, with a ConvergenceWarning where max_iter cuts it short."""
        if not (isinstance(self.max_iter, int | np.integer) and self.max_iter >= 1):
            raise FitError(f"max_iter is a whole number ≥ 1, found {self.max_iter!r}")
        if not 0 < self.tol < 1:
            raise FitError(f"tol is between 0 and 1, found {self.tol!r}")
        try:
            steps = steps_for(self.method, L, mu, self.tol, int(self.max_iter), eta)
        except InputError as error:
            raise FitError(str(error)) from None
        if steps <= self.max_iter:
            return steps
        warnings.warn(
            f"{self.max_iter} steps of {self.method} do not bring the error to tol={self.tol:g} of its start: the "
            f"eigenvalues lie between mu={mu:.3g} and L={L:.3g}. Raise max_iter, or alpha, or drop columns that nearly "
            "depend on others.",
            ConvergenceWarning,
            stacklevel=4,
        )
        return int(self.max_iter)

    def _paced(self, L: float, mu: float) -> tuple[float, int]:
        """(μ, T): T steps that bring a quadratic to tol, with μ raised until max_iter of them suffice.

        For losses that are no quadratics, whose smallest curvature on the way is far above the bound μ. The gradient
        that is reached is measured after the run.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._steps(L, mu)
        while steps_for(self.method, L, mu, self.tol, int(self.max_iter)) > self.max_iter and mu < L:
            mu = min(1.1 * mu, L)
        return mu, min(steps_for(self.method, L, mu, self.tol, int(self.max_iter)), int(self.max_iter))


@dataclass(eq=False, repr=False, kw_only=True)
class LinearEstimator(SteppingEstimator):
    """Weights of columns: `coef_` and `intercept_` in the user's units."""

    fit_intercept: bool = True
    heads: int = 4

    def _run(
        self, program: Program, inputs: Sequence[np.ndarray], start: np.ndarray, iterate: str, token: int = 0
    ) -> Float[np.ndarray, " weights"]:
        """Runs the program; sets program_, start_, prompt_ and trajectory_, and returns the last weights."""
        self.program_, self.start_, self.prompt_ = program, start, inputs[-1]
        weights, self.trajectory_ = run_recorded(program, inputs, start, iterate, token)
        return weights

    def _in_units(self, units: ColumnUnits, weights: np.ndarray) -> tuple[Float[np.ndarray, " features"], float]:
        """(coefficients, intercept) in the user's units; the weight of the intercept, if there is one, comes last."""
        features = len(units.scale)
        self.units_ = units
        return units.undo(weights[:features], float(weights[-1]) if len(weights) > features else 0.0)


def check_penalty(alpha: float) -> None:
    if not 0 <= alpha < np.inf:
        raise FitError(f"alpha is a penalty ≥ 0, and finite, found {alpha!r}")


def with_ones(columns: Float[np.ndarray, "rows features"], intercept: bool) -> Float[np.ndarray, "rows weights"]:
    """The columns, with one of ones for the intercept."""
    return np.column_stack([columns, np.ones(len(columns))]) if intercept else columns
