"""Decompositions of small dense matrices, by LAPACK without the checks of numpy, which take longer than the work.

The results have the same bits as those of `numpy.linalg`: the routines and the sizes of their workspace are the same.
"""

from __future__ import annotations

import functools

import numpy as np

from attnc.numerics.arrays import Bool, Float


def triangular_factor(A: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "columns columns"]:
    """Return R of A = QR, as `numpy.linalg.qr(A, mode="r")` does, for at least as many rows as columns."""
    from scipy.linalg.lapack import dgeqrf

    packed, _, _, info = dgeqrf(A)
    if info != 0:
        raise np.linalg.LinAlgError("the QR decomposition failed")
    return np.where(_upper(A.shape[1]), packed[: A.shape[1]], 0.0)


def orthonormal_factors(
    A: Float[np.ndarray, "rows columns"],
) -> tuple[Float[np.ndarray, "rows columns"], Float[np.ndarray, "columns columns"]]:
    """Return Q and R with A = QR, as `numpy.linalg.qr` does, for at least as many rows as columns."""
    from scipy.linalg.lapack import dgeqrf, dorgqr

    packed, tau, _, info = dgeqrf(A)
    Q, _, formed = dorgqr(packed, tau)
    if info != 0 or formed != 0:
        raise np.linalg.LinAlgError("the QR decomposition failed")
    return np.ascontiguousarray(Q), np.where(_upper(A.shape[1]), packed[: A.shape[1]], 0.0)


def triangular_solution(
    R: Float[np.ndarray, "columns columns"], b: Float[np.ndarray, " columns"]
) -> Float[np.ndarray, " columns"] | None:
    """Return v with Rv = b for an upper triangular R, or None if R is singular."""
    from scipy.linalg.lapack import dtrtrs

    found, info = dtrtrs(R, b)
    return found if info == 0 else None


def singular_values(
    A: Float[np.ndarray, "rows columns"],
) -> tuple[Float[np.ndarray, "rows rank"], Float[np.ndarray, " rank"], Float[np.ndarray, "rank columns"]]:
    """Return U, S, Vᵀ with A = U·diag(S)·Vᵀ, as `numpy.linalg.svd(A, full_matrices=False)` does."""
    from scipy.linalg.lapack import dgesdd

    U, S, Vt, info = dgesdd(A, full_matrices=0, lwork=_workspace(*A.shape))
    if info != 0:
        raise np.linalg.LinAlgError("the singular value decomposition did not converge")
    return np.ascontiguousarray(U), S, np.ascontiguousarray(Vt)


@functools.lru_cache(maxsize=64)
def _upper(size: int) -> Bool[np.ndarray, "size size"]:
    """Return which entries of a square matrix are on or above its diagonal."""
    return ~np.tri(size, k=-1, dtype=bool)


@functools.lru_cache(maxsize=1024)
def _workspace(rows: int, columns: int) -> int:
    """Return the best size of the workspace. A smaller one changes the last digits of the results."""
    from scipy.linalg.lapack import dgesdd_lwork

    size, _ = dgesdd_lwork(rows, columns, full_matrices=0)
    return int(size)
