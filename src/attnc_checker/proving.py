"""The proof leaf by leaf. Other kinds of proof, in norms.py, tables.py and deep/, are made of the same parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flint import arb

from attnc_checker.averages import Average, Box
from attnc_checker.cells import Cell, Leaf
from attnc_checker.claims import Claim
from attnc_checker.expressions import Function, parse
from attnc_checker.files import Refused, Tensor
from attnc_checker.leaves import Prover
from attnc_checker.network import Reduction, Stage
from attnc_checker.overflow import require_finite
from attnc_checker.program import Program, exact
from attnc_checker.rounding import Arithmetic
from attnc_checker.tails import tail_error
from attnc_checker.vectors import most

PIECES = (16, 16, 64)
"""A leaf that does not pass whole may be cut into so many, in one, two, three variables: what holds on all, holds."""
FINE = 8
"""In d variables, keys are left out in cells up to the level FINE/d."""

Job = tuple[int, int]
"""The number of a subject, and that of a leaf of it."""


@dataclass(frozen=True)
class Subject:
    """The whole network or one of its stages, which is claimed to be within a bound of a function on a box."""

    claim: Any  # a Claim, or that of a stage
    leaves: Sequence[Any]
    bounds: Sequence[float]  # of each leaf
    prover: Prover
    narrowed: dict[Cell, Prover] = field(default_factory=dict)

    def sides(self, cell: Cell) -> list[tuple[Any, Any]]:
        """Exact rationals, as the ends of the box are float64 numbers."""
        level, index = cell
        whole = [(exact(lo), (exact(hi) - exact(lo)) / 2**level) for lo, hi in self.claim.ends]
        return [(lo + i * width, lo + (i + 1) * width) for (lo, width), i in zip(whole, index, strict=True)]

    def box(self, cell: Cell) -> Box:
        sides = self.sides(cell)
        return Box([arb((lo + hi) / 2) for lo, hi in sides], [arb((hi - lo) / 2) for lo, hi in sides])

    def near(self, cell: Cell) -> Prover:
        """For parts of the cell: on the way to it keys that are far behind are left out, except in the finest cells."""
        level, index = cell
        above = (level - 1, tuple(i >> 1 for i in index))
        if level > FINE // len(index):
            return self.near(above)
        if cell not in self.narrowed:
            self.narrowed[cell] = (self.near(above) if level else self.prover).within(self.box(cell))
        return self.narrowed[cell]

    def prove(self, leaf: Leaf, bound: float, loose: float = 1) -> Any:
        """About `bound` on |f − network| on the leaf; Refused if nothing up to loose·bound is found."""
        if leaf.cell is None:
            stage, function, start = self.prover.stage, self.prover.function, exact(self.claim.ends[0][leaf.order > 0])
            name = f"the tail leaf beyond the core on side {leaf.order}"
            return self.hold(name, bound, loose, lambda room: tail_error(stage, function, start, leaf.order))
        return self._prove_cell(leaf, leaf.cell, PIECES[min(len(self.claim.ends), len(PIECES)) - 1], bound, loose)

    def _prove_cell(self, leaf: Leaf, cell: Cell, pieces: int, bound: float, loose: float) -> Any:
        (level, index), box, prover = cell, self.box(cell), self.near(cell)
        places = zip(self.claim.variables, self.sides(cell), strict=True)
        where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
        try:
            name = f"the {leaf.kind} leaf {where}"
            return self.hold(name, bound, loose, lambda room: prover.error(leaf.kind, leaf.order, box, room))
        except Refused:
            if pieces < 2 ** len(index):
                raise
        parts = itertools.product(*((2 * i, 2 * i + 1) for i in index))
        return most(self._prove_cell(leaf, (level + 1, part), pieces >> len(index), bound, loose) for part in parts)

    def hold(self, name: str, bound: float, loose: float, prove: Callable[[Any], Any]) -> Any:
        """What is found, if that is at most loose·bound."""
        try:
            found = prove(bound - arb(self.claim.truncation)) + self.claim.truncation
            if found <= loose * bound:  # False for nan
                return found
            reason = f"the bound found here is {float(found):.6g}"
        except (ArithmeticError, ValueError) as error:
            reason = str(error)
        raise Refused(f"{self.claim.title}{name} is not re-proved to {loose * bound:.6g}: {reason}")


class Proof:
    """All that there is to prove of a claim. Every process makes its own, reducing the network once."""

    scope = "at every point of the box"
    at_once = 16
    """Another process is worth while for so many leaves."""

    def __init__(self, claim: Claim, structure: Any, tensors: dict[str, Tensor]) -> None:
        self.claim, self.arithmetic = claim, Arithmetic(claim.dtype)
        self.leaves: Sequence[Any] = self.read_leaves()
        reach = [arb(max(abs(lo), abs(hi))) for lo, hi in claim.ends]
        program = Program(structure, tensors, len(reach))
        if claim.dtype not in (program.dtype, "real"):
            raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {program.dtype}")
        function = self.function()
        if len(function[1]) != program.num_outputs:
            raise Refused(f"the network has {program.num_outputs} output(s), the expression {len(function[1])}")
        reduction = self.reduction(program, reach)
        self.subjects = self.divide(reduction, function)
        require_finite(program, reduction.reach)

    def read_leaves(self) -> Sequence[Any]:
        return self.claim.leaves

    def function(self) -> Function:
        return parse(self.claim.expression, self.claim.variables)

    def reduction(self, program: Program, reach: list[Any]) -> Reduction:
        return Reduction(program, reach)

    def divide(self, reduction: Any, function: Function) -> list[Subject]:
        """What is to be proved."""
        return [Subject(self.claim, self.leaves, self.bounds(), self.prover(reduction.stage(), function))]

    def bounds(self) -> Sequence[float]:
        return [self.claim.bound] * len(self.leaves)

    def prover(self, stage: Stage, function: Function) -> Prover:
        return Prover(stage, [Average(head, stage.inputs) for head in stage.heads], function, self.arithmetic)

    @property
    def jobs(self) -> list[Job]:
        return [(s, n) for s, subject in enumerate(self.subjects) for n in range(len(subject.leaves))]

    def prove(self, job: Job) -> float:
        """The bound that is found on the leaf."""
        subject, n = self.subjects[job[0]], job[1]
        return float(subject.prove(subject.leaves[n], subject.bounds[n]))

    def conclude(self, found: Iterable[float]) -> float:
        """What follows from all jobs."""
        return max(found)
