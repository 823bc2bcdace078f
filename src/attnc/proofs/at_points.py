"""The error at finitely many points, each of them proved: a table's claim.

A point is a cell of width 0. The network's value there is enclosed as on any cell (`leaves.taylor`), and what engines
round is added (`rounding.stage`); no sample of the network is believed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.bound import Term
from attnc.numerics.jet_tables import num_monomials
from attnc.numerics.rounding import up
from attnc.proofs.leaves.taylor import taylor_enclosures
from attnc.proofs.rounding.program import roundings
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.stages.extraction import stages
from attnc.targets.expressions.taylor import Taylor

if TYPE_CHECKING:
    from jaxtyping import Float

SPARE = 1.5
"""Rounding is claimed to be so much larger: a checker may count it in another way."""
POINTS = 1024
"""At a time, between two looks at the clock."""


@dataclass(frozen=True)
class ProvenAtPoints:
    """|network(x_i) − y_i| ≤ bound for every point of the table."""

    bound: float
    terms: tuple[Term, ...]
    worst: int  # the point where it is largest


def prove_at_points(
    program: Program,
    points: Float[np.ndarray, "points d"],
    values: Float[np.ndarray, "points outputs"],
    *,
    truncation: float = 0.0,
    time_budget: float = 30.0,
    progress: Callable[[str, float], None] | None = None,
) -> ProvenAtPoints | None:
    """None when time runs out: a part of a table proves nothing of the rest. ProgramError where it is not one stage."""
    found = stages(program)
    if len(found) != 1 or found[0][0].constant.mid.shape != values.shape[1:]:
        raise ProgramError(
            f"the outputs are read from {len(found)} query tokens; a proof is for one that makes them all"
        )
    (stage, outputs), (rounds,) = found[0], roundings(program)
    began, count = time.monotonic(), num_monomials(points.shape[1], 1)
    off, rounding = np.empty((2, *values.shape))
    for start in range(0, len(points), POINTS):
        if time.monotonic() - began > time_budget:
            return None
        rows = slice(start, start + POINTS)
        at, radii = points[rows], np.zeros_like(points[rows])
        mid = np.zeros((len(at), values.shape[1], count))
        mid[:, :, 0] = values[rows][:, outputs]
        wanted = Taylor(mid, np.zeros_like(mid), np.zeros(mid.shape[:2]))
        off[rows] = taylor_enclosures(stage, wanted, at, radii, 1).upper
        rounding[rows] = up(SPARE * rounding_bounds(stage, rounds, at, radii, truncation=truncation))
        if progress is not None:
            progress("proving", min(1.0, (start + POINTS) / len(points)))
    total = np.nan_to_num(up(off + rounding), nan=math.inf, posinf=math.inf)
    worst, output = (int(i) for i in np.unravel_index(int(np.argmax(total)), total.shape))
    terms = (
        Term("approximation", float(off[worst, output]), "the exact network against the table at the worst point"),
        Term("rounding", float(rounding[worst, output]), "of the engine at that point: scores, exponentials, sums"),
    )
    return ProvenAtPoints(float(total.max()), terms, worst)
