"""Activations that are a softmax already and are no functions of the expression language."""

from __future__ import annotations

import math

from attnc.constructions.gate.keys import Gate, exact_gate
from attnc.functions.gate_recipes import ExactKeys
from attnc.functions.logistic import SILU_SLOPE_TURNS

LOG_2 = math.log(2.0)


def tanhshrink(eps: float) -> Gate:
    """x − tanh x: the weights of tanh, values x ± 1."""
    return exact_gate("tanhshrink", ExactKeys((-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (1.0, 1.0), lipschitz=1.0), eps)


def quick_gelu(eps: float) -> Gate:
    """x·σ(1.702x)."""
    # 1.702 is stored with a relative error of 2⁻⁵³, and s²σ′(s)/1.702 ≤ 0.26.
    keys = ExactKeys((0.0, 1.702), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), SILU_SLOPE_TURNS[1][2], 2.0**-54)
    return exact_gate("quick_gelu", keys, eps)


def mish(eps: float) -> Gate:
    """x·tanh(log(1 + eˣ)): scores log 2, x + log 2, 2x and values 0, x, x.

    Proof.  With z = eˣ, tanh(log(1 + z)) = ((1 + z)² − 1)/((1 + z)² + 1) = (2z + z²)/(2 + 2z + z²).
    """
    # log 2 is stored to within 2⁻⁵⁴, which moves the output by |x|·w₀(1 − w₀)·2⁻⁵⁴, and |x|·w₀(1 − w₀) < ½.
    offsets, carried = (LOG_2, LOG_2, 0.0), (0.0, 1.0, 1.0)
    keys = ExactKeys((0.0, 1.0, 2.0), offsets, (0.0, 0.0, 0.0), carried, 1.088498161251728, 2.0**-55)
    return exact_gate("mish", keys, eps)
