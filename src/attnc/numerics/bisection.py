"""Bisection of a real number between two ends.

Examples
--------
The least number whose square is at least 2, to 1e-6:

>>> round(least(0.0, 2.0, lambda x: x * x >= 2, 1e-6), 5)
1.41421
"""

from __future__ import annotations

from collections.abc import Callable


def least(low: float, high: float, is_met: Callable[[float], bool], precision: float) -> float:
    """Return the least number that meets a condition, given that `high` meets it and `low` does not.

    A precision of 0 asks for all digits.
    """
    while high - low > precision and low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high
