"""Partitions of the box into equal cells: the choice of the grid, the values and the bound.

Lattice coordinates are y = scale·x + offset, in which cells have width 1.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from attnc.constructions.built import Built, require, too_many_anchors
from attnc.constructions.construction import Estimate, Request, finite_box, function
from attnc.constructions.fitting.search import Bracket
from attnc.constructions.fitting.selection import (
    CellSelection,
    Positions,
    allowed_anchors,
    positions_of,
    round_up,
)
from attnc.errors import BoundNotMet, InputError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bisection import least
from attnc.numerics.bound import Bound, Term
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

MAX_CELLS_TRIED = 20_000
"""Largest grid, in cells, whose variation an estimate computes. Larger grids are extrapolated. Measured with five grids
of up to 972 cells: half and twice as many change nothing."""
FAR_ABOVE = 8
"""An estimate stops at a rough number of cells per axis if this part of it already exceeds the limit. The rough number
is the variation over COARSE_CELLS cells, which falls at most like their width; beyond that it may only be too large by
the width of its intervals. Measured on half of the corpus: it is at most twice the number that is found."""
COARSE_CELLS, COARSE_LINES = 32, 4
"""Number of cells per axis, and of lines along an axis, from which the rough number is found."""
MAX_GRID_VARIABLES = 10
"""Largest number of variables of a grid. Two cells per axis are then 1024 cells."""
CELL_OVERHANG = 1 / 128
"""η, in cells: the distance beyond its cell at which a centre may still win. It costs 2η ≈ 1.6 % of the bound. A
smaller η needs a larger β."""
Counts = tuple[int, ...]
"""Numbers of cells per axis."""
GRID_CELLS_PER_BLOCK = 2**15
"""Number of cells whose variation is computed at once. An array of one number per cell has 256 KiB."""
FEW_CELLS = 64
"""Largest number of cells per axis that is tried to put all jumps of f on borders of cells. Measured with one function
that jumps at 0 and at 1/4: 32 and 128 give the same result."""


@dataclass(frozen=True, eq=False)
class CellGrid:
    """A grid of counts[i] cells along axis i. The coordinates L = k − (counts−1)/2 of centres are exact floats."""

    box: Box
    counts: tuple[int, ...]
    dtype: str = "float64"

    def __post_init__(self) -> None:
        limits, magnitude = np.finfo(self.dtype), self.box.magnitude
        largest = float(limits.max) / 8
        with quiet():
            scale = np.array(self.counts, np.float64) / self.box.widths
            is_held = (magnitude * scale < largest) & (scale < largest) & (magnitude < largest)
        if not (is_held & (magnitude >= float(limits.smallest_normal))).all():
            raise InputError(f"{self.box} is too wide or too narrow for {self.dtype}: scale the variables")

    @property
    def num_cells(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def scale(self) -> Float[np.ndarray, " d"]:
        """The scale as stored in the program's dtype. All bounds here are about the stored numbers."""
        return (np.array(self.counts) / self.box.widths).astype(self.dtype).astype(np.float64)

    @cached_property
    def offset(self) -> Float[np.ndarray, " d"]:
        middle = self.box.lo / 2 + self.box.hi / 2
        return (-middle * self.scale).astype(self.dtype).astype(np.float64)

    @cached_property
    def radius(self) -> Float[np.ndarray, " d"]:
        """The largest |L| on each axis."""
        return (np.array(self.counts) - 1) / 2

    @cached_property
    def query_error(self) -> Float[np.ndarray, " d"]:
        """A bound on |computed y − (scale·x + offset)|: four roundings, for a cast, a product and a sum."""
        u = UNIT_ROUNDOFF[self.dtype]
        return np.asarray(up(gamma(4, u) * up(self.scale * self.box.magnitude + np.abs(self.offset), 2)))

    def lattice(self, axis: int) -> Float[np.ndarray, " count"]:
        return np.arange(self.counts[axis]) - self.radius[axis]

    def centres(self, axis: int) -> Float[np.ndarray, " count"]:
        """Return the points, inside the box, where the target is sampled. The bound does not need them to be exact."""
        x = (self.lattice(axis) - self.offset[axis]) / self.scale[axis]
        return np.clip(x, self.box.lo[axis], self.box.hi[axis])

    def intervals(self, axis: int, rho: float) -> Interval:
        """Enclose, for each centre, all x of the box whose computed lattice coordinate can be within rho of it."""
        reach = rho + Interval.point(np.asarray(self.query_error[axis]))
        lattice = Interval.point(self.lattice(axis))
        offset, scale = Interval.point(self.offset[axis]), Interval.point(self.scale[axis])
        spread = Interval(-reach.hi, reach.hi)
        x = (lattice + spread - offset) / scale
        lo, hi = self.box.lo[axis], self.box.hi[axis]
        return Interval(np.clip(x.lo, lo, hi), np.clip(x.hi, lo, hi))

    def cells(self, rho: float) -> Iterator[tuple[slice, Interval, Float[np.ndarray, "cells d"]]]:
        """Yield blocks of (positions, cells widened to rho, centres). The last axis runs fastest."""
        sides = [self.intervals(axis, rho) for axis in range(self.box.d)]
        centres = [self.centres(axis) for axis in range(self.box.d)]
        for start in range(0, self.num_cells, GRID_CELLS_PER_BLOCK):
            block = slice(start, min(start + GRID_CELLS_PER_BLOCK, self.num_cells))
            yield block, self._cells_of(sides, block), self._product(centres, block)

    def _cells_of(self, sides: Sequence[Interval], block: slice) -> Interval:
        return Interval(self._product([s.lo for s in sides], block), self._product([s.hi for s in sides], block))

    def _product(self, columns: Sequence[np.ndarray], block: slice) -> Float[np.ndarray, "cells d"]:
        """Return the rows of a block of the Cartesian product of one column per axis."""
        index = np.unravel_index(np.arange(block.start, block.stop), self.counts)
        return np.stack([column[i] for column, i in zip(columns, index, strict=True)], axis=1)

    def averages(self, target: Target, block: slice, p: float) -> Float[np.ndarray, "cells outputs"] | None:
        """Return the target's mean over each cell of a block, or None for p = ∞, where values are those at centres.

        Gauss–Legendre quadrature has at most 4 nodes per axis and 256 in all. A poor mean costs accuracy but not
        soundness, since the bound is about the stored values.
        """
        if p == math.inf:
            return None
        nodes = max(1, min(4, int(256 ** (1 / self.box.d))))
        t, weight = np.polynomial.legendre.leggauss(nodes)
        cells = self._cells_of([self.intervals(axis, 0.5) for axis in range(self.box.d)], block)
        total = np.zeros((len(cells), target.num_outputs))
        for chosen in itertools.product(range(nodes), repeat=self.box.d):
            points = np.clip(cells.lo + (t[list(chosen)] + 1) / 2 * (cells.hi - cells.lo), cells.lo, cells.hi)
            total += float(np.prod(weight[list(chosen)] / 2)) * target(points)
        return total


@dataclass(frozen=True)
class Variation:
    """A norm of the variation of a target over the cells of a grid, and the cell that varies most."""

    value: float
    cell: dict[str, tuple[float, float]]


def variation_norm(target: Target, grid: CellGrid, rho: float, p: float = math.inf) -> Variation:
    """Return the L_p norm over the box of x ↦ max over cells C, widened to rho, that hold x of sup_C |f − value of C|.

    For p = ∞ this is the largest variation. Otherwise (Σ_C vol(C)·variation(C)^p)^{1/p} bounds it, as a maximum is at
    most a sum. The value of a cell is f at its centre for p = ∞, and otherwise the mean of f, which is best for p = 2.
    """
    worst, total, lo, hi = 0.0, 0.0, grid.box.lo, grid.box.hi
    for block, cells, centres in grid.cells(rho):
        check_time("choosing cells")
        found = target.variation(cells, centres, grid.averages(target, block, p))
        largest = int(np.argmax(found))
        if found[largest] > worst:
            # The sum of powers is in units of the largest variation, so that no power overflows.
            total *= (worst / float(found[largest])) ** p if p < math.inf and math.isfinite(found[largest]) else 1.0
            worst, lo, hi = float(found[largest]), cells.lo[largest], cells.hi[largest]
        if p < math.inf and 0 < worst < math.inf:
            fractions = up(((cells.hi - cells.lo) / grid.box.widths).prod(axis=1), 4 * grid.box.d)
            total += float((fractions * (found / worst) ** p).sum())
    value = worst
    if p < math.inf and 0 < worst < math.inf:
        # 2⁻³⁰ covers the rounding of sums and powers of positive numbers by far.
        value = worst * total ** (1 / p) * constant_norm(grid.box, p) * (1 + 2.0**-30)
    return Variation(value, Box(grid.box.names, lo, hi).as_dict())


def constant_norm(box: Box, p: float) -> float:
    """Return the L_p norm of 1 over the box: vol^{1/p}, rounded up."""
    return 1.0 if p == math.inf else math.exp(float(np.log(box.widths).sum()) / p) * (1 + 2.0**-30)


@dataclass(frozen=True, eq=False)
class GridSearch:
    """The search for the coarsest grid whose variation over cells widened to rho(grid) is at most eps, in L_p."""

    target: Target
    eps: float
    rho: Callable[[CellGrid], float]
    dtype: str
    p: float

    def counts(self, max_cells: int) -> tuple[int, ...]:
        """Return the cells per axis. If more than max_cells are needed, this is an estimate of the number needed."""
        aligned = None if self.target.is_continuous else self._on_borders(max_cells)
        if aligned is None:
            return self._scaled_grid(max_cells)[0]
        refined, is_met = self._scaled_grid(min(max_cells, 16 * math.prod(aligned)))  # starts too fine
        return refined if is_met and math.prod(refined) < math.prod(aligned) else aligned

    def rough_counts(self) -> tuple[float, ...]:
        """Return about the cells per axis, from the variation over few cells. They are infinite if that is."""
        share, axes = max(self.eps / self.target.box.d, 1e-300), range(self.target.box.d)
        variations = (self._axis_variation(axis, COARSE_CELLS, COARSE_LINES) for axis in axes)
        return tuple(max(1.0, COARSE_CELLS * variation / share) for variation in variations)

    def _scaled_grid(self, max_cells: int) -> tuple[tuple[int, ...], bool]:
        """Return a grid, and whether it was found to meet eps.

        Each axis gets an equal share of eps. The variation along one axis alone, at two resolutions, gives the number
        of cells and the rate at which it falls (1 for Lipschitz functions, ½ for √x at 0). Then a common factor of all
        axes is searched: by the rate while only one side is known, and by bisection once a grid that meets eps and one
        that does not are known.
        """
        needed, rates = zip(*(self._axis_need(axis) for axis in range(self.target.box.d)), strict=True)
        needed = tuple(min(need, 1e15) for need in needed)
        multiple = 1 if self.target.is_continuous else 2  # a border in the middle is often the place of a jump
        rate, factor, bracket = min(rates), 1.0, Bracket()
        best: tuple[int, ...] | None = None
        tried: set[tuple[int, ...]] = set()
        for _ in range(24):
            counts = _scaled(needed, factor, multiple)
            if math.prod(counts) > max_cells and best is None:
                return counts, False
            if counts in tried:
                break
            tried.add(counts)
            grid = CellGrid(self.target.box, counts, self.dtype)
            found = variation_norm(self.target, grid, self.rho(grid), self.p).value
            if found <= self.eps:
                best = counts
                if found >= 0.985 * self.eps:
                    break
            ratio = found / (0.995 * self.eps) if math.isfinite(found) else 4.0
            factor = bracket.next(factor, found <= self.eps, min(16.0, max(ratio, 1e-3) ** (1 / rate)))
        return (_scaled(needed, factor * 1.05, multiple), False) if best is None else (best, True)

    def _on_borders(self, max_cells: int) -> tuple[int, ...] | None:
        """Return few cells with borders where f jumps, or None if no such cells are found that meet eps.

        On every axis the count with the least variation on lines along it is taken. It is then lowered as far as eps
        allows, with the boundary layer included (see `GridPartition`).
        """
        few = range(2, FEW_CELLS + 1, 2)
        axes = range(self.target.box.d)
        counts = tuple(min(few, key=lambda count: self._axis_variation(i, count, 16)) for i in axes)
        if math.prod(counts) > max_cells or not self._is_met_with_borders(counts):
            return None
        for i in sorted(axes, key=lambda i: -counts[i]):
            fewer = ((*counts[:i], count, *counts[i + 1 :]) for count in few if count < counts[i])
            counts = next(filter(self._is_met_with_borders, fewer), counts)
        return counts

    def _is_met_with_borders(self, counts: tuple[int, ...]) -> bool:
        grid = CellGrid(self.target.box, counts, self.dtype)
        narrow = self.rho(grid)
        layer = (1 - (narrow / (1 - narrow)) ** self.target.box.d) ** (1 / self.p)
        total = variation_norm(self.target, grid, narrow, self.p).value
        if total > self.eps:
            return False
        return total + layer * variation_norm(self.target, grid, 1 - narrow, self.p).value <= self.eps

    def _axis_need(self, axis: int) -> tuple[float, float]:
        """Return the number of cells that one axis needs for its share of eps, and the rate of its variation."""
        share = self.eps / self.target.box.d
        coarse = self._axis_variation(axis, 32, 64)
        for count, num_lines in ((512, 64), (8192, 16)):
            fine = self._axis_variation(axis, count, num_lines)
            if not (math.isfinite(coarse) and math.isfinite(fine)):
                return float(count), 1.0
            if fine <= 1e-6 * share or not coarse > fine:
                return (1.0 if fine <= share else float(count)), 1.0
            rate = min(1.0, max(0.2, math.log(coarse / fine) / math.log(16)))
            if rate > 0.45 or fine <= share:
                break
            coarse = fine  # cells may hold whole periods of f, which hide the rate
        return max(1.0, count * min(1e15, fine / max(share, 1e-300)) ** (1 / rate)), rate

    def _axis_variation(self, axis: int, count: int, num_lines: int) -> float:
        """Return the variation over cells of one axis, on lines at fixed places of the other axes."""
        box, p = self.target.box, self.p
        num_lines = 2 if box.d == 1 else num_lines
        lines = box.lo + np.random.default_rng(0).random((num_lines, box.d)) * box.widths
        lines[0], lines[1] = box.lo, box.hi
        grid = CellGrid(box, (count,) * box.d)
        side = grid.intervals(axis, self.rho(grid))
        centres = np.repeat(lines, count, axis=0)
        centres[:, axis] = np.tile(grid.centres(axis), num_lines)
        lo, hi = centres.copy(), centres.copy()
        lo[:, axis], hi[:, axis] = np.tile(side.lo, num_lines), np.tile(side.hi, num_lines)
        found = self.target.variation(Interval(lo, hi), centres)
        worst = float(found.max())
        if p == math.inf or not 0 < worst < math.inf:
            return worst
        return worst * float(((found / worst) ** p).mean()) ** (1 / p) * constant_norm(box, p)


def _scaled(needed: tuple[float, ...], factor: float, multiple: int) -> tuple[int, ...]:
    scaled = (max(1.0, min(need * factor, 1e15)) for need in needed)
    return tuple(1 if count <= 1 else multiple * math.ceil(count / multiple) for count in scaled)


@dataclass(frozen=True, eq=False)
class GridPartition(abc.ABC):
    """A grid with a value per cell, a temperature, and the proof of `bound`.

    Theorem.  Let `selection.leak` bound the weight of all cells that do not hold x when widened to ρ = ½ + η. Then
              |out − f| at x is at most the largest |f(x) − value of C| over the cells C that hold x when widened to ρ,
              plus leak·osc + rounding. In L_p the norms of both count.
    Proof.    An average of the values of the cells that hold x when widened is off by at most the largest difference,
              whatever their weights. So errors in the scores affect only the leak: errors of δ multiply it by at most
              e^{2δ}.
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
        """The quality of the selection of the cells that hold x when widened to ½ + η."""

    @cached_property
    def variation(self) -> Variation:
        """The variation over the cells widened to ρ."""
        return variation_norm(self.target, self.grid, 0.5 + self.eta, self.p)

    @cached_property
    def stored_values(self) -> Float[np.ndarray, "keys outputs_per_position"]:
        return self.positions.stored(self.values)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        return (("points_per_axis", " × ".join(map(str, self.grid.counts))), ("beta", self.beta), ("eta", self.eta))

    @cached_property
    def bound(self) -> Bound:
        reason = f"weight of all farther cells at β = {self.beta:.6g} in units of a cell"
        # |f(x) − v_j| ≤ |v_near − v_j| + variation, as x lies in some cell.
        largest, spread = self.variation.value, float(np.ptp(self.values, axis=0).max())
        if self.p < math.inf:
            # The mean of f over a cell is within the variation of the cell.
            largest = variation_norm(self.target, self.grid, 0.5 + self.eta).value + spread
        leak = Term("leak", self.selection.leak * (spread + largest), reason)
        # ‖constant‖_p over the box is the constant times vol^{1/p}.
        volume = constant_norm(self.grid.box, self.p)
        terms = variation_terms(self.target, self.grid, self.variation, self.eta, self.p)
        return self.positions.bound(terms, leak, self.values, self.selection, self.grid.dtype, volume)


def variation_terms(target: Target, grid: CellGrid, variation: Variation, eta: float, p: float) -> list[Term]:
    """Return the variation over cells widened by η or, in L_p, a bound that suits jumps at borders if it is smaller.

    Farther than η from every border x has one near cell, so the variation over cells narrowed by η counts there. The
    rest, a fraction 1 − ((1−2η)/(1+2η))^d of the widened cells, is the boundary layer.
    """
    what = f"the change of f over cells widened by η = {eta:.3g}"
    if p == math.inf:
        return [Term("variation", variation.value, what)]
    widened = Term("variation", variation.value, f"the L{p:g} norm of {what}")
    if eta >= 0.25:
        return [widened]
    inner = variation_norm(target, grid, 0.5 - eta, p).value
    wide = eta + float(grid.query_error.max())  # η plus the error of y
    fraction = 1 - ((1 - 2 * wide) / (1 + 2 * wide)) ** grid.box.d
    layer = round_up(variation.value * fraction ** (1 / p))
    if inner + layer >= widened.value:
        return [widened]
    return [
        Term("variation", inner, f"the L{p:g} norm of the change of f inside the cells"),
        Term("boundary layer", layer, f"the same on a layer of width {2 * eta:.2g} cells about their borders"),
    ]


def few_variables(target: Target, request: Request) -> str | None:
    return None if target.box.d <= MAX_GRID_VARIABLES else f"a grid in {target.box.d} variables has too many cells"


def known_variation(target: Target, request: Request) -> str | None:
    if target.is_known_on_cells:
        return None
    return "needs a Lipschitz constant (lipschitz=…) or hessian_bound=… of Python code"


FOR_CELLS = 0.99
"""The part of eps for the change of f over cells. Leak and rounding have the rest, which is more than they need: the
temperature is chosen so that the leak is a small part of it."""
CELL_CONDITIONS = (finite_box, function, few_variables, known_variation)
"""The conditions of a partition into cells."""


Cells = TypeVar("Cells", bound=GridPartition)


@dataclass(frozen=True, eq=False)
class GridBuilder(abc.ABC, Generic[Cells]):
    """A construction on a grid of cells. It chooses the grid, samples the values, and builds program and bound.

    A subclass defines how the program selects a cell, and its cost.
    """

    target: Target
    request: Request
    name: str

    @abc.abstractmethod
    def cost(self, counts: Counts) -> tuple[int, int]:
        """Return the anchors and bytes of a program for a grid with these cells per axis."""

    @abc.abstractmethod
    def eta(self, grid: CellGrid) -> float:
        """Return η: the distance beyond its cell, in cells, at which a centre of this grid may still win."""

    @abc.abstractmethod
    def partition(self, grid: CellGrid, values: Float[np.ndarray, "cells outputs"]) -> Cells:
        """Return the partition with a chosen temperature."""

    @abc.abstractmethod
    def program(self, partition: Cells) -> Program:
        """Return the program that selects the cells of the partition."""

    @abc.abstractmethod
    def estimate(self) -> Estimate:
        """Return the cost without building."""

    def build(self) -> Built:
        """Return the network with its bound, or raise BoundNotMet."""
        check_cells(self.request)
        grid = self._grid()
        partition = self.partition(grid, self._sample(grid))
        worst, made = partition.variation.cell, self.program(partition)
        built = Built(made, self.name, partition.bound, worst, partition.parameters)
        return require(built, self.request.eps, self.target)

    @property
    def positions(self) -> Positions:
        """The positions of the output that the program separates."""
        return positions_of(self.target, self.request)

    def estimated_counts(self) -> Counts:
        """Return the cells per axis from the variation of the target, extrapolated beyond MAX_CELLS_TRIED cells.

        If these are far more than the request allows, the number is rough.
        """
        request = self.request
        rho = (lambda grid: 0.5 + CELL_OVERHANG) if self.target.is_continuous else self._rho
        search = GridSearch(self.target, self._share, rho, request.dtype, request.p)
        if self.target.is_continuous and request.max_anchors < MAX_CELLS_TRIED:
            rough = search.rough_counts()
            if request.max_anchors < math.prod(max(1.0, count / FAR_ABOVE) for count in rough) < math.inf:
                return tuple(math.ceil(min(count, 1e15)) for count in rough)
        return search.counts(MAX_CELLS_TRIED)

    def _sample(self, grid: CellGrid) -> Float[np.ndarray, "cells outputs"]:
        """Return the value of every cell."""
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
        """Return the given grid, or one whose variation over cells widened by eta leaves room for leak and rounding."""
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
        most = allowed_anchors(self.target, request) // self.positions.n  # more cells certainly exceed the limits
        counts = GridSearch(self.target, self._share, self._rho, request.dtype, request.p).counts(most)
        if self._fits(counts):
            return CellGrid(self.target.box, counts, request.dtype)
        # The estimate may be too large, so the largest allowed grid may be enough.
        smaller = self._largest_allowed(counts)
        reachable = variation_norm(self.target, smaller, self._rho(smaller), request.p)
        variation = self._with_layer(smaller, reachable)
        if variation <= FOR_CELLS * request.goal and self._fits(smaller.counts):
            return smaller
        raise self._refusal(counts, smaller, variation, reachable.cell)

    def _fits(self, counts: Counts) -> bool:
        anchors, size = self.cost(counts)
        return anchors <= self.request.max_anchors and size <= self.request.max_bytes

    def _largest_allowed(self, needed: Counts) -> CellGrid:
        """Return the largest multiple of `needed` within the limits, by 50 bisections: 2⁵⁰ = 1e15."""

        def shrunk(factor: float) -> Counts:
            return tuple(max(1, math.floor(count * factor)) for count in needed)

        too_large = least(0.0, 1.0, lambda factor: not self._fits(shrunk(factor)), 2.0**-50)
        return CellGrid(self.target.box, shrunk(too_large - 2.0**-50), self.request.dtype)

    @property
    def _share(self) -> float:
        """The part of eps for the grid, less if there is a boundary layer about jumps of f."""
        if self.target.is_continuous:
            return FOR_CELLS * self.request.goal
        return (0.8 if self.request.dtype == "float64" else 0.6) * self.request.goal  # the layer is wider in float32

    def _rho(self, grid: CellGrid) -> float:
        """Return ½ + η, or ½ − η if f jumps (see `variation_terms`)."""
        sign = 1 if self.target.is_continuous else -1
        return 0.5 + sign * min(0.4, self.eta(grid))

    def _with_layer(self, grid: CellGrid, inner: Variation) -> float:
        """Return the change of f over the cells of a grid, with the boundary layer about jumps."""
        if self.target.is_continuous:
            return inner.value
        eta, p = self.eta(grid), self.request.p
        widened = variation_norm(self.target, grid, 0.5 + eta, p)
        return sum(term.value for term in variation_terms(self.target, grid, widened, eta, p))

    def _refusal(
        self, needed: Counts, grid: CellGrid, variation: float, cell: dict[str, tuple[float, float]]
    ) -> BoundNotMet:
        """Return the refusal of an eps that needs too many anchors, with their number and the reachable bound."""
        request, target, counts = self.request, self.target, grid.counts
        anchors, size = self.cost(needed)
        is_many = anchors > request.max_anchors
        thin = "" if target.is_continuous else " for a thin boundary layer of cells across which f jumps"
        limit = f"max_anchors={request.max_anchors:,}" if is_many else f"max_bytes={request.max_bytes:,}"
        smaller = replace(self, request=replace(request, eps=None, points_per_axis=counts, progress=None))
        return too_many_anchors(
            target,
            request.goal,
            f"a grid of {' × '.join(map(_about, needed))} cells",
            f"about {_about(anchors)} anchors ({_about(math.ceil(size / 2**20))} MiB){thin}",
            limit,
            variation / FOR_CELLS,
            cell,
            smaller.build if self._fits(counts) else None,
        )


def _about(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"{count:.1e}"


def check_cells(request: Request) -> None:
    """Raise InputError unless exactly one of eps and the number of cells is given."""
    if (request.eps is None) == (request.points_per_axis is None):
        raise InputError("give either eps or points_per_axis")
