"""Expressions: values, ranges, mean values and gradients, each against Arb or exact values."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from flint import arb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnc.errors import ExpressionError, InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression
from strategies.expressions import expressions
from strategies.reference import precision, surely_outside, tree_value
from targets.boxes import box, ends

# Values


@pytest.mark.parametrize("name", [name for name, row in FUNCTIONS.items() if row.arity == 1])
def test_values_against_arb(name: str) -> None:
    f = Expression.parse(f"{name}(x)")
    x = np.random.default_rng(0).uniform(0.05, 0.95, (50, 1))
    with precision():
        exact = [float(tree_value(f.outputs[0], {"x": arb(t)}).mid()) for t in x[:, 0].tolist()]
    assert np.abs(f(x)[:, 0] - exact).max() <= 1e-14


def test_values_are_careful_far_out() -> None:
    x = np.array([[-1e300], [-800.0], [-40.0], [0.0], [40.0], [800.0], [1e300]])
    for text in ("softplus(x)", "sigmoid(x)", "gelu(x)", "silu(x)", "tanh(x)", "erf(x)", "atan(x)"):
        assert np.isfinite(Expression.parse(text)(x)).all(), text
    assert Expression.parse("softplus(x)")(x)[5] == 800
    assert 0 < Expression.parse("sigmoid(x)")(x)[2, 0] < 1e-17
    assert Expression.parse("log(x)")([[0.0]]).item() == -np.inf
    assert np.isnan(Expression.parse("sqrt(x)")([[-1.0]]).item())


def test_shapes_and_columns() -> None:
    f = Expression.parse("(y - x, 3)")
    assert f.variables == ("y", "x")
    assert f([[1.0, 2.0]]).tolist() == [[-1.0, 3.0]]
    g = f.with_variables(("t", "x", "y"))
    assert g([[0.0, 1.0, 2.0]]).tolist() == [[1.0, 3.0]]
    assert f(np.empty((0, 2))).shape == (0, 2)
    ranges, gradients = g.ranges_and_gradients(Interval(np.zeros((5, 3)), np.ones((5, 3))))
    assert ranges.shape == (5, 2)
    assert gradients.shape == (5, 2, 3)
    assert gradients.lo[0].tolist() == [[0, -1, 1], [0, 0, 0]]
    assert f.ranges(Interval(np.empty((0, 2)), np.empty((0, 2)))).shape == (0, 2)
    constant = Expression.parse("pi")
    assert constant(np.empty((4, 0))).shape == (4, 1)
    assert constant.ranges(Interval(np.empty((4, 0)), np.empty((4, 0)))).contains(np.pi).all()
    for wrong in (np.zeros((2, 3)), np.zeros(2)):
        with pytest.raises(InputError, match="shape"):
            f(wrong)
    with pytest.raises(InputError, match="y"):
        f.with_variables(("x",))
    with pytest.raises(InputError, match="twice"):
        f.with_variables(("x", "y", "x"))
    assert pickle.loads(pickle.dumps(f)) == f


# Ranges


def test_decimals_are_reals() -> None:
    nowhere = Interval(np.empty((1, 0)), np.empty((1, 0)))
    tenth = Expression.parse("0.1").ranges(nowhere)
    assert tenth.lo.item() == 0.09999999999999999
    assert tenth.hi.item() == 0.1  # the float is above 1/10
    assert Expression.parse("0.5").ranges(nowhere).width.item() == 0
    beyond = Expression.parse("1.7976931348623158e308").ranges(nowhere)
    assert ends(beyond) == [np.finfo(float).max, np.inf]
    zero = Expression.parse("sin(pi)").ranges(nowhere)
    assert zero.contains(0.0).all()


@pytest.mark.parametrize(
    ("text", "sides", "lo", "hi"),
    [
        ("x", [(0.1, 0.3)], 0.1, 0.3),
        ("abs(x)", [(-0.3, 0.1)], 0.0, 0.3),
        ("x*x", [(-0.5, 1.0)], 0.0, 1.0),
        ("x*y*x", [(-0.5, 1.0), (-2.0, 1.0)], -2.0, 1.0),
        ("x**4", [(-2.0, 1.0)], 0.0, 16.0),
        ("x**3", [(-2.0, 1.0)], -8.0, 1.0),
        ("x**-2", [(1.0, 2.0)], 0.25, 1.0),
        ("x**0", [(-1.0, 1.0)], 1.0, 1.0),
        ("2*x - 1", [(-1.0, 1.0)], -3.0, 1.0),
        ("sqrt(1 - x**2)", [(-1.0, 1.0)], 0.0, 1.0),
        ("min(x, y, 0.25) + max(x, 1)", [(0.0, 2.0), (-1.0, 3.0)], 0.0, 2.25),
        ("clip(x, -1, y)", [(-5.0, 5.0), (0.0, 1.0)], -1.0, 1.0),
        ("floor(x) + sign(y)", [(-0.5, 1.5), (0.0, 1.0)], -1.0, 2.0),
        ("sin(x)", [(-1e9, 1e9)], -1.0, 1.0),
        ("1/(1 + x**2)", [(-3.0, 1.0)], 0.1, 1.0),
    ],
)
def test_ranges_known_exactly(text: str, sides: list[tuple[float, float]], lo: float, hi: float) -> None:
    result = Expression.parse(text).ranges(box(*sides))
    assert np.nextafter(lo, -np.inf) <= result.lo.item() <= lo
    assert hi <= result.hi.item() <= np.nextafter(hi, np.inf)


def _draw_box(data: st.DataObject, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A box in [−4, 4]^d and three members of it."""
    centre = np.array(data.draw(st.lists(st.floats(-3, 3), min_size=d, max_size=d)))
    width = data.draw(st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 1.0]))
    lo, hi = centre - width, centre + width
    fractions = np.array(data.draw(st.lists(st.floats(0, 1), min_size=3 * d, max_size=3 * d))).reshape(3, d)
    return lo, hi, np.clip(lo + fractions * (hi - lo), lo, hi)


def _check_enclosure(text: str, data: st.DataObject) -> None:
    f = Expression.parse(text).with_variables(("x", "y"))
    lo, hi, points = _draw_box(data, 2)
    cell = Interval(lo[None], hi[None])
    ranges, gradients = f.ranges_and_gradients(cell)
    natural = f.ranges(cell)
    assert natural.lo == ranges.lo
    assert natural.hi == ranges.hi
    assert not np.isnan([gradients.lo, gradients.hi]).any()
    points = np.concatenate([points, lo[None], hi[None]])
    with precision(160):
        values = [tree_value(f.outputs[0], dict(zip("xy", map(arb, p.tolist()), strict=True))) for p in points]
        for value in values:
            assert not surely_outside(value, ranges[0, 0])
        computed = f(points)[:, 0]
        for value, y in zip(values, computed.tolist(), strict=True):
            assert not abs(value - arb(y)) > arb(1e-9) * (1 + abs(value))
        if not gradients.is_bounded.all():
            return
        for p, u in zip(points, values, strict=True):
            for q, v in zip(points, values, strict=True):
                bound = Interval.point(0.0)
                for i in range(2):
                    bound = bound + gradients[0, 0, i] * (Interval.point(p[i]) - Interval.point(q[i]))
                assert not surely_outside(u - v, bound)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions(("x", "y"), max_depth=4), st.data())
def test_ranges_and_mean_values_contain_arb(text: str, data: st.DataObject) -> None:
    _check_enclosure(text, data)


@pytest.mark.slow
@settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions(("x", "y"), max_depth=6), st.data())
def test_ranges_and_mean_values_of_many_expressions(text: str, data: st.DataObject) -> None:
    _check_enclosure(text, data)


# Gradients


GRADIENTS = {
    "abs(x)": [((-1.0, 2.0), [-1, 1]), ((0.0, 2.0), [1, 1]), ((0.0, 0.0), [-1, 1])],
    "relu(x)": [((-2.0, 0.0), [0, 0]), ((-2.0, 1.0), [0, 1])],
    "max(x, 3 - 2*x)": [((0.0, 0.5), [-2, -2]), ((0.5, 1.5), [-2, 1])],
    "min(x, 2*x, 3*x)": [((1.0, 4.0), [1, 3])],
    "clip(x, -1, 1)": [((-0.5, 0.5), [1, 1]), ((0.5, 3.0), [0, 1]), ((2.0, 3.0), [0, 0])],
    "sign(x)": [((1.0, 2.0), [0, 0]), ((-1.0, 2.0), [0, np.inf])],
    "floor(x)": [((0.25, 0.75), [0, 0])],
    "-floor(x)": [((0.25, 1.0), [-np.inf, 0])],
    "sqrt(x)": [((0.0, 4.0), [0.25, np.inf])],
    "x*x": [((-1.0, 2.0), [-2, 4])],
    "x**3": [((-1.0, 2.0), [0, 12])],
    "x**1": [((-1.0, 2.0), [1, 1])],
    "x**0": [((-1.0, 2.0), [0, 0])],
    "3*x - x": [((-1.0, 2.0), [2, 2])],
}


@pytest.mark.parametrize(
    ("text", "sides", "expected"), [(text, *case) for text, cases in GRADIENTS.items() for case in cases]
)
def test_gradients_known_exactly(text: str, sides: tuple[float, float], expected: list[float]) -> None:
    _, gradient = Expression.parse(text).ranges_and_gradients(box(sides))
    assert ends(gradient) == expected


def test_unbounded_derivatives_are_infinite_on_their_side() -> None:
    for text, sides in [("x**0.5", (0.0, 1.0)), ("asin(x)", (-1.0, 1.0)), ("x**y", (0.0, 1.0))]:
        f = Expression.parse(text)
        _, gradient = f.ranges_and_gradients(box(sides, *[(0.5, 1.0)] * (len(f.variables) - 1)))
        assert gradient.lo.flat[0] >= 0
        assert gradient.hi.flat[0] == np.inf
    _, gradient = Expression.parse("acos(x)").ranges_and_gradients(box((0.0, 1.0)))
    assert gradient.lo.item() == -np.inf
    assert gradient.hi.item() < -0.99


def test_gradients_are_tight_on_small_boxes() -> None:
    f = Expression.parse("exp(sin(x)*y) + x**y/(1 + y**2) + tanh(x - y)")
    x = np.random.default_rng(1).uniform(0.5, 2, (100, 2))
    _, g = f.ranges_and_gradients(Interval(x, x))
    step = 1e-6
    for i in range(2):
        shift = step * np.eye(2)[i]
        numeric = (f(x + shift) - f(x - shift)) / (2 * step)
        assert np.abs(g.mid[:, :, i] - numeric).max() < 1e-7
    assert (g.width <= 1e-12 * (1 + g.mag)).all()


def test_long_sums_and_products() -> None:
    many = Expression.parse("*".join(["(1 + x/500)"] * 200 + ["cos(x/100)"] * 200))
    value, gradient = many.ranges_and_gradients(box((0.99, 1.01)))
    assert value.contains(many([[1.0]])).all()
    assert gradient.is_bounded.all()
    distinct = Expression.parse("*".join(f"(1 + x/{1000 + i})" for i in range(300)))
    value, gradient = distinct.ranges_and_gradients(box((0.99, 1.01)))
    slope = (distinct([[1.001]]) - distinct([[0.999]])) / 0.002
    assert gradient.contains(slope[..., None]).all()


def test_the_work_grows_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 factors and their gradients take a few products each, not 400² of them."""
    f = Expression.parse("*".join(f"(x + {i})" for i in range(400)))
    calls = 0
    multiply = Interval.__mul__

    def counted(a: Interval, b: Interval) -> Interval:
        nonlocal calls
        calls += 1
        return multiply(a, b)

    monkeypatch.setattr(Interval, "__mul__", counted)
    f.ranges_and_gradients(box((0.0, 0.5)), violations="infinite")
    assert calls <= 5 * 400


def test_boxes_are_worked_in_chunks() -> None:
    f = Expression.parse("exp(sin(x)*y)")
    lo = np.random.default_rng(3).uniform(-1, 1, (20_001, 2))
    cells = Interval(lo, lo + 0.01)
    ranges, gradients = f.ranges_and_gradients(cells)
    for i in (0, 8191, 8192, 20_000):
        one, slope = f.ranges_and_gradients(cells[i : i + 1])
        assert ends(one) == ends(ranges[i])
        assert slope.lo.tolist() == gradients.lo[i : i + 1].tolist()


def test_nothing_heavy_is_imported() -> None:
    heavy = "[name for name in ('scipy', 'torch', 'matplotlib') if name in sys.modules]"
    code = f"import sys, attnc.targets.expressions.expression; print({heavy})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["x**(10**30)", "x**(2**60)", "x**(-(7**25))", "x**(1000*pi)", "sin(x**(2**64 + 1))"])
def test_constant_exponents_are_limited(text):
    """The checker has the same limit for numbers."""
    with pytest.raises(ExpressionError, match="the exponent is beyond 1000"):
        Expression.parse(text)


def test_constant_exponents_within_the_limit():
    assert Expression.parse("x**(7**25/7**24) + x**(10*pi) + 2**x + x**(2**9)").variables == ("x",)
