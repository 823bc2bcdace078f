"""Programs side by side in one stream, all on one prompt: copies of a program, or several programs.

The tokens of every program are a block of one state, whose channels are those of all programs. A layer of a program
changes its own block: masks give every copy segments of its own, and affine maps keep all other blocks. Tokens of other
blocks see the null token, which is zero.

Where the queries of a head have several segments, the keys that all of them see (sinks and null tokens) have the value
zero and are the same in every copy. So those of the first copy are seen by all, and those of the others by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.numerics.arrays import Float, Int

Array = np.ndarray
NOTHING = -1
"""The row of a token that reads nothing: its inputs are zero."""
SEES_NULL, SEEN_BY_NONE, FIRST = 0, 1, 2
"""The segments of queries that see the null token, of keys that no query sees, and of the first keys of a block."""


@dataclass(frozen=True, eq=False)
class Part:
    """Copies of a program, and the rows of the common prompt that the tokens of its inputs read.

    A token reads the first columns of its row, as many as its input has, times a factor. `name` begins the names of the
    layers.
    """

    program: Program
    rows: tuple[Int[np.ndarray, "copies tokens"], ...]  # for each input
    factors: tuple[Float[np.ndarray, "copies tokens"], ...] = ()  # for each input; none mean 1
    name: str = ""


@dataclass(frozen=True, eq=False)
class _Block:
    """The tokens of one stream of a part, copy by copy."""

    copies: int
    tokens: int  # of one copy
    channels: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.copies * self.tokens


class Stream:
    """The layers of all parts, one after the other.

    Attributes
    ----------
    channels : tuple of str
        The channels of the state.
    layers : list of layers
        The layers so far.
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self.channels = tuple(channels)
        self.layers: list[Layer] = []
        self._dtype: Any = np.float64
        self._blocks: list[_Block] = []
        # Layers that share arrays share what is made of them. The second entries keep the numbered objects alive.
        self._affines: dict[tuple[object, ...], tuple[Affine, object]] = {}
        self._heads: dict[tuple[object, ...], tuple[tuple[Head, ...], object]] = {}
        self._projections: dict[tuple[object, ...], tuple[np.ndarray, object]] = {}
        self._masks: dict[tuple[object, ...], tuple[Mask, object]] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens. The last one is the null token."""
        return sum(block.size for block in self._blocks) + 1

    def places(self, at: int) -> Int[np.ndarray, "copies tokens"]:
        """Return the tokens of a block."""
        block = self._blocks[at]
        start = sum(one.size for one in self._blocks[:at])
        return start + np.arange(block.size).reshape(block.copies, block.tokens)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.channels)}

    def _columns(self, channels: Sequence[str]) -> Int[np.ndarray, " channels"]:
        return np.array([self._numbers[name] for name in channels], np.int32)

    def place(self, parts: Sequence[Part], shape: tuple[int, int]) -> None:
        """Add the blocks of all parts, and the map that makes them from the prompt."""
        index, values, where, constants = [], [], [], []
        tokens, width = 0, len(self.channels)
        for part in parts:
            program = part.program
            firsts = [layers[0] for layers in (program.unrolled_layers, program.unrolled_memory)[: len(part.rows)]]
            factors = part.factors or tuple(np.ones(rows.shape) for rows in part.rows)
            for layer, rows, factor in zip(firsts, part.rows, factors, strict=True):
                assert isinstance(layer, Affine)  # every stream of a program in context begins with its placement
                block = _Block(len(rows), layer.weight.shape[0], layer.channels)
                self._blocks.append(block)
                entries, columns = layer.weight.index, self._columns(layer.channels)
                for copy, (row, times) in enumerate(zip(rows, factor, strict=True)):
                    read, first = row[entries[:, 2]], tokens + copy * block.tokens
                    moved = np.stack([first + entries[:, 0], columns[entries[:, 1]], read, entries[:, 3]], axis=1)
                    kept = read != NOTHING
                    index.append(moved[kept])
                    values.append((layer.weight.values * times[entries[:, 2]])[kept])
                where.append(self._copied(layer.constant.index, (tokens, block)))
                constants.append(np.tile(layer.constant.values, block.copies))
                tokens += block.size
        dtype = self._dtype = parts[0].program.dtype
        weight = Sparse((tokens + 1, width, *shape), _joined(index, np.int32), _joined(values, dtype))
        constant = Sparse((tokens + 1, width), _joined(where, np.int32), _joined(constants, dtype))
        self.layers.append(Affine("place", weight, constant, self.channels))

    def _copied(
        self, index: Int[np.ndarray, "entries rank"], *streams: tuple[int, _Block]
    ) -> Int[np.ndarray, "all rank"]:
        """Return the places of entries in all copies. Each stream has two columns of `index`, tokens and channels."""
        found = []
        for k, (first, block) in enumerate(streams):
            copies = np.arange(block.copies)[:, None]
            found.append(first + copies * block.tokens + index[:, 2 * k])
            found.append(np.broadcast_to(self._columns(block.channels)[index[:, 2 * k + 1]], found[-1].shape))
        return np.stack([part.ravel() for part in found], axis=1).astype(np.int32)

    def apply(self, layer: Layer, name: str, at: int, keyed: int) -> None:
        """Apply a layer to block `at`. Attention across streams has its keys in block `keyed`."""
        if isinstance(layer, Affine):
            self.layers.append(replace(self._affine(layer, at), name=name))
        elif isinstance(layer, Attention) and layer.residual:
            heads = self._all_heads(layer, at, keyed if layer.cross else at)
            self.layers.append(Attention(name, heads, self.channels, residual=True))
        else:
            raise InputError(f"programs side by side have affine maps and attention with a residual; {name!r} is none")

    def answer(self, at: int, factors: Float[np.ndarray, " tokens"] | None = None) -> Affine:
        """Return the map that reads the channels of a block, times a factor for each token."""
        names, tokens = self._blocks[at].channels, self.places(at).reshape(-1)
        read = AffineBuilder(self.tokens, self.channels, len(tokens), names)
        for name in names:
            read.link(np.arange(len(tokens)), name, tokens, name, 1.0 if factors is None else factors)
        return read.build("outputs", self._dtype)

    def _sizes(self) -> tuple[object, ...]:
        return tuple((block.tokens, block.channels) for block in self._blocks)

    def _affine(self, layer: Affine, at: int) -> Affine:
        key = (id(layer.weight), id(layer.constant), at, self._sizes())
        before, old = self._blocks, self._blocks[at]
        new = replace(old, tokens=layer.weight.shape[0], channels=layer.channels)
        after = [*before[:at], new, *before[at + 1 :]]
        if key not in self._affines:
            self._affines[key] = self._affine_on(layer, before, after, at), layer
        self._blocks = after
        return self._affines[key][0]

    def _affine_on(self, layer: Affine, before: list[_Block], after: list[_Block], at: int) -> Affine:
        old, new, width = before[at], after[at], len(self.channels)
        index, values = [], []
        read, written = 0, 0  # the first tokens of the blocks
        where = np.zeros((0, 2), np.int32)
        for k, (one, other) in enumerate(zip(before, after, strict=True)):
            if k == at:
                index.append(self._copied(layer.weight.index, (written, new), (read, old)))
                values.append(np.tile(layer.weight.values, old.copies))
                where = self._copied(layer.constant.index, (written, new))
            else:
                columns, tokens = self._columns(one.channels), np.arange(one.size)
                token, column = np.repeat(tokens, len(columns)), np.tile(columns, len(tokens))
                index.append(np.stack([written + token, column, read + token, column], axis=1))
                values.append(np.ones(len(token)))
            read, written = read + one.size, written + other.size
        dtype = layer.constant.values.dtype
        shape = (written + 1, width, read + 1, width)
        weight = Sparse(shape, _joined(index, np.int32), _joined(values, dtype))
        constant = Sparse(shape[:2], where, np.tile(layer.constant.values, old.copies))
        return Affine(layer.name, weight, constant, self.channels)

    def _all_heads(self, layer: Attention, at: int, keyed: int) -> tuple[Head, ...]:
        key = (id(layer.heads), at, keyed, self._sizes())
        if key not in self._heads:
            asking, known = self._blocks[at].channels, self._blocks[keyed].channels
            made = tuple(
                Head(
                    self._projection(head.W_Q, asking),
                    self._projection(head.W_K, known),
                    self._projection(head.W_V, known),
                    _widened(head.W_O, self._columns(asking), len(self.channels)),
                    self._mask(head.mask, at, keyed),
                )
                for head in layer.heads
            )
            self._heads[key] = made, layer.heads
        return self._heads[key][0]

    def _projection(self, matrix: np.ndarray, channels: tuple[str, ...]) -> Float[np.ndarray, "width columns"]:
        key = (id(matrix), channels)
        if key not in self._projections:
            self._projections[key] = _widened(matrix.T, self._columns(channels), len(self.channels)).T.copy(), matrix
        return self._projections[key][0]

    def _mask(self, mask: Mask | None, at: int, keyed: int) -> Mask:
        segments = None if mask is None else (id(mask.query_segments), id(mask.key_segments))
        key = (segments, at, keyed, tuple(block.tokens for block in self._blocks))
        if key not in self._masks:
            asking, known = self._blocks[at], self._blocks[keyed]
            of_queries = np.zeros(asking.tokens, np.int32) if mask is None else mask.query_segments
            of_keys = np.zeros(known.tokens, np.int32) if mask is None else mask.key_segments
            if (
                of_queries == of_queries[0]
            ).all():  # all queries are alike, so they are the ones that may see every key
                of_keys = np.where(of_keys == EVERY_QUERY, of_queries[0], of_keys)
            span = 1 + int(max(of_queries.max(), of_keys.max()))
            base = FIRST + span * np.arange(asking.copies)[:, None]
            shared = np.where(base == FIRST, EVERY_QUERY, SEEN_BY_NONE)
            sees, seen = np.full(self.tokens, SEES_NULL, np.int32), np.full(self.tokens, SEEN_BY_NONE, np.int32)
            seen[-1] = SEES_NULL
            sees[self.places(at)] = np.where(of_queries == EVERY_QUERY, EVERY_QUERY, base + of_queries)
            seen[self.places(keyed)] = np.where(of_keys == EVERY_QUERY, shared, base + of_keys)
            self._masks[key] = Mask(sees, seen), mask
        return self._masks[key][0]


def side_by_side(parts: Sequence[Part], shape: tuple[int, int]) -> tuple[Stream, tuple[int, ...]]:
    """Return the stream of these parts on a prompt of a shape, and the block with the answers of each part."""
    stream = Stream(tuple(dict.fromkeys(c for p in parts for layer in p.program.all_layers for c in layer.channels)))
    stream.place(parts, shape)
    begins = np.cumsum([0, *(len(part.rows) for part in parts)])[:-1].tolist()
    for part, at in zip(parts, begins, strict=True):
        prefix, memory = f"{part.name}." if part.name else "", at + len(part.rows) - 1
        for layer in part.program.unrolled_memory[1:]:
            stream.apply(layer, f"{prefix}memory.{layer.name}", memory, memory)
        for layer in part.program.unrolled_layers[1:]:
            stream.apply(layer, f"{prefix}{layer.name}", at, memory)
    return stream, tuple(begins)


def of_inputs(program: Program, prompt: Array, blank: float) -> tuple[Array, ...]:
    """Return numbers for all tokens of a program's inputs, from those for the rows of its prompt, queries included.

    First weights are `blank`. They are an input of their own or the row above the prompt. Programs of kernels have the
    queries as the first input.
    """
    first, *second = program.input_shapes
    if second and len(first) == 2:
        return prompt[:, -first[0] :], prompt[:, : -first[0]]
    above = np.full((len(prompt), 1), blank, prompt.dtype)
    return (above, prompt) if second else (np.hstack([above, prompt]),)


def with_start(program: Program) -> tuple[Stream, int, tuple[int, int]]:
    """Return the stream of one program whose first weights are the row above its prompt, its block, and the input."""
    rows, width = program.input_shapes[-1]
    is_above = len(program.input_shapes) == 1
    each = np.arange(rows + (not is_above))[None]
    shape = (each.shape[1], width)
    stream, (at,) = side_by_side([Part(program, (each,) if is_above else (each[:, :1], each[:, 1:]))], shape)
    return stream, at, shape


def with_queries(program: Program) -> Program:
    """Return the program of one prompt, whose last rows are the queries that `program` has as its first input."""
    (queries, _), (rows, width) = program.input_shapes
    shape = (rows + queries, width)
    stream, (at,) = side_by_side([Part(program, of_inputs(program, np.arange(shape[0])[None], NOTHING))], shape)
    return check(Program(rolled([*stream.layers, stream.answer(at)]), (shape,), program.output_shape))


def _widened(matrix: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """Return a matrix of a width whose `columns` are those of another matrix, and whose other columns are zero."""
    found = np.zeros((len(matrix), width), matrix.dtype)
    found[:, columns] = matrix
    return found


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False)
