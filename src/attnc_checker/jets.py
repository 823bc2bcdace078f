"""Polynomials in τ ∈ [−1, 1]^d with balls for coefficients, and Taylor models of an expression.

Such a polynomial represents any function that is, at every τ, Σ_j c_j τ^j with some members c_j of the balls.
A monomial τ^j is one integer: six bits for each j_i, and above them the total degree |j|. So the key of a product is
the sum of the keys, and sorted keys are sorted by degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce
from itertools import accumulate
from typing import NamedTuple

from flint import arb, fmpq

from attnc_checker.expressions import Function, Rules, Smooth, evaluate
from attnc_checker.ranges import Box, Range, Ranges, expansion, hull
from attnc_checker.vectors import INFINITE

Poly = dict[int, arb]
"""Coefficients by monomial."""
BITS = 6
"""Bits of one exponent. Orders are at most 24, so a product of two polynomials has exponents up to 48."""
MAX_HALVINGS = 10
"""Largest number of halvings of a cube along each axis. attnc's margins rely on ten."""
SMALL = arb(2) ** -20
"""Coefficients below this share of the limit are added to the constant when a cube is halved."""
ANY, EVEN = arb(0, 1), arb(0.5, 0.5)


def variable(i: int, d: int) -> int:
    return (1 << BITS * d) + (1 << BITS * i)


def above(m: int, d: int) -> int:
    """Return the key below which are exactly the keys of degree ≤ m."""
    return (m + 1) << BITS * d


def degree(key: int, i: int) -> int:
    """Return the power of τ_i in a monomial."""
    return key >> BITS * i & (1 << BITS) - 1


def multiply(a: Poly, b: Poly, m: int, d: int) -> tuple[Poly, arb]:
    """Return the product up to degree m, and an upper bound on the absolute value of the rest."""
    product: Poly = {}
    end, rest, sorted_b = above(m, d), arb(0), sorted(b.items())
    sizes = [*accumulate(abs(y) for _, y in reversed(sorted_b))][::-1]  # of b from here on
    for i, x in a.items():
        for (j, y), size in zip(sorted_b, sizes, strict=True):
            if i + j >= end:
                rest += abs(x) * size
                break
            product[i + j] = product[i + j] + x * y if i + j in product else x * y
    return product, rest


def add(a: Poly, b: Poly, factor: arb | int = 1) -> Poly:
    sum_ = dict(a)
    for key, x in b.items():
        sum_[key] = sum_[key] + x * factor if key in sum_ else x * factor
    return sum_


def over(p: Poly, d: int) -> arb:
    """Return a ball that holds all values on [−1, 1]^d. Monomials of even powers are in [0, 1], others in [−1, 1]."""
    odd = sum(1 << BITS * i for i in range(d))
    return sum((x * (ANY if key & odd else EVEN if key else 1) for key, x in p.items()), arb(0))


def largest(p: Poly, limit: arb, d: int) -> arb:
    """Return an upper bound on |p| on [−1, 1]^d. The cube is halved if that may bring the bound down to the limit."""
    pending, worst = [(p, 0)], arb(0)
    while pending:
        piece, depth = pending.pop()
        size = abs(over(piece, d)).upper()
        if size <= limit:
            worst = max(worst, size)
        elif depth == MAX_HALVINGS * d or not abs(piece[0]) < limit:
            return reduce(arb.max, (abs(over(q, d)).upper() for q, _ in pending), size.max(worst))
        else:
            small = {key: x for key, x in piece.items() if key and abs(x) < SMALL * limit}
            piece = {key: x for key, x in piece.items() if key not in small} | {0: piece[0] + norm(small) * ANY}
            pending += [(_half(piece, depth % d, side, d), depth + 1) for side in (-1, 1)]
    return worst


def _half(p: Poly, i: int, side: int, d: int) -> Poly:
    """Return p with τ_i replaced by (τ_i + side)/2."""
    half: Poly = {}
    for key, x in p.items():
        n = degree(key, i)
        for k, factor in enumerate(_binomial(n, side)):
            lower = key - (n - k) * variable(i, d)
            half[lower] = half[lower] + x * factor if lower in half else x * factor
    return half


@cache
def _binomial(n: int, side: int) -> list[arb]:
    """Return the coefficients of ((τ + side)/2)^n."""
    return [arb(math.comb(n, k) * side ** (n - k)) / 2**n for k in range(n + 1)]


def norm(p: Poly) -> arb:
    """Return an upper bound on |p| on [−1, 1]^d: the sum of the absolute coefficients."""
    return sum(map(abs, p.values()), arb(0))


def _radii(p: Poly) -> arb:
    return sum((x.rad() for x in p.values()), arb(0))


def _error(found: tuple[Poly, arb]) -> arb:
    """Return the error of a polynomial up to ±rest, for comparisons."""
    poly, rest = found
    error = (rest + _radii(poly)).upper()
    return error if error.is_finite() else INFINITE


def _over(size: arb, divisor: arb) -> arb:
    """Return an upper bound on the size divided by the least of a positive divisor."""
    return (size / divisor.lower()).upper() if divisor > 0 else INFINITE


class Model(NamedTuple):
    """A function on a box: a polynomial, and the range of its values. If it is 1/v, then v is its `divisor`."""

    poly: Poly
    range: Range
    divisor: Model | None = None


class Models(Rules[Model]):
    """Rules for models on a box, of degree m."""

    def __init__(self, box: Box, m: int) -> None:
        self.box, self.m, self.d, self.ranges = box, m, len(box.centre), Ranges(box.sides)

    def model(self, poly: Poly, rest: arb, range_: Range) -> Model:
        """Make a model from a polynomial up to ±rest and a range. Each narrows the other."""
        poly = poly | {0: poly[0] + rest * ANY}
        values = over(poly, self.d)
        if values.is_finite():
            range_ = range_[0].max(values.lower()), range_[1].min(values.upper())
        ball = hull(range_)
        if ball.is_finite() and not (values.is_finite() and _radii(poly) <= ball.rad()):
            poly = {0: ball}
        return Model(poly, range_)

    def constant(self, x: fmpq | arb) -> Model:
        return Model({0: arb(x)}, self.ranges.constant(x))

    def variable(self, i: int) -> Model:
        return Model({0: self.box.centre[i], variable(i, self.d): self.box.half[i]}, self.ranges.variable(i))

    def plus(self, a: Model, b: Model, sign: int = 1) -> Model:
        return self.model(add(a.poly, b.poly, sign), arb(0), self.ranges.plus(a.range, b.range, sign))

    def times(self, a: Model, b: Model) -> Model:
        poly, rest = multiply(a.poly, b.poly, self.m, self.d)
        for u, v in ((a, b.divisor), (b, a.divisor)):
            if v is not None and len(u.poly) > 1:
                poly, rest = min((poly, rest), self._quotient(u, v), key=_error)
        return self.model(poly, rest, self.ranges.times(a.range, b.range))

    def _quotient(self, u: Model, v: Model) -> tuple[Poly, arb]:
        """Return a polynomial q and a bound on |u/v − q| = |u − q·v|/|v|, which is small also where u and v cancel."""
        q, left = self._solution(u.poly, lambda q: v.poly, {}, v.poly[0])
        return q, _over(left, abs(hull(v.range)))

    def _root(self, u: Model) -> tuple[Poly, arb]:
        """Return a polynomial q and a bound on |√u − q| = |u − q²|/|√u + q|, which is 0 for squares."""
        first = u.poly[0].sqrt()
        q, left = self._solution(u.poly, lambda q: q, {0: first.mid()}, 2 * first)
        return q, _over(left, u.range[0].sqrt() + over(q, self.d))

    def _solution(self, u: Poly, factor: Callable[[Poly], Poly], q: Poly, slope: arb) -> tuple[Poly, arb]:
        """Return q with q·factor(q) = u up to degree m, as nearly as q can be stored, and a bound on the difference.

        Terms of degree k are added to q in turn: those that are left of u, divided by the slope.
        """
        for k in range(self.m + 1):
            left, end = add(u, multiply(q, factor(q), k, self.d)[0], -1), above(k, self.d)
            q = q | {key: (x / slope).mid() for key, x in left.items() if key < end and key not in q}
        product, cut = multiply(q, factor(q), self.m, self.d)
        return q, norm(add(u, product, -1)) + cut

    def apply(self, name: Smooth, a: Model) -> Model:
        """For p and p + z in the range, g(p + z) = Σ_{k<n} g_k(p) z^k + d_n(p + z) z^n with d_n of `expansion`.

        The n ≤ m + 1 with the smallest remainder is used. In Horner's rule, terms of degree > m − k that are cut off
        with k factors still to come are multiplied by at most ‖z‖^k in the end.
        """
        p = a.poly[0].mid().max(a.range[0]).min(a.range[1])
        z = a.poly | {0: a.poly[0] - p}
        size, (at_p, wide) = norm(z), expansion(name, p, a.range, self.m + 2)
        remainders = [((x.rad() if n <= self.m else abs(x)) * size**n).upper() for n, x in enumerate(wide)]
        finite = (n for n, x in enumerate(remainders) if x.is_finite() and wide[n].is_finite())
        n = min(finite, key=remainders.__getitem__, default=0)
        poly, rest = {0: wide[n]}, arb(0)
        for k in reversed(range(n)):
            poly, cut = multiply(poly, z, self.m - k, self.d)
            poly[0] += at_p[k]
            rest += cut * size**k
        if name == fmpq(1, 2) and len(a.poly) > 1:
            poly, rest = min((poly, rest), self._root(a), key=_error)
        found = self.model(poly, rest, self.ranges.apply(name, a.range))
        return found._replace(divisor=a) if name == fmpq(-1) else found

    def raised(self, a: Model, b: Model) -> Model:
        return self.model(super().raised(a, b).poly, arb(0), self.ranges.raised(a.range, b.range))

    def magnitude(self, a: Model) -> Model:
        return self.model(super().magnitude(a).poly, arb(0), self.ranges.magnitude(a.range))

    def maximum(self, a: Model, b: Model) -> Model:
        low, high = self.plus(a, b, -1).range
        return a if low >= 0 else b if high <= 0 else self.undecided(a, b, low, high)

    def undecided(self, a: Model, b: Model, low: arb, high: arb) -> Model:
        """Return b + max(y, 0) for low ≤ y = a − b ≤ high. With s = high/(high − low), convexity gives
        0 ≤ max(y, 0) − s·y ≤ −s·low."""
        slope = high / (high - low)
        poly, rest = add(add({0: -low * slope / 2}, a.poly, slope), b.poly, 1 - slope), -low * slope / 2
        return self.model(poly, rest, self.ranges.maximum(a.range, b.range))

    def step(self, name: str, a: Model) -> Model:
        range_ = self.ranges.step(name, a.range)
        return Model({0: hull(range_)}, range_)


def models(function: Function, box: Box, m: int) -> list[Model]:
    """Return each output as a model in τ = (x − centre)/half, of degree m + 1."""
    return evaluate(function, Models(box, m + 1))
