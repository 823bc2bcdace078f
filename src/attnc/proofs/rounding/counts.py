"""How often the entries of a state have been rounded, affine map after affine map.

An evaluation of affine maps only multiplies and adds: every path from an input to a result is a product of weights,
each multiplication and addition on it rounds once, and n roundings are a factor 1 + θ, |θ| ≤ γ_n. What is exact is
not counted: products with ±2^k, sums of one term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.layers import Affine, Layer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class Counts:
    """For every entry of a state, flat: is it there, how often is it rounded, by how many maps, is it ±2^k, k ≥ 0."""

    is_there: Bool[np.ndarray, " entries"]
    count: Int[np.ndarray, " entries"]
    maps: Int[np.ndarray, " entries"]
    is_power: Bool[np.ndarray, " entries"]

    @classmethod
    def inputs(cls, size: int) -> Counts:
        zero = np.zeros(size, np.int64)
        return cls(np.ones(size, bool), zero, zero, np.zeros(size, bool))

    def at(self, places: np.ndarray) -> Counts:
        return Counts(self.is_there[places], self.count[places], self.maps[places], self.is_power[places])

    def through(
        self, size: int, row: np.ndarray, column: np.ndarray, weights: np.ndarray, constants: np.ndarray
    ) -> Counts:
        """After an affine map to `size` entries with these weights at (row, column), and these constants."""
        kept = (weights != 0) & self.is_there[column]
        row, column, weights = row[kept], column[kept], weights[kept]
        terms = np.bincount(row, minlength=size) + (constants != 0)
        is_exact = _is_power(weights) | self.is_power[column]
        inexact = np.bincount(row, ~is_exact, size) > 0
        count, maps = np.zeros((2, size), np.int64)
        np.maximum.at(count, row, self.count[column])
        np.maximum.at(maps, row, self.maps[column])
        single = np.bincount(row, _is_power(weights) & self.is_power[column], size) > 0
        is_power = (terms == 1) & np.where(constants != 0, _is_power(constants), single)
        rounds = np.maximum(terms - 1, 0) + inexact
        return Counts(terms > 0, count + rounds, maps + (rounds > 0), is_power)

    def through_columns(self, tokens: int, matrix: Float[np.ndarray, "width new_width"]) -> Counts:
        """After a map of the features of every token."""
        width, new_width = matrix.shape
        j, m = np.nonzero(matrix)
        token = np.arange(tokens)[:, None]
        row, column = (token * new_width + m).ravel(), (token * width + j).ravel()
        weights = np.broadcast_to(matrix[j, m], (tokens, len(j))).ravel()
        return self.through(tokens * new_width, row, column, weights, np.zeros(tokens * new_width))


def _is_power(x: np.ndarray) -> np.ndarray:
    """±2^k, k ≥ 0: products with 2^−k may underflow."""
    return (np.abs(np.frexp(x)[0]) == 0.5) & (np.abs(x) >= 1)


def through_layers(layers: Sequence[Layer], counts: Counts) -> Counts:
    for layer in layers:
        assert isinstance(layer, Affine)
        size = layer.constant.shape[0] * layer.constant.shape[1]
        weight, constant = layer.weight, layer.constant
        constants = np.zeros(size)
        constants[constant.flat(slice(None))] = constant.values
        row, column = weight.flat(slice(0, 2)), weight.flat(slice(2, None))
        counts = counts.through(size, row, column, weight.values.astype(np.float64), constants)
    return counts


def folded(counts: Counts, num_terms: np.ndarray) -> np.ndarray:
    """Roundings of an entry, evaluated map by map or folded: then its terms are summed besides."""
    return counts.count + np.where(counts.maps > 1, num_terms, 0)


@dataclass(frozen=True)
class Gain:
    """What underflow can do: `terms` products, each off by a subnormal number, multiplied by at most `factor` each.

    A product that underflows is multiplied by weights of later maps or, if maps are folded first, by an input.
    """

    terms: int = 0
    factor: float = 1.0

    def through(self, weights: Float[np.ndarray, " entries"], row: Int[np.ndarray, " entries"]) -> Gain:
        if not len(row):
            return self
        rows = np.bincount(row, np.abs(weights).astype(np.float64))
        return Gain(self.terms + int(np.bincount(row).max()), self.factor * max(1.0, float(rows.max()) * (1 + 1e-9)))

    def through_matrix(self, matrix: Float[np.ndarray, "rows columns"]) -> Gain:
        row, column = np.nonzero(matrix)
        return self.through(matrix[row, column], column)

    def through_layers(self, layers: Sequence[Layer]) -> Gain:
        gain = self
        for layer in layers:
            assert isinstance(layer, Affine)
            gain = gain.through(layer.weight.values, layer.weight.flat(slice(0, 2)))
        return gain

    @property
    def size(self) -> float:
        return self.terms * self.factor


def sizes_through(layers: Sequence[Layer], sizes: Float[np.ndarray, " entries"]) -> list[Float[np.ndarray, " entries"]]:
    """The sizes of the entries before the first map and after each, from absolute values."""
    found = [sizes]
    for layer in layers:
        assert isinstance(layer, Affine)
        weight, constant = layer.weight, layer.constant
        terms = np.abs(weight.values.astype(np.float64)) * found[-1][weight.flat(slice(2, None))]
        size = constant.shape[0] * constant.shape[1]
        after = np.bincount(weight.flat(slice(0, 2)), terms, size).astype(np.float64)  # of no terms it is of integers
        after[constant.flat(slice(None))] += np.abs(constant.values)
        found.append(after)
    return found
