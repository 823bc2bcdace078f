"""One axis of a spectral grid: normalised Gaussians on equally spaced anchors, and the values that fit f best.

On t ∈ [−1, 1] everything depends on (p, pad, c) alone, so one singular value decomposition serves every function.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.ir.reference import softmax
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_P = 1025
"""Anchors on an axis: beyond, the decomposition takes minutes and other constructions are cheaper."""
MAX_VALUE = 10.0
LEAST_VALUE = 1.5
"""|values|/max|f|: what is allowed, and what a fit can hardly do without."""
VALUE_ROUNDINGS = 40
"""Of the largest value, what one head rounds by: proved, not observed."""
CUTS = (1e-13, 1e-10, 1e-8, 1e-6)
"""Singular values below this fraction of the largest are cut: trades error against the size of the values."""


def value_limit(eps: float, size: float, dtype: str) -> float:
    """How many times max|f| = size values may be, so that their rounding is but a part of eps."""
    room = eps / (VALUE_ROUNDINGS * UNIT_ROUNDOFF[dtype] * max(size, 1e-300))
    return min(MAX_VALUE, max(LEAST_VALUE, room))


@dataclass(frozen=True)
class Axis:
    """p anchors of spacing h on [lo, hi], `pad` spacings of them beyond either end, at temperature c = βh²."""

    lo: float
    hi: float
    p: int
    pad: float = 0.0
    c: float = 1.0
    cut: float = CUTS[0]
    spare: int = 4  # nodes beyond the p or 3p/2 that would do

    def __post_init__(self) -> None:
        if not 1 <= self.p <= MAX_P:
            raise InputError(f"an axis has 1 to {MAX_P} anchors, found {self.p}")
        if self.p > 1 and not self.p - 1 - 2 * self.pad > 0:
            raise InputError(f"{self.p} anchors do not reach {self.pad:g} spacings beyond both ends; use fewer")

    @property
    def h(self) -> float:
        return (self.hi - self.lo) / (self.p - 1 - 2 * self.pad) if self.p > 1 else self.hi - self.lo

    @property
    def lattice(self) -> Float[np.ndarray, " p"]:
        """The anchors in units of h about the middle of the box."""
        return np.arange(self.p) - (self.p - 1) / 2

    def at(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        """From [−1, 1] to [lo, hi]."""
        return np.clip(self.lo / 2 + self.hi / 2 + (self.hi / 2 - self.lo / 2) * t, self.lo, self.hi)

    @property
    def fit(self) -> Fit:
        return unit_fit(self.p, self.pad, self.c, self.spare)

    def nodes(self) -> Float[np.ndarray, " nodes"]:
        """Where f is sampled for the fit."""
        return self.at(self.fit.nodes)

    def solve(self, samples: Float[np.ndarray, "nodes lines"]) -> Float[np.ndarray, "p lines"]:
        """Samples of f at the nodes → values of the anchors."""
        fit = self.fit
        return fit.values(fit.left.T @ samples, fit.rank(self.cut))

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        """The softmax over the anchors of this axis."""
        middle = self.lo / 2 + self.hi / 2
        return _weights((x - middle) / self.h, self.lattice, self.c)


def _weights(y: np.ndarray, lattice: np.ndarray, c: float) -> np.ndarray:
    return softmax(-c * (y[:, None] - lattice) ** 2)


@dataclass(frozen=True, eq=False)
class Fit:
    """Least squares at Chebyshev points, by the singular value decomposition of the weights there."""

    nodes: Float[np.ndarray, " nodes"]
    tests: Float[np.ndarray, " tests"]  # where the error is looked for: several for every spacing
    left: Float[np.ndarray, "nodes rank"]
    singular: Float[np.ndarray, " rank"]
    right: Float[np.ndarray, "rank p"]
    predicted: Float[np.ndarray, "tests rank"]

    def values(self, moved: Float[np.ndarray, "rank lines"], rank: int) -> Float[np.ndarray, "p lines"]:
        """From leftᵀ·samples. (The product of the three factors, formed first, would lose what they cancel.)"""
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is not finite, and not used
            return self.right[:rank].T @ (moved[:rank] / self.singular[:rank, None])

    def rank(self, cut: float) -> int:
        return int(np.count_nonzero(self.singular > cut * self.singular[0]))


@functools.lru_cache(maxsize=2048)
def unit_fit(p: int, pad: float, c: float, spare: int) -> Fit:
    """The fit on [−1, 1]."""
    n = p + min(p // 2, 12 * spare) + spare
    nodes = np.cos(np.pi * (np.arange(n) + 0.5) / n)
    tests = np.concatenate(
        [np.linspace(-1, 1, max(9, min(4 * p, 2 * p + 200))), np.cos(np.pi * np.arange(8) / (3 * p))]
    )
    h = 2 / (p - 1 - 2 * pad) if p > 1 else 2.0
    lattice = np.arange(p) - (p - 1) / 2
    left, singular, right = np.linalg.svd(_weights(nodes / h, lattice, c), full_matrices=False)
    return Fit(nodes, tests, left, singular, right, _weights(tests / h, lattice, c) @ (right.T / singular))
