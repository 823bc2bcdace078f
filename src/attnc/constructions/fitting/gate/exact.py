"""Activations that are a softmax already: exact with two keys, or three."""

from __future__ import annotations

import math

import numpy as np

from attnc.constructions.fitting.gate.keys import Gate, GateKeys, positive

LOG_2 = math.log(2.0)


def _exact(
    name: str, slopes: list[float], values: list[float], carried: list[float], lipschitz: float, error: float = 0.0
) -> Gate:
    keys = GateKeys(np.array(slopes), np.zeros(len(slopes)), np.array(values), np.array(carried))
    return Gate.one_head(name, keys, error, lipschitz, is_proved=True)


def sigmoid(eps: float) -> Gate:
    """σ(x): scores 0, x and values 0, 1."""
    positive("eps", eps)
    return _exact("sigmoid", [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], 0.25)


def tanh(eps: float) -> Gate:
    """tanh x: scores ∓x, values ∓1."""
    positive("eps", eps)
    return _exact("tanh", [-1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], 1.0)


def tanhshrink(eps: float) -> Gate:
    """x − tanh x: the same weights, values x ± 1."""
    positive("eps", eps)
    return _exact("tanhshrink", [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0], 1.0)


def silu(eps: float) -> Gate:
    """x·σ(x): scores 0, x and values 0, x."""
    positive("eps", eps)
    return _exact("silu", [0.0, 1.0], [0.0, 0.0], [0.0, 1.0], 1.0998393201288673)


def quick_gelu(eps: float) -> Gate:
    """x·σ(1.702x)."""
    positive("eps", eps)
    # 1.702 is stored with a relative error of 2⁻⁵³, and s²σ′(s)/1.702 ≤ 0.26.
    return _exact("quick_gelu", [0.0, 1.702], [0.0, 0.0], [0.0, 1.0], 1.0998393201288673, 2.0**-54)


def mish(eps: float) -> Gate:
    """x·tanh(log(1 + eˣ)): scores log 2, x + log 2, 2x and values 0, x, x.

    Proof.  With z = eˣ, tanh(log(1 + z)) = ((1 + z)² − 1)/((1 + z)² + 1) = (2z + z²)/(2 + 2z + z²).
    """
    positive("eps", eps)
    slopes, offsets = np.array([0.0, 1.0, 2.0]), np.array([LOG_2, LOG_2, 0.0])
    keys = GateKeys(slopes, offsets, np.zeros(3), np.array([0.0, 1.0, 1.0]))
    # log 2 is stored to within 2⁻⁵⁴, which moves the output by |x|·w₀(1 − w₀)·2⁻⁵⁴, and |x|·w₀(1 − w₀) < ½.
    return Gate.one_head("mish", keys, 2.0**-55, 1.088498161251728, is_proved=True)
