"""Functions with kinks or jumps on jets: the side is chosen where the ranges prove it.

Elsewhere there is no jet, and the remainder is infinite. A rule takes the jets of the arguments, their ranges over the
boxes, and the order, as in `jet_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_rules import Rule
from attnc.numerics.jet_tables import embedding, num_monomials
from attnc.numerics.jets import Jet, add, constant, negate, union
from attnc.numerics.rounding import Array, Mask


def pieces(left: float, right: float) -> Rule:
    """left·u where u ≤ 0 and right·u where u ≥ 0, for factors 0, 1 and −1."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        u, x = jets[0], ranges[0]
        factor = np.where(x.lo >= 0, right, left)
        remainder = np.where((x.lo >= 0) | (x.hi <= 0), u.remainder * np.abs(factor), np.inf)
        return Jet(u.variables, u.degree, u.mid * factor, u.radius * np.abs(factor), remainder)

    return rule


def maximum(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """The larger, where the range of the difference has one sign."""
    best, x = jets[0], ranges[0]
    for u, y in zip(jets[1:], ranges[1:], strict=True):
        difference = add((best, negate(u))).range
        best = _choose((best, u), (x.lo >= y.hi) | (difference.lo >= 0), (y.lo >= x.hi) | (difference.hi <= 0))
        x = x.max(y)
    return best


def minimum(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """min(u, …) = −max(−u, …)."""
    return negate(maximum([negate(u) for u in jets], [-x for x in ranges], order))


def clip(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """min(max(u, low), high)."""
    raised = maximum(jets[:2], ranges[:2], order)
    return minimum((raised, jets[2]), (ranges[0].max(ranges[1]), ranges[2]), order)


def _choose(jets: tuple[Jet, Jet], first: Mask, second: Mask) -> Jet:
    """The first jet where `first` holds, the second where `second` does, none elsewhere."""
    variables, places = union(jets)
    degree, num_boxes = max(jet.degree for jet in jets), max(first.size, *(len(jet.remainder) for jet in jets))
    mid = np.zeros((num_monomials(len(variables), degree), num_boxes))
    radius, remainder = np.zeros((degree + 1, num_boxes)), np.where(first | second, np.zeros(num_boxes), np.inf)
    for jet, where, chosen in zip(jets, places, (first, second & ~first), strict=True):
        mid[embedding(where, jet.degree, len(variables))] += np.where(chosen, jet.mid, 0.0)
        radius[: jet.degree + 1] += np.where(chosen, jet.radius, 0.0)
        remainder += np.where(chosen, jet.remainder, 0.0)
    return Jet(variables, degree, mid, radius, remainder)


def step(value: Callable[[Array], Array]) -> Rule:
    """An increasing function that is constant between its jumps."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        low, high = np.atleast_1d(value(ranges[0].lo)), np.atleast_1d(value(ranges[0].hi))
        return replace(constant(Ball.point(low)), remainder=np.where(low == high, 0.0, np.inf))

    return rule
