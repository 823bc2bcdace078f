"""Parts cover the box, and are as many as the distance to single points asks for."""

from __future__ import annotations

import math

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.targets.parts.dividing import CLOSE, FAR, MANY_PARTS, MOST_PARTS, divided

BOX = Interval(np.full((1, 10), -1.0), np.full((1, 10), 1.0))


def volume(parts: Interval) -> float:
    return float(np.prod(parts.hi - parts.lo, axis=1).sum())


def test_a_bound_that_stays_far_takes_many_parts():
    parts, found, axes = divided(BOX, lambda boxes: 1.0 + boxes.width.sum(axis=1))
    assert MANY_PARTS <= len(parts) <= 2 * MANY_PARTS
    assert volume(parts) == volume(BOX)
    assert found.max() > FAR
    assert set(axes) <= set(range(10))


def test_a_bound_that_is_near_takes_few():
    """What is left above 1.1 is not worth more parts, as it is below 1.5."""
    parts, found, _ = divided(BOX, lambda boxes: 1.0 + boxes.width.sum(axis=1) / 50)
    assert len(parts) <= 2 * MOST_PARTS
    assert CLOSE < found.max() <= FAR
    assert volume(parts) == volume(BOX)
    assert len(divided(BOX, lambda boxes: np.ones(len(boxes)))[0]) == 1


def test_what_is_infinite_everywhere_is_given_up_early():
    parts, found, _ = divided(BOX, lambda boxes: np.where(boxes.width.max(axis=1) > 0, math.inf, 1.0))
    assert len(parts) <= MOST_PARTS
    assert np.isinf(found).all()
