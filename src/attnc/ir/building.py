"""Affine maps and projections written by the names of channels, not by bare column numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.ir.layers import Affine, Head, Mask
from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Float

Entries = Mapping[tuple[str, str], float]
"""A matrix by the names of its rows and columns: (row, column) → entry. All other entries are zero."""


class AffineBuilder:
    """Collects links (output channel ← coefficient × input channel) and constants. Arrays of tokens broadcast."""

    def __init__(
        self, tokens_in: int, channels_in: Sequence[str], tokens_out: int, channels_out: Sequence[str]
    ) -> None:
        self.channels_in, self.channels_out = tuple(channels_in), tuple(channels_out)
        self._columns_in = {name: i for i, name in enumerate(self.channels_in)}
        self._columns_out = {name: i for i, name in enumerate(self.channels_out)}
        self._shape = (tokens_out, len(self.channels_out), tokens_in, len(self.channels_in))
        self._links: list[tuple[np.ndarray, np.ndarray]] = []
        self._constants: list[tuple[np.ndarray, np.ndarray]] = []

    def link(self, token_out: Any, channel_out: str, token_in: Any, channel_in: str, coefficient: Any = 1.0) -> None:
        where = (token_out, self._columns_out[channel_out], token_in, self._columns_in[channel_in])
        self._links.append(_entries(where, coefficient))

    def copy(self, token_out: Any, token_in: Any, channels: Iterable[str]) -> None:
        """Link each of these channels to the input channel of the same name."""
        for name in channels:
            self.link(token_out, name, token_in, name)

    def set(self, token_out: Any, channel_out: str, value: Any) -> None:
        self._constants.append(_entries((token_out, self._columns_out[channel_out]), value))

    def build(self, name: str, dtype: Any = np.float64) -> Affine:
        weight = _collect(self._links, self._shape, dtype)
        constant = _collect(self._constants, self._shape[:2], dtype)
        return Affine(name, weight, constant, self.channels_out)


def _entries(where: tuple[Any, ...], values: Any) -> tuple[np.ndarray, np.ndarray]:
    *columns, values = np.broadcast_arrays(*where, np.asarray(values, np.float64))
    values = values.ravel()
    index = np.empty((values.size, len(columns)), np.int32)
    for axis, column in enumerate(columns):
        index[:, axis] = column.ravel()
    keep = values != 0
    return (index, values) if keep.all() else (index[keep], values[keep])


def _collect(parts: list[tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...], dtype: Any) -> Sparse:
    if not parts:
        return Sparse.zeros(shape, dtype)
    index = np.concatenate([index for index, _ in parts])
    return Sparse(shape, index, np.concatenate([values for _, values in parts]).astype(dtype))


def reading(
    name: str, tokens_in: int, channels_in: Sequence[str], read: Any, outputs: Mapping[str, str], dtype: Any
) -> Affine:
    """Return the map that reads the tokens `read` of a state. outputs[channel] is the channel of the state."""
    builder = AffineBuilder(tokens_in, channels_in, len(read), tuple(outputs))
    for output, channel in outputs.items():
        builder.link(np.arange(len(read)), output, read, channel)
    return builder.build(name, dtype)


def projection(
    channels_in: Sequence[str], channels_out: Sequence[str], entries: Entries, dtype: Any
) -> Float[np.ndarray, "inputs outputs"]:
    """Return the matrix with `entries[from, to]` at row `from`, column `to`, and zeros elsewhere."""
    rows = {name: i for i, name in enumerate(channels_in)}
    columns = {name: i for i, name in enumerate(channels_out)}
    assert len(rows) == len(channels_in)
    assert len(columns) == len(channels_out)  # constructions give their channels distinct names
    matrix = np.zeros((len(rows), len(columns)), dtype)
    for (source, sink), value in entries.items():
        matrix[rows[source], columns[sink]] = value
    return matrix


@dataclass(frozen=True, eq=False)
class Attending:
    """Tokens with the channels `asking` that attend to tokens with the channels `keyed`."""

    asking: Sequence[str]
    keyed: Sequence[str]
    dtype: Any
    mask: Mask | None = None

    def head(self, queries: Entries, keys: Entries, values: Entries, outputs: Entries | None = None) -> Head:
        """Return the head with these entries of W_Q, W_K, W_V and W_O; W_O is 1 if no outputs are given.

        The terms of a score are numbered in the order of `keys`, and the values in the order of `values`.
        """
        terms, carried = (tuple(dict.fromkeys(column for _, column in entries)) for entries in (keys, values))
        one = np.eye(len(carried), dtype=self.dtype)
        return Head(
            projection(self.asking, terms, queries, self.dtype),
            projection(self.keyed, terms, keys, self.dtype),
            projection(self.keyed, carried, values, self.dtype),
            one if outputs is None else projection(carried, self.asking, outputs, self.dtype),
            self.mask,
        )
