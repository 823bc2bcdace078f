"""Taylor polynomials of expressions against Arb: values at points of the box, coefficients, looseness, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.errors import InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_tables import monomials
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import Taylor, taylor
from strategies.expressions import expressions
from strategies.reference import VALUES, precision
from targets.series import SERIES, boxes, check, check_points, line_coefficients

UNARY = [name for name, function in FUNCTIONS.items() if function.arity == 1 and not function.is_variadic]


SMOOTH = [name for name in UNARY if name not in ("abs", "relu", "sign", "floor")]


DOMAINS = {"log": (1e-9, 50.0), "sqrt": (1e-9, 50.0), "asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "tan": (-1.57, 1.57)}


SEVERAL = (
    "exp(sin(x)*y)",
    "1/(1 + 25*x**2)",
    "exp(-x**2 - y**2)*sin(3*x + y)",
    "exp(-x*y)*sin(x + 2*z)/(2 + cos(y*z)) + sqrt(1 + x**2 + z**2)*tanh(y - z)",
    "(2 + x*y)**z - (3 + x)**-2 + (1.5 + y)**0.3",
    "max(x + 3, y) * min(x - 3, y, 7) + clip(x, -5, 5) + clip(y, x + 3, 9)",
    "gelu(x - y)*erf(x*y) + silu(2*x)*atan(y) - softplus(x*y + z)",
    "sinh(x)*cosh(y) - tan(x*y/4)*sigmoid(z)",
    "(x + y + z)**7 - (x*y*z)**3/3",
    "log(3 + x)*asin(x/4) - acos(y/5)**2 + 0.1*pi*e",
)


# Enclosure


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_variable(name: str) -> None:
    f = Expression.parse(f"{name}(x)")
    low, high = DOMAINS.get(name, (-4.0, 4.0))
    centres, radii = boxes(f, 40, 1, low, high)
    result = check(f, centres, radii, 6, lines=name in SMOOTH)
    assert np.isfinite(result.remainder).mean() > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("order", [0, 1, 4, 9])
def test_functions_of_one_variable_at_many_boxes(name: str, order: int) -> None:
    for seed, (inner, widest) in enumerate(((("x"), 1.0), ("x*y - z", 0.5), ("(x + y)**2/9", 0.5))):
        f = Expression.parse(f"{name}({inner})")
        low, high = DOMAINS.get(name, (-30.0, 30.0) if inner == "x" else (-2.0, 2.0))
        centres, radii = boxes(f, 100, seed, low, high, widest)
        check(f, centres, radii, order, seed, lines=name in SMOOTH)


@pytest.mark.parametrize("name", SMOOTH)
def test_awkward_boxes(name: str) -> None:
    """Ends at extrema, zeros and turning points, near the ends of domains, far out, and next to nothing wide."""
    ends = np.array(
        [-710.0, -40.0, -6.0, -np.pi / 2, -1.0, -1e-3, 0.0, 1e-300, 1e-8, 0.5, 1.0, np.pi / 2, 2.0, 38.0, 700.0]
    )
    pairs = [(a, b) for i, a in enumerate(ends) for b in ends[i:] if b - a <= 10]
    lo, hi = np.array(pairs).T
    low, high = DOMAINS.get(name, (-1e3, 1e3))
    keep = (lo >= low) & (hi <= high)
    centres, radii = ((lo + hi) / 2)[keep, None], ((hi - lo) / 2)[keep, None]
    check(Expression.parse(f"{name}(x)"), centres, radii, 5)


@pytest.mark.parametrize("text", SEVERAL)
def test_several_variables(text: str) -> None:
    f = Expression.parse(text)
    centres, radii = boxes(f, 12, 2)
    order = 4 if len(f.variables) > 2 else 6
    result = check(f, centres, radii, order, lines="max" not in text)
    assert np.isfinite(result.remainder).all()


@settings(max_examples=40, deadline=None)
@given(expressions(names=("x", "y"), max_depth=3, smooth=True), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_random_smooth_expressions(text: str, order: int, seed: int) -> None:
    f = Expression.parse(text).with_variables(("x", "y"))
    centres, radii = boxes(f, 3, seed, -4.0, 4.0)
    check(f, centres, radii, order, seed)


@settings(max_examples=40, deadline=None)
@given(expressions(names=("x", "y"), max_depth=4), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_random_expressions_with_kinks(text: str, order: int, seed: int) -> None:
    f = Expression.parse(text).with_variables(("x", "y"))
    centres, radii = boxes(f, 4, seed, -4.0, 4.0)
    check(f, centres, radii, order, seed, lines=False)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(expressions(names=("x", "y", "z"), max_depth=5), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_many_random_expressions(text: str, order: int, seed: int) -> None:
    f = Expression.parse(text).with_variables(("x", "y", "z"))
    centres, radii = boxes(f, 4, seed, -4.0, 4.0, 1.0)
    check(f, centres, radii, order, seed, lines=False)


# Tightness


@pytest.mark.parametrize("text", [f"{name}(x)" for name in SMOOTH] + [text for text in SEVERAL if "max" not in text])
def test_remainder_on_narrow_boxes_is_near_the_next_degree(text: str) -> None:
    """At most 50 times the largest value, at some corners, of the part of degree m + 1; typically less than 6 times."""
    f = Expression.parse(text)
    d, order = len(f.variables), 5
    low, high = (0.2, 0.8) if d == 1 else (-0.6, 0.6)
    rng = np.random.default_rng(3)
    centres, radii = rng.uniform(low, high, (10, d)), np.full((10, d), 2.0**-7)
    result = taylor(f, centres, radii, order)
    corners = rng.choice([-1.0, 1.0], (10, d))
    ratios = []
    with precision(300):
        for box in range(len(centres)):
            parts = [line_coefficients(f, centres[box], radii[box], corner, order + 1)[0][-1] for corner in corners]
            ratios.append(result.remainder[box, 0] / max(float(abs(part).lower()) for part in parts))
    assert min(ratios) >= 0.999  # the bound is no smaller than the part it contains
    assert max(ratios) <= 50
    assert np.median(ratios) <= 6


@pytest.mark.parametrize(
    ("text", "factor"), [("exp(sin(x)*y)", 10), ("1/(1 + 25*x**2)", 3), ("sqrt(1 + x**2 + y**2)", 30)]
)
def test_remainder_on_wide_boxes(text: str, factor: float) -> None:
    """On boxes of a sixteenth of the domain the remainder is of the size of the error, observed at corners."""
    f = Expression.parse(text)
    d = len(f.variables)
    rng = np.random.default_rng(4)
    half = (1.0 if d == 1 else 3.0) / 16
    centres, radii = rng.integers(-8, 8, (200, d)) * 2 * half + half, np.full((200, d), half)
    result = taylor(f, centres, radii, 8)
    tau = np.concatenate([rng.choice([-1.0, 1.0], (20, d)), rng.uniform(-1, 1, (200, d))])
    polynomial = result.mid[:, 0] @ np.prod(tau[:, None] ** monomials(d, 8), axis=2).T
    values = f((centres[:, None] + radii[:, None] * tau).reshape(-1, d)).reshape(len(centres), -1)
    assert result.remainder.max() <= factor * np.abs(values - polynomial).max()


def test_coefficients_are_known_to_a_few_ulp() -> None:
    for text in SEVERAL:
        f = Expression.parse(text)
        result = taylor(f, *boxes(f, 50, 5), 6)
        size = np.abs(result.mid).sum(axis=2)
        assert (result.radius.sum(axis=2) <= 2.0**-43 * (1 + size)).all(), text


def test_polynomials_have_no_remainder() -> None:
    f = Expression.parse("(3*x**2*y - x/4 + 2, x, 7, (x - y)**3)")
    result = taylor(f, np.array([[0.5, -2.0]]), np.array([[0.25, 1.0]]), 3)
    assert (result.remainder == 0).all()
    exponents = monomials(2, 3).tolist()
    # 3(½ + τ₁/4)²(−2 + τ₂) − (½ + τ₁/4)/4 + 2
    expected = {(0, 0): 0.375, (1, 0): -1.5625, (0, 1): 0.75, (2, 0): -0.375, (1, 1): 0.75, (2, 1): 0.1875}
    assert result.mid[0, 0].tolist() == [expected.get(tuple(j), 0.0) for j in exponents]
    assert result.mid[0, 1].tolist() == [0.5, 0.25] + [0.0] * 8
    assert result.mid[0, 2].tolist() == [7.0] + [0.0] * 9


# Where there is no jet


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("abs(x)", [0.0, 0.4, -0.4999], [0.5, 0.51, -0.5]),
        ("relu(x)", [0.2, 0.4999, -0.4999], [0.5, -0.5]),
        ("max(x, 1)", [1.2], [1.5, 0.5]),
        ("min(x, 0.3, y)", [0.3], [-3.0]),
        ("clip(x, -1, 1)", [-1.0, 1.3], [0.0, 2.0, -5.0]),
        ("sign(x)", [0.0, 0.5], [0.6, -0.6]),
        ("floor(x/2)", [0.0, 1.5], [1.0, -1.3]),
        ("log(x)", [0.0, 0.5, -3.0], [0.6]),
        ("sqrt(x)", [0.0, 0.5, -3.0], [0.6]),
        ("1/x", [0.0, 0.5], [-0.6, 0.6]),
        ("x**-3", [0.0, -0.5], [-0.6, 0.6]),
        ("x**0.5", [0.5, -2.0], [0.6]),
        ("x**y", [0.5, -2.0], [0.6]),
        ("asin(x)", [0.6, 3.0], [0.4]),
        ("acos(x)", [-0.6, -3.0], [-0.4]),
        ("tan(x)", [1.5, 2.0], [0.5, 2.5]),
        ("sign(log(x))", [0.3, 1.0], [2.0]),
        ("log(x)**0", [0.3], [0.6]),
        ("max(log(x), 100)", [0.3], [0.6]),
        ("0*log(x)", [0.3], [0.6]),
    ],
)
def test_kinks_and_domains(text: str, inside: list[float], outside: list[float]) -> None:
    f = Expression.parse(text)
    d = len(f.variables)
    for centres, expected in ((inside, False), (outside, True)):
        first = np.array(centres)[:, None]
        points = np.concatenate([first, np.full((len(first), d - 1), 0.6)], axis=1)
        result = taylor(f, points, np.full(points.shape, 0.5), 4)
        assert (np.isfinite(result.remainder) == expected).all(), (centres, result.remainder)
        if not expected:
            assert (result.mid == 0).all()
            assert (result.remainder == np.inf).all()


def test_ranges_of_polynomials_prove_what_intervals_cannot() -> None:
    """The intervals of x² and x allow x² − x + 0.26 = 0, and those of x and x + y overlap."""
    f = Expression.parse("log(x**2 - x + 0.26) + max(x, x + y)")
    centre, radius = np.array([[0.5, 0.1]]), np.array([[0.05, 0.05]])
    assert f.ranges(Interval(centre - radius, centre + radius), violations="infinite").lo == -np.inf
    assert np.isfinite(check(f, centre, radius, 6, lines=False).remainder).all()


@pytest.mark.parametrize(
    "text",
    [
        "exp(1000*x)",
        "1e300*x*1e300",
        "x**1000 + y",
        "exp(exp(exp(10*x)))",
        "sinh(800*x) - cosh(-800*x)",
        "(1e-200*x)**3/(1e-200*x)**3",
        "tan(1e6*x)",
        "sin(1e30*x)*y",
        "exp(-1e300*x**2)",
        "1/(1e-320 + x**2)",
        "tanh(1e200*x) + softplus(1e300*x) + gelu(1e160*y) + erf(1e160*x)",
    ],
)
def test_overflow_is_no_jet_and_no_warning(text: str) -> None:
    f = Expression.parse(text).with_variables(("x", "y"))
    centres, radii = boxes(f, 60, 6, -100.0, 100.0)
    result = taylor(f, centres, radii, 4)
    assert not np.isnan(result.remainder).any()
    finite = np.isfinite(result.remainder[:, 0])
    with precision(4000):
        check_points(
            f,
            centres[finite][:8],
            radii[finite][:8],
            4,
            Taylor(*(part[finite][:8] for part in (result.mid, result.radius, result.remainder))),
            6,
        )


# Shapes


def test_outputs_are_independent() -> None:
    f = Expression.parse("(abs(x), sin(x)*y, 3, y)")
    result = taylor(f, np.array([[0.0, 1.0], [2.0, 1.0]]), np.full((2, 2), 0.5), 3)
    assert result.mid.shape == result.radius.shape == (2, 4, 10)
    assert np.isfinite(result.remainder).tolist() == [[False, True, True, True], [True] * 4]
    alone = taylor(Expression.parse("sin(x)*y"), np.array([[0.0, 1.0], [2.0, 1.0]]), np.full((2, 2), 0.5), 3)
    assert (alone.mid[:, 0] == result.mid[:, 1]).all()


def test_boxes_do_not_influence_each_other() -> None:
    f = Expression.parse("exp(sin(x)*y)/(x**2 + 1) - abs(x - 0.25)")
    centres, radii = boxes(f, 3000, 7)
    result = taylor(f, centres, radii, 5)
    some = np.random.default_rng(8).permutation(3000)[:70]
    again = taylor(f, centres[some], radii[some], 5)
    for name in ("mid", "radius", "remainder"):
        np.testing.assert_allclose(getattr(again, name), getattr(result, name)[some], rtol=1e-9, atol=1e-300)


def test_variables_that_do_not_occur() -> None:
    f = Expression.parse("x*z").with_variables(("t", "x", "y", "z"))
    result = taylor(f, np.array([[9.0, 1.0, 9.0, 2.0]]), np.full((1, 4), 0.5), 2)
    nonzero = {tuple(j): m for j, m in zip(monomials(4, 2).tolist(), result.mid[0, 0].tolist(), strict=True) if m}
    assert nonzero == {(0, 0, 0, 0): 2.0, (0, 1, 0, 0): 1.0, (0, 0, 0, 1): 0.5, (0, 1, 0, 1): 0.25}
    assert taylor(Expression.parse("pi"), np.empty((2, 0)), np.empty((2, 0)), 4).mid.shape == (2, 1, 1)
    assert taylor(f, np.empty((0, 4)), np.empty((0, 4)), 2).remainder.shape == (0, 1)


def test_bad_input() -> None:
    f = Expression.parse("x*y")
    one = np.ones((1, 2))
    for centres, radii, order, match in (
        (np.ones((1, 3)), np.ones((1, 3)), 2, "shape"),
        (one, np.ones((2, 2)), 2, "shape"),
        (one, -one, 2, "negative"),
        (one * np.nan, one, 2, "finite"),
        (one, one, -1, "at least 0"),
        (one, one, 400, "smaller order"),
    ):
        with pytest.raises(InputError, match=match):
            taylor(f, centres, radii, order)


def test_every_function_has_a_jet() -> None:
    assert [name for name, function in FUNCTIONS.items() if function.jet is None] == []
    assert set(SMOOTH) == set(SERIES)
    assert set(VALUES) == set(FUNCTIONS)
