"""Cells as intervals, and affine functions over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import Enclosed
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float


def interval(enclosed: Enclosed) -> Interval:
    """The smallest interval of floats around every number."""
    return Interval(-up(enclosed.radius - enclosed.mid), up(enclosed.mid + enclosed.radius))


def cells_within(box: Box, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Interval:
    """The boxes centre ± radius, cut off at the box, beyond which rounding may have moved them."""
    lo, hi = (Interval.point(centres) - radii).lo, (Interval.point(centres) + radii).hi
    return Interval(np.maximum(lo, box.lo), np.minimum(hi, box.hi))


def distance(values: Interval, others: Interval) -> Float[np.ndarray, "*shape"]:
    """The largest |s − t| of members."""
    return np.asarray(np.maximum(up(values.hi - others.lo), up(others.hi - values.lo)))


def affine_range(values: Interval, slopes: Interval, cells: Interval) -> Interval:
    """values + Σ_i slopes_i·x_i over cells (n, d), for values (n, outputs) and slopes (n, outputs, d)."""
    total = values
    for axis in range(cells.shape[1]):
        total = total + slopes[..., axis] * cells[:, None, axis]
    return total
