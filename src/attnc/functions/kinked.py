"""Functions with kinks or jumps: abs, relu, sign, floor, max, min and clip.

A jet takes one side of a kink where the ranges prove which. Elsewhere there is no jet, and the remainder is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from attnc.functions.function import ONE, ZERO, ElementaryFunction, Gradient, GradientRule, levels, ramp
from attnc.functions.gate_recipes import PickedValue, TwoLines
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball
from attnc.numerics.jet_equations import JetRule
from attnc.numerics.jet_tables import embedding, num_monomials
from attnc.numerics.jets import Jet, add, constant, negate, union
from attnc.numerics.rounding import Array, Mask

IntervalRule = Callable[[Interval], Interval]

# Ranges and slopes


def _exact_range(value: Callable[[Array], Array]) -> IntervalRule:
    """The range of an increasing function whose values are computed exactly."""
    return lambda x: Interval(value(x.lo), value(x.hi))


def _sides(x: Interval, left: float, right: float) -> Interval:
    """The slopes of a function with slope `left` below 0 and `right` above."""
    below, above = x.lo < 0, x.hi > 0
    at_kink = below == above  # the interval has both sides of 0, or is the point 0
    only = np.where(below, left, right)
    return Interval(np.where(at_kink, min(left, right), only), np.where(at_kink, max(left, right), only))


def _hull(a: Gradient, b: Gradient, only_a: Any, only_b: Any) -> Gradient:
    """Return the gradient of a (or b) where it alone counts, and the hull of both elsewhere."""
    result: Gradient = {}
    for i in a.keys() | b.keys():
        g, h = a.get(i, ZERO), b.get(i, ZERO)
        both = g.hull(h)
        lo = np.where(only_a, g.lo, np.where(only_b, h.lo, both.lo))
        result[i] = Interval(lo, np.where(only_a, g.hi, np.where(only_b, h.hi, both.hi)))
    return result


def _choice_gradient(*, is_max: bool) -> GradientRule:
    """max(u, v)(x) − max(u, v)(c) lies between u(x) − u(c) and v(x) − v(c), or equals one of them; so does min."""

    def rule(ranges: Sequence[Interval], gradients: Sequence[Gradient], y: Interval) -> Gradient:
        total, gradient = ranges[0], gradients[0]
        for x, g in zip(ranges[1:], gradients[1:], strict=True):
            above, below = total.lo >= x.hi, x.lo >= total.hi
            gradient = _hull(gradient, g, above, below) if is_max else _hull(gradient, g, below, above)
            total = total.max(x) if is_max else total.min(x)
        return gradient

    return rule


_max_gradient, _min_gradient = _choice_gradient(is_max=True), _choice_gradient(is_max=False)


def _clip_gradient(ranges: Sequence[Interval], gradients: Sequence[Gradient], y: Interval) -> Gradient:
    x, low, high = ranges
    return _min_gradient((x.max(low), high), (_max_gradient((x, low), gradients[:2], y), gradients[2]), y)


def _fold(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: reduce(operation, arguments)


# Jets


def two_lines_jet(left: float, right: float) -> JetRule:
    """left·u where u ≤ 0 and right·u where u ≥ 0, for factors 0, 1 and −1."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        u, x = jets[0], ranges[0]
        factor = np.where(x.lo >= 0, right, left)
        remainder = np.where((x.lo >= 0) | (x.hi <= 0), u.remainder * np.abs(factor), np.inf)
        return Jet(u.variables, u.degree, u.mid * factor, u.radius * np.abs(factor), remainder)

    return rule


def max_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """Return the larger jet where the range of the difference has one sign."""
    best, x = jets[0], ranges[0]
    for u, y in zip(jets[1:], ranges[1:], strict=True):
        difference = add((best, negate(u))).range
        best = _choose((best, u), (x.lo >= y.hi) | (difference.lo >= 0), (y.lo >= x.hi) | (difference.hi <= 0))
        x = x.max(y)
    return best


def min_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """min(u, …) = −max(−u, …)."""
    return negate(max_jet([negate(u) for u in jets], [-x for x in ranges], order))


def _clip_jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
    """min(max(u, low), high)."""
    raised = max_jet(jets[:2], ranges[:2], order)
    return min_jet((raised, jets[2]), (ranges[0].max(ranges[1]), ranges[2]), order)


def _choose(jets: tuple[Jet, Jet], first: Mask, second: Mask) -> Jet:
    """Return the first jet where `first` holds, the second where `second` holds, and none elsewhere."""
    variables, places = union(jets)
    degree, num_boxes = max(jet.degree for jet in jets), max(first.size, *(len(jet.remainder) for jet in jets))
    mid = np.zeros((num_monomials(len(variables), degree), num_boxes))
    radius, remainder = np.zeros((degree + 1, num_boxes)), np.where(first | second, np.zeros(num_boxes), np.inf)
    for jet, where, chosen in zip(jets, places, (first, second & ~first), strict=True):
        mid[embedding(where, jet.degree, len(variables))] += np.where(chosen, jet.mid, 0.0)
        radius[: jet.degree + 1] += np.where(chosen, jet.radius, 0.0)
        remainder += np.where(chosen, jet.remainder, 0.0)
    return Jet(variables, degree, mid, radius, remainder)


def step_jet(value: Callable[[Array], Array]) -> JetRule:
    """An increasing function that is constant between its jumps."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        low, high = np.atleast_1d(value(ranges[0].lo)), np.atleast_1d(value(ranges[0].hi))
        return replace(constant(Ball.point(low)), remainder=np.where(low == high, 0.0, np.inf))

    return rule


# Asymptotes


def _relu_remainder(low: float) -> tuple[float, float] | None:
    """relu equals its asymptote for s ≥ 0. For s < 0 they differ by −s."""
    return max(0.0, -low), math.inf if low >= 0 else 0.0


def _sign_remainder(low: float) -> tuple[float, float] | None:
    return (0.0, math.inf) if low > 0 else None


def _two_lines(
    name: str, value: Callable[[Array], Array], range: IntervalRule, left: float, right: float, derivative: str
) -> ElementaryFunction:
    """left·x for x ≤ 0 and right·x for x ≥ 0."""
    jet, gate = two_lines_jet(left, right), TwoLines(left, right)

    def slope(x: Interval, y: Interval) -> Interval:
        return _sides(x, left, right)

    return ElementaryFunction(name, value, range, jet, slope=slope, kinks=(0.0,), gate=gate, derivative=derivative)


def _steps(
    name: str, value: Callable[[Array], Array], jumps: Callable[[float, float], Iterable[float]]
) -> ElementaryFunction:
    """An increasing step function. Its slope is 0 between jumps, and unbounded above over a jump."""

    def slope(x: Interval, y: Interval) -> Interval:
        return Interval(np.zeros(y.shape), np.where(y.lo < y.hi, np.inf, 0.0))

    return ElementaryFunction(name, value, _exact_range(value), step_jet(value), slope=slope, jumps=jumps)


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


ABS = _two_lines("abs", np.abs, abs, -1.0, 1.0, "sign(t)")
RELU = replace(
    _two_lines("relu", _relu, _exact_range(_relu), 0.0, 1.0, "(1 + sign(t))/2"), asymptotes=ramp(_relu_remainder)
)
MIN, MAX = (
    ElementaryFunction(
        name, _fold(value), _fold(range), jet, None, gradient, 2, is_variadic=True, chooses=True, gate=PickedValue()
    )
    for name, value, range, jet, gradient in (
        ("min", np.minimum, Interval.min, min_jet, _min_gradient),
        ("max", np.maximum, Interval.max, max_jet, _max_gradient),
    )
)
CLIP = ElementaryFunction(
    "clip",
    lambda x, low, high: np.minimum(np.maximum(x, low), high),
    lambda x, low, high: x.max(low).min(high),
    _clip_jet,
    gradient=_clip_gradient,
    arity=3,
    chooses=True,
    gate=PickedValue(),
)
SIGN = replace(_steps("sign", np.sign, lambda lo, hi: (0.0,)), asymptotes=levels(-ONE, ONE, _sign_remainder))
FLOOR = _steps("floor", np.floor, lambda lo, hi: range(math.ceil(lo), math.floor(hi) + 1))
