"""Jets of solutions of differential equations: quotients, powers, exponentials, sines, tangents, integrals.

With E = Σ_i τ_i ∂/∂τ_i, which multiplies a term of degree k by k, f = g(u) has Ef = g′(u)·Eu. Read degree by degree,
that is a recurrence for the coefficients of f, and all of f costs as much as a product or two. The polynomial found, of
degree m, satisfies the equation up to a residual D, the terms of degree n > m. Along the ray s ↦ sτ the error is an
integral of D(sτ)/s, and |D_n(sτ)| ≤ s^n·Σ_{a+b=n} T_a T_b with the coefficients that f has after all cancellation.
(Bounds on the (m + 1)-st derivatives over the box ignore cancellation. On boxes of a sixteenth of the domain they were
15 to 10⁴ times as large.)

The arguments are polynomials, with remainder 0, except in `quotient`: `at_polynomial` reduces other arguments to them.
A `JetRule` takes the jets of the arguments, their ranges over the boxes, and the order. Rules of functions are in
`attnc.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball, U, above
from attnc.numerics.jet_tables import Places, degree_blocks, degrees, embedding, num_monomials, pairs
from attnc.numerics.jets import Jet, constant, convolve, product_total, union
from attnc.numerics.rounding import Array

JetRule = Callable[[Sequence[Jet], Sequence[Interval], int], Jet]
Coefficients = tuple[Array, Array]
"""Coefficients of one degree (row by row), and a bound on the error of each of them."""


def number(value: float | Interval) -> Jet:
    """Return the constant function of this value."""
    return constant(Ball.around(value) if isinstance(value, Interval) else Ball.point(value))


def analytic(
    jet: Callable[[Jet, Interval, int], Jet],
    value: Callable[[Interval], Interval],
    slope: Callable[[Interval], Interval],
) -> JetRule:
    """Return the rule of a function of one variable, from its jet at polynomials and the ranges of it and its slope."""

    def rule(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        def at(p: Jet, x: Interval) -> Jet:
            return jet(p, x, order) if p.variables else constant(Ball.around(value(p.value.interval)))

        return at_polynomial(at, slope, jets[0], ranges[0])

    return rule


def at_polynomial(g: Callable[[Jet, Interval], Jet], slope: Callable[[Interval], Interval], u: Jet, x: Interval) -> Jet:
    """Return g(u) from the jet of g(p), p the polynomial of u: |g(u) − g(p)| ≤ |g′(ξ)|·|u − p|, ξ between them.

    x is the range of u. p is within its variation of u(c), and within the remainder of a value of u.
    """
    if u.is_polynomial:
        return g(u, x)
    p = replace(u, remainder=np.zeros(u.remainder.shape))
    lo = np.nextafter(np.maximum(p.range.lo, x.lo - u.remainder), -np.inf)
    hi = np.nextafter(np.minimum(p.range.hi, x.hi + u.remainder), np.inf)
    lo, hi = np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi)  # NaN where u has no jet
    around = Interval(np.minimum(lo, x.lo), np.maximum(hi, x.hi))
    result = g(p, around)
    return replace(result, remainder=above(result.remainder + slope(around).mag * u.remainder))


def derivative(u: Jet) -> Jet:
    """Eu."""
    column = np.arange(u.degree + 1.0)[:, None]
    mid = u.mid * degrees(len(u.variables), u.degree)
    return replace(u, mid=mid, radius=above(column * above(u.radius + U * u.size)))


def integrate(slope: Jet, value: Interval, order: int) -> Jet:
    """Return f with Ef = slope, f(c) in `value`. An error s^{m+1}·R of the slope adds at most ∫_0^1 s^m·R ds to f."""
    column = np.maximum(np.arange(slope.degree + 1.0), 1.0)[:, None]
    mid = slope.mid / np.maximum(degrees(len(slope.variables), slope.degree), 1.0)
    radius = above(above(slope.radius + U * slope.size) / column)
    mid[0], radius[0] = Ball.around(value).mid, Ball.around(value).radius
    return Jet(slope.variables, slope.degree, mid, radius, above(slope.remainder / (order + 1)))


class GrowingPolynomial:
    """A polynomial in d variables, found degree by degree. `size` and `total` are defined as in `Jet`."""

    def __init__(self, d: int, order: int, num_boxes: int, value: Interval | None = None) -> None:
        self.blocks = degree_blocks(d, order)
        self.mid = np.zeros((num_monomials(d, order), num_boxes))
        self.radius, self.size, self.total = np.zeros((3, order + 1, num_boxes))
        if value is not None:
            self.put(0, (Ball.around(value).mid[None], Ball.around(value).radius))

    def put(self, k: int, found: Coefficients) -> None:
        """Set the coefficients of degree k."""
        rows, self.radius[k] = found
        self.mid[self.blocks[k]] = rows
        sizes = np.abs(rows)
        self.size[k] = sizes.max(axis=0)
        self.total[k] = above(sizes.sum(axis=0) + len(rows) * self.radius[k])

    def jet(self, variables: Places, remainder: Array) -> Jet:
        result = Jet(variables, len(self.blocks) - 1, self.mid, self.radius, remainder)
        result.__dict__.update(size=self.size, total=self.total)  # the cached properties of Jet
        return result


class WeightedSums:
    """The sums Σ_{a≥1} w_a·u_a∗f_{k−a} in all recurrences. u_a is the part of degree a of u.

    `places` are the indices of u's variables among the d variables of f. The error of the weights w_a
    (degrees, boxes or 1) is at most `slack`.
    """

    def __init__(self, u: Jet, places: Places, d: int, order: int, weights: Array, slack: float = 0.0) -> None:
        weights = weights[: u.degree + 1]
        counts = [block.stop - block.start for block in degree_blocks(len(places), u.degree)]
        self.tables = pairs(tuple(range(d)), order - 1, places, u.degree, d, order, constant=False)
        self.mid = u.mid * np.repeat(weights, counts, axis=0)
        size = np.abs(weights) + slack
        self.total = above(u.total * size)
        self.radius = above(u.radius * size + u.total * slack)

    def of_degree(self, k: int, f: GrowingPolynomial) -> Coefficients:
        """Return the coefficients of degree k of the sum."""
        table = self.tables[k]
        rows = np.zeros((table.block.stop - table.block.start, f.mid.shape[1]))
        convolve(f.mid, self.mid, table, rows)
        # n products, n − 1 sums, and the products with the weights: γ_{n+1} ≤ (n + 2)u.
        low = max(0, k + 1 - len(self.total))  # f's degrees k − a with 1 ≤ a ≤ the degree of u
        rounded = above(f.radius[low:k] + ((table.longest + 2) * U) * f.size[low:k])
        total, radius = self.total[1 : k - low + 1][::-1], self.radius[1 : k - low + 1][::-1]
        spread = np.einsum("ab,ab->b", total, rounded) + np.einsum("ab,ab->b", radius, f.total[low:k])
        return rows, above(spread)

    def residual(self, n: int, f: GrowingPolynomial) -> Array:
        """Bound the terms of the sum of a degree n beyond the order."""
        return above(product_total(f.total, self.total, n))


def plus(found: Coefficients, rows: Array, radius: Array) -> Coefficients:
    """Return the sum with other coefficients."""
    total = found[0] + rows
    return total, above(found[1] + radius + U * np.abs(total).max(axis=0))


def times(found: Coefficients, factor: Ball) -> Coefficients:
    """Return the product with a number."""
    rows, radius = found
    size = np.abs(rows).max(axis=0)
    return rows * factor.mid, above(factor.mag * above(radius + U * size) + factor.radius * size)


def over(found: Coefficients, divisor: int) -> Coefficients:
    """Return the quotient by a positive integer."""
    rows = found[0] / divisor
    return rows, above(found[1] / divisor + U * np.abs(rows).max(axis=0))


def growth(rate: Array, n: int) -> Array:
    """Bound n·∫_0^1 s^{n−1} e^{rate·(1−s)} ds = Σ_k rate^k/((n + 1)⋯(n + k)), which is also ≤ e^rate."""
    slow = rate <= n
    series = (n + 1) / np.maximum(n + 1 - rate, 1.0)
    fast = elementary.exp(Interval.point(np.where(slow, 0.0, np.fmin(rate, 1e3)))).hi  # infinite for 1e3 and for NaN
    return above(np.where(slow, series, fast))


def quotient(u: Jet, v: Jet, x: Interval, order: int) -> Jet:
    """Return q = u/v, x the range of v: v_0·q_k = u_k − Σ_{a≥1} v_a∗q_{k−a}.

    |u/v − q| = |u − qv|/|v|. u − qv consists of the terms of q·v of degree > m, the error of u, and q times the error
    of v.
    """
    variables, (of_u, of_v) = union((u, v))
    d, num_boxes = len(variables), max(len(u.remainder), len(v.remainder))
    rows = np.zeros((num_monomials(d, order), num_boxes))
    rows[embedding(of_u, u.degree, d)] = u.mid
    radius = np.zeros((order + 1, num_boxes))
    radius[: u.degree + 1] = u.radius
    sums = WeightedSums(v, of_v, d, order, np.full((order + 1, 1), -1.0))
    q, inverse = GrowingPolynomial(d, order, num_boxes), v.value.inverse()
    q.put(0, times((rows[:1], radius[0]), inverse))
    for k in range(1, order + 1):
        q.put(k, times(plus(sums.of_degree(k, q), rows[q.blocks[k]], radius[k]), inverse))
    left = u.remainder + v.remainder * above(q.total.sum(axis=0))
    for n in range(order + 1, order + v.degree + 1):
        left = left + sums.residual(n, q)
    return q.jet(variables, above(above(left) / x.mig))


def _slopes(u: Jet) -> Array:
    """L = Σ_a a·T_a: along a ray, |u(τ) − u(sτ)| ≤ Σ_a (1 − s^a)·T_a ≤ (1 − s)·L."""
    return above(np.einsum("a,ab->b", np.arange(u.degree + 1.0), u.total))


def _sums(u: Jet, order: int) -> WeightedSums:
    """Σ_a a·u_a∗f_{k−a}, the part of degree k of f·Eu."""
    d = len(u.variables)
    return WeightedSums(u, tuple(range(d)), d, order, np.arange(u.degree + 1.0)[:, None])


def _along_rays(u: Jet, order: int, residual: Callable[[int], Array], rate: Array, other: Array | float = 0.0) -> Array:
    """Bound the integral of D, whose terms of degree n > m are at most residual(n), plus `other` errors."""
    total = np.zeros(len(u.remainder)) + other
    for n in range(order + 1, order + u.degree + 1):
        total = above(total + residual(n) / n * growth(rate, n))
    return total


def exponential(u: Jet, order: int) -> Jet:
    """Return f = e^u: k·f_k = Σ_a a·u_a∗f_{k−a}.

    The polynomial f has Ef = f·Eu − D, and e^u − f is the integral of D(sτ)/s·e^{u(τ)−u(sτ)}.
    """
    sums, rate = _sums(u, order), _slopes(u)
    f = GrowingPolynomial(len(u.variables), order, len(u.remainder), elementary.exp(u.value.interval))
    for k in range(1, order + 1):
        f.put(k, over(sums.of_degree(k, f), k))
    return f.jet(u.variables, _along_rays(u, order, lambda n: sums.residual(n, f), rate))


def power_jet(u: Jet, x: Interval, exponent: Ball, value: Interval, order: int) -> Jet:
    """Return f = u^α, with u(c)^α in `value`, for u without zeros: k·u_0·f_k = Σ_a (αa − (k − a))·u_a∗f_{k−a}.

    The polynomial f has u·Ef = α·f·Eu − D, and u^α − f is the integral of D(sτ)/s·u(τ)^α·u(sτ)^{−α−1}. The ratio of
    u(τ) and u(sτ) is at most e^{(1−s)·L/min|u|}; it occurs to the power α, besides 1/u(sτ), or α + 1, besides 1/u(τ).
    """
    d, a = len(u.variables), np.arange(u.degree + 1.0)[:, None]
    one_more = exponent + Ball.point(1.0)
    # The weight is (α + 1)·a − k, which is rounded twice.
    spread = float(np.max(one_more.radius + 4 * U * one_more.mag)) * u.degree

    def sums(k: int) -> WeightedSums:
        return WeightedSums(u, tuple(range(d)), d, order, one_more.mid * a - k, spread + 2 * U * k)

    f, inverse = GrowingPolynomial(d, order, len(u.remainder), value), u.value.inverse()
    for k in range(1, order + 1):
        f.put(k, times(over(sums(k).of_degree(k, f), k), inverse))
    rate = above(above(_slopes(u) / x.mig) * np.minimum(exponent.mag, one_more.mag))
    remainder = _along_rays(u, order, lambda n: sums(n).residual(n, f), rate)
    return f.jet(u.variables, above(remainder / x.mig))


def sine_and_cosine(u: Jet, sine_at: Interval, cosine_at: Interval, order: int) -> tuple[Jet, Jet]:
    """Return sin u and cos u from their values at the centre: k·s_k = Σ_a a·u_a∗c_{k−a}, k·c_k = −Σ_a a·u_a∗s_{k−a}.

    The errors are integrals of both residuals, turned by the angle u(τ) − u(sτ), which is at most (1 − s)·L.
    """
    sums, rate = _sums(u, order), _slopes(u)
    d, num_boxes = len(u.variables), len(u.remainder)
    sine = GrowingPolynomial(d, order, num_boxes, sine_at)
    cosine = GrowingPolynomial(d, order, num_boxes, cosine_at)
    for k in range(1, order + 1):
        rows, radius = sums.of_degree(k, sine)
        sine.put(k, over(sums.of_degree(k, cosine), k))
        cosine.put(k, over((-rows, radius), k))
    of_sine, of_cosine = np.zeros((2, num_boxes))
    for n in range(order + 1, order + u.degree + 1):
        residual, other, turn = sums.residual(n, cosine), sums.residual(n, sine), np.minimum(rate / (n + 1), 1.0)
        of_sine = above(of_sine + (residual + turn * other) / n)
        of_cosine = above(of_cosine + (other + turn * residual) / n)
    return sine.jet(u.variables, of_sine), cosine.jet(u.variables, of_cosine)


def riccati(u: Jet, value: Interval, slope: Interval, largest: Array, sign: float, order: int) -> Jet:
    """Return f = g(u) for g′ = 1 + σg², σ = ±1 (tan, tanh), from g(u(c)) and g′(u(c)). |g| ≤ largest on the box.

    With w = 1 + σf²: k·f_k = Σ_a a·u_a∗w_{k−a}, w_k = σ Σ_{i+j=k} f_i∗f_j. The polynomial f has Ef = (1 + σf²)·Eu − D,
    D the terms beyond degree m of w·Eu, and of f² times Eu. The error e = f − g(u) has Ee = σ(f + g)·Eu·e − D, so that
    D grows by at most the factor e^{(1−s)·L·max|f + g|}.
    """
    sums, d, num_boxes = _sums(u, order), len(u.variables), len(u.remainder)
    squares = pairs(tuple(range(d)), order, tuple(range(d)), order, d, order)
    f = GrowingPolynomial(d, order, num_boxes, value)
    w = GrowingPolynomial(d, order, num_boxes, slope)
    for k in range(1, order + 1):
        f.put(k, over(sums.of_degree(k, w), k))
        rows = np.zeros((f.blocks[k].stop - f.blocks[k].start, num_boxes))
        convolve(f.mid, f.mid, squares[k], rows)
        # Twice f's radius for the two factors, and n products and n − 1 sums: γ_n ≤ (n + 1)u.
        off = above(2 * f.radius[: k + 1] + ((squares[k].longest + 1) * U) * f.size[: k + 1])
        w.put(k, (sign * rows, above(product_total(f.total[: k + 1], off, k))))
    rate = above(_slopes(u) * above(largest + f.total.sum(axis=0)))
    of_square = sum((product_total(f.total, f.total, n) for n in range(order + 1, 2 * order + 1)), np.zeros(num_boxes))
    squared = above(above(above(of_square) * _slopes(u)) / (order + 2) * growth(rate, order + 2))
    return f.jet(u.variables, _along_rays(u, order, lambda n: sums.residual(n, w), rate, squared))
