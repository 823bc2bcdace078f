"""Groups of keys: each computes one smooth piece of a function of one variable, or is graded to singular points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.fitting.minimax import Function, SolvedValues, chebyshev, fit_values
from attnc.constructions.fitting.search import Shape, descend, fewest, ladder
from attnc.ir.soft_head import SoftHead
from attnc.numerics.rounding import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Grading:
    """Anchors that crowd at given points, and the scores that select among them.

    A density ρ is the number of anchors per unit of length. Equidistribute them, and let the scores be the tangents at
    the anchors of a convex φ with φ″ = cρ²: then a step from one anchor to the next looks the same everywhere, and the
    weights about an anchor are those of a Gaussian softmax whose spacing is the local h = 1/ρ. Here

    ρ(t) ∝ 1/(t0 + |t − κ|) + u/(hi − lo), κ the nearest of `points`; without points ρ is constant.

    Near κ the spacing is that of t = κ ± t0(e^{|s|} − 1), s uniform; u > 0 keeps it from growing too much far away.
    Everything has a closed form between the middles of neighbouring points: with r = |t − κ|, l = log(1 + r/t0) and
    U = u/(hi − lo), integrated from κ,

        ∫ρ = l + Ur,   ∫ρ² = 1/t0 − 1/(t0 + r) + 2Ul + U²r,   ∫∫ρ² = r/t0 − l + 2U((t0 + r)l − r) + U²r²/2.
    """

    lo: float
    hi: float
    points: tuple[float, ...] = ()
    t0: float = 1.0
    u: float = 0.0

    def tangents(
        self, num_anchors: int, c: float, steps: float, shift: float = 0.0
    ) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
        """(slopes, offsets, anchors). `steps` spacings, a real number, fill [lo, hi]; the other anchors
        lie outside, as many on either side, or 2·shift more on the right."""
        number = np.arange(num_anchors) - (num_anchors - 1) / 2 + shift
        if not self.points:
            h = (self.hi - self.lo) / steps
            middle, off = 0.5 * (self.lo + self.hi), h * number
            slopes = c * off / h**2
            return slopes, -slopes * middle - c * off**2 / (2 * h**2), middle + off
        first, last = self._count(np.array([self.lo, self.hi]))
        density = steps / (last - first)  # anchors per unit of ∫ρ
        anchors = self._place(0.5 * (first + last) + number / density)
        height, slope = self._phi(anchors)
        slopes = c * density**2 * slope
        return slopes, c * density**2 * height - slopes * anchors, anchors

    @property
    def _U(self) -> float:
        return self.u / (self.hi - self.lo)

    @cached_property
    def _kappa(self) -> Float[np.ndarray, " points"]:
        return np.array(self.points)

    @cached_property
    def _middles(self) -> Float[np.ndarray, " gaps"]:
        return (self._kappa[1:] + self._kappa[:-1]) / 2

    @cached_property
    def _at_points(self) -> tuple[Float[np.ndarray, " points"], ...]:
        """∫ρ, φ′ and φ (for c = 1) at the points, from the first one on: two half gaps at a time."""
        count, slope, height = [0.0], [0.0], [0.0]
        for gap in np.diff(self._kappa):
            half_count, half_slope, _ = (float(part[0]) for part in self._from_point(np.array([gap / 2])))
            height.append(height[-1] + (slope[-1] + half_slope) * gap)  # ρ is symmetric about the middle of a gap
            slope.append(slope[-1] + 2 * half_slope)
            count.append(count[-1] + 2 * half_count)
        return np.array(count), np.array(slope), np.array(height)

    def _from_point(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """∫ρ, ∫ρ², ∫∫ρ² over a distance r from a point."""
        t0, U = self.t0, self._U
        log = np.log1p(r / t0)
        first = r / (t0 * (t0 + r)) + 2 * U * log + U**2 * r
        second = r / t0 - log + 2 * U * ((t0 + r) * log - r) + U**2 * r**2 / 2
        return log + U * r, first, second

    def _count(self, t: np.ndarray) -> np.ndarray:
        nearest = np.searchsorted(self._middles, t)
        off = t - self._kappa[nearest]
        return self._at_points[0][nearest] + np.sign(off) * self._from_point(np.abs(off))[0]

    def _phi(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nearest = np.searchsorted(self._middles, t)
        off = t - self._kappa[nearest]
        _, slope, height = self._from_point(np.abs(off))
        _, base_slope, base = self._at_points
        return base[nearest] + base_slope[nearest] * off + height, base_slope[nearest] + np.sign(off) * slope

    def _place(self, wanted: np.ndarray) -> np.ndarray:
        """The t with ∫ρ = wanted: on each side of a point l + Ur = s, by Newton's method in l from above."""
        counts = self._at_points[0]
        nearest = np.searchsorted((counts[1:] + counts[:-1]) / 2, wanted)
        off = wanted - counts[nearest]
        s = np.abs(off)
        W = self._U * self.t0  # l + W(e^l − 1) = s is convex in l, and l ≤ s
        log = s if W == 0 else np.minimum(s, np.log1p(s / W))
        if W > 0:
            for _ in range(60):
                grown = W * np.exp(log)
                step = (log + grown - W - s) / (1 + grown)
                log = log - step
                if np.abs(step).max(initial=0.0) <= 1e-14 * (1 + float(log.max(initial=0.0))):
                    break
        return self._kappa[nearest] + np.sign(off) * self.t0 * np.expm1(log)


GROUP_PASSES = 8
"""Passes of the reweighted least squares of a thorough fit."""


@dataclass(frozen=True, eq=False)
class SmoothPiece:
    """f on [lo, hi]; `points` are where it is not smooth, at the ends or inside."""

    f: Function
    lo: float
    hi: float
    limits: Float[np.ndarray, " outputs"]  # of the values
    points: tuple[float, ...] = ()
    unit: float = UNIT_ROUNDOFF["float64"]  # of the arithmetic that the head runs in
    _samples: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, default_factory=dict)  # by number of keys

    @property
    def width(self) -> float:
        return self.hi - self.lo

    def sample(self, anchors: np.ndarray, t0: float) -> tuple[np.ndarray, np.ndarray]:
        """Points dense enough for these anchors, and f there."""
        if not self.points:
            if len(anchors) not in self._samples:
                x = chebyshev(self.lo, self.hi, (6 if len(anchors) <= 64 else 4) * len(anchors) + 24)
                self._samples[len(anchors)] = x, self.f(x)
            return self._samples[len(anchors)]
        x = graded_points(self.lo, self.hi, self.points, anchors, t0, 6)
        return x, self.f(x)


@dataclass(frozen=True, eq=False)
class KeyGroup:
    piece: SmoothPiece
    keys: SoftHead[np.ndarray]
    anchors: Float[np.ndarray, " p"]
    error: float  # the largest on the sample of the piece
    shape: Shape  # (log c, log steps, shift), for a graded group (…, log t0, u), and () for a constant

    @property
    def p(self) -> int:
        return self.keys.num_keys


def graded_points(
    lo: float, hi: float, points: tuple[float, ...], anchors: np.ndarray, t0: float, per_gap: int
) -> Float[np.ndarray, " sample"]:
    """Chebyshev points in every gap between anchors, and ever closer to the singular points."""
    near = t0 * 10.0 ** -np.arange(0.0, 16.1, 0.5)
    marks = np.concatenate([anchors, [lo, hi], np.array(points)])
    marks = np.unique(marks[(marks >= lo) & (marks <= hi)])
    inner = chebyshev(0.0, 1.0, per_gap)[1:-1]
    between = (marks[:-1, None] + np.diff(marks)[:, None] * inner).ravel()
    close = np.concatenate([kappa + side * near for kappa in points for side in (-1.0, 1.0)] or [between])
    x = np.concatenate([marks, between, close, chebyshev(lo, hi, 4 * per_gap)])
    return np.unique(x[(x >= lo) & (x <= hi)])


def make_group(
    piece: SmoothPiece, num_keys: int, shape: Shape, passes: int = GROUP_PASSES, goal: float = 0.0
) -> KeyGroup:
    """The keys of this shape with their values solved."""
    c, steps, shift = math.exp(shape[0]), math.exp(shape[1]), shape[2]
    t0, u = (math.exp(shape[3]), shape[4]) if piece.points else (1.0, 0.0)
    slopes, offsets, anchors = Grading(piece.lo, piece.hi, piece.points, t0, u).tangents(num_keys, c, steps, shift)
    x, f = piece.sample(anchors, t0)
    head = SoftHead.of_one_variable(slopes, offsets, np.zeros(num_keys))
    fit = fit_values(head.weights(x[:, None]), f, piece.limits, passes, goal)
    return KeyGroup(piece, replace(head, values=fit.values), anchors, fit.error, shape)


def constant_group(piece: SmoothPiece) -> KeyGroup:
    """One key: the middle of the range."""
    x = graded_points(piece.lo, piece.hi, piece.points, np.linspace(piece.lo, piece.hi, 17), piece.width, 6)
    f = piece.f(x)
    least, most = f.min(axis=0), f.max(axis=0)
    fit = SolvedValues(
        np.clip(0.5 * least + 0.5 * most, -piece.limits, piece.limits)[None], float((most - least).max() / 2)
    )
    zero, middle = np.zeros(1), np.array([0.5 * piece.lo + 0.5 * piece.hi])
    return KeyGroup(piece, SoftHead(zero[:, None], zero, fit.values), middle, fit.error, ())


LARGEST_GROUP = 512
"""Largest number of keys of one group: the cost of a fit grows with its cube."""
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, LARGEST_GROUP)
"""Numbers of keys that are tried in turn: each is about 1.4 times the one before."""
FIRST_STEP, LAST_STEP = 0.17, 0.012
"""The first and the last step of the way downhill."""
DOWNHILL_FACTOR = 300.0
"""Errors up to this multiple of the goal are still lowered by steps downhill; larger ones seldom come down to it."""
FEW_KEYS, MANY_KEYS = 16, 64
"""Up to 16 keys the search is thorough, as fits are quick; beyond 64 it tries few shapes."""
AT_END = 1 / 16
"""Share of the width of a piece: an error this close to an end comes from a singular point beyond the end."""
CURVATURES, LEAST_STEPS = (0.02, 6.0), 0.1
"""The range of c, and the least number of spacings that fill a piece, within which the search stays."""
GRADED_ROUNDING = 0.0007
"""The rounding of a graded group's output, in units of u × largest score × limit of the values (measured)."""


def search_group(
    piece: SmoothPiece, num_keys: int, goal: float | None = None, near: KeyGroup | None = None
) -> KeyGroup:
    """The first group of this size with an error of at most `goal` that is found, or the best.

    The search is over the curvature c, the number of spacings that fill the piece, the shift of the anchors, and for a
    graded group t0 and u. The error as a function of these has narrow valleys, so the search is coarse at first and
    then goes downhill from the best places.
    """
    if num_keys == 1:
        return constant_group(piece)
    enough = 2.0**-50 * float(piece.limits.max()) if goal is None else goal
    found: list[KeyGroup] = []
    for shape in _starts(piece, num_keys, goal, near):
        found.append(_try(piece, num_keys, shape, 1, goal))
        if found[-1].error <= enough:
            return found[-1]
    found.sort(key=lambda group: group.error)
    best, few = found[0], num_keys <= FEW_KEYS
    near_enough = (4.0 if few else 2.5) if piece.points else DOWNHILL_FACTOR
    if num_keys <= MANY_KEYS and (goal is None or best.error <= near_enough * goal):
        for start in found[: 1 if not few else 2 if piece.points else 3]:
            end = _downhill(start, goal)
            best = min(best, end, key=lambda group: group.error)
            if best.error <= enough:
                return best
    return best if goal is not None else make_group(piece, num_keys, best.shape, 4 * GROUP_PASSES)


def _try(piece: SmoothPiece, num_keys: int, shape: Shape, passes: int, goal: float | None) -> KeyGroup:
    """A quick fit; a thorough one where that may reach the goal."""
    if goal is None:
        return make_group(piece, num_keys, shape, passes)
    group = make_group(piece, num_keys, shape, passes, goal)
    if goal < group.error <= 1.5 * goal or (passes == 1 and goal < group.error <= 4 * goal):
        return make_group(piece, num_keys, shape, GROUP_PASSES, goal)
    return group


def smallest_group(piece: SmoothPiece, goal: float, most: int) -> KeyGroup:
    """A group with an error of at most `goal` and the fewest keys, or the best of those up to `most` keys.

    Where a smooth piece takes many keys, a group graded to where its error is largest is tried as well: f may have a
    singular point nearby, off the real line or beyond an end.
    """
    goal = max(goal, _reachable(piece, goal))

    def attempt(size: int, before: Sequence[KeyGroup]) -> KeyGroup:
        near = min(before, key=lambda group: group.error, default=None)
        same = before[-1].piece if before else piece  # graded already, if that helped before
        group = search_group(same, size, goal, near)
        is_growing = near is None or near.error > goal
        if is_growing and group.error > goal and FEW_KEYS < size <= MANY_KEYS and not same.points:
            graded = search_group(replace(same, points=(_worst_place(group),)), size, goal)
            return graded if graded.error < 0.5 * group.error else group
        return group

    def gives_up(failed: Sequence[KeyGroup]) -> bool:
        if len(failed) < 2:
            return False
        best = min(failed[:-1], key=lambda group: group.error)
        return _is_floor(failed[-1], best) or _is_slow(failed[-1], best, goal)

    sizes = ladder(GROUP_SIZES, min(most, LARGEST_GROUP))
    found = fewest(sizes, attempt, goal, resolution=20, gives_up=gives_up)
    if found.met is not None:
        return found.met
    return min(found.failed[: -1 if found.gave_up else None], key=lambda group: group.error)


def _reachable(piece: SmoothPiece, goal: float) -> float:
    """The least error that rounding allows a graded group: scores grow like width/t0, and with them their errors.

    t0 is as small as the goal makes it, so this asks for the least goal with width/t0(goal)·u below it.
    """
    if not piece.points:
        return 0.0
    size = float(piece.limits.max())
    while goal < size and _inner_scale(piece, goal) * goal < GRADED_ROUNDING * piece.unit * piece.width * size:
        goal *= 1.25
    return goal


def _worst_place(group: KeyGroup) -> float:
    """Where the error is largest; next to an end, that end."""
    piece = group.piece
    x, f = piece.sample(group.anchors, 1.0)
    worst = float(x[np.argmax(np.abs(group.keys(x[:, None]) - f).max(axis=1))])
    end = piece.lo if worst < piece.lo / 2 + piece.hi / 2 else piece.hi
    return end if abs(worst - end) <= AT_END * piece.width else worst


def _is_floor(group: KeyGroup, before: KeyGroup) -> bool:
    """Whether the rest of the error is rounding: more keys do not help any more."""
    return group.error > 0.5 * before.error and before.error < 2.0**-36 * float(group.piece.limits.max())


def _is_slow(group: KeyGroup, before: KeyGroup, goal: float) -> bool:
    """Whether the error of many keys falls like a power, and would be far from the goal even for the largest group.

    An error that does not fall at all proves nothing: there may be too few keys for the waves of f.
    """
    if group.p <= MANY_KEYS or not 0.05 < group.error / before.error < 0.95:
        return False
    power = math.log(before.error / group.error) / math.log(group.p / before.p)
    return group.error * (group.p / LARGEST_GROUP) ** power > 10 * goal


def _starts(piece: SmoothPiece, num_keys: int, goal: float | None, near: KeyGroup | None) -> Iterator[Shape]:
    """The shape of a group of another size, with as many anchors outside, and a coarse net."""
    if near is not None and near.shape and bool(near.piece.points) == bool(piece.points):
        steps = max(0.5, math.exp(near.shape[1]) + num_keys - near.p)
        yield near.shape[0], math.log(steps), *near.shape[2:]
    if not piece.points:
        depth, step = (4.0, 0.5) if num_keys <= FEW_KEYS else (1.5, 0.5) if num_keys <= MANY_KEYS else (0.375, 0.125)
        top = math.log2(num_keys)
        for c in (0.2, 0.45, 0.7, 1.0, 1.4, 2.0) if num_keys <= FEW_KEYS else (0.2, 0.4, 0.8):
            for octave in np.arange(max(-2.0, top - depth), top + 0.1, step):
                yield math.log(c), float(octave * math.log(2)), 0.0
        return
    likely = 0.1 * math.exp(-2.3 * math.sqrt(num_keys)) * float(piece.limits.max())
    guess = _inner_scale(piece, likely if goal is None else goal)
    factors = (
        (1.0,) if num_keys > MANY_KEYS else (1.0, 0.2, 5.0) if goal is not None else (1.0, 0.2, 5.0, 0.02, 50.0, 500.0)
    )
    for factor in factors:
        for c in (0.2, 0.4, 0.8):
            for outside in (0.5, 2.0) if num_keys <= FEW_KEYS else (1.0,):
                for u in (0.0, 2.0):
                    steps = max(0.5, num_keys - 1 - outside)
                    yield math.log(c), math.log(steps), 0.0, math.log(factor * guess), u


def _inner_scale(piece: SmoothPiece, goal: float) -> float:
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


def _downhill(start: KeyGroup, goal: float | None) -> KeyGroup:
    """Along c, the spacing, c against the spacing, the shift, and t0."""
    piece, p = start.piece, start.p
    axes = np.zeros((5 if piece.points else 4, len(start.shape)))
    axes[0, :2], axes[1, 1], axes[2, 2], axes[-1, 0] = (1, -1), 1, 2, 1
    if piece.points:
        axes[3, 3] = 3

    def attempt(shape: Shape) -> KeyGroup | None:
        return _try(piece, p, shape, 2, goal) if _is_legal(shape, p) else None

    return descend(start, attempt, axes, FIRST_STEP, LAST_STEP if p <= FEW_KEYS else 4 * LAST_STEP, goal or 0.0)


def _is_legal(shape: Shape, num_keys: int) -> bool:
    is_wide = LEAST_STEPS <= math.exp(shape[1]) <= num_keys + 1
    return is_wide and CURVATURES[0] <= math.exp(shape[0]) <= CURVATURES[1] and abs(shape[2]) < num_keys
