"""A proof by leaves as `compile` runs it, and the borders of its cells as places to look for trouble."""

from __future__ import annotations

import numpy as np

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.program import Program
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.observed import observed_error
from attnc.proofs.proven import Proven
from attnc.proofs.prover import prove
from attnc.targets.expression_target import ExpressionTarget


def proven(program: Program, target: ExpressionTarget, seconds: float = 1.0, tolerance: float = 0.03) -> Proven:
    engine = NumpyEngine(program)
    observed = observed_error(lambda x: engine(x).reshape(len(x), -1), target, engine.work_per_point)
    return prove(
        program, target, observed=observed, truncation=engine.truncation, time_budget=seconds, tolerance=tolerance
    )


def borders(found: Proven, most: int = 2000) -> np.ndarray:
    """Corners of the leaves with the largest bounds: they crowd at kinks."""
    order = np.argsort(-found.leaf_bounds)[:most]
    points = []
    for level in {found.leaves[i].level for i in order}:
        index = np.array([found.leaves[i].index for i in order if found.leaves[i].level == level])
        centres, radii = cell_boxes(found.core, level, index)
        points += [centres - radii, centres + radii]
    return np.concatenate(points)
