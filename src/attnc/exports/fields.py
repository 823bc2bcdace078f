"""The fields of a structure read from JSON, each taken only if it is what it should be; FileError says what is not."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnc.errors import FileError

DType = np.dtype[Any]

MAX_CELLS = 2**62
"""Of a shape: positions in it must fit an int64, as `ir.spec` computes them."""
MAX_STORED = 2**48
"""Of an array that is stored: more than any disk holds, and well within what numpy can address."""
MAX_RANK = 32


def object_with(value: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{where} is an object; found {shown(value)}")
    for key in keys:
        if key not in value:
            raise FileError(f"{where} lacks the key {key!r}")
    for key in value:
        if key not in keys:
            raise FileError(f"{where} has the key {shown(key)}, which is not known here; it has {', '.join(keys)}")
    return value


def a_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FileError(f"{where} is a list; found {shown(value)}")
    return value


def a_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise FileError(f"{where} is a text; found {shown(value)}")
    return value


def a_flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise FileError(f"{where} is true or false; found {shown(value)}")
    return value


def a_size(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_CELLS:
        raise FileError(f"{where} is a whole number from 0 to {MAX_CELLS}; found {shown(value)}")
    return value


def a_shape(value: Any, where: str, max_cells: int = MAX_CELLS) -> tuple[int, ...]:
    shape = tuple(a_size(size, f"{where}[{i}]") for i, size in enumerate(a_list(value, where)))
    if len(shape) > MAX_RANK or math.prod(max(1, size) for size in shape) > max_cells:
        raise FileError(f"{where} is too large: at most {MAX_RANK} axes and {max_cells} cells; found {shown(value)}")
    return shape


def a_dtype(value: Any, where: str, known: Mapping[str, DType]) -> DType:
    if not isinstance(value, str) or value not in known:
        raise FileError(f"{where} is one of {', '.join(known)}; found {shown(value)}")
    return known[value]


def shown(value: Any) -> str:
    """Short, whatever it is."""
    try:
        return ascii(value) if isinstance(value, str) and len(value) <= 60 else reprlib.repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} with a number of thousands of digits"
