"""One axis of a gridded table: its keys, and the values of these keys that fit the table's own nodes best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.constructions.fitting.minimax import truncated
from attnc.constructions.fitting.search import fewest, ladder
from attnc.constructions.fitting.spectral_axis import CUTS, PADS, SOFTNESS
from attnc.constructions.fitting.table_head import middle_of_groups
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int


FEW_ANCHORS = 64
"""Up to this number anchors are fitted by singular values; more are fitted by bands, faster, and good to 1e-9."""
ANCHOR_COUNTS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    FEW_ANCHORS,
    *(FEW_ANCHORS * 2**k for k in range(1, 16)),
)


@dataclass(frozen=True)
class AxisAnchors:
    """p anchors one spacing apart, `pad` of them beyond either end of an axis of any length, at temperature c."""

    p: int
    pad: float = 0.0
    c: float = 1.0
    cut: float = CUTS[0]  # of singular values; for many anchors, the ridge
    is_graded: bool = False  # as dense as the nodes are, instead of equally spaced

    @property
    def spacings(self) -> float:
        """Between the ends of the axis."""
        return self.p - 1 - 2 * self.pad if self.p > 1 else 1.0

    @property
    def anchors(self) -> Float[np.ndarray, " p"]:
        return np.arange(self.p) - (self.p - 1) / 2

    @property
    def bias(self) -> Float[np.ndarray, " p"]:
        """With y = c(x − middle)/spacing, L whole halves and c in whole 64ths, 2L and −cL² are exact."""
        return -self.c * self.anchors**2

    def graded_places(self, nodes: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " p"]:
        """p ≥ 2 places with equally many nodes between them; beyond the ends nodes go on as they came."""
        x = np.unique(nodes)
        step = (len(x) - 1) / self.spacings
        beyond = math.ceil(self.pad * step) + 1
        left, right = x[0] - _continued(np.diff(x), beyond)[::-1], x[-1] + _continued(np.diff(x)[::-1], beyond)
        places = step * (np.arange(self.p) - self.pad)
        return np.interp(places, np.arange(-beyond, len(x) + beyond), np.concatenate([left, x, right]))


def _continued(gaps: Float[np.ndarray, " gaps"], count: int) -> Float[np.ndarray, " count"]:
    """Distances of `count` places beyond the first node: gaps go on growing as they do at this end, or stay."""
    some = min(len(gaps) - 1, 1 + len(gaps) // 10)
    ratio = np.clip((gaps[0] / gaps[some]) ** (1 / max(1, some)), 1.0, 2.0)
    with np.errstate(over="ignore"):
        return np.asarray(np.cumsum(np.minimum(gaps[0] * ratio ** np.arange(1.0, count + 1), gaps.sum())))


def menu(p: int, is_uneven: bool) -> list[AxisAnchors]:
    """Softness and padding to try: a fine search for few anchors, where every one counts."""
    if p == 1:
        return [AxisAnchors(1)]
    pads = [pad for pad in PADS if p - 1 - 2 * pad > 0.4] if p <= FEW_ANCHORS else [0.0, 3.0]
    softness = SOFTNESS[::2] if p <= FEW_ANCHORS else SOFTNESS[5::2]
    even = [AxisAnchors(p, pad, c) for c, pad in product(softness, pads)]
    if not is_uneven:
        return even
    return [*(replace(lattice, is_graded=True) for lattice in even if 4 * lattice.pad <= min(p - 2, 12)), *even]


NEGLIGIBLE_EXPONENT = 40.0
"""Weights below e^−40 are left out of a fit: they change nothing in float64."""


class Band:
    """Row j holds the weights at point j of the keys from nearest_j − reach to nearest_j + reach."""

    def __init__(
        self,
        y: Float[np.ndarray, " points"],
        anchors: Float[np.ndarray, " keys"],
        bias: Float[np.ndarray, " keys"],
        nearest: Int[np.ndarray, " points"],
        reach: int,
    ) -> None:
        from scipy.sparse import csr_array

        num_keys = len(anchors)
        self.width = min(2 * reach + 1, num_keys)
        first = np.clip(nearest - reach, 0, num_keys - self.width)
        self._key = first[:, None] + np.arange(self.width)
        self._weights = softmax(2 * y[:, None] * anchors[self._key] + bias[self._key])
        starts = np.arange(0, len(y) * self.width + 1, self.width)
        shape = (len(y), num_keys)
        self.matrix: Any = csr_array((self._weights.ravel(), self._key.ravel(), starts), shape=shape)

    def apply(self, v: Float[np.ndarray, "keys lines"]) -> Float[np.ndarray, "points lines"]:
        return np.asarray(self.matrix @ v)

    def solve(self, f: Float[np.ndarray, "points lines"]) -> Float[np.ndarray, "keys lines"]:
        """W⁻¹f, for as many keys as points."""
        from scipy.linalg import solve_banded

        reach = self.width - 1  # keys that share a row are no farther apart
        diagonals = np.zeros((2 * reach + 1, len(f)))  # W_ij is in row reach + i − j, column j
        diagonals[reach + np.arange(len(f))[:, None] - self._key, self._key] = self._weights
        return np.asarray(solve_banded((reach, reach), diagonals, f))

    def least_squares(
        self, f: Float[np.ndarray, "points lines"], ridge: float
    ) -> Float[np.ndarray, "keys lines"] | None:
        """The v that make |Wv − f|² + ridge·|v|² least, refined twice; None if rounding leaves no way to solve."""
        from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded

        transposed = self.matrix.T.tocsr()
        gram = transposed @ self.matrix
        diagonals = np.zeros((self.width, gram.shape[0]))
        for k in range(self.width):
            diagonals[k, : gram.shape[0] - k] = gram.diagonal(-k)
        diagonals[0] += ridge * diagonals[0].max()
        try:
            factor = cholesky_banded(diagonals, lower=True)
        except LinAlgError:
            return None
        v = np.zeros((gram.shape[0], f.shape[1]))
        for _ in range(3):  # each pass adds the part that the ridge held back before
            v += cho_solve_banded((factor, True), transposed @ (f - self.matrix @ v))
        return v


def reach_of_lattice(c: float) -> int:
    """Weights e^{−c·n²} are negligible n keys away; one more for the point's place between two keys."""
    return math.ceil(math.sqrt(NEGLIGIBLE_EXPONENT / c)) + 2


def keys_at_nodes(
    y: Float[np.ndarray, " nodes"], c: float
) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Anchors and bias of a key for each node, at which it leads its neighbours by c however uneven the nodes.

    Slopes 2L grow by 2c/gap from a node to the next, and neighbours' scores meet in the middle between them: at a node
    its own key leads by (2c/gap)·(gap/2) = c, and the k-th from it by kc or more. A linear function added to all
    scores changes nothing: the one is chosen that leaves the numbers smallest, and with them their rounding.
    """
    gaps = np.diff(y)
    slopes = np.concatenate([[0.0], np.cumsum(c / gaps)])
    best, chosen = math.inf, (slopes, slopes)
    for level in (slopes[-1] / 2, 0.0, slopes[-1], slopes[np.argmin(gaps)]):
        anchors = slopes - level
        bias = np.concatenate([[0.0], np.cumsum(-2 * np.diff(anchors) * (y[:-1] + gaps / 2))])
        bias -= bias[np.argmin(np.abs(anchors))]
        size = float((np.abs(2 * anchors * y) + np.abs(bias)).max())
        if size < best:
            best, chosen = size, (anchors, bias)
    return chosen


def reach_at_nodes(
    y: Float[np.ndarray, " nodes"], anchors: Float[np.ndarray, " nodes"], bias: Float[np.ndarray, " nodes"]
) -> int:
    """How many keys away the weights of keys at nodes are negligible, at every node."""
    own = 2 * anchors * y + bias
    for k in range(1, len(y)):
        before, after = (
            own[k:] - (2 * anchors[:-k] * y[k:] + bias[:-k]),
            own[:-k] - (2 * anchors[k:] * y[:-k] + bias[k:]),
        )
        if min(before.min(), after.min()) > NEGLIGIBLE_EXPONENT:
            return k
    return len(y) - 1


BAND_RIDGES = (1e-14, 1e-12, 1e-10)
"""Ridges in units of the largest diagonal entry: the first that keeps the values small is taken."""
UNEVEN = 3.0
"""Ratio of gaps between nodes above which graded anchors are tried, too."""
NODES_LOOKED_AT = 1000
"""Nodes of a long axis that are tested for noise."""
HOPELESS_ACCURACY = 1e-2
"""The error, as a share of max |f|, that three anchors for four nodes stay below if any smooth fit is close."""


@dataclass(frozen=True, eq=False)
class NodeKeys:
    """Keys on one axis, score_k(x) = 2L_k(scale·x + offset) + bias_k; their values from a table's nodes, and back."""

    scale: float
    offset: float
    anchors: Float[np.ndarray, " p"]  # the L_k
    bias: Float[np.ndarray, " p"]
    c: float
    kind: str  # "even" or "graded", fewer keys than nodes; or "nodes", a key for each
    solve: Callable[[Float[np.ndarray, "nodes lines"]], Float[np.ndarray, "p lines"]]  # f at the nodes → values
    apply: Callable[[Float[np.ndarray, "p lines"]], Float[np.ndarray, "nodes lines"]]  # values → output at the nodes

    @property
    def p(self) -> int:
        return len(self.anchors)

    @property
    def is_smooth(self) -> bool:
        return self.kind != "nodes"


@dataclass(frozen=True, eq=False)
class Sections:
    """Lines through the table along one axis: `f` is to be fitted, and values are made of `solved`.

    `solved` are lines of the values after the axes before; the values may grow up to `sizes`.
    """

    f: Float[np.ndarray, "nodes lines"]
    solved: Float[np.ndarray, "nodes others"]
    sizes: Float[np.ndarray, " others"]

    def growth(self, values: Float[np.ndarray, "p others"]) -> float:
        """The largest value in units of its limit."""
        return float((np.abs(values).max(axis=0) / self.sizes).max())


@dataclass(frozen=True)
class Candidate:
    """A softness, a padding and a cut; the error at the nodes that they leave, and values in units of their limit."""

    lattice: AxisAnchors
    error: float
    growth: float


class NodeAxis:
    """The nodes of one axis, as the network sees them: in its own dtype."""

    def __init__(self, nodes: Float[np.ndarray, " nodes"], dtype: str) -> None:
        self.dtype = dtype
        self.x = nodes.astype(dtype).astype(np.float64)
        self.lo, self.hi = float(nodes[0]), float(nodes[-1])
        gaps = np.diff(np.unique(self.x))
        self.is_uneven = bool(gaps.max(initial=0.0) > UNEVEN * gaps.min(initial=math.inf))

    def __len__(self) -> int:
        return len(self.x)

    def _coordinate(self, scale: float, origin: float) -> tuple[float, float]:
        """Scale and offset of y, which is 0 at the origin, as they are stored."""
        stored = float(np.array(scale).astype(self.dtype))
        return stored, float(np.array(-origin * stored).astype(self.dtype))

    # --- fewer keys than nodes: least squares -------------------------------------------------------------------------

    def smallest(self, sections: Sections, eps: float) -> Candidate | None:
        """The fewest anchors, fewer than the nodes, with an error ≤ eps on these sections; None if there are none."""

        if self._is_hopeless(sections, eps):
            return None
        sizes = ladder(ANCHOR_COUNTS, len(self) - 1)
        return fewest(sizes, lambda p, before: self.best(p, sections, eps), eps, resolution=32).met

    def _is_hopeless(self, sections: Sections, eps: float) -> bool:
        """Whether not even three anchors for four nodes come near: then the table is noise to every smooth fit."""
        start = max(0, (len(self) - NODES_LOOKED_AT) // 2)  # on a long axis a piece is enough
        piece = slice(start, start + NODES_LOOKED_AT)
        some = NodeAxis(self.x[piece], self.dtype)
        if some.lo == some.hi:
            return False
        free = Sections(sections.f[piece], sections.solved[piece], np.full_like(sections.sizes, math.inf))
        lattice = AxisAnchors(max(2, 3 * len(some) // 4), 0.0, 0.5, is_graded=self.is_uneven)
        found = some._by_band(lattice, np.arange(len(some)), free)
        return found is not None and found.error > max(10 * eps, HOPELESS_ACCURACY * float(np.abs(sections.f).max()))

    def best(self, p: int, sections: Sections, eps: float) -> Candidate | None:
        """The fit of p anchors with an error ≤ eps and the smallest values, or else with the least error."""
        rows = self._rows(3 * p + 32)
        cut = Sections(sections.f[rows], sections.solved[rows], sections.sizes)
        fit = self._by_singular_values if p <= FEW_ANCHORS else self._by_band
        tried = (fit(lattice, rows, cut) for lattice in menu(p, self.is_uneven))
        found = [candidate for candidate in tried if candidate is not None]
        near = [candidate for candidate in found if candidate.error <= eps]
        if near:
            return min(near, key=lambda candidate: candidate.growth)
        return min(found, key=lambda candidate: candidate.error, default=None)

    def _rows(self, count: int) -> np.ndarray:
        """About `count` nodes at most, evenly spread over their order: enough for a smooth fit."""
        if len(self) <= count:
            return np.arange(len(self))
        return np.unique(np.linspace(0, len(self) - 1, count).round().astype(int))

    def _by_singular_values(self, lattice: AxisAnchors, rows: np.ndarray, sections: Sections) -> Candidate | None:
        """With the first cut that keeps the values small; None if none does."""
        left, singular, right = np.linalg.svd(self._weights(lattice, rows), full_matrices=False)
        found = truncated(singular, right, left.T @ sections.solved, CUTS, lambda values: sections.growth(values) <= 1)
        if found is None:
            return None
        values, rank, cut = found
        error = float(np.abs(sections.f - left[:, :rank] @ (left.T @ sections.f)[:rank]).max())
        return Candidate(replace(lattice, cut=cut), error, sections.growth(values))

    def _by_band(self, lattice: AxisAnchors, rows: np.ndarray, sections: Sections) -> Candidate | None:
        """The same by banded least squares, with the first ridge that keeps the values small."""
        band = self._band(lattice, rows)
        for ridge in BAND_RIDGES:
            both = band.least_squares(np.concatenate([sections.f, sections.solved], axis=1), ridge)
            if both is None:
                continue
            values = both[:, sections.f.shape[1] :]
            growth = sections.growth(values)
            if growth <= 1:
                error = float(np.abs(sections.f - band.apply(both[:, : sections.f.shape[1]])).max())
                return Candidate(replace(lattice, cut=ridge), error, growth)
        return None

    def _band(self, lattice: AxisAnchors, rows: np.ndarray) -> Band:
        scale, offset, anchors, bias = self._keys(lattice)
        y = self.x[rows] * scale + offset
        if lattice.is_graded:
            at = lattice.graded_places(self.x) * scale + offset
            nearest = np.searchsorted((at[1:] + at[:-1]) / 2, y)
            return Band(y, anchors, bias, nearest, reach_at_nodes(at, anchors, bias) + 2)
        nearest = np.clip(np.round(y / lattice.c - anchors[0]), 0, lattice.p - 1).astype(int)
        return Band(y, anchors, bias, nearest, reach_of_lattice(lattice.c))

    def _keys(self, lattice: AxisAnchors) -> tuple[float, float, np.ndarray, np.ndarray]:
        if lattice.is_graded:
            return self._keys_at(lattice.graded_places(self.x), lattice.c)
        scale = lattice.c * lattice.spacings / (self.hi - self.lo)
        return *self._coordinate(scale, self.lo / 2 + self.hi / 2), lattice.anchors, lattice.bias

    def _keys_at(self, x: Float[np.ndarray, " p"], c: float) -> tuple[float, float, np.ndarray, np.ndarray]:
        # y is 0 where keys are closest: there slopes are steepest, and y must be most exact.
        origin = float(x[np.argmin(np.diff(x))])
        scale, offset = self._coordinate((len(x) - 1) / (self.hi - self.lo), origin)
        anchors, bias = keys_at_nodes(x * scale + offset, c)
        return scale, offset, anchors.astype(self.dtype).astype(np.float64), bias

    def _weights(self, lattice: AxisAnchors, rows: np.ndarray) -> Float[np.ndarray, "rows p"]:
        scale, offset, anchors, bias = self._keys(lattice)
        return softmax(2 * (self.x[rows, None] * scale + offset) * anchors + bias)

    def smooth(self, candidate: Candidate) -> NodeKeys:
        """The candidate, fitted to as many nodes as can do any good."""
        lattice = candidate.lattice
        kind = "graded" if lattice.is_graded else "even"
        rows = self._rows(20 * lattice.p + 32)
        if lattice.p > FEW_ANCHORS:
            some, every = self._band(lattice, rows), self._band(lattice, np.arange(len(self)))
            ridge = lattice.cut
            return NodeKeys(*self._keys(lattice), lattice.c, kind, lambda f: _solved(some, f[rows], ridge), every.apply)
        left, singular, right = np.linalg.svd(self._weights(lattice, rows), full_matrices=False)
        kept = singular > lattice.cut * singular[0]
        to_modes, to_values = left[:, kept].T, right[kept].T
        W = self._weights(lattice, np.arange(len(self)))

        def solve(f: np.ndarray) -> np.ndarray:
            # Two factors, never multiplied out: errors made before the division fall into directions that W forgets.
            return to_values @ ((to_modes @ f[rows]) / singular[kept, None])

        return NodeKeys(*self._keys(lattice), lattice.c, kind, solve, lambda v: W @ v)

    # --- a key for every node -----------------------------------------------------------------------------------------

    def at_nodes(self, c: float) -> NodeKeys:
        """A key for each node, at which it leads its neighbours by c (`keys_at_nodes`).

        The weights W of the keys at the nodes are a band, nearly the identity for large c; the values W⁻¹f give f at
        the nodes. Nodes that are one in the program's dtype share a key.
        """
        x, which = np.unique(self.x, return_inverse=True)
        scale, offset, anchors, bias = self._keys_at(x, c)
        y = x * scale + offset
        band = Band(y, anchors, bias, np.arange(len(x)), reach_at_nodes(y, anchors, bias))

        def solve(f: np.ndarray) -> np.ndarray:
            return band.solve(f if len(x) == len(self) else middle_of_groups(f, which, len(x)))

        return NodeKeys(scale, offset, anchors, bias, c, "nodes", solve, lambda v: band.apply(v)[which])


def _solved(band: Band, f: np.ndarray, ridge: float) -> np.ndarray:
    """The values with this ridge, or with a larger one if rounding makes the equations indefinite."""
    found = band.least_squares(f, ridge)
    found = band.least_squares(f, BAND_RIDGES[-1]) if found is None else found
    assert found is not None
    return found
