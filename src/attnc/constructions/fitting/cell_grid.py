"""A grid of equal cells over a box, in lattice coordinates y = scale·x + offset in which cells have width 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.fitting.search import Bracket
from attnc.errors import InputError
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

GRID_CELLS_PER_BLOCK = 2**15
"""Cells whose variation is computed at once: arrays then fit the cache."""
FEW_CELLS = 64
"""Largest number of cells per axis that is tried where f jumps, in case it puts all jumps on borders."""


@dataclass(frozen=True, eq=False)
class CellGrid:
    """counts[i] cells along axis i. Centres have lattice coordinates L = k − (counts−1)/2: exact in floating point."""

    box: Box
    counts: tuple[int, ...]
    dtype: str = "float64"

    def __post_init__(self) -> None:
        limits, magnitude = np.finfo(self.dtype), self.box.magnitude
        largest = float(limits.max) / 8
        with np.errstate(over="ignore"):
            scale = np.array(self.counts, np.float64) / self.box.widths
            is_held = (magnitude * scale < largest) & (scale < largest) & (magnitude < largest)
        if not (is_held & (magnitude >= float(limits.smallest_normal))).all():
            raise InputError(f"{self.box} is too wide or too narrow for {self.dtype}: scale the variables")

    @property
    def num_cells(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def scale(self) -> Float[np.ndarray, " d"]:
        """As stored in the program's dtype; everything below reasons about the stored numbers."""
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
        """|computed y − (scale·x + offset)|: casting x, one product and one sum are three roundings, one to spare."""
        u = UNIT_ROUNDOFF[self.dtype]
        return np.asarray(up(gamma(4, u) * up(self.scale * self.box.magnitude + np.abs(self.offset), 2)))

    def lattice(self, axis: int) -> Float[np.ndarray, " count"]:
        return np.arange(self.counts[axis]) - self.radius[axis]

    def centres(self, axis: int) -> Float[np.ndarray, " count"]:
        """The points where the target is sampled, inside the box; the bound does not need them to be exact."""
        x = (self.lattice(axis) - self.offset[axis]) / self.scale[axis]
        return np.clip(x, self.box.lo[axis], self.box.hi[axis])

    def intervals(self, axis: int, rho: float) -> Interval:
        """All x of the box whose computed lattice coordinate can be within rho of each centre."""
        reach = rho + Interval.point(np.asarray(self.query_error[axis]))
        lattice = Interval.point(self.lattice(axis))
        offset, scale = Interval.point(self.offset[axis]), Interval.point(self.scale[axis])
        spread = Interval(-reach.hi, reach.hi)
        x = (lattice + spread - offset) / scale
        lo, hi = self.box.lo[axis], self.box.hi[axis]
        return Interval(np.clip(x.lo, lo, hi), np.clip(x.hi, lo, hi))

    def cells(self, rho: float) -> Iterator[tuple[slice, Interval, Float[np.ndarray, "cells d"]]]:
        """Blocks of (positions, cells widened to rho, centres), the last axis running fastest."""
        sides = [self.intervals(axis, rho) for axis in range(self.box.d)]
        centres = [self.centres(axis) for axis in range(self.box.d)]
        for start in range(0, self.num_cells, GRID_CELLS_PER_BLOCK):
            block = slice(start, min(start + GRID_CELLS_PER_BLOCK, self.num_cells))
            yield block, self._cells_of(sides, block), self._product(centres, block)

    def _cells_of(self, sides: Sequence[Interval], block: slice) -> Interval:
        return Interval(self._product([s.lo for s in sides], block), self._product([s.hi for s in sides], block))

    def _product(self, columns: Sequence[np.ndarray], block: slice) -> Float[np.ndarray, "cells d"]:
        """The rows of a block of the product of one column per axis."""
        index = np.unravel_index(np.arange(block.start, block.stop), self.counts)
        return np.stack([column[i] for column, i in zip(columns, index, strict=True)], axis=1)

    def averages(self, target: Target, block: slice, p: float) -> Float[np.ndarray, "cells outputs"] | None:
        """The target's mean over each cell of a block; None for p = ∞, where cells have the values at their centres.

        Gauss–Legendre quadrature has at most 4 nodes per axis and 256 in all. A poor mean costs accuracy, never
        soundness: the bound is about the values as they are.
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
    """The L_p norm over the box of x ↦ max over cells C, widened to rho, that hold x of sup_C |f − value of C|.

    For p = ∞ the largest variation. Otherwise (Σ_C vol(C)·variation(C)^p)^{1/p}, as a maximum is at most a sum.
    Values are those at the centres for p = ∞, and averages over the cells otherwise: the best choice for p = 2.
    """
    worst, total, lo, hi = 0.0, 0.0, grid.box.lo, grid.box.hi
    for block, cells, centres in grid.cells(rho):
        found = target.variation(cells, centres, grid.averages(target, block, p))
        largest = int(np.argmax(found))
        if found[largest] > worst:
            # Sums of powers are kept in units of the largest, so that no power under- or overflows where it matters.
            total *= (worst / float(found[largest])) ** p if p < math.inf and math.isfinite(found[largest]) else 1.0
            worst, lo, hi = float(found[largest]), cells.lo[largest], cells.hi[largest]
        if p < math.inf and 0 < worst < math.inf:
            fractions = up(((cells.hi - cells.lo) / grid.box.widths).prod(axis=1), 4 * grid.box.d)
            total += float((fractions * (found / worst) ** p).sum())
    value = worst
    if p < math.inf and 0 < worst < math.inf:
        # Sums and powers of positive numbers: 2⁻³⁰ is far more than they round.
        value = worst * total ** (1 / p) * constant_norm(grid.box, p) * (1 + 2.0**-30)
    return Variation(value, Box(grid.box.names, lo, hi).as_dict())


def constant_norm(box: Box, p: float) -> float:
    """The L_p norm of 1 over the box: vol^{1/p}, rounded up."""
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
        """The cells per axis; where more than max_cells are needed, about as many as are needed."""
        aligned = None if self.target.is_continuous else self._on_borders(max_cells)
        if aligned is None:
            return self._scaled_grid(max_cells)[0]
        refined, is_met = self._scaled_grid(min(max_cells, 16 * math.prod(aligned)))  # starts too fine
        return refined if is_met and math.prod(refined) < math.prod(aligned) else aligned

    def _scaled_grid(self, max_cells: int) -> tuple[tuple[int, ...], bool]:
        """A grid, and whether it was found to meet eps.

        Each axis gets an equal share of eps: the variation along one axis alone, at two resolutions, gives the
        proportions and the rate at which it falls (1 for Lipschitz functions, ½ for √x at 0). A common factor of all
        axes is then searched for: by the rate while only one side is known, by halving once a grid that meets eps and
        one that does not are known.
        """
        needed, rates = zip(*(self._axis_need(axis) for axis in range(self.target.box.d)), strict=True)
        needed = tuple(min(need, 1e15) for need in needed)
        multiple = 1 if self.target.is_continuous else 2  # jumps are often in the middle: a border fits them best
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
        """Few cells whose borders are where f jumps, if there are such and they meet eps; then finer is not better.

        On every axis the count with the least variation on lines along it is taken, and then lowered as far as eps
        allows, the layer at the borders included (see `GridPartition`).
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
        """How many cells one axis alone needs for its share of eps, and the rate at which its variation falls."""
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
            coarse = fine  # cells may hold whole periods of f, and do not show its rate
        return max(1.0, count * min(1e15, fine / max(share, 1e-300)) ** (1 / rate)), rate

    def _axis_variation(self, axis: int, count: int, num_lines: int) -> float:
        """The variation over cells of one axis, on lines at fixed places of the other axes."""
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
