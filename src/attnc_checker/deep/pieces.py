"""How much of the error of its argument a function passes on: by slopes, or by its range where they are infinite."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from flint import arb

from attnc_checker.claims import StageClaim
from attnc_checker.expressions import Function, evaluate, parse
from attnc_checker.jets import Model, Models, variable
from attnc_checker.ranges import Range, Ranges
from attnc_checker.rounding import most

PIECES, NEAR_ENDS = 128, 48
"""Of an interval, to find how much a function changes; the latter are shorter and shorter towards each end."""
ZERO, TINY = (arb(0), arb(0)), arb(2) ** -100


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
    slope, values = _slope(function, left, right)
    change, by_range = (abs(slope) * off).upper(), (values[1] - values[0]).upper()
    if not change.is_finite():
        return Piece(low, high, ZERO, by_range, values, by_range)
    if left != (low - e).lower() or right != (high + e).upper():
        slope = slope.union(arb(0))
    return Piece(
        low, high, (slope.lower(), slope.upper()), (abs(slope) * (off - e)).upper(), values, change.min(by_range)
    )


def _slope(function: Function, left: Any, right: Any) -> tuple[Any, Range]:
    """Slopes and values of g on [left, right]; nan where they are not known. If g is convex or concave there, between
    those at the ends."""
    half, linear, ranges = ((right - left) / 2).upper(), variable(0, 1), Ranges([(left, right)])

    def model(x: Any, half: Any, m: int) -> Model:
        rules = Models([x], [half], m)
        rules.ranges = ranges
        return evaluate(function, rules)[0]

    for m in (1, 0):
        try:
            whole = model((left + right) / 2, half, m)
            slope, bend = whole.wide.get(linear, arb(0)) / half, whole.wide.get(2 * linear, arb(0))
            if m and (bend >= 0 or bend <= 0):
                first, last = (model(x, TINY, 1).point.get(linear, arb(0)) / TINY for x in (left, right))
                slope = first.union(last)
            elif m:  # g′ = g′(c) + g″·(t − c)
                slope = slope.intersection((whole.point.get(linear, arb(0)) + 2 * bend * arb(0, 1)) / half)
            if slope.is_finite():
                return slope, whole.range
        except (ArithmeticError, ValueError):
            continue
    return arb("nan"), evaluate(function, ranges)[0]
