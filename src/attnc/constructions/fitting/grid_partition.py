"""Partitions of the box into the cells of a grid: the choice of grid, temperature and values, and the bound."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from attnc.constructions.built import Built, require
from attnc.constructions.construction import Estimate, Request, finite_box, function, round_above
from attnc.constructions.fitting.cell_grid import CellGrid, GridSearch, Variation, constant_norm, variation_norm
from attnc.constructions.fitting.positions import Positions, bytes_per_anchor, num_positions
from attnc.constructions.fitting.search import least
from attnc.constructions.fitting.selection import CellSelection, round_up
from attnc.errors import BoundNotMet, InputError
from attnc.ir.program import Program
from attnc.numerics.bound import Bound, Term
from attnc.targets.box import show_intervals
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_CELLS_TRIED = 20_000
"""Largest grid, in cells, whose variation an estimate computes; larger grids are extrapolated. Chosen, not measured."""
MAX_GRID_VARIABLES = 10
"""Largest number of variables of a grid: two cells per axis are 1024 cells."""
CELL_OVERHANG = 1 / 128
"""η, in cells: how far beyond its cell a centre may still win. It costs 2η ≈ 1.6 % of the bound, and sets β."""
Counts = tuple[int, ...]
"""Numbers of cells per axis."""


@dataclass(frozen=True, eq=False)
class GridPartition(abc.ABC):
    """A grid with a value per cell, a temperature, and the proof of `bound`.

    Theorem.  Let `selection.leak` bound the weight of all cells that do not hold x when widened to ρ = ½ + η. Then
              |out − f| at x is at most the largest |f(x) − value of C| over the cells C that hold x when widened to ρ,
              plus leak·osc + rounding. In L_p: the norms of both.
    Proof.    An average of the values of the cells that hold x when widened is off by at most the largest difference,
              whatever their weights. That is why errors in the scores do no harm beyond the leak: a score off by δ
              multiplies the leak by e^{2δ}, no more.
    """

    target: Target
    grid: CellGrid
    values: Float[np.ndarray, "cells outputs"]
    beta: float
    eta: float
    positions: Positions
    p: float

    @property
    @abc.abstractmethod
    def selection(self) -> CellSelection:
        """How well the scores select the cells that hold x when widened to ½ + η."""

    @cached_property
    def variation(self) -> Variation:
        """Over the cells widened to ρ."""
        return variation_norm(self.target, self.grid, 0.5 + self.eta, self.p)

    @cached_property
    def _variation_terms(self) -> list[Term]:
        """In L_∞ the variation over widened cells. In L_p that, or a bound that suits jumps at the cells' borders:

        farther than η from every border x has one near cell, so the variation over cells narrowed by η counts there;
        the rest, a fraction 1 − ((1−2η)/(1+2η))^d of the widened cells, is the boundary layer.
        """
        what = f"the change of f over cells widened by η = {self.eta:.3g}"
        if self.p == math.inf:
            return [Term("variation", self.variation.value, what)]
        widened = Term("variation", self.variation.value, f"the L{self.p:g} norm of {what}")
        if self.eta >= 0.25:
            return [widened]
        inner = variation_norm(self.target, self.grid, 0.5 - self.eta, self.p).value
        wide = self.eta + float(self.grid.query_error.max())  # the error of the distance of y from a border
        fraction = 1 - ((1 - 2 * wide) / (1 + 2 * wide)) ** self.grid.box.d
        layer = round_up(self.variation.value * fraction ** (1 / self.p))
        if inner + layer >= widened.value:
            return [widened]
        return [
            Term("variation", inner, f"the L{self.p:g} norm of the change of f inside the cells"),
            Term("boundary layer", layer, f"the same on a layer of width {2 * self.eta:.2g} cells about their borders"),
        ]

    @cached_property
    def stored_values(self) -> Float[np.ndarray, "keys outputs_per_position"]:
        return self.positions.stored(self.values)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        return (("points_per_axis", " × ".join(map(str, self.grid.counts))), ("beta", self.beta), ("eta", self.eta))

    @cached_property
    def bound(self) -> Bound:
        leak = self.selection.leak * self._spread
        terms = [
            Term("leak", leak, f"weight of all farther cells at β = {self.beta:.6g} in units of a cell"),
            *self.positions.value_terms(self.values, self.selection, self.grid.dtype),
        ]
        # ‖constant‖_p over the box is the constant times vol^{1/p}.
        volume = constant_norm(self.grid.box, self.p)
        constants = (Term(t.name, round_up(t.value * volume), t.reason) for t in terms)
        return Bound((*self._variation_terms, *constants))

    @property
    def _spread(self) -> float:
        """|f(x) − v_j| ≤ |v_near − v_j| + variation, as x lies in some cell."""
        largest = self.variation.value
        if self.p < math.inf:
            largest = variation_norm(self.target, self.grid, 0.5 + self.eta).value
            largest += float(np.ptp(self.values, axis=0).max())  # the average of a cell is within its variation
        return float(np.ptp(self.values, axis=0).max()) + largest


def few_variables(target: Target, request: Request) -> str | None:
    return None if target.box.d <= MAX_GRID_VARIABLES else f"a grid in {target.box.d} variables has too many cells"


def known_variation(target: Target, request: Request) -> str | None:
    if target.is_known_on_cells:
        return None
    return "needs a Lipschitz constant (lipschitz=…) or hessian_bound=… of Python code"


CELL_CONDITIONS = (finite_box, function, few_variables, known_variation)
"""The conditions of a partition into cells."""


Cells = TypeVar("Cells", bound=GridPartition)


@dataclass(frozen=True, eq=False)
class GridBuilder(abc.ABC, Generic[Cells]):
    """A construction on a grid of cells: chooses the grid, samples the values, and builds the program with its bound.

    A subclass defines how the program selects a cell, and what that costs.
    """

    target: Target
    request: Request
    name: str

    @property
    def max_cells(self) -> int:
        """More cells than these cost too much for sure."""
        per_anchor = bytes_per_anchor(self.target)
        return min(self.request.max_anchors, self.request.max_bytes // per_anchor) // self.positions.n

    @abc.abstractmethod
    def cost(self, counts: Counts) -> tuple[int, int]:
        """The anchors and bytes of a program for a grid with these cells per axis."""

    @abc.abstractmethod
    def eta(self, grid: CellGrid) -> float:
        """How far beyond its cell a centre of this grid may still win, in cells."""

    @abc.abstractmethod
    def partition(self, grid: CellGrid, values: Float[np.ndarray, "cells outputs"]) -> Cells:
        """Choose the temperature."""

    @abc.abstractmethod
    def program(self, partition: Cells) -> Program:
        """The program that selects the cells of the partition."""

    @abc.abstractmethod
    def estimate(self) -> Estimate:
        """The cost without building."""

    def build(self) -> Built:
        """The network with its bound, or BoundNotMet."""
        check_cells(self.request)
        grid = self._grid()
        partition = self.partition(grid, self._sample(grid))
        made = self.program(partition)
        built = Built(made, self.name, partition.bound, partition.variation.cell, partition.parameters)
        return require(built, self.request.eps, self.target)

    @property
    def positions(self) -> Positions:
        """The positions of the output that the program tells apart."""
        return Positions(num_positions(self.target), self.request.margin)

    def estimated_counts(self) -> Counts:
        """Cells per axis from the variation of the target: tried up to MAX_CELLS_TRIED cells, extrapolated beyond."""
        goal, request = 0.99 * self.request.goal, self.request
        search = GridSearch(self.target, goal, lambda grid: 0.5 + CELL_OVERHANG, request.dtype, request.p)
        return search.counts(MAX_CELLS_TRIED)

    def _sample(self, grid: CellGrid) -> Float[np.ndarray, "cells outputs"]:
        """The value of every cell."""
        values = np.empty((grid.num_cells, self.target.num_outputs))
        for block, _, centres in grid.cells(0.5):
            averages = grid.averages(self.target, block, self.request.p)
            values[block] = self.target(centres) if averages is None else averages
            self.request.report("sampling", block.stop / grid.num_cells)
        largest = float(np.abs(values).max(initial=0.0))
        if not largest < float(np.finfo(grid.dtype).max) / 8:
            raise InputError(
                f"{self.target.describe()} reaches {largest:.3g}, more than {grid.dtype} holds: scale the function"
            )
        return values

    def _grid(self) -> CellGrid:
        """The grid asked for, or one whose variation over cells widened by eta leaves room for leak and rounding."""
        given, d, request = self.request.points_per_axis, self.target.box.d, self.request
        if given is not None:
            counts = (given,) * d if isinstance(given, int) else tuple(given)
            if len(counts) != d or not all(isinstance(c, int) and c >= 1 for c in counts):
                raise InputError(f"points_per_axis: expected {d} whole number(s) ≥ 1, found {given}")
            if not self._fits(counts):
                anchors, size = self.cost(counts)
                raise InputError(
                    f"points_per_axis={counts} makes {math.prod(counts):,} centres: {anchors:,} anchors, {size:,} "
                    f"bytes, more than max_anchors={request.max_anchors:,} or max_bytes={request.max_bytes:,} allow"
                )
            return CellGrid(self.target.box, counts, request.dtype)
        counts = GridSearch(self.target, self._share, self._rho, request.dtype, request.p).counts(self.max_cells)
        if self._fits(counts):
            return CellGrid(self.target.box, counts, request.dtype)
        # The need may be a generous estimate: the largest grid that is allowed may be enough.
        smaller = self._largest_allowed(counts)
        reachable = variation_norm(self.target, smaller, self._rho(smaller), request.p)
        if reachable.value <= self._share and self._fits(smaller.counts):
            return smaller
        raise self._refusal(counts, smaller, reachable)

    def _fits(self, counts: Counts) -> bool:
        anchors, size = self.cost(counts)
        return anchors <= self.request.max_anchors and size <= self.request.max_bytes

    def _largest_allowed(self, needed: Counts) -> CellGrid:
        """The largest multiple of `needed` within the limits, by bisection: 50 halvings tell 1e15 cells apart."""

        def shrunk(factor: float) -> Counts:
            return tuple(max(1, math.floor(count * factor)) for count in needed)

        too_large = least(0.0, 1.0, lambda factor: not self._fits(shrunk(factor)), 2.0**-50)
        return CellGrid(self.target.box, shrunk(too_large - 2.0**-50), self.request.dtype)

    @property
    def _share(self) -> float:
        """The part of eps for the grid: 1 % is for leak and rounding, and more for a boundary layer where f jumps."""
        if self.target.is_continuous:
            return 0.99 * self.request.goal
        return (0.8 if self.request.dtype == "float64" else 0.6) * self.request.goal  # coarser arithmetic, wider layers

    def _rho(self, grid: CellGrid) -> float:
        """Cells widened by η; where f jumps, narrowed by it (see GridPartition._variation_terms)."""
        sign = 1 if self.target.is_continuous else -1
        return 0.5 + sign * min(0.4, self.eta(grid))

    def _refusal(self, needed: Counts, grid: CellGrid, reachable: Variation) -> BoundNotMet:
        """The refusal where eps needs more anchors than allowed, with their number and the bound within reach."""
        request, target, counts = self.request, self.target, grid.counts
        anchors, size = self.cost(needed)
        bound = reachable.value * request.goal / self._share
        is_many = anchors > request.max_anchors
        limit = f"max_anchors={request.max_anchors:,}" if is_many else f"max_bytes={request.max_bytes:,}"
        smaller = replace(self, request=replace(request, eps=None, points_per_axis=counts, progress=None))
        return BoundNotMet(
            f"cannot bring the bound to eps={request.eps:g} for {target.describe()} on {target.box} with a partition "
            f"into cells: it needs about {_about(anchors)} anchors ({' × '.join(map(_about, needed))} centres, "
            f"{_about(math.ceil(size / 2**20))} MiB), "
            f"more than {limit} allows. Within it ({' × '.join(map(str, counts))} centres) the bound is about "
            f"{bound:.3g}, largest on {show_intervals(reachable.cell)}. "
            f"Choose eps ≥ {round_above(bound):.2g}, a smaller box, or raise max_anchors and max_bytes.",
            eps=request.goal,
            bound=bound,
            worst_box=reachable.cell,
            build=smaller.build if self._fits(counts) else None,
        )


def _about(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"{count:.1e}"


def check_cells(request: Request) -> None:
    """Raise InputError unless exactly one of eps and the number of cells is given."""
    if (request.eps is None) == (request.points_per_axis is None):
        raise InputError("give either eps or points_per_axis")
