"""Read torch modules and calls: the activation with its parameters, or the reason why it cannot be attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnc.converting.activations import Activation

SOFTPLUS_JUMP = 1e-8
"""The largest jump of a softplus that is converted. torch's softplus is x beyond a threshold, where it jumps; with the
default threshold 20 the jump is 2.1e-9."""


@dataclass(frozen=True)
class ActivationCall:
    """An activation of one tensor, or a·f(b) of the halves of the axis `gate_dim`.

    `activation` is None if it cannot be converted; `reason` says why.
    """

    input: Any
    activation: Activation | None
    inplace: bool = False
    gate_dim: int | None = None
    reason: str = ""


def _plain(name: str) -> Callable[..., ActivationCall]:
    def read(input: Any = None, inplace: bool = False) -> ActivationCall:
        return ActivationCall(input, Activation(name), inplace)

    return read


def _gelu(input: Any = None, *, approximate: str = "none") -> ActivationCall:
    return ActivationCall(input, Activation("gelu_tanh" if approximate == "tanh" else "gelu"))


def _leaky_relu(input: Any = None, negative_slope: float = 0.01, inplace: bool = False) -> ActivationCall:
    if negative_slope == 1:
        return ActivationCall(input, None, reason="a leaky ReLU of slope 1 is the identity")
    return ActivationCall(input, Activation("leaky_relu", (("slope", float(negative_slope)),)), inplace)


def _hardtanh(input: Any = None, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> ActivationCall:
    return ActivationCall(input, Activation("hardtanh", (("lo", float(min_val)), ("hi", float(max_val)))), inplace)


def _softplus(input: Any = None, beta: float = 1.0, threshold: float = 20.0) -> ActivationCall:
    if not beta > 0:
        return ActivationCall(input, None, reason=f"softplus with beta={beta:g}")
    jump = math.log1p(math.exp(-threshold)) / beta
    if jump > SOFTPLUS_JUMP:
        return ActivationCall(input, None, reason=f"softplus with threshold={threshold:g} jumps by {jump:.2g} there")
    return ActivationCall(input, Activation("softplus", (("beta", float(beta)),)))


def _with_alpha(name: str) -> Callable[..., ActivationCall]:
    def read(input: Any = None, alpha: float = 1.0, inplace: bool = False) -> ActivationCall:
        if not alpha > 0:
            return ActivationCall(input, None, reason=f"{name} with alpha={alpha:g}")
        return ActivationCall(input, Activation(name, (("alpha", float(alpha)),)), inplace)

    return read


def _softshrink(input: Any = None, lambd: float = 0.5) -> ActivationCall:
    if lambd == 0:
        return ActivationCall(input, None, reason="a soft threshold of 0 is the identity")
    return ActivationCall(input, Activation("soft_threshold", (("threshold", float(lambd)),)))


def _threshold(input: Any = None, threshold: float = 0.0, value: float = 0.0, inplace: bool = False) -> ActivationCall:
    if threshold == 0 == value:
        return ActivationCall(input, Activation("relu"), inplace)
    return ActivationCall(input, None, reason=f"threshold({threshold:g}, {value:g}) jumps; attention is continuous")


def _rrelu(
    input: Any = None, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> ActivationCall:
    if training:
        return ActivationCall(input, None, reason="a randomised ReLU in training: call eval() first")
    return _leaky_relu(input, (lower + upper) / 2, inplace)


def _glu(input: Any = None, dim: int = -1) -> ActivationCall:
    return ActivationCall(input, Activation("sigmoid"), gate_dim=dim)


def _jumps(name: str) -> Callable[..., ActivationCall]:
    def read(input: Any = None, *args: Any, **options: Any) -> ActivationCall:
        return ActivationCall(input, None, reason=f"{name} jumps; attention is continuous")

    return read


def _prelu(input: Any = None, weight: Any = None) -> ActivationCall:
    return ActivationCall(input, Activation("prelu"))


WITHOUT_PARAMETERS = (
    *("relu", "relu6", "hardswish", "hardsigmoid", "silu", "mish", "sigmoid", "logsigmoid", "tanh", "tanhshrink"),
    *("softsign", "selu", "erf"),
)
"""The activations without parameters, whose names are those of the gates."""
READERS: dict[str, Callable[..., ActivationCall]] = {
    **{name: _plain(name) for name in WITHOUT_PARAMETERS},
    **{name: _with_alpha(name) for name in ("elu", "celu")},
    "expit": _plain("sigmoid"),
    "hardtanh": _hardtanh,
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "prelu": _prelu,
    "gelu": _gelu,
    "softplus": _softplus,
    "softshrink": _softshrink,
    "hardshrink": _jumps("hardshrink"),
    "threshold": _threshold,
    "glu": _glu,
}
"""torch's name of a function → the reader of its calls, which has the signature of that function."""


def _functions() -> dict[Any, tuple[str, bool]]:
    """torch's functions of these names → (name in READERS, whether it writes into its input)."""
    found: dict[Any, tuple[str, bool]] = {}
    for name in READERS:
        for place in (F, torch, torch.special, Tensor, torch._C._nn):
            for spelled in (name, f"{name}_"):
                function = getattr(place, spelled, None)
                if callable(function):
                    found[function] = (name, spelled.endswith("_"))
    return found


def _modules() -> dict[type[nn.Module], str]:
    """torch's module of an activation → its name in READERS; the names differ in capitals and underscores alone."""
    kinds = {name.lower(): kind for name, kind in vars(nn).items() if isinstance(kind, type)}
    return {kinds[key]: name for name in READERS if (key := name.replace("_", "")) in kinds}


FUSED: dict[type[nn.Module], str] = {
    nn.RNNBase: "its activations run inside one fused kernel",
    nn.RNNCellBase: "its activations run inside one fused kernel",
}
"""Modules whose activations cannot be replaced, and the reason."""
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
"""The modules whose classes in LIBRARY are known activations; their other classes are read like any code."""
FUNCTIONS, MODULES = _functions(), _modules()


def read_module(module: nn.Module) -> ActivationCall | None:
    """The activation that a module is; None if it is none."""
    kind = type(module)
    if kind.__module__ in LIBRARIES and kind.__name__ in LIBRARY:
        return ActivationCall(None, Activation(LIBRARY[kind.__name__]))
    for base in kind.__mro__:
        if base in MODULES:
            if kind.forward is not base.forward:
                return None
            reader = READERS[MODULES[base]]  # a module's attributes have the names of the function's parameters
            names = [*signature(reader).parameters][1:]  # without `input`
            given = {name: getattr(module, name) for name in names if hasattr(module, name)}
            return reader(**given)
    return None


def why_fused(module: nn.Module) -> str | None:
    return next((reason for kind, reason in FUSED.items() if isinstance(module, kind)), None)


def read_function(function: Any) -> ActivationCall | None:
    """The activation that a function kept as an attribute is, with its bound arguments; None if it is none."""
    if isinstance(function, functools.partial):
        inner = read_call(function.func, (None, *function.args), function.keywords)
        return inner if not function.args else None
    try:
        return read_call(function, (None,), {})
    except TypeError:  # not hashable
        return None


def read_call(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ActivationCall | None:
    """The activation that a call of the function computes; None if it is none."""
    if function not in FUNCTIONS:
        return None
    name, writes = FUNCTIONS[function]
    try:
        call = READERS[name](*args, **options)
    except TypeError:  # out=… and other arguments that the reader does not take
        return ActivationCall(None, None, reason=f"{name} was called with unknown arguments: {sorted(options)}")
    return replace(call, inplace=True) if writes else call
