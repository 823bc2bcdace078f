"""Values of a head by reweighted least squares: near the minimax error, with small values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.limits import check_time, spend
from attnc.numerics.quiet import quiet
from attnc.numerics.small_matrices import singular_values, triangular_factor, triangular_solution

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
    values, errors = fit_each(weights[None], f, limits, passes, goal)
    return values[0], float(errors[0])


def fit_each(
    weights: Float[np.ndarray, "heads points p"],
    f: Float[np.ndarray, "points outputs"],
    limits: Float[np.ndarray, " outputs"],
    passes: int = 8,
    goal: float = 0.0,
) -> tuple[Float[np.ndarray, "heads p outputs"], Float[np.ndarray, " heads"]]:
    """Return the values of `fit_values` for each of several heads, and their errors, in less time than one by one."""
    fits = [_lawson(weights, f[:, j], float(limits[j]), passes, goal) for j in range(f.shape[1])]
    return np.stack([values for values, _ in fits], axis=2), np.max([errors for _, errors in fits], axis=0)


def _lawson(W: np.ndarray, f: np.ndarray, limit: float, passes: int, goal: float) -> tuple[np.ndarray, np.ndarray]:
    heads, points, p = W.shape
    at = np.full((heads, points), 1 / points)
    best, least = np.zeros((heads, p)), np.full(heads, np.abs(f).max(initial=0.0))
    left = np.arange(heads)  # those that get another pass
    for _ in range(passes):
        spend(ROW_SECONDS * len(left) * points * p**2)
        check_time("fitting")
        some, root = W if len(left) == heads else W[left], np.sqrt(at)
        values = _ridge(some * root[:, :, None], f * root, limit)
        errors = np.abs((some @ values[:, :, None])[:, :, 0] - f)
        worst = errors.max(axis=1)
        is_better = worst < least[left]
        best[left[is_better]], least[left[is_better]] = values[is_better], worst[is_better]
        is_done = (least[left] <= goal) | (worst == 0)
        if goal > 0:
            is_done |= least[left] > LARGEST_FIRST_PASS * goal
        left, again = left[~is_done], ~is_done
        if not len(left):
            break
        at = at[again] * errors[again] / worst[again, None] + LEAST_POINT_WEIGHT / points
        at /= at.sum(axis=1, keepdims=True)
    return best, least


def _ridge(W: np.ndarray, f: np.ndarray, limit: float) -> np.ndarray:
    """Minimise |Wv − f|² + λ²|v|² for each head, with the least λ of RIDGE_LADDER for which max |v| ≤ limit.

    For λ = 0, the first of the ladder, the triangular factor of W is enough. It usually is within the limit.
    """
    p = W.shape[2]
    values = np.empty((len(W), p))
    for head, with_f in enumerate(np.concatenate([W, f[:, :, None]], axis=2)):
        R = triangular_factor(with_f)  # its last column is Qᵀf: no Q is formed
        found = triangular_solution(R[:p, :p], R[:p, p])
        if found is None or not np.abs(found).max(initial=0.0) <= limit:
            found = _shrunk(R[:p, :p], R[:p, p], limit)
        values[head] = found
    return values


def _shrunk(R: np.ndarray, Qf: np.ndarray, limit: float) -> np.ndarray:
    """Minimise |Rv − Qf|² + λ²|v|² with the least λ for which max |v| ≤ limit. If there is none, scale v."""
    U, S, Vt = singular_values(R)
    with quiet():
        gains = S[:, None] / (S[:, None] ** 2 + (RIDGE_LADDER * S[0]) ** 2)
    gains[~np.isfinite(gains)] = 0.0
    candidates = Vt.T @ (gains * (U.T @ Qf)[:, None])
    sizes = np.abs(candidates).max(axis=0)
    is_within = sizes <= limit
    chosen = int(np.argmax(is_within)) if is_within.any() else -1
    return candidates[:, chosen] * min(1.0, limit / sizes[chosen]) if sizes[chosen] > 0 else candidates[:, chosen]


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
