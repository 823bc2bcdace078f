"""A deep program cut into stages: each one softmax, from the entries of a state that are read to those of the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention, Layer, Softmax
from attnc.ir.program import Program
from attnc.ir.shapes import main_start
from attnc.ir.sparse import Sparse
from attnc.proofs.deep.softmax_heads import attention_of_softmax

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class Slice:
    """One stage: the entries of the state before and after it that are read, by name, and the program between them.

    `tokens` are those that the outputs are entries of.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tokens: Int[np.ndarray, " outputs"]
    program: Program


def slices(program: Program) -> tuple[tuple[Slice, ...], Program]:
    """The stages, and the affine map that reads the outputs off the last state.

    ProgramError if the program has a memory, or two affine maps one after the other.
    """
    found = []
    *_, read = layers = _alternating(program)
    names, entries = _inputs(program)
    for cut in _cuts(program, layers):
        outputs = tuple(_name(cut.softmax, int(entry)) for entry in cut.wanted)
        stage = Program(_stage(cut.place, cut.softmax, cut.reader), ((len(names),),), (len(outputs),))
        tokens = cut.wanted // max(1, len(cut.softmax.channels))
        found.append(Slice(cut.softmax.name, names, outputs, tokens, stage))
        names, entries = outputs, cut.wanted
    assert isinstance(read, Affine)
    return tuple(found), Program((_from_entries(read, entries),), ((len(names),),), program.output_shape)


def stage_programs(program: Program) -> tuple[Program, ...]:
    """The same stages, the last of them with the outputs of the program: one after the other they are the program."""
    *_, read = layers = _alternating(program)
    assert isinstance(read, Affine)
    cuts = tuple(_cuts(program, layers))
    if not cuts:
        raise ProgramError("the program is an affine map: it has no stages")
    *before, last = cuts
    found = [Program(_stage(cut.place, cut.softmax, cut.reader), cut.takes, (len(cut.wanted),)) for cut in before]
    return (*found, Program(_stage(last.place, last.softmax, read), last.takes, program.output_shape))


@dataclass(frozen=True, eq=False)
class _Cut:
    """An affine map from a vector, a softmax, and the entries of what it writes that something reads."""

    place: Affine
    softmax: Attention | Softmax
    wanted: Int[np.ndarray, " entries"]

    @property
    def takes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.place.weight.shape[3],),)

    @property
    def reader(self) -> Affine:
        """The wanted entries, as they are."""
        tokens, width, n = self.place.weight.shape[0], len(self.softmax.channels), len(self.wanted)
        index = np.zeros((n, 4), np.int32)
        index[:, 1] = np.arange(n)
        index[:, 2], index[:, 3] = np.divmod(self.wanted, max(1, width))
        dtype = self.place.weight.values.dtype
        weight = Sparse((1, n, tokens, width), index, np.ones(n, dtype))
        names = tuple(_name(self.softmax, int(entry)) for entry in self.wanted)
        return Affine("read the state", weight, Sparse.zeros((1, n), dtype), names)


def _cuts(program: Program, layers: tuple[Layer, ...]) -> Iterator[_Cut]:
    _, entries = _inputs(program)
    for place, softmax, after in zip(layers[::2], layers[1::2], layers[2::2], strict=False):
        assert isinstance(place, Affine)
        assert isinstance(after, Affine)
        assert not isinstance(softmax, Affine)
        wanted = np.unique(after.weight.flat(slice(2, None)))
        yield _Cut(_from_entries(place, entries), softmax, wanted)
        entries = wanted


def _inputs(program: Program) -> tuple[tuple[str, ...], Int[np.ndarray, " entries"]]:
    tokens, width = main_start(program)
    return tuple(f"in.{i}" for i in range(tokens * width)), np.arange(tokens * width)


def _alternating(program: Program) -> tuple[Layer, ...]:
    """Affine, softmax, affine, …, affine."""
    layers = program.layers
    kinds = [isinstance(layer, Affine) for layer in layers]
    wanted = [number % 2 == 0 for number in range(len(layers))]
    if program.memory or len(program.input_shapes) > 1 or kinds != wanted or not kinds[-1]:
        raise ProgramError(
            "a program is proved stage by stage if affine maps and softmaxes (of attention, or of features) alternate "
            "in it, with an affine map at both ends and no memory"
        )
    return layers


def _stage(place: Affine, softmax: Layer, read: Affine) -> tuple[Layer, ...]:
    return (place, softmax, read) if isinstance(softmax, Attention) else attention_of_softmax(place, read)


def _name(layer: Attention | Softmax, entry: int) -> str:
    """A channel of the first token by its name, of others with the number of the token."""
    token, column = divmod(entry, len(layer.channels))
    return layer.channels[column] if token == 0 else f"{layer.channels[column]}@{token}"


def _from_entries(layer: Affine, entries: Int[np.ndarray, " entries"]) -> Affine:
    """The same map of a vector of these entries, in ascending order, which are all that it reads."""
    tokens, width, _, _ = layer.weight.shape
    index = layer.weight.index.copy()
    index[:, 2], index[:, 3] = 0, np.searchsorted(entries, layer.weight.flat(slice(2, None)))
    weight = Sparse((tokens, width, 1, len(entries)), index, layer.weight.values)
    return Affine(layer.name, weight, layer.constant, layer.channels)
