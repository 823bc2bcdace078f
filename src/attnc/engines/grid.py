"""Heads whose anchors are a grid: their softmax is a product of one softmax an axis.

A head is a grid if its scores are Σ_i a_{i,k_i}·t_i + c_k over all index tuples k, with t_i the entries of its query
that move, and c_k = Σ_i c_{i,k_i} + ρ_k with a small ρ. Then its weights are Π_i softmax_i(t_i)_{k_i}, up to factors
e^{ρ_k}: p^d exponentials become d·p, or fewer (see `grid_axis`), and values are contracted one axis after the other.
All of it is read off the folded weights, whatever the order of the keys.

Arithmetic is float64 whatever the program's dtype. Its roundings are among those that `ir.rounding` grants to any
evaluation: of t its own and a few relative ones more, of scores γ_2(|a t| + |c|) an axis. What goes beyond that is
bounded by `truncation`: Σ_k |weight used − weight| for the weights that windows leave out, for powers in place of
exponentials, for d exponentials in place of one, for ρ, and for offsets that are larger one by one than together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.engines.grid_axis import Axis, exact_sum, make_axis
from attnc.ir.normal_form import FoldedHead
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, gamma, up

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FEWEST_KEYS = 64
"""With fewer keys a plain softmax is as fast."""
MOST_RESIDUE = 5e-13
"""A larger ρ is not left out but kept: in the values, and as a column of its own that is divided by."""
LARGEST_RESIDUE = 4.0
"""A head with a larger ρ is no grid. In float32 the rounding of large offsets alone may be near 1."""
MOST_TRUNCATION = 1e-12
"""A head that could be off by more is not evaluated as a grid."""

U = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, eq=False)
class Grid:
    """Anchors on a grid. If `is_weighted`, the last column of values is the weight e^ρ, which the others contain.

    In exact arithmetic, |evaluation − softmax| ≤ truncation · max_k |v_k|; in floating point this comes on top of what
    a plain evaluation may be off by.
    """

    features: tuple[int, ...]  # the entries of the query, one an axis
    axes: tuple[Axis, ...]
    values: Float[np.ndarray, "*anchors columns"]
    is_weighted: bool
    truncation: float

    def padded_values(self) -> Float[np.ndarray, "*padded columns"]:
        """Zeros where no anchor is."""
        padded = np.zeros((*(axis.padded for axis in self.axes), self.values.shape[-1]))
        inside = [slice(axis.front, axis.front + p) for axis, p in zip(self.axes, self.values.shape, strict=False)]
        padded[tuple(inside)] = self.values
        return padded


def recognise(head: FoldedHead) -> Grid | None:
    """The head as a grid, or None if it is none (or has a mask, several queries, or keys or values that move)."""
    is_plain = head.key_segments is None and head.queries.shape[0] == 1 and head.values.shape[1] > 0
    if not (is_plain and head.keys.is_constant and head.values.is_constant and head.keys.shape[0] >= FEWEST_KEYS):
        return None
    lattice = _lattice(head)
    split = None if lattice is None else _split(lattice.offsets)
    if lattice is None or split is None:
        return None
    counts, d = lattice.offsets.shape, lattice.offsets.ndim
    values = head.values.constant.toarray().astype(np.float64)[lattice.order].reshape(*counts, -1)
    residue = float(up(np.ptp(split.rho) / 2, 4))
    is_weighted = residue > MOST_RESIDUE
    # With P = Σ p_k e^{ρ_k}: Σ|p e^ρ/P − q e^ρ/Q| ≤ 2·max e^ρ·Σ|p − q|/P, and P ≥ min e^ρ.
    growth = 2 * math.exp(2 * residue) if is_weighted else 1.0
    axes = tuple(make_axis(a, c, d, growth) for a, c in zip(lattice.slopes, split.parts, strict=True))
    # An axis more is an exponential, a sum, a quotient and a product more; so is e^ρ.
    terms = [(d + 1) * (2 * LIBM_ULPS + 6) * U, gamma(d + 3, U) * split.excess]
    if is_weighted:
        weights = np.exp(split.rho)[..., None]
        values = np.concatenate([values * weights, weights], axis=-1)
    else:
        terms.append(residue)
    terms += [growth * axis.error for axis in axes]
    truncation = float(up(math.fsum(terms), 8))
    is_held = np.abs(values).max(initial=0.0) < 1e200  # times a weight, still far from overflow; not NaN
    if not (truncation <= MOST_TRUNCATION and is_held):
        return None
    return Grid(lattice.features, axes, values, is_weighted, truncation)


@dataclass(frozen=True, eq=False)
class _Lattice:
    features: tuple[int, ...]
    slopes: list[Float[np.ndarray, " p"]]  # ascending, one an axis
    order: Int[np.ndarray, " keys"]  # the keys, in the order of the grid
    offsets: Float[np.ndarray, "*counts"]


def _lattice(head: FoldedHead) -> _Lattice | None:
    """Slopes must be those of a full grid to the last bit: an error in a slope grows with t, and no bound holds it."""
    keys = head.keys.constant.tocsc()
    is_moving = np.diff(head.queries.linear.indptr) > 0
    constants = head.queries.constant.toarray()[0].astype(np.float64)
    features, slopes = [], []
    places, offsets = np.zeros(keys.shape[0], np.int64), np.zeros(keys.shape[0])
    for feature in range(keys.shape[1]):
        column = keys[:, [feature]].toarray()[:, 0].astype(np.float64)
        if not is_moving[feature]:
            offsets += column * constants[feature]
            continue
        levels, place = np.unique(column, return_inverse=True)
        if len(levels) == 1:  # adds the same to every score
            continue
        features.append(feature)
        slopes.append(levels)
        if keys.shape[0] % math.prod(map(len, slopes)):
            return None
        places = places * len(levels) + place
    counts = [len(levels) for levels in slopes]
    if not counts or math.prod(counts) != keys.shape[0] or not np.isfinite([*map(np.sum, slopes), offsets.sum()]).all():
        return None
    order = np.argsort(places, kind="stable")
    if (places[order] != np.arange(len(places))).any():
        return None
    return _Lattice(tuple(features), slopes, order, offsets[order].reshape(counts))


@dataclass(frozen=True, eq=False)
class _Split:
    """c_k = Σ_i parts_i[k_i] + ρ_k up to a constant; Σ_i|parts_i[k_i]| ≤ |c_k| + excess."""

    parts: list[Float[np.ndarray, " p"]]
    rho: Float[np.ndarray, "*counts"]
    excess: float


def _split(offsets: Float[np.ndarray, "*counts"]) -> _Split | None:
    """The parts are the lines through the smallest |c|: where all c have one sign, as in −|L|², none exceeds them."""
    least = np.unravel_index(np.abs(offsets).argmin(), offsets.shape)
    parts, terms = [], [offsets, -offsets[least] * np.ones(offsets.shape)]
    size = -np.abs(offsets)
    for axis in range(offsets.ndim):
        part = offsets[(*least[:axis], slice(None), *least[axis + 1 :])] - offsets[least]
        along = part.reshape([-1 if i == axis else 1 for i in range(offsets.ndim)])
        parts.append(part)
        terms.append(-along)
        size = size + np.abs(along)
    rho = exact_sum(*terms)
    return _Split(parts, rho, float(max(0.0, size.max()))) if np.abs(rho).max() <= LARGEST_RESIDUE else None
