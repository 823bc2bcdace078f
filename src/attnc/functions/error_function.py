"""erf and gelu, which is t·Φ(t) with Φ(t) = (1 + erf(t/√2))/2.

gelu falls to one minimum and rises from there. Its slope Φ + tφ has its extremes at ±√2, where the derivative φ(2 − t²)
vanishes. The extremes below were computed with Arb to 30 digits. The tests compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnc.functions.exponential import EXP
from attnc.functions.function import ONE, ElementaryFunction, gaussian_remainder, levels, ramp, scipy_special, smooth
from attnc.functions.gate_recipes import FittedKeys
from attnc.functions.gate_table import ERF as ERF_TABLE
from attnc.functions.gate_table import ERF_LATTICE, GELU_LATTICE
from attnc.functions.gate_table import GELU as GELU_TABLE
from attnc.functions.logistic import ramp_slope_beyond
from attnc.numerics import elementary
from attnc.numerics.elementary import PI, increasing, piecewise_monotone
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_equations import derivative, integrate, number
from attnc.numerics.jets import Jet, add, multiply, negate, scale
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LARGEST, Array

SQRT_2 = elementary.sqrt(Interval.point(2.0))
SQRT_HALF = elementary.sqrt(Interval.point(0.5))
SQRT_2_PI = elementary.sqrt(2.0 * PI)
TWO_OVER_SQRT_PI = 2.0 / elementary.sqrt(PI)
BELL_HEIGHT = 0.39894228040143274  # ≥ 1/√(2π) = 0.398942280401432677…
BELL_VANISHES = 40.0  # e^(−t²/2) and t·e^(−t²/2) are decreasing and below 2⁻¹⁰⁰⁰ there

# (position, a lower and an upper bound of the value)
GELU_TURN = (-0.7517915246935645, -0.1699712074799037, -0.16997120747990363)
GELU_SLOPE_TURNS = (
    (-1.4142135623730951, -0.12890414518515485, -0.1289041451851547),
    (1.4142135623730951, 1.1289041451851545, 1.1289041451851551),
)


# Values and ranges


def erf_range(x: Interval) -> Interval:
    """erf t in [−1, 1]."""
    return increasing(scipy_special("erf"), x, 0.0).max(-ONE).min(ONE)


def erf_slope(x: Interval) -> Interval:
    """2/√π·e^(−t²)."""
    return TWO_OVER_SQRT_PI * elementary.exp(-x.square())


def _bell(t: Interval) -> Interval:
    """φ(t) = e^(−t²/2)/√(2π)."""
    return elementary.exp(t.square() * -0.5) / SQRT_2_PI


def _normal_cdf(t: Interval) -> Interval:
    """Φ(t) = (1 + erf(t/√2))/2."""
    return (erf_range(t / SQRT_2) + 1.0) * 0.5


def _where_bell_counts(t: Array) -> Interval:
    return Interval.point(np.clip(t, -BELL_VANISHES, BELL_VANISHES))


@quietly
def _gelu_at(t: Array) -> Interval:
    """tΦ(t), with 0 ≤ t − gelu(t) ≤ φ(t) for t ≥ 0 and −φ(t) ≤ gelu(t) ≤ 0 for t ≤ 0 (Mills' ratio)."""
    x = _where_bell_counts(t)
    y, bell = x * _normal_cdf(x), _bell(x)
    high = np.where(t <= 0, np.minimum(y.hi, 0.0), np.minimum(y.hi, x.hi))
    low = np.where(t <= 0, np.maximum(y.lo, -bell.hi), np.maximum(y.lo, (x - bell).lo))
    far = t > BELL_VANISHES
    # Beyond 40: t − φ(40) ≤ gelu(t) ≤ t, and φ(40) is far below half an ulp of t.
    low = np.where(far, np.minimum(np.nextafter(t, 0.0), LARGEST), low)
    return Interval(np.minimum(low, high), np.where(far, t, high))


def _gelu_slope_at(t: Array) -> Interval:
    """Φ(t) + tφ(t)."""
    x = _where_bell_counts(t)
    return ramp_slope_beyond(t, BELL_VANISHES, _normal_cdf(x) + x * _bell(x))


def _erfc(x: Array) -> Array:
    return np.array([math.erfc(t) for t in x.tolist()])


# Jets


def _erf_jet(p: Jet, x: Interval, order: int) -> Jet:
    """E erf p = 2/√π·e^(−p²)·Ep."""
    bell = EXP.jet([negate(multiply(p, p, order))], [-x.square()], order)
    slope = multiply(scale(bell, number(TWO_OVER_SQRT_PI)), derivative(p), order)
    return integrate(slope, erf_range(p.value.interval), order)


def _gelu_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """t·Φ(t), Φ(t) = ½ + ½·erf(t/√2)."""
    half = number(0.5)
    erf_part = ERF.jet([scale(jets[0], number(SQRT_HALF))], [ranges[0] * SQRT_HALF], order)
    return multiply(jets[0], add((half, scale(erf_part, half))), order)


ERF = replace(
    smooth("erf", scipy_special("erf"), erf_range, _erf_jet, erf_slope, "2/sqrt(pi)*exp(-t**2)"),
    asymptotes=levels(-ONE, ONE, gaussian_remainder(1.0, 1.0)),  # erfc(s) ≤ e^{−s²}
    gate=FittedKeys(
        lambda x: _erfc(-x) - 1.0,
        lambda x: math.exp(-x * x),
        1.1283791670955128,
        ERF_TABLE,
        limit=1.0,
        lattice=ERF_LATTICE,
    ),
)
GELU = ElementaryFunction(
    "gelu",
    lambda x: x * scipy_special("ndtr")(x),
    lambda x: piecewise_monotone(_gelu_at, x, (GELU_TURN,)),
    _gelu_jet,
    slope=lambda x, y: piecewise_monotone(_gelu_slope_at, x, GELU_SLOPE_TURNS),
    asymptotes=ramp(gaussian_remainder(BELL_HEIGHT, 0.5)),  # s − gelu(s) ≤ φ(s), by Mills' ratio
    gate=FittedKeys(
        lambda x: 0.5 * x * _erfc(-math.sqrt(0.5) * x),
        lambda x: math.exp(-x * x / 2),
        GELU_SLOPE_TURNS[1][2],
        GELU_TABLE,
        lattice=GELU_LATTICE,
    ),
    derivative="(1 + erf(t/sqrt(2)))/2 + t*exp(-t**2/2)/sqrt(2*pi)",
)
