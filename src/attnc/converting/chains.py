"""A chain of linear maps and activations: its error, and what it computes as a Target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from attnc.converting.activations import Activation, Solved, exact_number
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.leaves_prover import MAX_VARIABLES
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import ReLUNetwork
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_PROVED_UNITS = 16


@dataclass(frozen=True, eq=False)
class Linear:
    """z = W·y + b of what the units before it give, or of the input."""

    W: Float[np.ndarray, "out inputs"]
    b: Float[np.ndarray, " out"]


@dataclass(frozen=True, eq=False)
class Units:
    """The activations behind a linear map: one gate, whose carried parts may differ from unit to unit."""

    solved: Solved
    carried: Float[np.ndarray, "units p"]


def chain_error(layers: Sequence[Any]) -> float:
    """See `bounds.composed_error`."""
    off = np.zeros(layers[0].W.shape[1])
    for layer in layers:
        if isinstance(layer, Linear):
            off = up(np.abs(layer.W) @ off, layer.W.shape[1] + 1)
        else:
            off = up(layer.solved.lipschitz * off + layer.solved.error, 3)
    return float(off.max())


def expression_target(layers: Sequence[Any], box: Box) -> ExpressionTarget | None:
    """The module as an expression, where the prover serves: one hidden layer, few units and inputs."""
    shapes = [type(layer) for layer in layers]
    few = len(layers) > 1 and len(layers[0].b) <= MAX_PROVED_UNITS and box.d <= MAX_VARIABLES
    if shapes not in ([Linear, Units, Linear], [Linear, Units]) or not few:
        return None
    first, units = layers[0], layers[1]
    activation = units.solved.activation
    hidden = []
    for row, constant, carried in zip(first.W, first.b, units.carried, strict=True):
        given = activation
        if activation.name == "prelu":
            given = Activation("leaky_relu", (("slope", float(carried[0])),))
        text = given.expression(units.solved.dtypes[0])
        affine = " + ".join(f"{exact_number(w)}*{name}" for w, name in zip(row, box.names, strict=True))
        hidden.append("(" + re.sub(r"\bx\b", f"({affine} + {exact_number(constant)})", text) + ")")
    outputs = hidden
    if len(layers) == 3:
        last = layers[2]
        outputs = [
            " + ".join([*(f"{exact_number(w)}*{unit}" for w, unit in zip(row, hidden, strict=True)), exact_number(b)])
            for row, b in zip(last.W, last.b, strict=True)
        ]
    return ExpressionTarget(Expression.parse(outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"), box)


def relu_target(layers: Sequence[Any], box: Box) -> ReLUNetwork | None:
    """The module as a network of ReLUs, if it is one: of any size, proved unit by unit."""
    linear = [layer for layer in layers if isinstance(layer, Linear)]
    if any(isinstance(layer, Units) and layer.solved.activation.name != "relu" for layer in layers):
        return None
    if isinstance(layers[-1], Units):
        units = len(linear[-1].b)
        linear.append(Linear(np.eye(units), np.zeros(units)))
    return ReLUNetwork([layer.W for layer in linear], [layer.b for layer in linear], box)


class ModuleTarget(Target):
    """What the torch module computes, in float64."""

    def __init__(self, module: nn.Module, layers: Sequence[Any], box: Box) -> None:
        self.module, self.layers, self.box = module, layers, box
        self.input_shapes = ((box.d,),)
        last = layers[-1] if isinstance(layers[-1], Linear) else layers[-2]
        self.output_shape = (len(last.b),)

    def __call__(self, points: Float[np.ndarray, "batch d"]) -> Float[np.ndarray, "batch outputs"]:
        with torch.no_grad():
            return np.asarray(self.module(torch.tensor(np.asarray(points, np.float64))).numpy())

    def variation(
        self,
        cells: Interval,
        centres: Float[np.ndarray, "cells d"],
        values: Float[np.ndarray, "cells outputs"] | None = None,
    ) -> Float[np.ndarray, " cells"]:
        """By the Lipschitz constants of linear maps and activations."""
        moved = up(np.maximum(cells.hi - centres, centres - cells.lo))
        for layer in self.layers:
            if isinstance(layer, Linear):
                moved = up(moved @ np.abs(layer.W).T, layer.W.shape[1] + 1)
            else:
                moved = up(moved * layer.solved.lipschitz)
        found = np.asarray(moved.max(axis=1))
        return found if values is None else up(found + self.distance(centres, values))

    def describe(self) -> str:
        return "a torch module of " + " → ".join(
            str(len(layer.b)) for layer in self.layers if isinstance(layer, Linear)
        )
