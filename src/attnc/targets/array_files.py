"""Reads columns of Parquet files and arrays of Zarr folders, piece by piece, if pyarrow and zarr are installed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnc.errors import FileError, InputError, MissingExtra
from attnc.opening import PathLike, open_regular

BATCH_ROWS = 2**18
"""Rows of a Parquet file that are read at once."""
SLAB_NUMBERS = 2**22
"""Numbers of a Zarr array that are read at once, or one of its chunks along the first axis if that is more."""
MAX_NUMBERS = 2**30
"""Most numbers of a table: 8 GiB of memory."""
COMPRESSORS = frozenset(("blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"))
CODECS = COMPRESSORS | {
    "bytes",
    "crc32c",
    "delta",
    "endian",
    "fixedscaleoffset",
    "sharding_indexed",
    "shuffle",
    "transpose",
}
"""The codecs of Zarr chunks that are read. Others, such as pickle, might run code that is stored in a file."""
MAX_METADATA = 2**20
"""The longest description of a Zarr array, in bytes."""


def parquet_columns(path: PathLike, names: Sequence[str], *, skip_missing: bool) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the columns of these names as an array, and remarks."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("Parquet files need", "pyarrow", "tables") from None
    shown, num_missing = os.fspath(path), 0
    with open_regular(path) as file:
        before = os.fstat(file.fileno())
        try:
            source = pyarrow.parquet.ParquetFile(file)
            known = source.schema_arrow.names
            for name in names:
                if known.count(name) != 1:
                    listed = ", ".join(map(repr, known))[:300]
                    raise InputError(f"{shown}: there is no single column {name!r}; the file has {listed or 'none'}")
                kind = source.schema_arrow.field(name).type
                if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or _is_decimal(kind)):
                    raise InputError(f"{shown}: column {name!r} holds {kind}, not numbers")
            if source.metadata.num_rows * len(names) > MAX_NUMBERS:
                raise InputError(f"{shown}: {source.metadata.num_rows:,} rows are too many; thin the table first")
            numbers, end = np.empty((source.metadata.num_rows, len(names))), 0
            for batch in source.iter_batches(BATCH_ROWS, columns=list(dict.fromkeys(names))):
                block = numbers[end : end + batch.num_rows]
                for j, name in enumerate(names):
                    column = batch.column(batch.schema.get_field_index(name)).cast(pyarrow.float64())
                    block[:, j] = column.to_numpy(zero_copy_only=False)  # a missing number becomes NaN
                is_missing = np.isnan(block).any(axis=1)
                if is_missing.any():
                    if not skip_missing:
                        row = end + num_missing + int(np.argmax(is_missing))
                        raise InputError(
                            f"{shown}: row {row} has a missing number, and {int(is_missing.sum())} of its batch. Fill "
                            "them in, or leave such rows out: skip_missing=True, or --skip-missing."
                        )
                    kept = block[~is_missing]
                    num_missing += int(is_missing.sum())
                    numbers[end : end + len(kept)] = kept
                    end += len(kept)
                else:
                    end += batch.num_rows
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise FileError(f"{shown} cannot be read as Parquet: {str(error).splitlines()[0][:200]}") from None
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise FileError(f"{shown} changed while it was read; copy it first")
    return numbers[:end], _left_out(num_missing)


def _is_decimal(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_decimal(kind))


def _left_out(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    return (f"{count:,} {'row with a missing cell was' if count == 1 else 'rows with missing cells were'} left out.",)


def zarr_table(
    path: PathLike, inputs: Sequence[str], outputs: Sequence[str], *, skip_missing: bool
) -> tuple[list[np.ndarray] | None, np.ndarray, tuple[str, ...]]:
    """Return nodes and values of a grid, or None and rows of scattered points; and remarks.

    With one input in ascending or descending order, the rows are a grid.
    """
    shown = os.fspath(path)
    if not os.path.isdir(shown):
        raise FileError(f"{shown!r} is no folder of Zarr arrays")
    nodes = [_array(shown, name) for name in inputs]
    arrays = [_array(shown, name) for name in outputs]
    before = [_state(os.path.join(shown, name)) for name in (*inputs, *outputs)]
    found = _read_zarr(shown, [*zip(inputs, nodes, strict=True)], [*zip(outputs, arrays, strict=True)], skip_missing)
    if before != [_state(os.path.join(shown, name)) for name in (*inputs, *outputs)]:
        raise FileError(f"{shown} changed while it was read; copy it first")
    return found


def _state(folder: str) -> list[tuple[str, int, int]]:
    """Return the size and the time of the last change of all files of an array."""
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    with contextlib.suppress(OSError):
        return sorted((file, state.st_size, state.st_mtime_ns) for file in files for state in [os.stat(file)])
    return []


def _read_zarr(
    shown: str, inputs: Sequence[tuple[str, Any]], outputs: Sequence[tuple[str, Any]], skip_missing: bool
) -> tuple[list[np.ndarray] | None, np.ndarray, tuple[str, ...]]:
    nodes, arrays = [axis for _, axis in inputs], [array for _, array in outputs]
    for name, axis in inputs:
        if axis.ndim != 1:
            raise InputError(f"{shown}: the input {name!r} has {axis.ndim} dimensions; a coordinate has one")
    sizes = tuple(axis.shape[0] for axis in nodes)
    if sum(int(np.prod(array.shape)) for array in arrays) > MAX_NUMBERS:
        raise InputError(f"{shown}: the outputs have more than {MAX_NUMBERS:,} numbers; thin the table first")
    is_ordered = len(nodes) == 1 and sizes[0] < MAX_NUMBERS and _is_ordered(_numbers_of(nodes[0], shown))
    if all(array.shape == sizes[:1] for array in arrays) and len(set(sizes)) == 1 and not is_ordered:
        rows = np.empty((sizes[0], len(nodes) + len(arrays)))
        for j, array in enumerate([*nodes, *arrays]):
            _fill_from(array, rows[:, j], shown)
        is_missing = np.isnan(rows).any(axis=1) if skip_missing else np.zeros(0, bool)
        return None, rows[~is_missing] if is_missing.any() else rows, _left_out(int(is_missing.sum()))
    for name, array in outputs:
        if array.shape != sizes:
            wanted = " × ".join(f"{size:,}" for size in sizes)
            found = " × ".join(f"{size:,}" for size in array.shape)
            raise InputError(
                f"{shown}: the output {name!r} has {found} numbers; on the grid of the inputs it has {wanted}"
            )
    values = np.empty((*sizes, len(arrays))) if len(arrays) > 1 else np.empty(sizes)
    for j, array in enumerate(arrays):
        _fill_from(array, values[..., j] if len(arrays) > 1 else values, shown)
    axes = []
    for i, axis in enumerate(nodes):
        coordinates = _numbers_of(axis, shown)
        if len(coordinates) > 1 and coordinates[0] > coordinates[-1]:  # such as latitudes from north to south
            coordinates, values = coordinates[::-1].copy(), np.flip(values, i)
        axes.append(coordinates)
    return axes, values, ()


def _array(folder: str, name: str) -> Any:
    """Open an array of a Zarr folder after a look at its description: no code that is stored there may run."""
    try:
        import zarr
    except ImportError:
        raise MissingExtra("Zarr folders need", "zarr", "tables") from None
    if not name or name != os.path.basename(name) or name.startswith("."):
        raise InputError(f"{name!r:.60} is no name of an array")
    place = os.path.join(folder, name)
    files = [os.path.join(place, file) for file in ("zarr.json", ".zarray")]
    described = next((file for file in files if os.path.exists(file)), None)
    if described is None:
        known = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
        raise InputError(f"{folder}: there is no array {name!r}; the folder has {', '.join(map(repr, known))[:300]}")
    try:
        with open_regular(described) as file:
            raw = file.read(MAX_METADATA + 1)
        if len(raw) > MAX_METADATA:
            raise ValueError(f"its description has more than {MAX_METADATA:,} bytes")
        unknown = _codecs(json.loads(raw)) - CODECS
        if unknown:
            raise ValueError(f"its chunks have the codec {sorted(unknown)[0]!r:.40}, which is not read here")
        array = zarr.open_array(place, mode="r")
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RuntimeError) as error:
        raise FileError(f"{place} cannot be read as a Zarr array: {str(error)[:200]}") from None
    if array.dtype.kind not in "fiu":
        raise InputError(f"{place} holds {array.dtype}, not numbers")
    return array


def _codecs(described: Any) -> set[str]:
    """Return the names of all codecs in the description of an array."""
    found = set[str]()
    for key in ("codecs", "index_codecs", "filters"):
        for codec in described.get(key) or ():
            found.add(str(codec.get("name") or codec.get("id")).removeprefix("numcodecs."))
            found |= _codecs(codec.get("configuration") or {})
    if described.get("compressor"):
        found.add(str(described["compressor"].get("id")))
    return found


def _is_ordered(numbers: np.ndarray) -> bool:
    steps = np.diff(numbers)
    return bool((steps > 0).all() or (steps < 0).all())


def _numbers_of(array: Any, shown: str) -> np.ndarray:
    numbers = np.empty(array.shape)
    _fill_from(array, numbers, shown)
    return numbers


def _fill_from(array: Any, out: np.ndarray, shown: str) -> None:
    """Read an array into `out`, slab by slab."""
    per_row = max(1, int(np.prod(array.shape[1:])))
    step = max(1, SLAB_NUMBERS // per_row // array.chunks[0]) * array.chunks[0]
    try:
        for start in range(0, array.shape[0], step):
            out[start : start + step] = array[start : start + step]
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise FileError(f"{shown}: a chunk cannot be read: {str(error)[:200]}") from None
