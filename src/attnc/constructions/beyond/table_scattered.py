"""One head for a table with points anywhere: few anchors on a grid if it is smooth, or a key at every point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

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
from attnc.constructions.fitting.minimax import truncated
from attnc.constructions.fitting.positions import bytes_per_anchor
from attnc.constructions.fitting.search import fewest, thinned
from attnc.constructions.fitting.table_axis import AxisAnchors
from attnc.constructions.fitting.table_head import (
    MAX_TABLE_VALUE,
    TABLE_SHARE,
    TableHead,
    accepted,
    as_table,
    is_above_rounding,
    middle_of_groups,
    require_room,
    too_many,
)
from attnc.errors import InputError
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int


NAME = "table_scattered"
ROUGH_GROWTH = 3.0
"""Largest ratio of the values of keys at the points to those of a table that is noise."""
SHAPES = ((0.0, 0.5), (0.0, 0.296875), (0.125, 0.6875), (0.25, 0.5), (0.25, 0.296875))
"""(padding as a part of p, c): little of both for steep functions, more for those that go on smoothly."""
CUTS = (1e-11, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Singular values below this share of the largest are cut: the first cut that keeps the values small is taken."""
RIDGES = (1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
"""Ridges in units of the largest diagonal entry: the first that keeps the values small is taken."""
FINE_SHARE = 1e-6
"""An eps below this part of max |f| needs singular values; otherwise normal equations do, ten times as fast."""
MAX_SMOOTH_ANCHORS, MAX_FINE_ANCHORS = 2000, 600
"""Largest numbers of anchors of a smooth fit by normal equations and by singular values: each takes about a second."""
MAX_POINT_WEIGHTS = 4 * 10**7
"""Largest number of weights (points × anchors) of a smooth fit: 320 MB in float64."""
STEEPEST_COUNTS = (*range(1, 11), 12, 14, 16, 19, 22, 26, 30, 36, 43, 51, 61, 73, 88, 105, 126, 151, 181, 217, 260)
"""Numbers of anchors on the steepest axis that are tried in turn: from ten on, each is 1.2 times the one before."""


def table_scattered(
    target: Target,
    *,
    eps: float,
    max_value: float = MAX_TABLE_VALUE,
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
    search = _ScatteredSearch(table, eps, max_value, dtype, limit, progress)
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
class _GridFit:
    """Anchors on a grid of `counts`, in a shape of SHAPES, and the error of the best values that are not too large."""

    counts: tuple[int, ...]
    shape: int
    error: float
    values: Float[np.ndarray, "keys outputs"] | None = None


class _ScatteredSearch:
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
        self.is_fine = eps < FINE_SHARE * float(np.abs(self.f).max())
        largest = MAX_FINE_ANCHORS if self.is_fine else MAX_SMOOTH_ANCHORS
        self.limit = min(limit, int(0.6 * table.num_points), largest, MAX_POINT_WEIGHTS // table.num_points)
        self.ridges = [0] * len(SHAPES)  # the one of RIDGES that a fit of this shape took last
        self.order = np.random.default_rng(0).permutation(table.num_points)
        self.near = Neighbours.of(self.x / table.box.widths, self.f, eps)

    def reach(self) -> TableHead | None:
        """Find the smallest grid whose error before rounding is within TABLE_SHARE·eps; None if none fits the limit."""
        goal = TABLE_SHARE * self.eps
        shapes = list(range(len(SHAPES)))

        def attempt(p: int, before: Sequence[_GridFit]) -> _GridFit:
            nonlocal shapes
            counts = self._counts(p)
            if self.progress is not None:
                self.progress("fitting", math.prod(counts) / self.limit)
            fits = sorted((self._fit(counts, shape) for shape in shapes), key=lambda fit: fit.error)
            if math.prod(counts) > 600:  # from here on fits take long, and the best shapes change little
                shapes = [fit.shape for fit in fits[:2]]
            return fits[0]

        sizes = itertools.takewhile(lambda p: math.prod(self._counts(p)) <= self.limit, STEEPEST_COUNTS)
        found = fewest(sizes, attempt, goal, resolution=1).met
        return None if found is None else self._head(self._thinned(found, goal))

    def _counts(self, p: int) -> tuple[int, ...]:
        """p anchors on the steepest axis, on others as many fewer as they are less steep; a few are needed anyway."""
        relative = float((np.abs(self.f).max(axis=0) / self.eps).max(initial=1.0))
        least = 2 + 1.2 * math.log10(max(1.0, relative))
        return tuple(round(min(p, least + share * max(0.0, p - least))) for share in self.near.steepness.tolist())

    def _thinned(self, fit: _GridFit, goal: float) -> _GridFit:
        """Fewer anchors on single axes, while the error stays small enough."""

        def shorter(grid: _GridFit, i: int) -> _GridFit | None:
            if grid.counts[i] == 1:
                return None
            counts = tuple(p - (1 + p // 12) * (i == j) for j, p in enumerate(grid.counts))
            less = self._fit(counts, grid.shape)
            return less if less.error <= goal else None

        return thinned(fit, len(fit.counts), shorter)

    def _fit(self, counts: tuple[int, ...], shape: int) -> _GridFit:
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
            return _GridFit(counts, shape, math.inf)
        error = float(np.abs(W @ values - f).max())
        if error <= TABLE_SHARE * self.eps and len(rows) < len(self.x):
            error = float(np.abs(self._outputs(lattices, values) - self.f).max())
        return _GridFit(counts, shape, error, values)

    def _outputs(self, lattices: Sequence[AxisAnchors], values: np.ndarray) -> Float[np.ndarray, "points outputs"]:
        """At all points, block by block."""
        step = max(1, 2**21 // len(values))
        blocks = [self._weights(lattices, self.x[i : i + step]) @ values for i in range(0, len(self.x), step)]
        return np.concatenate(blocks)

    def _weights(self, lattices: Sequence[AxisAnchors], x: np.ndarray) -> Float[np.ndarray, "points keys"]:
        """The softmax over a grid factorises: products of the weights of the axes."""
        axes = []
        for i, lattice in enumerate(lattices):
            scale, offset = self._coordinate(lattice, i)
            axes.append(softmax(2 * (x[:, i, None] * scale + offset) * lattice.anchors + lattice.bias))
        return reduce(lambda W, w: (W[:, :, None] * w[:, None, :]).reshape(len(x), -1), axes)

    def _coordinate(self, lattice: AxisAnchors, axis: int) -> tuple[float, float]:
        """Scale and offset of y, which is 0 in the middle of the box, as they are stored."""
        lo, hi = float(self.table.box.lo[axis]), float(self.table.box.hi[axis])
        scale = float(np.array(lattice.c * lattice.spacings / (hi - lo)).astype(self.dtype))
        return scale, float(np.array(-(lo / 2 + hi / 2) * scale).astype(self.dtype))

    def _head(self, fit: _GridFit) -> TableHead:
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
            SoftHead(
                2 * np.stack([L.ravel() for L in mesh], axis=1),
                np.sum([b.ravel() for b in biases], axis=0),
                fit.values + self.middle,
            ),
            self._outputs(lattices, fit.values) + self.middle,
            (*counts, ("c", SHAPES[fit.shape][1])),
        )


def _by_singular_values(W: np.ndarray, f: np.ndarray, largest: np.ndarray) -> np.ndarray | None:
    """Least squares with the first cut that keeps the values small; None if none does."""
    left, triangle = np.linalg.qr(W)
    inner, singular, right = np.linalg.svd(triangle)
    modes = inner.T @ (left.T @ f)
    found = truncated(singular, right, modes, CUTS, lambda v: bool((np.abs(v).max(axis=0) <= largest).all()))
    return None if found is None else found[0]


def _by_normal_equations(
    W: np.ndarray, f: np.ndarray, largest: np.ndarray, start: int
) -> tuple[np.ndarray | None, int]:
    """The same with a ridge, from the one before RIDGES[start] on; each pass adds the part that the ridge held back."""
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


def _lattices(counts: Sequence[int], shape: int) -> list[AxisAnchors]:
    part, c = SHAPES[shape]
    return [AxisAnchors(p, min(part * p, 6.0, (p - 1) / 2 - 0.2) if p > 1 else 0.0, c) for p in counts]


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Whether the table is noise to every smooth fit, and how steep it is along each axis, as neighbours show."""

    is_rough: bool
    steepness: Float[np.ndarray, " d"]  # in widths of the box, as a part of the steepest

    @classmethod
    def of(cls, y: Float[np.ndarray, "points d"], f: Float[np.ndarray, "points outputs"], eps: float) -> Neighbours:
        """From points in widths of the box.

        A quadratic through a point's neighbours predicts its value: of a smooth function much better than the nearest
        neighbour's value does, of noise no better.
        """
        from scipy.spatial import cKDTree

        d = y.shape[1]
        count = (d + 1) * (d + 2) + 1  # twice as many neighbours as a quadratic has coefficients, and the point itself
        if len(y) <= 2 * count:
            return cls(False, np.ones(d))
        some = np.random.default_rng(1).permutation(len(y))[:400]
        near = np.asarray(cKDTree(y).query(y[some], k=count)[1])
        coefficients = np.linalg.pinv(_quadratic(y[near[:, 1:]] - y[some, None])) @ f[near[:, 1:]]
        predicted = np.abs(coefficients[:, 0] - f[some]).max(axis=1)
        nearest = np.abs(f[near[:, 1]] - f[some]).max(axis=1)
        slopes = np.quantile(np.abs(coefficients[:, 1 : d + 1]).max(axis=2), 0.8, axis=0)
        is_rough = float(np.median(predicted)) > max(5 * eps, 0.5 * float(np.median(nearest)))
        return cls(is_rough, slopes / slopes.max() if slopes.max() > 0 else np.ones(d))


def _quadratic(x: Float[np.ndarray, "batch points d"]) -> Float[np.ndarray, "batch points monomials"]:
    d = x.shape[-1]
    squares = [x[..., i] * x[..., j] for i in range(d) for j in range(i, d)]
    return np.stack([np.ones(x.shape[:-1]), *np.moveaxis(x, -1, 0), *squares], axis=-1)


NEGLIGIBLE_EXPONENT = 40.0
"""Weights below e^−40 are left out of a fit, and change nothing in float64."""
MAX_PAIRS = 10**7
"""Largest number of pairs of points whose kernel is stored: 240 MB."""
MAX_GRADIENT_STEPS = 1000
MAX_GRADIENT_WORK = 2 * 10**8
"""Steps, and steps × pairs, of the conjugate gradients: a kernel that needs more is too soft for its closest points."""
SOFTEST = 1.0
"""The first β, in units of the mean spacing of the points: weights then reach over about six spacings."""
HARDER = 2.0
"""A power of two, so that multiples of anchors are exact."""


def keys_at_points(table: TableTarget, dtype: str, eps: float, growth: float) -> Iterator[TableHead]:
    """Heads with a key at every point, from the softest that can be solved to one that selects the nearest point.

    Weights ∝ exp(−β|y − L_j|²) at the points are W = D⁻¹K, K the Gaussian kernel, positive definite for distinct
    points, and D its row sums: the values W⁻¹f are K⁻¹(Df). They exist for every β; for small β they are large where
    two points are close, and those more than `growth` times as large as the table's are passed over. As β grows W
    tends to the identity and the values to f: any eps above rounding is reached. The softer, the smoother between
    the points. The last head (`Kinks`) tells points apart that are too close for any β.
    """
    points = _Points(table, dtype)
    beta = SOFTEST
    while True:
        is_last = beta * points.closest**2 > 2 * NEGLIGIBLE_EXPONENT
        found = points.head(beta, eps, math.inf if is_last else growth)
        if found is not None:
            yield found
        if is_last or beta * points.farthest**2 > 1 / UNIT_ROUNDOFF[dtype]:  # from here on rounding decides, not scores
            break
        beta *= HARDER
    yield points.selecting()


class _Points:
    """The distinct points in units of their mean spacing, and their values in the table."""

    def __init__(self, table: TableTarget, dtype: str) -> None:
        self.table, self.dtype = table, dtype
        box = table.box
        spacing = table.num_points ** (-1 / box.d)
        self.scale = (1 / (box.widths * spacing)).astype(dtype).astype(np.float64)
        self.offset = (-(box.lo / 2 + box.hi / 2) * self.scale).astype(dtype).astype(np.float64)
        seen = table.points.astype(dtype).astype(np.float64)  # as the network sees them
        y = (seen * self.scale + self.offset).astype(dtype).astype(np.float64)
        self.y, which = np.unique(y, axis=0, return_inverse=True)
        self.which: Int[np.ndarray, " points"] = which.ravel()
        self.middle = table.values.min(axis=0) / 2 + table.values.max(axis=0) / 2
        self.f = middle_of_groups(table.values - self.middle, self.which, len(self.y))

    @cached_property
    def _tree(self) -> Any:
        from scipy.spatial import cKDTree

        return cKDTree(self.y)

    @cached_property
    def _nearest(self) -> tuple[Float[np.ndarray, " points"], Int[np.ndarray, " points"]]:
        """Every point's distance from its nearest neighbour, and which that is."""
        if len(self.y) < 2:
            return np.full(1, np.inf), np.zeros(1, np.int64)
        distances, found = self._tree.query(self.y, k=2)
        return distances[:, 1], found[:, 1]

    @property
    def closest(self) -> float:
        """The least distance of two points."""
        return float(self._nearest[0].min())

    @cached_property
    def farthest(self) -> float:
        """The largest distance from the origin."""
        return float(np.sqrt((self.y**2).sum(axis=1).max()))

    def selecting(self) -> TableHead:
        """A head that selects the nearest point, with kinks between points that are too close for β alone."""
        u = UNIT_ROUNDOFF[self.dtype]
        beta = 2.0 ** math.floor(math.log2(SELECTING / (400 * u * self.farthest**2)))
        near = math.sqrt(SELECTING / beta)  # 20√u of the largest |y|: scores are good to a quarter
        kinks = Kinks.between(self.y, self._tree.query_pairs(near, output_type="ndarray"))
        anchors, bias = kinks.tangents(self.y)
        return TableHead(
            self.table,
            self.dtype,
            self.scale,
            self.offset,
            SoftHead(2 * (beta * self.y + anchors), bias - beta * (self.y**2).sum(axis=1), self.f + self.middle),
            self.f[self.which] + self.middle,
            (("beta", beta), ("kinks", len(kinks.at))),
        )

    def head(self, beta: float, eps: float, growth: float) -> TableHead | None:
        """The head of this temperature; None if its values cannot be solved, or grow too large."""
        largest = growth * np.maximum(np.abs(self.f).max(axis=0), eps)
        if (self._expected(beta) > largest).any():
            return None
        kernel = self._kernel(beta)
        if kernel is None:
            return None
        sums = np.asarray(kernel.sum(axis=1)).reshape(-1, 1)
        values = _conjugate_gradients(kernel, sums * self.f, 1e-3 * eps)
        if values is None or (np.abs(values).max(axis=0) > largest).any():
            return None
        exact = (kernel @ values) / sums
        return TableHead(
            self.table,
            self.dtype,
            self.scale,
            self.offset,
            # β is a power of two: β·y is as exact as y
            SoftHead(2 * beta * self.y, -beta * (self.y**2).sum(axis=1), values + self.middle),
            exact[self.which] + self.middle,
            (("beta", beta),),
        )

    def _expected(self, beta: float) -> Float[np.ndarray, " outputs"]:
        """How large values are at least, as if every point had one neighbour: of K = (1 k; k 1) the half difference of
        two values is (1 + k)/(1 − k) times that of f."""
        distances, neighbours = self._nearest
        k = np.exp(-beta * distances**2)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            halves = (1 + k) / -np.expm1(-beta * distances**2)[:, None] * np.abs(self.f - self.f[neighbours]) / 2
        return np.nan_to_num(halves, nan=0.0, posinf=np.inf).max(axis=0)

    def _kernel(self, beta: float) -> Any:
        """exp(−β|L_i − L_j|²) where it is not negligible, sparse; None if that is too much."""
        from scipy.sparse import coo_array

        n, reach = len(self.y), math.sqrt(NEGLIGIBLE_EXPONENT / beta)
        if self._tree.count_neighbors(self._tree, reach) > 2 * MAX_PAIRS:
            return None
        pairs = self._tree.query_pairs(reach, output_type="ndarray")
        weights = np.exp(-beta * ((self.y[pairs[:, 0]] - self.y[pairs[:, 1]]) ** 2).sum(axis=1))
        one = np.arange(n)
        rows = np.concatenate([one, pairs[:, 0], pairs[:, 1]])
        columns = np.concatenate([one, pairs[:, 1], pairs[:, 0]])
        return coo_array((np.concatenate([np.ones(n), weights, weights]), (rows, columns)), shape=(n, n)).tocsr()


def _conjugate_gradients(
    kernel: Any, right: Float[np.ndarray, "points outputs"], goal: float
) -> Float[np.ndarray, "points outputs"] | None:
    """kernel⁻¹·right, all columns side by side, until no residual is above the goal; None if that takes too long.

    Rows of the kernel sum to 1 or more, so a residual here is none larger in the network's output.
    """
    x = right / np.asarray(kernel.sum(axis=1)).reshape(-1, 1)
    residual = right - kernel @ x
    direction = residual.copy()
    square = (residual**2).sum(axis=0)
    goal = max(goal, 1e-14 * float(np.abs(right).max(initial=0.0)))
    for _ in range(min(MAX_GRADIENT_STEPS, MAX_GRADIENT_WORK // kernel.nnz)):
        if np.abs(residual).max(initial=0.0) <= goal:
            return x
        moved = kernel @ direction
        curvature = (direction * moved).sum(axis=0)
        if (curvature <= 0).any() and (square[curvature <= 0] > 0).any():
            return None
        step = np.divide(square, curvature, out=np.zeros_like(square), where=curvature > 0)
        x = x + step * direction
        residual = residual - step * moved
        before, square = square, (residual**2).sum(axis=0)
        direction = residual + np.divide(square, before, out=np.zeros_like(square), where=before > 0) * direction
    return None


SELECTING = 80.0
"""The lead of a score that leaves no weight to others: e^−80 is below float64 rounding by far."""
MAX_KINKS = 2000
"""Largest number of kinks between close points: every key adds a term for each."""


@dataclass(frozen=True, eq=False)
class Kinks:
    """Σ κ|y_axis − at|, a convex function to which keys add their tangents.

    A tangent at a point leads there all other tangents, and sums of convex functions add their leads: so kinks take
    nothing from other points. Two points on opposite sides of a kink lead each other by 2κ times their distance to it.
    """

    axis: Int[np.ndarray, " kinks"]
    at: Float[np.ndarray, " kinks"]
    strength: Float[np.ndarray, " kinks"]  # the κ

    @classmethod
    def between(cls, y: Float[np.ndarray, "points d"], pairs: Int[np.ndarray, "pairs two"]) -> Kinks:
        """Kinks for which the points of every pair lead each other by SELECTING: halfway, where they differ most."""
        difference = np.abs(y[pairs[:, 0]] - y[pairs[:, 1]])
        axes, gaps = difference.argmax(axis=1), difference.max(axis=1)
        found: list[tuple[int, float, float]] = []
        for pair in np.argsort(gaps)[:MAX_KINKS].tolist():
            axis = int(axes[pair])
            low, high = sorted(y[pairs[pair], axis].tolist())
            is_apart = (2 * k * min(m - low, high - m) >= SELECTING for i, m, k in found if i == axis)
            if not any(is_apart):
                found.append((axis, (low + high) / 2, SELECTING / (high - low)))
        table = np.array(found).reshape(-1, 3)
        return cls(table[:, 0].astype(int), table[:, 1], table[:, 2])

    def tangents(self, y: Float[np.ndarray, "points d"]) -> tuple[np.ndarray, np.ndarray]:
        """Anchors and bias: the tangent of κ|y − m| at a point is κ·sign·(y − m)."""
        anchors, bias = np.zeros_like(y), np.zeros(len(y))
        for axis, at, strength in zip(self.axis.tolist(), self.at.tolist(), self.strength.tolist(), strict=True):
            sign = np.sign(y[:, axis] - at)
            anchors[:, axis] += strength / 2 * sign
            bias -= strength * at * sign
        return anchors, bias


def _suits(target: Target, request: Request) -> bool:
    return target.kind == "TableTarget" and as_table(target, NAME).grid is None


TABLE_SCATTERED = Construction(NAME, for_eps(table_scattered), (finite_box, made_for("TableTarget")), _suits)
