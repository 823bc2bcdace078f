"""Errors of activations behind the linear maps that follow: proven in exact arithmetic, rounded outward."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from attnc.converting.modules import AttentionActivation
from attnc.converting.report import Report
from attnc.errors import InputError
from attnc.numerics.rounding import up


def summed_axes(module: nn.Module) -> tuple[int, ...] | None:
    """The axes of `weight` over which a linear module sums; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return None
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return tuple(range(1, weight.ndim))
    return (0,) if type(module).__name__ == "Conv1D" and weight.ndim == 2 else None


def gain(module: nn.Module) -> float:
    """‖|W|‖_∞ rounded up: a bound of the change of an output when every input changes by at most 1."""
    axes, weight = summed_axes(module), module.weight
    assert axes is not None
    assert isinstance(weight, Tensor)
    sizes = weight.detach().abs().double().cpu().numpy()
    terms = int(np.prod([sizes.shape[axis] for axis in axes]))
    return float(up(sizes.sum(axis=axes), terms).max(initial=0.0))


def add_block_errors(converted: nn.Module, report: Report) -> None:
    """Add ‖|W₂|‖_∞·δ to every activation whose linear map is known, from a run or from the order of a container."""
    modules = dict(converted.named_modules())
    for path, module in modules.items():
        for gate, linear in _in_order(module):
            if gate.entry is not None:
                gate.entry.add_consumers([f"{path}.{linear}" if path else linear])
    for entry in report.replaced:
        gains = [gain(modules[path]) for path in entry.consumers]
        if gains:
            entry.block_error = float(up(max(gains) * entry.error)) if entry.error else 0.0


def _in_order(module: nn.Module) -> list[tuple[AttentionActivation, str]]:
    """The activations of one container, each with the name of the linear map behind it."""
    found: list[tuple[AttentionActivation, str]] = []
    is_layer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    if is_layer and isinstance(module.activation, AttentionActivation):
        found.append((module.activation, "linear2"))
    if isinstance(module, nn.Sequential):
        last: AttentionActivation | None = None
        for name, child in module._modules.items():  # named_children would name a shared activation once
            assert child is not None
            if last is not None and summed_axes(child) is not None:
                found.append((last, name))
            if not isinstance(child, nn.Dropout | nn.Identity | nn.Flatten):
                last = child if isinstance(child, AttentionActivation) else None
    return found


def composed_error(converted: nn.Sequential) -> float:
    """A bound of |converted − original| over all inputs, for linear maps and activations in a row, in exact arithmetic.

    Proof.  Through a linear map an error e becomes |W|·e. An activation of Lipschitz constant L and error δ makes it
            L·e + δ for every input, since gates are within δ of f everywhere.
    """
    off: np.ndarray | None = None
    for name, module in converted._modules.items():  # named_children would name a shared activation once
        if isinstance(module, nn.Dropout | nn.Identity):
            continue
        if isinstance(module, AttentionActivation):
            solved = module.solved
            before = np.zeros(1) if off is None else off
            off = up(solved.lipschitz * before + solved.error, 3)
        elif isinstance(module, nn.Linear):
            size = module.weight.detach().abs().double().cpu().numpy()
            off = None if off is None else up(size @ np.broadcast_to(off, size.shape[1]), size.shape[1] + 1)
        else:
            raise InputError(
                f"{name} ({type(module).__name__}): errors are composed through linear maps and activations alone"
            )
    return 0.0 if off is None else float(off.max())
