"""Contraction and amplification hold for quadratics, and are reached by some."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.errors import InputError
from attnc.incontext.acceleration import METHODS, Schedule, steps_for
from incontext.exact_descent import exact_path


def iterate(schedule: Schedule, eigenvalues: np.ndarray, start: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The errors x_t − x* of every eigenvector, in long double, with `errors` added to the gradients."""
    each = iter(errors)
    return exact_path(schedule, lambda v: eigenvalues * v + next(each), start)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kappa", [1.0, 1.5, 30.0, 1000.0])
def test_bounds_hold_and_are_near(method, kappa):
    L, mu, T = 7.0, 7.0 / kappa, 60
    schedule = Schedule(method, T, L, mu)
    eigenvalues = np.unique(np.concatenate([np.linspace(mu, L, 200), [mu, L]]))
    still = np.zeros((T, len(eigenvalues)))
    shrunk = np.abs(iterate(schedule, eigenvalues, np.ones(len(eigenvalues)), still)[-1]).max()
    assert shrunk <= schedule.contraction * (1 + 1e-9)  # the coefficients themselves are rounded
    assert schedule.contraction <= 3 * T * shrunk + 1e-30
    for pattern in (np.ones(T), (-1.0) ** np.arange(T), np.random.default_rng(0).uniform(-1, 1, T)):
        errors = np.repeat(pattern[:, None], len(eigenvalues), axis=1)
        moved = np.abs(iterate(schedule, eigenvalues, np.zeros(len(eigenvalues)), errors)[-1]).max()
        assert moved <= schedule.amplification * (1 + 1e-12)
    constant = np.abs(iterate(schedule, eigenvalues, np.zeros(len(eigenvalues)), np.ones_like(still))[-1]).max()
    assert schedule.amplification <= 4 * constant


@pytest.mark.parametrize("method", METHODS)
def test_residuals_stay_below_the_overshoot(method):
    schedule = Schedule(method, 200, 1.0, 1e-3)
    eigenvalues = np.linspace(1e-3, 1, 500)
    path = iterate(schedule, eigenvalues, np.ones(500), np.zeros((200, 500)))
    assert np.abs(path).max() <= schedule.overshoot


@pytest.mark.parametrize("method", METHODS)
def test_steps_for_is_the_fewest(method):
    T = steps_for(method, 10.0, 0.1, 1e-9, 10**5)
    assert Schedule(method, T, 10.0, 0.1).contraction <= 1e-9 < Schedule(method, T - 1, 10.0, 0.1).contraction
    assert steps_for(method, 10.0, 0.1, 1e-9, 5) == 6


def test_a_diverging_step_size_names_the_eigenvalue():
    with pytest.raises(InputError, match=r"at most L = 10, .* less than 2/L = 0\.2"):
        Schedule("plain", 5, 10.0, 0.1, eta=0.25)
    assert Schedule("plain", 5, 10.0, 0.1, eta=0.1).rho == pytest.approx(0.99)


@pytest.mark.parametrize(
    "wrong",
    [
        ("newton", 5, 1.0, 0.1),
        ("plain", 0, 1.0, 0.1),
        ("plain", 1, 1.0, 2.0),
        ("chebyshev", 5, 1.0, 0.0),
        ("plain", 1, np.nan, 0.1),
    ],
)
def test_refusals(wrong):
    with pytest.raises(InputError):
        Schedule(*wrong)
