"""Sums Σ r_i x_i by attention: heads that take central differences of s ↦ Σ x_i e^{s r_i} at s = 0.

Theorem.  With c_j = 2(−1)^{j+1} (m!)²/((m−j)!(m+j)!) the sum  D(r) = Σ_{j=1..m} c_j sinh(jεr)/(jε)  is r + e(r),
          |e(r)| ≤ E(r̄) = r̄·(m!)²/(2m+1)!·(εr̄)^{2m}·exp((mεr̄)²/(4m+6))  for |r| ≤ r̄.
Heads.    j = ±1 … ±m: score jεr_i, value x_i, output weight c_|j|/(2jε), beside a sink of score C and value 0.
          The sink makes every denominator e^C(1+θ), 0 ≤ θ ≤ K·e^{mεr̄−C} over K keys: a sum, not an average.
Product.  Σ_j c_j sinh(jεa)·sinh(jεb)/(jε)² = ab + e, |e| ≤ E(2)/(2m+2) for |a|, |b| ≤ 1: four heads for each j, with
          scores jε(±a_i ± b_i). It sums Σ a_i b_i x_i for two numbers a_i and b_i that scores compute.
Proof.    Σ_j c_j = 1 and Σ_j c_j j^{2k} = 0 for 0 < k < m. For k ≥ m the sum is (−1)^{m+1}(m!)²·h_{k−m}(1², …, m²),
          with h the complete homogeneous polynomial. So the series of e has terms of one sign, |e| grows with |r|, and
          h_n ≤ C(n+m−1, n)·m^{2n} with (m)_n/(2m+2)_{2n} ≤ (4m+6)^{−n} sums it. The sum for a product is
          ½(Q(a+b) − Q(a−b)) with Q(t) = Σ_j c_j (cosh(jεt) − 1)/(jε)², Q′ = D. As e has powers from 2m+1 on, it is
          |Q(t) − t²/2| ≤ |t|·E(t)/(2m+2), a convex function of t, and |a+b| + |a−b| ≤ 2.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.incontext.prompt import LOG_WEIGHT, ONE, SINK
from attnc.ir.building import Attending, Entries
from attnc.ir.layers import Head
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

SINK_MARGIN = 4.0
"""log of one rounding of a denominator over the examples' share in it. With this value the share is below 2 % of a
rounding."""
MAX_HEADS = 12
"""Maximum number of pairs of heads. In float64 the bound is smallest with about 8, and beyond 12 rounding makes it
larger."""
CLOSED_FORM_SLACK = 64
"""Units in the last place by which closed forms are rounded up: each has a few dozen roundings."""

SIGNS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
"""The signs of the two factors in the scores of the four heads at a node of a product."""


def rounded_up(*terms: tuple[str, float, str]) -> Bound:
    """Return the bound with these terms (name, value, reason). The values are rounded up."""
    return Bound(tuple(Term(name, float(up(value, CLOSED_FORM_SLACK)), reason) for name, value, reason in terms))


def sink_score(keys: int, largest: float, dtype: str) -> float:
    """Return the score C of a sink beside keys with scores up to `largest`.

    Their share of a denominator is below rounding.
    """
    return float(math.ceil(math.log(keys) + largest - math.log(UNIT_ROUNDOFF[dtype]) + SINK_MARGIN))


def beside_the_sink(C: float, weighted: bool, more: Entries | None = None) -> tuple[Entries, Entries]:
    """Return the entries of W_Q and W_K of a sink of score C, of the logarithms of the weights, and of `more`."""
    terms = dict(more or {}) | ({(ONE, LOG_WEIGHT): 1.0} if weighted else {})
    return {(ONE, SINK): 1.0, **terms}, {(SINK, SINK): C} | {(term, term): 1.0 for _, term in terms}


@dataclass(frozen=True)
class Sizes:
    """Bounds of the quantities in a sum Σ r_i x_i, or in a mean.

    There are `terms` rows with |x_i| ≤ x and |r_i| ≤ r. Each r_i is an inner product of `width` terms with
    Σ|terms| ≤ parts.
    """

    terms: int
    width: int
    x: float
    r: float
    parts: float
    mean: bool = False


@dataclass(frozen=True)
class Differences:
    """m pairs of heads at spacing ε. ε is a power of two, so that jε is exact."""

    heads: int
    eps: float

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= MAX_HEADS:
            raise InputError(f"difference heads come in 1 to {MAX_HEADS} pairs, found {self.heads}")
        if not (self.eps > 0 and math.frexp(self.eps)[0] == 0.5):
            raise InputError(f"the spacing eps is a power of two, found {self.eps!r}")

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return (*range(1, self.heads + 1), *range(-1, -self.heads - 1, -1))

    def weight(self, j: int) -> float:
        """Return the output weight c_|j|/(2jε) of the head at node j."""
        m, k = self.heads, abs(j)
        c = 2 * (-1) ** (k + 1) * math.factorial(m) ** 2 / (math.factorial(m - k) * math.factorial(m + k))
        return c / (2 * j * self.eps)

    def __call__(self, r: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Return the differences D(r)."""
        return np.asarray(sum(self.weight(j) * np.exp(j * self.eps * r) for j in self.nodes))

    def truncation(self, r: float) -> float:
        """Return the bound E(r̄), rounded up."""
        m, x = self.heads, self.eps * r
        leading = math.factorial(m) ** 2 / math.factorial(2 * m + 1)
        with np.errstate(all="ignore"):
            value = r * leading * np.float64(x) ** (2 * m) * np.exp((m * np.float64(x)) ** 2 / (4 * m + 6))
        return float(up(value, CLOSED_FORM_SLACK)) if r else 0.0

    def sink(self, keys: int, r: float, dtype: str) -> float:
        """Return the score of the sink beside examples with |r_i| ≤ r."""
        return sink_score(keys, self.heads * self.eps * r, dtype)

    def bound(self, sizes: Sizes, dtype: str) -> Bound:
        """Return a bound of |output of the heads − Σ r_i x_i|₂ for every prompt within the sizes."""
        u, m = UNIT_ROUNDOFF[dtype], self.heads
        n, X, r = sizes.terms, sizes.x, sizes.r
        keys = 2 * n if sizes.mean else n + 1
        reach = m * self.eps * r
        C = self.sink(keys, r, dtype)
        total = X if sizes.mean else n * X
        scales = [abs(j) * self.eps for j in self.nodes]
        weights = [abs(self.weight(j)) * math.exp(min(abs(j) * self.eps * r, 700)) for j in self.nodes]
        mass = sum(weights)
        leak = keys * math.exp(reach - C) if reach < 700 else math.inf
        # Errors of a weight come from its score, the shift by the largest score, and the exponential. Sums add more.
        of_scores = sum(map(operator.mul, scales, weights)) * gamma(sizes.width + 3, u) * sizes.parts
        of_weights = mass * (2 * u * (C + reach) + 2 * LIBM_ULPS * u + gamma(keys + 2 * m + 8, u))
        return rounded_up(
            ("truncation", total * self.truncation(r), f"{m} pairs of heads, eps {self.eps:g}"),
            ("sink", total * (mass * leak), "the examples' share of the denominators"),
            ("rounding", total * (of_scores + of_weights), f"the gradient layer in {dtype}"),
        )

    def sum_heads(
        self,
        attending: Attending,
        C: float,
        residual: Entries,
        keys: Entries,
        outputs: Iterable[tuple[str, str]],
        *,
        factor: float = 1.0,
        weighted: bool = False,
        beside: Entries | None = None,
    ) -> tuple[Head, ...]:
        """Return the heads of D beside a sink of score C. `residual` holds the entries of W_Q that compute r_i.

        All heads share W_K and W_V. For each pair (value, channel) of `outputs` they sum the channel `value`, times
        `factor`, into `channel`. If `weighted`, term i is multiplied by ω_i. `beside` holds further entries of
        W_Q, which all scores get alike.
        """
        outputs = tuple(outputs)
        values = {(value, value): 1.0 for value, _ in outputs}
        of_query, of_key = beside_the_sink(C, weighted, beside)
        heads: list[Head] = []
        for j in self.nodes:
            queries = {pair: j * self.eps * entry for pair, entry in residual.items()} | dict(of_query)
            written = dict.fromkeys(outputs, self.weight(j) * math.exp(C) * factor)
            made = attending.head(queries, {**keys, **of_key}, values, written)
            heads.append(replace(made, W_K=heads[0].W_K, W_V=heads[0].W_V) if heads else made)
        return tuple(heads)

    def square_heads(
        self,
        attending: Attending,
        C: float,
        residual: Entries,
        keys: Entries,
        output: tuple[str, str],
        *,
        weighted: bool = False,
        beside: Entries | None = None,
    ) -> tuple[Head, ...]:
        """Return heads that sum r_i² times the channel output[0] of term i into output[1].

        Σ_j c_j (2cosh(jεr) − 2)/(jε)² is 2∫D over [0, r], so its error is at most 2|r|·E(r̄).
        """
        of_query, of_key = beside_the_sink(C, weighted, beside)
        weights = {j: 2 * self.weight(j) / (j * self.eps) for j in self.nodes}
        weights[0] = -sum(weights.values())
        heads: list[Head] = []
        for j, weight in weights.items():
            queries = {pair: j * self.eps * entry for pair, entry in residual.items()} | dict(of_query)
            made = attending.head(
                queries, {**keys, **of_key}, {(output[0], output[0]): 1.0}, {output: weight * math.exp(C)}
            )
            heads.append(replace(made, W_K=heads[0].W_K, W_V=heads[0].W_V) if heads else made)
        return tuple(heads)


@dataclass(frozen=True)
class Products(Differences):
    """Heads for sums Σ a_i b_i x_i with |a_i|, |b_i| ≤ 1: four for each j, with the signs of `SIGNS`."""

    @property
    def product_truncation(self) -> float:
        """The bound of the error of a product of two factors in [−1, 1]."""
        return self.truncation(2.0) / (2 * self.heads + 2)

    def product_weight(self, j: int) -> float:
        """Return the output weight c_j/(4(jε)²) of the heads at node j, up to its sign."""
        return self.weight(j) / (2 * j * self.eps)

    def product_heads(
        self,
        attending: Attending,
        C: float,
        a: Entries,
        b: Entries,
        keys: Entries,
        outputs: Entries,
        *,
        weighted: bool = False,
    ) -> tuple[Head, ...]:
        """Return the heads beside a sink of score C. `a` and `b` hold the entries of W_Q that compute the factors.

        All heads share W_K and W_V. `value` is written into `channel` with the factor outputs[value, channel]. If
        `weighted`, term i is multiplied by ω_i.
        """
        values = {(value, value): 1.0 for value, _ in outputs}
        of_query, of_key = beside_the_sink(C, weighted)
        heads: list[Head] = []
        for j in range(1, self.heads + 1):
            for of_a, of_b in SIGNS:
                queries = {pair: of_a * j * self.eps * entry for pair, entry in a.items()} | dict(of_query)
                queries |= {pair: of_b * j * self.eps * entry for pair, entry in b.items()}
                weight = of_a * of_b * self.product_weight(j) * math.exp(C)
                written = {pair: weight * factor for pair, factor in outputs.items()}
                made = attending.head(queries, {**keys, **of_key}, values, written)
                heads.append(replace(made, W_K=heads[0].W_K, W_V=heads[0].W_V) if heads else made)
        return tuple(heads)

    @classmethod
    def best(cls, heads: int, dtype: str) -> Products:
        """Return the heads at the spacing with the smallest sum of truncation and rounding of one term."""
        u = UNIT_ROUNDOFF[dtype]

        def error(one: Products) -> float:
            steps = range(1, one.heads + 1)
            rounding = sum(4 * abs(one.product_weight(j)) * math.exp(2 * j * one.eps) for j in steps)
            return one.product_truncation + 4 * u * rounding

        return min((cls(heads, math.ldexp(1.0, -k)) for k in range(20)), key=error)


def choose(sizes: Sizes, heads: int, dtype: str) -> Differences:
    """Return the heads at the spacing with the smallest bound. Truncation falls with ε, and rounding grows like 1/ε."""
    scale = max(sizes.r, 2.0**-900)
    centre = math.frexp(1 / scale)[1]
    candidates = [Differences(heads, math.ldexp(1.0, centre - k)) for k in range(-2, 40)]
    return min(candidates, key=lambda candidate: candidate.bound(sizes, dtype).value)
