"""Points where an expression has kinks: there, and close to them, a network may err most, and no grid would find it.

A kink lies where the argument of relu or abs, or the difference of two arguments of max, min or clip, changes its sign.
Between two points with different signs it is found by bisection.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.targets.box import Box
from attnc.targets.expressions.evaluation import evaluate_points
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Step

if TYPE_CHECKING:
    from jaxtyping import Float

PAIRS, KEPT = 512, 16
"""Of points, between which signs are compared; and of those with different signs, for every kink."""
HALVINGS = 60
REACH = 16.0
"""Of an infinite range: where samples are taken. Beyond it rounding grows with |x|."""
NEAR = 10.0 ** -np.arange(1, 15)
"""How far from a kink points are taken besides, in parts of the way between the two points."""


def points_at_kinks(expression: Expression, box: Box, seed: int = 0) -> Float[np.ndarray, "points d"]:
    """On the kinks and on both sides of them; none, if the expression has no kinks in the box."""
    rng = np.random.default_rng(seed)
    first, last = (box.lo + rng.random((PAIRS, box.d)) * box.widths for _ in range(2))
    apart = _switches(expression, first) * _switches(expression, last) < 0  # (kinks, pairs)
    found = []
    for kink in np.flatnonzero(apart.any(axis=1)):
        chosen = np.flatnonzero(apart[kink])[:KEPT]
        a, b = first[chosen], last[chosen]
        low, high = np.zeros((2, len(chosen), 1))
        high += 1
        side = np.sign(_switches(expression, a)[kink])
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_before = (np.sign(_switches(expression, a + middle * (b - a))[kink]) == side)[:, None]
            low, high = np.where(is_before, middle, low), np.where(is_before, high, middle)
        at = np.concatenate([high, *(high + sign * distance for sign in (-1, 1) for distance in NEAR)], axis=1)
        found.append((a[:, None] + at[..., None] * (b - a)[:, None]).reshape(-1, box.d))
    points = np.concatenate([np.zeros((0, box.d)), *found])
    return points[((points >= box.lo) & (points <= box.hi)).all(axis=1)]


def _switches(expression: Expression, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "kinks n"]:
    """What changes its sign at a kink, one row for each."""
    steps = expression.schedule[0]
    values = evaluate_points(steps, {name: points[:, i] for i, name in enumerate(expression.variables)})
    rows = [values[i] - (0.0 if j is None else values[j]) for i, j in _arguments(steps)]
    return np.stack([np.broadcast_to(row, len(points)) for row in rows]) if rows else np.zeros((0, len(points)))


def _arguments(steps: Sequence[Step]) -> list[tuple[int, int | None]]:
    found: list[tuple[int, int | None]] = []
    for step in steps:
        match step.node:
            case Call("relu" | "abs"):
                found.append((step.arguments[0], None))
            case Call("max" | "min"):
                found += itertools.combinations(step.arguments, 2)
            case Call("clip"):
                found += [(step.arguments[0], end) for end in step.arguments[1:]]
    return found
