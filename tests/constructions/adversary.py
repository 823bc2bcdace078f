"""The largest error that a search finds: a dense sample, then steps uphill from its worst points."""

from __future__ import annotations

import numpy as np

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.program import Program
from attnc.targets.target import Target


def worst_error(program: Program, target: Target, count: int = 6000, rounds: int = 8) -> float:
    rng = np.random.default_rng(11)
    box, engine = target.box, NumpyEngine(program)

    def errors(points: np.ndarray) -> np.ndarray:
        return np.abs(engine(points).reshape(len(points), -1) - target(points)).max(axis=1)

    corners = np.where(rng.random((min(count, 2**box.d), box.d)) < 0.5, box.lo, box.hi)
    points = np.concatenate([corners, box.lo + rng.random((count, box.d)) * box.widths])
    found = errors(points)
    best = points[np.argsort(found)[-40:]]
    worst, step = float(found.max()), 0.5 * count ** (-1 / box.d)
    for _ in range(rounds):
        moved = best[:, None] + step * rng.normal(size=(len(best), 12, box.d)) * box.widths
        moved = np.clip(moved, box.lo, box.hi).reshape(-1, box.d)
        found = errors(moved)
        worst = max(worst, float(found.max()))
        best, step = moved[np.argsort(found)[-40:]], step * 0.6
    return worst
