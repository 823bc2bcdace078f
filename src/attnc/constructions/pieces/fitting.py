"""A function of one variable as smooth pieces, each with a group of keys, joined into one stored head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.pieces.group_search import search, smallest
from attnc.constructions.pieces.groups import Group, Piece, constant_group, graded_points
from attnc.constructions.pieces.kinks import Kink
from attnc.constructions.pieces.switching import join, steepness
from attnc.constructions.unary.keys import Function
from attnc.constructions.unary.minimax import chebyshev, fit_values
from attnc.constructions.unary.program import StoredHead, store, worst_error
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float

EVERYWHERE = {"float64": 4001, "float32": 40_001}
"""Points all over the box beside those at kinks and anchors; more where the error is the noise of rounding."""
SLACK = 0.97
"""Of eps, what a sample may show: its points are not everywhere."""
EFFORTS = ((0.95, 1.0), (0.5, 1.0), (0.5, 0.4), (0.5, 0.2))
"""What the fits may take of eps, and how much of the largest value allowed. The rest of eps is for the switches."""
AFFORDABLE = 160
"""Up to so many keys the values of all of them are solved for together."""
MANY = 12
"""With more pieces than that, a piece of the size of its neighbour is taken without looking for a smaller one."""


@dataclass(frozen=True, eq=False)
class Line:
    """f on the box, where it bends, and how large the values of keys may be."""

    f: Function
    box: Box
    kinks: tuple[Kink, ...]
    max_value: float
    dtype: str
    report: Callable[[float], None] | None = None

    @property
    def lo(self) -> float:
        return float(self.box.lo[0])

    @property
    def hi(self) -> float:
        return float(self.box.hi[0])

    @cached_property
    def limits(self) -> Float[np.ndarray, " outputs"]:
        inside = [kink.x for kink in self.kinks]
        return self.max_value * np.abs(self.f(np.concatenate([chebyshev(self.lo, self.hi, 2049), inside]))).max(axis=0)

    @cached_property
    def pieces(self) -> list[Piece]:
        edges = [self.lo, *(kink.x for kink in self.kinks if self.lo < kink.x < self.hi), self.hi]
        return [self.piece(lo, hi) for lo, hi in itertools.pairwise(edges)]

    def piece(self, lo: float, hi: float) -> Piece:
        """Graded to the singular points in it."""
        points = tuple(kink.x for kink in self.kinks if kink.is_singular and lo <= kink.x <= hi)
        return Piece(self.f, lo, hi, self.limits, points, UNIT_ROUNDOFF[self.dtype])

    @property
    def centre(self) -> float | None:
        """The origin of y: the only kink, or the singular one. There x − κ is exact."""
        singular = [kink.x for kink in self.kinks if kink.is_singular] or [kink.x for kink in self.kinks]
        return singular[0] if len(singular) == 1 else None


@dataclass(frozen=True, eq=False)
class Fitted:
    head: StoredHead
    groups: tuple[Group, ...]
    error: float  # the largest that the search for one found
    at: float

    @property
    def p(self) -> int:
        return self.head.keys.p


def fit_within(line: Line, eps: float, most: int) -> Fitted:
    """The fewest keys with an error of at most eps, or the best that was found.

    Where rounding is in the way: more of eps for the switches, whose scores are then smaller, and smaller values.
    """
    tried: list[Fitted] = []
    is_met = True
    for share, smaller in EFFORTS:
        if not is_met and smaller == 1.0:
            continue  # what rounding forbids, a smaller share does not bring
        careful = replace(line, max_value=max(1.0, smaller * line.max_value))
        groups = _groups_within(careful, share * eps, most)
        is_met = max(group.error for group in groups) <= share * eps
        for allowed in (SLACK * eps, 1.8 * eps):  # what is solved again after joining halves the error at a kink
            tried.append(_joined(careful, groups, allowed))
            if tried[-1].error <= SLACK * eps:
                return tried[-1]
            if not is_met or len(groups) == 1:
                break
        if sum(group.p for group in groups) >= most:
            tried += [fit_size(line, most)] if len(line.pieces) <= most <= AFFORDABLE else []
            break
        if len(groups) > 1:
            tried.append(_best_joined(careful, groups))
        elif not is_met:
            break
    return min(tried, key=lambda one: one.error)


def fit_size(line: Line, num_keys: int) -> Fitted:
    """The smallest error that is found with this many keys."""
    candidates = [_groups_of_size(line, num_keys)] if num_keys >= len(line.pieces) else []
    if num_keys <= 2 * len(line.pieces) and len(line.pieces) > 1:
        whole, kinks = line.piece(line.lo, line.hi), tuple(kink.x for kink in line.kinks)
        candidates += [[search(replace(whole, points=points), num_keys)] for points in ((), kinks)]
    best = min((_best_joined(line, groups) for groups in candidates), key=lambda one: one.error)
    if len(best.groups) > 1 and best.error > 10 * max(group.error for group in best.groups) and line.max_value > 2:
        # The switches, not the fits, are what is left: rounding is felt less where values are smaller.
        careful = replace(line, max_value=2.0)
        best = min(best, _best_joined(careful, _groups_of_size(careful, num_keys)), key=lambda one: one.error)
    if line.report is not None:
        line.report(1.0)
    return best


def _groups_within(line: Line, goal: float, most: int) -> list[Group]:
    groups: list[Group] = []
    for i, piece in enumerate(line.pieces):
        room = max(1, most - sum(group.p for group in groups) - (len(line.pieces) - i - 1))
        group = None
        if groups and len(line.pieces) > MANY and 1 < groups[-1].p <= room:
            group = search(piece, groups[-1].p, goal, groups[-1])
        groups.append(group if group is not None and group.error <= goal else smallest(piece, goal, room))
        if line.report is not None:
            line.report((i + 1) / len(line.pieces))
    return _merged(line, groups, goal)


def _merged(line: Line, groups: list[Group], goal: float) -> list[Group]:
    """Neighbours as one group where that takes fewer keys: at kinks too weak to matter, and at singular ones."""
    i = 0
    while i + 1 < len(groups) and len(groups) <= MANY:
        left, right = groups[i], groups[i + 1]
        piece = line.piece(left.piece.lo, right.piece.hi)
        size = left.p + right.p - 1
        together = constant_group(piece) if size == 1 else search(piece, size, goal, left)
        if together.error <= goal:
            groups[i : i + 2] = [smallest(piece, goal, size)]
        else:
            i += 1
    return groups


def _groups_of_size(line: Line, num_keys: int) -> list[Group]:
    """More keys for the worst piece, again and again, in ever smaller portions."""
    groups = [constant_group(piece) for piece in line.pieces]
    left = num_keys - len(groups)
    while left > 0:
        worst = max(range(len(groups)), key=lambda i: groups[i].error)
        group = groups[worst]
        portion = left if len(groups) == 1 else max(1, left // (3 * len(groups)))
        larger = search(group.piece, group.p + portion, near=group)
        if larger.error > 0.9 * group.error and portion == 1 < left:  # one more may be of no use where two are
            portion, larger = 2, search(group.piece, group.p + 2, near=group)
        groups[worst], left = larger, left - portion
    return groups


def _best_joined(line: Line, groups: list[Group]) -> Fitted:
    """Switches as steep as rounding allows: the steeper, the larger the scores."""
    least = max(max(group.error for group in groups), UNIT_ROUNDOFF[line.dtype] * float(line.limits.max()))
    if len(groups) == 1:
        return _joined(line, groups, least)
    best = _joined(line, groups, 1.01 * least)
    for factor in (1.1, 1.4, 2.0, 4.0, 10.0, 40.0, 200.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
        fitted = _joined(line, groups, factor * least)
        if fitted.error > 4 * best.error:
            break
        best = min(best, fitted, key=lambda one: one.error)
    return best


def _joined(line: Line, groups: Sequence[Group], allowed: float) -> Fitted:
    """One head: joined, stored, its values solved again for the keys as they are stored, and its error looked for."""
    steep = [steepness(left, right, allowed) for left, right in itertools.pairwise(groups)]
    head = store(join(groups, steep), line.box, line.dtype, line.centre)
    heads = [head]
    if head.keys.p <= AFFORDABLE:
        x = _sample(line, groups, steep, 5)
        refit = fit_values(head.weights(x), line.f(x), line.limits, 12, 0.5 * allowed)
        heads.append(head.with_values(refit.values))
    dense = np.linspace(line.lo, line.hi, EVERYWHERE[line.dtype])
    fine = np.union1d(_sample(line, groups, steep, 14), dense)
    errors = [worst_error(candidate, line.f, fine) for candidate in heads]
    (error, at), head = min(zip(errors, heads, strict=True), key=lambda pair: pair[0][0])
    return Fitted(head, tuple(groups), error, at)


def _sample(line: Line, groups: Sequence[Group], steep: Sequence[float], per_gap: int) -> Float[np.ndarray, " points"]:
    """Dense between anchors, ever denser towards kinks and singular points."""
    parts = [chebyshev(line.lo, line.hi, 16 * per_gap)]
    for i, group in enumerate(groups):
        piece = group.piece
        t0 = [math.exp(group.shape[3])] if len(group.shape) > 3 else []
        t0 += [16 / B for B in (*steep[max(0, i - 1) : i], *steep[i : i + 1])]
        ends = {end for end in (piece.lo, piece.hi) if line.lo < end < line.hi}
        points = tuple(sorted({*piece.points, *ends}))
        parts.append(graded_points(piece.lo, piece.hi, points, group.anchors, max(t0, default=piece.width), per_gap))
        parts.append(chebyshev(piece.lo, piece.hi, per_gap * (group.p + 4)))
    return np.unique(np.concatenate(parts))
