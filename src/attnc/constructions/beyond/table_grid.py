"""One head for a table whose points are a tensor grid: the fewest anchors that reproduce the table at its points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request, of_kind
from attnc.constructions.fitting.axis import (
    COLUMNS_AT_ONCE,
    MAX_VALUE,
    NodeAxis,
    NodeKeys,
    Sections,
    along_axes,
    column_blocks,
    grid_head,
)
from attnc.constructions.fitting.search import thinned
from attnc.constructions.fitting.table_fit import TABLE_SHARE, TableFit, TableSearch, table_construction
from attnc.errors import InputError
from attnc.ir.soft_head import unpacked
from attnc.numerics.contraction import contracted
from attnc.numerics.threads import one_thread
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

NAME = "table_grid"
NUM_SECTIONS = 40
"""Number of random sections of the table along each axis. Twice as many lines of solved values are kept.
Measured with eight tables on grids: with 20 one takes 160 anchors instead of 110; 80 change nothing."""
MAX_REFITS = 8
"""Largest number of fits of the whole table. Each fit adds sections through the worst points. Measured with eight
tables on grids: 4 and 16 give the same heads."""
SOFT_LEADS = (1.0, 1.5, 2.0, 3.0, 5.0)
HARD_LEADS = (3.0, 8.0, 16.0, 32.0, 64.0)
"""By how much the score of a key exceeds its neighbours' at its own node, with a key for each node. With a small lead
the output varies smoothly between the nodes. With a large lead the rounding of scores does no harm."""
GROWTH_AT_NODES = 1.5
"""Largest growth of the values, with a key for every node, at which the smaller lead is kept. Measured with 576 random
numbers on a grid: the bound is 5e-12 with 1.2, 8e-12 with 1.5 and 2e-11 with 3."""
SMALL_VALUE = 2.5
"""Largest ratio of the values of keys to those of the table if rounding is the limit: a quarter of MAX_VALUE."""


@one_thread()
def table_grid(
    target: Target,
    *,
    eps: float,
    max_value: float = MAX_VALUE,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One self-attention head over a tensor grid of anchors, its values solved from a gridded table.

    Statement. |out − f| ≤ eps at every point of the table, rounding included. Nothing is proved between them.
    Weights.   An axis has normalised Gaussians on few anchors, as in `spectral_grid`. If the table is too rough for
               that, it has a key for every node, whose score leads by c there (`NodeAxis.at_nodes`). The softmax
               factorises over the axes: values = (S_1 ⊗ … ⊗ S_d) f, S_i the pseudo-inverse or the inverse of the
               weights W_i of axis i.
    Chosen.    Sections of the table give the fewest anchors for each axis. Then the whole table is fitted. Sections
               through the worst points are added until the error is ≤ eps at all points. Among equal numbers of
               anchors the smallest values are taken. All values are ≤ max_value times the table's.
    Always.    With a key for every node W_i is invertible, and it tends to the identity as c grows. So any eps above
               rounding is reached.

    Parameters
    ----------
    target : TableTarget
        A table whose points are a tensor grid.
    eps : float
        The largest error allowed at the points of the table.
    max_value : float
        The largest |value| of a key, in units of the table's largest value.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the anchors and the softness of every axis. It has no bound.

    Raises
    ------
    InputError
        If the target is not a table on a tensor grid, or the dtype cannot hold its numbers.
    BoundNotMet
        If eps is not reached, or needs more anchors than allowed. The exception carries the best head, if there is one.

    Examples
    --------
    >>> import attnc
    >>> import numpy as np
    >>> x = np.linspace(-3, 3, 50)
    >>> built = attnc.constructions.table_grid(attnc.TableTarget(x, np.sin(x)), eps=1e-6)
    >>> built.program.num_anchors
    11
    """
    table = of_kind(NAME, target, TableTarget)
    if table.grid is None:
        raise InputError(f"{NAME}: the points of the {table.describe()} are not a tensor grid; use table_scattered")
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    return GridTableSearch(table, table.grid, request, max_value).build()


class GridTableSearch(TableSearch):
    """Chooses keys for every axis from sections, fits the table, and adds sections where the fit is worst."""

    def __init__(self, table: TableTarget, grid: Sequence[np.ndarray], request: Request, max_value: float) -> None:
        super().__init__(NAME, table, request, max_value)
        self.axes = [NodeAxis(nodes, self.dtype) for nodes in grid]
        self.counts = [len(axis) for axis in self.axes]
        self.tensor = table.values.reshape(*self.counts, -1)  # the middle is subtracted where it is read
        rng = np.random.default_rng(0)
        through = [rng.integers(0, count, NUM_SECTIONS) for count in self.counts]
        ends = [column.argmax() for column in table.values.T] + [column.argmin() for column in table.values.T]
        extreme = np.unravel_index(ends, self.counts)
        self.through = np.concatenate([np.stack(through, axis=1), np.stack(extreme, axis=1)])

    def smooth(self) -> Iterator[TableFit]:
        small = min(self.max_value, SMALL_VALUE)
        for value, leads in ((self.max_value, SOFT_LEADS), (small, HARD_LEADS[:1]), (small, HARD_LEADS[2:3])):
            found = self._reach(value, leads)
            if found is None:
                return
            yield found

    def at_points(self) -> Iterator[TableFit]:
        return (self._fit([axis.at_nodes(c) for axis in self.axes]) for c in HARD_LEADS)

    def _reach(self, max_value: float, leads: Sequence[float]) -> TableFit | None:
        """Return the smallest head with an error ≤ TABLE_SHARE·eps before rounding, or None if it exceeds the limit."""
        goal = TABLE_SHARE * self.eps
        for round_ in range(MAX_REFITS):
            self.request.report("fitting", round_ / MAX_REFITS)
            lines = self._choose(goal, max_value, leads)
            if math.prod(line.p for line in lines) > self.limit:
                return None
            found = self._fit(lines)
            if found.fitted <= TABLE_SHARE * self.eps:
                return self._thinned(found, lines, max_value)
            worst = np.unravel_index(found.worst_rows, self.counts)
            self.through = np.concatenate([self.through, np.stack(worst, axis=1)])
            goal *= 0.6
        return None

    def _choose(self, eps: float, max_value: float, leads: Sequence[float]) -> list[NodeKeys]:
        """Return the fewest anchors per axis with sections within eps/√d, or a key for every node if fewer fail."""
        lines: list[NodeKeys] = []
        solved = self.tensor
        for i, axis in enumerate(self.axes):
            # Values grow from axis to axis. Each axis may add the same factor.
            sections = self._sections(i, solved, max_value ** ((i + 1) / len(self.axes)))
            found = axis.smallest(sections, eps / math.sqrt(len(self.axes)))
            lines.append(self._softest(axis, sections, leads) if found is None else axis.smooth(found))
            solved = along_axes(solved, [lines[-1].solve], i, self._minus(i))
        return lines

    def _softest(self, axis: NodeAxis, sections: Sections, leads: Sequence[float]) -> NodeKeys:
        """Return a key for every node, with the smallest lead that keeps the values small."""
        before = np.abs(sections.solved).max()
        for c in leads:
            line = axis.at_nodes(c)
            if np.abs(line.solve(sections.solved)).max() <= GROWTH_AT_NODES * before:
                break
        return line

    def _sections(self, i: int, solved: np.ndarray, max_value: float) -> Sections:
        """Return lines along axis i: chosen lines of f, and the largest lines of the values left by earlier axes."""
        lines = np.moveaxis(self.tensor, i, 0)
        where = tuple(np.delete(self.through, i, axis=1).T)
        f = (lines[:, *where] if where else lines) - self.middle
        peaks = [np.abs(block).max(axis=0) for _, block in column_blocks(solved, i, self._minus(i))]
        size = np.concatenate(peaks)
        limits = np.tile(max_value * self.sizes, len(size) // len(self.sizes))
        largest = np.argsort(size / limits)[-2 * NUM_SECTIONS :]
        made = np.moveaxis(solved, i, 0)
        places = np.unravel_index(largest, made.shape[1:])
        chosen = np.stack([made[:, *place] for place in zip(*places, strict=True)], axis=1)
        chosen -= self.middle[places[-1]] if i == 0 else 0.0
        return Sections(f.reshape(len(lines), -1), chosen, limits[largest])

    def _minus(self, i: int) -> np.ndarray | float:
        """Return the number subtracted from the values left by earlier axes: before axis 0, the middle of the table."""
        return self.middle if i == 0 else 0.0

    def _fit(self, lines: Sequence[NodeKeys]) -> TableFit:
        values = along_axes(self.tensor, [line.solve for line in lines], 0, self.middle)
        error, worst = self._worst(lines, values)

        def exact_at(rows: np.ndarray) -> np.ndarray:
            places = np.unravel_index(rows, self.counts)
            weights = [line.weights_at(place) for line, place in zip(lines, places, strict=True)]
            if len(weights) == 1:
                return np.asarray(weights[0] @ values)
            return contracted([np.ascontiguousarray(unpacked(W).T) for W in weights], values)

        named = [*zip(self.table.box.names, lines, strict=True)]
        return self.fit(
            grid_head([line.keys for line in lines], values.reshape(-1, len(self.middle)), self.dtype),
            error,
            exact_at,
            *((f"anchors_{name}", line.p) for name, line in named),
            *((f"c_{name}", line.c) for name, line in named),
            *((f"keys_{name}", line.kind) for name, line in named),
            worst_rows=worst,
            axes=[line.keys for line in lines],
        )

    def _worst(self, lines: Sequence[NodeKeys], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the largest error at all points and the rows of the four largest, slab by slab of the first axis."""
        within = along_axes(values, [line.apply for line in lines[1:]], 1).reshape(len(values), -1)
        outputs, flat = len(self.middle), self.table.values.reshape(self.counts[0], -1, len(self.middle))
        step = max(1, COLUMNS_AT_ONCE // max(within.shape[1], lines[0].p))
        errors, rows = np.zeros(0), np.zeros(0, np.int64)
        for start in range(0, self.counts[0], step):
            slab = slice(start, min(self.counts[0], start + step))
            off = (lines[0].weights_at(slab) @ within).reshape(-1, flat.shape[1], outputs)
            off -= flat[slab]
            off += self.middle
            peak = np.abs(off, out=off).max(axis=2).ravel()
            top = np.argpartition(peak, -4)[-4:] if len(peak) > 4 else np.arange(len(peak))
            errors, rows = np.append(errors, peak[top]), np.append(rows, top + start * flat.shape[1])
        order = np.argsort(errors, kind="stable")[-4:]
        return float(errors[order[-1]]), rows[order]

    def _thinned(self, found: TableFit, lines: list[NodeKeys], max_value: float) -> TableFit:
        """Remove anchors axis by axis while the error stays small enough. Sections often ask for too many."""
        if len(lines) == 1:
            return found
        goal = TABLE_SHARE * self.eps

        def shorter(fitted: tuple[TableFit, list[NodeKeys]], i: int) -> tuple[TableFit, list[NodeKeys]] | None:
            _, keys = fitted
            if keys[i].kind == "nodes" or keys[i].p == 1:
                return None
            solved = along_axes(self.tensor, [before.solve for before in keys[:i]], 0, self.middle)
            axis = self.axes[i]
            fewer = axis.best(keys[i].p - 1, self._sections(i, solved, max_value), goal)
            if fewer is None:
                return None
            thinner = [*keys[:i], axis.smooth(fewer), *keys[i + 1 :]]
            fit = self._fit(thinner)
            is_small = bool((np.abs(fit.values - self.middle).max(axis=0) <= max_value * self.sizes).all())
            return (fit, thinner) if is_small and fit.fitted <= goal else None

        return thinned((found, lines), len(lines), shorter)[0]


TABLE_GRID = table_construction(table_grid, is_gridded=True)
