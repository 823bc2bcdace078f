"""`attnc eval NET --csv points.csv --out values.csv`: a table of points, read, evaluated and written in blocks of rows.

Memory does not grow with the table. Numbers are parsed by numpy. If it refuses a block, the block is read again cell by
cell, so that the message names the line and the column.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from attnc.cli.tables import number_in
from attnc.errors import FileError, InputError
from attnc.exports.safe_files import why_not_into, writing_whole
from attnc.opening import open_regular
from attnc.targets.csv_rows import MAX_LINE, column_of, delimiter_of
from attnc.wording import plural

if TYPE_CHECKING:
    import numpy as np

    from attnc.constructions.built import Progress
    from attnc.network import Network

ROWS_PER_BLOCK = 2**16
"""Number of rows of a block. Measured with a million rows of two columns: 2^14 rows at once take 2.4 CPU s in all, 2^16
take 2.0 and 2^18 take 2.3."""
MAX_HEADER_CELLS = 10**5
"""Maximum number of columns of a table."""


def evaluate_table(network: Network, source: Path, target: Path, outside: str, progress: Progress) -> int:
    """Write the outputs at all points of a table: a header, then one row per point, in order. Return their number.

    `source` and `target` may be "-" for standard input and output. A file is written whole or not at all.
    """
    where = "standard input" if str(source) == "-" else str(source)
    rows = 0
    with _reading(source) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        size = 0 if str(source) == "-" else os.fstat(raw.fileno()).st_size
        blocks = _blocks(text, where, network.variables)
        points = next(blocks)  # a table that cannot be read leaves no file behind
        with _writing(target) as out:
            out.write(",".join(_quoted(name) for name in output_names(network)).encode() + b"\n")
            while points is not None:
                first, block = points
                _write(network, block, outside, out, where, first)
                rows += len(block)
                progress("evaluating", min(1.0, raw.tell() / size) if size else 0.0)
                points = next(blocks, None)
    return rows


def output_names(network: Network) -> list[str]:
    """Return the names of the outputs: out, or out[0], out[1], …"""
    import numpy as np

    shape = network.program.output_shape
    return [f"out[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)] if shape else ["out"]


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _write(network: Network, block: np.ndarray, outside: str, out: BinaryIO, where: str, first: list[int]) -> None:
    import numpy as np

    from attnc.ir.program import split_columns

    if outside == "raise":
        is_inside = network.box.contains(block)
        if not is_inside.all():
            row = int(np.argmin(is_inside))
            raise InputError(
                f"{where}, line {first[row]}: the point is outside the box ({network.box}), where nothing is claimed. "
                "Use --outside clamp or --outside allow to go on."
            )
    inputs = split_columns(block, network.program.input_shapes)
    values = network(*inputs, outside=outside).reshape(len(block), -1)
    lines = (",".join(map(repr, row)) for row in values.tolist())
    out.write(("\n".join(lines) + "\n").encode())


def _blocks(text: TextIO, where: str, names: Sequence[str]) -> Iterator[tuple[list[int], np.ndarray] | None]:
    """Yield the numbers of the lines and the points of every block of rows; None if there is no row."""
    import numpy as np

    number, head = 0, ""
    for head in _lines(text, where):
        number += 1
        if head.strip():
            break
    if not head.strip():
        raise InputError(f"{where}: the file is empty; its first line must name the columns")
    delimiter = delimiter_of(head, names)
    header = [cell.strip() for cell in next(csv.reader([head], delimiter=delimiter))]
    if len(header) > MAX_HEADER_CELLS:
        raise InputError(f"{where}: the header names {len(header):,} columns, more than {MAX_HEADER_CELLS:,}")
    columns = [column_of(where, name, header) for name in names]
    lines, has_rows = _lines(text, where), False
    while block := list(islice(lines, ROWS_PER_BLOCK)):
        kept = [i for i, line in enumerate(block) if line.strip()]
        numbers = [number + 1 + i for i in kept]
        number += len(block)
        if not kept:
            continue
        points = _parsed([block[i] for i in kept], columns, delimiter)
        if points is None or len(points) != len(kept) or not np.isfinite(points).all():
            pairs = zip(kept, numbers, strict=True)
            points = np.array([_row(block[i], where, n, columns, header, delimiter) for i, n in pairs])
        has_rows = True
        yield numbers, points
    if not has_rows:
        yield None


def _parsed(lines: list[str], columns: Sequence[int], delimiter: str) -> np.ndarray | None:
    import numpy as np

    try:
        return np.loadtxt(lines, delimiter=delimiter, usecols=columns, comments=None, quotechar='"', ndmin=2)
    except (ValueError, IndexError):
        return None


def _row(
    line: str, where: str, number: int, columns: Sequence[int], header: Sequence[str], delimiter: str
) -> list[float]:
    """Return the numbers of a row, or raise an error that names the cell."""
    cells = next(csv.reader([line], delimiter=delimiter), [])
    if len(cells) <= max(columns):
        raise InputError(
            f"{where}, line {number}: {plural(len(cells), 'cell')}, but the header names {len(header)} columns"
        )
    return [number_in(cells[i], f"{where}, line {number}, column {header[i]!r}", delimiter) for i in columns]


def _lines(text: TextIO, where: str) -> Iterator[str]:
    number = 0
    try:
        while line := text.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise FileError(f"{where}: a line has more than {MAX_LINE:,} characters; leave columns out")
            yield line
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise FileError(f"{where}: not UTF-8 (byte {byte:#04x} after line {number}); save the file as UTF-8") from None


@contextmanager
def _reading(source: Path) -> Iterator[BinaryIO]:
    if str(source) == "-":
        yield sys.stdin.buffer
        return
    with open_regular(source) as file:
        yield file


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    if str(target) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if reason := why_not_into(os.path.dirname(target)):
        raise FileError(f"cannot write {str(target)!r}: {reason}")
    with writing_whole(os.path.realpath(target)) as file:
        yield file
