"""Branch and bound over dyadic cells: a box is proved cell by cell, and what is not proved well is halved.

Every method (`Kind`) bounds |f − network| over many cells at once. A cell whose best bound is at most the goal becomes
a leaf, the others are cut into 2^d. The goal is a little above the largest error that was seen, which no bound can
beat. The bound that is proved is the largest of the leaves.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.numerics.jet_balls import TINY
from attnc.proofs.cells.dyadic import cell_boxes, cell_ends, cells, children
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_LEVEL = 48  # beyond it a cell is some units in the last place of its ends
_FIRST_CELLS = 8  # at most so many cells to begin with
_CELLS = 4096  # examined at a time, unless they take long
_HOPELESS = 2048  # cells without a finite bound, after which there will be none: numbers overflow, or underflow
_PATIENCE = 1 / 30  # of the time budget, between two looks at the clock


@dataclass(frozen=True, eq=False)
class Bounds:
    """What a method proved on cells.

    `terms`, if given, add up to `upper`. `seen` is an error that is attained in one of the cells, up to rounding (0 if
    none is known), `floor` the part of `upper` that no halving removes.
    """

    upper: Float[np.ndarray, "cells outputs"]
    terms: Mapping[str, Float[np.ndarray, "cells outputs"]] = field(default_factory=dict)
    seen: float = 0.0
    floor: Float[np.ndarray, "cells outputs"] | float = 0.0

    @property
    def floors(self) -> Float[np.ndarray, " cells"]:
        return np.asarray(np.broadcast_to(self.floor, self.upper.shape).max(axis=1))

    def meet(self, goal: float) -> Bool[np.ndarray, " cells"]:
        """Which cells need not be halved."""
        return meets(self.upper, self.floors, goal)


def meets(upper: np.ndarray, floors: np.ndarray, goal: float) -> Bool[np.ndarray, " cells"]:
    """Whether a bound is finite and at most the goal, but for what no halving removes and a quarter of it."""
    largest = upper.max(axis=1)
    with np.errstate(over="ignore"):
        return np.asarray((largest <= goal + 1.25 * np.nan_to_num(floors)) & np.isfinite(largest))


@dataclass(frozen=True)
class Kind:
    """A method to bound the error on boxes {c + rτ}. A fallback is tried only where no other gives a finite bound."""

    name: str
    order: int
    bounds: Callable[[Float[np.ndarray, "cells d"], Float[np.ndarray, "cells d"], Goal], Bounds]
    is_fallback: bool = False


@dataclass(frozen=True)
class Leaf:
    """The cell `index` of a level, and the method that proved it."""

    kind: str
    order: int
    level: int
    index: tuple[int, ...]

    def as_json(self) -> list[Any]:
        """[kind, order, level, i_1, …, i_d] for Taylor leaves, [kind, level, i_1, …, i_d] for others."""
        return [self.kind, *([self.order] if self.kind == "taylor" else []), self.level, *self.index]


@dataclass(frozen=True, eq=False)
class Covering:
    """sup |f − network| ≤ bound over the box: the largest of the leaves, which cover it."""

    box: Box
    leaves: tuple[Leaf, ...]
    leaf_bounds: Float[np.ndarray, "leaves outputs"]
    terms: Mapping[str, Float[np.ndarray, "leaves outputs"]]  # what the bounds of the leaves are made of
    seen: float
    goal: float
    examined: int
    complete: bool  # False: time or cells ran out before all leaves met the goal

    @property
    def bounds(self) -> Float[np.ndarray, " outputs"]:
        """For every output."""
        return np.asarray(self.leaf_bounds.max(axis=0))

    @property
    def bound(self) -> float:
        return float(self.bounds.max())

    @property
    def _worst(self) -> tuple[int, int]:
        leaf, output = np.unravel_index(int(np.argmax(self.leaf_bounds)), self.leaf_bounds.shape)
        return int(leaf), int(output)

    @property
    def worst(self) -> Leaf:
        """The leaf with the largest bound."""
        return self.leaves[self._worst[0]]

    @property
    def worst_terms(self) -> dict[str, float]:
        """What the largest bound is made of."""
        values = {name: float(term[self._worst]) for name, term in self.terms.items()}
        return {name: value for name, value in values.items() if value > 0}

    @property
    def worst_box(self) -> dict[str, tuple[float, float]]:
        """The cell with the largest bound, up to rounding."""
        ends = cell_ends(self.box, self.worst.level, np.array(self.worst.index))
        return {name: (float(lo), float(hi)) for name, (lo, hi) in zip(self.box.names, ends, strict=True)}


def branch_and_bound(
    kinds: Sequence[Kind],
    box: Box,
    *,
    observed: float = 0.0,
    tolerance: float = 0.03,
    floor: float = 0.0,
    goal: float | None = None,
    time_budget: float = 60.0,
    box_budget: int = 500_000,
    start_level: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Covering:
    """Prove a bound of |f − network| over the box, within the tolerance (and `floor`, absolute) of the least possible.

    `observed` is an error that was seen; more are seen on the way. With a `goal` nothing below it is attempted. When
    time or cells run out, what is proved so far is returned, not complete: a bound all the same.
    """
    began = time.monotonic()
    search = _Search(kinds, box, observed, tolerance, floor, goal or 0.0)
    level = int(math.log2(_FIRST_CELLS) / box.d) if start_level is None else start_level
    first = cells(box.d, level)
    pending = deque(search.examine(level, first[i : i + _CELLS]) for i in range(0, len(first), _CELLS))
    size = _CELLS
    while pending:
        parents = pending.popleft()
        while pending and pending[0].level == parents.level and len(parents.index) << box.d < size:
            parents = Cells.joined([parents, pending.popleft()])
        fit = max(1, size >> box.d)
        if len(parents.index) > fit:
            pending.appendleft(parents.where(slice(fit, None)))
            parents = parents.where(slice(fit))
        now = time.monotonic()
        is_spent = search.examined + (len(parents.index) << box.d) > box_budget or now - began > time_budget
        is_spent |= search.examined > _HOPELESS and not search.is_anything_bounded
        if len(parents.index) and (is_spent or parents.level >= MAX_LEVEL):
            return search.proof([parents, *pending], complete=False)
        if len(parents.index):
            pending.append(search.examine(parents.level + 1, children(parents.index)))
            is_slow = time.monotonic() - now > _PATIENCE * time_budget
            size = max(1 << box.d, size // 2) if is_slow else min(_CELLS, 2 * size)
        if progress is not None:
            progress("proving", min(1.0, search.proved))
    return search.proof([], complete=True)


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one level with the best that is known of each."""

    level: int
    index: Int[np.ndarray, "cells d"]
    upper: Float[np.ndarray, "cells outputs"]
    kind: Int[np.ndarray, " cells"]
    floor: Float[np.ndarray, " cells"]
    terms: dict[str, Float[np.ndarray, "cells outputs"]]

    @classmethod
    def unknown(cls, level: int, index: Int[np.ndarray, "cells d"], outputs: int) -> Cells:
        n = len(index)
        return cls(level, index, np.full((n, outputs), np.inf), np.zeros(n, dtype=np.int64), np.zeros(n), {})

    def improve(self, rows: Int[np.ndarray, " some"], number: int, kind: Kind, found: Bounds) -> None:
        """Keep what was found on these rows where it is better."""
        better = found.upper.max(axis=1) < self.upper[rows].max(axis=1)
        rows = rows[better]
        self.upper[rows], self.kind[rows], self.floor[rows] = found.upper[better], number, found.floors[better]
        for term in self.terms.values():
            term[rows] = 0.0
        for name, term in (found.terms or {kind.name: found.upper}).items():
            self.terms.setdefault(name, np.zeros(self.upper.shape))[rows] = term[better]

    def where(self, rows: np.ndarray | slice) -> Cells:
        terms = {name: term[rows] for name, term in self.terms.items()}
        return Cells(self.level, self.index[rows], self.upper[rows], self.kind[rows], self.floor[rows], terms)

    @classmethod
    def joined(cls, parts: Sequence[Cells]) -> Cells:
        names = dict.fromkeys(name for part in parts for name in part.terms)
        terms = {
            name: np.concatenate([part.terms.get(name, np.zeros(part.upper.shape)) for part in parts]) for name in names
        }
        index, upper, kind, floor = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "upper", "kind", "floor")
        )
        return cls(parts[0].level, index, upper, kind, floor, terms)


def best_of(
    kinds: Sequence[Kind], box: Box, level: int, index: Int[np.ndarray, "cells d"], goal: Goal, seen: float = 0.0
) -> tuple[Cells, float]:
    """The best bound of any method on every cell, and the largest error seen; methods are tried until one will do."""
    centres, radii = cell_boxes(box, level, index)
    known: Cells | None = None
    for number, kind in enumerate(kinds):
        largest = np.full(len(index), np.inf) if known is None else known.upper.max(axis=1)
        rows = np.flatnonzero(np.isinf(largest) | (largest > goal.value) & (not kind.is_fallback))
        if not len(rows):
            continue
        found = kind.bounds(centres[rows], radii[rows], goal)
        seen = max(seen, found.seen)
        known = known or Cells.unknown(level, index, found.upper.shape[1])
        known.improve(rows, number, kind, found)
    if known is None:
        raise InputError("a proof by cells needs a method to bound the error on them; none was given.")
    return known, seen


def leaves_of(kinds: Sequence[Kind], parts: Sequence[Cells]) -> tuple[tuple[Leaf, ...], Cells]:
    """All of these cells as leaves, and what is known of each in the same order."""
    parts = [part for part in parts if len(part.index)]
    whole = Cells.joined(parts)
    levels = np.repeat([part.level for part in parts], [len(part.index) for part in parts])
    leaves = tuple(
        Leaf(kinds[kind].name, kinds[kind].order, level, tuple(row))
        for kind, level, row in zip(whole.kind.tolist(), levels.tolist(), whole.index.tolist(), strict=True)
    )
    return leaves, whole


class _Search:
    """The leaves so far, and the goal."""

    def __init__(
        self, kinds: Sequence[Kind], box: Box, seen: float, tolerance: float, floor: float, wanted: float
    ) -> None:
        self.kinds, self.box = kinds, box
        self.seen, self.growth, self.floor, self.wanted = seen, 1 + tolerance, floor, wanted
        self.leaves: list[Cells] = []
        self.examined, self.proved, self.bound, self.is_anything_bounded = 0, 0.0, 0.0, False

    @property
    def goal(self) -> float:
        """A little above what was seen; and no less than the bound of a leaf, which nothing will lower again."""
        return max(self.wanted, self.growth * self.seen + self.floor, self.bound, TINY)

    def examine(self, level: int, index: Int[np.ndarray, "cells d"]) -> Cells:
        """Make leaves of the cells that meet the goal, and return the others."""
        self.examined += len(index)
        known, self.seen = best_of(self.kinds, self.box, level, index, Goal(self.goal, self.growth), self.seen)
        self.is_anything_bounded |= bool(np.isfinite(known.upper).any())
        done = meets(known.upper, known.floor, self.goal)
        self.bound = max(self.bound, float(known.upper[done].max(initial=0.0)))
        done = known.upper.max(axis=1) <= self.bound
        self.leaves.append(known.where(done))
        self.proved += float(done.sum()) * 0.5 ** (level * self.box.d)
        return known.where(~done)

    def proof(self, unfinished: Sequence[Cells], *, complete: bool) -> Covering:
        leaves, whole = leaves_of(self.kinds, [*self.leaves, *unfinished])
        return Covering(self.box, leaves, whole.upper, whole.terms, self.seen, self.goal, self.examined, complete)
