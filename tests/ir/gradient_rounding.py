"""How far any two evaluations of the gradient of one program may be apart: the tolerance of the agreement tests.

Each derivative is carried as (value, error, size), like the values in `ir.rounding`, layer by layer and unfolded, in
long double. The rules are those of a value, applied to the derivative of each operation:

    affine    as for values, without the constant
    scores    ds = dq·k + q·dk, with an error as for a score, by the product rule
    softmax   dp = p·(ds − Σ p·ds)
    average   dA = Σ p (v − A)(ds − Σ p·ds) + Σ p·dv. Engines may centre neither, one or both of the factors, and may
              centre the parts of a value one by one. So |v − A| counts as size_v + Σ p·size_v, and |ds − Σ p·ds| as
              |ds| + Σ p·|ds|. A weight is off by a factor (1 + τ_k)/(1 − τ̄) as in `ir.rounding`, and every term is
              rounded at most 2n + 12 times, additions included.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from attnc.ir import Affine, Attention, Head, Program
from attnc.ir.layers import Layer
from ir.rounding import EVERY_QUERY, FOLDED_LAYERS, NEGLIGIBLE, Known, _apply, _weights, gamma

UNKNOWN = 1e100
"""The relative error of weights of which no digit is certain. It is finite, so that its product with 0 is 0."""
PAIRS = "...qd,...kd->...qk"


@dataclass(frozen=True)
class Moving:
    """A state, and its derivatives with one more axis in front: one entry per input."""

    state: Known
    change: Known

    def times(self, matrix: np.ndarray, u: float) -> Moving:
        return Moving(self.state.times(matrix, u), self.change.times(matrix, u))


def exact_gradient_and_bound(program: Program, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The gradient (batch, outputs, inputs) in long double, and a bound on the distance of any evaluation to it."""
    u, batch = float(np.finfo(program.dtype).eps) / 2, len(inputs[0])
    sizes = [t * w for t, w in program.starts]
    count, first, states = sum(sizes), 0, []
    for position, start in enumerate(program.starts):
        given = inputs[position] if position < len(inputs) else np.zeros((batch, 0))
        value = np.asarray(given, np.longdouble).reshape(batch, *start)
        change = np.zeros((count, sizes[position]), np.longdouble)
        change[first + np.arange(sizes[position]), np.arange(sizes[position])] = 1
        change = np.broadcast_to(change.reshape(count, 1, *start), (count, *value.shape))
        first += sizes[position]
        zeros = Known(value, np.zeros_like(value), np.abs(value)), Known(change, np.zeros_like(change), np.abs(change))
        states.append(Moving(*zeros))
    main, memory = states
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bound may overflow to ∞
        for layer in program.memory:
            memory = _moved(layer, memory, memory, u, program)
        for layer in program.layers:
            main = _moved(layer, main, memory, u, program)
    num_outputs = math.prod(program.output_shape)
    exact, bound = (
        np.moveaxis(part.reshape(count, batch, num_outputs), 0, -1) for part in (main.change.value, main.change.error)
    )
    return exact, bound


def assert_gradients_agree(program: Program, inputs: tuple[np.ndarray, ...], found: np.ndarray) -> None:
    exact, bound = exact_gradient_and_bound(program, inputs)
    assert found.shape == exact.shape
    assert found.dtype == program.dtype
    error = np.abs(found - exact)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), f"off by {error.flat[worst]}, allowed {bound.flat[worst]}, of {exact.flat[worst]}"


def _moved(layer: Layer, main: Moving, memory: Moving, u: float, program: Program) -> Moving:
    state, dtype = _apply(layer, main.state, memory.state, u, program.dtype), program.dtype
    change = main.change
    if isinstance(layer, Affine):
        weight = layer.weight.dense().astype(np.longdouble)
        terms = FOLDED_LAYERS * (1 + int((weight != 0).sum(axis=(2, 3)).max(initial=0)))
        value, size, error = (
            np.einsum("pqtw,dbtw->dbpq", matrix, part)
            for matrix, part in (
                (weight, change.value),
                (np.abs(weight), change.size),
                (np.abs(weight), change.error),
            )
        )
        return Moving(state, Known(value, error + gamma(terms, u) * size, size))
    if isinstance(layer, Attention):
        keyed = memory if layer.cross else main
        outs = [_head(head, main, keyed, u, dtype) for head in layer.heads] + ([change] if layer.residual else [])
        value, size, error = (sum(getattr(out, part) for out in outs) for part in ("value", "size", "error"))
        error = error + gamma(len(outs) + 2, u) * size
        return Moving(state, Known(value, error, np.abs(value) + error))
    count = main.state.value.shape[-1]
    p, tau = _weights(main.state.value, main.state.error + gamma(FOLDED_LAYERS, u) * main.state.size, u)
    off = _weight_errors(p, tau, u, count)
    error_s = change.error + gamma(FOLDED_LAYERS, u) * change.size
    mean = (p * change.value).sum(axis=-1, keepdims=True)
    span = np.abs(change.value) + (p * np.abs(change.value)).sum(axis=-1, keepdims=True)
    error = p * off * span + p * (1 + off) * (error_s + (p * (1 + off) * (error_s + off * span)).sum(-1, keepdims=True))
    error += count * np.exp(np.longdouble(NEGLIGIBLE[dtype])) * span.max(axis=-1, keepdims=True, initial=0)
    value = p * (change.value - mean)
    return Moving(state, Known(value, error, np.abs(value) + error))


def _weight_errors(p: np.ndarray, tau: np.ndarray, u: float, count: int) -> np.ndarray:
    """A bound of the relative errors of the weights and of all roundings of a term, or UNKNOWN."""
    mean = (p * tau).sum(axis=-1, keepdims=True)
    return np.where(mean < 0.5, (tau + mean) / (1 - mean), UNKNOWN) * (1 + 1e-3) + gamma(2 * count + 12, u)


def _head(head: Head, main: Moving, keyed: Moving, u: float, dtype: np.dtype[np.floating]) -> Known:
    q, k, v = main.times(head.W_Q, u), keyed.times(head.W_K, u), keyed.times(head.W_V, u)
    folded = gamma(FOLDED_LAYERS * (head.W_Q.shape[1] + 1), u)
    scores, error_s, _ = _product(q.state, k.state, folded)
    by_query, by_key = _product(q.change, k.state, folded), _product(q.state, k.change, folded)
    ds, error_ds = by_query[0] + by_key[0], by_query[1] + by_key[1] + folded * (by_query[2] + by_key[2])
    if head.mask is not None:
        of_keys = head.mask.key_segments[None, :]
        is_hidden = (head.mask.query_segments[:, None] != of_keys) & (of_keys != EVERY_QUERY)
        scores, error_s = np.where(is_hidden, -np.inf, scores), np.where(is_hidden, 0, error_s)
    p, tau = _weights(scores, error_s, u)
    count = p.shape[-1]
    off = _weight_errors(p, tau, u, count)
    seen = p * (1 + off)
    A = p @ v.state.value
    deviation = v.state.size[:, None] + (p @ v.state.size)[:, :, None]  # (batch, queries, keys, d_v)
    error_v = v.state.error[:, None] + (seen @ v.state.error)[:, :, None]
    error_v += np.einsum("bqk,bqkc->bqc", p * off, deviation)[:, :, None]
    slope = np.abs(ds) + (p * np.abs(ds)).sum(axis=-1, keepdims=True)
    error_slope = error_ds + (seen * error_ds).sum(axis=-1, keepdims=True)
    error_slope += (p * off * slope).sum(axis=-1, keepdims=True)
    centred = v.state.value[:, None] - A[:, :, None]
    value = np.einsum("dbqk,bqkc->dbqc", p * ds, centred) + p @ v.change.value
    error = np.einsum("dbqk,bqkc->dbqc", p * off * slope + seen * error_slope, deviation + error_v)
    error += np.einsum("dbqk,bqkc->dbqc", seen * slope, error_v)
    error += (p * off) @ v.change.size + seen @ v.change.error
    span = 4 * (v.state.size + v.state.error).max(axis=1, keepdims=True, initial=0)
    most = span * (np.abs(ds) + error_ds).max(axis=-1, initial=0)[..., None]
    most = most + (v.change.size + v.change.error).max(axis=2, keepdims=True, initial=0)
    error = error + 2 * count * np.exp(np.longdouble(NEGLIGIBLE[dtype])) * most
    error = np.minimum(error, 2 * most)  # averages never leave the span of the values
    return Known(value, error, np.abs(value) + error).times(head.W_O, u)


def _product(q: Known, k: Known, folded: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inner products of queries and keys, their error, and the products of sizes."""
    size = np.einsum(PAIRS, q.size, k.size)
    error = (
        np.einsum(PAIRS, q.error, np.abs(k.value))
        + np.einsum(PAIRS, np.abs(q.value), k.error)
        + np.einsum(PAIRS, q.error, k.error)
        + folded * size
    )
    return np.einsum(PAIRS, q.value, k.value), error, size
