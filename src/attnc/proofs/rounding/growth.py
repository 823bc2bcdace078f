"""The growth of tangents and cotangents in a program: gradients that overflow or underflow where values do not.

Tangents go forwards as |W|·tangents, and cotangents backwards as |W|ᵀ·cotangents, through every matrix of a head by
itself. For a head with the sizes Q, K, V of its queries, keys and values, and with tangents Q′, K′, V′,

    scores   have tangents of at most S = Q′·K + Q·K′, and averages of 4 S·V + 2 V′,
    weights  have cotangents of at most P = ō·V for the cotangents ō of averages; queries 4 P·K, keys 4 P·Q and values
             2 ō, for each query.

The factors cover slopes that are centred, and those of weights as computed. Before every layer tangents and cotangents
count as at least 1, since products of weights that engines fold may begin there. Sizes count as at least 1 where a
stage begins.

Theorem.  Let F and B be the largest tangent and the largest cotangent at any place. A number of any engine is at most F
          or B, forwards or backwards. A product that underflows is off by at most the smallest normal number ω. So it
          moves a slope by at most ω·F·B. A point has less than N³ products, N the length of all sums in all layers.
Proof.    An error at a place moves the result by the error times a tangent before it and a cotangent after it.
"""

from __future__ import annotations

import math

import numpy as np

from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program
from attnc.ir.shapes import Stream, streams
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.targets.box import Box

OVERFLOW = {"float64": 2.0**1000, "float32": 2.0**102}
"""No tangent or cotangent may reach this. A sum of 2^22 terms below it does not overflow. The checker has the same."""
CENTRED, GATED = 4.25, 2.125
"""Largest Σ |d_k| in units of max |v_k|, and largest Σ p_k |V_k − E[V]| in units of max |V_k|."""
FURTHER_ROUNDINGS = 64
"""Roundings of a product in a layer besides those of sums: differences, divisions, exponentials' weights, and some to
spare."""
LOSS_ROOM = 1.125
"""Factor on the effect of underflow: prover and checker round their products in other orders."""

Sizes = np.ndarray
"""A number for every feature, the largest one over all tokens."""


def num_roundings(program: Program) -> int:
    """Return the largest number of roundings of a product, for any order of products and sums."""
    found = 0
    for stream in streams(program):
        before = stream.start
        for step in stream.steps:
            found += math.prod(before) + math.prod(step.after) + FURTHER_ROUNDINGS
            if not isinstance(step.layer, Affine):
                found += 2 * max(before[0], step.num_keys)
                found += sum(head.W_Q.shape[1] + head.W_V.shape[1] + 1 for head in step.layer.heads)
            before = step.after
    return found


def slope_underflow(program: Program, box: Box) -> float:
    """Return the largest effect of underflow on a slope, or ∞ if a product in a gradient may overflow."""
    dtype, (of_memory, of_main) = str(program.dtype), streams(program)
    reach = np.maximum(box.magnitude, 1.0)
    first = math.prod(of_main.start)
    with quiet():
        memory = _Growth.of(of_memory, reach[first:], None)
        main = _Growth.of(of_main, reach[:first], memory)
        main.go_back(np.ones(of_main.end[1]))
        memory.go_back(main.of_memory)
        F, B = max(memory.tangent, main.tangent), max(memory.cotangent, main.cotangent)
    if not max(F, B) < OVERFLOW[dtype]:
        return math.inf
    return LOSS_ROOM * num_roundings(program) ** 3 * float(np.finfo(dtype).smallest_normal) * F * B


class _Growth:
    """The sizes and tangents of the features of a stream before every layer, each the largest one over all tokens."""

    def __init__(self, stream: Stream, memory: _Growth | None) -> None:
        self.stream, self.memory = stream, memory
        self.states = list[tuple[Sizes, Sizes]]()
        self.tangent = self.cotangent = 1.0
        self.of_memory = np.zeros(0 if memory is None else len(memory.states[-1][0]))

    @classmethod
    def of(cls, stream: Stream, reach: Float[np.ndarray, " variables"], memory: _Growth | None) -> _Growth:
        """Go forwards. `memory` is the stream whose last state is read."""
        found, (tokens, width) = cls(stream, memory), stream.start
        least = 1.0 if tokens else 0.0  # a stream without variables has no tangents
        sizes, moved = reach.reshape(tokens, width).max(axis=0, initial=0.0), np.full(width, least)
        found.states.append((sizes, moved))
        for step in stream.steps:
            layer = step.layer
            if isinstance(layer, Affine):
                constants = np.abs(layer.constant.dense()).astype(np.float64)
                sizes = (_through(layer, sizes) + constants).max(axis=0, initial=0.0)
                made = _through(layer, moved).max(axis=0, initial=0.0)
            elif isinstance(layer, Attention):
                sizes, made = found._attend(layer, sizes, moved)
            else:
                sizes, made = np.ones(step.after[1]), np.full(step.after[1], GATED * moved.max(initial=0.0))
            found.tangent = _largest(found.tangent, made)
            moved = np.maximum(made, least)
            found.states.append((sizes, moved))
        return found

    def _read(self, layer: Attention, sizes: Sizes, moved: Sizes) -> tuple[Sizes, Sizes]:
        """Return the sizes and the tangents from which keys and values are made."""
        if not layer.cross:
            return sizes, moved
        assert self.memory is not None
        return self.memory.states[-1]

    def _attend(self, layer: Attention, sizes: Sizes, moved: Sizes) -> tuple[Sizes, Sizes]:
        read, change = self._read(layer, sizes, moved)
        written, made = (sizes, moved) if layer.residual else (np.zeros((2, len(layer.channels))))
        for head in layer.heads:
            W_Q, W_K, W_V, W_O = (np.abs(W).astype(np.float64) for W in head.matrices.values())
            Q, K, V, dQ, dK, dV = sizes @ W_Q, read @ W_K, read @ W_V, moved @ W_Q, change @ W_K, change @ W_V
            scores = CENTRED * (dQ @ K + Q @ dK)
            averages = scores * V + GATED * dV
            self.tangent = _largest(self.tangent, [scores], dQ, dK, dV, averages)
            written, made = written + V @ W_O, made + averages @ W_O
        return np.maximum(written, 1.0), made

    def go_back(self, cotangents: Sizes) -> None:
        """Go backwards from the last state, to the first one and to the memory."""
        for step, (sizes, moved) in zip(reversed(self.stream.steps), reversed(self.states[:-1]), strict=True):
            layer, after, width = step.layer, np.maximum(cotangents, 1.0), len(sizes)
            if isinstance(layer, Affine):
                cotangents = _through_columns(layer, after, width)
            elif isinstance(layer, Attention):
                cotangents, of_read = after if layer.residual else np.zeros(width), np.zeros(0)
                read, _ = self._read(layer, sizes, moved)
                of_read = np.zeros(len(read))
                for head in layer.heads:
                    W_Q, W_K, W_V, W_O = (np.abs(W).astype(np.float64) for W in head.matrices.values())
                    Q, K, V, back = sizes @ W_Q, read @ W_K, read @ W_V, W_O @ after
                    weights, tokens = CENTRED * float(back @ V), step.after[0]
                    queries, keys, values = weights * K, tokens * weights * Q, tokens * GATED * back
                    self.cotangent = _largest(self.cotangent, [weights], back, queries, keys, values)
                    cotangents = cotangents + W_Q @ queries
                    of_read += W_K @ keys + W_V @ values
                if layer.cross:
                    self.of_memory = self.of_memory + of_read
                else:
                    cotangents = cotangents + of_read
            else:
                cotangents = np.full(width, GATED * after.max(initial=0.0))
            self.cotangent = _largest(self.cotangent, cotangents)


def _through(layer: Affine, sizes: Sizes) -> Float[np.ndarray, "tokens features"]:
    """Return |W|·sizes for every token."""
    token, feature, _, read = layer.weight.index.T
    found = np.zeros(layer.weight.shape[:2])
    np.add.at(found, (token, feature), np.abs(layer.weight.values).astype(np.float64) * sizes[read])
    return found


def _through_columns(layer: Affine, after: Sizes, width: int) -> Sizes:
    """Return |W|ᵀ·sizes, the largest one over all tokens."""
    _, feature, token, read = layer.weight.index.T
    found = np.zeros(layer.weight.shape[2:])
    np.add.at(found, (token, read), np.abs(layer.weight.values).astype(np.float64) * after[feature])
    return found.max(axis=0, initial=0.0).reshape(width)


def _largest(known: float, *parts: np.ndarray | list[float]) -> float:
    """Return the largest number, or NaN if one is NaN."""
    return float(np.max([known, *(float(np.max(part)) for part in parts if len(part))]))
