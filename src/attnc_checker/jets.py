"""Polynomials in τ ∈ [−1, 1]^d with balls for coefficients, and Taylor models of an expression.

Such a polynomial represents any function that is, at every τ, Σ_j c_j τ^j with some members c_j of the balls.
A monomial τ^j is one integer: six bits for each j_i, and above them the total degree |j|. So the key of a product is
the sum of the keys, and sorted keys are sorted by degree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from itertools import accumulate, combinations_with_replacement, product
from typing import NamedTuple

from flint import arb, arb_mat, arb_poly, fmpq, fmpz_poly

from attnc_checker.expressions import Function, Rules, Smooth, evaluate
from attnc_checker.ranges import Box, Range, Ranges, expansion, hull
from attnc_checker.vectors import INFINITE, most

Poly = dict[int, arb]
"""Coefficients by monomial."""
BITS = 6
"""Bits of one exponent. Orders are at most 24, so a product of two polynomials has exponents up to 48."""
MAX_HALVINGS = 10
"""Largest number of halvings of a cube along each axis. attnc's margins rely on ten."""
DENSE, MOST_PACKED = 2000, 3
"""Fewest pairs of terms and most variables of polynomials that are packed before they are multiplied.
Measured: in two variables of degree 17 that is four times as fast."""
MOST_COEFFICIENTS = 4096
"""Largest number of coefficients in Bernstein's basis. They take 0.5 µs each, so that this many take 2 ms."""
MOST_CORNERED = 8
"""Largest number of variables in which the corners are compared with the limit, which may save halvings."""
SMALL = arb(2) ** -22
"""Coefficients below this share of the limit are added to the constant before a cube is halved."""
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
    if len(a) * len(b) >= DENSE and 1 < d <= MOST_PACKED:
        parts, others = packed(a, m, d), packed(b, m, d)
        whole = [sum((parts[i] * others[n - i] for i in range(n)), parts[n] * others[0]) for n in range(m + 1)]
        degrees = max(m, *(key >> BITS * d for key in (*a, *b)))
        sizes = [*accumulate(reversed(by_degree(b, degrees, d)))][::-1]  # of b from each degree on
        pairs = ((x, m + 1 - n) for n, x in enumerate(by_degree(a, degrees, d)))
        return unpacked(whole, m, d), sum((x * sizes[max(n, 0)] for x, n in pairs if n <= degrees), arb(0))
    found: Poly = {}
    end, rest, sorted_b = above(m, d), arb(0), sorted(b.items())
    sizes = [*accumulate(abs(y) for _, y in reversed(sorted_b))][::-1]  # of b from here on
    for i, x in a.items():
        for (j, y), size in zip(sorted_b, sizes, strict=True):
            key = i + j
            if key >= end:
                rest += abs(x) * size
                break
            if key in found:
                found[key] += x * y
            else:
                found[key] = x * y
    return found, rest


def packed(p: Poly, m: int, d: int) -> list[arb_poly]:
    """Return the terms of each degree up to m as one polynomial in one variable, so that products are Arb's own."""
    return [arb_poly([p.get(key, 0) for key in keys]) for keys in _layout(m, d)]


def unpacked(parts: list[arb_poly], m: int, d: int) -> Poly:
    pairs = zip(_layout(m, d), parts, strict=True)
    return {key: part[n] for keys, part in pairs for n, key in enumerate(keys) if key >= 0}


@cache
def _layout(m: int, d: int) -> list[list[int]]:
    """For every degree up to m, return the keys of its monomials by their places in a polynomial in one variable.

    The place is Σ_{i>0} j_i·(m + 1)^{i−1}: with the degree it determines j, and places of a product are added. There
    is no monomial at a place with the key −1.
    """
    found = []
    for n in range(m + 1):
        keys = [-1] * (n * (m + 1) ** max(0, d - 2) + 1)
        for key in _monomials(n, d):
            keys[sum(degree(key, i) * (m + 1) ** (i - 1) for i in range(1, d))] = key
        found.append(keys)
    return found


def _monomials(n: int, d: int) -> list[int]:
    """Return the keys of all monomials of degree n."""
    chosen = combinations_with_replacement([variable(i, d) for i in range(d)], n)
    return [*map(sum, chosen)]


def by_degree(p: Poly, m: int, d: int) -> list[arb]:
    """Return the sums of the absolute coefficients of each degree up to m, which is that of p."""
    if d == 1 and len(p) == m + 1:
        return [abs(p[n * variable(0, 1)]) for n in range(m + 1)]
    found = [arb(0)] * (m + 1)
    for key, x in p.items():
        found[key >> BITS * d] += abs(x)
    return found


def add(a: Poly, b: Poly, factor: arb | int = 1) -> Poly:
    sum_ = dict(a)
    if isinstance(factor, int) and factor == 1:
        for key, x in b.items():
            sum_[key] = sum_[key] + x if key in sum_ else x
    elif isinstance(factor, int) and factor == -1:
        for key, x in b.items():
            sum_[key] = sum_[key] - x if key in sum_ else -x
    else:
        for key, x in b.items():
            sum_[key] = sum_[key] + x * factor if key in sum_ else x * factor
    return sum_


def over(p: Poly, d: int) -> arb:
    """Return a ball that holds all values on [−1, 1]^d. Monomials of even powers are in [0, 1], others in [−1, 1]."""
    odd, sizes, total = sum(1 << BITS * i for i in range(d)), arb(0), p.get(0, arb(0))
    for key, x in p.items():
        if key & odd:
            sizes += abs(x)
        elif key:
            total += x * EVEN
    return total + sizes * ANY


def largest(p: Poly, limit: arb, d: int) -> arb:
    """Return an upper bound on |p| on [−1, 1]^d. The cube is halved if that may bring the bound down to the limit."""
    pending, worst = [(p, 0)], arb(0)
    while pending:
        piece, depth = pending.pop()
        size, is_exceeded = abs(over(piece, d)).upper(), not abs(piece[0]) < limit
        if not (size <= limit or is_exceeded):
            least = SMALL * limit
            if small := {key: x for key, x in piece.items() if key and abs(x) < least}:
                piece = {key: x for key, x in piece.items() if key not in small} | {0: piece[0] + norm(small) * ANY}
            by_corners, is_exceeded = _between_corners(piece, limit, d)
            size = size.min(by_corners)
        if size <= limit:
            worst = max(worst, size)
        elif depth == MAX_HALVINGS * d or is_exceeded:
            return reduce(arb.max, (abs(over(q, d)).upper() for q, _ in pending), size.max(worst))
        else:
            pending += [(half, depth + 1) for half in halves(piece, depth % d, d)]
    return worst


def _between_corners(p: Poly, limit: arb, d: int) -> tuple[arb, bool]:
    """Return a bound on |p| on [−1, 1]^d, and whether |p| exceeds the limit at a corner.

    In Bernstein's basis the polynomials are not negative and have the sum 1. So |p| is at most the largest coefficient,
    and the coefficients at the corners are the values of p there.
    """
    sizes, places, corners = _array(tuple(p), d)
    if math.prod(sizes) > MOST_COEFFICIENTS:
        return INFINITE, False
    numbers = [arb(0)] * math.prod(sizes)
    for place, x in zip(places, p.values(), strict=True):
        numbers[place] = x
    for size in reversed(sizes):
        numbers = rotated(numbers, _bernstein(size - 1))
    return most(map(abs, numbers)), any(abs(numbers[n]) > limit for n in corners)


@lru_cache(1024)
def _array(keys: tuple[int, ...], d: int) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes of the smallest array for these monomials, their places in it, and the places of its corners."""
    powers = [[degree(key, i) for key in keys] for i in range(d)]
    sizes = [1 + max(column) for column in powers]
    strides = [math.prod(sizes[i + 1 :]) for i in range(d)]

    def place(index: Sequence[int]) -> int:
        return sum(map(int.__mul__, index, strides))

    corners = [*map(place, product(*({0, size - 1} for size in sizes)))] if d <= MOST_CORNERED else []
    return sizes, [*map(place, zip(*powers, strict=True))], corners


def rotated(numbers: Sequence[arb], matrix: arb_mat) -> list[arb]:
    """Multiply the last index of an array, whose numbers are listed in order, by the matrix, and make it the first."""
    size = matrix.nrows()
    found: list[arb] = (arb_mat(len(numbers) // size, size, numbers) * matrix).transpose().entries()
    return found


@cache
def _bernstein(n: int) -> arb_mat:
    """Return the matrix from coefficients of τ^j to those in Bernstein's basis of degree n on [−1, 1].

    The coefficient i of τ^j is the mean of all products of j out of n numbers, of which i are 1 and n − i are −1.
    """
    products = [fmpz_poly([1, 1]) ** i * fmpz_poly([1, -1]) ** (n - i) for i in range(n + 1)]
    return arb_mat([[arb(products[i][j]) / math.comb(n, j) for i in range(n + 1)] for j in range(n + 1)])


def halves(p: Poly, i: int, d: int) -> tuple[Poly, Poly]:
    """Return p with τ_i replaced by (τ_i − 1)/2, and by (τ_i + 1)/2. They differ in the signs of odd powers of ±1."""
    parts: tuple[Poly, Poly] = ({}, {})  # of even powers, of odd powers
    step = variable(i, d)
    for key, x in p.items():
        if n := degree(key, i):
            for power, factor in enumerate(_binomial(n)):
                part = parts[power & 1]
                part[key] = part[key] + x * factor if key in part else x * factor
                key -= step
        else:
            parts[0][key] = parts[0][key] + x if key in parts[0] else x
    return add(*parts, -1), add(*parts)


@cache
def _binomial(n: int) -> list[arb]:
    """Return the coefficients of τ^n, τ^{n−1}, … in ((τ + 1)/2)^n."""
    return [arb(math.comb(n, k)) / 2**n for k in range(n + 1)]


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
    """Rules for models on a box, of degree m. Remainders are as small as possible, or at most `enough`."""

    def __init__(self, box: Box, m: int, enough: arb | int = 0) -> None:
        self.box, self.m, self.d, self.ranges, self.enough = box, m, len(box.centre), Ranges(box.sides), enough

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
        whole, cut = multiply(q, factor(q), self.m, self.d)
        return q, norm(add(u, whole, -1)) + cut

    def apply(self, name: Smooth, a: Model) -> Model:
        """For p and p + z in the range, g(p + z) = Σ_{k<n} g_k(p) z^k + d_n(p + z) z^n with d_n of `expansion`.

        The first n ≤ m + 1 with a remainder of at most `enough` is used, or the one with the smallest remainder. In
        Horner's rule, terms of degree > m − k that are cut off with k factors still to come are multiplied by at most
        ‖z‖^k in the end.
        """
        p = a.poly[0].mid().max(a.range[0]).min(a.range[1])
        z = a.poly | {0: a.poly[0] - p}
        if z[0] == 0:
            del z[0]
        size, (at_p, wide) = norm(z), expansion(name, p, a.range, self.m + 2)
        remainders = [((x.rad() if n <= self.m else abs(x)) * size**n).upper() for n, x in enumerate(wide)]
        finite = [n for n, x in enumerate(remainders) if x.is_finite() and wide[n].is_finite()]
        n = min(finite, key=lambda n: remainders[n].max(self.enough), default=0)
        poly, rest = {0: wide[n]}, arb(0)
        if is_one_term := len(z) == 1 and 0 not in z:
            poly, rest = self._powers(z, [*at_p[:n], wide[n]])
        else:
            for k in reversed(range(n)):
                poly, cut = multiply(poly, z, self.m - k, self.d)
                poly[0] = poly[0] + at_p[k] if 0 in poly else at_p[k]
                rest += cut * size**k
        if name == fmpq(1, 2) and not is_one_term and len(a.poly) > 1:
            poly, rest = min((poly, rest), self._root(a), key=_error)
        found = self.model(poly, rest, self.ranges.apply(name, a.range))
        return found._replace(divisor=a) if name == fmpq(-1) else found

    def _powers(self, z: Poly, coefficients: list[arb]) -> tuple[Poly, arb]:
        """Return Σ_k coefficients_k z^k up to degree m for a single term z, and a bound on the rest."""
        ((key, x),) = z.items()
        powers = accumulate([x] * (len(coefficients) - 1), operator.mul, initial=arb(1))
        terms = {k * key: g * power for k, (g, power) in enumerate(zip(coefficients, powers, strict=True))}
        end = above(self.m, self.d)
        return {k: y for k, y in terms.items() if k < end}, norm({k: y for k, y in terms.items() if k >= end})

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


def models(function: Function, box: Box, m: int, enough: arb | int = 0) -> list[Model]:
    """Return each output as a model in τ = (x − centre)/half, of degree m + 1."""
    return evaluate(function, Models(box, m + 1, enough))
