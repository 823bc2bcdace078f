"""Selection among the cells of a grid: what the max-affine constructions share.

A softmax over scores β(2L_j·y − |L_j|²) picks the centre L_j nearest to y. This module chooses the grid, the
temperature and the values for a target, and proves how far the selected value can be from the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.partition.grid import Grid, Variation, choose_counts, constant_norm, variation_norm
from attnc.constructions.partition.selection import average_error, far_weight, round_up, score_error, underflow
from attnc.errors import BoundNotMet, InputError
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

Cost = Callable[[tuple[int, ...]], tuple[int, int]]
"""Anchors and bytes of a program for a grid with this many cells an axis."""

MAX_ANCHORS = 2_000_000
MAX_BYTES = 2**30
ETA = 1 / 128
"""How far beyond its cell a centre may still win: costs 2·ETA ≈ 1.6 % of the bound, and sets how hard β must be."""
ETA_LP = 2.0**-14
"""The same for L_p norms, where what is lost is the whole jump on a layer of this width about the cells' borders."""


@dataclass(frozen=True)
class Request:
    """What was asked of a max-affine construction."""

    eps: float | None = None
    points_per_axis: int | tuple[int, ...] | None = None
    beta: float | None = None
    margin: float = 40.0
    p: float = math.inf
    dtype: str = "float64"
    max_anchors: int = MAX_ANCHORS
    max_bytes: int = MAX_BYTES
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if (self.eps is None) == (self.points_per_axis is None):
            raise InputError("give either eps or points_per_axis")
        if self.beta is not None and not (math.isfinite(self.beta) and self.beta > 0):
            raise InputError(f"beta must be a finite number > 0, found {self.beta}")
        if not 0 < self.margin <= 700:
            raise InputError(f"margin must be in (0, 700], found {self.margin}")
        if not self.p >= 1:
            raise InputError(f"norm must be 'inf' or a number ≥ 1, found {self.p}")


@dataclass(frozen=True)
class Selection:
    """How well a softmax over cells selects those that hold x when widened."""

    delta: float  # the error of a score
    leak: float  # the weight of all other cells, score errors included
    near: int  # how many keys can belong to the widened cells that hold x


@dataclass(frozen=True, eq=False)
class Partition:
    """A grid with a value per cell, a temperature, and the proof of `bound`.

    Theorem.  With ρ = ½ + η, |out − f| at x is at most the largest |f(x) − value of C| over the cells C that hold x
              when widened to ρ, plus leak(β, η)·osc + rounding. In L_p: the norms of both.
    Proof.    The weights factorise over the axes. Centres farther than ρ from y on some axis get at most `leak`
              (`selection.far_weight`, the union over axes). All others have cells that hold x when widened to ρ, and an
              average of their values is off by at most the largest, whatever their weights. That is why errors in
              the scores do no harm beyond the leak: a score off by δ multiplies the leak by e^{2δ}, no more.
    """

    target: Target
    grid: Grid
    values: Float[np.ndarray, "cells outputs"]
    beta: float
    eta: float
    positions: Positions
    p: float
    given_selection: Selection | None = None  # of other scores than these, with a proof of their own

    @cached_property
    def selection(self) -> Selection:
        if self.given_selection is not None:
            return self.given_selection
        grid = self.grid
        delta = _score_error(self.target, grid, self.beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, math.floor(1 + 2 * self.eta) + 1) for count in grid.counts)
        return Selection(delta, _leak(grid, self.beta, self.eta, delta), near)

    @cached_property
    def variation(self) -> Variation:
        """Over the cells widened to ρ."""
        return variation_norm(self.target, self.grid, 0.5 + self.eta, self.p)

    @cached_property
    def _variation_terms(self) -> list[Term]:
        """In L_∞ the variation over widened cells. In L_p that, or what holds for jumps at the cells' borders:

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
        wide = self.eta + float(self.grid.query_error.max())  # which border y is near is known to this
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
        """The value of key (j, i), in the order of keys: cells first, positions within them."""
        by_position = self.values.reshape(len(self.values), self.positions.n, -1)
        return self.positions.undo_leak(by_position).reshape(len(self.values) * self.positions.n, -1)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        return (("points_per_axis", " × ".join(map(str, self.grid.counts))), ("beta", self.beta), ("eta", self.eta))

    @cached_property
    def bound(self) -> Bound:
        grid, positions, u = self.grid, self.positions, UNIT_ROUNDOFF[self.grid.dtype]
        num_keys = grid.num_cells * positions.n
        delta, leak, near = self.selection.delta, self.selection.leak, self.selection.near
        largest = float(np.abs(self.stored_values).max(initial=0.0))
        cast = float(np.abs(self.stored_values - self.stored_values.astype(grid.dtype)).max(initial=0.0))
        rounding = average_error(num_keys, near, leak, u) * largest + cast + underflow(num_keys, grid.dtype)
        terms = [
            Term("leak", leak * self._spread, f"weight of all farther cells at β = {self.beta:.6g} in units of a cell"),
        ]
        if positions.n > 1:
            by_position = self.values.reshape(len(self.values), positions.n, -1)
            off, undone = positions.residue(by_position, self.stored_values.reshape(by_position.shape))
            rounding += undone
            wrong = math.expm1(2 * delta) if delta < 300 else math.inf
            terms.append(Term("position", wrong * off, "weights of other positions, not undone"))
        reason = f"{grid.dtype} sums over {num_keys:,} keys in any order, {near} of them near"
        terms.append(Term("rounding", rounding, reason))
        # ‖constant‖_p over the box is the constant times vol^{1/p}.
        volume = constant_norm(grid.box, self.p)
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


@dataclass(frozen=True)
class Positions:
    """n output positions, told apart by a score bonus of M; a = e^M − 1.

    A query at position i gives its keys weights in proportion to C = (aI + 11ᵀ)/(a + n) over positions, so values
    C⁻¹f return f exactly, for every M > 0.
    """

    n: int
    M: float

    @property
    def a(self) -> float:
        return math.expm1(self.M)

    @property
    def margin(self) -> float:
        return self.M if self.n > 1 else 0.0

    def undo_leak(self, f: Float[np.ndarray, "cells n k"]) -> Float[np.ndarray, "cells n k"]:
        """C⁻¹f = ((a+n) f_i − Σ f)/a."""
        return f if self.n == 1 else f + (self.n * f - f.sum(axis=1, keepdims=True)) / self.a

    def residue(self, f: np.ndarray, stored: np.ndarray) -> tuple[float, float]:
        """(max Σ_i' C_ii'|stored_i' − f_i|, rounding of `stored`).

        The sum without absolute values is 0; weights off by factors e^{±2δ} leave e^{2δ} − 1 of the first figure.
        """
        own = float(np.abs(stored - f).max())
        elsewhere = float(max(stored.max() - f.min(), f.max() - stored.min()))
        off = (self.a + 1) / (self.a + self.n) * own + (self.n - 1) / (self.a + self.n) * elsewhere
        return off, 4 * UNIT_ROUNDOFF["float64"] * self.n * float(np.abs(f).max()) * (1 + 1 / self.a)


def num_positions(target: Target) -> int:
    """The tokens of the output: n for (n, k), one for (k,) and ()."""
    return target.output_shape[0] if len(target.output_shape) == 2 else 1


def make_partition(target: Target, request: Request, rebuild: Callable[[tuple[int, ...]], Built]) -> Partition:
    """Chooses grid, β, η and values. `rebuild` builds with given points per axis, for what a refusal carries."""
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
    values = sample(target, grid, request.p, request.progress)
    if request.beta is None:
        eta = _sufficient_eta(target, grid, request.p)
        beta = _sufficient_beta(values, grid, eta, request.eps)
    else:
        beta, eta = request.beta, _best_eta(target, grid, values, request)
    return Partition(target, grid, values, beta, eta, positions, request.p)


def sample(target: Target, grid: Grid, p: float, progress: Progress | None) -> Float[np.ndarray, "cells outputs"]:
    """The value of every cell."""
    values = np.empty((grid.num_cells, target.num_outputs))
    for block, _, centres in grid.cells(0.5):
        averages = grid.values(target, block, centres, p)
        values[block] = target(centres) if averages is None else averages
        if progress:
            progress("sampling", block.stop / grid.num_cells)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest < float(np.finfo(grid.dtype).max) / 8:
        raise InputError(f"{target.describe()} reaches {largest:.3g}, more than {grid.dtype} holds: scale the function")
    return values


def choose_grid(
    target: Target,
    request: Request,
    eta: Callable[[Grid], float],
    cost: Cost,
    max_cells: int,
    rebuild: Callable[[tuple[int, ...]], Built],
) -> Grid:
    """The grid asked for, or one whose variation over cells widened by eta leaves room for leak and rounding.

    More than `max_cells` cells are sure to cost too much; whether fewer do, `cost` says.
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
        return Grid(target.box, counts, request.dtype)
    assert request.eps is not None
    counts = choose_counts(
        target, _share(target, request), _search_rho(target, eta), max_cells, request.dtype, request.p
    )
    if not _fits(request, cost, counts):
        raise _refusal(target, request, counts, eta, cost, rebuild)
    return Grid(target.box, counts, request.dtype)


def _fits(request: Request, cost: Cost, counts: tuple[int, ...]) -> bool:
    anchors, size = cost(counts)
    return anchors <= request.max_anchors and size <= request.max_bytes


def _share(target: Target, request: Request) -> float:
    """What the grid may use of eps: 1 % is kept for leak and rounding, and more for a boundary layer where f jumps."""
    assert request.eps is not None
    if target.is_continuous:
        return 0.99 * request.eps
    return (0.8 if request.dtype == "float64" else 0.6) * request.eps  # coarser arithmetic, wider layers


def _search_rho(target: Target, eta: Callable[[Grid], float]) -> Callable[[Grid], float]:
    """Cells widened by η; where f jumps, narrowed by it (see Partition._variation_terms)."""
    sign = 1 if target.is_continuous else -1
    return lambda grid: 0.5 + sign * min(0.4, eta(grid))


def _sufficient_eta(target: Target, grid: Grid, p: float) -> float:
    """At least twice the error of a score per unit of β, so that a large β always separates."""
    least = ETA if p == math.inf else ETA_LP
    return max(least, 2 * _score_error(target, grid, 1.0, 0.0), 2 * float(grid.query_error.max()))


def _sufficient_beta(values: np.ndarray, grid: Grid, eta: float, eps: float | None) -> float:
    """A β for which leak·osc is below 0.2 % of eps (or of the variation): leak ≈ e^{−β(2η − 2δ)}, δ ≤ η/2 per β."""
    spread = float(np.ptp(values, axis=0).max()) or 1.0
    goal = 0.002 * (eps if eps is not None else spread / max(grid.counts))
    ratio = min(1e300, spread / max(goal, 1e-300))
    beta = max(math.log(max(2.0, 64 * grid.box.d * ratio)) / eta, 4.0)
    return 2.0 ** math.ceil(math.log2(beta))  # a power of two: 2βL and β|L|² are then exact


def _best_eta(target: Target, grid: Grid, values: np.ndarray, request: Request) -> float:
    """For a given β: the η with the smallest variation + leak."""
    assert request.beta is not None
    spread = float(np.ptp(values, axis=0).max())
    best, chosen = math.inf, ETA
    for eta in (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        leaked = _leak(grid, request.beta, eta, 0.0) * spread
        if leaked >= best or eta > 2 * max(grid.counts):
            continue
        total = leaked + variation_norm(target, grid, 0.5 + eta, request.p).value
        if total < best:
            best, chosen = total, eta
    return chosen


def _refusal(
    target: Target,
    request: Request,
    needed: tuple[int, ...],
    eta: Callable[[Grid], float],
    cost: Cost,
    rebuild: Callable[[tuple[int, ...]], Built],
) -> BoundNotMet:
    """eps needs more anchors than allowed: says how many, and what can be reached, before anything large is made."""
    assert request.eps is not None
    anchors, size = cost(needed)
    fitting, too_large = 0.0, 1.0
    counts = (1,) * target.box.d
    for _ in range(50):  # bisection for the largest multiple of `needed` that fits: 50 halvings tell 1e15 cells apart
        shrink = (fitting + too_large) / 2
        smaller = tuple(max(1, math.floor(count * shrink)) for count in needed)
        if _fits(request, cost, smaller):
            fitting, counts = shrink, smaller
        else:
            too_large = shrink
    grid = Grid(target.box, counts, request.dtype)
    reachable = variation_norm(target, grid, _search_rho(target, eta)(grid), request.p)
    bound = reachable.value * request.eps / _share(target, request)
    is_many = anchors > request.max_anchors
    limit = f"max_anchors={request.max_anchors:,}" if is_many else f"max_bytes={request.max_bytes:,}"
    return BoundNotMet(
        f"cannot bring the bound to eps={request.eps:g} for {target.describe()} on {target.box} with a partition into "
        f"cells: it needs about {anchors:,} anchors ({' × '.join(map(str, needed))} centres, {size / 2**20:,.0f} MiB), "
        f"more than {limit} allows. Within it ({' × '.join(map(str, counts))} centres) the bound is about {bound:.3g}. "
        f"Choose eps ≥ {bound:.2g}, a smaller box, or raise max_anchors and max_bytes.",
        eps=request.eps,
        bound=bound,
        worst_box=reachable.cell,
        build=(lambda: rebuild(counts)) if _fits(request, cost, counts) else None,
    )


def bytes_per_anchor(target: Target) -> int:
    """Stored (an index of 8 bytes and a value of 8 per non-zero), folded, and the copies made on the way."""
    numbers = target.box.d + 1 + target.num_outputs // num_positions(target) + (num_positions(target) > 1)
    return 64 * numbers


def _score_error(target: Target, grid: Grid, beta: float, margin: float) -> float:
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


def _leak(grid: Grid, beta: float, eta: float, delta: float) -> float:
    """The weight of all centres farther than ½ + η on some axis: the union over the axes."""
    overhang = float(grid.query_error.max())  # at the ends of the box r may exceed ½ by this much
    if eta <= overhang:
        return 1.0
    return min(1.0, sum(far_weight(beta, 0.5 + eta, count, delta, overhang) for count in grid.counts))
