"""Averages over a tensor grid of keys: weights of every axis at points, contracted with the values of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnc.numerics.arrays import Float

NUMBERS_AT_ONCE = 2**18
"""Numbers of an intermediate array: 2 MB, so that it stays in the cache."""


def contracted(
    weights: Sequence[Float[np.ndarray, "points p"]], values: Float[np.ndarray, "*grid outputs"]
) -> Float[np.ndarray, "points outputs"]:
    """Return Σ_k Π_i weights[i][·, k_i] · values[k] at every point. The longest axis is contracted first, by BLAS."""
    sizes = values.shape[:-1]
    longest = int(np.argmax(sizes))
    rest = [i for i in range(len(sizes)) if i != longest]
    matrix = np.moveaxis(values, longest, 0).reshape(sizes[longest], -1)
    found = np.empty((len(weights[0]), values.shape[-1]))
    step = max(16, NUMBERS_AT_ONCE // max(matrix.shape))
    for start in range(0, len(found), step):
        rows = slice(start, start + step)
        part = weights[longest][rows] @ matrix
        for i in rest:
            own = weights[i][rows]
            part = np.einsum("np,npq->nq", own, part.reshape(len(own), sizes[i], -1))
        found[rows] = part.reshape(len(part), -1)
    return found


def roundings_of(sizes: Sequence[int]) -> int:
    """Return the number of roundings on the way of any term of `contracted`: a product per axis, and sums over it."""
    return sum(sizes) + len(sizes)
