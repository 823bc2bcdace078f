"""The rows of a large table: a file of float64 numbers, little-endian, row by row. It is read block by block."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from attnc_checker.cells import Ends
from attnc_checker.files import BadFile, Object, Refused, field, require

TABLE = "table.f64"
MAX_TABLE = 2**34
"""Largest number of bytes of a table: 2^31 numbers."""
MAX_COLUMNS = 2**16
"""Largest number of columns of a table."""
READ_AT_ONCE = 2**22
"""Number of bytes that are hashed at a time."""


class RowFile(Sequence[tuple[float, ...]]):
    """The rows of a file whose hash was compared. If the file changes afterwards, its rows are refused."""

    def __init__(self, path: Path, data: Object, ends: tuple[Ends, ...]) -> None:
        entry, count = field(data, "table_file", dict), field(data, "points", int)
        columns = field(entry, "columns", int, "table_file.")
        require(
            len(ends) < columns <= MAX_COLUMNS, f"the table has {columns} columns for {len(ends)} variables", BadFile
        )
        self.path, self.num_rows, self.ends, self.columns = path, count, ends, columns
        self.layout = struct.Struct(f"<{columns}d")
        if not path.exists():
            raise Refused(
                "the table is not stored: give it to `attnc verify` with --csv FILE --inputs … --output …, or its rows "
                "to the checker with --table FILE"
            )
        self.file = self._opened()
        self.state = self._state()
        require(self.state[0] == count * self.layout.size <= MAX_TABLE, f"{path} does not have {count:,} rows", BadFile)
        digest = hashlib.sha256()
        for start in range(0, self.state[0], READ_AT_ONCE):
            digest.update(os.pread(self.file, READ_AT_ONCE, start))
        is_same = digest.hexdigest() == entry.get("sha256")
        require(is_same, f"{path.name} is another table: it has the SHA-256 {digest.hexdigest()}")

    def _opened(self) -> int:
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
        except OSError as error:
            raise BadFile(f"{self.path} cannot be read: {error.strerror or error}") from None
        self.close = weakref.finalize(self, os.close, file)
        require(stat.S_ISREG(os.fstat(file).st_mode), f"{self.path} is not a regular file", BadFile)
        return file

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.file)
        return found.st_size, found.st_mtime_ns

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("file", "close", "layout")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layout, self.file = struct.Struct(f"<{self.columns}d"), self._opened()

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, n: int) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, n: slice) -> list[tuple[float, ...]]: ...
    def __getitem__(self, n: int | slice) -> tuple[float, ...] | list[tuple[float, ...]]:
        if isinstance(n, int):
            if not 0 <= n < self.num_rows:
                raise IndexError(n)
            return self[n : n + 1][0]
        start, stop, _ = n.indices(self.num_rows)
        size = self.layout.size
        raw = os.pread(self.file, (stop - start) * size, start * size)
        is_same = len(raw) == (stop - start) * size and self._state() == self.state
        require(is_same, f"{self.path.name} changed while it was read")
        rows = list(self.layout.iter_unpack(raw))
        for number, row in enumerate(rows, start):
            require(all(map(math.isfinite, row)), f"row {number} of the table has a number that is not finite", BadFile)
            if not all(lo <= x <= hi for x, (lo, hi) in zip(row, self.ends, strict=False)):
                raise Refused(f"the point in row {number} of the table lies outside of the box")
        return rows
