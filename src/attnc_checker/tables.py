"""Tables: the network is held against every row at its point. Between the points nothing is claimed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from flint import arb

from attnc_checker.averages import Box
from attnc_checker.cells import Cell, Leaf
from attnc_checker.claims import AtPoints, Claim
from attnc_checker.expressions import Function, Operation
from attnc_checker.files import BadFile, Refused, Tensor
from attnc_checker.network import Reduction
from attnc_checker.overflow import require_finite
from attnc_checker.program import exact
from attnc_checker.proving import Job, Proof, Subject, prover_of, reach_of, stored_program
from attnc_checker.rounding import Arithmetic

LEVEL = 8
"""The level of the cell that stands for a point while far keys are left out: 256 cells along each axis."""


class TableProof(Proof):
    """A leaf for every row: a cell that holds the point."""

    def __init__(self, claim: Claim, evidence: AtPoints, structure: object, tensors: dict[str, Tensor]) -> None:
        self.claim, self.rows = claim, evidence.rows
        first = self.rows[0][len(claim.ends) :]
        leaves = [Leaf("row", 1, self._cell(number)) for number in range(len(self.rows))]
        program = stored_program(claim, structure, tensors, len(first))
        reduction = Reduction(program, reach_of(claim))
        prover = prover_of(reduction.stage(), constants(first), Arithmetic(claim.dtype))
        self.subjects = [Subject(claim, leaves, [claim.bound] * len(leaves), prover)]
        self.scope = f"at the table's {len(self.rows):,} points, and nowhere else"
        require_finite(program, reduction.reach)

    def _cell(self, number: int) -> Cell:
        row, ends, parts = self.rows[number], self.claim.ends, 2**LEVEL
        if not len(row) == len(self.rows[0]) > len(ends):
            raise BadFile(f"the certificate: row {number} of the table is no list of as many numbers as the first")
        sides = [(Fraction(x), Fraction(lo), Fraction(hi)) for x, (lo, hi) in zip(row, ends, strict=False)]
        if not all(lo <= x <= hi for x, lo, hi in sides):
            raise Refused(f"the point in row {number} of the table lies outside of the box")
        return LEVEL, tuple(min(parts - 1, int((x - lo) / (hi - lo) * parts)) for x, lo, hi in sides)

    def prove(self, job: Job) -> float:
        (subject,), number, d = self.subjects, job[1], len(self.claim.ends)
        point, values = self.rows[number][:d], self.rows[number][d:]
        prover, box = replace(subject.near(self._cell(number)), function=constants(values)), _at(point)
        where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.claim.variables, point, strict=True))
        name = f"the row leaf {number}, {where},"
        return float(subject.hold(name, self.claim.bound, 1, lambda room: prover.error("taylor", 1, box, room)))

    def conclude(self, found: Iterable[float]) -> float:
        return max(found)


def constants(values: Sequence[float]) -> Function:
    """The function that has these values everywhere."""
    return Function({i: Operation("constant", (exact(x),)) for i, x in enumerate(values)}, range(len(values)))


def _at(point: Sequence[float]) -> Box:
    return Box([arb(x) for x in point], [arb(0) for _ in point])
