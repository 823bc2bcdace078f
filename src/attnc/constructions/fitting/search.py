"""Downhill by trial: steps along given axes, halved when none helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

Shape = tuple[float, ...]


class Tried(Protocol):
    """What a shape led to."""

    @property
    def shape(self) -> Shape: ...

    @property
    def error(self) -> float: ...


S = TypeVar("S", bound=Tried)


def descend(
    start: S, attempt: Callable[[Shape], S | None], axes: np.ndarray, first: float, last: float, goal: float = 0.0
) -> S:
    """The best found when steps along ±axes go from `first` to `last`, or the first with an error of at most `goal`.

    `attempt` gives None where a shape is out of the question.
    """
    best, step = start, first
    while step > last:
        moved = best
        for axis in axes:
            for sign in (1.0, -1.0):
                tried = attempt(tuple(float(v) for v in np.array(best.shape) + sign * step * axis))
                if tried is None:
                    continue
                if tried.error <= goal:
                    return tried
                if tried.error < moved.error:
                    moved = tried
        if moved is best:
            step /= 2
        best = moved
    return best
