"""The elementary functions by name. To add one, define an `ElementaryFunction` and add it to `ALL`.

A program that uses attnc may also call `register` with a function of its own, before it parses an expression with it.
"""

from __future__ import annotations

from attnc.errors import InputError
from attnc.functions.error_function import ERF, GELU
from attnc.functions.exponential import COSH, EXP, LOG, SINH
from attnc.functions.function import ElementaryFunction
from attnc.functions.kinked import ABS, CLIP, FLOOR, MAX, MIN, RELU, SIGN
from attnc.functions.logistic import SIGMOID, SILU, SOFTPLUS, TANH
from attnc.functions.powers import SQRT
from attnc.functions.trigonometric import ACOS, ASIN, ATAN, COS, SIN, TAN

ALL = (
    *(SIN, COS, TAN, EXP, LOG, SQRT, ABS, TANH, SINH, COSH, ATAN, ASIN, ACOS, ERF, SIGMOID),
    *(RELU, GELU, SILU, SOFTPLUS, MIN, MAX, CLIP, SIGN, FLOOR),
)
FUNCTIONS: dict[str, ElementaryFunction] = {function.name: function for function in ALL}


def register(function: ElementaryFunction) -> None:
    """Make a function available in expressions.

    Raises
    ------
    InputError
        If the name is taken or is not an identifier.
    """
    if function.name in FUNCTIONS or not function.name.isidentifier():
        raise InputError(
            f"cannot register a function as {function.name!r}: a name is an identifier that is not among "
            f"{', '.join(FUNCTIONS)}. Choose another name."
        )
    FUNCTIONS[function.name] = function
