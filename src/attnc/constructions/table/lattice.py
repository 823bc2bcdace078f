"""Anchors on one axis of a table, fewer than its nodes: equally spaced, or as dense as the nodes are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.spectral.axis import CUTS
from attnc.constructions.spectral.lines import PADS, SOFTNESS

if TYPE_CHECKING:
    from jaxtyping import Float

FEW = 64
"""Up to so many anchors are fitted by singular values, more by bands: quicker, and good to about 1e-9."""
LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, FEW, *(FEW * 2**k for k in range(1, 16)))


@dataclass(frozen=True)
class Lattice:
    """p anchors one spacing apart, `pad` of them beyond either end of an axis, at temperature c; of any length."""

    p: int
    pad: float = 0.0
    c: float = 1.0
    cut: float = CUTS[0]  # of singular values; for many anchors, the ridge
    is_graded: bool = False  # as dense as the nodes are, instead of equally spaced

    @property
    def spacings(self) -> float:
        """Between the ends of the axis."""
        return self.p - 1 - 2 * self.pad if self.p > 1 else 1.0

    @property
    def anchors(self) -> Float[np.ndarray, " p"]:
        return np.arange(self.p) - (self.p - 1) / 2

    @property
    def bias(self) -> Float[np.ndarray, " p"]:
        """With y = c(x − middle)/spacing, L whole halves and c in whole 64ths, 2L and −cL² are exact."""
        return -self.c * self.anchors**2

    def graded_places(self, nodes: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " p"]:
        """p ≥ 2 places with equally many nodes between them; beyond the ends nodes go on as they came."""
        x = np.unique(nodes)
        step = (len(x) - 1) / self.spacings
        beyond = math.ceil(self.pad * step) + 1
        left, right = x[0] - _continued(np.diff(x), beyond)[::-1], x[-1] + _continued(np.diff(x)[::-1], beyond)
        places = step * (np.arange(self.p) - self.pad)
        return np.interp(places, np.arange(-beyond, len(x) + beyond), np.concatenate([left, x, right]))


def _continued(gaps: Float[np.ndarray, " gaps"], count: int) -> Float[np.ndarray, " count"]:
    """Distances of `count` places beyond the first node: gaps go on growing as they do at this end, or stay."""
    some = min(len(gaps) - 1, 1 + len(gaps) // 10)
    ratio = np.clip((gaps[0] / gaps[some]) ** (1 / max(1, some)), 1.0, 2.0)
    with np.errstate(over="ignore"):
        return np.asarray(np.cumsum(np.minimum(gaps[0] * ratio ** np.arange(1.0, count + 1), gaps.sum())))


def menu(p: int, is_uneven: bool) -> list[Lattice]:
    """Softness and padding to try: a fine search for few anchors, where every one counts."""
    if p == 1:
        return [Lattice(1)]
    pads = [pad for pad in PADS if p - 1 - 2 * pad > 0.4] if p <= FEW else [0.0, 3.0]
    softness = SOFTNESS[::2] if p <= FEW else SOFTNESS[5::2]
    even = [Lattice(p, pad, c) for c, pad in product(softness, pads)]
    if not is_uneven:
        return even
    return [*(replace(lattice, is_graded=True) for lattice in even if 4 * lattice.pad <= min(p - 2, 12)), *even]
