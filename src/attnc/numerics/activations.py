"""Ranges of gelu and silu, and of the slopes of gelu, silu and sigmoid.

gelu(t) = t·Φ(t) and silu(t) = t·σ(t) fall to one minimum and rise from there; their slopes turn twice:
  gelu′ = Φ + tφ,     gelu″ = φ(2 − t²)                       turns at ±√2,
  silu′ = σ + tσ(1−σ), silu″ = σ(1−σ)(2 − t·tanh(t/2))        turns where t·tanh(t/2) = 2.
The turning points below were computed with Arb to 30 digits; the tests do it again.
"""

from __future__ import annotations

import numpy as np

from attnc.numerics.elementary import PI, erf, exp, piecewise_monotone, sigmoid, sqrt
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array

_quiet = np.errstate(all="ignore")
_SQRT_2 = sqrt(Interval.point(2.0))
_SQRT_2_PI = sqrt(2.0 * PI)
_FAR = 40.0  # e^(−t²/2) and t·e^(−t²/2) are decreasing and below 2⁻¹⁰⁰⁰ there

# (position, a lower and an upper bound of the value)
_GELU_TURN = (-0.7517915246935645, -0.1699712074799037, -0.16997120747990363)
_SILU_TURN = (-1.2784645427610738, -0.27846454276107385, -0.27846454276107374)
_GELU_SLOPE_TURNS = (
    (-1.4142135623730951, -0.12890414518515485, -0.1289041451851547),
    (1.4142135623730951, 1.1289041451851545, 1.1289041451851551),
)
_SILU_SLOPE_TURNS = (
    (-2.3993572805154677, -0.09983932012886697, -0.09983932012886688),
    (2.3993572805154677, 1.0998393201288665, 1.0998393201288673),
)


def _bell(t: Interval) -> Interval:
    """φ(t) = e^(−t²/2)/√(2π)."""
    return exp(t.square() * -0.5) / _SQRT_2_PI


def _normal_cdf(t: Interval) -> Interval:
    """Φ(t) = (1 + erf(t/√2))/2."""
    return (erf(t / _SQRT_2) + 1.0) * 0.5


def _finite(t: Array, far: float) -> Interval:
    return Interval.point(np.clip(t, -far, far))


@_quiet
def _gelu_at(t: Array) -> Interval:
    """tΦ(t), with 0 ≤ t − gelu(t) ≤ φ(t) for t ≥ 0 and −φ(t) ≤ gelu(t) ≤ 0 for t ≤ 0 (Mills' ratio)."""
    x = _finite(t, _FAR)
    y, bell = x * _normal_cdf(x), _bell(x)
    high = np.where(t <= 0, np.minimum(y.hi, 0.0), np.minimum(y.hi, x.hi))
    low = np.where(t <= 0, np.maximum(y.lo, -bell.hi), np.maximum(y.lo, (x - bell).lo))
    far = t > _FAR
    # Beyond 40: t − φ(40) ≤ gelu(t) ≤ t, and φ(40) is far below half an ulp of t.
    low = np.where(far, np.minimum(np.nextafter(t, 0.0), np.finfo(np.float64).max), low)
    return Interval(np.minimum(low, high), np.where(far, t, high))


def gelu(x: Interval) -> Interval:
    """tΦ(t)."""
    return piecewise_monotone(_gelu_at, x, (_GELU_TURN,))


def _silu_at(t: Array) -> Interval:
    """tσ(t); 0 ≥ silu(t) ≥ −2⁻¹⁰⁰⁰ for t ≤ −710."""
    x = Interval.point(np.clip(t, -710.0, np.finfo(np.float64).max))
    y = x * sigmoid(x)
    low = np.where(t < -710.0, np.minimum(y.lo, 0.0), y.lo)
    high = np.where(t < -710.0, 0.0, np.where(t == np.inf, np.inf, y.hi))
    return Interval(low, high)


def silu(x: Interval) -> Interval:
    """tσ(t)."""
    return piecewise_monotone(_silu_at, x, (_SILU_TURN,))


def sigmoid_slope(x: Interval) -> Interval:
    """σ(t)σ(−t) falls from ¼ at 0 as |t| grows."""
    size = abs(x)
    near, far = _finite(size.lo, 750.0), _finite(size.hi, 750.0)
    least, greatest = sigmoid(far) * sigmoid(-far), sigmoid(near) * sigmoid(-near)
    return Interval(np.where(size.hi > 750.0, 0.0, least.lo), np.minimum(greatest.hi, 0.25))


def _beyond(t: Array, far: float, y: Interval) -> Interval:
    """y where |t| ≤ far; beyond it a slope is within 2⁻⁹⁰⁰ of its limit, 0 or 1."""
    margin, limit = np.where(t > 0, 2.0**-52, 2.0**-900), np.where(t > 0, 1.0, 0.0)
    outside = np.abs(t) > far
    return Interval(np.where(outside, limit - margin, y.lo), np.where(outside, limit + margin, y.hi))


def _gelu_slope_at(t: Array) -> Interval:
    x = _finite(t, _FAR)
    return _beyond(t, _FAR, _normal_cdf(x) + x * _bell(x))


def gelu_slope(x: Interval) -> Interval:
    """Φ(t) + tφ(t)."""
    return piecewise_monotone(_gelu_slope_at, x, _GELU_SLOPE_TURNS)


def _silu_slope_at(t: Array) -> Interval:
    x = _finite(t, 700.0)
    return _beyond(t, 700.0, sigmoid(x) * (x * sigmoid(-x) + 1.0))


def silu_slope(x: Interval) -> Interval:
    """σ(t) + tσ(t)σ(−t)."""
    return piecewise_monotone(_silu_slope_at, x, _SILU_SLOPE_TURNS)
