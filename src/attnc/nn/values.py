"""The trainable values of a network: the numbers that its heads average, as they are stored in its program.

A folded module has products of stored weights. Here a value is trainable if it is one stored number, unchanged: a
constant of an affine map that a head reads as the value of a key. To find these, the constants are replaced by random
tags, and the tags are looked up in the folded module. Values that carry the input, and values that are 0 in the
program, stay fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnc.engines.torch_engine import to_torch
from attnc.ir.program import Program
from attnc.ir.weights import named_weights, with_named_weights

CONSTANT = ".constant"
"""The end of the names of the constants of affine maps, among the weights of a program."""
HELD = ".values.constant"
"""The end of the names of the constant values of heads, among the tensors of a folded module."""
TAGS = 2**52
"""Tags are whole numbers below this one, so that float64 holds them. A sum of tags is another tag by chance only."""


@dataclass(frozen=True, eq=False)
class HeldValues:
    """The places of the trainable values: where they are stored, and where a folded module has them.

    `places[name]` has, for each entry of a tensor of the folded module, the number of the trainable value, or −1.
    """

    stored: tuple[tuple[str, np.ndarray], ...]  # name of stored constants, and the entries that are trainable
    places: dict[str, np.ndarray]

    @classmethod
    def of(cls, program: Program) -> HeldValues:
        weights = named_weights(program)
        rng, tags, tagged = np.random.default_rng(0), dict[int, tuple[str, int]](), dict[str, np.ndarray]()
        for name, numbers in weights.items():
            tagged[name] = numbers
            if name.endswith(CONSTANT):
                tagged[name] = rng.integers(1, TAGS, len(numbers)).astype(np.float64)
                tags |= {int(tag): (name, entry) for entry, tag in enumerate(tagged[name])}
        folded = to_torch(with_named_weights(program.astype("float64"), tagged)).state_dict()
        found = {name: held.numpy() for name, held in folded.items() if name.endswith(HELD)}
        own = to_torch(program).state_dict()
        used, places = dict[tuple[str, int], int](), dict[str, np.ndarray]()
        for name, held in found.items():
            numbers = own[name].numpy()
            places[name] = np.full(held.shape, -1)
            for place, tag in np.ndenumerate(held):
                source = tags.get(int(tag)) if abs(tag) < TAGS and tag == int(tag) else None
                if source is not None and weights[source[0]][source[1]] == numbers[place]:
                    places[name][place] = used.setdefault(source, len(used))
        by_name = dict[str, list[int]]()
        for name, entry in sorted(used):
            by_name.setdefault(name, []).append(entry)
        order = {source: number for number, source in enumerate(sorted(used))}
        renumbered = np.array([order[source] for source in used] + [-1])  # −1, for fixed entries, stays −1
        return cls(
            tuple((name, np.array(entries)) for name, entries in by_name.items()),
            {name: renumbered[numbers] for name, numbers in places.items() if (numbers >= 0).any()},
        )

    def read(self, program: Program) -> np.ndarray:
        """Return the trainable values of a program."""
        weights = named_weights(program)
        parts = [weights[name][entries] for name, entries in self.stored]
        return np.concatenate(parts) if parts else np.zeros(0, program.dtype)

    def write(self, program: Program, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return all weights of the program by name, with other values."""
        weights, start = dict(named_weights(program)), 0
        for name, entries in self.stored:
            changed = weights[name].copy()
            changed[entries] = values[start : start + len(entries)]
            weights[name], start = changed, start + len(entries)
        return weights

    def folded(self, module: torch.nn.Module, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the folded module that hold values, with these in their places."""
        found = {}
        for name, numbers in self.places.items():
            which = torch.as_tensor(numbers, device=values.device)
            found[name] = torch.where(which >= 0, values[which.clamp(min=0)], module.get_buffer(name))
        return found
