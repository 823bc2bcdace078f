"""Intervals of reals with float64 endpoints, rounded outward, many at a time.

An Interval holds two arrays of one shape. Entry i is the set {t real : lo[i] ≤ t ≤ hi[i]}. Endpoints may be −∞ and +∞,
which are bounds and not members, and never NaN. The result of an operation contains every value of the operation on
members. Endpoints that are exact in floating point are not widened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from attnc.errors import InputError
from attnc.numerics.arrays import Int
from attnc.numerics.quiet import quietly
from attnc.numerics.rounding import LARGEST, TINIEST, Array, Mask, add_down, add_up, is_short, square_down, square_up


@dataclass(frozen=True, eq=False, init=False)
class Interval:
    """The sets [lo, hi], entry by entry. `lo` and `hi` are broadcast against each other."""

    lo: Array
    hi: Array

    __array_ufunc__ = None  # so that ndarray + Interval calls Interval.__radd__

    @quietly
    def __init__(self, lo: npt.ArrayLike, hi: npt.ArrayLike) -> None:
        lo, hi = np.asarray(lo, dtype=np.float64), np.asarray(hi, dtype=np.float64)
        if lo.shape != hi.shape:
            lo, hi = np.broadcast_arrays(lo, hi)
        # The sign of a difference is exact. It is NaN for a NaN, and for [∞, ∞] and [−∞, −∞], which hold no real.
        legal = lo - hi <= 0
        if np.count_nonzero(legal) < legal.size:
            i = np.unravel_index(int(np.argmin(legal)), legal.shape)
            raise InputError(f"[{lo[i]}, {hi[i]}] is not an interval: it needs lo <= hi, no NaN, and a real inside.")
        self.__dict__["lo"], self.__dict__["hi"] = lo, hi  # the class is frozen

    @classmethod
    def _legal(cls, lo: Array, hi: Array) -> Interval:
        """Return intervals whose ends have one shape and are known to be legal, without a check."""
        made = object.__new__(cls)
        made.__dict__["lo"], made.__dict__["hi"] = np.asarray(lo), np.asarray(hi)
        return made

    @classmethod
    def point(cls, x: npt.ArrayLike) -> Interval:
        """Return the sets {x}."""
        x = np.asarray(x, dtype=np.float64)
        return cls(x, x)

    @classmethod
    def joined(cls, *parts: Interval) -> Interval:
        """Return the entries of all parts, one part after the other along the first axis."""
        return cls(*(np.concatenate(ends) for ends in ([part.lo for part in parts], [part.hi for part in parts])))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lo.shape

    def __len__(self) -> int:
        return len(self.lo)

    def __getitem__(self, index: Any) -> Interval:
        return Interval._legal(self.lo[index], self.hi[index])

    # Sizes

    @property
    def _ends(self) -> tuple[Array, ...]:
        """Both ends, or one if they are the same array."""
        return (self.lo,) if self.hi is self.lo else (self.lo, self.hi)

    @cached_property
    def _short_ends(self) -> tuple[Mask, ...]:
        """Which of these ends fit in float32, so that products with others like them are exact."""
        return tuple(map(is_short, self._ends))

    @property
    def is_bounded(self) -> Mask:
        return np.isfinite(self.lo) & np.isfinite(self.hi)

    @property
    def mag(self) -> Array:
        """max |t| over the interval."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    @property
    def mig(self) -> Array:
        """min |t| over the interval."""
        return np.maximum(np.maximum(self.lo, -self.hi), 0.0)

    @property
    def mid(self) -> Array:
        """A float inside, near the middle. It is finite for unbounded intervals too."""
        lo, hi = np.maximum(self.lo, -LARGEST), np.minimum(self.hi, LARGEST)
        return np.minimum(np.maximum(lo * 0.5 + hi * 0.5, lo), hi)

    @property
    @quietly
    def width(self) -> Array:
        """hi − lo, rounded up."""
        return add_up(self.hi, -self.lo)

    def contains(self, other: Interval | npt.ArrayLike) -> Mask:
        """Whether `other` (numbers, or intervals) lies inside."""
        if not isinstance(other, Interval):
            other = Interval.point(other)
        return np.asarray((self.lo <= other.lo) & (other.hi <= self.hi))

    # Sets

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval around both."""
        return Interval._legal(np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    def intersect(self, other: Interval) -> Interval:
        """Return the common part, or raise InputError if there is none."""
        return Interval(np.maximum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    def min(self, other: Interval) -> Interval:
        """min(s, t) of members."""
        return Interval._legal(np.minimum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    def max(self, other: Interval) -> Interval:
        """max(s, t) of members."""
        return Interval._legal(np.maximum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    # Arithmetic

    def __neg__(self) -> Interval:
        return Interval._legal(-self.hi, -self.lo)

    def __abs__(self) -> Interval:
        return Interval._legal(self.mig, self.mag)

    @quietly
    def __add__(self, other: Interval | npt.ArrayLike) -> Interval:
        other = _interval(other)
        return Interval._legal(add_down(self.lo, other.lo), add_up(self.hi, other.hi))

    @quietly
    def __sub__(self, other: Interval | npt.ArrayLike) -> Interval:
        other = _interval(other)
        return Interval._legal(add_down(self.lo, -other.hi), add_up(self.hi, -other.lo))

    @quietly
    def __mul__(self, other: Interval | npt.ArrayLike) -> Interval:
        """Return the hull of the four products of ends, with 0·∞ = 0."""
        other = _interval(other)
        corners = [(x * y) for x in self._ends for y in other._ends]
        if _is_power_of_two(self) or _is_power_of_two(other):
            exact = [_is_normal(corner) for corner in corners]
        else:
            exact = [x & y for x in self._short_ends for y in other._short_ends]
        return _hull(corners, exact, self, other)

    @quietly
    def __truediv__(self, other: Interval | npt.ArrayLike) -> Interval:
        """Return the quotients: [−∞, ∞] where 0 is inside the divisor, and one-sided where 0 is one end of it."""
        other = _interval(other)
        # The signs of the zeros send t/0 to the infinity that t/s approaches as s → 0 inside the divisor.
        divisors = (other.lo + 0.0, -(0.0 - other.hi))
        corners, shorts = [(x / y) for x in self._ends for y in divisors], other._short_ends
        if _is_power_of_two(other):
            exact = [_is_normal(corner) for corner in corners]
        elif any(np.count_nonzero(short) for short in shorts):
            # A short quotient times a short divisor is computed exactly: if that gives the dividend, it was exact.
            by_divisor = list(zip(divisors, (shorts[0], shorts[-1]), strict=True))
            pairs = [(x, y, short) for x in self._ends for y, short in by_divisor]
            exact = [(is_short(q) & short & (q * y == x)) for q, (x, y, short) in zip(corners, pairs, strict=True)]
        else:
            exact = [np.zeros((), dtype=bool)] * len(corners)
        straddles = ((other.lo < 0) & (other.hi > 0)) | ((other.lo == 0) & (other.hi == 0))
        result = _hull(corners, exact, self, other)
        return result.entire_where(straddles) if np.count_nonzero(straddles) else result

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: npt.ArrayLike) -> Interval:
        return _interval(other) - self

    def __rtruediv__(self, other: npt.ArrayLike) -> Interval:
        return _interval(other) / self

    @quietly
    def square(self) -> Interval:
        """t² ≥ 0."""
        return Interval._legal(square_down(self.mig), square_up(self.mag))

    def entire_where(self, mask: Mask) -> Interval:
        """Return [−∞, ∞] where the mask holds, and the same intervals elsewhere."""
        return Interval._legal(np.where(mask, -np.inf, self.lo), np.where(mask, np.inf, self.hi))


def halved(boxes: Interval, axis: int | Int[np.ndarray, " boxes"]) -> Interval:
    """Return both halves of every box (n, d), along one axis or each along its own. All lower halves come first."""
    rows = np.arange(len(boxes))
    below, above = boxes.hi.copy(), boxes.lo.copy()
    below[rows, axis] = above[rows, axis] = boxes.mid[rows, axis]
    return Interval(np.concatenate([boxes.lo, above]), np.concatenate([below, boxes.hi]))


def _interval(x: Interval | npt.ArrayLike) -> Interval:
    return x if isinstance(x, Interval) else Interval.point(x)


def _is_power_of_two(factor: Interval) -> bool:
    """Whether this is one number ±2ⁿ, so that products and quotients by it are exact unless they leave the range."""
    if factor.lo.size != 1 or (end := factor.lo.item()) != factor.hi.item():
        return False
    return abs(math.frexp(end)[0]) == 0.5


def _is_normal(x: Array) -> Mask:
    return np.asarray((np.abs(x) > 1e-300) & (np.abs(x) < np.inf))


def _hull(corners: list[Array], exact: list[Mask], x: Interval, y: Interval) -> Interval:
    """Return the hull of the rounded corners of x·y or x/y, each moved outward where it is not exact.

    A NaN, from 0·∞, 0/0 or ∞/∞, is ignored. Unless all four are NaN, the other corners span its value.
    """
    counts = [np.count_nonzero(mask) for mask in exact]
    nowhere = not any(counts)
    if nowhere or counts == [mask.size for mask in exact]:
        lo, hi = _least(corners), _greatest(corners)
        if nowhere:
            lo, hi = np.nextafter(lo, -np.inf), np.nextafter(hi, np.inf)
    else:
        pairs = list(zip(corners, exact, strict=True))
        lo = _least([np.where(mask, corner, np.nextafter(corner, -np.inf)) for corner, mask in pairs])
        hi = _greatest([np.where(mask, corner, np.nextafter(corner, np.inf)) for corner, mask in pairs])
    is_far = (np.abs(lo) > 1e-320) & (np.abs(hi) > 1e-320)  # neither zero nor NaN
    if np.count_nonzero(is_far) < is_far.size:
        near = ~is_far
        # A zero is exact or an underflow; the signs of x and y show on which side of 0 the exact end can lie.
        negative = ((x.lo < 0) & (y.hi > 0)) | ((x.hi > 0) & (y.lo < 0))
        positive = ((x.lo < 0) & (y.lo < 0)) | ((x.hi > 0) & (y.hi > 0))
        low, high = np.where(np.isnan(lo), 0.0, lo), np.where(np.isnan(hi), 0.0, hi)
        low = np.where(negative, np.where(low < 0, low, -TINIEST), np.maximum(low, 0.0))
        high = np.where(positive, np.where(high > 0, high, TINIEST), np.minimum(high, 0.0))
        lo, hi = np.where(near, low, lo), np.where(near, high, hi)
    return Interval(lo, hi)


_least, _greatest = partial(reduce, np.fmin), partial(reduce, np.fmax)
