"""Random legal programs for the tests of ir/ and engines/: hypothesis draws the structure, a seed the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attnc.ir import Affine, Attention, Head, Mask, Program, Softmax
from attnc.ir.layers import EVERY_QUERY, Layer
from attnc.ir.program import token_shape
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check

Shape = tuple[int, int]


NAMES = ("embed", "select", "β = 3", "read.out", "层", "a b", "__metadata__", "x")
WILD = (-0.0, 0.0, 5e-324, -1e-310, 1e-45, 3.4e38, -3.4e38, 0.1)


@st.composite
def programs_and_inputs(
    draw: st.DrawFn, max_layers: int = 4, max_tokens: int = 5, scales: tuple[float, ...] = (0.1, 1.0, 20.0)
) -> tuple[Program, tuple[np.ndarray, ...]]:
    """A program and a batch for it, possibly empty. `scales` are factors on W_Q: large ones make wide logits."""
    program = _program(draw, max_layers, max_tokens, scales)
    return program, random_inputs(program, draw(st.sampled_from([1, 3, 0, 7])), draw(st.integers(0, 2**32)))


@st.composite
def programs(draw: st.DrawFn, *, wild: bool = False) -> Program:
    """A program with odd names, integers of either width, and entries in any order.

    With `wild` there are also signed zeros, subnormal and huge numbers, which only survive being stored.
    """
    program = _program(draw, max_layers=3, max_tokens=4, scales=(1.0,))
    rng, integers = np.random.default_rng(draw(st.integers(0, 2**32))), st.sampled_from([np.int32, np.int64])

    def numbers(values: np.ndarray) -> np.ndarray:
        with np.errstate(under="ignore"):
            made = np.where(rng.random(values.shape) < 0.3 * wild, rng.choice(WILD, values.shape), values)
            return made.astype(program.dtype)

    def sparse(tensor: Sparse) -> Sparse:
        order = rng.permutation(len(tensor.values))
        return Sparse(tensor.shape, tensor.index[order].astype(draw(integers)), numbers(tensor.values[order]))

    def head(known: Head) -> Head:
        mask = known.mask
        if mask is not None:
            mask = Mask(mask.query_segments.astype(draw(integers)), mask.key_segments.astype(draw(integers)))
        return Head(**{name: numbers(W) for name, W in known.matrices.items()}, mask=mask)

    def disguised(number: int, layer: Layer) -> Layer:
        prefix, name = draw(st.sampled_from(["c", "key.", "λ"])), f"{draw(st.sampled_from(NAMES))}{number}"
        layer = replace(layer, name=name, channels=tuple(f"{prefix}{i}" for i in range(len(layer.channels))))
        if isinstance(layer, Affine):
            return replace(layer, weight=sparse(layer.weight), constant=sparse(layer.constant))
        return replace(layer, heads=tuple(map(head, layer.heads))) if isinstance(layer, Attention) else layer

    layers, memory = (
        tuple(disguised(i, layer) for i, layer in enumerate(stream)) for stream in (program.layers, program.memory)
    )
    size = math.prod(program.output_shape)
    shapes = [program.output_shape, (1, *program.output_shape)] + ([()] if size == 1 else [])
    return check(replace(program, layers=layers, memory=memory, output_shape=draw(st.sampled_from(shapes))))


def _program(draw: st.DrawFn, max_layers: int, max_tokens: int, scales: tuple[float, ...]) -> Program:
    dtype = np.dtype(draw(st.sampled_from([np.float64, np.float32])))
    factory = Factory(draw, np.random.default_rng(draw(st.integers(0, 2**32))), dtype, max_tokens, scales)
    input_shapes, memory_shape, memory = [factory.input_shape()], None, []
    kind = draw(st.sampled_from(["no memory", "constant memory", "second input"]))
    if kind != "no memory":
        start = (0, 0)
        if kind == "second input":
            input_shapes.append(factory.input_shape())
            start = token_shape(input_shapes[1])
        else:
            memory.append(factory.affine("memory0", start))
            start = memory[0].weight.shape[:2]
        memory_shape = factory.extend(memory, start, draw(st.integers(0, 2)), None)
    layers: list[Layer] = []
    shape = factory.extend(layers, token_shape(input_shapes[0]), draw(st.integers(1, max_layers)), memory_shape)
    if memory_shape is not None:
        layers.append(factory.attention("last", shape, memory_shape, cross=True))
        shape = (shape[0], len(layers[-1].channels))
    if draw(st.booleans()):
        layers.append(factory.read(shape))
        shape = layers[-1].weight.shape[:2]
    output_shape = draw(st.sampled_from([shape, (shape[0] * shape[1],)]))
    return check(Program(tuple(layers), tuple(input_shapes), output_shape, tuple(memory)))


def random_inputs(program: Program, batch: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.uniform(-2, 2, (batch, *shape)).astype(program.dtype) for shape in program.input_shapes)


class Factory:
    def __init__(
        self, draw: Any, rng: np.random.Generator, dtype: np.dtype[Any], max_tokens: int, scales: tuple[float, ...]
    ) -> None:
        self.draw, self.rng, self.dtype = draw, rng, dtype
        self.max_tokens, self.scales = max_tokens, scales

    def input_shape(self) -> tuple[int, ...]:
        width = self.draw(st.integers(1, 3))
        return self.draw(st.sampled_from([(width,), (1, width), (3, width)]))

    def extend(self, layers: list[Layer], shape: Shape, count: int, memory: Shape | None) -> Shape:
        for i in range(len(layers), len(layers) + count):
            kind = self.draw(st.sampled_from(["affine", "attention", "cross", "softmax", "attention"]))
            if kind == "affine":
                layers.append(self.affine(f"layer{i}", shape))
                shape = layers[-1].weight.shape[:2]
            elif kind == "softmax":
                layers.append(Softmax(f"layer{i}", channels(shape[1])))
            else:
                cross = kind == "cross" and memory is not None
                layers.append(self.attention(f"layer{i}", shape, memory if cross else shape, cross))
                shape = (shape[0], len(layers[-1].channels))
        return shape

    def affine(self, name: str, shape: Shape) -> Affine:
        """Reads only some of the tokens, in any order, and makes some tokens of constants alone."""
        counts = [self.max_tokens, *range(1, self.max_tokens)]
        tokens, width = self.draw(st.sampled_from(counts)), self.draw(st.sampled_from([2, 1, 3, 4]))
        weight = self.numbers(tokens, width, *shape) * (self.rng.random((tokens, width, *shape)) < 0.4)
        weight *= self.rng.random((tokens, 1, 1, 1)) < 0.7
        weight *= self.rng.random((shape[0], 1)) < 0.8
        constant = self.numbers(tokens, width) * (self.rng.random((tokens, width)) < 0.5)
        return Affine(name, Sparse.from_dense(weight), Sparse.from_dense(constant), channels(width))

    def read(self, shape: Shape) -> Affine:
        """Some of the tokens, in another order."""
        chosen = self.rng.permutation(shape[0])[: 1 + shape[0] // 2]
        weight = np.zeros((len(chosen), shape[1], *shape), self.dtype)
        for row, token in enumerate(chosen):
            weight[row, :, token] = np.eye(shape[1])
        constant = Sparse.zeros(weight.shape[:2], self.dtype)
        return Affine("read", Sparse.from_dense(weight), constant, channels(shape[1]))

    def attention(self, name: str, shape: Shape, keyed: Shape, cross: bool) -> Attention:
        residual = self.draw(st.booleans())
        width_out = shape[1] if residual else self.draw(st.integers(1, 3))
        heads = tuple(self.head(shape, keyed, width_out) for _ in range(self.draw(st.integers(1, 3))))
        return Attention(name, heads, channels(width_out), residual, cross)

    def head(self, shape: Shape, keyed: Shape, width_out: int) -> Head:
        d_k, d_v = self.draw(st.sampled_from([1, 2, 3, 0])), self.draw(st.sampled_from([1, 2, 0]))
        scale = self.dtype.type(self.draw(st.sampled_from(self.scales)))
        mask = self.mask(shape[0], keyed[0]) if self.draw(st.booleans()) else None
        W_O = self.numbers(d_v, width_out) * (self.rng.random(width_out) < 0.7)
        W_Q, W_K, W_V = scale * self.numbers(shape[1], d_k), self.numbers(keyed[1], d_k), self.numbers(keyed[1], d_v)
        return Head(W_Q, W_K, W_V, W_O, mask)

    def mask(self, queries: int, keys: int) -> Mask:
        mask = Mask(self.rng.integers(-1, 3, queries), self.rng.integers(-1, 3, keys))
        if (mask.num_visible() == 0).any():
            mask.key_segments[self.rng.integers(keys)] = EVERY_QUERY
        return mask

    def numbers(self, *shape: int) -> np.ndarray:
        return self.rng.uniform(-1, 1, shape).astype(self.dtype)


def channels(width: int) -> tuple[str, ...]:
    return tuple(f"c{i}" for i in range(width))


def lookup_program(anchors: np.ndarray, values: np.ndarray, beta: float, dtype: Any = np.float64) -> Program:
    """One query token (x, 1) and a constant token per anchor: weights ∝ exp(−β(x − L_k)²)."""
    from attnc.ir.building import AffineBuilder, Attending, reading

    names, tokens = ("x", "one", "slope", "offset", "value"), len(anchors) + 1
    embed = AffineBuilder(1, ["x"], tokens, names)
    embed.link(0, "x", 0, "x")
    embed.set(0, "one", 1.0)
    keys = 1 + np.arange(len(anchors))
    embed.set(keys, "slope", 2 * beta * anchors)
    embed.set(keys, "offset", -beta * anchors**2)
    embed.set(keys, "value", values)
    mask = Mask(np.zeros(tokens, np.int64), np.r_[1, np.zeros(len(anchors), np.int64)])
    queries, keys = {("x", "q"): 1.0, ("one", "one"): 1.0}, {("slope", "q"): 1.0, ("offset", "one"): 1.0}
    head = Attending(names, names, dtype, mask).head(queries, keys, {("value", "value"): 1.0})
    read = reading("read", tokens, ["y"], [0], {"y": "y"}, dtype)
    layers = (embed.build("embed", dtype), Attention("select", (head,), ("y",)), read)
    return check(Program(layers, ((1,),), ()))
