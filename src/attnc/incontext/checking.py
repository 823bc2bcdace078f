"""What is asked of an estimator, checked: its penalty, the room in its prompt, the number of its steps."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from attnc.errors import InputError
from attnc.incontext.acceleration import METHODS, steps_for
from attnc.incontext.fitting import FitError
from attnc.incontext.prompt import Prompt

LEFT_OVER = 1e-7
"""A gradient larger than this part of the terms that cancel in it is worth a warning."""


def check_penalty(alpha: float) -> None:
    if not 0 <= alpha < np.inf:
        raise FitError(f"alpha is a penalty ≥ 0, and finite, found {alpha!r}")


def room(X: np.ndarray, max_rows: int | None, intercept: bool = False) -> Prompt:
    """A prompt that holds X, or FitError."""
    if max_rows is not None and len(X) > max_rows:
        raise FitError(f"X has {len(X)} rows, more than max_rows={max_rows}: the program has no room for them")
    return Prompt(max_rows or len(X), X.shape[1], intercept)


def paced(method: str, L: float, mu: float, tol: float, max_iter: int) -> tuple[float, int]:
    """(μ, T): T steps that bring a quadratic to tol, with μ raised until max_iter of them suffice.

    For losses that are no quadratics, where the bound μ is far below the curvature met: what is reached is measured.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        checked_steps(method, L, mu, tol, max_iter)
    while steps_for(method, L, mu, tol, int(max_iter)) > max_iter and mu < L:
        mu = min(1.1 * mu, L)
    return mu, min(steps_for(method, L, mu, tol, int(max_iter)), int(max_iter))


def checked_steps(method: str, L: float, mu: float, tol: float, max_iter: int, eta: float | None = None) -> int:
    """The number of steps, with a ConvergenceWarning where max_iter cuts it short."""
    if method not in METHODS:
        raise FitError(f"method {method!r} is none of {', '.join(METHODS)}")
    if not (isinstance(max_iter, int | np.integer) and max_iter >= 1):
        raise FitError(f"max_iter is a whole number ≥ 1, found {max_iter!r}")
    if not 0 < tol < 1:
        raise FitError(f"tol is between 0 and 1, found {tol!r}")
    try:
        steps = steps_for(method, L, mu, tol, int(max_iter), eta)
    except InputError as error:
        raise FitError(str(error)) from None
    if steps <= max_iter:
        return steps
    warnings.warn(
        f"{max_iter} steps of {method} do not bring the error to tol={tol:g} of its start: the eigenvalues lie between "
        f"mu={mu:.3g} and L={L:.3g}. Raise max_iter, or alpha, or drop columns that nearly depend on others.",
        ConvergenceWarning,
        stacklevel=4,
    )
    return int(max_iter)
