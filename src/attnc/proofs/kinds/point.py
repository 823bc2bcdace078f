"""The error at finitely many points, each of them proved: the claim of a table.

A point is a cell of width 0. The value of the network there is enclosed as on any cell (`kinds.taylor`), and the
rounding of engines is added. The network is not evaluated in floating point.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.numerics.jet_tables import num_monomials
from attnc.numerics.limits import is_time_over
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import FIRST_BATCH
from attnc.proofs.cells.kind import Goal
from attnc.proofs.kinds.rounded import RoundedKind, StageRounding
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.margins import POINT_ROUNDING
from attnc.proofs.proof import Points, Proof
from attnc.proofs.prover import ProofRequest, Prover
from attnc.proofs.rounding.program import roundings
from attnc.proofs.stages.extraction import stages
from attnc.targets.expressions.taylor import Taylor
from attnc.targets.target import Target

MAX_STORED = 2**20  # the most numbers of a table that a certificate repeats for a checker: 20 MB of JSON


def constants(
    values: Float[np.ndarray, "points outputs"], centres: np.ndarray, radii: np.ndarray, degree: int
) -> Taylor:
    """Return the values that a stage should have at cells of width 0, in the order of the cells, as polynomials."""
    mid = np.zeros((*values.shape, num_monomials(centres.shape[1], degree)))
    mid[:, :, 0] = values
    return Taylor(mid, np.zeros_like(mid), np.zeros(values.shape))


class PointProver(Prover):
    """Proves the error at all points of a table."""

    name = "points"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        return target.check_points() is not None

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove all points. Raise ProgramError if the program is not one stage, or if time runs out.

        There is no incomplete proof: bounds at some points imply nothing about the others.
        """
        points, found = target.check_points(), stages(program)
        if points is None or len(found) != 1 or found[0][0].constant.mid.shape != (target.num_outputs,):
            raise ProgramError(
                f"the outputs are read from {len(found)} query tokens; a table is proved if one token makes them all"
            )
        (stage, outputs), (rounds,) = found[0], roundings(program)
        rounding = StageRounding(stage, rounds, request.truncation, spare=POINT_ROUNDING)
        values, parts = target(points), list[tuple[np.ndarray, ...]]()
        for start in range(0, len(points), FIRST_BATCH):
            if is_time_over():
                raise ProgramError(f"the time is not enough to prove all {len(points):,} points")
            rows = slice(start, start + FIRST_BATCH)
            kind = RoundedKind(TaylorKind(stage, functools.partial(constants, values[rows][:, outputs]), 1), rounding)
            bounds = kind.bounds(points[rows], np.zeros_like(points[rows]), Goal(np.inf))
            off = up(bounds.terms["approximation"] + bounds.terms["remainder"])
            parts.append((bounds.upper, off, bounds.terms["rounding"]))
            request.report((start + FIRST_BATCH) / len(points))
        upper, off, rounded = (np.concatenate(column) for column in zip(*parts, strict=True))
        total = np.nan_to_num(upper, nan=math.inf, posinf=math.inf)
        worst = np.unravel_index(int(np.argmax(total)), total.shape)
        terms = (
            Term("approximation", float(off[worst]), "the exact network against the table at the worst point"),
            Term("rounding", float(rounded[worst]), "of the engine at that point: scores, exponentials, sums"),
        )
        return Proof(float(total.max()), terms, Points(len(points), _table(points, values)))


def _table(points: np.ndarray, values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Return every point with its values, or nothing if they are too many to store."""
    rows = np.hstack([points, values])
    return tuple(map(tuple, rows.tolist())) if rows.size <= MAX_STORED else ()
