"""How much of the error of its argument a function passes on: by slopes, or by its range where they are infinite."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from flint import arb

from attnc_checker.claims import StageClaim
from attnc_checker.expressions import Function, evaluate, parse
from attnc_checker.jets import Model, Models, Poly, variable
from attnc_checker.ranges import Range, Ranges, coefficients, hull
from attnc_checker.vectors import most

PIECES, NEAR_ENDS = 128, 48
"""Of an interval, to find how much a function changes; the latter are shorter and shorter towards each end."""
ZERO, LINEAR, SLIVER = (arb(0), arb(0)), variable(0, 1), arb(2) ** -40


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
    steps, off = [width * i / PIECES for i in range(1, PIECES)] if are_many else [], e + _beyond(claim, low, high)
    if are_many and 0 < off < width:
        steps += [width * (off / width) ** (arb(i) / NEAR_ENDS) for i in range(1, NEAR_ENDS + 1)]
    inner = {float(x.mid()) for step in steps for x in (low + step, high - step)}
    edges = [low, *(arb(x) for x in sorted(inner) if low < x < high), high]
    found = [_piece(claim, function, a, b, e) for a, b in itertools.pairwise(edges)]
    jump = most([piece.jump for piece in found])  # smaller ones cost nothing more
    return [
        piece._replace(slopes=ZERO, jump=jump) if piece.values[1] - piece.values[0] <= jump else piece
        for piece in found
    ]


def _beyond(claim: StageClaim, low: Any, high: Any) -> Any:
    """How far [low, high] reaches beyond where g is held."""
    return arb(0) if claim.held is None else most([arb(claim.held[0]) - low, high - arb(claim.held[1]), arb(0)])


def _piece(claim: StageClaim, function: Function, low: Any, high: Any, e: Any) -> Piece:
    left, right, off = (low - e).lower(), (high + e).upper(), e + _beyond(claim, low, high)
    if claim.held is not None:  # clip(T) − t = σ·(T − t) + (clip(t) − t), σ ∈ [0, 1]
        first, last = (arb(end) for end in claim.held)
        left, right = low.min(left.max(first).min(last)), high.max(right.max(first).min(last))
    if off == 0:
        return Piece(low, high, ZERO, arb(0), evaluate(function, Ranges([(left, right)]))[0], arb(0))
    slope, values = _slope(function, left, right)
    by_range = (values[1] - values[0]).upper()
    if not slope.is_finite():
        return Piece(low, high, ZERO, by_range, values, by_range)
    if left != (low - e).lower() or right != (high + e).upper():
        slope = slope.union(arb(0))
    jump, change = (abs(slope) * (off - e)).upper(), (abs(slope) * off).upper()
    return Piece(low, high, (slope.lower(), slope.upper()), jump, values, change.min(by_range))


def _slope(function: Function, left: Any, right: Any) -> tuple[Any, Range]:
    """Slopes and values of g on [left, right]; nan where they are not known. If g is convex or concave there, between
    those at the ends; else by that in the middle, g′(t) = g′(c) + g″·(t − c). These from slivers within, as at a point
    alone it is not seen which side of a kink counts."""

    def series(low: Any, high: Any) -> Model:
        return evaluate(function, _Series((low, high)))[0]

    whole, middle, sliver = series(left, right), ((left + right) / 2).mid(), (right - left) * SLIVER
    slope, bend = _slope_and_bend(whole)
    if bend >= 0 or bend <= 0:
        ends = series(left, (left + sliver).upper()), series((right - sliver).lower(), right)
        nearer = _slope_and_bend(ends[0])[0].union(_slope_and_bend(ends[1])[0])
    else:
        nearer = _slope_and_bend(series(middle, (middle + sliver).upper()))[0] + 2 * bend * (left.union(right) - middle)
    return slope.intersection(nearer) if nearer.is_finite() else slope, whole.range


def _slope_and_bend(a: Model) -> tuple[Any, Any]:
    return a.poly.get(LINEAR, arb(0)), a.poly.get(2 * LINEAR, arb(0))


class _Series(Models):
    """Values, slopes and halves of second derivatives at all points of an interval: balls c_0 + c_1·τ + c_2·τ².

    At a kink slopes are those of both sides and all between (Clarke's derivative): g(T) − g(t) = G·(T − t) with one of
    them by Lebourg's mean value theorem.
    """

    def __init__(self, ends: Range) -> None:
        super().__init__([hull(ends)], [arb(1)], 2)
        self.ranges = Ranges([ends])

    def model(self, poly: Poly, rest: Any, range_: Range) -> Model:
        return Model({**poly, 0: hull(range_)}, range_)

    def apply(self, name: Any, a: Model) -> Model:
        slope, bend = _slope_and_bend(a)
        _, first, second = coefficients(name, a.range, 3)
        poly = {LINEAR: first * slope, 2 * LINEAR: first * bend + second * slope * slope}
        return self.model(poly, arb(0), self.ranges.apply(name, a.range))

    def undecided(self, a: Model, b: Model, low: Any, high: Any) -> Model:
        slope = _slope_and_bend(a)[0].union(_slope_and_bend(b)[0])
        return self.model({LINEAR: slope, 2 * LINEAR: arb("nan")}, arb(0), self.ranges.maximum(a.range, b.range))

    def step(self, name: str, a: Model) -> Model:
        low, high = self.ranges.step(name, a.range)
        return self.model({} if low == high else {LINEAR: arb("nan"), 2 * LINEAR: arb("nan")}, arb(0), (low, high))
