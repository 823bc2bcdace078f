"""Limits of a check: on its time, on its memory, and on its life, which ends with the process that asked for it."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field

from attnc_checker.files import Undecided

PILOT, ROUNDS = 1 / 20, 4
"""The time of all leaves is predicted after this share of the limit and as many turns of every process. The first
leaves take longer than others: they include the selection of the keys of their regions."""
CLEARLY = 3
"""A check ends early if it would take this many times the limit. Predictions were at most 1.6 times the time taken
(measured: six checks of 256 to 1,336 leaves)."""
WATCH = 1.0
"""Seconds between two looks at the parent. A look takes microseconds."""
ALLOW_MORE = "Allow more with --memory, or use fewer processes."


@dataclass(frozen=True)
class Limit:
    """A limit on the time of a check in seconds."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float | None:
        return None if math.isinf(self.seconds) else max(0.0, self.started + self.seconds - time.monotonic())

    def look(self, begun: float, done: int, count: int, pilot: int, *, is_over: bool = False) -> None:
        """Raise Undecided if the time is over, or if all leaves would clearly take longer, by the time of the first."""
        spent, proving = (time.monotonic() - since for since in (self.started, begun))
        needed = spent + proving * (count / max(1, done) - 1)
        is_known = done >= pilot and spent >= PILOT * self.seconds
        is_hopeless = is_known and needed > CLEARLY * self.seconds
        if done < count and (is_over or spent > self.seconds or is_hopeless):
            all_take = f", and all would take about {needed:.0f} s" if done >= pilot else ""
            raise Undecided(
                f"{done:,} of {count:,} leaves were proved in {spent:.1f} s{all_take}. "
                f"The limit is {self.seconds:.3g} s: allow more with --seconds."
            )


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however that happened. Call it in the main thread."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, WATCH, WATCH)
    # While Python shuts down it removes the handler, and then the next signal would end the process with an error.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    look()


def limit_memory(megabytes: float) -> None:
    """Limit the memory that this process and its later children take from now on, where the system can do that."""
    if sys.platform == "linux":
        import resource  # in the function: WebAssembly has no such module, and the checker runs there too

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()
        with contextlib.suppress(ValueError):  # a lower limit was set before
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (now + int(megabytes * 1e6), hard))
