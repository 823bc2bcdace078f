"""Read files that others may have damaged, and write files whole.

Sizes that JSON and tensor files state are checked before memory is allocated for them. A file or a directory is written
whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from typing import Any

import numpy as np

from attnc.errors import FileError
from attnc.opening import PathLike as PathLike
from attnc.opening import open_regular

CONFIG = "config.json"
DType = np.dtype[Any]
Layout = Mapping[str, tuple[DType, tuple[int, ...]]]
"""The dtype and the shape of each tensor by its name."""

MAX_JSON_BYTES = 2**26
"""The longest JSON file that is read or written, in bytes of its text in memory: 64 MiB. The longest that attnc writes
is the certificate of a table of 2^20 numbers. It has up to 28 MB, and 57 MB as text with 2 bytes per letter."""
MAX_JSON_VALUES = 2**21
"""The most values of a JSON file, counted by brackets, commas and colons. That certificate has 1.6 million. A value
takes up to 110 bytes (measured: entries of one object), so that all of a file take at most 231 MB."""
MAX_JSON_NAMES = 2**19
"""The most members of the objects of a JSON file, counted by colons. The header of 100,000 tensors has 400,000. A
million members took 2 s to read."""
MAX_DIGITS = 400
"""The most digits of a whole number. The largest float64 has 309. Tokenizers state 10^30 for "no limit"."""
MAX_HEADER_BYTES = 2**24
"""The longest header of a tensor file. It is enough for more than 100,000 tensors."""
MAX_TENSOR_BYTES = 2**32
"""The largest tensor file that is read, unless the caller allows more."""
MAX_JSON_DEPTH = 64
"""The deepest nesting of a JSON file. Ours have fewer than ten levels."""
MAX_RANK = 32
"""Maximum number of axes of an array, as in numpy 1."""
MAX_STORED_ENTRIES = 2**48
"""Maximum number of entries of a stored array. No disk holds more, and numpy can address them."""
CHUNK_BYTES = 2**20
"""Tensors are read, and hashed, in pieces that stay in the processor's cache."""

DTYPES: dict[str, DType] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The dtypes of floats in files of other programs, and their sizes."""


def read_bytes(path: PathLike, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        return file.read(_limited_size(file, path, max_bytes))


def sha256_of(path: PathLike, max_bytes: int) -> str:
    """Return the SHA-256 of a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        _limited_size(file, path, max_bytes)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _limited_size(file: BufferedReader, path: PathLike, max_bytes: int) -> int:
    size = _size(file)
    if size > max_bytes:
        raise FileError(f"{os.fspath(path)!r} has {size:,} bytes, more than the {max_bytes:,} that are read here")
    return size


def read_json(path: PathLike, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file (strictly RFC 8259: UTF-8, no NaN or Infinity, no key twice)."""
    return parse_json(read_bytes(path, max_bytes), os.fspath(path))


def parse_json(raw: bytes, origin: str) -> dict[str, Any]:
    """Return the object in `raw`; `origin` names it in messages. Its values are counted before any memory is taken."""
    if text_bytes(raw) > MAX_JSON_BYTES:
        raise FileError(f"{origin!r} has {text_bytes(raw):,} bytes of text, more than the {MAX_JSON_BYTES:,} allowed")
    counts = {letter: raw.count(letter) for letter in (b"[", b"{", b",", b":")}
    limits = {"values": (sum(counts.values()), MAX_JSON_VALUES), "names": (counts[b":"], MAX_JSON_NAMES)}
    for what, (count, most) in limits.items():
        if count > most:
            raise FileError(f"{origin!r} has about {count:,} {what}, more than the {most:,} allowed")
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_short_integer,
        )
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half a surrogate pair
    except RecursionError as error:
        raise FileError(f"{origin!r} is nested too deep") from error
    except ValueError as error:  # UnicodeError and JSONDecodeError are kinds of it
        raise FileError(f"{origin!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{origin!r} holds a JSON {type(value).__name__}, not an object")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        members = (member for outer in level for member in (outer.values() if isinstance(outer, dict) else outer))
        level = [member for member in members if isinstance(member, dict | list)]
    if level:
        raise FileError(f"{origin!r} is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def text_bytes(raw: bytes) -> int:
    """Return the bytes that UTF-8 takes as text in memory. All letters are as wide as the widest: 1, 2 or 4 bytes."""
    return len(raw) * (1 if raw.isascii() else 4 if any(lead in raw for lead in range(0xF0, 0xF8)) else 2)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object states one key twice")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _short_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:40]}… is a whole number of {len(text):,} digits, and {MAX_DIGITS} are allowed")
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond float64")
    return value


def pack_tensors(tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file. The same tensors give the same bytes, whatever their order."""
    from safetensors.numpy import save

    # save() copies raw memory, so a transposed array would be stored in the wrong order
    packed = save({name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}, metadata)
    header = int.from_bytes(packed[:8], "little")
    if header > MAX_HEADER_BYTES:
        raise FileError(
            f"{len(tensors):,} tensors need a header of {header:,} bytes, more than the {MAX_HEADER_BYTES:,} that are "
            "read back. Merge heads or layers."
        )
    return packed


def read_tensors(path: PathLike, expected: Layout, max_bytes: int) -> tuple[dict[str, np.ndarray], str]:
    """Read exactly the `expected` tensors of a safetensors file, and hash its bytes (SHA-256) in the same pass."""
    origin = os.fspath(path)
    with open_regular(path) as file:
        prefix, header = _read_header(file, origin)
        total = _size(file) - len(prefix)
        names = _check_header(header, expected, total, origin)
        if total > max_bytes:
            raise FileError(f"{origin!r} holds {total:,} bytes of tensors, more than max_bytes = {max_bytes:,}")
        digest = hashlib.sha256(prefix)
        tensors = {}
        for name in names:
            dtype, shape = expected[name]
            tensors[name] = np.empty(shape, dtype)
            _fill(file, tensors[name], digest, origin)
        return tensors, digest.hexdigest()


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file: its dtype as the file names it, its shape, and its first and last byte + 1."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def row(self, number: int) -> StoredTensor:
        """Return the place of one row."""
        size = (self.end - self.begin) // self.shape[0]
        return StoredTensor(self.dtype, self.shape[1:], self.begin + number * size, self.begin + (number + 1) * size)


def stored_tensors(path: PathLike) -> dict[str, StoredTensor]:
    """Return the places of all tensors of a safetensors file that someone else wrote. Nothing else is read."""
    origin, found = os.fspath(path), {}
    with open_regular(path) as file:
        prefix, header = _read_header(file, origin)
        total = _size(file) - len(prefix)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = _described(name, entry, origin)
        size = STORED_BYTES.get(dtype)
        if begin > end or end > total or (size is not None and end - begin != math.prod(shape) * size):
            raise FileError(f"{origin!r}: the tensor {name!r} has offsets that do not fit its shape or the file")
        found[name] = StoredTensor(dtype, shape, len(prefix) + begin, len(prefix) + end)
    return found


def read_stored(path: PathLike, stored: StoredTensor) -> np.ndarray:
    """Read one tensor of floats. bfloat16 becomes float32, which holds all of its numbers."""
    origin = os.fspath(path)
    if stored.dtype not in STORED_BYTES:
        raise FileError(f"{origin!r}: a tensor has the dtype {stored.dtype!r}; {', '.join(STORED_BYTES)} are read")
    with open_regular(path) as file:
        file.seek(stored.begin)
        raw = file.read(stored.end - stored.begin)
    if len(raw) != stored.end - stored.begin:
        raise FileError(f"{origin!r} became shorter while it was read")
    if stored.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(stored.shape)
    return np.frombuffer(raw, f"<f{STORED_BYTES[stored.dtype]}").reshape(stored.shape)


def _size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size


def _fill(file: BufferedReader, tensor: np.ndarray, digest: Any, origin: str) -> None:
    buffer = tensor.reshape(-1).view(np.uint8).data
    while len(buffer):
        count = file.readinto(buffer[:CHUNK_BYTES])
        if not count:
            raise FileError(f"{origin!r} became shorter while it was read")
        digest.update(buffer[:count])
        buffer = buffer[count:]


def _read_header(file: BufferedReader, origin: str) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes before the tensors, and the header in them."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(MAX_HEADER_BYTES, _size(file) - 8):
        raise FileError(
            f"{origin!r} is not a safetensors file, or is cut short: of {_size(file):,} bytes, {length:,} would be "
            f"its header (at most {MAX_HEADER_BYTES:,} are read)"
        )
    raw = file.read(length)
    return start + raw, parse_json(raw, f"{origin} (header)")


def _check_header(header: dict[str, Any], expected: Layout, size: int, origin: str) -> list[str]:
    """Return the names in the order of the file.

    Check that the tensors fill its `size` bytes without gap or overlap.
    """
    found, placed = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, ends = _described(name, entry, origin)
        if kind not in DTYPES:  # numpy would accept None and names of its own as dtypes
            raise FileError(f"{origin!r}: the tensor {name!r} has a dtype that is not among {', '.join(DTYPES)}")
        found[name] = (DTYPES[kind], shape)
        placed.append((*ends, name))
    require_expected(found, expected, f"{origin!r}: ")
    end = 0
    for begin, next_end, name in sorted(placed):
        dtype, shape = expected[name]
        if next_end - begin != math.prod(shape) * dtype.itemsize:
            offsets = [begin, next_end]
            raise FileError(f"{origin!r}: the tensor {name!r} has offsets {offsets} that do not fit its shape {shape}")
        if begin != end:
            raise FileError(f"{origin!r}: the tensor {name!r} begins at byte {begin:,}, not at {end:,} where it should")
        end = next_end
    if end != size:
        raise FileError(f"{origin!r}: the tensors need {end:,} bytes, the file has {size:,} for them")
    return [name for *_, name in sorted(placed)]


def _described(name: str, entry: Any, origin: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of a tensor as the header states them."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"{origin!r}: the tensor {name!r} is not described by dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise FileError(f"{origin!r}: the tensor {name!r} has no proper shape or data_offsets")
    return str(entry["dtype"]), tuple(shape), (offsets[0], offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def require_expected(found: Mapping[str, tuple[Any, tuple[int, ...]]], expected: Layout, origin: str = "") -> None:
    """Raise FileError unless exactly the expected tensors are there; `origin` begins the message."""
    for name, (dtype, shape) in expected.items():
        if name not in found:
            raise FileError(f"{origin}the tensor {name!r} is missing")
        if found[name] != (dtype, shape):
            has = f"{found[name][0]} of shape {found[name][1]}"
            raise FileError(f"{origin}the tensor {name!r} is {has}; expected {dtype} of shape {shape}")
    if extra := found.keys() - expected.keys():
        raise FileError(f"{origin}the tensor {min(extra)!r} is not expected")


def require_format(found: Any, wanted: str, what: str) -> None:
    """Raise FileError unless `what` states the format that is read; another number of it has a remedy."""
    if found == wanted:
        return
    family = wanted.rpartition("/")[0]
    if isinstance(found, str) and found.startswith(f"{family}/"):
        raise FileError(
            f"{what} has the format {found[:60]!r}, and this version of attnc reads {wanted!r}. Use the version of "
            "attnc that wrote it, or write it again with this one."
        )
    raise FileError(f"{what} does not state its format, which should be {wanted!r}; found {found!r:.60}")


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that attnc writes. Such a folder may be replaced, unless it contains other files."""

    name: str  # with its article, for messages
    family: str  # all formats of this kind begin with it
    keys: tuple[str, ...]  # the keys that lead to the format in config.json
    is_part: Callable[[str], object]  # true for the names of its files
    has_folders: bool = False  # if it has, it is never replaced

    def includes(self, path: PathLike) -> bool:
        """Return whether the config.json of a folder states a format of this kind, of any version."""
        try:
            found: Any = read_json(os.path.join(os.fspath(path), CONFIG))
        except FileError:
            return False
        for key in self.keys:
            found = found.get(key) if isinstance(found, dict) else None
        return isinstance(found, str) and found.startswith(self.family)

    def why_not_replace(self, path: str) -> str | None:
        """Return why a folder may not be replaced, or None if it may."""
        if self.has_folders:
            return "a folder that exists already"
        try:
            with os.scandir(path) as entries:
                is_own = {e.name: self.is_part(e.name) and not e.is_dir(follow_symlinks=False) for e in entries}
        except OSError as error:
            return f"a folder that cannot be looked into ({error.strerror or error})"
        if not is_own:
            return "an empty folder"
        if not self.includes(path):
            return f"a folder that is not {self.name} of attnc"
        if foreign := [name for name, own in is_own.items() if not own]:
            return f"{self.name} together with {min(foreign)!r}, which is not part of it and would be lost"
        return None


def write_whole(path: PathLike, files: Mapping[str, bytes], kind: FolderKind) -> None:
    """Make the directory `path` with these files in it, and leave no trace on failure.

    An existing directory of this kind is replaced. Anything else is left unchanged. Only the last component
    of the path is created. If the kind has folders, names of files may begin with them, as in "folder/file".
    """
    for name in files:
        parts = name.split("/") if kind.has_folders else [name]
        if any(part in ("", ".", "..") or any(sign in part for sign in "/\\\0") for part in parts):
            raise FileError(f"cannot save a file under the name {name!r}: it must be a plain name, without folders")
    try:
        given = os.fspath(path)
        if reason := why_not_writable(path, kind):
            raise FileError(f"cannot save to {given!r}: {reason}")
        target = os.path.realpath(given.rstrip(os.sep) or given)
        parent, token = os.path.dirname(target), secrets.token_hex(8)
        new, old = os.path.join(parent, f".attnc-{token}.new"), os.path.join(parent, f".attnc-{token}.old")
        try:
            os.mkdir(new)
            for folder in sorted({os.path.dirname(name) for name in files} - {""}):
                os.makedirs(os.path.join(new, folder), exist_ok=True)
            for name, content in files.items():
                _write_file(os.path.join(new, name), content)
            _sync_directory(new)
            with _uninterrupted():
                _put_in_place(new, target, old)
                _sync_directory(parent)
                _remove_former(old, given)
        finally:
            shutil.rmtree(new, ignore_errors=True)  # it is still there only if something went wrong
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = str(getattr(error, "strerror", None) or error)  # without the name of a temporary file
        raise FileError(f"cannot save to {given!r}: {reason}. Nothing was changed.") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the end of a block of renames, which must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal reaches other threads
        return
    received = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _remove_former(old: str, given: str) -> None:
    """Delete the folder that was replaced, if there was one."""
    if not os.path.lexists(old):
        return
    try:
        shutil.rmtree(old)
    except OSError as error:
        raise FileError(
            f"{given!r} was saved, but the former content could not be deleted: {error}. The rest of it is in "
            f"{old!r}; delete that by hand."
        ) from error


def write_file_whole(target: str, content: bytes) -> None:
    """Write a file, whole or not at all, and replace an existing one."""
    with writing_whole(target) as file:
        file.write(content)


@contextmanager
def writing_whole(target: str) -> Iterator[BufferedWriter]:
    """Open a new file. At the end of the block it takes the place of `target`. On an error it is deleted."""
    new = os.path.join(os.path.dirname(target), f".attnc-{secrets.token_hex(8)}.new")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise FileError(f"cannot write {target!r}: it exists and is not a file. Choose another name.")
    try:
        with open(new, "xb") as file:
            yield file
            _sync(file)
        os.replace(new, target)
    except OSError as error:
        raise FileError(f"cannot write {target!r}: {error.strerror or error}. Nothing was changed.") from error
    finally:
        with suppress(OSError):  # it is still there only if something went wrong
            os.unlink(new)


def why_not_writable(path: PathLike, kind: FolderKind) -> str | None:
    """Return why `write_whole` cannot write there, with the remedy, or None if it can. Call it before long work."""
    given = os.fspath(path)
    stripped = given.rstrip(os.sep) or given
    if not stripped:
        return "the path is empty. Give the name of a folder to create."
    found = None
    if os.path.isdir(stripped):
        found = kind.why_not_replace(stripped)
    elif os.path.islink(stripped) and not os.path.exists(stripped):
        found = "a symbolic link that leads nowhere"
    elif os.path.lexists(stripped):
        found = "a file, not a folder" if os.path.isfile(stripped) else "neither a file nor a folder"
    if found:
        return f"{given!r} is {found}. Choose another name, or remove it first."
    return why_not_into(os.path.dirname(stripped))


def why_not_into(folder: str) -> str | None:
    """Return why nothing can be written into a folder, with the remedy, or None if it can. "" is the current folder."""
    folder = folder or os.curdir
    if not os.path.isdir(folder):
        problem = "is not a folder" if os.path.lexists(folder) else "does not exist"
        return f"the folder {folder!r} {problem}. Create it first."
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder!r} may not be written to. Choose another one, or change its permissions."
    return None


def _write_file(path: str, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    """Flush a directory. Some file systems do not offer this; the files themselves are on the disk already."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _put_in_place(new: str, target: str, old: str) -> None:
    """Rename `new` to `target`. After a kill in between, the old one is at `old`: POSIX cannot exchange directories."""
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    try:
        os.rename(target, old)
        os.rename(new, target)
    except BaseException as error:
        if os.path.lexists(old):
            try:
                os.replace(old, target)
            except OSError:
                raise FileError(f"cannot save to {target!r}: {error}. The former content is now in {old!r}.") from error
        raise
