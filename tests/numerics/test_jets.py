"""Jets: monomials, exact arithmetic in fractions as the reference, and errors that fall towards the centre."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product as cartesian
from math import comb

import numpy as np
import pytest
from flint import Ordering, arb, fmpq, fmpq_mpoly, fmpq_mpoly_ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.functions.kinked import max_jet, min_jet, step_jet, two_lines_jet
from attnc.functions.powers import QUOTIENT, integer_power_jet
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball, above
from attnc.numerics.jet_equations import growth
from attnc.numerics.jet_tables import embedding, monomials, pairs
from attnc.numerics.jets import Jet, add, constant, multiply, negate, scale, variable
from strategies.reference import VALUES, precision

POLYNOMIALS = fmpq_mpoly_ctx.get(("x", "y", "z"), Ordering.deglex)
"""Polynomials in three variables with rational coefficients: the reference."""
SMOOTH = ["exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "atan", "asin", "acos", "erf", "sigmoid"]
SMOOTH += ["gelu", "silu", "softplus"]


def test_monomials() -> None:
    assert monomials(2, 2).tolist() == [[0, 0], [1, 0], [0, 1], [2, 0], [1, 1], [0, 2]]
    assert monomials(3, 1).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert monomials(1, 3).tolist() == [[0], [1], [2], [3]]
    assert monomials(0, 5).shape == (1, 0)
    for d, order in cartesian(range(5), range(6)):
        table = monomials(d, order)
        assert len(table) == comb(d + order, d) == len({tuple(j) for j in table.tolist()})
        keys = [(sum(j), [-k for k in j]) for j in table.tolist()]
        assert keys == sorted(keys)
        assert (table == monomials(d, order + 1)[: len(table)]).all()


def test_embedding_and_pairs_find_the_right_monomials() -> None:
    everything = monomials(3, 4)
    inner = np.zeros((len(monomials(2, 4)), 3), dtype=int)
    inner[:, [0, 2]] = monomials(2, 4)
    assert (everything[embedding((0, 2), 4, 3)] == inner).all()
    left, right = np.zeros((15, 3), dtype=int), np.zeros((10, 3), dtype=int)
    left[:, [0, 1]], right[:, [1, 2]] = monomials(2, 4), monomials(2, 3)
    found = []
    for block in pairs((0, 1), 4, (1, 2), 3, 3, 5):
        targets = monomials(3, 5)[block.block]
        singles = (
            [] if block.single is None else list(zip(*(np.arange(99)[rows] for rows in block.single), strict=True))
        )
        sums = [(t, i, j) for t, a, b in block.sums for i, j in zip(np.arange(99)[a], np.arange(99)[b], strict=True)]
        assert all((targets[t] == left[i] + right[j]).all() for t, i, j in singles + sums)
        found += [(i, j) for _, i, j in singles + sums]
    wanted = [(i, j) for i in range(15) for j in range(10) if left[i].sum() + right[j].sum() <= 5]
    assert sorted(found) == sorted(wanted)


# Arithmetic, against fractions


def random_jet(rng: np.random.Generator, variables: tuple[int, ...], degree: int, order: int) -> Jet:
    """One box; coefficients of many sizes, a remainder unless the polynomial is short."""
    shape = (len(monomials(len(variables), degree)), 1)
    mid = rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape)
    radius = 10.0 ** rng.uniform(-18, -1, (degree + 1, 1)) * (rng.random() < 0.7)
    return Jet(variables, degree, mid, radius, np.array([10.0 ** rng.uniform(-9, 0) * (rng.random() < 0.7)]))


def exact(number: float) -> fmpq:
    return fmpq(*number.as_integer_ratio())


def member(rng: np.random.Generator, jet: Jet) -> tuple[fmpq_mpoly, fmpq]:
    """Coefficients within the radii, and an error within the remainder, at one point."""
    coefficients = {}
    for j, mid in zip(monomials(len(jet.variables), jet.degree).tolist(), jet.mid[:, 0].tolist(), strict=True):
        powers = dict(zip(jet.variables, j, strict=True))
        move = exact(float(jet.radius[sum(j), 0])) * fmpq(int(rng.integers(-4, 5)), 4)
        coefficients[tuple(powers.get(place, 0) for place in range(3))] = exact(mid) + move
    return POLYNOMIALS.from_dict(coefficients), exact(float(jet.remainder[0])) * fmpq(int(rng.integers(-4, 5)), 4)


def check_enclosed(jet: Jet, whole: fmpq_mpoly, value: fmpq, tau: list[fmpq], order: int) -> None:
    """The coefficients up to the order within the radii, and the value within the remainder of their polynomial."""
    stored, _ = member(np.random.default_rng(0), replace(jet, radius=0 * jet.radius))
    kept = POLYNOMIALS.from_dict({j: c for j, c in whole.to_dict().items() if sum(j) <= order})
    for j, off in (kept - stored).to_dict().items():
        radius = float(jet.radius[sum(j), 0]) if sum(j) <= jet.degree else 0.0
        assert abs(off) <= exact(radius), (j, off, radius)
    assert abs(value - kept(*tau)) <= exact(float(jet.remainder[0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_sums_and_products_enclose_fractions(seed: int, order: int) -> None:
    rng = np.random.default_rng(seed)
    choices = [(), (0,), (1,), (0, 1), (1, 2), (0, 1, 2)]
    jets = []
    for _ in range(3):
        variables = choices[rng.integers(len(choices))]
        jets.append(random_jet(rng, variables, int(rng.integers(1, order + 1)) if variables else 0, order))
    tau = [fmpq(int(rng.integers(-8, 9)), 8) for _ in range(3)]
    members = [member(rng, jet) for jet in jets]
    values = [p(*tau) + error for p, error in members]
    a, b, c = (p for p, _ in members)
    check_enclosed(add(jets), a + b + c, sum(values, fmpq(0)), tau, order)
    check_enclosed(multiply(jets[0], jets[1], order), a * b, values[0] * values[1], tau, order)
    check_enclosed(multiply(jets[2], jets[2], order), c * c, values[2] ** 2, tau, order)
    check_enclosed(negate(jets[0]), -a, -values[0], tau, order)
    number = constant(Ball(np.array(3.7), np.array(2.0**-20)))
    factor = exact(3.7) - fmpq(1, 2**20)
    check_enclosed(scale(jets[0], number), factor * a, values[0] * factor, tau, order)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_quotients_enclose_fractions(seed: int, order: int) -> None:
    rng = np.random.default_rng(seed)
    u, v = random_jet(rng, (0, 1), order, order), random_jet(rng, (1, 2), int(rng.integers(1, order + 1)), order)
    v.remainder[0] = 10.0 ** rng.uniform(-3, 0) * np.abs(v.mid[1:]).sum()
    v.mid[0] = 1.1 * (np.abs(v.mid[1:]).sum() + v.remainder[0] + 99 * v.radius.sum())
    result = QUOTIENT.jet((u, v), (u.range, v.range), order)
    tau = [fmpq(int(rng.integers(-8, 9)), 8) for _ in range(3)]
    (p, p_error), (q, q_error) = member(rng, u), member(rng, v)
    found = POLYNOMIALS.from_dict({})
    for j in map(tuple, monomials(3, order).tolist()):  # q·found = p, coefficient by coefficient
        found += POLYNOMIALS.from_dict({j: (p - q * found).to_dict().get(j, fmpq(0)) / q.to_dict()[0, 0, 0]})
    check_enclosed(result, found, (p(*tau) + p_error) / (q(*tau) + q_error), tau, order)


# Functions


@pytest.mark.parametrize("name", SMOOTH)
def test_errors_fall_towards_the_centre(name: str) -> None:
    """|f − polynomial| ≤ s^{m+1}·remainder at s times a corner: of a variable, and of something with a remainder."""
    order = 5
    centres, radii = np.array([0.2, 0.45, 0.6]), np.array([0.15, 0.3, 0.01])
    x = variable(0, centres, radii)
    box = Interval(centres - radii, centres + radii)
    rule = FUNCTIONS[name].jet
    nested = rule(
        [FUNCTIONS["sin"].jet([x], [box], order)], [Interval(np.sin(box.lo) - 1e-9, np.sin(box.hi) + 1e-9)], order
    )
    for jet, inner in ((rule([x], [box], order), lambda t: t), (nested, arb.sin)):
        assert jet.is_finite.all()
        with precision(200):
            for i, s in cartesian(range(3), (-1.0, -0.5, 0.25, 0.75, 1.0)):
                error = VALUES[name](inner(arb(centres[i]) + arb(radii[i]) * arb(s)))
                allowed = arb(float(jet.remainder[i])) * arb(abs(s)) ** (order + 1)
                for k in range(order + 1):
                    error = error - arb(float(jet.mid[k, i])) * arb(s) ** k
                    allowed = allowed + arb(float(jet.radius[k, i])) * arb(abs(s)) ** k
                assert abs(error) <= allowed, (name, i, s)
        assert (jet.remainder[2] < 1e-11).all()


def test_powers_agree_with_products() -> None:
    x = variable(0, np.array([0.7, -1.5]), np.array([0.1, 0.2]))
    y = variable(1, np.array([2.0, 0.3]), np.array([0.3, 0.1]))
    u = add((multiply(x, y, 4), x))
    cube = multiply(multiply(u, u, 4), u, 4)
    inverse_cube = integer_power_jet(u, u.range, -3, 4)
    one = multiply(cube, inverse_cube, 4)
    expected = np.zeros(one.mid.shape)
    expected[0] = 1.0
    assert (np.abs(one.mid - expected) <= np.repeat(one.radius, [1, 2, 3, 4, 5], axis=0)).all()
    assert (one.radius < 1e-12).all()
    seventh = integer_power_jet(x, x.range, 7, 9)
    assert seventh.degree == 7
    assert (seventh.remainder == 0).all()
    expected = [comb(7, k) * 0.7 ** (7 - k) * 0.1**k for k in range(8)]
    np.testing.assert_allclose(seventh.mid[:, 0], expected, rtol=1e-13)
    assert integer_power_jet(x, x.range, 0, 3).mid.tolist() == [[1.0]]


def test_growth() -> None:
    """n·∫ s^{n−1}e^{rate(1−s)} ds, from above and not from far."""
    for n in (1, 4, 10):
        rates = np.array([0.0, 1e-9, 0.1, 1.0, 3.0, 20.0])
        bounds = growth(rates, n)
        for rate, bound in zip(rates.tolist(), bounds.tolist(), strict=True):
            term, exact = 1.0, 1.0
            for k in range(1, 200):
                term *= rate / (n + k)
                exact += term
            assert exact <= bound * (1 + 1e-15)
            assert bound <= (1.5 * exact if rate <= n else np.exp(rate) * (1 + 1e-9))
    assert (growth(np.array([np.inf, np.nan, 1e5]), 3) == np.inf).all()


def test_above_covers_rounding_and_underflow() -> None:
    rng = np.random.default_rng(1)
    for scale_of in (1.0, 1e-160, 1e150):
        x, y = rng.random((2, 1000)) * scale_of
        exact = sum((Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)), Fraction(0))
        assert Fraction(float(above(np.einsum("i,i->", x, y)))) >= exact
    inverse = Ball(np.array([3.0, 0.0, 1e-320]), np.array([2.0**-30, 1.0, 0.0])).inverse()
    assert np.isfinite(inverse.radius).tolist() == [True, False, False]
    assert abs(Fraction(inverse.mid[0]) - 1 / (3 - Fraction(1, 2**30))) <= Fraction(inverse.radius[0])


def test_kinks_choose_box_by_box() -> None:
    x = variable(0, np.array([-2.0, 0.0, 3.0]), np.full(3, 0.5))
    y = variable(1, np.array([0.0, 0.0, 9.0]), np.full(3, 0.25))
    ranges = (x.range, y.range)
    largest = max_jet((x, y), ranges, 3)
    assert np.isfinite(largest.remainder).tolist() == [True, False, True]
    assert largest.mid[:, 0].tolist() == [0.0, 0.0, 0.25]
    assert largest.mid[:, 2].tolist() == [9.0, 0.0, 0.25]
    smallest = min_jet((x, y), ranges, 3)
    assert smallest.mid[:, 0].tolist() == [-2.0, 0.5, 0.0]
    size = two_lines_jet(-1.0, 1.0)([x], [x.range], 3)
    assert size.mid[:, 0].tolist() == [2.0, -0.5]
    assert np.isfinite(size.remainder).tolist() == [True, False, True]
    steps = step_jet(np.sign)([x], [x.range], 3)
    assert steps.mid[0, [0, 2]].tolist() == [-1.0, 1.0]
    assert steps.variables == ()
