"""The construction `gates`: expressions that are affine in activations and products."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import attnc
from attnc.constructions.beyond.gates import GATES, gates, max_gate, product_gate
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.errors import BoundNotMet, InputError
from attnc.targets.expressions.expression import Expression
from attnc.targets.target import Target
from constructions.fitting.gate.references import ULP64, reference


def target(text: str, lo: float = -3.0, hi: float = 3.0) -> Target:
    return attnc.as_target(text, {name: (lo, hi) for name in Expression.parse(text).variables})


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        ("gelu(x)", 7),
        ("gelu(2*x-1)/3 + relu(x) - 4", 8),
        ("x*y", 4),
        ("(x+2*y)*(x-3)/7", 4),
        ("x**2", 4),
        ("x*sigmoid(2*x+y)", 2),
        ("-(x-1)*tanh(x)/2", 2),
        ("max(x, y, 1)", 3),
        ("min(x, 2-x)", 2),
        ("clip(x, -1, 1) + abs(x-1)*pi", 5),
        ("exp(x)", 6),
        ("exp(-2*x)/e", 7),
        ("softplus(x) + erf(x) + silu(x)", 15),
        ("relu(x) - 2*relu(x)", 2),
        ("relu(x)*exp(x - x) + 2*(x*0)", 2),
        ("2*x - y", 0),
        ("(relu(x), gelu(y) + relu(x))", 10),
        ("sqrt(2)*relu(x/sqrt(2))", 2),
    ],
)
def test_construction(text, anchors):
    eps = 1e-6
    wanted = target(text)
    built = gates(wanted, eps=eps)
    found = dict(built.parameters)["error"]
    points = np.random.default_rng(3).uniform(-3, 3, (3000, wanted.box.d))
    error = np.abs(built.program(points).reshape(len(points), -1) - wanted(points)).max()
    assert error <= found + 1e-13
    assert found <= eps
    assert built.program.num_anchors == anchors
    assert built.bound is None
    single = gates(wanted, eps=eps, dtype="float32").program
    assert np.abs(single(points).reshape(len(points), -1) - wanted(points)).max() <= eps + 1e-4


def test_a_narrow_box_far_from_0_costs_a_product_little():
    wanted = attnc.as_target("x*y", {"x": (100, 101), "y": (-50, -49)})
    assert gates(wanted, eps=1e-6).program.num_anchors == 4


def test_infinite_boxes():
    """Wherever the gates are global."""
    built = gates(target("gelu(x) - 3*softplus(1-x) + abs(x)", -math.inf, math.inf), eps=1e-6)
    x = np.concatenate([np.linspace(-50, 50, 1001), [1e4, -1e4]])
    expected = reference("gelu", x) - 3 * np.logaddexp(0, 1 - x) + np.abs(x)
    assert (np.abs(built.program(x[:, None]) - expected) <= 1e-6 + 8 * ULP64 * np.abs(expected)).all()
    found = gates(target("exp(3-x)", 2.0, math.inf), eps=1e-6).program(np.array([[2.0], [10.0], [1e300]]))
    np.testing.assert_allclose(found, [math.e, math.exp(-7), 0], atol=1e-6, rtol=0)


NOT_FOR_GATES = {
    "sin(x)": "there is no gate for sin",
    "relu(gelu(x))": "must be affine",
    "x*y*x": "multiplies two affine",
    "x*relu(x)": "multiplies two affine",
    "1/(x+9)": "no other operation",
    "x**3": "no other operation",
    "clip(x, y, 2)": "two numbers",
}
"""Expressions that gates refuse; the refusal names `compose`."""


@pytest.mark.parametrize("name", GATES)
def test_wrong_eps(name):
    for bad in (0, -1e-3, math.nan, math.inf, "1", None):
        with pytest.raises(InputError, match="eps"):
            GATES[name](bad)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        *((partial(gates, target(text), eps=1e-3), f"{reason}.*compose") for text, reason in NOT_FOR_GATES.items()),
        (lambda: GATES["clip"](1e-3, 2, 1), "lo < hi"),
        (lambda: GATES["elu"](1e-3, alpha=0), "alpha"),
        (lambda: GATES["soft_threshold"](1e-3, threshold=-1), "threshold"),
        (lambda: product_gate(1e-3, 1, 0), "size_y"),
        (lambda: product_gate(1e-20), "no product gate"),
        (lambda: GATES["gelu"](1e-15), "no gelu gate"),
        (lambda: GATES["relu"](1e-310), "larger eps"),
        (lambda: max_gate(1e-3, 1), "two wires"),
        (lambda: max_gate(1e-3).build(Circuit(["x"]), Wire()), "2 wires, found 1"),
        (lambda: gates(target("relu(x)"), dtype="float16"), "dtype"),
        (lambda: gates(target("exp(200*x)"), eps=1e-6), "bounded above"),
        (lambda: gates(target("x**2", -math.inf, math.inf), eps=1e-6), "bounded factors"),
        (lambda: gates(target("exp(x)", -math.inf, math.inf), eps=1e-6), "bounded above"),
    ],
)
def test_wrong_input(ask, reason):
    with pytest.raises(InputError, match=reason):
        ask()


def test_too_few_anchors():
    with pytest.raises(BoundNotMet, match="max_anchors"):
        gates(target("gelu(x)"), eps=1e-6, max_anchors=3)


@pytest.mark.parametrize(
    "text",
    ["relu(x+y)", "0.3*relu(x+y) + tanh(2*x-y) + 1", "(x+0.1)*(y-0.7) + relu(x-y)", "x*sigmoid(x-y) + clip(x, 0.1, 1)"],
)
def test_kinks_across_the_axes_are_proved_head_by_head(text):
    """By leaves over the box a kink along a line of it would take far too many."""
    net = attnc.compile(text, {"x": (-1, 1), "y": (-1, 2)}, 1e-6, construction="gates")
    claim = net.certificate
    assert (claim.method, claim.complete) == ("staged proof", True)
    assert claim.observed <= claim.bound <= 1e-6
    assert claim.num_heads == net.program.num_heads


@pytest.mark.parametrize(
    ("text", "has"), [("relu(x+y)", True), ("max(x, y)", False), ("relu(x/3+y)", True), ("relu(2*x)", True)]
)
def test_a_derivation_is_of_the_expression_or_none(text, has):
    """A max has more than one argument. Coefficients are exact: x/3 is not x times a rounded third."""
    assert (gates(target(text), eps=1e-3).derivation is not None) == has


@pytest.mark.parametrize("text", ["atan(x) - abs(y)*((x - x)*0.5)", "x*y*((x - x)*0.5) + tanh(y)"])
def test_a_term_times_zero_is_left_out(text):
    network = attnc.compile(text, {"x": (1, 2), "y": (-2, 2)}, 0.01)
    assert network.certificate.bound <= 0.01
