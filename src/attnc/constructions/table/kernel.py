"""A key at every point of a scattered table: normalised Gaussians whose values are solved, or which select."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.constructions.table.head import TableHead, middle_of_groups
from attnc.constructions.table.kinks import SELECTING, Kinks
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.table import TableTarget

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEGLIGIBLE = 40.0
"""Weights below e^−40 are left out of a fit, and change nothing in float64."""
MAX_PAIRS = 10**7
MAX_STEPS = 1000
MAX_WORK = 2 * 10**8
"""Steps, and steps × pairs, of the conjugate gradients: a kernel that needs more is too soft for its closest points."""
SOFTEST = 1.0
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
        is_last = beta * points.closest**2 > 2 * NEGLIGIBLE
        found = points.head(beta, eps, math.inf if is_last else growth)
        if found is not None:
            yield found
        if is_last or beta * points.farthest**2 > 1 / UNIT_ROUNDOFF[dtype]:  # from here on rounding decides, not scores
            break
        beta *= HARDER
    yield points.selecting()


class _Points:
    """The distinct points in units of their mean spacing, and what shall be their values."""

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
            beta * self.y + anchors,
            bias - beta * (self.y**2).sum(axis=1),
            self.f + self.middle,
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
            beta * self.y,  # β is a power of two: as exact as y
            -beta * (self.y**2).sum(axis=1),
            values + self.middle,
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

        n, reach = len(self.y), math.sqrt(NEGLIGIBLE / beta)
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
    for _ in range(min(MAX_STEPS, MAX_WORK // kernel.nnz)):
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
