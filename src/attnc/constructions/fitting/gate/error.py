"""The largest error of a gate: found by a search on a core, and bounded in closed form beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.fitting.gate.keys import GateKeys

if TYPE_CHECKING:
    from jaxtyping import Float

SAFETY = 1.01
"""Peaks are found to 1e-4; this is the margin on them."""
ROUNDS, PARTS = 2, 24
FAR = 60.0
"""e^{−60} is below 2⁻⁸⁶."""


def largest(error_at: Callable[[np.ndarray], np.ndarray], points: Float[np.ndarray, " points"]) -> float:
    """max |error| over sorted points, followed to the top of every peak between them that matters."""
    points = np.asarray(points, np.float64)
    errors = np.abs(error_at(points))
    found = float(errors.max())
    for _ in range(ROUNDS):
        padded = np.concatenate([[0.0], errors, [0.0]])
        at = np.flatnonzero((errors >= padded[:-2]) & (errors >= padded[2:]) & (errors >= 0.7 * found))
        left, right = points[np.maximum(at - 1, 0)], points[np.minimum(at + 1, len(points) - 1)]
        points = np.unique((left[:, None] + (right - left)[:, None] * (np.arange(PARTS + 1) / PARTS)).ravel())
        errors = np.abs(error_at(points))
        found = max(found, float(errors.max()))
    return found


def observed(error_at: Callable[[np.ndarray], np.ndarray], points: Float[np.ndarray, " points"], size: float) -> float:
    """The largest error rounded up, with what float64 may hide of it: `size` is that of the terms that are summed."""
    return SAFETY * largest(error_at, points) + 16 * 2.0**-53 * size


def half_line(reach: float, core: float = 12.0, count: int = 1000) -> Float[np.ndarray, " points"]:
    """0 … reach: even up to `core`, geometric beyond."""
    near = np.linspace(0.0, min(core, reach), count)
    return near if reach <= core else np.concatenate([near, np.geomspace(core, reach, 300)[1:]])


def reach_of(keys: GateKeys) -> float:
    """How far from 0 all keys but the last are behind it by 60, and more and more so."""
    gaps, behind = keys.slopes[-1] - keys.slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    return float(((FAR + np.maximum(behind, 0.0)) / gaps).max())


def tail(keys: GateKeys, x: float) -> float:
    """sup |G(t) − (v + ut)| over t ≥ x, (v, u) those of the last key, whose slope is the largest; x ≥ reach_of(keys).

    Proof.  |G − (v + ut)| ≤ Σ_k e^{s_k − s_last}(|v_k − v| + |u_k − u|t), and t·e^{−gap·t} falls for t ≥ 1/gap.
    """
    gaps, behind = keys.slopes[-1] - keys.slopes[:-1], keys.offsets[:-1] - keys.offsets[-1]
    apart = np.abs(keys.values[:-1] - keys.values[-1]) + np.abs(keys.carried[:-1] - keys.carried[-1]) * x
    return 1.001 * float((np.exp(behind - gaps * x) * apart).sum())
