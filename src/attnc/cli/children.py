"""A program in a process of its own, which ends when this one is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def run_child(command: Sequence[str], *, is_silent: bool) -> int:
    """Run a program that writes no files to its end, and return its exit code.

    It has a session of its own, which Ctrl-C does not reach: the program cannot be caught half way through its start.
    If this process is interrupted, the program and all processes that it started are ended, and the error goes on.
    """
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL if is_silent else None, start_new_session=True)
    try:
        return child.wait()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
