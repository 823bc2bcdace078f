"""Powers of intervals: integer exponents on all reals, real exponents on positive bases."""

from __future__ import annotations

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LIBM_ULPS, Array, down, is_short, up

_quiet = np.errstate(all="ignore")
_BY_SQUARING = 16  # beyond it the errors of repeated multiplication exceed those of the machine's power


@_quiet
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
    if n > _BY_SQUARING:
        return np.where((x == 0) | (x == 1), x, np.maximum(down(np.power(x, float(n)), LIBM_ULPS), 0.0))
    return _by_squaring(x, n, -np.inf)


def _power_up(x: Array, n: int) -> Array:
    """An upper bound of xⁿ for x ≥ 0."""
    if n > _BY_SQUARING:
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


@_quiet
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
