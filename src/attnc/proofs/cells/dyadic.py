"""Dyadic cells of a box: at level n every side is cut into 2ⁿ parts, and cells are named by integers.

The parts of a side are equal, unless it has knots (`GradedBox`): then cells may be narrow across one variable alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import up
from attnc.targets.box import Box

Knots = tuple[tuple[float, ...], ...]
"""For each variable, points inside of the box in ascending order: none, or 2^k − 1."""
CELLS_PER_REGION = 8
"""Least number of cells of a region, so that the sizes of regions differ by an eighth at most."""
_INDEX_BITS = 56  # a level and an index below 2^56 are one number of 63 bits: levels are below 128


@dataclass(frozen=True, eq=False)
class GradedBox(Box):
    """A box whose sides have knots: 2^k − 1 points at which a side is cut at level k. Deeper cells are equal parts."""

    knots: Knots

    @classmethod
    def of(cls, box: Box, knots: Knots) -> GradedBox:
        return cls(box.names, box.lo, box.hi, knots)


def _segments(box: Box, axis: int) -> list[float]:
    """The ends of a side and its knots."""
    inner = box.knots[axis] if isinstance(box, GradedBox) else ()
    return [float(box.lo[axis]), *inner, float(box.hi[axis])]


def volumes(box: Box, level: Int[np.ndarray, " cells"], index: Int[np.ndarray, "cells d"]) -> np.ndarray:
    """Return the volumes of cells in units of that of the box, rounded up. Without knots they are exact powers of 2."""
    if not isinstance(box, GradedBox):
        return np.ldexp(1.0, -box.d * level)
    found = np.ones(len(index))
    for axis in range(box.d):
        ends = np.array(_segments(box, axis))
        depth = (len(ends) - 1).bit_length() - 1
        above, below = np.maximum(depth - level, 0), np.maximum(level - depth, 0)
        first = (index[:, axis] << above) >> below
        widths = up(ends[first + (1 << above)] - ends[first]) / (ends[-1] - ends[0])
        found = up(found * up(np.ldexp(widths, -below), 2))
    return found


def cells(d: int, level: int) -> Int[np.ndarray, "cells d"]:
    """Return all cells of a level. Children of one parent are adjacent."""
    index = np.zeros((1, d), dtype=np.int64)
    for _ in range(level):
        index = children(index)
    return index


@dataclass(frozen=True)
class Region:
    """The cells `first` to `after` − 1 of a level, in the order of `cells`."""

    level: int
    first: int
    after: int

    def cells(self, d: int, level: int) -> Int[np.ndarray, "cells d"]:
        """Return the cells of a level, which is that of the region or a finer one, in the region."""
        number = np.arange(self.first, self.after)
        index = np.zeros((len(number), d), dtype=np.int64)
        for depth in range(self.level):
            for axis in range(d):
                index[:, axis] |= (number >> (d * depth + d - 1 - axis) & 1) << depth
        for _ in range(level - self.level):
            index = children(index)
        return index

    def share(self, d: int) -> float:
        """Return the volume of the region in units of that of the box."""
        return (self.after - self.first) / 2.0 ** (d * self.level)

    @staticmethod
    def numbers(index: Int[np.ndarray, "cells d"], level: int) -> Int[np.ndarray, " cells"]:
        """Return the numbers of cells in the order of `cells`."""
        d = index.shape[1]
        number = np.zeros(len(index), dtype=np.int64)
        for depth in range(level):
            for axis in range(d):
                number |= (index[:, axis] >> depth & 1) << (d * depth + d - 1 - axis)
        return number


def regions(d: int, count: int) -> list[Region]:
    """Divide a box into regions of nearly equal size: at least CELLS_PER_REGION cells each."""
    level = next(level for level in itertools.count(1) if 1 << d * level >= CELLS_PER_REGION * count)
    whole = 1 << d * level
    return [Region(level, whole * k // count, whole * (k + 1) // count) for k in range(count)]


def children(index: Int[np.ndarray, "cells d"]) -> Int[np.ndarray, "children d"]:
    """Return the 2^d cells of the next level in every cell, cell by cell."""
    d = index.shape[1]
    corners = np.array(list(itertools.product((0, 1), repeat=d)), dtype=np.int64).reshape(-1, d)
    return (2 * index[:, None] + corners).reshape(-1, d)


def cell_boxes(
    box: Box, level: int | Int[np.ndarray, " cells"], index: Int[np.ndarray, "cells d"]
) -> tuple[Float[np.ndarray, "cells d"], Float[np.ndarray, "cells d"]]:
    """Return centres c and radii r in float64. {c + rτ : τ ∈ [−1, 1]^d} is the cell, enlarged by rounding only.

    `level` is one number for all cells, or one for each.
    """
    centres, radii = np.empty(index.shape), np.empty(index.shape)
    first_of_level = np.full(len(index), level, np.int64) << _INDEX_BITS
    for axis in range(box.d):
        ratios = [end.as_integer_ratio() for end in _segments(box, axis)]
        scale = max(den for _, den in ratios)  # all are powers of two
        ends = [num * (scale // den) for num, den in ratios]
        distinct, where = np.unique(first_of_level + index[:, axis], return_inverse=True)
        cells_there = zip(*(part.tolist() for part in np.divmod(distinct, 1 << _INDEX_BITS)), strict=True)
        found = [_covering(_at(ends, n, i), _at(ends, n, i + 1), scale << n) for n, i in cells_there]
        centres[:, axis], radii[:, axis] = np.array(found).reshape(-1, 2)[where.ravel()].T
    return centres, radii


def _at(ends: Sequence[int], level: int, i: int) -> int:
    """Return the point between the parts i − 1 and i of 2^level parts of a side, times 2^level."""
    segment, rest = divmod(i * (len(ends) - 1), 1 << level)
    inside = (ends[segment + 1] - ends[segment]) * rest if rest else 0
    return (ends[segment] << level) + inside


def _covering(left: int, right: int, scale: int) -> tuple[float, float]:
    """Return the float nearest to the middle of [left, right]/scale, and the smallest float radius to both ends.

    Ends, middles and the two floats are integers over the same power of two, so the comparison is exact.
    """
    whole = 2 * scale
    centre = (left + right) / whole
    num, den = centre.as_integer_ratio()
    middle = num * (whole // den)
    reach = max(2 * right - middle, middle - 2 * left)
    radius = reach / whole
    num, den = radius.as_integer_ratio()
    return centre, radius if num * (whole // den) >= reach else math.nextafter(radius, math.inf)
