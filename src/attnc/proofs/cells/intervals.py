"""Cells as intervals, and affine functions over them."""

from __future__ import annotations

import numpy as np

from attnc.ir.soft_head import Enclosed
from attnc.numerics.arrays import Bool, Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box


def around(centres: np.ndarray, radii: np.ndarray) -> Interval:
    """The smallest intervals of floats around centre ± radius; exactly the centre where the radius is 0."""
    return Interval.point(centres) + Interval(-radii, radii)


def interval(enclosed: Enclosed) -> Interval:
    """The smallest interval of floats around every number."""
    return around(enclosed.mid, enclosed.radius)


def centred(cells: Interval) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    """Centres, and radii that reach both ends."""
    centres = cells.mid
    with np.errstate(over="ignore"):
        return centres, up(np.maximum(cells.hi - centres, centres - cells.lo))


def cells_within(box: Box, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Interval:
    """The boxes centre ± radius, cut off at the box, beyond which rounding may have moved them."""
    cells = around(centres, radii)
    return Interval(np.maximum(cells.lo, box.lo), np.minimum(cells.hi, box.hi))


def hull(cells: Interval) -> Interval:
    """The smallest interval around all of the first axis, which stays with length 1."""
    return Interval(cells.lo.min(axis=0, keepdims=True), cells.hi.max(axis=0, keepdims=True))


def distance(values: Interval, others: Interval) -> Float[np.ndarray, "*shape"]:
    """The largest |s − t| of members."""
    return np.asarray(np.maximum(up(values.hi - others.lo), up(others.hi - values.lo)))


def is_same_number(one: Interval, other: Interval) -> Bool[np.ndarray, "*shape"]:
    """Where both intervals are one and the same number."""
    return np.asarray((one.lo == one.hi) & (other.lo == other.hi) & (one.lo == other.lo))


def affine_range(values: Interval, slopes: Interval, cells: Interval) -> Interval:
    """values + Σ_i slopes_i·x_i over cells (n, d), for values (n, outputs) and slopes (n, outputs, d)."""
    total = values
    for axis in range(cells.shape[1]):
        total = total + slopes[..., axis] * cells[:, None, axis]
    return total
