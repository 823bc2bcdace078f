"""Kernel regression and nearest neighbours: `predict` runs the program on its queries."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin, clone
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.validation import check_is_fitted

from attnc.engines.prompt import remember, run
from attnc.incontext.acceleration import Schedule
from attnc.incontext.causal import Causal, of_predictor
from attnc.incontext.domain import Domain
from attnc.incontext.estimators import (
    POSITIVE_ALPHA,
    RULES,
    FitError,
    InContextEstimator,
    Rule,
    SteppingEstimator,
    Weighing,
    answers_of,
    is_count,
    method_rule,
)
from attnc.incontext.kernels import Kernel, kernel_ridge, nadaraya_watson, nearest, universal_bound
from attnc.incontext.programs import InContextProgram
from attnc.incontext.side_by_side import with_queries
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import UNIT_ROUNDOFF

QUERIES = 64
"""Number of queries of one program. Predictions are made in blocks of this size, and the last block is padded with
zeros."""
KERNEL_ROWS = 512
"""Number of rows of the kernel matrix that are in memory at a time: 40 MB for 10,000 examples."""
QUERY_REACH = 2.0
"""Programs are built for norms up to this multiple of the largest norm of an example. Queries beyond it get their own
program."""


MOST_OFF = 1.0
"""The largest error of gamma times a squared distance, as a proven bound. Beyond it a kernel may be wrong by a factor
of e and exceed 1, so that steps diverge."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


@dataclass(eq=False, repr=False, kw_only=True)
class QueriedRegressor(RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """A regressor whose program takes (queries, prompt_). Columns are centred and not scaled, which keeps distances."""

    @abc.abstractmethod
    def _program(self, size: float, queries: int = QUERIES) -> Program:
        """Return the program for a number of queries of at most this norm."""

    def _prepare(self, X: np.ndarray, y: np.ndarray) -> Float[np.ndarray, "rows features"]:
        """Set the prompt and the norm up to which the program is built. Return the centred columns."""
        self.mean_ = X.mean(axis=0)
        centred = X - self.mean_
        self._prompt = self._room(X)
        self.prompt_ = self._prompt.tokens(centred, y)
        self.size_ = QUERY_REACH * max(float(np.sqrt((centred**2).sum(axis=1).max())), 1e-100) * (1 + 1e-12)
        return centred

    def _build(self) -> None:
        self.program_ = self._in_context(self.size_)
        self._memory = self._remembered(self.program_.program)

    def _in_context(self, size: float) -> InContextProgram:
        """Return the program with its domain: examples and queries up to this norm."""
        return InContextProgram(self._program(size), Domain(self._prompt, size), type(self).__name__)

    def _remembered(self, program: Program, watch: Any = None) -> np.ndarray:
        """Return the memory that the program makes from the prompt. It is the same for all queries."""
        return remember(program, [np.zeros(program.input_shapes[0]), self.prompt_], watch)

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict a number for every row of X, by a run of the program.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.NadarayaWatson(gamma=1.0).fit([[0.0], [1.0]], [2.0, 4.0])
        >>> [round(float(value), 6) for value in model.predict([[0.5]])]  # both examples are equally near
        [3.0]
        """
        X = self._queries(X) - self.mean_
        size = float(np.sqrt((X**2).sum(axis=1).max(initial=0)))
        program, memory = self.program_.program, self._memory
        if size > self.size_:
            program = self._program(size * (1 + 1e-12))
            memory = self._remembered(program)
        answers = []
        for block in (X[i : i + QUERIES] for i in range(0, len(X), QUERIES)):
            padded = np.zeros((QUERIES, X.shape[1]))
            padded[: len(block)] = block
            answers.append(run(program, [padded, self.prompt_], memory=memory)[: len(block)])
        return np.concatenate(answers)

    def predictor(self, queries: int = 1, reach: float = QUERY_REACH) -> InContextProgram:
        """Return the program that writes predictions into query tokens, the last rows of its prompt.

        Parameters
        ----------
        queries : int
            Maximum number of queries of one prompt.
        reach : float
            The largest norm of a query, as a multiple of the largest norm of an example of the fit. At least 2.

        Returns
        -------
        InContextProgram
            Its output has a number for each query.

        Raises
        ------
        FitError
            If a parameter is out of range.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.NadarayaWatson(gamma=100.0).fit([[0.0], [1.0]], [2.0, 4.0])
        >>> program = model.predictor(queries=3)
        >>> program.input_shapes, program.program.output_shape  # two examples and three queries
        (((5, 3),), (3,))
        """
        check_is_fitted(self)
        if not is_count(queries) or not QUERY_REACH <= reach < np.inf:
            raise FitError(
                f"queries is a whole number ≥ 1 and reach is at least {QUERY_REACH:g}, found {queries!r} and {reach!r}"
            )
        size = self.size_ * reach / QUERY_REACH
        domain = Domain(replace(self._prompt, queries=int(queries)), self.size_, query=size)
        return InContextProgram(with_queries(self._program(size, int(queries))), domain, type(self).__name__)

    def predict_in_context(self, X: Any, at_once: int = 16) -> Float[np.ndarray, " rows"]:
        """Predict by the program alone: queries are tokens of the prompt, and it returns their predictions.

        Parameters
        ----------
        X : array-like of shape (rows, features)
        at_once : int
            Number of queries of one prompt.

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.KNeighborsRegressor(n_neighbors=1).fit([[0.0], [1.0]], [2.0, 4.0])
        >>> model.predict_in_context([[0.2], [0.9]]).tolist()
        [2.0, 4.0]
        """
        X = self._queries(X) - self.mean_
        self._check_room()
        longest = float(np.sqrt((X**2).sum(axis=1)).max(initial=0)) * (1 + 1e-9)
        program = self.predictor(at_once, QUERY_REACH * max(1.0, longest / self.size_))
        return answers_of(program, (), self.prompt_, np.pad(X, ((0, 0), (0, 2))))

    def _check_room(self) -> None:
        """Raise FitError if the prompt has too few examples for a prediction."""

    def _causal(self, X: np.ndarray, y: np.ndarray) -> Causal:
        model = clone(self).set_params(max_rows=None)
        model._weighing = Weighing()
        model._choose(model._prepare(X, y))
        rows = len(X)
        program = of_predictor(model._program(model.size_, 1), rows, rows, factors=model._causal_factors(rows))
        domain = Domain(model._prompt, model.size_)
        return Causal(InContextProgram(program, domain, type(self).__name__), (model.prompt_,))

    def _choose(self, centred: Float[np.ndarray, "rows features"]) -> None:
        """Choose the parameters that depend on the examples."""

    def _require_digits(self, gamma: float) -> None:
        """Raise FitError if squared distances times gamma have no digit in float64."""
        kernel = Kernel(self._prompt, gamma, self.size_)
        off = gamma * kernel.square_error
        if not off <= MOST_OFF:
            raise FitError(
                f"with norms up to {self.size_:.3g} and gamma={gamma:.3g} the exponents of the kernel may be "
                f"{off:.3g} off in float64, and {MOST_OFF:g} is allowed. Scale the columns down, or lower gamma."
            )

    def _causal_factors(self, rows: int) -> np.ndarray | None:
        """Return the factors of causal predictions. None means 1."""
        return None


@dataclass(eq=False, repr=False)
class NadarayaWatson(QueriedRegressor):
    """Σ_i e^{−gamma|x−x_i|²} y_i / Σ_i e^{−gamma|x−x_i|²}: one head.

    Parameters
    ----------
    gamma : float or None
        The inverse width of the kernel, above 0; None takes Scott's bandwidth.
    corrections : int
        Number of times that the targets are corrected by their residuals, at least 0. Each is one more attention layer.
        The error for smooth functions is then smaller at the same width.
    max_rows : int or None
        Maximum number of rows in the prompt; None takes the rows of X.

    Attributes
    ----------
    gamma_ : float
        The inverse width of the kernel that was used.
    program_ : attnc.incontext.InContextProgram
        Its inputs are a block of queries, less `mean_`, and prompt_.
    prompt_ : array of shape (max_rows, features + 2)
        The examples, less `mean_`, as tokens.
    mean_ : array of shape (features,)
        The means of the columns.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.NadarayaWatson(gamma=100.0).fit([[0.0], [1.0]], [2.0, 4.0])
    >>> [round(float(value), 6) for value in model.predict([[0.0], [1.0]])]
    [2.0, 4.0]
    """

    gamma: float | None = None
    _: KW_ONLY
    corrections: int = 0

    rules: ClassVar[dict[str, Rule]] = RULES | {
        "corrections": (_is_whole, "corrections is a whole number ≥ 0"),
    }

    def error_bound(self, modulus: Callable[[float], float], fill: float, oscillation: float) -> Bound:
        """Return a proven bound of |prediction − f|, if the targets of the fit are f at the examples.

        Parameters
        ----------
        modulus : callable
            A concave modulus of continuity of f that never falls: t ↦ Λt if f is Λ-Lipschitz in the 2-norm.
        fill : float
            The fill distance: no point of the domain is farther than this from an example.
        oscillation : float
            A bound of |f|, and of the difference of any two of its values.

        Returns
        -------
        Bound
            The bound for every point of the domain, if its norm less `mean_` is at most `size_`.

        Raises
        ------
        InputError
            If there are corrections, for which nothing is proved, or a number is out of range.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.NadarayaWatson(gamma=100.0).fit([[0.0], [0.5], [1.0]], [0.0, 0.5, 1.0])
        >>> bound = model.error_bound(lambda t: t, fill=0.25, oscillation=1.0)  # the targets are those of f(x) = x
        >>> bool(abs(model.predict([[0.3]])[0] - 0.3) <= bound.value < 1.0)
        True
        """
        check_is_fitted(self)
        if self.corrections:
            raise FitError("the bound is for corrections=0: nothing is proved about corrected targets")
        if not (0 <= fill < np.inf and 0 <= oscillation < np.inf):
            raise FitError(f"fill and oscillation are finite and ≥ 0, found {fill!r} and {oscillation!r}")
        return universal_bound(Kernel(self._prompt, self.gamma_, self.size_, QUERIES), modulus, fill, oscillation)

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self._choose(self._prepare(X, y))
        self._build()

    def _choose(self, centred: Float[np.ndarray, "rows features"]) -> None:
        self.gamma_ = _scott(centred) if self.gamma is None else float(self.gamma)
        self._require_digits(self.gamma_)

    def _program(self, size: float, queries: int = QUERIES) -> Program:
        return nadaraya_watson(Kernel(self._prompt, self.gamma_, size, queries), int(self.corrections))


@dataclass(eq=False, repr=False)
class KernelRidge(QueriedRegressor, SteppingEstimator):
    """argmin over the span of e^{−gamma|x−x_i|²} of Σ (f(x_i) − y_i)² + alpha·|f|².

    T steps in the memory find the dual weights. The kernel's largest row sum bounds its largest eigenvalue, and 0
    bounds its smallest.

    Parameters
    ----------
    alpha : float
        The penalty, above 0.
    gamma : float or None
        The inverse width of the kernel, above 0; None takes 1/features.
    method : {"heavy_ball", "nesterov", "plain"}
        The kind of steps.
    tol, max_iter, max_rows
        As for `Ridge`.

    Attributes
    ----------
    dual_coef_ : array of shape (rows,)
        The dual weights.
    trajectory_ : array of shape (steps + 1, rows)
        The dual weights at the start and after every step.
    n_iter_ : int
        The number of steps T.
    program_, prompt_, mean_, gamma_
        As for `NadarayaWatson`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.KernelRidge(alpha=1e-3, gamma=1.0).fit([[0.0], [1.0]], [2.0, 4.0])
    >>> bool(abs(model.predict([[1.0]])[0] - 4.0) < 0.02)
    True
    """

    alpha: float = 1.0
    _: KW_ONLY
    gamma: float | None = None
    method: str = "heavy_ball"
    tol: float = 1e-11
    max_iter: int = 5_000

    rules: ClassVar[dict[str, Rule]] = method_rule("plain", "heavy_ball", "nesterov") | {"alpha": POSITIVE_ALPHA}

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        centred = self._prepare(X, y)
        self._choose(centred)
        self.program_ = self._in_context(self.size_)
        path = [np.zeros(len(centred))]

        def watch(layer: Any, state: np.ndarray) -> None:
            if layer.name.startswith("update"):
                path.append(state[: len(centred), layer.channels.index(self._schedule.iterate)].copy())

        self._memory = self._remembered(self.program_.program, watch)
        self.trajectory_ = np.stack(path)
        self.dual_coef_ = self.trajectory_[-1]

    def _choose(self, centred: Float[np.ndarray, "rows features"]) -> None:
        self.gamma_ = 1 / centred.shape[1] if self.gamma is None else float(self.gamma)
        self._require_digits(self.gamma_)
        L = _row_sums(centred, self.gamma_) + float(self.alpha)
        self.n_iter_ = self._steps(L, float(self.alpha))
        self._schedule = Schedule(self.method, self.n_iter_, L, float(self.alpha))

    def _program(self, size: float, queries: int = QUERIES) -> Program:
        return kernel_ridge(Kernel(self._prompt, self.gamma_, size, queries), float(self.alpha), self._schedule)


@dataclass(eq=False, repr=False)
class KNeighborsRegressor(QueriedRegressor):
    """The mean of y over the n_neighbors nearest examples. One round of hard attention finds each of them.

    Parameters
    ----------
    n_neighbors : int
        Number of neighbours.
    resolution : float or None
        Squared distances that differ by less than this times the square of the data's extent count as equal, and the
        first example wins. None takes the smallest difference that scores in float64 resolve.
    max_rows : int or None
        Maximum number of rows in the prompt; None takes the rows of X.

    Attributes
    ----------
    program_, prompt_, mean_
        As for `NadarayaWatson`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.KNeighborsRegressor(n_neighbors=1).fit([[0.0], [1.0]], [2.0, 4.0])
    >>> [round(float(value), 6) for value in model.predict([[0.2], [0.9]])]
    [2.0, 4.0]
    """

    n_neighbors: int = 5
    _: KW_ONLY
    resolution: float | None = None

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self._prepare(X, y)
        self._build()

    def _program(self, size: float, queries: int = QUERIES) -> Program:
        extent = 4 * size**2
        count = min(int(self.n_neighbors), self._prompt.rows)
        finest = 64 * UNIT_ROUNDOFF["float64"] * (self._prompt.features + 8) * (self._prompt.rows + 1)
        resolution = finest if self.resolution is None else float(self.resolution)
        return nearest(Kernel(self._prompt, 1.0, size, queries, heads=6), count, resolution * extent)

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict the mean of the nearest targets for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Raises
        ------
        FitError
            If the prompt has fewer examples than `n_neighbors`.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.KNeighborsRegressor(n_neighbors=2).fit([[0.0], [1.0], [9.0]], [2.0, 4.0, 7.0])
        >>> [round(float(value), 6) for value in model.predict([[0.2]])]  # the mean of 2 and 4
        [3.0]
        """
        check_is_fitted(self)
        self._check_room()
        return super().predict(X)

    def _check_room(self) -> None:
        present = int(self.prompt_[:, -2].sum())
        if self.n_neighbors > present:
            raise FitError(
                f"Expected n_neighbors <= n_samples_fit: n_neighbors = {self.n_neighbors}, n_samples_fit = {present}"
            )

    def _causal_factors(self, rows: int) -> np.ndarray | None:
        # Rows that a copy does not read have the target 0: the mean over k rows becomes that over the rows before.
        most = min(int(self.n_neighbors), rows)
        found: np.ndarray = most / np.clip(np.arange(rows), 1, most)
        return found


def _scott(centred: np.ndarray) -> float:
    """Return 1/(2h²) with h = σ·n^{−1/(d+4)}."""
    rows, features = centred.shape
    return float(rows ** (2 / (features + 4)) / (2 * (centred.var() or 1.0)))


def _row_sums(centred: np.ndarray, gamma: float) -> float:
    """Return the largest Σ_j e^{−γ|x_i−x_j|²}, rounded up. No eigenvalue of the kernel is larger."""
    blocks = (centred[i : i + KERNEL_ROWS] for i in range(0, len(centred), KERNEL_ROWS))
    return max(float(rbf_kernel(block, centred, gamma=gamma).sum(axis=1).max()) for block in blocks) * (1 + 1e-9)
