"""Bounds on half-lines against Arb: no point beyond R is farther off, and they are of the size of what is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

import attnc
from attnc.errors import InputError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.kinds.tail import expression_tails, tail_bound
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.expressions.expression import Expression
from proofs.one_stage_programs import enclosed, rational, stage_output
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


def exact_errors(stage: OneStage, text: str, points) -> list[arb]:
    (node,) = Expression.parse(text).outputs
    found = []
    for x in points:
        value = tree_value(node, {"x": arb(rational(x))})
        error = abs(stage_output(stage, np.array([x]))[0] - value)
        assert error.is_finite()
        assert float(error.rad()) < 1e-25
        found.append(error)
    return found


def gate(slopes, offsets, values, carried=None, radius: float = 0.0) -> OneStage:
    """One head of one variable, one output."""
    moving = None if carried is None else enclosed(np.array(carried)[:, None, None], radius)
    head = SoftHead(
        enclosed(np.array(slopes)[:, None], radius),
        enclosed(offsets, radius),
        enclosed(np.array(values)[:, None], radius),
        moving,
    )
    return OneStage((head,), enclosed([0.0]), enclosed([[0.0]]))


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
    rng = np.random.default_rng(seed)
    stage = random_gate(rng, FUNCTIONS[text])
    for side in (1, -1):
        (bound,) = tail_bound(stage, Expression.parse(text), side, R)
        assert math.isfinite(bound)
        points = [side * (R + t) for t in DISTANCES]
        with precision(2000):
            assert not any(error > arb(rational(bound)) for error in exact_errors(stage, text, points))


@given(text=st.sampled_from(sorted(FUNCTIONS)), R=st.floats(3, 30), side=st.sampled_from([1, -1]))
def test_tails_of_expressions_enclose_them(text, R, side):
    expression = Expression.parse(text)
    (tail,) = expression_tails(expression, side, R)
    assert float(tail.q.lo) == float(tail.q.hi) == side * FUNCTIONS[text][side > 0]
    with precision(2000):
        for t in DISTANCES[:-2]:
            x = arb(rational(R)) + arb(rational(t))
            value = tree_value(expression.outputs[0], {"x": side * x})
            value -= arb(rational(float(tail.q.lo))) * arb(rational(t))
            rate = min(tail.rate, 1e6)
            reach = arb(rational(tail.error)) * (arb(rational(-rate)) * arb(rational(t))).exp()
            assert not value > arb(rational(float(tail.p.hi))) + reach
            assert not value < arb(rational(float(tail.p.lo))) - reach


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
    for side in (1, -1):
        (bound,) = tail_bound(stage, Expression.parse(text), side, R)
        with precision(300):
            seen = max(
                float(e) for e in exact_errors(stage, text, [side * (R + t) for t in np.linspace(0, 3 * R, 200)])
            )
        assert seen <= bound <= most * seen


def test_exact_gates_are_exact_far_out():
    silu = gate([0, 1.0], [0, 0], [0, 0], [0, 1.0])
    for side in (1, -1):
        assert tail_bound(silu, Expression.parse("silu(x)"), side, 40.0)[0] < 1e-15
        assert tail_bound(silu, Expression.parse("x/(1+exp(-x))"), side, 40.0)[0] < 1e-15


def test_several_heads_outputs_and_a_residual():
    """(x + tanh(x), −x + 1): the first head is tanh in output 0, the residual carries x."""
    head = SoftHead(enclosed([[-1.0], [1.0]]), enclosed([0.0, 0.0]), enclosed([[-1.0, 0.0], [1.0, 0.0]]))
    flat = SoftHead(enclosed([[0.0]]), enclosed([3.0]), enclosed([[0.0, 1.0]]))
    stage = OneStage((head, flat), enclosed([0.0, 0.0]), enclosed([[1.0], [-1.0]]))
    for side in (1, -1):
        bounds = tail_bound(stage, Expression.parse("(x + tanh(x), 1 - x)"), side, 20.0)
        assert bounds.shape == (2,)
        assert (bounds < 1e-15).all()


def test_what_has_no_bound_is_infinite_or_refused():
    relu = gate([0, 10.0], [0, 0], [0, 0], [0, 1.0])
    assert tail_bound(relu, Expression.parse("0.999*x"), 1, 5.0)[0] == math.inf
    almost = gate([0, 10.0], [0, 0], [0, 0], [0, 1.0], radius=1e-16)
    assert tail_bound(almost, Expression.parse("relu(x)"), 1, 5.0)[0] == math.inf  # the slope is known to 10⁻¹⁶ only
    slopes = Enclosed(np.array([[1.0], [1.0]]), np.full((2, 1), 1e-9))
    head = SoftHead(slopes, enclosed([0, 0]), enclosed([[0.0], [1.0]]))
    unclear = OneStage((head,), enclosed([0.0]), enclosed([[0.0]]))
    assert tail_bound(unclear, Expression.parse("tanh(x)"), 1, 5.0)[0] == math.inf
    for text in ("x**2", "sqrt(x)", "sin(x)", "x*atan(x)", "exp(x)", "log(x)"):
        with pytest.raises(InputError, match="cannot bound the tail of"):
            tail_bound(relu, Expression.parse(text), 1, 5.0)
    with pytest.raises(InputError, match="one variable"):
        tail_bound(relu, Expression.parse("x + y"), 1, 5.0)


@pytest.mark.parametrize("text", ["1.7*x", "gelu(0.3*x)", "0.1*x + tanh(x)"])
def test_a_slope_that_no_float_has_is_refused_and_explained(text):
    """0.3 is no float64 number: on all of R the error grows without bound, however small it is at samples."""
    with pytest.raises(attnc.BoundNotMet, match=r"same slope.*0\.3 is not.*finite box"):
        attnc.compile(text, box={"x": (-np.inf, np.inf)}, eps=1e-6)
    assert attnc.compile("gelu(0.25*x)", box={"x": (-np.inf, np.inf)}, eps=1e-6).certificate.bound <= 1e-6
