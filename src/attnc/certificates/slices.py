"""A deep program cut into stages: each one attention layer, from one state of the first token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class Slice:
    """One stage: the channels of the first token before and after it, and the program between them."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    places: Int[np.ndarray, " outputs"]  # of the outputs among all channels
    program: Program


def slices(program: Program) -> tuple[tuple[Slice, ...], Program]:
    """The stages, and the affine map that reads the outputs off the last state.

    ProgramError unless affine maps and attention layers alternate, and each map reads the first token alone.
    """
    *body, read = program.layers
    places, attentions = body[::2], body[1::2]
    alternates = len(places) == len(attentions) and isinstance(read, Affine)
    alternates &= all(
        isinstance(a, Affine) and isinstance(b, Attention) for a, b in zip(places, attentions, strict=False)
    )
    if not alternates or program.memory or program.input_shapes != ((program.input_shapes[0][0],),):
        raise ProgramError("a program is proved stage by stage if affine maps and attention layers alternate in it")
    channels = tuple(f"in.{i}" for i in range(program.input_shapes[0][0]))
    found = []
    for place, attention, after in zip(places, attentions, [*places, read][1:], strict=True):
        assert isinstance(place, Affine)
        assert isinstance(attention, Attention)
        assert isinstance(after, Affine)
        wanted = _read_columns(after)
        layers = (_from_first_token(place), attention, _reader(place.weight.shape[0], attention, wanted))
        outputs = tuple(attention.channels[i] for i in wanted)
        stage = Program(layers, ((len(channels),),), (len(outputs),))
        found.append(Slice(attention.name, channels, outputs, wanted, stage))
        channels = attention.channels
    assert isinstance(read, Affine)
    return tuple(found), Program((_from_first_token(read),), ((len(channels),),), program.output_shape)


def _read_columns(layer: Affine) -> Int[np.ndarray, " columns"]:
    """The channels that a map reads, all of the first token."""
    index = layer.weight.index
    if (index[:, 2] != 0).any():
        raise ProgramError(f"layer {layer.name!r} reads other tokens than the first")
    return np.unique(index[:, 3])


def _from_first_token(layer: Affine) -> Affine:
    tokens, width, _, width_in = layer.weight.shape
    _read_columns(layer)
    weight = Sparse((tokens, width, 1, width_in), layer.weight.index, layer.weight.values)
    return Affine(layer.name, weight, layer.constant, layer.channels)


def _reader(tokens: int, attention: Attention, columns: np.ndarray) -> Affine:
    """These channels of the first token, as they are."""
    n, dtype = len(columns), attention.heads[0].W_Q.dtype
    zero = np.zeros(n, np.int32)
    index = np.stack([zero, np.arange(n, dtype=np.int32), zero, columns.astype(np.int32)], axis=1)
    weight = Sparse((1, n, tokens, len(attention.channels)), index, np.ones(n, dtype))
    return Affine("read the state", weight, Sparse.zeros((1, n), dtype), tuple(attention.channels[i] for i in columns))
