"""Values of a head by reweighted least squares: near the minimax error, with small values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.limits import check_time, spend

Function = Callable[[np.ndarray], np.ndarray]
"""A function of one variable, on arrays of points."""
RIDGE_LADDER = np.concatenate([[0.0], 10.0 ** np.arange(-15.0, 0.01, 0.25)])
"""Ridges λ in units of the largest singular value. The least that keeps the values within their limit is used."""
LEAST_POINT_WEIGHT = 1e-6
"""Least weight of a point, as a share of the mean weight, so that every point of the sample counts. Measured
with ten fits: 1e-7 and 1e-5 take as many keys, with bounds within 1 %."""
LARGEST_FIRST_PASS = 6.0
"""Largest ratio of the first error to the goal at which more passes are tried. A trade between time and keys; not
tuned."""
ROW_SECONDS = 4e-9
"""Counted seconds of a pass, for each point and each pair of keys."""

PEAK_ROUNDS, PEAK_PARTS, MOST_PEAKS = 3, 18, 16
"""Number of refinements about the highest peaks, of parts per refinement, and of peaks. Points are then 9³ = 729 times
as close. Errors of gates found with 2 rounds of 24 parts about more peaks agree with these to five digits."""


def fit_values(
    weights: Float[np.ndarray, "points p"],
    f: Float[np.ndarray, "points outputs"],
    limits: Float[np.ndarray, " outputs"],
    passes: int = 8,
    goal: float = 0.0,
) -> tuple[Float[np.ndarray, "p outputs"], float]:
    """Return values v, |v| ≤ limits, with a small max |weights·v − f|, and that error, by Lawson's method.

    A pass is least squares with a weight for every point of the sample. Each weight is then multiplied by the error at
    its point, so that weight moves to the largest errors until they are equal. Passes stop when the error is at most
    `goal`, and after the first one if the goal is out of reach. Each output is fitted by itself.
    """
    fits = [_lawson(weights, f[:, j], float(limits[j]), passes, goal) for j in range(f.shape[1])]
    return np.stack([values for values, _ in fits], axis=1), max(error for _, error in fits)


def _lawson(W: np.ndarray, f: np.ndarray, limit: float, passes: int, goal: float) -> tuple[np.ndarray, float]:
    at = np.full(len(f), 1 / len(f))
    best, least = np.zeros(W.shape[1]), float(np.abs(f).max(initial=0.0))
    for _ in range(passes):
        spend(ROW_SECONDS * len(f) * W.shape[1] ** 2)
        check_time("fitting")
        root = np.sqrt(at)
        values = _ridge(W * root[:, None], f * root, limit)
        errors = np.abs(W @ values - f)
        worst = float(errors.max())
        if worst < least:
            best, least = values, worst
        if least <= goal or least > LARGEST_FIRST_PASS * goal > 0 or worst == 0:
            break
        at = at * errors / worst + LEAST_POINT_WEIGHT / len(f)
        at /= at.sum()
    return best, least


def _ridge(W: np.ndarray, f: np.ndarray, limit: float) -> np.ndarray:
    """Minimise |Wv − f|² + λ²|v|², with the least λ of RIDGE_LADDER for which max |v| ≤ limit."""
    # The last column of R is Qᵀf: no Q is formed.
    R = np.asarray(np.linalg.qr(np.concatenate([W, f[:, None]], axis=1), mode="r"))
    p = W.shape[1]
    U, S, Vt = np.linalg.svd(R[:p, :p])
    ridges = RIDGE_LADDER * S[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = S[:, None] / (S[:, None] ** 2 + ridges**2)
    gains[~np.isfinite(gains)] = 0.0
    candidates = Vt.T @ (gains * (U.T @ R[:p, p])[:, None])
    sizes = np.abs(candidates).max(axis=0)
    within = np.flatnonzero(sizes <= limit)
    if len(within):
        return candidates[:, within[0]]
    return candidates[:, -1] * (limit / sizes[-1])


def chebyshev(lo: float, hi: float, count: int) -> Float[np.ndarray, " count"]:
    """Return Chebyshev points with both ends."""
    turn = np.linspace(0.0, math.pi, count)
    return np.clip(0.5 * (lo + hi) - 0.5 * (hi - lo) * np.cos(turn), lo, hi)


def highest(f: Function, x: Float[np.ndarray, " points"]) -> tuple[float, float]:
    """Return (the largest value of f found, its place), on sorted points and ever closer points near the peaks."""
    found = f(x)
    for _ in range(PEAK_ROUNDS):
        inner = found[1:-1]
        peaks = 1 + np.flatnonzero((inner >= found[:-2]) & (inner >= found[2:]))
        peaks = peaks[np.argsort(-found[peaks])][:MOST_PEAKS]
        close = [np.linspace(x[i - 1], x[i + 1], PEAK_PARTS + 1)[1:-1] for i in peaks]
        more = np.setdiff1d(np.concatenate([*close, []]), x)
        if not len(more):
            break
        x, found = np.concatenate([x, more]), np.concatenate([found, f(more)])
        order = np.argsort(x)
        x, found = x[order], found[order]
    worst = int(np.argmax(found))
    return float(found[worst]), float(x[worst])
