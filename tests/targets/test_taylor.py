"""Taylor polynomials of expressions against Arb: values at points of the box, coefficients, looseness, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import flint
import numpy as np
import pytest
from flint import arb, arb_series
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.errors import InputError
from attnc.numerics.intervals import Interval
from attnc.numerics.jets import monomials
from attnc.targets.expression import Expression
from attnc.targets.functions import FUNCTIONS
from attnc.targets.taylor import Taylor, taylor
from attnc.targets.tree import Call, Constant, Negate, Node, Number, Power, Product, Quotient, Sum, Variable, children
from strategies.expressions import expressions
from strategies.reference import VALUES, precision, rational, tree_value

UNARY = [name for name, function in FUNCTIONS.items() if function.arity == 1 and not function.variadic]
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


def boxes(expression: Expression, count: int, seed: int, low: float = -1.0, high: float = 1.0, widest: float = 0.3):
    """Centres and radii of boxes in [low, high]^d, from very small ones to wide ones."""
    rng = np.random.default_rng(seed)
    shape = (count, len(expression.variables))
    radii = (high - low) * np.minimum(10.0 ** rng.uniform(-8, 0, shape), widest) / 2
    radii[rng.random(shape) < 0.05] = 0.0
    centres = rng.uniform(low, high, shape)
    return np.clip(centres, low + radii, high - radii), radii


def check_points(expression: Expression, centres: np.ndarray, radii: np.ndarray, order: int, result: Taylor, seed: int):
    """|f(c + rτ) − Σ mid_j τ^j| ≤ Σ radius_j |τ^j| + max|τ|^{m+1}·remainder at corners and at random."""
    rng = np.random.default_rng(seed)
    d = len(expression.variables)
    exponents = monomials(d, order).tolist()
    points = np.concatenate([np.zeros((1, d)), rng.choice([-1.0, 1.0], (3, d)), rng.uniform(-1, 1, (3, d))])
    for box, output in zip(*np.nonzero(np.isfinite(result.remainder)), strict=True):
        mid, radius = result.mid[box, output].tolist(), result.radius[box, output].tolist()
        for point in points.tolist():
            tau = [arb(t) for t in point]
            at = [arb(c) + arb(r) * t for c, r, t in zip(centres[box].tolist(), radii[box].tolist(), tau, strict=True)]
            value = tree_value(expression.outputs[output], dict(zip(expression.variables, at, strict=True)))
            error, allowed = value, arb(float(result.remainder[box, output]))
            for _ in range(order + 1):
                allowed = allowed * arb(max(map(abs, point), default=0.0))
            for j, m, r in zip(exponents, mid, radius, strict=True):
                if m or r:
                    monomial = arb(1)
                    for t, k in zip(tau, j, strict=True):
                        for _ in range(k):
                            monomial = monomial * t
                    error, allowed = error - arb(m) * monomial, allowed + arb(r) * abs(monomial)
            assert error.is_finite()
            assert not abs(error) > allowed, (expression.text, centres[box], radii[box], point, error, allowed)


def _tanh(x: arb_series) -> arb_series:
    return 1 - 2 / ((2 * x).exp() + 1)


def _normal_cdf(x: arb_series) -> arb_series:
    return (1 + (x * (1 / arb(2).sqrt())).erf()) / 2


SERIES: dict[str, Callable[[arb_series], arb_series]] = {
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2,
    "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "tanh": _tanh,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "softplus": lambda x: (1 + x.exp()).log(),
    "gelu": lambda x: x * _normal_cdf(x),
    **{name: getattr(arb_series, name) for name in ("sin", "cos", "tan", "exp", "log", "sqrt")},
    **{name: getattr(arb_series, name) for name in ("atan", "asin", "acos", "erf")},
}


def tree_series(node: Node, point: Mapping[str, arb_series]) -> arb_series:
    """The series of a tree without kinks along a line."""
    a = [tree_series(child, point) for child in children(node)]
    match node:
        case Number(value):
            return arb_series([rational(value)])
        case Constant(name):
            return arb_series([arb.pi() if name == "pi" else arb(1).exp()])
        case Variable(name):
            return point[name]
        case Sum():
            return sum(a[1:], a[0])
        case Product():
            result = a[0]
            for factor in a[1:]:
                result = result * factor
            return result
        case Quotient():
            return a[0] / a[1]
        case Power(_, Number(value)) if value.denominator == 1:
            result = arb_series([arb(1)])
            for _ in range(abs(int(value))):
                result = result * a[0]
            return 1 / result if value < 0 else result
        case Power():
            return (a[0].log() * a[1]).exp()
        case Negate():
            return -a[0]
        case Call(name):
            return SERIES[name](a[0])
    raise AssertionError(node)


def line_coefficients(expression: Expression, centre: np.ndarray, radius: np.ndarray, along: np.ndarray, order: int):
    """The coefficients of s^k in f(c + r·s·τ), k ≤ order, for each output: Σ_{|j|=k} p_j τ^j."""
    before = flint.ctx.cap
    flint.ctx.cap = order + 1
    try:
        point = {
            name: arb_series([arb(c), arb(r) * arb(t)])
            for name, c, r, t in zip(expression.variables, centre, radius, along, strict=True)
        }
        series = [tree_series(output, point) for output in expression.outputs]
        return [[each[k] for k in range(order + 1)] for each in series]
    finally:
        flint.ctx.cap = before


def check_coefficients(expression: Expression, centres, radii, order: int, result: Taylor, seed: int) -> None:
    """Along random lines through the centre, degree by degree: the enclosures contain Arb's coefficients."""
    rng = np.random.default_rng(seed)
    d = len(expression.variables)
    exponents = monomials(d, order)
    degrees = exponents.sum(axis=1)
    for box in range(len(centres)):
        along = rng.integers(-4, 5, d) / 4  # so that τ^j is exact
        powers = np.prod(along**exponents, axis=1)
        exact = line_coefficients(expression, centres[box].tolist(), radii[box].tolist(), along.tolist(), order)
        for output in range(len(expression.outputs)):
            if not np.isfinite(result.remainder[box, output]):
                continue
            for k in range(order + 1):
                chosen = degrees == k
                difference, allowed = exact[output][k], arb(0)
                for m, r, t in zip(
                    result.mid[box, output, chosen].tolist(),
                    result.radius[box, output, chosen].tolist(),
                    powers[chosen].tolist(),
                    strict=True,
                ):
                    difference, allowed = difference - arb(m) * arb(t), allowed + arb(r) * abs(arb(t))
                assert difference.is_finite()
                assert not abs(difference) > allowed, (expression.text, centres[box], radii[box], k, difference)


def check(expression: Expression, centres, radii, order: int, seed: int = 0, *, lines: bool = True) -> Taylor:
    result = taylor(expression, centres, radii, order)
    assert result.mid.shape == result.radius.shape
    assert np.isfinite(result.mid).all()
    assert np.isfinite(result.radius).all()
    assert (result.radius >= 0).all()
    assert (result.remainder >= 0).all()
    with precision(300):
        check_points(expression, centres, radii, order, result, seed)
        if lines:
            check_coefficients(expression, centres, radii, order, result, seed)
    return result


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
