"""Cells, and how far a target is from an affine function on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import Enclosed
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def interval(enclosed: Enclosed) -> Interval:
    return Interval(-up(enclosed.radius - enclosed.mid), up(enclosed.mid + enclosed.radius))


def cells_within(box: Box, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Interval:
    """The boxes centre ± radius, without what rounding would add to them outside the box."""
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


def deviation(
    target: Target, outputs: Int[np.ndarray, " outputs"], cells: Interval, values: Interval, slopes: Interval | None
) -> Float[np.ndarray, "cells outputs"]:
    """Upper bounds of |f(x) − values − slopes·x| over the cells, for these outputs of the target.

    By the ranges of both; and, where gradients G of an expression are known, by the mean value form
    |f(c) − values − slopes·c| + Σ_i |G_i − slopes_i|·reach_i, which knows that both move together.
    """
    by_range = target.enclosure(cells)[:, outputs]
    if slopes is None:
        return distance(by_range, values)
    bounds = distance(by_range, affine_range(values, slopes, cells))
    if not isinstance(target, ExpressionTarget):
        return bounds
    gradients = target.expression.ranges_and_gradients(cells, violations="infinite")[1][:, outputs]
    middle = cells.mid
    at_middle = Interval.point(middle)
    there = target.expression.ranges(at_middle, violations="infinite")[:, outputs]
    form = distance(there, affine_range(values, slopes, at_middle))
    reach = up(np.maximum(cells.hi - middle, middle - cells.lo))
    for axis in range(cells.shape[1]):
        steepness = (gradients[..., axis] - slopes[..., axis]).mag
        with np.errstate(invalid="ignore"):
            change = np.where(reach[:, None, axis] > 0, up(steepness * reach[:, None, axis]), 0.0)
        form = up(form + change)
    return np.minimum(bounds, form)
