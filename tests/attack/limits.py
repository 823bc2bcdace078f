"""Limits of CPU time that raise an exception, and the peak of memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class TooLong(BaseException):
    """A limit of CPU time is reached. No handler of ordinary errors takes it for one of them."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong after this many CPU seconds of the process, and again every second until it is out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def memory(field: str = "VmHWM") -> int:
    """Return the largest resident memory of this process so far in bytes, or with VmRSS the present one."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
