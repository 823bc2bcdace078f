"""Moments of the keys of a head by products of matrices, and the quotient of two polynomials.

Let key k have the slope a_{k_i} along axis i. Then e^{s_k} = e^{c_k}·Π_i e^{a_{k_i} x_i}, and every moment at a centre,
    Σ_k e^{s_k(c)} g_k Π_i (α_{k_i} r_i)^{j_i}/j_i!,
is a sum over the array e^{c_k} g_k, which all boxes share, times one matrix for each axis. A grid has few slopes along
an axis, so that few exponentials and powers are needed for a box.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from flint import arb, arb_mat, arb_series, ctx

from attnc_checker.jets import MOST_PACKED, Poly, above, by_degree, degree, norm, packed, unpacked, variable
from attnc_checker.vectors import Vector


class Axis:
    """For every slope a along one axis, a weight e^{a·x} at the centre, and the shift (a − mean)·r."""

    def __init__(self, weights: list[arb], shifts: list[arb]) -> None:
        self.weights, self.shifts, self.known = weights, shifts, dict[tuple[int, int], arb_mat]()

    def powers(self, m: int, lowest: int = 0) -> arb_mat:
        """Return weight·shift^n for every slope and lowest ≤ n ≤ m. Shifts are not negative if lowest > 0."""
        if (m, lowest) not in self.known:
            pairs = zip(self.weights, self.shifts, strict=True)
            firsts = ((w * x**lowest if lowest else w, x) for w, x in pairs)
            rows = [[*itertools.accumulate([x] * (m - lowest), arb.__mul__, initial=w)] for w, x in firsts]
            self.known[m, lowest] = arb_mat(rows)
        return self.known[m, lowest]

    @cached_property
    def wide(self) -> Axis:
        """The axis of |shift|, with the weights times e^|shift|."""
        sizes = [abs(x).upper() for x in self.shifts]
        return Axis([w * x.exp() for w, x in zip(self.weights, sizes, strict=True)], sizes)


class Grid:
    """For each of several columns, the numbers of keys by their places. There are zeros where there is no key.

    Boxes that share the last axes share the sums over them.
    """

    def __init__(
        self, columns: Sequence[Vector], places: Sequence[tuple[int, ...]], sizes: list[int], kept: int
    ) -> None:
        """Add up the numbers of all keys at the same place. The last `kept` sums are kept."""
        count, strides = math.prod(sizes), [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self.sizes, self.numbers, self.num_columns = sizes, [arb(0)] * (count * len(columns)), len(columns)
        for place, row in zip(places, zip(*columns, strict=True), strict=True):
            for n, x in enumerate(row):
                self.numbers[n * count + sum(map(int.__mul__, place, strides))] += x
        self._sums = lru_cache(kept)(self._summed)

    def moments(self, axes: Sequence[Axis], m: int, lowest: int = 0) -> list[Poly]:
        """Return the moments of degree `lowest` to m for every column, sorted by degree."""
        order = _order(len(axes), m, lowest)
        powers = axes[0].powers(m, lowest if len(axes) == 1 else 0)
        numbers = order.kept(self._sums(tuple(axes[1:]), m) * powers, 0)
        columns = (numbers[n :: self.num_columns] for n in range(self.num_columns))
        return [dict(zip(order.keys, map(arb.__mul__, column, order.factors), strict=True)) for column in columns]

    def _summed(self, axes: tuple[Axis, ...], m: int) -> arb_mat:
        """Return the sums over the last axes for all monomials up to degree m. Rows are along the axis before them."""
        numbers, i = self.numbers, len(self.sizes) - len(axes)
        if axes:
            numbers = _order(len(self.sizes), m, 0).kept(self._sums(axes[1:], m) * axes[0].powers(m), i)
        return arb_mat(len(numbers) // self.sizes[i - 1], self.sizes[i - 1], numbers)


class _Order(NamedTuple):
    """The order of monomials in sums over one axis after the other, from the last axis on."""

    steps: list[tuple[int, list[int]]]  # for axis i: the number of monomials that are made, and which of them are kept
    keys: list[int]
    factors: list[arb]  # 1/j!

    def kept(self, product: arb_mat, i: int) -> list[arb]:
        """Return the numbers of the monomials that are kept after axis i. Columns are the powers along this axis."""
        numbers, (num_made, kept) = product.transpose().entries(), self.steps[i]
        if len(kept) == num_made:
            return numbers
        block = len(numbers) // num_made
        if block == 1:
            return [*map(numbers.__getitem__, kept)]
        found = list[arb]()
        for n in kept:
            found += numbers[n * block : (n + 1) * block]
        return found


@cache
def _order(d: int, m: int, lowest: int) -> _Order:
    keys, steps = [0], list[tuple[int, list[int]]]()
    for i in reversed(range(d)):
        powers = range(lowest if d == 1 else 0, m + 1)
        made = [key + n * variable(i, d) for n in powers for key in keys]
        least = above(lowest - 1, d) if i == 0 else 0
        kept = [n for n, key in enumerate(made) if least <= key < above(m, d)]
        if i == 0:
            kept.sort(key=made.__getitem__)
        steps.insert(0, (len(made), kept))
        keys = [made[n] for n in kept]
    return _Order(steps, keys, [1 / arb(math.prod(math.factorial(degree(key, i)) for i in range(d))) for key in keys])


def quotient(nu: Poly, delta: Poly, m: int, d: int) -> tuple[Poly, arb]:
    """Return Q by long division up to degree m, and an upper bound on Σ_j |(ν − Q·δ)_j|. δ has no degree above m.

    The exact quotient is a member of the balls of Q, and for it ν − Q·δ has no terms up to degree m.
    """
    found = _long_division(nu, delta, m, d)
    sizes_of_delta = itertools.accumulate(reversed(by_degree(delta, m, d)))  # of all degrees ≥ m, ≥ m − 1, …
    rest = sum(map(arb.__mul__, by_degree(found, m, d)[1:], sizes_of_delta), arb(0))
    return found, rest + norm({key: x for key, x in nu.items() if key >= above(m, d)})


def _long_division(nu: Poly, delta: Poly, m: int, d: int) -> Poly:
    if d == 1 and ctx.cap > m:  # terms beyond it would be 0
        series = (arb_series([p[n * variable(0, 1)] for n in range(m + 1)], m + 1) for p in (nu, delta))
        ratio = operator.truediv(*series)
        return {key: ratio[n] for n, key in enumerate(delta)}
    inverse, end = 1 / delta[0], above(m, d)
    if d <= MOST_PACKED:
        parts, by = packed(nu, m, d), packed(delta, m, d)
        for n in range(m + 1):
            parts[n] = sum((-parts[i] * by[n - i] for i in range(n)), parts[n]) * inverse
        return unpacked(parts, m, d)
    found, left = {}, dict(nu)
    for key in delta:
        q = found[key] = left[key] * inverse
        for j, x in delta.items():
            if key + j >= end:
                break
            left[key + j] -= q * x
    return found
