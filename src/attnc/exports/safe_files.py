"""Files from strangers: JSON and tensors, each measured and checked before anything of its size is allocated."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from attnc.errors import FileError
from attnc.exports.fields import MAX_RANK, MAX_STORED, DType

Path = str | os.PathLike[str]

MAX_JSON_BYTES = 2**28
MAX_HEADER_BYTES = 2**24
MAX_TENSOR_BYTES = 2**32
MAX_DEPTH = 64
CHUNK_BYTES = 2**20
"""Tensors are read, and hashed, in pieces that stay in the processor's cache."""

DTYPES: dict[str, DType] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file, or a link to one: never a pipe, a device or a folder. OSErrors become FileErrors."""
    try:
        try:
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK: a pipe must not make us wait
        except ValueError as error:  # a NUL in the path
            raise FileError(f"{os.fspath(path)!r} cannot be read: {error}") from error
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise FileError(f"{os.fspath(path)!r} is not a regular file")
        with open(number, "rb", buffering=0) as file:
            yield file
    except FileNotFoundError as error:
        raise FileError(f"{os.fspath(path)!r} is missing") from error
    except OSError as error:
        raise FileError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise FileError(f"{os.fspath(path)!r} does not fit in memory") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file (RFC 8259 to the letter: UTF-8, no NaN or Infinity, no key twice)."""
    with open_regular(path) as file:
        size = _size(file)
        if size > max_bytes:
            raise FileError(f"{os.fspath(path)!r} has {size:,} bytes, more than the {max_bytes:,} that are read here")
        return parse_json(_read(file, size), os.fspath(path))


def parse_json(raw: bytes, origin: str) -> dict[str, Any]:
    """The object in `raw`; `origin` names it in messages."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_refuse_constant, parse_float=_finite_float
        )
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half a surrogate pair
    except RecursionError as error:
        raise FileError(f"{origin!r} is nested too deep") from error
    except ValueError as error:  # of which UnicodeError and JSONDecodeError are kinds
        raise FileError(f"{origin!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{origin!r} holds a JSON {type(value).__name__}, not an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        members = (member for outer in level for member in (outer.values() if isinstance(outer, dict) else outer))
        level = [member for member in members if isinstance(member, dict | list)]
    if level:
        raise FileError(f"{origin!r} is nested deeper than {MAX_DEPTH} levels")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object states one key twice")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond float64")
    return value


def pack_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file; the same tensors give the same bytes, whatever their order."""
    from safetensors.numpy import save

    # save() copies memory as it lies, so that a transposed array would be stored scrambled
    packed = save({name: np.asarray(tensors[name], order="C") for name in sorted(tensors)})
    header = int.from_bytes(packed[:8], "little")
    if header > MAX_HEADER_BYTES:
        raise FileError(
            f"{len(tensors):,} tensors need a header of {header:,} bytes, more than the {MAX_HEADER_BYTES:,} that are "
            "read back. Merge heads or layers."
        )
    return packed


def read_tensors(
    path: Path,
    expected: Mapping[str, tuple[DType, tuple[int, ...]]] | None = None,
    max_bytes: int = MAX_TENSOR_BYTES,
) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, which must be exactly the expected ones (name → dtype, shape) if given."""
    return read_tensors_and_hash(path, expected, max_bytes)[0]


def read_tensors_and_hash(
    path: Path, expected: Mapping[str, tuple[DType, tuple[int, ...]]] | None, max_bytes: int
) -> tuple[dict[str, np.ndarray], str]:
    """Also the SHA-256 of the very bytes that were read, in the same pass over them."""
    origin = os.fspath(path)
    with open_regular(path) as file:
        prefix, header = _read_header(file, origin)
        entries = _check_header(header, _size(file) - len(prefix), origin)
        if expected is not None:
            _check_expected({name: (dtype, shape) for name, dtype, shape in entries}, expected, origin)
        total = _size(file) - len(prefix)
        if total > max_bytes:
            raise FileError(f"{origin!r} holds {total:,} bytes of tensors, more than max_bytes = {max_bytes:,}")
        digest = hashlib.sha256(prefix)
        tensors = {}
        for name, dtype, shape in entries:
            tensors[name] = np.empty(shape, dtype)
            _fill(file, tensors[name], digest, origin)
        return tensors, digest.hexdigest()


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read(file: BinaryIO, count: int) -> bytes:
    """Up to `count` bytes: fewer only at the end of the file."""
    pieces = []
    while count and (piece := file.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _fill(file: BinaryIO, tensor: np.ndarray, digest: Any, origin: str) -> None:
    buffer = tensor.reshape(-1).view(np.uint8).data
    while len(buffer):
        count = file.readinto(buffer[:CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise FileError(f"{origin!r} became shorter while it was read")
        digest.update(buffer[:count])
        buffer = buffer[count:]


def _read_header(file: BinaryIO, origin: str) -> tuple[bytes, dict[str, Any]]:
    """(the bytes before the tensors, the header in them)."""
    start = _read(file, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(MAX_HEADER_BYTES, _size(file) - 8):
        raise FileError(
            f"{origin!r} is not a safetensors file, or is cut short: of {_size(file):,} bytes, {length:,} would be "
            f"its header (at most {MAX_HEADER_BYTES:,} are read)"
        )
    raw = _read(file, length)
    return start + raw, parse_json(raw, f"{origin} (header)")


def _check_header(header: dict[str, Any], size: int, origin: str) -> list[tuple[str, DType, tuple[int, ...]]]:
    """(name, dtype, shape) in the order of the file; the tensors must fill its `size` bytes without gap or overlap."""
    placed = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FileError(f"{origin!r}: the tensor {name!r} is not described by dtype, shape and data_offsets")
        dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise FileError(f"{origin!r}: the tensor {name!r} has a dtype that is not among {', '.join(DTYPES)}")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _are_sizes(shape) or len(shape) > MAX_RANK or math.prod(max(1, n) for n in shape) > MAX_STORED:
            raise FileError(f"{origin!r}: the tensor {name!r} has no proper shape")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise FileError(f"{origin!r}: the tensor {name!r} has no proper data_offsets")
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise FileError(f"{origin!r}: the tensor {name!r} has offsets {offsets} that do not fit its shape {shape}")
        placed.append((offsets[0], offsets[1], name, dtype, tuple(shape)))
    placed.sort(key=lambda entry: entry[:2])
    end = 0
    for begin, next_end, name, _, _ in placed:
        if begin != end:
            raise FileError(f"{origin!r}: the tensor {name!r} begins at byte {begin:,}, not at {end:,} where it should")
        end = next_end
    if end != size:
        raise FileError(f"{origin!r}: the tensors need {end:,} bytes, the file has {size:,} for them")
    return [(name, dtype, shape) for _, _, name, dtype, shape in placed]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_expected(
    found: Mapping[str, tuple[DType, tuple[int, ...]]],
    expected: Mapping[str, tuple[DType, tuple[int, ...]]],
    origin: str,
) -> None:
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise FileError(f"{origin!r}: the tensor {name!r} is missing")
        if found[name] != (dtype, shape):
            has = f"{found[name][0]} of shape {found[name][1]}"
            raise FileError(f"{origin!r}: the tensor {name!r} is {has}; expected {dtype} of shape {shape}")
    if extra := found.keys() - expected.keys():
        raise FileError(f"{origin!r}: the tensor {min(extra)!r} is not expected")
