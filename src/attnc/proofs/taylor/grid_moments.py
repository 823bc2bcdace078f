"""Moments of a head whose keys form a tensor grid: sums over keys factorise, axis by axis.

The slopes are a_k = (a_1[k_1], …, a_d[k_d]), the offsets c_k = c_1[k_1] + … + c_d[k_d] + η_k with small η_k, mostly the
rounding of a sum. So ω_k = e^{η_k} Π_i ω_i[k_i], and with the columns U_k = e^{η_k} and e^{η_k}(v_k − v0) the
moments
    Σ_k U_k Π_i w_i z_i^{j_i}/j_i!
are the tensor U contracted with one axis after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.jet_balls import TINY, above
from attnc.proofs.taylor.moments import KeyMoments, Moments
from attnc.proofs.taylor.polynomials import Layout, gamma, layout
from attnc.proofs.taylor.weights import (
    EXP_ERROR,
    LEFT_OUT_BELOW,
    STEEP,
    Weights,
    box_around,
    leaks,
    least_denominator,
    powers,
    relative_error,
)

LARGEST_MISFIT = 1.0
"""Largest |η_k| of a grid: beyond it e^η is no longer near 1, and the keys near a box are not a window of the grid."""
_STRESS = 2.0**49
"""K ≥ 1 in Π(1 + κ_i) − 1 ≤ (Π(1 + Kκ_i) − 1)/K: one sum bounds the errors κ_i of all factors, which are some 2⁻⁵³."""


def moments_of(head: SoftHead[Enclosed]) -> KeyMoments:
    """The moments of a head, axis by axis where its keys form a grid of two axes or more."""
    known = KeyMoments.of(head)
    keys, d = known.keys, known.keys.num_inputs
    grid = keys.as_grid() if d > 1 and keys.carried is None else None
    if grid is None or grid.has_duplicates or min(grid.shape) < 2:
        return known
    split = grid.offsets_by_means()
    if not np.abs(split.misfit).max() <= LARGEST_MISFIT:
        return known
    back = tuple(reversed(range(1, d)))
    values = np.ascontiguousarray(keys.values[grid.keys].transpose(*back, d, 0))
    slopes, misfit = tuple(rows[:, 0] for rows in grid.rows), split.misfit.transpose(*back, 0).copy()
    return GridMoments(known.head, known.axes, keys, slopes, split.lines, values, misfit, split.misfit_error)


@dataclass(frozen=True, eq=False)
class GridMoments(KeyMoments):
    """The moments of a head whose keys are a grid. In `values` the last axis stands first: (n_d, …, outputs, n_1)."""

    slopes: tuple[Float[np.ndarray, " n"], ...]
    offsets: tuple[Float[np.ndarray, " n"], ...]
    values: np.ndarray
    misfit: np.ndarray  # η, (n_d, …, n_2, n_1)
    misfit_error: float

    def numbers(self, space: Layout) -> int:
        """The count of numbers that `moments` holds for a box."""
        return 2 * (space.order + 2) * (self.values.size + self.misfit.size) // len(self.slopes[-1])

    def moments(self, space: Layout, centres: np.ndarray, radii: np.ndarray) -> Moments:
        """The moments at a chunk of neighbouring boxes."""
        m, box = space.order, box_around(centres, radii)
        window, far = self._window(box)
        axes = [
            Weights.of(a[part, None], c[part], 0.0, centres[:, [i]], radii[:, [i]], STEEP / space.d)
            for a, c, part, i in zip(self.slopes, self.offsets, window, self.axes, strict=True)
        ]
        columns, shift, size = self.columns(window, axes)
        sums = contract(space, [axis.w[:, None] * powers(axis.z[0], m) for axis in axes], columns)
        rows = [axis.most[:, None] * powers(axis.rho, m + 1) for axis in axes]
        stressed = [axis.most * (1 + _STRESS * axis.error) for axis in axes]
        tail, total = contract_sizes([*zip(rows, stressed, strict=True)], np.abs(columns))

        # The terms of a sum: powers m + d, a product with w on each axis, U twice, and for each axis a sum.
        rounding = gamma(m + 2 * space.d + 4 + sum(axis.w.shape[1] for axis in axes))
        # Every term has the errors of its score, and of the exponentials in w and in e^η.
        unsure = relative_error(np.asarray(self.unsure(box).max() + self.misfit_error))
        common = float(above(unsure + (space.d + 2) * EXP_ERROR * (1 + unsure)))
        everything = above(total[:, 0] * (1 + common))
        rounded = total * (rounding + common + 1 / _STRESS)
        value_error = self.value_error(box).max(axis=0) + TINY * size + far * size
        unknown = total[:, 0] * (common + 1 / _STRESS)
        boxes = (space.count, len(shift), len(centres))
        return Moments(
            np.broadcast_to(shift[:, None], boxes[1:]),
            np.ascontiguousarray(sums[:, 1:].transpose(2, 1, 0)),
            above((rounded + tail)[:, 1:].T + value_error[:, None] * everything),
            rounded[:, 1:].T + value_error[:, None] * everything,
            np.ascontiguousarray(sums[:, 0].T),
            above((rounded + tail)[:, 0] + far * everything),
            least_denominator(space, sums[:, 0], rounding * everything, unknown),
        )

    def columns(
        self, window: Sequence[slice], axes: Sequence[Weights]
    ) -> tuple[np.ndarray, Float[np.ndarray, " outputs"], Float[np.ndarray, " outputs"]]:
        """U within the window, (…, 1 + outputs, n_1); v0, the value at the box in the middle; a bound of |v − v0|."""
        *others, first = (*window[:0:-1], window[0])
        values, scale = self.values[(*others, slice(None), first)], self.scale[(*others, first)]
        middle, shift = len(axes[0].w) // 2, values
        for axis in axes[:0:-1]:
            shift = np.tensordot(axis.w[middle] / axis.w[middle].sum(), shift, axes=(0, 0))
        shift = shift @ (axes[0].w[middle] / axes[0].w[middle].sum())
        columns = np.concatenate([scale[..., None, :], (values - shift[:, None]) * scale[..., None, :]], axis=-2)
        return columns, shift, np.abs(self.keys.values).max(axis=0) + np.abs(shift)

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """e^η."""
        return np.exp(self.misfit)

    def _window(self, box: Enclosed) -> tuple[list[slice], float]:
        """The keys on every axis that are near somewhere in the box; and Σ ω_k/D over all other keys of the grid.

        A key left out is outside the window on one axis at least, and up to e^η each axis has its own softmax: the keys
        outside on axis i weigh Σ ω_i[n]/D_i, at most Σ ω_i[n]/ω_i[*].
        """
        window, outside = [], 0.0
        for a, c, i in zip(self.slopes, self.offsets, self.axes, strict=True):
            lag = leaks(a[:, None], c, np.zeros(len(a)), box[[i]])
            near = np.flatnonzero(lag > LEFT_OUT_BELOW)
            part = slice(int(near[0]), int(near[-1]) + 1)
            window.append(part)
            outside += float(above(np.exp(np.delete(lag, part))).sum())
        spread = float(np.abs(self.misfit).max()) + self.misfit_error + float(self.unsure(box).max())
        return window, float(above(np.asarray(outside * math.exp(2 * spread)))) if outside else 0.0


@functools.lru_cache(maxsize=32)
def _places(k: int, order: int) -> list[np.ndarray]:
    """For every degree g, the indices of τ^j times the monomials of degree g in k more variables, (monomials, j)."""
    smaller, larger = layout(k, order), layout(k + 1, order)
    return [
        np.array(
            [
                [larger.index[(j, *row)] for j in range(order + 1 - g)]
                for row in smaller.exponents[smaller.degree(g)].tolist()
            ]
        )
        for g in range(order + 1)
    ]


def contract(space: Layout, tables: Sequence[np.ndarray], tensor: np.ndarray) -> np.ndarray:
    """Σ_k U_k Π_i table_i[j_i, k_i] for all |j| ≤ order, (boxes, columns, count); tables (boxes, order + 1, n_i)."""
    m, sums = space.order, _first_axis(tables[-1], tensor)
    for k, table in enumerate(reversed(tables[:-1]), start=1):
        smaller, sums = layout(k, m), _next_axis(sums, table.shape[2], is_last=k == space.d - 1)
        larger = np.empty((len(sums), layout(k + 1, m).count, sums.shape[3]))
        for g, place in enumerate(_places(k, m)):
            larger[:, place] = table[:, None, : m + 1 - g] @ sums[:, smaller.degree(g)]
        sums = larger
    return sums.swapaxes(1, 2)


def contract_sizes(
    tables: Sequence[tuple[np.ndarray, np.ndarray]], tensor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(boxes, columns) twice, of tables (rows, stressed) for each axis, (boxes, order + 1, n) and (boxes, n).

    The first is Σ_k U_k Σ_{|j|=order} Π_i rows_i[j_i, k_i], the second Σ_k U_k Π_i stressed_i[k_i].
    """
    top = tables[0][0].shape[1]
    sums = _first_axis(np.concatenate([tables[-1][0], tables[-1][1][:, None]], axis=1), tensor)
    for rows, stressed in reversed(tables[1:-1]):
        sums = _next_axis(sums, rows.shape[2], is_last=False)
        larger = np.zeros((len(sums), top + 1, sums.shape[3]))
        for g in range(top):
            larger[:, g:top] += rows[:, : top - g] @ sums[:, g]
        larger[:, top] = (stressed[:, None] @ sums[:, top])[:, 0]
        sums = larger
    rows, stressed = tables[0]
    sums = _next_axis(sums, rows.shape[2], is_last=True)
    tail = np.einsum("bjnc,bjn->bc", sums[:, :top], rows[:, ::-1])
    return above(tail), above(np.einsum("bnc,bn->bc", sums[:, top], stressed))


def _first_axis(table: np.ndarray, tensor: np.ndarray) -> np.ndarray:
    """The last axis of the grid, for all boxes in one product of matrices."""
    boxes, rows, n = table.shape
    return (table.reshape(boxes * rows, n) @ tensor.reshape(n, -1)).reshape(boxes, rows, -1)


def _next_axis(sums: np.ndarray, n: int, *, is_last: bool) -> np.ndarray:
    """(boxes, rows, n, rest): the keys of the next axis apart; the last of all stands behind the columns."""
    if is_last:
        return sums.reshape(*sums.shape[:2], -1, n).swapaxes(2, 3)
    return sums.reshape(*sums.shape[:2], n, -1)
