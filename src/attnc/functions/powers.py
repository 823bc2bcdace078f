"""Quotients, powers and sqrt: their ranges over intervals, their jets, and where they are defined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnc.functions.exponential import EXP, LOG
from attnc.functions.function import DomainRule, ElementaryFunction, at_least
from attnc.numerics import elementary
from attnc.numerics.elementary import quiet
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_equations import analytic, number, power_jet, quotient
from attnc.numerics.jets import Jet, constant, multiply, scale
from attnc.numerics.rounding import LIBM_ULPS, Array, Mask, down, is_short, up

MAX_SQUARED_EXPONENT = 16  # beyond it the errors of repeated multiplication exceed those of the machine's power


# Domains


def _may_vanish(x: Interval) -> Mask:
    return np.asarray((x.lo <= 0) & (x.hi >= 0))


def _vanishes(x: Interval) -> Mask:
    return np.asarray((x.lo == 0) & (x.hi == 0))


DIVISOR = DomainRule(
    "the divisor {0} contains 0",
    "Choose a box that excludes 0, or add to {0} a constant that keeps it away from 0",
    lambda a: _may_vanish(a[1]),
    lambda a: _vanishes(a[1]),
    guard=lambda a: a[1],
    operand=1,
)
NEGATIVE_POWER = DomainRule(
    "the base {0} of a negative power contains 0",
    "Choose a box that excludes 0, or add to {0} a constant that keeps it away from 0",
    lambda a: _may_vanish(a[0]),
    lambda a: _vanishes(a[0]),
    guard=lambda a: a[0],
)
REAL_POWER = DomainRule(
    "the base {0} of a power that is not an integer is negative, or zero to an exponent that is not positive,",
    "Choose a box on which {0} is positive, or use an integer exponent",
    lambda a: (a[0].lo < 0) | ((a[0].lo <= 0) & (a[1].lo <= 0)),
    lambda a: (a[0].hi < 0) | (_vanishes(a[0]) & (a[1].hi <= 0)),
)


# Ranges: integer exponents on all reals, real exponents on positive bases


@quiet
def power(x: Interval, n: int) -> Interval:
    """tⁿ for an integer n (t⁰ = 1): even powers are ≥ 0, negative ones 1/t^|n|."""
    if n < 0:
        return 1.0 / power(x, -n)
    if n == 0:
        return Interval.point(np.ones(x.shape))
    if n == 1:
        return x
    if n == 2:
        return x.square()
    if n % 2 == 0:
        return Interval(_power_down(x.mig, n), _power_up(x.mag, n))
    # An odd power is increasing and odd: bound |t|ⁿ, from below where it is to be rounded towards 0.
    low, high = np.abs(x.lo), np.abs(x.hi)
    lo = np.where(x.lo >= 0, _power_down(low, n), -_power_up(low, n))
    hi = np.where(x.hi >= 0, _power_up(high, n), -_power_down(high, n))
    return Interval(lo, hi)


def _power_down(x: Array, n: int) -> Array:
    """A lower bound of xⁿ for x ≥ 0."""
    if n > MAX_SQUARED_EXPONENT:
        return np.where((x == 0) | (x == 1), x, np.maximum(down(np.power(x, float(n)), LIBM_ULPS), 0.0))
    return _by_squaring(x, n, -np.inf)


def _power_up(x: Array, n: int) -> Array:
    """An upper bound of xⁿ for x ≥ 0."""
    if n > MAX_SQUARED_EXPONENT:
        return np.where((x == 0) | (x == 1), x, up(np.power(x, float(n)), LIBM_ULPS))
    return _by_squaring(x, n, np.inf)


def _by_squaring(x: Array, n: int, towards: float) -> Array:
    """xⁿ for x ≥ 0 with every product rounded `towards` −∞ or +∞, unless it is exact."""

    def product(a: Array, b: Array) -> Array:
        exact = (is_short(a) & is_short(b)) | (a == 0) | (b == 0)
        ab = a * b
        return np.where(exact, ab, np.maximum(np.nextafter(ab, towards), 0.0))

    result: Array | None = None
    while n:
        if n % 2:
            result = x if result is None else product(result, x)
        n //= 2
        if n:
            x = product(x, x)
    assert result is not None
    return result


@quiet
def real_power(x: Interval, y: Interval) -> Interval:
    """sᵗ for s ≥ 0: monotone in s and in t, so that the extremes are at the four corners. [−∞, ∞] for negative s."""
    bottom = np.maximum(x.lo, 0.0) + 0.0  # + 0.0 makes −0 into 0, whose negative powers are +∞
    top = np.maximum(x.hi, 0.0) + 0.0
    a, b = np.power(bottom, y.lo), np.power(bottom, y.hi)
    c, d = np.power(top, y.lo), np.power(top, y.hi)
    lo, hi = np.minimum(np.minimum(a, b), np.minimum(c, d)), np.maximum(np.maximum(a, b), np.maximum(c, d))
    one = (lo == 1) & (hi == 1) & (((x.lo == 1) & (x.hi == 1)) | ((y.lo == 0) & (y.hi == 0)))
    low = np.where(one | (lo == 0), lo, np.maximum(down(lo, LIBM_ULPS), 0.0))
    true_zero = (hi == 0) & (x.hi == 0)
    high = np.where(one | true_zero, hi, up(hi, LIBM_ULPS))
    return Interval(low, high).entire_where(x.lo < 0)


# Jets


def divide_jets(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """u/v."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return scale(u, constant(v.value.inverse()))
    return quotient(u, v, ranges[1], order)


def integer_power_jet(u: Jet, x: Interval, n: int, order: int) -> Jet:
    """uⁿ: products for n ≥ 0, the equation of the power for n < 0."""
    if n < 0:

        def at(p: Jet, around: Interval, order: int) -> Jet:
            value = Ball.around(power(p.value.interval, n))
            return power_jet(p, around, Ball.point(float(n)), value, order)

        rule = analytic(at, lambda t: power(t, n), lambda t: power(t, n - 1) * float(n))
        return rule([u], [x], order)
    result: Jet | None = None
    while n:
        if n % 2:
            result = u if result is None else multiply(result, u, order)
        n //= 2
        if n:
            u = multiply(u, u, order)
    return number(1.0) if result is None else result


def positive_power_jet(u: Jet, x: Interval, exponent: Ball, order: int) -> Jet:
    """u^α for u > 0."""
    alpha = exponent.interval

    def value(t: Interval) -> Interval:
        return real_power(t, alpha)

    def at(p: Jet, around: Interval, order: int) -> Jet:
        return power_jet(p, around, exponent, Ball.around(value(p.value.interval)), order)

    return analytic(at, value, lambda t: real_power(t, alpha - 1.0) * alpha)([u], [x], order)


def real_power_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """uᵛ for u > 0: e^(v·log u) unless v is constant."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return positive_power_jet(u, ranges[0], v.value, order)
    exponent = multiply(v, LOG.jet(jets[:1], ranges[:1], order), order)
    return EXP.jet([exponent], [exponent.range], order)


SQRT = ElementaryFunction(
    "sqrt",
    np.sqrt,
    elementary.sqrt,
    lambda jets, ranges, order: positive_power_jet(jets[0], ranges[0], Ball.point(0.5), order),
    slope=lambda x, y: 0.5 / y,
    domain=at_least(0.0, "the argument", strict=False),
    singularities=(0.0,),
)
