"""Jets: polynomials with a remainder that enclose functions over boxes, many boxes at a time (Taylor models).

On the box {c + rτ : τ ∈ [−1, 1]^d} a jet of order m encloses f if f's Taylor coefficients at c in τ are p_j with
|p_j − mid_j| ≤ radius_|j| for |j| ≤ m, and for all τ in [−1, 1]^d and s in [0, 1]
    |f(c + rsτ) − Σ_{|j|≤m} p_j (sτ)^j| ≤ s^{m+1}·remainder.
Each rule keeps this true. Integrals along rays need that the error falls as s^{m+1} towards the centre. A product moves
its terms of degree > m into the remainder: at degree n they are at most Σ_{s+t=n} T_s·T_t with T_k ≥ Σ_{|j|=k} |p_j|.

A jet stores only the variables it depends on and the degrees it reaches, so that a function of one variable costs as
much as a series in one variable. Boxes are the last axis: operations run along contiguous rows of boxes. Where a number
is not finite the jet bounds nothing; readers of a jet check `is_finite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball, U, above
from attnc.numerics.jet_tables import FactorPairs, Places, degree_blocks, embedding, num_monomials, pairs
from attnc.numerics.rounding import Array, Mask, down, up


@dataclass(frozen=True, eq=False)
class Jet:
    """Shapes: mid (monomials in `variables` up to `degree`, boxes), radius (degree + 1, boxes), remainder (boxes).

    The axis of boxes has length 1 where a function does not depend on the box.
    """

    variables: Places
    degree: int
    mid: Array
    radius: Array
    remainder: Array

    @cached_property
    def size(self) -> Array:
        """max_{|j|=k} |mid_j| for each degree k."""
        return self._sizes[0]

    @cached_property
    def total(self) -> Array:
        """T_k ≥ Σ_{|j|=k} |p_j| for each degree k."""
        return self._sizes[1]

    @cached_property
    def _sizes(self) -> tuple[Array, Array]:
        size = np.abs(self.mid)
        if len(self.variables) <= 1:
            return size, above(size + self.radius)
        blocks = degree_blocks(len(self.variables), self.degree)
        total = np.stack([size[block].sum(axis=0) for block in blocks])
        counts = np.array([block.stop - block.start for block in blocks], dtype=np.float64)
        return np.stack([size[block].max(axis=0) for block in blocks]), above(total + counts[:, None] * self.radius)

    @cached_property
    def variation(self) -> Array:
        """An upper bound on |Σ_{j≠0} p_j τ^j| over the box."""
        return above(self.total[1:].sum(axis=0)) if self.degree else np.zeros(self.remainder.shape)

    @property
    def value(self) -> Ball:
        """f(c)."""
        return Ball(self.mid[0], self.radius[0])

    @property
    def is_polynomial(self) -> bool:
        return not self.remainder.any()

    @cached_property
    def is_finite(self) -> Mask:
        """The boxes on which everything is finite. A coefficient that is not finite makes its T_k infinite or NaN."""
        return np.isfinite(self.total.sum(axis=0) + self.remainder)

    @cached_property
    def range(self) -> Interval:
        """Return an enclosure of all values over the box. It is all reals where the jet bounds nothing."""
        reach = above(self.radius[0] + self.variation + self.remainder)
        lo, hi = down(self.mid[0] - reach), up(self.mid[0] + reach)
        known = np.isfinite(lo) & np.isfinite(hi)
        return Interval(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))


def variable(number: int, centres: Array, radii: Array) -> Jet:
    """Return the jet of the variable itself, c + rτ."""
    zeros = np.zeros((2, len(centres)))
    return Jet((number,), 1, np.stack([centres, radii]), zeros, zeros[0])


def constant(value: Ball) -> Jet:
    """Return the jet of a function that is constant on each box."""
    return Jet((), 0, np.atleast_2d(value.mid), np.atleast_2d(value.radius), np.zeros(value.mid.size))


def union(jets: Sequence[Jet]) -> tuple[Places, list[Places]]:
    """Return all variables of the jets, and the places of each jet's variables among them."""
    everything = tuple(sorted(set().union(*(jet.variables for jet in jets))))
    place = {number: i for i, number in enumerate(everything)}
    return everything, [tuple(place[number] for number in jet.variables) for jet in jets]


def negate(jet: Jet) -> Jet:
    return replace(jet, mid=-jet.mid)


def add(jets: Sequence[Jet]) -> Jet:
    """Return the sum of the jets."""
    variables, places = union(jets)
    degree, num_boxes = max(jet.degree for jet in jets), max(len(jet.remainder) for jet in jets)
    mid = np.zeros((num_monomials(len(variables), degree), num_boxes))
    radius, size = np.zeros((2, degree + 1, num_boxes))
    for jet, where in zip(jets, places, strict=True):
        mid[embedding(where, jet.degree, len(variables))] += jet.mid
        radius[: jet.degree + 1] += jet.radius
        size[: jet.degree + 1] += jet.size
    remainder = np.sum(np.broadcast_arrays(*(jet.remainder for jet in jets)), axis=0)
    return Jet(
        variables,
        degree,
        mid,
        above(radius + ((len(jets) - 1) * U) * size),
        remainder if all(jet.is_polynomial for jet in jets) else above(remainder),
    )


def scale(jet: Jet, factor: Jet) -> Jet:
    """Return the product with a function that is constant on each box."""
    c, radius = factor.mid[0], factor.radius[0]
    # c·p is rounded once: (|c| + radius_c)·radius + radius_c·|mid| + u·|c·mid|.
    spread = factor.total[0] * jet.radius + above(radius + U * np.abs(c)) * jet.size
    remainder = _product_remainder(jet, factor, np.zeros(1))
    return Jet(jet.variables, jet.degree, jet.mid * c, above(spread), remainder)


def multiply(a: Jet, b: Jet, order: int) -> Jet:
    """Return the product. Its terms of degree > order go into the remainder."""
    if not a.variables:
        return scale(b, a)
    if not b.variables:
        return scale(a, b)
    variables, (left, right) = union((a, b))
    degree = min(a.degree + b.degree, order)
    blocks = pairs(left, a.degree, right, b.degree, len(variables), degree)
    mid = np.zeros((num_monomials(len(variables), degree), max(len(a.remainder), len(b.remainder))))
    for block in blocks:
        convolve(a.mid, b.mid, block, mid[block.block])
    # A coefficient of degree k is Σ p_i·q_j over |i| + |j| = k, n products at most, computed with an error of at most
    # γ_n·Σ |p_i||q_j|, γ_n ≤ (n + 1)u.
    rounded = above(b.radius + ((max(block.longest for block in blocks) + 1) * U) * b.size)
    radius = above(degree_product(a.total, rounded, degree) + degree_product(a.radius, b.total, degree))
    dropped = sum((product_total(a.total, b.total, n) for n in range(order + 1, a.degree + b.degree + 1)), np.zeros(1))
    return Jet(variables, degree, mid, radius, _product_remainder(a, b, dropped))


def convolve(a: Array, b: Array, block: FactorPairs, out: Array) -> None:
    """Write the coefficients of one degree of the product of two polynomials into `out`, which is zero."""
    if block.single is not None:
        targets, i, j = block.single
        out[targets] = a[i] * b[j]
    for target, i, j in block.sums:
        np.einsum("ib,ib->b", a[i], b[j], out=out[target])


def degree_product(x: Array, y: Array, limit: int) -> Array:
    """Return Σ_{s+t=k} x_s·y_t for k ≤ limit."""
    if len(x) > len(y):
        x, y = y, x
    result = np.zeros((limit + 1, max(x.shape[1], y.shape[1])))
    for s in range(min(len(x), limit + 1)):
        rows = y[: limit + 1 - s]
        result[s : s + len(rows)] += x[s] * rows
    return result


def product_total(x: Array, y: Array, n: int) -> Array:
    """Return Σ_{s+t=n} x_s·y_t, a bound on the terms of degree n of a product."""
    first, last = max(0, n + 1 - len(y)), min(n, len(x) - 1)
    if first > last:
        return np.zeros(1)
    return np.asarray(np.einsum("sb,sb->b", x[first : last + 1], y[n - last : n - first + 1][::-1]))


def _product_remainder(a: Jet, b: Jet, dropped: Array) -> Array:
    """Bound |fg − pq| ≤ |f − p|·|q| + |g − q|·|p| + |f − p|·|g − q|, plus the dropped terms of pq."""
    if a.is_polynomial and b.is_polynomial:
        remainder = above(dropped) if dropped.any() else dropped
        return np.broadcast_to(remainder, np.broadcast_shapes(dropped.shape, a.remainder.shape, b.remainder.shape))
    of_a, of_b = above(a.total.sum(axis=0)), above(b.total.sum(axis=0))
    return above(a.remainder * above(of_b + b.remainder) + b.remainder * of_a + dropped)
