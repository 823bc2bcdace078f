"""L_p norms over dyadic cells: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p}, b_C a bound of |f − network| on the cell C.

A cell across a jump of f adds the height of the jump times its volume, and halving makes that volume as small as is
wanted. Cells are halved where the expected gain is largest. If b_C − |f − network| is of the order of the width of C,
each halving gains half as much as the one before. The expected gain is the mean of two numbers: half the gain of the
last halving, and half the gain that was expected of it. The second is there because a first halving may gain nothing
where a second one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc.numerics.arrays import Float, Int
from attnc.numerics.limits import counted_seconds, is_time_over
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ULPS, TINIEST, up
from attnc.proofs.cells.branching import (
    FIRST_BATCH,
    HOPELESS,
    MAX_LEVEL,
    Budget,
    CellBounds,
    Covering,
    best_of,
    next_batch,
)
from attnc.proofs.cells.dyadic import Region, children, volumes
from attnc.proofs.cells.kind import SHARP, Kind
from attnc.proofs.margins import SMALL_LEAVES
from attnc.targets.box import Box

SUMMED = 1 + 2.0**-30
"""The factor on a sum over cells. With up to 2^20 cells, roundings are below 2^−32 of it."""
_FIRST_CELLS = 64
"""The largest number of cells to begin with, unless a level is given. Measured on 15 norms: with 8 the bounds are up to
1.4 times as large, with 512 there are up to 8 times as many leaves."""
_WORTHWHILE = 0.005
"""The search ends where halving all cells would lower the norm by less than this part of it. Measured as a part of the
sum of powers: between 0.0025 and 0.05 none of the 14 norms of the corpus changes."""
_MOST_GAIN, _ENOUGH_GAIN = 0.7, 1.5
"""The expected gains of the cells that are halved in one round are at most the first share of all expected gains, and
at most the second multiple of the distance to the goal. Measured on 15 norms: with 0.4 and with 1.0 bounds grow by up
to 2 % and there are 2 % fewer leaves, with 0.95 and with 3.0 there are 50 % and 15 % more leaves."""


@dataclass(frozen=True, eq=False)
class _WeighedCells(CellBounds):
    """Cells with the amount that each adds to the sum, and the amount by which halving it may lower the sum."""

    adds: Float[np.ndarray, " cells"]
    gains: Float[np.ndarray, " cells"]


def bound_integral(
    kinds: Sequence[Kind],
    box: Box,
    p: float,
    *,
    goal: float = 0.0,
    start_level: int | None = None,
    budget: Budget | None = None,
) -> Covering:
    """Bound the L_p norm by at most `goal` or, if that is impossible, by little more than leaves can prove at best.

    If the budget has a region, the norm is over this region alone.
    """
    d, budget = box.d, budget or Budget()
    level = int(math.log2(_FIRST_CELLS) / d) if start_level is None else start_level
    region = budget.region or Region(0, 0, 1)
    level = max(level, region.level)
    first, _ = best_of(kinds, box, level, region.cells(d, level), SHARP)
    unit = float(np.max(first.upper, where=np.isfinite(first.upper), initial=TINIEST))  # powers are of b_C/unit
    adds = _adds(first, p, unit, box)
    known, examined, complete = _WeighedCells(**vars(first), adds=adds, gains=adds), len(first), True
    batch = FIRST_BATCH
    while True:
        total, gains = float(known.adds.sum()) * SUMMED * (1 + SMALL_LEAVES), float(known.gains.sum())
        norm = _norm(box, p, unit, total)
        if norm <= goal or (gains <= (1 - (1 - _WORTHWHILE) ** p) * total < math.inf):
            break
        missing = total * (1 - (goal / norm) ** p) if math.isfinite(norm) else math.inf
        rows = _chosen(known, max(1, batch >> d), min(_MOST_GAIN * gains, _ENOUGH_GAIN * missing))
        is_hopeless = examined > HOPELESS and not np.isfinite(known.adds).any()
        is_spent = is_time_over() or examined + (len(rows) << d) > budget.cells
        if is_hopeless or is_spent or not len(rows):
            complete = False
            break
        examined += len(rows) << d
        parents = known.where(rows[np.argsort(known.level[rows], kind="stable")])
        before = counted_seconds()
        found, _ = best_of(kinds, box, np.repeat(parents.level + 1, 1 << d), children(parents.index), SHARP)
        batch = next_batch(batch, before)
        halves = _with_gains(found, _adds(found, p, unit, box), parents)
        known = _WeighedCells.joined([known.where(np.delete(np.arange(len(known)), rows)), halves])
        budget.report(examined / budget.cells)
    known = known.where(np.argsort(known.level, kind="stable"))
    if math.isfinite(total):
        least = (1 - 2.0**-20) * unit * (SMALL_LEAVES * total / (1 + SMALL_LEAVES)) ** (1 / p)
        known = replace(known, upper=np.maximum(known.upper, least))
        known = replace(known, adds=_adds(known, p, unit, box))
    with quiet():
        shares = known.adds / max(total, TINIEST)
    return Covering(box, kinds, known, complete, norm=norm, shares=shares)


def norm_of_leaves(box: Box, p: float, level: Int[np.ndarray, " cells"], bounds: Float[np.ndarray, " cells"]) -> float:
    """Return the bound of an L_p norm that follows from bounds on cells of a box without knots, rounded up."""
    unit = float(np.max(bounds, initial=TINIEST))
    return _norm(box, p, unit, float(_weighed(np.ldexp(1.0, -box.d * level), bounds, p, unit).sum()) * SUMMED)


def _adds(found: CellBounds, p: float, unit: float, box: Box) -> Float[np.ndarray, " cells"]:
    """Return vol(C)·(b_C/unit)^p, rounded up. Volumes are in units of that of the box."""
    return _weighed(volumes(box, found.level, found.index), found.upper.max(axis=1), p, unit)


def _weighed(
    volume: Float[np.ndarray, " cells"], bounds: Float[np.ndarray, " cells"], p: float, unit: float
) -> Float[np.ndarray, " cells"]:
    with quiet():
        return np.asarray(up(volume * up(up(bounds / unit) ** p, LIBM_ULPS)))


def _norm(box: Box, p: float, unit: float, total: float) -> float:
    """Return unit·(vol·total)^{1/p}, rounded up."""
    if not math.isfinite(total):
        return math.inf
    root = float(up(float(up(total)) ** (1 / p), LIBM_ULPS + 4))
    for width in up(box.hi - box.lo):
        # The exponent 1/p is off by a unit, and so is its product with a logarithm of up to 1500.
        root = float(up(root * float(up(float(width) ** (1 / p), LIBM_ULPS + 2048)), 2))
    return float(up(root * unit * (1 + abs(math.log(max(total, TINIEST))) * 2.0**-52), 4))


def _chosen(known: _WeighedCells, most: int, enough: float) -> Int[np.ndarray, " rows"]:
    """Return the cells to halve next: those with the largest expected gains, until these sum to `enough`."""
    gains = np.where(known.level < MAX_LEVEL, known.gains, 0.0)
    order = np.argsort(-gains, kind="stable")[:most]
    with quiet():
        running = np.cumsum(gains[order])
        count = 1 + int(np.searchsorted(running, enough)) if np.isfinite(running).all() else most
    order = order[:count]
    return np.sort(order[gains[order] > 0])


def _with_gains(found: CellBounds, adds: Float[np.ndarray, " cells"], parents: _WeighedCells) -> _WeighedCells:
    """Return the halves of cells, with the gains expected of halving them again: at most their parts of the norm."""
    of_parent = adds.reshape(len(parents), -1)
    sums = of_parent.sum(axis=1)
    with quiet():
        expected = (np.maximum(0.0, parents.adds - sums) + parents.gains) / 4
        gains = np.where(np.isfinite(expected), np.minimum(expected / sums, 1.0), 1.0)[:, None] * of_parent
    return _WeighedCells(**vars(found), adds=adds, gains=np.nan_to_num(gains.ravel(), nan=0.0, posinf=np.inf))
