"""The costs of a measurement: processor time, and how far memory grew."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from attnc_lab.experiment import CPU_SECONDS, PEAK_MIB, Row

Result = TypeVar("Result")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"
"""The number that resets the kernel's record of the largest resident memory of the process."""


def metered(work: Callable[[], Result]) -> tuple[Result, Row]:
    """Do some work, and return its result and its costs.

    Processor time counts all threads of the process. Memory is the largest resident memory during the work above that
    before it, or above that after it if this is more: libraries that the work loaded stay, and are not counted. Only
    Linux records memory, so elsewhere this column is missing.
    """
    before, started = _resident_reset(), time.process_time()
    result = work()
    costs: Row = {CPU_SECONDS: round(time.process_time() - started, 4)}
    peak = _kib("VmHWM")
    after = _resident()
    if before is not None and after is not None and peak is not None:
        costs[PEAK_MIB] = round(max(0, peak - max(before, after)) / 1024, 2)
    return result, costs


def _resident_reset() -> int | None:
    """Return the resident memory in KiB, and reset the record of the peak."""
    found = _resident()
    try:
        CLEAR.write_text(CLEAR_PEAK)
    except OSError:
        return None
    return found


def _resident() -> int | None:
    """Return free memory to the system, and return the resident memory in KiB."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # otherwise the work could reuse memory that the process still holds, and would seem to need none
    return _kib("VmRSS")


def _kib(name: str) -> int | None:
    """Return an entry of the kernel's status of this process."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
