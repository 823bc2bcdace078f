from __future__ import annotations

import contextlib
import warnings
from fractions import Fraction

import pytest
from hypothesis import given

from attnc.errors import ExpressionError
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.parsing import MAX_DEPTH
from attnc.targets.expressions.tree import (
    Call,
    Negate,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    schedule,
    to_text,
    walk,
)
from strategies.expressions import expressions

X, Y = Variable("x"), Variable("y")


def number(value: object) -> Number:
    return Number(Fraction(str(value)))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("x", X),
        (" \t-x\n", Negate(X)),
        ("x + y - 1", Sum((X, Y, number(-1)))),
        ("x - (y - x)", Sum((X, Negate(Sum((Y, Negate(X))))))),
        ("-x**2", Negate(Power(X, number(2)))),
        ("(-x)**2", Power(Negate(X), number(2))),
        ("x**-2", Power(X, number(-2))),
        ("2**x**y", Power(number(2), Power(X, Y))),
        ("x*y/2*x", Product((Quotient(Product((X, Y)), number(2)), X))),
        ("1/3*x", Product((Number(Fraction(1, 3)), X))),
        ("x**(1/3)", Power(X, Number(Fraction(1, 3)))),
        ("0.1 + 0.2", number("0.3")),
        ("2**10", number(1024)),
        ("+x", X),
        ("max(x, y, 1e-3)", Call("max", (X, Y, number("0.001")))),
        ("x\n+\ny", Sum((X, Y))),
        ("1/0", Quotient(number(1), number(0))),
        ("00", number(0)),
        ("0e999999999", number(0)),
    ],
)
def test_trees(text: str, tree: object) -> None:
    assert Expression.parse(text).outputs == (tree,)


def test_outputs_and_variables() -> None:
    f = Expression.parse("(b*sin(a), pi + e, a**c)")
    assert f.is_tuple
    assert f.variables == ("b", "a", "c")
    assert len(f.outputs) == 3
    assert Expression.parse("x,").is_tuple
    assert not Expression.parse("(x)").is_tuple
    assert Expression.parse("floor(x) + sign(y)").discontinuous == ("sign", "floor")
    assert Expression.parse("abs(x)").discontinuous == ()


REFUSED = [
    ("empty", [("", 0), ("   ", 0)]),
    (r"x\*\*2", [("x^2", 1)]),
    (r"2\*x", [("2x", 1)]),
    (r"\*", [("1j", 1), ("1_000", 1), ("0x10", 1)]),
    ("Did you mean sin", [("x + sinn(y)", 4), ("Sin(x)", 0)]),
    ("Did you mean atan", [("arctan(x)", 0)]),
    (r"Write log\(x\)", [("2*ln(x)", 2)]),
    (r"Write x\*\*y", [("pow(x, 2)", 0)]),
    (r"Write \* for a product", [("x(2)", 0)]),
    ("not a function", [("f(x)", 0)]),
    ("is a number", [("pi(x)", 0)]),
    ("only a function can be called", [("2(x)", 0), ("sin(x)(y)", 0)]),
    ("min is a function", [("x + min", 4)]),
    ("clip is a function", [("clip*x", 0)]),
    ("2 or more arguments", [("min(x)", 0)]),
    ("1 argument, and got 2", [("sin(x, y)", 0)]),
    ("3 arguments, and got 2", [("clip(x, 1)", 0)]),
    ("got 0", [("sin()", 0)]),
    ("starred", [("min(*x)", 4)]),
    ("by position", [("sin(**x)", 0)]),
    ("not allowed", [("sin(x=1)", 5), ("'x'", 0), ("f'{x}'", 1), ("(x := 1)", 3), ("x # y", 2), ("x @ y", 2)]),
    ("not allowed", [("x < y", 2), ("x + é", 4), ("(*x, y)", 1)]),
    ("attributes", [("x.real", 1)]),
    ("parentheses", [("x[0]", 1)]),
    ("word of Python", [("lambda: x", 0), ("x if y else 1", 2), ("not x", 0), ("True", 0)]),
    ("names start with a letter", [("__import__", 0), ("x + _y", 4)]),
    ("floor", [("x // y", 2), ("x % y", 2)]),
    ("Write pi", [("π*x", 0)]),
    ("ASCII", [("x − y", 2)]),
    ("U\\+0000", [("x\0", 1)]),
    ("ends too early", [("x +", 3)]),
    ("cannot be read", [("x 2", 2)]),
    ("never closed", [("  (x + y", 2)]),
    ("unmatched", [("x +\n  y)", 7)]),
    ("only around the whole", [("(x, (y, x))", 4)]),
    ("no expression", [("()", 0)]),
    ("beyond 1000", [("x**1001", 3), ("x**-1e9", 3), ("9**9**9", 3)]),
    ("larger than the largest", [("1e309", 0)]),
    ("smaller than the smallest", [("x + 1e-400", 4), ("1e-999999999", 0)]),
    ("digits", [("9" * 401, 0), ("0." + "1" * 5000, 0)]),
    ("zeros", [("007", 0)]),
]
"""The words of a message, and the texts that get it with the position of the fault."""


@pytest.mark.parametrize(
    ("text", "position", "words"), [(text, position, words) for words, texts in REFUSED for text, position in texts]
)
def test_refusals_say_where_and_why(text: str, position: int, words: str) -> None:
    with pytest.raises(ExpressionError, match=words) as caught:
        Expression.parse(text)
    assert caught.value.position == position
    assert caught.value.text == text


@pytest.mark.parametrize(
    "text",
    [
        *(sign * count + "x" for sign, count in (("-", 150), ("-", 5000), ("+", 9000), ("x**", 3000), ("x/", 4000))),
        *("(" * opened + "x" + ")" * closed for opened, closed in ((90, 89), (5000, 4000))),
        *("sin(" * count + "x" + ")" * count for count in (101, 1500)),
        *("+".join("x" * 5001), "x*" * 10_000, "x" * 10_001),
    ],
)
def test_too_deep_or_too_long(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression.parse(text)


def test_not_text() -> None:
    with pytest.raises(ExpressionError, match="is text"):
        Expression.parse(3)  # type: ignore[arg-type]


def test_what_is_large_but_allowed() -> None:
    terms = Expression.parse(" + ".join(f"x{i}*sin({i}*x)" for i in range(400)))
    assert isinstance(terms.outputs[0], Sum)
    assert len(terms.outputs[0].terms) == 400
    factors = Expression.parse("*".join(["(1 + x)"] * 400)).outputs[0]
    assert isinstance(factors, Product)
    nested = Expression.parse("sin(" * (MAX_DEPTH - 1) + "x" + ")" * (MAX_DEPTH - 1))
    assert Expression.parse(to_text(nested.outputs[0])).outputs == nested.outputs
    assert Expression.parse("(" * 80 + "x" + ")" * 80).outputs == (X,)


def test_large_literals_are_exact_and_not_folded() -> None:
    f = Expression.parse("1e300*1e300")
    assert f.outputs == (Product((number("1e300"), number("1e300"))),)
    assert to_text(f.outputs[0]) == "1e300*1e300"
    assert Expression.parse("3**40").outputs == (Power(number(3), number(40)),)
    assert Expression.parse("5e-324").outputs == (number("5e-324"),)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("x+y-1", "x + y - 1"),
        ("x - (y-1)", "x - (y - 1)"),
        ("-(x*y)", "-(x*y)"),
        ("-x*y", "-x*y"),
        ("x*(-y)", "x*-y"),
        ("(x**y)**2", "(x**y)**2"),
        ("x**(-1/3)", "x**(-1/3)"),
        ("x/(y*2)", "x/(y*2)"),
        ("x/(y/2)", "x/(y/2)"),
        ("x - -2", "x + 2"),
        ("min(x,y)*0.10", "min(x, y)*0.1"),
        ("--x", "--x"),
    ],
)
def test_text_of_trees(text: str, rendered: str) -> None:
    (tree,) = Expression.parse(text).outputs
    assert to_text(tree) == rendered
    assert Expression.parse(rendered).outputs == (tree,)


@given(expressions(("x", "y", "z"), max_depth=5))
def test_round_trip(text: str) -> None:
    (tree,) = Expression.parse(text).outputs
    assert Expression.parse(to_text(tree)).outputs == (tree,)


def test_equal_sub_expressions_are_evaluated_once() -> None:
    doubled = "x"
    for _ in range(9):
        doubled = f"({doubled} + {doubled})"
    assert len(schedule(Expression.parse(doubled).outputs)[0]) == 10
    f = Expression.parse("(sin(x*y) + cos(sin(x*y)), sin(x*y))")
    assert sum(isinstance(node, Call) and node.name == "sin" for node in walk(f.outputs)) == 1
    steps, outputs = f.schedule
    assert [steps[i].node for i in outputs] == list(f.outputs)


def test_no_warnings_from_the_parser() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("1if x else y", "1or x", "0x1for x", "1(x)", "1.e5", "'\\d'"):
            with contextlib.suppress(ExpressionError):
                Expression.parse(text)
