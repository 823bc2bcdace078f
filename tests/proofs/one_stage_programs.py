"""Random programs of one attention stage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnc.ir import Affine, Attention, Head, Mask, Program
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.program import token_shape
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check


def random_program(seed: int, *, scale: float | None = None, gates: bool | None = None) -> Program:
    """Affine maps, one attention layer, affine maps: all kinds of heads, masks, residuals, memories and dtypes.

    The first two channels of every state move with the input, the others are constant; keys are made from constants,
    values with `gates` from all. `scale` multiplies W_K: large ones make hard selections.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["float64", "float32"]))
    gates = bool(rng.random() < 0.4) if gates is None else gates
    scale = float(10 ** rng.uniform(-2, 4)) if scale is None else scale
    make = Maker(rng, dtype)
    input_shapes = [(int(rng.integers(1, 4)),), (int(rng.integers(1, 3)), int(rng.integers(1, 3)))][rng.integers(2)]
    memory_kind = rng.choice(["none", "constant", "second"], p=[0.5, 0.3, 0.2])
    shapes, memory, keyed = [input_shapes], [], None
    if memory_kind != "none":
        start = (0, 0)
        if memory_kind == "second":
            shapes.append((int(rng.integers(1, 3)), 2))
            start = token_shape(shapes[1])
        for i in range(rng.integers(1, 3)):
            memory.append(make.affine(f"memory{i}", start, (int(rng.integers(1, 9)), int(rng.integers(4, 6)))))
            start = memory[-1].weight.shape[:2]
        keyed = start
    state = token_shape(input_shapes)
    layers: list[Any] = []
    for i in range(rng.integers(1, 3)):
        layers.append(make.affine(f"embed{i}", state, (int(rng.integers(1, 9)), int(rng.integers(4, 6)))))
        state = layers[-1].weight.shape[:2]
    layers.append(make.attention(state, keyed, scale, gates))
    state = (state[0], len(layers[-1].channels))
    for i in range(rng.integers(0, 3)):
        layers.append(make.affine(f"read{i}", state, (int(rng.integers(1, 4)), int(rng.integers(1, 3))), dense=True))
        state = layers[-1].weight.shape[:2]
    return check(Program(tuple(layers), tuple(shapes), (state[0] * state[1],), tuple(memory)))


def num_inputs(program: Program) -> int:
    return sum(math.prod(shape) for shape in program.input_shapes)


class Maker:
    def __init__(self, rng: np.random.Generator, dtype: Any) -> None:
        self.rng, self.dtype = rng, dtype

    def numbers(self, *shape: int) -> np.ndarray:
        """Of mixed size and sign; some are powers of two, some zero."""
        values = self.rng.normal(size=shape) * 10.0 ** self.rng.uniform(-1.5, 1, shape)
        values = np.where(self.rng.random(shape) < 0.2, 2.0 ** self.rng.integers(-3, 4, shape), values)
        return np.where(self.rng.random(shape) < 0.2, 0.0, values).astype(self.dtype)

    def affine(self, name: str, start: tuple[int, int], shape: tuple[int, int], dense: bool = False) -> Affine:
        weight, constant = self.numbers(*shape, *start), self.numbers(*shape)
        if not dense:  # only the first two channels may move, and only by what moved before
            if name.endswith("0"):
                weight[:, 2:] = 0
            else:
                weight[:, 2:, :, :2] = weight[:, :2, :, 2:] = 0
        return Affine(name, Sparse.from_dense(weight), Sparse.from_dense(constant), _names(shape[1]))

    def attention(self, state: tuple[int, int], keyed: tuple[int, int] | None, scale: float, gates: bool) -> Attention:
        residual = bool(self.rng.random() < 0.5)
        width = state[1] if residual else int(self.rng.integers(1, 4))
        of_keys = state if keyed is None else keyed
        heads = tuple(self.head(state, of_keys, width, scale, gates) for _ in range(self.rng.integers(1, 4)))
        return Attention("attend", heads, _names(width), residual, keyed is not None)

    def head(self, state: tuple[int, int], keyed: tuple[int, int], width: int, scale: float, gates: bool) -> Head:
        d_k, d_v = int(self.rng.integers(1, 4)), int(self.rng.integers(1, 3))
        W_K, W_V = self.numbers(keyed[1], d_k) * self.dtype.type(scale), self.numbers(keyed[1], d_v)
        W_K[:2] = 0
        if not gates:
            W_V[:2] = 0
        mask = None
        if self.rng.random() < 0.4:
            of_keys = self.rng.integers(EVERY_QUERY, 2, keyed[0])
            of_keys[self.rng.integers(keyed[0])] = EVERY_QUERY
            mask = Mask(self.rng.integers(0, 2, state[0]), of_keys)
        return Head(self.numbers(state[1], d_k), W_K, W_V, self.numbers(d_v, width), mask)


def _names(width: int) -> tuple[str, ...]:
    return tuple(f"c{i}" for i in range(width))
