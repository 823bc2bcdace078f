"""The arithmetic of the running thread: proofs need IEEE 754 rounding to nearest, and certificates are about it.

A thread may have another one, since each has its own rounding mode and its own treatment of subnormal numbers. It is
changed by `torch.set_flush_denormal(True)`, and by loading some libraries that were linked with -ffast-math.
"""

from __future__ import annotations

import functools
import warnings

from attnc.errors import InputError
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF

SMALLEST_NORMAL = 2.0**-1022
"""The smallest positive float64 number with all of its digits."""
HALF = 0.5
ONE = 1.0
MORE_THAN_HALF = 1.5 * UNIT_ROUNDOFF["float64"]
LESS_THAN_HALF = 0.5 * UNIT_ROUNDOFF["float64"]
"""Numbers on either side of half the distance from 1 to the next float64 number."""


def fault() -> str | None:
    """Return in words how the arithmetic of this thread differs from the assumed one, or None. It takes 0.2 µs.

    All operands are names: Python computes with literals when it compiles the code, in the arithmetic of that moment.
    """
    if TINIEST == 0.0 or SMALLEST_NORMAL * HALF == 0.0:
        return "takes subnormal numbers for zero (torch.set_flush_denormal(False) ends this, if torch began it)"
    if ONE + MORE_THAN_HALF == ONE or ONE + LESS_THAN_HALF != ONE or -ONE - LESS_THAN_HALF != -ONE:
        return "does not round to the nearest number (fesetround(FE_TONEAREST) of the C library ends this)"
    return None


def warn_of_fault() -> None:
    """Warn, once per process, if the arithmetic of this thread is not that of certificates."""
    if (found := fault()) is not None:
        _warn_once(found)


def require_no_fault() -> None:
    """Raise InputError if nothing can be proved in the arithmetic of this thread."""
    if (found := fault()) is not None:
        raise InputError(f"nothing can be proved here: the arithmetic of this thread {found}")


@functools.cache
def _warn_once(found: str) -> None:
    message = f"the arithmetic of this thread {found}, so the bound of a certificate does not hold; see `attnc doctor`"
    warnings.warn(message, RuntimeWarning, stacklevel=5)
