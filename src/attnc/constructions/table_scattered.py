"""One head for a table with points anywhere: few anchors on a grid if it is smooth, or a key at every point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES, bytes_per_anchor
from attnc.constructions.table.head import (
    MARGIN,
    MAX_VALUE,
    TableHead,
    accepted,
    as_table,
    is_above_rounding,
    require_room,
    too_many,
)
from attnc.constructions.table.kernel import keys_at_points
from attnc.constructions.table.lattice import Lattice
from attnc.constructions.table.neighbours import Neighbours
from attnc.errors import InputError
from attnc.ir.reference import softmax
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

NAME = "table_scattered"
ROUGH_GROWTH = 3.0
"""How much larger than a table of noise the values of keys at its points may be."""
SHAPES = ((0.0, 0.5), (0.0, 0.296875), (0.125, 0.6875), (0.25, 0.5), (0.25, 0.296875))
"""(padding as a part of p, c): little of both for steep functions, more for those that go on smoothly."""
CUTS = (1e-11, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
RIDGES = (1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
FINE = 1e-6
"""An eps below this part of max |f| needs singular values; otherwise normal equations do, ten times as fast."""
MAX_GRID, MAX_FINE_GRID = 2000, 600
"""Anchors of a smooth fit by either, which take about a second."""
MAX_CELLS = 4 * 10**7
"""points × anchors of a smooth fit."""
LADDER = (*range(1, 11), 12, 14, 16, 19, 22, 26, 30, 36, 43, 51, 61, 73, 88, 105, 126, 151, 181, 217, 260)


def table_scattered(
    target: Target,
    *,
    eps: float,
    max_value: float = MAX_VALUE,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One self-attention head, its values solved from a table whose points may lie anywhere.

    Statement. |out − f| ≤ eps at every point of the table, rounding included. Nothing is proved between them.
    Weights.   Normalised Gaussians on a tensor grid of few anchors, as in `spectral_grid`, with values by least squares
               over the points; or, where the table is too rough for that, on the points themselves (`keys_at_points`).
    Chosen.    The grid grows, faster along axes on which the table is steeper, until the error is ≤ eps at every point;
               then axes are shortened one by one. |values| stay ≤ max_value times the table's.
    Always.    Keys at the points select the nearest one when β is large: any eps above rounding is reached.
    """
    table = as_table(target, NAME)
    if not max_value >= 1:
        raise InputError(f"max_value must be a number ≥ 1, found {max_value}")
    require_room(table, dtype)
    limit = min(max_anchors, max_bytes // bytes_per_anchor(table))
    search = _Search(table, eps, max_value, dtype, limit, progress)
    heads = []
    is_smooth = is_above_rounding(table, eps, dtype) and not search.near.is_rough
    found = search.reach() if is_smooth else None
    if found is not None:
        heads.append(found)
        if found.error <= eps:
            return found.build(NAME)
    if table.num_points > limit:
        raise too_many(table, NAME, eps, limit, heads)
    growth = ROUGH_GROWTH if search.near.is_rough else max_value
    for head in keys_at_points(table, dtype, eps, growth):
        heads.append(head)
        if head.error <= eps:
            break
    return accepted(heads, NAME, eps)


@dataclass(frozen=True, eq=False)
class _Fit:
    """Anchors on a grid of `counts`, in a shape of SHAPES, and the error of the best values that are not too large."""

    counts: tuple[int, ...]
    shape: int
    error: float
    values: Float[np.ndarray, "keys outputs"] | None = None


class _Search:
    """Tries grids of anchors, from small to large, in several shapes each."""

    def __init__(
        self,
        table: TableTarget,
        eps: float,
        max_value: float,
        dtype: str,
        limit: int,
        progress: Progress | None,
    ) -> None:
        self.table, self.eps, self.dtype, self.progress = table, eps, dtype, progress
        self.x = table.points.astype(dtype).astype(np.float64)  # as the network sees them
        lo, hi = table.values.min(axis=0), table.values.max(axis=0)
        self.middle = lo / 2 + hi / 2
        self.f = table.values - self.middle
        self.largest = max_value * np.maximum(hi / 2 - lo / 2, eps)
        self.is_fine = eps < FINE * float(np.abs(self.f).max())
        largest = MAX_FINE_GRID if self.is_fine else MAX_GRID
        self.limit = min(limit, int(0.6 * table.num_points), largest, MAX_CELLS // table.num_points)
        self.ridges = [0] * len(SHAPES)  # the one of RIDGES that a fit of this shape took last
        self.order = np.random.default_rng(0).permutation(table.num_points)
        self.near = Neighbours.of(self.x / table.box.widths, self.f, eps)

    def reach(self) -> TableHead | None:
        """The smallest grid found whose error is within MARGIN of eps, before rounding; None if none fits the limit."""
        goal, shapes = MARGIN * self.eps, list(range(len(SHAPES)))
        for p in LADDER:
            counts = self._counts(p)
            num_anchors = math.prod(counts)
            if num_anchors > self.limit:
                return None
            if self.progress is not None:
                self.progress("fitting", num_anchors / self.limit)
            fits = sorted((self._fit(counts, shape) for shape in shapes), key=lambda fit: fit.error)
            if fits[0].error <= goal:
                return self._head(self._thinned(fits[0], goal))
            if num_anchors > 600:  # from here on fits cost, and what suits them changes little
                shapes = [fit.shape for fit in fits[:2]]
        return None

    def _counts(self, p: int) -> tuple[int, ...]:
        """p anchors on the steepest axis, on others as many fewer as they are less steep; a few are needed anyway."""
        relative = float((np.abs(self.f).max(axis=0) / self.eps).max(initial=1.0))
        least = 2 + 1.2 * math.log10(max(1.0, relative))
        return tuple(round(min(p, least + share * max(0.0, p - least))) for share in self.near.steepness.tolist())

    def _thinned(self, fit: _Fit, goal: float) -> _Fit:
        """Fewer anchors on single axes, while the error stays small enough."""
        for i in range(len(fit.counts)):
            while fit.counts[i] > 1:
                counts = tuple(p - (1 + p // 12) * (i == j) for j, p in enumerate(fit.counts))
                thinner = self._fit(counts, fit.shape)
                if thinner.error > goal:
                    break
                fit = thinner
        return fit

    def _fit(self, counts: tuple[int, ...], shape: int) -> _Fit:
        """Least squares at several points for each anchor; the error at all points."""
        lattices = _lattices(counts, shape)
        num_anchors = math.prod(counts)
        rows = self.order[: 8 * num_anchors + 600]
        W, f = self._weights(lattices, self.x[rows]), self.f[rows]
        if self.is_fine:
            values = _by_singular_values(W, f, self.largest)
        else:
            values, self.ridges[shape] = _by_normal_equations(W, f, self.largest, self.ridges[shape])
        if values is None:
            return _Fit(counts, shape, math.inf)
        error = float(np.abs(W @ values - f).max())
        if error <= MARGIN * self.eps and len(rows) < len(self.x):
            error = float(np.abs(self._outputs(lattices, values) - self.f).max())
        return _Fit(counts, shape, error, values)

    def _outputs(self, lattices: Sequence[Lattice], values: np.ndarray) -> Float[np.ndarray, "points outputs"]:
        """At all points, block by block."""
        step = max(1, 2**21 // len(values))
        blocks = [self._weights(lattices, self.x[i : i + step]) @ values for i in range(0, len(self.x), step)]
        return np.concatenate(blocks)

    def _weights(self, lattices: Sequence[Lattice], x: np.ndarray) -> Float[np.ndarray, "points keys"]:
        """The softmax over a grid factorises: products of the weights of the axes."""
        axes = []
        for i, lattice in enumerate(lattices):
            scale, offset = self._coordinate(lattice, i)
            axes.append(softmax(2 * (x[:, i, None] * scale + offset) * lattice.anchors + lattice.bias))
        return reduce(lambda W, w: (W[:, :, None] * w[:, None, :]).reshape(len(x), -1), axes)

    def _coordinate(self, lattice: Lattice, axis: int) -> tuple[float, float]:
        """Scale and offset of y, which is 0 in the middle of the box, as they are stored."""
        lo, hi = float(self.table.box.lo[axis]), float(self.table.box.hi[axis])
        scale = float(np.array(lattice.c * lattice.spacings / (hi - lo)).astype(self.dtype))
        return scale, float(np.array(-(lo / 2 + hi / 2) * scale).astype(self.dtype))

    def _head(self, fit: _Fit) -> TableHead:
        assert fit.values is not None  # its error is finite
        lattices = _lattices(fit.counts, fit.shape)
        coordinates = np.array([self._coordinate(lattice, i) for i, lattice in enumerate(lattices)])
        mesh = np.meshgrid(*(lattice.anchors for lattice in lattices), indexing="ij")
        biases = np.meshgrid(*(lattice.bias for lattice in lattices), indexing="ij")
        names = self.table.box.names
        counts = tuple((f"anchors_{name}", p) for name, p in zip(names, fit.counts, strict=True))
        return TableHead(
            self.table,
            self.dtype,
            coordinates[:, 0],
            coordinates[:, 1],
            np.stack([L.ravel() for L in mesh], axis=1),
            np.sum([b.ravel() for b in biases], axis=0),
            fit.values + self.middle,
            self._outputs(lattices, fit.values) + self.middle,
            (*counts, ("c", SHAPES[fit.shape][1])),
        )


def _by_singular_values(W: np.ndarray, f: np.ndarray, largest: np.ndarray) -> np.ndarray | None:
    """Least squares with the first cut that keeps the values small; None if none does."""
    left, triangle = np.linalg.qr(W)
    inner, singular, right = np.linalg.svd(triangle)
    modes = inner.T @ (left.T @ f)
    for cut in CUTS:
        rank = int(np.count_nonzero(singular > cut * singular[0]))
        values = right[:rank].T @ (modes[:rank] / singular[:rank, None])
        if (np.abs(values).max(axis=0) <= largest).all():
            return np.asarray(values)
    return None


def _by_normal_equations(
    W: np.ndarray, f: np.ndarray, largest: np.ndarray, start: int
) -> tuple[np.ndarray | None, int]:
    """The same with a ridge, from the one before RIDGES[start] on; what it holds back in one pass, the next adds."""
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    gram, right = W.T @ W, W.T @ f
    size = float(gram.diagonal().max())
    for i in range(max(0, start - 1), len(RIDGES)):
        try:
            factor = cho_factor(gram + RIDGES[i] * size * np.eye(len(gram)))
        except LinAlgError:
            continue
        values = np.zeros_like(right)
        for _ in range(3):
            values += cho_solve(factor, right - gram @ values)
        if (np.abs(values).max(axis=0) <= largest).all():
            return values, i
    return None, 0


def _lattices(counts: Sequence[int], shape: int) -> list[Lattice]:
    part, c = SHAPES[shape]
    return [Lattice(p, min(part * p, 6.0, (p - 1) / 2 - 0.2) if p > 1 else 0.0, c) for p in counts]
