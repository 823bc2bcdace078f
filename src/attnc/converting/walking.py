"""Convert a torch model: replace every activation by attention, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnc.constructions.fitting.gate import ROUNDED_UP, power_of_two
from attnc.converting import measuring
from attnc.converting.activations import KnownActivation, Solved, solve
from attnc.converting.arithmetic import Tree, matched
from attnc.converting.intercepting import (
    NONLINEAR,
    arithmetic_names,
    compiled_functions,
    intercept,
    methods_with_activations,
    probe,
    traced_calls,
)
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
from attnc.converting.pairs import AttentionMaximum, maximum_keys, prelu
from attnc.converting.recognising import ActivationCall, read_function, read_module
from attnc.converting.recurrent import AttentionCell, AttentionRecurrence, activations_of, recurrent
from attnc.converting.report import Left, Replaced, Report
from attnc.converting.tracing import TRACED
from attnc.errors import InputError, positive_number

UNCERTAIN = {"exp", "expm1", "log", "log1p", "logaddexp", "sign", "sinh", "cosh"}
"""Functions whose names in code do not show whether they work on data, and whether they are part of an activation."""
OF_POSITIONS = {"abs", "clamp", "clamp_min", "clamp_max"}
"""Functions that TorchScript helpers, as those of DeBERTa-v2, call on positions. A run shows whether these are data."""
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
    elif walk.unread:
        names = "; ".join(f"{name} ({', '.join(paths)})" for name, paths in sorted(walk.unread.items()))
        report.notes.append(f"the code also calls functions that may be nonlinear: {names}. Give example= to see")
    if not report.replaced and not report.left and not walk.num_intercepted:
        raise InputError(
            f"there is no activation in this {type(module).__name__}: nothing to convert."
            + ("" if example is not None else " Give example= to find calls that only a run shows.")
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
    """The attention that computes activations called in a module's code. Each gate is made at its first call.

    Gates are plain attributes too, gate_NAME and pair_NAME: torch.compile does not see new entries of a ModuleDict.
    """

    def __init__(self, path: str, walk: _Conversion, *, notes_forms: bool = False) -> None:
        super().__init__()
        self.path, self.walk, self.notes_forms = path, walk, notes_forms
        self.gates = nn.ModuleDict()
        self.pairs = nn.ModuleDict()  # the maxima of two tensors, by the name of their gate
        self.names: dict[KnownActivation, tuple[str, ...]] = {}  # the names of the gates
        self.largest_jump = 1.0  # of |1 − weight|, over the calls of prelu
        self.refused: set[KnownActivation] = set()  # arithmetic that is no activation with a proof

    def answer(self, call: ActivationCall, x: Tensor) -> Tensor | None:
        """Return the result of a call, or None if the framework's own function should run."""
        if isinstance(x, nn.Parameter) or not (x.is_floating_point() or x.is_complex()):
            return None  # neither weights nor counts are data
        if x.dtype not in DTYPES:
            call = ActivationCall(x, None, reason=call.reason or f"a tensor of {x.dtype}")
        activation = self.walk.convertible(call, self.path, "function")
        if activation is None:
            return None
        if activation.name == "prelu":
            return prelu(self.prelu(call.weight, DTYPES[x.dtype]), x, call.weight)
        gate = getattr(self, f"gate_{self.known_gate(activation.name, activation.parameters, DTYPES[x.dtype])}")
        if call.gate_dim is not None:
            return AttentionGLU(gate, call.gate_dim)(x)
        return into(x, gate) if call.inplace else gate(x)

    def written(self, tree: Tree, x: Tensor) -> Tensor | None:
        """Return the activation of x that an expression computes, or None if it cannot be proved or x is no data."""
        if isinstance(x, nn.Parameter) or x.dtype not in DTYPES:
            return None
        name = self.written_gate(tree, DTYPES[x.dtype])
        return None if name is None else getattr(self, f"gate_{name}")(x)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile would trace the search
    def written_gate(self, tree: Tree, dtype: str) -> str | None:
        """Return the name of an expression's gate, or None if it is no activation that can be proved."""
        activation = matched(tree)
        if activation is None or activation in self.refused:
            return None
        try:
            return self.gate(activation, (dtype,))
        except InputError:
            self.refused.add(activation)
            return None

    def extreme(self, name: str, x: Any, y: Any) -> Tensor | None:
        """Return the maximum or minimum of two tensors by two keys, or None for numbers that are no data."""
        if not all(isinstance(part, Tensor) and part.dtype in DTYPES for part in (x, y)):
            return None
        if all(isinstance(part, nn.Parameter) for part in (x, y)):
            return None
        made: Tensor = getattr(self, f"pair_{self.pair(DTYPES[torch.promote_types(x.dtype, y.dtype)])}")(x, y, name)
        return made

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile would trace the proof
    def pair(self, dtype: str) -> str:
        """Return the name of the maximum of two tensors."""
        name = self.gate(KnownActivation("maximum"), (dtype,))
        if name not in self.pairs:
            gate = vars(self)[f"gate_{name}"]
            self.pairs[name] = vars(self)[f"pair_{name}"] = AttentionMaximum(gate)
        return name

    def prelu(self, weight: Tensor, dtype: str) -> AttentionActivation:
        """Return a ReLU for a PReLU of this weight, accurate enough for an error that counts |1 − weight| times."""
        if not torch.compiler.is_compiling():
            jump = float((1 - weight.detach().double()).abs().max()) * ROUNDED_UP
            self.largest_jump = max(self.largest_jump, power_of_two(max(jump, 1.0)))
        relu = getattr(self, f"gate_{self.known_gate('prelu', (('jump', self.largest_jump),), dtype)}")
        assert isinstance(relu, AttentionActivation)
        return relu

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile would trace the proof
    def known_gate(self, name: str, parameters: tuple[tuple[str, float], ...], dtype: str) -> str:
        """Return the name of the gate of this activation."""
        return self.gate(KnownActivation(name, parameters), (dtype,))

    def gate(self, activation: KnownActivation, dtypes: tuple[str, ...]) -> str:
        """Return the name of an activation's gate. It is made if none is proved in these dtypes."""
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        for name in self.names.get(activation, ()):
            gate = vars(self)[f"gate_{name}"]
            if set(dtypes) <= set(gate.solved.dtypes):
                if name not in self.gates and not is_tracing:
                    self.gates[name] = gate
                return name
        name = "".join(c if c.isalnum() else "_" for c in str(activation))
        while f"gate_{name}" in vars(self):
            name += "_"
        made = self.walk.made(activation, dtypes, _joined(self.path, f"{activation.name}()"), "function")
        vars(self)[f"gate_{name}"] = made
        if not is_tracing:  # a trace whose state_dict changes fails
            self.gates[name] = made
        self.names[activation] = (*self.names.get(activation, ()), name)
        return name


@dataclasses.dataclass(eq=False)
class _Conversion:
    report: Report
    dtypes: tuple[str, ...]
    device: torch.device | None = None
    num_intercepted: int = 0
    unread: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # a function in code → paths of modules
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
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            self.leave(path, "TorchScript", "a compiled module cannot be taken apart")
            return None
        if activations_of(module) is not None:
            return recurrent(
                module,
                lambda name: self.made(KnownActivation(name), self.dtypes, _joined(path, f"gates.{name}"), "module"),
            )
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            self.leave(path, kind, "its activations run inside one fused kernel, and it has a forward of its own")
            return None
        call = read_module(module)
        activation = self.convertible(call, path, kind)
        if call is None or activation is None:
            return None
        if activation.name == "prelu":
            return self._prelu(module, path)
        made = self.made(activation, self.dtypes, path, "module", inplace=call.inplace)
        return made if call.gate_dim is None else AttentionGLU(made, call.gate_dim)

    def convertible(self, call: ActivationCall | None, path: str, what: str) -> KnownActivation | None:
        """Return the activation of a call. If it cannot be converted, list it in the report and return None."""
        if call is not None and call.activation is None:
            self.leave(path, what, call.reason)
        return None if call is None else call.activation

    def made(
        self,
        activation: KnownActivation,
        dtypes: tuple[str, ...],
        path: str,
        found: str,
        *,
        inplace: bool = False,
    ) -> AttentionActivation:
        if activation.name == "maximum":
            solved = maximum_keys(self.report.eps, dtypes)
        elif activation.name == "prelu":
            ((_, jump),) = activation.parameters
            relu = self._solved(KnownActivation("relu"), dtypes, path, self.report.eps / jump)
            gate = self._recorded(AttentionActivation(relu, device=self.device), path, found)
            assert gate.entry is not None
            gate.entry.activation, gate.entry.parameters = "prelu", activation.parameters
            gate.entry.error = relu.error * jump
            return gate
        else:
            solved = self._solved(activation, dtypes, path)
        kind = AttentionSoftsign if solved.sign is not None else AttentionActivation
        return self._recorded(kind(solved, inplace=inplace, device=self.device), path, found)

    def _solved(
        self, activation: KnownActivation, dtypes: tuple[str, ...], path: str, eps: float | None = None
    ) -> Solved:
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
        relu = self._solved(KnownActivation("relu"), self.dtypes, path, self.report.eps / max(jump, 1.0))
        lipschitz = max(1.0, float(weight.detach().double().abs().max()))
        solved = dataclasses.replace(
            relu,
            activation=KnownActivation("prelu"),
            error=relu.error * max(jump, 1.0) * ROUNDED_UP,
            lipschitz=lipschitz,
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
        for name, kinds in sorted(compiled_functions(module).items()):
            if kinds <= OF_POSITIONS:
                self.unread.setdefault(name, []).append(path or "the model")
            else:
                self.leave(path, name, f"a function compiled by TorchScript, which calls {', '.join(sorted(kinds))}")
        methods = methods_with_activations(module)
        hidden = list(_hidden_activations(module))
        arithmetic = arithmetic_names(module)
        is_leaf = next(module.children(), None) is None
        notes_forms = bool(arithmetic & set(TRACED)) or (is_leaf and bool(arithmetic - NONLINEAR))
        if not methods and not hidden and not notes_forms and path:
            for name in sorted(arithmetic & NONLINEAR):
                self.unread.setdefault(name, []).append(path)
            return  # the model itself is always watched: a run shows the calls that its code does not
        self.num_intercepted += bool(methods or hidden or arithmetic - NONLINEAR)
        holder = FunctionGates(path, self, notes_forms=notes_forms)
        calls = traced_calls(module) if "forward" in methods else []
        for call in calls or ():
            activation = self.convertible(call, path, "function")
            if call.weight is None and activation is not None and activation.name != "prelu":
                holder.gate(activation, self.dtypes)
        if calls is None or hidden or set(methods) - {"forward"}:
            names = sorted({name for names in methods.values() for name in names} | set(hidden))
            self.report.notes.append(
                f"{path or 'the model'}: its code may call {', '.join(names)}; each becomes attention when it is called"
            )
        intercept(module, holder, {"forward", *methods})
        if notes_forms and len(self.dtypes) == 1:
            probe(module, getattr(torch, self.dtypes[0]), self.device)
        for name in sorted(arithmetic & (NONLINEAR if holder.gates else NONLINEAR | UNCERTAIN)):
            self.unread.setdefault(name, []).append(path or "the model")

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
    return isinstance(module, AttentionActivation | AttentionGLU | FunctionGates | AttentionCell | AttentionRecurrence)


def _hidden_activations(module: nn.Module) -> Iterator[str]:
    """Yield the activations in lists and dictionaries, which torch does not search."""
    for value in vars(module).values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inside:
            call = read_module(item) if isinstance(item, nn.Module) else read_function(item)
            if call is not None and call.activation is not None:
                yield call.activation.name
