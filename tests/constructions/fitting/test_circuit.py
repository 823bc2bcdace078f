"""The program of a circuit computes its wires, in every engine."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check

SIGMOID = SoftHead.of_one_variable(np.array([0.0, 1.0]), np.zeros(2), np.array([0.0, 1.0]))
POINTS = np.random.default_rng(0).normal(size=(200, 2))


def sigmoid(t: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-t))


def deep() -> tuple[Circuit, list[Wire], np.ndarray]:
    """Three levels, a gate, wires that skip levels, heads of different sizes, a head that nothing reads."""
    circuit = Circuit(["x", "y"])
    x, y = circuit.input(0), circuit.input(1)
    wide = SoftHead.of_one_variable(np.linspace(-3, 3, 7), np.log(np.arange(1.0, 8.0)), np.arange(7.0) - 3)
    circuit.apply(wide, x, name="unread")
    silu = circuit.apply(SIGMOID, x, x)
    bumpy = circuit.apply(wide, 2 * x - y + 0.5)
    inner = circuit.apply(SIGMOID, silu - 3 * bumpy + y)
    last = circuit.apply(SIGMOID, inner * -1.0, x + 1)
    X, Y = POINTS.T
    s = X * sigmoid(X)
    b = wide((2 * X - Y + 0.5)[:, None])[:, 0]
    i = sigmoid(s - 3 * b + Y)
    return circuit, [last + y - 1, silu * 2 - inner], np.stack([sigmoid(-i) * (X + 1) + Y - 1, 2 * s - i], axis=1)


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-14), ("float32", 3e-6)])
def test_the_program_computes_the_wires_and_nothing_else(dtype: str, atol: float) -> None:
    circuit, outputs, expected = deep()
    program = circuit.build(outputs, (2,), dtype)
    assert program.dtype == dtype
    np.testing.assert_allclose(program(POINTS), expected, atol=atol, rtol=0)
    np.testing.assert_allclose(NumpyEngine(program)(POINTS), expected, atol=atol, rtol=0)
    assert program.num_heads == 4
    assert program.num_attention_layers == 3
    assert program.num_anchors == 2 + 7 + 2 + 2  # masks hide the keys of wider heads
    assert check(program) is program
    with pytest.raises(ProgramError, match="output shape"):
        circuit.build(outputs, (3,), dtype)


def test_a_circuit_without_heads_is_an_affine_map() -> None:
    circuit = Circuit(["x", "y"])
    program = circuit.build([circuit.input(0) * 2 - circuit.input(1) + 3], (), "float64")
    assert program.num_anchors == 0
    np.testing.assert_array_equal(program(POINTS), 2 * POINTS[:, 0] - POINTS[:, 1] + 3)


def test_wires_cancel() -> None:
    x = Circuit(["x"]).input(0)
    assert (x - x).terms == {}
    assert (3 - x * 2).constant == 3
