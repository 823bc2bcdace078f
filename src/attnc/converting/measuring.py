"""The figures of a report: block errors, which are proven, and ranges and drift, measured on the same inputs.

Block errors hold in exact arithmetic and are rounded outward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.converting.modules import AttentionActivation
from attnc.converting.recognising import READERS
from attnc.converting.report import EndToEnd, Left, Report
from attnc.errors import InputError
from attnc.numerics.rounding import up

if TYPE_CHECKING:
    from jaxtyping import Float

KERNELS = {*READERS, "log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise", "special_erf"}
"""The names of torch's kernels that compute activations."""


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
    axes, sizes = summed_axes(module), absolute(module)
    assert axes is not None
    terms = int(np.prod([sizes.shape[axis] for axis in axes]))
    return float(up(sizes.sum(axis=axes), terms).max(initial=0.0))


def absolute(module: nn.Module) -> Float[np.ndarray, "*shape"]:
    """The absolute values of the weights of a linear module, in float64."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return np.asarray(weight.detach().abs().double().cpu().numpy())


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


def compare(original: nn.Module, converted: nn.Module, example: Any, report: Report) -> tuple[Any, Any]:
    """Add the measurements of a run to the report, and return both outputs. Dropout is off during the run."""
    with in_evaluation(original), in_evaluation(converted), torch.no_grad():
        _run(converted, example, "the converted model")  # makes the activations that only a run shows
        kernels = _Kernels()
        with _watched(converted), kernels:
            ours = _run(converted, example, "the converted model")
        for name in sorted(kernels.seen):
            report.left.append(Left("", f"kernel {name}", "it ran in the converted model, and its call was not seen"))
        consumers = {path for entry in report.replaced for path in entry.consumers}
        before: dict[str, list[Tensor]] = defaultdict(list)
        moved: dict[str, float] = {}

        def keep(path: str, output: Tensor) -> None:
            before[path].append(output.detach().clone())

        def differ(path: str, output: Tensor) -> None:
            if before[path]:
                difference = float((before[path].pop(0) - output).abs().max()) if output.numel() else 0.0
                moved[path] = max(moved.get(path, 0.0), difference)

        with _outputs(original, consumers, keep):
            theirs = _run(original, example, "the model")
        with _outputs(converted, consumers, differ):
            _run(converted, example, "the converted model")
    for entry in report.replaced:
        entry.drift = max((moved[path] for path in entry.consumers if path in moved), default=None)
    report.end_to_end = EndToEnd("the example", hidden=largest_difference(theirs, ours))
    return theirs, ours


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The kernels of activations that run, by whatever call."""

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
    """The model in evaluation mode; afterwards each module is in its mode of before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _watched(converted: nn.Module) -> Iterator[None]:
    """Record the range of inputs of every activation, and the linear maps that take its output."""
    paths = {module: path for path, module in converted.named_modules()}
    last: list[tuple[AttentionActivation, Tensor]] = []  # the activation that ran last: its consumer runs next

    def entered(gate: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(gate, AttentionActivation)
        x, entry = inputs[0], gate.entry
        if x.numel() and entry is not None:
            lo, hi = entry.seen or (float("inf"), float("-inf"))
            entry.seen = min(float(x.min()), lo), max(float(x.max()), hi)
        last[:] = [(gate, output)]

    def consumed(linear: nn.Module, inputs: Any) -> None:
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        x = inputs[0]
        for gate, output in last:
            is_same = x is output or (x.data_ptr() == output.data_ptr() and x.numel() == output.numel())
            if is_same and gate.entry is not None:
                gate.entry.add_consumers([paths[linear]])

    with contextlib.ExitStack() as hooks:
        for module in paths:
            if isinstance(module, AttentionActivation):
                hooks.callback(module.register_forward_hook(entered).remove)
            elif summed_axes(module) is not None:
                hooks.callback(module.register_forward_pre_hook(consumed).remove)
        yield


@contextlib.contextmanager
def _outputs(model: nn.Module, paths: set[str], seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call seen(path, output) after every call of the modules at these paths."""
    with contextlib.ExitStack() as hooks:
        for path in paths:

            def after(module: nn.Module, inputs: Any, output: Tensor, path: str = path) -> None:
                seen(path, output)

            hooks.callback(model.get_submodule(path).register_forward_hook(after).remove)
        yield


def tensors_in(value: Any) -> list[Tensor]:
    """The floating-point tensors in the output of a model, in whatever containers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = [getattr(value, part.name) for part in dataclasses.fields(value)]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for member in members for tensor in tensors_in(member)]


def largest_difference(before: Any, after: Any) -> float | None:
    pairs = zip(tensors_in(before), tensors_in(after), strict=True)
    differences = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()]
    return max(differences, default=None)
