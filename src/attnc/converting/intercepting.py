"""Find activations that are function calls in a module's code, and replace them while the code runs.

Calls are found in three ways. The names in the code of functions and methods show which modules call activations. They
are followed through the package that defines the module. This needs no inputs, and control flow cannot hide a call. For
modules that torch.fx can trace, it shows the arguments. While a module runs, torch passes every call of a torch
function to `_Mode`, which computes activations by attention.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from attnc.converting.recognising import READERS, ActivationCall, name_of, read_call

HOLDER = "attention_functions"
"""The name of the submodule that computes the calls."""
MAX_FUNCTIONS = 400
"""Maximum number of functions that are read for one module. The calls in the others are found when the module runs.
Measured: no module of BERT, GPT-2, Llama and T5 has more than 33."""
CALLED_NAMES = {*READERS, *(f"{name}_" for name in READERS), "log_sigmoid"}
"""The names in code that may be activations."""
Answer = Callable[[ActivationCall, Tensor], Tensor | None]
"""A call and its input → the result, or None if the framework's own function should run."""


class Running(threading.local):
    """The `Answer` of every module that is running in this thread, outermost first."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []


RUNNING = Running()


class _Mode(TorchFunctionMode):
    """While it is active, the innermost module of `RUNNING` computes the calls of activations."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        options, found = options or {}, None
        call = read_call(function, args, options)
        if call is not None and isinstance(call.input, Tensor):
            found = RUNNING.answers[-1](call, call.input)
        return function(*args, **options) if found is None else found


def _answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its activations computed by the module's own `HOLDER`. Its signature stays the same."""

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **options: Any) -> Any:
        is_outermost = not RUNNING.answers
        RUNNING.answers.append(getattr(self, HOLDER).answer)
        try:
            if not is_outermost:
                return method(self, *args, **options)
            with _Mode():
                return method(self, *args, **options)
        finally:
            RUNNING.answers.pop()

    return run


def intercept(module: nn.Module, holder: nn.Module, methods: Iterable[str]) -> None:
    """Let `holder.answer` compute the activations in these methods of this module, and of no other of its class."""
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


def compiled_functions(module: nn.Module) -> set[str]:
    """Return the TorchScript functions that the module's code names. Their activations cannot be found."""
    return {
        name
        for function in _followed(type(module).forward, module)
        for name in _names(function.__code__)
        if isinstance(function.__globals__.get(name), torch.jit.ScriptFunction)
    }


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
                waiting.append(cell.cell_contents)
            except ValueError:  # the closure cell is still empty
                continue
        for name in _names(current.__code__):
            named = current.__globals__.get(name)
            if isinstance(named, nn.Module):
                named = type(named).forward
            elif isinstance(named, type) and issubclass(named, torch.autograd.Function):
                named = named.forward
            if inspect.isfunction(named) and named.__module__.partition(".")[0] == package:
                waiting.append(named)
            own = vars(module).get(name, getattr(kind, name, None))
            waiting.extend(own if isinstance(own, list | tuple) else own.values() if isinstance(own, dict) else [own])


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
