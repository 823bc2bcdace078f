"""Rigorous folding of stored weights: sparse matrices of reals known to within a radius, and affine forms of these.

In a matrix product the errors of products and sums are computed (Dekker, Knuth) and added to the result. So the radius
of an entry is about one unit in its own last place, even after cancellation, and zero if all operations were exact.

`EnclosedForm` and `SizeForm` are types of numbers for `attnc.ir.normal_form`. The first encloses the real numbers that
the stored weights define. The second has the sums of the absolute values of all paths, to which rounding is relative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.ir.soft_head import Enclosed
from attnc.numerics.arrays import Float, Int
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, product_and_error, sum_and_error, up

U = UNIT_ROUNDOFF["float64"]
TERMS_PER_BLOCK = 2**20
"""The number of products that are computed before they are summed: 2**20 of them take about 100 MB."""
_RELATIVE = ContextVar("relative", default=0.0)
_LEAST_EXPONENT = -900  # below 2^−900 the error of a product may underflow, so it is bounded instead


@contextmanager
def weights_within(relative: float) -> Iterator[None]:
    """Take every stored number w as the interval w·[1 − relative, 1 + relative] while programs are folded.

    A bound that is proved from such a folding holds, in exact arithmetic, for all programs with weights in the
    intervals.
    """
    token = _RELATIVE.set(relative)
    try:
        yield
    finally:
        _RELATIVE.reset(token)


def relative_width() -> float:
    """Return the relative half-width of stored numbers. It is 0 outside of `weights_within`."""
    return _RELATIVE.get()


@dataclass(frozen=True, eq=False)
class EnclosedSparse:
    """A sparse matrix: entry (row[i], column[i]) is within radius[i] of mid[i], and all other entries are 0.

    Entries are sorted by row and column, and none occurs twice. Rows are labels: any integers ≥ 0. Columns are below
    `num_columns`.
    """

    row: Int[np.ndarray, " entries"]
    column: Int[np.ndarray, " entries"]
    mid: Float[np.ndarray, " entries"]
    radius: Float[np.ndarray, " entries"]
    num_columns: int

    @classmethod
    def exact(cls, row: np.ndarray, column: np.ndarray, values: np.ndarray, num_columns: int) -> EnclosedSparse:
        """Make a matrix of stored numbers, given in any order. Zeros are dropped."""
        keep = np.flatnonzero(values)
        row, column = row[keep].astype(np.int64), column[keep].astype(np.int64)
        order = np.lexsort((column, row))
        mid = values[keep][order].astype(np.float64)
        return cls(row[order], column[order], mid, np.zeros(len(mid)), num_columns)

    @classmethod
    def of_matrix(cls, matrix: Float[np.ndarray, "rows columns"]) -> EnclosedSparse:
        row, column = np.nonzero(matrix)
        return cls.exact(row, column, matrix[row, column], matrix.shape[1])

    def widened(self) -> EnclosedSparse:
        """Return the same entries, each known to within `relative_width()` of itself."""
        if not (relative := relative_width()):
            return self
        return replace(self, radius=up(self.radius + up(relative * np.abs(self.mid))))

    def relabelled(self, row: np.ndarray, column: np.ndarray, num_columns: int) -> EnclosedSparse:
        """Return the same entries at other places."""
        order = np.lexsort((column, row))
        return EnclosedSparse(row[order], column[order], self.mid[order], self.radius[order], num_columns)

    def where(self, kept: np.ndarray | slice) -> EnclosedSparse:
        return EnclosedSparse(self.row[kept], self.column[kept], self.mid[kept], self.radius[kept], self.num_columns)

    def rows(self, chosen: Int[np.ndarray, " chosen"]) -> EnclosedSparse:
        """Return the matrix whose row i is row chosen[i]. A chosen row may be empty, or be chosen twice."""
        first, last = np.searchsorted(self.row, chosen), np.searchsorted(self.row, chosen, "right")
        which, place = expanded(first, last)
        return replace(self.where(place), row=which)

    def dense(self, num_rows: int) -> Enclosed:
        mid, radius = np.zeros((2, num_rows, self.num_columns))
        mid[self.row, self.column], radius[self.row, self.column] = self.mid, self.radius
        return Enclosed(mid, radius)

    def largest(self, num_rows: int) -> Float[np.ndarray, "rows columns"]:
        """Return an upper bound of the absolute value of every entry."""
        found = self.dense(num_rows)
        return up(np.abs(found.mid) + found.radius)

    def times(self, other: EnclosedSparse) -> EnclosedSparse:
        """Return the matrix product. The rows of `other` are the columns of this."""
        starts = np.searchsorted(other.row, np.arange(self.num_columns + 1))
        first, last = starts[self.column], starts[self.column + 1]
        blocks = []
        for block in _row_blocks(self.row, last - first):
            which, place = expanded(first[block], last[block])
            a, b = self.where(block).where(which), other.where(place)
            blocks.append(_product_block(a, b))
        return stacked(blocks, other.num_columns)

    def plus(self, other: EnclosedSparse) -> EnclosedSparse:
        both = stacked([self, other], self.num_columns)
        return _summed(both, np.zeros(len(both.mid)))


def expanded(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (i, place) for every i and first[i] ≤ place < last[i], in this order."""
    counts = last - first
    which = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, first[which] + offset


def _row_blocks(row: np.ndarray, counts: np.ndarray) -> list[slice]:
    """Return slices of entries with about TERMS_PER_BLOCK terms each. No row is cut."""
    cuts = [0]
    made = np.concatenate([[0], np.cumsum(counts)])
    while cuts[-1] < len(row):
        end = max(cuts[-1] + 1, int(np.searchsorted(made, made[cuts[-1]] + TERMS_PER_BLOCK)))
        cuts.append(int(np.searchsorted(row, row[end - 1], "right")) if end < len(row) else len(row))
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def stacked(parts: list[EnclosedSparse], num_columns: int) -> EnclosedSparse:
    """Join the entries of all parts; the rows of a part come after those of the parts before it."""
    parts = parts or [EnclosedSparse.of_matrix(np.zeros((0, num_columns)))]
    row, column, mid, radius = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("row", "column", "mid", "radius")
    )
    return EnclosedSparse(row, column, mid, radius, num_columns)


def _product_block(a: EnclosedSparse, b: EnclosedSparse) -> EnclosedSparse:
    """Return Σ a·b over pairs of entries with the same row of a and the same column of b."""
    value, error, unknown = _two_product(a.mid, b.mid)
    # |(a+α)(b+β) − ab| ≤ |a|β + α(|b| + β). Four units cover its three roundings.
    spread = (np.abs(a.mid) * b.radius + a.radius * (np.abs(b.mid) + b.radius)) * (1 + 4 * U)
    underflow = np.where((a.radius > 0) | (b.radius > 0), 4 * TINIEST, 0.0)
    return _summed(EnclosedSparse(a.row, b.column, value, spread + underflow + unknown, b.num_columns), error)


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (p, e, ζ), |ab − p − e| ≤ ζ, by Dekker's product of the mantissas. ζ = 0 unless ab is tiny and inexact."""
    (m, i), (n, j) = np.frexp(a), np.frexp(b)
    p, e = product_and_error(m, n)
    exponent = i + j
    with quiet():
        value, error = np.ldexp(p, exponent), np.ldexp(e, exponent)
        is_exact = (e == 0) & (np.ldexp(value, -exponent) == p)
    is_tiny = (exponent < _LEAST_EXPONENT) & ~is_exact
    if not np.isfinite(value).all():
        raise ProgramError("folding the stored weights overflows float64: scale them down")
    unknown = np.where(is_tiny, 2.0 ** (_LEAST_EXPONENT - 52), 0.0)
    return value, np.where(is_tiny, 0.0, error), unknown


def _summed(terms: EnclosedSparse, error: np.ndarray) -> EnclosedSparse:
    """Return Σ (mid + error ± radius) over terms at equal places. The roundings of the sums are added to the errors."""
    order = np.lexsort((terms.column, terms.row))
    terms, error = terms.where(order), error[order]
    row, column, value = terms.row, terms.column, terms.mid
    is_first = np.ones(len(row), bool)
    is_first[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
    first, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    count = len(first)
    num_terms = np.bincount(group, minlength=count)
    by_place: list[np.ndarray] = [np.bincount(group, part, count) for part in (error, np.abs(error), terms.radius)]
    low, size, spread = by_place
    total = value[first]
    with quiet():
        for number in range(1, int(num_terms.max(initial=0))):  # one more term of every sum that has it
            (rows,) = np.nonzero(num_terms > number)
            total[rows], lost = sum_and_error(total[rows], value[first[rows] + number])
            low[rows] += lost
            size[rows] += np.abs(lost)
        mid, lost = sum_and_error(total, low)
    if not np.isfinite(mid).all():
        raise ProgramError("folding the stored weights overflows float64: scale them down")
    # `low` sums at most 3·num_terms errors. `size` is the sum of their absolute values. `spread` has as many terms.
    slack = (4 * num_terms + 8) * U
    is_exact = (spread == 0) & (size == 0)
    radius = np.nextafter(spread * (1 + slack) + size * slack + np.abs(lost) * (1 + slack), np.inf)
    radius = np.where(is_exact, 0.0, radius)
    kept = (mid != 0) | (radius > 0)
    places = first[kept]
    return EnclosedSparse(row[places], column[places], mid[kept], radius[kept], terms.num_columns)


@dataclass(frozen=True, eq=False)
class EnclosedForm:
    """A (rows, columns) array of affine functions of u, each coefficient known to within a radius."""

    shape: tuple[int, int]
    entries: EnclosedSparse  # (rows·columns, variables + 1): the last column holds the constants

    @property
    def num_variables(self) -> int:
        return self.entries.num_columns - 1

    @staticmethod
    def stored(weights: np.ndarray) -> np.ndarray:
        """Return the numbers of a form from stored weights."""
        return weights

    @classmethod
    def identity(cls, shape: tuple[int, int], variables: np.ndarray, count: int, dtype: np.dtype[Any]) -> Self:
        size = shape[0] * shape[1]
        return cls(shape, EnclosedSparse.exact(np.arange(size), variables, np.ones(size), count + 1))

    @classmethod
    def after_stage(
        cls, writes: np.ndarray, residual: Self | None, num_carried: int, dtype: np.dtype[Any]
    ) -> tuple[Self, np.ndarray]:
        """Make every entry a variable, also constants, because a proof states for each entry which heads made it."""
        written = np.arange(writes.size)
        return cls.identity((len(writes), writes.shape[1]), written, writes.size + num_carried, dtype), written

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> Self:
        width = self.shape[1]
        places = (np.asarray(rows)[:, None] * width + np.arange(width)).ravel()
        return replace(self, shape=(len(rows), width), entries=self.entries.rows(places))

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> Self:
        return self.times_enclosed(self.stored_matrix(matrix))

    @classmethod
    def stored_matrix(cls, matrix: Float[np.ndarray, "columns new_columns"]) -> EnclosedSparse:
        return EnclosedSparse.of_matrix(cls.stored(matrix)).widened()

    def times_enclosed(self, matrix: EnclosedSparse) -> Self:
        """Return form @ matrix, for a matrix with a row for each column of the form."""
        width, new_width = max(1, self.shape[1]), matrix.num_columns
        row, j = np.divmod(self.entries.row, width)
        num_columns = self.entries.num_columns
        product = self.entries.relabelled(row * num_columns + self.entries.column, j, width).times(matrix)
        row, variable = np.divmod(product.row, num_columns)
        entries = product.relabelled(row * new_width + product.column, variable, num_columns)
        return replace(self, shape=(self.shape[0], new_width), entries=entries)

    def through(self, layer: Affine) -> Self:
        weight, constant = layer.weight, layer.constant
        size, num_columns = self.shape[0] * self.shape[1], self.entries.num_columns
        # One more row holds the constant 1, and the constants of the layer are one more column.
        one = EnclosedSparse.exact(np.array([size]), np.array([num_columns - 1]), np.ones(1), num_columns)
        row = np.concatenate([weight.flat(slice(0, 2)), constant.flat(slice(None))])
        column = np.concatenate([weight.flat(slice(2, None)), np.full(len(constant.values), size, np.int64)])
        values = self.stored(np.concatenate([weight.values, constant.values]))
        weights = EnclosedSparse.exact(row, column, values, size + 1).widened()
        entries = weights.times(stacked([self.entries, one], num_columns))
        return replace(self, shape=(weight.shape[0], weight.shape[1]), entries=entries)

    def variables_used(self) -> Int[np.ndarray, " used"]:
        return np.unique(self.entries.column[self.entries.column < self.num_variables])

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> Self:
        column = np.append(positions, count)[self.entries.column]
        return replace(self, entries=self.entries.relabelled(self.entries.row, column, count + 1))

    def dense(self) -> Enclosed:
        """Return the coefficients of every entry, the constants last."""
        return self.entries.dense(self.shape[0] * self.shape[1])


class SizeForm(EnclosedForm):
    """The form of the absolute values of all stored weights. Nothing cancels, so all paths count."""

    @staticmethod
    def stored(weights: np.ndarray) -> np.ndarray:
        return np.abs(weights)
