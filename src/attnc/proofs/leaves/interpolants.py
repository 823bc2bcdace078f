"""Leaves for functions of which only values are known, and how steep or how curved they can be.

On every cell f is its multilinear interpolant at the cell's corners, up to what was given allows (the theorem is that
of `FunctionTarget`), and the network its Taylor polynomial. Corners are floats of the box between which the cell lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.jet_tables import monomials
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Bounds, Kind
from attnc.proofs.leaves.deviations import cells_within
from attnc.proofs.leaves.kinds import model_bounds
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.expressions.taylor import Taylor
from attnc.targets.function_target import FunctionTarget

if TYPE_CHECKING:
    from jaxtyping import Float

ORDERS = (2, 3, 4, 6)
"""Of the network's polynomial: cells are so small for f that more does not pay. One in d variables has degree d."""


def interpolant_kind(stage: OneStage, target: FunctionTarget, order: int) -> Kind:
    def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        return model_bounds(stage, interpolant(target, centres, radii, order), centres, radii, order, goal)

    return Kind("interpolant", order, bounds)


def interpolant(
    target: FunctionTarget, centres: Float[np.ndarray, "cells d"], radii: Float[np.ndarray, "cells d"], order: int
) -> Taylor:
    """f(c + rτ) = Σ_{j ∈ {0,1}^d} p_j τ^j ± what was given allows, with enclosed p_j."""
    n, d = centres.shape
    cells = cells_within(target.box, centres, radii)
    lo, hi, c, r = (Interval.point(array) for array in (cells.lo, cells.hi, centres, radii))
    start, slope = (c - lo) / (hi - lo), r / (hi - lo)  # (x − a)/(b − a) = start + slope·τ
    coefficients: dict[tuple[int, ...], Interval] = {
        (): Interval.point(target.corners(cells).reshape(n, *[2] * d, target.num_outputs))
    }
    for axis in range(d):
        at = (slice(None), axis, *[None] * (d - axis))
        split: dict[tuple[int, ...], Interval] = {}
        for power, values in coefficients.items():
            below, change = values[:, 0], values[:, 1] - values[:, 0]
            split[*power, 0], split[*power, 1] = below + change * start[at], change * slope[at]
        coefficients = split
    rows = {tuple(power): row for row, power in enumerate(monomials(d, order).tolist())}
    mid, radius = np.zeros((2, n, target.num_outputs, len(rows)))
    for power, found in coefficients.items():
        mid[..., rows[power]] = found.mid
        radius[..., rows[power]] = up(np.maximum(found.hi - found.mid, found.mid - found.lo))
    remainder = np.repeat(target.interpolation_error(cells)[:, None], target.num_outputs, axis=1)
    return Taylor(mid, radius, remainder)
