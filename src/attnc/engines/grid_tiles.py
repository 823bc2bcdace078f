"""A grid contracted in numpy: points of one group of every axis share a window of values, and one matrix product.

Points are sorted by group and cut into tiles of equally many; a group's last tile repeats its last point. Of a tile's
weights, those of the first axes are multiplied out to the rows of one matrix, so that the values of the window, as a
matrix, contract them all at once; the other axes follow.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.engines.grid_axis import FLOOR, Axis

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from attnc.engines.grid import Grid

CELLS_PER_BATCH = 2**18
"""Of the arrays of the tiles that are worked on together, 2 MiB: with fewer, Python between them takes longer."""
LARGE_WINDOW = 2**13
"""With smaller windows most calls are so short that threads only wait for each other's: these take turns."""
LARGEST_TILE = 128
PRODUCT_SIZE = 2**18
"""Of one matrix product: a larger one starts threads of BLAS, which would compete with those of the engine."""


class Tiles:
    def __init__(self, grid: Grid) -> None:
        self._axes, self._columns = grid.axes, grid.values.shape[-1]
        widths = [axis.width for axis in grid.axes]
        d = len(widths)
        # Multiplying out the first s axes makes math.prod(widths[:s]) rows; the product then leaves the others'.
        self.split = min(range(1, d + 1), key=lambda s: math.prod(widths[:s]) + self._columns * math.prod(widths[s:]))
        self._rows, self._rest = math.prod(widths[: self.split]), math.prod(widths[self.split :])
        order = (*range(self.split, d), d, *range(self.split))
        values = np.ascontiguousarray(grid.padded_values().transpose(order))
        window = tuple(self._columns if axis == d else widths[axis] for axis in order)
        self._windows = np.lib.stride_tricks.sliding_window_view(values, window)
        self.num_groups = math.prod(axis.num_groups for axis in grid.axes)
        self._cells = sum(widths) + self._rows + 2 * self._columns * self._rest
        is_large = self._rows * self._rest * self._columns >= LARGE_WINDOW
        self._turn: AbstractContextManager[Any] = nullcontext() if is_large else Lock()

    def __call__(self, t: Float[np.ndarray, "axes batch"]) -> Float[np.ndarray, "columns batch"]:
        """The averages over the grid of each column of values."""
        with self._turn:
            return self._averaged(t)

    def _averaged(self, t: Float[np.ndarray, "axes batch"]) -> Float[np.ndarray, "columns batch"]:
        out = np.empty((self._columns, t.shape[1]))
        if not t.shape[1]:
            return out
        ids: Any = np.zeros(t.shape[1], np.uint16 if self.num_groups < 2**16 else np.int64)  # short ones sort faster
        arguments = []
        for axis, row in zip(self._axes, t, strict=True):
            group, argument = _locate(axis, row)
            ids *= ids.dtype.type(axis.num_groups)
            ids += group.astype(ids.dtype)
            arguments.append(argument)
        places, groups = _tiles(ids)
        per_batch = max(1, CELLS_PER_BATCH // (self._cells * places.shape[1]))
        for i in range(0, len(groups), per_batch):
            where = places[i : i + per_batch]
            of_axes = np.unravel_index(groups[i : i + per_batch], [axis.num_groups for axis in self._axes])
            out[:, where] = self._averages(of_axes, [argument[where] for argument in arguments]).swapaxes(0, 1)
        return out

    def _averages(
        self, groups: tuple[np.ndarray, ...], arguments: list[Float[np.ndarray, "tiles points"]]
    ) -> Float[np.ndarray, "tiles columns points"]:
        tiles, points = arguments[0].shape
        weights = [_weights(*parts) for parts in zip(self._axes, groups, arguments, strict=True)]
        totals = weights[0].sum(axis=1)
        for weight in weights[1:]:
            totals *= weight.sum(axis=1)
        rows = _multiplied_out(weights[: self.split])
        starts = [axis.starts[group] for axis, group in zip(self._axes, groups, strict=True)]
        if self.num_groups == 1:  # one window for all tiles
            starts = [start[:1] for start in starts]
        window = self._windows[(*starts[self.split :], 0, *starts[: self.split])]
        matrices = window.reshape(len(window), self._rest * self._columns, self._rows)
        sums = np.empty((tiles, self._rest * self._columns, points))
        step = max(4, PRODUCT_SIZE // matrices[0].size)
        for start in range(0, points, step):
            piece = slice(start, start + step)
            np.matmul(matrices, rows[..., piece], out=sums[..., piece])
        sums = sums.reshape(tiles, self._rest, self._columns, points)
        if self.split < len(weights):
            averages = np.einsum("brcp,brp->bcp", sums, _multiplied_out(weights[self.split :]))
        else:
            averages = sums[:, 0]
        averages /= totals[:, None]
        return averages


def _locate(
    axis: Axis, t: Float[np.ndarray, " batch"]
) -> tuple[Int[np.ndarray, " batch"], Float[np.ndarray, " batch"]]:
    """The group of every point, counted from 0, and E (with a table) or t."""
    if axis.num_groups == 1:
        return np.zeros(len(t), np.int64), t
    y = t - axis.origin
    y *= axis.inverse
    np.clip(y, axis.first, axis.last, out=y)
    group = np.floor(y)
    np.minimum(group, axis.last - 1, out=group)
    if axis.table is None:
        return (group - axis.first).astype(np.int64), t
    y -= group
    y -= 0.5
    y *= axis.kappa
    return (group - axis.first).astype(np.int64), np.exp(y, out=y)


def _tiles(ids: Int[np.ndarray, " batch"]) -> tuple[Int[np.ndarray, "tiles points"], Int[np.ndarray, " tiles"]]:
    """Positions of the points of every tile, and its group."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[begins[1:], len(ids)]
    size = min(LARGEST_TILE, 2 ** math.ceil(math.log2(len(ids) / len(begins))))
    counts = -(-(ends - begins) // size)
    of_tile = np.repeat(np.arange(len(begins)), counts)
    number = np.arange(len(of_tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = (begins[of_tile] + number * size)[:, None] + np.arange(size)
    np.minimum(places, ends[of_tile, None] - 1, out=places)
    return order[places], ordered[begins][of_tile].astype(np.int64)


def _weights(
    axis: Axis, group: Int[np.ndarray, " tiles"], argument: np.ndarray
) -> Float[np.ndarray, "tiles width points"]:
    weights = np.empty((len(group), axis.width, argument.shape[1]))
    if axis.table is None:
        places = axis.starts[group][:, None] + np.arange(axis.width)
        np.multiply(axis.slopes[places][..., None], argument[:, None], out=weights)
        weights += axis.offsets[places][..., None]
        weights -= weights.max(axis=1, keepdims=True)
        np.maximum(weights, FLOOR, out=weights)
        return np.exp(weights, out=weights)
    weights[:, 0] = 1.0
    weights[:, 1] = argument
    done, factor = 2, argument
    while done < axis.width:  # E^0 … E^{done−1}, times E^done
        factor = factor * factor
        more = min(done, axis.width - done)
        np.multiply(weights[:, :more], factor[:, None], out=weights[:, done : done + more])
        done += more
    weights *= axis.table[group][..., None]
    return weights


def _multiplied_out(weights: list[Any]) -> Float[np.ndarray, "tiles rows points"]:
    rows = weights[0]
    for weight in weights[1:]:
        rows = (rows[:, :, None] * weight[:, None]).reshape(len(rows), rows.shape[1] * weight.shape[1], rows.shape[2])
    return rows
