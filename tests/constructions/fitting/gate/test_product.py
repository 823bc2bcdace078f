"""Products, squares and choices, and gates that feed one another."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from attnc.constructions.beyond.gates import GATES, Gate, max_gate, min_gate, product_gate, square_gate
from attnc.constructions.fitting.circuit import Circuit, Wire
from constructions.fitting.gate.references import ULP32, ULP64, exactly, program, reference


def built(gate: Gate, count: int) -> tuple[Circuit, Wire]:
    """The gate of the inputs x0, x1, …"""
    circuit = Circuit([f"x{i}" for i in range(count)])
    return circuit, gate.build(circuit, *map(circuit.input, range(count)))


@pytest.mark.parametrize(
    ("eps", "sizes", "keys"),
    [
        (1e-3, (1, 1), 2),
        (1e-4, (1, 1), 3),
        (1e-6, (1, 1), 4),
        (1e-8, (1, 1), 5),
        (1e-8, (30, 0.2), 6),
        (1e-9, (20, 50), 8),
    ],
)
def test_products(eps, sizes, keys):
    gate = product_gate(eps, *sizes)
    assert gate.num_anchors == keys
    assert gate.error <= eps
    assert np.abs(gate.keys.values).max() <= 10.1 * sizes[1]
    rng = np.random.default_rng(1)
    points = np.concatenate([rng.uniform(-1, 1, (4000, 2)), [[1, t] for t in np.linspace(-1, 1, 800)]]) * sizes
    circuit, wire = built(gate, 2)
    product = points.prod(axis=1)
    error = np.abs(circuit.build([wire], (), "float64")(points) - product)
    assert 0.4 * gate.error <= error.max() <= gate.error + 64 * ULP64 * sizes[0] * sizes[1]
    worst = points[np.argsort(error)[-20:]]
    for x, y in worst.tolist():
        assert abs(exactly(circuit, wire, {"x0": x, "x1": y}) - arb(x) * arb(y)) <= gate.error
    single = circuit.build([wire], (), "float32")(points.astype(np.float32)).astype(np.float64)
    rounding = 24 * ULP32 * sizes[0] * sizes[1]
    assert (np.abs(single - points.astype(np.float32).astype(np.float64).prod(axis=1)) <= gate.error + rounding).all()


def test_squares():
    gate = square_gate(1e-7, 3.0)
    x = np.linspace(-3, 3, 2001)
    error = np.abs(program(gate)(x[:, None]) - x * x)
    assert 0.2 * gate.error <= error.max() <= gate.error <= 1e-7
    assert gate.num_anchors == product_gate(1e-7, 3.0, 3.0).num_anchors == 5
    assert gate.domain == (-3, 3)
    assert gate.lipschitz == 6


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=5),
    st.floats(1e-9, 1.0),
    st.sampled_from([max_gate, min_gate]),
)
def test_choices(values, eps, make):
    gate = make(eps, len(values))
    circuit, wire = built(gate, len(values))
    found = float(circuit.build([wire], (), "float64")(np.array([values]))[0])
    expected = max(values) if make is max_gate else min(values)
    assert abs(found - expected) <= gate.error + 8 * ULP64 * max(map(abs, values))
    assert gate.error <= eps


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_error_of_a_maximum_is_reached(count):
    gate = max_gate(1e-3, count)
    circuit, wire = built(gate, count)
    apart = np.linspace(0, 6, 601) / gate.keys.slopes.max()
    points = np.concatenate([np.zeros((601, 1)), -np.repeat(apart[:, None], count - 1, axis=1)], axis=1)
    assert np.abs(circuit.build([wire], (), "float64")(points)).max() == pytest.approx(gate.error, rel=1e-3)


def test_a_maximum_keeps_the_smaller_numbers_digits():
    circuit, wire = built(max_gate(1e-6), 2)
    assert circuit.build([wire], (), "float64")(np.array([[-1e16, 1.25]]))[0] == 1.25


def test_gates_compose_in_one_circuit():
    """softplus(gelu(x)·tanh(y)) + max(mish(x − y), softsign(y)), four levels deep."""
    circuit = Circuit(["x", "y"])
    x, y = circuit.input(0), circuit.input(1)
    inner = product_gate(1e-9, 6.0, 1.0).build(
        circuit, GATES["gelu"](1e-9).build(circuit, x), GATES["tanh"](1.0).build(circuit, y)
    )
    left = GATES["softplus"](1e-9).build(circuit, inner)
    right = max_gate(1e-9).build(
        circuit, GATES["mish"](1.0).build(circuit, x - y), GATES["softsign"](1e-5).build(circuit, y)
    )
    points = np.random.default_rng(2).uniform(-5, 5, (500, 2))
    X, Y = points.T
    product = reference("gelu", X) * np.tanh(Y)
    expected = np.logaddexp(0, product) + np.maximum(reference("mish", X - Y), Y / (1 + np.abs(Y)))
    double = circuit.build([left + right], (), "float64")
    assert double.num_attention_layers == 3
    np.testing.assert_allclose(double(points), expected, atol=1.01e-5, rtol=0)
    single = circuit.build([left + right], (), "float32")
    np.testing.assert_allclose(single(points), expected, atol=3e-5, rtol=0)
