"""Gates against references of 200 bits: in exact arithmetic the error is the tolerance, otherwise a few ulps more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attnc.constructions.beyond.gates import GATES, Gate
from attnc.engines.numpy_engine import NumpyEngine
from constructions.fitting.gate.references import (
    BY_NAME,
    EXACT,
    REFERENCES,
    ROUGH,
    SELU_ALPHA,
    SELU_SCALE,
    ULP32,
    ULP64,
    largest_exact_error,
    program,
    reference,
    usual,
    within,
)


def test_every_gate_has_a_reference():
    assert set(REFERENCES) == set(GATES)


@BY_NAME
@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_error_holds_in_exact_arithmetic(name, factor):
    gate = GATES[name](ROUGH.get(name, 1e-7) * factor)
    steep = float(np.abs(gate.keys.slopes).max())
    near = np.linspace(-40, 40, 401) / max(steep, 1.0)
    kinks = np.concatenate([near + kink for kink in (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0)])
    points = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-60, 60, 200), kinks, [1e4, -1e4, 1e7, -1e7]])
    points = within(gate, np.unique(points))
    error = largest_exact_error(gate, name, points)
    assert error <= gate.error <= ROUGH.get(name, 1e-7) * factor
    if name not in EXACT:
        assert error >= 0.3 * gate.error  # the claim is not vacuous


SMALL_AND_LARGE = {"float64": [0, 5e-324, 1e-8, 1e4, 700, -750], "float32": [0, 1e-30, 1e4]}


@BY_NAME
@pytest.mark.parametrize(("dtype", "ulp", "ulps"), [("float64", ULP64, 16), ("float32", ULP32, 8)])
def test_rounding_adds_a_few_ulps(name, dtype, ulp, ulps):
    gate, built = usual(name), program(usual(name), dtype)
    special = np.array(SMALL_AND_LARGE[dtype])
    points = np.concatenate([np.linspace(-50, 50, 1501), special, -special]).astype(dtype)
    points = within(gate, points.astype(np.float64))
    expected = reference(name, points)
    ulps = 4 if name in EXACT and dtype == "float64" else ulps
    allowed = gate.error + ulps * ulp * np.maximum(1.0, np.abs(expected))
    engines = (built, NumpyEngine(built)) if dtype == "float64" else (built,)
    for engine in engines:
        assert (np.abs(engine(points[:, None]).astype(np.float64) - expected) <= allowed).all()
    assert (built.num_anchors, built.num_attention_layers) == (gate.num_anchors, 1 if gate.sign is None else 2)


LIMITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("tanh", "clip", "hardtanh", "erf", "softsign"), np.sign),
    **dict.fromkeys(("sigmoid", "hardsigmoid"), lambda x: (x > 0) * 1.0),
    **dict.fromkeys(("elu", "celu"), lambda x: np.maximum(x, -1)),
    "tanhshrink": lambda x: x - np.sign(x),
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
    "clamp_min": lambda x: np.maximum(x, 0.5),
    "clamp_max": lambda x: np.minimum(x, 0.5),
    "prelu": lambda x: np.maximum(x, 0.25 * x),
    "abs": np.abs,
    "relu6": lambda x: 6.0 * (x > 0),
    "soft_threshold": lambda x: x,
    "logsigmoid": lambda x: np.minimum(x, 0),
    "atan": lambda x: np.sign(x) * np.pi / 2,
    "exp": np.zeros_like,
    "selu": lambda x: float(SELU_SCALE) * np.maximum(x, -float(SELU_ALPHA)),
}
"""The values at huge arguments. For the other gates these are max(x, 0)."""


@BY_NAME
def test_huge_arguments_do_not_overflow(name):
    gate, limit = usual(name), LIMITS.get(name, lambda x: np.maximum(x, 0))
    points = within(gate, np.array([-1e300, -1e100, -1e20, 1e20, 1e100, 1e300]))
    np.testing.assert_allclose(program(gate)(points[:, None]), limit(points), rtol=1e-15, atol=1e-14)
    points = within(gate, np.array([-1e29, 1e29], np.float32))
    found = program(gate, "float32")(points[:, None])
    np.testing.assert_allclose(found, limit(points), rtol=1e-6, atol=1e-6)


@BY_NAME
def test_lipschitz_constants(name):
    """The bound of the function itself is reached, and not exceeded."""
    gate = usual(name)
    points = within(gate, np.concatenate([np.linspace(-8, 8, 6401), [-40.0, 40.0]]))
    values = reference(name, points)
    slopes = np.abs(np.diff(values) / np.diff(points))
    assert 0.997 * gate.lipschitz <= slopes.max() <= gate.lipschitz * (1 + 1e-9)


@pytest.mark.parametrize(
    ("gate", "f"),
    [
        (GATES["leaky_relu"](1e-6, slope=0.2), lambda x: np.maximum(x, 0.2 * x)),
        (GATES["prelu"](1e-6, slope=-0.5), lambda x: np.where(x > 0, x, -0.5 * x)),
        (GATES["leaky_relu"](1e-6, slope=1.0), lambda x: x),
        (GATES["clip"](1e-6, 2, 5), lambda x: np.clip(x, 2, 5)),
        (GATES["clip"](1e-6, 1e6, 1e6 + 1), lambda x: np.clip(x, 1e6, 1e6 + 1)),
        (GATES["hardtanh"](1e-6, lo=-2.0, hi=0.5), lambda x: np.clip(x, -2, 0.5)),
        (GATES["soft_threshold"](1e-6, threshold=2.5), lambda x: np.sign(x) * np.maximum(np.abs(x) - 2.5, 0)),
        (GATES["elu"](1e-6, alpha=0.3), lambda x: np.where(x > 0, x, 0.3 * np.expm1(np.minimum(x, 0)))),
        (GATES["celu"](1e-6, alpha=2.5), lambda x: np.where(x > 0, x, 2.5 * np.expm1(np.minimum(x, 0) / 2.5))),
        (GATES["celu"](1e-6, alpha=0.01), lambda x: np.where(x > 0, x, 0.01 * np.expm1(np.minimum(x, 0) / 0.01))),
        (GATES["softplus"](1e-6, beta=3.0), lambda x: np.logaddexp(0, 3 * x) / 3),
        (GATES["softplus"](1e-6, beta=0.1), lambda x: np.logaddexp(0, 0.1 * x) / 0.1),
        (GATES["exp"](1e-4, hi=3.0), lambda x: np.exp(np.minimum(x, 3))),
    ],
    ids=lambda value: value.name if isinstance(value, Gate) else "",
)
def test_parameters(gate, f):
    x = within(gate, np.concatenate([np.linspace(-40, 40, 4001), np.linspace(-0.1, 0.1, 801), [1e6, 1e6 + 0.5, 2e6]]))
    error = np.abs(program(gate)(x[:, None]) - f(x))
    assert (error <= gate.error + 16 * ULP64 * np.maximum(1, np.abs(f(x)))).all()
