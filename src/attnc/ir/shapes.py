"""Facts that follow from shapes and masks alone: the shapes of states, the tokens that are read, the keys per query.

Everything that walks through a program layer by layer (evaluation, error analysis, folding, counting, text) walks
through the steps of its two streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.ir.layers import Affine, Attention, Layer
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Int


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """A layer in its place: the shape of the state after it, and the tokens before and after it that are read."""

    layer: Layer
    after: tuple[int, int]  # (tokens, width)
    read: Int[np.ndarray, " read"]  # the tokens before it that this layer or a later one reads
    tokens: Int[np.ndarray, " live"]  # the tokens after it that something later reads
    num_keys: int

    @property
    def rows(self) -> Int[np.ndarray, " live"]:
        """The indices of `tokens` within `read`, for a layer that keeps the numbers of its tokens."""
        return np.searchsorted(self.read, self.tokens)

    @cached_property
    def live_layer(self) -> Layer:
        """The layer. An affine map is restricted to the tokens that are read."""
        if not isinstance(self.layer, Affine):
            return self.layer
        weight = _chosen(_chosen(self.layer.weight, 0, self.tokens), 2, self.read)
        return replace(self.layer, weight=weight, constant=_chosen(self.layer.constant, 0, self.tokens))

    def key_counts(self) -> list[int]:
        """Return, for every head, the largest number of keys that a live query sees."""
        masks = (head.mask for head in self.layer.heads)
        return [self.num_keys if m is None else int(m.num_visible()[self.tokens].max(initial=0)) for m in masks]


@dataclass(frozen=True, eq=False)
class Stream:
    """The steps of the memory or of the main stream. `first` are the tokens of the first state that are read."""

    start: tuple[int, int]
    first: Int[np.ndarray, " live"]
    steps: tuple[PlacedLayer, ...]

    @classmethod
    def of(cls, layers: Sequence[Layer], start: tuple[int, int], memory: Stream | None) -> Stream:
        shapes = [start]
        for layer in layers:
            tokens = layer.weight.shape[0] if isinstance(layer, Affine) else shapes[-1][0]
            shapes.append((tokens, len(layer.channels)))
        live = [np.arange(shapes[-1][0])]  # the last state is read whole
        for layer, (tokens, _) in zip(reversed(layers), reversed(shapes[:-1]), strict=True):
            live.insert(0, _tokens_read(layer, tokens, live[0]))
        steps = []
        for i, layer in enumerate(layers):
            num_keys = memory.end[0] if layer.cross and memory is not None else shapes[i][0]
            steps.append(PlacedLayer(layer, shapes[i + 1], live[i], live[i + 1], num_keys))
        return cls(start, live[0], tuple(steps))

    @property
    def end(self) -> tuple[int, int]:
        """(tokens, width) of the last state."""
        return self.steps[-1].after if self.steps else self.start


def streams(program: Program) -> tuple[Stream, Stream]:
    """Return the stream of the memory and the main stream."""
    main, second = program.starts
    memory = Stream.of(program.unrolled_memory, second, None)
    return memory, Stream.of(program.unrolled_layers, main, memory)


def key_counts(program: Program) -> list[int]:
    """Return, for every head of every attention layer, the largest number of keys that a live query sees."""
    return [count for stream in streams(program) for step in stream.steps for count in step.key_counts()]


def _tokens_read(layer: Layer, num_tokens: int, after: Int[np.ndarray, " live"]) -> Int[np.ndarray, " live"]:
    """Return the tokens before a layer that are read, if the tokens `after` are read after it."""
    if isinstance(layer, Affine):
        index = layer.weight.index
        is_read = np.zeros(layer.weight.shape[0], bool)
        is_read[after] = True
        return np.unique(index[is_read[index[:, 0]], 2])
    if isinstance(layer, Attention) and not layer.cross and len(after):
        return np.arange(num_tokens)  # every token may be a key
    return after


def _chosen(tensor: Sparse, axis: int, chosen: np.ndarray) -> Sparse:
    """Return the tensor at the chosen places along one axis."""
    if len(chosen) == tensor.shape[axis]:
        return tensor
    places = np.full(tensor.shape[axis], -1, tensor.index.dtype)
    places[chosen] = np.arange(len(chosen))
    moved = places[tensor.index[:, axis]]
    kept = moved >= 0
    index = tensor.index[kept]
    index[:, axis] = moved[kept]
    return Sparse((*tensor.shape[:axis], len(chosen), *tensor.shape[axis + 1 :]), index, tensor.values[kept])
