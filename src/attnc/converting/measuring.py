"""The figures of a report: proven block errors, and ranges and drift measured on one example.

Block errors hold in exact arithmetic and are rounded up.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnc.converting.blocks import BlockErrors
from attnc.converting.inventory import Found, Inventory, counted
from attnc.converting.modules import HALVES, AttentionActivation
from attnc.converting.pairs import AttentionMaximum
from attnc.converting.recurrent import AttentionCell, AttentionRecurrence
from attnc.converting.report import EndToEnd, Left, Report
from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import up

Run = Callable[[nn.Module], Any]
"""Runs a model on the example and returns its output."""
OURS = (AttentionActivation, AttentionMaximum, AttentionCell, AttentionRecurrence)
"""Modules that compute by attention."""
TIMED_RUNS = 3
"""Number of runs of which the fastest is timed. Other programs disturb one of them at most times."""
MAX_FLOAT64_PARAMETERS = 2**30
"""Largest model that is copied into float64 for the noise floor, in parameters: 8 GiB."""
FAILURES = (TypeError, RuntimeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)
"""The errors of a model that does not run."""


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
            direct = float(up(max(gains) * entry.error)) if entry.error else 0.0
            if entry.block_error_seen is None:
                entry.block_error = direct
            elif entry.block_error is not None:  # a run showed further matrices, or factors
                entry.block_error = max(direct, entry.block_error)


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
    run = running(example)
    with in_evaluation(original), in_evaluation(converted), without_nesting(original), torch.no_grad():
        _run(converted, run, "the converted model")  # makes the activations that only a run shows
        blocks = BlockErrors({id(entry): entry for entry in report.replaced})
        inventory = Inventory(None if _is_function(example) else tensors_in(example), blocks)
        with inventory.watching(converted, (part for part in converted.modules() if isinstance(part, OURS))):
            ours = _run(converted, run, "the converted model")
        found = inventory.reached(tensors_in(ours))
        report.kept = dict(sorted(counted(found).items()))
        report.left += named(found)
        parts = {path: part for path, part in converted.named_modules() if _is_watched(part)}
        gated = {path for paths in blocks.readers.values() for path in paths if path in parts}
        watched = _Watched(gated)
        with _after_calls(parts, watched.keep):
            ours = _run(converted, run, "the converted model")
        watched.calls.clear()
        readers = {
            id(entry): {*entry.consumers, *(blocks.readers.get(id(entry), set()) & gated)} for entry in report.replaced
        }
        consumers = sorted(set().union(*readers.values()))
        with _after_calls({path: original.get_submodule(path) for path in consumers}, watched.differ):
            theirs = _run(original, run, "the model")
        drifts, exact = watched.next_round(), None
        if (copied := in_float64(original, report.notes)) is not None:
            with _after_calls({path: copied.get_submodule(path) for path in consumers}, watched.differ):
                exact = run_in_float64(copied, running(_as_float64(example)), report.notes)
        floors = watched.next_round()
        shares = _time_shares(converted, run)
    for entry in report.replaced:
        paths = readers.get(id(entry), set())
        entry.drift = max((drifts[path] for path in paths if path in drifts), default=None)
        entry.floor = max((floors[path] for path in paths if path in floors), default=None)
        entry.share = shares.get(id(entry))
    floor, hidden = None if exact is None else largest_difference(exact, theirs), largest_difference(theirs, ours)
    if hidden is not None and not math.isfinite(hidden):
        report.notes.append(
            "the outputs were not compared: on the example they are NaN or infinite in different places"
        )
        hidden = floor = None
    report.end_to_end = EndToEnd("the example", hidden, noise_floor=floor)


def named(found: Iterable[Found]) -> list[Left]:
    """Return the operators that are left, one entry for every line of code."""
    places: dict[tuple[str, str], list[str]] = {}
    for each in found:
        if each.kind == "left":
            paths = places.setdefault((each.operator, each.place), [])
            if each.path not in paths:
                paths.append(each.path)
    entries = []
    for (operator, place), paths in places.items():
        where = f" at {place}" if place else ""
        more = f", and in {len(paths) - 1} more module(s)" if len(paths) > 1 else ""
        entries.append(
            Left(paths[0], f"kernel {operator}", f"it runs on data{where}{more}, and is no activation with a proof")
        )
    return entries


def _time_shares(converted: nn.Module, run: Run) -> dict[int, float]:
    """Return the id of an entry of the report → the share of its activation in the time of the fastest of some runs."""
    spent: Counter[int] = Counter()
    started: list[float] = []
    fastest, shares = float("inf"), dict[int, float]()

    def before(module: nn.Module, args: Any) -> None:
        started.append(time.perf_counter())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        spent[id(module.entry)] += time.perf_counter() - started.pop()  # type: ignore[assignment]

    with contextlib.ExitStack() as hooks:
        for part in converted.modules():
            if isinstance(part, AttentionActivation) and part.entry is not None:
                hooks.callback(part.register_forward_pre_hook(before).remove)
                hooks.callback(part.register_forward_hook(after).remove)
        for _ in range(TIMED_RUNS):
            spent.clear()
            start = time.perf_counter()
            _run(converted, run, "the converted model")
            total = time.perf_counter() - start
            if total < fastest:
                fastest, shares = total, {entry: seconds / total for entry, seconds in spent.items()}
    return shares


class _Double(TorchFunctionMode):
    """While it is active, torch's functions compute in float64, whatever dtype the code asks for."""

    SMALLER = (torch.float32, *HALVES)

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        spelled = getattr(function, "__name__", "")
        if spelled.startswith("__") and spelled not in ("__getitem__", "__rsub__", "__rdiv__", "__rpow__"):
            return function(*args, **(options or {}))  # attributes, and assignments
        if spelled in ("grouped_mm", "_grouped_mm"):
            return _grouped_product(*args, **(options or {}))
        first = args[:1] if spelled.endswith("_") else ()  # the tensor that an in-place function changes
        return function(
            *first,
            *(self.widened(part) for part in args[len(first) :]),
            **{name: self.widened(part) for name, part in (options or {}).items()},
        )

    def widened(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.double() if part.dtype in self.SMALLER and not isinstance(part, nn.Parameter) else part
        if isinstance(part, torch.dtype):
            return torch.float64 if part in self.SMALLER else part
        return type(part)(self.widened(each) for each in part) if type(part) in (list, tuple) else part


def _grouped_product(x: Tensor, W: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any) -> Tensor:
    """torch's product of rows with one matrix for each group of them, which it does not have in float64."""
    if offs is None or x.ndim != 2 or W.ndim != 3:
        raise RuntimeError("there is no grouped product of this kind in float64")
    groups = zip(x.tensor_split(offs.tolist()[:-1]), W, strict=True)
    y = torch.cat([rows.double() @ matrix.double() for rows, matrix in groups])
    return y if bias is None else y + bias


def in_float64(model: nn.Module, notes: list[str]) -> nn.Module | None:
    """Return a copy of the model in float64. It is None, with a note, if the model is too large, or is in float64."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    if not dtypes or dtypes == {torch.float64}:
        return None
    count = sum(tensor.numel() for tensor in model.parameters())
    if count > MAX_FLOAT64_PARAMETERS:
        notes.append(f"no noise floor: the model has {count:,} parameters, more than {MAX_FLOAT64_PARAMETERS:,}")
        return None
    return copy.deepcopy(model).double()


def run_in_float64(model: nn.Module, run: Run, notes: list[str]) -> Any:
    """Return the output of a float64 copy, or None, with a note, if it does not run in float64."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with in_evaluation(model), without_nesting(model), _Double():
            return run(model)
    except FAILURES as error:
        first = str(error).splitlines()[:1] or [type(error).__name__]
        notes.append(f"no noise floor: the model does not run in float64: {first[0]}")
        return None
    finally:
        torch.set_default_dtype(default)


def _as_float64(example: Any) -> Any:
    """Return the example with its floating-point tensors in float64."""
    if isinstance(example, Tensor):
        return example.double() if example.is_floating_point() else example
    if isinstance(example, Mapping):
        return {name: _as_float64(part) for name, part in example.items()}
    if type(example) in (list, tuple):
        return type(example)(_as_float64(part) for part in example)
    return example


@contextlib.contextmanager
def without_nesting(model: nn.Module) -> Iterator[None]:
    """Let torch's encoders compute padded positions too, so that both models return the same ones.

    Otherwise their fast path packs the others into a nested tensor.
    """
    parts = [part for part in model.modules() if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor]
    for part in parts:
        part.use_nested_tensor = False
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        if parts:
            torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part in parts:
            part.use_nested_tensor = True


def _is_watched(module: nn.Module) -> bool:
    return isinstance(module, AttentionActivation) or summed_axes(module) is not None


@dataclasses.dataclass
class _Watched:
    """The outputs of linear maps that take the output of an activation, by path and call number.

    `gated` are the paths of those that take its product with other data.
    """

    gated: set[str]
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    outputs: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)
    others: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)  # of the model that runs now
    moved: dict[str, float] = dataclasses.field(default_factory=dict)  # path → largest difference of an output
    last: tuple[AttentionActivation, Tensor] | None = None  # the activation that ran last, and its output

    def keep(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the range of an activation's inputs, and the linear map that runs next if it takes the output."""
        self.calls[path] += 1
        x: Any = inputs[0] if inputs else None
        if isinstance(output, Tensor) and output.is_nested:
            return
        if isinstance(module, AttentionActivation):
            ends = (float(x.min()), float(x.max())) if x.numel() else (math.nan, math.nan)
            if module.entry is not None and all(map(math.isfinite, ends)):
                lo, hi = module.entry.seen or (math.inf, -math.inf)
                module.entry.seen = min(ends[0], lo), max(ends[1], hi)
            self.last = module, output
            return
        if path in self.gated and isinstance(output, Tensor):
            self.outputs[path, self.calls[path]] = output.detach().clone()
        if self.last is not None and isinstance(x, Tensor):
            gate, made = self.last
            is_same = x is made or (x.data_ptr() == made.data_ptr() and x.numel() == made.numel())
            if is_same and gate.entry is not None:
                gate.entry.add_consumer(path)
                self.outputs[path, self.calls[path]] = output.detach().clone()

    def differ(self, path: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Compare an output with that of the same call in the other model."""
        self.calls[path] += 1
        other = self.outputs.pop((path, self.calls[path]), None)
        if other is not None and other.shape == output.shape:
            difference = float((output.double() - other.double()).abs().max()) if output.numel() else 0.0
            self.moved[path] = max(self.moved.get(path, 0.0), difference)
            self.others[path, self.calls[path]] = output.detach().clone()

    def next_round(self) -> dict[str, float]:
        """Return the largest differences. The outputs of the model that ran are compared with the next one's."""
        moved, self.moved, self.outputs, self.others = self.moved, {}, self.others, {}
        self.calls.clear()
        return moved


@contextlib.contextmanager
def _after_calls(modules: Mapping[str, nn.Module], seen: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call seen(path, module, inputs, output) after every call of one of the modules."""
    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.callback(module.register_forward_hook(functools.partial(seen, path)).remove)
        yield


def _is_function(example: Any) -> bool:
    return callable(example) and not isinstance(example, Tensor | nn.Module | Mapping)


def running(example: Any) -> Run:
    """Return how a model runs on the example: the arguments of one call, or a function of the model."""
    if _is_function(example):
        return lambda model: example(model)
    if isinstance(example, Mapping):
        return lambda model: model(**example)
    return lambda model: model(*example) if isinstance(example, tuple) else model(example)


def _run(model: nn.Module, run: Run, which: str) -> Any:
    try:
        return run(model)
    except NotImplementedError as error:
        raise InputError(
            f"{which} has no forward: give example=lambda model: model.encode(…), a function that runs the model"
        ) from error
    except FAILURES as error:
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
    differences = [_difference(a.double(), b.double()) for a, b in pairs if a.numel()]
    return max(differences, default=None)


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference. Equal infinities are none, as in masks, and neither is NaN in both."""
    is_same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(is_same, 0.0, a - b).abs().max())
