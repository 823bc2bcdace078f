"""Runs of equal layers, found in a program so that files and exports store them once.

A program that takes T equal steps has T times the same layers. They share their arrays, and differ in the number at the
end of their names. Steps whose lengths vary, as Chebyshev's do, have affine maps with the same places and other values.
`repeats` finds such runs. A run is a `Repeat`: the layers of one turn, the number of turns, and the values that vary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from attnc.ir.layers import Affine, Attention, Layer
from attnc.ir.sparse import Sparse
from attnc.numerics.arrays import Float

MAX_PERIOD = 8
"""Maximum number of layers of a turn. The longest turns that are built have four."""
FEWEST_TURNS = 3
"""Minimum number of turns of a run. Two turns are stored as plainly as they are written."""
NUMBERED = re.compile(r"(.*?)([1-9]\d{0,8}|0)")
"""A name with a number at its end. The number of a turn is one more than that of the turn before."""
PARTS = ("weight", "constant")

Affines = tuple[Affine, ...]
Arrays = TypeVar("Arrays")


@dataclass(frozen=True, eq=False)
class Repeat:
    """`times` turns of the layers `body`, the first turn. `varying` has the values that differ from turn to turn.

    Its keys are the place of an affine map in the body and "weight" or "constant". Its values have one row per turn.
    """

    body: tuple[Layer, ...]
    times: int
    varying: dict[tuple[int, str], Float[np.ndarray, "times entries"]]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of all turns, in order. Turns share every array that does not vary."""
        return tuple(layer for turn in range(self.times) for layer in self.turn(turn))

    def turn(self, number: int) -> Iterator[Layer]:
        """Return the layers of one turn, from 0."""
        for place, layer in enumerate(self.body):
            varied = {
                part: replace(getattr(layer, part), values=self.varying[place, part][number])
                for part in PARTS
                if (place, part) in self.varying
            }
            yield replace(layer, name=later_name(layer.name, number), **varied) if number else layer


def repeats(layers: Sequence[Layer]) -> list[Repeat]:
    """Return the layers as runs, in order. Layers that do not repeat make runs of one turn, as long as possible."""
    found: list[Repeat] = []
    plain: list[Layer] = []
    at = 0
    while at < len(layers):
        period, times = _longest_run(layers, at)
        if times < FEWEST_TURNS:
            plain.append(layers[at])
            at += 1
            continue
        if plain:
            found.append(Repeat(tuple(plain), 1, {}))
            plain = []
        turns = [layers[at + k * period : at + (k + 1) * period] for k in range(times)]
        found.append(Repeat(tuple(turns[0]), times, _varying(turns)))
        at += period * times
    return [*found, Repeat(tuple(plain), 1, {})] if plain else found


def later_name(name: str, turns: int) -> str:
    """Return the name of a layer some turns later: its number grows by one with every turn."""
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
    return one.shape == other.shape and (one.index is other.index or np.array_equal(one.index, other.index))


def _varying(turns: Sequence[Sequence[Layer]]) -> dict[tuple[int, str], np.ndarray]:
    found = {}
    for place, layer in enumerate(turns[0]):
        for part in PARTS if isinstance(layer, Affine) else ():
            values = [getattr(turn[place], part).values for turn in turns]
            if any(other is not values[0] and not _same_bits(values[0], other) for other in values[1:]):
                found[place, part] = np.stack(values)
    return found


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays of one shape and dtype hold the same bits. A zero and a negative zero differ."""
    return one.tobytes() == other.tobytes()
