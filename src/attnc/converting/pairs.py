"""Nonlinear functions of two tensors by attention: maximum and minimum, and PReLU with a weight that is an argument.

The maximum of x and y is a head of two keys, with the scores β(x − y) and 0 and the values x and y. Its error is
d/(e^{βd} + 1) ≤ W(1/e)/β with d = |x − y|, as for ReLU.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from attnc.constructions.fitting.gate import ROUNDED_UP, W, power_of_two
from attnc.converting.activations import KnownActivation, Solved
from attnc.converting.modules import AttentionActivation, compute_dtype, exported_mean, exported_weights, two_slopes
from attnc.errors import positive_number
from attnc.ir.soft_head import SoftHead


def maximum_keys(eps: float, dtypes: tuple[str, ...]) -> Solved:
    """Return the two keys. Their slopes are powers of two, which every dtype stores exactly."""
    beta = power_of_two(W / positive_number("eps", eps) * ROUNDED_UP)
    keys = SoftHead.of_one_variable(np.array([0.0, beta]), np.zeros(2), np.array([0.0, 1.0]))
    return Solved(KnownActivation("maximum"), keys, W / beta * ROUNDED_UP, "closed form", dtypes, 1.0)


class AttentionMaximum(nn.Module):
    """The maximum, or minimum, of two tensors that torch can broadcast. The gate belongs to another module."""

    def __init__(self, gate: AttentionActivation) -> None:
        super().__init__()
        self.held = (gate,)  # a tuple, so that its keys are not listed twice

    def forward(self, x: Tensor, y: Tensor, name: str = "max") -> Tensor:
        shared = torch.promote_types(x.dtype, y.dtype)
        inner = compute_dtype(torch.empty((), dtype=shared))
        if torch.onnx.is_in_onnx_export():
            x, y = torch.broadcast_tensors(x.to(inner), y.to(inner))  # type: ignore[no-untyped-call]
            slopes, offsets, _, _ = self.held[0].keys(x)
            values = torch.stack((x, y) if name == "min" else (y, x), -1)
            return exported_mean(exported_weights(x - y, slopes, offsets), values).to(shared)
        if name == "min":
            return -self.forward(-x, -y)
        # an infinite number times a weight of 0 would be NaN
        finite_x, finite_y = (torch.nan_to_num(part.to(inner), nan=math.nan) for part in (x, y))
        weight = self.held[0](finite_x - finite_y)
        made = (weight * finite_x + (1 - weight) * finite_y).to(shared)
        made = made.masked_fill((x == math.inf) | (y == math.inf), math.inf)
        return made.masked_fill((x == -math.inf) & (y == -math.inf), -math.inf)


def prelu(relu: AttentionActivation, x: Tensor, weight: Tensor) -> Tensor:
    """Return x to the right of 0 and weight·x to the left, with one weight for all or one for each channel (axis 1)."""
    inner = compute_dtype(x)
    if weight.numel() > 1 and weight.ndim == 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    given = x.to(inner)
    return two_slopes(given, relu, weight.to(inner)).to(x.dtype)
