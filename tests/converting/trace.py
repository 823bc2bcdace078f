"""The kernels that run, by the operators that torch dispatches; and models to convert."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ACTIVATION_KERNELS = {
    *("relu", "gelu", "tanh", "silu", "sigmoid", "softplus", "mish", "elu", "celu", "selu", "hardtanh", "hardswish"),
    *("hardsigmoid", "leaky_relu", "prelu", "_prelu_kernel", "log_sigmoid_forward", "log_sigmoid", "softshrink"),
    *("hardshrink", "threshold", "rrelu_with_noise", "glu", "erf", "special_erf", "clamp", "clamp_min", "clamp_max"),
    *("tanh_backward", "gelu_backward", "threshold_backward", "sigmoid_backward", "silu_backward", "elu_backward"),
    *("softplus_backward", "mish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward"),
    *("_transformer_encoder_layer_fwd", "lstm", "gru", "atan", "maximum", "minimum", "where"),
}


class Trace(TorchDispatchMode):
    """Counts operators by name, without the underscore of those that write into their input."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__.removesuffix("_")] += 1
        return function(*args, **(kwargs or {}))

    @property
    def activations(self) -> set[str]:
        return set(self.counts) & ACTIVATION_KERNELS


def traced(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, Trace]:
    trace = Trace()
    with torch.no_grad(), trace:
        out = model(*args, **options)
    return out, trace


def assert_same_by_attention(model: Callable[..., Any], converted: Callable[..., Any], *args: Any) -> Trace:
    """The outputs agree, and no kernel of an activation runs in the converted model."""
    y, trace = traced(converted, *args)
    assert not trace.activations
    assert (y - model(*args)).abs().max() <= 1e-5
    return trace


def mlp(activation: Callable[[], nn.Module], *widths: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [(nn.Linear(a, b), activation()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[part for pair in parts for part in pair][:-1]).to(dtype)
