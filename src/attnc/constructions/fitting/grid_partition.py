"""A partition of the box into the cells of a grid: the choice of grid, temperature and values, and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built
from attnc.constructions.construction import Request, finite_box, function, round_above
from attnc.constructions.fitting.cell_grid import CellGrid, Variation, choose_counts, constant_norm, variation_norm
from attnc.constructions.fitting.positions import Positions, bytes_per_anchor, num_positions
from attnc.constructions.fitting.search import least
from attnc.constructions.fitting.selection import (
    CellSelection,
    far_weight,
    round_up,
    score_error,
)
from attnc.errors import BoundNotMet, InputError
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.box import show_intervals
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class GridPartition:
    """A grid with a value per cell, a temperature, and the proof of `bound`.

    Theorem.  With ρ = ½ + η, |out − f| at x is at most the largest |f(x) − value of C| over the cells C that hold x
              when widened to ρ, plus leak(β, η)·osc + rounding. In L_p: the norms of both.
    Proof.    The weights factorise over the axes. Centres farther than ρ from y on some axis get at most `leak`
              (`selection.far_weight`, the union over axes). All others have cells that hold x when widened to ρ, and an
              average of their values is off by at most the largest, whatever their weights. That is why errors in
              the scores do no harm beyond the leak: a score off by δ multiplies the leak by e^{2δ}, no more.
    """

    target: Target
    grid: CellGrid
    values: Float[np.ndarray, "cells outputs"]
    beta: float
    eta: float
    positions: Positions
    p: float
    given_selection: CellSelection | None = None  # of other scores than these, with a proof of their own

    @cached_property
    def selection(self) -> CellSelection:
        if self.given_selection is not None:
            return self.given_selection
        grid = self.grid
        delta = grid_score_error(self.target, grid, self.beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, math.floor(1 + 2 * self.eta) + 1) for count in grid.counts)
        return CellSelection(delta, grid_leak(grid, self.beta, self.eta, delta), near)

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


def grid_score_error(target: Target, grid: CellGrid, beta: float, margin: float) -> float:
    """δ of the scores: the sum of 2βL_i·y_i over the axes, −β|L|², and M.

    An axis of the second input is on the side of the keys: its 2L_i(scale·x_i + offset) is multiplied out there, so
    the sizes of both parts count. Four roundings more than usual cover the making of those coefficients.
    """
    reach = grid.radius + 0.5 + grid.query_error
    if len(target.input_shapes) > 1:
        start = math.prod(target.input_shapes[0])
        reach[start:] = (grid.scale * grid.box.magnitude + np.abs(grid.offset))[start:]
    with np.errstate(over="ignore"):
        size = beta * float((2 * grid.radius * reach + grid.radius**2).sum()) + margin
    return score_error(grid.box.d + 6, size, UNIT_ROUNDOFF[grid.dtype])


def grid_leak(grid: CellGrid, beta: float, eta: float, delta: float) -> float:
    """The weight of all centres farther than ½ + η on some axis: the union over the axes."""
    overhang = float(grid.query_error.max())  # at the ends of the box r may exceed ½ by this much
    if eta <= overhang:
        return 1.0
    return min(1.0, sum(far_weight(beta, 0.5 + eta, count, delta, overhang) for count in grid.counts))


MAX_CELLS_TRIED = 20_000
"""Largest grid, in cells, whose variation an estimate computes; larger grids are extrapolated."""
MAX_GRID_VARIABLES = 10
"""Largest number of variables of a grid: two cells per axis are 1024 cells."""
Cost = Callable[[tuple[int, ...]], tuple[int, int]]
"""Anchors and bytes of a program for a grid with these cells per axis."""
CELL_OVERHANG = 1 / 128
"""η, in cells: how far beyond its cell a centre may still win. It costs 2η ≈ 1.6 % of the bound, and sets β."""
CELL_OVERHANG_LP = 2.0**-14
"""The same for L_p norms, where the whole jump is lost on a layer of this width about the cells' borders."""


def make_partition(target: Target, request: Request, rebuild: Callable[[tuple[int, ...]], Built]) -> GridPartition:
    """Choose grid, β, η and values. `rebuild` builds with given points per axis: a refusal carries that network."""
    check_cells(request)
    positions = Positions(num_positions(target), request.margin)
    n, per_anchor = positions.n, bytes_per_anchor(target)
    grid = choose_grid(
        target,
        request,
        lambda grid: _sufficient_eta(target, grid, request.p),
        lambda counts: (n * math.prod(counts), n * math.prod(counts) * per_anchor),
        min(request.max_anchors, request.max_bytes // per_anchor) // n,
        rebuild,
    )
    values = sample(target, grid, request)
    if request.beta is None:
        eta = _sufficient_eta(target, grid, request.p)
        beta = _sufficient_beta(values, grid, eta, request.eps)
    else:
        beta, eta = request.beta, _best_eta(target, grid, values, request)
    return GridPartition(target, grid, values, beta, eta, positions, request.p)


def check_cells(request: Request) -> None:
    """Raise InputError unless exactly one of eps and the number of cells is given."""
    if (request.eps is None) == (request.points_per_axis is None):
        raise InputError("give either eps or points_per_axis")


def estimated_counts(target: Target, request: Request) -> tuple[int, ...]:
    """Cells per axis from the variation of the target: tried up to MAX_CELLS_TRIED cells, extrapolated beyond."""
    rho = 0.5 + CELL_OVERHANG
    return choose_counts(target, 0.99 * request.goal, lambda grid: rho, MAX_CELLS_TRIED, request.dtype, request.p)


def few_variables(target: Target, request: Request) -> str | None:
    return None if target.box.d <= MAX_GRID_VARIABLES else f"a grid in {target.box.d} variables has too many cells"


def known_variation(target: Target, request: Request) -> str | None:
    if target.is_known_on_cells:
        return None
    return "needs a Lipschitz constant (lipschitz=…) or hessian_bound=… of Python code"


CELL_CONDITIONS = (finite_box, function, few_variables, known_variation)
"""The conditions of a partition into cells."""


def sample(target: Target, grid: CellGrid, request: Request) -> Float[np.ndarray, "cells outputs"]:
    """The value of every cell."""
    values = np.empty((grid.num_cells, target.num_outputs))
    for block, _, centres in grid.cells(0.5):
        averages = grid.values(target, block, centres, request.p)
        values[block] = target(centres) if averages is None else averages
        request.report("sampling", block.stop / grid.num_cells)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest < float(np.finfo(grid.dtype).max) / 8:
        raise InputError(f"{target.describe()} reaches {largest:.3g}, more than {grid.dtype} holds: scale the function")
    return values


def choose_grid(
    target: Target,
    request: Request,
    eta: Callable[[CellGrid], float],
    cost: Cost,
    max_cells: int,
    rebuild: Callable[[tuple[int, ...]], Built],
) -> CellGrid:
    """The grid asked for, or one whose variation over cells widened by eta leaves room for leak and rounding.

    More than `max_cells` cells cost too much for sure; `cost` counts the cost of fewer.
    """
    given = request.points_per_axis
    if given is not None:
        counts = (given,) * target.box.d if isinstance(given, int) else tuple(given)
        if len(counts) != target.box.d or not all(isinstance(c, int) and c >= 1 for c in counts):
            raise InputError(f"points_per_axis: expected {target.box.d} whole number(s) ≥ 1, found {given}")
        if not _fits(request, cost, counts):
            anchors, size = cost(counts)
            raise InputError(
                f"points_per_axis={counts} makes {math.prod(counts):,} centres: {anchors:,} anchors, {size:,} bytes, "
                f"more than max_anchors={request.max_anchors:,} or max_bytes={request.max_bytes:,} allow"
            )
        return CellGrid(target.box, counts, request.dtype)
    assert request.eps is not None
    counts = choose_counts(
        target, _share(target, request), _search_rho(target, eta), max_cells, request.dtype, request.p
    )
    if _fits(request, cost, counts):
        return CellGrid(target.box, counts, request.dtype)
    # The need may be a generous estimate: the largest grid that is allowed may be enough.
    smaller = _largest_allowed(target, request, counts, cost)
    reachable = variation_norm(target, smaller, _search_rho(target, eta)(smaller), request.p)
    if reachable.value <= _share(target, request) and _fits(request, cost, smaller.counts):
        return smaller
    raise _refusal(target, request, counts, smaller, reachable, cost, rebuild)


def _largest_allowed(target: Target, request: Request, needed: tuple[int, ...], cost: Cost) -> CellGrid:
    """The largest multiple of `needed` within the limits, by bisection: 50 halvings tell 1e15 cells apart."""

    def shrunk(factor: float) -> tuple[int, ...]:
        return tuple(max(1, math.floor(count * factor)) for count in needed)

    too_large = least(0.0, 1.0, lambda factor: not _fits(request, cost, shrunk(factor)), 2.0**-50)
    return CellGrid(target.box, shrunk(too_large - 2.0**-50), request.dtype)


def _fits(request: Request, cost: Cost, counts: tuple[int, ...]) -> bool:
    anchors, size = cost(counts)
    return anchors <= request.max_anchors and size <= request.max_bytes


def _share(target: Target, request: Request) -> float:
    """The part of eps for the grid: 1 % is kept for leak and rounding, and more for a boundary layer where f jumps."""
    assert request.eps is not None
    if target.is_continuous:
        return 0.99 * request.eps
    return (0.8 if request.dtype == "float64" else 0.6) * request.eps  # coarser arithmetic, wider layers


def _search_rho(target: Target, eta: Callable[[CellGrid], float]) -> Callable[[CellGrid], float]:
    """Cells widened by η; where f jumps, narrowed by it (see GridPartition._variation_terms)."""
    sign = 1 if target.is_continuous else -1
    return lambda grid: 0.5 + sign * min(0.4, eta(grid))


def _sufficient_eta(target: Target, grid: CellGrid, p: float) -> float:
    """At least twice the error of a score per unit of β, so that a large β always separates."""
    overhang = CELL_OVERHANG if p == math.inf else CELL_OVERHANG_LP
    return max(overhang, 2 * grid_score_error(target, grid, 1.0, 0.0), 2 * float(grid.query_error.max()))


def _sufficient_beta(values: np.ndarray, grid: CellGrid, eta: float, eps: float | None) -> float:
    """A β for which leak·osc is below 0.2 % of eps (or of the variation): leak ≈ e^{−β(2η − 2δ)}, δ ≤ η/2 per β."""
    spread = float(np.ptp(values, axis=0).max()) or 1.0
    goal = 0.002 * (eps if eps is not None else spread / max(grid.counts))
    ratio = min(1e300, spread / max(goal, 1e-300))
    beta = max(math.log(max(2.0, 64 * grid.box.d * ratio)) / eta, 4.0)
    return 2.0 ** math.ceil(math.log2(beta))  # a power of two: 2βL and β|L|² are then exact


def _best_eta(target: Target, grid: CellGrid, values: np.ndarray, request: Request) -> float:
    """For a given β: the η with the smallest variation + leak."""
    assert request.beta is not None
    spread = float(np.ptp(values, axis=0).max())
    best, chosen = math.inf, CELL_OVERHANG
    for eta in (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        leaked = grid_leak(grid, request.beta, eta, 0.0) * spread
        if leaked >= best or eta > 2 * max(grid.counts):
            continue
        total = leaked + variation_norm(target, grid, 0.5 + eta, request.p).value
        if total < best:
            best, chosen = total, eta
    return chosen


def _about(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"{count:.1e}"


def _refusal(
    target: Target,
    request: Request,
    needed: tuple[int, ...],
    grid: CellGrid,
    reachable: Variation,
    cost: Cost,
    rebuild: Callable[[tuple[int, ...]], Built],
) -> BoundNotMet:
    """The refusal where eps needs more anchors than allowed, with their number and the bound within reach."""
    assert request.eps is not None
    anchors, size = cost(needed)
    counts = grid.counts
    bound = reachable.value * request.eps / _share(target, request)
    is_many = anchors > request.max_anchors
    limit = f"max_anchors={request.max_anchors:,}" if is_many else f"max_bytes={request.max_bytes:,}"
    return BoundNotMet(
        f"cannot bring the bound to eps={request.eps:g} for {target.describe()} on {target.box} with a partition into "
        f"cells: it needs about {_about(anchors)} anchors ({' × '.join(map(_about, needed))} centres, "
        f"{_about(math.ceil(size / 2**20))} MiB), "
        f"more than {limit} allows. Within it ({' × '.join(map(str, counts))} centres) the bound is about {bound:.3g}, "
        f"largest on {show_intervals(reachable.cell)}. "
        f"Choose eps ≥ {round_above(bound):.2g}, a smaller box, or raise max_anchors and max_bytes.",
        eps=request.eps,
        bound=bound,
        worst_box=reachable.cell,
        build=(lambda: rebuild(counts)) if _fits(request, cost, counts) else None,
    )
