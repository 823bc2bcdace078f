"""Reads tables from CSV files with the standard library. Every error names its line and column."""

from __future__ import annotations

import csv
import io
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.cli.options import read_box
from attnc.constructions.construction import DEFAULT_EPS
from attnc.errors import FileError, InputError
from attnc.opening import open_regular
from attnc.targets.csv_rows import MAX_LINE, NUMBER, NoNumber, column_of, delimiter_of
from attnc.targets.csv_rows import number_in as parsed_number
from attnc.wording import plural

if TYPE_CHECKING:
    import numpy as np

    from attnc.network import Network
    from attnc.targets.table import TableTarget

MAX_CSV_BYTES = 2**26
"""Size limit of a CSV file with examples or a matrix, in bytes: a million rows of 64 characters. Tables have none."""
MAX_EXAMPLE_ROWS = 10**6
"""Most rows of such a file."""
ZARR_FILES = (".zgroup", "zarr.json", ".zmetadata")
"""The files by which a folder is known to be of Zarr."""


@dataclass(frozen=True)
class TableReading:
    """How rows are read: the options of commands that take a table."""

    decimal: str = "."
    skip_missing: bool = False
    duplicates: str = "error"
    tolerance: float = 0.0


AS_IT_IS = TableReading()


def read_source(
    expression: str | None,
    box: Sequence[str],
    table: Path | None,
    inputs: str | None,
    output: str | None,
    reading: TableReading = AS_IT_IS,
) -> tuple[str | TableTarget, dict[str, tuple[float, float]] | None]:
    """Return the source to compile and its box. A table has its own box, hence None."""
    if table is None:
        for option, given in (("--inputs", inputs), ("--output", output)):
            if given is not None:
                raise InputError(f"{option} names columns of a table: give the table too, with --csv FILE")
        if reading != AS_IT_IS and reading != TableReading(tolerance=reading.tolerance):
            raise InputError("--skip-missing, --duplicates and --decimal are about a table: give it with --csv FILE")
        if expression is None:
            raise InputError(
                "there is no function: give an expression, or a table with --csv FILE --inputs X,Y --output Z"
            )
        return expression, read_box(box)
    if expression is not None:
        raise InputError(f"{expression!r:.60} and --csv {table}: give an expression or a table, not both")
    if box:
        raise InputError(f"--box {box[0]}: the box of a table is that of its points; leave --box out")
    return read_table(table, inputs, output, reading), None


def read_table(path: Path, inputs: str | None, output: str | None, reading: TableReading = AS_IT_IS) -> TableTarget:
    """Read the table of the columns named by --inputs and --output, each a list such as `x,y`.

    A folder is read as Zarr, a file that ends in .parquet as Parquet, and any other as CSV.
    """
    from attnc.targets.table import TableTarget

    arguments, values = _names("--inputs", inputs), _names("--output", output)
    for name in values:
        if name in arguments:
            raise InputError(f"column {name!r} is both an input and an output")
    skip, twice, tolerance = reading.skip_missing, reading.duplicates, reading.tolerance
    is_csv = not path.is_dir() and path.suffix != ".parquet"
    if not is_csv and reading.decimal != ".":
        raise InputError(f"--decimal {reading.decimal} is for CSV files; {path} holds binary numbers")
    if path.is_dir() and any((path / name).exists() for name in ZARR_FILES):
        return TableTarget.from_zarr(path, arguments, values, skip_missing=skip, duplicates=twice, tolerance=tolerance)
    if path.suffix == ".parquet":
        return TableTarget.from_parquet(
            path, arguments, values, skip_missing=skip, duplicates=twice, tolerance=tolerance
        )
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else open_regular(path) as file:
        return TableTarget.from_stream(
            file,
            str(path),
            arguments,
            values,
            decimal=reading.decimal,
            skip_missing=skip,
            duplicates=twice,
            tolerance=tolerance,
        )


@contextmanager
def rows_of_table(
    net: Path, path: Path | None, inputs: str | None, output: str | None, reading: TableReading
) -> Iterator[str | None]:
    """Write the rows of a table to a file for the checker, and yield its name; None if there is no table.

    Values at one point that differ by at most the network's eps are merged, as when it was compiled.
    """
    if path is None:
        if inputs is not None or output is not None or reading != AS_IT_IS:
            raise InputError("--inputs, --output and the options of rows are about a table: give it with --csv FILE")
        yield None
        return
    from attnc.loading import load
    from attnc.proofs.kinds.point import row_bytes

    table = read_table(path, inputs, output, replace(reading, tolerance=load(net).eps or DEFAULT_EPS))
    with tempfile.NamedTemporaryFile(prefix="attnc-table-") as file:
        try:
            for block in table.check_blocks():
                file.write(row_bytes(*block))
            file.flush()
        except OSError as error:
            raise FileError(f"{file.name} cannot be written: {error.strerror or error}") from None
        yield file.name


def table_remarks(source: object, network: Network) -> tuple[str, ...]:
    """Return sentences about the rows of a table, and about its network between them."""
    from attnc.targets.table import TableTarget

    if not isinstance(source, TableTarget):
        return ()
    given, said = network.parameters, list(source.remarks)
    if "smooth_error" in given:
        said.append(
            f"every point has a key of its own, because no smaller network that was tried is within eps. One with "
            f"{given['smooth_anchors']:,} anchors is within {given['smooth_error']:.2g}: see whether that is enough."
        )
    if "holdout_error" in given:
        said.append(
            f"between the points, an estimate: the error is at most {given['holdout_error']:.2g} at "
            f"{given['holdout_points']:,} points of the table that no fit used."
        )
    return tuple(said)


def read_csv(path: Path, inputs: str | None, output: str | None) -> TableTarget:
    """Read a table without any of the options for rows as people have them."""
    return read_table(path, inputs, output)


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
    too_long = FileError(f"{path}: more than {MAX_EXAMPLE_ROWS:,} rows; thin the table first")
    if max(text.count("\n"), text.count("\r")) > MAX_EXAMPLE_ROWS + 1:  # counted before memory is allocated for them
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
        if len(lines) == MAX_EXAMPLE_ROWS:
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
    try:  # as in CSV, quotes keep a comma in a name: --inputs 'x,"y, in m"'
        names = tuple(name.strip() for name in next(csv.reader([given], skipinitialspace=True, strict=True), [""]))
    except csv.Error:
        names = ("",)
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


def number_in(cell: str, where: str, delimiter: str) -> float:
    """Return the number in a cell, or raise InputError that says where it is."""
    try:
        return parsed_number(cell, delimiter)
    except NoNumber as error:
        raise InputError(f"{where}: {error}") from None


def _label(cell: str, where: str) -> str:
    text = cell.strip()
    if not text or text.lower() in ("nan", "inf", "infinity"):
        raise InputError(f"{where}: {text!r} is not a label; fill it in, or leave the row out")
    return text
