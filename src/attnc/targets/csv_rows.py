"""Reads columns of numbers from CSV files of any length, block by block.

A block of plain numbers is parsed at once. A block with anything else is read cell by cell: quotes, blanks, comments,
missing cells, decimal commas. Bad rows are collected, and reported together.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from attnc.errors import FileError, InputError
from attnc.numerics.arrays import Float

BLOCK_BYTES = 2**24
"""Bytes of a file that are parsed at once."""
ARROW_BYTES, ARROW_BLOCK = 2**16, 2**20
"""From this number of bytes on, pyarrow parses numbers if it is installed: to import it takes longer than to parse
less. It divides them among its threads in blocks of the second size. Measured: 0.06 µs for a number of 20 digits, and
0.32 µs by numpy."""
MAX_LINE = 2**22
"""Most characters of a line: 100,000 columns of 40 characters."""
MAX_ROWS = 10**8
"""Most rows of a table. A number of a table takes 8 bytes of memory."""
SHOWN_ROWS = 20
"""Number of bad rows that a message lists."""
DELIMITERS = (",", ";", "\t")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
MISSING = frozenset(("", "na", "n/a", "nan", "-nan", "null", "none", "nil", "missing", "?", "-", "--"))
"""The texts of a missing value, in small letters."""
COMMENT = "#"


class NoNumber(Exception):
    """A cell is not a number."""


@dataclass(frozen=True, eq=False)
class CsvColumns:
    """The chosen columns of a file as numbers, with remarks about the lines that were left out."""

    numbers: Float[np.ndarray, "rows columns"]
    blocks: tuple[_Block, ...]
    remarks: tuple[str, ...]

    def label(self, row: int) -> str:
        """Return the line of a row, as messages name it."""
        block = self.blocks[bisect.bisect_right(self.blocks, row, key=lambda block: block.row) - 1]
        offset = row - block.row
        return f"line {block.line + offset if block.lines is None else block.lines[offset]}"


@dataclass(frozen=True, eq=False)
class _Block:
    """The number of the first row of a block, its line, and the lines of all rows if these do not follow each other."""

    row: int
    line: int
    lines: Sequence[int] | None


def read_columns(
    file: BinaryIO, name: str, wanted: Sequence[str], *, decimal: str = ".", skip_missing: bool = False
) -> CsvColumns:
    """Read the wanted columns of a CSV file. `name` is that of the file in messages.

    Raises InputError with all bad rows, or FileError if the file changes while it is read.
    """
    if decimal not in (".", ","):
        raise InputError(f"decimal={decimal!r:.20}: expected '.' or ','")
    before = _state(file)
    found = _Reading(name, wanted, decimal, skip_missing).read(blocks_of_lines(file, name))
    if _state(file) != before:
        raise FileError(f"{name} changed while it was read; copy it first")
    return found


def _state(file: BinaryIO) -> tuple[int, int] | None:
    """Return the size and the time of a file's last change; None for a stream that is no file."""
    try:
        found = os.fstat(file.fileno())
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns) if file.seekable() else None


def blocks_of_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of whole lines."""
    rest, is_first = b"", True
    while True:
        try:
            read = file.read(BLOCK_BYTES)
        except OSError as error:
            raise FileError(f"{name} cannot be read: {error.strerror or error}") from None
        if is_first:
            read, is_first = read.removeprefix(b"\xef\xbb\xbf"), False
        block = rest + read
        if not read:
            if block:
                yield block
            return
        end = block.rfind(b"\n") + 1
        if not end and len(block) > 4 * MAX_LINE:
            end = block.rfind(b"\r", 0, len(block) - 1) + 1
            if not end:
                raise FileError(f"{name}: a line has more than {MAX_LINE:,} characters; leave columns out")
        if end:
            yield block[:end]
        rest = block[end:]


@dataclass
class _Reading:
    """One reading of a file."""

    name: str
    wanted: Sequence[str]
    decimal: str
    skip_missing: bool
    delimiter: str = ","
    header: list[str] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    num_rows: int = 0
    line: int = 1  # of the next block
    bad: list[str] = field(default_factory=list)
    num_bad: int = 0
    num_missing: int = 0
    units: str | None = None
    is_first_row: bool = True

    def read(self, blocks: Iterator[bytes]) -> CsvColumns:
        rest = self._header(blocks)
        for block in itertools.chain([rest] if rest else [], blocks):
            numbers = self._plain(block)
            if numbers is not None:
                self._add(numbers, None)
                self.line += len(numbers)
            elif b'"' in block:  # a quoted cell may go on in the next block
                self._slow(itertools.chain([block], blocks))
                break
            else:
                self._slow(iter([block]))
        if self.num_bad:
            raise InputError(self._problem())
        if not self.num_rows:
            reason = f": all {self.num_missing:,} rows have missing cells" if self.num_missing else ""
            raise InputError(f"{self.name}: there is no row below the header{reason}")
        remarks = [] if self.units is None else [f"{self.units} has units and no numbers: it was left out."]
        if self.num_missing:
            rows = "row with a missing cell was" if self.num_missing == 1 else "rows with missing cells were"
            remarks.append(f"{self.num_missing:,} {rows} left out.")
        numbers = np.concatenate(self.parts)
        self.parts.clear()
        return CsvColumns(numbers, tuple(self.blocks), tuple(remarks))

    # --- the header ---------------------------------------------------------------------------------------------------

    def _header(self, blocks: Iterator[bytes]) -> bytes:
        """Read the names of the columns. Return the part of a block after them.

        Comments and blank lines before are left out. If numbers follow, the last comment with all wanted names counts.
        """
        rest, named = next(blocks, b""), None
        while rest:
            line, after = first_line(rest)
            text = self._decoded(line)
            self._require_short(text)
            stated = text.strip().lstrip(COMMENT).strip()
            if not stated or (text.lstrip().startswith(COMMENT) and not self._has_names(text)):
                named = stated if self._has_names(stated) else named
                self.line += 1
                rest = after or next(blocks, b"")
                continue
            if named is not None and all(
                NUMBER.fullmatch(cell) for cell in _cells(text, delimiter_of(named, self.wanted))
            ):
                text, after = named, rest
            else:
                self.line += 1
                while text.count('"') % 2 and after:  # a quoted name may hold line breaks
                    line, after = first_line(after)
                    text += self._decoded(line)
                    self.line += 1
            self.delimiter = delimiter_of(text, self.wanted)
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
            try:
                self.header = [cell.strip() for cell in next(reader)]
            except csv.Error as error:
                raise FileError(f"{self.name}, line {self.line - 1}: not CSV: {error}") from None
            self.columns = [column_of(self.name, name, self.header) for name in self.wanted]
            return after
        raise InputError(f"{self.name}: the file is empty; its first line must name the columns")

    def _has_names(self, text: str) -> bool:
        """Whether the cells of a line are all wanted names, and others perhaps."""
        names = _cells(text, delimiter_of(text, self.wanted))
        return bool(self.wanted) and all(name in names for name in self.wanted)

    # --- blocks of numbers --------------------------------------------------------------------------------------------

    def _plain(self, block: bytes) -> np.ndarray | None:
        """Return the wanted columns of a block that consists of numbers alone, or None."""
        numbers = plain_numbers(block, self.delimiter, len(self.header), self.columns, self.decimal)
        if numbers is not None:
            self.is_first_row = False
        return numbers

    def _add(self, numbers: np.ndarray, lines: Sequence[int] | None) -> None:
        if self.num_rows + len(numbers) > MAX_ROWS:
            raise FileError(f"{self.name}: more than {MAX_ROWS:,} rows; thin the table first")
        self.blocks.append(_Block(self.num_rows, self.line, lines))
        self.parts.append(numbers)
        self.num_rows += len(numbers)

    # --- cell by cell -------------------------------------------------------------------------------------------------

    def _slow(self, blocks: Iterator[bytes]) -> None:
        """Read blocks cell by cell."""
        num_lines = 0

        def lines() -> Iterator[str]:
            nonlocal num_lines
            for block in blocks:
                for line in io.StringIO(self._decoded(block, num_lines), newline=""):
                    self._require_short(line)
                    num_lines += 1
                    yield line

        reader = csv.reader(lines(), delimiter=self.delimiter, strict=True)
        numbers, places = list[list[float]](), list[int]()
        while True:
            place = self.line + reader.line_num  # a quoted cell may hold line breaks: the row begins here
            try:
                cells = next(reader, None)
            except csv.Error as error:
                line = self.line + reader.line_num - 1
                raise FileError(f"{self.name}, line {line}: not CSV: {error}") from None
            if cells is None or len(numbers) == ROWS_AT_ONCE:
                if numbers:
                    self._add(np.array(numbers), places)
                    numbers, places = [], []
                if cells is None:
                    break
            if not any(cell.strip() for cell in cells) or cells[0].lstrip().startswith(COMMENT):
                continue
            row = self._row(cells, place)
            if row is not None:
                numbers.append(row)
                places.append(place)
        self.line += num_lines

    def _row(self, cells: list[str], place: int) -> list[float] | None:
        """Return the wanted numbers of a row, or None if it is bad or left out."""
        is_first, self.is_first_row = self.is_first_row, False
        where = f"line {place}"
        if len(cells) < len(self.header) or any(cell.strip() for cell in cells[len(self.header) :]):
            count = f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"
            self._report(f"{where}: {count}, but the header names {len(self.header)} columns")
            return None
        texts = [cells[i].strip() for i in self.columns]
        if self.skip_missing and any(text.lower() in MISSING for text in texts):
            self.num_missing += 1
            return None
        row, problem = list[float](), None
        for i, text in zip(self.columns, texts, strict=True):
            try:
                row.append(number_in(text, self.delimiter, self.decimal))
            except NoNumber as error:
                problem = problem or f"{where}, column {self.header[i]!r}: {error}"
        if problem is None:
            return row
        if is_first and not row and all(text.lower() not in MISSING and any(map(str.isalpha, text)) for text in texts):
            self.units = f"Line {place}"
            return None
        self._report(problem)
        return None

    def _report(self, problem: str) -> None:
        self.num_bad += 1
        if len(self.bad) < SHOWN_ROWS:
            self.bad.append(problem)

    def _problem(self) -> str:
        if self.num_bad == 1:
            return f"{self.name}, {self.bad[0]}"
        shown = f"the first {len(self.bad)} of them" if self.num_bad > len(self.bad) else "all of them"
        return f"{self.name}: {self.num_bad:,} rows cannot be read. These are {shown}:\n" + "\n".join(
            f"  {problem}" for problem in self.bad
        )

    def _require_short(self, line: str) -> None:
        if len(line) > MAX_LINE:
            raise FileError(f"{self.name}: a line has more than {MAX_LINE:,} characters; leave columns out")

    def _decoded(self, block: bytes, before: int = 0) -> str:
        try:
            return block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + before + block[: error.start].count(b"\n")
            raise FileError(
                f"{self.name}, line {line}: not UTF-8 (byte {block[error.start]:#04x}); save the file as UTF-8"
            ) from None


def plain_numbers(
    block: bytes, delimiter: str, width: int, columns: Sequence[int], decimal: str = "."
) -> Float[np.ndarray, "rows columns"] | None:
    """Return columns of whole lines that consist of finite numbers alone, `width` in each line. Else return None."""
    mark = delimiter.encode()
    if block.translate(None, b"0123456789+-.eE\r\n" + mark + (b"," if decimal == "," else b"")):
        return None
    if decimal == ",":
        if mark == b"," or b"." in block:
            return None
        block = block.replace(b",", b".")
    text = block.replace(b"\r\n", b"\n") if b"\r" in block else block
    if b"\r" in text or text[:1] == b"\n" or b"\n\n" in text:
        return None
    text = text if text.endswith(b"\n") else text + b"\n"
    if text.count(mark) != text.count(b"\n") * (width - 1):
        return None
    numbers = _by_arrow(text, delimiter, width, columns) if len(text) >= ARROW_BYTES else None
    if numbers is None:
        numbers = _by_numpy(text, delimiter, width, columns)
    return numbers if numbers is not None and np.isfinite(numbers).all() else None


def _by_arrow(text: bytes, delimiter: str, width: int, columns: Sequence[int]) -> np.ndarray | None:
    """Parse lines by pyarrow, which rounds correctly, too. Return None if it is not installed or refuses the lines."""
    try:
        import pyarrow
        from pyarrow import csv as arrow_csv
    except ImportError:
        return None
    names, number = [str(i) for i in range(width)], pyarrow.float64()
    wanted = [names[i] for i in columns]
    try:
        table = arrow_csv.read_csv(
            pyarrow.BufferReader(text),
            read_options=arrow_csv.ReadOptions(column_names=names, block_size=ARROW_BLOCK),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, quote_char=False, ignore_empty_lines=False),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, number),
                include_columns=list(dict.fromkeys(wanted)),
                null_values=[],
            ),
        )
    except pyarrow.ArrowException:
        return None
    numbers = np.empty((table.num_rows, len(columns)))
    for j, name in enumerate(wanted):
        numbers[:, j] = table.column(name).to_numpy()
    return numbers


def _by_numpy(text: bytes, delimiter: str, width: int, columns: Sequence[int]) -> np.ndarray | None:
    mark, codes = delimiter.encode(), np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((codes == 10) | (codes == mark[0]))
    if len(ends) % width or not ends[0] or not (np.diff(ends) > 1).all():
        return None
    is_end = (codes[ends] == 10).reshape(-1, width)
    if not is_end[:, -1].all() or is_end[:, :-1].any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(text.replace(b"\n", mark)[:-1], sep=delimiter)
        except (ValueError, DeprecationWarning):
            return None
    return numbers.reshape(-1, width)[:, columns] if len(numbers) == len(ends) else None


ROWS_AT_ONCE = 2**16
"""Rows that are collected before they become an array."""


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def first_line(block: bytes) -> tuple[bytes, bytes]:
    """Return the first line with its end, and the rest."""
    end = block.find(b"\n") + 1 or block.find(b"\r") + 1 or len(block)
    return block[:end], block[end:]


def delimiter_of(first: str, wanted: Sequence[str]) -> str:
    """Return the delimiter with which the first line has the most wanted columns, then the most columns."""

    def found(delimiter: str) -> tuple[int, int]:
        names = _cells(first, delimiter)
        return sum(name in names for name in wanted), len(names)

    return max(DELIMITERS, key=found)


def column_of(path: object, name: str, header: list[str]) -> int:
    """Return the number of the column of this name."""
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise InputError(f"{path}: {header.count(name)} columns are named {name!r}; rename all but one")
    if header and all(NUMBER.fullmatch(cell) for cell in header):
        raise InputError(f"{path}: the first line must name the columns; found numbers, {', '.join(header)[:80]}")
    known = ", ".join(repr(cell) for cell in header)[:300] or "none"
    raise InputError(f"{path}: there is no column {name!r}; the header names {known}")


def number_in(cell: str, delimiter: str = ",", decimal: str = ".") -> float:
    """Return the number in a cell. Raise NoNumber with the reason."""
    text = cell.strip()
    if not text:
        raise NoNumber("the cell is empty; fill it in, or leave the row out")
    other = "," if decimal == "." else "."
    plain = text.replace(",", ".", 1) if decimal == "," else text
    if NUMBER.fullmatch(plain) and not (decimal == "," and "." in text):
        value = float(plain)
        if math.isfinite(value):
            return value
    elif NOT_FINITE.fullmatch(text) is None:
        if delimiter != other and other in text and NUMBER.fullmatch(text.replace(",", ".", 1)):
            kind, remedy = ("comma", text.replace(",", ".")) if other == "," else ("point", text.replace(".", ","))
            raise NoNumber(f"{text!r} has a decimal {kind}; write {remedy}")
        raise NoNumber(f"{text!r:.60} is not a number")
    raise NoNumber(f"{text:.60} is not finite; leave the row out")
