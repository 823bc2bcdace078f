"""What there is to prove, and its proof leaf by leaf: of the whole network, or of every stage of a deep one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import Average, Box
from attnc_checker.claims import Cell, Claim, Leaf
from attnc_checker.deep.chains import Chain
from attnc_checker.deep.composition import lines
from attnc_checker.expressions import Function, constants, parse
from attnc_checker.files import Refused, Tensor
from attnc_checker.leaves import Prover
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import Program, exact
from attnc_checker.rounding import Arithmetic, most
from attnc_checker.tails import tail_error

PIECES = (16, 16, 64)
"""A leaf that does not pass whole may be cut into so many, in one, two, three variables: what holds on all, holds."""
LOOSE = 1.01
"""Of an L_p norm a leaf may be found so much worse than it is stated to be: what is found is added up."""
FINE = 8
"""In d variables, keys are left out in cells up to the level FINE/d."""
AT_ONCE = 16
"""Leaves are proved so many at a time."""


@dataclass(frozen=True)
class Subject:
    """Leaves that have to prove a stage, or the whole network, to be within `bound` of a function on a box."""

    name: str
    variables: tuple[str, ...]
    ends: tuple[tuple[float, float], ...]
    bound: float
    spent: float  # of the bound, in advance
    leaves: tuple[Leaf, ...]
    prover: Prover
    narrowed: dict[Cell, Prover] = field(default_factory=dict)

    def cell_ends(self, cell: Cell) -> list[tuple[Any, Any]]:
        """Exact rationals, as the ends of the box are float64 numbers."""
        level, index = cell
        whole = [(exact(lo), (exact(hi) - exact(lo)) / 2**level) for lo, hi in self.ends]
        return [(lo + i * width, lo + (i + 1) * width) for (lo, width), i in zip(whole, index, strict=True)]

    def box(self, cell: Cell) -> Box:
        ends = self.cell_ends(cell)
        return Box([arb((lo + hi) / 2) for lo, hi in ends], [arb((hi - lo) / 2) for lo, hi in ends])

    def near(self, cell: Cell) -> Prover:
        """For parts of the cell: on the way to it keys that are far behind are left out, except in the finest cells."""
        if cell[0] > FINE // len(cell[1]):
            return self.near(_above(cell))
        if cell not in self.narrowed:
            wider = self.near(_above(cell)) if cell[0] else self.prover
            self.narrowed[cell] = wider.within(self.box(cell))
        return self.narrowed[cell]

    def prove(self, leaf: Leaf) -> Any:
        """A bound on |f − network| on the leaf, at most the claimed one; Refused if that is not found."""
        if leaf.cell is not None and leaf.row:
            return self._prove_row(leaf, leaf.cell)
        if leaf.cell is not None:
            return self._prove_cell(leaf, leaf.cell, PIECES[min(len(self.ends), len(PIECES)) - 1])
        start = exact(self.ends[0][0 if leaf.order < 0 else 1])
        whole, side = self.prover, leaf.order
        found, reason = _attempt(lambda: tail_error(whole.stage, whole.function, start, side) + self.spent)
        return self._at_most(self.bound, found, reason, leaf, f"beyond the core on side {leaf.order}")

    def _prove_cell(self, leaf: Leaf, cell: Cell, pieces: int) -> Any:
        bound = self.bound if leaf.bound is None else LOOSE * leaf.bound
        box, room = self.box(cell), bound - arb(self.spent)
        found, reason = _attempt(lambda: self.near(cell).error(leaf.kind, leaf.order, box, room) + self.spent)
        if not found <= bound and pieces >= 2 ** len(cell[1]):
            parts = itertools.product(*((2 * i, 2 * i + 1) for i in cell[1]))
            return most(self._prove_cell(leaf, (cell[0] + 1, part), pieces >> len(cell[1])) for part in parts)
        places = zip(self.variables, self.cell_ends(cell), strict=True)
        where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
        return self._at_most(bound, found, reason, leaf, where)

    def _prove_row(self, leaf: Leaf, cell: Cell) -> Any:
        """At a point, which is a box of width 0, the function is what the table says."""
        point, values = leaf.row[: len(self.ends)], leaf.row[len(self.ends) :]
        prover = replace(self.near(cell), function=constants(values))
        box, room = Box([arb(x) for x in point], [arb(0) for _ in point]), self.bound - arb(self.spent)
        found, reason = _attempt(lambda: prover.error("taylor", 1, box, room) + self.spent)
        where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.variables, point, strict=True))
        return self._at_most(self.bound, found, reason, leaf, f"{leaf.order}, {where},")

    def _at_most(self, bound: float, found: Any, reason: str, leaf: Leaf, where: str) -> Any:
        if found <= bound:  # False for nan
            return found
        raise Refused(f"{self.name}the {leaf.kind} leaf {where} is not re-proved to {bound:.6g}: {reason}")

    def power_of_norm(self, leaf: Leaf, p: float) -> Any:
        """Above ∫|f − network|^p over the leaf."""
        sides = (hi - lo for lo, hi in self.cell_ends(leaf.cell or (0, ())))
        found = self.prove(leaf)
        return arb(math.prod(sides, start=fmpq(1))) * found ** arb(p) if found > 0 else arb(0)


def _above(cell: Cell) -> Cell:
    return cell[0] - 1, tuple(i >> 1 for i in cell[1])


def _attempt(prove: Callable[[], Any]) -> tuple[Any, str]:
    """The bound, and what to say of it."""
    try:
        found = prove()
        return found, f"the bound found here is {float(found):.6g}"
    except (ArithmeticError, ValueError) as error:
        return arb("nan"), str(error)


@dataclass(frozen=True)
class Task:
    """The claim and the network as they were read; every process reduces the network for itself, once."""

    claim: Claim
    structure: Any
    tensors: dict[str, Tensor]

    def subjects(self) -> tuple[list[Subject], float | None]:
        """What leaves have to prove; and, of a deep program, the bound that follows."""
        claim = self.claim
        reach = [arb(max(abs(lo), abs(hi))) for lo, hi in claim.ends]
        arithmetic = Arithmetic(claim.dtype)
        program = Program(self.structure, self.tensors, len(reach))
        reduction = Reduction(program, reach, claim.is_staged, [] if claim.is_chain else None)
        if claim.dtype not in (reduction.dtype, "real"):
            raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {reduction.dtype}")
        row = claim.leaves[0].row if claim.leaves else ()
        function = constants(row[len(reach) :]) if row else parse(claim.expression, claim.variables)
        if len(function[1]) != reduction.num_outputs:
            raise Refused(f"the network has {reduction.num_outputs} output(s), the expression {len(function[1])}")

        def prover(stage: Stage, function: Function) -> Prover:
            return Prover(stage, [Average(head) for head in stage.heads], function, arithmetic)

        if not claim.is_staged:
            if claim.is_chain:
                whole: Prover = Chain.of(reduction, function, arithmetic, claim)
            else:
                whole = prover(reduction.stage(), function)
            return [Subject("", claim.variables, claim.ends, claim.bound, claim.truncation, claim.leaves, whole)], None
        found, composed = lines(claim, reduction, arithmetic)
        if not composed <= claim.bound:
            raise Refused(f"the errors of the stages add up to {float(composed):.9g}, the bound is {claim.bound:.9g}")
        return [
            Subject(
                f"stage {line.claim.name}, {line.claim.channel!r:.60}: ",
                ("t",),
                (line.claim.ends,),
                line.claim.bound,
                0.0,
                line.claim.leaves,
                prover(line.stage, line.function),
            )
            for line in found
        ], float(composed)


class Worker:
    """Proves leaves; one for each process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.subjects, self.composed = task.subjects()

    def jobs(self) -> list[tuple[int, tuple[Leaf, ...]]]:
        """Leaves that lie near each other, so that they leave out the same keys."""
        return [
            (number, subject.leaves[start : start + AT_ONCE])
            for number, subject in enumerate(self.subjects)
            for start in range(0, len(subject.leaves), AT_ONCE)
        ]

    def prove(self, number: int, leaves: tuple[Leaf, ...]) -> tuple[int, float]:
        """How many, and above the largest error; of an L_p norm, above the sum of their parts of its power."""
        subject, p = self.subjects[number], self.task.claim.p
        if p is None:
            return len(leaves), float(most(map(subject.prove, leaves)))
        whole = sum((subject.power_of_norm(leaf, p) for leaf in leaves), arb(0)).upper()
        return len(leaves), math.nextafter(float(whole), math.inf)
