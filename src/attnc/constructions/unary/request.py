"""What may be asked of the fits of one variable."""

from __future__ import annotations

import math

from attnc.errors import InputError, real_number
from attnc.numerics.rounding import UNIT_ROUNDOFF

SMALLEST = 1e-300
"""That is advised: of smaller numbers two digits are no numbers of float64."""


def check_request(eps: float | None, num_anchors: int | None, max_value: float, dtype: str) -> None:
    if (eps is None) == (num_anchors is None):
        raise InputError("give either eps or the number of anchors")
    if eps is not None and not real_number("eps", eps) > 0:
        raise InputError(f"eps must be a finite number > 0, found {eps!r}")
    if num_anchors is not None and (
        isinstance(num_anchors, bool) or not isinstance(num_anchors, int) or num_anchors < 1
    ):
        raise InputError(f"the number of anchors must be a whole number ≥ 1, found {num_anchors!r}")
    if not real_number("max_value", max_value) >= 1:
        raise InputError(f"max_value must be at least 1, found {max_value}: values below max|f| cannot reach f")
    if dtype not in UNIT_ROUNDOFF:
        raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")


def round_above(error: float) -> float:
    """Two digits that are safely above, and above what a proof finds of an error that was seen."""
    if error < SMALLEST:
        return SMALLEST
    digit = 10.0 ** (math.floor(math.log10(error)) - 1)
    return math.ceil(1.04 * error / digit) * digit
