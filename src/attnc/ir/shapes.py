"""Facts that follow from shapes and masks alone: the shapes of states, the tokens that are read, the keys met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.layers import Affine, Attention, Layer
from attnc.ir.program import Program, token_shape
from attnc.ir.sparse import Sparse

if TYPE_CHECKING:
    from jaxtyping import Int


def stream_shapes(layers: Sequence[Layer], start: tuple[int, int]) -> list[tuple[int, int]]:
    """(tokens, width) before the first layer and after each."""
    shapes = [start]
    for layer in layers:
        if isinstance(layer, Affine):
            shapes.append((layer.weight.shape[0], layer.weight.shape[1]))
        else:
            shapes.append((shapes[-1][0], len(layer.channels)))
    return shapes


def main_start(program: Program) -> tuple[int, int]:
    return token_shape(program.input_shapes[0])


def memory_start(program: Program) -> tuple[int, int]:
    """The second input as tokens, or no token at all when the memory is constant."""
    return token_shape(program.input_shapes[1]) if len(program.input_shapes) > 1 else (0, 0)


def key_counts(program: Program) -> list[int]:
    """For every head of every attention layer: the largest number of keys that a query which is read meets."""
    memory = stream_shapes(program.memory, memory_start(program))
    counts = []
    streams = ((program.memory, memory, None), (program.layers, stream_shapes(program.layers, main_start(program)), 1))
    for layers, shapes, is_main in streams:
        live = live_tokens(layers, shapes[0][0], shapes[-1][0])
        for i, layer in enumerate(layers):
            if isinstance(layer, Attention):
                keys = memory[-1][0] if layer.cross and is_main else shapes[i][0]
                for head in layer.heads:
                    counts.append(
                        keys if head.mask is None else int(head.mask.num_visible()[live[i + 1]].max(initial=0))
                    )
    return counts


def live_tokens(layers: Sequence[Layer], tokens_in: int, tokens_out: int) -> list[Int[np.ndarray, " live"]]:
    """Before the first layer and after each: the tokens that something later reads. The last state is read whole."""
    live = [np.arange(tokens_out)]
    shapes = [tokens_in]
    for layer in layers:
        shapes.append(layer.weight.shape[0] if isinstance(layer, Affine) else shapes[-1])
    for i in range(len(layers) - 1, -1, -1):
        layer, after = layers[i], live[0]
        if isinstance(layer, Affine):
            index = layer.weight.index
            is_read = np.zeros(shapes[i + 1], bool)
            is_read[after] = True
            before = np.unique(index[is_read[index[:, 0]], 2])
        elif isinstance(layer, Attention) and not layer.cross and len(after):
            before = np.arange(shapes[i])  # every token may be a key
        else:
            before = after
        live.insert(0, before)
    return live


def live_layers(
    layers: Sequence[Layer], start: tuple[int, int]
) -> tuple[Int[np.ndarray, " live"], list[tuple[Layer, Int[np.ndarray, " live"], Int[np.ndarray, " live"]]]]:
    """The tokens of the first state that something reads; and the layers, affine maps cut down to the tokens that are
    read, each with these tokens after it, and their places among those before it if it keeps their numbers."""
    live = live_tokens(layers, start[0], stream_shapes(layers, start)[-1][0])
    found = []
    for layer, before, after in zip(layers, live[:-1], live[1:], strict=True):
        if isinstance(layer, Affine):
            weight = _chosen(_chosen(layer.weight, 0, after), 2, before)
            layer = replace(layer, weight=weight, constant=_chosen(layer.constant, 0, after))
        found.append((layer, after, np.searchsorted(before, after)))
    return live[0], found


def _chosen(tensor: Sparse, axis: int, chosen: np.ndarray) -> Sparse:
    """The tensor at the chosen places along one axis."""
    if len(chosen) == tensor.shape[axis]:
        return tensor
    places = np.full(tensor.shape[axis], -1, tensor.index.dtype)
    places[chosen] = np.arange(len(chosen))
    moved = places[tensor.index[:, axis]]
    kept = moved >= 0
    index = tensor.index[kept]
    index[:, axis] = moved[kept]
    return Sparse((*tensor.shape[:axis], len(chosen), *tensor.shape[axis + 1 :]), index, tensor.values[kept])
