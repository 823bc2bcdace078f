"""What a program computes in exact arithmetic, to any precision: its stored weights in Arb, layer by layer.

Nothing is folded, and nothing is taken from the package but the layers themselves. Queries that no output depends on
are left out, as they would cost the square of the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flint import arb

from attnc.ir.layers import Affine, Attention, Head
from attnc.ir.program import Program
from attnc.targets.expressions.expression import Expression
from strategies.reference import precision, tree_value

BITS = 200
Rows = list[list[arb]]
ZERO = arb(0)


class ArbNetwork:
    """A program of one input without a memory, deep or not."""

    def __init__(self, program: Program) -> None:
        assert len(program.input_shapes) == 1
        assert not program.memory
        self.width = program.input_shapes[0][-1]
        self.layers: list[_Affine | _Attention | _Softmax] = []
        wanted: set[int] | None = None  # the tokens that count after the layer; None for all
        for layer in reversed(program.layers):
            if isinstance(layer, Affine):
                made = _Affine(layer, wanted)
                self.layers.append(made)
                wanted = made.read
            elif isinstance(layer, Attention):
                self.layers.append(_Attention(layer, wanted))
                wanted = None
            else:
                self.layers.append(_Softmax())
        self.layers.reverse()

    def __call__(self, point: Sequence[float]) -> list[arb]:
        """All outputs in a row, at a point of floats."""
        with precision(BITS):
            flat = [arb(float(x)) for x in point]
            state = [flat[i : i + self.width] for i in range(0, len(flat), self.width)]
            for layer in self.layers:
                state = layer(state)
            return [entry for row in state for entry in row]


class _Affine:
    def __init__(self, layer: Affine, wanted: set[int] | None) -> None:
        entries = zip(layer.weight.index.tolist(), layer.weight.values.tolist(), strict=True)
        self.entries = [(*index, arb(value)) for index, value in entries if wanted is None or index[0] in wanted]
        self.read = {i for _, _, i, _, _ in self.entries}
        tokens, width = layer.constant.shape
        self.constant = [[ZERO] * width for _ in range(tokens)]
        for (token, channel), value in zip(layer.constant.index.tolist(), layer.constant.values.tolist(), strict=True):
            self.constant[token][channel] = arb(value)

    def __call__(self, state: Rows) -> Rows:
        out = [list(row) for row in self.constant]
        for token, channel, i, j, weight in self.entries:
            out[token][channel] = out[token][channel] + weight * state[i][j]
        return out


class _Attention:
    def __init__(self, layer: Attention, wanted: set[int] | None) -> None:
        self.layer, self.wanted = layer, wanted
        self.heads = [tuple(map(_columns, (head.W_Q, head.W_K, head.W_V, head.W_O))) for head in layer.heads]

    def __call__(self, state: Rows) -> Rows:
        width = len(self.layer.channels)
        out = [list(row) if self.layer.residual else [ZERO] * width for row in state]
        for head, (W_Q, W_K, W_V, W_O) in zip(self.layer.heads, self.heads, strict=True):
            keys, values = [_times(row, W_K) for row in state], [_times(row, W_V) for row in state]
            for query in range(len(state)) if self.wanted is None else sorted(self.wanted):
                seen = _seen(head, query, len(state))
                q = _times(state[query], W_Q)
                scores = [sum((a * b for a, b in zip(q, keys[k], strict=True)), ZERO) for k in seen]
                top = max(float(score.mid()) for score in scores)
                weights = [(score - top).exp() for score in scores]
                total = sum(weights, ZERO)
                average = [
                    sum((w * values[k][m] for w, k in zip(weights, seen, strict=True)), ZERO) / total
                    for m in range(len(W_V))
                ]
                written = _times(average, W_O)
                out[query] = [a + b for a, b in zip(out[query], written, strict=True)]
        return out


def _seen(head: Head, query: int, num_keys: int) -> list[int]:
    if head.mask is None:
        return list(range(num_keys))
    seen: list[int] = np.flatnonzero(head.mask.visible(np.array([query]), slice(None))[0]).tolist()
    return seen


def _columns(matrix: np.ndarray) -> list[list[tuple[int, arb]]]:
    """The non-zeros of each column."""
    return [[(i, arb(value)) for i, value in enumerate(column) if value] for column in matrix.T.tolist()]


def _times(row: list[arb], columns: list[list[tuple[int, arb]]]) -> list[arb]:
    return [sum((weight * row[i] for i, weight in column), ZERO) for column in columns]


def exact_values(expression: Expression, point: Sequence[float]) -> list[arb]:
    """f at a point of floats."""
    with precision(BITS):
        at = {name: arb(float(x)) for name, x in zip(expression.variables, point, strict=True)}
        return [tree_value(tree, at) for tree in expression.outputs]


class _Softmax:
    def __call__(self, state: Rows) -> Rows:
        out = []
        for row in state:
            largest = max(row, key=lambda entry: float(entry.mid()))
            weights = [(entry - largest).exp() for entry in row]
            total = sum(weights, ZERO)
            out.append([weight / total for weight in weights])
        return out
