"""Where anchors stand: weights ∝ exp(−γ(x − X_k)²) tell their X_k."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROUNDING = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 2e-6}
"""What counts as rounding when scores are compared with a formula, relative to their range."""


def gaussian_places(
    slopes: Float[np.ndarray, " keys"], constants: Float[np.ndarray, " keys"], rounding: float
) -> Float[np.ndarray, " keys"] | None:
    """The X_k of scores s_k·x + c_k that are −γ(x − X_k)² up to what all keys share; None where they are not that.

    Then c_k = α + p·s_k + q·s_k² with q < 0, and key k is the best of all s at x = −2q·s_k − p.
    """
    middle, half = (slopes.min() + slopes.max()) / 2, (slopes.max() - slopes.min()) / 2
    if half == 0 or len(np.unique(slopes)) < 3:
        return None
    z = (slopes - middle) / half
    columns = np.stack([np.ones_like(z), z, z * z], axis=1)
    found = np.linalg.lstsq(columns, constants, rcond=None)[0]
    off = np.abs(columns @ found - constants).max()
    _, linear, square = (float(number) for number in found)
    if not square < 0 or off > rounding * max(np.ptp(constants), np.abs(constants).max(), 1e-300):
        return None
    q, p = square / half**2, linear / half - 2 * square * middle / half**2
    return np.asarray(-2 * q * slopes - p)


def runs(ids: Int[np.ndarray, " samples"]) -> tuple[Int[np.ndarray, " runs"], Int[np.ndarray, " runs"]]:
    """(first, last) sample of every run of equal numbers."""
    ends = np.flatnonzero(np.diff(ids))
    return np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(ids) - 1]])


def run_places(x: Float[np.ndarray, " samples"], ids: Int[np.ndarray, " samples"]) -> Float[np.ndarray, " runs"]:
    """The middle of every cell that wins somewhere on a line; an end cell is no wider than its neighbour."""
    first, last = runs(ids)
    edges = np.concatenate([[x[0]], (x[last[:-1]] + x[first[1:]]) / 2, [x[-1]]])
    half = np.diff(edges) / 2
    middles = edges[:-1] + half
    if len(half) > 2:
        middles[0] = edges[1] - min(half[0], half[1])
        middles[-1] = edges[-2] + min(half[-1], half[-2])
    return np.asarray(middles)
