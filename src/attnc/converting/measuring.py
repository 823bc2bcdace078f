"""The figures of a report: proven block errors, and ranges and drift measured on one example.

Block errors hold in exact arithmetic and are rounded up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.converting.modules import AttentionActivation
from attnc.converting.recognising import READERS
from attnc.converting.report import EndToEnd, Left, Report
from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import up

KERNELS = {*READERS, "log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise", "special_erf"}
"""The names of torch's kernels that compute activations."""


def summed_axes(module: nn.Module) -> tuple[int, ...] | None:
    """Return the axes of `weight` over which a linear module sums, or None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return None
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return tuple(range(1, weight.ndim))
    return (0,) if type(module).__name__ == "Conv1D" and weight.ndim == 2 else None


def gain(module: nn.Module) -> float:
    """Return ‖|W|‖_∞ of a linear module, rounded up: the change of an output if every input changes by at most 1."""
    sizes = np.abs(numbers(module.weight))
    sums = sizes.sum(axis=summed_axes(module))
    return float(up(sums, sizes.size // max(1, sums.size)).max(initial=0.0))


def numbers(tensor: Any) -> Float[np.ndarray, "*shape"]:
    """The numbers of a tensor, in float64."""
    return np.asarray(tensor.detach().double().cpu().numpy())


def add_block_errors(converted: nn.Module, report: Report) -> None:
    """Add ‖|W₂|‖_∞·δ to every activation if a run, or the order of a container, shows which linear map follows it."""
    modules = dict(converted.named_modules())
    for path, module in modules.items():
        for gate, linear in _in_order(module):
            if gate.entry is not None:
                gate.entry.add_consumer(f"{path}.{linear}" if path else linear)
    for entry in report.replaced:
        gains = [gain(modules[path]) for path in entry.consumers]
        if gains:
            entry.block_error = float(up(max(gains) * entry.error)) if entry.error else 0.0


def _in_order(module: nn.Module) -> Iterator[tuple[AttentionActivation, str]]:
    """Yield the activations of one container, each with the name of the linear map after it."""
    is_layer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    if is_layer and isinstance(module.activation, AttentionActivation):
        yield module.activation, "linear2"
    last = None
    for name, child in module._modules.items() if isinstance(module, nn.Sequential) else ():
        assert child is not None  # named_children would list a shared activation only once
        if last is not None and summed_axes(child) is not None:
            yield last, name
        if not isinstance(child, nn.Dropout | nn.Identity | nn.Flatten):
            last = child if isinstance(child, AttentionActivation) else None


def compare(original: nn.Module, converted: nn.Module, example: Any, report: Report) -> None:
    """Add the measurements of a run to the report. Dropout is off during the run."""
    watched = _Watched()
    with in_evaluation(original), in_evaluation(converted), torch.no_grad():
        _run(converted, example, "the converted model")  # makes the activations that only a run shows
        parts = {path: part for path, part in converted.named_modules() if _is_watched(part)}
        with _after_calls(parts, watched.keep), _Kernels() as kernels:
            ours = _run(converted, example, "the converted model")
        for name in sorted(kernels.seen):
            report.left.append(Left("", f"kernel {name}", "it ran in the converted model, and its call was not seen"))
        consumers = {path for entry in report.replaced for path in entry.consumers}
        watched.calls.clear()
        with _after_calls({path: original.get_submodule(path) for path in consumers}, watched.differ):
            theirs = _run(original, example, "the model")
    for entry in report.replaced:
        entry.drift = max((watched.moved[path] for path in entry.consumers if path in watched.moved), default=None)
    report.end_to_end = EndToEnd("the example", hidden=largest_difference(theirs, ours))


def _is_watched(module: nn.Module) -> bool:
    return isinstance(module, AttentionActivation) or summed_axes(module) is not None


@dataclasses.dataclass
class _Watched:
    """The outputs of linear maps that take the output of an activation, by path and call number."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    outputs: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)
    moved: dict[str, float] = dataclasses.field(default_factory=dict)  # path → largest difference of an output
    last: tuple[AttentionActivation, Tensor] | None = None  # the activation that ran last, and its output

    def keep(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the range of an activation's inputs, and the linear map that runs next if it takes the output."""
        self.calls[path] += 1
        x: Any = inputs[0] if inputs else None
        if isinstance(module, AttentionActivation):
            if x.numel() and module.entry is not None:
                lo, hi = module.entry.seen or (float("inf"), float("-inf"))
                module.entry.seen = min(float(x.min()), lo), max(float(x.max()), hi)
            self.last = module, output
        elif self.last is not None and isinstance(x, Tensor):
            gate, made = self.last
            is_same = x is made or (x.data_ptr() == made.data_ptr() and x.numel() == made.numel())
            if is_same and gate.entry is not None:
                gate.entry.add_consumer(path)
                self.outputs[path, self.calls[path]] = output.detach().clone()

    def differ(self, path: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Compare an output with that of the same call in the other model."""
        self.calls[path] += 1
        other = self.outputs.pop((path, self.calls[path]), None)
        if other is not None:
            difference = float((output - other).abs().max()) if output.numel() else 0.0
            self.moved[path] = max(self.moved.get(path, 0.0), difference)


@contextlib.contextmanager
def _after_calls(modules: Mapping[str, nn.Module], seen: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call seen(path, module, inputs, output) after every call of one of the modules."""
    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.callback(module.register_forward_hook(functools.partial(seen, path)).remove)
        yield


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the activation kernels that run, whichever call starts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        name = function.overloadpacket.__name__.removesuffix("_")
        if name in KERNELS:
            self.seen.add(name)
        return function(*args, **(options or {}))


def _run(model: nn.Module, example: Any, which: str) -> Any:
    try:
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise InputError(f"{which} does not run on the example: {error}") from error


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. Afterwards, put each module back into its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def tensors_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in the output of a model, from all containers in it."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = [getattr(value, part.name) for part in dataclasses.fields(value)]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for member in members for tensor in tensors_in(member)]


def largest_difference(before: Any, after: Any) -> float | None:
    """Return the largest difference between corresponding numbers of two outputs, or None if there are no numbers."""
    pairs = zip(tensors_in(before), tensors_in(after), strict=True)
    differences = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()]
    return max(differences, default=None)
