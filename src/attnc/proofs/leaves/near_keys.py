"""Which keys can matter on which boxes: the others are behind the best by a gap, everywhere on the box.

For keys k and j, the largest s_k − s_j on a box is (s_k − s_j)(c) + |a_k − a_j|·r, c its centre and r its half-widths.
With j the best key at c, a key whose difference is ≤ −gap has a weight of at most e^{−gap} on the whole box. Clusters
of boxes are halved, again and again, and each passes on only the keys that are near on the box around it: nothing of
size boxes × keys is made unless so many are near.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PAIRS_PER_CLUSTER = 2**13
FEW_INPUTS = 8
MINOR = 1e-7
"""Of many inputs those that change no score by more than this against another are not looked at key by key."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a head over boxes, centre by centre, and what differences of them may be off by."""

    head: SoftHead[Enclosed]
    centres: Float[np.ndarray, "boxes d"]
    radii: Float[np.ndarray, "boxes d"]

    @property
    def slopes(self) -> Float[np.ndarray, "keys d"]:
        return self.head.slopes.mid

    @property
    def num_keys(self) -> int:
        return len(self.head.offsets.mid)

    @cached_property
    def spreads(self) -> Float[np.ndarray, " d"]:
        """How much any two slopes differ, input by input."""
        return np.ptp(self.slopes, axis=0)

    @cached_property
    def slack(self) -> float:
        """Bounds the error of every difference of two scores as computed here, on any of the boxes.

        A score is off by its radii, and by γ of the roundings of a_k·c + c_k, of the difference, and of |a_k − a_j|·r,
        relative to the sizes of all that is added.
        """
        head, d = self.head, self.centres.shape[1]
        reach = (np.abs(self.centres) + self.radii).max(axis=0)
        radius = head.offsets.radius.max() + head.slopes.radius.max(axis=0) @ reach
        size = np.abs(head.offsets.mid).max() + np.abs(head.slopes.mid).max(axis=0) @ reach
        return float(4 * (radius + gamma(2 * d + 16, UNIT_ROUNDOFF["float64"]) * size) + 1e-300)

    def at(self, boxes: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Scores at the centres, for index arrays that broadcast."""
        scores = self.head.offsets.mid[keys]
        for axis in range(self.centres.shape[1]):
            scores = scores + self.slopes[keys, axis] * self.centres[boxes, axis]
        return np.asarray(scores)

    def leads(self, boxes: np.ndarray, keys: np.ndarray, others: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """|a_k − a_j|·r added to `scores`, which are differences s_k − s_j at the centres: their largest values."""
        for axis in range(self.centres.shape[1]):
            scores = scores + np.abs(self.slopes[keys, axis] - self.slopes[others, axis]) * self.radii[boxes, axis]
        return scores


def clusters(
    scores: Scores, gap: float, crowd: int | None = None
) -> Iterator[tuple[Int[np.ndarray, " boxes"], Int[np.ndarray, " keys"]]]:
    """(boxes, keys): on each of these boxes every other key is behind the best by more than `gap`.

    Clusters are small, unless halving them no longer sheds keys and more than `crowd` are left.
    """
    d = scores.centres.shape[1]
    pending = [(np.arange(len(scores.centres)), np.arange(scores.num_keys), 0)]
    while pending:
        boxes, keys, idle = pending.pop()
        near = _near(scores, boxes, keys, gap)
        idle = idle + 1 if len(near) > 0.9 * len(keys) else 0
        is_small = len(boxes) == 1 or len(boxes) * len(near) <= PAIRS_PER_CLUSTER
        is_crowded = crowd is not None and len(near) > crowd and idle > 2 * d + 2
        if is_small or is_crowded:
            yield boxes, near
            continue
        centres = scores.centres[boxes]
        axis = int(np.argmax(np.ptp(centres, axis=0)))
        order = np.argpartition(centres[:, axis], len(boxes) // 2)
        pending.append((boxes[order[: len(boxes) // 2]], near, idle))
        pending.append((boxes[order[len(boxes) // 2 :]], near, idle))


def _near(scores: Scores, boxes: np.ndarray, keys: np.ndarray, gap: float) -> np.ndarray:
    """The keys that are near on the box around all these boxes."""
    lo = (scores.centres[boxes] - scores.radii[boxes]).min(axis=0)
    hi = (scores.centres[boxes] + scores.radii[boxes]).max(axis=0)
    middle = lo / 2 + hi / 2
    reach = np.maximum(hi - middle, middle - lo)
    at_middle = scores.head.offsets.mid[keys] + scores.slopes[keys] @ middle
    best = int(np.argmax(at_middle))
    effects = scores.spreads * reach
    is_minor = effects <= MINOR if len(reach) > FEW_INPUTS else np.zeros(len(reach), bool)
    slopes = scores.slopes[:, ~is_minor]
    lead = at_middle - at_middle[best] + np.abs(slopes[keys] - slopes[keys[best]]) @ reach[~is_minor]
    lead = lead + effects[is_minor].sum()
    return keys[lead > -gap - scores.slack]


def near_pairs(
    scores: Scores, boxes: np.ndarray, keys: np.ndarray, gap: float
) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
    """(number among `boxes`, key, lead) for the keys of a cluster that are near on a box itself, box by box.

    The lead is the largest value over the box of s_k − s_j, j the best key at its centre, to within the slack.
    """
    if scores.centres.shape[1] <= FEW_INPUTS:
        at_centre = scores.at(boxes[:, None], keys[None])
        best = np.argmax(at_centre, axis=1)
        lead = at_centre - at_centre[np.arange(len(boxes)), best][:, None]
        lead = scores.leads(boxes[:, None], keys[None], keys[best][:, None], lead)
    else:
        lead = leads_over_many(scores, boxes, keys)
    row, column = np.nonzero(lead > -gap - scores.slack)
    return row, keys[column], lead[row, column]


def leads_over_many(scores: Scores, boxes: np.ndarray, keys: np.ndarray) -> Float[np.ndarray, "boxes keys"]:
    """The leads of all keys on all boxes: on inputs that hardly move by the most that any two keys differ there."""
    slopes, radii = scores.slopes[keys], scores.radii[boxes]
    at_centre = scores.centres[boxes] @ slopes.T + scores.head.offsets.mid[keys]
    best = np.argmax(at_centre, axis=1)
    effects = scores.spreads * radii
    is_minor = effects.max(axis=0) <= MINOR
    lead = at_centre - at_centre[np.arange(len(boxes)), best][:, None] + effects[:, is_minor].sum(axis=1)[:, None]
    for axis in np.flatnonzero(~is_minor):
        lead += np.abs(slopes[:, axis] - slopes[best, axis][:, None]) * radii[:, axis][:, None]
    return lead
