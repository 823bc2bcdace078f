"""The rows of a table as a saved network has them: points and values that a proof checks, and nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from attnc.errors import FileError, InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.table import BLOCK_ROWS
from attnc.targets.target import Target

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values


@dataclass(eq=False)
class StoredRows(Target):
    """The rows from number `first` on of a table of `count` rows. Each has its point, and then its values."""

    box: Box
    rows: Float[np.ndarray, "rows columns"]
    output_shape: tuple[int, ...]
    count: int
    first: int = 0
    path: str | None = None  # the file that the rows are mapped from

    def __post_init__(self) -> None:
        self.input_shapes = ((self.box.d,),)

    @classmethod
    def of_file(cls, path: str, sha256: str, count: int, columns: int, box: Box, shape: tuple[int, ...]) -> StoredRows:
        """Map a file of rows: float64, little-endian, row by row. Raise FileError if it is another table."""
        try:
            size = os.path.getsize(path)
            if not os.path.isfile(path) or size != 8 * count * columns:
                raise FileError(f"{path} has {size:,} bytes; {count:,} rows of {columns} numbers have another size")
            rows = np.memmap(path, "<f8", mode="r", shape=(count, columns))
        except (OSError, ValueError) as error:
            raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        digest = hashlib.sha256()
        for start in range(0, count, BLOCK_ROWS):
            digest.update(rows[start : start + BLOCK_ROWS].data)
        if digest.hexdigest() != sha256:
            raise FileError(f"{path} is another table: it has the SHA-256 {digest.hexdigest()}")
        return cls(box, rows, shape, count, path=path)

    @property
    def is_known_on_cells(self) -> bool:
        return False

    @property
    def num_check_points(self) -> int:
        return self.count

    def part(self, first: int, after: int) -> tuple[Points, Values]:
        """Return the points and values of the rows `first` to `after`."""
        rows = np.asarray(self.rows[first - self.first : after - self.first], np.float64)
        return rows[:, : self.box.d], rows[:, self.box.d :]

    def check_blocks(self) -> Iterator[tuple[Points, Values]]:
        for start in range(0, self.count, BLOCK_ROWS):
            yield self.part(start, min(self.count, start + BLOCK_ROWS))

    def __call__(self, points: Points) -> Values:
        self._refuse()

    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(f"a {self.describe()} is known at its points alone")

    def describe(self) -> str:
        return f"table of {self.count:,} points"
