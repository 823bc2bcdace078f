"""Times of contenders that take turns in one process, and the facts about the machine that belong beside them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

BUSY = 0.5
"""Load average per core above which times are not worth keeping: another process uses half of the machine."""


def alternated(
    runs: Mapping[str, Callable[[], object]], turns: int, seconds: float = 10.0, turn_seconds: float = 0.0
) -> dict[str, float]:
    """Return the least wall-clock seconds of each run. The runs take turns, at least once, at most `turns` times.

    No turn starts after `seconds`. A run that takes less than `turn_seconds` is repeated for that long in its turn.
    Each run is called once before, without being timed.
    """
    for run in runs.values():
        run()
    least, end = dict.fromkeys(runs, float("inf")), time.perf_counter() + seconds
    for turn in range(turns):
        if turn and time.perf_counter() > end:
            break
        for name, run in runs.items():
            now = time.perf_counter()
            over = now + turn_seconds
            while True:
                start = now
                run()
                now = time.perf_counter()
                least[name] = min(least[name], now - start)
                if now >= over:
                    break
    return least


def load_per_core() -> float:
    """Return the load average of the last minute, divided by the number of cores."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def busy_warning(load: float) -> str | None:
    """Return a sentence if the machine was busy, else None."""
    if load <= BUSY:
        return None
    return f"The machine was busy (load average per core {load:.1f}): these times are not worth keeping."


def versions(packages: Sequence[str]) -> str:
    """Return the versions of Python and of those packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def processor() -> str:
    """Return the name of the processor, as far as the system tells it, and the number of cores."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"
