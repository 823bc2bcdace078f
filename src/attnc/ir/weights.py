"""The weights of a program by name, and a program with other weights in the same places.

An affine map has the stored entries of its `weight` and its `constant`, in the order of the program. A head has its
four matrices, such as `attend1.head0.W_Q`. Names of the memory begin with `memory.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.reference import MEMORY


def named_weights(program: Program) -> dict[str, np.ndarray]:
    """Return the arrays of all weights, by name."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str, weight: np.ndarray) -> np.ndarray:
        found[name] = weight
        return weight

    _mapped(program, keep)
    return found


def with_named_weights(program: Program, weights: Mapping[str, np.ndarray]) -> Program:
    """Return the program with these arrays, which must have the names and shapes of `named_weights`, in its dtype."""
    return _mapped(program, lambda name, weight: weights[name].astype(weight.dtype).reshape(weight.shape))


def _mapped(program: Program, change: Callable[[str, np.ndarray], np.ndarray]) -> Program:
    def changed(layer: Layer, name: str) -> Layer:
        if isinstance(layer, Affine):
            weight, constant = (
                replace(tensor, values=change(f"{name}.{part}", tensor.values))
                for part, tensor in (("weight", layer.weight), ("constant", layer.constant))
            )
            return replace(layer, weight=weight, constant=constant)
        if isinstance(layer, Attention):
            heads = [
                Head(**{p: change(f"{name}.head{h}.{p}", W) for p, W in head.matrices.items()}, mask=head.mask)
                for h, head in enumerate(layer.heads)
            ]
            return replace(layer, heads=tuple(heads))
        return layer

    return replace(
        program,
        memory=tuple(changed(layer, MEMORY + layer.name) for layer in program.unrolled_memory),
        layers=tuple(changed(layer, layer.name) for layer in program.unrolled_layers),
    )
