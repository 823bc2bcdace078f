"""One axis of a spectral grid: normalised Gaussians on equally spaced anchors, with the values that fit f best.

On t ∈ [−1, 1] everything depends on (p, pad, c) alone, so all functions share one singular value decomposition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnc.constructions.fitting.minimax import truncated
from attnc.constructions.fitting.search import doubling, fewest
from attnc.errors import InputError
from attnc.ir.reference import softmax
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float


MAX_P = 1025
"""Largest number of anchors per axis: with more the decomposition takes minutes, and others are cheaper."""
MAX_VALUE = 10.0
LEAST_VALUE = 1.5
"""|values|/max|f|: the default limit, and the least limit with which fits succeed."""
VALUE_ROUNDINGS = 40
"""The proved rounding error of one head, in roundings of its largest value."""
CUTS = (1e-13, 1e-10, 1e-8, 1e-6)
"""Singular values below this fraction of the largest are cut: trades error against the size of the values."""


def value_limit(eps: float, size: float, dtype: str) -> float:
    """How many times max|f| = size values may be, so that their rounding is but a part of eps."""
    room = eps / (VALUE_ROUNDINGS * UNIT_ROUNDOFF[dtype] * max(size, 1e-300))
    return min(MAX_VALUE, max(LEAST_VALUE, room))


@dataclass(frozen=True)
class SpectralAxis:
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
    def fit(self) -> UnitFit:
        return unit_fit(self.p, self.pad, self.c, self.spare)

    def nodes(self) -> Float[np.ndarray, " nodes"]:
        """Where f is sampled for the fit."""
        return self.at(self.fit.nodes)

    def solve(self, samples: Float[np.ndarray, "nodes lines"]) -> Float[np.ndarray, "p lines"]:
        """Samples of f at the nodes → values of the anchors."""
        fit = self.fit
        found = truncated(fit.singular, fit.right, fit.left.T @ samples, (self.cut,), lambda values: True)
        assert found is not None
        return found[0]

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        """The softmax over the anchors of this axis."""
        middle = self.lo / 2 + self.hi / 2
        return _weights((x - middle) / self.h, self.lattice, self.c)


def _weights(y: np.ndarray, lattice: np.ndarray, c: float) -> np.ndarray:
    return softmax(-c * (y[:, None] - lattice) ** 2)


@dataclass(frozen=True, eq=False)
class UnitFit:
    """Least squares at Chebyshev points, by the singular value decomposition of the weights there."""

    nodes: Float[np.ndarray, " nodes"]
    tests: Float[np.ndarray, " tests"]  # where the error is looked for: several for every spacing
    left: Float[np.ndarray, "nodes rank"]
    singular: Float[np.ndarray, " rank"]
    right: Float[np.ndarray, "rank p"]
    predicted: Float[np.ndarray, "tests rank"]


@functools.lru_cache(maxsize=2048)
def unit_fit(p: int, pad: float, c: float, spare: int) -> UnitFit:
    """The fit on [−1, 1]."""
    n = p + min(p // 2, 12 * spare) + spare
    nodes = np.cos(np.pi * (np.arange(n) + 0.5) / n)
    tests = np.concatenate(
        [np.linspace(-1, 1, max(9, min(4 * p, 2 * p + 200))), np.cos(np.pi * np.arange(8) / (3 * p))]
    )
    h = 2 / (p - 1 - 2 * pad) if p > 1 else 2.0
    lattice = np.arange(p) - (p - 1) / 2
    left, singular, right = np.linalg.svd(_weights(nodes / h, lattice, c), full_matrices=False)
    return UnitFit(nodes, tests, left, singular, right, _weights(tests / h, lattice, c) @ (right.T / singular))


SOFTNESS = tuple(k / 64 for k in (6, 8, 10, 12, 14, 16, 19, 22, 26, 32, 38, 44, 54, 64, 80))
"""c = βh², in whole 64ths so that −c·L² is exact. The ripple is (2π/c)e^{−π²/c} per unit slope and spacing; the smaller
c, the smaller the ripple, and the larger the values."""
PADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Spacings by which anchors reach beyond either end of the axis."""
COARSE_PLACES = tuple(product(range(1, 15, 3), range(0, 12, 2)))
"""Places in SOFTNESS and PADS that a search begins with."""
COARSE_PLACES_FOR_MANY = ((2, 9), (5, 9), (5, 6), (8, 6), (8, 0), (13, 0))
"""With many anchors the decomposition is slow, and the best parameters vary little."""


class FittedAxis(NamedTuple):
    """An axis, and the error that it leaves on the sections that it was fitted to."""

    axis: SpectralAxis
    error: float


@dataclass(frozen=True, eq=False)
class AxisSections:
    """Sections of f along one axis: samples(x) is (points, lines), for x on [lo, hi].

    `solved(x)` are sections that the values of other axes already stand in for: their errors do not matter, but the
    values that they lead to are those of the whole grid.
    """

    lo: float
    hi: float
    samples: Callable[[np.ndarray], np.ndarray]
    solved: Callable[[np.ndarray], np.ndarray]
    spare: int = 4

    def best(self, p: int, max_value: float, enough: float = 0.0) -> FittedAxis | None:
        """The axis of p anchors with the least error on these lines, |values| ≤ max_value; and that error.

        A coarse search over (c, pad), then its neighbours; the first with an error ≤ `enough` will do.
        """
        if p == 1:
            return self._fitted(SpectralAxis(self.lo, self.hi, 1, spare=self.spare), max_value, _Samples(self))
        samples, found = _Samples(self), dict[tuple[int, int], FittedAxis | None]()

        def error(place: tuple[int, int]) -> float:
            c, pad = place
            if not (0 <= c < len(SOFTNESS) and 0 <= pad < len(PADS)) or p - 1 - 2 * PADS[pad] <= 0.4:
                return math.inf
            if place not in found:
                found[place] = self._fitted(self._axis(p, c, pad), max_value, samples)
            fitted = found[place]
            return math.inf if fitted is None else fitted.error

        place, least = (0, 0), math.inf
        for candidate in COARSE_PLACES if p <= 80 else COARSE_PLACES_FOR_MANY:
            if error(candidate) < least:
                place, least = candidate, error(candidate)
            if least <= enough:
                return found[place]
        while p <= 300:
            c, pad = place
            around = [(c + i, pad + j) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))]
            nearest = min(around, key=error)
            if not enough < error(nearest) < least:
                return found[nearest if error(nearest) < least else place] if least < math.inf else None
            place, least = nearest, error(nearest)
        return found.get(place)

    def _axis(self, p: int, c: int, pad: int) -> SpectralAxis:
        return SpectralAxis(self.lo, self.hi, p, PADS[pad], SOFTNESS[c], spare=self.spare)

    def _fitted(self, axis: SpectralAxis, max_value: float, samples: _Samples) -> FittedAxis | None:
        """The axis with the first cut that keeps the values small, and its error; None if none does."""
        fit = axis.fit
        at_nodes, at_tests, solved = samples(axis)
        modes = fit.left.T @ solved
        found = truncated(fit.singular, fit.right, modes, CUTS, lambda v: bool(np.abs(v).max() <= max_value))
        if found is None:
            return None
        _, rank, cut = found
        error = float(np.abs(fit.predicted[:, :rank] @ (fit.left.T @ at_nodes)[:rank] - at_tests).max())
        return FittedAxis(replace(axis, cut=cut), error)

    def smallest(self, eps: float, max_value: float, start: int = 9, most: int = MAX_P) -> FittedAxis | None:
        """The fewest anchors with an error ≤ eps on these lines; None if `most` of them do not suffice."""
        found = fewest(
            doubling(start, most),
            lambda p, before: self.best(p, max_value, eps),
            eps,
            resolution=64,
            gives_up=lambda failed: len(failed) > 1 and _is_hopeless(failed[-2], failed[-1], eps, most),
        ).met
        return found and (self.best(found.axis.p, max_value) or found)


def _is_hopeless(before: FittedAxis, after: FittedAxis, eps: float, most: int) -> bool:
    """Whether the error falls like a power of p, as at a kink, and too slowly for `most` anchors to be enough."""
    low, high = before.axis.p, after.axis.p
    if high < 48 or high > 2 * low:  # too few to tell, or not tried one after the other
        return False
    rate = math.log(before.error / after.error) / math.log(high / low)
    return rate < 3 and after.error * (most / high) ** -max(rate, 0.0) > 2 * eps


class _Samples:
    """The lines at the nodes and tests of a fit, which depend on p alone."""

    def __init__(self, lines: AxisSections) -> None:
        self._lines = lines
        self._found: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __call__(self, axis: SpectralAxis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._found is None:
            nodes, lines = axis.nodes(), self._lines
            self._found = lines.samples(nodes), lines.samples(axis.at(axis.fit.tests)), lines.solved(nodes)
        return self._found


def along_axes(
    tensor: Float[np.ndarray, "*grid outputs"], maps: Sequence[Callable[[np.ndarray], np.ndarray]], first: int = 0
) -> Float[np.ndarray, "*grid outputs"]:
    """Axis first + i goes through maps[i], a linear map of columns; the other axes stay."""
    for axis, linear in enumerate(maps, first):
        moved = np.moveaxis(tensor, axis, 0)
        columns = linear(np.ascontiguousarray(moved.reshape(len(moved), -1)))
        tensor = np.moveaxis(columns.reshape(len(columns), *moved.shape[1:]), 0, axis)
    return tensor
