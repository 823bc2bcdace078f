"""Finds the points where a function of one variable is not smooth, from the tree of an expression or from samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from attnc.constructions.fitting.minimax import Function
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Negate, Node, Number, Power, Sum, walk
from attnc.targets.expressions.zeros import SMALLEST_CELL, zeros
from attnc.targets.target import Target

BEND_CELLS = 2048
"""Number of cells whose second differences are compared with those of their neighbours. If two kinks are within 12
cells, only the stronger one is found."""
SMOOTH_ORDER = 1.7
"""Least exponent α for a smooth function, whose second differences fall like t^α with the step t. In theory α is 2; the
rest is for rounding. A kink has α = 1, and x^1.5 has 1.5."""


@dataclass(frozen=True)
class Kink:
    """A point at which the function bends. If `is_singular`, it is not smooth up to the point, like √x at 0."""

    x: float
    is_singular: bool = False
    is_sharp: bool = True  # found to the last digits


def _of_samples(f: Function, lo: float, hi: float) -> Iterator[Kink]:
    """Yield points whose second differences exceed their neighbours' and fall with the step t like t^α, α < 1.7.

    α = 1 shows a kink. Another α below 2 shows a singularity.
    """
    x = np.linspace(lo, hi, BEND_CELLS + 1)
    values = f(x)
    bend, noise, h = _bend(values), 2.0**-46 * (float(np.abs(values).max()) or 1.0), (hi - lo) / BEND_CELLS
    steps = [(lo, 0.0, 2.0), (hi, -2.0, 0.0)]
    for i in range(len(bend)):
        around = bend[max(0, i - 12) : i + 13]
        if bend[i] > noise and bend[i] == around.max() and bend[i] > 6 * np.median(around):
            place = _zoom(f, float(x[i]), float(x[i + 2]), noise)
            if lo + h / 4 <= place <= hi - h / 4:
                steps.append((place, -1.0, 1.0))
    for place, first, last in steps:
        order = _order(f, place, first, last, h, noise)
        if order < SMOOTH_ORDER:
            yield Kink(place, place in (lo, hi) or abs(order - 1) > 0.15)


def _bend(values: np.ndarray) -> np.ndarray:
    """Return the largest second difference of all outputs, at every inner point."""
    return np.asarray(np.abs(values[2:] - 2 * values[1:-1] + values[:-2]).max(axis=1))


def _zoom(f: Function, lo: float, hi: float, noise: float) -> float:
    """Return the middle of the smallest interval on which f bends by more than rounding."""
    for _ in range(40):
        x = np.linspace(lo, hi, 17)
        bend = _bend(f(x))
        i = int(np.argmax(bend))
        if bend[i] <= 4 * noise or not x[i] < x[i + 1] < x[i + 2]:
            break
        lo, hi = float(x[i]), float(x[i + 2])
    return 0.5 * (lo + hi)


def _order(f: Function, x: float, first: float, last: float, h: float, noise: float) -> float:
    """Return α of |second difference| ~ t^α as t → 0, between x + first·t and x + last·t, or 2 if rounding hides it."""
    t = h * 4.0 ** -np.arange(1.0, 8.0)
    size = np.abs(f(x + first * t) - 2 * f(x + 0.5 * (first + last) * t) + f(x + last * t)).max(axis=1)
    count = int(np.argmin(np.append(size > 64 * noise, False)))
    return float(np.polyfit(np.log(t[:count]), np.log(size[:count]), 1)[0]) if count >= 3 else 2.0


def find_kinks(target: Target) -> tuple[Kink, ...]:
    """Return all kinks that the tree of an expression shows, or those that samples of a callable show.

    Samples may miss kinks. abs, relu, clip, min and max bend where an argument passes 0 or another argument. Roots,
    powers that are not integers, asin and acos are singular where their argument reaches the edge of their domain.
    """
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])

    def f(x: np.ndarray) -> np.ndarray:
        return target(x[:, None])

    found = _of_samples(f, lo, hi) if target.expression is None else _of_tree(target.expression, lo, hi)
    return _that_bend(f, _distinct(list(found), lo, hi), lo, hi)


def _distinct(found: list[Kink], lo: float, hi: float) -> list[Kink]:
    """Return one kink of each cluster, a sharp one if there is any, sorted."""
    near = 4 * SMALLEST_CELL * (hi - lo)
    kinks: list[Kink] = []
    for kink in sorted(found, key=lambda kink: kink.x):
        if kinks and kink.x - kinks[-1].x <= near:
            sharper = kink if kink.is_sharp and not kinks[-1].is_sharp else kinks[-1]
            kinks[-1] = replace(sharper, is_singular=kinks[-1].is_singular or kink.is_singular)
        else:
            kinks.append(kink)
    ends = [replace(k, x=lo if k.x - lo <= near else hi if hi - k.x <= near else k.x) for k in kinks]
    return [kink for kink in ends if kink.is_singular or lo < kink.x < hi]


def _that_bend(f: Function, kinks: list[Kink], lo: float, hi: float) -> tuple[Kink, ...]:
    """Return the kinks without points across which f is smooth, such as zeros that touch, or hidden branches.

    If f is smooth up to the point on both sides, the kink is not singular, whatever the tree suggests (√x²).
    """
    edges = [lo, *(kink.x for kink in kinks), hi]
    scale = float(np.abs(f(np.linspace(lo, hi, 257))).max())
    bending: list[Kink] = []
    for before, kink, after in zip(edges, kinks, edges[2:], strict=False):
        reach = [min(0.01 * (hi - lo), 0.25 * gap) for gap in (kink.x - before, after - kink.x)]
        inside = min(reach) > 0
        if inside and _is_smooth(f, kink.x - min(reach), kink.x + min(reach), scale):
            continue
        sides = [(kink.x - reach[0], kink.x), (kink.x, kink.x + reach[1])]
        is_regular = all(_is_smooth(f, a, b, scale) for a, b in sides if a < b)
        if inside or not is_regular:
            bending.append(replace(kink, is_singular=kink.is_singular and not is_regular))
    return tuple(bending)


def _is_smooth(f: Function, lo: float, hi: float, scale: float) -> bool:
    """Whether f, whose size is `scale`, is a polynomial on [lo, hi] up to rounding."""
    t = np.cos(np.pi * np.arange(41) / 40)
    values = f(np.clip(0.5 * (lo + hi) + 0.5 * (hi - lo) * t, lo, hi))
    basis = np.polynomial.chebyshev.chebvander(t, 12)
    left = values - basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    return bool(np.abs(left).max() <= 2.0**-44 * scale)


def _of_tree(expression: Expression, lo: float, hi: float) -> Iterator[Kink]:
    (name,) = expression.variables
    seen: set[Node] = set()
    for node in walk(expression.outputs):
        for difference, is_singular in _differences(node):
            if difference not in seen:
                seen.add(difference)
                yield from (Kink(x, is_singular, is_sharp) for x, is_sharp in zeros(difference, name, lo, hi))


def _differences(node: Node) -> Iterator[tuple[Node, bool]]:
    """Yield the differences that vanish where the node bends, and whether it is singular there."""
    match node:
        case Call(name, arguments):
            function = FUNCTIONS[name]
            if function.chooses:
                for u, v in itertools.combinations(arguments, 2):
                    yield Sum((u, Negate(v))), False
            for points, is_singular in ((function.kinks, False), (function.singularities, True)):
                for x in points:
                    yield arguments[0] if x == 0 else Sum((arguments[0], Number(Fraction(-x)))), is_singular
        case Power(base, exponent):
            if not (isinstance(exponent, Number) and exponent.value.denominator == 1):
                yield base, True
