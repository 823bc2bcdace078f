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
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_X_y, validate_data

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.exports.safe_files import PathLike
from attnc.incontext.acceleration import METHODS, Schedule, steps_for
from attnc.incontext.causal import Causal
from attnc.incontext.descent import Task, run_recorded
from attnc.incontext.domain import Domain
from attnc.incontext.enclosures import Enclosure, Fit, enclose, enclose_sparse
from attnc.incontext.gates import limits_of, safeguarded
from attnc.incontext.newton import NewtonTask
from attnc.incontext.newton_glm import CurvedTask
from attnc.incontext.programs import InContextProgram
from attnc.incontext.progress import Objective
from attnc.incontext.prompt import Prompt
from attnc.incontext.stored_fit import stored_fit
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound

if TYPE_CHECKING:
    from attnc.engines.torch_layers import LayeredNetwork

LEFT_OVER = 1e-7
"""A gradient causes a warning if it is larger than this fraction of the terms that cancel in it. The fraction is 10⁹
times the rounding of float64."""


QUERY_ROOM = 4.0
"""Predictors are built for queries up to this multiple of the largest norm of an example in the domain."""
MEAN_EXCESS = 20.0
"""log of the largest mean of a query, relative to the largest mean of an example in the domain."""

AnyTask = Task | NewtonTask | CurvedTask


class FitError(InputError, ValueError):
    """Data or parameters that an estimator cannot fit. It is also a ValueError, as callers of scikit-learn expect."""


Rule = tuple[Callable[[Any], bool], str]


def is_count(value: Any) -> bool:
    """Return whether a parameter is a whole number of at least 1."""
    return isinstance(value, int | np.integer) and bool(value >= 1)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


POSITIVE_ALPHA: Rule = (_is_positive, "alpha is a positive penalty")
RULES: dict[str, Rule] = {
    "alpha": (lambda value: 0 <= value < math.inf, "alpha is a penalty ≥ 0, and finite"),
    "l1_ratio": (lambda value: 0 <= value <= 1, "l1_ratio is between 0 and 1"),
    "C": (_is_positive, "C is a positive number"),
    "gamma": (lambda value: value is None or _is_positive(value), "gamma is a positive number"),
    "n_neighbors": (is_count, "n_neighbors is a whole number ≥ 1"),
    "max_iter": (is_count, "max_iter is a whole number ≥ 1"),
    "tol": (lambda value: 0 < value < 1, "tol is between 0 and 1"),
}
"""Name of a parameter → a test of its value, and a sentence that states the allowed values."""


@dataclass(eq=False, repr=False, kw_only=True)
class InContextEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
    """An estimator whose program reads the examples from its prompt."""

    max_rows: int | None = None

    takes_numbers: ClassVar[bool] = True  # False for a classifier, whose targets are labels
    takes_several_targets: ClassVar[bool] = False
    rules: ClassVar[dict[str, Rule]] = RULES

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the model to examples X (rows, features) and targets y.

        Parameters
        ----------
        X : array-like of shape (rows, features)
            The examples.
        y : array-like of shape (rows,)
            Their targets. `Ridge` and `LinearRegression` also take several targets, (rows, targets).

        Returns
        -------
        The estimator itself.

        Raises
        ------
        FitError
            If the data or a parameter cannot be used. It is also a ValueError.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.NadarayaWatson(gamma=100.0)
        >>> model.fit([[0.0], [1.0]], [2.0, 4.0]) is model
        True
        """
        return self._fit_weighted(X, y, None)

    def _fit_weighted(self, X: Any, y: Any, sample_weight: Any) -> Self:
        if self.takes_numbers:
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=self.takes_several_targets)
            y = np.asarray(y, np.float64)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
        self._check_parameters()
        self._weighing = Weighing()
        if sample_weight is not None:
            omega = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64))
            if (omega < 0).any() or not omega.any():
                raise FitError("sample weights are ≥ 0 and not all zero")
            X, y, omega = X[omega > 0], y[omega > 0], omega[omega > 0]
            self._weighing = Weighing(omega)
        try:
            self._fit(X, y)
        except InputError as error:
            raise FitError(str(error)) from None
        return self

    def _check_parameters(self) -> None:
        given = self.get_params()
        for name, (is_allowed, allowed) in self.rules.items():
            if name in given and not is_allowed(given[name]):
                raise FitError(f"{allowed}, found {given[name]!r}")

    def causal(self, X: Any, y: Any) -> Causal:
        """Return one program that predicts every example from the examples before it.

        It is for data of this size and these norms. The estimator itself is not fitted. Linear models have no intercept
        here, and do not centre columns: `attnc.incontext.causal` tells why.

        Parameters
        ----------
        X : array-like of shape (rows, features)
            The examples in their order.
        y : array-like of shape (rows,)
            Their targets.

        Returns
        -------
        Causal
            The program, its inputs for these examples, and the unit of its predictions.

        Raises
        ------
        FitError
            If the data or a parameter cannot be used, or steps do not converge on a prefix. It is also a ValueError.

        Examples
        --------
        >>> import attnc
        >>> causal = attnc.incontext.KNeighborsRegressor(n_neighbors=1).causal([[0.0], [9.0], [1.0]], [5.0, 2.0, 1.0])
        >>> causal.predictions().tolist()
        [0.0, 5.0, 5.0]
        """
        if self.takes_numbers:
            X, y = check_X_y(X, y, dtype=np.float64, y_numeric=True)
            y = np.asarray(y, np.float64)
        else:
            X, y = check_X_y(X, y, dtype=np.float64)
        self._check_parameters()
        try:
            return self._causal(X, y)
        except InputError as error:
            raise FitError(str(error)) from None

    def causal_predictions(self, X: Any, y: Any) -> Float[np.ndarray, " *shape"]:
        """Predict the target of every example from the examples before it, by the program of `causal`.

        Parameters
        ----------
        X : array-like of shape (rows, features)
            The examples in their order.
        y : array-like of shape (rows,)
            Their targets.

        Returns
        -------
        Array of shape (rows,), or (rows, classes) for more than two classes. The first prediction is that of weights 0.
        For two classes it is the probability of the second.

        Raises
        ------
        FitError
            If the data or a parameter cannot be used, or steps diverge on a prefix. It is also a ValueError.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LinearRegression(fit_intercept=False)
        >>> found = model.causal_predictions([[1.0], [2.0], [4.0]], [3.0, 6.0, 12.0])
        >>> [round(float(value), 6) + 0.0 for value in found]
        [0.0, 6.0, 12.0]
        """
        made = self.causal(X, y)
        try:
            return made.predictions()
        except InputError as error:
            raise FitError(str(error)) from None

    @abc.abstractmethod
    def _causal(self, X: Float[np.ndarray, "rows features"], y: np.ndarray) -> Causal:
        """Return the causal form for checked data, with checked parameters."""

    @abc.abstractmethod
    def _fit(self, X: Float[np.ndarray, "rows features"], y: np.ndarray) -> None:
        """Fit the model to checked data, with checked parameters."""

    def save(self, path: PathLike) -> None:
        """Write the fitted program as a folder, with its prompt and a bound for it: see `InContextProgram.save`.

        The bound is about the weights for this prompt, and `attnc verify` proves it again. If there is none, as for a
        lasso, the folder tells why.

        Parameters
        ----------
        path : path-like
            The folder.

        Examples
        --------
        >>> import attnc, pathlib, tempfile
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/ridge")
        ...     sorted(path.name for path in pathlib.Path(folder, "ridge").iterdir())
        ['README.md', 'certificate.json', 'config.json', 'fit.safetensors', 'model.safetensors']
        """
        program = self._fitted_program()
        if hasattr(self, "task_") and hasattr(self, "trajectory_"):
            inputs = [self.start_, self.prompt_][-len(program.input_shapes) :]
            fit = stored_fit(program.program, self.task_, inputs, self.trajectory_[-1])
            program = replace(program, fit=fit)
        program.save(path)

    def to_torch(self, *, trainable: bool = False) -> LayeredNetwork:
        """Return the fitted program as a torch module: see `InContextProgram.to_torch`.

        Parameters
        ----------
        trainable : bool
            Whether the weights are parameters.

        Returns
        -------
        torch.nn.Module
            Its inputs are those of `program_`, batch first.

        Examples
        --------
        >>> import attnc, torch
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> module = model.to_torch()
        >>> inputs = [torch.tensor(each[None]) for each in (model.start_, model.prompt_)]
        >>> bool((module(*inputs)[0] - torch.tensor(model.trajectory_[-1])).abs().max() < 1e-9)
        True
        """
        return self._fitted_program().to_torch(trainable=trainable)

    def export_onnx(self, path: PathLike) -> None:
        """Write the fitted program as an ONNX file: see `InContextProgram.export_onnx`. It needs the extra `onnx`.

        Parameters
        ----------
        path : path-like
            The file.

        Examples
        --------
        >>> import attnc, pathlib, tempfile
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.export_onnx(f"{folder}/ridge.onnx")
        ...     [path.name for path in pathlib.Path(folder).iterdir()]
        ['ridge.onnx']
        """
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
        return Prompt(self.max_rows or len(X), X.shape[1], intercept, weighted=self._weighing.relative is not None)


@dataclass(frozen=True, eq=False)
class Weighing:
    """Sample weights above 0. `given` is None if there are none."""

    given: Float[np.ndarray, " rows"] | None = None

    @property
    def most(self) -> float:
        """The largest weight."""
        return 1.0 if self.given is None else float(self.given.max())

    @property
    def relative(self) -> Float[np.ndarray, " rows"] | None:
        """The weights divided by the largest. None if all are equal."""
        if self.given is None or (self.given == self.most).all():
            return None
        # A weight below this adds nothing to a sum in float64, and its quotient by the largest may be 0.
        found: np.ndarray = np.maximum(self.given / self.most, np.finfo(float).tiny)
        return found

    def over(self, rows: int) -> Float[np.ndarray, " rows"]:
        """Return the relative weights of all rows."""
        return np.ones(rows) if self.relative is None else self.relative


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

    def _steps(self, L: float, mu: float, eta: float | None = None, method: str | None = None) -> int:
        """Return the number of steps that bring the error to tol, at most max_iter; warn if max_iter is too small."""
        method = method or self.method
        steps = steps_for(method, L, mu, self.tol, int(self.max_iter), eta)
        if steps > self.max_iter:
            warn_of(
                f"{self.max_iter} steps of {method} do not bring the error to tol={self.tol:g} of its start: the "
                f"eigenvalues lie between mu={mu:.3g} and L={L:.3g}. Raise max_iter, or alpha, or drop columns that "
                "nearly depend on others.",
                stacklevel=5,
            )
        return min(steps, int(self.max_iter))

    def _paced(self, L: float, mu: float, method: str) -> Schedule:
        """Return the steps that bring a quadratic to tol. μ is raised until max_iter steps suffice.

        It is for losses that are not quadratic: their smallest curvature along the steps is far above the bound μ. The
        gradient at the end is measured after the run.
        """
        most = int(self.max_iter)
        while (steps := steps_for(method, L, mu, self.tol, most)) > most and mu < L:
            mu = min(1.1 * mu, L)
        self.n_iter_ = min(steps, most)
        return Schedule(method, self.n_iter_, L, mu)


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
    centre: Float[np.ndarray, " *targets"]
    spread: Float[np.ndarray, " *targets"]  # the unit of the targets

    @classmethod
    def of(
        cls,
        X: np.ndarray,
        y: np.ndarray,
        omega: np.ndarray,
        *,
        centred: bool,
        centred_y: bool,
        damping: float | np.ndarray = 0.0,
    ) -> ColumnUnits:
        total = omega.sum()
        mean = omega @ X / total if centred else np.zeros(X.shape[1])
        moved = X - mean
        largest = np.abs(moved).max(axis=0)
        largest[largest == 0] = 1.0  # squares of numbers below 1e-162 would be 0
        scale = np.hypot(largest * np.sqrt(omega @ (moved / largest) ** 2 / total), np.sqrt(damping))
        is_constant = (X[:1] == X).all(axis=0) if centred else (X == 0).all(axis=0)
        if centred and is_constant.any() and len(X) > 1:
            columns = ", ".join(map(str, np.flatnonzero(is_constant)[:8]))
            warnings.warn(
                f"column {columns} of X is constant: its coefficient is 0, since the intercept includes it",
                UserWarning,
                stacklevel=4,
            )
        mean = np.where(is_constant & centred, X[0], mean)  # leaves exact zeros, without rounding
        centre = omega @ y / total if centred_y else np.zeros(y.shape[1:])
        return cls(mean, np.where(is_constant, 1.0, scale), np.asarray(centre), np.ones(y.shape[1:]))

    def uniform(self) -> ColumnUnits:
        """Use one scale for all columns. The shortest of several optima is then also the shortest in the units of X."""
        return replace(self, scale=np.full_like(self.scale, np.sqrt((self.scale**2).mean())))

    def of_norm_one(self, total: float, targets: np.ndarray) -> ColumnUnits:
        """Divide columns, their penalties included, and the centred targets by their 2-norms, rounded up.

        The norms of columns are those with the weights of the examples, whose sum is `total`.
        """
        norms = np.linalg.norm(targets, axis=0) * (1 + 1e-12)
        return replace(self, scale=self.scale * math.sqrt(total) * (1 + 1e-12), spread=np.where(norms == 0, 1.0, norms))

    def prompt(self, X: np.ndarray) -> Float[np.ndarray, "rows features"]:
        """Return the columns of the prompt."""
        moved: np.ndarray = (X - self.mean) / self.scale
        return moved


@dataclass(eq=False, repr=False, kw_only=True)
class LinearEstimator(SteppingEstimator):
    """A linear model. `coef_` and `intercept_` are in the user's units."""

    fit_intercept: bool = True
    heads: int = 4

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to examples X (rows, features) and targets y.

        Parameters
        ----------
        X : array-like of shape (rows, features)
            The examples.
        y : array-like of shape (rows,)
            Their targets. `Ridge` and `LinearRegression` also take several targets, (rows, targets).
        sample_weight : array-like of shape (rows,), optional
            The weight of every example, at least 0. Weights enter the prompt as logarithms. None means 1.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        FitError
            If the data or a parameter cannot be used. It is also a ValueError.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [2.0]], [1.0, 3.0], sample_weight=[1.0, 1.0])
        >>> [round(float(value), 6) for value in (*model.coef_, model.intercept_)]
        [0.666667, 1.333333]
        """
        return self._fit_weighted(X, y, sample_weight)

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
        inputs = task.inputs(start, units.prompt(X), targets, self._weighing.relative)
        return self._run_on(
            task, units, inputs, InContextProgram(task.program(), domain, type(self).__name__, bound, limit)
        )

    def _run_on(
        self, task: AnyTask, units: ColumnUnits, inputs: Sequence[np.ndarray], program: InContextProgram
    ) -> tuple[Float[np.ndarray, " *shape"], Float[np.ndarray, " *shape"]]:
        """Run a program on these inputs, as `_run` does."""
        self.task_, self.units_, self.program_, self.prompt_ = task, units, program, inputs[-1]
        features, num_weights = len(units.scale), task.prompt.num_weights
        self.start_ = inputs[0].reshape(-1)[:num_weights]
        start = self.start_ if task.prompt.targets == 1 else np.tile(self.start_, (task.prompt.targets, 1))
        weights, self.trajectory_ = run_recorded(self.program_.program, inputs, start, task.iterate, task.token)
        if self._has_gates and np.isfinite(self.trajectory_).all():
            self.program_, self.prompt_ = self._guarded(task, self.program_), self._below_start(inputs)
            made = self.program_.program
            weights, self.trajectory_ = run_recorded(made, [self.prompt_], start, task.iterate, task.token)
        examples = self.prompt_[-task.prompt.rows :]
        present = examples[examples[:, task.prompt.features] != 0]
        is_zero = ~present[:, :features].any(axis=0)  # a column without an example tells nothing
        self.coef_ = np.where(is_zero, 0.0, weights[..., :features] * units.spread[..., None] / units.scale)
        own = units.spread * weights[..., -1] * self._constant if num_weights > features else 0.0
        intercept = units.centre + own - self.coef_ @ units.mean
        self.intercept_: Any = float(intercept) if intercept.ndim == 0 else intercept
        return weights, Objective.of(task, examples).gradient(weights)

    @property
    def _longest(self) -> float:
        """The largest norm of an example in the domain, or 1 if all examples are zero."""
        return self.program_.domain.x or 1.0

    @property
    def _has_gates(self) -> bool:
        """Whether the program is to have gates of `gates`. Plans of least squares have their own."""
        return bool(getattr(self, "safeguard", False)) and not (isinstance(self.task_, Task) and self.task_.clip)

    def _guarded(self, task: AnyTask, program: InContextProgram) -> InContextProgram:
        """Return a program of the task with gates. The limit of weights is a power of two above those on the way."""
        most = 4 * float(np.abs(self.trajectory_).max(initial=0)) or 1.0
        domain = replace(program.domain, start=float(np.linalg.norm(self.start_)))
        kept = limits_of(task, math.ldexp(1.0, math.frexp(most)[1]))
        made, limit = safeguarded(program.program, kept, domain)
        return InContextProgram(made, domain, program.algorithm, program.bound, limit)

    @staticmethod
    def _below_start(inputs: Sequence[np.ndarray]) -> Float[np.ndarray, "rows width"]:
        """Return the first weights above the prompt."""
        if len(inputs) == 1:
            return inputs[0]
        return np.vstack([np.pad(inputs[0], (0, inputs[1].shape[1] - len(inputs[0]))), inputs[1]])

    @property
    def _constant(self) -> float:
        """The constant column of an intercept that is fitted as a weight."""
        is_curved = isinstance(self.task_, CurvedTask)
        return float(np.abs(self.prompt_[1:, self.task_.prompt.num_weights - 1]).max()) if is_curved else 1.0

    def _with_intercept(
        self, units: ColumnUnits, X: np.ndarray, penalty: float
    ) -> tuple[Float[np.ndarray, "rows weights"], Float[np.ndarray, " weights"]]:
        """Return the columns and their penalties. An intercept is a column of ones without penalty."""
        columns, penalties = units.prompt(X), penalty / units.scale / units.scale
        if not self.fit_intercept:
            return columns, penalties
        return np.column_stack([columns, np.ones(len(X))]), np.append(penalties, 0.0)

    def _enclose(self, fits: Sequence[Fit], l1: np.ndarray | None = None) -> None:
        """Set `coef_bound_` and `intercept_bound_` from the objective in the user's units, one for each target."""
        self._set_enclosures([enclose(fit) if l1 is None else enclose_sparse(fit, l1) for fit in fits])

    def _set_enclosures(self, found: list[Enclosure]) -> None:
        self._enclosures = found
        self.coef_bound_ = np.stack([one.coef for one in found]).reshape(self.coef_.shape)
        own = np.array([one.intercept for one in found])
        self.intercept_bound_: Any = own if np.ndim(self.intercept_) else float(own[0])

    def _fits(self, loss: str, X: np.ndarray, y: np.ndarray, penalty: float, is_mean: bool = False) -> list[Fit]:
        """Return the objective Σ ω_i ℓ_i + ½ Σ λ w_c² of each target, in the user's units."""
        coefs, owns = np.atleast_2d(self.coef_), np.atleast_1d(self.intercept_)
        targets = y.reshape(len(y), -1).T
        return [
            Fit(
                loss,
                X,
                target,
                coef,
                float(own) if self.fit_intercept else None,
                np.full(X.shape[1], penalty),
                omega=self._weighing.given,
                is_mean=is_mean,
                mean=self.units_.mean,
                scale=self.units_.scale,
            )
            for target, coef, own in zip(targets, coefs, owns, strict=True)
        ]

    def predict_bound(self, X: Any) -> Float[np.ndarray, " *shape"]:
        """Return a proven bound of |w·x + b − (w*·x + b*)| for every row x, with (w*, b*) the optimum.

        It counts the distance of the weights that were found from the optimum for the data of the fit, and not the
        rounding of the sum w·x + b itself.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,), or (rows, targets).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [2.0]], [1.0, 3.0])
        >>> bool(model.predict_bound([[1.0]])[0] < 1e-9)
        True
        """
        X = self._queries(X)
        found = np.stack([one.of_scores(X) for one in self._enclosures], axis=1)
        return found if np.ndim(self.intercept_) and found.shape[1] > 1 else found[:, 0]

    def predictor(self, queries: int = 1, reach: float = QUERY_ROOM) -> InContextProgram:
        """Return the program that writes predictions into query tokens, the last rows of its prompt.

        Parameters
        ----------
        queries : int
            Maximum number of queries of one prompt.
        reach : float
            The largest norm of a query, as a multiple of the largest norm of an example in the domain.

        Returns
        -------
        InContextProgram
            Its output has a number for each query, in the units of the prompt: see `predict_in_context`.

        Raises
        ------
        FitError
            If a parameter cannot be used. It is also a ValueError.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
        >>> program = model.predictor(queries=2)
        >>> program.input_shapes[1], program.program.output_shape  # three examples, a penalty and two queries
        ((6, 3), (2,))
        """
        check_is_fitted(self)
        if not is_count(queries) or not _is_positive(reach):
            raise FitError(f"queries is a whole number ≥ 1 and reach is positive, found {queries!r} and {reach!r}")
        prompt, limit = replace(self.task_.prompt, queries=int(queries)), reach * self._longest
        task: AnyTask
        if isinstance(self.task_, NewtonTask):
            task = replace(self.task_, prompt=prompt, query=limit)
        elif isinstance(self.task_, CurvedTask):
            reached = max(1.0, limit * 2 * float(np.linalg.norm(self.trajectory_[-1])))
            task = replace(self.task_, prompt=prompt, asked=reached if self.task_.is_huber else 1.0)
        else:
            largest = float(np.linalg.norm(self.trajectory_[-1]))
            asked = limit * max(2 * largest, 1e-100)
            if self.task_.loss == "poisson":
                asked = min(asked, self.task_.reach + MEAN_EXCESS)
            task = replace(self.task_, prompt=prompt, asked=asked)
        domain = replace(self.program_.domain, prompt=prompt, query=limit)
        made = InContextProgram(task.program(), domain, type(self).__name__)
        return self._guarded(task, made) if self._has_gates else made

    def predict_in_context(self, X: Any, at_once: int = 16) -> Float[np.ndarray, " *shape"]:
        """Predict by the program alone: queries are tokens of the prompt, and it returns their predictions.

        Parameters
        ----------
        X : array-like of shape (rows, features)
        at_once : int
            Number of queries of one prompt.

        Returns
        -------
        Array of shape (rows,), or (rows, targets): numbers in the units of the data, or the probability of the second
        class.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
        >>> bool(abs(model.predict_in_context([[10.0]])[0] - 21.0) < 1e-8)
        True
        """
        X = self._queries(X)
        columns = self.units_.prompt(X)
        width = self.prompt_.shape[1]
        asked = np.zeros((len(X), width))
        asked[:, : columns.shape[1]] = columns
        if isinstance(self.task_, CurvedTask) and self.task_.prompt.num_weights > columns.shape[1]:
            asked[:, columns.shape[1]] = self._constant
        longest = float(np.sqrt((asked**2).sum(axis=1)).max(initial=0))
        reach = max(QUERY_ROOM, longest / self._longest * (1 + 1e-9))
        program = self.predictor(at_once, reach)
        starts = (self.start_,) if len(program.input_shapes) == 2 else ()
        return self._in_units(answers_of(program, starts, self.prompt_, asked))

    def _in_units(self, answers: Float[np.ndarray, " *shape"]) -> Float[np.ndarray, " *shape"]:
        """Return predictions of the program in the units of the data."""
        found: np.ndarray = answers * self.units_.spread + self.units_.centre
        return found


def answers_of(
    program: InContextProgram,
    starts: tuple[np.ndarray, ...],
    prompt: np.ndarray,
    asked: Float[np.ndarray, "rows width"],
) -> Float[np.ndarray, "rows ..."]:
    """Return the predictions of a program for all queries, as many at once as it takes."""
    at_once, width = program.domain.prompt.queries, asked.shape[1]
    answers = []
    for block in (asked[i : i + at_once] for i in range(0, len(asked), at_once)):
        tokens = np.vstack([prompt, block, np.zeros((at_once - len(block), width))])
        answers.append(run(program.program, [*starts, tokens])[: len(block)])
    return np.concatenate(answers)
