"""How constructions on bumps are tried: where steps are in transition, at borders of cells, anywhere."""

from __future__ import annotations

import numpy as np

from attnc.constructions.built import Built
from attnc.proofs.observed import sample_points
from attnc.targets.target import Target


def counts_of(built: Built) -> tuple[int, ...]:
    return tuple(int(c) for c in str(dict(built.parameters)["points_per_axis"]).split(" × "))


def hard_points(target: Target, built: Built, count: int = 400, seed: int = 1) -> np.ndarray:
    """Half at random and on a grid; half at edges of cells, beside them, and at every stage of a transition."""
    box, counts = target.box, np.array(counts_of(built))
    delta = float(dict(built.parameters)["step_width"]) / 2
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, counts + 1, (count, box.d)).astype(float)
    stages = [0.0, 1e-15, -1e-15, 1e-9, -1e-9, delta / 3, -delta / 3, delta, -delta, 1.01 * delta, -1.01 * delta, 0.5]
    places = (edges + rng.choice(stages, (count, box.d))) / counts
    points = np.clip(box.lo + places * box.widths, box.lo, box.hi)
    return np.concatenate([sample_points(box, count), points])


def midpoints(target: Target, per_axis: int) -> np.ndarray:
    """The midpoints of a regular grid, for quadrature."""
    middles = (np.arange(per_axis) + 0.5) / per_axis
    axes = target.box.lo + middles[:, None] * target.box.widths
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes.T, indexing="ij")], axis=1)
