"""Find points where an expression has kinks or jumps.

The error of a network may be largest there, and a grid of samples misses them.

A kink lies where the argument of a function passes one of the function's kinks, or where two arguments of max, min or
clip are equal. Bisection between two points with different signs finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from attnc.functions.registry import FUNCTIONS
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.expressions.evaluation import evaluate_points
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Number, Sum, Variable, walk
from attnc.targets.expressions.zeros import SMALLEST_CELL, zeros

NUM_SIGN_PAIRS = 512
"""Number of random pairs of points whose signs are compared. A kink that cuts off 1 % of the box is then missed with a
probability of 4e-5."""
NUM_PAIRS_PER_KINK = 16
"""Number of pairs with different signs that are bisected for each kink, so that a long kink is found in many places."""
MAX_KINKS_SEARCHED = 128
"""Maximum number of kinks that are searched for. Measured with max of 600 lines, which has 179,700 pairs: 1.6 s of CPU
time for 128 of them, 6 s for 512. Other samples test the further kinks."""
KINK_HALVINGS = 60
"""Number of bisection steps. It exceeds the 53 bits of a float64 number."""
REACH = 16.0
"""Samples of an infinite range are taken up to this |x|. Beyond it, rounding grows with |x|."""
MAX_JUMPS = 64
"""Maximum number of jumps along one variable. Each is a border between parts of a network, and of a proof."""
KINK_DISTANCES = 10.0 ** -np.arange(1, 15)
"""Further points are taken at these distances from a kink, in units of the distance between the two points."""


def points_at_kinks(expression: Expression, box: Box, seed: int = 0) -> Float[np.ndarray, "points d"]:
    """Return points on the kinks and on both sides of them, or none if the expression has no kinks in the box."""
    rng = np.random.default_rng(seed)
    first, last = (box.lo + rng.random((NUM_SIGN_PAIRS, box.d)) * box.widths for _ in range(2))
    apart = _switches(expression, first) * _switches(expression, last) < 0  # (kinks, pairs)
    kink, pair = np.nonzero(apart & (np.cumsum(apart, axis=1) <= NUM_PAIRS_PER_KINK))
    a, b, row = first[pair], last[pair], np.arange(len(pair))

    def sides(points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n 1"]:
        return np.sign(_switches(expression, points)[kink, row])[:, None]

    low, high = np.zeros((2, len(pair), 1))
    high += 1
    side = sides(a)
    for _ in range(KINK_HALVINGS if len(pair) else 0):
        middle = (low + high) / 2
        is_before = sides(a + middle * (b - a)) == side
        low, high = np.where(is_before, middle, low), np.where(is_before, high, middle)
    at = np.concatenate([high, *(high + sign * distance for sign in (-1, 1) for distance in KINK_DISTANCES)], axis=1)
    points = (a[:, None] + at[..., None] * (b - a)[:, None]).reshape(-1, box.d)
    return points[((points >= box.lo) & (points <= box.hi)).all(axis=1)]


def _switches(expression: Expression, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "kinks n"]:
    """Return the quantities that change sign at a kink, one row for each."""
    steps = expression.schedule[0]
    values = evaluate_points(steps, {name: points[:, i] for i, name in enumerate(expression.variables)})

    def rows() -> Iterator[Float[np.ndarray, " n"]]:
        for step in steps:
            if isinstance(step.node, Call):
                function, arguments = FUNCTIONS[step.node.name], [values[i] for i in dict.fromkeys(step.arguments)]
                yield from (arguments[0] - kink for kink in function.kinks)
                if function.chooses:
                    yield from (u - v for u, v in itertools.combinations(arguments, 2))

    found = [np.broadcast_to(row, (1, len(points))) for row in itertools.islice(rows(), MAX_KINKS_SEARCHED)]
    return np.concatenate([np.zeros((0, len(points))), *found])


def jumps_across(expression: Expression, box: Box) -> list[list[float]] | None:
    """Return, for each variable, the places where the expression may jump; None if they are not known.

    An end of the box is among them if the expression jumps there. They are known if the argument of every function that
    jumps depends on one variable only, and if there are at most MAX_JUMPS for each function. Nothing is proved about
    them: they guide fits, and the choice of the cells of a proof.
    """
    found: list[list[tuple[float, bool]]] = [[] for _ in box.names]
    for call in walk(expression.outputs):
        jumps = FUNCTIONS[call.name].jumps if isinstance(call, Call) else None
        if not isinstance(call, Call) or jumps is None:
            continue
        names, (argument,) = {node.name for node in walk(call.arguments) if isinstance(node, Variable)}, call.arguments
        if len(names) > 1:
            return None
        for name in names:
            axis = box.names.index(name)
            lo, hi = float(box.lo[axis]), float(box.hi[axis])
            side = Interval(np.array([[lo]]), np.array([[hi]]))
            u = Expression("", (argument,), (name,), False, ()).ranges(side, violations="infinite")
            if not float(u.width.max()) <= MAX_JUMPS:
                return None
            for level in jumps(float(u.lo.min()), float(u.hi.max())):
                crossed = argument if level == 0 else Sum((argument, Number(Fraction(-level))))
                found[axis] += [zero for zero in zeros(crossed, name, lo, hi) if lo <= zero[0] <= hi]
    near = SMALLEST_CELL * box.widths
    return [_apart(sorted(places), distance) for places, distance in zip(found, near.tolist(), strict=True)]


def _apart(places: list[tuple[float, bool]], distance: float) -> list[float]:
    """Return one place of each cluster, a sharp one if there is any."""
    clusters: list[list[tuple[float, bool]]] = []
    for place in places:
        if clusters and place[0] - clusters[-1][-1][0] <= distance:
            clusters[-1].append(place)
        else:
            clusters.append([place])
    return [max(cluster, key=lambda place: place[1])[0] for cluster in clusters]
