"""Groups of keys: each group computes one piece of a function of one variable, which may have singular points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.search import Shape, descend, fewest, ladder
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF


@dataclass(frozen=True)
class Grading:
    """Anchors that are denser near given points, and the scores that select among the anchors.

    The density ρ is the number of anchors per unit of length. The scores are the tangents, at the anchors, of a convex
    φ with φ″ = cρ². In units of the local spacing h = 1/ρ, neighbouring anchors then look the same everywhere, and the
    weights about an anchor are those of a Gaussian softmax with spacing h. Here

    ρ(t) ∝ 1/(t0 + |t − κ|) + u/(hi − lo), κ the nearest of `points`; without points ρ is constant.

    Near κ the anchors are at κ ± t0(e^{|s|} − 1) for equidistant s. With u > 0 the spacing grows less far from κ.
    Between the middles of neighbouring points the integrals have closed forms. With r = |t − κ|, l = log(1 + r/t0) and
    U = u/(hi − lo) they are, integrated from κ,

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
        """Return (slopes, offsets, anchors).

        [lo, hi] is `steps` spacings wide, which need not be a whole number. The other anchors lie outside: equally many
        on both sides for shift = 0, and 2·shift more on the right otherwise.
        """
        number = np.arange(num_anchors) - (num_anchors - 1) / 2 + shift
        if not self.points:
            h = (self.hi - self.lo) / steps
            middle, off = 0.5 * (self.lo + self.hi), h * number
            slopes = c * off / h**2
            return slopes, -slopes * middle - c * off**2 / (2 * h**2), middle + off
        first, last = self._integrals(np.array([self.lo, self.hi]))[0]
        density = steps / (last - first)  # anchors per unit of ∫ρ
        anchors = self._place(0.5 * (first + last) + number / density)
        _, slope, height = self._integrals(anchors)
        slopes = c * density**2 * slope
        return slopes, c * density**2 * height - slopes * anchors, anchors

    @property
    def _U(self) -> float:
        return self.u / (self.hi - self.lo)

    @cached_property
    def _kappa(self) -> Float[np.ndarray, " points"]:
        return np.array(self.points)

    @cached_property
    def _at_points(self) -> tuple[Float[np.ndarray, " points"], ...]:
        """∫ρ, φ′ and φ (for c = 1) at the points, integrated from the first point on."""
        gaps = np.diff(self._kappa)
        half_count, half_slope, _ = self._from_point(gaps / 2)
        count, slope = (np.concatenate([[0.0], np.cumsum(2 * half)]) for half in (half_count, half_slope))
        rises = (slope[:-1] + half_slope) * gaps  # ρ is symmetric about the middle of a gap
        return count, slope, np.concatenate([[0.0], np.cumsum(rises)])

    def _from_point(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """∫ρ, ∫ρ² and ∫∫ρ² over a distance r from a point."""
        t0, U = self.t0, self._U
        log = np.log1p(r / t0)
        first = r / (t0 * (t0 + r)) + 2 * U * log + U**2 * r
        second = r / t0 - log + 2 * U * ((t0 + r) * log - r) + U**2 * r**2 / 2
        return log + U * r, first, second

    def _integrals(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """∫ρ, φ′ and φ (for c = 1) at t."""
        nearest = np.searchsorted((self._kappa[1:] + self._kappa[:-1]) / 2, t)
        off = t - self._kappa[nearest]
        count, slope, height = self._from_point(np.abs(off))
        at_count, at_slope, at_height = (base[nearest] for base in self._at_points)
        side = np.sign(off)
        return at_count + side * count, at_slope + side * slope, at_height + at_slope * off + height

    def _place(self, wanted: np.ndarray) -> np.ndarray:
        """Solve ∫ρ = wanted for t: on each side of a point l + Ur = s, by Newton's method in l from above."""
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
"""Number of passes of the reweighted least squares in a thorough fit. Chosen, not measured."""


@dataclass(frozen=True, eq=False)
class SmoothPiece:
    """A function f on [lo, hi]. `points` are the places where f is not smooth, at the ends or inside."""

    f: Function
    lo: float
    hi: float
    limits: Float[np.ndarray, " outputs"]  # the largest |value| of a key, per output
    points: tuple[float, ...] = ()
    unit: float = UNIT_ROUNDOFF["float64"]  # the unit roundoff of the arithmetic that the head runs in
    _samples: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, default_factory=dict)  # by number of keys

    @property
    def width(self) -> float:
        return self.hi - self.lo

    def sample(self, anchors: np.ndarray, t0: float) -> tuple[np.ndarray, np.ndarray]:
        """Sample points, dense enough for these anchors, and the values of f there."""
        if not self.points:
            if len(anchors) not in self._samples:
                x = chebyshev(self.lo, self.hi, (6 if len(anchors) <= 64 else 4) * len(anchors) + 24)
                self._samples[len(anchors)] = x, self.f(x)
            return self._samples[len(anchors)]
        x = graded_points(self.lo, self.hi, self.points, anchors, t0, 6)
        return x, self.f(x)


@dataclass(frozen=True, eq=False)
class KeyGroup:
    """The keys that compute one piece, and their error."""

    piece: SmoothPiece
    keys: SoftHead[np.ndarray]
    anchors: Float[np.ndarray, " p"]
    error: float  # the largest error on the sample of the piece
    shape: Shape  # (log c, log steps, shift), for a graded group (…, log t0, u), and () for a constant

    @property
    def p(self) -> int:
        return self.keys.num_keys


def graded_points(
    lo: float, hi: float, points: tuple[float, ...], anchors: np.ndarray, t0: float, per_gap: int
) -> Float[np.ndarray, " sample"]:
    """Chebyshev points in every gap between anchors, and points that approach the singular points geometrically."""
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
    """Make the keys of this shape and solve for their values."""
    c, steps, shift = math.exp(shape[0]), math.exp(shape[1]), shape[2]
    t0, u = (math.exp(shape[3]), shape[4]) if piece.points else (1.0, 0.0)
    slopes, offsets, anchors = Grading(piece.lo, piece.hi, piece.points, t0, u).tangents(num_keys, c, steps, shift)
    x, f = piece.sample(anchors, t0)
    head = SoftHead.of_one_variable(slopes, offsets, np.zeros(num_keys))
    fit = fit_values(head.weights(x[:, None]), f, piece.limits, passes, goal)
    return KeyGroup(piece, replace(head, values=fit.values), anchors, fit.error, shape)


def constant_group(piece: SmoothPiece) -> KeyGroup:
    """One key, whose value is the middle of the range of f."""
    x = graded_points(piece.lo, piece.hi, piece.points, np.linspace(piece.lo, piece.hi, 17), piece.width, 6)
    f = piece.f(x)
    least, most = f.min(axis=0), f.max(axis=0)
    values = np.clip(0.5 * least + 0.5 * most, -piece.limits, piece.limits)[None]
    zero, middle = np.zeros(1), np.array([0.5 * piece.lo + 0.5 * piece.hi])
    return KeyGroup(piece, SoftHead(zero[:, None], zero, values), middle, float((most - least).max() / 2), ())


LARGEST_GROUP = 512
"""Largest number of keys of one group: the cost of a fit grows with its cube."""
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, LARGEST_GROUP)
"""Numbers of keys that are tried in turn: each is about 1.4 times the one before."""
FIRST_STEP, LAST_STEP = 0.17, 0.012
"""The first and the last step length of the descent, in the logarithms of the shape. Chosen, not measured."""
DOWNHILL_FACTOR = 300.0
"""The descent starts from errors up to this multiple of the goal; larger errors seldom come down to the goal."""
FEW_KEYS, MANY_KEYS = 16, 64
"""The search is thorough up to 16 keys, since fits are quick there; beyond 64 keys it tries few shapes."""
AT_END = 1 / 16
"""Share of the width of a piece: an error this close to an end comes from a singular point beyond the end."""
CURVATURES, LEAST_STEPS = (0.02, 6.0), 0.1
"""The search keeps c in this range, and at least this number of spacings on a piece. Chosen, not measured."""
GRADED_ROUNDING = 0.0007
"""The rounding of a graded group's output, in units of u × largest score × limit of the values. Measured."""


def search_group(
    piece: SmoothPiece, num_keys: int, goal: float | None = None, near: KeyGroup | None = None
) -> KeyGroup:
    """Return the first group found with this size and an error of at most `goal`; the best group if there is none.

    The search is over the curvature c, the number of spacings on the piece, the shift of the anchors, and for a graded
    group t0 and u. The error has narrow valleys as a function of these. So the search first tries a coarse net, and
    then descends from the best places.
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
    """Fit quickly, and thoroughly where a thorough fit may reach the goal."""
    if goal is None:
        return make_group(piece, num_keys, shape, passes)
    group = make_group(piece, num_keys, shape, passes, goal)
    if goal < group.error <= 1.5 * goal or (passes == 1 and goal < group.error <= 4 * goal):
        return make_group(piece, num_keys, shape, GROUP_PASSES, goal)
    return group


def smallest_group(piece: SmoothPiece, goal: float, most: int) -> KeyGroup:
    """Return the group with the fewest keys and an error of at most `goal`; else the best group of up to `most` keys.

    Where a smooth piece needs many keys, f may have a singular point nearby, off the real line or beyond an end. So a
    group that is graded to the place of the largest error is tried as well.
    """
    goal = max(goal, _reachable(piece, goal))

    def attempt(size: int, before: Sequence[KeyGroup]) -> KeyGroup:
        near = min(before, key=lambda group: group.error, default=None)
        same = before[-1].piece if before else piece  # graded if that helped before
        group = search_group(same, size, goal, near)
        is_growing = near is None or near.error > goal
        if is_growing and group.error > goal and FEW_KEYS < size <= MANY_KEYS and not same.points:
            graded = search_group(replace(same, points=(_worst_place(group),)), size, goal)
            return graded if graded.error < 0.5 * group.error else group
        return group

    def gives_up(failed: Sequence[KeyGroup]) -> bool:
        """Whether more keys will not help: the rest of the error is rounding, or it falls too slowly."""
        if len(failed) < 2:
            return False
        best, last = min(failed[:-1], key=lambda group: group.error), failed[-1]
        if last.error > 0.5 * best.error and best.error < 2.0**-36 * float(last.piece.limits.max()):
            return True
        # An error that does not fall at all proves nothing: there may be too few keys for the waves of f.
        if last.p <= MANY_KEYS or not 0.05 < last.error / best.error < 0.95:
            return False
        # The error falls like a power of the number of keys.
        power = math.log(best.error / last.error) / math.log(last.p / best.p)
        return last.error * (last.p / LARGEST_GROUP) ** power > 10 * goal

    sizes = ladder(GROUP_SIZES, min(most, LARGEST_GROUP))
    found = fewest(sizes, attempt, goal, resolution=20, gives_up=gives_up)
    if found.met is not None:
        return found.met
    return min(found.failed[: -1 if found.gave_up else None], key=lambda group: group.error)


def _reachable(piece: SmoothPiece, goal: float) -> float:
    """The least error that rounding allows for a graded group. Scores and their errors grow like width/t0.

    t0 shrinks with the goal. So this is the least goal that is above width/t0(goal)·u.
    """
    if not piece.points:
        return 0.0
    size = float(piece.limits.max())
    while goal < size and _inner_scale(piece, goal) * goal < GRADED_ROUNDING * piece.unit * piece.width * size:
        goal *= 1.25
    return goal


def _worst_place(group: KeyGroup) -> float:
    """The place of the largest error, or an end of the piece if that is close."""
    piece = group.piece
    x, f = piece.sample(group.anchors, 1.0)
    worst = float(x[np.argmax(np.abs(group.keys(x[:, None]) - f).max(axis=1))])
    end = piece.lo if worst < piece.lo / 2 + piece.hi / 2 else piece.hi
    return end if abs(worst - end) <= AT_END * piece.width else worst


def _starts(piece: SmoothPiece, num_keys: int, goal: float | None, near: KeyGroup | None) -> Iterator[Shape]:
    """Start shapes: that of `near`, with the same number of anchors outside the piece, and then a coarse net."""
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
    """The distance from a singular point within which f bends by less than `goal`, so that no anchors are needed."""
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
    """Descend along c, the spacing, c against the spacing, the shift, and t0."""
    piece, p = start.piece, start.p
    axes = np.zeros((5 if piece.points else 4, len(start.shape)))
    axes[0, :2], axes[1, 1], axes[2, 2], axes[-1, 0] = (1, -1), 1, 2, 1
    if piece.points:
        axes[3, 3] = 3

    def attempt(shape: Shape) -> KeyGroup | None:
        is_legal = LEAST_STEPS <= math.exp(shape[1]) <= p + 1 and abs(shape[2]) < p
        is_legal = is_legal and CURVATURES[0] <= math.exp(shape[0]) <= CURVATURES[1]
        return _try(piece, p, shape, 2, goal) if is_legal else None

    return descend(start, attempt, axes, FIRST_STEP, LAST_STEP if p <= FEW_KEYS else 4 * LAST_STEP, goal or 0.0)
