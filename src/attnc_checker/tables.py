"""Tables: every row is a leaf, a point at which the network is held against what the row says; between the points
nothing is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from flint import arb

from attnc_checker.averages import Box
from attnc_checker.cells import Cell
from attnc_checker.claims import AT_POINTS
from attnc_checker.expressions import Function
from attnc_checker.files import BadFile, Refused, field
from attnc_checker.program import exact
from attnc_checker.proving import Job, Proof

LEVEL = 8


class Row(NamedTuple):
    number: int
    cell: Cell  # some cell of the box that holds the point
    point: tuple[float, ...]
    values: tuple[float, ...]


def constants(values: Sequence[float]) -> Function:
    return {i: ("constant", exact(x)) for i, x in enumerate(values)}, range(len(values))


class TableProof(Proof):
    def read_leaves(self) -> Sequence[Row]:
        data, ends, parts = self.claim.data, self.claim.ends, 2**LEVEL
        rows, leaves = field(data, "table", tuple[tuple[float, ...], ...] | None), []
        if not rows or self.claim.method != f"{AT_POINTS}{len(rows):,} points":
            raise Refused(f"the method is {self.claim.method!r:.60}, but the table is not stored, or not whole")
        if self.claim.expression is not None or data.get("points", len(rows)) != len(rows):
            raise Refused(f"the claim is about {len(rows):,} rows of a table, and states an expression or other points")
        for number, row in enumerate(rows):
            if not len(row) == len(rows[0]) > len(ends):
                raise BadFile(f"the certificate: row {number} of the table is no list of as many numbers as the first")
            sides = [(Fraction(x), Fraction(lo), Fraction(hi)) for x, (lo, hi) in zip(row, ends, strict=False)]
            if not all(lo <= x <= hi for x, lo, hi in sides):
                raise Refused(f"the point in row {number} of the table lies outside of the box")
            index = tuple(min(parts - 1, int((x - lo) / (hi - lo) * parts)) for x, lo, hi in sides)
            leaves.append(Row(number, (LEVEL, index), row[: len(ends)], row[len(ends) :]))
        self.scope = f"at the table's {len(rows):,} points, and nowhere else"
        return leaves

    def function(self) -> Function:
        return constants(self.leaves[0].values)

    def prove(self, job: Job) -> float:
        number, cell, point, values = self.leaves[job[1]]
        (subject,), box = self.subjects, Box([arb(x) for x in point], [arb(0) for _ in point])
        prover = replace(subject.near(cell), function=constants(values))
        where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.claim.variables, point, strict=True))
        name = f"the row leaf {number}, {where},"
        return float(subject.hold(name, self.claim.bound, 1, lambda room: prover.error("taylor", 1, box, room)))
