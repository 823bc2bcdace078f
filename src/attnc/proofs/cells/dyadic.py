"""Dyadic cells of a box: at level n every side is cut into 2ⁿ equal parts, and cells are named by integers."""

from __future__ import annotations

import itertools
import math

import numpy as np

from attnc.numerics.arrays import Float, Int
from attnc.targets.box import Box

_INDEX_BITS = 56  # a level and an index below 2^56 are one number of 63 bits: levels are below 128


def cells(d: int, level: int) -> Int[np.ndarray, "cells d"]:
    """Return all cells of a level. Children of one parent are adjacent."""
    index = np.zeros((1, d), dtype=np.int64)
    for _ in range(level):
        index = children(index)
    return index


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
    for axis, (lo, hi) in enumerate(zip(box.lo.tolist(), box.hi.tolist(), strict=True)):
        (start, den), (end, den_hi) = lo.as_integer_ratio(), hi.as_integer_ratio()
        scale = max(den, den_hi)  # both are powers of two
        start, end = start * (scale // den), end * (scale // den_hi)
        distinct, where = np.unique(first_of_level + index[:, axis], return_inverse=True)
        cells_there = zip(*(part.tolist() for part in np.divmod(distinct, 1 << _INDEX_BITS)), strict=True)
        found = [_covering(start, end - start, scale, *cell) for cell in cells_there]
        centres[:, axis], radii[:, axis] = np.array(found).reshape(-1, 2)[where.ravel()].T
    return centres, radii


def _covering(start: int, width: int, scale: int, level: int, i: int) -> tuple[float, float]:
    """Return the float nearest to the middle of cell i of [start, start + width]/scale, and a radius to both ends.

    The radius is the smallest float that reaches both ends. Ends, middles and the two floats are integers over the same
    power of two, so the comparison is exact.
    """
    whole = scale << (level + 1)
    left = (start << (level + 1)) + 2 * width * i
    centre = (left + width) / whole
    num, den = centre.as_integer_ratio()
    middle = num * (whole // den)
    reach = max(left + 2 * width - middle, middle - left)
    radius = reach / whole
    num, den = radius.as_integer_ratio()
    return centre, radius if num * (whole // den) >= reach else math.nextafter(radius, math.inf)
