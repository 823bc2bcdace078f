"""Averages over a tensor grid of keys: weights of every axis at points, contracted with the values of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnc.numerics.arrays import Float

ROWS_AT_ONCE = 2**13
"""Number of points whose weights are computed together: 0.5 MB for 8 keys, which stay in the cache."""
NUMBERS_AT_ONCE = 2**18
"""Numbers of an intermediate array: 2 MB, so that it stays in the cache."""


def contracted(
    weights: Sequence[Float[np.ndarray, "p points"]], values: Float[np.ndarray, "*grid outputs"]
) -> Float[np.ndarray, "points outputs"]:
    """Return Σ_k Π_i weights[i][k_i, ·] · values[k] at every point. The longest axis is contracted first, by BLAS.

    Points are the last axis of the weights, so that all sums over keys add whole rows of numbers.
    """
    sizes = values.shape[:-1]
    longest = int(np.argmax(sizes))
    rest = [i for i in range(len(sizes)) if i != longest]
    matrix = np.moveaxis(values, longest, 0).reshape(sizes[longest], -1).T
    found = np.empty((weights[0].shape[1], values.shape[-1]))
    step = max(16, NUMBERS_AT_ONCE // max(matrix.shape))
    for start in range(0, len(found), step):
        points = slice(start, start + step)
        part = matrix @ weights[longest][:, points]
        for i in rest:
            part = part.reshape(sizes[i], -1, part.shape[-1])
            part *= weights[i][:, None, points]
            part = part.sum(axis=0)
        found[points] = part.T
    return found


def softmax_of_rows(scores: Float[np.ndarray, "p points"]) -> Float[np.ndarray, "p points"]:
    """Return the softmax over the first axis, shifted by the maximum. The scores are overwritten."""
    scores -= scores.max(axis=0)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=0)
    return scores


def largest_of_rows(sizes: Float[np.ndarray, "points outputs"]) -> Float[np.ndarray, " points"]:
    """Return the largest number of every row. Rows of one number take no time."""
    return sizes[:, 0] if sizes.shape[1] == 1 else np.asarray(sizes.max(axis=1))


def roundings_of(sizes: Sequence[int]) -> int:
    """Return the number of roundings on the way of any term of `contracted`: a product per axis, and sums over it."""
    return sum(sizes) + len(sizes)
