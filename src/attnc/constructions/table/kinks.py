"""Telling points apart that are too close for any temperature: a convex function with kinks between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SELECTING = 80.0
"""A lead of so much leaves nothing to others."""
MAX_KINKS = 2000


@dataclass(frozen=True, eq=False)
class Kinks:
    """Σ κ|y_axis − at|, a convex function to which keys add their tangents.

    A tangent at a point leads there all other tangents, and sums of convex functions add their leads: so kinks take
    nothing from other points. Two points on opposite sides of a kink lead each other by 2κ times their distance to it.
    """

    axis: Int[np.ndarray, " kinks"]
    at: Float[np.ndarray, " kinks"]
    strength: Float[np.ndarray, " kinks"]  # the κ

    @classmethod
    def between(cls, y: Float[np.ndarray, "points d"], pairs: Int[np.ndarray, "pairs two"]) -> Kinks:
        """Kinks for which the points of every pair lead each other by SELECTING: halfway, where they differ most."""
        difference = np.abs(y[pairs[:, 0]] - y[pairs[:, 1]])
        axes, gaps = difference.argmax(axis=1), difference.max(axis=1)
        found: list[tuple[int, float, float]] = []
        for pair in np.argsort(gaps)[:MAX_KINKS].tolist():
            axis = int(axes[pair])
            low, high = sorted(y[pairs[pair], axis].tolist())
            is_apart = (2 * k * min(m - low, high - m) >= SELECTING for i, m, k in found if i == axis)
            if not any(is_apart):
                found.append((axis, (low + high) / 2, SELECTING / (high - low)))
        table = np.array(found).reshape(-1, 3)
        return cls(table[:, 0].astype(int), table[:, 1], table[:, 2])

    def tangents(self, y: Float[np.ndarray, "points d"]) -> tuple[np.ndarray, np.ndarray]:
        """Anchors and bias: the tangent of κ|y − m| at a point is κ·sign·(y − m)."""
        anchors, bias = np.zeros_like(y), np.zeros(len(y))
        for axis, at, strength in zip(self.axis.tolist(), self.at.tolist(), self.strength.tolist(), strict=True):
            sign = np.sign(y[:, axis] - at)
            anchors[:, axis] += strength / 2 * sign
            bias -= strength * at * sign
        return anchors, bias
