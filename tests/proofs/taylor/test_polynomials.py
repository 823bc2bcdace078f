"""Series quotients whose residuals are bounded as stored, and ranges that are sound and sharp."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from attnc.proofs.cells.kind import Goal
from attnc.proofs.taylor.polynomials import layout, quotient, residual
from attnc.proofs.taylor.ranges import largest


def exact_residual(space, nu, delta, q) -> float:
    """Σ |(ν − Q·δ)_j| over all degrees, in rationals."""
    total: dict[tuple[int, ...], Fraction] = {}
    for i, left in enumerate(space.exponents.tolist()):
        total[tuple(left)] = total.get(tuple(left), Fraction(0)) + Fraction(float(nu[i]))
        for j, right in enumerate(space.exponents.tolist()):
            place = tuple(a + b for a, b in zip(left, right, strict=True))
            total[place] = total.get(place, Fraction(0)) - Fraction(float(q[i])) * Fraction(float(delta[j]))
    return float(sum(map(abs, total.values())))


@pytest.mark.parametrize(("d", "order"), [(1, 1), (1, 9), (2, 5), (3, 3)])
def test_the_residual_of_a_stored_quotient_is_bounded(d, order):
    rng = np.random.default_rng(d)
    space = layout(d, order)
    degrees = space.exponents.sum(axis=1)[:, None, None]
    nu = rng.normal(size=(space.count, 2, 3)) * 10.0 ** (rng.uniform(-8, 1, (1, 2, 3)) * degrees)
    delta = rng.normal(size=(space.count, 3)) * 10.0 ** (rng.uniform(-8, 0.3, (1, 3)) * degrees[:, 0])
    delta[0] = 1 + rng.random(3)
    q = quotient(space, nu, delta)
    bounds = residual(space, q, delta)
    for output in range(2):
        for box in range(3):
            found = exact_residual(space, nu[:, output, box], delta[:, box], q[:, output, box])
            assert found <= bounds[output, box]


def test_a_quotient_of_low_degree_is_found_to_rounding():
    space = layout(2, 6)
    rng = np.random.default_rng(0)
    p, delta = np.zeros((space.count, 1, 1)), np.zeros((space.count, 1))
    p[: space.starts[3], 0, 0], delta[: space.starts[3], 0] = rng.normal(size=6), 0.1 * rng.normal(size=6)
    delta[0] = 1.0
    nu = np.zeros_like(p)
    for i, left in enumerate(space.exponents[:6].tolist()):
        for j, right in enumerate(space.exponents[:6].tolist()):
            nu[space.index[tuple(np.add(left, right).tolist())], 0, 0] += p[i, 0, 0] * delta[j, 0]
    q = quotient(space, nu, delta)
    np.testing.assert_allclose(q, p, atol=1e-14)


def at(space, coefficients, points):
    return np.prod(points[:, None] ** space.exponents, axis=2) @ coefficients


@pytest.mark.parametrize(("d", "order"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 6), (3, 4)])
def test_ranges_are_sound_and_sharp(d, order):
    rng = np.random.default_rng(order)
    space = layout(d, order)
    coefficients = rng.normal(size=(space.count, 40)) * 0.6 ** space.exponents.sum(axis=1)[:, None]
    upper, seen = largest(space, coefficients, np.zeros(40))
    per_axis = int(40_000 ** (1 / d))
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, per_axis)] * d), axis=-1).reshape(-1, d)
    truth = np.abs(at(space, coefficients, grid)).max(axis=0)
    assert (truth <= upper).all()
    assert (seen <= upper).all()
    assert (upper <= 1.03 * truth).all()


def test_chebyshev_polynomials_have_the_range_one():
    space = layout(1, 12)
    rows = [np.polynomial.chebyshev.cheb2poly([0] * n + [1]) for n in range(1, 13)]
    coefficients = np.array([np.pad(row, (0, 13 - len(row))) for row in rows]).T
    upper, _ = largest(space, coefficients, np.zeros(12))
    assert (upper >= 1).all()
    assert (upper <= 1.011).all()


def test_a_bound_that_serves_the_goal_or_cannot_is_not_made_sharp():
    space = layout(1, 2)
    coefficients = np.array([[0.0, 0.0], [1.0, 1.0], [-0.7, -0.7]])  # |p| ≤ 1.7 at τ = −1; at most 0.357 beyond 0
    easy, _ = largest(space, coefficients, np.zeros(2), Goal(3.0, 1.03))
    np.testing.assert_array_equal(easy, largest(space, coefficients, np.zeros(2), Goal(1e-9, 1.0))[0])
    hopeless, seen = largest(space, coefficients, np.array([0.0, np.inf]), Goal(1.0, 1.03))
    assert (hopeless >= 1.7).all()
    assert seen[0] == pytest.approx(1.7)
