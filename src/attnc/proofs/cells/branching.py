"""Branch and bound over dyadic cells: a box is proved cell by cell, and cells with a large bound are halved.

Every `Kind` bounds |f − network| over many cells at once. A cell whose best bound is at most the goal becomes a leaf.
Every other cell is cut into 2^d. No bound can be below the largest error that was seen, so the goal is a little above
it. The proved bound is the largest bound of a leaf.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float, Int
from attnc.numerics.jet_balls import TINY
from attnc.numerics.limits import OutOfTime, check_time, counted_seconds, is_time_over, spend
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import TINIEST, up
from attnc.proofs.cells.dyadic import Region, cell_boxes, children
from attnc.proofs.cells.kind import Bounds, Goal, Kind, meets
from attnc.targets.box import Box

MAX_LEVEL = 48  # beyond it a cell is a few units in the last place of its ends
FIRST_BATCH = 512
"""Number of cells in the first batch. The time of a cell is counted only after it."""
LARGEST_BATCH = 4096
"""Largest number of cells that are examined at a time. Measured: with 512 proofs take 10 % longer, with 32,768 no less
time."""
PATIENCE = 0.25  # counted seconds of a batch: the time may be over by about this much
CELL_SECONDS = 5e-6  # counted for a cell, apart from its keys and its function
LOOKED_AT_ONCE, MOST_AHEAD = 64, 3
"""While few cells are left, up to MOST_AHEAD levels below them are examined in one call, if these have at most
LOOKED_AT_ONCE cells: up to this number a call takes nearly the same time, whatever the number of cells is."""
HOPELESS = 2048
"""After this number of cells without a finite bound the search ends: numbers overflow or underflow. Measured: every
case of the corpus has a finite bound within 256 cells."""
PROVING = "proving"
"""The name of a proof in progress reports and in the message that the time ran out."""


MOST_PROOF_CELLS = 100_000
"""Largest number of cells of a proof by default. All of them may become leaves: some 10 MB of JSON, and about a minute
of the checker. The largest proof of the corpus has 4,250 leaves."""


@dataclass(frozen=True)
class Budget:
    """The number of cells that a search may take, and a function to which it reports its progress.

    Its time is that of the block around it (`numerics.limits`). If there is a `region`, only its cells are covered.
    """

    cells: int = MOST_PROOF_CELLS
    progress: Callable[[str, float], None] | None = None
    region: Region | None = None

    def report(self, part: float) -> None:
        if self.progress is not None:
            self.progress(PROVING, min(1.0, part))


@dataclass(frozen=True)
class Leaf:
    """The cell `index` of a level, the kind that proved it, and the order of that kind, if it has one."""

    kind: str
    order: int | None
    level: int
    index: tuple[int, ...]

    def as_json(self) -> list[Any]:
        """Return [kind, level, i_1, …, i_d], with the order after the kind if there is one."""
        return [self.kind, *([] if self.order is None else [self.order]), self.level, *self.index]

    @classmethod
    def from_json(cls, entry: Any, d: int) -> Leaf:
        """Read a leaf over d variables. Raise TypeError or ValueError if the entry is not one."""
        if not isinstance(entry, list) or len(entry) not in (d + 2, d + 3) or not isinstance(entry[0], str):
            raise TypeError(f"expected a leaf over {d} variables, found {entry!r:.80}")
        kind, *numbers = entry
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise TypeError(f"expected whole numbers in a leaf, found {entry!r:.80}")
        *order, level = numbers[:-d]
        if not 0 <= level <= MAX_LEVEL or not all(0 <= i < 2**level for i in numbers[-d:]):
            raise ValueError(f"expected a level up to {MAX_LEVEL} and a cell of it in a leaf, found {entry!r:.80}")
        return cls(kind, order[0] if order else None, level, tuple(numbers[-d:]))


@dataclass(frozen=True, eq=False)
class CellBounds:
    """Cells with the best bound known for each."""

    level: Int[np.ndarray, " cells"]
    index: Int[np.ndarray, "cells d"]
    upper: Float[np.ndarray, "cells outputs"]
    kind: Int[np.ndarray, " cells"]
    floor: Float[np.ndarray, " cells"]
    terms: dict[str, Float[np.ndarray, "cells outputs"]]

    @classmethod
    def unknown(cls, level: int | np.ndarray, index: Int[np.ndarray, "cells d"], outputs: int) -> CellBounds:
        n = len(index)
        levels, kinds = np.full(n, level), np.zeros(n, dtype=np.int64)
        return cls(levels, index, np.full((n, outputs), np.inf), kinds, np.zeros(n), {})

    def __len__(self) -> int:
        return len(self.index)

    def improve(self, rows: Int[np.ndarray, " some"], number: int, kind: Kind, found: Bounds) -> None:
        """Keep the bounds found on these rows where they are better."""
        better = found.upper.max(axis=1) < self.upper[rows].max(axis=1)
        rows = rows[better]
        self.upper[rows], self.kind[rows], self.floor[rows] = found.upper[better], number, found.floors[better]
        for term in self.terms.values():
            term[rows] = 0.0
        for name, term in (found.terms or {kind.name: found.upper}).items():
            self.terms.setdefault(name, np.zeros(self.upper.shape))[rows] = term[better]

    @classmethod
    def _columns(cls) -> list[str]:
        """Return the names of the fields that have one entry per cell, those of subclasses included."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "terms"]

    def where(self, rows: np.ndarray | slice) -> Self:
        terms = {name: term[rows] for name, term in self.terms.items()}
        return dataclasses.replace(self, terms=terms, **{name: getattr(self, name)[rows] for name in self._columns()})

    def cut(self, depth: Int[np.ndarray, " cells"]) -> Self:
        """Replace every cell of a line by its 2^depth equal parts, each with the bound of the cell."""
        owner = np.repeat(np.arange(len(self)), 1 << depth)
        part = np.arange(len(owner)) - np.searchsorted(owner, owner)
        index = (self.index[owner] << depth[owner, None]) + part[:, None]
        return dataclasses.replace(self.where(owner), level=(self.level + depth)[owner], index=index)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        names = dict.fromkeys(name for part in parts for name in part.terms)
        terms = {
            name: np.concatenate([part.terms.get(name, np.zeros(part.upper.shape)) for part in parts]) for name in names
        }
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in cls._columns()
        }
        return dataclasses.replace(parts[0], terms=terms, **columns)


@dataclass(frozen=True, eq=False)
class Covering:
    """Cells that cover a box, each with a bound of |f − network| by one of the kinds.

    The largest of these bounds is a bound of the largest error. If `norm` is given, it is a bound of the L_p norm.
    """

    box: Box
    kinds: Sequence[Kind]
    cells: CellBounds
    complete: bool  # False: time or cells ran out before the goal was met
    seen: float = 0.0
    norm: float | None = None
    shares: Float[np.ndarray, " cells"] | None = None  # the share of each cell in the integral of a norm

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        rows = zip(*(column.tolist() for column in (self.cells.kind, self.cells.level, self.cells.index)), strict=True)
        return tuple(Leaf(self.kinds[k].name, self.kinds[k].order, level, tuple(index)) for k, level, index in rows)

    @property
    def bound(self) -> float:
        return float(self.cells.upper.max()) if self.norm is None else self.norm

    @property
    def ledger(self) -> dict[str, float]:
        """The terms of the bound: those of the worst leaf, or for a norm the weighted sums over all leaves.

        On every cell b^p = b^{p−1}·Σ terms, so each term has its share of the integral.
        """
        terms = self.cells.terms
        if self.norm is None or self.shares is None:
            values = {name: float(term.flat[np.argmax(self.cells.upper)]) for name, term in terms.items()}
            return {name: value for name, value in values.items() if value > 0}
        rows, worst = np.arange(len(self.cells.upper)), np.argmax(self.cells.upper, axis=1)
        largest = np.maximum(self.cells.upper.max(axis=1), TINIEST)
        with quiet():
            parts = {
                name: (self.shares * term[rows, worst] / largest).sum() * self.norm for name, term in terms.items()
            }
        return {name: float(up(part, 16)) for name, part in parts.items() if part > 0}


def branch_and_bound(
    kinds: Sequence[Kind],
    box: Box,
    *,
    observed: float = 0.0,
    tolerance: float = 0.03,
    floor: float = 0.0,
    goal: float = 0.0,
    start_level: int = 0,
    budget: Budget | None = None,
) -> Covering:
    """Prove a bound of |f − network| over the box, at most (1 + tolerance) times the largest error, plus `floor`.

    `observed` is an error that was seen. Larger ones may be seen on the way. No bound below `goal` is sought. When
    time or cells run out, the covering found so far is returned with complete=False. Its bound holds nevertheless.
    OutOfTime is raised if the time on the wall is over before the first cells were examined.
    """
    budget = budget or Budget()
    search = _Branching(kinds, box, observed, 1 + tolerance, floor, goal)
    start_level = max(start_level, 0 if budget.region is None else budget.region.level)
    pending, first = deque[CellBounds](), (budget.region or Region(0, 0, 1)).cells(box.d, start_level)
    while len(first):
        size = search.batch
        pending += search.examine(start_level, first[:size])
        first = first[size:]
        if len(first):
            check_time(PROVING)
    while pending:
        parents, size = pending.popleft(), search.batch
        while pending and pending[0].level[0] == parents.level[0] and len(parents) << box.d < size:
            parents = CellBounds.joined([parents, pending.popleft()])
        fit = max(1, size >> box.d)
        if len(parents) > fit:
            pending.appendleft(parents.where(slice(fit, None)))
            parents = parents.where(slice(fit))
        level, ahead = int(parents.level[0]), 1
        while ahead < MOST_AHEAD and len(parents) * num_below(box.d, ahead + 1) <= LOOKED_AT_ONCE:
            ahead += 1
        is_spent = search.examined + (len(parents) << box.d) > budget.cells or is_time_over()
        is_spent |= search.examined > HOPELESS and not search.is_anything_bounded
        if is_spent or level >= MAX_LEVEL:
            return search.proof([parents, *pending], complete=False)
        try:
            found = search.examine(level + 1, children(parents.index), min(ahead, MAX_LEVEL - level))
        except OutOfTime:
            return search.proof([parents, *pending], complete=False)
        pending += found
        budget.report(search.proved)
    return search.proof([], complete=True)


def num_below(d: int, depth: int) -> int:
    """Return the number of cells in a cell, on this number of levels below it."""
    return sum(1 << d * down for down in range(1, depth + 1))


def best_of(
    kinds: Sequence[Kind],
    box: Box,
    level: int | Int[np.ndarray, " cells"],
    index: Int[np.ndarray, "cells d"],
    goal: Goal,
    seen: float = 0.0,
) -> tuple[CellBounds, float]:
    """Return the best bound on every cell, and the largest error seen. Kinds are tried until one meets the goal."""
    centres, radii = cell_boxes(box, level, index)
    known: CellBounds | None = None
    for number, kind in enumerate(kinds):
        largest = np.full(len(index), np.inf) if known is None else known.upper.max(axis=1)
        rows = np.flatnonzero(np.isinf(largest) | (largest > goal.value))
        if len(rows) and known is not None:
            rows = rows[kind.least(centres[rows]) < largest[rows]]
        if not len(rows):
            continue
        spend(CELL_SECONDS * len(rows))
        found = kind.bounds(centres[rows], radii[rows], goal)
        seen = max(seen, found.seen)
        known = known or CellBounds.unknown(level, index, found.upper.shape[1])
        known.improve(rows, number, kind, found)
    if known is None:
        raise InputError("a proof by cells needs a kind of bound for them; none was given.")
    return known, seen


def next_batch(size: int, before: float) -> int:
    """Return the size of the next batch of cells: half if the last one took long since `before`, else twice as much."""
    is_slow = counted_seconds() - before > PATIENCE
    return max(1, size // 2) if is_slow else min(LARGEST_BATCH, 2 * size)


@dataclass(eq=False)
class _Branching:
    """The state of a search: the leaves so far, and the goal."""

    kinds: Sequence[Kind]
    box: Box
    seen: float
    growth: float
    floor: float
    wanted: float
    leaves: list[CellBounds] = field(default_factory=list)
    examined: int = 0
    batch: int = FIRST_BATCH
    proved: float = 0.0
    bound: float = 0.0
    is_anything_bounded: bool = False

    @property
    def goal(self) -> float:
        """The goal: a little above the largest error seen, and at least the largest bound of a leaf so far."""
        return max(self.wanted, self.growth * self.seen + self.floor, self.bound, TINY)

    def examine(self, level: int, index: Int[np.ndarray, "cells d"], depth: int = 1) -> list[CellBounds]:
        """Make leaves of the cells that meet the goal, then of the parts of the others, on `depth` levels in all.

        Return the cells of the last level that are still open, if there are any. Bounds on all levels are found in one
        call, whether they will be needed or not.
        """
        below = [index]
        for _ in range(depth - 1):
            below.append(children(below[-1]))
        levels = np.repeat(np.arange(level, level + depth), [len(cells) for cells in below])
        before = counted_seconds()
        goal, cells = Goal(self.goal, self.growth), np.concatenate(below)
        known, self.seen = best_of(self.kinds, self.box, levels, cells, goal, self.seen)
        self.batch = next_batch(self.batch, before)
        self.is_anything_bounded |= bool(np.isfinite(known.upper).any())
        rows, start, parts = np.arange(len(index)), 0, np.arange(1 << self.box.d)
        for deeper, all_of_level in enumerate(below):
            found = known.where(start + rows)
            self.examined += len(found)
            done = meets(found.upper, found.floor, self.goal)
            self.bound = max(self.bound, float(found.upper[done].max(initial=0.0)))
            done = found.upper.max(axis=1) <= self.bound
            self.leaves.append(found.where(done))
            self.proved += float(done.sum()) * 0.5 ** ((level + deeper) * self.box.d)
            if done.all():
                return []
            start += len(all_of_level)
            rows, unfinished = (rows[~done, None] * len(parts) + parts).ravel(), found.where(~done)
        return [unfinished]

    def proof(self, unfinished: Sequence[CellBounds], *, complete: bool) -> Covering:
        return Covering(self.box, self.kinds, CellBounds.joined([*self.leaves, *unfinished]), complete, self.seen)
