"""Bounds on half-lines against Arb: no point beyond R is farther off, and they are of the size of observed errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

import attnc
from attnc.errors import InputError
from attnc.proofs.kinds.tail import expression_tails, tail_bound
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.expressions.expression import Expression
from proofs.small_stages import enclosed, exact_errors, head_of, stage_of
from strategies.reference import precision, tree_value

DISTANCES = (0.0, 1e-9, 1e-3, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4, 1e8)

FUNCTIONS = {  # slopes at −∞ and ∞
    "gelu(x)": (0, 1),
    "silu(x)": (0, 1),
    "sigmoid(2*x - 1)": (0, 0),
    "tanh(x)": (0, 0),
    "relu(x)": (0, 1),
    "abs(x)": (-1, 1),
    "softplus(x)": (0, 1),
    "clip(x, -2, 1.5)": (0, 0),
    "erf(x/2)": (0, 0),
    "x*sigmoid(x)": (0, 1),
    "x/(1 + exp(-x))": (0, 1),
    "0.5*x*(1 + tanh(0.79788456*(x + 0.044715*x**3)))": (0, 1),
    "x*(1 + erf(x/sqrt(2)))/2": (0, 1),
    "3*relu(x - 2) - 0.5*x + tanh(-x)": (-0.5, 2.5),
    "max(x, -x, 2) - min(x, 1)": (-2, 1),
    "relu(x) + 0.25*gelu(-2*x) - exp(-x**2)": (-0.5, 1),
    "atan(x) + 2**0.5": (0, 0),
    "x - tanh(x)*softplus(x)": (2 - 1, 0),
}


def errors_at(stage: OneStage, expression: Expression, points) -> list[arb]:
    found = [exact_errors(stage, expression, [float(x)])[0] for x in points]
    for error in found:
        assert error.is_finite()
        assert float(error.rad()) < 1e-25
    return found


def gate(slopes, offsets, values, carried=None, radius: float = 0.0) -> OneStage:
    """One head of one variable, one output."""
    moving = None if carried is None else np.array(carried)[:, None, None]
    return stage_of([head_of((np.array(slopes)[:, None], offsets, np.array(values)[:, None], moving), radius)], 1)


def random_gate(rng: np.random.Generator, ends: tuple[float, float]) -> OneStage:
    """A head whose steepest keys carry the slopes of f, so that the error is bounded; all else is at random."""
    p = int(rng.integers(2, 10))
    slopes = np.sort(rng.normal(size=p) * 10 ** rng.uniform(-1, 2))
    offsets, values, moving = rng.normal(size=p) * 3, rng.normal(size=p), rng.normal(size=p)
    moving[0], moving[-1] = ends
    if rng.random() < 0.3 and p > 3:  # two keys share the last place
        slopes[-2] = slopes[-1]
        moving[-2] = moving[-1]
    return gate(slopes, offsets, values, moving)


@given(text=st.sampled_from(sorted(FUNCTIONS)), seed=st.integers(0, 10**6), R=st.sampled_from([3.0, 5.5, 12.0, 40.0]))
def test_no_point_beyond_R_is_farther_off(text, seed, R):
    stage, expression = random_gate(np.random.default_rng(seed), FUNCTIONS[text]), Expression.parse(text)
    for side in (1, -1):
        (bound,) = tail_bound(stage, expression, side, R).constant
        assert math.isfinite(bound)
        with precision(2000):
            found = errors_at(stage, expression, [side * (R + t) for t in DISTANCES])
            assert not any(error > arb(float(bound)) for error in found)


@given(text=st.sampled_from(sorted(FUNCTIONS)), R=st.floats(3, 30), side=st.sampled_from([1, -1]))
def test_tails_of_expressions_enclose_them(text, R, side):
    expression = Expression.parse(text)
    (tail,) = expression_tails(expression, side, R)
    assert float(tail.q.lo) == float(tail.q.hi) == side * FUNCTIONS[text][side > 0]
    with precision(2000):
        for t in map(arb, DISTANCES[:-2]):
            value = tree_value(expression.outputs[0], {"x": side * (arb(R) + t)}) - float(tail.q.lo) * t
            reach = float(tail.error) * (-min(float(tail.rate), 1e6) * t).exp()
            assert not value > float(tail.p.hi) + reach
            assert not value < float(tail.p.lo) - reach


@pytest.mark.parametrize(
    ("text", "stage", "R", "most"),
    [
        ("relu(x)", gate([0, 1000.0], [0, 0], [0, 0], [0, 1.0]), 1e-3, 1.5),
        ("silu(x)", gate([0, 2.0], [0, 0], [0, 0], [0, 1.0]), 2.0, 2.0),
        ("tanh(x)", gate([-1, 1.0], [0, 0], [-0.9, 0.9]), 4.0, 1.1),
        ("gelu(x)", gate([0, 1.702], [0, 0], [0, 0], [0, 1.0]), 5.0, 1.2),
    ],
)
def test_bounds_are_of_the_size_of_the_error(text, stage, R, most):
    expression = Expression.parse(text)
    for side in (1, -1):
        (bound,) = tail_bound(stage, expression, side, R).constant
        with precision(300):
            seen = max(map(float, errors_at(stage, expression, side * (R + np.linspace(0, 3 * R, 200)))))
        assert seen <= bound <= most * seen


SILU = gate([0, 1.0], [0, 0], [0, 0], [0, 1.0])
TANH = head_of(([[-1.0], [1.0]], [0.0, 0.0], [[-1.0, 0.0], [1.0, 0.0]], None))
FLAT = head_of(([[0.0]], [3.0], [[0.0, 1.0]], None))
WITH_RESIDUAL = OneStage((TANH, FLAT), enclosed([0.0, 0.0]), enclosed([[1.0], [-1.0]]))


@pytest.mark.parametrize(
    ("stage", "text", "R"),
    [(SILU, "silu(x)", 40.0), (SILU, "x/(1+exp(-x))", 40.0), (WITH_RESIDUAL, "(x + tanh(x), 1 - x)", 20.0)],
)
def test_exact_gates_are_exact_far_out(stage, text, R):
    """Also with several heads and outputs: tanh in output 0, 1 in output 1, and the residual carries x to both."""
    for side in (1, -1):
        bounds = tail_bound(stage, Expression.parse(text), side, R).constant
        assert bounds.shape == stage.constant.mid.shape
        assert (bounds < 1e-15).all()


RELU = gate([0, 10.0], [0, 0], [0, 0], [0, 1.0])
VAGUE_RELU = gate([0, 10.0], [0, 0], [0, 0], [0, 1.0], radius=1e-16)
UNORDERED = gate([1.0, 1.0], [0, 0], [0.0, 1.0], radius=1e-9)


@pytest.mark.parametrize(("stage", "text"), [(RELU, "0.999*x"), (VAGUE_RELU, "relu(x)"), (UNORDERED, "tanh(x)")])
def test_another_slope_or_one_that_is_not_known_has_no_bound(stage, text):
    assert tail_bound(stage, Expression.parse(text), 1, 5.0).constant[0] == math.inf


@pytest.mark.parametrize("text", ["x**2", "sqrt(x)", "sin(x)", "x*atan(x)", "exp(x)", "log(x)", "x + y"])
def test_expressions_without_a_tail_are_refused(text):
    with pytest.raises(InputError, match="one variable" if "y" in text else "cannot bound the tail of"):
        tail_bound(RELU, Expression.parse(text), 1, 5.0)


@pytest.mark.parametrize("text", ["1.7*x", "gelu(0.3*x)", "0.1*x + tanh(x)"])
def test_a_slope_that_no_float_has_is_refused_and_explained(text):
    """0.3 is no float64 number: on all of R the error grows without bound, however small it is at samples."""
    with pytest.raises(attnc.BoundNotMet, match=r"exactly the slopes.*0\.3 is not.*finite box"):
        attnc.compile(text, box={"x": (-np.inf, np.inf)}, eps=1e-6)
    assert attnc.compile("gelu(0.25*x)", box={"x": (-np.inf, np.inf)}, eps=1e-6).certificate.bound <= 1e-6
