"""Run a program in another process, and end it when this process is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def run_child(command: Sequence[str], *, is_silent: bool) -> int:
    """Run a program that writes no files to its end, and return its exit code.

    The program runs in its own session, which Ctrl-C does not reach. It is therefore never interrupted while it starts.
    If this process is interrupted, the program and all processes that it started are killed.
    """
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL if is_silent else None, start_new_session=True)
    try:
        return child.wait()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
