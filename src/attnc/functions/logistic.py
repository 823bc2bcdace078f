"""tanh, sigmoid, silu and softplus: the functions made of eˣ/(1 + eˣ).

silu(t) = t·σ(t) falls to one minimum and rises from there. Its slope σ + tσ(1−σ) has two extremes, where the derivative
σ(1−σ)(2 − t·tanh(t/2)) vanishes: t·tanh(t/2) = 2. The extremes below were computed with Arb to 30 digits. The tests
compute them again.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from attnc.functions.exponential import cosh_range
from attnc.functions.function import (
    ONE,
    ZERO,
    ElementaryFunction,
    exponential_remainder,
    levels,
    linear_exponential_remainder,
    ramp,
    smooth,
)
from attnc.functions.gate_recipes import ExactKeys, FittedKeys
from attnc.functions.gate_table import SOFTPLUS as SOFTPLUS_TABLE
from attnc.functions.gate_table import SOFTPLUS_LATTICE
from attnc.numerics.elementary import increasing, piecewise_monotone
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_equations import derivative, integrate, number, riccati
from attnc.numerics.jets import Jet, add, multiply, scale
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LARGEST, LIBM_ULPS, Array

LOGISTIC_ULPS = LIBM_ULPS + 2  # one exponential, one sum and one quotient
SILU_VANISHES = 710.0  # −2⁻¹⁰⁰⁰ ≤ silu(t) ≤ 0 for t below −710
SLOPE_VANISHES = 750.0  # σ(t)σ(−t) is below 2⁻¹⁰⁷⁴ for |t| above 750
SLOPE_SETTLES = 700.0  # silu′ is within 2⁻⁹⁰⁰ of its limits beyond ±700

# (position, a lower and an upper bound of the value)
SILU_TURN = (-1.2784645427610738, -0.27846454276107385, -0.27846454276107374)
SILU_SLOPE_TURNS = (
    (-2.3993572805154677, -0.09983932012886697, -0.09983932012886688),
    (2.3993572805154677, 1.0998393201288665, 1.0998393201288673),
)


# Values and ranges


@quietly
def logistic(x: Array) -> Array:
    """Return 1/(1 + e⁻ˣ) in float64. scipy's expit is 0 below −709, where this still has all its digits."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1.0 + e))


def tanh_range(x: Interval) -> Interval:
    """tanh t in [−1, 1]."""
    return increasing(np.tanh, x, 0.0).max(-ONE).min(ONE)


def tanh_slope(x: Interval) -> Interval:
    """1/cosh² t."""
    return (1.0 / cosh_range(x)).square()


def sigmoid_range(x: Interval) -> Interval:
    """1/(1 + e⁻ᵗ) in [0, 1]; ½ at 0."""
    return increasing(logistic, x, 0.5, LOGISTIC_ULPS).max(ZERO).min(ONE)


def sigmoid_slope(x: Interval) -> Interval:
    """σ(t)σ(−t) falls from ¼ at 0 as |t| grows."""
    size = abs(x)
    near, far = (Interval.point(np.minimum(end, SLOPE_VANISHES)) for end in (size.lo, size.hi))
    least, greatest = sigmoid_range(far) * sigmoid_range(-far), sigmoid_range(near) * sigmoid_range(-near)
    return Interval(np.where(size.hi > SLOPE_VANISHES, 0.0, least.lo), np.minimum(greatest.hi, 0.25))


def softplus_range(x: Interval) -> Interval:
    """log(1 + eᵗ) ≥ max(t, 0)."""
    y = increasing(lambda t: np.logaddexp(0.0, t), x)
    return Interval(np.maximum(y.lo, np.maximum(x.lo, 0.0)), y.hi)


def _silu_at(t: Array) -> Interval:
    """tσ(t)."""
    x = Interval.point(np.clip(t, -SILU_VANISHES, LARGEST))
    y = x * sigmoid_range(x)
    low = np.where(t < -SILU_VANISHES, np.minimum(y.lo, 0.0), y.lo)
    high = np.where(t < -SILU_VANISHES, 0.0, np.where(t == np.inf, np.inf, y.hi))
    return Interval(low, high)


def ramp_slope_beyond(t: Array, far: float, y: Interval) -> Interval:
    """Return y where |t| ≤ far. Beyond it, the slope of a smooth ramp is within 2⁻⁹⁰⁰ of its limit, 0 or 1."""
    margin, limit = np.where(t > 0, 2.0**-52, 2.0**-900), np.where(t > 0, 1.0, 0.0)
    outside = np.abs(t) > far
    return Interval(np.where(outside, limit - margin, y.lo), np.where(outside, limit + margin, y.hi))


def _silu_slope_at(t: Array) -> Interval:
    """σ(t) + tσ(t)σ(−t)."""
    x = Interval.point(np.clip(t, -SLOPE_SETTLES, SLOPE_SETTLES))
    return ramp_slope_beyond(t, SLOPE_SETTLES, sigmoid_range(x) * (x * sigmoid_range(-x) + 1.0))


# Jets


def _tanh_jet(p: Jet, x: Interval, order: int) -> Jet:
    at_centre = p.value.interval
    return riccati(p, tanh_range(at_centre), tanh_slope(at_centre), tanh_range(x).mag, -1.0, order)


def _sigmoid_jet(p: Jet, x: Interval, order: int) -> Jet:
    """σ(t) = ½ + ½·tanh(t/2)."""
    half = number(0.5)
    return add((half, scale(_tanh_jet(scale(p, half), x * 0.5, order), half)))


def _softplus_jet(p: Jet, x: Interval, order: int) -> Jet:
    """softplus′ = σ."""
    slope = multiply(_sigmoid_jet(p, x, order), derivative(p), order)
    return integrate(slope, softplus_range(p.value.interval), order)


TANH = replace(
    smooth("tanh", np.tanh, tanh_range, _tanh_jet, tanh_slope, "1 - tanh(t)**2"),
    asymptotes=levels(-ONE, ONE, exponential_remainder(2.0, 2.0)),  # 1 − tanh s ≤ 2e^{−2s}
    gate=ExactKeys((-1.0, 1.0), (0.0, 0.0), (-1.0, 1.0), (0.0, 0.0), lipschitz=1.0),  # scores ∓x, values ∓1
)
SIGMOID = replace(
    smooth("sigmoid", logistic, sigmoid_range, _sigmoid_jet, sigmoid_slope, "sigmoid(t)*sigmoid(-t)"),
    asymptotes=levels(ZERO, ONE, exponential_remainder(1.0, 1.0)),  # 1 − σ(s) ≤ e^{−s}
    gate=ExactKeys((0.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0), lipschitz=0.25),  # scores 0, x and values 0, 1
    other_names=("logistic",),
)
SILU = ElementaryFunction(
    "silu",
    lambda x: x * logistic(x),
    lambda x: piecewise_monotone(_silu_at, x, (SILU_TURN,)),
    lambda jets, ranges, order: multiply(jets[0], SIGMOID.jet(jets, ranges, order), order),
    slope=lambda x, y: piecewise_monotone(_silu_slope_at, x, SILU_SLOPE_TURNS),
    asymptotes=ramp(linear_exponential_remainder),  # s − silu(s) ≤ s·e^{−s}
    # scores 0, x and values 0, x
    gate=ExactKeys((0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), lipschitz=SILU_SLOPE_TURNS[1][2]),
    other_names=("swish",),
    derivative="sigmoid(t) + t*sigmoid(t)*sigmoid(-t)",
)
SOFTPLUS = replace(
    smooth("softplus", lambda x: np.logaddexp(0.0, x), softplus_range, _softplus_jet, sigmoid_range, "sigmoid(t)"),
    asymptotes=ramp(exponential_remainder(1.0, 1.0)),  # softplus(s) − s ≤ e^{−s}
    gate=FittedKeys(
        lambda x: np.log1p(np.exp(x)),
        lambda x: math.exp(-x),
        1.0,
        SOFTPLUS_TABLE,
        is_pure=False,
        lattice=SOFTPLUS_LATTICE,
    ),
)
