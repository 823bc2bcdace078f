"""The affine forms on both sides of a program's one attention layer, from the stored weights, rigorously.

Every state is an affine form of the inputs x: a sparse matrix over (x, 1), known to within a radius that contains the
real numbers which the stored weights define.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.shapes import live_tokens, main_start, memory_start, stream_shapes
from attnc.ir.sparse import Sparse
from attnc.numerics.rounding import up
from attnc.proofs.stages.enclosed_sparse import EnclosedSparse, stacked

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Group:
    """Outputs, and the query tokens that they are read from, as numbers among those that are read at all."""

    outputs: Int[np.ndarray, " outputs"]
    queries: Int[np.ndarray, " queries"]


@dataclass(frozen=True)
class Place:
    """Where the attention layer stands: its number in the main stream, the query tokens that are read, its width."""

    number: int
    layer: Attention
    queries: Int[np.ndarray, " queries"]
    width: int


def program_attention(program: Program) -> tuple[list[tuple[int, int]], Place]:
    """The shapes of the main stream's states, and the place of its one attention layer."""
    kinds = [layer for layer in program.all_layers if not isinstance(layer, Affine)]
    in_main = [i for i, layer in enumerate(program.layers) if isinstance(layer, Attention)]
    if len(kinds) != 1 or len(in_main) != 1:
        found = ", ".join(f"{layer.name!r} ({type(layer).__name__.lower()})" for layer in kinds) or "none"
        raise ProgramError(
            "a program of one stage has one attention layer in its main stream, affine maps before and after it, and a "
            f"memory of affine maps; found, beside affine maps: {found}. Prove deeper programs stage by stage."
        )
    number = in_main[0]
    layer = program.layers[number]
    assert isinstance(layer, Attention)
    shapes = stream_shapes(program.layers, main_start(program))
    live = live_tokens(program.layers, shapes[0][0], shapes[-1][0])
    return shapes, Place(number, layer, live[number + 1], len(layer.channels))


def absolute(program: Program) -> Program:
    """The same program with the absolute value of every weight: its forms are the sizes that rounding multiplies."""
    return replace(program, layers=_absolute(program.layers), memory=_absolute(program.memory))


def _absolute(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    made: list[Layer] = []
    for layer in layers:
        if isinstance(layer, Affine):
            weight = replace(layer.weight, values=np.abs(layer.weight.values))
            constant = replace(layer.constant, values=np.abs(layer.constant.values))
            made.append(replace(layer, weight=weight, constant=constant))
        elif isinstance(layer, Attention):
            heads = tuple(
                replace(h, W_Q=np.abs(h.W_Q), W_K=np.abs(h.W_K), W_V=np.abs(h.W_V), W_O=np.abs(h.W_O))
                for h in layer.heads
            )
            made.append(replace(layer, heads=heads))
        else:
            made.append(layer)
    return tuple(made)


@dataclass(frozen=True, eq=False)
class HeadForms:
    """One query and one head; forms are over (x, 1), the keys those that the query sees."""

    query: EnclosedSparse  # (d_k, d + 1)
    keys: EnclosedSparse  # (keys·d_k, d + 1)
    values: EnclosedSparse  # (keys·d_v, d + 1)
    writes: EnclosedSparse  # (d_v, outputs): W_O and the read-out
    num_keys: int
    d_k: int
    d_v: int

    def scores(self) -> EnclosedSparse:
        """(keys, d + 1): Σ_j q_j(x)·k_kj(x); refused if a product has two factors that move."""
        num_columns = self.query.num_columns
        d = num_columns - 1
        key, component = np.divmod(self.keys.row, self.d_k)
        is_fixed = self.keys.column == d
        fixed = self.keys.where(is_fixed).relabelled(key[is_fixed], component[is_fixed], self.d_k)
        scores = fixed.times(self.query)
        if is_fixed.all():
            return scores
        moving = self.keys.where(~is_fixed)
        key, component = key[~is_fixed], component[~is_fixed]
        both = np.isin(component, self.query.row[self.query.column < d])
        if both.any():
            first = int(np.flatnonzero(both)[0])
            raise ProgramError(
                f"component {component[first]} of the query and of key {key[first]} both depend on the input: their "
                "product is bilinear, and the prover takes scores that are affine in the input"
            )
        constant = self.query.where(self.query.column == d)
        constant = constant.relabelled(constant.row, np.zeros(len(constant.row), np.int64), 1)
        products = moving.relabelled(key * d + moving.column, component, self.d_k).times(constant)
        key, column = np.divmod(products.row, d)
        return scores.plus(products.relabelled(key, column, num_columns))

    def with_query_scaled(self, factors: Float[np.ndarray, " d_k"]) -> HeadForms:
        """Component j of the query times factors[j], rounded up: for forms of sizes."""
        mid = up((self.query.mid + self.query.radius) * factors[self.query.row], 2)
        query = EnclosedSparse(self.query.row, self.query.column, mid, np.zeros(len(mid)), self.query.num_columns)
        return replace(self, query=query)

    def outputs(self) -> EnclosedSparse:
        """(keys·outputs, d + 1): the values as they arrive in the outputs."""
        return times_columns(self.values, self.d_v, self.writes)


def times_columns(form: EnclosedSparse, width: int, matrix: EnclosedSparse) -> EnclosedSparse:
    """A form of (rows, width) entries times a (width, new_width) matrix: row i·width + j becomes i·new_width + m."""
    row, j = np.divmod(form.row, width)
    product = form.relabelled(row * form.num_columns + form.column, j, width).times(matrix)
    row, variable = np.divmod(product.row, form.num_columns)
    return product.relabelled(row * matrix.num_columns + product.column, variable, form.num_columns)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The forms on both sides of the attention layer."""

    place: Place
    queried: EnclosedSparse  # (queries·width_in, d + 1)
    keyed: EnclosedSparse  # (keys·key_width, d + 1)
    num_keys: int
    num_tokens: int  # of the state that the layer writes
    read: EnclosedSparse  # (outputs, queries·width + 1): the output, affine in what the layer wrote

    @classmethod
    def of(cls, program: Program) -> Anatomy:
        shapes, place = program_attention(program)
        starts = main_start(program), memory_start(program)
        sizes = [tokens * width for tokens, width in starts]
        d = sum(sizes)
        state = _composed(program.layers[: place.number], _identity(np.arange(sizes[0]), d), sizes[0])
        keyed, num_keys = state, shapes[place.number][0]
        if place.layer.cross:
            keyed = _composed(program.memory, _identity(sizes[0] + np.arange(sizes[1]), d), sizes[1])
            num_keys = stream_shapes(program.memory, starts[1])[-1][0]
        width_in = shapes[place.number][1]
        queried = state.rows((place.queries[:, None] * width_in + np.arange(width_in)).ravel())
        # What the layer writes is numbered over the queries that are read; the others are read by nobody.
        position = np.full(shapes[place.number + 1][0], -1)
        position[place.queries] = np.arange(len(place.queries))
        written = (position[:, None] * place.width + np.arange(place.width)).ravel()
        start = _identity(np.arange(len(written)), len(written))
        is_read = written[start.row] >= 0
        wide = len(place.queries) * place.width
        start = start.where(is_read).relabelled(start.row[is_read], written[start.row[is_read]], wide + 1)
        read = _composed(program.layers[place.number + 1 :], start, len(written))
        return cls(place, queried, keyed, num_keys, shapes[place.number + 1][0], read)

    def heads(self, group: Group) -> Iterator[HeadForms]:
        """For every query of the group every head of the layer."""
        width, read = self.place.width, self.read.rows(group.outputs)
        for query in group.queries.tolist():
            own = read.where((read.column // width == query) & (read.column < read.num_columns - 1))
            writes = own.relabelled(own.column - query * width, own.row, len(group.outputs))
            for head in self.place.layer.heads:
                yield self._head(query, head, writes)

    def _head(self, query: int, head: Head, writes: EnclosedSparse) -> HeadForms:
        width, key_width = head.W_Q.shape[0], head.W_K.shape[0]
        token = self.place.queries[query]
        seen = np.arange(self.num_keys)
        if head.mask is not None:
            seen = np.flatnonzero(head.mask.visible(np.array([token]), slice(None))[0])
        own = self.queried.rows(query * width + np.arange(width))
        keyed = self.keyed.rows((seen[:, None] * key_width + np.arange(key_width)).ravel())
        W_Q, W_K, W_V, W_O = (EnclosedSparse.of_matrix(W) for W in (head.W_Q, head.W_K, head.W_V, head.W_O))
        return HeadForms(
            times_columns(own, width, W_Q),
            times_columns(keyed, key_width, W_K),
            times_columns(keyed, key_width, W_V),
            W_O.times(writes),
            len(seen),
            max(1, head.W_Q.shape[1]),
            max(1, head.W_V.shape[1]),
        )

    def affine_part(self, outputs: np.ndarray) -> EnclosedSparse:
        """(outputs, d + 1): constants of the read-out, and the residual."""
        read = self.read.rows(outputs)
        is_last = read.column == read.num_columns - 1
        d = self.queried.num_columns - 1
        constant = read.where(is_last).relabelled(read.row[is_last], np.full(is_last.sum(), d), d + 1)
        if not self.place.layer.residual:
            return constant
        moving = read.where(~is_last)
        moving = moving.relabelled(moving.row, moving.column, read.num_columns - 1)
        return moving.times(self.queried).plus(constant)


def _identity(variables: np.ndarray, d: int) -> EnclosedSparse:
    """Row i is variable variables[i] of d; the column of the constant comes after them."""
    return EnclosedSparse.exact(np.arange(len(variables)), variables, np.ones(len(variables)), d + 1)


def _composed(layers: Sequence[Layer], state: EnclosedSparse, size: int) -> EnclosedSparse:
    """The affine maps applied to a form of `size` rows, one after the other."""
    num_columns = state.num_columns
    for layer in layers:
        assert isinstance(layer, Affine)
        # One more row, the constant 1, and the layer's own constants as its column.
        one = EnclosedSparse.exact(np.array([size]), np.array([num_columns - 1]), np.ones(1), num_columns)
        row, column, values = _entries(layer.weight, layer.constant, size)
        state = EnclosedSparse.exact(row, column, values, size + 1).times(stacked([state, one], num_columns))
        size = layer.constant.shape[0] * layer.constant.shape[1]
    return state


def _entries(weight: Sparse, constant: Sparse, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    row = np.concatenate([weight.flat(slice(0, 2)), constant.flat(slice(None))])
    column = np.concatenate([weight.flat(slice(2, None)), np.full(len(constant.values), size, np.int64)])
    return row, column, np.concatenate([weight.values, constant.values])
