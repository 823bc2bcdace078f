"""Gates against references of 200 bits: in exact arithmetic the error is the tolerance, otherwise a few ulps more."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.constructions.circuit import Circuit, Wire
from attnc.constructions.gate import fitted, pieces, product
from attnc.constructions.gate.table import RECIPROCAL
from attnc.constructions.gates import GATES, Gate, gates, max_gate, min_gate, product_gate, square_gate
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import BoundNotMet, InputError
from attnc.targets.box import Box
from attnc.targets.expression import Expression
from attnc.targets.expression_target import ExpressionTarget

Reference = Callable[[arb], arb]
ULP64, ULP32 = 2.0**-52, 2.0**-23
SELU_SCALE, SELU_ALPHA = arb(1.0507009873554805), arb(1.6732632423543772)


@pytest.fixture(autouse=True)
def precise():
    before = ctx.prec
    ctx.prec = 200
    yield
    ctx.prec = before


def sigmoid(t: arb) -> arb:
    return 1 / (1 + (-t).exp()) if t > 0 else t.exp() / (1 + t.exp())


def softplus(t: arb) -> arb:
    return t + (-t).exp().log1p() if t > 0 else t.exp().log1p()


def clip(t: arb, lo: float, hi: float) -> arb:
    return arb(lo) if t < lo else arb(hi) if t > hi else t


def elu(t: arb) -> arb:
    return t if t > 0 else t.expm1()


def gelu_tanh(t: arb) -> arb:
    return t * sigmoid(2 * (2 / arb.pi()).sqrt() * (t + arb("0.044715") * t * t * t))


REFERENCES: dict[str, Reference] = {
    "sigmoid": sigmoid,
    "tanh": lambda t: t.tanh(),
    "tanhshrink": lambda t: t - t.tanh(),
    "silu": lambda t: t * sigmoid(t),
    "quick_gelu": lambda t: t * sigmoid(arb("1.702") * t),
    "mish": lambda t: t * softplus(t).tanh(),
    "relu": lambda t: clip(t, 0, math.inf),
    "leaky_relu": lambda t: t if t > 0 else arb(0.01) * t,
    "prelu": lambda t: t if t > 0 else t / 4,
    "abs": lambda t: abs(t),
    "clip": lambda t: clip(t, -1, 1),
    "hardtanh": lambda t: clip(t, -1, 1),
    "relu6": lambda t: clip(t, 0, 6),
    "hardsigmoid": lambda t: clip(t / 6 + arb(0.5), 0, 1),
    "soft_threshold": lambda t: t - clip(t, -0.5, 0.5),
    "gelu": lambda t: t * (-t / arb(2).sqrt()).erfc() / 2,
    "gelu_tanh": gelu_tanh,
    "softplus": softplus,
    "logsigmoid": lambda t: -softplus(-t),
    "erf": lambda t: t.erf(),
    "atan": lambda t: t.atan(),
    "exp": lambda t: t.exp(),
    "elu": elu,
    "celu": elu,
    "selu": lambda t: SELU_SCALE * (t if t > 0 else SELU_ALPHA * t.expm1()),
    "hardswish": lambda t: t * clip(t + 3, 0, 6) / 6,
    "softsign": lambda t: t / (1 + abs(t)),
}
ROUGH = {"atan": 1e-4, "softsign": 1e-5}
"""Those whose keys grow with the square of log 1/eps."""
EXACT = ("sigmoid", "tanh", "tanhshrink", "silu", "quick_gelu", "mish")
KINKED = ("relu", "leaky_relu", "prelu", "abs", "clip", "hardtanh", "relu6", "hardsigmoid", "soft_threshold")
BY_NAME = pytest.mark.parametrize("name", sorted(GATES))


def usual(name: str) -> Gate:
    return GATES[name](ROUGH.get(name, 1e-7))


def within(gate: Gate, points: np.ndarray) -> np.ndarray:
    return points[(points >= gate.domain[0]) & (points <= gate.domain[1])]


def reference(name: str, points: np.ndarray) -> np.ndarray:
    return np.array([float(REFERENCES[name](arb(float(t))).mid()) for t in points])


def program(gate: Gate, dtype: str = "float64"):
    circuit = Circuit(["x"])
    return circuit.build([gate.build(circuit, circuit.input(0))], (), dtype)


def exactly(circuit: Circuit, wire: Wire, inputs: dict[str, float]) -> arb:
    """What a circuit computes in exact arithmetic, to 200 bits."""
    known = {signal: arb(inputs[signal.name]) for signal in circuit.inputs}

    def value(of: Wire) -> arb:
        return sum((arb(c) * known[s] for s, c in of.terms.items()), arb(of.constant))

    for head in circuit.heads:
        queries, carriers = [value(q) for q in head.queries], [value(c) for c in head.carriers]
        scores = [
            sum((arb(float(a)) * q for a, q in zip(row, queries, strict=True)), arb(float(c)))
            for row, c in zip(head.slopes, head.offsets, strict=True)
        ]
        top = max(float(score.mid()) for score in scores)
        weights = [(score - top).exp() for score in scores]
        for m, signal in enumerate(head.signals):
            values = [
                sum((arb(float(head.carried[i, k, m])) * c for i, c in enumerate(carriers)), arb(float(v)))
                for k, v in enumerate(head.values[:, m])
            ]
            known[signal] = sum((w * v for w, v in zip(weights, values, strict=True)), arb(0)) / sum(weights, arb(0))
    return value(wire)


def largest_exact_error(gate: Gate, name: str, points: np.ndarray) -> float:
    """Over the points at which float64 shows the largest errors, and some others."""
    built = program(gate)
    errors = np.abs(built(points[:, None]) - reference(name, points))
    chosen = np.concatenate([points[np.argsort(errors)[-40:]], points[:: max(1, len(points) // 40)]])
    circuit = Circuit(["x"])
    wire = gate.build(circuit, circuit.input(0))
    found = arb(0)
    for t in chosen.tolist():
        error = abs(exactly(circuit, wire, {"x": t}) - REFERENCES[name](arb(t)))
        found = error if error > found else found
    return float(found.upper())


def test_every_gate_has_a_reference():
    assert set(REFERENCES) == set(GATES)


@BY_NAME
@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_error_holds_in_exact_arithmetic(name, factor):
    gate = GATES[name](ROUGH.get(name, 1e-7) * factor)
    steep = 1.0 if gate.keys is None else float(np.abs(gate.keys.slopes).max())
    near = np.linspace(-40, 40, 401) / max(steep, 1.0)
    kinks = np.concatenate([near + kink for kink in (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0)])
    points = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-60, 60, 200), kinks, [1e4, -1e4, 1e7, -1e7]])
    points = within(gate, np.unique(points))
    error = largest_exact_error(gate, name, points)
    assert error <= gate.error <= ROUGH.get(name, 1e-7) * factor
    if name not in EXACT:
        assert error >= 0.3 * gate.error  # the claim is not vacuous


@BY_NAME
def test_float64_adds_a_few_ulps(name):
    gate = usual(name)
    points = np.concatenate([np.linspace(-50, 50, 1501), [0, 5e-324, -5e-324, 1e-8, -1e-8, 1e4, -1e4, 700, -700, -750]])
    points = within(gate, points)
    expected = reference(name, points)
    allowed = gate.error + (4 if name in EXACT else 16) * ULP64 * np.maximum(1.0, np.abs(expected))
    built = program(gate)
    assert (np.abs(built(points[:, None]) - expected) <= allowed).all()
    assert (np.abs(NumpyEngine(built)(points[:, None]) - expected) <= allowed).all()
    assert built.num_anchors == gate.num_anchors
    assert built.num_attention_layers == gate.num_layers


@BY_NAME
def test_float32_adds_a_few_ulps(name):
    gate = usual(name)
    points = np.concatenate([np.linspace(-50, 50, 801), [0, 1e-30, -1e-30, 1e4, -1e4]]).astype(np.float32)
    points = within(gate, points.astype(np.float64))
    expected = reference(name, points)
    error = np.abs(program(gate, "float32")(points[:, None]).astype(np.float64) - expected)
    assert (error <= gate.error + 8 * ULP32 * np.maximum(1.0, np.abs(expected))).all()


LIMITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": lambda x: (x > 0) * 1.0,
    "tanh": np.sign,
    "tanhshrink": lambda x: x - np.sign(x),
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
    "prelu": lambda x: np.maximum(x, 0.25 * x),
    "abs": np.abs,
    "clip": np.sign,
    "hardtanh": np.sign,
    "relu6": lambda x: 6.0 * (x > 0),
    "hardsigmoid": lambda x: (x > 0) * 1.0,
    "soft_threshold": lambda x: x,
    "logsigmoid": lambda x: np.minimum(x, 0),
    "erf": np.sign,
    "atan": lambda x: np.sign(x) * np.pi / 2,
    "exp": np.zeros_like,
    "elu": lambda x: np.maximum(x, -1),
    "celu": lambda x: np.maximum(x, -1),
    "selu": lambda x: float(SELU_SCALE) * np.maximum(x, -float(SELU_ALPHA)),
    "softsign": np.sign,
}
"""At huge arguments; of the others max(x, 0)."""


@BY_NAME
def test_huge_arguments_do_not_overflow(name):
    gate, limit = usual(name), LIMITS.get(name, lambda x: np.maximum(x, 0))
    points = within(gate, np.array([-1e300, -1e100, -1e20, 1e20, 1e100, 1e300]))
    np.testing.assert_allclose(program(gate)(points[:, None]), limit(points), rtol=1e-15, atol=1e-14)
    points = within(gate, np.array([-1e29, 1e29], np.float32))
    found = program(gate, "float32")(points[:, None])
    np.testing.assert_allclose(found, limit(points), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "eps", "keys"),
    [
        ("sigmoid", 1e-9, 2),
        ("silu", 1e-9, 2),
        ("mish", 1e-9, 3),
        ("relu", 1e-9, 2),
        ("clip", 1e-9, 3),
        ("gelu", 5.6e-5, 5),
        ("gelu", 2.6e-6, 6),
        ("gelu", 1e-7, 8),
        ("gelu", 2.3e-10, 10),
        ("gelu", 1e-12, 14),
        ("gelu_tanh", 2.7e-6, 6),
        ("gelu_tanh", 1e-7, 8),
        ("gelu_tanh", 5.7e-9, 10),
        ("erf", 1e-7, 8),
        ("softplus", 1e-7, 5),
        ("softplus", 1e-11, 8),
        ("exp", 6.7e-8, 6),
        ("exp", 2e-9, 7),
        ("elu", 1e-7, 7),
        ("hardswish", 1e-8, 7),
        ("softsign", 1e-4, 18),
        ("atan", 1e-3, 16),
    ],
)
def test_numbers_of_keys(name, eps, keys):
    gate = GATES[name](eps)
    assert gate.error <= eps
    assert gate.num_anchors == keys


LEAST = {"gelu_tanh": 1.7e-10, "atan": 3.8e-5, "softsign": 4.0e-7}
"""What refusals say is possible; the others reach 1e-12."""


@BY_NAME
@settings(max_examples=30)
@given(exponent=st.floats(-12, 0))
def test_the_error_is_at_most_eps_or_the_refusal_says_what_is_possible(name, exponent):
    eps = 10.0**exponent
    least = LEAST.get(name, 0.0)
    if eps >= least:
        assert 0 <= GATES[name](eps).error <= eps
    elif eps <= 0.97 * least:  # `least` is rounded up to two digits: just below it there may be a gate
        with pytest.raises(InputError, match=rf"Choose eps ≥ {least:g}\."):
            GATES[name](eps)


@pytest.mark.parametrize("family", ["_GELU", "_GELU_TANH", "_SOFTPLUS", "_ERF", "_ATAN"])
def test_the_table_says_what_its_rows_give(family):
    table = getattr(fitted, family)
    for p, row in table.rows.items():
        error = fitted._solved(table, p).error
        assert 0.92 * row[-1] <= error <= 1.03 * row[-1]
    errors = [row[-1] for row in table.rows.values()]
    assert errors == sorted(errors, reverse=True)


def test_hints_say_what_fits_give():
    for p, hint in product.HINTS.items():
        assert 0.92 * hint <= product.identity(p)[1] <= hint
    for p, hint in pieces.EXP_HINTS.items():
        assert 0.92 * hint <= pieces.decay(p)[1] <= hint
    for p, row in RECIPROCAL.items():
        assert 0.92 * row[-1] <= pieces.reciprocal(p)[1] <= row[-1]


@BY_NAME
def test_values_are_small(name):
    gate = usual(name)
    circuit = Circuit(["x"])
    gate.build(circuit, circuit.input(0))
    for head in circuit.heads:
        assert np.abs(head.values).max(initial=0) <= 12 * gate.lipschitz
        assert np.abs(head.carried).max(initial=0) <= 12 * gate.lipschitz


def test_gelu_weighs_x_by_numbers_close_to_0_and_1():
    carried = GATES["gelu"](1e-12).keys.carried
    assert carried[0] == 0
    assert carried[-1] == 1
    assert np.abs(carried - np.round(carried)).max() < 0.006


@BY_NAME
def test_lipschitz_constants(name):
    """Of the function itself; reached, and not exceeded."""
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
    circuit = Circuit(["x", "y"])
    wire = gate.build(circuit, circuit.input(0), circuit.input(1))
    product = points.prod(axis=1)
    error = np.abs(circuit.build([wire], (), "float64")(points) - product)
    assert 0.4 * gate.error <= error.max() <= gate.error + 64 * ULP64 * sizes[0] * sizes[1]
    worst = points[np.argsort(error)[-20:]]
    for x, y in worst.tolist():
        assert abs(exactly(circuit, wire, {"x": x, "y": y}) - arb(x) * arb(y)) <= gate.error
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
    circuit = Circuit([f"x{i}" for i in range(len(values))])
    wire = gate.build(circuit, *(circuit.input(i) for i in range(len(values))))
    found = float(circuit.build([wire], (), "float64")(np.array([values]))[0])
    expected = max(values) if make is max_gate else min(values)
    assert abs(found - expected) <= gate.error + 8 * ULP64 * max(map(abs, values))
    assert gate.error <= eps


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_error_of_a_maximum_is_reached(count):
    gate = max_gate(1e-3, count)
    circuit = Circuit([f"x{i}" for i in range(count)])
    wire = gate.build(circuit, *(circuit.input(i) for i in range(count)))
    apart = np.linspace(0, 6, 601) / gate.beta
    points = np.concatenate([np.zeros((601, 1)), -np.repeat(apart[:, None], count - 1, axis=1)], axis=1)
    assert np.abs(circuit.build([wire], (), "float64")(points)).max() == pytest.approx(gate.error, rel=1e-3)


def test_a_maximum_keeps_the_smaller_numbers_digits():
    circuit = Circuit(["x", "y"])
    wire = max_gate(1e-6).build(circuit, circuit.input(0), circuit.input(1))
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


def target(text: str, lo: float = -3.0, hi: float = 3.0) -> ExpressionTarget:
    expression = Expression.parse(text)
    return ExpressionTarget(expression, Box.parse({name: (lo, hi) for name in expression.variables}))


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
    wanted = ExpressionTarget(Expression.parse("x*y"), Box.parse({"x": (100, 101), "y": (-50, -49)}))
    assert gates(wanted, eps=1e-6).program.num_anchors == 4


def test_infinite_boxes():
    """Wherever the gates are global."""
    line = Box(("x",), np.array([-np.inf]), np.array([np.inf]))
    wanted = target("gelu(x) - 3*softplus(1-x) + abs(x)")
    wanted.box = line
    built = gates(wanted, eps=1e-6)
    x = np.concatenate([np.linspace(-50, 50, 1001), [1e4, -1e4]])
    expected = reference("gelu", x) - 3 * np.logaddexp(0, 1 - x) + np.abs(x)
    assert (np.abs(built.program(x[:, None]) - expected) <= 1e-6 + 8 * ULP64 * np.abs(expected)).all()
    wanted = target("exp(3-x)")
    wanted.box = Box(("x",), np.array([2.0]), np.array([np.inf]))
    found = gates(wanted, eps=1e-6).program(np.array([[2.0], [10.0], [1e300]]))
    np.testing.assert_allclose(found, [math.e, math.exp(-7), 0], atol=1e-6, rtol=0)
    for text, reason in (("x**2", "bounded factors"), ("exp(x)", "bounded above")):
        wanted = target(text)
        wanted.box = line
        with pytest.raises(InputError, match=reason):
            gates(wanted, eps=1e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sin(x)", "there is no gate for sin"),
        ("relu(gelu(x))", "must be affine"),
        ("x*y*x", "multiplies two affine"),
        ("x*relu(x)", "multiplies two affine"),
        ("1/(x+9)", "no other operation"),
        ("x**3", "no other operation"),
        ("clip(x, y, 2)", "two numbers"),
    ],
)
def test_what_gates_are_not_for(text, reason):
    with pytest.raises(InputError, match=reason) as refusal:
        gates(target(text), eps=1e-3)
    assert "compose" in str(refusal.value)


def test_wrong_input():
    for name in GATES:
        for bad in (0, -1e-3, math.nan, math.inf, "1", None):
            with pytest.raises(InputError, match="eps"):
                GATES[name](bad)
    with pytest.raises(InputError, match="lo < hi"):
        GATES["clip"](1e-3, 2, 1)
    with pytest.raises(InputError, match="alpha"):
        GATES["elu"](1e-3, alpha=0)
    with pytest.raises(InputError, match="threshold"):
        GATES["soft_threshold"](1e-3, threshold=-1)
    with pytest.raises(InputError, match="size_y"):
        product_gate(1e-3, 1, 0)
    with pytest.raises(InputError, match="no product gate"):
        product_gate(1e-20)
    with pytest.raises(InputError, match="no gelu gate"):
        GATES["gelu"](1e-15)
    with pytest.raises(InputError, match="larger eps"):
        GATES["relu"](1e-310)
    with pytest.raises(InputError, match="two wires"):
        max_gate(1e-3, 1)
    circuit = Circuit(["x"])
    with pytest.raises(InputError, match="2 wires, 1 given"):
        max_gate(1e-3).build(circuit, circuit.input(0))
    with pytest.raises(InputError, match="dtype"):
        gates(target("relu(x)"), dtype="float16")
    with pytest.raises(BoundNotMet, match="max_anchors"):
        gates(target("gelu(x)"), eps=1e-6, max_anchors=3)
    with pytest.raises(InputError, match="bounded above"):
        gates(target("exp(200*x)"), eps=1e-6)
