from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from attnc.errors import InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.rounding import LIBM_ASSUMPTION, UNIT_ROUNDOFF, add_down, add_up, down, gamma, square_up, up
from strategies.reference import VALUES, precision

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite, st.integers(1, 20))
def test_up_and_down_move_by_the_ulps(x: float, ulps: int) -> None:
    above, below = float(up(x, ulps)), float(down(x, ulps))
    step = Fraction(np.spacing(min(abs(x), 1.7e308)).item())
    if ulps == 1:
        assert (above, below) == (math.nextafter(x, math.inf), math.nextafter(x, -math.inf))
        return
    assert above == np.inf or Fraction(above) >= Fraction(x) + ulps * step
    assert below == -np.inf or Fraction(below) <= Fraction(x) - ulps * step
    assert above == np.inf or Fraction(above) <= Fraction(x) + (2 * ulps + 2) * step


def test_rounding_of_infinities_leaves_the_far_side_finite() -> None:
    assert up(np.inf) == np.inf
    assert down(-np.inf, 8) == -np.inf
    assert np.isfinite(down(np.inf))
    assert down(np.inf, 8) < down(np.inf) < np.inf
    assert -np.inf < up(-np.inf) < up(-np.inf, 8)


@given(finite, finite)
def test_directed_sums_are_the_nearest_bounds(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        low, high = float(add_down(np.array(a), np.array(b))), float(add_up(np.array(a), np.array(b)))
    exact = Fraction(a) + Fraction(b)
    assert low == -np.inf or Fraction(low) <= exact
    assert high == np.inf or Fraction(high) >= exact
    assert high <= math.nextafter(low, math.inf)
    if -np.inf < low and high < np.inf and low != high:
        assert Fraction(low) < exact < Fraction(high)


@given(st.floats(0, allow_infinity=False))
def test_squares(x: float) -> None:
    with np.errstate(all="ignore"):
        high = float(square_up(np.array(x)))
    assert high == np.inf or Fraction(high) >= Fraction(x) ** 2


def test_gamma_is_an_upper_bound_and_refuses_too_many_roundings() -> None:
    for u in UNIT_ROUNDOFF.values():
        for n in (0, 1, 7, 1000, 10**6):
            exact = n * Fraction(u) / (1 - n * Fraction(u))
            assert exact <= Fraction(gamma(n, u)) <= exact * (1 + Fraction(1, 2**51))
    with pytest.raises(InputError, match="n\\*u"):
        gamma(2**24, UNIT_ROUNDOFF["float32"])


_SAMPLES = {
    "exp": (-745, 709),
    "log": (1e-300, 1e300),
    "sin": (-1e6, 1e6),
    "cos": (-1e6, 1e6),
    "tan": (-1e6, 1e6),
    "tanh": (-20, 20),
    "sinh": (-700, 700),
    "cosh": (-700, 700),
    "atan": (-1e3, 1e3),
    "asin": (-1, 1),
    "acos": (-1, 1),
    "erf": (-6, 6),
    "sigmoid": (-740, 40),  # 10 ulp: see elementary.logistic
    "softplus": (-740, 40),
}


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _SAMPLES)
def test_the_libm_assumption_holds_here(name: str, count: int) -> None:
    assert "8 ulp" in LIBM_ASSUMPTION
    rng = np.random.default_rng(7)
    low, high = _SAMPLES[name]
    x = rng.uniform(low, high, count)
    small = 10.0 ** rng.uniform(-300, 0, count) * np.sign(rng.uniform(-1 if low < 0 else 0, 1, count))
    x = np.concatenate([x, small[(small >= low) & (small <= high)], rng.uniform(max(low, -2), min(high, 2), count)])
    with np.errstate(all="ignore"):
        computed = FUNCTIONS[name].value(x)
    with precision(200):
        for t, y in zip(x.tolist(), computed.tolist(), strict=True):
            unit = 2.0**-52 if name in ("sin", "cos") else float(np.spacing(abs(y)))
            slack = arb((10 if name == "sigmoid" else 8) * unit)
            assert not abs(VALUES[name](arb(t)) - arb(y)) > slack, (name, t, y)
