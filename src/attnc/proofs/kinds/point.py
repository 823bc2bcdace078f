"""The error at finitely many points, each of them proved: the claim of a table.

Where rounding is a small part of eps, the value of the network is computed in float64, with a bound of all roundings
that holds on the whole box (`FloatPoints`). Otherwise a point is a cell of width 0, and the value of the network there
is enclosed as on any cell (`kinds.taylor`). The rounding of engines is added.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.numerics.contraction import ROWS_AT_ONCE, contracted, roundings_of, softmax_of_rows
from attnc.numerics.jet_tables import num_monomials
from attnc.numerics.limits import is_time_over
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import FIRST_BATCH
from attnc.proofs.cells.kind import Goal
from attnc.proofs.kinds.rounded import RoundedKind, StageRounding
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.margins import LEAF_ROOM, POINT_ROUNDING
from attnc.proofs.proof import Points, Proof
from attnc.proofs.prover import ProofRequest, Prover
from attnc.proofs.rounding.program import roundings
from attnc.proofs.stages.extraction import OneStage, stages
from attnc.targets.box import Box
from attnc.targets.expressions.taylor import Taylor
from attnc.targets.target import Target

MAX_STORED = 2**20  # the most numbers of a table that a certificate repeats for a checker: 20 MB of JSON
MAX_TABLE_BYTES = 2**28
"""Largest size in bytes of a table that is stored beside its certificate: ten million rows of three columns."""
QUICK_SHARE = 2.0**-8
"""The share of eps below which one bound of all rounding is added at every point. Else it is bounded point by point."""


def constants(
    values: Float[np.ndarray, "points outputs"], centres: np.ndarray, radii: np.ndarray, degree: int
) -> Taylor:
    """Return the values that a stage should have at cells of width 0, in the order of the cells, as polynomials."""
    mid = np.zeros((*values.shape, num_monomials(centres.shape[1], degree)))
    mid[:, :, 0] = values
    return Taylor(mid, np.zeros_like(mid), np.zeros(values.shape))


@dataclass(frozen=True, eq=False)
class FloatPoints:
    """A stage of one head over a grid of keys, evaluated in float64 with an a-priori bound of all roundings.

    A score is Σ_i (a_i x_i + c_i) + ρ_k. In floats each a_i x_i + c_i is off by at most
    γ_2(|a_i x_i| + |c_i|). With the radii of the enclosures and |ρ_k| it is off by at most σ, so that weights are off
    by a factor e^{±2σ} once they are
    normalised. Per axis come an exponential, a sum and a division, then the products and sums of `contracted`. All
    these relative errors of weights multiply |v_k − v| ≤ V, where v is the middle of the values.
    """

    slopes: tuple[Float[np.ndarray, " p"], ...]
    offsets: tuple[Float[np.ndarray, " p"], ...]
    values: Float[np.ndarray, "*grid outputs"]  # the v_k − v
    middle: Float[np.ndarray, " outputs"]
    error: Float[np.ndarray, " outputs"]

    @classmethod
    def of(cls, stage: OneStage, box: Box) -> FloatPoints | None:
        """Return the stage in this form, or None if it is no single grid with constant values."""
        is_plain = len(stage.heads) == 1 and stage.heads[0].carried is None
        affine = (stage.constant.mid, stage.constant.radius, stage.linear.mid, stage.linear.radius)
        if not is_plain or any(part.any() for part in affine):
            return None
        head = stage.heads[0]
        grid = head.as_grid()
        if grid is None or grid.has_duplicates:
            return None
        split, d, u = grid.offsets_through_least(), len(grid.shape), UNIT_ROUNDOFF["float64"]
        reach, slopes = box.magnitude, tuple(rows[:, 0] for rows in grid.rows)
        with quiet():
            size = sum(
                float(np.abs(a).max() * x + np.abs(c).max()) for a, c, x in zip(slopes, split.lines, reach, strict=True)
            )
            radii = float(head.offsets.radius.max() + (head.slopes.radius.max(axis=0) * reach).sum())
            sigma = gamma(4, u) * size + float(np.abs(split.misfit).max()) + split.misfit_error + radii
        if not sigma < 2.0**-20:
            return None
        low, high = head.values.mid.min(axis=0), head.values.mid.max(axis=0)
        middle = low / 2 + high / 2
        values = head.values.mid[grid.keys] - middle
        per_axis = sum(2 * (2 * LIBM_ULPS + 2) + 2 * p for p in grid.shape)
        relative = math.expm1(2 * sigma) + gamma(per_axis + roundings_of(grid.shape) + 2 * d + 8, u)
        spread = np.abs(values).max(axis=tuple(range(d)))
        error = up(1.01 * relative * spread + head.values.radius.max(axis=0) + 2.0**-900 * (1 + spread), 4)
        return cls(slopes, split.lines, values, middle, error)

    def off(self, points: np.ndarray, wanted: np.ndarray) -> Float[np.ndarray, " outputs"]:
        """Return an upper bound of |stage − wanted| at all points, for every output. NaN if a number overflows."""
        largest = np.zeros(len(self.middle))
        for start in range(0, len(points), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            weights = [
                softmax_of_rows(np.multiply.outer(a, x) + c[:, None])
                for x, a, c in zip(points[rows].T, self.slopes, self.offsets, strict=True)
            ]
            apart = wanted[rows] - self.middle
            off = np.abs(contracted(weights, self.values) - apart) + 2.0**-51 * np.abs(apart)
            largest = np.maximum(largest, off.max(axis=0))
        return np.asarray(up(largest + self.error))


class PointProver(Prover):
    """Proves the error at all points of a table."""

    name = "points"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        return target.num_check_points is not None

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove all points. Raise ProgramError if the program is not one stage, or if time runs out.

        There is no incomplete proof: bounds at some points imply nothing about the others.
        """
        count = target.num_check_points
        assert count is not None
        check_rows = RowCheck.of(program, target.box, target.num_outputs, request)
        worst, done, digest = WorstRow(), 0, hashlib.sha256()
        for points, values in target.check_blocks():
            worst = max(worst, check_rows.worst(points, values, lambda n: check_time_for(count)))
            done += len(points)
            request.report(done / count)
            digest.update(row_bytes(points, values))
        return Proof(worst.bound, worst.terms, points_of(target, digest.hexdigest()))


class WorstRow(NamedTuple):
    """The bound at the worst row of several, and its parts for the approximation and for rounding."""

    bound: float = -math.inf
    approximation: float = 0.0
    rounding: float = 0.0

    @property
    def terms(self) -> tuple[Term, ...]:
        return (
            Term("approximation", self.approximation, "the exact network against the table at the worst point"),
            Term("rounding", self.rounding, "of the engine at that point: scores, exponentials, sums"),
        )


@dataclass(frozen=True, eq=False)
class RowCheck:
    """The proof of any rows of a table: `quick` where rounding is a small part of eps."""

    stage: OneStage
    outputs: np.ndarray
    rounding: StageRounding
    quick: _Quick | None

    @classmethod
    def of(cls, program: Program, box: Box, num_outputs: int, request: ProofRequest) -> RowCheck:
        """Prepare the proof. Raise ProgramError if the program is not one stage."""
        found = stages(program)
        if len(found) != 1 or found[0][0].constant.mid.shape != (num_outputs,):
            raise ProgramError(
                f"the outputs are read from {len(found)} query tokens; a table is proved if one token makes them all"
            )
        (stage, outputs), (rounds,) = found[0], roundings(program)
        rounding = StageRounding(stage, rounds, request.truncation, spare=POINT_ROUNDING, box=box)
        return cls(stage, outputs, rounding, _Quick.of(stage, rounding, box, request.eps))

    def worst(self, points: np.ndarray, values: np.ndarray, report: Callable[[int], None]) -> WorstRow:
        """Return the largest bound at rows. `report` takes the number of rows that are done."""
        wanted, worst = values[:, self.outputs], WorstRow()
        if self.quick is not None:
            report(0)
            return self.quick.worst(points, wanted)
        for start in range(0, len(points), FIRST_BATCH):
            report(start)
            rows = slice(start, start + FIRST_BATCH)
            worst = max(worst, _sharp(self.stage, self.rounding, points[rows], wanted[rows]))
        return worst


def points_of(target: Target, sha256: str) -> Points:
    """Return the rows of a table as evidence. Many are stated by their hash, and written to a file of their own."""
    count = target.num_check_points or 0
    columns = target.box.d + target.num_outputs
    if count * columns > MAX_STORED:
        return Points(count, sha256=sha256, columns=columns, content=lambda: _content(target, columns))
    table = np.concatenate([np.hstack(block) for block in target.check_blocks()])
    return Points(count, tuple(map(tuple, table.tolist())))


def hash_of_rows(target: Target) -> str:
    """Return the SHA-256 of the rows of a table, as a file has them."""
    digest = hashlib.sha256()
    for block in target.check_blocks():
        digest.update(row_bytes(*block))
    return digest.hexdigest()


def row_bytes(points: np.ndarray, values: np.ndarray) -> bytes:
    """Return rows of points and values as bytes: float64, little-endian, row by row."""
    return np.ascontiguousarray(np.hstack([points, values]), "<f8").tobytes()


def _content(target: Target, columns: int) -> bytes | None:
    """Return the rows of a table as a file has them, or None if they are too many to be stored."""
    count = target.num_check_points or 0
    if 8 * count * columns > MAX_TABLE_BYTES:
        return None
    return b"".join(row_bytes(*block) for block in target.check_blocks())


@dataclass(frozen=True, eq=False)
class _Quick:
    """A proof in floats, with one bound of the rounding of engines on the whole box, if it is a small part of eps."""

    floats: FloatPoints
    rounding: Float[np.ndarray, "1 outputs"]

    @classmethod
    def of(cls, stage: OneStage, rounding: StageRounding, box: Box, eps: float) -> _Quick | None:
        floats = FloatPoints.of(stage, box)
        if floats is None:
            return None
        whole = rounding.on_box
        is_small = float((whole + floats.error).max()) <= QUICK_SHARE * eps  # False for NaN
        return cls(floats, whole) if is_small else None

    def worst(self, points: np.ndarray, wanted: np.ndarray) -> WorstRow:
        """Return the largest bound at the points, its part for the approximation, and its part for rounding."""
        off = up((1 + LEAF_ROOM) * self.floats.off(points, wanted), 2)[None]
        return _worst(up(off + self.rounding), off, np.broadcast_to(self.rounding, off.shape))


def _sharp(stage: OneStage, rounding: StageRounding, points: np.ndarray, wanted: np.ndarray) -> WorstRow:
    """Return the same by enclosures, with the rounding of engines at every point."""
    kind = RoundedKind(TaylorKind(stage, functools.partial(constants, wanted), 1), replace(rounding, box=None))
    bounds = kind.bounds(points, np.zeros_like(points), Goal(np.inf))
    return _worst(bounds.upper, up(bounds.terms["approximation"] + bounds.terms["remainder"]), bounds.terms["rounding"])


def _worst(upper: np.ndarray, off: np.ndarray, rounded: np.ndarray) -> WorstRow:
    total = np.nan_to_num(upper, nan=math.inf, posinf=math.inf)
    place = np.unravel_index(int(np.argmax(total)), total.shape)
    return WorstRow(float(total[place]), float(off[place]), float(rounded[place]))


def check_time_for(count: int) -> None:
    if is_time_over():
        raise ProgramError(f"the time is not enough to prove all {count:,} points")
