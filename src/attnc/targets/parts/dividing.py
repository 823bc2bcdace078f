"""A box in parts: halved where something is largest, as long as that makes it smaller.

A part at depth k is halved along axes[k]: whoever knows the axes can make the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.targets.parts.part_ranges import halved

if TYPE_CHECKING:
    from jaxtyping import Float

CLOSE = 1.1
"""Parts are halved until the bound is so close to what it is at single points."""
FAR = 1.5
"""A bound that is still so far above single points may take MANY_PARTS, however slowly it gets smaller."""
FEW, MOST_PARTS, MANY_PARTS, MOST_AXES = 32, 256, 1024, 40
WORTH = 0.97
"""Of the bound: with twice as many parts it is to be this at most, or there will be no more of them."""
WORST = 0.8
"""Parts with so much of the largest error are halved together."""
ASKED = 16
"""So many parts say along which axis all of their depth are halved."""


def divided(
    box: Interval, largest: Callable[[Interval], Float[np.ndarray, " boxes"]]
) -> tuple[Interval, Float[np.ndarray, " parts"], tuple[int, ...]]:
    """Parts, what is largest on each of them, and the axes."""
    parts, found, depth = box, largest(box), np.zeros(1, dtype=int)
    axes: list[int] = []
    seen, before = 0.0, (1, math.inf)
    while len(parts) < MANY_PARTS:
        is_far = FAR * seen < found.max() < math.inf
        if len(parts) >= MOST_PARTS and not is_far:
            break
        if len(parts) >= 2 * before[0] and len(parts) > FEW:
            if found.max() > WORTH * before[1] and not is_far:
                break
            before = len(parts), float(found.max())
        seen = max(seen, float(largest(Interval.point(parts[np.argsort(-found)[:ASKED]].mid)).max()))
        wide = (found > CLOSE * seen) & ((found >= WORST * found.max()) | ~np.isfinite(found))
        if wide.any() and int(depth[wide].max()) == len(axes):
            if len(axes) == MOST_AXES:
                break
            deep = np.flatnonzero(wide & (depth == len(axes)))
            axes.append(_axis(parts[deep[np.argsort(-found[deep])[:ASKED]]], len(axes), largest))
        if not wide.any():
            break
        halves = halved(parts[wide], np.array(axes)[depth[wide]])
        below = np.tile(depth[wide] + 1, 2)
        lo, hi = (np.concatenate(ends) for ends in ((parts.lo[~wide], halves.lo), (parts.hi[~wide], halves.hi)))
        parts, depth = Interval(lo, hi), np.concatenate([depth[~wide], below])
        found = np.concatenate([found[~wide], largest(halves)])
    return parts, found, tuple(axes)


def _axis(parts: Interval, depth: int, largest: Callable[[Interval], Float[np.ndarray, " boxes"]]) -> int:
    """The axis without whose width the errors would be smallest; one after the other where none would be finite."""
    d = parts.shape[1]
    lo, hi = np.tile(parts.lo, (d, 1, 1)), np.tile(parts.hi, (d, 1, 1))
    for axis in range(d):
        lo[axis, :, axis] = hi[axis, :, axis] = parts.mid[:, axis]
    found = largest(Interval(lo.reshape(-1, d), hi.reshape(-1, d))).reshape(d, -1)
    score = np.log(np.clip(found, 1e-300, 1e300)).sum(axis=1)
    return int(np.argmin(score)) if np.ptp(score) > 0 else depth % d
