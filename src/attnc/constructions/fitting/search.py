"""Searches that constructions share: the fewest keys for an error, the least factor, and steps downhill.

A *trial* is an object with an `error`. A search gets a function that makes trials, and stops at a trial whose error is
at most a goal.

`fewest` tries sizes from a ladder until one meets the goal. Bisection between that size and the largest one that failed
then finds the fewest keys. `tightened` asks for a smaller error whenever a trial misses the goal. `thinned` shortens
the axes of a grid one by one. `Bracket` does the same as `fewest` for a positive factor, such as the density of a grid,
if the error determines the next factor. `lowest` finds a low error over
several real numbers: from a coarse net, then by `descend`.

Examples
--------
The fewest keys k with an error 1/k² of at most 0.01, from a coarse ladder:

>>> from collections import namedtuple
>>> Trial = namedtuple("Trial", "size error")
>>> found = fewest((1, 4, 16, 64), lambda size, before: Trial(size, size**-2), 0.01)
>>> found.met.size, [trial.size for trial in found.failed]
(10, [1, 4])

A network whose error is three times the one that it is asked for: it is asked for a smaller one.

>>> found = tightened(
...     1.0, lambda asked, failed: Trial(asked, 3 * asked), lambda asked, trial: asked / trial.error, 1.0, 5
... )
>>> round(found.met.size, 3), len(found.failed)
(0.333, 1)

The minimum of (x − 1)² + (y + 2)², by steps along the axes:

>>> Place = namedtuple("Place", "shape error")
>>> at = lambda shape: Place(shape, (shape[0] - 1) ** 2 + (shape[1] + 2) ** 2)
>>> descend(at((0.0, 0.0)), lambda shapes: map(at, shapes), np.eye(2), 1.0, 0.1).shape
(1.0, -2.0)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from attnc.numerics.limits import OutOfTime, check_time

FITTING = "fitting"
"""The name of these searches in the message that the time ran out."""
Shape = tuple[float, ...]


class Tried(Protocol):
    """Anything whose error a search compares."""

    @property
    def error(self) -> float: ...


class TriedShape(Tried, Protocol):
    """A trial that was made from several real numbers."""

    @property
    def shape(self) -> Shape: ...


T = TypeVar("T", bound=Tried)
S = TypeVar("S", bound=TriedShape)
A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class Grown(Generic[T]):
    """The result of `fewest` or `tightened`: the trial that meets the goal, if any, and those that failed before it."""

    met: T | None
    failed: tuple[T, ...]
    gave_up: bool = False

    @property
    def best(self) -> T:
        """The failed trial with the least error."""
        return min(self.failed, key=lambda trial: trial.error)


def ladder(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Return the sizes below `most`, and `most` itself."""
    return (*(size for size in sizes if size < most), most)


def doubling(start: int, most: int) -> tuple[int, ...]:
    """Return start, 2·start, … and `most` as the last one."""
    return ladder((max(1, start) << k for k in range(most.bit_length())), most)


def fewest(
    sizes: Iterable[int],
    attempt: Callable[[int, Sequence[T]], T | None],
    goal: float,
    *,
    resolution: float = math.inf,
    gives_up: Callable[[Sequence[T]], bool] = lambda failed: False,
) -> Grown[T]:
    """Grow along `sizes` until a trial has an error of at most `goal`, then bisect towards the last size that failed.

    `attempt(size, before)` makes a trial, or None if there is none of this size. `before` are earlier trials from which
    to start: the failed ones, in order, and while bisecting the smallest one that meets the goal. Bisection ends when
    sizes differ by at most 1 + size/resolution, since among many keys a few do not matter. `gives_up(failed)` ends the
    growth early. If the time runs out while bisecting, the smallest trial so far is kept.
    """
    low, failed = 0, list[T]()
    for size in sizes:
        check_time(FITTING)
        met = attempt(size, failed)
        if met is not None and met.error <= goal:
            break
        low = size
        if met is not None:
            failed.append(met)
            if gives_up(failed):
                return Grown(None, tuple(failed), gave_up=True)
    else:
        return Grown(None, tuple(failed))
    while size - low > 1 + size // resolution:
        middle = (low + size) // 2
        try:
            check_time(FITTING)
            fewer = attempt(middle, [met])
        except OutOfTime:
            break
        if fewer is not None and fewer.error <= goal:
            size, met = middle, fewer
        else:
            low = middle
    return Grown(met, tuple(failed))


def tightened(
    asked: A,
    attempt: Callable[[A, Sequence[T]], T | None],
    less: Callable[[A, T], A],
    goal: float,
    tries: int,
    *,
    gives_up: Callable[[Sequence[T]], bool] = lambda failed: False,
) -> Grown[T]:
    """Ask for a smaller error whenever a trial misses the goal, up to `tries` times.

    `attempt(asked, failed)` makes a trial, or None if there is no trial for that eps, which ends the search. The next
    trial is made for `less(asked, trial)`. `gives_up(failed)` ends the search early.
    """
    failed = list[T]()
    for _ in range(tries):
        trial = attempt(asked, failed)
        if trial is not None and trial.error <= goal:
            return Grown(trial, tuple(failed))
        if trial is not None:
            failed.append(trial)
        if trial is None or gives_up(failed):
            return Grown(None, tuple(failed), gave_up=True)
        asked = less(asked, trial)
    return Grown(None, tuple(failed))


def thinned(found: A, num_axes: int, shorter: Callable[[A, int], A | None]) -> A:
    """Shorten each axis of a grid for as long as `shorter(found, axis)` returns a grid that is good enough.

    If the time runs out, the shortest grid so far is kept.
    """
    for axis in range(num_axes):
        with contextlib.suppress(OutOfTime):
            while (less := shorter(found, axis)) is not None:
                found = less
                check_time(FITTING)
    return found


@dataclass
class Bracket:
    """The factors between which the least one that meets a goal lies."""

    misses: float = field(default=0.0, init=False)  # the largest factor that is too small
    meets: float = field(default=math.inf, init=False)  # the smallest factor that is large enough

    def next(self, factor: float, is_met: bool, ratio: float) -> float:
        """Record whether `factor` meets the goal, and return the next: ratio·factor until both sides are known."""
        if is_met:
            self.meets = factor
        else:
            self.misses = factor
        if self.misses > 0 and self.meets < math.inf:
            return math.sqrt(self.misses * self.meets)
        return factor * ratio

    def is_within(self, ratio: float) -> bool:
        """Whether both sides are known, and less than this ratio apart."""
        return self.misses > 0 and self.meets / self.misses < ratio


THOROUGH_KEYS = 16
"""Up to this number of keys the search of shapes is thorough, since fits are quick. Measured with ten fits: with 8 the
keys are as many or one more or less; with 32 one fit takes 44 keys instead of 36, and one 21 instead of 25."""
DOWNHILL_FACTOR = 300.0
"""The descent starts from errors up to this multiple of the goal. Measured with ten fits: 150 changes nothing, and with
600 one takes 22 keys instead of 25, in as much time."""


def lowest(
    starts: Iterable[S],
    attempts: Callable[[Sequence[Shape]], Iterable[S | None]],
    axes: np.ndarray,
    first: float,
    last: float,
    goal: float = 0.0,
    *,
    num_descents: int = 1,
    near_enough: float = math.inf,
) -> S:
    """Return the best trial of a coarse net, after a descent from its best places if their error is small enough.

    The first trial with an error of at most `goal` ends the search. Several descents are made, since the error has
    several narrow valleys.
    """
    found = list[S]()
    for trial in starts:
        check_time(FITTING)
        if trial.error <= goal:
            return trial
        found.append(trial)
    found.sort(key=lambda trial: trial.error)
    best = found[0]
    for start in found[:num_descents] if best.error <= near_enough else ():
        best = min(best, descend(start, attempts, axes, first, last, goal), key=lambda trial: trial.error)
        if best.error <= goal:
            break
    return best


def descend(
    start: S,
    attempts: Callable[[Sequence[Shape]], Iterable[S | None]],
    axes: np.ndarray,
    first: float,
    last: float,
    goal: float = 0.0,
) -> S:
    """Step along ±axes to lower errors, with steps halved from `first` to `last` whenever none helps.

    Returns the best trial, or the first with an error of at most `goal`. `attempts` makes a trial of every shape in
    turn, or None for an illegal one.
    """
    best, step = start, first
    while step > last:
        moved, places = best, np.array(best.shape) + step * np.stack([axes, -axes], axis=1).reshape(-1, len(best.shape))
        for tried in attempts([tuple(place) for place in places.tolist()]):
            check_time(FITTING)
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
