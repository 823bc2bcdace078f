"""The largest |p(τ)| of polynomials over the cube [−1, 1]^d, by halving the cube."""

from __future__ import annotations

import numpy as np

from attnc.numerics.arrays import Bool, Float
from attnc.proofs.cells.kind import SHARP, Goal
from attnc.proofs.taylor.polynomials import Layout, gamma, layout

_DEPTH = 10
"""Maximum number of halvings of a cube. Each divides the overestimate by 4 or more: after 10 it is < 10⁻⁶ of Σ|p_j|."""
_PIECES = 2**15
"""Maximum number of pieces of cubes that are held at a time: with 100 coefficients each they take 26 MB."""


def largest(
    space: Layout,
    coefficients: Float[np.ndarray, "count boxes"],
    remainder: Float[np.ndarray, " boxes"],
    goal: Goal = SHARP,
    tolerance: float = 0.01,
) -> tuple[Float[np.ndarray, " boxes"], Float[np.ndarray, " boxes"]]:
    """Return an upper bound of max |p(τ)| over the cube, and the largest value seen.

    The cube is halved along all axes until the bound reaches the goal, or is within the tolerance of the largest value
    seen. On halves the terms of high degree are small: they are dropped, and their sizes added to the bound.
    """
    boxes = coefficients.shape[1]
    size = np.abs(coefficients).sum(axis=0)
    upper, seen = np.zeros(boxes), np.zeros(boxes)
    pieces, owner, extra = coefficients, np.arange(boxes), np.zeros(boxes)
    for depth in range(_DEPTH + 1):
        bound, value = _simple_bounds(space, pieces)
        # The sums of a piece are off by γ_count·Σ|p_j|, and Σ|p_j| ≤ 3·bound.
        bound = bound * (1 + 4 * gamma(space.count + 8)) + extra
        np.maximum.at(seen, owner, value - extra)
        enough, is_hopeless = _enough(seen, remainder, goal, tolerance)
        split = np.isfinite(bound) & (bound > enough[owner]) & ~is_hopeless[owner]
        if depth == _DEPTH or len(split) > _PIECES or not split.any():
            np.maximum.at(upper, owner, bound)
            break
        np.maximum.at(upper, owner[~split], bound[~split])
        pieces, owner, extra = pieces[:, split], owner[split], extra[split]
        space, pieces, dropped = _economised(space, pieces, 0.1 * tolerance * enough[owner])
        # A halving is a product with a matrix whose columns have norm 1: it adds γ_count·size to the norm.
        extra = (extra + dropped + gamma(space.count) * size[owner]) * (1 + gamma(space.count))
        halves = (space.halves @ pieces).reshape(-1, space.count, len(owner))
        owner, extra = np.tile(owner, len(halves)), np.tile(extra, len(halves))
        pieces = np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(space.count, -1)
    return np.where(np.isnan(upper), np.inf, upper), seen


def _enough(
    seen: np.ndarray, remainder: np.ndarray, goal: Goal, tolerance: float
) -> tuple[Float[np.ndarray, " boxes"], Bool[np.ndarray, " boxes"]]:
    """Return the bound below which a piece is not halved, and which boxes cannot reach the goal."""
    sharp = (1 + tolerance) * seen
    if goal.value <= 0:
        return sharp, ~np.isfinite(remainder)
    attained = np.nan_to_num(seen - remainder, nan=0.0, posinf=0.0, neginf=0.0).max(initial=0.0)
    room = max(goal.value, goal.growth * attained) - remainder
    return np.maximum(room, sharp), ~(seen <= room)


def _economised(
    space: Layout, pieces: Float[np.ndarray, "count pieces"], allowed: Float[np.ndarray, " pieces"]
) -> tuple[Layout, Float[np.ndarray, "fewer pieces"], Float[np.ndarray, " pieces"]]:
    """Return the pieces without their highest degrees, and a bound of the dropped terms."""
    dropped = np.zeros(len(allowed))
    order = space.order
    while order > 2:
        more = dropped + np.abs(pieces[space.degree(order)]).sum(axis=0)
        if (more > allowed).any():
            break
        dropped, order = more, order - 1
    if order == space.order:
        return space, pieces, dropped
    smaller = layout(space.d, order)
    return smaller, pieces[: smaller.count], dropped * (1 + gamma(space.count))


def _simple_bounds(
    space: Layout, pieces: Float[np.ndarray, "count pieces"]
) -> tuple[Float[np.ndarray, " pieces"], Float[np.ndarray, " pieces"]]:
    """Return an upper bound of |p| over the cube, up to rounding, and the largest value at the centre and the corners.

    Along every axis lτ + qτ² is at most |l| + q, or l²/(4|q|) if its top is inside; the other terms are bounded one by
    one, c_j τ^j by max(c_j, 0) if all exponents are even and by |c_j| if not.
    """
    corners = np.abs(space.corners @ pieces).max(axis=0)
    odd = np.abs(pieces[space.odd]).sum(axis=0)
    if space.order < 2:
        return np.abs(pieces).sum(axis=0), np.maximum(np.abs(pieces[0]), corners)
    linear, square = pieces[space.degree(1)], pieces[space.squares]
    even = pieces[space.even]
    high = pieces[0] + _tops(linear, square) + np.maximum(even, 0).sum(axis=0) + odd
    low = -pieces[0] + _tops(linear, -square) + np.maximum(-even, 0).sum(axis=0) + odd
    return np.maximum(high, low), np.maximum(np.abs(pieces[0]), corners)


def _tops(linear: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Return Σ_i max over τ_i ∈ [−1, 1] of l_i τ_i + q_i τ_i²."""
    size = np.abs(linear)
    is_inside = 2 * square < -size
    # l·(l/q), and not l²/q: the square may underflow.
    top = np.where(is_inside, -0.25 * linear * (linear / np.where(is_inside, square, -1.0)), size + square)
    return np.asarray(top.sum(axis=0))
