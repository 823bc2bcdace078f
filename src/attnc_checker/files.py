"""Files from untrusted sources: strict JSON and safetensors. Sizes are checked before memory is allocated for them."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeGuard, get_args

MAX_JSON, MAX_WEIGHTS, MAX_HEADER = 2**26, 2**30, 2**24
"""Largest numbers of bytes of a JSON file, of the weights, and of their header. The longest certificate that attnc
writes, for a table of 2^20 numbers, has 28 MB."""
MAX_VALUES, MAX_NAMES = 2**21, 2**19
"""Largest numbers of values of a JSON file, counted by brackets, commas and colons, and of names in its objects,
counted by colons. That certificate has 1.6 million values. Each takes up to 110 bytes in memory. The header of 100,000
tensors has 400,000 names. A million names took 2 s to read."""
MAX_DIGITS = 20
"""Largest number of digits of an integer. int64 has 19."""
LETTERS = {"F64": "d", "F32": "f", "I32": "i", "I64": "q"}
"""The dtypes that are read, and their letters in `struct` and in `array`."""


Object = dict[str, object]
"""A JSON object from a file that has not been checked yet."""
KINDS = {float: "a number of float64", int: "a whole number", str: "a text", list: "a list", dict: "an object"}


class Refused(Exception):
    """The claim is not re-proved."""

    exit_code = 1


class Undecided(Exception):
    """The check came to a limit before it came to an end."""

    exit_code = 1


class BadFile(Exception):
    """A file is missing, malformed or too large."""

    exit_code = 2


def require(holds: bool, reason: str, error: type[Exception] = Refused) -> None:
    """Raise the error for this reason unless the condition holds. A comparison with nan does not hold."""
    if not holds:
        raise error(reason)


class Tensor(NamedTuple):
    """The numbers of a tensor, in the order of the file."""

    dtype: str
    shape: tuple[int, ...]
    values: Sequence[Any]

    def rounded_to(self, dtype: str) -> Tensor:
        """Return the tensor with floats rounded to nearest, ties to even. Integers do not change."""
        if dtype == self.dtype or self.dtype not in ("F32", "F64"):
            return self
        letter = f"<{len(self.values)}{LETTERS[dtype]}"
        try:
            rounded = struct.unpack(letter, struct.pack(letter, *self.values))
            return Tensor(dtype, self.shape, array(LETTERS[dtype], rounded))
        except OverflowError:
            raise Refused(f"a weight is too large for {dtype}") from None


def read_bytes(path: Path, limit: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe must not block
            found = os.fstat(file.fileno())
            require(stat.S_ISREG(found.st_mode), f"{path} is not a regular file", BadFile)
            raw = file.read(found.st_size + 1) if found.st_size <= limit else b""  # one more, if it grows meanwhile
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror or error}") from None
    if max(len(raw), found.st_size) > limit:
        raise BadFile(f"{path} has more than the {limit:,} bytes that are read here")
    return raw


def read_json(path: Path) -> Object:
    return parse_json(read_bytes(path, MAX_JSON), path.name)


def parse_json(raw: bytes, name: str) -> Object:
    """Parse one object: no key twice, no NaN or Infinity, no number beyond float64, no integer over 20 digits.

    Values are counted before memory is allocated for them. A single letter beyond ASCII makes every letter of the text
    take 2 or 4 bytes.
    """
    width = 1 if raw.isascii() else 4 if any(lead in raw for lead in range(0xF0, 0xF8)) else 2
    require(width * len(raw) <= MAX_JSON, f"{name} has more than {MAX_JSON:,} bytes as text", BadFile)
    count = sum(map(raw.count, (b"[", b"{", b",", b":")))
    require(count <= MAX_VALUES, f"{name} has more than {MAX_VALUES:,} values", BadFile)
    require(raw.count(b":") <= MAX_NAMES, f"{name} has more than {MAX_NAMES:,} names", BadFile)

    def distinct(pairs: list[tuple[str, object]]) -> Object:
        require(len(dict(pairs)) == len(pairs), "an object states one key twice", ValueError)
        return dict(pairs)

    def number(text: str) -> float:
        require(math.isfinite(float(text)), f"{text[:30]} is no number of float64", ValueError)
        return float(text)

    def integer(text: str) -> int:
        has_few = len(text.lstrip("-")) <= MAX_DIGITS
        require(has_few, f"{text[:MAX_DIGITS]}… has more than {MAX_DIGITS} digits", ValueError)
        return int(text)

    hooks: dict[str, Any] = {"parse_constant": number, "parse_float": number, "parse_int": integer}
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=distinct, **hooks)
    except RecursionError:
        raise BadFile(f"{name} is nested too deep") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are kinds of it
        raise BadFile(f"{name} is not valid JSON: {error}") from None
    require(isinstance(value, dict), f"{name} holds no JSON object", BadFile)
    return value


def parse_safetensors(raw: bytes) -> dict[str, Tensor]:
    """Parse eight bytes of length, a JSON header, and the tensors, which must fill the rest without gap or overlap."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(MAX_HEADER, len(raw) - 8):
        sizes = f"its header would take {length:,} of its {len(raw):,} bytes"
        raise BadFile(f"model.safetensors is cut short, or is not a safetensors file: {sizes}")
    header, body = _header(raw, length), memoryview(raw)[8 + length :]
    header.pop("__metadata__", None)
    entries = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise BadFile(f"model.safetensors does not describe {name!r} by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in tuple(LETTERS) or not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
            raise BadFile(f"model.safetensors describes {name!r} by a dtype, shape or offsets that are not read here")
        entries.append((*offsets, name, dtype, tuple(shape)))
    tensors, end = {}, 0
    for begin, after, name, dtype, shape in sorted(entries):
        count = math.prod(shape)
        if begin != end or after > len(body) or after - begin != count * struct.calcsize("<" + LETTERS[dtype]):
            raise BadFile(f"model.safetensors has {name!r} at bytes {begin} to {after}, which is cut or does not fit")
        values = array(LETTERS[dtype])
        values.frombytes(body[begin:after])
        if sys.byteorder == "big":
            values.byteswap()
        tensors[name], end = Tensor(dtype, shape, values), after
        if not all(map(math.isfinite, values)):
            raise BadFile(f"model.safetensors has a value in {name!r} that is not finite")
    if end != len(body):
        raise BadFile(f"model.safetensors has {len(body):,} bytes of tensors, of which {end:,} are described")
    return tensors


def _header(raw: bytes, length: int) -> Object:
    return parse_json(raw[8 : 8 + length], "the header of model.safetensors")


def metadata(raw: bytes) -> object:
    """Return the metadata of a file of tensors, or None if it has none."""
    return _header(raw, int.from_bytes(raw[:8], "little")).get("__metadata__")


def are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**40 for size in value)


def field(data: Object, name: str, kind: Any, where: str = "") -> Any:
    """Return a field of this kind of the object `where` of the certificate, or None if it is optional and missing."""
    if name not in data and type(None) not in get_args(kind):
        raise BadFile(f"the certificate lacks {where + name!r}")
    return typed(data.get(name), kind, where + name)


def typed(value: object, kind: Any, where: str) -> Any:
    """Return the value if it is of the kind: float, int, str, list, dict, a tuple of kinds, or `kind | None`."""
    kinds = get_args(kind)
    if kind is Any or (value is None and type(None) in kinds):
        return value
    if isinstance(kind, UnionType):
        return typed(value, kinds[0], where)
    if kinds:
        entries = typed(value, list, where)
        kinds = kinds[:1] * len(entries) if kinds[1] is ... else kinds
        if len(entries) != len(kinds):
            raise BadFile(f"the certificate: {where} is {value!r:.40}, not a list of {len(kinds)}")
        return tuple(typed(x, kind, f"{where}[{i}]") for i, (x, kind) in enumerate(zip(entries, kinds, strict=True)))
    if kind is float and type(value) is int and int(float(value)) == value:
        value = float(value)
    if type(value) is not kind:
        raise BadFile(f"the certificate: {where} is {value!r:.40}, not {KINDS[kind]}")
    return value
