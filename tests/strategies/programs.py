"""Random legal programs: every kind of layer, masks, several heads, residuals, and a memory with or without input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attnc.ir.layers import EVERY_QUERY, Affine, Attention, Head, Layer, Mask, Softmax
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check

NAMES = ("embed", "select", "β = 3", "read.out", "层", "a b", "__metadata__", "x")
WILD = (-0.0, 0.0, 5e-324, -1e-310, 1e-45, 3.4e38, -3.4e38, 0.1)


@st.composite
def programs(
    draw: st.DrawFn, *, max_tokens: int = 4, max_width: int = 3, max_layers: int = 3, wild: bool = False
) -> Program:
    """A program that `ir.spec` accepts.

    Values are of moderate size, so that it can be run. With `wild` there are also signed zeros, subnormal and huge
    numbers among them, which only survive being stored.
    """
    dtype = np.dtype(draw(st.sampled_from(["float32", "float64"])))
    make = _Maker(draw, dtype, max_tokens, max_width, wild)
    memory_kind = draw(st.sampled_from(["none", "constant", "input"]))
    input_shapes, state = [make.input_shape()], (0, 0)
    memory: list[Layer] = []
    if memory_kind == "constant":
        memory, state = make.stream([make.affine], (0, 0), None)
    elif memory_kind == "input":
        input_shapes.append(make.input_shape())
        first = [make.layer] * draw(st.integers(0, 2))
        memory, state = make.stream(first, (math.prod(input_shapes[1][:-1]), input_shapes[1][-1]), None)
    memory_state = None if memory_kind == "none" else state
    steps = [make.layer] * draw(st.integers(1, max_layers))
    if memory_state is not None:
        steps.insert(draw(st.integers(0, len(steps))), make.cross)
    start = (math.prod(input_shapes[0][:-1]), input_shapes[0][-1])
    layers, (tokens, width) = make.stream(steps, start, memory_state)
    outputs = [(tokens, width), (tokens * width,), (1, tokens, width)] + ([()] if tokens * width == 1 else [])
    return check(Program(tuple(layers), tuple(input_shapes), draw(st.sampled_from(outputs)), tuple(memory)))


def random_inputs(program: Program, batch: int, seed: int = 0) -> list[np.ndarray]:
    """Inputs that the program takes."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-2, 2, (batch, *shape)).astype(program.dtype) for shape in program.input_shapes]


class _Maker:
    """Draws layers: sizes and choices from hypothesis, numbers from a generator that it seeds."""

    def __init__(self, draw: st.DrawFn, dtype: Any, max_tokens: int, max_width: int, wild: bool) -> None:
        self.draw, self.dtype, self.wild = draw, dtype, wild
        self.max_tokens, self.max_width = max_tokens, max_width
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def input_shape(self) -> tuple[int, ...]:
        width = self.draw(st.integers(1, self.max_width))
        return self.draw(st.sampled_from([(width,), (self.draw(st.integers(1, self.max_tokens)), width)]))

    def stream(
        self, steps: list[Any], state: tuple[int, int], memory: tuple[int, int] | None
    ) -> tuple[list[Layer], tuple[int, int]]:
        layers: list[Layer] = []
        for i, step in enumerate(steps):
            layer, state = step(f"{self.draw(st.sampled_from(NAMES))}{i}", state, memory)
            layers.append(layer)
        return layers, state

    def layer(self, name: str, state: tuple[int, int], memory: tuple[int, int] | None) -> tuple[Layer, tuple[int, int]]:
        kinds = [self.affine, self.attention, self.softmax] + ([self.cross] if memory else [])
        made: tuple[Layer, tuple[int, int]] = self.draw(st.sampled_from(kinds))(name, state, memory)
        return made

    def affine(
        self, name: str, state: tuple[int, int], memory: tuple[int, int] | None
    ) -> tuple[Layer, tuple[int, int]]:
        tokens, width = self.draw(st.integers(1, self.max_tokens)), self.draw(st.integers(1, self.max_width))
        weight, constant = self.sparse((tokens, width, *state)), self.sparse((tokens, width))
        return Affine(name, weight, constant, self.channels(width)), (tokens, width)

    def softmax(
        self, name: str, state: tuple[int, int], memory: tuple[int, int] | None
    ) -> tuple[Layer, tuple[int, int]]:
        return Softmax(name, self.channels(state[1])), state

    def attention(
        self, name: str, state: tuple[int, int], memory: tuple[int, int] | None, *, cross: bool = False
    ) -> tuple[Layer, tuple[int, int]]:
        keyed = memory if cross and memory is not None else state
        residual = self.draw(st.booleans())
        width_out = state[1] if residual else self.draw(st.integers(1, self.max_width))
        heads = tuple(self.head(state, keyed, width_out) for _ in range(self.draw(st.integers(1, 3))))
        return Attention(name, heads, self.channels(width_out), residual, cross), (state[0], width_out)

    def cross(self, name: str, state: tuple[int, int], memory: tuple[int, int] | None) -> tuple[Layer, tuple[int, int]]:
        return self.attention(name, state, memory, cross=True)

    def head(self, state: tuple[int, int], keyed: tuple[int, int], width_out: int) -> Head:
        d_k, d_v = self.draw(st.integers(1, 3)), self.draw(st.integers(1, 3))
        shapes = ((state[1], d_k), (keyed[1], d_k), (keyed[1], d_v), (d_v, width_out))
        W_Q, W_K, W_V, W_O = [self.numbers(math.prod(shape)).reshape(shape) for shape in shapes]
        mask = self.mask(state[0], keyed[0]) if self.draw(st.booleans()) else None
        return Head(W_Q, W_K, W_V, W_O, mask)

    def mask(self, queries: int, keys: int) -> Mask:
        of_keys = self.rng.integers(EVERY_QUERY, 3, keys).astype(self.integer_dtype())
        choices = np.arange(EVERY_QUERY, 5) if (of_keys == EVERY_QUERY).any() else of_keys
        return Mask(self.rng.choice(choices, queries).astype(self.integer_dtype()), of_keys)

    def sparse(self, shape: tuple[int, ...]) -> Sparse:
        """Entries in no particular order."""
        cells = self.rng.permutation(math.prod(shape))
        cells = cells[: self.draw(st.integers(0, len(cells)))]
        index = np.stack(np.unravel_index(cells, shape), axis=1) if len(cells) else np.zeros((0, len(shape)), np.int64)
        return Sparse(shape, index.astype(self.integer_dtype()), self.numbers(len(cells)))

    def numbers(self, count: int) -> np.ndarray:
        values = self.rng.normal(size=count) * 10.0 ** self.rng.integers(-2, 2)
        if self.wild:
            values = np.where(self.rng.random(count) < 0.3, self.rng.choice(WILD, count), values)
        with np.errstate(under="ignore"):
            return values.astype(self.dtype)

    def integer_dtype(self) -> Any:
        return np.dtype(self.draw(st.sampled_from(["int32", "int64"])))

    def channels(self, width: int) -> tuple[str, ...]:
        prefix = self.draw(st.sampled_from(["c", "key.", "λ"]))
        return tuple(f"{prefix}{i}" for i in range(width))
