"""Recognise activations in torch modules and calls, each with its parameters or the reason why it is left."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnc.converting.activations import KnownActivation

LARGEST_JUMP = 1e-8
"""The largest jump of a softplus that is converted. torch's softplus is x beyond a threshold, and jumps there. With the
default threshold 20 the jump is 2.1e-9."""
GUARD = 1e-4
"""Largest lower bound of a clamp that is taken for a guard against division by zero, and not for an activation."""
HUGE = 1e30
"""A bound of this size only replaces infinities, so that a clamp to it is not an activation."""


@dataclass(frozen=True)
class ActivationCall:
    """An activation of one tensor, or a·f(b) of the halves of the axis `gate_dim`.

    If it cannot be converted, `activation` is None and `reason` explains why.
    """

    input: Any
    activation: KnownActivation | None
    inplace: bool = False
    gate_dim: int | None = None
    reason: str = ""
    weight: Any = None  # of prelu


Reading = KnownActivation | str | None
"""An activation, the reason why attention cannot compute it, or None if the arguments make it something else."""


def _made(name: str, **parameters: float) -> KnownActivation:
    return KnownActivation(name, tuple((parameter, float(value)) for parameter, value in parameters.items()))


def _leaky_relu(negative_slope: float = 0.01) -> Reading:
    return (
        "a leaky ReLU of slope 1 is the identity" if negative_slope == 1 else _made("leaky_relu", slope=negative_slope)
    )


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Reading:
    if not beta > 0:
        return f"softplus with beta={beta:g}"
    jump = math.log1p(math.exp(-threshold)) / beta
    if jump > LARGEST_JUMP:
        return f"softplus with threshold={threshold:g} jumps by {jump:.2g} there"
    return _made("softplus", beta=beta)


def _with_alpha(name: str) -> Callable[..., Reading]:
    return lambda alpha=1.0: _made(name, alpha=alpha) if alpha > 0 else f"{name} with alpha={alpha:g}"


def _softshrink(lambd: float = 0.5) -> Reading:
    return "a soft threshold of 0 is the identity" if lambd == 0 else _made("soft_threshold", threshold=lambd)


def _threshold(threshold: float = 0.0, value: float = 0.0) -> Reading:
    if threshold == 0 == value:
        return KnownActivation("relu")
    return f"threshold({threshold:g}, {value:g}) jumps; attention is continuous"


def _rrelu(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Reading:
    return "a randomised ReLU in training: call eval() first" if training else _leaky_relu((lower + upper) / 2)


def clamped(min: Any = None, max: Any = None) -> Reading:
    """Read the bounds of a clamp. Those that are tensors are not read here."""
    if any(isinstance(bound, Tensor) for bound in (min, max)):
        return None
    lo = -math.inf if min is None or min <= -HUGE else float(min)
    hi = math.inf if max is None or max >= HUGE else float(max)
    if hi == math.inf:
        if lo == 0:
            return KnownActivation("relu")
        return None if lo == -math.inf or 0 < lo <= GUARD else _made("clamp_min", lo=lo)
    if lo == -math.inf:
        return _made("clamp_max", hi=hi)
    if (lo, hi) == (0.0, 6.0):
        return KnownActivation("relu6")
    return _made("hardtanh", lo=lo, hi=hi) if lo < hi else None


def _plain(name: str) -> Callable[[], Reading]:
    return lambda: KnownActivation(name)


WITHOUT_PARAMETERS = (
    *("relu", "relu6", "hardswish", "hardsigmoid", "silu", "mish", "sigmoid", "logsigmoid", "tanh", "tanhshrink"),
    *("softsign", "selu", "erf", "abs", "atan"),
)
"""The activations without parameters. Their gates have the same names."""
READERS: dict[str, Callable[..., Reading]] = {
    **{name: _plain(name) for name in WITHOUT_PARAMETERS},
    **{name: _with_alpha(name) for name in ("elu", "celu")},
    "expit": _plain("sigmoid"),
    "hardtanh": lambda min_val=-1.0, max_val=1.0: _made("hardtanh", lo=min_val, hi=max_val),
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "clamp": clamped,
    "clip": clamped,
    "clamp_min": lambda min=None: clamped(min),
    "clamp_max": lambda max=None: clamped(None, max),
    "absolute": _plain("abs"),
    "arctan": _plain("atan"),
    "prelu": lambda weight=None: KnownActivation("prelu"),
    "gelu": lambda approximate="none": KnownActivation("gelu_tanh" if approximate == "tanh" else "gelu"),
    "softplus": _softplus,
    "softshrink": _softshrink,
    "hardshrink": lambda lambd=0.5: "hardshrink jumps; attention is continuous",
    "threshold": _threshold,
    "glu": lambda dim=-1: KnownActivation("sigmoid"),
}
"""torch's name of a function → the reader of its parameters. A reader takes them by torch's names and in torch's order,
without the first (`input`) and the last (`inplace`). torch's modules have attributes of the same names."""
PARAMETERS = {name: tuple(signature(reader).parameters) for name, reader in READERS.items()}


def _read(name: str, input: Any, inplace: bool = False, **given: Any) -> ActivationCall | None:
    found = READERS[name](**given)
    if found is None:
        return None
    if isinstance(found, str):
        return ActivationCall(input, None, reason=found)
    dim = given.get("dim", -1) if name == "glu" else None
    return ActivationCall(input, found, inplace, dim, weight=given.get("weight"))


def _functions() -> dict[Any, tuple[str, bool]]:
    """Return torch's functions of these names → (name in READERS, whether the function writes into its input)."""
    found: dict[Any, tuple[str, bool]] = {}
    for name in READERS:
        for place in (F, torch, torch.special, Tensor, torch._C._nn):
            for spelled in (name, f"{name}_"):
                function = getattr(place, spelled, None)
                if callable(function):
                    found[function] = (name, spelled.endswith("_"))
    return found


def _modules() -> dict[type[nn.Module], str]:
    """Return torch's module of an activation → its name in READERS.

    The names differ only in capitals and underscores.
    """
    kinds = {name.lower(): kind for name, kind in vars(nn).items() if isinstance(kind, type)}
    return {kinds[key]: name for name in READERS if (key := name.replace("_", "")) in kinds}


TANH_GELUS = (
    *("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "GELUTanh", "PytorchGELUTanh", "BloomGelu"),
)
LIBRARY: dict[str, str] = {
    **dict.fromkeys(TANH_GELUS, "gelu_tanh"),
    "GELUActivation": "gelu",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "MishActivation": "mish",
}
LIBRARIES = ("transformers.activations", "transformers.models.bloom.modeling_bloom")
"""The Python modules whose classes LIBRARY lists as known activations. Their other classes are read like any code."""
FUNCTIONS, MODULES = _functions(), _modules()


def read_module(module: nn.Module) -> ActivationCall | None:
    """Return the activation that a module computes, or None if it is not an activation."""
    kind = type(module)
    if kind.__module__ in LIBRARIES and kind.__name__ in LIBRARY:
        return ActivationCall(None, KnownActivation(LIBRARY[kind.__name__]))
    base = next((base for base in kind.__mro__ if base in MODULES), None)
    if base is None or kind.forward is not base.forward:
        return None
    names = (*PARAMETERS[MODULES[base]], "inplace")
    given = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return _read(MODULES[base], None, **given)


def read_function(function: Any) -> ActivationCall | None:
    """Return the activation that an attribute of a module computes, with its bound arguments, or None."""
    if isinstance(function, functools.partial):
        return None if function.args else read_call(function.func, (None,), function.keywords)
    return read_call(function, (None,), {})


def name_of(function: Any) -> tuple[str, bool] | None:
    """Return torch's name of an activation, and whether it writes into its input. Return None for other functions."""
    try:
        return FUNCTIONS.get(function)
    except TypeError:  # not hashable
        return None


def read_call(function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> ActivationCall | None:
    """Return the activation that a call of the function computes, or None if it is not an activation."""
    found = name_of(function)
    if found is None:
        return None
    name, writes = found
    names = ("input", *PARAMETERS[name], "inplace")
    try:
        call = _read(name, **dict(zip(names[: len(args)], args, strict=True)), **options)
    except (TypeError, ValueError):  # out=… and other arguments that the reader does not take
        return ActivationCall(None, None, reason=f"{name} was called with unknown arguments: {sorted(options)}")
    return replace(call, inplace=True) if writes and call is not None else call
