"""One box, and the ends of an interval."""

from __future__ import annotations

import numpy as np

from attnc.numerics.intervals import Interval


def box(*sides: tuple[float, float]) -> Interval:
    """One box."""
    ends = np.array(sides, dtype=float).reshape(1, len(sides), 2)
    return Interval(ends[..., 0], ends[..., 1])


def ends(x: Interval) -> list[float]:
    return [x.lo.item(), x.hi.item()]
