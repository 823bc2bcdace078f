"""Half-lines: the bound is above the error that is seen far out, and close to it."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb, fmpq

from attnc.targets.expressions.expression import Expression
from attnc_checker.expressions import parse
from attnc_checker.rounding import Arithmetic
from attnc_checker.tails import Undecided, tail_error
from checker.networks import gate, reduced

SIGMOID = gate([(0, 0), (0, 1)], [(0, 0), (0, 1)])  # x·σ(x)
THREE = gate([(0.5, -0.75), (0.25, 0), (0, 1)], [(1, -1), (0.5, 0.25), (-1, 1)])


def error_beyond(program, text, start=4.0, side=1):
    at = fmpq(*float(start).as_integer_ratio())
    constant, slope = tail_error(reduced(program), parse(text, ["x"]), at, side, Arithmetic("real"))
    assert slope == 0
    return constant


@pytest.mark.parametrize(
    ("program", "text", "start", "side", "looseness"),
    [
        (SIGMOID, "x", 4, 1, 1.2),
        (SIGMOID, "0", -4, -1, 1.2),
        (SIGMOID, "x", 0.25, 1, 4),  # where x·e^{−x} has its top beyond the start
        (SIGMOID, "relu(x)", 3, 1, 1.2),
        (SIGMOID, "gelu(x)", 3, 1, 1.2),
        (SIGMOID, "gelu(x)", -3, -1, 1.2),
        (SIGMOID, "max(x, -x/2, 1) + exp(-2*x)", 3, 1, 1.2),
        (SIGMOID, "x*tanh(softplus(x))", 3, 1, 2.5),
        (SIGMOID, "x*(erf(x/2) + 1)/2", 5, 1, 1.2),
        (SIGMOID, "clip(x, -1, 1) + 1", -3, -1, 1.2),
        (SIGMOID, "abs(x)*sigmoid(-3*x)**2 + x", 2, 1, 1.5),
        (SIGMOID, "x + atan(3*x - 5) - pi/2", 4, 1, 3.2),  # by its range
        (THREE, "x - 1", 3, 1, 1.2),
        (THREE, "1 - x + sigmoid(x)", -6, -1, 1.2),
        (THREE, "softplus(-x) + 1", -5, -1, 1.2),
    ],
)
def test_above_what_is_seen(program, text, start, side, looseness):
    found = float(error_beyond(program, text, start, side))
    points = start + side * np.concatenate([np.linspace(0, 20, 4001), np.geomspace(20, 600, 200)])[:, None]
    f = Expression.parse(text).with_variables(["x"])
    seen = float(np.abs(program(points) - f(points)).max())
    assert seen * (1 - 1e-9) <= found <= looseness * seen


@pytest.mark.parametrize(
    "text", ["x + 1e-9*x", "x**2", "x + sin(x)*x", "exp(x)", "sqrt(x)", "floor(x)", "abs(x - 10)", "x + atan(x)*x"]
)
def test_what_is_not_followed_is_refused(text):
    with pytest.raises(Undecided):
        error_beyond(SIGMOID, text)


def test_ties_with_different_values_are_refused():
    tie = gate([(0, 0), (0, 1), (1, 1)], [(0, 0), (0, 1), (1, 1)])
    with pytest.raises(Undecided, match="win together"):
        error_beyond(tie, "x")
    same = gate([(0, 0), (0, 1), (1, 1)], [(0, 0), (0, 1), (0, 1)])
    one = gate([(0, 0), (float(np.log(1 + np.e)), 1)], [(0, 0), (0, 1)])
    together, alone = (error_beyond(program, "x") for program in (same, one))
    assert abs(together - alone) < arb(1e-12)


def test_a_slope_that_cannot_be_told_from_zero_is_refused():
    """10⁻⁵²·x − 20: whether the sigmoid ends at 0 or at 1 is beyond the precision, and it is 1."""
    above_pi = "3.14159265358979323846264338327950288419716939937510592"
    for text in (f"sigmoid(x*({above_pi} - pi) - 20)", f"exp(x*({above_pi} - pi) - 20)"):
        with pytest.raises(Undecided, match="rises or falls"):
            error_beyond(SIGMOID, text)
