"""How much of the error of its argument a function passes on: by slopes, or by its range where they are infinite."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.claims import StageClaim
from attnc_checker.expressions import Function, Rules, evaluate, parse
from attnc_checker.ranges import NAMED, Range, Ranges, coefficients
from attnc_checker.rounding import most

PIECES, NEAR_ENDS = 128, 48
"""Of an interval, to find how much a function changes; the latter are shorter and shorter towards each end."""
ZERO, UNKNOWN = (arb(0), arb(0)), (arb("nan"), arb("nan"))


class Piece(NamedTuple):
    """g(T) − g(t) = G·(T − t) up to jump, G one of slopes, for t in [low, high] and T within e of it, held as g is."""

    low: Any
    high: Any
    slopes: Range
    jump: Any
    values: Range  # of g at t and T
    change: Any  # |g(T) − g(t)|


def pieces_of(claim: StageClaim, low: Any, high: Any, e: Any, are_many: bool) -> list[Piece]:
    """Of [low, high], which holds t, while |T − t| ≤ e; all of it is one if the box is not halved either."""
    function, width = parse(claim.function, ["t"]), (high - low).upper()
    steps = [width * i / PIECES for i in range(1, PIECES)] if are_many else []
    if are_many and 0 < e < width:
        steps += [width * (e / width) ** (arb(i) / NEAR_ENDS) for i in range(1, NEAR_ENDS + 1)]
    inner = {float(x.mid()) for step in steps for x in (low + step, high - step)}
    edges = [low, *(arb(x) for x in sorted(inner) if low < x < high), high]
    found = [_piece(claim, function, a, b, e) for a, b in itertools.pairwise(edges)]
    jump = most([piece.jump for piece in found])  # smaller ones cost nothing more
    return [
        piece._replace(slopes=ZERO, jump=jump) if piece.values[1] - piece.values[0] <= jump else piece
        for piece in found
    ]


def _piece(claim: StageClaim, function: Function, low: Any, high: Any, e: Any) -> Piece:
    left, right, off = (low - e).lower(), (high + e).upper(), e
    if claim.held is not None:  # clip(T) − t = σ·(T − t) + (clip(t) − t), σ ∈ [0, 1]
        first, last = (arb(end) for end in claim.held)
        left, right = low.min(left.max(first).min(last)), high.max(right.max(first).min(last))
        off = e + most([first - low, high - last, arb(0)])
    if off == 0:
        return Piece(low, high, ZERO, arb(0), evaluate(function, Ranges([(left, right)]))[0], arb(0))
    slopes, values = _slopes(function, left, right)
    by_range = (values[1] - values[0]).upper()
    if not all(x.is_finite() for x in slopes):
        return Piece(low, high, ZERO, by_range, values, by_range)
    if left != (low - e).lower() or right != (high + e).upper():
        slopes = slopes[0].min(arb(0)), slopes[1].max(arb(0))
    steepest = slopes[1].max(-slopes[0])
    return Piece(low, high, slopes, (steepest * (off - e)).upper(), values, (steepest * off).upper().min(by_range))


def _slopes(function: Function, left: Any, right: Any) -> tuple[Range, Range]:
    """Slopes and values of g on [left, right]: if g is convex or concave there, slopes lie between those at the ends;
    else by those in the middle, g′(t) = g′(c) + g″·(t − c)."""

    def curve(low: Any, high: Any) -> Curve:
        return evaluate(function, _Curves((low, high)))[0]

    whole, middle, rules = curve(left, right), ((left + right) / 2).mid(), Ranges([])
    if whole.bend[0] >= 0 or whole.bend[1] <= 0:
        slopes = _hull(curve(left, left).slope, curve(right, right).slope)
    else:
        moved = rules.times(rules.plus(whole.bend, whole.bend), (left - middle, right - middle))
        slopes = rules.plus(curve(middle, middle).slope, moved)
    if all(x.is_finite() for x in slopes):
        return (slopes[0].max(whole.slope[0]), slopes[1].min(whole.slope[1])), whole.value
    return whole.slope, whole.value


def _hull(a: Range, b: Range) -> Range:
    return a[0].min(b[0]), a[1].max(b[1])


class Curve(NamedTuple):
    """Of a function of one variable on an interval; the bend is half of its second derivative."""

    value: Range
    slope: Range
    bend: Range


class _Curves(Rules):
    """At a kink the slope is one of those on both sides, and between them (Clarke's derivative): by Lebourg's mean
    value theorem g(T) − g(t) = G·(T − t) with one of them. nan at jumps, and of bends at kinks."""

    def __init__(self, ends: Range) -> None:
        self.ranges = Ranges([ends])

    def constant(self, x: Any) -> Curve:
        return Curve(self.ranges.constant(x), ZERO, ZERO)

    def named(self, name: str) -> Curve:
        return self.constant(NAMED[name]())

    def variable(self, i: int) -> Curve:
        return Curve(self.ranges.variable(i), (arb(1), arb(1)), ZERO)

    def plus(self, a: Curve, b: Curve, sign: int = 1) -> Curve:
        return Curve(*(self.ranges.plus(x, y, sign) for x, y in zip(a, b, strict=True)))

    def times(self, a: Curve, b: Curve) -> Curve:
        plus, times = self.ranges.plus, self.ranges.times
        slope = plus(times(a.value, b.slope), times(a.slope, b.value))
        bend = plus(plus(times(a.value, b.bend), times(a.slope, b.slope)), times(a.bend, b.value))
        return Curve(times(a.value, b.value), slope, bend)

    def power(self, a: Curve, n: int) -> Curve:
        return self.apply(fmpq(n), a)

    def root(self, a: Curve, q: Any) -> Curve:
        return self.apply(q, a)

    def apply(self, name: Any, a: Curve) -> Curve:
        times = self.ranges.times
        _, first, second = ((x.lower(), x.upper()) for x in coefficients(name, a.value, 3))
        bend = self.ranges.plus(times(first, a.bend), times(second, self.ranges.power(a.slope, 2)))
        return Curve(self.ranges.apply(name, a.value), times(first, a.slope), bend)

    def magnitude(self, a: Curve) -> Curve:
        return super().magnitude(a)._replace(value=self.ranges.magnitude(a.value))

    def maximum(self, a: Curve, b: Curve) -> Curve:
        low, high = self.plus(a, b, -1).value
        if low >= 0 or high <= 0:
            return a if low >= 0 else b
        return Curve(self.ranges.maximum(a.value, b.value), _hull(a.slope, b.slope), UNKNOWN)

    def step(self, name: str, a: Curve) -> Curve:
        low, high = self.ranges.step(name, a.value)
        return Curve((low, high), *((ZERO, ZERO) if low == high else (UNKNOWN, UNKNOWN)))
