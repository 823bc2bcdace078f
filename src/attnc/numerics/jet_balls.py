"""Balls: sets {t : |t − mid| ≤ radius}, many at a time, for numbers that are known to a few ulp.

Radii are computed in ordinary floating point from non-negative numbers, and `above` then covers the roundings. A radius
that is NaN or infinite bounds nothing, and neither does any number computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, Array, down, up

U = UNIT_ROUNDOFF["float64"]
GROW = 1 + 2.0**-36  # covers 2¹⁶ roundings of relative size 2⁻⁵³, and that of the product with GROW itself
TINY = 2.0**-900  # covers 2¹⁶ underflows of 2⁻¹⁰⁷⁵ or less, and is far from subnormal


def above(x: Array) -> Array:
    """Return an upper bound on the exact value of x, a sum of products and quotients of two non-negative floats."""
    return np.asarray(x * GROW + TINY)


@dataclass(frozen=True, eq=False)
class Ball:
    """Entry by entry, the numbers within radius of mid."""

    mid: Array
    radius: Array

    @classmethod
    def point(cls, x: npt.ArrayLike) -> Ball:
        mid = np.asarray(x, dtype=np.float64)
        return cls(mid, np.zeros(mid.shape))

    @classmethod
    def around(cls, x: Interval) -> Ball:
        """Return a ball that contains the interval."""
        mid = x.mid
        return cls(mid, up(np.maximum(x.hi - mid, mid - x.lo)))

    @property
    def interval(self) -> Interval:
        """An interval that contains the ball. It is all reals where the radius is not finite."""
        exact = self.radius == 0
        lo = np.where(exact, self.mid, down(self.mid - self.radius))
        hi = np.where(exact, self.mid, up(self.mid + self.radius))
        known = np.isfinite(lo) & np.isfinite(hi)
        return Interval(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))

    @property
    def mag(self) -> Array:
        """An upper bound on |t|."""
        return above(np.abs(self.mid) + self.radius)

    def __add__(self, other: Ball) -> Ball:
        mid = self.mid + other.mid
        return Ball(mid, above(self.radius + other.radius + U * np.abs(mid)))

    def inverse(self) -> Ball:
        """Return 1/t, with an infinite radius where the ball contains 0."""
        return Ball.around(1.0 / self.interval)
