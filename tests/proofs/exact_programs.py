"""Programs in exact arithmetic, to any precision: their stored weights, layer by layer.

Nothing is folded, and nothing is taken from the package but the layers themselves. Queries that no output depends on
are left out, as they would cost the square of the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from flint import arb, fmpq

from attnc.ir.layers import Affine, Attention, Head
from attnc.ir.program import Program, token_shape
from attnc.ir.sparse import Sparse
from attnc.targets.expressions.expression import Expression
from strategies.reference import tree_value

Row = list[Any]
Rows = list[Row]


def rational(x: float) -> fmpq:
    return fmpq(*float(x).as_integer_ratio())


def softmax(scores: Sequence[arb]) -> list[arb]:
    top = max(score.mid() for score in scores)
    weights = [(score - top).exp() for score in scores]
    total = sum(weights, arb(0))
    return [weight / total for weight in weights]


def softmax_average(scores: Sequence[arb], values: Rows) -> list[arb]:
    """Average the rows of values with the softmax of the scores."""
    weights = softmax(scores)
    return [sum((w * v for w, v in zip(weights, column, strict=True)), arb(0)) for column in zip(*values, strict=True)]


@dataclass(frozen=True)
class LayerArithmetic:
    """Layers over any entries that can be added and multiplied, also by `number(weight)`."""

    number: Callable[[float], Any] = arb
    constant: Callable[[Any], Any] = lambda number: number  # an entry without inputs
    average: Callable[[Row, Rows], Row] = softmax_average

    @property
    def zero(self) -> Any:
        return self.constant(self.number(0.0))

    def affine(self, layer: Affine, state: Rows, wanted: Iterable[int] | None = None) -> Rows:
        tokens, width = layer.constant.shape
        out = [[self.zero] * width for _ in range(tokens)]
        for (token, channel), value in _entries(layer.constant):
            out[token][channel] = self.constant(self.number(value))
        for (token, channel, i, j), value in _entries(layer.weight):
            if wanted is None or token in wanted:
                out[token][channel] = out[token][channel] + state[i][j] * self.number(value)
        return out

    def product(self, rows: Rows, matrix: np.ndarray) -> Rows:
        columns = [[(i, self.number(w)) for i, w in enumerate(column) if w] for column in matrix.T.tolist()]
        zero = self.zero
        return [[sum((row[i] * w for i, w in column), zero) for column in columns] for row in rows]

    def meetings(self, head: Head, state: Rows, keyed: Rows, queries: Iterable[int]) -> Iterator[tuple[int, Row, Rows]]:
        """Yield each query with its scores and the values that it averages, over the keys that it sees."""
        keys, values, zero = self.product(keyed, head.W_K), self.product(keyed, head.W_V), self.zero
        for query in queries:
            (q,) = self.product([state[query]], head.W_Q)
            seen = np.arange(len(keys))
            if head.mask is not None:
                seen = np.flatnonzero(head.mask.visible(np.array([query]), slice(None))[0])
            scores = [sum((a * b for a, b in zip(q, keys[k], strict=True)), zero) for k in seen]
            yield query, scores, [values[k] for k in seen]

    def attention(self, layer: Attention, state: Rows, keyed: Rows, wanted: Iterable[int] | None) -> Rows:
        out = [list(row) if layer.residual else [self.zero] * len(layer.channels) for row in state]
        for head in layer.heads:
            for query, *met in self.meetings(head, state, keyed, range(len(state)) if wanted is None else wanted):
                (written,) = self.product([self.average(*met)], head.W_O)
                out[query] = [a + b for a, b in zip(out[query], written, strict=True)]
        return out

    def states(self, program: Program, point: Sequence[Any]) -> Iterator[tuple[Rows, Rows]]:
        """Yield the state and the memory before each layer, and at the end."""
        inputs, used = [], 0
        for shape in program.input_shapes:
            tokens, width = token_shape(shape)
            inputs.append([list(point[used + t * width : used + (t + 1) * width]) for t in range(tokens)])
            used += tokens * width
        state, memory = [*inputs, []][:2]
        for layer in program.memory:
            memory = self.affine(layer, memory)
        yield state, memory
        for layer, wanted in zip(program.layers, _wanted_tokens(program), strict=True):
            if isinstance(layer, Affine):
                state = self.affine(layer, state, wanted)
            elif isinstance(layer, Attention):
                state = self.attention(layer, state, memory if layer.cross else state, wanted)
            else:
                state = [softmax(row) for row in state]
            yield state, memory

    def outputs(self, program: Program, point: Sequence[Any]) -> Row:
        """All outputs in a row."""
        *_, (state, _) = self.states(program, point)
        return [entry for row in state for entry in row]


def _entries(sparse: Sparse) -> Iterator[tuple[list[int], float]]:
    return zip(sparse.index.tolist(), sparse.values.tolist(), strict=True)


def _wanted_tokens(program: Program) -> list[set[int] | None]:
    """The tokens after each layer on which an output depends; None for all."""
    found: list[set[int] | None] = [None]
    for layer in reversed(program.layers[1:]):
        wanted = found[-1]
        if isinstance(layer, Affine):
            wanted = {i for (token, _, i, _), _ in _entries(layer.weight) if wanted is None or token in wanted}
        elif isinstance(layer, Attention):
            wanted = None
        found.append(wanted)
    return found[::-1]


RATIONAL = LayerArithmetic(rational)


def exact_output(program: Program, point: Sequence[float]) -> list[arb]:
    """The program in Arb at a point of floats, to the precision in force."""
    return LayerArithmetic().outputs(program, [arb(float(x)) for x in point])


def exact_head(program: Program, point: Sequence[fmpq], query: int, number: int) -> tuple[list[fmpq], Rows]:
    """(scores, values·W_O) that one query token meets in one head of the only attention, over the keys it sees."""
    place = _attention_place(program)
    (state, memory) = next(islice(RATIONAL.states(program, point), place, None))
    layer = program.layers[place]
    head = layer.heads[number]
    ((_, scores, values),) = RATIONAL.meetings(head, state, memory if layer.cross else state, [query])
    return scores, RATIONAL.product(values, head.W_O)


def read_out(program: Program, rows: Rows) -> Row:
    """The affine maps after the attention, applied to the rationals that it wrote."""
    for layer in program.layers[_attention_place(program) + 1 :]:
        rows = RATIONAL.affine(layer, rows)
    return [entry for row in rows for entry in row]


def _attention_place(program: Program) -> int:
    return next(i for i, layer in enumerate(program.layers) if isinstance(layer, Attention))


def exact_values(expression: Expression, point: Sequence[float]) -> list[arb]:
    """f at a point of floats, to the precision in force."""
    at = {name: arb(float(x)) for name, x in zip(expression.variables, point, strict=True)}
    return [tree_value(tree, at) for tree in expression.outputs]
