"""What there is to prove, and its proof leaf by leaf: of the whole network, or of every stage of a deep one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import Average, Box
from attnc_checker.cells import Cell, Leaf
from attnc_checker.claims import Claim, StageClaim
from attnc_checker.deep.chains import Chain, Links
from attnc_checker.deep.composition import lines
from attnc_checker.expressions import Function, constants, parse
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
LOOSE = 1.01
"""Of an L_p norm a leaf may be found so much worse than it is stated to be: what is found is added up."""
FINE = 8
"""In d variables, keys are left out in cells up to the level FINE/d."""

Job = tuple[int, Leaf]
"""The number of a subject, and a leaf of it."""


@dataclass(frozen=True)
class Subject:
    """The whole network or one of its stages, which is claimed to be within a bound of a function on a box."""

    claim: Claim | StageClaim
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

    def prove(self, leaf: Leaf) -> Any:
        """A bound on |f − network| on the leaf, at most the claimed one; Refused if that is not found."""
        if leaf.cell is None:
            stage, function, start = self.prover.stage, self.prover.function, exact(self.claim.ends[0][leaf.order > 0])
            where = f"beyond the core on side {leaf.order}"
            return self._hold(leaf, where, lambda room: tail_error(stage, function, start, leaf.order))
        if not leaf.row:
            return self._prove_cell(leaf, leaf.cell, PIECES[min(len(self.claim.ends), len(PIECES)) - 1])
        point, values = leaf.row[: len(self.claim.ends)], leaf.row[len(self.claim.ends) :]
        box = Box([arb(x) for x in point], [arb(0) for _ in point])  # where the function is what the table says
        prover = replace(self.near(leaf.cell), function=constants(values))
        where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.claim.variables, point, strict=True))
        return self._hold(leaf, f"{leaf.order}, {where},", lambda room: prover.error("taylor", 1, box, room))

    def _prove_cell(self, leaf: Leaf, cell: Cell, pieces: int) -> Any:
        (level, index), box, prover = cell, self.box(cell), self.near(cell)
        places = zip(self.claim.variables, self.sides(cell), strict=True)
        where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
        try:
            return self._hold(leaf, where, lambda room: prover.error(leaf.kind, leaf.order, box, room))
        except Refused:
            if pieces < 2 ** len(index):
                raise
        parts = itertools.product(*((2 * i, 2 * i + 1) for i in index))
        return most(self._prove_cell(leaf, (level + 1, part), pieces >> len(index)) for part in parts)

    def _hold(self, leaf: Leaf, where: str, prove: Callable[[Any], Any]) -> Any:
        wanted = self.claim.bound if leaf.bound is None else leaf.bound
        bound = wanted if leaf.bound is None else LOOSE * wanted
        try:
            found = prove(wanted - arb(self.claim.truncation)) + self.claim.truncation
            if found <= bound:  # False for nan
                return found
            reason = f"the bound found here is {float(found):.6g}"
        except (ArithmeticError, ValueError) as error:
            reason = str(error)
        raise Refused(f"{self.claim.title}the {leaf.kind} leaf {where} is not re-proved to {bound:.6g}: {reason}")

    def power_of_norm(self, leaf: Leaf, p: float) -> Any:
        """Above ∫|f − network|^p over the leaf."""
        sides = (hi - lo for lo, hi in self.sides(leaf.cell or (0, ())))
        found = self.prove(leaf).upper()
        return arb(math.prod(sides, start=fmpq(1))) * found ** arb(p) if found > 0 else arb(0)


class Proof:
    """All that there is to prove of a claim. Every process makes its own, reducing the network once."""

    def __init__(self, claim: Claim, structure: Any, tensors: dict[str, Tensor]) -> None:
        self.claim, self.composed = claim, arb(0)
        reach = [arb(max(abs(lo), abs(hi))) for lo, hi in claim.ends]
        arithmetic, program = Arithmetic(claim.dtype), Program(structure, tensors, len(reach))
        reduction = Links(program, reach) if claim.is_chain else Reduction(program, reach, claim.is_staged)
        if claim.dtype not in (program.dtype, "real"):
            raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {program.dtype}")
        row = claim.leaves[0].row if claim.leaves else ()
        function = constants(row[len(reach) :]) if row else parse(claim.expression, claim.variables)
        if len(function[1]) != program.num_outputs:
            raise Refused(f"the network has {program.num_outputs} output(s), the expression {len(function[1])}")

        def prover(stage: Stage, function: Function) -> Prover:
            return Prover(stage, [Average(head, stage.inputs) for head in stage.heads], function, arithmetic)

        if claim.is_staged:
            found, self.composed = lines(claim, reduction, arithmetic)
            self.subjects = [Subject(line.claim, prover(line.stage, line.function)) for line in found]
        elif isinstance(reduction, Links):
            self.subjects = [Subject(claim, Chain.of(reduction, function, arithmetic, claim))]
        else:
            self.subjects = [Subject(claim, prover(reduction.stage(), function))]
        require_finite(program, reduction.reach)

    @property
    def jobs(self) -> list[Job]:
        return [(number, leaf) for number, subject in enumerate(self.subjects) for leaf in subject.claim.leaves]

    def prove(self, job: Job) -> float:
        """The bound that is found on the leaf; of an L_p norm, above the leaf's part of the norm's power."""
        (number, leaf), p = job, self.claim.p
        if p is None:
            return float(self.subjects[number].prove(leaf))
        return math.nextafter(float(self.subjects[number].power_of_norm(leaf, p).upper()), math.inf)

    def conclude(self, found: Iterable[float]) -> float:
        """What follows from all jobs: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p}; of a deep program it is known."""
        if self.claim.is_staged:
            return float(self.composed)
        if self.claim.p is None:
            return max(found)
        whole = sum(map(arb, found), arb(0))
        norm = whole ** (1 / arb(self.claim.p))
        if not norm <= self.claim.bound:
            raise Refused(f"the leaves add up to the norm {float(norm):.9g}, the bound is {self.claim.bound:.9g}")
        return float(norm)
