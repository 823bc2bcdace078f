"""Equal expressions, however they are written, and expressions that are not equal."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.targets.expressions.canonical import equivalent
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Negate, Node, Number, Product, Sum
from attnc.targets.parts.lowering import Lowering
from attnc.targets.parts.part_ranges import PartRanges
from strategies.expressions import expressions


def same(left: str, right: str) -> bool:
    return equivalent(Expression.parse(left).outputs, Expression.parse(right).outputs)


EQUAL = [
    ("x + y - x", "y"),
    ("2*(x + y)*z", "z*y*2 + 2*x*z"),
    ("(x + y)**2", "x**2 + 2*x*y + y*y"),
    ("0.1*x + 0.2*x", "3*x/10"),
    ("x/y/z", "x/(y*z)"),
    ("x*y/x", "y"),
    ("1/(2*x + 2*y)", "0.5/(y + x)"),
    ("pi*(x + y)*z", "(pi*x + pi*y)*z"),
    ("max(x, y, z)", "x + relu(y - x) + relu(z - (x + relu(y - x)))"),
    ("min(x, sin(y))", "x - relu(x - sin(y))"),
    ("clip(x*y, -1, 0.5)", "-1 + relu(x*y + 1) - relu(x*y - 0.5)"),
    ("clip(x, y, z)", "min(max(x, y), z)"),
    ("x**y", "exp(y*log(x))"),
    ("x**(2*3 - 1)", "x**4*x"),
    ("((x + y)**2)**3", "(x + y)**6"),
    ("sin(x + y - y)", "sin(x)"),
    ("sin(2*x)", "2*sin(x)*cos(x)"),
    ("cos(3*x*y)", "1 - 2*sin(3*x*y/2)**2"),
    ("sin(x)**2 + cos(x)**2", "1"),
    ("cos(x)**2*sin(x) + sin(x)**3", "sin(x)"),
    ("sin(4*x)", "4*sin(x)*cos(x)*cos(2*x)"),
    ("sin(-x)", "-sin(x)"),
    ("(x, y)", "(x + 0, y*1)"),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal_expressions_are_found_equal(left, right):
    assert same(left, right)
    assert same(right, left)


UNEQUAL = [
    ("x", "y"),
    ("x", "x + 1e-300"),
    ("0.1*x", "0.1000000000000000055511151231257827*x"),
    ("sin(x)", "cos(x)"),
    ("sin(2*x)", "2*sin(x)"),
    ("cos(2*x)", "1 - 2*cos(x)**2"),
    ("x**y", "y**x"),
    ("max(x, y)", "min(x, y)"),
    ("clip(x, -1, 1)", "clip(x, -1, 1.0000000001)"),
    ("1/(x + y)", "1/x + 1/y"),
    ("relu(x)*y", "relu(x*y)"),
    ("exp(x + y)", "exp(x) + exp(y)"),
    ("pi*x", "3.141592653589793*x"),
    ("sqrt(x)", "x**0.25"),
    ("sin(40*x)", "sin(41*x)"),
    ("(x, y)", "(y, x)"),
    ("(x, y)", "x"),
]


@pytest.mark.parametrize(("left", "right"), UNEQUAL)
def test_different_expressions_are_not_taken_for_equal(left, right):
    assert not same(left, right)


def test_long_products_do_not_run_away():
    names = "abcdfghijklmnopqrstu"
    text = "*".join(f"(1 + {name} + {name}**2)" for name in names)
    backwards = "*".join(f"({name}**2 + 1 + {name})" for name in reversed(names))
    assert same(text, backwards)
    assert not same(text, backwards + "*1.0001")
    assert not same("(a + b + c + d)**200", "(a + b + c + d)**201")


@given(expressions(("x", "y")), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_what_is_rewritten_stays_equal_and_what_is_changed_does_not(text, seed):
    rng = np.random.default_rng(seed)
    (tree,) = Expression.parse(text).outputs
    assert equivalent([_rewritten(tree, rng)], [tree])
    assert not equivalent([Sum((tree, Number(Fraction(1, 10**9))))], [tree])


def _rewritten(tree: Node, rng: np.random.Generator) -> Node:
    """Terms and factors in another order, 0 added, 1 multiplied, signs doubled."""
    match tree:
        case Sum(terms):
            order = rng.permutation(len(terms))
            return Sum((*(_rewritten(terms[i], rng) for i in order), Number(Fraction(0))))
        case Product(factors):
            order = rng.permutation(len(factors))
            return Product((*(_rewritten(factors[i], rng) for i in order), Number(Fraction(1))))
        case _:
            return Negate(Negate(tree))


@given(expressions(("x", "y", "z")), st.booleans(), st.sampled_from([(), ("tanh", "relu", "gelu")]))
@settings(max_examples=150)
def test_expressions_that_are_taken_apart_are_still_the_same(text, together, gates):
    """Whatever `Lowering` does with an expression, its parts put together again are known to be equal to it."""
    expression = Expression.parse(text).with_variables(("x", "y", "z"))
    parts = Lowering(expression.variables, lambda base, tree: together, gates).lower(expression.outputs)
    ranges = PartRanges.__new__(PartRanges)
    ranges._variables, ranges._trees, ranges._kept = expression.variables, {}, []
    assert equivalent([ranges.tree(part) for part in parts], expression.outputs)
