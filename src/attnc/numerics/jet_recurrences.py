"""Polynomials found degree by degree, with the errors of their coefficients: what `jet_equations` computes with."""

from __future__ import annotations

import numpy as np

from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball, U, above
from attnc.numerics.jet_tables import Places, degree_blocks, num_monomials, pairs
from attnc.numerics.jets import Jet, convolve, product_total
from attnc.numerics.rounding import Array

Known = tuple[Array, Array]
"""Coefficients of one degree (row by row), and by how much each of them may be off."""


class Growing:
    """A polynomial in d variables that is known up to some degree; `size` and `total` are those of `Jet`."""

    def __init__(self, d: int, order: int, num_boxes: int, value: Ball | None = None) -> None:
        self.blocks = degree_blocks(d, order)
        self.mid = np.zeros((num_monomials(d, order), num_boxes))
        self.radius, self.size, self.total = np.zeros((3, order + 1, num_boxes))
        if value is not None:
            self.put(0, (value.mid[None], value.radius))

    def put(self, k: int, known: Known) -> None:
        """Its coefficients of degree k."""
        rows, self.radius[k] = known
        self.mid[self.blocks[k]] = rows
        sizes = np.abs(rows)
        self.size[k] = sizes.max(axis=0)
        self.total[k] = above(sizes.sum(axis=0) + len(rows) * self.radius[k])

    def jet(self, variables: Places, remainder: Array) -> Jet:
        result = Jet(variables, len(self.blocks) - 1, self.mid, self.radius, remainder)
        result.__dict__.update(size=self.size, total=self.total)  # Jet's cached properties: they are known already
        return result


class Sums:
    """Σ_{a≥1} w_a·u_a∗f_{k−a}, of which all recurrences are made; u_a is the part of degree a of u.

    `places` are those of u's variables among the d variables of f. The weights w_a (degrees, boxes or 1) are known up
    to `slack`.
    """

    def __init__(self, u: Jet, places: Places, d: int, order: int, weights: Array, slack: float = 0.0) -> None:
        weights = weights[: u.degree + 1]
        counts = [block.stop - block.start for block in degree_blocks(len(places), u.degree)]
        self.tables = pairs(tuple(range(d)), order - 1, places, u.degree, d, order, constant=False)
        self.mid = u.mid * np.repeat(weights, counts, axis=0)
        size = np.abs(weights) + slack
        self.total = above(u.total * size)
        self.radius = above(u.radius * size + u.total * slack)

    def of_degree(self, k: int, f: Growing) -> Known:
        """The sum's coefficients of degree k."""
        table = self.tables[k]
        rows = np.zeros((table.block.stop - table.block.start, f.mid.shape[1]))
        convolve(f.mid, self.mid, table, rows)
        # n products, n − 1 sums, and the products with the weights: γ_{n+1} ≤ (n + 2)u.
        low = max(0, k + 1 - len(self.total))  # f's degrees k − a with 1 ≤ a ≤ the degree of u
        rounded = above(f.radius[low:k] + ((table.longest + 2) * U) * f.size[low:k])
        total, radius = self.total[1 : k - low + 1][::-1], self.radius[1 : k - low + 1][::-1]
        spread = np.einsum("ab,ab->b", total, rounded) + np.einsum("ab,ab->b", radius, f.total[low:k])
        return rows, above(spread)

    def residual(self, n: int, f: Growing) -> Array:
        """A bound of the sum's terms of degree n, beyond the order."""
        return above(product_total(f.total, self.total, n))


def plus(known: Known, rows: Array, radius: Array) -> Known:
    """The sum with other coefficients."""
    total = known[0] + rows
    return total, above(known[1] + radius + U * np.abs(total).max(axis=0))


def times(known: Known, factor: Ball) -> Known:
    """The product with a number."""
    rows, radius = known
    size = np.abs(rows).max(axis=0)
    return rows * factor.mid, above(factor.mag * above(radius + U * size) + factor.radius * size)


def over(known: Known, divisor: int) -> Known:
    """The quotient by a positive integer."""
    rows = known[0] / divisor
    return rows, above(known[1] / divisor + U * np.abs(rows).max(axis=0))


def growth(rate: Array, n: int) -> Array:
    """A bound of n·∫_0^1 s^{n−1} e^{rate·(1−s)} ds = Σ_k rate^k/((n + 1)⋯(n + k)); e^rate is one, too."""
    slow = rate <= n
    series = (n + 1) / np.maximum(n + 1 - rate, 1.0)
    fast = elementary.exp(Interval.point(np.where(slow, 0.0, np.fmin(rate, 1e3)))).hi  # infinite for 1e3 and for NaN
    return above(np.where(slow, series, fast))
