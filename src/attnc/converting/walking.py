"""Convert a torch model: replace every activation by attention, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnc.constructions.fitting.gate import ROUNDED_UP
from attnc.converting import measuring
from attnc.converting.activations import Activation, Solved, solve
from attnc.converting.intercepting import compiled_functions, intercept, methods_with_activations, traced_calls
from attnc.converting.modules import (
    DTYPE_NAMES,
    DTYPES,
    HALVES,
    AttentionActivation,
    AttentionGLU,
    AttentionPReLU,
    AttentionSoftsign,
    into,
)
from attnc.converting.recognising import ActivationCall, read_function, read_module, why_fused
from attnc.converting.report import Left, Replaced, Report
from attnc.errors import InputError, positive_number

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The devices on which tensors have values. On the meta device they have none."""


def convert_module(module: nn.Module, eps: float, strict: bool, example: Any) -> tuple[nn.Module, Report]:
    """Convert a model, as `attnc.convert` describes."""
    eps = _check(module, eps)
    dtype = _dtype_of(module)
    dtypes = ("float64", "float32") if dtype is None else (DTYPES[dtype],)
    report = Report(eps, " or ".join(dtypes) if dtype is None else str(dtype).removeprefix("torch."))
    if dtype in HALVES:
        report.notes.append(f"{report.dtype}: activations are computed in float32, and rounded to {report.dtype} once")
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"the model cannot be copied, and attnc never changes the original: {error}") from error
    walk = _Conversion(report, dtypes, next((tensor.device for tensor in module.parameters()), None))
    converted = walk.convert(copied)
    walk.done.clear()  # the gates of functions hold this walk, which would keep the replaced modules in memory
    if example is not None:
        measuring.compare(module, converted, example, report)
    if not report.replaced and not report.left and not walk.num_intercepted:
        raise InputError(
            f"there is no activation in this {type(module).__name__}: nothing to convert. Give example= to find "
            "calls that only a run shows."
        )
    measuring.add_block_errors(converted, report)
    if strict and report.left:
        first = report.left[0]
        raise InputError(
            f"{len(report.left)} part(s) cannot be converted; the first is {first.path or 'the model itself'!r} "
            f"({first.what}): {first.reason}. Without strict=True they are left as they are, and listed in the report."
        )
    return converted, report


def _check(module: Any, eps: Any) -> float:
    if not isinstance(module, nn.Module):
        raise InputError(f"convert takes a torch.nn.Module, found {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError("give the module from which this TorchScript module was compiled: it cannot be taken apart")
    for name, part in module.named_modules():
        if type(part).__name__ == "OptimizedModule":  # torch._dynamo takes seconds to import
            raise InputError(
                f"{name or 'the model'} was compiled by torch.compile: give the model it was made from (_orig_mod), "
                "and compile the converted one"
            )
    eps = positive_number("eps", eps)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type not in DEVICES:
            raise InputError(f"{name} is on the device {tensor.device}: convert the model on {', '.join(DEVICES)}")
        if tensor.is_complex():
            raise InputError(f"{name} is complex: attention computes activations of real numbers only")
        if (tensor.is_floating_point() and tensor.dtype not in DTYPES) or tensor.is_quantized:
            raise InputError(f"{name} is {tensor.dtype}: convert the model in one of {DTYPE_NAMES}")
    return eps


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of most parameters. It is None for a model without parameters, which follows its input."""
    counts: dict[torch.dtype, int] = {}
    for tensor in module.parameters():
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda kind: counts[kind]) if counts else None


class FunctionGates(nn.Module):
    """The attention that computes activations called in a module's code. Each gate is made at its first call."""

    def __init__(self, path: str, walk: _Conversion) -> None:
        super().__init__()
        self.path, self.walk = path, walk
        self.gates = nn.ModuleDict()

    def answer(self, call: ActivationCall, x: Tensor) -> Tensor | None:
        """Return the result of a call, or None if the framework's own function should run."""
        if x.dtype not in DTYPES:
            call = ActivationCall(x, None, reason=call.reason or f"a tensor of {x.dtype}")
        elif call.activation is not None and call.activation.name == "prelu":
            call = ActivationCall(x, None, reason="prelu with a weight that the call computes")
        activation = self.walk.convertible(call, self.path, "function")
        if activation is None:
            return None
        gate = self.gate(activation, (DTYPES[x.dtype],))
        if call.gate_dim is not None:
            return AttentionGLU(gate, call.gate_dim)(x)
        return into(x, gate) if call.inplace else gate(x)

    def gate(self, activation: Activation, dtypes: tuple[str, ...]) -> AttentionActivation:
        name = "".join(c if c.isalnum() else "_" for c in str(activation))
        if name not in self.gates:
            path = _joined(self.path, f"{activation.name}()")
            self.gates[name] = self.walk.made(activation, dtypes, path, "function")
        return self.gates[name]  # type: ignore[return-value]


@dataclasses.dataclass(eq=False)
class _Conversion:
    report: Report
    dtypes: tuple[str, ...]
    device: torch.device | None = None
    num_intercepted: int = 0
    done: dict[nn.Module, nn.Module] = dataclasses.field(default_factory=dict)  # a module → its replacement, or itself

    def convert(self, module: nn.Module, path: str = "") -> nn.Module:
        """Return a new module for an activation, otherwise the module itself with its parts converted."""
        if _is_ours(module):
            return module
        if module in self.done:
            shared = self.done[module]
            gate = shared.gate if isinstance(shared, AttentionGLU) else shared
            if isinstance(gate, AttentionActivation) and gate.entry is not None:
                gate.entry.also = (*gate.entry.also, path)
            return shared
        made = self._replacement(module, path)
        self.done[module] = module if made is None else made
        if made is not None:
            return made
        for name, child in list(module._modules.items()):
            converted = child if child is None else self.convert(child, _joined(path, name))
            if converted is not child:
                module._modules[name] = converted
        if not isinstance(module, torch.jit.ScriptModule):
            self._code(module, path)
        return module

    def _replacement(self, module: nn.Module, path: str) -> nn.Module | None:
        kind, reason = type(module).__name__, why_fused(module)
        if isinstance(module, torch.jit.ScriptModule):
            kind, reason = "TorchScript", "a compiled module cannot be taken apart"
        if reason is not None:
            self.leave(path, kind, reason)
            return None
        call = read_module(module)
        activation = self.convertible(call, path, kind)
        if call is None or activation is None:
            return None
        if activation.name == "prelu":
            return self._prelu(module, path)
        made = self.made(activation, self.dtypes, path, "module", inplace=call.inplace)
        return made if call.gate_dim is None else AttentionGLU(made, call.gate_dim)

    def convertible(self, call: ActivationCall | None, path: str, what: str) -> Activation | None:
        """Return the activation of a call. If it cannot be converted, list it in the report and return None."""
        if call is not None and call.activation is None:
            self.leave(path, what, call.reason)
        return None if call is None else call.activation

    def made(
        self,
        activation: Activation,
        dtypes: tuple[str, ...],
        path: str,
        found: str,
        *,
        inplace: bool = False,
    ) -> AttentionActivation:
        solved = self._solved(activation, dtypes, path)
        kind = AttentionSoftsign if solved.sign is not None else AttentionActivation
        return self._recorded(kind(solved, inplace=inplace, device=self.device), path, found)

    def _solved(self, activation: Activation, dtypes: tuple[str, ...], path: str, eps: float | None = None) -> Solved:
        eps = self.report.eps if eps is None else eps
        try:
            return solve(activation, eps, dtypes)
        except InputError as error:
            if len(dtypes) > 1:  # a model without parameters
                self.report.notes.append(
                    f"{path or 'the model'}: the proven error holds in float64 only, not in float32"
                )
                return self._solved(activation, dtypes[:1], path, eps)
            raise InputError(f"{path or 'the model'}: {error}") from None

    def _prelu(self, module: nn.Module, path: str) -> nn.Module:
        """Compute a ReLU plus the weight times the rest of x. An error of the ReLU counts |1 − weight| times."""
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        jump = float((1 - weight.detach().double()).abs().max()) * ROUNDED_UP
        relu = self._solved(Activation("relu"), self.dtypes, path, self.report.eps / max(jump, 1.0))
        lipschitz = max(1.0, float(weight.detach().double().abs().max()))
        solved = dataclasses.replace(
            relu, activation=Activation("prelu"), error=relu.error * max(jump, 1.0) * ROUNDED_UP, lipschitz=lipschitz
        )
        return self._recorded(AttentionPReLU(solved, weight), path, "module")

    def _recorded(self, gate: AttentionActivation, path: str, found: str) -> AttentionActivation:
        gate.entry = Replaced.of(gate.solved, path, found)
        self.report.replaced.append(gate.entry)
        return gate

    def leave(self, path: str, what: str, reason: str) -> None:
        entry = Left(path, what, reason)
        if entry not in self.report.left:
            self.report.left.append(entry)

    def _code(self, module: nn.Module, path: str) -> None:
        """Turn functions that are attributes into modules, and compute the calls in the code while it runs."""
        for name, value in list(vars(module).items()):
            call, inner = read_function(value), _joined(path, name)
            activation = self.convertible(call, inner, "function")
            if call is not None and activation is not None and call.gate_dim is None:
                delattr(module, name)
                setattr(module, name, self.made(activation, self.dtypes, inner, "module", inplace=call.inplace))
        self._close_fast_path(module, path)
        if type(module).__module__.startswith(("torch.nn.", "torch.ao.")):
            return
        for name in sorted(compiled_functions(module)):
            self.leave(path, name, "a function compiled by TorchScript, whose code cannot be read")
        methods = methods_with_activations(module)
        hidden = list(_hidden_activations(module))
        if not methods and not hidden and path:
            return  # the model itself is always watched: a run shows the calls that its code does not
        self.num_intercepted += bool(methods or hidden)
        holder = FunctionGates(path, self)
        calls = traced_calls(module) if "forward" in methods else []
        for call in calls or ():
            activation = self.convertible(call, path, "function")
            if activation is not None and activation.name != "prelu":
                holder.gate(activation, self.dtypes)
        if calls is None or hidden or set(methods) - {"forward"}:
            names = sorted({name for names in methods.values() for name in names} | set(hidden))
            self.report.notes.append(
                f"{path or 'the model'}: its code may call {', '.join(names)}; each becomes attention when it is called"
            )
        intercept(module, holder, {"forward", *methods})

    def _close_fast_path(self, module: nn.Module, path: str) -> None:
        """Turn off torch's fused kernels for encoder layers, because they compute ReLU or GELU themselves."""
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = module.enable_nested_tensor = False
            self.report.notes.append(
                f"{path or 'the model'}: padded positions are now computed, as torch does in training. torch's "
                "fused path, which is turned off here, returns 0 for them"
            )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, AttentionActivation | AttentionGLU | FunctionGates)


def _hidden_activations(module: nn.Module) -> Iterator[str]:
    """Yield the activations in lists and dictionaries, which torch does not search."""
    for value in vars(module).values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inside:
            call = read_module(item) if isinstance(item, nn.Module) else read_function(item)
            if call is not None and call.activation is not None:
                yield call.activation.name
