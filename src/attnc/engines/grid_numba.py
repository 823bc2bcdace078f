"""Contract a grid by compiled loops. This module imports numba, so it is imported only where numba is installed.

As in `grid.Tiles`, points are sorted by group and taken in tiles, whose points share a window of values. The arrays of
a tile stay in the fastest cache, and loops over its points are vectorised. Indices are unsigned, because numba wraps
negative ones around, and then does not vectorise the loop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnc.engines.exponential_numba import exponential, inlined, kept
from attnc.engines.grid_axis import LEAST_EXPONENT, WindowedAxis
from attnc.numerics.arrays import Float, Int

if TYPE_CHECKING:
    from attnc.engines.grid import GridTables

POINTS_PER_TILE = 64
"""Number of points of a tile. With a window of 16 places their weights take 8 KiB and stay in the fastest cache."""
PLACES_PER_BLOCK = 4
"""Number of rows and of columns that are contracted together. Blocks of four by four numbers fit into the registers."""
ANY_ORDER = {"contract", "reassoc", "nsz"}
"""Sums of products may be taken in any order, as everywhere else. Nothing else may be rearranged."""


class _Axes(NamedTuple):
    """The axes of a grid for compiled loops: numbers and rows of numbers per axis, padded with zeros."""

    widths: Int[np.ndarray, " axes"]
    strides: Int[np.ndarray, " axes"]  # of the padded values
    groups: Int[np.ndarray, " axes"]
    has_table: Int[np.ndarray, " axes"]
    starts: Int[np.ndarray, "axes most_groups"]
    slopes: Float[np.ndarray, "axes most_places"]
    offsets: Float[np.ndarray, "axes most_places"]
    table: Float[np.ndarray, "axes most_entries"]
    floor: float  # smallest exponent; not a global, because compiled code does not follow changes of globals

    @classmethod
    def of(cls, axes: tuple[WindowedAxis, ...]) -> _Axes:
        strides = [math.prod(axis.padded for axis in axes[i + 1 :]) for i in range(len(axes))]
        tables = [np.zeros(0) if axis.table is None else axis.table.ravel() for axis in axes]
        has_table = [axis.table is not None for axis in axes]
        numbers = ([axis.width for axis in axes], strides, [axis.num_groups for axis in axes], has_table)
        integers = [np.array(part, np.uint64) for part in (*numbers, _rows([axis.starts for axis in axes]))]
        slopes, offsets = _rows([axis.slopes for axis in axes]), _rows([axis.offsets for axis in axes])
        return cls._make([*integers, slopes, offsets, _rows(tables), LEAST_EXPONENT])


def _rows(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the arrays as the rows of one array, padded with zeros."""
    longest = max(map(len, arrays))
    return np.stack([np.pad(array, (0, longest - len(array))) for array in arrays])


class CompiledTiles:
    """Computes the same averages as `grid.Tiles`. It overwrites the array of arguments."""

    def __init__(self, grid: GridTables, split: int) -> None:
        """Multiply out the first `split` axes to the rows of a tile, and the others to its columns."""
        self._axes, self._arrays, self._split = grid.axes, _Axes.of(grid.axes), np.uint64(split)
        self._values = np.moveaxis(grid.padded_values(), -1, 0).reshape(grid.values.shape[-1], -1).copy()
        strides, widths = self._arrays.strides, self._arrays.widths
        self._rows, self._columns = _places(strides[:split], widths[:split]), _places(strides[split:], widths[split:])
        self._num_groups = math.prod(axis.num_groups for axis in grid.axes)

    def __call__(self, t: Float[np.ndarray, "axes batch"]) -> Float[np.ndarray, "columns batch"]:
        ids = np.zeros(t.shape[1], np.uint32)
        for axis, row in zip(self._axes, t, strict=True):
            number = (axis.origin, axis.inverse, float(axis.first), float(axis.last), axis.kappa)
            _locate(row, *number, axis.table is not None, np.uint32(axis.num_groups), ids)
            if axis.table is not None:
                np.exp(row, out=row)
        ends, order = _sort(ids, self._num_groups)
        out = np.empty((len(self._values), t.shape[1]))
        _average(t, ends, order, self._values, self._arrays, self._split, self._rows, self._columns, out)
        return out


def _places(strides: np.ndarray, widths: np.ndarray) -> Int[np.ndarray, " places"]:
    """Return the places of a window's values, relative to the first. Places without weight fill the last block."""
    places = np.zeros(1, np.uint64)
    for stride, width in zip(strides, widths, strict=True):
        places = (places[:, None] + np.arange(width, dtype=np.uint64) * stride).ravel()
    return np.concatenate([places, np.zeros(-len(places) % PLACES_PER_BLOCK, np.uint64)])


def _locate_points(
    t: Any, origin: Any, inverse: Any, first: Any, last: Any, kappa: Any, has_table: Any, num_groups: Any, ids: Any
) -> None:
    """Set ids ← ids·num_groups + group. Where the axis has a table, t becomes the logarithm of E."""
    for q in range(len(t)):
        y = min(max((t[q] - origin) * inverse, first), last)
        whole = min(math.floor(y), last - 1.0)
        ids[q] = ids[q] * num_groups + np.uint32(whole - first)
        if has_table:
            t[q] = (y - whole - 0.5) * kappa


def _sort_groups(ids: Any, num_groups: Any) -> Any:
    """Return the end of every group, and the points in the order of the groups."""
    ends, order = np.zeros(num_groups, np.int64), np.empty(len(ids), np.uint32)
    for q in range(len(ids)):
        ends[ids[q]] += 1
    total = 0
    for group in range(num_groups):
        total += ends[group]
        ends[group] = total - ends[group]
    for q in range(len(ids)):
        order[ends[ids[q]]] = q
        ends[ids[q]] += 1
    return ends, order


def _powers(axes: Any, axis: Any, own: Any, factors: Any, points: Any, weights: Any, sums: Any) -> None:
    """Set weights[j] = table[own, j]·factor^j, where `own` is the group."""
    width, table = axes.widths[axis], axes.table[axis]
    one = np.uint64(1)
    for b in range(points):
        weights[0, b], sums[b] = 1.0, 0.0
    for j in range(one, width):
        for b in range(points):
            weights[j, b] = weights[j - one, b] * factors[axis, b]
    for j in range(width):
        a = table[own * width + j]
        for b in range(points):
            weight = weights[j, b] * a
            weights[j, b] = weight
            sums[b] += weight


def _exponentials(axes: Any, axis: Any, start: Any, t: Any, points: Any, weights: Any, sums: Any) -> None:
    """Set weights[j] = exp(slope_j·t + offset_j − the largest), at least e^floor."""
    width, slopes, offsets = axes.widths[axis], axes.slopes[axis], axes.offsets[axis]
    least, top = math.exp(axes.floor), np.empty(POINTS_PER_TILE)
    for b in range(points):
        top[b], sums[b] = -np.inf, 0.0
    for j in range(width):
        a, c = slopes[start + j], offsets[start + j]
        for b in range(points):
            score = a * t[axis, b] + c
            weights[j, b] = score
            top[b] = max(top[b], score)
    for j in range(width):
        for b in range(points):
            score = weights[j, b] - top[b]
            weight = exponential(score) if score > axes.floor else least
            weights[j, b] = weight
            sums[b] += weight


def _multiply_out(weights: Any, width: Any, rows: Any, count: Any, points: Any) -> None:
    """rows[r·width + j] ← rows[r]·weights[j] for r < count, from the end: no row is overwritten before it is read."""
    one = np.uint64(1)
    for r in range(count):
        source = count - one - r
        for j in range(width):
            place = width - one - j
            for b in range(points):
                rows[source * width + place, b] = rows[source, b] * weights[place, b]


def _contract(
    values: Any, column: Any, base: Any, rows: Any, columns: Any, left: Any, right: Any, points: Any, out: Any
) -> None:
    """out[b] = Σ_{r,k} values[base + rows[k] + columns[r]]·left[k, b]·right[r, b], in blocks of four by four."""
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    for b in range(points):
        out[b] = 0.0
    for r in range(np.uint64(0), np.uint64(len(columns)), four):
        i, j = base + columns[r], base + columns[r + one]
        m, n = base + columns[r + two], base + columns[r + three]
        for k in range(np.uint64(0), np.uint64(len(rows)), four):
            p, q, s, t = rows[k], rows[k + one], rows[k + two], rows[k + three]
            ip, iq, is_, it = values[column, i + p], values[column, i + q], values[column, i + s], values[column, i + t]
            jp, jq, js, jt = values[column, j + p], values[column, j + q], values[column, j + s], values[column, j + t]
            mp, mq, ms, mt = values[column, m + p], values[column, m + q], values[column, m + s], values[column, m + t]
            np_, nq, ns, nt = values[column, n + p], values[column, n + q], values[column, n + s], values[column, n + t]
            for b in range(points):
                w, x, y, z = left[k, b], left[k + one, b], left[k + two, b], left[k + three, b]
                sums = (ip * w + iq * x + is_ * y + it * z) * right[r, b]
                sums += (jp * w + jq * x + js * y + jt * z) * right[r + one, b]
                sums += (mp * w + mq * x + ms * y + mt * z) * right[r + two, b]
                sums += (np_ * w + nq * x + ns * y + nt * z) * right[r + three, b]
                out[b] += sums


_powers, _contract = inlined(_powers, ANY_ORDER), inlined(_contract, ANY_ORDER)
_exponentials, _multiply_out = inlined(_exponentials), inlined(_multiply_out)


def _average_groups(
    arguments: Any, ends: Any, order: Any, values: Any, axes: Any, split: Any, rows: Any, columns: Any, out: Any
) -> None:
    d, one = np.uint64(len(arguments)), np.uint64(1)
    given, weights = np.ones((d, POINTS_PER_TILE)), np.empty((np.max(axes.widths), POINTS_PER_TILE))
    left, right = np.zeros((len(rows), POINTS_PER_TILE)), np.zeros((len(columns), POINTS_PER_TILE))
    right[0] = 1.0
    totals, sums, mixed = np.empty(POINTS_PER_TILE), np.empty(POINTS_PER_TILE), np.empty(POINTS_PER_TILE)
    begin = 0
    for group in range(len(ends)):
        for tile in range(begin, ends[group], POINTS_PER_TILE):
            count = min(POINTS_PER_TILE, ends[group] - tile)
            points = np.uint64((count + 7) // 8 * 8)
            for i in range(d):
                for b in range(count):
                    given[i, b] = arguments[i, order[tile + b]]
            base, rest, stride, num_rows = np.uint64(0), np.uint64(group), np.uint64(len(ends)), one
            for i in range(d):
                stride //= axes.groups[i]
                own = rest // stride
                rest -= own * stride
                width, start = axes.widths[i], axes.starts[i, own]
                base += start * axes.strides[i]
                is_first = i == 0 or i == split
                side = left if i < split else right
                target = side if is_first else weights
                if axes.has_table[i]:
                    _powers(axes, i, own, given, points, target, sums)
                else:
                    _exponentials(axes, i, start, given, points, target, sums)
                if not is_first:
                    _multiply_out(weights, width, side, num_rows, points)
                num_rows = width if is_first else num_rows * width
                for b in range(points):
                    totals[b] = sums[b] if i == 0 else totals[b] * sums[b]
            for column in range(np.uint64(len(values))):
                _contract(values, column, base, rows, columns, left, right, points, mixed)
                for b in range(count):
                    out[column, order[tile + b]] = mixed[b] / totals[b]
        begin = ends[group]


_locate, _sort, _average = kept(_locate_points), kept(_sort_groups), kept(_average_groups)


def product_of_weights(a: Float[np.ndarray, "1 n"], b: Float[np.ndarray, "1 n"]) -> Float[np.ndarray, "1 n"]:
    """Return a·b entry by entry, by the compiled products of weights: for `attnc doctor`."""
    one, rows = np.uint64(1), a.copy()
    _multiply_out(b, one, rows, one, np.uint64(a.shape[1]))
    return rows
