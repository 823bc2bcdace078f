"""Quotients, powers and sqrt: their ranges over intervals, their jets, and where they are defined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import truediv
from typing import TypeVar

import numpy as np

from attnc.functions.exponential import EXP, LOG
from attnc.functions.function import DomainRule, ElementaryFunction, Gradient, added, at_least, scaled
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_equations import analytic, number, power_jet, quotient
from attnc.numerics.jets import Jet, constant, multiply, scale
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LIBM_ULPS, Array, down, is_short, up

N = TypeVar("N", Array, Jet)
MAX_SQUARED_EXPONENT = 16  # beyond it the errors of repeated multiplication exceed those of the machine's power


# Domains


def _not_zero(complaint: str, operand: int) -> DomainRule:
    """This operand must not be 0."""
    remedy = "Choose a box that excludes 0, or add to {0} a constant that keeps it away from 0"
    return DomainRule(
        complaint,
        remedy,
        lambda a: a[operand].contains(0.0),
        lambda a: a[operand].mag == 0,
        guard=lambda a: a[operand],
        operand=operand,
    )


NEGATIVE_POWER = _not_zero("the base {0} of a negative power contains 0", 0)
POSITIVE_BASE = DomainRule(
    "the base {0} of a power that is not an integer is negative, or zero to an exponent that is not positive,",
    "Choose a box on which {0} is positive, or use an integer exponent",
    lambda a: (a[0].lo < 0) | ((a[0].lo <= 0) & (a[1].lo <= 0)),
    lambda a: (a[0].hi < 0) | ((a[0].mag == 0) & (a[1].hi <= 0)),
)


# Ranges: integer exponents on all reals, real exponents on positive bases


@quietly
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
        return Interval(_power_towards(x.mig, n, -np.inf), _power_towards(x.mag, n, np.inf))
    # An odd power is increasing and odd. |t|ⁿ is bounded from below where the result is rounded towards 0.
    least, greatest = (
        np.where(end >= 0, _power_towards(abs(end), n, way), -_power_towards(abs(end), n, -way))
        for end, way in ((x.lo, -np.inf), (x.hi, np.inf))
    )
    return Interval(least, greatest)


def _power_towards(x: Array, n: int, towards: float) -> Array:
    """A bound of xⁿ for x ≥ 0, from below or above: `towards` −∞ or +∞."""

    def product(a: Array, b: Array) -> Array:
        """ab, rounded unless it is exact."""
        exact = (is_short(a) & is_short(b)) | (a == 0) | (b == 0)
        ab = a * b
        return np.where(exact, ab, np.maximum(np.nextafter(ab, towards), 0.0))

    if n <= MAX_SQUARED_EXPONENT:
        return _by_squaring(x, n, product)
    computed = np.power(x, float(n))
    widened = up(computed, LIBM_ULPS) if towards > 0 else np.maximum(down(computed, LIBM_ULPS), 0.0)
    return np.where((x == 0) | (x == 1), x, widened)


def _by_squaring(x: N, n: int, product: Callable[[N, N], N]) -> N:
    """xⁿ for n ≥ 1 by squares and products."""
    result: N | None = None
    while True:
        if n % 2:
            result = x if result is None else product(result, x)
        n //= 2
        if not n:
            break
        x = product(x, x)
    assert result is not None
    return result


@quietly
def real_power(x: Interval, y: Interval) -> Interval:
    """sᵗ for s ≥ 0. It is monotone in s and in t, so the extremes are at the four corners. [−∞, ∞] for negative s."""
    bottom = np.maximum(x.lo, 0.0) + 0.0  # + 0.0 makes −0 into 0, whose negative powers are +∞
    top = np.maximum(x.hi, 0.0) + 0.0
    corners = [np.power(base, exponent) for base in (bottom, top) for exponent in (y.lo, y.hi)]
    lo, hi = reduce(np.minimum, corners), reduce(np.maximum, corners)
    one = (lo == 1) & (hi == 1) & (((x.lo == 1) & (x.hi == 1)) | ((y.lo == 0) & (y.hi == 0)))
    low = np.where(one | (lo == 0), lo, np.maximum(down(lo, LIBM_ULPS), 0.0))
    true_zero = (hi == 0) & (x.hi == 0)
    high = np.where(one | true_zero, hi, up(hi, LIBM_ULPS))
    return Interval(low, high).entire_where(x.lo < 0)


# Jets


def _divide_jets(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """u/v."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return scale(u, constant(v.value.inverse()))
    return quotient(u, v, ranges[1], order)


def integer_power_jet(u: Jet, x: Interval, n: int, order: int) -> Jet:
    """uⁿ, by products for n ≥ 0 and by the equation of the power for n < 0."""
    if n < 0:

        def at(p: Jet, around: Interval, order: int) -> Jet:
            return power_jet(p, around, Ball.point(float(n)), power(p.value.interval, n), order)

        rule = analytic(at, lambda t: power(t, n), lambda t: power(t, n - 1) * float(n))
        return rule([u], [x], order)
    return _by_squaring(u, n, lambda a, b: multiply(a, b, order)) if n else number(1.0)


def positive_power_jet(u: Jet, x: Interval, exponent: Ball, order: int) -> Jet:
    """u^α for u > 0."""
    alpha = exponent.interval

    def value(t: Interval) -> Interval:
        return real_power(t, alpha)

    def at(p: Jet, around: Interval, order: int) -> Jet:
        return power_jet(p, around, exponent, value(p.value.interval), order)

    return analytic(at, value, lambda t: real_power(t, alpha - 1.0) * alpha)([u], [x], order)


def _real_power_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """uᵛ for u > 0: e^(v·log u) unless v is constant."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return positive_power_jet(u, ranges[0], v.value, order)
    exponent = multiply(v, LOG.jet(jets[:1], ranges[:1], order), order)
    return EXP.jet([exponent], [exponent.range], order)


# Gradients


def _quotient_gradient(a: Sequence[Interval], g: Sequence[Gradient], y: Interval) -> Gradient:
    """u/v − u′/v′ = (u − u′)/v − (u′/v′)(v − v′)/v."""
    return added(scaled(1.0 / a[1], g[0]) if g[0] else {}, scaled(-y / a[1], g[1]) if g[1] else {})


def _power_gradient(a: Sequence[Interval], g: Sequence[Gradient], y: Interval) -> Gradient:
    """The slopes are v·u^(v−1) in u, and u^v·log u in v."""
    base = scaled(a[1] * real_power(a[0], a[1] - 1.0), g[0]) if g[0] else {}
    return added(base, scaled(y * elementary.log(a[0]), g[1])) if g[1] else base


def integer_power(n: int) -> ElementaryFunction:
    """The operation base ** n; its second operand is the number n."""
    return ElementaryFunction(
        "**",
        np.power,
        lambda base, _: power(base, n),
        lambda jets, ranges, order: integer_power_jet(jets[0], ranges[0], n, order),
        gradient=lambda a, g, _: scaled(float(n) * power(a[0], n - 1), g[0]) if n and g[0] else {},
        domain=NEGATIVE_POWER if n < 0 else None,
    )


DIVISOR = _not_zero("the divisor {0} contains 0", 1)
QUOTIENT = ElementaryFunction("/", truediv, truediv, _divide_jets, gradient=_quotient_gradient, domain=DIVISOR)
REAL_POWER = ElementaryFunction(
    "**", np.power, real_power, _real_power_jet, gradient=_power_gradient, domain=POSITIVE_BASE
)
SQRT = ElementaryFunction(
    "sqrt",
    np.sqrt,
    elementary.sqrt,
    lambda jets, ranges, order: positive_power_jet(jets[0], ranges[0], Ball.point(0.5), order),
    slope=lambda x, y: 0.5 / y,
    domain=at_least(0.0, "the argument", strict=False),
    singularities=(0.0,),
    derivative="1/(2*sqrt(t))",
)
