"""Activations to 200 bits, and gates in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flint import arb

from attnc.constructions.beyond.gates import GATES, Gate
from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate import ACTIVATIONS
from strategies.reference import VALUES, precision

Reference = Callable[[arb], arb]


ULP64, ULP32 = 2.0**-52, 2.0**-23


SELU_SCALE, SELU_ALPHA = arb(1.0507009873554805), arb(1.6732632423543772)


sigmoid, softplus = VALUES["sigmoid"], VALUES["softplus"]


def clip(t: arb, lo: float, hi: float) -> arb:
    return arb(lo) if t < lo else arb(hi) if t > hi else t


def elu(t: arb) -> arb:
    return t if t > 0 else t.expm1()


def gelu_tanh(t: arb) -> arb:
    return t * sigmoid(2 * (2 / arb.pi()).sqrt() * (t + arb("0.044715") * t * t * t))


REFERENCES: dict[str, Reference] = {
    **{name: VALUES[name] for name in ACTIVATIONS},
    "tanhshrink": lambda t: t - t.tanh(),
    "quick_gelu": lambda t: t * sigmoid(arb("1.702") * t),
    "mish": lambda t: t * softplus(t).tanh(),
    "leaky_relu": lambda t: t if t > 0 else arb(0.01) * t,
    "prelu": lambda t: t if t > 0 else t / 4,
    "clamp_min": lambda t: t if t > 0.5 else arb(0.5),
    "clamp_max": lambda t: t if t < 0.5 else arb(0.5),
    "clip": lambda t: clip(t, -1, 1),
    "hardtanh": lambda t: clip(t, -1, 1),
    "relu6": lambda t: clip(t, 0, 6),
    "hardsigmoid": lambda t: clip(t / 6 + arb(0.5), 0, 1),
    "soft_threshold": lambda t: t - clip(t, -0.5, 0.5),
    "gelu_tanh": gelu_tanh,
    "logsigmoid": lambda t: -softplus(-t),
    "elu": elu,
    "celu": elu,
    "selu": lambda t: SELU_SCALE * (t if t > 0 else SELU_ALPHA * t.expm1()),
    "hardswish": lambda t: t * clip(t + 3, 0, 6) / 6,
    "softsign": lambda t: t / (1 + abs(t)),
}


ROUGH = {"atan": 1e-4, "softsign": 1e-5}
"""The errors asked of gates whose number of keys grows with the square of log 1/eps."""


EXACT = ("sigmoid", "tanh", "tanhshrink", "silu", "quick_gelu", "mish")


BY_NAME = pytest.mark.parametrize("name", sorted(GATES))


def usual(name: str) -> Gate:
    return GATES[name](ROUGH.get(name, 1e-7))


def within(gate: Gate, points: np.ndarray) -> np.ndarray:
    return points[(points >= gate.domain[0]) & (points <= gate.domain[1])]


def reference(name: str, points: np.ndarray) -> np.ndarray:
    with precision(200):
        return np.array([float(REFERENCES[name](arb(float(t))).mid()) for t in points])


def program(gate: Gate, dtype: str = "float64"):
    circuit = Circuit(["x"])
    return circuit.build([gate.build(circuit, circuit.input(0))], (), dtype)


def exactly(circuit: Circuit, wire: Wire, inputs: dict[str, float]) -> arb:
    """The value of a wire of a circuit in exact arithmetic, to 200 bits."""
    known = {signal: arb(inputs[signal.name]) for signal in circuit.inputs}

    def value(of: Wire) -> arb:
        return sum((arb(c) * known[s] for s, c in of.terms.items()), arb(of.constant))

    for head in circuit.heads:
        queries, carriers = [value(q) for q in head.queries], [value(c) for c in head.carriers]
        scores = [
            sum((arb(float(a)) * q for a, q in zip(row, queries, strict=True)), arb(float(c)))
            for row, c in zip(head.keys.slopes, head.keys.offsets, strict=True)
        ]
        top = max(float(score.mid()) for score in scores)
        weights = [(score - top).exp() for score in scores]
        for m, signal in enumerate(head.signals):
            values = [
                sum((arb(float(head.keys.carried[k, m, i])) * c for i, c in enumerate(carriers)), arb(float(v)))
                for k, v in enumerate(head.keys.values[:, m])
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
