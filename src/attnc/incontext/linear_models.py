"""Least squares, ridge, lasso, elastic net, Poisson and logistic regression, fitted by attention programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from attnc.engines.prompt import run
from attnc.incontext import causal
from attnc.incontext.acceleration import METHODS, Schedule, eigenvalue_bounds
from attnc.incontext.descent import GLMTask, Task
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.domain import Domain
from attnc.incontext.enclosures import Fit, enclose_classes, objective_gap, prediction_bound, prompt_bound
from attnc.incontext.errors import Norms, plan_least_squares, proximal_step
from attnc.incontext.estimators import (
    LEFT_OVER,
    ColumnUnits,
    FitError,
    LinearEstimator,
    Rule,
    method_rule,
    warn_of,
)
from attnc.incontext.newton import FINEST, HEADS, SETTLING, NewtonTask
from attnc.incontext.newton_glm import CurvedTask, glm_tasks, huber_task
from attnc.incontext.programs import InContextProgram
from attnc.incontext.prompt import Prompt
from attnc.incontext.safeguard import largest_weight
from attnc.incontext.softmax_regression import SoftmaxTask
from attnc.incontext.turns import CURVATURES, HUBER, Examples
from attnc.numerics.arrays import Float

NEWTON = "newton"
LEAST_SQUARES_METHODS = (NEWTON, *METHODS)
DESCENT_HEADS = 4
"""Number of pairs of heads of a gradient step, if `heads` is None."""
ASSUMED = 1e-4
"""If the smallest eigenvalue is zero, momentum is chosen as if it were this fraction of the largest. A step then
shrinks errors by about √ASSUMED, one per cent. The proximal gradient at the end is measured after the fit."""
RAISES = 12
"""Maximum number of attempts of Poisson regression with a larger bound of the means. Each attempt at least doubles
it."""
NESTEROV = "nesterov"
"""The steps that logistic and Poisson regression take if Newton's do not converge."""
ACCURATE = 1e-12
"""The length of a Newton step, relative to 1 + the largest weight, below which no further attempt is made."""
GOOD_ENOUGH = 1e-8
"""The length of a Newton step below which attempts end that bring less than one digit."""
LEAST_MEAN = 1 / 8
"""Poisson regression takes its steps for means down to this share of the mean count: a smaller share takes more steps.
Measured with counts up to 7 and up to 262: 1/16 takes 1.4 times as many steps, and 1/4 takes 0.7 times as many. The
first fit converges with all three. The second ends with a gradient of 2e-3, and of 1e-7 with 1/16."""
LARGEST_RAISE = 1e3
"""Largest factor, besides 2, by which an attempt raises the bound of the means: means of steps that diverge are no
guide. Measured with the same counts, which need no raise: 500 and 2000 change nothing."""
PATH_POINTS = 200
"""Number of points of the path of the steps at which the means are computed. Measured with the same counts: 100 and 400
find the same."""
NORMAL = 1.4826022185056018
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""
NEAR_NORMAL = 1.345
"""Huber's threshold in standard deviations. On normal residuals the estimate then has 95 % of the least-squares one's
efficiency (Huber, 1981)."""
SHARES_OF_PENALTY = (1.0, 0.1, 0.01)
"""The curvatures by which several classes choose their momentum, as fractions of the smallest penalty: the curvature
along the intercepts, which have no penalty, may be smaller where the classes are nearly separated."""
SEPARABLE = ": the classes are separable, and only the penalty bounds the weights"
WORTH_A_WARNING = 1e-4
"""The fit warns if the estimated distance from the weights to the optimum exceeds this fraction of 1 + |w|. Weights are
often printed with four digits."""


@dataclass(eq=False, repr=False, kw_only=True)
class LinearRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """A linear model whose targets are numbers."""

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict w·x + b for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [2.0]], [1.0, 3.0])
        >>> [round(float(value), 6) for value in model.predict([[1.0]])]
        [2.0]
        """
        predicted: np.ndarray = self._queries(X) @ self.coef_.T + self.intercept_
        return predicted

    def _centred(self, X: np.ndarray, y: np.ndarray, damping: float) -> ColumnUnits:
        """Units in which an intercept is zero: columns and targets are centred if there is one."""
        omega, has_own = self._weighing.over(len(X)), self.fit_intercept
        return ColumnUnits.of(X, y, omega, centred=has_own, centred_y=has_own, damping=damping)


@dataclass(eq=False, repr=False, kw_only=True)
class LeastSquares(LinearRegressor):
    """argmin Σ (w·x_i + b − y_i)² + penalty·|w|², by T layers over the prompt."""

    method: str = NEWTON
    max_iter: int = 20_000
    heads: int | None = None  # type: ignore[assignment]
    learning_rate: float | None = None
    safeguard: bool = False

    rules: ClassVar[dict[str, Rule]] = method_rule(*LEAST_SQUARES_METHODS)
    takes_several_targets: ClassVar[bool] = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @property
    def _penalty(self) -> float:
        return 0.0

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        omega = self._weighing.over(len(X))
        alpha = self._penalty / self._weighing.most
        if self.method == NEWTON and self.learning_rate is not None:
            raise FitError("learning_rate belongs to gradient steps: choose method='plain'")
        if self.method != NEWTON and y.ndim > 1:
            raise FitError(f"{y.shape[1]} targets take method='newton', found {self.method!r}")
        units = self._centred(X, y, alpha / omega.sum())
        roots = np.sqrt(omega)[:, None]
        if not alpha and np.linalg.matrix_rank(roots * units.prompt(X)) < X.shape[1]:
            units = units.uniform()
        if self.method == NEWTON:
            self._fit_by_newton(X, y - units.centre, units, alpha)
        else:
            self._fit_by_steps(X, y, units, alpha)
        self._enclose(self._fits("squared", X, y, self._penalty))

    def _fit_by_steps(self, X: np.ndarray, y: np.ndarray, units: ColumnUnits, alpha: float) -> None:
        roots = np.sqrt(self._weighing.over(len(X)))
        columns, targets, penalty = units.prompt(X), y - units.centre, alpha / units.scale / units.scale
        weighted = roots[:, None] * columns
        L, mu = eigenvalue_bounds(weighted.T @ weighted + np.diag(penalty))
        self.n_iter_ = self._steps(L, mu, self.learning_rate)
        prompt, norms = self._room(X), Norms(_longest(columns), _up(np.linalg.norm(targets)), L, mu)
        plan = plan_least_squares(
            prompt,
            norms,
            tuple(penalty),
            steps=self.n_iter_,
            heads=DESCENT_HEADS if self.heads is None else self.heads,
            method=self.method,
            eta=self.learning_rate,
            safeguard=self.safeguard,
        )
        self.gradient_bound_ = plan.gradient
        domain = Domain(prompt, norms.x, norms.y, start=0.0, L=L, mu=mu, penalty=plan.task.penalty)
        limit = largest_weight(plan.task, norms.x, norms.y) if self.safeguard else None
        weights, _ = self._run(plan.task, units, X, targets, domain, bound=plan.bound, limit=limit)
        self.bound_ = prompt_bound(plan.task, self.prompt_, weights)

    def _fit_by_newton(self, X: np.ndarray, targets: np.ndarray, units: ColumnUnits, alpha: float) -> None:
        omega = self._weighing.over(len(X))
        units = units.of_norm_one(float(omega.sum()), np.sqrt(omega)[(...,) + (None,) * (targets.ndim - 1)] * targets)
        penalty = alpha / units.scale / units.scale
        columns, room = units.prompt(X), self._room(X)
        whole = np.concatenate([np.sqrt(omega)[:, None] * columns, np.diag(np.sqrt(penalty))])
        least = eigenvalue_bounds(whole.T @ whole)[1]
        # Conditions are powers of 4, so that data sets of one shape and of like conditions have one program.
        condition = min(4.0 ** math.ceil(math.log(max(causal.LEAST_CONDITION, X.shape[1] / least), 4)), FINEST)
        prompt = replace(room, rows=room.rows + (X.shape[1] if alpha else 0), targets=targets.size // len(targets))
        task = NewtonTask(prompt, condition, HEADS if self.heads is None else self.heads)
        self.n_iter_ = task.turns
        if task.turns > self.max_iter:
            warn_of(f"{self.max_iter} turns are too few: a condition of {condition:.3g} takes {task.turns}")
            task = replace(task, condition=max(1.0, 2.0 ** (int(self.max_iter) - SETTLING)))
            self.n_iter_ = task.turns
        given = (targets / units.spread).reshape((len(X),) if prompt.targets == 1 else targets.shape)
        tokens = task.tokens(columns, given, penalty, self._weighing.relative)
        program = InContextProgram(task.program(), task.domain, type(self).__name__)
        if targets.ndim == 2 and prompt.targets == 1:  # one target in a column: the program has one state
            units = replace(units, centre=units.centre[0], spread=units.spread[0])
        weights, _ = self._run_on(task, units, [np.zeros(X.shape[1]), tokens], program)
        if targets.ndim == 2 and prompt.targets == 1:
            self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])
        self.bound_ = prompt_bound(task, self.prompt_, weights)
        off = self.bound_.value
        if task.condition == condition and WORTH_A_WARNING * (1 + np.linalg.norm(weights)) < off < math.inf:
            warn_of(
                f"after {task.turns} turns the weights of the prompt's columns may be {off:.3g} from the "
                f"optimum: the condition is {X.shape[1] / least:.3g}. Raise alpha, or drop columns that nearly depend "
                "on others."
            )

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        return causal.least_squares(X, y, self._penalty, type(self).__name__)


@dataclass(eq=False, repr=False)
class Ridge(LeastSquares):
    """argmin Σ (w·x_i + b − y_i)² + alpha·|w|², by steps of attention over the prompt.

    The columns are centred (fit_intercept) and divided by √(Σ squares + alpha), and the targets are centred and divided
    by their norm, before they enter the prompt. (Gradient steps divide by the root of the mean, and keep the targets'
    unit.) `coef_` and `intercept_` are in the user's units.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    fit_intercept : bool
        Whether to fit b.
    method : {"newton", "chebyshev", "nesterov", "heavy_ball", "plain"}
        The kind of steps. Newton–Schulz turns have two attention layers, and their number grows like the logarithm of
        the condition. Gradient steps have one, and their number grows like its root.
    tol : float
        The fraction of the starting error that may remain after T gradient steps. It determines T.
    max_iter : int
        Maximum number of steps.
    heads : int
        Maximum number of heads that compute the gradient.
    learning_rate : float or None
        The length of plain steps; None chooses it.
    safeguard : bool
        Whether the program keeps its weights within limits on every prompt, by one more attention layer per step, or
        two if the method is newton.
    max_rows : int or None
        Maximum number of rows in the prompt; the rest is padding. None takes the rows of X.

    Attributes
    ----------
    coef_, intercept_
        The weights.
    program_ : attnc.incontext.InContextProgram
        Its inputs are start_ and prompt_.
    trajectory_ : array of shape (steps + 1, features)
        The weights of the prompt's columns at the start and after every step.
    bound_ : Bound
        A bound of |trajectory_[-1] − optimum|₂.
    n_iter_ : int
        The number of steps T.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Ridge(alpha=0.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> bool(abs(model.predict([[3.0]])[0] - 7.0) < 1e-9)
    True
    """

    alpha: float = 1.0

    @property
    def _penalty(self) -> float:
        return float(self.alpha)


@dataclass(eq=False, repr=False, kw_only=True)
class LinearRegression(LeastSquares):
    """argmin Σ (w·x_i + b − y_i)²; if there are several, the shortest w.

    Eigenvalues that are zero up to rounding count as zero. The steps and bound_ are for the shortest w without them.

    Parameters
    ----------
    fit_intercept, method, tol, max_iter, heads, learning_rate, safeguard, max_rows
        As for `Ridge`.

    Attributes
    ----------
    coef_, intercept_, program_, start_, prompt_, trajectory_, bound_, n_iter_
        As for `Ridge`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> [round(float(w), 6) for w in (*model.coef_, model.intercept_)]
    [2.0, 1.0]
    """

    tol: float = 1e-13


@dataclass(eq=False, repr=False)
class RidgeSelection(LinearRegressor):
    """Ridge regression whose program chooses the penalty, by its error on held-out examples of the prompt.

    The fits for all penalties run side by side on the first examples, by Newton–Schulz turns. Then each sums the
    squares of its residuals on the last examples, and one head returns the weights of the smallest sum. They are not
    fitted again on all examples.

    Parameters
    ----------
    alphas : sequence of float
        The penalties, above 0, at least two.
    held_out : float
        The share of the examples, the last ones, that are held out, between 0 and 1.
    fit_intercept, heads, max_rows, method, tol, max_iter
        As for `Ridge`. `max_rows` is at least the rows of X, and the held-out examples are the last of them.

    Attributes
    ----------
    alpha_ : float
        The chosen penalty.
    losses_ : array of shape (penalties,)
        The sums of squares on the held-out examples that the program computed, in units of the squared norm of y.
    coef_, intercept_, program_, start_, prompt_, trajectory_, n_iter_
        As for `Ridge`.

    Examples
    --------
    >>> import attnc
    >>> X = [[float(i), float(i * i % 7)] for i in range(12)]
    >>> model = attnc.incontext.RidgeSelection(alphas=(0.01, 1000.0)).fit(X, [3.0 * a - b for a, b in X])
    >>> model.alpha_
    0.01
    """

    alphas: Sequence[float] = (0.01, 0.1, 1.0, 10.0, 100.0)
    _: KW_ONLY
    held_out: float = 0.25
    method: str = NEWTON

    rules: ClassVar[dict[str, Rule]] = method_rule(NEWTON) | {
        "alphas": (
            lambda value: len(value) > 1 and all(0 < one < math.inf for one in value),
            "alphas are two or more penalties above 0",
        ),
        "held_out": (lambda value: 0 < value < 1, "held_out is a share between 0 and 1"),
    }

    def fit(self, X: Any, y: Any) -> Self:  # type: ignore[override]
        """Fit the model to examples X (rows, features) and targets y, the last of which are held out.

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

        Examples
        --------
        >>> import attnc
        >>> X = [[float(i), float(i * i % 7)] for i in range(12)]
        >>> attnc.incontext.RidgeSelection(alphas=(0.01, 1000.0)).fit(X, [3.0 * a - b for a, b in X]).alpha_
        0.01
        """
        return self._fit_weighted(X, y, None)

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        raise FitError(
            "a choice on held-out examples has no causal form: every prefix would hold out its own last examples, and "
            "its losses would have a program of their own. Take Ridge with one penalty."
        )

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        if self.max_rows is not None and self.max_rows != len(X):
            raise FitError(f"the last rows of the prompt are held out: it takes max_rows={len(X)}, the rows of X")
        held = math.ceil(len(X) * float(self.held_out))
        if len(X) - held < 1:
            raise FitError(f"a share of {self.held_out:g} holds out all of n_samples = {len(X)} example(s)")
        kept, alphas = slice(0, len(X) - held), np.array([float(alpha) for alpha in self.alphas])
        units = self._centred(X[kept], y[kept], 0.0)
        targets, moved = y - units.centre, X - units.mean
        norms = np.sqrt((moved**2).sum(axis=0) + alphas.max()) * (1 + 1e-12)
        spread = float(np.linalg.norm(targets)) * (1 + 1e-12) or 1.0
        units = replace(units, scale=norms, spread=np.asarray(spread))
        columns, penalties = units.prompt(X), alphas[:, None] / norms**2
        gram = columns[kept].T @ columns[kept]
        least = min(eigenvalue_bounds(gram + np.diag(penalty))[1] for penalty in penalties)
        condition = min(4.0 ** math.ceil(math.log(max(causal.LEAST_CONDITION, X.shape[1] / least), 4)), FINEST)
        task = NewtonTask(self._room(X), condition, penalties=tuple(map(tuple, penalties.tolist())), held_out=held)
        self.n_iter_ = task.turns
        tokens = task.tokens(columns, targets / spread, np.zeros(X.shape[1]))
        program = InContextProgram(task.program(), task.domain, type(self).__name__)
        self._run_on(task, units, [np.zeros(X.shape[1]), tokens], program)
        losses: list[np.ndarray] = []

        def watch(layer: Any, state: np.ndarray) -> None:
            if layer.name == "held_out":
                losses.append(state[: -1 : task.size, layer.channels.index("loss")].copy())

        run(program.program, [np.zeros(X.shape[1]), tokens], watch)
        self.losses_ = losses[0]
        self.alpha_ = float(self.alphas[int(np.argmin(self.losses_))])
        self._enclose(self._fits("squared", X[kept], y[kept], self.alpha_))


@dataclass(eq=False, repr=False)
class ProximalRegressor(LinearRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·(l1_share·|w|₁ + ½(1 − l1_share)·|w|²), by proximal gradient steps."""

    alpha: float = 1.0
    safeguard: bool = False

    rules: ClassVar[dict[str, Rule]] = method_rule("plain", "nesterov")

    @property
    def _l1_share(self) -> float:
        return 1.0

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        alpha, share = _some_penalty(self.alpha), self._l1_share
        return causal.proximal(
            X,
            y,
            alpha * share,
            alpha * (1 - share),
            type(self).__name__,
            method=self.method,
            heads=self.heads,
            max_iter=int(self.max_iter),
        )

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        alpha, l1_ratio = self.alpha, self._l1_share
        units = self._centred(X, y, alpha * (1 - l1_ratio))
        columns, targets, omega = units.prompt(X), y - units.centre, self._weighing.over(len(X))
        l1, penalty = alpha * l1_ratio / units.scale, alpha * (1 - l1_ratio) / units.scale**2
        gram = (columns.T * omega) @ columns / omega.sum() + np.diag(penalty)
        L, mu = eigenvalue_bounds(gram)
        if np.linalg.matrix_rank(gram) < len(gram):
            mu = 0.0
        pace = mu or ASSUMED * L  # the gradient at the end is measured below
        self.n_iter_ = self._steps(L, pace)
        schedule = Schedule(self.method, self.n_iter_, L, pace)
        size, norm = 3 * _weight_bound(targets, omega, l1, mu), _up(np.linalg.norm(targets))
        reach, prompt, x = schedule.overshoot * norm, self._room(X), _longest(columns)
        sizes = Sizes(prompt.rows, X.shape[1] + 1, x, reach, size * x + norm, mean=True)
        thresholds = tuple(l1) if l1.any() else ()
        differences = choose(sizes, self.heads, "float64")
        task = Task(prompt, schedule, differences, reach, tuple(penalty), thresholds, size, mean=True)
        self.gradient_bound_ = task.gradient_bound(x, size)
        domain = Domain(prompt, x, norm, start=0.0, L=L, penalty=task.penalty, mean=True)
        weights, gradient = self._run(task, units, X, targets, domain)
        step = proximal_step(weights, gradient, l1, L)
        self.bound_ = prompt_bound(task, self.prompt_, weights)
        (fit,) = self._fits("squared", X, y, alpha * (1 - l1_ratio), is_mean=True)
        l1_of_columns = np.full(X.shape[1], alpha * l1_ratio)
        self._enclose([fit], l1_of_columns)
        self.objective_bound_ = objective_gap(fit, l1_of_columns)
        self._fitted = fit
        if L * step > LEFT_OVER * max(L * float(np.linalg.norm(weights)), norm):
            warn_of(f"after {self.n_iter_} steps the proximal gradient is still {L * step:.3g}: raise max_iter")

    def predict_bound(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Return a proven bound of |w·x + b − (w*·x + b*)| for every row x, with (w*, b*) any optimum.

        It is the smaller of two: that of the weights, and that of `objective_bound_`, which is finite for combinations
        of the examples even if there are several optima, as there may be with more columns than rows.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Lasso(alpha=0.1).fit([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], [0.0, 1.0, 2.0])
        >>> bool(model.predict_bound([[1.5, 1.5]])[0] < 1e-3)  # the columns are equal: weights have no bound
        True
        """
        l1 = np.full(self.n_features_in_, float(self.alpha) * self._l1_share)
        of_weights = super().predict_bound(X)
        found: np.ndarray = np.minimum(
            of_weights, prediction_bound(self._fitted, l1, self.objective_bound_, self._queries(X))
        )
        return found


@dataclass(eq=False, repr=False)
class ElasticNet(ProximalRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·(l1_ratio·|w|₁ + ½(1 − l1_ratio)·|w|²), by proximal gradient steps.

    A step has four layers: the gradient, an affine map, the gates of the soft threshold, and an affine map. bound_
    bounds |trajectory_[-1] − optimum|₂. It is computed after the fit, from the proximal gradient there and the smallest
    eigenvalue. It is infinite if that eigenvalue is zero.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    l1_ratio : float
        The part of the penalty that is |w|₁, between 0 and 1.
    method : {"nesterov", "plain"}
        The kind of steps.
    safeguard : bool
        Whether the program keeps its weights within limits on every prompt, by two more attention layers per step.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`.

    Attributes
    ----------
    coef_, intercept_, program_, start_, prompt_, trajectory_, bound_, n_iter_
        As for `Ridge`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.ElasticNet(alpha=0.1).fit([[-1.0], [0.0], [1.0]], [-2.0, 0.0, 2.0])
    >>> bool(1.5 < model.coef_[0] < 2.0)
    True
    """

    _: KW_ONLY
    l1_ratio: float = 0.5

    @property
    def _l1_share(self) -> float:
        return float(self.l1_ratio)


@dataclass(eq=False, repr=False)
class Lasso(ProximalRegressor):
    """argmin Σ (w·x_i + b − y_i)²/(2n) + alpha·|w|₁: an elastic net with l1_ratio = 1.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    fit_intercept, method, tol, max_iter, heads, max_rows, safeguard
        As for `ElasticNet`.

    Attributes
    ----------
    coef_, intercept_, program_, start_, prompt_, trajectory_, bound_, n_iter_
        As for `Ridge`.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Lasso(alpha=5.0).fit([[-1.0], [0.0], [1.0]], [-2.0, 0.0, 2.0])
    >>> bool(abs(model.coef_[0]) < 1e-6)  # the penalty is above the largest correlation
    True
    """


@dataclass(eq=False, repr=False, kw_only=True)
class CurvedEstimator(LinearEstimator):
    """A model whose loss has a curvature that depends on the weights, fitted by Newton steps on the prompt."""

    safeguard: bool = False

    def _prepared(
        self, loss: str, X: np.ndarray, y: np.ndarray, penalty: float
    ) -> tuple[ColumnUnits, Examples, Prompt, int]:
        """Return the units, the examples of the prompt, its sizes, and log₂ of the condition, for Σ ω_i ℓ_i + penalty.

        Columns have the 2-norm 1 with their penalties, and an intercept is one more column.
        """
        omega, rows = self._weighing.over(len(X)), len(X)
        own = [1 / math.sqrt(float(omega.sum()))] * self.fit_intercept
        raised = penalty / CURVATURES[loss]
        total = float(omega.sum())
        units = ColumnUnits.of(X, y, omega, centred=self.fit_intercept, centred_y=False, damping=raised / total)
        units = units.of_norm_one(total, np.zeros(1))
        units = replace(units, spread=np.ones(()))
        columns = np.column_stack([units.prompt(X), *(np.full(rows, one) for one in own)])
        penalties = np.append(raised / units.scale / units.scale, np.zeros(len(own)))
        room = self._room(X)
        prompt = replace(room, rows=room.rows + columns.shape[1], features=columns.shape[1])
        examples = Examples(columns, y, omega, penalties)
        least = eigenvalue_bounds((columns.T * omega) @ columns + np.diag(penalties))[1]
        return units, examples, prompt, max(0, math.ceil(math.log2(columns.shape[1] / least)))

    def _fit_by_newton(self, loss: str, X: np.ndarray, y: np.ndarray, penalty: float) -> bool:
        """Fit with as few turns as suffice, and return whether they converge. Without that, nothing is set.

        The objective is Σ ω_i ℓ_i + ½ penalty·|w|². The first attempt has as many turns as the condition at the start
        asks for. Later attempts have more, and the last ones begin with short steps.
        """
        units, examples, prompt, doublings = self._prepared(loss, X, y, penalty)
        best: tuple[float, CurvedTask] | None = None
        for task in glm_tasks(loss, prompt, doublings, float(y.max()), int(self.max_iter)):
            inputs = task.inputs(examples.X, y, examples.penalty, self._weighing.relative)
            with np.errstate(over="ignore", invalid="ignore"):
                weights = run(task.program(), inputs)
                left = _newton_step(task, examples, weights)
            if best is not None and left > best[0] / 10:
                if best[0] <= GOOD_ENOUGH:
                    break
                continue
            best = (left, task)
            if left <= ACCURATE:
                break
        if best is None or best[0] > WORTH_A_WARNING:
            return False
        self._run_turns(best[1], units, examples)
        return True

    def _run_turns(self, task: CurvedTask, units: ColumnUnits, examples: Examples) -> None:
        """Run the program of a task, and set the fitted attributes."""
        self.n_iter_ = task.turns
        inputs = task.inputs(examples.X, examples.y, examples.penalty, self._weighing.relative)
        program = InContextProgram(task.program(), task.domain, type(self).__name__)
        weights, gradient = self._run_on(task, units, inputs, program)
        self.gradient_norm_ = float(np.linalg.norm(gradient))
        self.bound_ = prompt_bound(task, self.prompt_, weights)


def _newton_step(task: CurvedTask, examples: Examples, weights: np.ndarray) -> float:
    """Return the length of an exact Newton step at the weights, as a fraction of 1 + their largest."""
    if not np.isfinite(weights).all():
        return math.inf
    H, g = task.steps.curvature(examples, weights), task.steps.gradient(examples, weights)
    step = np.linalg.lstsq(H, g, rcond=None)[0] if np.isfinite(H).all() else np.array([math.inf])
    return float(np.abs(step).max() / (1 + np.abs(weights).max()))


@dataclass(eq=False, repr=False)
class Huber(LinearRegressor, CurvedEstimator):
    """argmin Σ H(w·x_i + b − y_i) + ½ alpha·|w|², with H(r) = r²/2 for |r| ≤ threshold, and linear beyond.

    So an outlier has the weight of a residual at the threshold.
    A turn has four attention layers: two read the residuals and clip them by gates, and two multiply their gradient by
    a matrix M, as Newton–Schulz turns do. M tends to the inverse of Σ x_i x_iᵀ + alpha. No turn raises the objective,
    whatever the data. The error shrinks in a turn, at last, by about the share of examples beyond the threshold.

    Columns are centred (fit_intercept) and scaled, and targets are less their median and in units of the threshold.
    scikit-learn's HuberRegressor finds a scale σ as well: its weights are those of threshold = epsilon·σ and its
    alpha·σ.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    threshold : float or None
        The residual beyond which the loss is linear, in units of y. None takes 1.345 times the standard deviation of a
        normal distribution with the targets' median absolute deviation.
    tol : float
        The length of the last step, relative to 1 + the largest weight. It determines T.
    safeguard : bool
        Whether the program keeps its weights within limits on every prompt, by two more attention layers per step.
    fit_intercept, max_iter, max_rows
        As for `Ridge`.

    Attributes
    ----------
    threshold_ : float
        The threshold.
    outliers_ : array of shape (rows,)
        Whether each example's residual is beyond the threshold.
    coef_, intercept_, program_, start_, prompt_, trajectory_, bound_, n_iter_
        As for `Ridge`; the weight of the intercept comes last.

    Examples
    --------
    >>> import attnc
    >>> X, y = [[float(i)] for i in range(10)], [2.0 * i + 1 for i in range(9)] + [1000.0]
    >>> model = attnc.incontext.Huber(alpha=0.0, threshold=0.1).fit(X, y)
    >>> bool(abs(model.coef_[0] - 2.0) < 0.01), int(model.outliers_.sum())
    (True, 1)
    """

    alpha: float = 1.0
    threshold: float | None = None
    _: KW_ONLY
    method: str = NEWTON

    rules: ClassVar[dict[str, Rule]] = method_rule(NEWTON) | {
        "threshold": (lambda value: value is None or 0 < value < math.inf, "threshold is a positive number"),
    }

    def _threshold_of(self, y: np.ndarray, omega: np.ndarray) -> tuple[float, float]:
        """Return the median of the targets, and the threshold."""
        middle = _median(y, omega)
        deviation = NORMAL * _median(np.abs(y - middle), omega) or float(np.abs(y - middle).max()) or 1.0
        return middle, float(NEAR_NORMAL * deviation if self.threshold is None else self.threshold)

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        _, threshold = self._threshold_of(y, np.ones(len(y)))
        penalty, most = _some_penalty(self.alpha), int(self.max_iter)
        made = causal.huber(X, y / threshold, penalty, type(self).__name__, tol=float(self.tol), max_iter=most)
        return replace(made, unit=threshold)

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        omega = self._weighing.over(len(X))
        middle, self.threshold_ = self._threshold_of(y, omega)
        centre = middle if self.fit_intercept else 0.0
        penalty = float(self.alpha) / self._weighing.most
        targets = (y - centre) / self.threshold_
        units, examples, prompt, doublings = self._prepared(HUBER, X, targets, penalty)
        units = replace(units, centre=np.asarray(centre), spread=np.asarray(self.threshold_))
        task, _ = huber_task(prompt, [examples], doublings, float(self.tol), int(self.max_iter))
        self._run_turns(task, units, examples)
        residuals = np.abs(X @ self.coef_ + self.intercept_ - y)
        self.outliers_ = residuals > self.threshold_
        (fit,) = self._fits(HUBER, X, y, float(self.alpha))
        self._enclose([replace(fit, threshold=self.threshold_)])
        left = _newton_step(task, examples, self.trajectory_[-1])
        if left > WORTH_A_WARNING:
            warn_of(
                f"after {task.turns} turns a Newton step would still be {left:.3g} of the largest weight: raise "
                "max_iter, alpha or threshold"
            )


def _some_penalty(alpha: float) -> float:
    """Return alpha, or raise FitError if it is 0: prefixes with fewer examples than columns then have many optima."""
    if not alpha > 0:
        raise FitError("the causal form takes alpha > 0: the first examples alone determine no weights")
    return float(alpha)


def _median(numbers: np.ndarray, omega: np.ndarray) -> float:
    """Return the smallest number below or at which lies half of the weight."""
    order = np.argsort(numbers, kind="stable")
    total = np.cumsum(omega[order])
    return float(numbers[order][np.searchsorted(total, total[-1] / 2 * (1 - 1e-12))])


@dataclass(eq=False, repr=False)
class PoissonRegressor(LinearRegressor, CurvedEstimator):
    """argmin Σ (e^{w·x_i + b} − y_i·(w·x_i + b))/n + alpha·½|w|² for counts y_i ≥ 0; one head sums the exponentials.

    The columns are centred (fit_intercept) and divided by √(mean square + alpha/mean y) before they enter the prompt.
    The intercept starts at log(mean y). The curvature of the loss has no bound. So the program is built for means up to
    a limit, at first twice the largest count. If the steps exceed the limit, the program is built again with a larger
    one.

    Parameters
    ----------
    alpha : float
        The penalty, at least 0.
    method : {"nesterov", "heavy_ball", "plain", "chebyshev"}
        The kind of steps.
    safeguard : bool
        Whether the program keeps its weights within limits on every prompt, by two more attention layers per step.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`.

    Attributes
    ----------
    coef_, intercept_, program_, start_, prompt_, trajectory_, n_iter_
        As for `Ridge`; the weight of the intercept comes last.
    most_ : float
        The largest mean for which the program was built.
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
    method: str = NEWTON
    tol: float = 1e-11

    rules: ClassVar[dict[str, Rule]] = method_rule(NEWTON, *METHODS)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        self._check_counts(y)
        penalty, name = _some_penalty(self.alpha), type(self).__name__
        return causal.curved("poisson", X, y, penalty, name, max_iter=int(self.max_iter), is_mean=True)

    @staticmethod
    def _check_counts(y: np.ndarray) -> None:
        if (y < 0).any() or not y.any():
            raise FitError(f"counts are ≥ 0 and not all zero, found values from {y.min():g} to {y.max():g}")

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self._check_counts(y)
        omega = self._weighing.over(len(X))
        mean = float(omega @ y / omega.sum()) if self.fit_intercept else 1.0
        penalty = float(self.alpha) * float(omega.sum()) / mean
        if self.method == NEWTON and self._fit_by_newton("poisson", X, y / mean, penalty):
            self.intercept_ += math.log(mean)
            self._unit = mean
        else:
            self._fit_by_steps(X, y)
            self._unit = 1.0
        self._enclose(self._fits("poisson", X, y, float(self.alpha), is_mean=True))

    def _fit_by_steps(self, X: np.ndarray, y: np.ndarray) -> None:
        omega = self._weighing.over(len(X))
        middle = float(omega @ y / omega.sum())
        units = ColumnUnits.of(
            X, y, omega, centred=self.fit_intercept, centred_y=False, damping=float(self.alpha) / middle
        )
        most = 2 * float(y.max())
        for _ in range(RAISES):
            found = self._fit_up_to(most, units, X, y)
            if found <= most:
                return
            most = 2 * min(max(most, found), LARGEST_RAISE * most)
        raise FitError(f"the steps went to means of {found:.3g}; scale the columns, or raise alpha")

    def _fit_up_to(self, most: float, units: ColumnUnits, X: np.ndarray, y: np.ndarray) -> float:
        """Fit with steps for means up to `most`, and return the largest mean during the steps."""
        columns, penalty = self._with_intercept(units, X, self.alpha)
        omega = self._weighing.over(len(X))
        middle = float(omega @ y / omega.sum())
        square = (columns.T * omega) @ columns / omega.sum()
        L, _ = eigenvalue_bounds(most * square + np.diag(penalty))
        least = eigenvalue_bounds(LEAST_MEAN * middle * square + np.diag(penalty))[1]
        schedule = self._paced(L, min(least, L), NESTEROV if self.method == NEWTON else self.method)
        prompt, x, largest_count = self._room(X, intercept=self.fit_intercept), _longest(columns), float(y.max())
        sizes = Sizes(prompt.rows, 2, x, largest_count, largest_count, mean=True)
        task = Task(
            prompt,
            schedule,
            choose(sizes, self.heads, "float64"),
            max(0.0, math.log(most)),
            tuple(penalty),
            mean=True,
            loss="poisson",
            targets=largest_count,
        )
        start = np.append(np.zeros(X.shape[1]), [math.log(middle)] * self.fit_intercept)
        domain = Domain(prompt, x, target=largest_count, L=L, curvature=most, penalty=task.penalty, mean=True)
        weights, gradient = self._run(task, units, X, y, domain, start=start)
        self.gradient_bound_ = task.gradient_bound(x, 3 * float(np.linalg.norm(self.trajectory_, axis=1).max()))
        self.gradient_norm_, self.most_ = float(np.linalg.norm(gradient)), most
        self.bound_ = prompt_bound(task, self.prompt_, weights)
        path = self.trajectory_[:: max(1, len(self.trajectory_) // PATH_POINTS)]
        with np.errstate(over="ignore", invalid="ignore"):
            largest = float(np.nan_to_num(np.exp((path @ columns.T).max()), nan=math.inf, posinf=1e300))
        if largest <= most and self.gradient_norm_ > LEFT_OVER * x * middle:
            warn_of(
                f"stopped after {self.n_iter_} steps with a gradient of norm {self.gradient_norm_:.3g}: raise max_iter",
                stacklevel=5,
            )
        return largest

    def _in_units(self, answers: np.ndarray) -> np.ndarray:
        return answers * self._unit

    def predict_bound(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Return a proven bound of |mean − mean at the optimum| for every row of X.

        It counts the distance of the weights that were found from the optimum for the data of the fit.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.PoissonRegressor(alpha=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 2.0, 3.0])
        >>> bool(model.predict_bound([[1.0]])[0] < 1e-6)
        True
        """
        with np.errstate(over="ignore"):
            found: np.ndarray = self.predict(X) * np.expm1(super().predict_bound(X)) * (1 + 1e-9)
        return found

    def predict(self, X: Any) -> Float[np.ndarray, " rows"]:
        """Predict the mean e^{w·x + b} for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,).

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.PoissonRegressor(alpha=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 2.0, 3.0])
        >>> bool(model.predict([[0.0]])[0] < model.predict([[2.0]])[0])
        True
        """
        return np.asarray(np.exp(super().predict(X)))


@dataclass(eq=False, repr=False)
class LogisticRegression(ClassifierMixin, CurvedEstimator):  # type: ignore[misc]
    """argmin C·Σ log(1 + e^{−s_i(w·x_i + b)}) + ½|w|² over two classes, s_i = ±1, by attention.

    Newton steps take three layers each. With more than two classes the loss is the cross entropy of the softmax, which
    attention computes exactly, and the steps are gradient steps of two layers each: method="newton" then stands for
    "nesterov". The columns are centred (fit_intercept) and scaled before they enter the prompt.
    `coef_` and `intercept_` are in the user's units. T is the number of steps that shrink the error of a quadratic with
    this penalty and this largest eigenvalue to `tol`, at most max_iter. Momentum is then fitted to T. If a plane
    separates the classes, only the penalty bounds the weights. If it is weak, a ConvergenceWarning states the remaining
    gradient.

    Parameters
    ----------
    C : float
        The inverse of the penalty, above 0.
    method : {"nesterov", "heavy_ball", "plain"}
        The kind of steps.
    safeguard : bool
        Whether the program keeps its weights within limits on every prompt, by two more attention layers per step.
    fit_intercept, tol, max_iter, heads, max_rows
        As for `Ridge`.

    Attributes
    ----------
    classes_ : array of shape (classes,)
        The labels.
    coef_ : array of shape (1, features), or (classes, features) if there are more than two classes
        The weights of the columns.
    intercept_ : array of shape (1,) or (classes,)
        The intercept.
    program_ : attnc.incontext.InContextProgram
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
    method: str = NEWTON
    tol: float = 1e-9

    takes_numbers: ClassVar[bool] = False
    rules: ClassVar[dict[str, Rule]] = method_rule(NEWTON, "plain", "heavy_ball", "nesterov")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags

    def _causal(self, X: np.ndarray, y: np.ndarray) -> causal.Causal:
        found, labels = _classes(y)
        penalty, name, most = 1 / self.C, type(self).__name__, int(self.max_iter)
        if len(found) == 2:
            return causal.curved("logistic", X, labels.astype(np.float64), penalty, name, max_iter=most)

        def pace(L: float, mu: float) -> Schedule:
            return Schedule(self._gradient_method, self._steps(L, mu, method=self._gradient_method), L, mu)

        return causal.classes(X, np.eye(len(found))[labels], penalty, name, schedule=pace, heads=self.heads)

    @property
    def _gradient_method(self) -> str:
        return NESTEROV if self.method == NEWTON else self.method

    def _fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.classes_, labels = _classes(y)
        if len(self.classes_) > 2:
            self._fit_classes(X, np.eye(len(self.classes_))[labels], 1 / self.C / self._weighing.most)
            return
        targets = labels.astype(np.float64)
        penalty = 1 / self.C / self._weighing.most  # all of the objective is divided by C and by the largest weight
        if not (self.method == NEWTON and self._fit_by_newton("logistic", X, targets, penalty)):
            self._fit_by_steps(X, targets, penalty)
        self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])
        self._enclose(self._fits("logistic", X, targets, 1 / float(self.C)))

    def _fit_by_steps(self, X: np.ndarray, targets: np.ndarray, inverse: float) -> None:
        omega = self._weighing.over(len(X))
        damping = 4 * inverse / float(omega.sum())
        units = ColumnUnits.of(X, targets, omega, centred=self.fit_intercept, centred_y=False, damping=damping)
        columns, penalty = self._with_intercept(units, X, inverse)
        L, _ = eigenvalue_bounds((columns.T * omega) @ columns / 4 + np.diag(penalty))
        schedule = self._paced(L, min(float(penalty[: X.shape[1]].min()), L), self._gradient_method)
        prompt = self._room(X, intercept=self.fit_intercept)
        sizes = Sizes(prompt.rows, 2, _longest(columns), 1.0, 2.0)
        task = GLMTask(prompt, schedule, choose(sizes, self.heads, "float64"), 1.0, tuple(penalty))
        domain = Domain(prompt, sizes.x, target=1.0, L=L, curvature=0.25, penalty=task.penalty)
        weights, gradient = self._run(task, units, X, targets, domain)
        self.bound_ = prompt_bound(task, self.prompt_, weights)
        largest = 3 * float(np.linalg.norm(self.trajectory_, axis=1).max())  # v is extrapolated from two iterates
        self.gradient_bound_ = task.gradient_bound(sizes.x, largest)
        self.gradient_norm_ = float(np.linalg.norm(gradient))
        # A small gradient is not enough: the objective is nearly flat along columns that depend on others.
        means = expit(columns @ weights)
        curvature = (columns.T * (omega * means * (1 - means))) @ columns + np.diag(penalty)
        least = float(np.linalg.eigvalsh(curvature)[0])
        distance = self.gradient_norm_ / least if least > 0 else np.inf
        if distance > WORTH_A_WARNING * (1 + float(np.linalg.norm(weights))):
            separates = ((means > 0.5) == (targets > 0.5)).all()
            warn_of(
                f"stopped after {self.n_iter_} steps with a gradient of norm {self.gradient_norm_:.3g}"
                + (SEPARABLE if separates else "")
                + f". At the least curvature there, {least:.3g}, the weights may be {distance:.3g} from the optimum. "
                "Raise max_iter, or lower C."
            )

    def _fit_classes(self, X: np.ndarray, targets: np.ndarray, inverse: float) -> None:
        """Fit more than two classes, by gradient steps on one-hot targets."""
        omega = self._weighing.over(len(X))
        units = ColumnUnits.of(
            X, targets, omega, centred=self.fit_intercept, centred_y=False, damping=2 * inverse / float(omega.sum())
        )
        columns, penalty = self._with_intercept(units, X, inverse)
        L, _ = eigenvalue_bounds((columns.T * omega) @ columns / 2 + np.diag(penalty))
        prompt = replace(self._room(X, intercept=self.fit_intercept), targets=targets.shape[1])
        sizes = Sizes(prompt.rows, 2, _longest(columns), 1.0, 2.0)
        domain = Domain(prompt, sizes.x, target=1.0, L=L, curvature=0.5, penalty=tuple(penalty))
        scale = float(np.linalg.norm((columns.T * omega) @ (targets - targets.mean(axis=0)))) or 1.0
        for share in SHARES_OF_PENALTY:
            least = min(share * float(penalty[: X.shape[1]].min()), L)
            schedule = self._paced(L, least, self._gradient_method)
            task = SoftmaxTask(prompt, schedule, choose(sizes, self.heads, "float64"), 1.0, tuple(penalty))
            weights, gradient = self._run(task, units, X, targets, domain)
            self.gradient_norm_ = float(np.linalg.norm(gradient))
            if self.gradient_norm_ <= LEFT_OVER * scale or self.n_iter_ == self.max_iter:
                break
        self.bound_ = prompt_bound(task, self.prompt_, weights)
        own = self.intercept_ if self.fit_intercept else np.zeros(targets.shape[1])
        nothing = np.zeros(X.shape[1])
        fit = Fit(
            "softmax",
            X,
            nothing,
            nothing,
            0.0 if self.fit_intercept else None,
            np.full(X.shape[1], 1 / float(self.C)),
            omega=self._weighing.given,
            mean=units.mean,
            scale=units.scale,
        )
        found = enclose_classes(fit, targets, np.column_stack([self.coef_, own])[:, : X.shape[1] + self.fit_intercept])
        self._set_enclosures(found)
        self.gradient_bound_ = task.gradient_bound(sizes.x, 3 * float(np.abs(self.trajectory_).max()) * len(penalty))
        if self.gradient_norm_ > LEFT_OVER * scale:
            warn_of(
                f"stopped after {self.n_iter_} steps with a gradient of norm {self.gradient_norm_:.3g}: raise "
                "max_iter, or lower C"
            )

    def _in_units(self, answers: np.ndarray) -> np.ndarray:
        return answers

    def predict_bound(self, X: Any) -> Float[np.ndarray, " *shape"]:
        """Return a proven bound of |w·x + b − (w*·x + b*)| for every row x, the error of `decision_function`.

        With more than two classes, (w*, b*) is the optimum whose intercepts add up to 0, and every class has a bound.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,), or (rows, classes) if there are more than two.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> bool(model.predict_bound([[1.5]])[0] < 1e-6)
        True
        """
        return super().predict_bound(X)

    def decision_function(self, X: Any) -> Float[np.ndarray, " *shape"]:
        """Return w·x + b for every row of X. With two classes, it is above 0 for the second.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,), or (rows, classes) if there are more than two.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> (model.decision_function([[0.0], [3.0]]) > 0).tolist()
        [False, True]
        """
        scores: np.ndarray = self._queries(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Float[np.ndarray, "rows classes"]:
        """Return the probabilities of all classes for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows, classes), in the order of `classes_`.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> model.predict_proba([[1.5]]).round(6).tolist()  # half-way between the classes
        [[0.5, 0.5]]
        """
        scores = self.decision_function(X)
        if scores.ndim == 2:
            return np.asarray(softmax(scores, axis=1))
        second = expit(scores)
        return np.column_stack([1 - second, second])

    def predict(self, X: Any) -> np.ndarray:
        """Predict the likeliest label for every row of X.

        Parameters
        ----------
        X : array-like of shape (rows, features)

        Returns
        -------
        Array of shape (rows,), with labels of `classes_`.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"])
        >>> model.predict([[0.5], [2.5]]).tolist()
        ['no', 'yes']
        """
        scores = self.decision_function(X)
        best = scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(int)
        chosen: np.ndarray = self.classes_[best]
        return chosen


def _classes(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of labels, and the number of each label's class."""
    check_classification_targets(y)
    found, labels = np.unique(y, return_inverse=True)
    if len(found) < 2:
        raise FitError("Classifier can't train when only one class is present: y needs two classes")
    return found, labels


def _weight_bound(targets: np.ndarray, omega: np.ndarray, l1: np.ndarray, mu: float) -> float:
    """Return a bound of |w| at every iterate: F(w) ≤ F(0) = Σωy²/2Σω there."""
    start = float(omega @ targets**2) / (2 * float(omega.sum()))
    bounds = [2 * np.sqrt(2 * start / mu)] if mu else []
    bounds += [np.sqrt(len(l1)) * start / l1.min()] if l1.min() > 0 else []
    return _up(min(bounds)) if bounds else 1e3 * _up(np.linalg.norm(targets))


def _longest(rows: Float[np.ndarray, "rows columns"]) -> float:
    """Return the largest 2-norm of a row, rounded up."""
    return _up(np.sqrt((rows**2).sum(axis=1).max()))


def _up(value: Any) -> float:
    """Return a norm rounded up by 1e-12, which covers far more roundings than its sums have."""
    return float(value) * (1 + 1e-12)
