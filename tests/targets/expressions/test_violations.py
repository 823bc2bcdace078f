"""Expressions that are not defined on all of a box: found, named, or shown to be false alarms."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.errors import DomainError, InputError
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression
from targets.boxes import box, ends


@pytest.mark.parametrize(
    ("text", "sides", "words"),
    [
        ("1 + sin(x)/x", [(-0.25, 0.25)], r"the divisor x contains 0 on x in \[-0.25, 0.25\].*excludes 0, or"),
        ("1/x", [(0.0, 1.0)], "the divisor x contains 0"),
        ("x**-1", [(-1.0, 1.0)], "the base x of a negative power contains 0"),
        ("log(x - 1)", [(1.0, 2.0)], r"the argument x - 1 is not positive.*\[0, 1\]"),
        ("sqrt(y*x)", [(-1.0, 1.0), (1.0, 2.0)], r"y\*x is negative on y in \[-1, 1\], x in \[1, 2\]"),
        ("tan(x)", [(1.0, 2.0)], "pole"),
        ("asin(2*x)", [(0.0, 1.0)], r"2\*x leaves \[-1, 1\]"),
        ("acos(2*x)", [(-1.0, 0.0)], r"clip\(2\*x, -1, 1\)"),
        ("x**0.5", [(-1.0, 1.0)], "not an integer"),
        ("x**y", [(0.0, 1.0), (0.0, 1.0)], "zero to an exponent"),
        ("exp(x)", [(0.0, 1000.0)], "not bounded"),
        ("1e300*x*x", [(0.0, 1e10)], "not bounded"),
    ],
)
def test_violations(text: str, sides: list[tuple[float, float]], words: str) -> None:
    f = Expression.parse(text)
    for call in (f.ranges, f.ranges_and_gradients):
        with pytest.raises(DomainError, match=words):
            call(box(*sides))
    with pytest.raises(DomainError, match="cannot bound"):
        f.check_domain(sides)
    both = Interval(
        np.stack([np.array([s[1] for s in sides]), box(*sides).lo[0]]), np.array([[s[1] for s in sides]] * 2)
    )
    ranges, gradients = f.ranges_and_gradients(both, violations="infinite")
    assert ends(ranges[1]) == [-np.inf, np.inf]
    assert np.isinf(gradients.lo[1]).all()
    assert np.isinf(gradients.hi[1]).all()


def test_bounded_functions_do_not_hide_a_violation() -> None:
    """tanh(1/x) would be bounded by [−1, 1], but is not defined at 0."""
    result = Expression.parse("tanh(1/x)").ranges(
        Interval(np.array([[-1.0], [1.0]]), np.array([[1.0], [2.0]])), violations="infinite"
    )
    assert result.lo[0] == -np.inf
    assert result.hi[1] < 1
    with pytest.raises(InputError, match="violations"):
        Expression.parse("x").ranges(box((0, 1)), violations="ignore")  # type: ignore[arg-type]


def test_unbounded_boxes() -> None:
    f = Expression.parse("tanh(x) + exp(-y)")
    result = f.ranges(box((-np.inf, np.inf), (0.0, np.inf)))
    assert result.lo.item() == -1
    assert 2 <= result.hi.item() < 2.001
    assert ends(Expression.parse("2*x").ranges(box((0.0, np.inf)))) == [0, np.inf]


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("1/(1.05 - 4*x*(1 - x))", [(0.0, 1.0)]),
        ("sqrt(x*x - 2*x + 1.01)", [(-3.0, 3.0)]),
        ("log(1 + x**2 - x)", [(-10.0, 10.0)]),
        ("1/(1.001 - sin(x)*cos(y))", [(-3.0, 3.0), (-3.0, 3.0)]),
        ("sqrt(1 - x**2)", [(-1.0, 1.0)]),
        ("sqrt(1 - x*y)", [(0.1, 1.0), (0.1, 1.0)]),
        ("asin(1/(1 + x**2))", [(-3.0, 3.0)]),
        ("log(2 + x*y - x*y)", [(-1.0, 1.0), (-1.0, 1.0)]),
        ("3", []),
        ("x**y", [(0.0, 1.0), (0.5, 1.0)]),
    ],
)
def test_false_violations_are_resolved(text: str, sides: list[tuple[float, float]]) -> None:
    Expression.parse(text).check_domain(sides)


@pytest.mark.parametrize(
    ("text", "sides", "words"),
    [
        ("1/(x**2 - 2)", [(0.0, 2.0)], "both signs"),
        ("tan(x*y)", [(0.0, 1.0), (0.0, 4.0)], "cosine takes both signs"),
        ("sqrt(x*x - 2*x + 0.99)", [(-3.0, 3.0)], "the violation is at x = "),
        ("1/sign(x)", [(-1.0, 1.0)], "the violation is at x = 0"),
        ("sin(x)/x", [(-1.0, 1.0)], "the divisor x contains 0 on x in .* the violation is at x = 0"),
        ("1/0", [], "at any point"),
        ("sqrt(x*x - 2*x + 1)", [(0.0, 3.0)], "neither confirm nor refute"),
        ("1/(floor(x) + 0.5)", [(-1.0, 1.3)], "neither confirm nor refute"),
    ],
)
def test_real_and_undecided_violations(text: str, sides: list[tuple[float, float]], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        Expression.parse(text).check_domain(sides)


def test_check_domain_takes_bounded_boxes_and_keeps_to_its_budget() -> None:
    f = Expression.parse("1/(y - x)")
    with pytest.raises(InputError, match="bounded box"):
        f.check_domain([(0.0, np.inf), (1.0, 2.0)])
    with pytest.raises(InputError):
        f.check_domain([(0.0, 1.0)])
    hard = Expression.parse("log(1.0005 - 4*x*(1 - x)*sin(y)*cos(z))")
    with pytest.raises(DomainError, match=r"which (\d{1,3}) sub-boxes"):
        hard.check_domain([(0.0, 1.0), (0.0, 6.0), (0.0, 6.0)], budget=500)
    hard.check_domain([(0.0, 1.0), (0.0, 6.0), (0.0, 6.0)])
