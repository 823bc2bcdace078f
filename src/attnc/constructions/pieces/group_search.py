"""The shape of a group: the fewest keys for an error, or the least error for a number of keys.

What is searched is the curvature c, the number of spacings that fill the piece, the shift of the anchors, and for a
graded group t0 and u. The error as a function of these has narrow valleys, so the search is coarse at first and then
goes downhill from the best places. A fit of few keys costs a tenth of a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnc.constructions.pieces.groups import PASSES, Group, Piece, constant_group, make_group
from attnc.constructions.unary.compass import Shape, descend

LARGEST_GROUP = 512
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, LARGEST_GROUP)
COARSE, FINE = 0.17, 0.012
"""The first and the last step of the way downhill."""
NEAR = 300.0
"""So many times above the goal, the way downhill is still tried."""
FEW, MANY = 16, 64
"""Up to so many keys the search is thorough; beyond so many it takes the first shapes that come to mind."""
AT_END = 1 / 16
"""Of the width of a piece: what is hard so close to an end is so for what lies beyond it."""
CURVATURES, LEAST_STEPS = (0.02, 6.0), 0.1
ROUNDING = 0.0007
"""Of the largest score times u, relative to the limit of the values, what is felt in the output of a graded group."""


def search(piece: Piece, num_keys: int, goal: float | None = None, near: Group | None = None) -> Group:
    """The first group of this size with an error of at most `goal` that is found, or the best."""
    if num_keys == 1:
        return constant_group(piece)
    enough = 2.0**-50 * float(piece.limits.max()) if goal is None else goal
    found: list[Group] = []
    for shape in _starts(piece, num_keys, goal, near):
        found.append(_try(piece, num_keys, shape, 1, goal))
        if found[-1].error <= enough:
            return found[-1]
    found.sort(key=lambda group: group.error)
    best, few = found[0], num_keys <= FEW
    near_enough = (4.0 if few else 2.5) if piece.points else NEAR
    if num_keys <= MANY and (goal is None or best.error <= near_enough * goal):
        for start in found[: 1 if not few else 2 if piece.points else 3]:
            end = _downhill(start, goal)
            best = min(best, end, key=lambda group: group.error)
            if best.error <= enough:
                return best
    return best if goal is not None else make_group(piece, num_keys, best.shape, 4 * PASSES)


def _try(piece: Piece, num_keys: int, shape: Shape, passes: int, goal: float | None) -> Group:
    """A quick fit; a thorough one where that may reach the goal."""
    if goal is None:
        return make_group(piece, num_keys, shape, passes)
    group = make_group(piece, num_keys, shape, passes, goal)
    if goal < group.error <= 1.5 * goal or (passes == 1 and goal < group.error <= 4 * goal):
        return make_group(piece, num_keys, shape, PASSES, goal)
    return group


def smallest(piece: Piece, goal: float, most: int) -> Group:
    """A group with an error of at most `goal` and the fewest keys, or the best of those up to `most` keys.

    Where a smooth piece takes many keys, a group graded to where its error is largest is tried as well: f may have a
    singular point nearby, off the real line or beyond an end.
    """
    goal = max(goal, _reachable(piece, goal))
    failed, best = 0, None
    for size in SIZES:
        if size > most and failed >= most:
            break
        group = search(piece, min(size, most), goal, best)
        if group.error > goal and FEW < group.p <= MANY and not piece.points:
            graded = search(replace(piece, points=(_worst_place(group),)), group.p, goal)
            if graded.error < 0.5 * group.error:
                group, piece = graded, graded.piece
        if group.error <= goal:
            return _fewer(group, failed, goal)
        if best is not None and (_is_floor(group, best) or _is_slow(group, best, goal)):
            break
        best = group if best is None or group.error < best.error else best
        failed = min(size, most)
    assert best is not None
    return best


def _reachable(piece: Piece, goal: float) -> float:
    """What rounding leaves to a graded group: scores grow like width/t0, and with them their errors.

    t0 is as small as the goal makes it, so this asks for the least goal with width/t0(goal)·u below it.
    """
    if not piece.points:
        return 0.0
    size = float(piece.limits.max())
    while goal < size and _inner_scale(piece, goal) * goal < ROUNDING * piece.unit * piece.width * size:
        goal *= 1.25
    return goal


def _worst_place(group: Group) -> float:
    """Where the error is largest; next to an end, that end."""
    piece = group.piece
    x, f = piece.sample(group.anchors, 1.0)
    worst = float(x[np.argmax(np.abs(group.keys(x) - f).max(axis=1))])
    end = piece.lo if worst < piece.lo / 2 + piece.hi / 2 else piece.hi
    return end if abs(worst - end) <= AT_END * piece.width else worst


def _fewer(group: Group, failed: int, goal: float) -> Group:
    """Bisection between a size that failed and the size of the group, to 5 % of many."""
    while group.p - failed > 1 + group.p // 20:
        size = (group.p + failed) // 2
        smaller = search(group.piece, size, goal, group)
        if smaller.error <= goal:
            group = smaller
        else:
            failed = size
    return group


def _is_floor(group: Group, before: Group) -> bool:
    """Whether what is left is rounding: more keys do not help any more."""
    return group.error > 0.5 * before.error and before.error < 2.0**-36 * float(group.piece.limits.max())


def _is_slow(group: Group, before: Group, goal: float) -> bool:
    """Whether the error of many keys falls like a power, and would be far from the goal even for the largest group.

    An error that does not fall at all says nothing: there are too few keys yet for the waves of f.
    """
    if group.p <= MANY or not 0.05 < group.error / before.error < 0.95:
        return False
    power = math.log(before.error / group.error) / math.log(group.p / before.p)
    return group.error * (group.p / LARGEST_GROUP) ** power > 10 * goal


def _starts(piece: Piece, num_keys: int, goal: float | None, near: Group | None) -> Iterator[Shape]:
    """The shape of a group of another size, with as many anchors outside, and a coarse net."""
    if near is not None and near.shape and bool(near.piece.points) == bool(piece.points):
        steps = max(0.5, math.exp(near.shape[1]) + num_keys - near.p)
        yield near.shape[0], math.log(steps), *near.shape[2:]
    if not piece.points:
        depth, step = (4.0, 0.5) if num_keys <= FEW else (1.5, 0.5) if num_keys <= MANY else (0.375, 0.125)
        top = math.log2(num_keys)
        for c in (0.2, 0.45, 0.7, 1.0, 1.4, 2.0) if num_keys <= FEW else (0.2, 0.4, 0.8):
            for octave in np.arange(max(-2.0, top - depth), top + 0.1, step):
                yield math.log(c), float(octave * math.log(2)), 0.0
        return
    likely = 0.1 * math.exp(-2.3 * math.sqrt(num_keys)) * float(piece.limits.max())
    guess = _inner_scale(piece, likely if goal is None else goal)
    factors = (1.0,) if num_keys > MANY else (1.0, 0.2, 5.0) if goal is not None else (1.0, 0.2, 5.0, 0.02, 50.0, 500.0)
    for factor in factors:
        for c in (0.2, 0.4, 0.8):
            for outside in (0.5, 2.0) if num_keys <= FEW else (1.0,):
                for u in (0.0, 2.0):
                    steps = max(0.5, num_keys - 1 - outside)
                    yield math.log(c), math.log(steps), 0.0, math.log(factor * guess), u


def _inner_scale(piece: Piece, goal: float) -> float:
    """The distance from a singular point within which f bends by less than `goal`: below it no anchors are needed."""
    scales = piece.width * 2.0 ** -np.arange(1.0, 90.0)
    least = piece.width
    for kappa in piece.points:
        for first, last in ((-1.0, 1.0), (0.0, 2.0), (-2.0, 0.0)):
            t = scales[(kappa + first * scales >= piece.lo) & (kappa + last * scales <= piece.hi)]
            if len(t):
                ends = piece.f(kappa + first * t) + piece.f(kappa + last * t)
                bend = np.abs(ends - 2 * piece.f(kappa + 0.5 * (first + last) * t)).max(axis=1)
                least = min(least, float(t[bend > goal].min(initial=piece.width)))
    return least


def _downhill(start: Group, goal: float | None) -> Group:
    """Along c, the spacing, c against the spacing, the shift, and t0."""
    piece, p = start.piece, start.p
    axes = np.zeros((5 if piece.points else 4, len(start.shape)))
    axes[0, :2], axes[1, 1], axes[2, 2], axes[-1, 0] = (1, -1), 1, 2, 1
    if piece.points:
        axes[3, 3] = 3

    def attempt(shape: Shape) -> Group | None:
        return _try(piece, p, shape, 2, goal) if _is_legal(shape, p) else None

    return descend(start, attempt, axes, COARSE, FINE if p <= FEW else 4 * FINE, goal or 0.0)


def _is_legal(shape: Shape, num_keys: int) -> bool:
    is_wide = LEAST_STEPS <= math.exp(shape[1]) <= num_keys + 1
    return is_wide and CURVATURES[0] <= math.exp(shape[0]) <= CURVATURES[1] and abs(shape[2]) < num_keys
