"""Where an operation is defined, and how to say that it is not.

A Domain answers three questions about the ranges of the operands. `may_leave`: can a value lie outside? `must_leave`:
do all values lie outside (asked at points, where it proves a violation)? `guard`: a quantity that must not vanish, so
that two signs of it in a connected box prove a zero between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Mask

Ranges = Sequence[Interval]


@dataclass(frozen=True)
class Domain:
    """`complaint` and `remedy` are said with {0} replaced by the text of the operand to blame, number `operand`."""

    complaint: str
    remedy: str
    may_leave: Callable[[Ranges], Mask]
    must_leave: Callable[[Ranges], Mask]
    guard: Callable[[Ranges], Interval] | None = None
    operand: int = 0
    proof: str = ", and it takes both signs"


def at_least(low: float, name: str, *, strict: bool) -> Domain:
    """The first operand must be ≥ low, or > low if strict."""
    what = "is not positive" if strict else "is negative"
    return Domain(
        f"{name} {{0}} {what}",
        f"Choose a box on which {{0}} is {'positive' if strict else 'not negative'}, or add a constant to it",
        (lambda a: a[0].lo <= low) if strict else (lambda a: a[0].lo < low),
        (lambda a: a[0].hi <= low) if strict else (lambda a: a[0].hi < low),
    )


def within(low: float, high: float, name: str) -> Domain:
    """The first operand must lie in [low, high]."""
    return Domain(
        f"{name} {{0}} leaves [{low:g}, {high:g}]",
        f"Choose a box on which {{0}} stays in [{low:g}, {high:g}], or write clip({{0}}, {low:g}, {high:g})",
        lambda a: (a[0].lo < low) | (a[0].hi > high),
        lambda a: (a[0].hi < low) | (a[0].lo > high),
    )


def _may_vanish(x: Interval) -> Mask:
    return np.asarray((x.lo <= 0) & (x.hi >= 0))


def _vanishes(x: Interval) -> Mask:
    return np.asarray((x.lo == 0) & (x.hi == 0))


DIVISOR = Domain(
    "the divisor {0} contains 0",
    "Choose a box that excludes 0, or add to {0} a constant that keeps it away from 0",
    lambda a: _may_vanish(a[1]),
    lambda a: _vanishes(a[1]),
    guard=lambda a: a[1],
    operand=1,
)
NEGATIVE_POWER = Domain(
    "the base {0} of a negative power contains 0",
    "Choose a box that excludes 0, or add to {0} a constant that keeps it away from 0",
    lambda a: _may_vanish(a[0]),
    lambda a: _vanishes(a[0]),
    guard=lambda a: a[0],
)
REAL_POWER = Domain(
    "the base {0} of a power that is not an integer is negative, or zero to an exponent that is not positive,",
    "Choose a box on which {0} is positive, or use an integer exponent",
    lambda a: (a[0].lo < 0) | ((a[0].lo <= 0) & (a[1].lo <= 0)),
    lambda a: (a[0].hi < 0) | (_vanishes(a[0]) & (a[1].hi <= 0)),
)
TANGENT = Domain(
    "the argument {0} of tan reaches a pole pi/2 + k*pi",
    "Choose a box on which cos({0}) is not 0",
    lambda a: elementary.may_have_pole(a[0]),
    lambda a: np.zeros(a[0].shape, dtype=bool),
    guard=lambda a: elementary.cos(a[0]),
    proof=", and its cosine takes both signs",
)
BOUNDED = Domain(
    "the value of {0} overflows: it is not bounded by the largest float64",
    "Choose a smaller box, or scale {0} down",
    lambda a: ~a[0].is_bounded,
    lambda a: a[0].mig > 1.7e308,
)
