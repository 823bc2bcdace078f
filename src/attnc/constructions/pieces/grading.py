"""Anchors that crowd at given points, and the scores that select among them.

A density ρ says how many anchors there are per unit of length. Equidistribute them, and let the scores be the tangents
at the anchors of a convex φ with φ″ = cρ²: then a step from one anchor to the next looks the same everywhere, and the
weights about an anchor are those of a Gaussian softmax whose spacing is the local h = 1/ρ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Grading:
    """ρ(t) ∝ 1/(t0 + |t − κ|) + u/(hi − lo), κ the nearest of `points`; without points ρ is constant.

    Near κ the spacing is that of t = κ ± t0(e^{|s|} − 1), s uniform; u > 0 keeps it from growing too much far away.
    Everything has a closed form between the middles of neighbouring points: with r = |t − κ|, l = log(1 + r/t0) and
    U = u/(hi − lo), integrated from κ,

        ∫ρ = l + Ur,   ∫ρ² = 1/t0 − 1/(t0 + r) + 2Ul + U²r,   ∫∫ρ² = r/t0 − l + 2U((t0 + r)l − r) + U²r²/2.
    """

    lo: float
    hi: float
    points: tuple[float, ...] = ()
    t0: float = 1.0
    u: float = 0.0

    def tangents(
        self, num_anchors: int, c: float, steps: float, shift: float = 0.0
    ) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
        """(slopes, offsets, anchors). `steps` spacings, a real number, fill [lo, hi]; what anchors there are beyond
        that lie outside, as many on either side, or 2·shift more on the right."""
        number = np.arange(num_anchors) - (num_anchors - 1) / 2 + shift
        if not self.points:
            h = (self.hi - self.lo) / steps
            middle, off = 0.5 * (self.lo + self.hi), h * number
            slopes = c * off / h**2
            return slopes, -slopes * middle - c * off**2 / (2 * h**2), middle + off
        first, last = self._count(np.array([self.lo, self.hi]))
        density = steps / (last - first)  # anchors per unit of ∫ρ
        anchors = self._place(0.5 * (first + last) + number / density)
        height, slope = self._phi(anchors)
        slopes = c * density**2 * slope
        return slopes, c * density**2 * height - slopes * anchors, anchors

    @property
    def _U(self) -> float:
        return self.u / (self.hi - self.lo)

    @cached_property
    def _kappa(self) -> Float[np.ndarray, " points"]:
        return np.array(self.points)

    @cached_property
    def _middles(self) -> Float[np.ndarray, " gaps"]:
        return (self._kappa[1:] + self._kappa[:-1]) / 2

    @cached_property
    def _at_points(self) -> tuple[Float[np.ndarray, " points"], ...]:
        """∫ρ, φ′ and φ (for c = 1) at the points, from the first one on: two half gaps at a time."""
        count, slope, height = [0.0], [0.0], [0.0]
        for gap in np.diff(self._kappa):
            half_count, half_slope, _ = (float(part[0]) for part in self._from_point(np.array([gap / 2])))
            height.append(height[-1] + (slope[-1] + half_slope) * gap)  # ρ is symmetric about the middle of a gap
            slope.append(slope[-1] + 2 * half_slope)
            count.append(count[-1] + 2 * half_count)
        return np.array(count), np.array(slope), np.array(height)

    def _from_point(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """∫ρ, ∫ρ², ∫∫ρ² over a distance r from a point."""
        t0, U = self.t0, self._U
        log = np.log1p(r / t0)
        first = r / (t0 * (t0 + r)) + 2 * U * log + U**2 * r
        second = r / t0 - log + 2 * U * ((t0 + r) * log - r) + U**2 * r**2 / 2
        return log + U * r, first, second

    def _count(self, t: np.ndarray) -> np.ndarray:
        nearest = np.searchsorted(self._middles, t)
        off = t - self._kappa[nearest]
        return self._at_points[0][nearest] + np.sign(off) * self._from_point(np.abs(off))[0]

    def _phi(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nearest = np.searchsorted(self._middles, t)
        off = t - self._kappa[nearest]
        _, slope, height = self._from_point(np.abs(off))
        _, base_slope, base = self._at_points
        return base[nearest] + base_slope[nearest] * off + height, base_slope[nearest] + np.sign(off) * slope

    def _place(self, wanted: np.ndarray) -> np.ndarray:
        """The t with ∫ρ = wanted: on each side of a point l + Ur = s, by Newton's method in l from above."""
        counts = self._at_points[0]
        nearest = np.searchsorted((counts[1:] + counts[:-1]) / 2, wanted)
        off = wanted - counts[nearest]
        s = np.abs(off)
        W = self._U * self.t0  # l + W(e^l − 1) = s is convex in l, and l ≤ s
        log = s if W == 0 else np.minimum(s, np.log1p(s / W))
        if W > 0:
            for _ in range(60):
                grown = W * np.exp(log)
                step = (log + grown - W - s) / (1 + grown)
                log = log - step
                if np.abs(step).max(initial=0.0) <= 1e-14 * (1 + float(log.max(initial=0.0))):
                    break
        return self._kappa[nearest] + np.sign(off) * self.t0 * np.expm1(log)
