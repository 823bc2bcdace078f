"""Calls of torch functions as steps of arithmetic: which `Form` a result has, given those of the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnc.converting.activations import KnownActivation
from attnc.converting.arithmetic import (
    Form,
    Tree,
    X,
    affine,
    called,
    chosen,
    combined,
    extreme,
    logarithm,
    negated,
    number,
    power,
    value_of,
)

ERF = KnownActivation("erf")
SAME_NAMES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "greater": "gt",
    "less": "lt",
    "greater_equal": "ge",
    "less_equal": "le",
    "absolute": "abs",
    "clip": "clamp",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
    "__rsub__": "rsub",
    "__rpow__": "rpow",
    "fmax": "maximum",
    "fmin": "minimum",
    "special_erfc": "erfc",
    "special_ndtr": "ndtr",
    "log_sigmoid": "logsigmoid",
    "bitwise_not": "logical_not",
    "__invert__": "logical_not",
}
"""torch's other names of functions → the name in this module."""
AFFINE = ("add", "sub", "rsub", "mul", "div", "neg", "clone", "contiguous")
COMPARISONS = ("gt", "lt", "ge", "le")
EXTREMES = {"maximum": "max", "max": "max", "minimum": "min", "min": "min"}
CONSTANTS = (
    "zeros_like",
    "ones_like",
    "full_like",
    "zeros",
    "ones",
    "full",
    "new_zeros",
    "new_ones",
    "new_full",
    "tensor",
)
CASTS = ("float", "double", "half", "bfloat16", "to", "type_as", "type")
HARD = (
    *("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "rdiv", "sign", "logaddexp", "pow", "square"),
    *("sinh", "cosh", "erfc", "ndtr"),
)
"""Functions that attention does not compute by themselves. An expression that contains them may be an activation."""
TRACED = (*HARD, "where", "masked_fill", "abs", "div")
"""Names in the code of a module that show that it may compute an activation by arithmetic."""
NAMES = (*AFFINE, *COMPARISONS, *EXTREMES, *CONSTANTS, *CASTS, *HARD, "where", "masked_fill", "logical_not")


def _functions() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for spelled in (*NAMES, *SAME_NAMES):
        for place in (torch, Tensor, torch.special, F):
            function = getattr(place, spelled, None)
            if callable(function):
                found[function] = SAME_NAMES.get(spelled, spelled)
    return found


OPERATIONS = _functions() | {Tensor.__setitem__: "fill", Tensor.masked_fill_: "fill"}
"""torch's functions → their names here."""
_CHANGES = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "pow",
    "exp",
    "sqrt",
    "abs",
    "clamp",
    "relu",
    "masked_fill",
    "copy",
    "fill",
)
INPLACE = frozenset(getattr(Tensor, f"{name}_") for name in _CHANGES) | {Tensor.__setitem__}
"""The usual functions that write into their first argument. torch.compile cannot look at the name of a function."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # __rsub__ is no key for torch.compile
def operation_of(function: Any) -> str | None:
    try:
        return OPERATIONS.get(function)
    except TypeError:  # not hashable
        return None


def is_inplace(function: Any) -> bool:
    """Return whether the function writes into its first argument."""
    if torch.compiler.is_compiling():
        return function in INPLACE
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


Read = Callable[[Any], Form | None]
"""An argument of a call → its form. It is None if the argument is neither a number nor a tensor with one."""


def step_of(name: str, args: Sequence[Any], options: Mapping[str, Any], read: Read) -> tuple[Any, Tree, bool] | None:
    """Return source and expression of the result, and whether torch computes a nonlinear part of it, or None."""
    if name in CONSTANTS:
        value = _constant(name, args, options)
        return None if value is None else (None, number(value), False)
    if name in CASTS:
        form = read(args[0]) if args else None
        return None if form is None or form.tree[0] != "step" else (form.source, form.tree, form.is_raw)
    if name in ("add", "sub") and options.get("alpha", 1) != 1:
        return None
    if name == "where" and len(args) == 3 and getattr(args[0], "dtype", None) is not torch.bool:
        args = (args[1], args[0], args[2])  # Tensor.where(self, condition, other)
    if name == "masked_fill":
        args = (args[1], args[2], args[0]) if len(args) == 3 else ()
    forms = [read(argument) for argument in args]
    if not forms or any(form is None for form in forms):
        return None
    known = [form for form in forms if form is not None]
    sources = [form.source for form in known if form.source is not None]
    if any(source is not sources[0] for source in sources):
        return None
    tree = _tree("where" if name == "masked_fill" else name, [form.tree for form in known])
    if tree is None:
        return None
    is_raw = any(form.is_raw for form in known)
    is_product = name in ("mul", "square") or (tree[0] == "power" and tree[2] > 0)
    has_step = any(form.tree[0] == "step" for form in known)
    computes = name not in (*AFFINE, *COMPARISONS, "logical_not") or name == "div"
    is_raw = is_raw or (affine(tree) is None and (has_step if is_product else computes))
    return (sources[0] if sources else None), tree, is_raw


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # numbers alone decide
def _tree(name: str, trees: list[Tree]) -> Tree | None:
    match name, trees:
        case (("clone" | "contiguous"), [u]):
            return u
        case "neg", [u]:
            return None if u[0] == "step" else ("neg", u)
        case (("add" | "sub" | "mul" | "div"), [u, v]):
            return combined(name, u, v)
        case "rsub", [u, v]:
            return combined("sub", v, u)
        case "rdiv", [u, v]:
            return combined("div", v, u)
        case "pow", [u, v] if (exponent := value_of(v)) is not None:
            return power(u, exponent)
        case "square", [u]:
            return power(u, 2)
        case "reciprocal", [u]:
            return combined("div", number(1.0), u)
        case "rsqrt", [u]:
            return combined("div", number(1.0), ("sqrt", u))
        case "expm1", [u]:
            return ("sub", ("exp", u), number(1.0))
        case (("sinh" | "cosh"), [u]) if u[0] != "step":
            halves = (("mul", number(0.5), ("exp", part)) for part in (u, ("neg", u)))
            return ("add" if name == "cosh" else "sub", *halves)
        case "erfc", [u] if u[0] != "step":
            return ("sub", number(1.0), called(ERF, u))
        case "ndtr", [u] if u[0] != "step":
            below = called(ERF, ("mul", number(math.sqrt(0.5)), u))
            return ("mul", number(0.5), ("add", number(1.0), below))
        case "log1p", [u]:
            return logarithm(("add", number(1.0), u))
        case "log", [u]:
            return logarithm(u)
        case "logaddexp", [u, v] if value_of(v) == 0:
            return logarithm(("add", number(1.0), ("exp", u)))
        case "sqrt", [("mul", u, v)] if u == v:
            return ("abs", u)
        case "sqrt", [("power", u, 2)]:
            return ("abs", u)
        case (("exp" | "sqrt" | "sign"), [u]):
            return None if u[0] == "step" else (name, u)
        case (("gt" | "ge" | "lt" | "le"), [u, v]):
            first, second = affine(u), affine(v)
            if first is None or second is None or first[0] == second[0]:
                return None
            step: Tree = ("step", first[0] - second[0], first[1] - second[1])
            return step if name in ("gt", "ge") else negated(step)
        case "logical_not", [u]:
            return negated(u) if u[0] == "step" else None
        case "where", [("step", _, _) as step, u, v]:
            return chosen(step, u, v)
        case (("maximum" | "minimum" | "max" | "min"), [u, v]):
            return extreme(EXTREMES[name], u, v)
    return None


def _constant(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> float | None:
    """Return the number of which a new tensor is full."""
    if name.startswith("new_"):
        args = args[1:]
    if "zeros" in name or "ones" in name:
        return 0.0 if "zeros" in name else 1.0
    place = 0 if name == "tensor" else 1
    given = args[place] if len(args) > place else options.get("fill_value")
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fresh(x: Any) -> Form | None:
    """Return the form of a tensor that is no result of arithmetic, or of a number."""
    if is_number(x):
        return Form(None, number(x), 0)
    return Form(x, X, 0) if isinstance(x, Tensor) and x.is_floating_point() else None
