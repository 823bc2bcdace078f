"""All zeros of an expression of one variable, enclosed with intervals.

Cells whose range excludes 0 are dropped, a cell on which the slope excludes 0 has at most one zero, found by bisection,
and the rest is halved. Zeros that only touch remain as small clusters of cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.targets.expressions.evaluation import evaluate_boxes, evaluate_points
from attnc.targets.expressions.tree import Node, Step, schedule

SMALLEST = 2.0**-26
"""Of the width of the box: cells in doubt are halved down to this. No finer, as rounding hides what only touches."""
BUDGET = 20_000


def zeros(node: Node, name: str, lo: float, hi: float) -> list[tuple[float, bool]]:
    """All zeros of a continuous expression on [lo, hi], and whether it crosses 0 there or may only touch.

    Where it vanishes on a whole interval there is none inside it: what bends at its ends has a zero of its own there.
    """
    steps, _ = schedule((node,))
    cells = Interval(np.array([[lo]]), np.array([[hi]]))
    found: list[float] = []
    doubtful: list[Interval] = []
    spent = 0
    while len(cells):
        evaluated = evaluate_boxes(steps, (name,), cells, gradients=True, centred=True)
        y = _spread(evaluated.ranges[-1], len(cells))
        slope = evaluated.gradients[-1].get(0)
        spent += len(cells)
        alive = (y.lo <= 0) & (y.hi >= 0) & ((y.lo < 0) | (y.hi > 0))
        if slope is None:
            break  # a constant
        slope = _spread(slope, len(cells))
        is_monotone = alive & ((slope.lo > 0) | (slope.hi < 0))
        value = _value_of(steps, name)
        for row in np.flatnonzero(is_monotone):
            found += _bisect(value, float(cells.lo[row, 0]), float(cells.hi[row, 0]))
        cells = cells[alive & ~is_monotone]
        is_small = cells.width[:, 0] <= SMALLEST * (hi - lo)
        if spent > BUDGET:
            is_small[:] = True
        doubtful.append(cells[is_small])
        cells = _halved(cells[~is_small])
    touching = _touching(doubtful, steps, name, SMALLEST * (hi - lo))
    return [(x, True) for x in found] + [(x, False) for x in touching]


def _spread(y: Interval, count: int) -> Interval:
    """A range of a constant is one number for all cells."""
    return Interval(np.broadcast_to(y.lo, count), np.broadcast_to(y.hi, count))


def _halved(cells: Interval) -> Interval:
    middle = cells.mid
    return Interval(np.concatenate([cells.lo, middle]), np.concatenate([middle, cells.hi]))


def _value_of(steps: Sequence[Step], name: str) -> Callable[[float], float]:
    return lambda x: float(evaluate_points(steps, {name: np.array([x])})[-1].reshape(-1)[0])


def _bisect(value: Callable[[float], float], lo: float, hi: float) -> list[float]:
    """The zero of a monotone function between lo and hi, if there is one."""
    at_lo, at_hi = value(lo), value(hi)
    for end, at_end in ((lo, at_lo), (hi, at_hi)):
        if at_end == 0:
            return [end]
    if not at_lo * at_hi < 0:
        return []
    while True:
        middle = 0.5 * (lo + hi)
        if not lo < middle < hi:
            return [lo if abs(at_lo) < abs(at_hi) else hi]
        at_middle = value(middle)
        if at_middle == 0:
            return [middle]
        if at_lo * at_middle < 0:
            hi, at_hi = middle, at_middle
        else:
            lo, at_lo = middle, at_middle


def _touching(doubtful: list[Interval], steps: Sequence[Step], name: str, width: float) -> list[float]:
    """The clusters of cells in doubt: where the slope changes sign, or else where the value is least."""
    cells = sorted(
        (float(lo), float(hi)) for part in doubtful for lo, hi in zip(part.lo[:, 0], part.hi[:, 0], strict=True)
    )
    clusters: list[tuple[float, float]] = []
    for lo, hi in cells:
        if clusters and lo <= clusters[-1][1] + 0.5 * width:
            clusters[-1] = clusters[-1][0], max(hi, clusters[-1][1])
        else:
            clusters.append((lo, hi))

    def slope(x: float) -> float:
        point = evaluate_boxes(steps, (name,), Interval.point(np.array([[x]])), gradients=True)
        found = point.gradients[-1][0]
        return float(found.mid.reshape(-1)[0])

    places: list[float] = []
    for lo, hi in clusters:
        at = _bisect(slope, lo, hi)
        if not at:
            x = np.linspace(lo, hi, 65)
            values = np.abs(np.broadcast_to(evaluate_points(steps, {name: x})[-1], x.shape))
            at = [float(x[np.argmin(values)])]
        # A long cluster is where the budget was spent: both its ends are as likely.
        places += at if hi - lo < 64 * width else [lo, *at, hi]
    return places
