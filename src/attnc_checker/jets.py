"""Polynomials in τ ∈ [−1, 1]^d with Arb coefficients, and Taylor models of an expression.

A monomial τ^j is one integer: six bits for each j_i, and above them the total degree |j|. So the key of a product is
the sum of the keys, and sorted keys are sorted by degree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

from flint import arb, arb_series, fmpq

from attnc_checker.expressions import Function, Rules, evaluate
from attnc_checker.ranges import NAMED, SERIES, Range, Ranges, hull

Poly = dict[int, Any]
BITS = 6
MAX_HALVINGS = 10
SLICES = 8
"""Of the range of an argument."""
SMALL = arb(2) ** -20
"""Of the limit: smaller coefficients are not carried further when a cube is halved, but added to the bound."""


class Undecided(ArithmeticError):
    """A kink, a jump or a singularity may lie within the box."""


def variable(i: int, d: int) -> int:
    return (1 << BITS * d) + (1 << BITS * i)


def above(m: int, d: int) -> int:
    """Keys of degree ≤ m are those below this one."""
    return (m + 1) << BITS * d


def degree(key: int, i: int) -> int:
    """The power of τ_i."""
    return key >> BITS * i & (1 << BITS) - 1


@cache
def monomials(variables: tuple[int, ...], m: int, d: int) -> tuple[tuple[int, int, int], ...]:
    """(key, number of its parent, i): each monomial is an earlier one times τ_i; degrees ≤ m, sorted by degree."""
    found, start = [(0, 0, min(variables, default=0))], 0
    for _ in range(m):
        start, end = len(found), start
        for parent in range(end, start):
            key, _, last = found[parent]
            found += [(key + variable(i, d), parent, i) for i in variables if i >= last]
    return tuple(found)


@cache
def factorial(key: int, d: int) -> int:
    """j! = Π j_i!"""
    return math.prod(math.factorial(degree(key, i)) for i in range(d))


def multiply(a: Poly, b: Poly, end: int) -> Poly:
    """The product, keys below `end` only."""
    product: Poly = {}
    sorted_b = sorted(b.items())
    for i, x in a.items():
        for j, y in sorted_b:
            if i + j >= end:
                break
            product[i + j] = product[i + j] + x * y if i + j in product else x * y
    return product


def add(a: Poly, b: Poly, factor: Any = 1) -> Poly:
    sum_ = dict(a)
    for key, x in b.items():
        sum_[key] = sum_[key] + x * factor if key in sum_ else x * factor
    return sum_


def bounds(p: Poly, d: int) -> tuple[Any, Any]:
    """Below and above all values on [−1, 1]^d: a monomial of even powers lies in [0, 1], any other in [−1, 1]."""
    odd = sum(1 << BITS * i for i in range(d))
    low = high = p.get(0, arb(0))
    for key, x in p.items():
        if key & odd:
            low, high = low - abs(x), high + abs(x)
        elif key:
            low, high = low - (-x).nonnegative_part(), high + x.nonnegative_part()
    return low, high


def largest(p: Poly, limit: Any, d: int) -> Any:
    """Above |p| on [−1, 1]^d. The cube is halved where that may bring it down to the limit."""
    pending, worst = [(p, arb(0), 0)], arb(0)
    while pending:
        piece, dropped, depth = pending.pop()
        low, high = bounds(piece, d)
        size = ((-low).max(high) + dropped).upper()
        if size <= limit:
            worst = max(worst, size)
        elif depth == MAX_HALVINGS * d or not abs(piece.get(0, arb(0))) < limit:
            return size
        else:
            small = {key: x for key, x in piece.items() if key and abs(x) < SMALL * limit}
            piece, dropped = {key: x for key, x in piece.items() if key not in small}, dropped + norm(small)
            pending += [(_half(piece, depth % d, side, d), dropped, depth + 1) for side in (-1, 1)]
    return worst


def _half(p: Poly, i: int, side: int, d: int) -> Poly:
    """p with (τ_i + side)/2 for τ_i."""
    half: Poly = {}
    for key, x in p.items():
        n = degree(key, i)
        for k, factor in enumerate(_binomial(n, side)):
            lower = key - (n - k) * variable(i, d)
            half[lower] = half[lower] + x * factor if lower in half else x * factor
    return half


@cache
def _binomial(n: int, side: int) -> list[Any]:
    """The coefficients of ((τ + side)/2)^n."""
    return [arb(math.comb(n, k) * side ** (n - k)) / 2**n for k in range(n + 1)]


def norm(p: Poly) -> Any:
    """Above all absolute values on [−1, 1]^d."""
    return sum(map(abs, p.values()), arb(0))


def _compose(series: Any, y: Poly, m: int, d: int) -> Poly:
    """g∘y by Horner's rule in y − y₀: n factors y − y₀ have degree n at least. The g_n are those around y₀."""
    moving = {key: x for key, x in y.items() if key}
    result: Poly = {0: series[m]}
    for n in range(m - 1, -1, -1):
        result = multiply(result, moving, above(m - n, d))
        result[0] = series[n]
    return result


def _coefficients(name: str, ball: Any, m: int) -> list[Any]:
    """Holds the Taylor coefficients at all points of a ball: those over its parts, as series of wide balls blow up."""
    if not ball.is_finite():
        return [arb("nan")] * (m + 1)
    low, step = ball.lower(), (ball.upper() - ball.lower()) / SLICES
    parts = [(low + n * step).union(low + (n + 1) * step) for n in range(SLICES)]
    series = [SERIES[name](arb_series([part, 1], m + 1)) for part in parts]
    return [reduce(arb.union, (s[n] for s in series)) for n in range(m + 1)]


def _of_root(q: Any, n: int, y: Range) -> Any:
    """Holds the Taylor coefficients q(q − 1)…(q − n + 1)/n!·y^{q − n} of y^q at all y of a range; q is no integer."""
    factor = math.prod((q - i for i in range(n)), start=fmpq(1)) / math.factorial(n)
    return arb(factor) * hull((_power(y[0], q - n), _power(y[1], q - n)))


def _power(x: Any, q: Any) -> Any:
    return arb(0) if x == 0 and q > 0 else x ** arb(q)


class Model(NamedTuple):
    """A function on a box, two ways.

    `point` is its Taylor polynomial of degree m at the centre. `wide` has, for every |j| ≤ m + 1, a ball that holds the
    Taylor coefficients at all points of the box. By Lagrange f = point + Σ_{|j|=m+1} wide_j τ^j, with some members of
    the balls. If m = 0, a kink may lie inside: wide_j is then the hull of both sides, and f(x) − f(c) = G·(x − c) with
    some G of it for all x and c of the box (Clarke's derivative and Lebourg's mean value theorem).
    """

    point: Poly
    wide: Poly
    range: Range


class Models(Rules):
    """Rules for models on centre ± half."""

    def __init__(self, centre: Sequence[Any], half: Sequence[Any], m: int) -> None:
        self.centre, self.half, self.m, self.d = centre, half, m, len(centre)
        self.ranges = Ranges([((x - r).lower(), (x + r).upper()) for x, r in zip(centre, half, strict=True)])

    def whole(self, a: Model) -> Poly:
        return a.point | {key: x for key, x in a.wide.items() if key >= above(self.m, self.d)}

    def _known(self, point: Poly, wide: Poly, range_: Range) -> Model:
        """If there is no slope, as of √x at 0 or at a jump, and m = 0: by the range, with slopes that are not known."""
        ball = hull(range_)
        if ball.is_finite() and wide[0].is_finite():
            wide[0] = wide[0].intersection(ball)
        elif ball.is_finite() and self.m == 0:
            unknown = {variable(i, self.d): arb("nan") for i in range(self.d)}
            return Model({0: ball}, {0: ball, **unknown}, range_)
        return Model(point, wide, range_)

    def constant(self, x: Any) -> Model:
        return Model({0: arb(x)}, {0: arb(x)}, self.ranges.constant(x))

    def named(self, name: str) -> Model:
        return self.constant(NAMED[name]())

    def variable(self, i: int) -> Model:
        x, h, linear = self.centre[i], self.half[i], variable(i, self.d)
        point = {0: x, linear: h} if self.m else {0: x}
        return Model(point, {0: x + h * arb(0, 1), linear: h}, self.ranges.variable(i))

    def plus(self, a: Model, b: Model, sign: int = 1) -> Model:
        range_ = self.ranges.plus(a.range, b.range, sign)
        return self._known(add(a.point, b.point, sign), add(a.wide, b.wide, sign), range_)

    def times(self, a: Model, b: Model) -> Model:
        ends = above(self.m, self.d), above(self.m + 1, self.d)
        point, wide = multiply(a.point, b.point, ends[0]), multiply(a.wide, b.wide, ends[1])
        return self._known(point, wide, self.ranges.times(a.range, b.range))

    def power(self, a: Model, n: int) -> Model:
        found = super().power(a, n)
        return self._known(found.point, found.wide, self.ranges.power(a.range, n))

    def apply(self, name: str, a: Model) -> Model:
        low, high = bounds(self.whole(a), self.d)
        ball = a.wide[0].intersection(low.union(high)) if low.is_finite() and high.is_finite() else a.wide[0]
        point = _compose(SERIES[name](arb_series([a.point[0], 1], self.m + 1)), a.point, self.m, self.d)
        wide = _compose(_coefficients(name, ball, self.m + 1), a.wide | {0: ball}, self.m + 1, self.d)
        return self._known(point, wide, self.ranges.apply(name, a.range))

    def root(self, a: Model, q: Any) -> Model:
        """By the ends of y^{q − n}, which is finite at 0, too, as long as n ≤ q: the slope of y^1.5 is known there."""
        range_, y, ends = self.ranges.root(a.range, q), a.point[0], a.range
        low, high = bounds(self.whole(a), self.d)
        if low.is_finite() and high.is_finite():
            ends = ends[0].max(low.lower()), ends[1].min(high.upper())
        point = _compose([_of_root(q, n, (y, y)) for n in range(self.m + 1)], a.point, self.m, self.d)
        if self.m == 0 and not point[0].is_finite():
            point = {0: hull(range_)}
        wide = _compose([_of_root(q, n, ends) for n in range(self.m + 2)], a.wide, self.m + 1, self.d)
        return self._known(point, wide, range_)

    def magnitude(self, a: Model) -> Model:
        found = super().magnitude(a)
        return self._known(found.point, dict(found.wide), self.ranges.magnitude(a.range))

    def maximum(self, a: Model, b: Model) -> Model:
        difference = self.plus(a, b, -1)
        low, high = bounds(self.whole(difference), self.d)
        if low >= 0 or difference.range[0] >= 0:
            return a
        if high <= 0 or difference.range[1] <= 0:
            return b
        if self.m:
            raise Undecided("a kink lies within the box, or cannot be told from one")
        zero = arb(0)  # the maximum changes by a mean of the changes of a and b
        wide = {key: a.wide.get(key, zero).union(b.wide.get(key, zero)) for key in a.wide.keys() | b.wide.keys()}
        wide[0] = a.wide[0].max(b.wide[0])
        return self._known({0: a.point[0].max(b.point[0])}, wide, self.ranges.maximum(a.range, b.range))

    def step(self, name: str, a: Model) -> Model:
        low, high = self.ranges.step(name, a.range)
        if low == high:
            return self.constant(low)
        if self.m:
            raise Undecided(f"{name} may jump within the box")
        return self._known({0: arb("nan")}, {0: arb("nan")}, (low, high))


def models(function: Function, centre: Sequence[Any], half: Sequence[Any], m: int) -> list[Poly]:
    """Each output as a polynomial in τ = (x − centre)/half, of degree m + 1; coefficients of degree m + 1 are balls.

    If m = 0, by slopes or by the range, whichever leaves less open.
    """
    rules, found = Models(centre, half, m), []
    for model in evaluate(function, rules):
        poly, ball = rules.whole(model), hull(model.range)
        if m == 0 and not norm({key: x.rad() for key, x in poly.items()}) <= ball.rad():
            poly = {0: ball}
        found.append(poly)
    return found
