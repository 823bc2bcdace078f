"""Run a stock checkpoint in numpy, with interventions on its inputs, heads, edges and residual stream.

The norm of such a checkpoint is the identity and its feed-forward weights are zero, so a query token carries a stream
    s = query + Σ_i x_i·input_i + Σ_heads output,
and a head reads s through W_Q. The keys and values of the prefix tokens are the same for every query. They are computed
once. A query token does not see other query tokens, so points are rows of one batch.

Everything here reads only the public parts of the benchmark: the tensors, and how to feed and read the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.numerics.arrays import Float

OUTPUT = "output"


def head_name(layer: int, head: int) -> str:
    """Return the name of a head, counted from 0 as in the tensors of the checkpoint."""
    return f"L{layer}H{head}"


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights of the heads of one layer."""

    W_Q: Float[np.ndarray, "heads d_head width"]
    W_K: Float[np.ndarray, "heads d_head width"]
    W_V: Float[np.ndarray, "heads d_head width"]
    W_O: Float[np.ndarray, "heads width d_head"]

    @property
    def num_heads(self) -> int:
        return len(self.W_Q)

    @property
    def d_head(self) -> int:
        return self.W_Q.shape[1]


@dataclass(frozen=True, eq=False)
class Subspace:
    """Directions of the residual stream after a layer, and the covectors that read the coordinates along them.

    `readers` are the rows of the left inverse of the directions by default: an orthogonal projection.
    """

    after_layer: int
    directions: Float[np.ndarray, "k width"]
    readers: Float[np.ndarray, "k width"] | None = None

    @cached_property
    def projector(self) -> Float[np.ndarray, "width width"]:
        """The projection P onto the directions, along the common kernel of the readers: stream ↦ stream @ P.T."""
        readers = self.directions if self.readers is None else self.readers
        return self.directions.T @ np.linalg.pinv(readers @ self.directions.T) @ readers


Reading = Callable[[int, int, Mapping[str, np.ndarray]], np.ndarray]
"""(layer, head, outputs of all nodes before the layer) → the stream that this head reads, (batch, width)."""


@dataclass(frozen=True, eq=False)
class Recording:
    """The outputs of all nodes at the query tokens of a batch, and the model's output."""

    nodes: dict[str, Float[np.ndarray, "batch width"]]
    streams: list[Float[np.ndarray, "batch width"]]  # after each layer; the first is before layer 0
    output: Float[np.ndarray, " batch"]


class RunningModel:
    """A checkpoint with its interface: prefix tokens, query token, input directions and output covector."""

    def __init__(
        self,
        layers: Sequence[AttentionWeights],
        prefix: Float[np.ndarray, "tokens width"],
        query: Float[np.ndarray, " width"],
        inputs: Float[np.ndarray, "variables width"],
        output: Float[np.ndarray, " width"],
        names: Sequence[str],
    ) -> None:
        self.layers = [
            AttentionWeights(*(np.asarray(W, np.float64) for W in (of.W_Q, of.W_K, of.W_V, of.W_O))) for of in layers
        ]
        self.prefix, self.query, self.inputs, self.output = (
            np.asarray(tensor, np.float64) for tensor in (prefix, query, inputs, output)
        )
        self.names = tuple(names)

    @property
    def width(self) -> int:
        return len(self.query)

    @cached_property
    def heads(self) -> tuple[str, ...]:
        """The names of all heads, layer by layer."""
        return tuple(head_name(i, h) for i, layer in enumerate(self.layers) for h in range(layer.num_heads))

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """All edges that a circuit may have: from variables and heads to later heads and to the output."""
        found, before = [], list(self.names)
        for i, layer in enumerate(self.layers):
            here = [head_name(i, h) for h in range(layer.num_heads)]
            found += [(source, target) for target in here for source in before]
            before += here
        return (*found, *((source, OUTPUT) for source in before))

    @cached_property
    def _memory(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The keys and the values of the prefix tokens, (heads, tokens, d_head), for each layer."""
        stream, found = self.prefix, []
        hidden = np.triu(np.ones((len(stream), len(stream)), bool), 1)
        for layer in self.layers:
            Q, K, V = (np.einsum("hdw,tw->htd", W, stream) for W in (layer.W_Q, layer.W_K, layer.W_V))
            scores = np.where(hidden, -np.inf, np.einsum("hqd,hkd->hqk", Q, K) / np.sqrt(layer.d_head))
            found.append((K, V))
            stream = stream + np.einsum("hwd,hqd->qw", layer.W_O, np.einsum("hqk,hkd->hqd", softmax(scores), V))
        return found

    def attend(self, layer: int, head: int, stream: Float[np.ndarray, "batch width"]) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights (batch, tokens + 1) of a head that reads this stream, and the values that it averages.

        The last token is the query token itself.
        """
        of, (K, V) = self.layers[layer], self._memory[layer]
        Q, own_key, own_value = (stream @ W[head].T for W in (of.W_Q, of.W_K, of.W_V))
        own = (Q * own_key).sum(axis=1, keepdims=True)
        weights = softmax(np.concatenate([Q @ K[head].T, own], axis=1) / np.sqrt(of.d_head))
        return weights, weights[:, :-1] @ V[head] + weights[:, -1:] * own_value

    def run(
        self,
        points: Float[np.ndarray, "batch variables"],
        *,
        reading: Reading | None = None,
        nodes: Mapping[str, Float[np.ndarray, "batch width"]] | None = None,
        swap: tuple[Subspace, Sequence[np.ndarray]] | None = None,
    ) -> Recording:
        """Run the model on points.

        Parameters
        ----------
        points : ndarray (batch, variables)
            The inputs.
        reading : callable, optional
            The stream that each head reads, and the output as head 0 of the layer after the last one.
        nodes : mapping, optional
            Outputs of nodes that replace the computed ones.
        swap : (Subspace, streams), optional
            The coordinates of the subspace are taken from these streams, those of another run.
        """
        points, given = np.asarray(points, np.float64), nodes or {}
        made = {name: points[:, [i]] * self.inputs[i] for i, name in enumerate(self.names)}
        made = {name: given.get(name, value) for name, value in made.items()}
        stream = self.query + sum(made.values(), np.zeros((len(points), self.width)))
        stream = _swapped(stream, 0, swap)
        streams = [stream]
        for i, layer in enumerate(self.layers):
            outputs = {}
            for h in range(layer.num_heads):
                name = head_name(i, h)
                if name in given:
                    outputs[name] = given[name]
                else:
                    read = stream if reading is None else reading(i, h, made)
                    outputs[name] = self.attend(i, h, read)[1] @ layer.W_O[h].T
            stream = _swapped(stream + sum(outputs.values()), i + 1, swap)
            streams.append(stream)
            made |= outputs
        last = stream if reading is None else reading(len(self.layers), 0, made)
        return Recording(made, streams, last @ self.output)

    def gradients(self, trace: Recording) -> list[Float[np.ndarray, "heads batch width"]]:
        """Return the gradient of the output with respect to the input of every head, layer by layer.

        The last entry is the gradient with respect to the input of the read-out.
        """
        batch = len(trace.output)
        arriving = np.tile(self.output, (batch, 1))
        found = [arriving[None]]
        for i in reversed(range(len(self.layers))):
            layer, (K, V), here = self.layers[i], self._memory[i], []
            for h in range(layer.num_heads):
                weights, _ = self.attend(i, h, trace.streams[i])
                effects = arriving @ layer.W_O[h] @ V[h].T  # of the value of each key on the output
                p = weights[:, :-1]
                by_score = p * (effects - (p * effects).sum(axis=1, keepdims=True))
                here.append(by_score @ K[h] @ layer.W_Q[h] / np.sqrt(layer.d_head))
            found.append(np.array(here).reshape(len(here), batch, self.width))
            arriving = arriving + found[-1].sum(axis=0)
        return found[::-1]

    def circuit_reading(self, edges: Sequence[tuple[str, str]], corrupted: Mapping[str, np.ndarray]) -> Reading:
        """Return how heads read the stream if only these edges carry the present run.

        All other edges carry the outputs of nodes in the corrupted run.
        """
        kept: dict[str, set[str]] = {}
        for source, target in edges:
            kept.setdefault(target, set()).add(source)

        def reading(layer: int, head: int, made: Mapping[str, np.ndarray]) -> np.ndarray:
            present = kept.get(OUTPUT if layer == len(self.layers) else head_name(layer, head), set())
            batch = len(next(iter(made.values())))
            parts = (value if name in present else corrupted[name] for name, value in made.items())
            return self.query + sum(parts, np.zeros((batch, self.width)))

        return reading


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _swapped(
    stream: np.ndarray, layers_done: int, swap: tuple[Subspace, Sequence[np.ndarray]] | None
) -> Float[np.ndarray, "batch width"]:
    if swap is None or swap[0].after_layer + 1 != layers_done:
        return stream
    subspace, others = swap
    return stream + (others[layers_done] - stream) @ subspace.projector.T
