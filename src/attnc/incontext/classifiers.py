"""Logistic regression in the manner of scikit-learn, fitted by an attention program."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from attnc.incontext.acceleration import Schedule
from attnc.incontext.checking import paced, room
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.fitting import FitError, Units, eigenvalue_bounds, run_recorded
from attnc.incontext.glm import LOGISTIC, Model, glm_program

if TYPE_CHECKING:
    from jaxtyping import Float

SEPARABLE = ": the classes are separable, and only the penalty holds the weights"
FAR = 1e-4
"""Weights that are about this far from the optimum, relative to 1 + |w|, are worth a warning."""


class LogisticRegression(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """argmin C·Σ log(1 + e^{−s_i(w·x_i + b)}) + ½|w|² over two classes, s_i = ±1; two layers of attention a step.

    The columns are centred (fit_intercept) and divided by √(mean square + 4/(C·n)) before they enter the prompt;
    `coef_` and `intercept_` are in the user's units. T is the number of steps that shrink the error of a quadratic with
    this penalty and this largest eigenvalue to `tol`, at most max_iter, to which momentum is then fitted. On classes
    that a plane separates the penalty alone decides: with a weak one a ConvergenceWarning gives the gradient left.

    After `fit`: program_ and prompt_ (its input), trajectory_ (weights of the prompt's columns after every step, the
    intercept last), gradient_norm_, n_iter_.
    """

    def __init__(
        self,
        C: float = 1.0,
        *,
        fit_intercept: bool = True,
        method: str = "nesterov",
        tol: float = 1e-9,
        max_iter: int = 10_000,
        heads: int = 4,
        max_rows: int | None = None,
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.heads = heads
        self.max_rows = max_rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        if not 0 < self.C < np.inf:
            raise FitError(f"C is a positive number, found {self.C!r}")
        if self.method not in ("plain", "heavy_ball", "nesterov"):
            raise FitError(f"the method is plain, heavy_ball or nesterov, found {self.method!r}")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if type_of_target(y) != "binary" or len(self.classes_) > 2:
            raise FitError(
                f"Only binary classification is supported. The type of the target is {type_of_target(y)}: "
                f"y has {len(self.classes_)} classes"
            )
        if len(self.classes_) < 2:
            raise FitError("Classifier can't train when only one class is present: y needs two classes")
        self._fit(X, labels.astype(np.float64))
        return self

    def _fit(self, X: np.ndarray, targets: np.ndarray) -> None:
        damping = 4 / (self.C * len(X))
        units = Units.of(X, targets, centred=self.fit_intercept, centred_y=False, damping=damping)
        columns = units.prompt(X)
        prompt = room(X, self.max_rows, intercept=self.fit_intercept)
        extended = np.column_stack([columns, np.ones(len(X))]) if self.fit_intercept else columns
        # F/C: the examples' part is a sum, as the layers make it, the penalty is over C.
        penalty = np.append(1 / (self.C * units.scale**2), [0.0] * self.fit_intercept)
        L, _ = eigenvalue_bounds(extended.T @ extended / 4 + np.diag(penalty))
        mu, steps = paced(self.method, L, min(float(penalty[: X.shape[1]].min()), L), self.tol, self.max_iter)
        x = float(np.sqrt((extended**2).sum(axis=1).max()))
        sizes = Sizes(prompt.rows, 2, x * (1 + 1e-12), 1.0, 2.0)
        model = Model(
            prompt,
            Schedule(self.method, steps, L, mu),
            choose(sizes, self.heads, "float64"),
            LOGISTIC,
            1.0,
            tuple(penalty),
        )
        self.task_, self.program_ = model, glm_program(model)
        start = np.zeros(prompt.num_weights)
        self.prompt_ = np.vstack([np.zeros(prompt.features + 2), prompt.tokens(columns, targets)])
        token = prompt.rows + model.sinks + (2 if model.iterate == "P" else 1)
        weights, self.trajectory_ = run_recorded(self.program_, [self.prompt_], start, "vector", token)
        coefficients, intercept = units.undo(weights[: X.shape[1]], weights[-1] if self.fit_intercept else 0.0)
        self.coef_, self.intercept_ = coefficients[None], np.array([intercept])
        largest = 3 * float(np.linalg.norm(self.trajectory_, axis=1).max())  # v is extrapolated from two iterates
        self.units_, self.n_iter_ = units, steps
        self.gradient_bound_ = model.gradient_bound(sizes.x, largest, 0.0, "float64")
        means = _sigmoid(extended @ weights)
        self.gradient_norm_ = float(np.linalg.norm(extended.T @ (means - targets) + penalty * weights))
        # A small gradient is not enough: along columns that depend on others little curves the objective.
        curvature = (extended.T * (means * (1 - means))) @ extended + np.diag(penalty)
        least = float(np.linalg.eigvalsh(curvature)[0])
        distance = self.gradient_norm_ / least if least > 0 else np.inf
        if distance > FAR * (1 + float(np.linalg.norm(weights))):
            warnings.warn(
                f"stopped after {steps} steps with a gradient of norm {self.gradient_norm_:.3g}"
                + (SEPARABLE if _separates(extended @ weights, targets) else "")
                + f". At the least curvature there, {least:.3g}, the weights may be {distance:.3g} from the optimum. "
                "Raise max_iter, or lower C.",
                ConvergenceWarning,
                stacklevel=3,
            )

    def decision_function(self, X: Any) -> Float[np.ndarray, " rows"]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        scores: np.ndarray = X @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> Float[np.ndarray, "rows 2"]:
        second = _sigmoid(self.decision_function(X))
        return np.column_stack([1 - second, second])

    def predict(self, X: Any) -> np.ndarray:
        is_second = self.decision_function(X) > 0
        chosen: np.ndarray = self.classes_[is_second.astype(int)]
        return chosen


def _sigmoid(z: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return np.asarray(expit(z))


def _separates(scores: np.ndarray, targets: np.ndarray) -> bool:
    return bool(((scores > 0) == (targets > 0.5)).all())
