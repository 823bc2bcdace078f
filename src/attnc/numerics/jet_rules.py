"""What the elementary functions do to jets.

A rule takes the jets of the arguments, their ranges over the boxes, and the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnc.numerics import elementary
from attnc.numerics.activations import sigmoid_slope
from attnc.numerics.elementary import PI
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_equations import (
    at_polynomial,
    derivative,
    exponential,
    integrate,
    power,
    quotient,
    riccati,
    sine_and_cosine,
)
from attnc.numerics.jets import Jet, add, constant, multiply, negate, scale
from attnc.numerics.powers import power as interval_power
from attnc.numerics.powers import real_power as interval_real_power

Rule = Callable[[Sequence[Jet], Sequence[Interval], int], Jet]
_TWO_OVER_SQRT_PI = 2.0 / elementary.sqrt(PI)
_SQRT_HALF = elementary.sqrt(Interval.point(0.5))


def _number(value: float | Interval) -> Jet:
    return constant(Ball.around(value) if isinstance(value, Interval) else Ball.point(value))


def analytic(
    jet: Callable[[Jet, Interval, int], Jet],
    value: Callable[[Interval], Interval],
    slope: Callable[[Interval], Interval],
) -> Rule:
    """The rule of a function of one variable: its jet at polynomials, its ranges, and those of its derivative."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        def at(p: Jet, x: Interval) -> Jet:
            return jet(p, x, order) if p.variables else constant(Ball.around(value(p.value.interval)))

        return at_polynomial(at, slope, jets[0], ranges[0])

    return rule


def _exp(p: Jet, x: Interval, order: int) -> Jet:
    return exponential(p, order)


def _half_sum(p: Jet, order: int, sign: float) -> Jet:
    """(e^p + sign·e^{−p})/2."""
    return scale(add((exponential(p, order), scale(exponential(negate(p), order), _number(sign)))), _number(0.5))


def _log(p: Jet, x: Interval, order: int) -> Jet:
    """E log p = Ep/p."""
    return integrate(quotient(derivative(p), p, x, order), Ball.around(elementary.log(p.value.interval)), order)


def _tan(p: Jet, x: Interval, order: int) -> Jet:
    value = elementary.tan(p.value.interval)
    return riccati(p, value, value.square() + 1.0, elementary.tan(x).mag, 1.0, order)


def _tanh(p: Jet, x: Interval, order: int) -> Jet:
    at_centre = p.value.interval
    slope = (1.0 / elementary.cosh(at_centre)).square()
    return riccati(p, elementary.tanh(at_centre), slope, elementary.tanh(x).mag, -1.0, order)


def _sigmoid(p: Jet, x: Interval, order: int) -> Jet:
    """σ(t) = ½ + ½·tanh(t/2)."""
    half = _number(0.5)
    return add((half, scale(_tanh(scale(p, half), x * 0.5, order), half)))


def _softplus(p: Jet, x: Interval, order: int) -> Jet:
    """softplus′ = σ."""
    slope = multiply(_sigmoid(p, x, order), derivative(p), order)
    return integrate(slope, Ball.around(elementary.softplus(p.value.interval)), order)


def _atan(p: Jet, x: Interval, order: int) -> Jet:
    """E arctan p = Ep/(1 + p²)."""
    divisor = add((_number(1.0), multiply(p, p, order)))
    slope = quotient(derivative(p), divisor, x.square() + 1.0, order)
    return integrate(slope, Ball.around(elementary.atan(p.value.interval)), order)


def _asin(p: Jet, x: Interval, order: int) -> Jet:
    """E arcsin p = (1 − p²)^(−½)·Ep."""
    under = add((_number(1.0), negate(multiply(p, p, order))))
    root = positive_power(under, 1.0 - x.square(), Ball.point(-0.5), order)
    return integrate(multiply(root, derivative(p), order), Ball.around(elementary.asin(p.value.interval)), order)


def _acos(p: Jet, x: Interval, order: int) -> Jet:
    """arccos = π/2 − arcsin."""
    return add((_number(PI * 0.5), negate(_asin(p, x, order))))


def _erf(p: Jet, x: Interval, order: int) -> Jet:
    """E erf p = 2/√π·e^(−p²)·Ep."""
    bell = exp([negate(multiply(p, p, order))], [-x.square()], order)
    slope = multiply(scale(bell, _number(_TWO_OVER_SQRT_PI)), derivative(p), order)
    return integrate(slope, Ball.around(elementary.erf(p.value.interval)), order)


def _root_slope(x: Interval) -> Interval:
    return 1.0 / elementary.sqrt(1.0 - x.square())


exp = analytic(_exp, elementary.exp, elementary.exp)
log = analytic(_log, elementary.log, lambda x: 1.0 / x)
sin = analytic(lambda p, x, order: sine_and_cosine(p, order)[0], elementary.sin, elementary.cos)
cos = analytic(lambda p, x, order: sine_and_cosine(p, order)[1], elementary.cos, elementary.sin)
tan = analytic(_tan, elementary.tan, lambda x: elementary.tan(x).square() + 1.0)
sinh = analytic(lambda p, x, order: _half_sum(p, order, -1.0), elementary.sinh, elementary.cosh)
cosh = analytic(lambda p, x, order: _half_sum(p, order, 1.0), elementary.cosh, elementary.sinh)
tanh = analytic(_tanh, elementary.tanh, lambda x: (1.0 / elementary.cosh(x)).square())
sigmoid = analytic(_sigmoid, elementary.sigmoid, sigmoid_slope)
softplus = analytic(_softplus, elementary.softplus, elementary.sigmoid)
atan = analytic(_atan, elementary.atan, lambda x: 1.0 / (x.square() + 1.0))
asin = analytic(_asin, elementary.asin, _root_slope)
acos = analytic(_acos, elementary.acos, _root_slope)
erf = analytic(_erf, elementary.erf, lambda x: _TWO_OVER_SQRT_PI * elementary.exp(-x.square()))


def silu(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """t·σ(t)."""
    return multiply(jets[0], sigmoid(jets, ranges, order), order)


def gelu(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """t·Φ(t), Φ(t) = ½ + ½·erf(t/√2)."""
    half = _number(0.5)
    erf_part = erf([scale(jets[0], _number(_SQRT_HALF))], [ranges[0] * _SQRT_HALF], order)
    return multiply(jets[0], add((half, scale(erf_part, half))), order)


# Quotients and powers


def divide(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """u/v."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return scale(u, constant(v.value.inverse()))
    return quotient(u, v, ranges[1], order)


def integer_power(u: Jet, x: Interval, n: int, order: int) -> Jet:
    """uⁿ: products for n ≥ 0, the equation of the power for n < 0."""
    if n < 0:

        def at(p: Jet, around: Interval, order: int) -> Jet:
            value = Ball.around(interval_power(p.value.interval, n))
            return power(p, around, Ball.point(float(n)), value, order)

        rule = analytic(at, lambda t: interval_power(t, n), lambda t: interval_power(t, n - 1) * float(n))
        return rule([u], [x], order)
    result: Jet | None = None
    while n:
        if n % 2:
            result = u if result is None else multiply(result, u, order)
        n //= 2
        if n:
            u = multiply(u, u, order)
    return _number(1.0) if result is None else result


def positive_power(u: Jet, x: Interval, exponent: Ball, order: int) -> Jet:
    """u^α for u > 0."""
    alpha = exponent.interval

    def value(t: Interval) -> Interval:
        return interval_real_power(t, alpha)

    def at(p: Jet, around: Interval, order: int) -> Jet:
        return power(p, around, exponent, Ball.around(value(p.value.interval)), order)

    return analytic(at, value, lambda t: interval_real_power(t, alpha - 1.0) * alpha)([u], [x], order)


def sqrt(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    return positive_power(jets[0], ranges[0], Ball.point(0.5), order)


def real_power(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """uᵛ for u > 0: e^(v·log u) unless v is constant."""
    u, v = jets
    if not v.variables and v.is_polynomial:
        return positive_power(u, ranges[0], v.value, order)
    exponent = multiply(v, log(jets[:1], ranges[:1], order), order)
    return exp([exponent], [exponent.range], order)
