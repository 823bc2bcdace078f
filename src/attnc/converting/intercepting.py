"""Find activations that are function calls or arithmetic in a module's code, and replace them while the code runs.

Calls are found in three ways. The names in the code of functions and methods show which modules call activations. They
are followed through the package that defines the module. This needs no inputs, and control flow cannot hide a call. For
modules that torch.fx can trace, it shows the arguments. While a module runs, torch passes every call of a torch
function to `_Mode`, which computes activations by attention. It also notes, on the tensors themselves, how arithmetic
of one tensor and numbers made them (`arithmetic.Form`), and computes the activations among them by attention.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from attnc.converting.arithmetic import Form, Tree, called, chosen, number
from attnc.converting.recognising import READERS, ActivationCall, name_of, read_call
from attnc.converting.tracing import (
    COMPARISONS,
    CONSTANTS,
    EXTREMES,
    TRACED,
    fresh,
    is_inplace,
    is_number,
    operation_of,
    step_of,
)

HOLDER = "attention_functions"
"""The name of the submodule that computes the calls."""
MAX_FUNCTIONS = 400
"""Maximum number of functions that are read for one module. The calls in the others are found when the module runs.
Measured: no module of BERT, GPT-2, Llama and T5 has more than 33."""
CALLED_NAMES = {*READERS, *(f"{name}_" for name in READERS), "log_sigmoid"}
"""The names in code that may be activations."""
FORM = "attnc_form"
"""The attribute of a tensor that holds its `Form`."""
NONLINEAR = {
    *("sin", "cos", "tan", "asin", "acos", "asinh", "acosh", "atanh", "atan2", "sinc", "hypot"),
    *("exp2", "log2", "log10", "erfinv", "round", "floor", "ceil", "fmod", "remainder"),
}
"""Functions that are neither an activation nor a part of one."""
ALWAYS = {*COMPARISONS, *CONSTANTS, *EXTREMES, "where", "masked_fill"}
"""Functions that are noted in all modules. Others are noted in modules whose code shows that it matters, because a form
keeps its source in memory."""


class Holder(Protocol):
    """The attention modules that compute the calls of a module."""

    notes_forms: bool

    def answer(self, call: ActivationCall, x: Tensor) -> Tensor | None:
        """Return the result of a call, or None if the framework's own function should run."""

    def written(self, tree: Tree, x: Tensor) -> Tensor | None:
        """Return the activation of x that an expression computes, or None if it is none that can be converted."""

    def extreme(self, name: str, x: Any, y: Any) -> Tensor | None:
        """Return the maximum or minimum of two tensors, or None if the framework's own function should run."""


class Running(threading.local):
    """The holder of every module that is running in this thread, outermost first, and the number of in-place calls."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.epoch = 0


RUNNING = Running()


class _Mode(TorchFunctionMode):
    """While it is active, the innermost module of `RUNNING` computes the calls of activations."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        return _answer(RUNNING.holders[-1], function, args, options or {})


class _CompiledMode(TorchFunctionMode):
    """The same for torch.compile: one mode for each running module, of which the innermost answers alone.

    `RUNNING` could not be changed in a region that torch.compile traces apart, as those of gradient checkpoints.
    """

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        if name_of(function) is None and operation_of(function) is None:  # its code may run other modules
            return _unknown(function, args, options)
        with torch._C.DisableTorchFunction():
            return _answer(self.holder, function, args, options)


def _answer(holder: Holder, function: Any, args: Any, options: Any) -> Any:
    """Run a torch function, by attention if it computes an activation."""
    call = read_call(function, args, options)
    if call is not None and isinstance(call.input, Tensor):
        found = holder.answer(call, call.input)
        result = function(*args, **options) if found is None else found
        if call.inplace or "out" in options:
            RUNNING.epoch += 1
        elif found is not None and holder.notes_forms and call.gate_dim is None and call.activation is not None:
            form = form_of(call.input)
            if form is not None and call.activation.name != "prelu":
                tree = called(call.activation, form.tree)
                setattr(result, FORM, Form(form.source, tree, RUNNING.epoch, form.is_raw))
        return result
    name = operation_of(function)
    if name is None:
        return _unknown(function, args, options)
    if name == "fill":
        x = args[0]
        found = _filled(holder, *args) if len(args) == 3 and not options else None
        if found is None:
            return _unknown(function, args, options)
        RUNNING.epoch += 1
        x.copy_(found)
        return None if function is Tensor.__setitem__ else x
    if "out" in options:
        RUNNING.epoch += 1
    return _arithmetic(holder, name, function, args, options)


def _unknown(function: Any, args: Any, options: Any) -> Any:
    """Run a function that is neither an activation nor arithmetic."""
    if "out" in options or options.get("inplace") or is_inplace(function):
        RUNNING.epoch += 1
    return function(*args, **options)


def form_of(x: Any) -> Form | None:
    """Return how arithmetic made the tensor. A tensor without a form is its own source."""
    form = getattr(x, FORM, None) if isinstance(x, Tensor) else None
    return form if form is not None and form.epoch == RUNNING.epoch else fresh(x)


def _arithmetic(holder: Holder, name: str, function: Any, args: Any, options: Any) -> Any:
    """Run a function of arithmetic, by attention if its result is an activation of one tensor."""
    step = None
    if name in ALWAYS or holder.notes_forms or any(getattr(x, FORM, None) is not None for x in args):
        step = step_of(name, args, options, form_of)
    if step is None:
        if name in EXTREMES and len(args) == 2 and not options:
            found = holder.extreme(EXTREMES[name], *args)
            if found is not None:
                return found
        return function(*args, **options)
    source, tree, is_raw = step
    if is_raw and source is not None and _has_shape_of(source, args):
        found = holder.written(tree, source)
        if found is not None:
            setattr(found, FORM, Form(source, tree, RUNNING.epoch))
            return found
    if name in EXTREMES and len(args) == 2 and not options:
        found = holder.extreme(EXTREMES[name], *args)
        if found is not None:
            return found
    result = function(*args, **options)
    if isinstance(result, Tensor) and (source is None or result.shape == source.shape):
        setattr(result, FORM, Form(source, tree, RUNNING.epoch, is_raw))
    return result


def _filled(holder: Holder, x: Any, mask: Any, value: Any) -> Tensor | None:
    """Return x with entries that a comparison chooses set to a number, if that is an activation by attention."""
    form, chooses = form_of(x), form_of(mask) if getattr(mask, FORM, None) is not None else None
    if form is None or chooses is None or chooses.tree[0] != "step" or not is_number(value):
        return None
    tree = chosen(chooses.tree, number(value), form.tree)
    source = form.source
    if tree is None or source is None or source is not chooses.source or not _has_shape_of(source, (x, mask)):
        return None
    return holder.written(tree, source.clone() if source is x else source)  # backward needs the old entries


def _has_shape_of(source: Tensor, args: Any) -> bool:
    """Return whether the result of a function of these arguments has the shape and dtype of the source."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    return all(x.shape == source.shape or x.ndim == 0 for x in tensors) and all(
        x.dtype == source.dtype for x in tensors if x.is_floating_point() and x.ndim
    )


def _without_form(result: Any) -> Any:
    """Return the result of a module without its form, which would keep its source in memory."""
    if isinstance(result, Tensor) and getattr(result, FORM, None) is not None:
        setattr(result, FORM, None)
    return result


def _answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its activations computed by the module's own `HOLDER`. Its signature stays the same."""

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with _CompiledMode(getattr(self, HOLDER)):
                return _without_form(method(self, *args, **options))
        is_outermost = not RUNNING.holders
        RUNNING.holders.append(getattr(self, HOLDER))
        try:
            if not is_outermost:
                return method(self, *args, **options)
            with _Mode():
                return _without_form(method(self, *args, **options))
        finally:
            RUNNING.holders.pop()

    return run


def intercept(module: nn.Module, holder: nn.Module, methods: Iterable[str]) -> None:
    """Let the holder compute the activations in these methods of this module, and of no other of its class."""
    kind = type(module)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    replaced = {name: _answered(getattr(kind, name)) for name in methods}
    module.__class__ = type(kind.__name__, (kind,), {**own, **replaced})
    setattr(module, HOLDER, holder)


def methods_with_activations(module: nn.Module) -> dict[str, set[str]]:
    """Return method → the activations that its code may call, for methods that nn.Module does not have."""
    found: dict[str, set[str]] = {}
    for name, method in inspect.getmembers(type(module), inspect.isfunction):
        if getattr(nn.Module, name, None) is method or (name.startswith("__") and name != "__call__"):
            continue
        if not inspect.isfunction(inspect.getattr_static(type(module), name)):
            continue  # a static method has no module whose gates could compute
        names = set[str]()
        for function in _followed(method, module):
            for used in _names(function.__code__):
                known = name_of(function.__globals__.get(used))
                if known is not None:
                    names.add(known[0])
                elif used in CALLED_NAMES and not isinstance(getattr(module, used, None), nn.Module):
                    names.add(used.removesuffix("_").replace("log_sigmoid", "logsigmoid"))
        if names:
            found[name] = names
    return found


def arithmetic_names(module: nn.Module) -> set[str]:
    """Return the functions and comparisons in the code of forward that may be part of an activation, or NONLINEAR."""
    found, looked_for = set[str](), {*TRACED, *NONLINEAR, "maximum", "minimum", "max"}
    for function in _followed(type(module).forward, module):
        found |= {name.removesuffix("_") for name in _names(function.__code__)} & looked_for
        found |= set(_operators(function.__code__))
    return found


def _operators(code: types.CodeType) -> Iterator[str]:
    """Yield the comparisons, powers and divisions in the code."""
    for step in dis.get_instructions(code):
        if step.opname == "COMPARE_OP":
            yield "a comparison"
        elif step.opname == "BINARY_OP" and step.argrepr in ("/", "**"):
            yield step.argrepr


def compiled_functions(module: nn.Module) -> dict[str, set[str]]:
    """Return the TorchScript functions that the module's code names, each with the activations in its graph."""
    found = {}
    for function in _followed(type(module).forward, module):
        for name in _names(function.__code__):
            named = function.__globals__.get(name)
            if isinstance(named, torch.jit.ScriptFunction):
                kinds = {node.kind().rpartition("::")[2].removesuffix("_") for node in _nodes(named.inlined_graph)}
                found[name] = kinds & CALLED_NAMES
    return {name: kinds for name, kinds in found.items() if kinds}


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a TorchScript graph, and of the blocks in it."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from _nodes(block)


def _followed(function: Any, module: nn.Module) -> Iterator[types.FunctionType]:
    """Yield a function, those that it wraps or closes over, and those of its package or module that it names."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    waiting, seen = [function], set[Any]()
    while waiting and len(seen) < MAX_FUNCTIONS:
        current = inspect.unwrap(waiting.pop())
        if not inspect.isfunction(current) or current.__code__ in seen:
            continue
        seen.add(current.__code__)
        yield current
        for cell in current.__closure__ or ():
            try:
                waiting.append(_code_of(cell.cell_contents))
            except ValueError:  # the closure cell is still empty
                continue
        for name in _names(current.__code__):
            named = _code_of(current.__globals__.get(name))
            if inspect.isfunction(named) and named.__module__.partition(".")[0] == package:
                waiting.append(named)
            own = vars(module).get(name, getattr(kind, name, None))
            waiting.extend(own if isinstance(own, list | tuple) else own.values() if isinstance(own, dict) else [own])


def _code_of(named: Any) -> Any:
    """Return the function that runs where a module or an autograd function is called, otherwise the thing itself."""
    if isinstance(named, torch.jit.ScriptModule):
        return None  # it cannot be read
    if isinstance(named, nn.Module):
        return type(named).forward
    is_function = isinstance(named, type) and issubclass(named, torch.autograd.Function)
    return named.forward if is_function else named


def _names(code: types.CodeType) -> set[str]:
    """Return the names in the code of a function and of the functions inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


class _Shallow(fx.Tracer):
    """A tracer for which every submodule is a leaf, so that it records the calls in the module's own code alone."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def traced_calls(module: nn.Module) -> list[ActivationCall] | None:
    """Return the activations in the module's own forward with their arguments, or None if torch.fx cannot trace it."""
    try:
        graph = _Shallow().trace(module)
    except Exception:  # the code may fail in any way on a traced value
        return None
    calls = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            function = getattr(Tensor, node.target, None) if node.op == "call_method" else node.target
            calls.append(read_call(function, node.args, node.kwargs))
    return [call for call in calls if call is not None]


def probe(module: nn.Module, dtype: torch.dtype, device: torch.device | None) -> None:
    """Make the gates of a module that computes a function of the entries of one tensor, if torch.fx can trace it.

    The graph, not the module, runs on a few numbers. So nothing of the module changes, and its gates are known before
    the first run.
    """
    try:
        graph = _Shallow().trace(module)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1 or any(node.op in ("call_module", "get_attr") for node in graph.nodes):
            return
        run = fx.GraphModule(nn.Module(), graph)
    except Exception:  # the code may fail in any way on a traced value
        return
    RUNNING.holders.append(getattr(module, HOLDER))
    try:
        with torch.no_grad(), _Mode():
            run(torch.linspace(-2, 2, 8, dtype=dtype, device=device))
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError):  # it needs an input of another kind
        return
    finally:
        RUNNING.holders.pop()
