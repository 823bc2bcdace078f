"""Sums over keys in float32: in blocks of 8, blocks of such blocks, and so on.

Each addition that a term passes through may round it once. In a block of 8, summed in any order, a term passes through
at most 7 additions, and then 8 times fewer terms are left. So a bound on rounding counts `depth(n)` additions instead
of n − 1: 18 for 289 keys. In float64 the rounding of sums hardly matters, and the BLAS computes the products.
"""

from __future__ import annotations

import numpy as np

from attnc.numerics.arrays import Float

BLOCK = 8
"""The number of terms that are added in any order."""
MOST_KEYS = 4096
"""The largest number of keys that is summed in blocks. With more, engines may add up chunks in any order."""


def depth(num_keys: int, dtype: str) -> int:
    """Return the largest number of additions that a term of a sum over the keys passes through, in any engine."""
    if dtype != "float32" or num_keys > MOST_KEYS:
        return max(0, num_keys - 1)
    additions = 0
    while num_keys > 1:
        additions += min(BLOCK, num_keys) - 1
        num_keys = -(-num_keys // BLOCK)
    return additions


def key_sum(terms: Float[np.ndarray, "... n"]) -> Float[np.ndarray, " ..."]:
    """Return the sum over the last axis, in blocks for float32."""
    return _sum(np.moveaxis(terms, -1, 0)) if terms.dtype == np.float32 else np.asarray(terms.sum(axis=-1))


def key_mix(
    weights: Float[np.ndarray, "... q n"], values: Float[np.ndarray, "... n v"]
) -> Float[np.ndarray, "... q v"]:
    """Return weights @ values, in blocks for float32."""
    n, v = values.shape[-2:]
    if weights.dtype != np.float32 or n <= BLOCK:
        return weights @ values
    if v == 1:
        return key_sum(weights * np.swapaxes(values, -1, -2))[..., None]
    whole = n - n % BLOCK
    values = values.reshape(*(1,) * (weights.ndim - values.ndim), *values.shape)
    of_blocks = np.moveaxis(weights[..., :whole].reshape(*weights.shape[:-1], whole // BLOCK, BLOCK), -2, 0)
    by_blocks = np.moveaxis(values[..., :whole, :].reshape(*values.shape[:-2], whole // BLOCK, BLOCK, v), -3, 0)
    sums = of_blocks @ by_blocks
    if whole < n:
        sums = np.concatenate([sums, (weights[..., whole:] @ values[..., whole:, :])[None]])
    return _sum(sums)


def _sum(terms: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, " ..."]:
    """Sum over the first axis. A block takes one term from each of 8 runs, so that long rows are added."""
    while len(terms) > BLOCK:
        step = -(-len(terms) // BLOCK)
        blocks = terms[:step].copy(order="K")
        for start in range(step, len(terms), step):
            run = terms[start : start + step]
            blocks[: len(run)] += run
        terms = blocks
    return np.asarray(terms.sum(axis=0))
