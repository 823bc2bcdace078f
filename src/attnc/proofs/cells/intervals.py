"""Cells as intervals, and affine functions over them."""

from __future__ import annotations

import numpy as np

from attnc.ir.soft_head import Enclosed
from attnc.numerics.arrays import Bool, Float
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import up
from attnc.targets.box import Box


def around(centres: np.ndarray, radii: np.ndarray) -> Interval:
    """Return the smallest intervals of floats around centre ± radius. Where the radius is 0 it is the centre alone."""
    return Interval.point(centres) + Interval(-radii, radii)


def interval(enclosed: Enclosed) -> Interval:
    """Return the smallest interval of floats around every number."""
    return around(enclosed.mid, enclosed.radius)


def centred(cells: Interval) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    """Return centres, and radii that reach both ends."""
    centres = cells.mid
    with quiet():
        return centres, up(np.maximum(cells.hi - centres, centres - cells.lo))


def cells_within(box: Box, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Interval:
    """Return the boxes centre ± radius, cut off at the ends of `box`: rounding may have moved them beyond it."""
    cells = around(centres, radii)
    return Interval(np.maximum(cells.lo, box.lo), np.minimum(cells.hi, box.hi))


def hull(cells: Interval) -> Interval:
    """Return the smallest interval around all entries along the first axis, which keeps length 1."""
    return Interval(cells.lo.min(axis=0, keepdims=True), cells.hi.max(axis=0, keepdims=True))


def distance(values: Interval, others: Interval) -> Float[np.ndarray, "*shape"]:
    """Return the largest |s − t| for s in `values` and t in `others`."""
    return np.asarray(np.maximum(up(values.hi - others.lo), up(others.hi - values.lo)))


def is_same_number(one: Interval, other: Interval) -> Bool[np.ndarray, "*shape"]:
    """Return where both intervals are points, and the same point."""
    return np.asarray((one.lo == one.hi) & (other.lo == other.hi) & (one.lo == other.lo))


def affine_range(values: Interval, slopes: Interval, cells: Interval) -> Interval:
    """Enclose values + Σ_i slopes_i·x_i over cells (n, d), for values (n, outputs) and slopes (n, outputs, d)."""
    total = values
    for axis in range(cells.shape[1]):
        total = total + slopes[..., axis] * cells[:, None, axis]
    return total
