"""Enclosures of expressions over cells."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnc.errors import DomainError
from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from constructions.errors import target_of
from strategies.expressions import expressions


@settings(max_examples=60, deadline=None)
@given(text=expressions(("x", "y")), centre=st.tuples(*[st.floats(-3, 3)] * 2), width=st.floats(1e-6, 1.0))
def test_enclosures_contain_the_values(text, centre, width):
    expression = Expression.parse(text)
    assume(expression.variables and not expression.discontinuous)
    lo = np.array(centre[: len(expression.variables)])
    try:
        target = ExpressionTarget(expression, Box.parse([(-4, 4)] * len(lo), expression.variables))
    except DomainError:
        assume(False)
    found = target.enclosure(Interval(lo[None], lo[None] + width))
    points = lo + np.random.default_rng(0).random((200, len(lo))) * width
    points[0], points[1] = lo, lo + width
    at_points = target.expression.ranges(Interval.point(points), violations="infinite")
    assert (at_points.hi >= found.lo).all()
    assert (at_points.lo <= found.hi).all()


def test_enclosures_of_monotone_functions_are_ranges():
    target = target_of("sqrt(x)*exp(y) - x", (0, 0.1), (0, 1))
    cells = Interval(np.array([[0.0, 0.2]]), np.array([[0.04, 0.6]]))
    found = target.enclosure(cells)
    ends = target(np.array([[0.0, 0.2], [0.04, 0.6]]))
    assert found.lo[0, 0] <= ends[0, 0] == 0
    assert found.hi[0, 0] >= ends[1, 0] > 0.99 * found.hi[0, 0]
