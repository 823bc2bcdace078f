"""A softmax over the features of tokens, as an attention layer over constant keys: the same function of the same
state.

Let R = W·u + c be what an affine map makes of a vector u, T tokens of G features, and let outputs be an affine map F
of softmax(R), token by token. Then query τ carries (u, 1), key (τ, v) carries the row of W, c that makes feature v of
token τ, and column (τ, v) of F as its value: Σ_v softmax(R_τ)_v·F_τv. A mask shows a query its own keys alone.
Products and sums are those that an engine makes of the softmax, in some order.
"""

from __future__ import annotations

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask
from attnc.ir.sparse import Sparse

MAX_BYTES = 2**28


def attention_of_softmax(place: Affine, read: Affine) -> tuple[Layer, ...]:
    """(affine map, attention layer, affine map) that compute read(softmax(place(u)))."""
    T, G, _, n = place.weight.shape
    *shape, _, _ = read.weight.shape
    num_outputs, dtype = shape[0] * shape[1], place.weight.values.dtype
    d_k, width = n + 1, n + 1 + num_outputs
    if 8 * width * (2 * d_k + num_outputs) > MAX_BYTES:
        raise ProgramError(f"a softmax of {n} inputs and {num_outputs} outputs that are read is too wide to be proved")
    channels = (*(f"by.{i}" for i in range(n)), "by.one", *(f"value.{j}" for j in range(num_outputs)))
    outputs = tuple(f"out.{j}" for j in range(num_outputs))
    embed = Affine(place.name, _queries(T, G, width, n, dtype), _tokens(place, read, width), channels)
    scores, values = np.eye(width, d_k, dtype=dtype), np.eye(width, num_outputs, -d_k, dtype=dtype)
    own, key = np.arange(T), np.repeat(np.arange(T), G)
    mask = Mask(np.concatenate([own, key]), np.concatenate([np.full(T, T), key]))
    head = Head(scores, scores, values, np.eye(num_outputs, dtype=dtype), mask)
    return embed, Attention("softmax", (head,), outputs), _sum_over_tokens(read, T, G, num_outputs)


def _queries(T: int, G: int, width: int, n: int, dtype: np.dtype[np.floating]) -> Sparse:
    """Token τ < T carries u."""
    token, i = (axis.ravel() for axis in np.indices((T, n)))
    index = np.stack([token, i, np.zeros_like(i), i], axis=1).astype(np.int32)
    return Sparse((T + T * G, width, 1, n), index, np.ones(T * n, dtype))


def _tokens(place: Affine, read: Affine, width: int) -> Sparse:
    """What does not depend on u: the ones of the queries; rows of W, c and columns of F in the keys."""
    T, G, _, n = place.weight.shape
    dtype = place.weight.values.dtype
    rows, constants = place.weight.flat(slice(0, 2)), place.constant.flat(slice(None))
    keys, outputs = read.weight.flat(slice(2, None)), read.weight.flat(slice(0, 2))
    parts = [
        (np.arange(T), np.full(T, n), np.ones(T, dtype)),
        (T + rows, place.weight.index[:, 3], place.weight.values),
        (T + constants, np.full(len(constants), n), place.constant.values),
        (T + keys, n + 1 + outputs, read.weight.values),
    ]
    token, column, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Sparse((T + T * G, width), np.stack([token, column], axis=1).astype(np.int32), values.astype(dtype))


def _sum_over_tokens(read: Affine, T: int, G: int, num_outputs: int) -> Affine:
    """Each output adds what the queries found for it; and the constants of F."""
    tokens, width, _, _ = read.weight.shape
    dtype = read.weight.values.dtype
    token, j = (axis.ravel() for axis in np.indices((T, num_outputs)))
    index = np.stack([j // width, j % width, token, j], axis=1).astype(np.int32)
    weight = Sparse((tokens, width, T + T * G, num_outputs), index, np.ones(len(j), dtype))
    return Affine(read.name, weight, read.constant, read.channels)
