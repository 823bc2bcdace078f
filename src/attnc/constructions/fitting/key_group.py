"""A group of keys that computes one piece of a function: anchors that may be denser near points, and solved values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnc.constructions.fitting.minimax import Function, chebyshev, fit_each
from attnc.constructions.fitting.search import DOWNHILL_FACTOR, THOROUGH_KEYS, Shape, fewest, ladder, lowest
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF


@dataclass(frozen=True)
class Grading:
    """Anchors that are denser near given points, and the scores that select among them.

    The density ρ is the number of anchors per unit of length. The scores are the tangents, at the anchors, of a convex
    φ with φ″ = cρ². In units of the local spacing h = 1/ρ, the weights near an anchor are then the same everywhere:
    those of a Gaussian softmax with spacing h. Here

    ρ(t) ∝ 1/(t0 + |t − κ|) + u/(hi − lo), κ the nearest of `points`; without points ρ is constant.

    Near κ the anchors are at κ ± t0(e^{|s|} − 1) for equidistant s. With u > 0 the spacing grows less far from κ.
    Between the midpoints of neighbouring points the integrals have closed forms. With r = |t − κ|, l = log(1 + r/t0)
    and U = u/(hi − lo) the integrals from κ are

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

        [lo, hi] is `steps` spacings wide, which need not be a whole number. The other anchors lie outside. With shift 0
        there are equally many on both sides, otherwise 2·shift more on the right.
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
        """Return ∫ρ, φ′ and φ (for c = 1) at the points, integrated from the first point."""
        gaps = np.diff(self._kappa)
        half_count, half_slope, _ = self._from_point(gaps / 2)
        count, slope = (np.concatenate([[0.0], np.cumsum(2 * half)]) for half in (half_count, half_slope))
        rises = (slope[:-1] + half_slope) * gaps  # ρ is symmetric about the middle of a gap
        return count, slope, np.concatenate([[0.0], np.cumsum(rises)])

    def _from_point(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ∫ρ, ∫ρ² and ∫∫ρ² over a distance r from a point."""
        t0, U = self.t0, self._U
        log = np.log1p(r / t0)
        first = r / (t0 * (t0 + r)) + 2 * U * log + U**2 * r
        second = r / t0 - log + 2 * U * ((t0 + r) * log - r) + U**2 * r**2 / 2
        return log + U * r, first, second

    def _integrals(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ∫ρ, φ′ and φ (for c = 1) at t."""
        nearest = np.searchsorted((self._kappa[1:] + self._kappa[:-1]) / 2, t)
        off = t - self._kappa[nearest]
        count, slope, height = self._from_point(np.abs(off))
        at_count, at_slope, at_height = (base[nearest] for base in self._at_points)
        side = np.sign(off)
        return at_count + side * count, at_slope + side * slope, at_height + at_slope * off + height

    def _place(self, wanted: np.ndarray) -> np.ndarray:
        """Solve ∫ρ = wanted for t. On each side of a point, Newton's method solves l + Ur = s for l from above."""
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
"""Number of passes of the reweighted least squares in a thorough fit. The best of a size gets four times as many. Not
tuned."""


@dataclass(frozen=True, eq=False)
class SmoothPiece:
    """A function f on [lo, hi]. At `points`, at the ends or inside, f is not smooth."""

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
        """Return sample points that are dense enough for these anchors, and the values of f there."""
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
    """Return Chebyshev points in every gap between anchors, and points that approach singular points geometrically."""
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
    return next(make_groups(piece, num_keys, [shape], passes, goal))


def make_groups(
    piece: SmoothPiece, num_keys: int, shapes: Sequence[Shape], passes: int = GROUP_PASSES, goal: float = 0.0
) -> Iterator[KeyGroup]:
    """Make groups of several shapes. Few keys of a piece without points share their sample, and are solved together."""
    if len(shapes) > 1 and (piece.points or num_keys > THOROUGH_KEYS):
        for shape in shapes:
            yield from make_groups(piece, num_keys, [shape], passes, goal)
        return
    tangents = []
    for shape in shapes:
        t0, u = (math.exp(shape[3]), shape[4]) if piece.points else (1.0, 0.0)
        grading = Grading(piece.lo, piece.hi, piece.points, t0, u)
        tangents.append(grading.tangents(num_keys, math.exp(shape[0]), math.exp(shape[1]), shape[2]))
    slopes, offsets, anchors = map(np.array, zip(*tangents, strict=True))
    x, f = piece.sample(anchors[0], t0)
    weights = softmax(x[:, None] * slopes[:, None] + offsets[:, None])
    values, errors = fit_each(weights, f, piece.limits, passes, goal)
    for number, (shape, error) in enumerate(zip(shapes, errors.tolist(), strict=True)):
        keys = SoftHead(slopes[number, :, None], offsets[number], values[number])
        yield KeyGroup(piece, keys, anchors[number], error, shape)


def constant_group(piece: SmoothPiece) -> KeyGroup:
    """Return a group of one key, whose value is the middle of the range of f."""
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
"""The first and the last step length of the descent, in the logarithms of the shape: factors of 1.19 and 1.01."""
MANY_KEYS = 64
"""Beyond this number of keys the search tries few shapes, since fits are slow."""
SHAPES_AT_ONCE = 9
"""Number of shapes of the coarse net that are fitted together: those with one c, up to THOROUGH_KEYS keys."""
AT_END = 1 / 16
"""Share of the width of a piece. A largest error this close to an end is taken to come from a singular point beyond the
end. Measured with five functions: 1/32 and 1/8 give the same networks."""
CURVATURES, LEAST_STEPS = (0.02, 6.0), 0.1
"""The range of c, and the least number of spacings on a piece, in the search. With a smaller c the weights are almost
equal, and with a larger c the nearest key has almost all weight. With fewer spacings nearly all anchors lie outside."""
GRADED_ROUNDING = 0.0007
"""The measured rounding error of the output of a graded group, in units of u × largest score × limit of the values."""


def search_group(piece: SmoothPiece, num_keys: int, goal: float = 0.0, near: KeyGroup | None = None) -> KeyGroup:
    """Return the first group found with this size and an error of at most `goal`, otherwise the best group found.

    The search is over the curvature c, the number of spacings on the piece, the shift of the anchors, and for a graded
    group t0 and u. The descent steps along c, the spacing, both in opposite directions, the shift, and t0. A goal of 0
    asks for the best group.
    """
    if num_keys == 1:
        return constant_group(piece)
    axes = np.zeros((5, 5)) if piece.points else np.zeros((4, 3))
    axes[0, :2], axes[1, 1], axes[2, 2], axes[-1, 0] = (1, -1), 1, 2, 1
    if piece.points:
        axes[3, 3] = 3

    def is_legal(shape: Shape) -> bool:
        has_room = LEAST_STEPS <= math.exp(shape[1]) <= num_keys + 1 and abs(shape[2]) < num_keys
        return has_room and CURVATURES[0] <= math.exp(shape[0]) <= CURVATURES[1]

    def attempts(shapes: Sequence[Shape]) -> Iterator[KeyGroup]:
        return _tries(piece, num_keys, list(filter(is_legal, shapes)), 2, goal)

    def starts() -> Iterator[KeyGroup]:
        shapes = _starts(piece, num_keys, goal, near)
        if near is not None:
            yield from _tries(piece, num_keys, list(itertools.islice(shapes, 1)), 1, goal)
        while some := list(itertools.islice(shapes, SHAPES_AT_ONCE)):
            yield from _tries(piece, num_keys, some, 1, goal)

    few = num_keys <= THOROUGH_KEYS
    factor = (4.0 if few else 2.5) if piece.points else DOWNHILL_FACTOR
    best = lowest(
        starts(),
        attempts,
        axes,
        FIRST_STEP,
        LAST_STEP if few else 4 * LAST_STEP,
        goal or 2.0**-50 * float(piece.limits.max()),
        num_descents=0 if num_keys > MANY_KEYS else 1 if not few else 2 if piece.points else 3,
        near_enough=factor * goal or math.inf,
    )
    return best if goal else make_group(piece, num_keys, best.shape, 4 * GROUP_PASSES)


def _tries(piece: SmoothPiece, num_keys: int, shapes: Sequence[Shape], passes: int, goal: float) -> Iterator[KeyGroup]:
    """Fit each shape with few passes, and with more passes if these may reach the goal."""
    for group in make_groups(piece, num_keys, shapes, passes, goal) if shapes else ():
        is_close = goal < group.error <= 1.5 * goal or (passes == 1 and goal < group.error <= 4 * goal)
        yield make_group(piece, num_keys, group.shape, GROUP_PASSES, goal) if is_close else group


def smallest_group(piece: SmoothPiece, goal: float, most: int) -> KeyGroup:
    """Return the group with the fewest keys and an error of at most `goal`, or the best group of up to `most` keys.

    If a smooth piece needs many keys, f may have a singular point nearby, off the real line or beyond an end. So the
    search also tries a group that is graded towards the place of the largest error.
    """
    goal = max(goal, _reachable(piece, goal))

    def attempt(size: int, before: Sequence[KeyGroup]) -> KeyGroup:
        near = min(before, key=lambda group: group.error, default=None)
        same = before[-1].piece if before else piece  # graded if that helped before
        group = search_group(same, size, goal, near)
        is_growing = near is None or near.error > goal
        if is_growing and group.error > goal and THOROUGH_KEYS < size <= MANY_KEYS and not same.points:
            graded = search_group(replace(same, points=(_worst_place(group),)), size, goal)
            return graded if graded.error < 0.5 * group.error else group
        return group

    def gives_up(failed: Sequence[KeyGroup]) -> bool:
        """Whether to stop: the rest of the error is rounding, or the error falls too slowly."""
        if len(failed) < 2:
            return False
        best, last = min(failed[:-1], key=lambda group: group.error), failed[-1]
        if last.error > 0.5 * best.error and best.error < 2.0**-36 * float(last.piece.limits.max()):
            return True
        # If the error does not fall at all, go on: there may be too few keys for the oscillations of f.
        if last.p <= MANY_KEYS or not 0.05 < last.error / best.error < 0.95:
            return False
        # Extrapolate the error as a power of the number of keys.
        power = math.log(best.error / last.error) / math.log(last.p / best.p)
        return last.error * (last.p / LARGEST_GROUP) ** power > 10 * goal

    sizes = ladder(GROUP_SIZES, min(most, LARGEST_GROUP))
    found = fewest(sizes, attempt, goal, resolution=20, gives_up=gives_up)
    if found.met is not None:
        return found.met
    return min(found.failed[: -1 if found.gave_up else None], key=lambda group: group.error)


def _reachable(piece: SmoothPiece, goal: float) -> float:
    """Return the least error that rounding allows for a graded group.

    Scores and their errors grow like width/t0, and t0 shrinks with the goal. So this is the least goal above
    width/t0(goal)·u.
    """
    if not piece.points:
        return 0.0
    size = float(piece.limits.max())
    while goal < size and _inner_scale(piece, goal) * goal < GRADED_ROUNDING * piece.unit * piece.width * size:
        goal *= 1.25
    return goal


def _worst_place(group: KeyGroup) -> float:
    """Return the place of the largest error, or an end of the piece if the end is close to it."""
    piece = group.piece
    x, f = piece.sample(group.anchors, 1.0)
    worst = float(x[np.argmax(np.abs(group.keys(x[:, None]) - f).max(axis=1))])
    end = piece.lo if worst < piece.lo / 2 + piece.hi / 2 else piece.hi
    return end if abs(worst - end) <= AT_END * piece.width else worst


def _starts(piece: SmoothPiece, num_keys: int, goal: float, near: KeyGroup | None) -> Iterator[Shape]:
    """Yield the shape of `near`, with the same number of anchors outside the piece, and then a coarse net of shapes."""
    if near is not None and near.shape and bool(near.piece.points) == bool(piece.points):
        steps = max(0.5, math.exp(near.shape[1]) + num_keys - near.p)
        yield near.shape[0], math.log(steps), *near.shape[2:]
    if not piece.points:
        depth, step = (
            (4.0, 0.5) if num_keys <= THOROUGH_KEYS else (1.5, 0.5) if num_keys <= MANY_KEYS else (0.375, 0.125)
        )
        top = math.log2(num_keys)
        for c in (0.2, 0.45, 0.7, 1.0, 1.4, 2.0) if num_keys <= THOROUGH_KEYS else (0.2, 0.4, 0.8):
            for octave in np.arange(max(-2.0, top - depth), top + 0.1, step):
                yield math.log(c), float(octave * math.log(2)), 0.0
        return
    likely = 0.1 * math.exp(-2.3 * math.sqrt(num_keys)) * float(piece.limits.max())
    guess = _inner_scale(piece, goal or likely)
    factors = (1.0, 0.2, 5.0) if goal else (1.0, 0.2, 5.0, 0.02, 50.0, 500.0)
    for factor in factors if num_keys <= MANY_KEYS else factors[:1]:
        for c in (0.2, 0.4, 0.8):
            for outside in (0.5, 2.0) if num_keys <= THOROUGH_KEYS else (1.0,):
                for u in (0.0, 2.0):
                    steps = max(0.5, num_keys - 1 - outside)
                    yield math.log(c), math.log(steps), 0.0, math.log(factor * guess), u


def _inner_scale(piece: SmoothPiece, goal: float) -> float:
    """Return the distance from a singular point within which f bends by less than `goal` and needs no anchors."""
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
