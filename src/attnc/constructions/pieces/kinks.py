"""Where a function of one variable is not smooth: from the tree of an expression, or from differences of samples.

abs, relu, clip, min and max bend where an argument passes 0 or another one. Roots, powers that are not integers, asin
and acos are singular where their argument reaches the edge of their domain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from attnc.constructions.pieces.bends import bends
from attnc.constructions.pieces.zeros import SMALLEST, zeros
from attnc.constructions.unary.keys import Function
from attnc.functions.registry import FUNCTIONS
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Call, Negate, Node, Number, Power, Sum, walk
from attnc.targets.target import Target


@dataclass(frozen=True)
class Kink:
    """A point at which the function bends; `is_singular` where it is not smooth up to the point, as √x at 0."""

    x: float
    is_singular: bool = False
    is_sharp: bool = True  # known to the last digits


def find_kinks(target: Target) -> tuple[Kink, ...]:
    """Those that a tree shows, which are all, or those that samples show, which may not be."""
    lo, hi = float(target.box.lo[0]), float(target.box.hi[0])

    def f(x: np.ndarray) -> np.ndarray:
        return target(x[:, None])

    found = _of_tree(target, lo, hi) if isinstance(target, ExpressionTarget) else _of_samples(f, lo, hi)
    return _that_bend(f, _distinct(list(found), lo, hi), lo, hi)


def _distinct(found: list[Kink], lo: float, hi: float) -> list[Kink]:
    """One of each cluster, a sharp one if there is any, sorted."""
    near = 4 * SMALLEST * (hi - lo)
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
    """Without those across which f is smooth (zeros that touch, a branch that another covers); where f is smooth up to
    the point on either side the kink is not singular, whatever the tree says (√x²)."""
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
    """Whether f, whose size is `scale`, is a polynomial there to rounding."""
    t = np.cos(np.pi * np.arange(41) / 40)
    values = f(np.clip(0.5 * (lo + hi) + 0.5 * (hi - lo) * t, lo, hi))
    basis = np.polynomial.chebyshev.chebvander(t, 12)
    left = values - basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    return bool(np.abs(left).max() <= 2.0**-44 * scale)


def _of_tree(target: ExpressionTarget, lo: float, hi: float) -> Iterator[Kink]:
    name = target.box.names[0]
    seen: set[Node] = set()
    for node in walk(target.expression.outputs):
        for difference, is_singular in _differences(node):
            if difference not in seen:
                seen.add(difference)
                yield from (Kink(x, is_singular, is_sharp) for x, is_sharp in zeros(difference, name, lo, hi))


def _of_samples(f: Function, lo: float, hi: float) -> Iterator[Kink]:
    """A second difference that falls like the step shows a kink; like another power below its square, a singularity."""
    for x, order in bends(f, lo, hi):
        yield Kink(x, x in (lo, hi) or abs(order - 1) > 0.15)


def _differences(node: Node) -> Iterator[tuple[Node, bool]]:
    """The expressions that vanish where the node bends, and whether it is singular there."""
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
