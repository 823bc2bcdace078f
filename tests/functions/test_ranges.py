"""Every range rule against Arb: containment at random and at awkward intervals, and tightness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from attnc.functions.error_function import GELU_SLOPE_TURNS, GELU_TURN
from attnc.functions.logistic import SILU_SLOPE_TURNS, SILU_TURN
from attnc.functions.powers import power, real_power
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from strategies.reference import DERIVATIVES, VALUES, precision, surely_outside

UNARY = [name for name, function in FUNCTIONS.items() if function.arity == 1 and not function.is_variadic]
SHOWN_DOMAINS = {"log": (5e-324, 1e300), "sqrt": (0.0, 1e300), "asin": (-1.0, 1.0), "acos": (-1.0, 1.0)}
_HALF_TURNS = [k * np.pi / 2 for k in range(-9, 10)]
_TURNS = [-0.7517915246935645, -1.2784645427610738, 2**0.5, -(2**0.5), 2.3993572805154677, -2.3993572805154677]
_OF_BOTH_SIGNS = np.array([0.0, 5e-324, 1e-310, 0.5, 1.0, 3.0, 40.0, 100.0, 710.0, 745.0, 1e300])
_OF_ONE_SIGN = [1e-20, 0.9999999999999999, 2.0, 1e5, 2.0**20]
_BESIDE_TURNS = [np.nextafter(t, way) for t in _HALF_TURNS + _TURNS for way in (np.inf, -np.inf)]
AWKWARD = np.concatenate([_OF_BOTH_SIGNS, -_OF_BOTH_SIGNS, _OF_ONE_SIGN, _HALF_TURNS, _BESIDE_TURNS])


def _boxes(name: str, count: int, seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-3, 2.5, count)
    a = rng.normal(size=count) * scale
    b = a + np.abs(rng.normal(size=count)) * 10.0 ** rng.uniform(-16, 1.5, count)
    pairs = rng.choice(AWKWARD, (count, 2))
    lo, hi = np.concatenate([a, pairs.min(axis=1), AWKWARD]), np.concatenate([b, pairs.max(axis=1), AWKWARD])
    low, high = SHOWN_DOMAINS.get(name, (-1e301, 1e301))
    lo, hi = np.clip(lo, low, high), np.clip(hi, low, high)
    return Interval(lo, np.maximum(lo, hi))


def _points(x: Interval, seed: int) -> np.ndarray:
    """Members: the ends, the middle, one at random, and an awkward number that lies inside."""
    rng = np.random.default_rng(seed)
    inside = np.clip(x.lo + rng.uniform(size=x.shape) * (x.hi - x.lo), x.lo, x.hi)
    awkward = np.clip(rng.choice(AWKWARD, x.shape), x.lo, x.hi)
    return np.stack([x.lo, x.hi, x.mid, inside, awkward])


def _check(reference: Callable[[arb], arb], x: Interval, y: Interval, points: np.ndarray) -> None:
    with precision(1200 if np.abs(points).max() > 1e30 else 300):
        for i in range(len(x)):
            for t in {float(p) for p in points[:, i]}:
                value = reference(arb(t))
                assert not surely_outside(value, y[i]), (t, value, x[i], y[i])


def _slope(name: str, x: Interval, y: Interval) -> Interval:
    slope = FUNCTIONS[name].slope
    assert slope is not None
    return slope(x, y)


def _defined(name: str, y: Interval) -> np.ndarray:
    """Where the function has no pole."""
    defined = y.is_bounded if name == "tan" else np.ones(len(y), dtype=bool)
    assert defined.sum() > 0.4 * len(y)
    return defined


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(("count", "seeds"), [(400, [1]), pytest.param(3000, range(10), marks=pytest.mark.slow)])
def test_ranges_contain_arb(name: str, count: int, seeds: Sequence[int]) -> None:
    for seed in seeds:
        x = _boxes(name, count, seed)
        y = FUNCTIONS[name].range(x)
        keep = _defined(name, y)
        _check(VALUES[name], x[keep], y[keep], _points(x, seed + 100)[:, keep])


@pytest.mark.parametrize("name", DERIVATIVES)
def test_slopes_contain_the_derivative(name: str) -> None:
    x = _boxes(name, 400, 3)
    y, points = FUNCTIONS[name].range(x), _points(x, 4)
    keep = _defined(name, y)
    if name in ("asin", "acos", "sqrt"):  # there the derivative is infinite, and the slope open to that side
        points = np.where((np.abs(points) == 1) | (points == 0), x.mid, points)
        keep &= (np.abs(points).max(axis=0) < 1) if name != "sqrt" else points.min(axis=0) > 0
    _check(DERIVATIVES[name], x[keep], _slope(name, x, y)[keep], points[:, keep])


@pytest.mark.parametrize("name", UNARY)
def test_slopes_contain_difference_quotients(name: str) -> None:
    x = _boxes(name, 300, 5)
    y, points = FUNCTIONS[name].range(x), _points(x, 6)
    slope = _slope(name, x, y)
    with precision(2400):
        for i in np.flatnonzero(_defined(name, y)):
            for u, v in ((x.lo[i], x.hi[i]), points[3:, i]):
                if u != v:
                    s, t = arb(float(u)), arb(float(v))
                    quotient = (VALUES[name](s) - VALUES[name](t)) / (s - t)
                    assert not surely_outside(quotient, slope[i]), (u, v, quotient, x[i], slope[i])


@pytest.mark.parametrize("name", UNARY)
def test_infinite_boxes(name: str) -> None:
    function = FUNCTIONS[name]
    x = Interval(np.array([-np.inf, -np.inf, 1.0, -3.0]), np.array([np.inf, 2.0, np.inf, np.inf]))
    y = function.range(x)
    slope = _slope(name, x, y)
    assert not np.isnan([y.lo, y.hi, slope.lo, slope.hi]).any()
    if function.domain is None:
        inside = np.array([[-1e300, -50.0, 1.0, -1.5], [1e3, -1e9, 1e9, 50.0], [0.0, 1.0, 40.0, 1e300]])
        if name not in ("sin", "cos", "exp", "sinh", "cosh"):
            _check(VALUES[name], x, y, inside)


@pytest.mark.parametrize("name", UNARY)
def test_ranges_over_small_boxes_are_tight(name: str) -> None:
    """For boxes a few ulp wide, the range is wider than the truth by a few dozen ulp of the largest value."""
    rng = np.random.default_rng(8)
    low, high = SHOWN_DOMAINS.get(name, (-6.0, 6.0))
    lo = rng.uniform(max(low, -6.0), min(high, 6.0) - 1e-9, 500)
    x = Interval(lo, np.nextafter(np.nextafter(lo, np.inf), np.inf))
    function = FUNCTIONS[name]
    if not function.is_continuous:
        return
    y = function.range(x)
    ok = y.is_bounded
    assert ok.mean() > 0.99
    true_width = _slope(name, x, y).mag * (x.hi - x.lo)
    size = np.maximum(y.mag, {"sin": 1.0, "cos": 1.0, "gelu": 6.0}.get(name, 0.0))  # absolute errors there
    assert (y.width <= true_width + 48 * 2.0**-52 * size)[ok].all()


@pytest.mark.parametrize(
    ("names", "x", "y"),
    [
        ("sin tanh sinh atan", (0.0, 0.0), (0, 0)),
        ("cos exp cosh", (0.0, 0.0), (1, 1)),
        ("sin cos tanh erf", (-1e9, 1e9), (-1, 1)),
        ("sigmoid", (-1e9, 1e9), (0, 1)),
        ("exp", (-1e9, 1e9), (0, np.inf)),
        ("sqrt", (0.0, 4.0), (0, 2)),
        ("log", (1.0, 1.0), (0, 0)),
        ("relu", (-1 / 3, 0.1), (0.0, 0.1)),
        ("abs", (-1 / 3, 0.1), (0.0, 1 / 3)),
        ("log", (0.0, 1.0), (-np.inf, np.inf)),  # outside the domain: everything
        ("sqrt", (-1e-300, 1.0), (-np.inf, np.inf)),
        ("asin", (0.0, 1.1), (-np.inf, np.inf)),
        ("acos", (-2.0, 0.0), (-np.inf, np.inf)),
        ("tan", (1.0, 2.0), (-np.inf, np.inf)),
    ],
)
def test_exact_values_clamps_and_domains(names: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    for name in names.split():
        found = FUNCTIONS[name].range(Interval(*map(np.array, x)))
        assert (found.lo, found.hi) == y, name


@given(st.floats(-30, 30), st.floats(0, 3), st.integers(-40, 40))
def test_integer_powers(lo: float, width: float, n: int) -> None:
    x = Interval(np.array(lo), np.array(lo + width))
    if n < 0 and x.contains(0.0):
        return
    y = power(x, n)
    if n % 2 == 0:
        assert y.lo >= 0
    with precision():
        for t in (lo, lo + width, float(x.mid)):
            assert not surely_outside(arb(t) ** n, y)
        if width == 0 and y.is_bounded and y.lo > 0:
            assert y.width <= 64 * 2.0**-52 * y.hi
    assert power(Interval.point(3.0), 5).lo == power(Interval.point(3.0), 5).hi == 243


@given(st.floats(0, 30), st.floats(0, 3), st.floats(-5, 5), st.floats(0, 3))
def test_real_powers(base: float, width: float, exponent: float, spread: float) -> None:
    x, y = Interval(np.array(base), np.array(base + width)), Interval(np.array(exponent), np.array(exponent + spread))
    z = real_power(x, y)
    with precision():
        for s in (base, base + width):
            for t in (exponent, exponent + spread):
                if s > 0:
                    assert not surely_outside((arb(s).log() * arb(t)).exp(), z)
    root = real_power(Interval(np.array(0.0), np.array(4.0)), Interval.point(0.5))
    assert root.lo == 0
    assert abs(root.hi - 2) < 1e-14
    assert real_power(Interval(np.array(-1.0), np.array(4.0)), Interval.point(0.5)).lo == -np.inf


def test_turning_points_of_activations() -> None:
    """Both signs of the derivative within 2⁻⁴⁰ of each stored position, and the stored values around the true ones."""
    cases = [
        ("gelu", GELU_TURN, VALUES["gelu"], DERIVATIVES["gelu"]),
        ("silu", SILU_TURN, VALUES["silu"], DERIVATIVES["silu"]),
        *(("gelu'", turn, DERIVATIVES["gelu"], lambda x: 2 - x * x) for turn in GELU_SLOPE_TURNS),
        *(("silu'", turn, DERIVATIVES["silu"], lambda x: 2 - x * (x / 2).tanh()) for turn in SILU_SLOPE_TURNS),
    ]
    with precision():
        for name, (position, least, greatest), value, derivative in cases:
            left, right = arb(position) - arb(2.0**-41), arb(position) + arb(2.0**-41)
            assert derivative(left) * derivative(right) < 0, name
            assert value(arb(position)) > arb(least), name
            assert value(arb(position)) < arb(greatest), name
            assert greatest - least < 1e-15
