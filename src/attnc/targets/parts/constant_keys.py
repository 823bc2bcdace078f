"""Parts rewritten so that heads with constant keys and values compute them, each with values of at most 1.

A head whose keys are the same for every query cannot carry a factor of a product. With P = α(u − a) and Q = β(v − b),
    u·v = PQ/(αβ) + a·v + b·u − ab,   PQ = ((P + Q)/2)² − ((P − Q)/2)².
Here a and b are near the middles of the ranges, and α and β are powers of two with |P|, |Q| ≤ 1. So both squares have
arguments in [−1, 1]. A function whose size is above 1 is computed as 2^−s of itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from attnc.targets.expressions.coefficient import MINUS, TWO, Coefficient
from attnc.targets.expressions.tree import Call, Number, Product
from attnc.targets.parts.lowering import RELU, SQUARE
from attnc.targets.parts.part import Choice, Combination, Multiply, Part, Source, T, Unary, combination, in_order
from attnc.targets.parts.part_ranges import PartRanges

ABSOLUTE = Call("abs", (T,))
"""|t| is computed as 2·relu(t) − t. A head for |t| itself has steep keys on both sides of 0, with values of both signs,
so that its rounding in float32 is a thousand times larger."""
MIDDLE_BITS = 4
"""A middle is rounded to this number of bits below the leading bit of the half-width, so that it is a short number, and
0 for ranges that are nearly symmetric. It makes the half-width larger by at most 1/16."""
LEAST_HALF = Fraction(1, 2**20)
"""The least half-width of a factor, relative to its middle: a factor that hardly moves is scaled up no further."""


def with_constant_keys(outputs: Sequence[Part], ranges: PartRanges) -> list[Part]:
    """Return the same outputs without products, and with functions of a size of at most 1.

    The sizes are those of the parts over the box. Raise nothing: a part whose range is not bounded is left as it is.
    """
    made: dict[int, Part] = {}
    for part in in_order(outputs):
        match part:
            case Source(_):
                new: Part = part
            case Combination(terms, constant, known):
                new = combination([(made[id(inner)], c) for inner, c in terms], constant)
                if known is not None and isinstance(new, Combination):
                    new = dataclasses.replace(new, known=known)
            case Unary(base, tree) if tree == ABSOLUTE:
                relu = Unary(made[id(base)], RELU)
                new = combination([(_scaled(relu, ranges.size(part)), TWO), (relu.base, MINUS)])
                if isinstance(new, Combination):
                    new = dataclasses.replace(new, known=part)
            case Unary(base, _):
                new = _scaled(dataclasses.replace(part, base=made[id(base)]), ranges.size(part))
            case Multiply(left, right):
                new = _quarter_squares(made[id(left)], made[id(right)], part, ranges)
            case Choice():
                raise AssertionError("a lowering for heads of one argument makes no choices")
        made[id(part)] = new
    return [made[id(part)] for part in outputs]


def _scaled(part: Unary, size: float) -> Part:
    """Return 2^s times a function of a size of at most 1."""
    s = max(0, math.frexp(size)[1] - (math.frexp(size)[0] == 0.5)) if math.isfinite(size) else 0
    if s == 0:
        return part
    tree = Product((Number(Fraction(1, 2**s)), part.tree))
    return combination([(dataclasses.replace(part, tree=tree), Coefficient.of(2**s))])


def _quarter_squares(u: Part, v: Part, product: Multiply, ranges: PartRanges) -> Part:
    (a, alpha), (b, beta) = (_middle_and_scale(*ranges(factor)) for factor in (product.left, product.right))
    half = Fraction(1, 2)
    whole = Coefficient.of(1 / (alpha * beta))
    terms = [(v, Coefficient.of(a)), (u, Coefficient.of(b))]
    constant = Coefficient.of(-a * b)
    for sign in (1, -1):
        offset = Coefficient.of(-half * (alpha * a + sign * beta * b))
        argument = combination([(u, Coefficient.of(half * alpha)), (v, Coefficient.of(half * sign * beta))], offset)
        factor = whole if sign > 0 else MINUS * whole
        if isinstance(argument, Combination) and not argument.terms:
            constant = constant + factor * argument.constant * argument.constant
        else:
            terms.append((Unary(argument, SQUARE), factor))
    made = combination(terms, constant)
    return dataclasses.replace(made, known=product) if isinstance(made, Combination) else made


def _middle_and_scale(lo: float, hi: float) -> tuple[Fraction, Fraction]:
    """Return a short number near the middle, and the largest power of two that scales the rest of the range to ≤ 1."""
    middle, half = Fraction(lo) / 2 + Fraction(hi) / 2, Fraction(hi) / 2 - Fraction(lo) / 2
    half = max(half, LEAST_HALF * abs(middle), Fraction(2) ** -100)
    step = Fraction(2) ** (math.frexp(half)[1] - 1 - MIDDLE_BITS)
    middle = round(middle / step) * step
    half = max(Fraction(hi) - middle, middle - Fraction(lo), Fraction(2) ** -100)
    exponent = math.frexp(half)[1]
    exponent -= Fraction(2) ** (exponent - 1) >= half
    return middle, Fraction(2) ** -exponent
