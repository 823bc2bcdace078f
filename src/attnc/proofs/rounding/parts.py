"""Bounds of rounding over many boxes: one for all of them where that is small enough, in parts where it is not.

Rounding changes slowly from place to place, but its bound over a box grows with the box: that of its parts is closer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import UNIT_ROUNDOFF, up

if TYPE_CHECKING:
    from jaxtyping import Float

RoundingOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(centres, radii) → bounds (boxes, outputs)."""
DEPTH = 2
"""Maximum number of halvings of a box along every axis: each multiplies the cost by 2^d."""
MOST_PARTS = 2**13
U = UNIT_ROUNDOFF["float64"]


def shared(
    bounds: RoundingOf, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"], enough: float
) -> Float[np.ndarray, "boxes outputs"]:
    """The bound of a box around many boxes, where it is at most `enough`; quarters of them where it is not."""
    found: np.ndarray | None = None
    groups = [np.arange(len(centres))]
    while groups:
        lo = np.stack([-up(radii[group] - centres[group]).max(axis=0) for group in groups])
        hi = np.stack([up(centres[group] + radii[group]).max(axis=0) for group in groups])
        middles = lo / 2 + hi / 2
        alone = np.array([len(group) == 1 for group in groups])
        first = np.array([group[0] for group in groups])
        middles = np.where(alone[:, None], centres[first], middles)
        reach = np.where(alone[:, None], radii[first], up(np.maximum(hi - middles, middles - lo), 4))
        upper = bounds(middles, reach)
        found = np.empty((len(centres), upper.shape[1])) if found is None else found
        open_groups = []
        for group, row, is_done in zip(groups, upper, alone | (upper.max(axis=1) <= enough), strict=True):
            if is_done:
                found[group] = row
            else:
                open_groups += [part for half in _halves(centres, group) for part in _halves(centres, half)]
        groups = open_groups
    assert found is not None
    return found


def _halves(centres: np.ndarray, group: np.ndarray) -> list[np.ndarray]:
    """Cut across the longest side of where the centres lie."""
    if len(group) == 1:
        return [group]
    axis = int(np.argmax(np.ptp(centres[group], axis=0)))
    order = np.argpartition(centres[group, axis], len(group) // 2)
    return [group[order[: len(group) // 2]], group[order[len(group) // 2 :]]]


def in_parts(
    bounds: RoundingOf,
    upper: Float[np.ndarray, "boxes outputs"],
    centres: Float[np.ndarray, "boxes d"],
    radii: Float[np.ndarray, "boxes d"],
    enough: Float[np.ndarray, " boxes"],
) -> Float[np.ndarray, "boxes outputs"]:
    """Bounds no larger than `upper`: of a box that has more than `enough`, the largest of its parts."""
    found, owner = upper.copy(), np.flatnonzero(upper.max(axis=1) > enough)
    done = np.zeros(upper.shape)  # the largest of the parts that are not halved any more
    centres, radii = centres[owner], radii[owner]
    for _ in range(DEPTH):
        if not 0 < len(owner) << centres.shape[1] <= MOST_PARTS:
            break
        for axis in range(centres.shape[1]):
            step = np.zeros_like(radii)
            step[:, axis] = radii[:, axis] / 2
            centres, radii = np.concatenate([centres - step, centres + step]), np.concatenate([radii - step] * 2)
            radii[:, axis] = up(radii[:, axis] + 4 * U * (np.abs(centres[:, axis]) + radii[:, axis]), 4)
            owner = np.concatenate([owner, owner])
        parts = bounds(centres, radii)
        largest = done.copy()
        np.maximum.at(largest, owner, parts)
        touched = np.unique(owner)
        found[touched] = np.minimum(found[touched], largest[touched])
        is_open = (parts.max(axis=1) > enough[owner]) & (found[owner].max(axis=1) > enough[owner])
        np.maximum.at(done, owner[~is_open], parts[~is_open])
        # If one part of a box stays above `enough`, only parts with equally large bounds matter.
        owner, centres, radii = owner[is_open], centres[is_open], radii[is_open]
    return found
