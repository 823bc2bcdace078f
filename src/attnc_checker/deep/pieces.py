"""The error of a function that an error of its argument causes: by slopes, or by its range if they are infinite."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from flint import arb

from attnc_checker.deep.claims import StageClaim
from attnc_checker.derivatives import DERIVATIVES
from attnc_checker.expressions import Function, Smooth, evaluate, parse
from attnc_checker.files import require
from attnc_checker.jets import Model, Models, Poly, variable
from attnc_checker.ranges import UNKNOWN, Box, Range, Ranges, coefficients, hull, outward
from attnc_checker.vectors import most

PIECES, NEAR_ENDS = 256, 48
"""Numbers of equal pieces of an interval on which slopes are found, and of geometric pieces towards each end. The
prover uses half as many, so that its slopes are no narrower than those here."""
ZERO, LINEAR = (arb(0), arb(0)), variable(0, 1)
PARSED = {name: parse(text, ["t"]) for name, text in DERIVATIVES.items()}
"""Derivatives that interval arithmetic encloses tightly. Others come from Taylor coefficients."""


class Piece(NamedTuple):
    """g(T) − g(t) = G·(T − t) up to `jump`, with G in `slopes`, for t in [low, high] and |T − t| ≤ e."""

    low: arb
    high: arb
    slopes: Range
    jump: arb
    values: Range  # the range of g at t and T
    change: arb  # a bound on |g(T) − g(t)|


class Pieces:
    """The pieces of the range [low, high] of t, with |T − t| ≤ e. There is one piece if the box is not halved."""

    def __init__(
        self,
        claim: StageClaim,
        low: arb,
        high: arb,
        e: arb,
        are_many: bool,
        function: Function | None = None,
        skipped: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`function` is g, or another function of t instead, such as g′. t is never in the intervals `skipped`."""
        function = function or parse(claim.function, ["t"])
        width, least, steps = (high - low).upper(), e if e > 0 else _beyond(claim, low, high), []
        if are_many:
            steps = [width * i / PIECES for i in range(1, PIECES)]
        if are_many and 0 < least < width:
            steps += [width * (least / width) ** (arb(i) / NEAR_ENDS) for i in range(1, NEAR_ENDS + 1)]
        inner = {float(x.mid()) for step in steps for x in (low + step, high - step)}
        holes = [(math.nextafter(a, b), math.nextafter(b, a)) for a, b in skipped]  # t is beyond their ends
        inner |= {*itertools.chain(*holes)}
        edges = [low, *(arb(x) for x in sorted(inner) if low < x < high), high]
        found = [
            _piece(claim, function, a, b, e)
            for a, b in itertools.pairwise(edges)
            if not any(lo <= a and b <= hi for lo, hi in holes)
        ]
        require(bool(found), "all of the interval of a stage is excluded")
        largest = most([piece.jump for piece in found])  # smaller jumps cost nothing more
        jumps = [(piece.values[1] - piece.values[0]).upper() for piece in found]
        self.pieces = [
            piece._replace(slopes=ZERO, jump=jump) if jump <= largest else piece
            for piece, jump in zip(found, jumps, strict=True)
        ]

    def around(self, t: Range = UNKNOWN) -> Piece:
        """Return one piece for all t of a range, or for all pieces if the range is nan."""
        first = bisect.bisect_left(self.pieces, t[0], key=lambda piece: piece.high)
        last = bisect.bisect_right(self.pieces, t[1], key=lambda piece: piece.low)
        met = self.pieces[first:last]
        require(bool(met), "nothing is known about a function on a part of the box")
        low, high = met[0].low.max(t[0]), met[-1].high.min(t[1])
        _, _, slopes, jumps, values, changes = zip(*met, strict=True)
        all_slopes, all_values = (outward([*itertools.chain(*ranges)]) for ranges in (slopes, values))
        return Piece(low, high, all_slopes, most(jumps), all_values, most(changes))


def _beyond(claim: StageClaim, low: arb, high: arb) -> arb:
    """Return the distance by which [low, high] exceeds the ends beyond which g is constant."""
    return arb(0) if claim.held is None else most([arb(claim.held[0]) - low, high - arb(claim.held[1]), arb(0)])


def _piece(claim: StageClaim, function: Function, low: arb, high: arb, e: arb) -> Piece:
    left, right, off = (low - e).lower(), (high + e).upper(), e + _beyond(claim, low, high)
    if claim.held is not None:  # clip(T) − t = σ·(T − t) + (clip(t) − t), σ ∈ [0, 1]
        first, last = (arb(end) for end in claim.held)
        left, right = low.min(left.max(first).min(last)), high.max(right.max(first).min(last))
    if off == 0:
        return Piece(low, high, ZERO, arb(0), evaluate(function, Ranges([(left, right)]))[0], arb(0))
    slope, values = slopes_of(function, (left, right))
    by_range = (values[1] - values[0]).upper()
    if not slope.is_finite():
        return Piece(low, high, ZERO, by_range, values, by_range)
    if left != (low - e).lower() or right != (high + e).upper():
        slope = slope.union(arb(0))
    jump, change = (abs(slope) * (off - e)).upper(), (abs(slope) * off).upper()
    return Piece(low, high, (slope.lower(), slope.upper()), jump, values, change.min(by_range))


def slopes_of(function: Function, ends: Range) -> tuple[arb, Range]:
    """Return a ball that holds all slopes, or nan if they are not known, and the range of values."""
    (whole,) = evaluate(function, _Slopes(ends))
    return _slope(whole), whole.range


class _Slopes(Models):
    """Values and slopes at all points of an interval: balls c_0 + c_1·τ.

    At a kink the slopes are those of both sides and all between them (Clarke's derivative). By Lebourg's mean value
    theorem g(T) − g(t) = G·(T − t) with one of them.
    """

    def __init__(self, ends: Range) -> None:
        super().__init__(Box([hull(ends)], [arb(1)]), 1)
        self.ranges = Ranges([ends])

    def model(self, poly: Poly, rest: arb, range_: Range) -> Model:
        return Model({**poly, 0: hull(range_)}, range_)

    def apply(self, name: Smooth, a: Model) -> Model:
        if isinstance(name, str) and name in PARSED:
            slope = hull(evaluate(PARSED[name], Ranges([a.range]))[0])
        else:
            slope = coefficients(name, a.range, 2)[1]
        return self.model({LINEAR: slope * _slope(a)}, arb(0), self.ranges.apply(name, a.range))

    def undecided(self, a: Model, b: Model, low: arb, high: arb) -> Model:
        return self.model({LINEAR: _slope(a).union(_slope(b))}, arb(0), self.ranges.maximum(a.range, b.range))

    def step(self, name: str, a: Model) -> Model:
        low, high = self.ranges.step(name, a.range)
        return self.model({} if low == high else {LINEAR: arb("nan")}, arb(0), (low, high))


def _slope(a: Model) -> arb:
    return a.poly.get(LINEAR, arb(0))
