"""A grid whose head selects the nearest centre: its leak, its temperature, and its builder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.constructions.construction import Estimate
from attnc.constructions.fitting.cell_head import CellHead
from attnc.constructions.fitting.grid_partition import (
    CELL_OVERHANG,
    CellGrid,
    Counts,
    GridBuilder,
    GridPartition,
    variation_norm,
)
from attnc.constructions.fitting.selection import CellSelection, bytes_per_anchor, far_weight, score_error
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

CELL_OVERHANG_LP = 2.0**-14
"""CELL_OVERHANG for L_p norms, where a whole jump is lost on a layer of this width about the borders of cells."""
OVERHANGS = (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Values of η, in cells, that are compared for a given β: about a factor of four apart."""


class NearestCentres(GridPartition):
    """A grid in which the nearest centre wins: the scores are −β|y − L|², up to a term that all cells share.

    The weights factorise over the axes. Centres farther than ρ from y on some axis get together at most the weight
    `leak` (`selection.far_weight`, summed over the axes).
    """

    @cached_property
    def selection(self) -> CellSelection:
        delta = _score_error(self.target, self.grid, self.beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, math.floor(1 + 2 * self.eta) + 1) for count in self.grid.counts)
        return CellSelection(delta, _leak(self.grid, self.beta, self.eta, delta), near)

    @property
    def head(self) -> CellHead:
        """Return the head with bias = −|L|²."""
        grid = self.grid
        index = np.unravel_index(np.arange(grid.num_cells), grid.counts)
        anchors = np.stack([grid.lattice(axis)[i] for axis, i in enumerate(index)], axis=1)
        cells = SoftHead(2 * anchors, -(anchors**2).sum(axis=1), self.stored_values)
        return CellHead(self.target, grid.dtype, grid.scale, grid.offset, cells, self.beta, self.positions)


def _score_error(target: Target, grid: CellGrid, beta: float, margin: float) -> float:
    """Return δ of the scores, which are the sum of 2βL_i·y_i over the axes, −β|L|², and M.

    An axis of the second input is on the side of the keys. Its 2L_i(scale·x_i + offset) is multiplied out there, so
    the sizes of both parts count. Four more roundings than usual cover the making of these coefficients.
    """
    reach = grid.radius + 0.5 + grid.query_error
    if len(target.input_shapes) > 1:
        start = math.prod(target.input_shapes[0])
        reach[start:] = (grid.scale * grid.box.magnitude + np.abs(grid.offset))[start:]
    with quiet():
        size = beta * float((2 * grid.radius * reach + grid.radius**2).sum()) + margin
    return score_error(grid.box.d + 6, size, UNIT_ROUNDOFF[grid.dtype])


def _leak(grid: CellGrid, beta: float, eta: float, delta: float) -> float:
    """Bound the weight of all centres farther than ½ + η on some axis, by a sum over the axes."""
    overhang = float(grid.query_error.max())  # at the ends of the box r may exceed ½ by this much
    if eta <= overhang:
        return 1.0
    return min(1.0, sum(far_weight(beta, 0.5 + eta, count, delta, overhang) for count in grid.counts))


@dataclass(frozen=True, eq=False)
class NearestCentresBuilder(GridBuilder[NearestCentres]):
    """The builder of one head that selects the nearest centre of a grid. `make` turns the head into a program."""

    make: Callable[[CellHead], Program]

    def cost(self, counts: Counts) -> tuple[int, int]:
        anchors = self.positions.n * math.prod(counts)
        return anchors, anchors * bytes_per_anchor(self.target, self.request)

    def eta(self, grid: CellGrid) -> float:
        """Return an η of at least twice the error of a score per unit of β, so that a large β always separates."""
        overhang = CELL_OVERHANG if self.request.p == math.inf else CELL_OVERHANG_LP
        return max(overhang, 2 * _score_error(self.target, grid, 1.0, 0.0), 2 * float(grid.query_error.max()))

    def partition(self, grid: CellGrid, values: Float[np.ndarray, "cells outputs"]) -> NearestCentres:
        request, spread = self.request, float(np.ptp(values, axis=0).max())
        if request.beta is None:
            eta = self.eta(grid)
            beta = _sufficient_beta(spread or 1.0, grid, eta, request.eps)
        else:
            beta, eta = request.beta, self._best_eta(grid, request.beta, spread)
        return NearestCentres(self.target, grid, values, beta, eta, self.positions, request.p)

    def program(self, partition: NearestCentres) -> Program:
        return self.make(partition.head)

    def estimate(self) -> Estimate:
        n, target = self.positions.n, self.target
        anchors, outputs = n * math.prod(self.estimated_counts()), target.num_outputs // n
        return Estimate.one_layer(self.name, anchors, target.box.d, outputs, self.request.goal).within(self.request)

    def _best_eta(self, grid: CellGrid, beta: float, spread: float) -> float:
        """Return the η with the smallest variation + leak for a given β."""
        best, chosen = math.inf, CELL_OVERHANG
        for eta in OVERHANGS:
            total = _leak(grid, beta, eta, 0.0) * spread
            if total < best and eta <= 2 * max(grid.counts):
                total += variation_norm(self.target, grid, 0.5 + eta, self.request.p).value
                best, chosen = (total, eta) if total < best else (best, chosen)
        return chosen


def _sufficient_beta(spread: float, grid: CellGrid, eta: float, eps: float | None) -> float:
    """Return a β for which leak·osc is below 0.2 % of eps (or of the variation).

    leak ≈ e^{−β(2η − 2δ)}, with δ ≤ η/2 per unit of β.
    """
    goal = 0.002 * (eps if eps is not None else spread / max(grid.counts))
    ratio = min(1e300, spread / max(goal, 1e-300))
    beta = max(math.log(max(2.0, 64 * grid.box.d * ratio)) / eta, 4.0)
    return 2.0 ** math.ceil(math.log2(beta))  # a power of two: 2βL and β|L|² are then exact
