"""L_p norms over dyadic cells: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p}, b_C a bound of |f − network| on the cell C.

A cell across a jump of f carries the height of the jump, times a volume that halving makes as small as is wanted. Cells
are halved where the expected gain is largest. With b_C − |f − network| of the order of the width of C, a halving gains
half as much as the one before it, relative to the rest. The expected gain is the mean of that and of half the gain that
was expected before, because a first halving may gain nothing where a second one does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import LIBM_ULPS, TINIEST, up
from attnc.proofs.cells.branching import MAX_LEVEL, CellBounds, Covering, best_of, leaves_of
from attnc.proofs.cells.dyadic import cells, children
from attnc.proofs.cells.kind import Kind
from attnc.proofs.taylor.ranges import SHARP
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float

_FIRST_CELLS = 64  # the most cells to begin with
_CELLS = 8192  # cells examined at a time
_HOPELESS = 2048  # after this many cells without a finite bound the search ends
_WORTHWHILE = 0.005  # the search ends where halving all cells would lower the sum by less than this part of it
_MOST_GAIN = 0.7  # the cells halved in one round promise at most this part of all that can be gained
_ENOUGH_GAIN = 1.5  # nor do they promise more than this multiple of the distance to the goal


@dataclass(frozen=True, eq=False)
class _LevelPart:
    """Cells of one level, the amount that each adds to the sum, and the amount that halving it may take away."""

    cells: CellBounds
    adds: Float[np.ndarray, " cells"]
    gains: Float[np.ndarray, " cells"]

    def where(self, rows: np.ndarray) -> _LevelPart:
        return _LevelPart(self.cells.where(rows), self.adds[rows], self.gains[rows])


def bound_integral(
    kinds: Sequence[Kind],
    box: Box,
    p: float,
    *,
    goal: float = 0.0,
    time_budget: float = 30.0,
    box_budget: int = 100_000,
    start_level: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Covering:
    """A bound of the L_p norm, at most `goal` if that can be had, or not much above the least that leaves can prove."""
    began, d = time.monotonic(), box.d
    level = int(math.log2(_FIRST_CELLS) / d) if start_level is None else start_level
    first, _ = best_of(kinds, box, level, cells(d, level), SHARP)
    unit = float(np.max(first.upper, where=np.isfinite(first.upper), initial=TINIEST))  # powers are of b_C/unit
    adds = _adds(first, p, unit, d)
    parts, examined, complete = [_LevelPart(first, adds, adds)], len(adds), True
    while True:
        total = sum(float(part.adds.sum()) for part in parts) * (1 + 2.0**-30)  # far more than such sums round
        gains = sum(float(part.gains.sum()) for part in parts)
        norm = _norm(box, p, unit, total)
        if norm <= goal or (gains <= _WORTHWHILE * total < math.inf):
            break
        missing = total * (1 - (goal / norm) ** p) if math.isfinite(norm) else math.inf
        chosen = _chosen(parts, _CELLS >> d, min(_MOST_GAIN * gains, _ENOUGH_GAIN * missing))
        num_chosen = sum(len(rows) for rows in chosen)
        is_hopeless = examined > _HOPELESS and not any(np.isfinite(part.adds).any() for part in parts)
        if (
            is_hopeless
            or time.monotonic() - began > time_budget
            or examined + (num_chosen << d) > box_budget
            or not num_chosen
        ):
            complete = False
            break
        examined += num_chosen << d
        parts = _halved(kinds, box, parts, chosen, lambda found: _adds(found, p, unit, d))
        if progress is not None:
            progress("proving", min(1.0, examined / box_budget))
    leaves, whole = leaves_of(kinds, [part.cells for part in parts])
    shares = np.concatenate([part.adds for part in parts if len(part.adds)])
    with np.errstate(invalid="ignore"):
        shares = shares / max(total, TINIEST)
    return Covering(box, leaves, whole.upper, whole.terms, 0.0, goal, examined, complete, norm, shares)


def _adds(found: CellBounds, p: float, unit: float, d: int) -> Float[np.ndarray, " cells"]:
    """vol(C)·(b_C/unit)^p, rounded up, in units of the volume of the box: powers of two, exact."""
    with np.errstate(over="ignore", under="ignore"):
        powers = up(up(found.upper.max(axis=1) / unit) ** p, LIBM_ULPS)
        return np.asarray(up(powers * 0.5 ** (d * found.level)))


def _norm(box: Box, p: float, unit: float, total: float) -> float:
    """unit·(vol·total)^{1/p}, rounded up."""
    if not math.isfinite(total):
        return math.inf
    root = float(up(float(up(total)) ** (1 / p), LIBM_ULPS + 4))
    for width in up(box.hi - box.lo):
        # The exponent 1/p is off by a unit, and so is its product with a logarithm of up to 1500.
        root = float(up(root * float(up(float(width) ** (1 / p), LIBM_ULPS + 2048)), 2))
    return float(up(root * unit * (1 + abs(math.log(max(total, TINIEST))) * 2.0**-52), 4))


def _chosen(parts: Sequence[_LevelPart], most: int, enough: float) -> list[np.ndarray]:
    """The cells of every part to halve next: those that promise most, until they promise enough."""
    gains = np.concatenate([part.gains for part in parts])
    order = np.argsort(-gains, kind="stable")[:most]
    with np.errstate(invalid="ignore"):
        running = np.cumsum(gains[order])
        count = 1 + int(np.searchsorted(running, enough)) if np.isfinite(running).all() else most
    owners = np.repeat(np.arange(len(parts)), [len(part.gains) for part in parts])
    starts = np.cumsum([0, *(len(part.gains) for part in parts)])
    order = order[:count]
    order = order[gains[order] > 0]
    return [
        np.sort(order[owners[order] == i]) - starts[i] if part.cells.level < MAX_LEVEL else np.zeros(0, dtype=np.int64)
        for i, part in enumerate(parts)
    ]


def _halved(
    kinds: Sequence[Kind],
    box: Box,
    parts: Sequence[_LevelPart],
    chosen: Sequence[np.ndarray],
    adds_of: Callable[[CellBounds], np.ndarray],
) -> list[_LevelPart]:
    by_level: dict[int, list[_LevelPart]] = {}
    for part, rows in zip(parts, chosen, strict=True):
        level = part.cells.level
        kept = np.ones(len(part.adds), dtype=bool)
        kept[rows] = False
        by_level.setdefault(level, []).append(part.where(kept))
        if not len(rows):
            continue
        found, _ = best_of(kinds, box, level + 1, children(part.cells.index[rows]), SHARP)
        adds = adds_of(found)
        of_parent = adds.reshape(len(rows), -1)
        sums = of_parent.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = (np.maximum(0.0, part.adds[rows] - sums) + part.gains[rows]) / 4
            gains = np.where(np.isfinite(expected), expected / sums, 1.0)[:, None] * of_parent
        by_level.setdefault(level + 1, []).append(
            _LevelPart(found, adds, np.nan_to_num(gains.ravel(), nan=0.0, posinf=np.inf))
        )
    return [_joined(found) for _, found in sorted(by_level.items())]


def _joined(parts: Sequence[_LevelPart]) -> _LevelPart:
    adds, gains = (np.concatenate(rows) for rows in zip(*((part.adds, part.gains) for part in parts), strict=True))
    return _LevelPart(CellBounds.joined([part.cells for part in parts]), adds, gains)
