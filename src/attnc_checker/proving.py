"""Proofs leaf by leaf: the largest error here; norms, tables and deep programs in norms.py, tables.py and deep/."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flint import arb, fmpq

from attnc_checker.averages import Average, Box
from attnc_checker.cells import Cell, Ends, Leaf
from attnc_checker.claims import ByLeaves, Claim
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
"""Most pieces of a leaf in one, two, three variables, if it does not pass whole. A bound of all pieces is one of the
leaf; attnc's margins count on these numbers."""
FINE = 8
"""In d variables, far keys are left out in cells down to the level FINE/d: finer ones would be too many to store."""

Job = tuple[int, int]
"""The number of a subject, and the number of one of its leaves."""


class Stated(Protocol):
    """The part of a claim that leaves prove: of the whole network, or of one stage of a deep one."""

    @property
    def variables(self) -> tuple[str, ...]: ...
    @property
    def ends(self) -> tuple[Ends, ...]: ...
    @property
    def truncation(self) -> float: ...
    @property
    def title(self) -> str: ...


@dataclass(frozen=True)
class Subject:
    """The whole network or one of its stages, which is claimed to be within a bound of a function on a box."""

    claim: Stated
    leaves: Sequence[Leaf]
    bounds: Sequence[float]  # one for each leaf
    prover: Prover
    narrowed: dict[Cell, Prover] = field(default_factory=dict)

    def sides(self, cell: Cell) -> list[tuple[fmpq, fmpq]]:
        """Exact rationals, as the ends of the box are float64 numbers."""
        level, index = cell
        whole = [(exact(lo), (exact(hi) - exact(lo)) / 2**level) for lo, hi in self.claim.ends]
        return [(lo + i * width, lo + (i + 1) * width) for (lo, width), i in zip(whole, index, strict=True)]

    def box(self, cell: Cell) -> Box:
        sides = self.sides(cell)
        return Box([arb((lo + hi) / 2) for lo, hi in sides], [arb((hi - lo) / 2) for lo, hi in sides])

    def near(self, cell: Cell) -> Prover:
        """The prover for parts of the cell: on the way down to it, keys that are far behind are left out."""
        level, index = cell
        above = (level - 1, tuple(i >> 1 for i in index))
        if level > FINE // len(index):
            return self.near(above)
        if cell not in self.narrowed:
            self.narrowed[cell] = (self.near(above) if level else self.prover).within(self.box(cell))
        return self.narrowed[cell]

    def prove(self, leaf: Leaf, bound: float, loose: float = 1) -> arb:
        """A bound of |f − network| on the leaf; Refused if it is above loose·bound."""
        if leaf.cell is None:
            stage, function, start = self.prover.stage, self.prover.function, exact(self.claim.ends[0][leaf.order > 0])
            name = f"the tail leaf beyond the core on side {leaf.order}"
            return self.hold(name, bound, loose, lambda room: tail_error(stage, function, start, leaf.order))
        return self._prove_cell(leaf, leaf.cell, PIECES[min(len(self.claim.ends), len(PIECES)) - 1], bound, loose)

    def _prove_cell(self, leaf: Leaf, cell: Cell, pieces: int, bound: float, loose: float) -> arb:
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

    def hold(self, name: str, bound: float, loose: float, prove: Callable[[arb], arb]) -> arb:
        """The bound that `prove` finds, if it is at most loose·bound."""
        try:
            found = prove(bound - arb(self.claim.truncation)) + self.claim.truncation
            if found <= loose * bound:  # False for nan
                return found
            reason = f"the bound found here is {float(found):.6g}"
        except (ArithmeticError, ValueError) as error:
            reason = str(error)
        raise Refused(f"{self.claim.title}{name} is not re-proved to {loose * bound:.6g}: {reason}")


class Proof(ABC):
    """Everything that is to be proved of a claim. Every process makes its own, reducing the network once."""

    scope = "at every point of the box"
    at_once = 16
    """The number of leaves for which one more process is worth its start."""
    subjects: Sequence[Subject]

    @property
    def jobs(self) -> list[Job]:
        return [(s, n) for s, subject in enumerate(self.subjects) for n in range(len(subject.leaves))]

    def prove(self, job: Job) -> float:
        """The bound that is found on the leaf."""
        subject, n = self.subjects[job[0]], job[1]
        return float(subject.prove(subject.leaves[n], subject.bounds[n]))

    @abstractmethod
    def conclude(self, found: Iterable[float]) -> float:
        """The bound that follows from those of all jobs."""


class LeavesProof(Proof):
    """The largest error of a one-stage program: every leaf is proved to the bound of the whole."""

    def __init__(self, claim: Claim, evidence: ByLeaves, structure: object, tensors: dict[str, Tensor]) -> None:
        function = parse(claim.expression, claim.variables)
        program = stored_program(claim, structure, tensors, len(function.outputs))
        reduction = Reduction(program, reach_of(claim))
        prover = prover_of(reduction.stage(), function, Arithmetic(claim.dtype))
        self.subjects = [Subject(claim, evidence.leaves, [claim.bound] * len(evidence.leaves), prover)]
        require_finite(program, reduction.reach)

    def conclude(self, found: Iterable[float]) -> float:
        return max(found)


def stored_program(claim: Claim, structure: object, tensors: dict[str, Tensor], num_outputs: int) -> Program:
    """The program, if its dtype and the number of its outputs are those of the claim."""
    program = Program(structure, tensors, len(claim.ends))
    if claim.dtype not in (program.dtype, "real"):
        raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {program.dtype}")
    if num_outputs != program.num_outputs:
        raise Refused(f"the network has {program.num_outputs} output(s), the expression {num_outputs}")
    return program


def reach_of(claim: Claim) -> list[arb]:
    """The largest absolute value of every variable."""
    return [arb(max(abs(lo), abs(hi))) for lo, hi in claim.ends]


def prover_of(stage: Stage, function: Function, arithmetic: Arithmetic) -> Prover:
    return Prover(stage, [Average(head, stage.inputs) for head in stage.heads], function, arithmetic)
