"""A stored program, run on one input in exact arithmetic: ball arithmetic encloses every number of every state.

Weights of attention are exp(s_k)/Σ exp(s_j) as written, without a shift. Balls are numbers with an error bound, and do
not overflow. The errors grow from layer to layer, so the caller doubles the precision until they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flint import arb, arb_mat

from attnc_checker.program import (
    SEEN_BY_ALL,
    AffineLayer,
    AttentionLayer,
    HeadWeights,
    Mask,
    Matrix,
    Program,
    SoftmaxLayer,
    Stream,
)

LOST = 2.0**-16
"""The radius at which a run is given up: radii grow from layer to layer."""
MAX_WORK = 2**31
"""Maximum number of exponentials of a run, times bits. With 192 bits they take about 2 µs each, and all 20 s."""

Group = tuple[list[int], list[int]]
"""Queries, and the keys that each of them sees."""


@dataclass(frozen=True, eq=False)
class ExactRun:
    """A run of a program. `look` is called before every layer, and raises if a limit is reached."""

    program: Program
    look: Callable[[], None]
    _groups: dict[tuple[int, int, int, int], list[Group]] = field(default_factory=dict)
    _matrices: dict[int, tuple[arb_mat, arb_mat, arb_mat, arb_mat, list[int]]] = field(default_factory=dict)
    _projections: dict[tuple[object, ...], arb_mat] = field(default_factory=dict)
    _rows: dict[int, list[tuple[int, int, list[tuple[int, int, arb | None]], arb | None]]] = field(default_factory=dict)

    def most_bits(self) -> int:
        """Return the largest precision in which a run does not take too long."""
        count, main = 1, self.program.main
        for n, layer in enumerate(main.layers):
            if isinstance(layer, AttentionLayer):
                keys = self.program.memory.shapes[-1][0] if layer.cross else main.shapes[n][0]
                groups = [group for head in layer.heads for group in self._grouped(head.mask, main.shapes[n][0], keys)]
                count += sum(len(asking) * len(seen) for asking, seen in groups if len(seen) > 1)
        return MAX_WORK // count

    def output(self, inputs: Sequence[arb_mat]) -> tuple[list[arb], float]:
        """Return the last state, row by row, and 1; nothing and the share of layers if a radius gets too large."""
        second = inputs[1] if len(inputs) > 1 else arb_mat(0, 0)
        memory, _ = self._through(self.program.memory, second, None)
        state, share = self._through(self.program.main, inputs[0], memory)
        return (state.entries() if share == 1 else []), share

    def _through(self, stream: Stream, state: arb_mat, memory: arb_mat | None) -> tuple[arb_mat, float]:
        for n, layer in enumerate(stream.layers):
            self.look()
            if isinstance(layer, AffineLayer):
                state = self._affine(layer, state, stream.shapes[n + 1])
            elif isinstance(layer, AttentionLayer):
                keyed = memory if layer.cross and memory is not None else state
                state = self._attention(layer, state, keyed, stream.shapes[n + 1])
                if not all(entry.rad() < LOST for entry in state.entries()):
                    return state, (n + 1) / (len(stream.layers) + 1)
            else:
                assert isinstance(layer, SoftmaxLayer)
                columns = state.ncols()
                state = _mixed(
                    state, arb_mat(columns, columns, [i == j for i in range(columns) for j in range(columns)])
                )
        return state, 1

    def _affine(self, layer: AffineLayer, state: arb_mat, shape: tuple[int, int]) -> arb_mat:
        if id(layer) not in self._rows:
            constants = {
                divmod(place, layer.constant.tokens)[::-1]: arb(value)
                for place, value in zip(layer.constant.places, layer.constant.values, strict=True)
            }
            self._rows[id(layer)] = [
                (*place, [(*at, None if weight == 1 else arb(weight)) for at, weight in layer.rows.get(place, [])], own)
                for place in layer.rows.keys() | constants.keys()
                for own in [constants.get(place)]
            ]
        made = arb_mat(*shape)
        for token, channel, terms, constant in self._rows[id(layer)]:
            total = arb(0) if constant is None else constant
            for from_token, from_channel, weight in terms:
                read = state[from_token, from_channel]
                term = read if weight is None else read * weight
                total = total + term
            made[token, channel] = total
        return made

    def _attention(self, layer: AttentionLayer, state: arb_mat, keyed: arb_mat, shape: tuple[int, int]) -> arb_mat:
        made = arb_mat(state) if layer.residual else arb_mat(*shape)
        taken: dict[tuple[int, ...], arb_mat] = {}

        def shown(seen: list[int], W: arb_mat | None = None) -> arb_mat:
            """Return these rows of the keyed state, times a projection. Heads share both."""
            key = (id(seen),) if W is None else (id(seen), id(W))
            if key not in taken:
                taken[key] = _rows_of(keyed, seen) if W is None else shown(seen) * W
            return taken[key]

        for head in layer.heads:
            W_Q, W_K, W_V, W_O, written = self._weights(head, state.ncols(), keyed.ncols(), shape[1])
            for asking, seen in self._grouped(head.mask, state.nrows(), keyed.nrows()):
                values = shown(seen, W_V)
                if all(value == 0 for value in values.entries()):
                    continue  # the head writes exact zeros
                keys = shown(seen, W_K)
                out = _mixed(_rows_of(state, asking) * W_Q * keys.transpose(), values) * W_O
                for row, query in enumerate(asking):
                    for column in written:
                        made[query, column] = made[query, column] + out[row, column]
        return made

    def _weights(
        self, head: HeadWeights, asks: int, keyed: int, width: int
    ) -> tuple[arb_mat, arb_mat, arb_mat, arb_mat, list[int]]:
        """Return the projections as matrices, and the channels that the head writes."""
        if id(head) not in self._matrices:
            sizes = (asks, keyed, keyed, len(head.W_V))
            made = [self._made(W, n) for W, n in zip((head.W_Q, head.W_K, head.W_V, head.W_O), sizes, strict=True)]
            written = [j for j, column in enumerate(head.W_O) if column]
            self._matrices[id(head)] = (*made, written)  # type: ignore[assignment]
        return self._matrices[id(head)]

    def _made(self, columns: Matrix, rows: int) -> arb_mat:
        """Return a projection. Equal ones are one object."""
        key = (rows, *(tuple(column) for column in columns))
        if key not in self._projections:
            made = arb_mat(rows, len(columns))
            for j, column in enumerate(columns):
                for i, number in column:
                    made[i, j] = arb(number)
            self._projections[key] = made
        return self._projections[key]

    def _grouped(self, mask: Mask | None, queries: int, keys: int) -> list[Group]:
        """Return the queries that see the same keys, with these keys."""
        place = (0, 0, queries, keys) if mask is None else (id(mask.queries), id(mask.keys), queries, keys)
        if place not in self._groups:
            groups: dict[int, Group] = {}
            if mask is None:
                groups[0] = ([*range(queries)], [*range(keys)])
            else:
                segments = set(mask.keys)
                for query, segment in enumerate(mask.queries):
                    own = segment if segment in segments else SEEN_BY_ALL
                    if own not in groups:
                        groups[own] = ([], [k for k, of in enumerate(mask.keys) if of in (own, SEEN_BY_ALL)])
                    groups[own][0].append(query)
            self._groups[place] = [*groups.values()]
        return self._groups[place]


def _rows_of(matrix: arb_mat, rows: list[int]) -> arb_mat:
    """Return these rows, ascending."""
    if len(rows) == matrix.nrows():
        return matrix
    width = matrix.ncols()
    return arb_mat(len(rows), width, [matrix[row, column] for row in rows for column in range(width)])


def _mixed(scores: arb_mat, values: arb_mat) -> arb_mat:
    """Return softmax(scores) · values. One key has the weight 1."""
    rows, columns, width = scores.nrows(), scores.ncols(), values.ncols()
    if columns == 1:
        return arb_mat(rows, width, values.entries() * rows)
    weights = arb_mat(rows, columns, [score.exp() for score in scores.entries()])
    totals, sums = weights * arb_mat(columns, 1, [1] * columns), weights * values
    return arb_mat(rows, width, [sums[i, j] / totals[i, 0] for i in range(rows) for j in range(width)])
