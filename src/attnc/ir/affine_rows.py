"""An affine map row by row: the rows that are copies, and the few distinct ones that are computed.

A step of a long prompt changes some numbers of the state and copies thousands. Row r of the map gives one number of the
next state. Rows with one entry 1 and no constant are copies. All others are computed from a few numbers of the state.
Rows that are equal are computed once. The next state is then a selection from the old state followed by these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnc.ir.layers import Affine
from attnc.ir.repeats import Varying
from attnc.numerics.arrays import Int


@dataclass(frozen=True, eq=False)
class ByTurn:
    """Numbers of a map in every turn of a repeat (`ir.repeats`). Turns with the same numbers share them.

    Turn t has `distinct[of_turn[t]]`, an array of one or two axes. A map that does not vary has one entry of
    `distinct`, and no `of_turn`.
    """

    distinct: np.ndarray
    of_turn: Int[np.ndarray, " turns"]

    @classmethod
    def of(cls, base: np.ndarray, where: tuple[np.ndarray, ...], varying: Varying | None) -> ByTurn:
        """Return the numbers `base` with the varying entries put at `where`."""
        if varying is None:
            return cls(base[None], np.zeros(0, np.int64))
        kinds, of_turn = np.unique(varying.values, axis=0, return_inverse=True)
        distinct = np.repeat(base[None], len(kinds), axis=0)
        for kind, numbers in zip(distinct, kinds, strict=True):
            kind[where] = numbers
        return cls(distinct, of_turn.reshape(-1))


@dataclass(frozen=True, eq=False)
class AffineRows:
    """`next = concatenate([state, (weights · state[columns]).sum(-1) + constants])[selected]`, on flat states.

    Rows with fewer entries than `columns` has are padded with weight 0 and column 0.
    """

    shape: tuple[int, int]
    selected: Int[np.ndarray, " next"]
    columns: Int[np.ndarray, "made entries"]
    weights: ByTurn  # of shape (made, entries)
    constants: ByTurn  # of shape (made,)

    @classmethod
    def of(cls, layer: Affine, weight: Varying | None = None, constant: Varying | None = None) -> AffineRows:
        """Return the rows of a map. Give the entries of its weight and of its constant that vary."""
        size_out = int(np.prod(layer.weight.shape[:2]))
        size_in = int(np.prod(layer.weight.shape[2:]))
        rows, columns = layer.weight.flat(slice(0, 2)), layer.weight.flat(slice(2, None))
        order = np.lexsort((columns, rows))
        counts = np.bincount(rows, minlength=size_out)
        places = np.empty(len(rows), np.int64)
        places[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_rows, of_constants = np.zeros(size_out, layer.constant.values.dtype), layer.constant.flat(slice(None))
        of_rows[of_constants] = layer.constant.values
        is_one, is_moved = layer.weight.values == 1, of_rows != 0
        if weight is not None:
            is_one[weight.entries] = False
        if constant is not None:
            is_moved[of_constants[constant.entries]] = True
        is_copied = is_one & (counts[rows] == 1) & ~is_moved[rows]
        selected = np.zeros(size_out, np.int64)
        selected[rows[is_copied]] = columns[is_copied]
        is_made = np.ones(size_out, bool)
        is_made[rows[is_copied]] = False

        made, kept = np.flatnonzero(is_made), ~is_copied
        of_made = np.cumsum(is_made) - 1
        shape = (len(made), int(counts[made].max(initial=1)) or 1)
        padded_columns, padded_weights = np.zeros(shape, np.int64), np.zeros(shape, layer.weight.values.dtype)
        padded_columns[of_made[rows[kept]], places[kept]] = columns[kept]
        padded_weights[of_made[rows[kept]], places[kept]] = layer.weight.values[kept]
        moving = slice(0) if weight is None else weight.entries
        weights = ByTurn.of(padded_weights, (of_made[rows[moving]], places[moving]), weight)
        moving = slice(0) if constant is None else constant.entries
        constants = ByTurn.of(of_rows[made], (of_made[of_constants[moving]],), constant)
        numbers = np.concatenate(  # (made, all numbers of a row), compared bit by bit
            [*(kind for kind in weights.distinct), constants.distinct.T], axis=1
        )
        bits = numbers.view(np.int32 if numbers.dtype == np.float32 else np.int64)
        each = np.concatenate([padded_columns, bits], axis=1)
        _, first, inverse = np.unique(each, axis=0, return_index=True, return_inverse=True)
        selected[made] = size_in + inverse.reshape(-1)
        return cls(
            (layer.weight.shape[0], layer.weight.shape[1]),
            selected,
            padded_columns[first],
            replace(weights, distinct=weights.distinct[:, first]),
            replace(constants, distinct=constants.distinct[:, first]),
        )
