"""Limits on the time of a piece of work, and a clock that counts operations.

`with time_limit(60):` limits all work within the block, however deep it is called. A loop that can take long calls
`check_time`, which raises OutOfTime. A loop that has a part of its result to return asks `is_time_over` instead. Limits
nest: an inner one is never longer than the one around it.

Time on the wall depends on the machine and its load, and so would a result that depends on it. Limits within a piece of
work are therefore *counted* seconds. Long steps add their usual time, found from the sizes of their arrays alone
(`spend`). Then the same call has the same result everywhere, unless the limit of the whole call is reached. Counted
seconds raise nothing: only `is_time_over` looks at them.

Examples
--------
>>> with time_limit(60, counted=1.0):
...     spend(0.75)
...     with time_share(1 / 2):
...         spend(0.2)
...         print(is_time_over())
True
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from attnc.errors import AttncError


class OutOfTime(AttncError):
    """The time of a piece of work is over.

    Attributes
    ----------
    step : str
        The step that was not finished, as the words after "while".
    """

    def __init__(self, step: str) -> None:
        super().__init__(f"the time ran out while {step}")
        self.step = step


@dataclass(eq=False)
class _Clock:
    counted: float = 0.0


@dataclass(frozen=True, eq=False)
class _Deadline:
    """The ends of a block: on the wall's clock, and on the counted one, which nested blocks share."""

    end: float = math.inf
    counted_end: float = math.inf
    clock: _Clock = field(default_factory=_Clock)


_LIMIT: ContextVar[_Deadline | None] = ContextVar("limit", default=None)


@contextmanager
def time_limit(seconds: float = math.inf, counted: float = math.inf) -> Iterator[None]:
    """Limit the work within the block to these seconds on the wall, and to these counted seconds."""
    around = _LIMIT.get() or _Deadline()
    end, counted_end = time.monotonic() + seconds, around.clock.counted + counted
    token = _LIMIT.set(_Deadline(min(end, around.end), min(counted_end, around.counted_end), around.clock))
    try:
        yield
    finally:
        _LIMIT.reset(token)


@contextmanager
def time_share(part: float) -> Iterator[None]:
    """Limit the work within the block to this part of the time that is left, on both clocks."""
    left, counted = _left()
    with time_limit(part * max(0.0, left), part * max(0.0, counted)):
        yield


def spend(seconds: float) -> None:
    """Add to the counted seconds."""
    limit = _LIMIT.get()
    if limit is not None:
        limit.clock.counted += seconds


def counted_seconds() -> float:
    """Return the counted seconds since the outermost block began, 0 outside of any."""
    return (_LIMIT.get() or _Deadline()).clock.counted


def is_time_over() -> bool:
    """Return whether a limit is reached."""
    return min(_left()) <= 0


def check_time(step: str) -> None:
    """Raise OutOfTime if the time on the wall is over. `step` names the work: the words after "while"."""
    if _left()[0] <= 0:
        raise OutOfTime(step)


def _left() -> tuple[float, float]:
    limit = _LIMIT.get() or _Deadline()
    return limit.end - time.monotonic(), limit.counted_end - limit.clock.counted
