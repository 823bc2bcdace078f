from __future__ import annotations

import math
from fractions import Fraction
from operator import add, mul, sub, truediv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.errors import InputError
from attnc.numerics.intervals import Interval

special = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.0, -1.0, 2.0, 0.1, 1e308, -1e308, 1e-308, 2.0**-1022])
finite = st.one_of(special, st.floats(allow_nan=False, allow_infinity=False), st.floats(-10, 10))


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    a, b = sorted([draw(finite), draw(finite)])
    return Interval(np.array(a), np.array(b))


@st.composite
def members(draw: st.DrawFn, x: Interval) -> float:
    return draw(st.sampled_from([float(x.lo), float(x.hi), float(x.mid)]))


def _assert_inside(exact: Fraction, z: Interval) -> None:
    assert z.lo == -np.inf or Fraction(float(z.lo)) <= exact
    assert z.hi == np.inf or exact <= Fraction(float(z.hi))


@given(st.data(), st.sampled_from([add, sub, mul, truediv]))
def test_arithmetic_contains_the_exact_result(data: st.DataObject, operation: object) -> None:
    x, y = data.draw(intervals()), data.draw(intervals())
    z = operation(x, y)  # type: ignore[operator]
    s, t = Fraction(data.draw(members(x))), Fraction(data.draw(members(y)))
    if operation is truediv and t == 0:
        return
    _assert_inside(operation(s, t), z)  # type: ignore[operator]


@given(st.data(), st.sampled_from([add, sub, mul, truediv]))
def test_arithmetic_is_tight(data: st.DataObject, operation: object) -> None:
    x, y = data.draw(intervals()), data.draw(intervals())
    if operation is truediv and y.contains(0.0):
        return
    z = operation(x, y)  # type: ignore[operator]
    ends = [operation(Fraction(float(s)), Fraction(float(t))) for s in (x.lo, x.hi) for t in (y.lo, y.hi)]  # type: ignore[operator]
    # Two floats on from an end would pass the exact one, if it can be reached at all.
    inner = math.nextafter(math.nextafter(float(z.lo), math.inf), math.inf)
    assert inner == math.inf or Fraction(max(inner, -1.7e308)) >= min(min(ends), Fraction(1.7e308))
    inner = math.nextafter(math.nextafter(float(z.hi), -math.inf), -math.inf)
    assert inner == -math.inf or Fraction(min(inner, 1.7e308)) <= max(max(ends), Fraction(-1.7e308))


@given(st.data())
def test_unary_rules(data: st.DataObject) -> None:
    x = data.draw(intervals())
    t = Fraction(data.draw(members(x)))
    _assert_inside(-t, -x)
    _assert_inside(abs(t), abs(x))
    _assert_inside(t * t, x.square())
    assert x.square().lo >= 0
    assert Fraction(float(x.mag)) == max(abs(Fraction(float(x.lo))), abs(Fraction(float(x.hi))))
    assert x.contains(x.mid)
    assert x.width == np.inf or Fraction(float(x.width)) >= Fraction(float(x.hi)) - Fraction(float(x.lo))


def test_exact_results_are_not_widened() -> None:
    x = Interval(np.array([-1.0, 0.5]), np.array([2.0, 0.75]))
    for y, lo, hi in [
        (x + 0.0, [-1.0, 0.5], [2.0, 0.75]),
        (x * 3.0, [-3.0, 1.5], [6.0, 2.25]),
        (x / 2.0, [-0.5, 0.25], [1.0, 0.375]),
        (1.0 - x, [-1.0, 0.25], [2.0, 0.5]),
        (x.square(), [0.0, 0.25], [4.0, 0.5625]),
        (abs(x), [0.0, 0.5], [2.0, 0.75]),
        (-x, [-2.0, -0.75], [1.0, -0.5]),
    ]:
        assert y.lo.tolist() == lo
        assert y.hi.tolist() == hi
    some_short = Interval(np.array([0.1]), np.array([1.0]))
    assert (some_short * some_short).hi == 1
    assert (1.0 / (some_short.square() + 1.0)).lo == 0.5
    third = Interval.point(0.1)
    for y in (third * 0.5, third * 2.0, third / 4.0, third + 0.0, third * 0.0):
        assert y.lo == y.hi


def test_infinite_endpoints() -> None:
    inf = np.inf
    entire, half = Interval(np.array(-inf), np.array(inf)), Interval(np.array(1.0), np.array(inf))
    zero = Interval.point(0.0)
    assert (zero * entire).mag == 0
    assert ((entire * zero).lo, (entire * zero).hi) == (0, 0)
    assert ((half * half).lo, (half * half).hi) == (1, inf)
    assert ((half / half).lo, (half / half).hi) == (0, inf)
    assert ((half - half).lo, (half - half).hi) == (-inf, inf)
    assert ((1.0 / half).lo, (1.0 / half).hi) == (0, 1)
    assert (Interval.point(1e308) * 1e10).lo == np.finfo(float).max
    assert np.isfinite(entire.mid)


def test_division_by_zero_is_everything_or_one_sided() -> None:
    inf = np.inf
    one = Interval.point(1.0)
    for divisor, expected in [
        ((-1, 1), (-inf, inf)),
        ((0, 0), (-inf, inf)),
        ((0, 2), (0.5, inf)),
        ((-0.0, 2), (0.5, inf)),
        ((-2, 0), (-inf, -0.5)),
    ]:
        y = one / Interval(np.array(float(divisor[0])), np.array(float(divisor[1])))
        assert (y.lo, y.hi) == expected


@pytest.mark.parametrize(("lo", "hi"), [(1.0, 0.0), (np.nan, 1.0), (0.0, np.nan), (np.inf, np.inf), (-np.inf, -np.inf)])
def test_what_is_not_an_interval_is_refused(lo: float, hi: float) -> None:
    with pytest.raises(InputError, match="not an interval"):
        Interval(np.array([0.0, lo]), np.array([1.0, hi]))


def test_sets_and_shapes() -> None:
    x = Interval(np.zeros((3, 1)), np.ones(4))
    assert x.shape == (3, 4)
    assert len(x) == 3
    assert x[1, :2].shape == (2,)
    y = Interval(np.array(0.5), np.array(3.0))
    assert ((x.hull(y)).hi == 3).all()
    assert ((x.intersect(y)).lo == 0.5).all()
    assert ((x.min(y)).hi == 1).all()
    assert ((x.max(y)).lo == 0.5).all()
    assert x.contains(Interval.point(0.25)).all()
    assert not x.contains(2.0).any()
    with pytest.raises(InputError):
        x.intersect(Interval.point(5.0))
    assert (np.ones((3, 4)) + x).shape == (3, 4)
    assert isinstance(np.float64(2.0) * x, Interval)
    assert len(Interval(np.empty((0, 2)), np.empty((0, 2))) + 1.0) == 0
