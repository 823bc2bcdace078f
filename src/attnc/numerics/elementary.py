"""Ranges over intervals: tools for elementary functions, and the three functions that arithmetic itself needs.

A monotone function takes its extremes at the endpoints. Other functions are cut where their derivative vanishes.
Computed values are widened by the error that `rounding.LIBM_ASSUMPTION` allows, and clamped to known bounds of the
function. If an interval leaves the domain of definition, the range is [−∞, ∞]. The other functions are in
`attnc.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LIBM_ULPS, Array, down, is_short, up

TURN_SLACK = 2.0**-40  # turning points are stored as float64 numbers, whose error is far below this

PI = Interval(np.array(np.pi), np.nextafter(np.pi, 4.0))
E = Interval(np.array(np.e), np.nextafter(np.e, 3.0))


@quietly
def increasing(f: Callable[[Array], Array], x: Interval, zero: float | None = None, ulps: int = LIBM_ULPS) -> Interval:
    """Return [f(lo), f(hi)]. `zero` is the exact f(0), if it is a float."""
    lo, hi = down(f(x.lo), ulps), up(f(x.hi), ulps)
    if zero is not None:
        lo = np.where(x.lo >= 0, np.maximum(lo, zero), lo)
        hi = np.where(x.hi <= 0, np.minimum(hi, zero), hi)
    return Interval(lo, hi)


def piecewise_monotone(
    at: Callable[[Array], Interval], x: Interval, turns: Sequence[tuple[float, float, float]]
) -> Interval:
    """Return the range of a function that is monotone between its turning points.

    `at(t)` encloses the function at floats (the limits at ±∞ included). A turn is (position, least, greatest) of a
    turning point: its position is known to `TURN_SLACK`, and [least, greatest] encloses its value.
    """
    y = at(x.lo).hull(at(x.hi))
    lo, hi = y.lo, y.hi
    for position, least, greatest in turns:
        inside = (x.lo <= position + TURN_SLACK) & (x.hi >= position - TURN_SLACK)
        lo = np.where(inside, np.minimum(lo, least), lo)
        hi = np.where(inside, np.maximum(hi, greatest), hi)
    return Interval(lo, hi)


@quietly
def sqrt(x: Interval) -> Interval:
    """Return the range of √t. IEEE 754 rounds it correctly, and a short root whose square is t is exact."""
    low, high = np.sqrt(np.maximum(x.lo, 0.0)), np.sqrt(np.maximum(x.hi, 0.0))
    lo = np.where(is_short(low) & (low * low == x.lo), low, np.maximum(down(low), 0.0))
    hi = np.where(is_short(high) & (high * high == x.hi), high, up(high))
    return Interval(lo, hi).entire_where(x.lo < 0)


@quietly
def exp(x: Interval) -> Interval:
    """Return the range of eᵗ, with eᵗ ≥ 0 and e⁰ = 1."""
    y = increasing(np.exp, x, 1.0)
    return Interval(np.maximum(y.lo, 0.0), y.hi)


@quietly
def log(x: Interval) -> Interval:
    """Return the range of log t, which is −∞ at the end t = 0."""
    low, high = np.log(np.maximum(x.lo, 0.0)), np.log(np.maximum(x.hi, 0.0))
    lo = np.where(x.lo == 1, 0.0, down(low, LIBM_ULPS))
    hi = np.where(x.hi == 1, 0.0, up(high, LIBM_ULPS))
    return Interval(lo, hi).entire_where(x.lo <= 0)
