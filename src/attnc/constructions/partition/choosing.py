"""The grid, the temperature and the values of a partition for a target; or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.limits import bytes_per_anchor
from attnc.constructions.partition.grid import Grid, Variation, choose_counts, variation_norm
from attnc.constructions.partition.of_grid import Partition, grid_leak, grid_score_error
from attnc.constructions.partition.positions import Positions, num_positions
from attnc.constructions.partition.request import Request
from attnc.constructions.unary.request import round_above
from attnc.errors import BoundNotMet, InputError
from attnc.targets.box import show_intervals
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

Cost = Callable[[tuple[int, ...]], tuple[int, int]]
"""Anchors and bytes of a program for a grid with this many cells an axis."""
ETA = 1 / 128
"""How far beyond its cell a centre may still win: costs 2·ETA ≈ 1.6 % of the bound, and sets how hard β must be."""
ETA_LP = 2.0**-14
"""The same for L_p norms, where what is lost is the whole jump on a layer of this width about the cells' borders."""


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
    if _fits(request, cost, counts):
        return Grid(target.box, counts, request.dtype)
    # What is needed may have been estimated only, and generously: the largest grid that is allowed may do.
    smaller = _largest_allowed(target, request, counts, cost)
    reachable = variation_norm(target, smaller, _search_rho(target, eta)(smaller), request.p)
    if reachable.value <= _share(target, request) and _fits(request, cost, smaller.counts):
        return smaller
    raise _refusal(target, request, counts, smaller, reachable, cost, rebuild)


def _largest_allowed(target: Target, request: Request, needed: tuple[int, ...], cost: Cost) -> Grid:
    """The largest multiple of `needed` within the limits, by bisection: 50 halvings tell 1e15 cells apart."""
    fitting, too_large, counts = 0.0, 1.0, (1,) * target.box.d
    for _ in range(50):
        shrink = (fitting + too_large) / 2
        smaller = tuple(max(1, math.floor(count * shrink)) for count in needed)
        if _fits(request, cost, smaller):
            fitting, counts = shrink, smaller
        else:
            too_large = shrink
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
    return max(least, 2 * grid_score_error(target, grid, 1.0, 0.0), 2 * float(grid.query_error.max()))


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
    grid: Grid,
    reachable: Variation,
    cost: Cost,
    rebuild: Callable[[tuple[int, ...]], Built],
) -> BoundNotMet:
    """eps needs more anchors than allowed: says how many, and what can be reached, before anything large is made."""
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
