"""The zeros of an expression of one variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.numerics.bisection import least
from attnc.numerics.intervals import Interval, halved
from attnc.numerics.limits import check_time
from attnc.targets.expressions.evaluation import evaluate_boxes, evaluate_points
from attnc.targets.expressions.tree import Node, Step, schedule

SMALLEST_CELL = 2.0**-26
"""Least width of an undecided cell, as a share of the box: √u to a factor of √2. The square of a smaller share is lost
in rounding, and with it a zero that only touches."""
MAX_CELLS_EVALUATED = 20_000
"""Largest number of cells on which an expression is enclosed, so that the search ends. The rest stays undecided. Not
tuned."""


def zeros(node: Node, name: str, lo: float, hi: float) -> list[tuple[float, bool]]:
    """All zeros of a continuous expression on [lo, hi], each with a flag: True if the expression crosses 0 there.

    Cells whose range excludes 0 are dropped. A cell on which the slope excludes 0 has at most one zero, which bisection
    finds. Other cells are halved. Zeros that only touch remain as small clusters of cells.

    If the expression vanishes on a whole interval, no zero inside it is listed. The parts that bend at the ends of the
    interval have zeros there.
    """
    steps, _ = schedule((node,))
    cells = Interval(np.array([[lo]]), np.array([[hi]]))
    found: list[float] = []
    doubtful: list[Interval] = []
    spent = 0

    def value(x: float) -> float:
        return float(evaluate_points(steps, {name: np.array([x])})[-1].reshape(-1)[0])

    while len(cells):
        check_time("finding kinks")
        evaluated = evaluate_boxes(steps, (name,), cells, gradients=True, centred=True)
        y, slope = evaluated.ranges[-1], evaluated.gradients[-1].get(0)
        spent += len(cells)
        if slope is None:
            break  # a constant
        alive = np.broadcast_to((y.lo <= 0) & (y.hi >= 0) & ((y.lo < 0) | (y.hi > 0)), len(cells))
        is_monotone = alive & ((slope.lo > 0) | (slope.hi < 0))
        for row in np.flatnonzero(is_monotone):
            found += _bisect(value, float(cells.lo[row, 0]), float(cells.hi[row, 0]))
        cells = cells[alive & ~is_monotone]
        is_small = cells.width[:, 0] <= SMALLEST_CELL * (hi - lo)
        if spent > MAX_CELLS_EVALUATED:
            is_small[:] = True
        doubtful.append(cells[is_small])
        cells = halved(cells[~is_small], 0)
    touching = _touching(doubtful, steps, name, SMALLEST_CELL * (hi - lo))
    return [(x, True) for x in found] + [(x, False) for x in touching]


def _bisect(value: Callable[[float], float], lo: float, hi: float) -> list[float]:
    """Return the zero of a monotone function between lo and hi, if there is one."""
    at_lo, at_hi = value(lo), value(hi)
    if at_lo == 0 or at_hi == 0:
        return [lo if at_lo == 0 else hi]
    if not at_lo * at_hi < 0:
        return []
    above = least(lo, hi, lambda x: at_lo * value(x) <= 0, 0.0)
    return [min(float(np.nextafter(above, lo)), above, key=lambda x: abs(value(x)))]


def _touching(doubtful: list[Interval], steps: Sequence[Step], name: str, width: float) -> list[float]:
    """Return one point of each cluster of undecided cells: where the slope changes sign, or |value| is least."""
    clusters: list[tuple[float, float]] = []
    for lo, hi in sorted((lo, hi) for part in doubtful for (lo, hi) in np.hstack([part.lo, part.hi]).tolist()):
        if clusters and lo <= clusters[-1][1] + 0.5 * width:
            clusters[-1] = clusters[-1][0], max(hi, clusters[-1][1])
        else:
            clusters.append((lo, hi))

    def slope(x: float) -> float:
        point = evaluate_boxes(steps, (name,), Interval.point(np.array([[x]])), gradients=True)
        return float(point.gradients[-1][0].mid.reshape(-1)[0])

    places: list[float] = []
    for lo, hi in clusters:
        at = _bisect(slope, lo, hi)
        if not at:
            x = np.linspace(lo, hi, 65)
            values = np.abs(np.broadcast_to(evaluate_points(steps, {name: x})[-1], x.shape))
            at = [float(x[np.argmin(values)])]
        # In a long cluster the search ended early. Then a zero may also be at either end.
        places += at if hi - lo < 64 * width else [lo, *at, hi]
    return places
