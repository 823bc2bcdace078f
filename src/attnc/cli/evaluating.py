"""`attnc eval NET --csv points.csv --out values.csv`: a table of points, read, evaluated and written in blocks of rows.

Memory does not grow with the table. A block of plain numbers is parsed at once. Any other block is read again cell by
cell, so that a message names the line and the column.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from attnc.cli.tables import number_in
from attnc.errors import FileError, InputError
from attnc.exports.safe_files import why_not_into, writing_whole
from attnc.opening import open_regular
from attnc.targets.csv_rows import MAX_LINE, blocks_of_lines, column_of, delimiter_of, first_line, plain_numbers
from attnc.wording import plural

if TYPE_CHECKING:
    import numpy as np

    from attnc.constructions.built import Progress
    from attnc.network import Network

ROWS_PER_BLOCK = 2**16
"""Number of rows that are evaluated and written at a time. Measured with a million rows of two columns by numpy alone:
2^14 rows at once take 2.4 CPU s in all, 2^16 take 2.0 and 2^18 take 2.3."""
MAX_HEADER_CELLS = 10**5
"""Maximum number of columns of a table."""


def evaluate_table(network: Network, source: Path, target: Path, outside: str, progress: Progress) -> int:
    """Write the outputs at all points of a table: a header, then one row per point, in order. Return their number.

    `source` and `target` may be "-" for standard input and output. A file is written whole or not at all.
    """
    where = "standard input" if str(source) == "-" else str(source)
    rows = 0
    with _reading(source) as raw:
        size = 0 if str(source) == "-" else os.fstat(raw.fileno()).st_size
        blocks = _blocks(raw, where, network.variables)
        points = next(blocks)  # a table that cannot be read leaves no file behind
        with _writing(target) as out:
            out.write(",".join(_quoted(name) for name in output_names(network)).encode() + b"\n")
            while points is not None:
                lines, block = points
                for start in range(0, len(block), ROWS_PER_BLOCK):
                    chosen = slice(start, start + ROWS_PER_BLOCK)
                    _write(network, block[chosen], outside, out, where, lines[chosen])
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


def _write(network: Network, block: np.ndarray, outside: str, out: BinaryIO, where: str, lines: Sequence[int]) -> None:
    import numpy as np

    from attnc.ir.program import split_columns

    if outside == "raise":
        is_inside = network.box.contains(block)
        if not is_inside.all():
            row = int(np.argmin(is_inside))
            raise InputError(
                f"{where}, line {lines[row]}: the point is outside the box ({network.box}), where nothing is claimed. "
                "Use --outside clamp or --outside allow to go on."
            )
    inputs = split_columns(block, network.program.input_shapes)
    values = network(*inputs, outside=outside).reshape(len(block), -1)
    out.write(_text_of(values))


def _text_of(values: np.ndarray) -> bytes:
    """Return rows of numbers as lines, each in the shortest form that reads back as the same number.

    pyarrow writes it, if it is installed. It takes a sixth of the time, and writes 1 and 0.00001 for 1.0 and 1e-05.
    """
    import numpy as np

    try:
        import pyarrow
        from pyarrow import csv as arrow_csv
    except ImportError:
        return ("\n".join(",".join(map(repr, row)) for row in values.tolist()) + "\n").encode()
    columns = {str(j): pyarrow.array(column) for j, column in enumerate(values.astype(np.float64, copy=False).T)}
    text = io.BytesIO()
    arrow_csv.write_csv(pyarrow.table(columns), text, arrow_csv.WriteOptions(include_header=False))
    return text.getvalue()


def _blocks(file: BinaryIO, where: str, names: Sequence[str]) -> Iterator[tuple[Sequence[int], np.ndarray] | None]:
    """Yield the numbers of the lines and the points of every block of rows; None if there is no row."""
    blocks, number, head, rest = blocks_of_lines(file, where), 0, "", b""
    while not head.strip() and (rest := rest or next(blocks, b"")):
        line, rest = first_line(rest)
        head = _decoded(line, where, number)
        if len(head) > MAX_LINE:
            raise FileError(f"{where}: a line has more than {MAX_LINE:,} characters; leave columns out")
        number += 1
    if not head.strip():
        raise InputError(f"{where}: the file is empty; its first line must name the columns")
    delimiter = delimiter_of(head, names)
    header = [cell.strip() for cell in next(csv.reader([head], delimiter=delimiter))]
    if len(header) > MAX_HEADER_CELLS:
        raise InputError(f"{where}: the header names {len(header):,} columns, more than {MAX_HEADER_CELLS:,}")
    columns, has_rows = [column_of(where, name, header) for name in names], False
    for block in itertools.chain([rest] if rest else [], blocks):
        points = plain_numbers(block, delimiter, len(header), columns)
        if points is not None:
            has_rows = True
            yield range(number + 1, number + 1 + len(points)), points
            number += len(points)
            continue
        lines = list(_lines(_decoded(block, where, number), where))
        for found in _slow_blocks(lines, where, number, columns, header, delimiter):
            has_rows = True
            yield found
        number += len(lines)
    if not has_rows:
        yield None


def _slow_blocks(
    lines: list[str], where: str, number: int, columns: Sequence[int], header: Sequence[str], delimiter: str
) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Yield the points of lines with anything but plain numbers: quotes, blanks, and cells that are refused."""
    import numpy as np

    for start in range(0, len(lines), ROWS_PER_BLOCK):
        block = lines[start : start + ROWS_PER_BLOCK]
        kept = [i for i, line in enumerate(block) if line.strip()]
        if not kept:
            continue
        numbers = [number + start + 1 + i for i in kept]
        points = _parsed([block[i] for i in kept], columns, delimiter)
        if points is None or len(points) != len(kept) or not np.isfinite(points).all():
            pairs = zip(kept, numbers, strict=True)
            points = np.array([_row(block[i], where, n, columns, header, delimiter) for i, n in pairs])
        yield numbers, points


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


def _lines(text: str, where: str) -> Iterator[str]:
    for line in io.StringIO(text, newline=""):
        if len(line) > MAX_LINE:
            raise FileError(f"{where}: a line has more than {MAX_LINE:,} characters; leave columns out")
        yield line


def _decoded(block: bytes, where: str, before: int) -> str:
    """Return the text of a block after `before` lines."""
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, line = block[error.start], before + block[: error.start].count(b"\n")
        raise FileError(f"{where}: not UTF-8 (byte {byte:#04x} after line {line}); save the file as UTF-8") from None


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
