"""The errors of heads with their signs: on a leaf, head − g is in [middle − radius, middle + radius].

A leaf states `bound` and `middle`, and its radius is bound − |middle|. So |head − g| ≤ bound follows. Errors of several
heads that reach an output may cancel, and with signs their sum is as small as it is: Σ_s σ_s d_s on a part of the box
is in the sum of the products of intervals. Leaves are narrow enough that an error hardly changes its sign within one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF, up
from attnc.proofs.cells.branching import Covering
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import SHARP, Bounds
from attnc.proofs.kinds.gradient import GradientKind
from attnc.proofs.kinds.taylor import TaylorKind, taylor_bounds
from attnc.proofs.margins import LEAF_ROOM
from attnc.targets.expressions.taylor import Taylor

SIGNED_LEVEL = 7
"""Leaves with signs are at most a 128th of the interval of t."""
SIGNED_SHARE = 2.0**-10
"""No radius is stated to be smaller than this share of the worst bound: see `LEAST_SHARE`."""
SAMPLES = 9  # points of a leaf at which its middle is sampled
TOWARDS_ZERO = 1 - 2.0**-9
"""Factor on middles. With it the larger end of head − g is that of the leaf without a middle, and no bound grows."""

Differences = Callable[[np.ndarray], np.ndarray]
"""A function from points (points, 1) to head − g there, (points,), up to rounding."""
Shifted = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""A function of (centres, radii, middles) that returns bounds of |head − g − middle| on cells."""


def signed_leaves(
    proof: Covering, differences: Differences, shifted: Shifted
) -> tuple[Covering, Float[np.ndarray, " cells"]]:
    """Return narrow leaves, each with its bound, and the middles of all. No bound is above the largest before."""
    cells = proof.cells.cut(np.maximum(0, SIGNED_LEVEL - proof.cells.level))
    centres, radii = cell_boxes(proof.box, cells.level, cells.index)
    points = centres + radii * np.linspace(-1, 1, SAMPLES)
    seen = differences(points.reshape(-1, 1)).reshape(points.shape)
    middles = TOWARDS_ZERO * (seen.min(axis=1) / 2 + seen.max(axis=1) / 2)
    radius = np.maximum(shifted(centres, radii, middles), SIGNED_SHARE * proof.cells.upper.max())
    bounds = up(np.abs(middles) + radius)
    is_better = bounds <= proof.cells.upper.max()  # False for nan
    upper = np.where(is_better, bounds, cells.upper[:, 0])[:, None]
    kind = np.where(is_better, 0, cells.kind)
    cells = dataclasses.replace(cells, upper=upper, kind=kind)
    return dataclasses.replace(proof, cells=cells), np.where(is_better, middles, 0.0)


def shifted_values(kind: TaylorKind) -> Shifted:
    """Return bounds of |head − g − middle|."""

    def bounds(centres: np.ndarray, radii: np.ndarray, middles: np.ndarray) -> np.ndarray:
        f = _plus(kind.model(centres, radii, kind.degree), middles)
        return _largest(taylor_bounds(kind.stage, f, centres, radii, kind.degree)) * (1 + LEAF_ROOM)

    return bounds


def shifted_slopes(kind: GradientKind) -> Shifted:
    """Return the same bounds for slopes, rounding included."""

    def bounds(centres: np.ndarray, radii: np.ndarray, middles: np.ndarray) -> np.ndarray:
        return _largest(kind.of_model(_plus(kind.model(centres, radii), middles), centres, radii, SHARP))

    return bounds


def _largest(found: Bounds) -> np.ndarray:
    return np.asarray(found.upper[:, 0])


def _plus(f: Taylor, middles: Float[np.ndarray, " boxes"]) -> Taylor:
    """Return the polynomials of f + middle."""
    mid, radius = f.mid.copy(), f.radius.copy()
    mid[:, 0, 0] += middles
    radius[:, 0, 0] = up(radius[:, 0, 0] + 2 * UNIT_ROUNDOFF["float64"] * np.abs(mid[:, 0, 0]))
    return Taylor(mid, radius, f.remainder)
