"""How far any two evaluations of one program may be apart: the tolerance of the agreement tests, derived.

Every entry of a state is carried as (value, error, size): the exact value in long double, a bound on what an
evaluation in the program's dtype may be off by, and the same sums taken of absolute values. u is the unit roundoff,
γ_n = nu/(1−nu). The bounds hold for any order of summation, and for folding, since between two softmaxes folding only
multiplies affine maps in another order: n counts the terms of all of them, and γ_n multiplies `size`, which no
cancellation makes small.

    affine    error ← |W|·error + γ_n·size,  size ← |W|·size + |B|
    scores    error_s = Σ (error_q·|k| + |q|·error_k + error_q·error_k) + γ_n·Σ size_q·size_k
    softmax   weights are off by a factor e^{±δ_k}, δ_k = error_s + u·(|s_k − top| + 2·max error_s) + EXP_ULPS·2u
    average   with τ_k = e^{δ_k} − 1, τ̄ = Σ p_k τ_k (shared design, certificates.md):
              Σ p_k τ_k |v_k − A|/(1−τ̄) + γ_{2p+3}·Σ p_k(1+τ_k) size_v/(1−τ̄) + Σ p_k(1+τ_k) error_v/(1−τ̄)
              + the change by underflow, or by an engine that takes tiny weights for zero: p·e^NEGLIGIBLE·2·max size_v
    stage     the output of a stage is computed afresh: size ← |value| + error
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from attnc.ir import Affine, Attention, Head, Program
from attnc.ir.layers import EVERY_QUERY, Layer

EXP_ULPS = {2.0**-24: 4, 2.0**-53: 32}  # numpy states < 4 ulp for float32; float64 also covers powers up to the 31st
NEGLIGIBLE = {np.dtype(np.float64): -700.0, np.dtype(np.float32): -80.0}
FOLDED_LAYERS = 8  # more than the affine maps and projections between two softmaxes in these tests


@dataclass(frozen=True)
class Known:
    value: np.ndarray
    error: np.ndarray
    size: np.ndarray

    def times(self, matrix: np.ndarray, u: float) -> Known:
        matrix = matrix.astype(np.longdouble)
        size = self.size @ np.abs(matrix)
        error = self.error @ np.abs(matrix) + gamma(matrix.shape[0] + 1, u) * size
        return Known(self.value @ matrix, error, size)


def gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


def exact_and_bound(program: Program, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The output in long double, and a bound on the distance to it of any evaluation in the program's dtype."""
    u = float(np.finfo(program.dtype).eps) / 2
    starts = program.starts
    states = []
    for position, start in enumerate(starts):
        given = inputs[position] if position < len(inputs) else np.zeros((len(inputs[0]), 0))
        value = np.asarray(given, np.longdouble).reshape(len(inputs[0]), *start)
        states.append(Known(value, np.zeros_like(value), np.abs(value)))
    main, memory = states
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bound may overflow to ∞
        for layer in program.memory:
            memory = _apply(layer, memory, memory, u, program.dtype)
        for layer in program.layers:
            main = _apply(layer, main, memory, u, program.dtype)
    shape = (len(inputs[0]), *program.output_shape)
    return main.value.reshape(shape), main.error.reshape(shape)


def assert_agrees(program: Program, inputs: tuple[np.ndarray, ...], found: np.ndarray) -> None:
    exact, bound = exact_and_bound(program, inputs)
    assert found.shape == exact.shape
    assert found.dtype == program.dtype
    error = np.abs(found - exact)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), f"off by {error.flat[worst]}, allowed {bound.flat[worst]}, of {exact.flat[worst]}"


def _apply(layer: Layer, state: Known, memory: Known, u: float, dtype: np.dtype[np.floating]) -> Known:
    if isinstance(layer, Affine):
        weight, constant = layer.weight.dense().astype(np.longdouble), layer.constant.dense().astype(np.longdouble)
        terms = FOLDED_LAYERS * (1 + int((weight != 0).sum(axis=(2, 3)).max(initial=0)))
        size = np.einsum("pqtw,btw->bpq", np.abs(weight), state.size) + np.abs(constant)
        error = np.einsum("pqtw,btw->bpq", np.abs(weight), state.error) + gamma(terms, u) * size
        return Known(np.einsum("pqtw,btw->bpq", weight, state.value) + constant, error, size)
    if isinstance(layer, Attention):
        keyed = memory if layer.cross else state
        outs = [_head(head, state, keyed, u, dtype) for head in layer.heads] + ([state] if layer.residual else [])
        value = sum(out.value for out in outs)
        size = sum(out.size for out in outs)
        error = sum(out.error for out in outs) + gamma(len(outs) + 2, u) * size
        return Known(value, error, np.abs(value) + error)
    error_s = state.error + gamma(FOLDED_LAYERS, u) * state.size
    p, tau = _weights(state.value, error_s, u)
    mean = (p * tau).sum(axis=-1, keepdims=True)
    error = np.where(mean < 1, p * (tau + mean) / (1 - mean), 1.0) + gamma(2 * p.shape[-1] + 3, u) * 2 * p
    error = np.minimum(error, 2.0) + np.exp(NEGLIGIBLE[dtype])
    return Known(p, error, p + error)


def _head(head: Head, state: Known, keyed: Known, u: float, dtype: np.dtype[np.floating]) -> Known:
    q, k, v = state.times(head.W_Q, u), keyed.times(head.W_K, u), keyed.times(head.W_V, u)
    pairs = "bqd,bkd->bqk"
    scores = np.einsum(pairs, q.value, k.value)
    error_s = (
        np.einsum(pairs, q.error, np.abs(k.value))
        + np.einsum(pairs, np.abs(q.value), k.error)
        + np.einsum(pairs, q.error, k.error)
        + gamma(FOLDED_LAYERS * (head.W_Q.shape[1] + 1), u) * np.einsum(pairs, q.size, k.size)
    )
    if head.mask is not None:
        of_keys = head.mask.key_segments[None, :]
        is_hidden = (head.mask.query_segments[:, None] != of_keys) & (of_keys != EVERY_QUERY)
        scores, error_s = np.where(is_hidden, -np.inf, scores), np.where(is_hidden, 0, error_s)
    p, tau = _weights(scores, error_s, u)
    A = p @ v.value
    mean = (p * tau).sum(axis=-1)[..., None]
    deviation = np.abs(v.value[:, None] - A[:, :, None])  # (batch, queries, keys, d_v)
    seen = p * (1 + tau)
    count = p.shape[-1]
    error = np.einsum("bqk,bqkd->bqd", p * tau, deviation) + gamma(2 * count + 3, u) * (seen @ v.size) + seen @ v.error
    span = 2 * (v.size + v.error).max(axis=1, keepdims=True)
    error = np.where(mean < 0.5, error / (1 - mean), span)  # an average never leaves the span of the values
    error += count * np.exp(np.longdouble(NEGLIGIBLE[dtype])) * span
    return Known(A, error, np.abs(A) + error).times(head.W_O, u)


def _weights(scores: np.ndarray, error_s: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray]:
    """p_k, and τ_k (zero where p_k is)."""
    distance = scores.max(axis=-1, keepdims=True) - scores
    weights = np.exp(-distance)
    p = weights / weights.sum(axis=-1, keepdims=True)
    delta = error_s + u * (distance + 2 * error_s.max(axis=-1, keepdims=True)) + 2 * EXP_ULPS[u] * u
    return p, np.where(p > 0, np.expm1(np.minimum(np.where(p > 0, delta, 0), 50)), 0)
