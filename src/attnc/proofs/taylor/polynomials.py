"""Polynomials in τ ∈ [−1, 1]^d of total degree ≤ order, many at a time, with coefficients along the first axis.

The order of the coefficients is that of `monomials`: by degree, then lexicographically descending.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Float, Int
from attnc.numerics.jet_balls import U
from attnc.numerics.jet_tables import monomials
from attnc.numerics.rounding import TINIEST

_BLOCK = 1024
"""Polynomials divided at a time: their rows stay in the cache."""


def gamma(n: int) -> float:
    """Return (n + 1)u ≥ γ_n = nu/(1 − nu), for n < 2²⁶: the relative error of n roundings in a row, in float64."""
    assert n < 2**26
    return (n + 1) * U


@dataclass(frozen=True, eq=False)
class Layout:
    """The order of the coefficients of τ^j, for all |j| ≤ order."""

    d: int
    order: int
    exponents: Int[np.ndarray, "count d"]
    starts: tuple[int, ...]  # the index of the first monomial of each degree 0, 1, …, order, and the total count

    @property
    def count(self) -> int:
        return len(self.exponents)

    def degree(self, n: int) -> slice:
        """Return the places of the coefficients of degree n."""
        return slice(self.starts[n], self.starts[n + 1])

    @functools.cached_property
    def index(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): i for i, row in enumerate(self.exponents.tolist())}

    def raised(self, axis: int) -> Int[np.ndarray, " lower"]:
        """Return the indices of the products of τ_axis with the monomials of degree < order."""
        unit = np.eye(self.d, dtype=int)[axis]
        return self.places(self.exponents[: self.starts[self.order]] + unit)

    @functools.cached_property
    def factors(self) -> list[tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]]:
        """For every j, the indices of all pairs (i, j − i) with 0 < i ≤ j."""
        found = []
        for j in self.exponents.tolist():
            below = np.array(list(itertools.product(*(range(n + 1) for n in j)))[1:], dtype=int).reshape(-1, self.d)
            found.append((self.places(below), self.places(j - below)))
        return found

    def differentiated(self, coefficients: Float[np.ndarray, "count ..."], axis: int) -> Float[np.ndarray, "lower ..."]:
        """Return the coefficients of ∂p/∂τ_axis, of the layout with the order below. Each is rounded once."""
        raised = self.raised(axis)
        powers = self.exponents[raised, axis].astype(np.float64)
        return np.asarray(coefficients[raised] * powers.reshape(-1, *[1] * (coefficients.ndim - 1)))

    def places(self, exponents: Int[np.ndarray, "some d"]) -> Int[np.ndarray, " some"]:
        """Return the indices of these monomials."""
        return np.array([self.index[tuple(row)] for row in exponents.tolist()], dtype=int)

    @functools.cached_property
    def halves(self) -> Float[np.ndarray, "halves_count count"]:
        """The matrices that map the coefficients of p to those of p((τ + σ)/2), for the 2^d signs σ. They are exact.

        (τ_i + σ_i)^n/2^n = Σ_l C(n, l) σ_i^{n−l} τ_i^l/2^n, so the |entries| of a column sum to 1 for every σ.
        """
        m = self.order
        one = {
            sign: np.array([[math.comb(n, k) * sign ** (n - k) / 2.0**n for n in range(m + 1)] for k in range(m + 1)])
            for sign in (-1, 1)
        }
        e = self.exponents
        parts = []
        for signs in itertools.product((-1, 1), repeat=self.d):
            part = np.ones((self.count, self.count))
            for i, sign in enumerate(signs):
                part *= one[sign][e[:, None, i], e[None, :, i]]
            parts.append(part)
        return np.concatenate(parts)

    @functools.cached_property
    def corners(self) -> Float[np.ndarray, "corners count"]:
        """The monomials at the corners of the cube."""
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=self.d))).reshape(-1, 1, self.d)
        return np.asarray(np.prod(signs**self.exponents, axis=2))

    @functools.cached_property
    def even(self) -> Int[np.ndarray, " even"]:
        """The indices of the monomials of degree > 2 that are ≥ 0 on the cube."""
        return np.flatnonzero(np.all(self.exponents % 2 == 0, axis=1) & (self.exponents.sum(axis=1) > 2))

    @functools.cached_property
    def squares(self) -> Int[np.ndarray, " d"]:
        """The indices of the τ_i²."""
        return self.places(2 * np.eye(self.d, dtype=int))

    @functools.cached_property
    def odd(self) -> Int[np.ndarray, " odd"]:
        """The indices of the monomials of degree > 1 that have both signs on the cube."""
        return np.flatnonzero(np.any(self.exponents % 2 == 1, axis=1) & (self.exponents.sum(axis=1) > 1))


@functools.lru_cache(maxsize=32)
def layout(d: int, order: int) -> Layout:
    exponents = np.asarray(monomials(d, order), dtype=int).reshape(-1, d)
    starts = np.searchsorted(exponents.sum(axis=1), np.arange(order + 2))
    return Layout(d, order, exponents, tuple(int(start) for start in starts))


def sizes(space: Layout, coefficients: Float[np.ndarray, "count ..."]) -> Float[np.ndarray, "order1 ..."]:
    """Return Σ |c_j| over the j of each degree, up to the rounding of these sums."""
    return np.add.reduceat(np.abs(coefficients), np.array(space.starts[:-1]), axis=0)


def quotient(
    space: Layout, nu: Float[np.ndarray, "count outputs boxes"], delta: Float[np.ndarray, "count boxes"]
) -> Float[np.ndarray, "count outputs boxes"]:
    """Return Q ≈ ν/δ as power series up to the order: Q_j = (ν_j − Σ_{0<i≤j} δ_i Q_{j−i})/δ_0 in floating point.

    `residual` bounds the error of this Q.
    """
    result = np.empty_like(nu)
    for start in range(0, nu.shape[2], _BLOCK):
        part = slice(start, start + _BLOCK)
        n, d, q = nu[:, :, part], np.ascontiguousarray(delta[:, part]), np.empty_like(nu[:, :, part])
        for j, (i, rest) in enumerate(space.factors):
            q[j] = (n[j] - np.einsum("pb,pob->ob", d[i], q[rest])) / d[0] if j else n[0] / d[0]
        result[:, :, part] = q
    return result


def residual(
    space: Layout,
    q: Float[np.ndarray, "count outputs boxes"],
    delta: Float[np.ndarray, "count boxes"],
    *,
    by_degree: bool = False,
) -> Float[np.ndarray, "outputs boxes"]:
    """Bound Σ_{|j|≤2·order} |(ν − Q·δ)_j| from above, for the floats Q = quotient(ν, δ).

    With `by_degree` every term counts |j| times, which bounds the same sum for any derivative ∂_i(ν − Q·δ).

    For |j| ≤ order the computed Q_j solves Q_j δ_0 = ν_j − Σ_{0<i≤j} δ_i Q_{j−i} to within γ_{n+2} Σ_i |δ_i||Q_{j−i}|,
    for n terms in the sum, in any order of summation (Higham, Accuracy and Stability, §8.1). Each product that
    underflows adds a smallest float. For |j| > order ν has no coefficients, and those of Q·δ of degree n sum to at most
    Σ_{a+b=n} |Q|_a |δ|_b, where |·|_a is the sum of the |coefficients| of degree a.
    """
    m = space.order
    a, b = sizes(space, q), sizes(space, delta)[:, None]
    most = max(len(pairs[0]) for pairs in space.factors) + 2
    low = sum((a[i] * b[: m + 1 - i].sum(axis=0) for i in range(m + 1)), np.zeros(q.shape[1:]))
    underflow = space.count * most * TINIEST * (1 + b[0])
    if by_degree:
        low, underflow = m * low, m * underflow
        degrees = np.arange(m + 1.0)[:, None, None]
        parts = (a[i] * ((i + degrees) * b)[m + 1 - i :].sum(axis=0) for i in range(1, m + 1))
    else:
        parts = (a[i] * b[m + 1 - i :].sum(axis=0) for i in range(1, m + 1))
    high = sum(parts, np.zeros(q.shape[1:]))
    # The sums above have fewer than count + 2·order positive terms, each of two factors, or of three.
    return np.asarray((gamma(most) * low + high + underflow) * (1 + gamma(space.count + 2 * m + 9)))
