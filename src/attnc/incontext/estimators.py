"""The base classes of all estimators. They follow scikit-learn, and fit by a run of a program on the prompt.

An estimator declares its parameters as dataclass fields, from which `__init__`, `get_params` and `clone` follow. It
implements `_fit`. Linear models share the units of the columns, the recorded run, and `predict`.
"""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.errors import InputError
from attnc.exports.safe_files import PathLike
from attnc.incontext.acceleration import METHODS, Schedule, steps_for
from attnc.incontext.descent import Task, run_recorded
from attnc.incontext.domain import Domain
from attnc.incontext.newton import NewtonTask
from attnc.incontext.programs import InContextProgram
from attnc.incontext.progress import Objective
from attnc.incontext.prompt import Prompt
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound

if TYPE_CHECKING:
    from attnc.engines.torch_layers import LayeredNetwork

LEFT_OVER = 1e-7
"""A gradient causes a warning if it is larger than this fraction of the terms that cancel in it. The fraction is 10⁹
times the rounding of float64."""


class FitError(InputError, ValueError):
    """Data or parameters that an estimator cannot fit. It is also a ValueError, as callers of scikit-learn expect."""


Rule = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= 1)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


POSITIVE_ALPHA: Rule = (_is_positive, "alpha is a positive penalty")
RULES: dict[str, Rule] = {
    "alpha": (lambda value: 0 <= value < math.inf, "alpha is a penalty ≥ 0, and finite"),
    "l1_ratio": (lambda value: 0 <= value <= 1, "l1_ratio is between 0 and 1"),
    "C": (_is_positive, "C is a positive number"),
    "gamma": (lambda value: value is None or _is_positive(value), "gamma is a positive number"),
    "n_neighbors": (_is_count, "n_neighbors is a whole number ≥ 1"),
    "max_iter": (_is_count, "max_iter is a whole number ≥ 1"),
    "tol": (lambda value: 0 < value < 1, "tol is between 0 and 1"),
}
"""Name of a parameter → a test of its value, and a sentence that states the allowed values."""


@dataclass(eq=False, repr=False, kw_only=True)
class InContextEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
    """An estimator whose program reads the examples from its prompt."""

    max_rows: int | None = None

    takes_numbers: ClassVar[bool] = True  # False for a classifier, whose targets are labels
    rules: ClassVar[dict[str, Rule]] = RULES

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
            If the data or a parameter cannot be used. It is also a ValueError.
        """
        if self.takes_numbers:
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
            y = np.asarray(y, np.float64)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
        given = self.get_params()
        for name, (is_allowed, allowed) in self.rules.items():
            if name in given and not is_allowed(given[name]):
                raise FitError(f"{allowed}, found {given[name]!r}")
        try:
            self._fit(X, y)
        except InputError as error:
            raise FitError(str(error)) from None
        return self

    @abc.abstractmethod
    def _fit(self, X: Float[np.ndarray, "rows features"], y: np.ndarray) -> None:
        """Fit the model to checked data, with checked parameters."""

    def save(self, path: PathLike) -> None:
        """Write the fitted program as a folder: see `InContextProgram.save`."""
        self._fitted_program().save(path)

    def to_torch(self, *, trainable: bool = False) -> LayeredNetwork:
        """Return the fitted program as a torch module: see `InContextProgram.to_torch`."""
        return self._fitted_program().to_torch(trainable=trainable)

    def export_onnx(self, path: PathLike) -> None:
        """Write the fitted program as an ONNX file: see `InContextProgram.export_onnx`."""
        self._fitted_program().export_onnx(path)

    def _fitted_program(self) -> InContextProgram:
        check_is_fitted(self)
        program: InContextProgram = self.program_
        return program

    def _queries(self, X: Any) -> Float[np.ndarray, "rows features"]:
        """Check that the model is fitted, and return the rows of X."""
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def _room(self, X: np.ndarray, intercept: bool = False) -> Prompt:
        """Return the sizes of the prompt. Raise FitError if X has more rows than the prompt."""
        if self.max_rows is not None and len(X) > self.max_rows:
            raise FitError(f"X has {len(X)} rows, more than max_rows={self.max_rows}: the program has no room for them")
        return Prompt(self.max_rows or len(X), X.shape[1], intercept)


def method_rule(*methods: str) -> dict[str, Rule]:
    """Return the rules of an estimator that takes these kinds of steps."""
    *others, last = methods
    return RULES | {"method": (lambda value: value in methods, f"the method is {', '.join(others)} or {last}")}


@dataclass(eq=False, repr=False, kw_only=True)
class SteppingEstimator(InContextEstimator):
    """An estimator that finds weights by steps of descent. Layers of attention compute each step."""

    method: str = "nesterov"
    tol: float = 1e-12
    max_iter: int = 10_000

    rules: ClassVar[dict[str, Rule]] = method_rule(*METHODS)

    def _steps(self, L: float, mu: float, eta: float | None = None) -> int:
        """Return the number of steps that bring the error to tol, at most max_iter; warn if max_iter is too small."""
        steps = steps_for(self.method, L, mu, self.tol, int(self.max_iter), eta)
        if steps > self.max_iter:
            warn_of(
                f"{self.max_iter} steps of {self.method} do not bring the error to tol={self.tol:g} of its start: the "
                f"eigenvalues lie between mu={mu:.3g} and L={L:.3g}. Raise max_iter, or alpha, or drop columns that "
                "nearly depend on others.",
                stacklevel=5,
            )
        return min(steps, int(self.max_iter))

    def _paced(self, L: float, mu: float) -> Schedule:
        """Return the steps that bring a quadratic to tol. μ is raised until max_iter steps suffice.

        It is for losses that are not quadratic: their smallest curvature along the steps is far above the bound μ. The
        gradient at the end is measured after the run.
        """
        most = int(self.max_iter)
        while (steps := steps_for(self.method, L, mu, self.tol, most)) > most and mu < L:
            mu = min(1.1 * mu, L)
        self.n_iter_ = min(steps, most)
        return Schedule(self.method, self.n_iter_, L, mu)


def warn_of(message: str, stacklevel: int = 4) -> None:
    """Warn that a fit did not converge. At level 4, a warning from `_fit` points to the caller of `fit`."""
    warnings.warn(message, ConvergenceWarning, stacklevel=stacklevel)


@dataclass(frozen=True, eq=False)
class ColumnUnits:
    """The units of the prompt: columns are centred and divided by √(mean square + damping), and targets are centred.

    With the damping penalty/(rows·largest curvature of the loss) every column has the same curvature, so that one step
    length suits all columns.
    """

    mean: Float[np.ndarray, " features"]
    scale: Float[np.ndarray, " features"]
    centre: float
    spread: float = 1.0  # the unit of the targets

    @classmethod
    def of(cls, X: np.ndarray, y: np.ndarray, *, centred: bool, centred_y: bool, damping: float = 0.0) -> ColumnUnits:
        mean = X.mean(axis=0) if centred else np.zeros(X.shape[1])
        moved = X - mean
        largest = np.abs(moved).max(axis=0)
        largest[largest == 0] = 1.0  # squares of numbers below 1e-162 would be 0
        scale = np.hypot(largest * np.sqrt(((moved / largest) ** 2).mean(axis=0)), math.sqrt(damping))
        is_constant = (X[:1] == X).all(axis=0) if centred else (X == 0).all(axis=0)
        if centred and is_constant.any() and len(X) > 1:
            columns = ", ".join(map(str, np.flatnonzero(is_constant)[:8]))
            warnings.warn(
                f"column {columns} of X is constant: its coefficient is 0, since the intercept includes it",
                UserWarning,
                stacklevel=4,
            )
        mean = np.where(is_constant & centred, X[0], mean)  # leaves exact zeros, without rounding
        return cls(mean, np.where(is_constant, 1.0, scale), float(y.mean()) if centred_y else 0.0)

    def uniform(self) -> ColumnUnits:
        """Use one scale for all columns. The shortest of several optima is then also the shortest in the units of X."""
        return replace(self, scale=np.full_like(self.scale, np.sqrt((self.scale**2).mean())))

    def of_norm_one(self, rows: int, targets: np.ndarray) -> ColumnUnits:
        """Divide columns, their penalties included, and the centred targets by their 2-norms, rounded up."""
        norm = float(np.linalg.norm(targets)) * (1 + 1e-12)
        return replace(self, scale=self.scale * math.sqrt(rows) * (1 + 1e-12), spread=norm or 1.0)

    def prompt(self, X: np.ndarray) -> Float[np.ndarray, "rows features"]:
        """Return the columns of the prompt."""
        moved: np.ndarray = (X - self.mean) / self.scale
        return moved


@dataclass(eq=False, repr=False, kw_only=True)
class LinearEstimator(SteppingEstimator):
    """A linear model. `coef_` and `intercept_` are in the user's units."""

    fit_intercept: bool = True
    heads: int = 4

    def _run(
        self,
        task: Task,
        units: ColumnUnits,
        X: np.ndarray,
        targets: np.ndarray,
        domain: Domain,
        *,
        start: np.ndarray | None = None,
        bound: Bound | None = None,
        limit: float | None = None,
    ) -> tuple[Float[np.ndarray, " weights"], Float[np.ndarray, " weights"]]:
        """Run the task's program, set the fitted attributes, and return the last weights and the gradient there.

        The attributes are task_, program_, start_, prompt_, trajectory_, units_, coef_ and intercept_. The weight of
        the intercept, if there is one, comes last.
        """
        start = np.zeros(task.prompt.num_weights) if start is None else start
        inputs = task.inputs(start, units.prompt(X), targets)
        return self._run_on(
            task, units, inputs, InContextProgram(task.program(), domain, type(self).__name__, bound, limit)
        )

    def _run_on(
        self, task: Task | NewtonTask, units: ColumnUnits, inputs: Sequence[np.ndarray], program: InContextProgram
    ) -> tuple[Float[np.ndarray, " weights"], Float[np.ndarray, " weights"]]:
        """Run a program on these inputs, as `_run` does."""
        self.task_, self.units_, self.program_, self.prompt_ = task, units, program, inputs[-1]
        features, num_weights = len(units.scale), task.prompt.num_weights
        self.start_ = inputs[0].reshape(-1)[:num_weights]
        weights, self.trajectory_ = run_recorded(self.program_.program, inputs, self.start_, task.iterate, task.token)
        examples = self.prompt_[-task.prompt.rows :]
        is_zero = ~examples[examples[:, -2] != 0, :features].any(axis=0)  # a column without an example tells nothing
        self.coef_ = np.where(is_zero, 0.0, weights[:features] * units.spread / units.scale)
        own = units.spread * float(weights[-1]) if len(weights) > features else 0.0
        self.intercept_: Any = units.centre + own - float(units.mean @ self.coef_)
        return weights, Objective.of(task, self.prompt_[-task.prompt.rows :]).gradient(weights)

    def _with_intercept(
        self, units: ColumnUnits, X: np.ndarray, penalty: float
    ) -> tuple[Float[np.ndarray, "rows weights"], Float[np.ndarray, " weights"]]:
        """Return the columns and their penalties. An intercept is a column of ones without penalty."""
        columns, penalties = units.prompt(X), penalty / units.scale / units.scale
        if not self.fit_intercept:
            return columns, penalties
        return np.column_stack([columns, np.ones(len(X))]), np.append(penalties, 0.0)


def eigenvalue_bounds(gram: Float[np.ndarray, "d d"]) -> tuple[float, float]:
    """Return (L, μ) such that [μ, L] contains all eigenvalues that are not zero up to rounding."""
    values = np.linalg.eigvalsh(gram)
    slack = 4 * len(gram) * np.finfo(float).eps * float(max(values[-1], np.finfo(float).tiny))
    kept = values[values > 2 * slack]
    if not len(kept):
        return 1.0, 1.0  # every gradient is zero
    return float(values[-1] + slack), float(kept[0] - slack)
