"""Taylor models, ranges and slopes against Arb's own values at points: they hold them, and not much more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import arb, fmpq

from attnc_checker.deep.pieces import slopes_of
from attnc_checker.expressions import CALLS, evaluate, parse
from attnc_checker.files import BadFile
from attnc_checker.jets import models
from attnc_checker.ranges import SERIES, Box, Ranges, coefficients, hull
from checker.networks import NAMES, at_tau, box_of, point

SMOOTH = ["exp(-x**2)*sin(5*x)/(2 + x)", "tanh(3*x) + softplus(-7*x)", "(x + 1.1)**2.5*log(2 + x)", "x**9 - x**2 + 3"]
KINKS = [
    "abs(x - 0.05)*exp(x)",
    "clip(3*x, -1, 1)**2",
    "max(x, x**2, 0.2 - x)",
    "exp(abs(abs(x) - 0.1))",
    "relu(sin(9*x))",
]
EDGES = [
    "sqrt(1 - x**2)",
    "(1 - x)**1.5",
    "acos(x)*asin(x)",
    "sqrt(abs(x))",
    "(1 - x)**(1 + x)",
    "sqrt(1 - sin(pi*x/2))",
]
JUMPS = ["sign(x)*x + floor(3*x)", "sign(x - 0.3)/(2 + sign(x))"]
PLANE = [
    "x*y/(1.1 + x**2 - y)",
    "max(x, y)*sin(x*y)",
    "sqrt(x**2 + y**2)",
    "abs(x - y)**1.5",
    "gelu(4*x*y) - min(x, -y)",
]


def values_at(function, points):
    """Balls around the values, each of which may be nan."""
    return [hull(evaluate(function, Ranges([(x.lower(), x.upper()) for x in point]))[0]) for point in points]


def width(poly):
    return float(sum((x.rad() for x in poly.values()), arb(0)))


@pytest.mark.parametrize("text", SMOOTH + KINKS + EDGES + JUMPS + PLANE)
@pytest.mark.parametrize("m", [0, 1, 4, 9])
def test_models_hold_the_function(text, m):
    rng, d = np.random.default_rng(m), 2 if "y" in text else 1
    function = parse(text, NAMES[:d])
    for half in (0.5, 0.125, 2.0**-9, 0.0):
        for centre in ([0.0] * d, [1 - half] * d, list(np.round(rng.uniform(half - 1, 1 - half, d), 3))):
            ((poly, *_),) = models(function, box_of(centre, half), m)
            assert width(poly) <= 30  # it is known everywhere
            taus = [*rng.choice([-1.0, 0.0, 1.0], (4, d)), *rng.uniform(-1, 1, (8, d))]
            points = [[x.mid() for x in point(box_of(centre, half), tau)] for tau in taus]
            for tau, seen in zip(taus, values_at(function, points), strict=True):
                assert (at_tau(poly, tau.tolist()) + arb(0, 1e-30)).overlaps(seen)


def test_how_much_models_leave_open():
    def left_open(text, centre, half, m):
        return width(models(parse(text, ["x"]), box_of(centre, half), m)[0].poly)

    for m, half in ((0, 0.25), (3, 0.25), (6, 0.125), (9, 0.5)):
        assert left_open("exp(x)", 0, half, m) <= 1.1 * math.exp(half) * half ** (m + 2) / math.factorial(m + 2)
        product = (2 * half) ** (m + 2) / math.factorial(m + 2)
        assert left_open("exp(x)*exp(x)", 0, half, m) <= 2.5 * math.exp(2 * half) * product
    for m in (0, 4):
        assert left_open("abs(x)", 0, 0.25, m) <= 0.125 + 1e-9  # between 0 and 1/4
        assert left_open("abs(x)", 0.125, 0.25, m) <= 0.375 * 0.125 / 0.5 + 1e-9
        assert left_open("abs(x)", 0.25, 0.25, m) <= 1e-30
        assert left_open("sqrt(x)", 0.125, 0.125, m) <= 0.25 + 1e-9
        assert left_open("x**1.5", 0.125, 0.125, m) <= 0.5 * 0.25**1.5
        assert left_open("floor(x)", 0.5, 0.75, m) <= 1 + 1e-8


FUNCTIONS = [*CALLS, "relu", "min", "max", "clip"]


def random_expression(rng, variables, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.1:
        return str(rng.choice([*variables, *variables, "0.3", "(-1.5)", "pi", "0", "1"]))
    parts = [random_expression(rng, variables, depth - 1) for _ in range(2)]
    if kind < 0.5:
        return f"({parts[0]} {rng.choice([*'+-*/'])} {parts[1]})"
    if kind < 0.85:
        return f"{rng.choice(FUNCTIONS)}({parts[0]}{', ' + parts[1] if kind < 0.6 else ''})"
    return f"({parts[0]})**({rng.choice(['2', '3', '-1', '-2', '0.5', '1.5', '-0.5', '1/3', '0', '7'])})"


@pytest.mark.parametrize("seed", range(300))
def test_what_is_known_of_any_expression_is_true(seed):
    """Models and slopes, where functions are undefined, too: finite ones hold the values, which then exist."""
    rng = np.random.default_rng(seed)
    d, m, half = int(rng.integers(1, 3)), int(rng.choice([0, 1, 3, 6])), 2.0 ** -int(rng.choice([0, 1, 3, 6, 9]))
    try:
        function = parse(random_expression(rng, NAMES[:d], int(rng.integers(1, 5))), NAMES[:d])
    except BadFile:  # a wrong number of arguments
        return
    centre = [float(rng.choice([0, half, -half, 1 - half, round(rng.uniform(-2, 2), 2)])) for _ in range(d)]
    ((poly, *_),) = models(function, box_of(centre, half), m)
    tau = np.sort(rng.choice([-1.0, 0.0, 1.0, *rng.uniform(-1, 1, 6)], (12, d)), axis=0)
    points = [point(box_of(centre, half), row) for row in tau]
    at = values_at(function, points)
    if all(x.is_finite() for x in poly.values()):
        for row, seen in zip(tau, at, strict=True):
            found = at_tau(poly, row.tolist())
            assert seen.is_finite()
            assert (found + abs(found) * arb(0, 1e-30) + arb(0, 1e-30)).overlaps(seen)
    if d == 1:
        slope, _ = slopes_of(function, (arb(centre[0]) - half, arb(centre[0]) + half))
        for (x,), (y,), a, b in zip(points, points[1:], at, at[1:], strict=False):
            if slope.is_finite() and x < y:
                assert (slope + abs(slope) * arb(0, 1e-20) + arb(0, 1e-20)).overlaps((b - a) / (y - x))


@pytest.mark.parametrize("name", [*SERIES, 3, 4, -1, -2, 0.5, 1.5, -0.5])
def test_ranges_and_coefficients_of_functions(name):
    rng = np.random.default_rng(0)
    name = name if isinstance(name, str) else fmpq(*float(name).as_integer_ratio())
    is_positive = name == "log" or (not isinstance(name, str) and name.q != 1)
    for _ in range(40):
        a, b = np.sort(rng.normal(0, rng.choice([0.01, 0.7, 5.0]), 2))
        a, b = (abs(a), abs(a) + b - a) if is_positive else (a, b)
        if name in ("asin", "acos"):
            a, b = np.tanh(a), np.tanh(b)
        low, high = Ranges([]).apply(name, (arb(a), arb(b)))
        wide = coefficients(name, (arb(a), arb(b)), 6)
        seen = [coefficients(name, (arb(x), arb(x)), 6) for x in np.linspace(a, b, 33)]
        if low.is_finite() and high.is_finite():
            assert all(low <= s[0].upper() and s[0].lower() <= high for s in seen)
            lows, highs = min(float(s[0]) for s in seen), max(float(s[0]) for s in seen)
            assert float(high - low) <= (highs - lows) * 1.05 + 1e-12 * (1 + abs(highs))
        else:
            assert name == "tan" or not isinstance(name, str)  # a pole within
            assert float(a) < 0 < float(b) or (name == "tan" and b - a > 0.1)
        for n, x in enumerate(wide):
            assert not x.is_finite() or all(x.overlaps(s[n]) for s in seen)


@pytest.mark.parametrize("name", SERIES)
def test_coefficients_are_close_on_wide_ranges(name):
    """Power series of balls, taken directly, are up to 20,000 times as large."""
    for a, b in ((-0.375, 0.375), (0.05, 0.6), (1.0, 1.5), (-3.0, -2.0)):
        if (name == "log" and a < 0) or (name in ("asin", "acos") and abs(a + b) > 1):
            continue
        found = coefficients(name, (arb(a), arb(b)), 12)
        seen = [coefficients(name, (arb(x), arb(x)), 12) for x in np.linspace(a, b, 65)]
        for n, x in enumerate(found):
            assert all(x.contains(s[n].mid()) for s in seen)
            assert x.rad() <= 4 * max(abs(s[n]) for s in seen)


@pytest.mark.parametrize("text", SMOOTH + KINKS + ["(1 - x)**1.5", "sqrt(1 - x**2)", "abs(x)**3", "x**4 + 1/(1.5 + x)"])
def test_slopes_hold_differences(text):
    rng, function = np.random.default_rng(1), parse(text, ["x"])
    for half in (0.5, 0.125, 2.0**-7):
        for centre in (0.0, 1 - half, half - 1, float(rng.uniform(half - 1, 1 - half))):
            left, right = arb(centre) - half, arb(centre) + half
            slope, values = slopes_of(function, (left, right))
            points = [*map(arb, np.sort(rng.uniform(centre - half, centre + half, 12)))]
            at = values_at(function, [[x] for x in points])
            assert all(values[0] <= x.upper() and x.lower() <= values[1] for x in at)
            seen = [(b - a) / (y - x) for x, y, a, b in zip(points, points[1:], at, at[1:], strict=False) if x < y]
            if slope.is_finite():
                assert all(slope.overlaps(x) for x in seen)
            else:
                assert "sqrt" in text
            if half < 0.01 and text in SMOOTH:
                spread = max(float(x) for x in seen) - min(float(x) for x in seen)
                assert 2 * float(slope.rad()) <= 10 * spread + 1e-3


def test_what_is_undefined_is_unknown():
    """x/x at 0, roots of negative numbers, and functions of them: even acos, which is π of nan in Arb."""
    for text in ("x/x", "acos(x/x)", "asin(x**(1/3))", "sign(1/x)", "(1/x)**0", "max(log(x), 1)", "0*tan(pi/(2 + x))"):
        ((poly, *_),) = models(parse(text, ["x"]), box_of(-0.125, 0.25), 3)
        assert not all(x.is_finite() for x in poly.values())


@pytest.mark.parametrize(
    ("text", "left", "right", "slopes"),
    [
        ("abs(silu(x))", -1 / 256, 0, (-0.5, -0.49805)),
        ("sinh(min(1, x))", 0.96875, 1, (math.cosh(0.96875), math.cosh(1))),
        ("abs(x) - 1.5*x", 0, 1, (-0.5, -0.5)),
    ],
)
def test_slopes_up_to_a_kink_at_the_end(text, left, right, slopes):
    """At the end both sides of the kink are equal, and only one of them counts."""
    slope, _ = slopes_of(parse(text, ["x"]), (arb(left), arb(right)))
    assert slope.lower() <= slopes[0]
    assert slopes[1] <= slope.upper()
    assert 2 * float(slope.rad()) <= 1.5 * (slopes[1] - slopes[0]) + 1e-8


def test_boxes_hold_the_cells_whose_ends_have_more_bits():
    """Of 200 bits. The centre and the half-width of a box have 128 bits, and each is rounded."""
    rng = np.random.default_rng(0)
    for numbers in rng.integers(-(2**62), 2**62, (400, 8)).tolist():
        ends = sorted(sum(fmpq(x, 2 ** (62 * n)) for n, x in enumerate(part)) for part in (numbers[:4], numbers[4:]))
        ((low, high),) = Box.between([tuple(ends)]).sides
        assert exactly(low) <= ends[0]
        assert exactly(high) >= ends[1]


def exactly(x: arb) -> fmpq:
    mantissa, exponent = x.man_exp()
    return fmpq(mantissa) * fmpq(2) ** int(exponent)
