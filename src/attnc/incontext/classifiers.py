"""Logistic regression, fitted by an attention program."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from attnc.incontext.acceleration import Schedule
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.estimators import LinearEstimator, with_ones
from attnc.incontext.fitting import ColumnUnits, FitError, eigenvalue_bounds
from attnc.incontext.glm import LOGISTIC, GLMTask, glm_program

if TYPE_CHECKING:
    from jaxtyping import Float

SEPARABLE = ": the classes are separable, and only the penalty holds the weights"
WORTH_A_WARNING = 1e-4
"""The estimated distance of the weights to the optimum, relative to 1 + |w|, from which on there is a warning."""


@dataclass(eq=False, repr=False)
class LogisticRegression(ClassifierMixin, LinearEstimator):  # type: ignore[misc]
    """argmin C·Σ log(1 + e^{−s_i(w·x_i + b)}) + ½|w|² over two classes, s_i = ±1, by two layers of attention per step.

    The columns are centred (fit_intercept) and divided by √(mean square + 4/(C·n)) before they enter the prompt.
    `coef_` and `intercept_` are in the user's units. T is the number of steps that shrink the error of a quadratic with
    this penalty and this largest eigenvalue to `tol`, at most max_iter; momentum is then fitted to T. For classes
    that a plane separates the penalty alone decides: if it is weak, a ConvergenceWarning gives the gradient
    that is left.

    Parameters
    ----------
    C : float
        The inverse of the penalty, above 0.
    method : {"nesterov", "heavy_ball", "plain"}
        The kind of steps.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`.

    Attributes
    ----------
    classes_ : array of shape (2,)
        The labels.
    coef_ : array of shape (1, features)
    intercept_ : array of shape (1,)
    program_ : attnc.Program
        Its input is prompt_.
    trajectory_ : array of shape (steps + 1, weights)
        The weights of the prompt's columns at the start and after every step, the intercept last.
    gradient_norm_ : float
        The norm of the gradient at the last weights.
    n_iter_ : int
        T.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.LogisticRegression().fit([[-2.0], [-1.0], [1.0], [2.0]], ["no", "no", "yes", "yes"])
    >>> [str(label) for label in model.predict([[-3.0], [3.0]])]
    ['no', 'yes']
    """

    C: float = 1.0
    _: KW_ONLY
    tol: float = 1e-9

    takes_numbers: ClassVar[bool] = False
    methods: ClassVar[tuple[str, ...]] = ("plain", "heavy_ball", "nesterov")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        check_classification_targets(y)
        if not 0 < self.C < np.inf:
            raise FitError(f"C is a positive number, found {self.C!r}")
        self._check_method()
        self.classes_, labels = np.unique(y, return_inverse=True)
        if type_of_target(y) != "binary" or len(self.classes_) > 2:
            raise FitError(
                f"Only binary classification is supported. The type of the target is {type_of_target(y)}: "
                f"y has {len(self.classes_)} classes"
            )
        if len(self.classes_) < 2:
            raise FitError("Classifier can't train when only one class is present: y needs two classes")
        self._fit_labels(X, labels.astype(np.float64))

    def _fit_labels(self, X: np.ndarray, targets: np.ndarray) -> None:
        damping = 4 / (self.C * len(X))
        units = ColumnUnits.of(X, targets, centred=self.fit_intercept, centred_y=False, damping=damping)
        columns = units.prompt(X)
        prompt = self._room(X, intercept=self.fit_intercept)
        extended = with_ones(columns, self.fit_intercept)
        # F/C: the examples' part is a sum, as the layers make it, the penalty is over C.
        penalty = np.append(1 / (self.C * units.scale**2), [0.0] * self.fit_intercept)
        L, _ = eigenvalue_bounds(extended.T @ extended / 4 + np.diag(penalty))
        mu, self.n_iter_ = self._paced(L, min(float(penalty[: X.shape[1]].min()), L))
        x = float(np.sqrt((extended**2).sum(axis=1).max()))
        sizes = Sizes(prompt.rows, 2, x * (1 + 1e-12), 1.0, 2.0)
        schedule = Schedule(self.method, self.n_iter_, L, mu)
        model = GLMTask(prompt, schedule, choose(sizes, self.heads, "float64"), LOGISTIC, 1.0, tuple(penalty))
        tokens = np.vstack([np.zeros(prompt.features + 2), prompt.tokens(columns, targets)])
        token = prompt.rows + model.sinks + (2 if model.schedule.iterate == "p" else 1)
        weights = self._run(glm_program(model), [tokens], np.zeros(prompt.num_weights), "vector", token)
        coefficients, intercept = self._in_units(units, weights)
        self.coef_, self.intercept_ = coefficients[None], np.array([intercept])
        largest = 3 * float(np.linalg.norm(self.trajectory_, axis=1).max())  # v is extrapolated from two iterates
        self.task_, self.gradient_bound_ = model, model.gradient_bound(sizes.x, largest, 0.0, "float64")
        means = _sigmoid(extended @ weights)
        self.gradient_norm_ = float(np.linalg.norm(extended.T @ (means - targets) + penalty * weights))
        # A small gradient is not enough: along columns that depend on others the objective is nearly flat.
        curvature = (extended.T * (means * (1 - means))) @ extended + np.diag(penalty)
        least = float(np.linalg.eigvalsh(curvature)[0])
        distance = self.gradient_norm_ / least if least > 0 else np.inf
        if distance > WORTH_A_WARNING * (1 + float(np.linalg.norm(weights))):
            warnings.warn(
                f"stopped after {self.n_iter_} steps with a gradient of norm {self.gradient_norm_:.3g}"
                + (SEPARABLE if _separates(extended @ weights, targets) else "")
                + f". At the least curvature there, {least:.3g}, the weights may be {distance:.3g} from the optimum. "
                "Raise max_iter, or lower C.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def decision_function(self, X: Any) -> Float[np.ndarray, " rows"]:
        """w·x + b for every row of X: above 0 for the second class."""
        scores: np.ndarray = self._queries(X) @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict_proba(self, X: Any) -> Float[np.ndarray, "rows 2"]:
        """The probabilities of both classes for every row of X."""
        second = _sigmoid(self.decision_function(X))
        return np.column_stack([1 - second, second])

    def predict(self, X: Any) -> np.ndarray:
        """The likelier label for every row of X."""
        is_second = self.decision_function(X) > 0
        chosen: np.ndarray = self.classes_[is_second.astype(int)]
        return chosen


def _sigmoid(z: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return np.asarray(expit(z))


def _separates(scores: np.ndarray, targets: np.ndarray) -> bool:
    return bool(((scores > 0) == (targets > 0.5)).all())
