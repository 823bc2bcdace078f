"""Sections of a function along one axis: the temperature and the fewest anchors that fit all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from attnc.constructions.spectral.axis import CUTS, MAX_P, Axis

SOFTNESS = tuple(k / 64 for k in (6, 8, 10, 12, 14, 16, 19, 22, 26, 32, 38, 44, 54, 64, 80))
"""c = βh², in whole 64ths so that −c·L² is exact. The ripple is (2π/c)e^{−π²/c} per unit slope and spacing; the smaller
c, the smaller the ripple, and the larger the values."""
PADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
COARSE = tuple(product(range(1, 15, 3), range(0, 12, 2)))
"""Places in SOFTNESS and PADS that a search begins with."""
COARSE_FOR_MANY = ((2, 9), (5, 9), (5, 6), (8, 6), (8, 0), (13, 0))
"""With many anchors the decomposition is slow, and the best parameters vary little."""


@dataclass(frozen=True, eq=False)
class Lines:
    """Sections of f along one axis: samples(x) is (points, lines), for x on [lo, hi].

    `solved(x)` are sections that the values of other axes already stand in for: their errors say nothing, but the
    values that they lead to are those of the whole grid.
    """

    lo: float
    hi: float
    samples: Callable[[np.ndarray], np.ndarray]
    solved: Callable[[np.ndarray], np.ndarray]
    spare: int = 4

    def best(self, p: int, max_value: float, enough: float = 0.0) -> tuple[Axis, float] | None:
        """The axis of p anchors with the least error on these lines, |values| ≤ max_value; and that error.

        A coarse search over (c, pad), then its neighbours; the first with an error ≤ `enough` will do.
        """
        if p == 1:
            return self._fitted(Axis(self.lo, self.hi, 1, spare=self.spare), max_value, _Samples(self))
        samples, found = _Samples(self), dict[tuple[int, int], tuple[Axis, float] | None]()

        def error(place: tuple[int, int]) -> float:
            c, pad = place
            if not (0 <= c < len(SOFTNESS) and 0 <= pad < len(PADS)) or p - 1 - 2 * PADS[pad] <= 0.4:
                return math.inf
            if place not in found:
                found[place] = self._fitted(self._axis(p, c, pad), max_value, samples)
            fitted = found[place]
            return math.inf if fitted is None else fitted[1]

        place, least = (0, 0), math.inf
        for candidate in COARSE if p <= 80 else COARSE_FOR_MANY:
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

    def _axis(self, p: int, c: int, pad: int) -> Axis:
        return Axis(self.lo, self.hi, p, PADS[pad], SOFTNESS[c], spare=self.spare)

    def _fitted(self, axis: Axis, max_value: float, samples: _Samples) -> tuple[Axis, float] | None:
        """The axis with the first cut that keeps the values small, and its error; None if none does."""
        fit = axis.fit
        at_nodes, at_tests, solved = samples(axis)
        moved, grown = fit.left.T @ at_nodes, fit.left.T @ solved
        for cut in CUTS:
            rank = fit.rank(cut)
            if np.abs(fit.values(grown, rank)).max() <= max_value:
                error = float(np.abs(fit.predicted[:, :rank] @ moved[:rank] - at_tests).max())
                return replace(axis, cut=cut), error
        return None

    def smallest(self, eps: float, max_value: float, start: int = 9, most: int = MAX_P) -> tuple[Axis, float] | None:
        """The fewest anchors with an error ≤ eps on these lines; None if `most` of them do not suffice."""
        tried: dict[int, tuple[Axis, float] | None] = {}

        def suffices(p: int) -> bool:
            found = tried[p] = self.best(p, max_value, eps)
            return found is not None and found[1] <= eps

        low, high = 0, min(most, max(1, start))
        while not suffices(high):
            if high == most or self._is_hopeless(tried, low, high, eps, most):
                return None
            low, high = high, min(most, 2 * high)
        while high - low > 1 + high // 64:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        return self.best(high, max_value) or tried[high]

    def _is_hopeless(
        self, tried: Mapping[int, tuple[Axis, float] | None], low: int, high: int, eps: float, most: int
    ) -> bool:
        """Whether the error falls like a power of p, as at a kink, and too slowly for `most` anchors to be enough."""
        before, after = tried.get(low), tried[high]
        if before is None or after is None or high < 48:
            return False
        rate = math.log(before[1] / after[1]) / math.log(high / low)
        return rate < 3 and after[1] * (most / high) ** -max(rate, 0.0) > 2 * eps


class _Samples:
    """The lines at the nodes and tests of a fit, which depend on p alone."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._found: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __call__(self, axis: Axis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._found is None:
            nodes, lines = axis.nodes(), self._lines
            self._found = lines.samples(nodes), lines.samples(axis.at(axis.fit.tests)), lines.solved(nodes)
        return self._found
