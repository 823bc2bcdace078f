"""Reads tables from CSV files with the standard library. Every error names its line and column."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.cli.options import read_box
from attnc.errors import FileError, InputError
from attnc.exports.safe_files import open_regular
from attnc.wording import plural

if TYPE_CHECKING:
    import numpy as np

    from attnc.targets.table import TableTarget

MAX_CSV_BYTES = 2**26
"""Size limit of a CSV file, in bytes: a million rows of 64 characters."""
MAX_ROWS = 10**6
"""Most rows of a table. The limit bounds the memory that a table takes."""
MAX_LINE = 2**22
"""Most characters of a line: 100,000 columns of 40 characters."""
DELIMITERS = (",", ";", "\t")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def read_source(
    expression: str | None, box: Sequence[str], table: Path | None, inputs: str | None, output: str | None
) -> tuple[str | TableTarget, dict[str, tuple[float, float]] | None]:
    """Return the source to compile and its box. A table has its own box, hence None."""
    if table is None:
        for option, given in (("--inputs", inputs), ("--output", output)):
            if given is not None:
                raise InputError(f"{option} names columns of a table: give the table too, with --csv FILE")
        if expression is None:
            raise InputError(
                "there is no function: give an expression, or a table with --csv FILE --inputs X,Y --output Z"
            )
        return expression, read_box(box)
    if expression is not None:
        raise InputError(f"{expression!r:.60} and --csv {table}: give an expression or a table, not both")
    if box:
        raise InputError(f"--box {box[0]}: the box of a table is that of its points; leave --box out")
    return read_csv(table, inputs, output), None


def read_csv(path: Path, inputs: str | None, output: str | None) -> TableTarget:
    """Read the table of the columns named by --inputs and --output, each a list such as `x,y`.

    The first line names the columns; cells are separated by commas, semicolons or tabs; the text is UTF-8, with or
    without a byte order mark. Blank lines are skipped, other columns ignored.
    """
    from attnc.targets.table import TableTarget

    arguments, values = _names("--inputs", inputs), _names("--output", output)
    for name in values:
        if name in arguments:
            raise InputError(f"column {name!r} is both an input and an output")
    array, lines, _ = _read(path, (*arguments, *values), with_others=False)
    split = len(arguments)
    outputs = array[:, split] if len(values) == 1 else array[:, split:]
    return TableTarget(array[:, :split], outputs, arguments, label=lambda row: f"line {lines[row]}")


def read_examples(
    path: Path, output: str, inputs: str | None, *, with_labels: bool = False
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Read X, y and the names of the columns of X, which are those of --inputs or all but the output.

    With `with_labels` the output may hold texts.
    """
    import numpy as np

    chosen = () if inputs is None else _names("--inputs", inputs)
    if output in chosen:
        raise InputError(f"column {output!r} is both an input and an output")
    labels = list[str]()
    array, _, names = _read(path, (output, *chosen), with_others=not chosen, labels=labels if with_labels else None)
    if array.shape[1] < 2:
        raise InputError(f"{path}: there is no column besides the output {output!r}")
    if not all(NUMBER.fullmatch(label) for label in labels):
        return array[:, 1:], np.array(labels), names[1:]
    return array[:, 1:], array[:, 0], names[1:]


def read_matrix(path: Path) -> np.ndarray:
    """Read all columns of a table, whose first line names them, as rows of numbers."""
    return _read(path, (), with_others=True)[0]


def _read(
    path: Path, wanted: Sequence[str], *, with_others: bool, labels: list[str] | None = None
) -> tuple[np.ndarray, list[int], tuple[str, ...]]:
    """Return the wanted columns (and all others, if asked for) as numbers, the rows' lines, and the columns' names.

    If `labels` is given, the texts of the first column are appended to it, and those that are no numbers become NaN.
    """
    import numpy as np

    text = read_text(path, MAX_CSV_BYTES, "thin the table first")
    too_long = FileError(f"{path}: more than {MAX_ROWS:,} rows; thin the table first")
    if max(text.count("\n"), text.count("\r")) > MAX_ROWS + 1:  # counted before memory is allocated for them
        raise too_long
    if any(len(line) > MAX_LINE for line in io.StringIO(text, newline="")):
        raise FileError(f"{path}: a line has more than {MAX_LINE:,} characters; leave columns out")
    first = next((line for line in io.StringIO(text, newline="") if line.strip()), "")
    delimiter = delimiter_of(first, wanted)
    rows = _rows(path, text, delimiter)
    _, header = next(rows, (1, list[str]()))
    if not header:
        raise InputError(f"{path}: the file is empty; its first line must name the columns")
    header = [cell.strip() for cell in header]
    names = (*wanted, *(name for name in header if with_others and name not in wanted))
    columns = [column_of(path, name, header) for name in names]
    numbers, lines = list[list[float]](), list[int]()
    for line, cells in rows:
        if len(lines) == MAX_ROWS:
            raise too_long
        if len(cells) < len(header) or any(cell.strip() for cell in cells[len(header) :]):
            raise InputError(
                f"{path}, line {line}: {plural(len(cells), 'cell')}, but the header names {len(header)} columns"
            )
        where = f"{path}, line {line}, column"
        label = list[float]()
        if labels is not None:
            labels.append(_label(cells[columns[0]], f"{where} {header[columns[0]]!r}"))
            label = [float(labels[-1]) if NUMBER.fullmatch(labels[-1]) else math.nan]
        others = (number_in(cells[i], f"{where} {header[i]!r}", delimiter) for i in columns[len(label) :])
        numbers.append([*label, *others])
        lines.append(line)
    if not lines:
        raise InputError(f"{path}: there is no row below the header")
    return np.array(numbers), lines, names


def _names(option: str, given: str | None) -> tuple[str, ...]:
    example = "z" if option == "--output" else "x,y"
    if given is None:
        raise InputError(f"--csv needs {option}: the names of columns, e.g. {option} {example}")
    names = tuple(name.strip() for name in given.split(","))
    if not all(names):
        raise InputError(f"{option} {given!r}: expected names of columns, e.g. {option} {example}")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{option} {given!r}: column {name!r} is named twice")
    return names


def read_text(path: Path, max_bytes: int, remedy: str) -> str:
    """Read a regular UTF-8 file, or standard input for "-". One of more than `max_bytes` needs the `remedy`."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else open_regular(path) as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    if len(raw) > max_bytes:
        raise FileError(f"{path}: more than the {max_bytes:,} bytes that are read; {remedy}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise FileError(
            f"{path}, line {line}: not UTF-8 (byte {raw[error.start]:#04x}); save the file as UTF-8"
        ) from None


def delimiter_of(first: str, wanted: Sequence[str]) -> str:
    """Return the delimiter with which the first line has the most wanted columns, then the most columns."""

    def found(delimiter: str) -> tuple[int, int]:
        try:
            names = [cell.strip() for cell in next(csv.reader([first], delimiter=delimiter), [])]
        except csv.Error:
            return 0, 0
        return sum(name in names for name in wanted), len(names)

    return max(DELIMITERS, key=found)


def _rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) of every row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        start = reader.line_num + 1  # a quoted cell may hold line breaks: the row begins here
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise FileError(f"{path}, line {reader.line_num}: not CSV: {error}") from None
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield start, cells


def column_of(path: Path | str, name: str, header: list[str]) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise InputError(f"{path}: {header.count(name)} columns are named {name!r}; rename all but one")
    if header and all(NUMBER.fullmatch(cell) for cell in header):
        raise InputError(f"{path}: the first line must name the columns; found numbers, {', '.join(header)[:80]}")
    known = ", ".join(repr(cell) for cell in header)[:300] or "none"
    raise InputError(f"{path}: there is no column {name!r}; the header names {known}")


def number_in(cell: str, where: str, delimiter: str) -> float:
    text = cell.strip()
    if not text:
        raise InputError(f"{where}: the cell is empty; fill it in, or leave the row out")
    if NUMBER.fullmatch(text):
        value = float(text)
        if math.isfinite(value):
            return value
    elif re.fullmatch(r"[+-]?(nan|inf|infinity)", text, re.IGNORECASE) is None:
        if delimiter != "," and NUMBER.fullmatch(text.replace(",", ".", 1)):
            raise InputError(f"{where}: {text!r} has a decimal comma; write {text.replace(',', '.')}")
        raise InputError(f"{where}: {text!r:.60} is not a number")
    raise InputError(f"{where}: {text:.60} is not finite; leave the row out")


def _label(cell: str, where: str) -> str:
    text = cell.strip()
    if not text or text.lower() in ("nan", "inf", "infinity"):
        raise InputError(f"{where}: {text!r} is not a label; fill it in, or leave the row out")
    return text
