"""Dyadic cells of a box: at level n every side is cut into 2ⁿ equal parts, and cells are named by integers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
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


def cell_ends(box: Box, level: int, index: Int[np.ndarray, " d"]) -> list[tuple[Fraction, Fraction]]:
    """The cell exactly: lo + (hi − lo)·[i, i + 1]/2ⁿ on every axis."""
    return [_ends(lo, hi, level, int(i)) for lo, hi, i in zip(box.lo.tolist(), box.hi.tolist(), index, strict=True)]


def cell_boxes(
    box: Box, level: int, index: Int[np.ndarray, "cells d"]
) -> tuple[Float[np.ndarray, "cells d"], Float[np.ndarray, "cells d"]]:
    """Centres c and radii r in float64: {c + rτ : τ ∈ [−1, 1]^d} contains the cell, and is larger by rounding alone."""
    centres, radii = np.empty(index.shape), np.empty(index.shape)
    for axis, (lo, hi) in enumerate(zip(box.lo.tolist(), box.hi.tolist(), strict=True)):
        distinct, where = np.unique(index[:, axis], return_inverse=True)
        found = [_covering(*_ends(lo, hi, level, int(i))) for i in distinct]
        centres[:, axis], radii[:, axis] = np.array(found).reshape(-1, 2).T[:, where]
    return centres, radii


def _ends(lo: float, hi: float, level: int, i: int) -> tuple[Fraction, Fraction]:
    start, width = Fraction(lo), Fraction(hi) - Fraction(lo)
    return start + width * Fraction(i, 2**level), start + width * Fraction(i + 1, 2**level)


def _covering(left: Fraction, right: Fraction) -> tuple[float, float]:
    """A float near the middle, and the least float from which both ends are within reach."""
    centre = float((left + right) / 2)
    reach = max(right - Fraction(centre), Fraction(centre) - left)
    radius = float(reach)
    return centre, radius if Fraction(radius) >= reach else math.nextafter(radius, math.inf)
