"""A table: points, and the values of the function there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.target import Target, show_point

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values

MAX_COLUMNS = 3
"""Maximum number of input columns. Ten nodes per axis are a thousand points in three columns, and a million in six."""


class TableTarget(Target):
    """A table of points and values. The rows may be in any order.

    A certificate for a table bounds the error at these points, and all points are checked. Nothing is claimed between
    them. The box is the bounding box of the points. Equal rows are merged.

    Parameters
    ----------
    points : array (N,) or (N, d)
        The points, of at most three coordinates.
    values : array (N,) or (N, k)
        The values at the points.
    names : sequence of str, optional
        The names of the coordinates: x0, x1, … by default.
    label : callable, optional
        Maps a row number to its name in messages. The default is "row 3"; a table from a file names lines.

    Attributes
    ----------
    points, values : array
        The rows, sorted by the first column, then by the next.
    grid : tuple of array or None
        The nodes of every axis if the points form a whole tensor grid.

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

    points: Float[np.ndarray, "points d"]
    values: Float[np.ndarray, "points outputs"]
    grid: tuple[Float[np.ndarray, " nodes"], ...] | None
    kind = "TableTarget"

    def __init__(
        self,
        points: Any,
        values: Any,
        names: Sequence[str] | None = None,
        *,
        label: Callable[[int], str] = "row {}".format,
    ) -> None:
        x, f = _numbers("points", points), _numbers("values", values)
        if len(x) != len(f):
            raise InputError(f"a table needs a row of values for each point; found {len(x):,} points, {len(f):,} rows")
        if len(x) < 2:
            raise InputError(f"a table needs at least two points; found {len(x)}")
        self.output_shape = f.shape[1:]
        x, f = x.reshape(len(x), -1), f.reshape(len(f), -1)
        if not 1 <= x.shape[1] <= MAX_COLUMNS:
            raise InputError(f"a table has 1 to {MAX_COLUMNS} input columns; the points have {x.shape[1]}")
        if not f.shape[1]:
            raise InputError("a table needs at least one column of values; found none")
        columns = _names(names, x.shape[1])
        _require_finite(x, [f"column {name}" for name in columns], "points", label)
        _require_finite(f, [f"output {j}" for j in range(f.shape[1])], "values", label)
        for name, column in zip(columns, x.T, strict=True):
            if column.min() == column.max():
                raise InputError(
                    f"column {name} is {column[0]:g} in all {len(x):,} rows: nothing depends on it. Leave this column "
                    "out of the points."
                )
        x = x + 0.0  # −0 becomes 0
        order = np.lexsort(x.T[::-1])
        x, f = x[order], f[order]
        is_repeated = (x[1:] == x[:-1]).all(axis=1)
        _require_agreement(x, f, is_repeated, columns, lambda i: label(int(order[i])))
        is_first = np.concatenate([[True], ~is_repeated])
        self.points, self.values = x[is_first], f[is_first]
        self.box = Box.parse(list(zip(x.min(axis=0).tolist(), x.max(axis=0).tolist(), strict=True)), columns)
        self.input_shapes = ((x.shape[1],),)
        nodes = tuple(np.unique(column) for column in self.points.T)
        # Distinct points of a grid form the whole grid if they are as many. Sorted, they are in its order.
        self.grid = nodes if np.prod([float(len(axis)) for axis in nodes]) == self.num_points else None
        for array in (self.points, self.values, *nodes):
            array.flags.writeable = False
        self.assumptions = (
            f"the claim is about the table's {self.num_points:,} points alone, every one of which was checked; between "
            "them nothing is claimed",
        )

    @property
    def num_points(self) -> int:
        """The number of distinct points."""
        return len(self.points)

    @property
    def is_known_on_cells(self) -> bool:
        return False

    def check_points(self) -> Float[np.ndarray, "points d"]:
        return self.points

    def __call__(self, points: Points) -> Values:
        """Look up the values in the table. Raise InputError for other points."""
        if points is self.points:
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
