"""L_p norms over dyadic cells: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p}, b_C a bound of |f − network| on the cell C.

A cell across a jump of f carries the height of the jump, times a volume that halving makes as small as is wanted. Cells
are halved where that promises most. With b_C − |f − network| of the order of the width of C, a halving gains half of
what the one before did, in proportion to what is left; what is expected of it is that, averaged with half of what was
expected before, as a first halving may gain nothing where a second one does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import LIBM_ULPS, TINIEST, up
from attnc.proofs.cells.branching import MAX_LEVEL, Cells, Kind, Leaf, best_of, leaves_of
from attnc.proofs.cells.dyadic import cells, children
from attnc.proofs.taylor.ranges import SHARP
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float

_FIRST_CELLS = 64
_CELLS = 8192  # examined at a time
_HOPELESS = 2048  # cells without a finite bound, after which there will be none
_WORTHWHILE = 0.005  # of the sum: where halving all cells gains less, it is not done
_MOST_GAIN = 0.7  # of all that can be gained: the cells halved in one round
_SPARE = 1.5  # times what is missing to the goal: no more is expected of a round


@dataclass(frozen=True, eq=False)
class Integral:
    """‖f − network‖_p ≤ bound over the box, from bounds on the leaves, which cover it."""

    bound: float
    leaves: tuple[Leaf, ...]
    leaf_bounds: Float[np.ndarray, " leaves"]
    shares: Float[np.ndarray, " leaves"]  # of the integral
    terms: Mapping[str, float]  # what the bound is made of: those of the leaves, weighed as the norm weighs them
    complete: bool  # False: time or cells ran out first


@dataclass(frozen=True, eq=False)
class _Part:
    """Cells of one level, what each adds to the sum, and what halving it may take from that."""

    cells: Cells
    adds: Float[np.ndarray, " cells"]
    gains: Float[np.ndarray, " cells"]

    def where(self, rows: np.ndarray) -> _Part:
        return _Part(self.cells.where(rows), self.adds[rows], self.gains[rows])


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
) -> Integral:
    """A bound of the L_p norm, at most `goal` if that can be had, or not much above the least that leaves can prove."""
    began, d = time.monotonic(), box.d
    level = int(math.log2(_FIRST_CELLS) / d) if start_level is None else start_level
    first, _ = best_of(kinds, box, level, cells(d, level), SHARP)
    unit = float(np.max(first.upper, where=np.isfinite(first.upper), initial=TINIEST))  # powers are of b_C/unit
    adds = _adds(first, p, unit, d)
    parts, examined, complete = [_Part(first, adds, adds)], len(adds), True
    while True:
        total = sum(float(part.adds.sum()) for part in parts) * (1 + 2.0**-30)  # far more than such sums round
        gains = sum(float(part.gains.sum()) for part in parts)
        norm = _norm(box, p, unit, total)
        if norm <= goal or (gains <= _WORTHWHILE * total < math.inf):
            break
        missing = total * (1 - (goal / norm) ** p) if math.isfinite(norm) else math.inf
        chosen = _chosen(parts, _CELLS >> d, min(_MOST_GAIN * gains, _SPARE * missing))
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
    return Integral(norm, leaves, whole.upper.max(axis=1), shares, _terms(whole, shares, norm), complete)


def _adds(found: Cells, p: float, unit: float, d: int) -> Float[np.ndarray, " cells"]:
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


def _chosen(parts: Sequence[_Part], most: int, enough: float) -> list[np.ndarray]:
    """Of every part the cells to halve next: those that promise most, until they promise enough."""
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
    parts: Sequence[_Part],
    chosen: Sequence[np.ndarray],
    adds_of: Callable[[Cells], np.ndarray],
) -> list[_Part]:
    by_level: dict[int, list[_Part]] = {}
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
            _Part(found, adds, np.nan_to_num(gains.ravel(), nan=0.0, posinf=np.inf))
        )
    return [_joined(found) for _, found in sorted(by_level.items())]


def _joined(parts: Sequence[_Part]) -> _Part:
    adds, gains = (np.concatenate(rows) for rows in zip(*((part.adds, part.gains) for part in parts), strict=True))
    return _Part(Cells.joined([part.cells for part in parts]), adds, gains)


def _terms(whole: Cells, shares: np.ndarray, bound: float) -> dict[str, float]:
    """b^p = b^{p−1}·Σ terms on every cell: each term has its share of that."""
    rows, worst = np.arange(len(whole.upper)), np.argmax(whole.upper, axis=1)
    largest = np.maximum(whole.upper.max(axis=1), TINIEST)
    with np.errstate(invalid="ignore", over="ignore"):
        parts = {name: (shares * term[rows, worst] / largest).sum() * bound for name, term in whole.terms.items()}
    return {name: float(up(part, 16)) for name, part in parts.items() if part > 0}
