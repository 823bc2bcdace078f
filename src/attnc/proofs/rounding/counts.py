"""The number of times that the entries of a state are rounded, affine map after affine map.

An evaluation of affine maps only multiplies and adds: every path from an input to a result is a product of weights,
each multiplication and addition on it rounds once, and n roundings are a factor 1 + θ, |θ| ≤ γ_n. Exact operations
are not counted: products with ±2^k, sums of one term.

`RoundingForm` is a type of numbers for `attnc.ir.normal_form`: the same folding that makes the numbers of a stage makes
their roundings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.layers import Affine

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Gain:
    """The effect of underflow: `terms` products, each off by a subnormal number, multiplied by at most `factor` each.

    A product that underflows is multiplied by weights of later maps or, if maps are folded first, by an input.
    """

    terms: int = 0
    factor: float = 1.0

    def through(self, weights: Float[np.ndarray, " entries"], row: Int[np.ndarray, " entries"]) -> Gain:
        if not len(row):
            return self
        rows = np.bincount(row, np.abs(weights).astype(np.float64))
        return Gain(self.terms + int(np.bincount(row).max()), self.factor * max(1.0, float(rows.max()) * (1 + 1e-9)))

    @property
    def size(self) -> float:
        return self.terms * self.factor


@dataclass(frozen=True, eq=False)
class RoundingForm:
    """For every entry of a (rows, columns) state, flat: whether it is there, and how it has been rounded.

    `count` is the number of its roundings, `maps` the number of maps that round it, `is_power` whether it is the
    constant ±2^k, k ≥ 0, and `size` the sum of the absolute values of all its paths where |u| ≤ 1. `peak` is the
    largest size of this state and of those before it.
    """

    shape: tuple[int, int]
    is_there: Bool[np.ndarray, " entries"]
    count: Int[np.ndarray, " entries"]
    maps: Int[np.ndarray, " entries"]
    is_power: Bool[np.ndarray, " entries"]
    size: Float[np.ndarray, " entries"]
    gain: Gain
    peak: float
    num_variables: int

    @classmethod
    def identity(cls, shape: tuple[int, int], variables: np.ndarray, count: int, dtype: np.dtype[Any]) -> RoundingForm:
        size = shape[0] * shape[1]
        zero, no, yes = np.zeros(size, np.int64), np.zeros(size, bool), np.ones(size, bool)
        return cls(shape, yes, zero, zero, no, np.ones(size), Gain(), 1.0, count)

    @classmethod
    def after_stage(
        cls, writes: np.ndarray, residual: RoundingForm | None, num_carried: int, dtype: np.dtype[Any]
    ) -> tuple[RoundingForm, np.ndarray]:
        """Every entry is computed afresh."""
        written = np.arange(writes.size)
        return cls.identity((len(writes), writes.shape[1]), written, writes.size + num_carried, dtype), written

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> RoundingForm:
        places = (np.asarray(rows)[:, None] * self.shape[1] + np.arange(self.shape[1])).ravel()
        return replace(
            self,
            shape=(len(rows), self.shape[1]),
            is_there=self.is_there[places],
            count=self.count[places],
            maps=self.maps[places],
            is_power=self.is_power[places],
            size=self.size[places],
        )

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> RoundingForm:
        (tokens, width), new_width = self.shape, matrix.shape[1]
        j, m = np.nonzero(matrix)
        token = np.arange(tokens)[:, None]
        row, column = (token * new_width + m).ravel(), (token * width + j).ravel()
        weights = np.broadcast_to(matrix[j, m], (tokens, len(j))).ravel()
        gain = self.gain.through(matrix[j, m], m)
        return self._mapped((tokens, new_width), row, column, weights, np.zeros(tokens * new_width), gain)

    def through(self, layer: Affine) -> RoundingForm:
        weight, row = layer.weight, layer.weight.flat(slice(0, 2))
        constants = layer.constant.dense().astype(np.float64).ravel()
        shape, gain = (weight.shape[0], weight.shape[1]), self.gain.through(weight.values, row)
        return self._mapped(shape, row, weight.flat(slice(2, None)), weight.values, constants, gain)

    def _mapped(
        self,
        shape: tuple[int, int],
        row: Int[np.ndarray, " entries"],
        column: Int[np.ndarray, " entries"],
        weights: Float[np.ndarray, " entries"],
        constants: Float[np.ndarray, " rows"],
        gain: Gain,
    ) -> RoundingForm:
        """After an affine map with these weights at (row, column), and these constants."""
        total = shape[0] * shape[1]
        kept = (weights != 0) & self.is_there[column]
        row, column, weights = row[kept], column[kept], weights[kept].astype(np.float64)
        terms = np.bincount(row, minlength=total) + (constants != 0)
        is_exact = _is_power(weights) | self.is_power[column]
        inexact = np.bincount(row, ~is_exact, total) > 0
        count, maps = np.zeros((2, total), np.int64)
        np.maximum.at(count, row, self.count[column])
        np.maximum.at(maps, row, self.maps[column])
        single = np.bincount(row, _is_power(weights) & self.is_power[column], total) > 0
        is_power = (terms == 1) & np.where(constants != 0, _is_power(constants), single)
        rounds = np.maximum(terms - 1, 0) + inexact
        with np.errstate(over="ignore"):
            size = np.bincount(row, np.abs(weights) * self.size[column], total) + np.abs(constants)
        peak = max(self.peak, float(size.max(initial=0.0)))
        return RoundingForm(
            shape, terms > 0, count + rounds, maps + (rounds > 0), is_power, size, gain, peak, self.num_variables
        )

    def variables_used(self) -> Int[np.ndarray, " used"]:
        """Counts name no variables."""
        return np.zeros(0, np.int64)

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> RoundingForm:
        return replace(self, num_variables=count)

    def folded(self, num_terms: Int[np.ndarray, " entries"]) -> Int[np.ndarray, " entries"]:
        """Roundings of the entries, evaluated map by map or folded: then the terms of each are summed besides."""
        return self.count + np.where(self.maps > 1, num_terms, 0)


def _is_power(x: np.ndarray) -> np.ndarray:
    """Whether x is ±2^k, k ≥ 0: products with 2^−k may underflow."""
    return (np.abs(np.frexp(x)[0]) == 0.5) & (np.abs(x) >= 1)
