"""Bounds of the distance to an optimum hold for every loss, and are close where the distance is small."""

from __future__ import annotations

import flint
import numpy as np
import pytest

from attnc_lab.enclosing import SLOPES, distance_bound

LOSSES = {
    "least squares": (lambda z: z, lambda z: np.ones_like(z)),
    "logistic": (lambda z: 1 / (1 + np.exp(-z)), lambda z: 1 / (2 + np.exp(z) + np.exp(-z))),
    "poisson": (np.exp, np.exp),
}
BY_LOSS = pytest.mark.parametrize("loss", LOSSES)


def problem(loss: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return examples and the optimum of Σ ℓ + ½·0.1|w|², by Newton steps."""
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(30, 3)) / 2, rng.integers(0, 2, 30).astype(float)
    mean, slope = LOSSES[loss]
    w = np.zeros(3)
    for _ in range(50):
        z = X @ w
        w = w - np.linalg.solve((X.T * slope(z)) @ X + 0.1 * np.eye(3), X.T @ (mean(z) - y) + 0.1 * w)
    return X, y, w


@BY_LOSS
@pytest.mark.parametrize("distance", [1e-12, 1e-6, 1e-2, 1.0])
def test_the_bound_holds_and_is_close(loss: str, distance: float) -> None:
    for seed in range(5):
        X, y, best = problem(loss, seed)
        step = np.random.default_rng(seed).normal(size=3)
        w = best + distance * step / np.linalg.norm(step)
        bound = distance_bound(loss, X, y, w, share=1.0, ridge=0.1)
        assert distance * (1 - 1e-3) - 1e-14 <= bound  # the optimum is known to 1e-14
        if distance < 0.1:
            assert bound <= 1.2 * distance


@BY_LOSS
def test_a_smaller_known_bound_is_used(loss: str) -> None:
    X, y, best = problem(loss, 0)
    far = best + 30.0
    free, known = (distance_bound(loss, X, y, far, share=1.0, ridge=0.1, known=k) for k in (np.inf, 52.0))
    assert np.sqrt(3) * 30 <= known <= min(free, 52.0)


@BY_LOSS
def test_ranges_of_slopes(loss: str) -> None:
    for middle, radius in ((0.0, 0.0), (0.3, 1.0), (-2.0, 0.5), (3.0, 0.01)):
        low, high = SLOPES[loss](flint.arb(middle, radius))
        found = LOSSES[loss][1](np.linspace(middle - radius, middle + radius, 101))
        assert float(low.lower()) <= found.min()
        assert found.max() <= float(high.upper()) * (1 + 1e-15)
