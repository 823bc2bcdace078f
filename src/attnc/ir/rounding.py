"""A bound on the distance of any evaluation of a program in its dtype from the exact one, at given points.

This is a running error analysis. Every entry of a state is carried as (value, error, size): its value, a bound on the
error of an evaluation, and the same sums over absolute values. u is the unit roundoff, γ_n = nu/(1−nu). The bound holds
for any order of summation. It also holds for folding, since between two softmaxes folding only multiplies affine maps
in another order: n counts the terms of all of them, and γ_n multiplies `size`, which no cancellation makes small.

    affine    error ← |W|·error + γ_n·size,  size ← |W|·size + |B|
    scores    error_s = Σ (error_q·|k| + |q|·error_k + error_q·error_k) + γ_n·Σ size_q·size_k
    softmax   weights are off by a factor e^{±δ_k}, δ_k = error_s + u·(|s_k − top| + 2·max error_s) + 2Ku, where K is
              ENGINE_ULPS
    average   with τ_k = e^{δ_k} − 1, τ̄ = Σ p_k τ_k:
              Σ p_k τ_k |v_k − A|/(1−τ̄) + γ_{2p+3}·Σ p_k(1+τ_k) size_v/(1−τ̄) + Σ p_k(1+τ_k) error_v/(1−τ̄)
              + p·e^NEGLIGIBLE·2·max size_v, for exponentials that underflow or are taken as zero
    stage     for the entries that a softmax writes the count starts again: size ← |value| + error

The analysis itself runs in float64. For a float64 program its own rounding is of second order in these figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.layers import Affine, Attention, Head
from attnc.ir.program import Program
from attnc.ir.shapes import Stream, streams
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, gamma

if TYPE_CHECKING:
    from collections.abc import Sequence


NEGLIGIBLE = {"float64": -700.0, "float32": -80.0}
"""Exponents below which engines may take exponentials as zero."""
FOLDED_LAYERS = 8
"""A bound on the number of affine maps and projections between two softmaxes."""


@dataclass(frozen=True)
class _Analysed:
    value: Float[np.ndarray, "batch tokens width"]
    error: Float[np.ndarray, "batch tokens width"]
    size: Float[np.ndarray, "batch tokens width"]

    def rows(self, rows: np.ndarray) -> _Analysed:
        return _Analysed(self.value[:, rows], self.error[:, rows], self.size[:, rows])

    def times(self, matrix: np.ndarray, u: float) -> _Analysed:
        matrix = matrix.astype(np.float64)
        size = self.size @ np.abs(matrix)
        return _Analysed(self.value @ matrix, self.error @ np.abs(matrix) + gamma(matrix.shape[0] + 1, u) * size, size)


def evaluation_error(program: Program, inputs: Sequence[np.ndarray]) -> Float[np.ndarray, "batch ..."]:
    """Bound, for every output entry, |any evaluation in the program's dtype − the exact value|."""
    bounds, (memory, main) = np.zeros((len(inputs[0]), *program.output_shape)), streams(program)
    with quiet():
        for i in range(len(inputs[0])):
            first, second = _analysed_inputs(program, [given[i : i + 1] for given in inputs])
            remembered = _run(memory, second, second, str(program.dtype))
            error = _run(main, first, remembered, str(program.dtype)).error
            bounds[i] = np.nan_to_num(error, nan=np.inf).reshape(program.output_shape)
    return bounds


def _analysed_inputs(program: Program, inputs: list[np.ndarray]) -> list[_Analysed]:
    """Return the first states of the main stream and of the memory for one point."""
    found = []
    for state, given in zip(program.as_tokens(tuple(inputs)), inputs, strict=True):
        value = np.asarray(state, np.float64)
        # Casting the input to the program's dtype is part of the evaluation.
        error = np.abs(value - np.asarray(given, np.float64).reshape(value.shape))
        found.append(_Analysed(value, error, np.abs(value)))
    return [*found, _Analysed(*[np.zeros((1, 0, 0))] * 3)][:2]


def _run(stream: Stream, state: _Analysed, memory: _Analysed, dtype: str) -> _Analysed:
    u = UNIT_ROUNDOFF[dtype]
    state = state.rows(stream.first)
    for step in stream.steps:
        layer = step.live_layer
        if not len(step.tokens):  # nothing later reads this
            state = _Analysed(*[np.zeros((1, 0, len(layer.channels)))] * 3)
        elif isinstance(layer, Affine):
            state = _affine(layer, state, u)
        elif isinstance(layer, Attention):
            queried = state.rows(step.rows)
            keyed = memory if layer.cross else state
            outs = [_head(head, queried, keyed, step.tokens, u, dtype) for head in layer.heads]
            outs += [queried] if layer.residual else []
            value, size, error = (sum(getattr(out, part) for out in outs) for part in ("value", "size", "error"))
            error = error + gamma(len(outs) + 2, u) * size
            state = _Analysed(np.asarray(value), np.asarray(error), np.abs(value) + error)
        else:
            state = _softmax(state, u, dtype)
    return state


def _affine(layer: Affine, state: _Analysed, u: float) -> _Analysed:
    weight = layer.weight.astype(np.float64).matrix(2)
    constant = layer.constant.dense().astype(np.float64)
    terms = FOLDED_LAYERS * (1 + int(np.diff(weight.indptr).max(initial=0)))

    def moved(array: np.ndarray, matrix: Any) -> np.ndarray:
        return (matrix @ array.reshape(-1)).reshape(1, *constant.shape)

    size = moved(state.size, abs(weight)) + np.abs(constant)
    error = moved(state.error, abs(weight)) + gamma(terms, u) * size
    return _Analysed(moved(state.value, weight) + constant, error, size)


def _head(head: Head, queried: _Analysed, keyed: _Analysed, tokens: np.ndarray, u: float, dtype: str) -> _Analysed:
    q, k, v = queried.times(head.W_Q, u), keyed.times(head.W_K, u), keyed.times(head.W_V, u)
    turned = [part.transpose(0, 2, 1) for part in (k.value, k.error, k.size)]
    scores = q.value @ turned[0]
    error_s = q.error @ np.abs(turned[0]) + np.abs(q.value) @ turned[1] + q.error @ turned[1]
    error_s += gamma(FOLDED_LAYERS * (head.W_Q.shape[1] + 1), u) * (q.size @ turned[2])
    if head.mask is not None:
        visible = head.mask.visible(tokens)
        scores, error_s = np.where(visible, scores, -np.inf), np.where(visible, error_s, 0)
    p, tau = _weights(scores, error_s, dtype)
    A = p @ v.value
    mean = (p * tau).sum(axis=-1)[..., None]
    seen, count = p * (1 + tau), p.shape[-1]
    columns = [(p * tau * np.abs(v.value[:, None, :, c] - A[..., c : c + 1])).sum(axis=-1) for c in range(A.shape[-1])]
    error = np.stack(columns, axis=-1) if columns else np.zeros_like(A)
    error += gamma(2 * count + 3, u) * (seen @ v.size) + seen @ v.error
    span = 2 * (v.size + v.error).max(axis=1, keepdims=True, initial=0.0)
    error = np.where(mean < 0.5, error / (1 - mean), span)  # an average never leaves the span of the values
    error += count * math.exp(NEGLIGIBLE[dtype]) * span
    return _Analysed(A, error, np.abs(A) + error).times(head.W_O, u)


def _softmax(state: _Analysed, u: float, dtype: str) -> _Analysed:
    p, tau = _weights(state.value, state.error + gamma(FOLDED_LAYERS, u) * state.size, dtype)
    mean = (p * tau).sum(axis=-1, keepdims=True)
    error = np.where(mean < 1, p * (tau + mean) / (1 - mean), 1.0) + gamma(2 * p.shape[-1] + 3, u) * 2 * p
    error = np.minimum(error, 2.0) + math.exp(NEGLIGIBLE[dtype])
    return _Analysed(p, error, p + error)


def _weights(scores: np.ndarray, error_s: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the p_k, and the τ_k, which are zero where p_k is zero."""
    u, ulps = UNIT_ROUNDOFF[dtype], ENGINE_ULPS[dtype]
    distance = scores.max(axis=-1, keepdims=True) - scores
    weights = np.exp(-distance)
    p = weights / weights.sum(axis=-1, keepdims=True)
    delta = error_s + u * (distance + 2 * error_s.max(axis=-1, keepdims=True)) + 2 * ulps * u
    return p, np.where(p > 0, np.expm1(np.minimum(np.where(p > 0, delta, 0), 50)), 0)
