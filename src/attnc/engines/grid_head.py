"""A grid as a head of the numpy engine: from variables to coordinates, and the way to the averages."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.grid import Grid, recognise
from attnc.engines.grid_tiles import Tiles
from attnc.ir.normal_form import FoldedHead

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

WORK_WORTH = 2**28
"""Compiled code is made, or loaded, once this much work has been done without it: a second or two, as that takes."""
MOST_GROUPS = 2**20
"""Compiled code counts the points of every group."""


def grid_head(head: FoldedHead) -> GridHead | None:
    """The head evaluated axis by axis, or None if it is no grid."""
    grid = recognise(head)
    return None if grid is None else GridHead(head, grid)


class _Compiling:
    def __init__(self) -> None:
        self.work_done = 0

    @cached_property
    def is_possible(self) -> bool:
        return importlib.util.find_spec("numba") is not None

    def is_worth(self, work: int) -> bool:
        if self.work_done < WORK_WORTH:
            self.work_done += work
            return False
        return self.is_possible


COMPILING = _Compiling()
"""One for all heads of a process: they share the code."""


class GridHead:
    """A head as `streaming` runs them. `truncation[o]` bounds what its output o may be off by, beyond the rounding of a
    plain evaluation, before W_O."""

    def __init__(self, head: FoldedHead, grid: Grid) -> None:
        self.grid = grid
        largest = np.abs(head.values.constant.toarray()).max(axis=0, initial=0.0).astype(np.float64)
        self.truncation: Float[np.ndarray, " d_v"] = np.nextafter(grid.truncation * largest, np.inf)
        self._dtype = head.W_O.dtype
        self._coordinates = [_Coordinate.of(head, feature) for feature in grid.features]
        others = np.setdiff1d(np.flatnonzero(np.diff(head.queries.linear.indptr)), grid.features)
        self._others = [_Coordinate.of(head, feature) for feature in others.tolist()]
        self._limits = [1e300 / max(1.0, np.abs(axis.slopes).max()) for axis in grid.axes]
        self._tiles = Tiles(grid)
        widths, columns = [axis.width for axis in grid.axes], grid.values.shape[-1]
        self.work_per_point = 16 + sum(widths) + columns * math.prod(widths) // 64  # a product is that much cheaper
        self.cells_per_point = 3 * len(widths) + 4 + 2 * columns

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch one d_v"]:
        t = np.empty((len(self._coordinates), len(u)))
        for row, coordinate in zip(t, self._coordinates, strict=True):
            coordinate(u, row)
        is_lost = self._tame(u, t)
        is_compiled = self._tiles.num_groups <= MOST_GROUPS and COMPILING.is_worth(len(u) * self.work_per_point)
        averages = self._compiled(t) if is_compiled else self._tiles(t)
        if self.grid.is_weighted:
            averages = averages[:-1] / averages[-1]
        if is_lost is not None:
            averages[:, is_lost] = np.nan
        return np.ascontiguousarray(averages.T, self._dtype)[:, None]

    @cached_property
    def _compiled(self) -> Callable[[Float[np.ndarray, "axes batch"]], Float[np.ndarray, "columns batch"]]:
        from attnc.engines.grid_numba import Compiled

        return Compiled(self.grid, self._tiles.split)

    def _tame(self, u: np.ndarray, t: Float[np.ndarray, "axes batch"]) -> Bool[np.ndarray, " batch"] | None:
        """Cuts t to where scores are finite; returns which points are not finite, and so have no scores, if any."""
        others = np.empty((len(self._others), len(u)))
        for row, coordinate in zip(others, self._others, strict=True):
            coordinate(u, row)
        limited = [*zip(t, self._limits, strict=True), *((row, 1e300) for row in others)]
        if all(-limit <= row.min(initial=0.0) and row.max(initial=0.0) <= limit for row, limit in limited):
            return None
        is_lost = ~(np.isfinite(t).all(axis=0) & np.isfinite(others).all(axis=0))
        for row, limit in zip(t, self._limits, strict=True):
            row[is_lost] = 0.0
            np.clip(row, -limit, limit, out=row)
        return is_lost


@dataclass(frozen=True)
class _Coordinate:
    """One entry of the query: Σ coefficient·u + constant."""

    variables: tuple[int, ...]
    coefficients: tuple[float, ...]
    constant: float

    @classmethod
    def of(cls, head: FoldedHead, feature: int) -> _Coordinate:
        row = head.queries.linear[[feature]].tocoo()
        constant = float(head.queries.constant.toarray()[0, feature])
        return cls(tuple(row.coords[1].tolist()), tuple(map(float, row.data)), constant)

    def __call__(self, u: Float[np.ndarray, "batch variables"], out: Float[np.ndarray, " batch"]) -> None:
        np.multiply(u[:, self.variables[0]], self.coefficients[0], out=out, dtype=np.float64)
        for variable, coefficient in zip(self.variables[1:], self.coefficients[1:], strict=True):
            out += np.multiply(u[:, variable], coefficient, dtype=np.float64)
        out += self.constant
