"""Dyadic cells of a box: at level n every side is cut into 2ⁿ equal parts, and cells are named by integers."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def cells(d: int, level: int) -> Int[np.ndarray, "cells d"]:
    """All cells of a level, neighbours near each other: children of one parent are adjacent."""
    index = np.zeros((1, d), dtype=np.int64)
    for _ in range(level):
        index = children(index)
    return index


def children(index: Int[np.ndarray, "cells d"]) -> Int[np.ndarray, "children d"]:
    """The 2^d halves of every cell, one level down, cell by cell."""
    d = index.shape[1]
    corners = np.array(list(itertools.product((0, 1), repeat=d)), dtype=np.int64).reshape(-1, d)
    return (2 * index[:, None] + corners).reshape(-1, d)


def cell_boxes(
    box: Box, level: int, index: Int[np.ndarray, "cells d"]
) -> tuple[Float[np.ndarray, "cells d"], Float[np.ndarray, "cells d"]]:
    """Centres c and radii r in float64: {c + rτ : τ ∈ [−1, 1]^d} contains the cell, and is larger by rounding alone."""
    centres, radii = np.empty(index.shape), np.empty(index.shape)
    for axis, (lo, hi) in enumerate(zip(box.lo.tolist(), box.hi.tolist(), strict=True)):
        distinct, where = np.unique(index[:, axis], return_inverse=True)
        centres[:, axis], radii[:, axis] = _covering(lo, hi, level, distinct)[:, where.ravel()]
    return centres, radii


def _covering(lo: float, hi: float, level: int, index: Int[np.ndarray, " cells"]) -> Float[np.ndarray, "2 cells"]:
    """Floats near the middles, and the least floats from which both ends are within reach.

    With middles (2i + 1)·step from lo: where step, product and sum are exact in floating point, that is all there is
    to do; elsewhere ends and middles are integers over a power of two.
    """
    width = hi - lo
    step = width / 2.0 ** (level + 1)
    odd = 2 * index + 1
    (num, den), (num_hi, den_hi) = lo.as_integer_ratio(), hi.as_integer_ratio()
    scale = max(den, den_hi)
    exact_width = num_hi * (scale // den_hi) - num * (scale // den)
    is_easy = np.zeros(len(index), dtype=bool)
    found = np.empty((2, len(index)))
    num_width, den_width = width.as_integer_ratio() if math.isfinite(width) else (0, 1)
    if step > 2.0**-1000 and num_width * scale == exact_width * den_width:
        bits = num_width.bit_length() - (num_width & -num_width).bit_length() + 1  # of its odd part
        steps = step * odd
        found[0], found[1] = lo + steps, step
        back = found[0] - steps  # TwoSum, whose error is 0 where the sum is exact
        is_easy = (odd < 2.0 ** (53 - bits)) & (((lo - back) + (steps - (found[0] - back))) == 0)
    for i in np.flatnonzero(~is_easy).tolist():
        found[:, i] = _covering_exactly(num * (scale // den), exact_width, scale, level, int(index[i]))
    return found


def _covering_exactly(start: int, width: int, scale: int, level: int, i: int) -> tuple[float, float]:
    """The same for one cell of [start, start + width]/scale; both floats are multiples of the finest unit here."""
    whole = scale << (level + 1)
    left = (start << (level + 1)) + 2 * width * i
    centre = (left + width) / whole
    num, den = centre.as_integer_ratio()
    middle = num * (whole // den)
    reach = max(left + 2 * width - middle, middle - left)
    radius = reach / whole
    num, den = radius.as_integer_ratio()
    return centre, radius if num * (whole // den) >= reach else math.nextafter(radius, math.inf)
