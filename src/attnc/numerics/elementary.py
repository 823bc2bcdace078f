"""Ranges of the elementary functions over intervals.

A monotone function takes its extremes at the endpoints; the others are cut where their derivative vanishes. Computed
values are widened by what `rounding.LIBM_ASSUMPTION` allows, and clamped to what is known of the function. Where an
interval leaves the domain of definition the answer is [−∞, ∞].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LIBM_ULPS, SINE_SLACK, Array, Mask, down, is_short, up

_quiet = np.errstate(all="ignore")
_HUGE = 2.0**20  # beyond it the reduction of an argument by π is not trusted
_TURN_SLACK = 2.0**-31  # in turns: > the error of x/2π for |x| ≤ 2²⁰, and 1 − cos(2π·2⁻³¹) < 2⁻⁵⁶ is below all slacks
_POLE_SLACK = 2.0**-31
_LOGISTIC_ULPS = LIBM_ULPS + 2  # one exponential, one sum and one quotient

PI = Interval(np.array(np.pi), np.nextafter(np.pi, 4.0))
E = Interval(np.array(np.e), np.nextafter(np.e, 3.0))


def _increasing(f: Callable[[Array], Array], x: Interval, zero: float | None = None, ulps: int = LIBM_ULPS) -> Interval:
    """[f(lo), f(hi)]; `zero` is the exact f(0), if it is a float."""
    lo, hi = down(f(x.lo), ulps), up(f(x.hi), ulps)
    if zero is not None:
        lo = np.where(x.lo >= 0, np.maximum(lo, zero), lo)
        hi = np.where(x.hi <= 0, np.minimum(hi, zero), hi)
    return Interval(lo, hi)


@_quiet
def sqrt(x: Interval) -> Interval:
    """√t, correctly rounded by IEEE 754; a short root whose square is t is exact."""
    low, high = np.sqrt(np.maximum(x.lo, 0.0)), np.sqrt(np.maximum(x.hi, 0.0))
    lo = np.where(is_short(low) & (low * low == x.lo), low, np.maximum(down(low), 0.0))
    hi = np.where(is_short(high) & (high * high == x.hi), high, up(high))
    return Interval(lo, hi).entire_where(x.lo < 0)


@_quiet
def exp(x: Interval) -> Interval:
    """eᵗ ≥ 0, and e⁰ = 1."""
    y = _increasing(np.exp, x, 1.0)
    return Interval(np.maximum(y.lo, 0.0), y.hi)


@_quiet
def log(x: Interval) -> Interval:
    """log t, −∞ at the end t = 0."""
    low, high = np.log(np.maximum(x.lo, 0.0)), np.log(np.maximum(x.hi, 0.0))
    lo = np.where(x.lo == 1, 0.0, down(low, LIBM_ULPS))
    hi = np.where(x.hi == 1, 0.0, up(high, LIBM_ULPS))
    return Interval(lo, hi).entire_where(x.lo <= 0)


def _has_integer(lo: Array, hi: Array, slack: float) -> Mask:
    """Whether an integer may lie in [lo − slack, hi + slack]."""
    return np.asarray(np.floor(hi + slack) >= np.ceil(lo - slack))


def _wave(f: Callable[[Array], Array], x: Interval, top: float, bottom: float) -> Interval:
    """sin or cos: the values at the ends, and ±1 if a crest or trough (at `top`, `bottom` + k turns) may be inside."""
    lo, hi = np.clip(x.lo, -_HUGE, _HUGE), np.clip(x.hi, -_HUGE, _HUGE)
    first, last = f(lo), f(hi)
    wild = (x.lo < -_HUGE) | (x.hi > _HUGE)
    start, end = lo * (0.5 / np.pi), hi * (0.5 / np.pi)
    crest = wild | _has_integer(start - top, end - top, _TURN_SLACK)
    trough = wild | _has_integer(start - bottom, end - bottom, _TURN_SLACK)
    slack = SINE_SLACK + 2.0**-52  # one more unit for the rounding of this very sum
    high = np.where(crest, 1.0, np.minimum(np.maximum(first, last) + slack, 1.0))
    low = np.where(trough, -1.0, np.maximum(np.minimum(first, last) - slack, -1.0))
    return Interval(low, high)


@_quiet
def sin(x: Interval) -> Interval:
    """sin t, with |sin t| ≤ |t| and its sign on (−π, π)."""
    y = _wave(np.sin, x, 0.25, -0.25)
    hi = np.where(x.lo >= -3, np.minimum(y.hi, np.maximum(x.hi, 0.0)), y.hi)
    lo = np.where(x.hi <= 3, np.maximum(y.lo, np.minimum(x.lo, 0.0)), y.lo)
    return Interval(lo, hi)


@_quiet
def cos(x: Interval) -> Interval:
    """cos t, and cos 0 = 1."""
    y = _wave(np.cos, x, 0.0, 0.5)
    return Interval(np.where((x.lo == 0) & (x.hi == 0), 1.0, y.lo), y.hi)


@_quiet
def may_have_pole(x: Interval) -> Mask:
    """Whether tan may have a pole (π/2 + kπ) in the interval; beyond 2²⁰ it is taken to have one."""
    wild = (x.lo < -_HUGE) | (x.hi > _HUGE)
    return np.asarray(wild | _has_integer(x.lo * (1 / np.pi) - 0.5, x.hi * (1 / np.pi) - 0.5, _POLE_SLACK))


@_quiet
def tan(x: Interval) -> Interval:
    """tan t between two poles."""
    pole = may_have_pole(x)
    inside = Interval(np.where(pole, 0.0, x.lo), np.where(pole, 0.0, x.hi))
    y = Interval(down(np.tan(inside.lo), LIBM_ULPS), up(np.tan(inside.hi), LIBM_ULPS))
    zero = Interval(np.where(inside.lo == 0, 0.0, y.lo), np.where(inside.hi == 0, 0.0, y.hi))
    return zero.entire_where(pole)


@_quiet
def tanh(x: Interval) -> Interval:
    """tanh t in [−1, 1]."""
    y = _increasing(np.tanh, x, 0.0)
    return Interval(np.clip(y.lo, -1.0, 1.0), np.clip(y.hi, -1.0, 1.0))


@_quiet
def sinh(x: Interval) -> Interval:
    """sinh t."""
    return _increasing(np.sinh, x, 0.0)


@_quiet
def cosh(x: Interval) -> Interval:
    """cosh t ≥ 1: increasing in |t|."""
    y = _increasing(np.cosh, abs(x), 1.0)
    return Interval(np.maximum(y.lo, 1.0), y.hi)


@_quiet
def atan(x: Interval) -> Interval:
    """arctan t."""
    return _increasing(np.arctan, x, 0.0)


@_quiet
def asin(x: Interval) -> Interval:
    """arcsin t on [−1, 1]."""
    y = _increasing(np.arcsin, Interval(np.clip(x.lo, -1, 1), np.clip(x.hi, -1, 1)), 0.0)
    return y.entire_where((x.lo < -1) | (x.hi > 1))


@_quiet
def acos(x: Interval) -> Interval:
    """arccos t ≥ 0 on [−1, 1], decreasing; arccos 1 = 0."""
    low, high = np.arccos(np.clip(x.hi, -1, 1)), np.arccos(np.clip(x.lo, -1, 1))
    lo = np.maximum(down(low, LIBM_ULPS), 0.0)
    hi = np.where(x.lo == 1, 0.0, up(high, LIBM_ULPS))
    return Interval(lo, hi).entire_where((x.lo < -1) | (x.hi > 1))


@_quiet
def erf(x: Interval) -> Interval:
    """erf t in [−1, 1]."""
    from scipy.special import erf as scipy_erf

    y = _increasing(scipy_erf, x, 0.0)
    return Interval(np.clip(y.lo, -1.0, 1.0), np.clip(y.hi, -1.0, 1.0))


@_quiet
def logistic(x: Array) -> Array:
    """1/(1 + e⁻ˣ) in float64; scipy's expit is 0 below −709, where this still has all its digits."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1.0 + e))


@_quiet
def sigmoid(x: Interval) -> Interval:
    """1/(1 + e⁻ᵗ) in [0, 1]; ½ at 0."""
    y = _increasing(logistic, x, 0.5, _LOGISTIC_ULPS)
    return Interval(np.clip(y.lo, 0.0, 1.0), np.clip(y.hi, 0.0, 1.0))


@_quiet
def softplus(x: Interval) -> Interval:
    """log(1 + eᵗ) ≥ max(t, 0)."""
    y = _increasing(lambda t: np.logaddexp(0.0, t), x)
    return Interval(np.maximum(y.lo, np.maximum(x.lo, 0.0)), y.hi)


def relu(x: Interval) -> Interval:
    """max(t, 0), exactly."""
    return Interval(np.maximum(x.lo, 0.0), np.maximum(x.hi, 0.0))


def sign(x: Interval) -> Interval:
    """−1, 0 or 1, exactly."""
    return Interval(np.sign(x.lo), np.sign(x.hi))


def floor(x: Interval) -> Interval:
    """The largest integer ≤ t, exactly."""
    return Interval(np.floor(x.lo), np.floor(x.hi))


def clip(x: Interval, low: Interval, high: Interval) -> Interval:
    """min(max(t, low), high), exactly."""
    return x.max(low).min(high)


def piecewise_monotone(
    at: Callable[[Array], Interval], x: Interval, turns: Sequence[tuple[float, float, float]]
) -> Interval:
    """The range of a function that is monotone between its turning points.

    `at(t)` encloses the function at floats (the limits at ±∞ included). A turn is (position, least, greatest) of a
    turning point: its position is known to 2⁻⁴⁰, [least, greatest] encloses its value.
    """
    y = at(x.lo).hull(at(x.hi))
    lo, hi = y.lo, y.hi
    for position, least, greatest in turns:
        inside = (x.lo <= position + 2.0**-40) & (x.hi >= position - 2.0**-40)
        lo = np.where(inside, np.minimum(lo, least), lo)
        hi = np.where(inside, np.maximum(hi, greatest), hi)
    return Interval(lo, hi)
