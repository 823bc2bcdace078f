"""Tasks for the scheduler. Workers import them, so they are in a module of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def square(n: int) -> int:
    return n * n


def lost_at_first(folder: str, n: int) -> int:
    """End the worker by a signal when one of some tasks is tried for the first time."""
    tried = Path(folder, str(n))
    if n % 3 == 1 and not tried.exists():
        tried.touch()
        always_lost(n)
    return n * n


def always_lost(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


def inverse(n: int) -> float:
    return 1 / n
