"""sin, cos, tan and their inverses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attnc.functions.function import ONE, DomainRule, levels, smooth, within
from attnc.functions.gate_recipes import FittedKeys, TableRow
from attnc.functions.gate_table import ATAN as ATAN_TABLE
from attnc.functions.powers import positive_power_jet
from attnc.numerics import elementary
from attnc.numerics.elementary import PI, increasing
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_equations import (
    derivative,
    integrate,
    number,
    quotient,
    riccati,
    sine_and_cosine,
)
from attnc.numerics.jets import Jet, add, multiply, negate
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LIBM_ULPS, SINE_SLACK, Array, Mask, down, up

MAX_REDUCED = 2.0**20  # beyond it the reduction of an argument by π is not trusted
CREST_SLACK = 2.0**-31  # in turns: > the error of x/2π for |x| ≤ 2²⁰, and 1 − cos(2π·2⁻³¹) < 2⁻⁵⁶ is below all slacks
POLE_SLACK = 2.0**-31  # in half turns: > the error of x/π for |x| ≤ 2²⁰


# Ranges


def _has_integer(lo: Array, hi: Array, slack: float) -> Mask:
    """Whether an integer may lie in [lo − slack, hi + slack]."""
    return np.asarray(np.floor(hi + slack) >= np.ceil(lo - slack))


def _wave(f: Callable[[Array], Array], x: Interval, top: float, bottom: float) -> Interval:
    """The hull of sin or cos at the ends, and ±1 if a crest or trough (at `top`, `bottom` + k turns) may be inside."""
    lo, hi = np.clip(x.lo, -MAX_REDUCED, MAX_REDUCED), np.clip(x.hi, -MAX_REDUCED, MAX_REDUCED)
    first, last = f(lo), f(hi)
    wild = (x.lo < -MAX_REDUCED) | (x.hi > MAX_REDUCED)
    start, end = lo * (0.5 / np.pi), hi * (0.5 / np.pi)
    crest = wild | _has_integer(start - top, end - top, CREST_SLACK)
    trough = wild | _has_integer(start - bottom, end - bottom, CREST_SLACK)
    slack = SINE_SLACK + 2.0**-52  # one more unit for the rounding of this very sum
    high = np.where(crest, 1.0, np.minimum(np.maximum(first, last) + slack, 1.0))
    low = np.where(trough, -1.0, np.maximum(np.minimum(first, last) - slack, -1.0))
    return Interval(low, high)


@quietly
def sin_range(x: Interval) -> Interval:
    """sin t, with |t| − |t|³/6 ≤ |sin t| ≤ |t| on [−1.5, 1.5], where it grows, and its sign on (−π, π)."""
    y = _wave(np.sin, x, 0.25, -0.25)
    hi = np.where(x.lo >= -3, np.minimum(y.hi, np.maximum(x.hi, 0.0)), y.hi)
    lo = np.where(x.hi <= 3, np.maximum(y.lo, np.minimum(x.lo, 0.0)), y.lo)
    hi = np.where((x.lo >= -1.5) & (x.hi < 0), np.minimum(hi, -_small_sine(-x.hi)), hi)
    lo = np.where((x.lo > 0) & (x.hi <= 1.5), np.maximum(lo, _small_sine(x.lo)), lo)
    return Interval(lo, hi)


def _small_sine(t: Array) -> Array:
    """A lower bound of sin t for t ≥ 0, exact to a few units of a small result: t·(1 − t²/6)."""
    return down(t * down(1 - up(t * t) / 6, 2))


@quietly
def cos_range(x: Interval) -> Interval:
    """cos t, and cos 0 = 1."""
    y = _wave(np.cos, x, 0.0, 0.5)
    return Interval(np.where((x.lo == 0) & (x.hi == 0), 1.0, y.lo), y.hi)


@quietly
def _may_have_pole(x: Interval) -> Mask:
    """Whether tan may have a pole (π/2 + kπ) in the interval. Beyond 2²⁰ a pole is assumed."""
    wild = (x.lo < -MAX_REDUCED) | (x.hi > MAX_REDUCED)
    return np.asarray(wild | _has_integer(x.lo * (1 / np.pi) - 0.5, x.hi * (1 / np.pi) - 0.5, POLE_SLACK))


@quietly
def tan_range(x: Interval) -> Interval:
    """tan t between two poles."""
    pole = _may_have_pole(x)
    inside = Interval(np.where(pole, 0.0, x.lo), np.where(pole, 0.0, x.hi))
    y = Interval(down(np.tan(inside.lo), LIBM_ULPS), up(np.tan(inside.hi), LIBM_ULPS))
    zero = Interval(np.where(inside.lo == 0, 0.0, y.lo), np.where(inside.hi == 0, 0.0, y.hi))
    return zero.entire_where(pole)


def atan_range(x: Interval) -> Interval:
    """arctan t."""
    return increasing(np.arctan, x, 0.0)


def _in_domain(x: Interval) -> Interval:
    """The part of the interval in [−1, 1], or the nearer end."""
    return x.max(-ONE).min(ONE)


def asin_range(x: Interval) -> Interval:
    """arcsin t on [−1, 1]."""
    return increasing(np.arcsin, _in_domain(x), 0.0).entire_where((x.lo < -1) | (x.hi > 1))


@quietly
def acos_range(x: Interval) -> Interval:
    """arccos t ≥ 0 on [−1, 1], decreasing; arccos 1 = 0."""
    inside = _in_domain(x)
    lo = np.maximum(down(np.arccos(inside.hi), LIBM_ULPS), 0.0)
    hi = np.where(x.lo == 1, 0.0, up(np.arccos(inside.lo), LIBM_ULPS))
    return Interval(lo, hi).entire_where((x.lo < -1) | (x.hi > 1))


def _root_slope(x: Interval) -> Interval:
    """1/√(1 − t²) = 1/√((1 − |t|)(1 + |t|)), which does not cancel; it grows with |t|."""
    size = abs(_in_domain(x))
    least, greatest = (1.0 / elementary.sqrt((1.0 - t) * (1.0 + t)) for t in map(Interval.point, (size.lo, size.hi)))
    # At |t| = 1 the quotient 1/[0, 0] is [−∞, ∞].
    return Interval(np.maximum(least.lo, 1.0), greatest.hi)


# Jets


def _waves(p: Jet, order: int) -> tuple[Jet, Jet]:
    at_centre = p.value.interval
    return sine_and_cosine(p, sin_range(at_centre), cos_range(at_centre), order)


def _tan_jet(p: Jet, x: Interval, order: int) -> Jet:
    value = tan_range(p.value.interval)
    return riccati(p, value, value.square() + 1.0, tan_range(x).mag, 1.0, order)


def _atan_jet(p: Jet, x: Interval, order: int) -> Jet:
    """E arctan p = Ep/(1 + p²)."""
    divisor = add((number(1.0), multiply(p, p, order)))
    slope = quotient(derivative(p), divisor, x.square() + 1.0, order)
    return integrate(slope, atan_range(p.value.interval), order)


def _asin_jet(p: Jet, x: Interval, order: int) -> Jet:
    """E arcsin p = (1 − p²)^(−½)·Ep."""
    under = add((number(1.0), negate(multiply(p, p, order))))
    root = positive_power_jet(under, 1.0 - x.square(), Ball.point(-0.5), order)
    return integrate(multiply(root, derivative(p), order), asin_range(p.value.interval), order)


def _acos_jet(p: Jet, x: Interval, order: int) -> Jet:
    """arccos = π/2 − arcsin."""
    return add((number(PI * 0.5), negate(_asin_jet(p, x, order))))


# Gates


def graded_row(K: float, step: float, first: float, gap: float, error: float, count: int) -> TableRow:
    """Slopes that crowd towards their limit, since arctan nears ±π/2 like 1/x. The error falls only like e^{−C√p}."""
    s = first + step * np.arange(count)
    slopes = math.exp(-first) * (1 + gap) - np.exp(-s)
    return tuple(slopes.tolist()), tuple((-K * (s - first)).tolist()), error


def _hyperbolic_remainder(low: float) -> tuple[float, float] | None:
    """π/2 − arctan s ≤ 1/s."""
    return (float(up(1 / low)), 0.0) if low > 0 else None


SIN = smooth("sin", np.sin, sin_range, lambda p, x, order: _waves(p, order)[0], cos_range, "cos(t)")
COS = smooth("cos", np.cos, cos_range, lambda p, x, order: _waves(p, order)[1], lambda x: -sin_range(x), "-sin(t)")
TAN = replace(
    smooth("tan", np.tan, tan_range, _tan_jet, lambda x: tan_range(x).square() + 1.0, "1 + tan(t)**2"),
    domain=DomainRule(
        "the argument {0} of tan reaches a pole pi/2 + k*pi",
        "Choose a box on which cos({0}) is not 0",
        lambda a: _may_have_pole(a[0]),
        lambda a: np.zeros(a[0].shape, dtype=bool),
        guard=lambda a: cos_range(a[0]),
        proof=", and its cosine takes both signs",
    ),
)
ATAN = replace(
    smooth("atan", np.arctan, atan_range, _atan_jet, lambda x: 1.0 / (x.square() + 1.0), "1/(1 + t**2)"),
    asymptotes=levels(PI * -0.5, PI * 0.5, _hyperbolic_remainder),
    gate=FittedKeys(
        np.arctan,
        lambda x: 1 / x,
        1.0,
        {p: graded_row(*row, p // 2) for p, row in ATAN_TABLE.items()},
        limit=math.pi / 2,
        is_economical=False,
    ),
)
ASIN, ACOS = (
    replace(function, domain=within(-1.0, 1.0, "the argument"), singularities=(-1.0, 1.0))
    for function in (
        smooth("asin", np.arcsin, asin_range, _asin_jet, _root_slope, "1/sqrt(1 - t**2)"),
        smooth("acos", np.arccos, acos_range, _acos_jet, lambda x: -_root_slope(x), "-1/sqrt(1 - t**2)"),
    )
)
