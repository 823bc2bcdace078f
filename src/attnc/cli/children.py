"""A program in a process of its own, which ends when this one is interrupted."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

SECONDS_TO_END = 5.0
"""Seconds that an interrupted child has to end its own processes: it needs a few tenths of one."""


def run_child(command: Sequence[str], *, is_silent: bool) -> int:
    """Run a program to its end, and return its exit code. If this process is interrupted, so is the program.

    Ctrl-C on a terminal reaches both. A signal to this process alone is passed on.
    """
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL if is_silent else None)
    try:
        return child.wait()
    except BaseException:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        try:
            child.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
