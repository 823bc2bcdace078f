"""A soft head: scores that are affine in the input, and values that are constant or affine in it.

Every attention head with constant keys becomes a soft head when the affine maps around it are folded. Constructions
choose its numbers, provers enclose them, engines evaluate them and plots draw them.

Keys that form a tensor grid are recognised here and nowhere else (`SoftHead.as_grid`): their softmax is a product of
one softmax per axis, up to the part of the offsets that is not a sum over axes (`AdditiveOffsets`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from attnc.ir.reference import softmax
from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import UNIT_ROUNDOFF, compensated_sum, gamma, up


@dataclass(frozen=True, eq=False)
class Enclosed:
    """An array of real numbers, each within `radius` of the float64 number `mid`."""

    mid: Float[np.ndarray, "any ..."]
    radius: Float[np.ndarray, "any ..."]

    @classmethod
    def exact(cls, mid: Float[np.ndarray, "any ..."]) -> Enclosed:
        return cls(mid, np.zeros(mid.shape))

    def __getitem__(self, index: Any) -> Enclosed:
        return Enclosed(self.mid[index], self.radius[index])


N = TypeVar("N", np.ndarray, Enclosed)
"""The numbers of a head: floats, or enclosures of the numbers that the stored weights define.

With floats, slopes and values may also be matrices of scipy.sparse: a softmax over 10⁴ features has 10⁴ × 10⁴ slopes.
"""


def unpacked(matrix: Any) -> np.ndarray:
    """Return a matrix that may be sparse as a dense array."""
    return matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix.toarray())


@dataclass(frozen=True, eq=False)
class SoftHead(Generic[N]):
    """A(x) = Σ_k e^{s_k(x)} (v_k + V_k·x) / Σ_k e^{s_k(x)} with scores s_k(x) = a_k·x + c_k."""

    slopes: N  # (keys, d): the a_k
    offsets: N  # (keys,): the c_k
    values: N  # (keys, outputs): the v_k
    carried: N | None = None  # (keys, outputs, d): the V_k of a gate, whose values move with the input

    # --- shapes and parts ---------------------------------------------------------------------------------------------

    @property
    def mid(self) -> SoftHead[np.ndarray]:
        """The head of the float64 numbers, without the radii of an enclosure."""
        return self._mapped(_mid)

    @property
    def num_keys(self) -> int:
        return len(_mid(self.offsets))

    @property
    def num_inputs(self) -> int:
        return _mid(self.slopes).shape[1]

    @property
    def num_outputs(self) -> int:
        return _mid(self.values).shape[1]

    @property
    def active(self) -> Int[np.ndarray, " active"]:
        """The inputs along which slopes differ or that keys carry. All scores depend on the others equally."""
        differ = np.ptp(unpacked(_mid(self.slopes)), axis=0) > 0
        if self.carried is not None:
            differ |= (_mid(self.carried) != 0).any(axis=(0, 1))
        return np.flatnonzero(differ)

    def restricted(self, inputs: Int[np.ndarray, " chosen"]) -> SoftHead[N]:
        """Return the head as a function of some of the inputs. The others are 0."""
        carried = None if self.carried is None else self.carried[:, :, inputs]
        return SoftHead(self.slopes[:, inputs], self.offsets, self.values, carried)

    def chosen(self, keys: Any) -> SoftHead[N]:
        """Return the head with only some of the keys: an index array, a slice or a mask."""
        return self._mapped(lambda part: part[keys])

    def _mapped(self, function: Callable[[Any], Any]) -> SoftHead[Any]:
        """Return the head of function(part) for each of its parts."""
        carried = None if self.carried is None else function(self.carried)
        return SoftHead(function(self.slopes), function(self.offsets), function(self.values), carried)

    # --- floats -------------------------------------------------------------------------------------------------------

    @staticmethod
    def of_one_variable(
        slopes: Float[np.ndarray, " keys"],
        offsets: Float[np.ndarray, " keys"],
        values: Float[np.ndarray, " keys"],
        carried: Float[np.ndarray, " keys"] | None = None,
    ) -> SoftHead[np.ndarray]:
        """Return a head with one input and one output."""
        moving = None if carried is None else carried[:, None, None]
        return SoftHead(slopes[:, None], offsets, values[:, None], moving)

    def scores(self: SoftHead[np.ndarray], x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points keys"]:
        return np.asarray(x @ self.slopes.T + self.offsets)

    def weights(self: SoftHead[np.ndarray], x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points keys"]:
        """Return the softmax of the scores. The largest score is subtracted first, so that no exponential overflows."""
        return softmax(self.scores(x))

    def __call__(self: SoftHead[np.ndarray], x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        weights = self.weights(x)
        if self.carried is None:
            return weights @ self.values
        moved = self.values + np.einsum("koi,ni->nko", self.carried, x)
        return np.asarray((weights[:, :, None] * moved).sum(axis=1))

    def gradients(
        self: SoftHead[np.ndarray], x: Float[np.ndarray, "points d"]
    ) -> Float[np.ndarray, "points outputs d"]:
        """Return Σ_k w_k (v_k + V_k·x − A)(a_k − ā) + Σ_k w_k V_k at points."""
        weights, moved = self.weights(x), self.values[None]
        if self.carried is not None:
            moved = moved + np.einsum("koi,ni->nko", self.carried, x)
        apart = moved - (weights[:, :, None] * moved).sum(axis=1, keepdims=True)
        mean = weights @ self.slopes
        weighted = weights[:, :, None] * apart
        found = np.einsum("nko,ki->noi", weighted, self.slopes) - weighted.sum(axis=1)[:, :, None] * mean[:, None]
        if self.carried is not None:
            found += np.einsum("nk,koi->noi", weights, self.carried)
        return np.asarray(found)

    def log_sum(self: SoftHead[np.ndarray], x: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
        """Return log Σ_k e^{s_k(x)}."""
        scores = self.scores(x)
        top = scores.max(axis=1)
        return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))

    def shifted(self: SoftHead[np.ndarray], shift: Float[np.ndarray, " d"] | float) -> SoftHead[np.ndarray]:
        """Return the head of x ↦ A(x + shift)."""
        offsets = self.offsets + (self.slopes * shift).sum(axis=1)
        values = self.values if self.carried is None else self.values + (self.carried * shift).sum(axis=2)
        return SoftHead(self.slopes, offsets, values, self.carried)

    def scaled(self: SoftHead[np.ndarray], scale: Float[np.ndarray, " d"] | float) -> SoftHead[np.ndarray]:
        """Return the head of x ↦ A(scale·x), with one scale for each input or one for all."""
        carried = None if self.carried is None else self.carried * scale
        return SoftHead(self.slopes * scale, self.offsets, self.values, carried)

    def combined(
        self: SoftHead[np.ndarray],
        factor: float,
        slope: Float[np.ndarray, "outputs d"] | float = 0.0,
        constant: Float[np.ndarray, " outputs"] | float = 0.0,
    ) -> SoftHead[np.ndarray]:
        """Return the head of x ↦ factor·A(x) + slope·x + constant. Weights sum to 1, so values take the affine part."""
        values, carried = factor * self.values + constant, self.carried
        if carried is None and not np.any(slope):
            return SoftHead(self.slopes, self.offsets, values)
        if carried is None:
            carried = np.zeros((*self.values.shape, self.slopes.shape[1]))
        return SoftHead(self.slopes, self.offsets, values, factor * carried + slope)

    # --- grids --------------------------------------------------------------------------------------------------------

    def as_grid(self, groups: Sequence[Int[np.ndarray, " inputs"]] | None = None) -> KeyGrid | None:
        """Return the tensor grid that the keys form, with one axis for each group of inputs, or None if they form none.

        Without `groups` every input is an axis of its own. Slopes must be those of a grid to the last bit: the effect
        of an error in a slope grows with the input without bound. Radii of an enclosure are ignored.
        """
        slopes, offsets = unpacked(_mid(self.slopes)), _mid(self.offsets)
        groups = [np.array([i]) for i in range(slopes.shape[1])] if groups is None else groups
        rows: list[np.ndarray] = []
        places = np.zeros(len(offsets), np.int64)
        for group in groups:
            own = slopes[:, group]
            if own.shape[1] == 1:
                levels, row = np.unique(own[:, 0], return_inverse=True)
                distinct = levels[:, None]
            elif own.shape[1]:
                distinct, row = np.unique(own, axis=0, return_inverse=True)
            else:
                distinct, row = own[:1], np.zeros(len(own), np.int64)
            rows.append(distinct)
            if math.prod(map(len, rows)) > len(offsets):
                return None
            places = places * len(distinct) + row.reshape(-1)
        if not (np.isfinite(offsets).all() and all(np.isfinite(each).all() for each in rows)):
            return None
        shape = tuple(map(len, rows))
        keys, order = np.full(math.prod(shape), -1), np.argsort(offsets, kind="stable")
        keys[places[order]] = order  # the last assignment has the largest offset
        if (keys < 0).any():
            return None
        return KeyGrid(tuple(groups), tuple(rows), keys.reshape(shape), places, offsets[keys].reshape(shape))


def _mid(numbers: np.ndarray | Enclosed) -> np.ndarray:
    return numbers.mid if isinstance(numbers, Enclosed) else numbers


@dataclass(frozen=True, eq=False)
class KeyGrid:
    """Keys on a tensor grid: the key at place (m_1, …, m_n) has the slopes rows[i][m_i] on the inputs groups[i].

    Several keys may have the same slopes. Then the key with the largest offset is in the grid.
    """

    groups: tuple[Int[np.ndarray, " inputs"], ...]
    rows: tuple[Float[np.ndarray, "rows inputs"], ...]  # in lexicographic order: ascending where a group has one input
    keys: Int[np.ndarray, "*rows"]
    places: Int[np.ndarray, " keys"]  # the place of every key in the flat grid
    offsets: Float[np.ndarray, "*rows"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.keys.shape

    @property
    def has_duplicates(self) -> bool:
        """Whether some keys share their slopes, so that there are more keys than places."""
        return len(self.places) > self.keys.size

    def offsets_through_least(self) -> AdditiveOffsets:
        """Return offsets as sums of lines through the smallest |c_k|. If all have one sign, no line exceeds them."""
        least = tuple(int(i) for i in np.unravel_index(np.abs(self.offsets).argmin(), self.shape))
        through: list[Any] = [(*least[:i], slice(None), *least[i + 1 :]) for i in range(len(least))]
        constant = float(self.offsets[least])
        return AdditiveOffsets.of(self.offsets, [self.offsets[line] - constant for line in through], constant)


@dataclass(frozen=True, eq=False)
class AdditiveOffsets:
    """c_k = constant + Σ_i lines[i][m_i] + misfit_k. A computed misfit is within `misfit_error` of the exact one."""

    constant: float
    lines: tuple[Float[np.ndarray, " rows"], ...]
    misfit: Float[np.ndarray, "*rows"]
    misfit_error: float

    @classmethod
    def of(cls, table: Float[np.ndarray, "*rows"], lines: Sequence[np.ndarray], constant: float) -> AdditiveOffsets:
        d = table.ndim
        along = [-line.reshape([-1 if i == axis else 1 for i in range(d)]) for axis, line in enumerate(lines)]
        misfit, lost = compensated_sum(table, np.full(table.shape, -constant), *along)
        # The errors of d + 1 additions are added with d roundings, and to their sum with one more.
        slack = gamma(d + 2, UNIT_ROUNDOFF["float64"]) * (lost + np.abs(misfit))
        return cls(constant, tuple(lines), misfit, float(up(slack.max(), 4)))
