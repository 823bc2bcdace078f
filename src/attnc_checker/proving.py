"""Proofs leaf by leaf: the largest error here; norms, tables and deep programs in norms.py, tables.py and deep/."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flint import arb, fmpq

from attnc_checker.cells import MAX_ORDERS, SELECTION, TAYLOR, Cell, Leaf
from attnc_checker.claims import Claim, Rows
from attnc_checker.deep.claims import StageClaim
from attnc_checker.files import Refused, require
from attnc_checker.jets import Poly, add, halves, largest
from attnc_checker.leaves import Prover
from attnc_checker.program import exact
from attnc_checker.ranges import Box
from attnc_checker.rounding import Arithmetic
from attnc_checker.tails import tail_error
from attnc_checker.vectors import most

PIECES = (16, 16, 64)
"""Largest numbers of pieces of a leaf in one, two, three variables, if it does not pass as a whole. A bound on all
pieces is a bound on the leaf. attnc's margins rely on these numbers."""
FINE = 8
"""In d variables, far keys are left out in cells down to the level FINE/d. Finer cells would be too many to store."""

LEVELS_UP = 2
"""In one variable, leaves share models on the cell this many levels above them. Measured on 13 compositions: with 3 the
check takes 1.02 times as long. In more variables models on larger cells were seldom sharp enough."""
MOST_FAILURES, MOST_LARGER = 3, 16
"""The number of failures in a row after which models are no longer shared, and the number of models that are kept."""

AT_ONCE = 16
"""The number of leaves that a process gets at a time, and the number per process. In the corpus a leaf takes 1 to 40
ms, so that 16 take 16 to 640 ms."""

Job = tuple[int, int]
"""The index of a subject, and the index of one of its leaves."""


def place(points: Sequence[float], t: fmpq) -> fmpq:
    """Map t ∈ [0, 1] to the side of a box, linearly between each two of its n + 1 points, the k-th of which is at k/n.

    The map ascends, from end to end. So cells of [0, 1] that cover it without overlap do the same on the side.
    """
    n = len(points) - 1
    k = min(int((n * t).floor()), n - 1)
    lo, hi = exact(points[k]), exact(points[k + 1])
    return lo + (n * t - k) * (hi - lo)


@dataclass(frozen=True)
class Subject:
    """The whole network or one of its stages, with the claim that it is within a bound of a function on a box."""

    claim: Claim | StageClaim
    leaves: Sequence[Leaf]
    bounds: Sequence[float]  # one for each leaf
    prover: Prover
    points: Rows | None = None  # for each variable, the ends of the box and the knots between them; None: no knots
    middles: Sequence[float] = ()  # of leaves of a stage; the network less f is within bound − |middle| of it
    narrowed: dict[Cell, Prover] = field(default_factory=dict)
    larger: Larger = field(default_factory=lambda: Larger())

    def sides(self, cell: Cell) -> list[tuple[fmpq, fmpq]]:
        """Return the sides of a cell as exact rationals. The ends of the box and the knots are float64 numbers."""
        (level, index), points = cell, self.points or self.claim.ends
        sides = zip(points, index, strict=True)
        return [(place(side, fmpq(i, 2**level)), place(side, fmpq(i + 1, 2**level))) for side, i in sides]

    def box(self, cell: Cell) -> Box:
        return Box.between(self.sides(cell))

    def near(self, cell: Cell) -> Prover:
        """Return the prover for parts of the cell. Keys that are far behind on it or on a larger cell are left out."""
        level, index = cell
        if not self.prover.has_many_keys:
            return self.prover
        above = (level - 1, tuple(i >> 1 for i in index))
        if level > FINE // len(index):
            return self.near(above)
        if cell not in self.narrowed:
            self.narrowed[cell] = (self.near(above) if level else self.prover).within(self.box(cell))
        return self.narrowed[cell]

    def allows(self, n: int, found: float) -> bool:
        """Return whether this bound on leaf n is within the one that the claim needs."""
        return 0 <= found <= self.bounds[n]

    def found(self, n: int) -> float:
        """Return the bound that is found on leaf n."""
        middle = self.middles[n] if self.middles else 0.0
        if middle == 0:
            return float(self.prove(self.leaves[n], self.bounds[n]))
        radius = float((arb(self.bounds[n]) - abs(arb(middle))).lower())
        return float(self.prove(self.leaves[n], math.nextafter(radius, 0), middle=middle) + abs(arb(middle)))

    def prove(self, leaf: Leaf, bound: float, loose: float = 1, middle: float = 0) -> arb:
        """Return a bound on |network − f − middle| on the leaf. Raise Refused if it is above loose·bound."""
        if leaf.cell is None:
            name = f"the tail leaf beyond the core on side {leaf.order}"
            return self.hold(lambda: name, bound, loose, lambda room: self._beyond(leaf.order))
        if leaf.kind == TAYLOR and (found := self.larger.bound(self, leaf, leaf.cell, bound, middle)) is not None:
            return found
        pieces, prover = PIECES[min(len(self.claim.ends), len(PIECES)) - 1], self.near(leaf.cell)
        prover = replace(prover, middle=arb(middle)) if middle else prover
        return self._prove_cell(leaf, leaf.cell, prover, pieces, bound, loose)

    def _prove_cell(self, leaf: Leaf, cell: Cell, prover: Prover, pieces: int, bound: float, loose: float) -> arb:
        (level, index), sides = cell, self.sides(cell)
        is_cut = pieces >= 2 ** len(index)  # before more than the bound is accepted
        box, allowed, refusals = Box.between(sides), 1 if is_cut else loose, []

        def name() -> str:
            places = zip(self.claim.variables, sides, strict=True)
            where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
            return f"the {leaf.kind} leaf {where}"

        for kind in dict.fromkeys((leaf.kind, SELECTION)):  # selection may do where a Taylor model has a steep head
            try:
                return self.hold(name, bound, allowed, functools.partial(prover.error, kind, leaf.order, box))
            except Refused as refusal:
                refusals.append(refusal)
        if not is_cut:
            raise refusals[0]
        parts = [(level + 1, part) for part in itertools.product(*((2 * i, 2 * i + 1) for i in index))]
        prover, pieces = prover.within(box), pieces >> len(index)  # without the keys that are far behind on the leaf
        return most(self._prove_cell(leaf, part, prover, pieces, bound, loose) for part in parts)

    def _beyond(self, side: int) -> arb:
        """Return a bound beyond the core, without the rounding that is relative to |x|."""
        prover, stated = self.prover, self.claim.beyond
        arithmetic, relative = (prover.arithmetic, stated.relative) if stated else (Arithmetic("real"), 0.0)
        start = exact(self.claim.ends[0][side > 0])
        constant, slope = tail_error(prover.stage, prover.function, start, side, arithmetic)
        require(slope <= relative, f"rounding is {float(slope):.6g}·|x|, not {relative:.6g}·|x|", ArithmeticError)
        return constant

    def hold(self, name: Callable[[], str], bound: float, loose: float, prove: Callable[[arb], arb]) -> arb:
        """Return the bound that `prove` finds, or raise Refused if it is above loose·bound."""
        try:
            found = prove(bound - arb(self.claim.truncation)) + self.claim.truncation
            if found <= loose * bound:  # False for nan
                return found
            reason = f"the bound found here is {float(found):.6g}"
        except (ArithmeticError, ValueError) as error:
            reason = str(error)
        raise Refused(f"{self.claim.title}{name()} is not re-proved to {loose * bound:.6g}: {reason}")


class Larger:
    """Models on larger cells of one variable, which several leaves share. A bound on a part is a bound on the leaf."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.failures, self.known = 0, dict[Cell, list[tuple[Poly, arb]] | None]()

    def bound(self, subject: Subject, leaf: Leaf, cell: Cell, bound: float, middle: float) -> arb | None:
        """Return a bound on |network − f − middle| on the leaf, or None if there is none below the stated one."""
        level, index = cell
        above, truncation = (level - LEVELS_UP, tuple(i >> LEVELS_UP for i in index)), arb(subject.claim.truncation)
        if not subject.prover.heads:  # provers of partitions and chains have bounds of their own
            return None
        if len(index) > 1 or level < LEVELS_UP or self.failures > MOST_FAILURES or not _is_even(subject, cell, above):
            return None
        room = bound - truncation
        if above not in self.known:
            if len(self.known) >= MOST_LARGER:
                del self.known[next(iter(self.known))]
            self.known[above] = None
            order = min(leaf.order + 2 * LEVELS_UP, MAX_ORDERS[0])
            with contextlib.suppress(ArithmeticError, ValueError, Refused):
                self.known[above] = subject.near(above).differences(order, subject.box(above), room)
        models, errors = self.known[above], list[arb]()
        if models is None:
            return None
        for p, error in models:
            for n in reversed(range(LEVELS_UP)):
                p = halves(p, 0, 1)[index[0] >> n & 1]
            p = add(p, {0: arb(middle)}) if middle else p
            errors.append(largest(p, room - error, 1) + error)
        found = most(errors) + truncation
        if found <= bound:
            self.failures = 0
            return found
        self.known[above] = None
        self.failures += 1
        return None


def _is_even(subject: Subject, cell: Cell, above: Cell) -> bool:
    """Whether the cell is one of the parts of equal width of the cell above it. With knots, it may be another part."""
    ((lo, hi),), n = subject.sides(above), cell[1][0] - (above[1][0] << LEVELS_UP)
    width = (hi - lo) / 2**LEVELS_UP
    return subject.sides(cell) == [(lo + n * width, lo + (n + 1) * width)]


@dataclass(frozen=True)
class Proof:
    """Everything that has to be proved for a claim. Every process makes its own and reduces the network once."""

    subjects: Sequence[Subject]
    conclude: Callable[[list[float]], float] = max
    """Computes the bound that follows from the bounds of all jobs."""
    scope: str = "at every point of the box"
    at_once: int = AT_ONCE
    """The number of leaves per process."""
    num_leaves: int | None = None
    """The number of leaves, if a job proves several of them."""

    @property
    def jobs(self) -> list[Job]:
        return [(s, n) for s, subject in enumerate(self.subjects) for n in range(len(subject.bounds))]

    def prove(self, job: Job) -> float:
        return self.subjects[job[0]].found(job[1])

    def prove_block(self, jobs: Sequence[Job]) -> list[float]:
        """Prove leaves that follow each other. The bounds do not depend on the leaves that were proved before."""
        for subject in self.subjects:
            subject.larger.forget()
        return [*map(self.prove, jobs)]
