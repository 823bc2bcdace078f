"""Heads whose keys form a grid. Their softmax is a product of one softmax per axis.

A head is a grid if its scores are Σ_i a_{i,k_i}·t_i + c_k over all index tuples k. Here t_i are the entries of its
query that depend on the point, and c_k = Σ_i c_{i,k_i} + ρ_k with a small ρ. Then its weights are Π_i
softmax_i(t_i)_{k_i}, up to factors e^{ρ_k}. So p^d exponentials become d·p, or fewer (see `grid_axis`), and values are
contracted one axis after the other. The grid is read from the folded weights, whatever the order of the keys.

Arithmetic is float64, whatever the program's dtype. Its roundings are among those that `ir.rounding` allows for any
evaluation: those of t, a few more relative ones, and γ_2(|a t| + |c|) per axis in the scores. `truncation` bounds
everything else: it is a bound of Σ_k |weight used − weight|. It covers the weights that windows leave out, powers in
place of exponentials, d exponentials in place of one, ρ, and offsets that are larger one by one than in their sum.

Points that share a window of values on every axis form a group, and are contracted together. This is done in numpy
(`Tiles`), or by compiled loops (`grid_numba`) once there is enough work to pay for the compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.engines.grid_axis import LEAST_EXPONENT, WindowedAxis, make_axis
from attnc.ir.normal_form import FoldedHead
from attnc.ir.soft_head import SoftHead, unpacked
from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

FEWEST_KEYS = 64
"""Number of keys below which a plain softmax is as fast as a grid."""
MOST_RESIDUE = 5e-13
"""Largest |ρ| that is dropped and counted as truncation. A larger ρ is kept in two places: in the values, and in a
column of its own by which the averages are divided."""
LARGEST_RESIDUE = 4.0
"""Largest |ρ| of a grid. In float32 the rounding of large offsets alone may be near 1."""
MOST_TRUNCATION = 1e-12
"""Largest Σ|weight used − weight| at which a head is evaluated as a grid. It is far below the error of any
certificate."""
LARGEST_VALUE, LEAST_VALUE = 1e200, 1e-100
"""Limits of the largest |value| of an output, unless all its values are 0. The products of a value with weights before
normalisation are far from overflow. They may underflow: sums of such numbers, times e^200 (LARGEST_POWER_LOG), are far
below the truncation."""
LARGEST_SCORE = 1e300
"""Largest |slope·t|. Arguments are clipped so that scores stay below it, and none is infinite."""

MOST_GROUPS = 2**20
"""Maximum number of groups for compiled loops. They count the points of every group: 8 MiB of counts."""

CELLS_PER_BATCH = 2**19
"""Number of array cells of the tiles that are processed together: 4 MiB. Measured with windows of 26 × 20 and 26 × 28
places: a half takes 1.05 times as long, and a quarter 1.2 times, because more time goes into Python, where threads take
turns."""
TILE_SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of points of a tile. Weights of 128 points in a window of 16 places take 16 KiB, half of a first-level
cache."""
POINTS_PER_TILE_MADE = 16
"""The time that a tile takes whatever its size, in points. Measured with 40 points per group and windows of 26 × 20
places."""
POINTS_PER_GROUP = 60
"""The number of points of a group, on average, that a part of a batch should have in numpy. Measured with 4,000 and
6,000 groups, on a busy machine: a quarter of it takes about 1.2 times as long, twice as many take as long."""
PRODUCT_SIZE = 2**18
"""Maximum number of multiplications in one matrix product. A larger product starts BLAS threads, which compete with the
engine's own."""

U = UNIT_ROUNDOFF["float64"]


# --- from the folded weights to tables --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GridTables:
    """A grid of keys, axis by axis.

    If `is_weighted`, the last column of values is the weight e^ρ, which is also a factor of the other columns.

    In exact arithmetic, |evaluation − softmax| ≤ truncation · max_k |v_k|. In floating point, the error of a plain
    evaluation is added.
    """

    features: tuple[int, ...]  # the entries of the query, one per axis
    axes: tuple[WindowedAxis, ...]
    values: Float[np.ndarray, "*keys columns"]
    is_weighted: bool
    truncation: float

    @classmethod
    def of(cls, head: FoldedHead) -> GridTables | None:
        """Return the head as a grid.

        Return None if its keys form none, or if it has a mask, several queries or moving keys.
        """
        is_plain = head.mask is None and head.queries.shape[0] == 1 and head.values.shape[1] > 0
        if not (is_plain and head.keys.is_constant and head.values.is_constant and head.keys.shape[0] >= FEWEST_KEYS):
            return None
        soft, moves = head.over_queries(), np.diff(head.queries.linear.indptr) > 0
        keys = SoftHead(*(unpacked(part).astype(np.float64) for part in (soft.slopes, soft.offsets, soft.values)))
        features = keys.active[moves[keys.active]]
        keys = keys.shifted(np.where(moves, 0.0, head.queries.constant.toarray()[0].astype(np.float64)))
        grid = keys.restricted(features).as_grid() if len(features) else None
        if grid is None or grid.has_duplicates:
            return None
        split, d = grid.offsets_through_least(), len(features)
        if not np.abs(split.misfit).max() <= LARGEST_RESIDUE:
            return None
        values = keys.values[grid.keys]
        residue = float(up(np.ptp(split.misfit) / 2, 4))
        is_weighted = residue > MOST_RESIDUE
        # With P = Σ p_k e^{ρ_k}: Σ|p e^ρ/P − q e^ρ/Q| ≤ 2·max e^ρ·Σ|p − q|/P, and P ≥ min e^ρ.
        growth = 2 * math.exp(2 * residue) if is_weighted else 1.0
        axes = tuple(make_axis(a[:, 0], c, d, growth) for a, c in zip(grid.rows, split.lines, strict=True))
        size = -np.abs(grid.offsets)
        for along in np.ix_(*split.lines):
            size = size + np.abs(along)
        # Every axis adds an exponential, a sum, a quotient and a product. e^ρ adds the same.
        terms = [(d + 1) * (2 * LIBM_ULPS + 6) * U, gamma(d + 3, U) * float(max(0.0, size.max()))]
        if is_weighted:
            weights = np.exp(split.misfit)[..., None]
            values = np.concatenate([values * weights, weights], axis=-1)
        else:
            terms.append(residue)
        terms += [growth * axis.error for axis in axes]
        truncation = float(up(math.fsum(terms), 8))
        sizes = np.abs(values).max(axis=tuple(range(d)))
        is_held = ((sizes == 0) | (sizes > LEAST_VALUE) & (sizes < LARGEST_VALUE)).all()  # False for NaN as well
        if not (truncation <= MOST_TRUNCATION and is_held):
            return None
        return cls(tuple(features.tolist()), axes, values, is_weighted, truncation)

    def padded_values(self) -> Float[np.ndarray, "*padded columns"]:
        """Return the values, with zeros where no key is."""
        padded = np.zeros((*(axis.padded for axis in self.axes), self.values.shape[-1]))
        inside = [slice(axis.front, axis.front + p) for axis, p in zip(self.axes, self.values.shape, strict=False)]
        padded[tuple(inside)] = self.values
        return padded


# --- the head ---------------------------------------------------------------------------------------------------------


class GridHead:
    """A head of the numpy engine over a grid of keys.

    `truncation[o]` bounds the error of its output o, before W_O, beyond the rounding of a plain evaluation.
    """

    def __init__(self, head: FoldedHead, grid: GridTables) -> None:
        self.grid = grid
        largest = np.abs(unpacked(head.values.constants)).max(axis=0, initial=0.0).astype(np.float64)
        self.truncation: Float[np.ndarray, " d_v"] = np.nextafter(grid.truncation * largest, np.inf)
        self._dtype = head.W_O.dtype
        others = np.setdiff1d(np.flatnonzero(np.diff(head.queries.linear.indptr)), grid.features).tolist()
        moving = [*grid.features, *others]  # the entries that depend on the point; on the others, no two keys differ
        self._linear = head.queries.linear[moving].astype(np.float64)
        self._constants = head.queries.constant.toarray().T[moving].astype(np.float64)
        limits = [LARGEST_SCORE / max(1.0, np.abs(axis.slopes).max()) for axis in grid.axes]
        self._limits = np.array([*limits, *[LARGEST_SCORE] * len(others)])[:, None]
        self._tiles = Tiles(grid)
        widths, columns = [axis.width for axis in grid.axes], grid.values.shape[-1]
        # One multiplication of a matrix product costs about 1/64 of an exponential.
        self.work_per_point = 16 + sum(widths) + columns * math.prod(widths) // 64
        self.cells_per_point = 3 * len(widths) + 4 + 2 * columns
        self.fewest_points = POINTS_PER_GROUP * self._tiles.num_groups

    @classmethod
    def of(cls, head: FoldedHead) -> GridHead | None:
        """Return the head evaluated axis by axis, or None if its keys do not form a grid."""
        grid = GridTables.of(head)
        return None if grid is None else cls(head, grid)

    def __call__(
        self, u: Float[np.ndarray, "batch variables"], *, is_compiled: bool = False
    ) -> Float[np.ndarray, "batch one d_v"]:
        t = self._linear @ u.T.astype(np.float64, copy=False)
        t += self._constants
        is_lost = None
        if not ((-self._limits <= t) & (t <= self._limits)).all():
            is_lost = ~np.isfinite(t).all(axis=0)  # such points have no scores
            t[:, is_lost] = 0.0
            np.clip(t, -self._limits, self._limits, out=t)
        t = t[: len(self.grid.axes)]
        averages = self._compiled(t) if is_compiled and self._tiles.num_groups <= MOST_GROUPS else self._tiles(t)
        if self.grid.is_weighted:
            averages = averages[:-1] / averages[-1]
        if is_lost is not None:
            averages[:, is_lost] = np.nan
        return np.ascontiguousarray(averages.T, self._dtype)[:, None]

    @cached_property
    def _compiled(self) -> Callable[[Float[np.ndarray, "axes batch"]], Float[np.ndarray, "columns batch"]]:
        from attnc.engines.grid_numba import CompiledTiles

        return CompiledTiles(self.grid, self._tiles.split)


# --- contraction in numpy ---------------------------------------------------------------------------------------------


class Tiles:
    """The averages over a grid, in numpy.

    Points are sorted by group and cut into tiles of equal size. The last tile of a group repeats its last point. The
    weights of a tile on the first axes are multiplied out to the rows of one matrix. One product with the values of the
    window then contracts these axes, and the other axes follow.
    """

    def __init__(self, grid: GridTables) -> None:
        self._axes, self._columns = grid.axes, grid.values.shape[-1]
        widths = [axis.width for axis in grid.axes]
        d = len(widths)
        # Multiplying out the first s axes makes math.prod(widths[:s]) rows. The product leaves those of the other axes.
        self.split = min(range(1, d + 1), key=lambda s: math.prod(widths[:s]) + self._columns * math.prod(widths[s:]))
        self._rows, self._rest = math.prod(widths[: self.split]), math.prod(widths[self.split :])
        order = (*range(self.split, d), d, *range(self.split))
        values = np.ascontiguousarray(grid.padded_values().transpose(order))
        window = tuple(self._columns if axis == d else widths[axis] for axis in order)
        self._windows = np.lib.stride_tricks.sliding_window_view(values, window)
        self.num_groups = math.prod(axis.num_groups for axis in grid.axes)
        self._cells = sum(widths) + self._rows + 2 * self._columns * self._rest

    def __call__(self, t: Float[np.ndarray, "axes batch"]) -> Float[np.ndarray, "columns batch"]:
        """Return the averages over the grid of each column of values."""
        out = np.empty((self._columns, t.shape[1]))
        if not t.shape[1]:
            return out
        # Short integers sort faster.
        ids: Any = np.zeros(t.shape[1], np.uint16 if self.num_groups < 2**16 else np.int64)
        arguments = []
        for axis, row in zip(self._axes, t, strict=True):
            group, argument = _locate(axis, row)
            ids *= ids.dtype.type(axis.num_groups)
            ids += group.astype(ids.dtype)
            arguments.append(argument)
        places, groups = _tiles(ids)
        cells = self._cells * places.shape[1] + 2 * self._rows * self._rest * self._columns
        per_batch = max(1, CELLS_PER_BATCH // cells)
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
        if self.num_groups == 1:  # one window for all tiles
            groups = tuple(group[:1] for group in groups)
        starts = [axis.starts[group] for axis, group in zip(self._axes, groups, strict=True)]
        factors = [_factors(axis, group) for axis, group in zip(self._axes, groups, strict=True)]
        window = self._windows[(*starts[self.split :], 0, *starts[: self.split])]
        window = window.reshape(len(window), self._rest, self._columns, self._rows)
        totals = np.ones((tiles, 1, points))
        for factor, weight in zip(factors, weights, strict=True):
            totals *= factor.swapaxes(1, 2) @ weight
        # The points of a tile share the factors of the weights. So the values take them, if that is less work.
        if 2 * self._rows * self._rest * self._columns < points * sum(axis.width for axis in self._axes):
            window = window * _multiplied_out(factors[: self.split]).swapaxes(1, 2)[:, None]
            if self.split < len(weights):
                window *= _multiplied_out(factors[self.split :])[..., None]
        else:
            for factor, weight in zip(factors, weights, strict=True):
                weight *= factor
        rows = _multiplied_out(weights[: self.split])
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
        averages /= totals
        return averages


def _locate(
    axis: WindowedAxis, t: Float[np.ndarray, " batch"]
) -> tuple[Int[np.ndarray, " batch"], Float[np.ndarray, " batch"]]:
    """Return the group of every point, counted from 0, and the argument of the weights: E with a table, else t."""
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
    """Return the positions of the points of every tile, and its group."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[begins[1:], len(ids)]
    of_size = {size: -(-(ends - begins) // size) for size in TILE_SIZES}
    size, counts = min(of_size.items(), key=lambda item: item[1].sum() * (item[0] + POINTS_PER_TILE_MADE))
    of_tile = np.repeat(np.arange(len(begins)), counts)
    number = np.arange(len(of_tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = (begins[of_tile] + number * size)[:, None] + np.arange(size)
    np.minimum(places, ends[of_tile, None] - 1, out=places)
    return order[places], ordered[begins][of_tile].astype(np.int64)


def _weights(
    axis: WindowedAxis, group: Int[np.ndarray, " tiles"], argument: np.ndarray
) -> Float[np.ndarray, "tiles width points"]:
    """Return the weights of the places of a window, not normalised, and without their `_factors`."""
    weights = np.empty((len(group), axis.width, argument.shape[1]))
    if axis.table is None:
        places = axis.starts[group][:, None] + np.arange(axis.width)
        np.multiply(axis.slopes[places][..., None], argument[:, None], out=weights)
        weights += axis.offsets[places][..., None]
        weights -= weights.max(axis=1, keepdims=True)
        np.maximum(weights, LEAST_EXPONENT, out=weights)
        return np.exp(weights, out=weights)
    weights[:, 0] = 1.0
    weights[:, 1] = argument
    done, factor = 2, argument
    while done < axis.width:  # E^0 … E^{done−1}, times E^done
        factor = factor * factor
        more = min(done, axis.width - done)
        np.multiply(weights[:, :more], factor[:, None], out=weights[:, done : done + more])
        done += more
    return weights


def _factors(axis: WindowedAxis, group: Int[np.ndarray, " tiles"]) -> Float[np.ndarray, "tiles width one"]:
    """Return the factors of the weights that all points of a group share: the table, or ones."""
    return np.ones((len(group), axis.width, 1)) if axis.table is None else axis.table[group][..., None]


def _multiplied_out(weights: list[Any]) -> Float[np.ndarray, "tiles rows points"]:
    """Return the products of the weights of several axes, with the last axis running fastest."""
    rows = weights[0]
    for weight in weights[1:]:
        rows = (rows[:, :, None] * weight[:, None]).reshape(len(rows), rows.shape[1] * weight.shape[1], rows.shape[2])
    return rows
