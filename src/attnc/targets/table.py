"""A table: points, and the values of the function there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.opening import PathLike, open_regular
from attnc.targets.box import Box
from attnc.targets.csv_rows import read_columns
from attnc.targets.target import Target, show_point

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values

MAX_COLUMNS, MAX_SCATTERED_COLUMNS = 6, 4
"""Maximum numbers of input columns of a gridded table and of a scattered one. Ten nodes per axis are a million points
in six columns. Ten anchors per axis, which scattered points need about as often, are 10,000 keys in four."""
BLOCK_ROWS = 2**17
"""Number of rows that are processed together: 4 MB for four columns."""
SORT_AT_ONCE = 2**20
"""Up to this number of rows all columns are sorted together. For more, the first column is sorted, and the others only
if it has equal numbers."""
DUPLICATES = ("error", "mean", "first")
"""The ways to treat rows that state different values for one point."""


class TableTarget(Target):
    """A table of points and values. The rows may be in any order.

    A certificate for a table bounds the error at these points, and all points are checked. Nothing is claimed between
    them. The box is the bounding box of the points. Equal rows are merged.

    Parameters
    ----------
    points : array (N,) or (N, d)
        The points, of at most six coordinates if they form a grid, and of at most four if not.
    values : array (N,) or (N, k)
        The values at the points.
    names : sequence of str, optional
        The names of the coordinates: x0, x1, … by default.
    label : callable, optional
        Maps a row number to its name in messages. The default is "row 3"; a table from a file names lines.
    duplicates : str
        The treatment of different values at one point: "error" refuses them, "mean" takes their mean, and "first" the
        value of the first row.
    tolerance : float
        With "error", values at one point that differ by at most this are accepted. Their middle is the table's value.

    Attributes
    ----------
    points, values : array
        The rows, sorted by the first column, then by the next.
    grid : tuple of array or None
        The nodes of every axis if the points form a whole tensor grid.
    remarks : tuple of str
        Sentences about rows that were merged or skipped.

    Raises
    ------
    InputError
        If the rows do not fit each other, are not finite, or state two values for one point.

    Examples
    --------
    >>> import attnc
    >>> table = attnc.TableTarget([0.0, 0.5, 1.0], [1.0, 0.0, 2.0], names=["x"])
    >>> net = attnc.compile(table, eps=1e-6)
    >>> bool(abs(net([[0.5]])[0]) <= net.certificate.bound <= 1e-6)
    True
    """

    values: Float[np.ndarray, "points outputs"]
    grid: tuple[Float[np.ndarray, " nodes"], ...] | None
    remarks: tuple[str, ...] = ()
    kind = "TableTarget"

    def __init__(
        self,
        points: Any,
        values: Any,
        names: Sequence[str] | None = None,
        *,
        label: Callable[[int], str] = "row {}".format,
        duplicates: str = "error",
        tolerance: float = 0.0,
    ) -> None:
        if duplicates not in DUPLICATES:
            raise InputError(f"duplicates={duplicates!r:.40}: expected {', '.join(map(repr, DUPLICATES))}")
        x, f = _numbers("points", points), _numbers("values", values)
        if len(x) != len(f):
            raise InputError(f"a table needs a row of values for each point; found {len(x):,} points, {len(f):,} rows")
        if len(x) < 2:
            raise InputError(f"a table needs at least two points; found {len(x)}")
        output_shape = f.shape[1:]
        x, f = x.reshape(len(x), -1), f.reshape(len(f), -1)
        columns = _columns(names, x.shape[1])
        if not f.shape[1]:
            raise InputError("a table needs at least one column of values; found none")
        _require_finite(x, [f"column {name}" for name in columns], "points", label)
        _require_finite(f, [f"output {j}" for j in range(f.shape[1])], "values", label)
        for name, column in zip(columns, x.T, strict=True):
            if column[0] == column[-1] and column.min() == column.max():
                raise InputError(
                    f"column {name} is {column[0]:g} in all {len(x):,} rows: nothing depends on it. Leave this column "
                    "out of the points."
                )
        x += 0.0  # −0 becomes 0
        found = _as_grid(x, f)
        if found is not None:
            self._set_grid(*found, columns, output_shape)
            return
        order, is_distinct = _sorted_order(x)
        x, f = x.take(order, axis=0), f.take(order, axis=0)
        is_repeated = np.zeros(0, bool) if is_distinct else (x[1:] == x[:-1]).all(axis=1)
        if is_repeated.any():
            f, remark = _merged(x, f, is_repeated, columns, lambda i: label(int(order[i])), duplicates, tolerance)
            self.remarks = () if remark is None else (remark,)
            x = x[np.concatenate([[True], ~is_repeated])]
            found = _as_grid(x, f)
            if found is not None:
                self._set_grid(*found, columns, output_shape)
                return
        if x.shape[1] > MAX_SCATTERED_COLUMNS:
            raise InputError(
                f"a table whose points form no grid has 1 to {MAX_SCATTERED_COLUMNS} input columns; these points have "
                f"{x.shape[1]}. Leave columns out, or fill the grid."
            )
        self._points: Float[np.ndarray, "points d"] | None = x
        self.grid = None
        self._set(f, columns, output_shape, [float(each.min()) for each in x.T], [float(each.max()) for each in x.T])

    @classmethod
    def from_grid(cls, nodes: Sequence[Any], values: Any, names: Sequence[str] | None = None) -> TableTarget:
        """Make a table on a tensor grid without writing out its points.

        Parameters
        ----------
        nodes : sequence of array
            The coordinates of each axis, ascending.
        values : array (n1, …, nd) or (n1, …, nd, k)
            The values. A float64 array in C order is not copied, and must not change afterwards.
        names : sequence of str, optional
            The names of the coordinates: x0, x1, … by default.

        Returns
        -------
        TableTarget

        Raises
        ------
        InputError
            If nodes do not ascend, or the values are not finite or have another shape.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> x, y = np.linspace(0, 1, 5), np.linspace(0, 2, 9)
        >>> table = attnc.TableTarget.from_grid([x, y], np.add.outer(x, y), ["x", "y"])
        >>> table.num_points, attnc.compile(table, eps=1e-3).certificate.bound <= 1e-3
        (45, True)
        """
        axes = tuple(_numbers("nodes", axis) for axis in nodes)
        columns = _columns(names, len(axes))
        for name, axis in zip(columns, axes, strict=True):
            if axis.ndim != 1 or len(axis) < 2 or not (np.isfinite(axis).all() and (np.diff(axis) > 0).all()):
                raise InputError(f"the nodes of {name} must be two or more finite numbers in ascending order")
        f, sizes = np.asarray(values), tuple(map(len, axes))
        if f.dtype.kind not in "fiub" or f.shape[: len(sizes)] != sizes or f.ndim > len(sizes) + 1:
            wanted = " × ".join(map(str, sizes))
            raise InputError(f"the values of a grid of {wanted} nodes have that shape; found {f.shape} of {f.dtype}")
        output_shape = f.shape[len(sizes) :]
        f = np.ascontiguousarray(f, np.float64).reshape(math.prod(sizes), -1).view()
        if not f.shape[1]:
            raise InputError("a table needs at least one column of values; found none")
        _require_finite(f, [f"output {j}" for j in range(f.shape[1])], "values", "row {}".format)
        table = cls.__new__(cls)
        table._set_grid(tuple(axis + 0.0 for axis in axes), f, columns, output_shape)
        return table

    @classmethod
    def from_csv(
        cls,
        path: PathLike,
        inputs: Sequence[str] | str,
        outputs: Sequence[str] | str,
        *,
        decimal: str = ".",
        skip_missing: bool = False,
        duplicates: str = "error",
        tolerance: float = 0.0,
    ) -> TableTarget:
        """Read a table from a CSV file of any length, block by block.

        The first line names the columns. Cells are separated by commas, semicolons or tabs; the text is UTF-8. Blank
        lines, comments that begin with #, other columns and a line of units below the header are left out.

        Parameters
        ----------
        path : path
            The file, which is no pipe.
        inputs, outputs : sequence of str, or str
            The names of the columns with the coordinates, and of those with the values.
        decimal : str
            The decimal mark, "." or ",".
        skip_missing : bool
            Leave out rows with a missing cell, such as one that is empty, NaN or NA.
        duplicates, tolerance
            As for the class.

        Returns
        -------
        TableTarget
            Its `remarks` tell what was left out or merged.

        Raises
        ------
        InputError
            If rows cannot be read. The message lists the first 20 of them.
        FileError
            If the file cannot be read, or changes meanwhile.

        Examples
        --------
        >>> import attnc, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "table.csv")
        ...     _ = path.write_text("t,v\\n0,1\\n1,NaN\\n2,5\\n")
        ...     table = attnc.TableTarget.from_csv(path, "t", "v", skip_missing=True)
        >>> table.points.ravel().tolist(), table.remarks
        ([0.0, 2.0], ('1 row with a missing cell was left out.',))
        """
        with open_regular(path) as file:
            return cls.from_stream(
                file,
                str(path),
                _listed(inputs),
                _listed(outputs),
                decimal=decimal,
                skip_missing=skip_missing,
                duplicates=duplicates,
                tolerance=tolerance,
            )

    @classmethod
    def from_stream(
        cls,
        file: BinaryIO,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        decimal: str = ".",
        skip_missing: bool = False,
        duplicates: str = "error",
        tolerance: float = 0.0,
    ) -> TableTarget:
        """Read a table from a binary stream of CSV text, such as standard input.

        Parameters
        ----------
        file : binary stream
            The CSV text, as for `from_csv`.
        name : str
            The name of the file in messages.
        inputs, outputs, decimal, skip_missing, duplicates, tolerance
            As for `from_csv`.

        Returns
        -------
        TableTarget

        Examples
        --------
        >>> import attnc, io
        >>> stream = io.BytesIO(b"t;v\\n0;1,5\\n2;5\\n")
        >>> attnc.TableTarget.from_stream(stream, "stream", ["t"], ["v"], decimal=",").values.ravel().tolist()
        [1.5, 5.0]
        """
        found = read_columns(file, name, (*inputs, *outputs), decimal=decimal, skip_missing=skip_missing)
        return cls._from_columns(found.numbers, inputs, found.remarks, found.label, duplicates, tolerance)

    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        inputs: Sequence[str] | str,
        outputs: Sequence[str] | str,
        *,
        skip_missing: bool = False,
        duplicates: str = "error",
        tolerance: float = 0.0,
    ) -> TableTarget:
        """Read a table from a Parquet file, batch by batch. It needs pyarrow: `pip install attnc[tables]`.

        Parameters
        ----------
        path : path
            The file.
        inputs, outputs : sequence of str, or str
            The names of the columns with the coordinates, and of those with the values. All hold numbers.
        skip_missing : bool
            Leave out rows with a missing number or NaN.
        duplicates, tolerance
            As for the class.

        Returns
        -------
        TableTarget

        Raises
        ------
        InputError
            If a column is missing or holds no numbers.
        FileError
            If the file cannot be read, or changes meanwhile.

        Examples
        --------
        >>> import attnc
        >>> attnc.TableTarget.from_parquet("none.parquet", ["x"], ["z"])
        Traceback (most recent call last):
        ...
        attnc.errors.FileError: 'none.parquet' is missing
        """
        from attnc.targets.array_files import parquet_columns

        names = _listed(inputs)
        numbers, remarks = parquet_columns(path, (*names, *_listed(outputs)), skip_missing=skip_missing)
        return cls._from_columns(numbers, names, remarks, "row {}".format, duplicates, tolerance)

    @classmethod
    def from_zarr(
        cls,
        path: PathLike,
        inputs: Sequence[str] | str,
        outputs: Sequence[str] | str,
        *,
        skip_missing: bool = False,
        duplicates: str = "error",
        tolerance: float = 0.0,
    ) -> TableTarget:
        """Read a table from a Zarr folder, chunk by chunk. It needs zarr: `pip install attnc[tables]`.

        The inputs are arrays of one dimension. An output with a dimension for each input is a table on their grid. One
        of a single dimension, as long as the inputs, is a table of scattered points.

        Parameters
        ----------
        path : path
            The folder of the Zarr group, of format 2 or 3.
        inputs, outputs : sequence of str, or str
            The names of the arrays with the coordinates, in the order of the dimensions, and of those with the values.
        skip_missing : bool
            Leave out scattered rows with NaN. A grid has no rows to leave out.
        duplicates, tolerance
            As for the class, for scattered points.

        Returns
        -------
        TableTarget

        Raises
        ------
        InputError
            If an array is missing, holds no numbers, or has another shape.
        FileError
            If the folder cannot be read.

        Examples
        --------
        >>> import attnc
        >>> attnc.TableTarget.from_zarr("none.zarr", ["x"], ["z"])
        Traceback (most recent call last):
        ...
        attnc.errors.FileError: 'none.zarr' is no folder of Zarr arrays
        """
        from attnc.targets.array_files import zarr_table

        names = _listed(inputs)
        nodes, values, remarks = zarr_table(path, names, _listed(outputs), skip_missing=skip_missing)
        if nodes is not None:
            return cls.from_grid(nodes, values, names)
        return cls._from_columns(values, names, remarks, "row {}".format, duplicates, tolerance)

    @classmethod
    def _from_columns(
        cls,
        numbers: np.ndarray,
        inputs: Sequence[str],
        remarks: tuple[str, ...],
        label: Callable[[int], str],
        duplicates: str,
        tolerance: float,
    ) -> TableTarget:
        """Make a table of rows that have the inputs first, and then the outputs. One output is one number."""
        split = len(inputs)
        f = numbers[:, split] if numbers.shape[1] == split + 1 else numbers[:, split:]
        x = numbers[:, :split]
        table = cls(x, f, inputs, label=label, duplicates=duplicates, tolerance=tolerance)
        table.remarks = (*remarks, *table.remarks)
        return table

    def _set_grid(
        self, nodes: tuple[np.ndarray, ...], f: np.ndarray, names: tuple[str, ...], output_shape: tuple[int, ...]
    ) -> None:
        self._points, self.grid = None, nodes
        self._set(f, names, output_shape, [float(axis[0]) for axis in nodes], [float(axis[-1]) for axis in nodes])

    def _set(
        self, f: np.ndarray, names: tuple[str, ...], output_shape: tuple[int, ...], lo: list[float], hi: list[float]
    ) -> None:
        self.values, self.output_shape = f, output_shape
        self.box = Box.parse(list(zip(lo, hi, strict=True)), names)
        self.input_shapes = ((len(names),),)
        for array in (self.values, *(() if self._points is None else (self._points,)), *(self.grid or ())):
            array.flags.writeable = False
        self.assumptions = (
            f"the claim is about the table's {self.num_points:,} points alone, every one of which was checked; between "
            "them nothing is claimed",
        )

    @property
    def points(self) -> Float[np.ndarray, "points d"]:
        """All points. Those of a grid are written out when they are first asked for.

        Examples
        --------
        >>> import attnc
        >>> attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0]).points.tolist()
        [[0.0], [1.0]]
        """
        if self._points is None:
            self._points = self.rows_at(np.arange(self.num_points))[0]
            self._points.flags.writeable = False
        return self._points

    def rows_at(self, rows: np.ndarray | slice) -> tuple[Points, Values]:
        """Return the points and values of chosen rows.

        Parameters
        ----------
        rows : array of int or slice
            The numbers of the rows.

        Returns
        -------
        tuple of two arrays
            The points (rows, d) and the values (rows, outputs).

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> points, values = table.rows_at(slice(0, 1))
        >>> points.tolist(), values.tolist()
        ([[0.0]], [[2.0]])
        """
        if self._points is not None:
            return self._points[rows], self.values[rows]
        assert self.grid is not None
        chosen = np.arange(self.num_points)[rows] if isinstance(rows, slice) and self.num_points < 2**16 else rows
        if isinstance(chosen, slice):
            chosen = np.arange(*chosen.indices(self.num_points))
        places = np.unravel_index(chosen, tuple(map(len, self.grid)))
        return np.stack([axis[k] for axis, k in zip(self.grid, places, strict=True)], axis=1), self.values[rows]

    @property
    def num_points(self) -> int:
        """The number of distinct points.

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> table.num_points
        2
        """
        return len(self.values)

    @property
    def is_known_on_cells(self) -> bool:
        return False

    @property
    def num_check_points(self) -> int:
        return self.num_points

    def check_blocks(self) -> Iterator[tuple[Points, Values]]:
        for start in range(0, self.num_points, BLOCK_ROWS):
            yield self.rows_at(slice(start, min(self.num_points, start + BLOCK_ROWS)))

    def largest_value(self, points: Points) -> float:
        return max(float(self.values.max()), -float(self.values.min()))

    def __call__(self, points: Points) -> Values:
        """Look up the values in the table. Raise InputError for other points."""
        if points is self._points:
            return self.values
        points = np.asarray(points, np.float64) + 0.0
        _, first, which = np.unique(
            np.concatenate([self.points, points]), axis=0, return_index=True, return_inverse=True
        )
        rows = first[which.ravel()[self.num_points :]]  # the first row with the same numbers, in the table if possible
        outside = rows >= self.num_points
        if outside.any():
            where = show_point(self.box.names, points[np.argmax(outside)])
            raise InputError(f"the {self.describe()} has no value at {where}, which is not one of its points")
        return self.values[rows]

    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        raise InputError(
            f"a {self.describe()} has no values between its points, so no bound over a box follows from it. Use a "
            "construction made for tables (construction='auto'), or give an expression or a function."
        )

    def describe(self) -> str:
        return f"table of {self.num_points:,} points"


def _numbers(what: str, given: Any) -> np.ndarray:
    """Return a float64 array of one or two axes."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise InputError(f"the {what} of a table do not form an array: rows differ in length") from None
    if array.dtype.kind not in "fiub":
        found = _first_non_number(array)
        raise InputError(f"the {what} of a table must be real numbers; found {found}")
    if array.ndim not in (1, 2):
        wanted = "(N,) or (N, d)" if what == "points" else "(N,) or (N, k)"
        raise InputError(f"the {what} of a table have shape {wanted}; found {array.shape}")
    return array.astype(np.float64)


def _listed(names: Sequence[str] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _columns(names: Sequence[str] | None, d: int) -> tuple[str, ...]:
    if not 1 <= d <= MAX_COLUMNS:
        raise InputError(f"a table has 1 to {MAX_COLUMNS} input columns; the points have {d}")
    return _names(names, d)


def _as_grid(x: np.ndarray, f: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray] | None:
    """Return the nodes and the values in C order if the points are all points of a tensor grid, each of them once."""
    if x.shape[1] == 1:
        column = x[:, 0]
        is_ascending = bool((column[1:] > column[:-1]).all())
        order = None if is_ascending else np.argsort(column)
        column = column.copy() if order is None else column[order]
        return None if (column[1:] == column[:-1]).any() else ((column,), f if order is None else f[order])
    nodes = [np.zeros(0)] * x.shape[1]
    for start in range(0, len(x), BLOCK_ROWS):
        nodes = [
            np.union1d(known, column) for known, column in zip(nodes, x[start : start + BLOCK_ROWS].T, strict=True)
        ]
        if math.prod(map(len, nodes)) > len(x):
            return None
    if math.prod(map(len, nodes)) != len(x):
        return None
    is_there, values = np.zeros(len(x), bool), np.empty_like(f)
    for start in range(0, len(x), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        places = [np.searchsorted(axis, column) for axis, column in zip(nodes, x[rows].T, strict=True)]
        places_in_order = np.ravel_multi_index(places, tuple(map(len, nodes)))
        is_there[places_in_order] = True
        values[places_in_order] = f[rows]
    return (tuple(nodes), values) if is_there.all() else None


def _sorted_order(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the order of the rows by the first column, then by the next, and whether the first column has no number
    twice. Equal rows keep their order."""
    if len(x) > SORT_AT_ONCE:
        order = _packed_order(np.ascontiguousarray(x[:, 0]))
        first = x[:, 0].take(order)
        if (first[1:] > first[:-1]).all():
            return order, True
    return np.lexsort(x.T[::-1]), False


def _packed_order(numbers: Float[np.ndarray, " rows"]) -> np.ndarray:
    """Return the order of numbers. Each is rounded down to a whole number, and sorted together with its row.

    Integers of 64 bits that hold both are sorted in a third of the time that indices take. Numbers that are rounded to
    the same whole number are then put in order.
    """
    bits = len(numbers).bit_length()
    lo, hi = float(numbers.min()), float(numbers.max())
    scale = (2.0 ** (62 - bits)) / (hi - lo) if hi > lo else 0.0
    if not 0 < scale < math.inf:
        return np.argsort(numbers, kind="stable")
    packed = ((numbers - lo) * scale).astype(np.int64)
    packed <<= bits
    packed |= np.arange(len(numbers))
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    same = packed[1:] == packed[:-1]
    if same.any():
        places = np.flatnonzero(np.concatenate([same, [False]]) | np.concatenate([[False], same]))
        rows = order[places]
        order[places] = rows[np.lexsort((rows, numbers[rows], packed[places]))]
    return order


def _merged(
    x: np.ndarray,
    f: np.ndarray,
    is_repeated: np.ndarray,
    names: tuple[str, ...],
    label: Callable[[int], str],
    duplicates: str,
    tolerance: float,
) -> tuple[np.ndarray, str | None]:
    """Return one row of values for each point of sorted rows, and a remark if rows differ. `label` names a sorted row.

    Raise InputError if values at one point differ, and `duplicates` and `tolerance` do not allow it.
    """
    starts = np.flatnonzero(np.concatenate([[True], ~is_repeated]))
    low, high = np.minimum.reduceat(f, starts), np.maximum.reduceat(f, starts)
    apart = (high - low).max(axis=1)
    count = int((apart > 0).sum())
    if not count:
        return f[starts], None
    where = f"{count:,} point{'' if count == 1 else 's'} with values up to {apart.max():.3g} apart"
    if duplicates == "first":
        return f[starts], f"{where}: the first row counts."
    if duplicates == "mean":
        sizes = np.diff(np.append(starts, len(f)))[:, None]
        # The middle of equal values is exact; a mean of three of them may round.
        means = np.where(low == high, low, np.add.reduceat(f, starts) / sizes)
        return means, f"{where}: their mean counts."
    if apart.max() > tolerance:
        _require_agreement(x, f, is_repeated, names, label)
    return np.where(low == high, low, low / 2 + high / 2), f"{where}, within eps: the middle counts."


def _first_non_number(array: np.ndarray) -> str:
    for index, value in np.ndenumerate(array):
        if isinstance(value, complex | np.complexfloating) or not isinstance(value, int | float | np.number):
            return f"{value!r:.40} in row {index[0] if index else 0}"
    return f"an array of {array.dtype}"


def _names(given: Sequence[str] | None, d: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"x{i}" for i in range(d))
    names = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(f"names: every column of the points needs a name; found {names!r:.80}")
    if len(names) != d:
        raise InputError(f"names: {len(names)} name(s) for {d} column(s) of points")
    if len(set(names)) < d:
        raise InputError(f"names: every column needs a name of its own; found {', '.join(names)}")
    return names


def _require_finite(array: np.ndarray, columns: list[str], what: str, label: Callable[[int], str]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum()):  # a sum of finite numbers may overflow, and others make no finite sum
            return
    bad = ~np.isfinite(array)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        count = int(bad.any(axis=1).sum())
        raise InputError(
            f"the {what} of a table must be finite; found {array[row, column]} in {label(int(row))}, "
            f"{columns[column]}. Leave {'this row' if count == 1 else f'such rows (there are {count:,})'} out."
        )


def _require_agreement(
    x: np.ndarray, f: np.ndarray, is_repeated: np.ndarray, names: tuple[str, ...], label: Callable[[int], str]
) -> None:
    """Raise InputError if sorted rows state two values for one point. `label` names a sorted row."""
    differs = is_repeated & (f[1:] != f[:-1]).any(axis=1)
    if not differs.any():
        return
    i = int(np.argmax(differs))
    column = int(np.argmax(f[i + 1] != f[i]))
    output = f" in output {column}" if f.shape[1] > 1 else ""
    count = int(differs.sum())
    more = "" if count == 1 else f" (and {count - 1:,} more such pair{'' if count == 2 else 's'})"
    raise InputError(
        f"{label(i)} and {label(i + 1)} are one point, {show_point(names, x[i])}, with two values, "
        f"{f[i, column]:.17g} and {f[i + 1, column]:.17g}{output}{more}: no function has both. Keep one, or their mean."
    )
