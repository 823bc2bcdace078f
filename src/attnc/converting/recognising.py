"""Which activation a torch module or function is, with its parameters; or why it cannot be attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnc.converting.activations import Activation

SOFTPLUS_JUMP = 1e-8
"""Beyond its threshold (20 unless told) torch's softplus is βx: it jumps by 2.1e-9, and ours does not."""


@dataclass(frozen=True)
class Call:
    """An activation of one tensor; a·f(b) of the halves of an axis if it has a `gate_dim`. `reason`: why it is none."""

    input: Any
    activation: Activation | None
    inplace: bool = False
    gate_dim: int | None = None
    reason: str = ""


def _plain(name: str) -> Callable[..., Call]:
    def read(input: Any = None, inplace: bool = False) -> Call:
        return Call(input, Activation(name), inplace)

    return read


def _gelu(input: Any = None, *, approximate: str = "none") -> Call:
    return Call(input, Activation("gelu_tanh" if approximate == "tanh" else "gelu"))


def _leaky_relu(input: Any = None, negative_slope: float = 0.01, inplace: bool = False) -> Call:
    if negative_slope == 1:
        return Call(input, None, reason="a leaky ReLU of slope 1 is the identity")
    return Call(input, Activation("leaky_relu", (("slope", float(negative_slope)),)), inplace)


def _hardtanh(input: Any = None, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Call:
    return Call(input, Activation("hardtanh", (("lo", float(min_val)), ("hi", float(max_val)))), inplace)


def _softplus(input: Any = None, beta: float = 1.0, threshold: float = 20.0) -> Call:
    if not beta > 0:
        return Call(input, None, reason=f"softplus with beta={beta:g}")
    jump = math.log1p(math.exp(-threshold)) / beta
    if jump > SOFTPLUS_JUMP:
        return Call(input, None, reason=f"softplus with threshold={threshold:g} jumps by {jump:.2g} there")
    return Call(input, Activation("softplus", (("beta", float(beta)),)))


def _elu(input: Any = None, alpha: float = 1.0, inplace: bool = False) -> Call:
    return _with_alpha("elu", input, alpha, inplace)


def _celu(input: Any = None, alpha: float = 1.0, inplace: bool = False) -> Call:
    return _with_alpha("celu", input, alpha, inplace)


def _with_alpha(name: str, input: Any, alpha: float, inplace: bool) -> Call:
    if not alpha > 0:
        return Call(input, None, reason=f"{name} with alpha={alpha:g}")
    return Call(input, Activation(name, (("alpha", float(alpha)),)), inplace)


def _softshrink(input: Any = None, lambd: float = 0.5) -> Call:
    if lambd == 0:
        return Call(input, None, reason="a soft threshold of 0 is the identity")
    return Call(input, Activation("soft_threshold", (("threshold", float(lambd)),)))


def _threshold(input: Any = None, threshold: float = 0.0, value: float = 0.0, inplace: bool = False) -> Call:
    if threshold == 0 == value:
        return Call(input, Activation("relu"), inplace)
    return Call(input, None, reason=f"threshold({threshold:g}, {value:g}) jumps; attention is continuous")


def _rrelu(
    input: Any = None, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Call:
    if training:
        return Call(input, None, reason="a randomised ReLU in training: call eval() first")
    return _leaky_relu(input, (lower + upper) / 2, inplace)


def _glu(input: Any = None, dim: int = -1) -> Call:
    return Call(input, Activation("sigmoid"), gate_dim=dim)


def _jumps(name: str) -> Callable[..., Call]:
    def read(input: Any = None, *args: Any, **options: Any) -> Call:
        return Call(input, None, reason=f"{name} jumps; attention is continuous")

    return read


def _prelu(input: Any = None, weight: Any = None) -> Call:
    return Call(input, Activation("prelu"))


READERS: dict[str, Callable[..., Call]] = {
    "relu": _plain("relu"),
    "relu6": _plain("relu6"),
    "hardtanh": _hardtanh,
    "hardswish": _plain("hardswish"),
    "hardsigmoid": _plain("hardsigmoid"),
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "prelu": _prelu,
    "gelu": _gelu,
    "silu": _plain("silu"),
    "mish": _plain("mish"),
    "sigmoid": _plain("sigmoid"),
    "expit": _plain("sigmoid"),
    "logsigmoid": _plain("logsigmoid"),
    "tanh": _plain("tanh"),
    "tanhshrink": _plain("tanhshrink"),
    "softplus": _softplus,
    "softsign": _plain("softsign"),
    "softshrink": _softshrink,
    "hardshrink": _jumps("hardshrink"),
    "threshold": _threshold,
    "elu": _elu,
    "celu": _celu,
    "selu": _plain("selu"),
    "glu": _glu,
    "erf": _plain("erf"),
}
"""The framework's name of a function → what a call of it asks for. Each reader has the signature of that function."""


def _functions() -> dict[Any, tuple[str, bool]]:
    """function → (name in READERS, whether it writes into its input)."""
    found: dict[Any, tuple[str, bool]] = {}
    for name in READERS:
        for place in (F, torch, torch.special, Tensor, torch._C._nn):
            for spelled in (name, f"{name}_"):
                function = getattr(place, spelled, None)
                if callable(function):
                    found[function] = (name, spelled.endswith("_"))
    return found


MODULES: dict[type[nn.Module], Callable[[Any], Call]] = {
    nn.ReLU: lambda m: Call(None, Activation("relu"), m.inplace),
    nn.ReLU6: lambda m: Call(None, Activation("relu6"), m.inplace),
    nn.Hardtanh: lambda m: _hardtanh(None, m.min_val, m.max_val, m.inplace),
    nn.Hardswish: lambda m: Call(None, Activation("hardswish"), m.inplace),
    nn.Hardsigmoid: lambda m: Call(None, Activation("hardsigmoid"), m.inplace),
    nn.LeakyReLU: lambda m: _leaky_relu(None, m.negative_slope, m.inplace),
    nn.RReLU: lambda m: _rrelu(None, m.lower, m.upper, m.training, m.inplace),
    nn.PReLU: lambda m: Call(None, Activation("prelu")),
    nn.GELU: lambda m: _gelu(approximate=m.approximate),
    nn.SiLU: lambda m: Call(None, Activation("silu"), m.inplace),
    nn.Mish: lambda m: Call(None, Activation("mish"), m.inplace),
    nn.Sigmoid: lambda m: Call(None, Activation("sigmoid")),
    nn.LogSigmoid: lambda m: Call(None, Activation("logsigmoid")),
    nn.Tanh: lambda m: Call(None, Activation("tanh")),
    nn.Tanhshrink: lambda m: Call(None, Activation("tanhshrink")),
    nn.Softplus: lambda m: _softplus(None, m.beta, m.threshold),
    nn.Softsign: lambda m: Call(None, Activation("softsign")),
    nn.Softshrink: lambda m: _softshrink(None, m.lambd),
    nn.Hardshrink: lambda m: _jumps("hardshrink")(None),
    nn.Threshold: lambda m: _threshold(None, m.threshold, m.value, m.inplace),
    nn.ELU: lambda m: _elu(None, m.alpha, m.inplace),
    nn.CELU: lambda m: _celu(None, m.alpha, m.inplace),
    nn.SELU: lambda m: Call(None, Activation("selu"), m.inplace),
    nn.GLU: lambda m: _glu(None, m.dim),
}
FUSED: dict[type[nn.Module], str] = {
    nn.RNNBase: "its activations run inside one fused kernel",
    nn.RNNCellBase: "its activations run inside one fused kernel",
}
"""Modules whose nonlinearities cannot be reached."""
LIBRARY: dict[str, str] = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "MishActivation": "mish",
    "BloomGelu": "gelu_tanh",
}
LIBRARIES = ("transformers.activations", "transformers.models.bloom.modeling_bloom")
"""Whose classes of these names are one of ours; others there are read like any code."""
FUNCTIONS = _functions()


def read_module(module: nn.Module) -> Call | None:
    """What activation the module is; None if it is none."""
    kind = type(module)
    if kind.__module__ in LIBRARIES and kind.__name__ in LIBRARY:
        return Call(None, Activation(LIBRARY[kind.__name__]))
    for base in kind.__mro__:
        if base in MODULES:
            return MODULES[base](module) if kind.forward is base.forward else None
    return None


def why_fused(module: nn.Module) -> str | None:
    return next((reason for kind, reason in FUSED.items() if isinstance(module, kind)), None)


def read_function(function: Any) -> Call | None:
    """What activation a function kept as an attribute is, with the arguments that were bound to it."""
    if isinstance(function, functools.partial):
        inner = read_call(function.func, (None, *function.args), function.keywords)
        return inner if not function.args else None
    try:
        return read_call(function, (None,), {})
    except TypeError:  # not hashable
        return None


def read_call(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Call | None:
    """What a call of the function computes; None if it is no activation."""
    if function not in FUNCTIONS:
        return None
    name, writes = FUNCTIONS[function]
    try:
        call = READERS[name](*args, **options)
    except TypeError:  # out=…, and whatever else the reader does not know
        return Call(None, None, reason=f"{name} was called with arguments that are not known: {sorted(options)}")
    return Call(call.input, call.activation, True, call.gate_dim, call.reason) if writes else call
