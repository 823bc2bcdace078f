"""An affine map row by row: the rows that are copies, and the few distinct ones that are computed.

A step of a long prompt changes some numbers of the state and copies thousands. Row r of the map gives one number of the
next state. Rows with one entry 1 and no constant are copies. All others are computed from a few numbers of the state.
Rows that are equal are computed once. The next state is then a selection from the old state followed by these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnc.ir.layers import Affine
from attnc.numerics.arrays import Float, Int


@dataclass(frozen=True, eq=False)
class AffineRows:
    """`next = concatenate([state, (weights · state[columns]).sum(-1) + constants])[selected]`, on flat states.

    `weights` and `constants` have a first axis for the turns of a run (`ir.repeats`). It has length 1 if the map is the
    same in every turn. Rows with fewer entries than `columns` has are padded with weight 0 and column 0.
    """

    shape: tuple[int, int]
    selected: Int[np.ndarray, " next"]
    columns: Int[np.ndarray, "made entries"]
    weights: Float[np.ndarray, "turns made entries"]
    constants: Float[np.ndarray, "turns made"]

    @classmethod
    def of(
        cls,
        layer: Affine,
        weights: Float[np.ndarray, "turns entries"] | None = None,
        constants: Float[np.ndarray, "turns entries"] | None = None,
    ) -> AffineRows:
        """Return the rows of a map. Give the values of all turns if they vary."""
        size_out = int(np.prod(layer.weight.shape[:2]))
        size_in = int(np.prod(layer.weight.shape[2:]))
        weights = layer.weight.values[None] if weights is None else weights
        constants = layer.constant.values[None] if constants is None else constants
        turns = max(len(weights), len(constants))
        rows, columns = layer.weight.flat(slice(0, 2)), layer.weight.flat(slice(2, None))
        order = np.lexsort((columns, rows))
        rows, columns, weights = rows[order], columns[order], weights[:, order]
        counts = np.bincount(rows, minlength=size_out)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_rows = np.zeros((turns, size_out), weights.dtype)
        of_rows[:, layer.constant.flat(slice(None))] = constants
        is_one = np.zeros(size_out, bool)
        is_one[rows] = (weights == 1).all(axis=0)
        is_copy = (counts == 1) & is_one & ~of_rows.any(axis=0)
        selected = np.zeros(size_out, np.int64)
        selected[rows[is_copy[rows]]] = columns[is_copy[rows]]

        made = np.flatnonzero(~is_copy)
        entries = int(counts[made].max(initial=1)) or 1
        of_made = np.full(size_out, -1)
        of_made[made] = np.arange(len(made))
        kept = ~is_copy[rows]
        padded_columns = np.zeros((len(made), entries), np.int64)
        padded_weights = np.zeros((turns, len(made), entries), weights.dtype)
        padded_columns[of_made[rows[kept]], places[kept]] = columns[kept]
        padded_weights[:, of_made[rows[kept]], places[kept]] = weights[:, kept]
        numbers = np.concatenate(  # (made, turns · (entries + 1)), compared bit by bit
            [padded_weights.transpose(1, 0, 2).reshape(len(made), turns * entries), of_rows[:, made].T], axis=1
        )
        bits = numbers.view(np.int32 if numbers.dtype == np.float32 else np.int64)
        each = np.concatenate([padded_columns, bits], axis=1)
        _, first, inverse = np.unique(each, axis=0, return_index=True, return_inverse=True)
        selected[made] = size_in + inverse.reshape(-1)
        shape = (layer.weight.shape[0], layer.weight.shape[1])
        return cls(shape, selected, padded_columns[first], padded_weights[:, first], of_rows[:, made[first]])
