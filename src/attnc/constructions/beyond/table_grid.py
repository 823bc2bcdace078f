"""One head for a table whose points are a tensor grid: the fewest anchors that have its values at all of its points."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import (
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Request,
    finite_box,
    for_eps,
    made_for,
)
from attnc.constructions.fitting.positions import bytes_per_anchor
from attnc.constructions.fitting.search import thinned
from attnc.constructions.fitting.spectral_axis import along_axes
from attnc.constructions.fitting.table_axis import NodeAxis, NodeKeys, Sections
from attnc.constructions.fitting.table_head import (
    MAX_TABLE_VALUE,
    TABLE_SHARE,
    TableHead,
    accepted,
    as_table,
    is_above_rounding,
    require_room,
    too_many,
)
from attnc.errors import InputError
from attnc.ir.soft_head import SoftHead
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

NAME = "table_grid"
NUM_SECTIONS = 40
"""Number of random sections of the table along each axis; twice as many of the solved values are kept."""
MAX_REFITS = 8
"""Largest number of fits of the whole table; each adds sections through the worst points."""
SOFT_LEADS = (1.0, 1.5, 2.0, 3.0, 5.0)
HARD_LEADS = (3.0, 8.0, 16.0, 32.0, 64.0)
"""Leads of the score of a key at its own node, with a key for each node. With soft leads the output varies smoothly
between the nodes; with hard ones the rounding of scores does no harm."""
GROWTH_AT_NODES = 1.5
"""Largest growth of the values, with a key for every node, at which the softer lead is kept."""
SMALL_VALUE = 2.5
"""Largest ratio of the values of keys to those of the table where rounding is the limit."""


def table_grid(
    target: Target,
    *,
    eps: float,
    max_value: float = MAX_TABLE_VALUE,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One self-attention head over a tensor grid of anchors, its values solved from a gridded table.

    Statement. |out − f| ≤ eps at every point of the table, rounding included. Nothing is proved between them.
    Weights.   On each axis normalised Gaussians on few anchors, as in `spectral_grid`, or, where the table is too rough
               for that, a key for every node that leads there by c (`NodeAxis.at_nodes`). The softmax factorises over
               the axes: values = (S_1 ⊗ … ⊗ S_d) f, S_i the pseudo-inverse or the inverse of the weights of axis i.
    Chosen.    The fewest anchors on every axis from sections of the table; then the whole table is fitted, and sections
               through the worst points are added until the error is ≤ eps at all of them. Among
               equal numbers of anchors those with the smallest values, all ≤ max_value times the table's, are taken.
    Always.    With a key for every node W_i is invertible, and a large c makes it the identity: any eps above
               rounding is reached.
    """
    table = as_table(target, NAME)
    if table.grid is None:
        raise InputError(f"{NAME}: the points of the {table.describe()} are no tensor grid; use table_scattered")
    if not max_value >= 1:
        raise InputError(f"max_value must be a number ≥ 1, found {max_value}")
    require_room(table, dtype)
    limit = min(max_anchors, max_bytes // bytes_per_anchor(table))
    search = _GridTableSearch(table, table.grid, eps, dtype, limit, progress)
    heads = []
    small = min(max_value, SMALL_VALUE)
    attempts = ((max_value, SOFT_LEADS), (small, HARD_LEADS[:1]), (small, HARD_LEADS[2:3]))
    for value, leads in attempts if is_above_rounding(table, eps, dtype) else ():
        found = search.reach(value, leads)
        if found is None:
            break
        heads.append(found)
        if found.error <= eps:
            return found.build(NAME)
    if table.num_points > limit:
        raise too_many(table, NAME, eps, limit, heads)
    for c in HARD_LEADS:
        heads.append(search.head([axis.at_nodes(c) for axis in search.axes]))
        if heads[-1].error <= eps:
            break
    return accepted(heads, NAME, eps)


class _GridTableSearch:
    """Chooses keys for every axis from sections, fits the table, and adds sections where the fit is worst."""

    def __init__(
        self,
        table: TableTarget,
        grid: Sequence[np.ndarray],
        eps: float,
        dtype: str,
        limit: int,
        progress: Progress | None,
    ) -> None:
        self.table, self.dtype, self.limit, self.progress, self.eps = table, dtype, limit, progress, eps
        self.axes = [NodeAxis(nodes, dtype) for nodes in grid]
        self.counts = [len(axis) for axis in self.axes]
        lo, hi = table.values.min(axis=0), table.values.max(axis=0)
        self.middle = lo / 2 + hi / 2
        self.f = (table.values - self.middle).reshape(*self.counts, -1)
        # An output that hardly varies may still have values as large as eps.
        self.sizes = np.maximum(hi / 2 - lo / 2, eps)
        rng = np.random.default_rng(0)
        through = [rng.integers(0, count, NUM_SECTIONS) for count in self.counts]
        extreme = np.unravel_index([np.abs(self.f).max(axis=-1).argmax()], self.counts)
        self.through = np.concatenate([np.stack(through, axis=1), np.stack(extreme, axis=1)])

    def reach(self, max_value: float, leads: Sequence[float]) -> TableHead | None:
        """The smallest head whose error is within TABLE_SHARE of eps, before rounding; None if none fits the limit."""
        goal = TABLE_SHARE * self.eps
        for round_ in range(MAX_REFITS):
            self._report(round_ / MAX_REFITS)
            lines = self._choose(goal, max_value, leads)
            if math.prod(line.p for line in lines) > self.limit:
                return None
            found = self.head(lines)
            errors = np.abs(found.exact - self.table.values).max(axis=1)
            if errors.max() <= TABLE_SHARE * self.eps:
                return self._thinned(found, lines, max_value)
            worst = np.argsort(errors)[-4:]
            self.through = np.concatenate([self.through, np.stack(np.unravel_index(worst, self.counts), axis=1)])
            goal *= 0.6
        return None

    def _choose(self, eps: float, max_value: float, leads: Sequence[float]) -> list[NodeKeys]:
        """The fewest anchors per axis with sections within eps/√d; a key for every node if fewer do not reach it."""
        lines: list[NodeKeys] = []
        solved = self.f
        for i, axis in enumerate(self.axes):
            # Values grow from axis to axis: each may add the same factor.
            sections = self._sections(i, solved, max_value ** ((i + 1) / len(self.axes)))
            found = axis.smallest(sections, eps / math.sqrt(len(self.axes)))
            lines.append(self._softest(axis, sections, leads) if found is None else axis.smooth(found))
            solved = along_axes(solved, [lines[-1].solve], i)
        return lines

    def _softest(self, axis: NodeAxis, sections: Sections, leads: Sequence[float]) -> NodeKeys:
        """A key for every node, as soft as leaves the values small."""
        before = np.abs(sections.solved).max()
        for c in leads:
            line = axis.at_nodes(c)
            if np.abs(line.solve(sections.solved)).max() <= GROWTH_AT_NODES * before:
                break
        return line

    def _sections(self, i: int, solved: np.ndarray, max_value: float) -> Sections:
        """Lines along axis i: the chosen ones of f, and the largest ones of the values after the axes before."""
        lines = np.moveaxis(self.f, i, 0)
        where = tuple(np.delete(self.through, i, axis=1).T)
        f = lines[(slice(None), *where)] if where else lines
        made = np.moveaxis(solved, i, 0).reshape(len(lines), -1)
        sizes = np.tile(max_value * self.sizes, made.shape[1] // len(self.sizes))
        largest = np.argsort(np.abs(made).max(axis=0) / sizes)[-2 * NUM_SECTIONS :]
        return Sections(f.reshape(len(lines), -1), made[:, largest], sizes[largest])

    def head(self, lines: Sequence[NodeKeys]) -> TableHead:
        values = along_axes(self.f, [line.solve for line in lines])
        exact = along_axes(values, [line.apply for line in lines])
        anchors = np.stack([L.ravel() for L in np.meshgrid(*(line.anchors for line in lines), indexing="ij")], axis=1)
        bias = np.sum([b.ravel() for b in np.meshgrid(*(line.bias for line in lines), indexing="ij")], axis=0)
        outputs = len(self.middle)
        names = self.table.box.names
        parameters = [(f"anchors_{name}", line.p) for name, line in zip(names, lines, strict=True)]
        softness = [(f"c_{name}", line.c) for name, line in zip(names, lines, strict=True)]
        kinds = [(f"keys_{name}", line.kind) for name, line in zip(names, lines, strict=True)]
        return TableHead(
            self.table,
            self.dtype,
            np.array([line.scale for line in lines]),
            np.array([line.offset for line in lines]),
            SoftHead(2 * anchors, bias, values.reshape(-1, outputs) + self.middle),
            exact.reshape(-1, outputs) + self.middle,
            (*parameters, *softness, *kinds),
        )

    def _thinned(self, found: TableHead, lines: list[NodeKeys], max_value: float) -> TableHead:
        """Fewer anchors on single axes, while the error stays small enough: sections ask for a little too much."""
        if len(lines) == 1:
            return found

        def shorter(fitted: tuple[TableHead, list[NodeKeys]], i: int) -> tuple[TableHead, list[NodeKeys]] | None:
            _, keys = fitted
            if not keys[i].is_smooth or keys[i].p == 1:
                return None
            solved = along_axes(self.f, [before.solve for before in keys[:i]])
            axis = self.axes[i]
            fewer = axis.best(keys[i].p - 1, self._sections(i, solved, max_value), TABLE_SHARE * self.eps)
            if fewer is None:
                return None
            thinner = [*keys[:i], axis.smooth(fewer), *keys[i + 1 :]]
            head = self.head(thinner)
            is_small = bool((np.abs(head.values - self.middle).max(axis=0) <= max_value * self.sizes).all())
            is_close = np.abs(head.exact - self.table.values).max() <= TABLE_SHARE * self.eps
            return (head, thinner) if is_small and is_close else None

        return thinned((found, lines), len(lines), shorter)[0]

    def _report(self, fraction: float) -> None:
        if self.progress is not None:
            self.progress("fitting", fraction)


def _suits(target: Target, request: Request) -> bool:
    return target.kind == "TableTarget" and as_table(target, NAME).grid is not None


TABLE_GRID = Construction(NAME, for_eps(table_grid), (finite_box, made_for("TableTarget")), _suits)
