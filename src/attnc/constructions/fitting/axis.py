"""One axis of a grid of anchors: its keys, and the values of these keys that fit samples of a function best.

The softmax over a tensor grid factorises, so a grid is fitted one axis at a time. A `Lattice` places p anchors on an
axis, and `KeysOnAxis` are their keys in the coordinate that a program stores. A `ValueSolver` finds values by least
squares. It cuts off small singular values or adds a ridge, so that the values stay below the limits of `Sections`.

`AxisSections` chooses the lattice for a function that can be sampled anywhere, `NodeAxis` for the nodes of a table.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from attnc.constructions.fitting.search import Shape, doubling, fewest, ladder, lowest
from attnc.constructions.fitting.stored_head import StoredHead, stored
from attnc.errors import InputError
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.small_matrices import singular_values

MAX_VALUE = 10.0
"""Default limit on |values|/max|f|. Rounding grows with it: at 10 one digit is lost."""
LEAST_VALUE = 1.5
"""Least limit on |values|/max|f| that rounding may impose. Values of a good fit exceed max |f| a little.
Measured near the limit of rounding: for exp(x)·y in float32 the best bound is 2e-5 with 3, 3e-5 with 1.5, and 0.3 with
1.2. Elsewhere it changes nothing."""
VALUE_ROUNDINGS = 40
"""The assumed rounding error of one head as proofs bound it, in roundings of its largest value."""
AXIS_CUTS = (1e-13, 1e-10, 1e-8, 1e-6)
"""Singular values below this share of the largest are cut off. A larger cut gives smaller values and larger errors."""
SOFTNESS = tuple(k / 64 for k in (6, 8, 10, 12, 14, 16, 19, 22, 26, 32, 38, 44, 54, 64, 80))
"""Values of c = βh², in whole 64ths so that −c·L² is exact. The ripple is (2π/c)e^{−π²/c} per unit slope and spacing. A
smaller c has a smaller ripple and larger values."""
PADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
"""Distances, in spacings, by which anchors reach beyond either end of the axis."""
LEAST_SPACINGS = 0.4
"""Least number of spacings between the ends of an axis. With fewer, nearly all anchors lie outside."""


def value_limit(eps: float, size: float, dtype: str) -> float:
    """Return the largest |values|/size, size = max|f|, with which rounding stays a part of eps."""
    room = eps / (VALUE_ROUNDINGS * UNIT_ROUNDOFF[dtype] * max(size, 1e-300))
    return min(MAX_VALUE, max(LEAST_VALUE, room))


# --- keys -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lattice:
    """p anchors one spacing h apart, reaching `pad` spacings beyond either end of an axis, with c = βh²."""

    p: int
    pad: float = 0.0
    c: float = 1.0
    is_graded: bool = False  # the anchors are as dense as the nodes, instead of equally spaced

    @property
    def spacings(self) -> float:
        """The number of spacings between the ends of the axis."""
        return self.p - 1 - 2 * self.pad if self.p > 1 else 1.0

    @property
    def anchors(self) -> Float[np.ndarray, " p"]:
        """The L_k, in spacings from the middle of the axis."""
        return np.arange(self.p) - (self.p - 1) / 2

    def keys(self, lo: float, hi: float, dtype: str) -> KeysOnAxis:
        """Return the keys in y = c(x − middle)/h. With 2L whole and c in whole 64ths, 2L and −cL² are exact."""
        scale, offset = stored_coordinate(self.c * self.spacings / (hi - lo), lo / 2 + hi / 2, dtype)
        return KeysOnAxis(scale, offset, self.anchors, -self.c * self.anchors**2)

    def weights(self, y: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        """Return the weights of the anchors at points, given in spacings from the middle of the axis."""
        return softmax(-self.c * (y[:, None] - self.anchors) ** 2)

    def graded_places(self, nodes: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " p"]:
        """Return p ≥ 2 places with equally many nodes between them. Beyond the ends the gaps between nodes continue."""
        x = np.unique(nodes)
        step = (len(x) - 1) / self.spacings
        beyond = math.ceil(self.pad * step) + 1
        left, right = x[0] - _continued(np.diff(x), beyond)[::-1], x[-1] + _continued(np.diff(x)[::-1], beyond)
        places = step * (np.arange(self.p) - self.pad)
        return np.interp(places, np.arange(-beyond, len(x) + beyond), np.concatenate([left, x, right]))


def _continued(gaps: Float[np.ndarray, " gaps"], count: int) -> Float[np.ndarray, " count"]:
    """Return the distances of `count` places beyond the first node. The gaps keep growing as they do at this end."""
    some = min(len(gaps) - 1, 1 + len(gaps) // 10)
    ratio = np.clip((gaps[0] / gaps[some]) ** (1 / max(1, some)), 1.0, 2.0)
    with quiet():
        return np.asarray(np.cumsum(np.minimum(gaps[0] * ratio ** np.arange(1.0, count + 1), gaps.sum())))


def stored_coordinate(scale: float, origin: float, dtype: str) -> tuple[float, float]:
    """Return the stored scale and offset of the coordinate y = scale·(x − origin)."""
    kept = float(stored(np.array(scale), dtype))
    return kept, float(stored(np.array(-origin * kept), dtype))


@dataclass(frozen=True, eq=False)
class KeysOnAxis:
    """Keys on one axis: score_k(x) = 2L_k·y + bias_k in the coordinate y = scale·x + offset."""

    scale: float
    offset: float
    anchors: Float[np.ndarray, " p"]  # the L_k
    bias: Float[np.ndarray, " p"]

    def y(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        return x * self.scale + self.offset

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        return softmax(2 * self.y(x)[:, None] * self.anchors + self.bias)

    def scores(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "p points"]:
        return np.multiply.outer(self.anchors, 2 * self.y(x)) + self.bias[:, None]


def grid_head(axes: Sequence[KeysOnAxis], values: Float[np.ndarray, "keys outputs"], dtype: str) -> StoredHead:
    """Return the head over the tensor grid of the keys of all axes. The last axis runs fastest."""
    anchors = np.meshgrid(*(axis.anchors for axis in axes), indexing="ij")
    biases = np.meshgrid(*(axis.bias for axis in axes), indexing="ij")
    slopes = 2 * np.stack([L.ravel() for L in anchors], axis=1)
    keys = SoftHead(slopes, np.sum([b.ravel() for b in biases], axis=0), values)
    scale, offset = np.array([(axis.scale, axis.offset) for axis in axes]).T
    return StoredHead(scale, offset, keys, dtype)


COLUMNS_AT_ONCE = 2**22
"""Numbers of a table that are mapped at once: 32 MB."""


def column_blocks(
    tensor: Float[np.ndarray, "*grid outputs"], axis: int, minus: Float[np.ndarray, " outputs"] | float = 0.0
) -> Iterator[tuple[slice, Float[np.ndarray, "nodes columns"]]]:
    """Yield the lines along an axis as columns, less `minus`, block by block, with their numbers."""
    n, outputs = tensor.shape[axis], tensor.shape[-1]
    before, after = math.prod(tensor.shape[:axis]), math.prod(tensor.shape[axis + 1 :])
    lines = tensor.reshape(before, n, after)
    width = max(outputs, COLUMNS_AT_ONCE // n // outputs * outputs)
    if before == 1:
        for start in range(0, after, width):
            columns = slice(start, min(after, start + width))
            block = lines[0][:, columns]
            yield columns, (block.reshape(n, -1, outputs) - minus).reshape(n, -1)
        return
    count = max(1, width // after)
    for start in range(0, before, count):
        chosen = lines[start : start + count]
        block = np.ascontiguousarray(chosen.transpose(1, 0, 2)).reshape(n, -1, outputs)
        yield slice(start * after, (start + len(chosen)) * after), (block - minus).reshape(n, -1)


def along_axes(
    tensor: Float[np.ndarray, "*grid outputs"],
    maps: Sequence[Callable[[np.ndarray], np.ndarray]],
    first: int = 0,
    minus: Float[np.ndarray, " outputs"] | float = 0.0,
) -> Float[np.ndarray, "*grid outputs"]:
    """Apply maps[i], a linear map of columns, along axis first + i, to the tensor less `minus`, block by block."""
    for axis, linear in enumerate(maps, first):
        shape, found = tensor.shape, None
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        for columns, block in column_blocks(tensor, axis, minus):
            mapped = linear(block)
            if found is None:
                found = np.empty((before, len(mapped), after))
            if before == 1:
                found[0][:, columns] = mapped
            else:
                rows = slice(columns.start // after, columns.stop // after)
                found[rows] = mapped.reshape(len(mapped), -1, after).transpose(1, 0, 2)
        assert found is not None
        tensor, minus = found.reshape(*shape[:axis], -1, *shape[axis + 1 :]), 0.0
    return tensor


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sections:
    """Lines along one axis. `f` is fitted. `solved` must give values below `limits`.

    `solved` are lines of the values after the earlier axes are solved. Their fitting errors do not matter, but the
    values made from them are the values of the whole grid.
    """

    f: Float[np.ndarray, "nodes lines"]
    solved: Float[np.ndarray, "nodes others"]
    limits: Float[np.ndarray, " others"] | float

    def growth(self, values: Float[np.ndarray, "p others"]) -> float:
        """Return the largest value in units of its limit."""
        if isinstance(self.limits, float):
            return float(np.abs(values).max() / np.float64(self.limits))  # NaN for a function that is 0
        return float((np.abs(values).max(axis=0) / self.limits).max())


class Kept(NamedTuple):
    """The values of a fit, the cut or ridge that keeps them small, and the largest value in units of its limit."""

    values: Float[np.ndarray, "p lines"]
    cut: float
    growth: float


class ValueSolver(ABC):
    """Finds values of keys that fit samples best, and keeps them small by a cut of singular values or by a ridge."""

    def __init__(self, weights: Any, cuts: Sequence[float]) -> None:
        self.weights, self.cuts = weights, cuts  # weights of the keys at the points, dense or sparse

    @abstractmethod
    def values(self, samples: Float[np.ndarray, "points lines"], cut: float) -> Float[np.ndarray, "p lines"] | None:
        """Return the values with this cut, or None if rounding makes the equations unsolvable."""

    def first_cut(self, sections: Sections) -> Kept | None:
        """Return the values made from `solved` with the first cut that keeps them within limits, or None."""
        for cut in self.cuts:
            values = self.values(sections.solved, cut)
            if values is not None and (growth := sections.growth(values)) <= 1:
                return Kept(values, cut, growth)
        return None


class Decomposition(ValueSolver):
    """Least squares by singular values. Those below a share of the largest are left out.

    Two factors make the values. They are never multiplied out, since the product would lose digits by cancellation.
    """

    @functools.cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Left singular vectors as columns, singular values, and right singular vectors as rows."""
        return singular_values(self.weights)

    @functools.cached_property
    def _ranks(self) -> dict[float, int]:
        """The number of singular values above each cut that was asked for."""
        return {}

    def rank(self, cut: float) -> int:
        """Return the number of singular values above this share of the largest, which is one of the cuts."""
        if cut not in self._ranks:
            singular = self.factors[1]
            self._ranks[cut] = int(np.count_nonzero(singular > cut * singular[0]))
        return self._ranks[cut]

    def values(self, samples: Float[np.ndarray, "points lines"], cut: float) -> Float[np.ndarray, "p lines"]:
        rank, (left, singular, right) = self.rank(cut), self.factors
        with quiet():  # a value that overflows is never within limits
            return right[:rank].T @ ((left[:, :rank].T @ samples) / singular[:rank, None])

    def first_cut(self, sections: Sections) -> Kept | None:
        left, singular, right = self.factors
        with quiet():
            # Cuts differ in the number of singular values, and a smaller number has a part of the same coefficients.
            coefficients = (left.T @ sections.solved) / singular[:, None]
            for cut in self.cuts:
                rank = self.rank(cut)
                values = right[:rank].T @ coefficients[:rank]
                if (growth := sections.growth(values)) <= 1:
                    return Kept(values, cut, growth)
        return None


class Ridged(ValueSolver):
    """Minimises |Wv − f|² + ridge·|v|², with a ridge in units of the largest diagonal entry of WᵀW.

    Three passes refine v. Each pass fits the residual of the one before.
    """

    @functools.cached_property
    def gram(self) -> Any:
        return self.weights.T @ self.weights

    def values(self, samples: Float[np.ndarray, "points lines"], cut: float) -> Float[np.ndarray, "p lines"] | None:
        try:
            inverse = _inverse_of_gram(self.gram, cut * float(self.gram.diagonal().max()))
        except np.linalg.LinAlgError:
            return None
        values = np.zeros((self.weights.shape[1], samples.shape[1]))
        for _ in range(3):
            values += inverse(self.weights.T @ (samples - self.weights @ values))
        return values


def _inverse_of_gram(gram: Any, ridge: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the inverse of WᵀW plus a ridge as a function, by Cholesky's method. WᵀW is dense or a sparse band."""
    from scipy.linalg import cho_factor, cho_solve, cho_solve_banded, cholesky_banded

    if isinstance(gram, np.ndarray):
        return functools.partial(cho_solve, cho_factor(gram + ridge * np.eye(len(gram))))
    entries = gram.tocoo()
    below = entries.row >= entries.col
    row, column = entries.row[below], entries.col[below]
    diagonals = np.zeros((int((row - column).max()) + 1, gram.shape[0]))
    diagonals[row - column, column] = entries.data[below]
    diagonals[0] += ridge
    return functools.partial(cho_solve_banded, (cholesky_banded(diagonals, lower=True), True))


NEGLIGIBLE_EXPONENT = 40.0
"""Weights below e^−40 are left out of a fit. They are below the unit roundoff of float64, e^−37."""
BAND_RIDGES = (1e-14, 1e-12, 1e-10)
"""Ridges in units of the largest diagonal entry. The first that keeps the values small is taken."""


def band_of_weights(keys: KeysOnAxis, x: Float[np.ndarray, " points"], places: Float[np.ndarray, " keys"]) -> Any:
    """Return the weights of the keys at points as a sparse array, without the negligible ones.

    Row j holds the keys from nearest_j − reach to nearest_j + reach.
    """
    from scipy.sparse import csr_array

    num_keys, y, reach = len(keys.anchors), keys.y(x), reach_of_keys(keys, places) + 2
    nearest = np.searchsorted((places[1:] + places[:-1]) / 2, y)
    width = min(2 * reach + 1, num_keys)
    key = np.clip(nearest - reach, 0, num_keys - width)[:, None] + np.arange(width)
    near = softmax(2 * y[:, None] * keys.anchors[key] + keys.bias[key])
    starts = np.arange(0, len(y) * width + 1, width)
    return csr_array((near.ravel(), key.ravel(), starts), shape=(len(y), num_keys))


# --- a function that can be sampled anywhere --------------------------------------------------------------------------

MAX_P = 1025
"""Largest number of anchors per axis. One decomposition of 1025 anchors takes about 2 s, and a search makes several."""
COARSE_PLACES = tuple(product(range(1, 15, 3), range(0, 12, 2)))
"""Pairs of indices in SOFTNESS and PADS with which a search begins."""
COARSE_PLACES_FOR_MANY = ((2, 9), (5, 9), (5, 6), (8, 6), (8, 0), (13, 0))
"""Pairs of indices with which a search begins for many anchors. They are few, since the decomposition is slow."""
NEIGHBOURS = np.array([(1, 0), (0, 1), (1, 1)])
"""Steps of the descent in these indices, forwards and backwards. (1, 1) changes softness and padding together."""


@functools.lru_cache(maxsize=256)
def unit_points(p: int, spare: int) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " tests"]]:
    """Return Chebyshev points of [−1, 1] for the fit of p anchors, and points for its error, several per spacing."""
    n = p + min(p // 2, 12 * spare) + spare
    even = np.linspace(-1, 1, max(9, min(4 * p, 2 * p + 200)))
    return np.cos(np.pi * (np.arange(n) + 0.5) / n), np.concatenate([even, np.cos(np.pi * np.arange(8) / (3 * p))])


@functools.lru_cache(maxsize=2048)
def unit_fit(lattice: Lattice, spare: int) -> tuple[Decomposition, Float[np.ndarray, "tests rank"]]:
    """Return the fit on [−1, 1], which all functions share, and the outputs at the test points per singular value."""
    nodes, tests = unit_points(lattice.p, spare)
    h = 2 / lattice.spacings
    fit = Decomposition(lattice.weights(nodes / h), AXIS_CUTS)
    _, singular, right = fit.factors
    return fit, lattice.weights(tests / h) @ (right.T / singular)


@dataclass(frozen=True)
class SpectralAxis:
    """A lattice on [lo, hi], with the values that fit f best at Chebyshev points."""

    lo: float
    hi: float
    lattice: Lattice
    cut: float = AXIS_CUTS[0]
    spare: int = 4  # the number of extra nodes for the fit: see `unit_points`
    error: float = math.inf  # on the sections that it was fitted to
    shape: Shape = ()  # its indices in SOFTNESS and PADS

    @property
    def p(self) -> int:
        return self.lattice.p

    def at(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        """Map t from [−1, 1] to [lo, hi]."""
        return np.clip(self.lo / 2 + self.hi / 2 + (self.hi / 2 - self.lo / 2) * t, self.lo, self.hi)

    def nodes(self) -> Float[np.ndarray, " nodes"]:
        """The points at which f is sampled for the fit."""
        return self.at(unit_points(self.p, self.spare)[0])

    def solve(self, samples: Float[np.ndarray, "nodes lines"]) -> Float[np.ndarray, "p lines"]:
        """Return the values of the anchors from samples of f at the nodes."""
        return unit_fit(self.lattice, self.spare)[0].values(samples, self.cut)

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        """Return the softmax over the anchors of this axis."""
        return self.lattice.weights((x - (self.lo / 2 + self.hi / 2)) * self.lattice.spacings / (self.hi - self.lo))


@dataclass(frozen=True, eq=False)
class AxisSections:
    """Sections of f along one axis, as functions of x ∈ [lo, hi]: samples(x) and solved(x) are (points, lines).

    `solved(x)` are lines of the values after the earlier axes are solved.
    """

    lo: float
    hi: float
    samples: Callable[[np.ndarray], np.ndarray]
    solved: Callable[[np.ndarray], np.ndarray]
    spare: int = 4

    def best(
        self, p: int, max_value: float, enough: float = 0.0, near: Sequence[SpectralAxis] = ()
    ) -> SpectralAxis | None:
        """Return the axis of p anchors with the least error on these lines and |values| ≤ max_value.

        The search is over (c, pad), first at the places of the axes `near`. The first error ≤ `enough` ends it.
        """
        if p > MAX_P:
            raise InputError(f"an axis has 1 to {MAX_P} anchors, found {p}")
        first = SpectralAxis(self.lo, self.hi, Lattice(p), spare=self.spare)
        nodes, tests = map(first.at, unit_points(p, self.spare))
        sections, at_tests = Sections(self.samples(nodes), self.solved(nodes), max_value), self.samples(tests)

        @functools.cache
        def fitted(place: Shape) -> SpectralAxis | None:
            """Return the axis with the first cut that keeps the values small, or None if none does."""
            c, pad = map(round, place)
            is_listed = 0 <= c < len(SOFTNESS) and 0 <= pad < len(PADS)
            if p > 1 and not (is_listed and p - 1 - 2 * PADS[pad] > LEAST_SPACINGS):
                return None
            lattice = Lattice(p, PADS[pad], SOFTNESS[c]) if p > 1 else first.lattice
            fit, predicted = unit_fit(lattice, self.spare)
            found = fit.first_cut(sections)
            if found is None:
                return None
            rank = fit.rank(found.cut)
            error = np.abs(predicted[:, :rank] @ (fit.factors[0][:, :rank].T @ sections.f) - at_tests).max()
            if not error < math.inf:
                return None
            return SpectralAxis(self.lo, self.hi, lattice, found.cut, self.spare, float(error), place)

        if p == 1:
            return fitted((0.0, 0.0))
        places = (*(axis.shape for axis in near if axis.p > 1), *(COARSE_PLACES if p <= 80 else COARSE_PLACES_FOR_MANY))
        starts = (fitted(place) or SpectralAxis(self.lo, self.hi, first.lattice, shape=place) for place in places)
        descents = 1 if p <= 300 else 0
        best = lowest(starts, functools.partial(map, fitted), NEIGHBOURS, 1.0, 0.5, enough, num_descents=descents)
        return best if best.error < math.inf else None

    def smallest(self, eps: float, max_value: float, start: int = 9, most: int = MAX_P) -> SpectralAxis | None:
        """Return an axis with the fewest anchors and an error ≤ eps on these lines, or None if it needs over `most`."""
        found = self._grown(eps, max_value, start, most, resolution=64)
        return found and (self.best(found.p, max_value) or found)

    def reaches(self, eps: float, max_value: float, most: int) -> bool:
        """Whether at most `most` anchors have an error ≤ eps on these lines."""
        return self._grown(eps, max_value, start=9, most=most, resolution=1) is not None

    def _grown(self, eps: float, max_value: float, start: int, most: int, resolution: float) -> SpectralAxis | None:
        return fewest(
            doubling(start, most),
            lambda p, before: self.best(p, max_value, eps, before),
            eps,
            resolution=resolution,
            gives_up=lambda failed: len(failed) > 1 and _is_hopeless(failed[-2], failed[-1], eps, most),
        ).met


def _is_hopeless(before: SpectralAxis, after: SpectralAxis, eps: float, most: int) -> bool:
    """Whether the error falls like a power of p, as at a kink, and too slowly for `most` anchors to be enough."""
    low, high = before.p, after.p
    if high < 48 or high > 2 * low:  # too few to tell, or not tried one after the other
        return False
    rate = math.log(before.error / after.error) / math.log(high / low)
    return rate < 3 and after.error * (most / high) ** -max(rate, 0.0) > 2 * eps


# --- the nodes of a table ---------------------------------------------------------------------------------------------

FEW_ANCHORS = 64
"""Up to this number of anchors fits use singular values. For more they use bands, which are faster and less exact."""
ANCHOR_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, *(FEW_ANCHORS * 2**k for k in range(16)))
"""Numbers of anchors that are tried in turn. Each is about 1.3 times the one before, and from 64 on twice."""
UNEVEN = 3.0
"""Ratio of the largest to the least gap between nodes above which graded anchors are tried. Below it the density of the
nodes varies by at most a factor of three. Measured with uneven tables of 60 and 200 rows: 1.5 and 6
give the same heads."""
NODES_TESTED = 1000
"""Number of nodes of a long axis that are tested for noise. It bounds the time of the test. Measured with tables of
3,000 and 5,000 rows: 500 and 2000 give the same heads in the same time."""
HOPELESS_ACCURACY = 1e-2
"""A table is noise if three anchors for four nodes leave an error above this share of max |f|. Measured with twelve
tables, one of them a wave with noise of this size: half and twice this share give the same heads."""


def menu(p: int, is_uneven: bool) -> list[Lattice]:
    """Return the lattices to try, with several softnesses and paddings. For few anchors the choice is finer."""
    if p == 1:
        return [Lattice(1)]
    pads = [pad for pad in PADS if p - 1 - 2 * pad > LEAST_SPACINGS] if p <= FEW_ANCHORS else [0.0, 3.0]
    softness = SOFTNESS[::2] if p <= FEW_ANCHORS else SOFTNESS[5::2]
    even = [Lattice(p, pad, c) for c, pad in product(softness, pads)]
    if not is_uneven:
        return even
    return [*(replace(lattice, is_graded=True) for lattice in even if 4 * lattice.pad <= min(p - 2, 12)), *even]


def keys_at_nodes(
    y: Float[np.ndarray, " nodes"], c: float
) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Return anchors and bias of a key for each node. At its node a key leads its neighbours by c, for any gaps.

    Slopes 2L grow by 2c/gap from a node to the next, and the scores of neighbours meet halfway between them. So at a
    node its own key leads the neighbours by (2c/gap)·(gap/2) = c, and the k-th key from it by kc or more. Adding a
    linear function to all scores changes nothing. It is chosen to make the numbers, and so their rounding, smallest.
    """
    gaps = np.diff(y)
    slopes = np.concatenate([[0.0], np.cumsum(c / gaps)])

    def levelled(level: float) -> tuple[np.ndarray, np.ndarray]:
        anchors = slopes - level
        bias = np.concatenate([[0.0], np.cumsum(-2 * np.diff(anchors) * (y[:-1] + gaps / 2))])
        return anchors, bias - bias[np.argmin(np.abs(anchors))]

    levels = (slopes[-1] / 2, 0.0, slopes[-1], slopes[np.argmin(gaps)])
    return min(map(levelled, levels), key=lambda keys: float((np.abs(2 * keys[0] * y) + np.abs(keys[1])).max()))


def reach_of_keys(keys: KeysOnAxis, y: Float[np.ndarray, " keys"]) -> int:
    """Return a k such that, at the place y of each key, the k-th neighbours and all farther keys are negligible."""
    anchors, bias = keys.anchors, keys.bias
    own = 2 * anchors * y + bias
    for k in range(1, len(y)):
        before = own[k:] - (2 * anchors[:-k] * y[k:] + bias[:-k])
        after = own[:-k] - (2 * anchors[k:] * y[:-k] + bias[k:])
        if min(before.min(), after.min()) > NEGLIGIBLE_EXPONENT:
            return k
    return len(y) - 1


def middle_of_groups(
    f: Float[np.ndarray, "points outputs"], which: Int[np.ndarray, " points"], count: int
) -> Float[np.ndarray, "groups outputs"]:
    """Return, for each group of points that are equal in the program's dtype, the middle of their values."""
    low, high = np.full((count, f.shape[1]), np.inf), np.full((count, f.shape[1]), -np.inf)
    np.minimum.at(low, which, f)
    np.maximum.at(high, which, f)
    return low / 2 + high / 2


@dataclass(frozen=True, eq=False)
class NodeKeys:
    """Keys on one axis, with the linear maps from a table's nodes to the values of the keys, and back."""

    num_nodes: int
    keys: KeysOnAxis
    c: float
    kind: str  # "even" or "graded", fewer keys than nodes; or "nodes", a key for each
    solve: Callable[[Float[np.ndarray, "nodes lines"]], Float[np.ndarray, "p lines"]]  # f at the nodes → values
    weights_at: Callable[[Any], Any]  # the weights of the keys at chosen nodes, dense or sparse

    @property
    def p(self) -> int:
        return len(self.keys.anchors)

    def apply(self, values: Float[np.ndarray, "p lines"]) -> Float[np.ndarray, "nodes lines"]:
        """Return the output at all nodes for values of the keys, block by block."""
        step = max(1024, COLUMNS_AT_ONCE // self.p)
        starts = range(0, self.num_nodes, step)
        return np.concatenate([self.weights_at(slice(i, min(i + step, self.num_nodes))) @ values for i in starts])


@dataclass(frozen=True)
class Candidate:
    """A lattice with a cut (a ridge for many anchors), its error at the nodes, and its largest value per limit."""

    lattice: Lattice
    cut: float
    error: float
    growth: float


class NodeAxis:
    """The nodes of one axis, rounded to the dtype in which the network receives them."""

    def __init__(self, nodes: Float[np.ndarray, " nodes"], dtype: str) -> None:
        self.dtype, self.x = dtype, stored(nodes, dtype)
        self.lo, self.hi = float(nodes[0]), float(nodes[-1])
        gaps = np.diff(np.unique(self.x))
        self.is_uneven = bool(gaps.max(initial=0.0) > UNEVEN * gaps.min(initial=math.inf))

    def __len__(self) -> int:
        return len(self.x)

    # --- fewer keys than nodes: least squares -------------------------------------------------------------------------

    def smallest(self, sections: Sections, eps: float) -> Candidate | None:
        """Return a fit with the fewest anchors, fewer than nodes, and an error ≤ eps on these sections, or None."""
        if self._is_hopeless(sections, eps):
            return None
        sizes = ladder(ANCHOR_COUNTS, len(self) - 1)
        return fewest(sizes, lambda p, before: self.best(p, sections, eps), eps, resolution=32).met

    def _is_hopeless(self, sections: Sections, eps: float) -> bool:
        """Whether even three anchors for four nodes leave a large error. Then the table is noise for smooth fits."""
        start = max(0, (len(self) - NODES_TESTED) // 2)  # on a long axis a piece is enough
        piece = slice(start, start + NODES_TESTED)
        some = NodeAxis(self.x[piece], self.dtype)
        if some.lo == some.hi:
            return False
        free = Sections(sections.f[piece], sections.solved[piece], math.inf)
        lattice = Lattice(max(2, 3 * len(some) // 4), 0.0, 0.5, is_graded=self.is_uneven)
        found = some._candidate(lattice, some._banded(lattice, np.arange(len(some))), free)
        return found is not None and found.error > max(10 * eps, HOPELESS_ACCURACY * float(np.abs(sections.f).max()))

    def best(self, p: int, sections: Sections, eps: float) -> Candidate | None:
        """Return the fit of p anchors with the smallest values and an error ≤ eps, otherwise with the least error."""
        rows = self._rows(3 * p + 32)
        some = Sections(sections.f[rows], sections.solved[rows], sections.limits)
        lattices = menu(p, self.is_uneven)
        tried = (self._candidate(lattice, self._solver(lattice, rows), some) for lattice in lattices)
        found = [candidate for candidate in tried if candidate is not None]
        near = [candidate for candidate in found if candidate.error <= eps]
        if near:
            return min(near, key=lambda candidate: candidate.growth)
        return min(found, key=lambda candidate: candidate.error, default=None)

    def _rows(self, count: int) -> np.ndarray:
        """Return the indices of about `count` nodes at most, evenly spread over their order."""
        if len(self) <= count:
            return np.arange(len(self))
        return np.unique(np.linspace(0, len(self) - 1, count).round().astype(int))

    def _candidate(self, lattice: Lattice, fit: ValueSolver, sections: Sections) -> Candidate | None:
        """Return the fit with the first cut that keeps the values small, or None if none does."""
        found = fit.first_cut(sections)
        if found is None:
            return None
        values = fit.values(sections.f, found.cut)
        assert values is not None  # the same equations have been solved for other lines
        error = float(np.abs(sections.f - fit.weights @ values).max())
        return Candidate(lattice, found.cut, error, found.growth)

    def _solver(self, lattice: Lattice, rows: np.ndarray) -> ValueSolver:
        if lattice.p > FEW_ANCHORS:
            return self._banded(lattice, rows)
        return Decomposition(self._keys(lattice).weights(self.x[rows]), AXIS_CUTS)

    def _banded(self, lattice: Lattice, rows: np.ndarray) -> Ridged:
        keys = self._keys(lattice)
        places = keys.y(lattice.graded_places(self.x)) if lattice.is_graded else lattice.c * keys.anchors
        return Ridged(band_of_weights(keys, self.x[rows], places), BAND_RIDGES)

    def _keys(self, lattice: Lattice) -> KeysOnAxis:
        if lattice.is_graded:
            return self._keys_at(lattice.graded_places(self.x), lattice.c)
        return lattice.keys(self.lo, self.hi, self.dtype)

    def _keys_at(self, x: Float[np.ndarray, " p"], c: float) -> KeysOnAxis:
        # y is 0 where keys are closest: there slopes are steepest, and y must be most exact.
        origin = float(x[np.argmin(np.diff(x))])
        scale, offset = stored_coordinate((len(x) - 1) / (self.hi - self.lo), origin, self.dtype)
        anchors, bias = keys_at_nodes(x * scale + offset, c)
        return KeysOnAxis(scale, offset, stored(anchors, self.dtype), bias)

    def smooth(self, candidate: Candidate) -> NodeKeys:
        """Return the keys of the candidate, fitted to about 20 nodes per anchor."""
        lattice, cut = candidate.lattice, candidate.cut
        kind, keys = "graded" if lattice.is_graded else "even", self._keys(lattice)
        rows = self._rows(20 * lattice.p + 32)
        some = self._solver(lattice, rows)

        def solve(f: np.ndarray) -> np.ndarray:
            """Solve for the values, with the largest ridge if rounding makes the equations indefinite."""
            tried = (some.values(f[rows], each) for each in (cut, some.cuts[-1]))
            return next(found for found in tried if found is not None)

        def weights_at(chosen: Any) -> Any:
            return self._solver(lattice, chosen).weights

        return NodeKeys(len(self), keys, lattice.c, kind, solve, weights_at)

    # --- a key for every node -----------------------------------------------------------------------------------------

    def at_nodes(self, c: float) -> NodeKeys:
        """Return a key for each node, at which it leads its neighbours by c (`keys_at_nodes`).

        The weights W of the keys at the nodes are a band matrix, nearly the identity for large c. The values W⁻¹f give
        f at the nodes. Nodes that are equal in the program's dtype share a key.
        """
        from scipy.sparse.linalg import splu

        x, which = np.unique(self.x, return_inverse=True)
        keys = self._keys_at(x, c)
        weights = band_of_weights(keys, x, keys.y(x))
        inverse = splu(weights.tocsc(), permc_spec="NATURAL").solve

        def solve(f: np.ndarray) -> np.ndarray:
            return inverse(f if len(x) == len(self) else middle_of_groups(f, which, len(x)))

        return NodeKeys(len(self), keys, c, "nodes", solve, lambda chosen: weights[which[chosen]])
