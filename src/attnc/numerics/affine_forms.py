"""Affine arithmetic with outward rounding: vectors as a centre, shared noise symbols, and a rest per entry.

An AffineForm stands for all vectors c + Σ_g H_g·ξ_g + e with ξ_g in [−1, 1]^k and |e_i| ≤ rest_i. Forms that share a
group of symbols g depend on each other through it, so that errors which cancel in the network cancel in the bound.
The matrices H_g are computed in float64, and their rounding goes into `rest`. So every result contains the exact one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, gamma, up

U = UNIT_ROUNDOFF["float64"]
_groups = itertools.count()


@dataclass(frozen=True, eq=False)
class AffineForm:
    """The vectors c + Σ_g H_g·ξ_g + e, |ξ| ≤ 1, |e_i| ≤ rest_i. `symbols` maps the number of a group to its H_g."""

    centre: Float[np.ndarray, " n"]
    symbols: Mapping[int, Float[np.ndarray, "n k"]]
    rest: Float[np.ndarray, " n"]

    @classmethod
    def zero(cls, n: int) -> AffineForm:
        return cls(np.zeros(n), {}, np.zeros(n))

    @classmethod
    def of_box(cls, x: Interval) -> AffineForm:
        """Return a form that contains the box x, without symbols."""
        centre = x.mid
        return cls(centre, {}, np.maximum(up(x.hi - centre), up(centre - x.lo)) * (x.hi > x.lo))

    @classmethod
    def around(cls, x: Interval) -> AffineForm:
        """Return a form that contains the box x, with one new symbol per entry."""
        return cls.of_box(x).folded()

    @property
    def num_symbols(self) -> int:
        return sum(H.shape[1] for H in self.symbols.values())

    @cached_property
    def spread(self) -> Float[np.ndarray, " n"]:
        """The largest distance of an entry from its centre, rounded up."""
        total = self.rest
        for H in self.symbols.values():
            total = up(total + up(np.abs(H).sum(axis=1), H.shape[1]))
        return total

    @property
    def size(self) -> Float[np.ndarray, " n"]:
        """The largest absolute value of an entry, rounded up."""
        return up(np.abs(self.centre) + self.spread)

    @property
    def interval(self) -> Interval:
        return Interval.point(self.centre) + Interval(-self.spread, self.spread)

    def with_noise(self, size: Float[np.ndarray, " n"]) -> AffineForm:
        """Add an unknown number of at most size_i to every entry, as new symbols."""
        if not size.any():
            return self
        return AffineForm(self.centre, {**self.symbols, next(_groups): np.diag(size)}, self.rest)

    def widened(self, size: Float[np.ndarray, " n"]) -> AffineForm:
        """Add an unknown number of at most size_i to every entry, without symbols."""
        return AffineForm(self.centre, self.symbols, up(self.rest + size))

    def folded(self) -> AffineForm:
        """Return a form with one new symbol per entry. It has forgotten how entries and forms depend on each other."""
        return AffineForm(self.centre, {}, np.zeros_like(self.rest)).with_noise(self.spread)

    def linear(self, W: Float[np.ndarray, "m n"], b: Float[np.ndarray, " m"] | None = None) -> AffineForm:
        """Return W·x + b.

        Proof.  A float64 product of n terms is off by at most γ_{n+1}·Σ|terms|, in any order, and a subnormal result by
                2⁻¹⁰⁷⁴ more for each term. |W|·size bounds the terms of all symbols together.
        """
        sizes, n = np.abs(W), W.shape[1]
        offset = np.zeros(len(W)) if b is None else b
        terms = up(up(sizes @ self.size, n + 1) + np.abs(offset))
        lost = up(up(gamma(n + 2, U) * terms) + (n + 2) * (1 + self.num_symbols) * TINIEST)
        symbols = {group: W @ H for group, H in self.symbols.items()}
        return AffineForm(W @ self.centre + offset, symbols, up(up(sizes @ self.rest, n + 1) + lost))

    def scaled(self, slope: Float[np.ndarray, " n"], offset: Float[np.ndarray, " n"] | None = None) -> AffineForm:
        """Return slope_i·x_i + offset_i for every entry."""
        shift = np.zeros_like(slope) if offset is None else offset
        lost = up(
            up(gamma(3, U) * up(up(np.abs(slope) * self.size) + np.abs(shift))) + 4 * (1 + self.num_symbols) * TINIEST
        )
        symbols = {group: slope[:, None] * H for group, H in self.symbols.items()}
        return AffineForm(slope * self.centre + shift, symbols, up(up(np.abs(slope) * self.rest) + lost))

    def __add__(self, other: AffineForm) -> AffineForm:
        symbols = dict(self.symbols)
        for group, H in other.symbols.items():
            symbols[group] = symbols[group] + H if group in symbols else H
        lost = up(up(gamma(2, U) * up(self.size + other.size)) + 2 * (1 + self.num_symbols) * TINIEST)
        return AffineForm(self.centre + other.centre, symbols, up(up(self.rest + other.rest) + lost))
