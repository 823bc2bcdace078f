"""Layers that repeat: a program stores those of one turn, and the number of turns.

A program that takes T equal steps has T times the same layers, which differ in the number at the end of their names.
Steps whose lengths vary, as Chebyshev's do, have affine maps with the same places and some other values. A `Repeat`
holds the layers of the first turn, the number of turns, and the values that vary. Builders write all layers down, with
shared arrays, and `rolled` makes repeats of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnc.ir.layers import Affine, Attention, Layer
from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Float, Int

MAX_PERIOD = 8
"""Maximum number of layers of a turn that `rolled` finds. The longest turns that are built have eight, for the Huber
loss with a safeguard."""
FEWEST_TURNS = 3
"""Minimum number of turns that `rolled` makes a repeat of. Two turns are stored as plainly as they are written."""
NUMBERED = re.compile(r"(.*?)([1-9]\d{0,8}|0)")
"""A name with a number at its end. The number of a turn is one more than that of the turn before."""
PARTS = ("weight", "constant")


@dataclass(frozen=True, eq=False)
class Varying:
    """The stored entries of an affine map that differ from turn to turn.

    Attributes
    ----------
    entries : array of shape (varied,)
        Their places among the stored entries of the map, ascending.
    values : array of shape (count, varied)
        Their values in every turn.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Ridge(method="plain").fit([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]], [1.0, 3.0, 5.0])
    >>> (repeat,) = [layer for layer in model.program_.program.layers if isinstance(layer, attnc.Repeat)]
    >>> repeat.varying  # plain steps have one length
    {}
    """

    entries: Int[np.ndarray, " varied"]
    values: Float[np.ndarray, "count varied"]


@dataclass(frozen=True, eq=False)
class Repeat:
    """Layers that are applied several times, one turn after the other.

    Parameters
    ----------
    layers : tuple of Affine, Attention or Softmax
        The layers of the first turn. Their names end with numbers, which grow by one from turn to turn.
    count : int
        The number of turns.
    varying : mapping of (int, str) to Varying
        The values that differ between turns, by the place of an affine map in `layers` and "weight" or "constant".

    Attributes
    ----------
    unrolled : tuple of layers
        All layers of all turns, in order. Turns share every array that does not vary.
    num_parameters : int
        Stored non-zeros.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Ridge(method="plain").fit([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]], [1.0, 3.0, 5.0])
    >>> (repeat,) = [layer for layer in model.program_.program.layers if isinstance(layer, attnc.Repeat)]
    >>> [layer.name for layer in repeat.layers], repeat.count == model.n_iter_
    (['gradient1', 'update1'], True)
    """

    layers: tuple[Layer, ...]
    count: int
    varying: Mapping[tuple[int, str], Varying] = field(default_factory=dict)

    @cached_property
    def unrolled(self) -> tuple[Layer, ...]:
        """All layers of all turns, in order. Turns share every array that does not vary.

        Examples
        --------
        >>> import attnc
        >>> repeat = attnc.Repeat((attnc.Softmax("soft1", ("a", "b")),), 3)
        >>> [layer.name for layer in repeat.unrolled]
        ['soft1', 'soft2', 'soft3']
        """
        known: dict[tuple[int, str, bytes], Sparse] = {}
        return tuple(layer for turn in range(self.count) for layer in self._turn(turn, known))

    def _turn(self, number: int, known: dict[tuple[int, str, bytes], Sparse]) -> Iterator[Layer]:
        """Return the layers of one turn, from 0. Turns with the same values share them."""
        for place, first in enumerate(self.layers):
            layer = replace(first, name=later_name(first.name, number)) if number else first
            for part in PARTS if isinstance(layer, Affine) else ():
                if (place, part) in self.varying:
                    differ = self.varying[place, part]
                    key = (place, part, differ.values[number].tobytes())
                    if key not in known:
                        sparse: Sparse = getattr(layer, part)
                        values = sparse.values.copy()
                        values[differ.entries] = differ.values[number]
                        known[key] = replace(sparse, values=values)
                    layer = replace(layer, **{part: known[key]})  # type: ignore[arg-type]
            yield layer

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros: those of one turn, and the values that vary.

        Examples
        --------
        >>> import attnc
        >>> attnc.Repeat((attnc.Softmax("soft1", ("a", "b")),), 3).num_parameters
        0
        """
        varied = sum(int(np.count_nonzero(differ.values)) for differ in self.varying.values())
        return sum(layer.num_parameters for layer in self.layers) + varied

    def astype(self, dtype: str) -> Repeat:
        """Return the repeat with every number rounded to a dtype.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Repeat
            A new repeat.

        Examples
        --------
        >>> import attnc
        >>> attnc.Repeat((attnc.Softmax("soft1", ("a", "b")),), 3).astype("float32").count
        3
        """
        varying = {key: replace(differ, values=differ.values.astype(dtype)) for key, differ in self.varying.items()}
        return Repeat(tuple(layer.astype(dtype) for layer in self.layers), self.count, varying)


Part = Layer | Repeat
"""An entry of a program: a layer, or layers that repeat."""


def unrolled(parts: Sequence[Part]) -> tuple[Layer, ...]:
    """Return the layers with all turns written out."""
    return tuple(each for part in parts for each in (part.unrolled if isinstance(part, Repeat) else (part,)))


def runs(parts: Sequence[Part]) -> list[Repeat]:
    """Return the same layers as repeats alone. Neighbours that do not repeat make one of a single turn."""
    found: list[Repeat] = []
    plain: list[Layer] = []
    for part in parts:
        if not isinstance(part, Repeat):
            plain.append(part)
            continue
        if plain:
            found.append(Repeat(tuple(plain), 1))
            plain = []
        found.append(part)
    return [*found, Repeat(tuple(plain), 1)] if plain else found


def rolled(layers: Sequence[Layer]) -> tuple[Part, ...]:
    """Return the layers with a `Repeat` for every run of turns that share their arrays."""
    found: list[Part] = []
    at = 0
    while at < len(layers):
        period, count = _longest_run(layers, at)
        if count < FEWEST_TURNS:
            found.append(layers[at])
            at += 1
            continue
        turns = [layers[at + k * period : at + (k + 1) * period] for k in range(count)]
        found.append(Repeat(tuple(turns[0]), count, _varying(turns)))
        at += period * count
    return tuple(found)


def later_name(name: str, turns: int) -> str:
    """Return the name of a layer some turns later: its number grows by one with every turn."""
    if not turns:
        return name
    numbered = NUMBERED.fullmatch(name)
    if numbered is None:
        raise ValueError(f"a repeated layer has a number at the end of its name, found {name!r}")
    return f"{numbered[1]}{int(numbered[2]) + turns}"


def _longest_run(layers: Sequence[Layer], at: int) -> tuple[int, int]:
    """Return the period and the number of turns of the run that begins here and covers the most layers."""
    best = (1, 1)
    if NUMBERED.fullmatch(layers[at].name) is None:
        return best
    for period in range(1, min(MAX_PERIOD, len(layers) - at) + 1):
        if not all(NUMBERED.fullmatch(layer.name) for layer in layers[at : at + period]):
            break
        turns = 1
        while at + (turns + 1) * period <= len(layers) and all(
            _is_later(layers[at + j], layers[at + turns * period + j], turns) for j in range(period)
        ):
            turns += 1
        if turns > 1 and turns * period > best[0] * best[1]:
            best = (period, turns)
    return best


def _is_later(first: Layer, layer: Layer, turns: int) -> bool:
    """Return whether a layer is the first one some turns later."""
    if type(first) is not type(layer) or first.channels != layer.channels:
        return False
    if layer.name != later_name(first.name, turns):
        return False
    if isinstance(first, Affine) and isinstance(layer, Affine):
        return all(_same_places(getattr(first, part), getattr(layer, part)) for part in PARTS)
    if isinstance(first, Attention) and isinstance(layer, Attention):
        return first.heads is layer.heads and (first.residual, first.cross) == (layer.residual, layer.cross)
    return True


def _same_places(one: Sparse, other: Sparse) -> bool:
    if one is other:
        return True
    return one.shape == other.shape and (one.index is other.index or np.array_equal(one.index, other.index))


def _varying(turns: Sequence[Sequence[Layer]]) -> dict[tuple[int, str], Varying]:
    found = {}
    for place, layer in enumerate(turns[0]):
        for part in PARTS if isinstance(layer, Affine) else ():
            values = [getattr(turn[place], part).values for turn in turns]
            differs = np.zeros(len(values[0]), bool)
            for other in {id(each): each for each in values[1:] if each is not values[0]}.values():
                differs |= _bits(values[0]) != _bits(other)
            entries = np.flatnonzero(differs).astype(np.int32)
            if len(entries):
                found[place, part] = Varying(entries, np.stack([each[entries] for each in values]))
    return found


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the numbers as bits. A zero and a negative zero differ."""
    return values.view(f"i{values.itemsize}")
