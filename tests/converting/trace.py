"""Which kernels run: the operators that torch dispatches."""

from __future__ import annotations

from collections import Counter
from typing import Any

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
