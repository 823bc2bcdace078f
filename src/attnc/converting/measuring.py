"""Both models on the same inputs: ranges of pre-activations, the linear map behind each activation, and the drift."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.converting.modules import AttentionActivation
from attnc.converting.recognising import READERS
from attnc.converting.report import EndToEnd, Left, Report
from attnc.errors import InputError

KERNELS = {*READERS, "log_sigmoid_forward", "_prelu_kernel", "rrelu_with_noise", "special_erf"}


def compare(original: nn.Module, converted: nn.Module, example: Any, report: Report) -> tuple[Any, Any]:
    """Fills in what a run shows; both outputs. Dropout is off for the run, and on again afterwards if it was on."""
    with in_evaluation(original), in_evaluation(converted), torch.no_grad():
        _run(converted, example, "the converted model")  # activations that only a run shows are made now
        watch, kernels = _Watch(converted), _Kernels()
        with watch.activations(), kernels:
            ours = _run(converted, example, "the converted model")
        for name in sorted(kernels.seen):
            report.left.append(Left("", f"kernel {name}", "it ran in the converted model, called in a way nobody saw"))
        watch.note()
        consumers = {path for entry in report.replaced for path in entry.consumers}
        with watch.outputs(original, consumers, {}) as before:
            theirs = _run(original, example, "the model")
        with watch.outputs(converted, consumers, before) as moved:
            _run(converted, example, "the converted model")
    for entry in report.replaced:
        drifts = [moved[path] for path in entry.consumers if isinstance(moved.get(path), float)]
        entry.drift = max(drifts, default=None)
    report.end_to_end = EndToEnd("the example", hidden=largest_difference(theirs, ours))
    return theirs, ours


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The kernels of activations that run, however they were called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        name = function.overloadpacket.__name__.removesuffix("_")
        if name in KERNELS:
            self.seen.add(name)
        return function(*args, **(options or {}))


def _run(model: nn.Module, example: Any, what: str) -> Any:
    try:
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise InputError(f"{what} does not run on the example: {error}") from error


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Watch:
    """Hooks of one run."""

    def __init__(self, converted: nn.Module) -> None:
        self.converted = converted
        self.gates = [module for module in converted.modules() if isinstance(module, AttentionActivation)]
        self.made: list[tuple[AttentionActivation, Tensor]] = []
        self.ranges: dict[AttentionActivation, tuple[float, float]] = {}
        self.consumers: dict[AttentionActivation, set[str]] = {}

    @contextlib.contextmanager
    def activations(self) -> Iterator[None]:
        hooks = []

        def entered(gate: nn.Module, inputs: Any, output: Any) -> None:
            assert isinstance(gate, AttentionActivation)
            x = inputs[0]
            if x.numel():
                lo, hi = float(x.min()), float(x.max())
                before = self.ranges.get(gate, (lo, hi))
                self.ranges[gate] = min(lo, before[0]), max(hi, before[1])
            self.made = [(gate, output)]  # the last one: what follows it follows at once

        def consumed(linear: nn.Module, inputs: Any) -> None:
            x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
            for gate, output in self.made:
                if x is not None and (
                    x is output or (x.data_ptr() == output.data_ptr() and x.numel() == output.numel())
                ):
                    self.consumers.setdefault(gate, set()).add(paths[linear])

        paths = {module: path for path, module in self.converted.named_modules()}
        for gate in self.gates:
            hooks.append(gate.register_forward_hook(entered))
        for module in paths:
            if row_sums_axis(module) is not None:
                hooks.append(module.register_forward_pre_hook(consumed))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.made = []

    def note(self) -> None:
        for gate, seen in self.ranges.items():
            if gate.entry is not None:
                gate.entry.seen = seen
        for gate, paths in self.consumers.items():
            if gate.entry is not None:
                gate.entry.consumers = tuple(sorted({*gate.entry.consumers, *paths}))

    @contextlib.contextmanager
    def outputs(self, model: nn.Module, paths: set[str], before: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Without `before`: path → the outputs, call by call. With it: path → the largest difference from them."""
        found: dict[str, Any] = {}
        hooks = []

        def watch(path: str) -> None:
            def left(module: nn.Module, inputs: Any, output: Tensor) -> None:
                if not before:
                    found.setdefault(path, []).append(output.detach().clone())
                elif before.get(path):
                    difference = float((before[path].pop(0) - output).abs().max()) if output.numel() else 0.0
                    found[path] = max(found.get(path, 0.0), difference)

            hooks.append(model.get_submodule(path).register_forward_hook(left))

        for path in paths:
            watch(path)
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


def row_sums_axis(module: nn.Module) -> tuple[int, ...] | None:
    """The axes of `weight` over which a linear module sums; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return None
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return tuple(range(1, weight.ndim))
    return (0,) if type(module).__name__ == "Conv1D" and weight.ndim == 2 else None


def tensors_in(value: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, whatever holds them."""
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
