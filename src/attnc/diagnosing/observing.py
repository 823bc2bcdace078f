"""What is seen of a network or a torch module at points: outputs, and the weights of every head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.layers import Attention
from attnc.ir.program import split_columns
from attnc.ir.reference import bytes_per_point, evaluate_recorded
from attnc.network import Network
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class Seen:
    """At every point: flat outputs, each head's weights over its keys, and the largest |score| where it is known."""

    outputs: Float[np.ndarray, "points outputs"]
    heads: list[Float[np.ndarray, "points keys"]]
    largest_score: float | None


@dataclass(frozen=True, eq=False)
class Subject:
    """Something with attention: how to look at it, and how to look at it with its scores multiplied by a number."""

    look: Callable[[np.ndarray], Seen]
    sharpened: Callable[[float, np.ndarray], np.ndarray] | None  # the flat outputs with all scores times r
    roundoff: float
    num_layers: int


def of_network(network: Network) -> Subject:
    """All heads of the last attention layer that selects: of a deep program the earlier ones make its inputs."""
    program = network.program
    layers = [layer for layer in program.layers if isinstance(layer, Attention)]

    def look(points: np.ndarray) -> Seen:
        inputs = tuple(split_columns(points, program.input_shapes))
        outputs, cache = evaluate_recorded(program, inputs, 4 * MAX_BYTES)
        name = layers[-1].name
        heads = [cache[f"{name}.head{h}.pattern"] for h in range(len(layers[-1].heads))]
        finite = [found[np.isfinite(found)] for key, found in cache.items() if key.endswith(".scores")]
        scores = [np.abs(found).max(initial=0.0) for found in finite]
        return Seen(_flat(outputs), [_per_query(weights) for weights in heads], float(max(scores)))

    def sharpened(factor: float, points: np.ndarray) -> np.ndarray:
        harder = replace(program, layers=tuple(_scaled(layer, factor) for layer in program.layers))
        return _flat(harder(*split_columns(points, program.input_shapes)))

    return Subject(look, sharpened, UNIT_ROUNDOFF[network.dtype], len(layers))


def points_allowed(network: Network, wanted: int) -> int:
    """As many as can be recorded."""
    return int(max(64, min(wanted, MAX_BYTES // max(1, bytes_per_point(network.program)))))


def of_module(module: Any) -> Subject:
    """torch.nn.MultiheadAttention, attending from and to its input, or a module that returns (outputs, weights).

    The weights are (batch, …, keys), summing to 1 over the last axis; queries and heads may stand between.
    """
    import torch
    from torch import nn

    def look(points: np.ndarray) -> Seen:
        parameter = next(module.parameters(), None)
        dtype = torch.float32 if parameter is None else parameter.dtype
        x = torch.as_tensor(points).to(dtype)
        with torch.no_grad():
            if isinstance(module, nn.MultiheadAttention):
                made = module(x, x, x, need_weights=True, average_attn_weights=False)
            else:
                made = module(x)
        if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, torch.Tensor) for part in made)):
            raise InputError(
                f"{type(module).__name__} must return (outputs, attention weights) for a batch of points; found "
                f"{type(made).__name__}. Wrap it in a module that does, or give a torch.nn.MultiheadAttention."
            )
        outputs, weights = (part.double().numpy() for part in made)
        if len(outputs) != len(points) or len(weights) != len(points) or weights.ndim < 2:
            raise InputError(
                f"{type(module).__name__} returned shapes {outputs.shape} and {weights.shape} for {len(points)} "
                "points; outputs are (batch, …), weights (batch, …, keys)"
            )
        if isinstance(module, nn.MultiheadAttention):
            weights = np.moveaxis(weights, 1, 0)
            return Seen(_flat(outputs), [_per_query(head) for head in weights], None)
        return Seen(_flat(outputs), [_per_query(weights.reshape(len(weights), -1, weights.shape[-1]))], None)

    parameter = next(module.parameters(), None)
    name = "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    return Subject(look, None, UNIT_ROUNDOFF.get(name, 2.0**-8), 1)


def _scaled(layer: Any, factor: float) -> Any:
    if not isinstance(layer, Attention):
        return layer
    heads = tuple(replace(head, W_K=(head.W_K * factor).astype(head.W_K.dtype)) for head in layer.heads)
    return replace(layer, heads=heads)


def _flat(outputs: np.ndarray) -> np.ndarray:
    return np.asarray(outputs, np.float64).reshape(len(outputs), -1)


def _per_query(weights: np.ndarray) -> np.ndarray:
    """(points, queries, keys) → (points, keys): of the query that is least sure."""
    weights = np.asarray(weights, np.float64)
    least = np.nan_to_num(weights.max(axis=-1), nan=0.0).argmin(axis=1)
    return weights[np.arange(len(weights)), least]
