"""What the errors of activations do to what follows: proven, in exact arithmetic, with outward rounding."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from attnc.converting.measuring import row_sums_axis
from attnc.converting.modules import AttentionActivation
from attnc.converting.report import Report
from attnc.errors import InputError
from attnc.numerics.rounding import up


def gain(module: nn.Module) -> float:
    """‖|W|‖_∞: how far an output can move when every input moves by 1, rounded up."""
    axes = row_sums_axis(module)
    assert axes is not None
    weight = module.weight
    assert isinstance(weight, Tensor)
    sizes = weight.detach().abs().double().cpu().numpy()
    terms = int(np.prod([sizes.shape[axis] for axis in axes]))
    return float(up(sizes.sum(axis=axes), terms).max(initial=0.0))


def add_block_errors(converted: nn.Module, report: Report) -> None:
    """‖|W₂|‖_∞·δ for every activation whose linear map is known: by a run, or by the order of an nn.Sequential."""
    modules = dict(converted.named_modules())
    for path, module in modules.items():
        for gate, linear in _in_order(module):
            if gate.entry is not None:
                inner = f"{path}.{linear}" if path else linear
                gate.entry.consumers = tuple(sorted({*gate.entry.consumers, inner}))
    for entry in report.replaced:
        gains = [gain(modules[path]) for path in entry.consumers]
        if gains:
            entry.block_error = float(up(max(gains) * entry.error)) if entry.error else 0.0


def _in_order(module: nn.Module) -> list[tuple[AttentionActivation, str]]:
    """(activation, name of the linear map behind it) within one container."""
    found: list[tuple[AttentionActivation, str]] = []
    is_layer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    if is_layer and isinstance(module.activation, AttentionActivation):
        found.append((module.activation, "linear2"))
    if isinstance(module, nn.Sequential):
        last: AttentionActivation | None = None
        for name, child in module._modules.items():  # named_children would name a shared activation once
            assert child is not None
            if last is not None and row_sums_axis(child) is not None:
                found.append((last, name))
            if not isinstance(child, nn.Dropout | nn.Identity | nn.Flatten):
                last = child if isinstance(child, AttentionActivation) else None
    return found


def composed_error(converted: nn.Sequential) -> float:
    """sup |converted − original| over all inputs, in exact arithmetic, of linear maps and activations in a row.

    Proof.  Through a linear map an error e becomes |W|·e; an activation of Lipschitz constant L and error δ makes of it
            L·e + δ, whatever the input is, since gates are within δ of f everywhere.
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
                f"{name} ({type(module).__name__}): errors are composed through linear maps and activations"
            )
    return 0.0 if off is None else float(off.max())
