"""Affine arithmetic with outward rounding: vectors as a centre, shared unknown vectors, and a rest per entry.

AffineVectors stands for all vectors c + Σ_g C_g·ν_g + e with |e_i| ≤ rest_i. An unknown vector ν_g lies in a box and in
a ball: |ν_k| ≤ sizes_k and |ν|₂ ≤ ball. Forms with the same ν_g depend on each other through it, so that errors which
cancel in a network cancel in the bound. The ball counts in deep networks: the largest singular value of a matrix is
often far smaller than the row sums of its absolute values.

The matrices C_g are computed in float64, and their rounding goes into `rest`. So every result contains the exact one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, gamma, up

U = UNIT_ROUNDOFF["float64"]
SQUARINGS = 5
"""Number of squarings in `spectral_norm`. The bound is at most n^(1/64) times too large: 8 % for n = 128."""
MAX_SQUARED = 2048
"""Largest matrix that is squared: it takes 5 times 2·2048³ operations, about 5 s. Larger ones use the Frobenius
norm."""
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Unknown:
    """C·ν for an unknown vector ν with |ν_k| ≤ sizes_k and |ν|₂ ≤ ball."""

    C: Float[np.ndarray, "n k"]
    sizes: Float[np.ndarray, " k"]
    ball: float

    @cached_property
    def box_reach(self) -> Float[np.ndarray, " n"]:
        """|C|·sizes, rounded up."""
        return up(np.abs(self.C) @ self.sizes, self.C.shape[1] + 1)

    @cached_property
    def reach(self) -> Float[np.ndarray, " n"]:
        """The largest absolute values of the entries of C·ν, by the box or by the ball."""
        n = self.C.shape[1]
        rows = up(np.sqrt(up((self.C * self.C).sum(axis=1), n + 2)), 2)
        return np.minimum(self.box_reach, up(rows * self.ball, 2))

    @cached_property
    def length(self) -> float:
        """An upper bound of |C·ν|₂."""
        return min(norm_up(self.reach), float(up(spectral_norm(self.C) * self.ball, 2)))


@dataclass(frozen=True, eq=False)
class AffineVectors:
    """The vectors c + Σ_g C_g·ν_g + e, |e_i| ≤ rest_i. `unknowns` maps the number of an unknown vector to its part."""

    centre: Float[np.ndarray, " n"]
    unknowns: Mapping[int, Unknown]
    rest: Float[np.ndarray, " n"]

    @classmethod
    def zero(cls, n: int) -> AffineVectors:
        return cls(np.zeros(n), {}, np.zeros(n))

    @classmethod
    def of_box(cls, x: Interval) -> AffineVectors:
        """Return a form that contains the box x, without unknown vectors."""
        centre = x.mid
        return cls(centre, {}, np.maximum(up(x.hi - centre), up(centre - x.lo)) * (x.hi > x.lo))

    @classmethod
    def around(cls, x: Interval) -> AffineVectors:
        """Return a form that contains the box x, with one unknown vector."""
        return cls.of_box(x).folded()

    @property
    def num_columns(self) -> int:
        return sum(part.C.shape[1] for part in self.unknowns.values())

    @cached_property
    def spread(self) -> Float[np.ndarray, " n"]:
        """The largest distance of an entry from its centre, rounded up."""
        total = self.rest
        for part in self.unknowns.values():
            total = up(total + part.reach)
        return total

    @property
    def size(self) -> Float[np.ndarray, " n"]:
        """The largest absolute value of an entry, rounded up."""
        return up(np.abs(self.centre) + self.spread) if self.centre.any() else self.spread

    @cached_property
    def length(self) -> float:
        """An upper bound of the Euclidean norm."""
        parts = [norm_up(self.centre), norm_up(self.rest), *(part.length for part in self.unknowns.values())]
        return min(norm_up(self.size), float(up(math.fsum(parts))))

    @property
    def interval(self) -> Interval:
        return Interval.point(self.centre) + Interval(-self.spread, self.spread)

    @cached_property
    def _terms(self) -> Float[np.ndarray, " n"]:
        """The sum of the absolute values of all terms of an entry, rounded up."""
        total = up(np.abs(self.centre) + self.rest)
        for part in self.unknowns.values():
            total = up(total + part.box_reach)
        return total

    def with_noise(self, sizes: Float[np.ndarray, " n"], ball: float = math.inf) -> AffineVectors:
        """Add a new unknown vector of at most these sizes, and of at most this Euclidean norm."""
        if not sizes.any():
            return self
        made = Unknown(np.eye(len(sizes)), sizes, min(ball, norm_up(sizes)))
        return replace(self, unknowns={**self.unknowns, next(_numbers): made})

    def widened(self, sizes: Float[np.ndarray, " n"]) -> AffineVectors:
        """Add an unknown number of at most sizes_i to every entry, without remembering it."""
        return replace(self, rest=up(self.rest + sizes))

    def folded(self) -> AffineVectors:
        """Return a form with one new unknown vector. It has forgotten how entries and forms depend on each other."""
        fresh = AffineVectors(self.centre, {}, np.zeros_like(self.rest))
        return fresh.with_noise(self.spread, self.length if not self.centre.any() else math.inf)

    def linear(self, W: Float[np.ndarray, "m n"], b: Float[np.ndarray, " m"] | None = None) -> AffineVectors:
        """Return W·x + b.

        Proof.  A float64 product of n terms is off by at most γ_{n+1}·Σ|terms|, in any order, and a subnormal result by
                2⁻¹⁰⁷⁴ more for each term. |W| times the sum of all terms of x bounds them together.
        """
        absolute, n = np.abs(W), W.shape[1]
        offset = np.zeros(len(W)) if b is None else b
        if not self._terms.any():
            return AffineVectors(offset, {}, np.zeros(len(W)))
        terms = up(up(absolute @ self._terms, n + 1) + np.abs(offset))
        lost = up(up(gamma(n + 2, U) * terms) + self._underflow(n + 2))
        unknowns = {number: replace(part, C=W @ part.C) for number, part in self.unknowns.items()}
        return AffineVectors(W @ self.centre + offset, unknowns, up(up(absolute @ self.rest, n + 1) + lost))

    def scaled(self, slope: Float[np.ndarray, " n"], offset: Float[np.ndarray, " n"] | None = None) -> AffineVectors:
        """Return slope_i·x_i + offset_i for every entry."""
        shift = np.zeros_like(slope) if offset is None else offset
        if not self._terms.any():
            return AffineVectors(shift, {}, np.zeros_like(slope))
        terms = up(up(np.abs(slope) * self._terms) + np.abs(shift))
        lost = up(up(gamma(3, U) * terms) + self._underflow(3))
        unknowns = {number: replace(part, C=slope[:, None] * part.C) for number, part in self.unknowns.items()}
        return AffineVectors(slope * self.centre + shift, unknowns, up(up(np.abs(slope) * self.rest) + lost))

    def __add__(self, other: AffineVectors) -> AffineVectors:
        unknowns = dict(self.unknowns)
        for number, part in other.unknowns.items():
            known = unknowns.get(number)
            unknowns[number] = part if known is None else replace(part, C=known.C + part.C)
        lost = up(gamma(2, U) * up(self._terms + other._terms))
        return AffineVectors(self.centre + other.centre, unknowns, up(up(self.rest + other.rest) + lost))

    def _underflow(self, count: int) -> float:
        """Bound the errors of subnormal results of this number of products per entry."""
        sizes = [float(part.sizes.max(initial=0.0)) * part.C.shape[1] for part in self.unknowns.values()]
        return float(up(2 * count * TINIEST * (1 + math.fsum(sizes))))


def norm_up(x: Float[np.ndarray, " n"]) -> float:
    """Return an upper bound of the Euclidean norm."""
    return float(up(np.sqrt(up((x * x).sum(), len(x) + 2)), 2)) if x.any() else 0.0


def spectral_norm(A: Float[np.ndarray, "m n"]) -> float:
    """Return an upper bound of the largest singular value.

    Proof.  |A|₂² = |AᵀA|₂ ≤ |fl(AᵀA)|₂ + γ_m·|A|_F², because the rounding of a product is at most γ_m·|Aᵀ||A| in every
            entry. At the end, |·|₂ ≤ |·|_F. After k squarings the norm is overestimated by n^(1/2^(k+1)) at most.
    """
    if A.shape[0] < A.shape[1]:
        A = A.T
    return _spectral(A, SQUARINGS if A.shape[1] <= MAX_SQUARED else 0)


def _spectral(A: Float[np.ndarray, "m n"], squarings: int) -> float:
    whole = norm_up(A.ravel())
    if squarings == 0 or not 0 < whole < math.inf:
        return whole
    power = 2.0 ** math.frexp(whole)[1]  # exact, and no square overflows or underflows
    B = A / power
    squared = _spectral(B.T @ B, squarings - 1)
    room = gamma(len(A) + 1, U) * (whole / power) ** 2 + A.size * 2.0**-500
    return float(up(power * up(np.sqrt(up(squared + up(room, 2))), 2), 2))
