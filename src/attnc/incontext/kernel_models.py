"""Kernel regression and nearest neighbours in the manner of scikit-learn: `predict` runs the program on its queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.engines.prompt import remember, run
from attnc.incontext.acceleration import Schedule
from attnc.incontext.checking import checked_steps, room
from attnc.incontext.fitting import FitError
from attnc.incontext.kernels import MAX_NAMED, Kernel, kernel_ridge, nadaraya_watson, nearest
from attnc.ir.program import Program
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float

QUERIES = 64
"""Of a program: they are asked in blocks of so many, the last padded with zeros."""
ROOM = 2.0
"""Programs are built for points this many times as far out as the examples; queries beyond get their own."""


class _Queried(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The columns are centred, and that is all: distances do not change. `program_` takes (queries, prompt_)."""

    program_: Program
    mean_: Float[np.ndarray, " features"]
    prompt_: Float[np.ndarray, "rows width"]
    size_: float

    def _program(self, size: float) -> Program:
        raise NotImplementedError

    def _prepare(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, multi_output=False)
        y = np.asarray(y, np.float64)
        self.mean_ = X.mean(axis=0)
        centred = X - self.mean_
        self._room = room(X, self.max_rows)
        self.prompt_ = self._room.tokens(centred, y)
        self.size_ = ROOM * max(float(np.sqrt((centred**2).sum(axis=1).max())), 1e-100) * (1 + 1e-12)
        return centred, y

    def _build(self) -> None:
        self.program_ = self._program(self.size_)
        self._memory = remember(self.program_, [np.zeros(self.program_.input_shapes[0]), self.prompt_])

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64) - self.mean_
        size = float(np.sqrt((X**2).sum(axis=1).max(initial=0)))
        program, memory = self.program_, self._memory
        if size > self.size_:
            program = self._program(size * (1 + 1e-12))
            memory = remember(program, [np.zeros(program.input_shapes[0]), self.prompt_])
        blocks = [X[i : i + QUERIES] for i in range(0, len(X), QUERIES)]
        answers = []
        for block in blocks:
            padded = np.zeros((QUERIES, X.shape[1]))
            padded[: len(block)] = block
            answers.append(run(program, [padded, self.prompt_], memory=memory)[: len(block)])
        return np.concatenate(answers)


class NadarayaWatson(_Queried):
    """Σ_i e^{−gamma|x−x_i|²} y_i / Σ_i e^{−gamma|x−x_i|²}: one head. gamma=None is Scott's bandwidth."""

    def __init__(self, gamma: float | None = None, *, max_rows: int | None = None) -> None:
        self.gamma = gamma
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        centred, _ = self._prepare(X, y)
        self.gamma_ = _gamma(self.gamma, _scott(centred))
        self._build()
        return self

    def _program(self, size: float) -> Program:
        return nadaraya_watson(Kernel(self._room, self.gamma_, size, QUERIES))


class KernelRidge(_Queried):
    """argmin over the span of e^{−gamma|x−x_i|²} of Σ (f(x_i) − y_i)² + alpha·|f|²; gamma=None is 1/features.

    The dual weights are found by T steps in the memory, heavy-ball unless told otherwise; the kernel's largest
    eigenvalue is bounded by its largest row sum, its smallest by 0. trajectory_: the dual weights after every step.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        gamma: float | None = None,
        method: str = "heavy_ball",
        tol: float = 1e-11,
        max_iter: int = 5_000,
        max_rows: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.gamma = gamma
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        if not 0 < self.alpha < math.inf:
            raise FitError(f"alpha is a positive penalty, found {self.alpha!r}")
        if self.method not in ("plain", "heavy_ball", "nesterov"):
            raise FitError(f"the method is plain, heavy_ball or nesterov, found {self.method!r}")
        centred, _ = self._prepare(X, y)
        self.gamma_ = _gamma(self.gamma, 1 / centred.shape[1])
        L = _row_sums(centred, self.gamma_) + float(self.alpha)
        steps = checked_steps(self.method, L, float(self.alpha), self.tol, self.max_iter)
        self._schedule, self.n_iter_ = Schedule(self.method, steps, L, float(self.alpha)), steps
        self.program_ = self._program(self.size_)
        path = [np.zeros(len(centred))]
        iterate = "p" if self.method == "nesterov" else "v"

        def watch(layer: Any, state: np.ndarray) -> None:
            if layer.name.startswith("update"):
                path.append(state[: len(centred), layer.channels.index(iterate)].copy())

        self._memory = remember(self.program_, [np.zeros(self.program_.input_shapes[0]), self.prompt_], watch)
        self.trajectory_ = np.stack(path)
        self.dual_coef_ = self.trajectory_[-1]
        return self

    def _program(self, size: float) -> Program:
        return kernel_ridge(Kernel(self._room, self.gamma_, size, QUERIES), float(self.alpha), self._schedule)


class KNeighborsRegressor(_Queried):
    """The mean of y over the n_neighbors nearest examples, one round of hard attention each.

    Squared distances that differ by less than `resolution` times the square of the data's extent count as equal; among
    equals the first wins. None is the finest that scores in float64 tell apart.
    """

    def __init__(self, n_neighbors: int = 5, *, resolution: float | None = None, max_rows: int | None = None) -> None:
        self.n_neighbors = n_neighbors
        self.resolution = resolution
        self.max_rows = max_rows

    def fit(self, X: Any, y: Any) -> Self:
        if not (isinstance(self.n_neighbors, int | np.integer) and self.n_neighbors >= 1):
            raise FitError(f"n_neighbors is a whole number ≥ 1, found {self.n_neighbors!r}")
        self._prepare(X, y)
        if self._room.rows > MAX_NAMED:
            raise FitError(f"neighbours are named one-hot: at most {MAX_NAMED} rows, found {self._room.rows}")
        self._build()
        return self

    def _program(self, size: float) -> Program:
        extent = 4 * size**2
        count = min(int(self.n_neighbors), self._room.rows)
        finest = 64 * UNIT_ROUNDOFF["float64"] * (self._room.features + 8) * (self._room.rows + 1)
        resolution = finest if self.resolution is None else float(self.resolution)
        return nearest(Kernel(self._room, 1.0, size, QUERIES, heads=6), count, resolution * extent)

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        check_is_fitted(self)
        present = int(self.prompt_[:, -2].sum())
        if self.n_neighbors > present:
            raise FitError(
                f"Expected n_neighbors <= n_samples_fit: n_neighbors = {self.n_neighbors}, n_samples_fit = {present}"
            )
        return super().predict(X)


def _gamma(given: float | None, default: float) -> float:
    if given is None:
        return default
    if not (math.isfinite(given) and given > 0):
        raise FitError(f"gamma is a positive number, found {given!r}")
    return float(given)


def _scott(centred: np.ndarray) -> float:
    """1/(2h²), h = σ·n^{−1/(d+4)}."""
    rows, features = centred.shape
    return float(rows ** (2 / (features + 4)) / (2 * (centred.var() or 1.0)))


def _row_sums(centred: np.ndarray, gamma: float) -> float:
    """The largest Σ_j e^{−γ|x_i−x_j|²}, rounded up: no eigenvalue of the kernel is larger."""
    squares = (centred**2).sum(axis=1)
    largest = 0.0
    for i in range(0, len(centred), 512):
        distances = squares[i : i + 512, None] + squares - 2 * centred[i : i + 512] @ centred.T
        largest = max(largest, float(np.exp(-gamma * np.maximum(distances, 0)).sum(axis=1).max()))
    return largest * (1 + 1e-9)
