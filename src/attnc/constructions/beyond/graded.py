"""Graded anchors: one head for a function of one variable that has kinks and singular points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnc.constructions.built import Built, Progress, round_above
from attnc.constructions.construction import MAX_BYTES, Request
from attnc.constructions.fitting.kinks import Kink, find_kinks
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.search import DOWNHILL_FACTOR, THOROUGH_KEYS, Shape, fewest, ladder, least, lowest
from attnc.constructions.fitting.selection import allowed_anchors
from attnc.constructions.fitting.stored_head import MeasuredHead, check_unary, measured, store, unary_construction
from attnc.errors import BoundNotMet, DomainError, real_number
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.threads import one_thread
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget
from attnc.targets.target import Target

MAX_GRADED_KEYS = 4096
"""Default limit on the number of keys. It bounds the time of a fit; not tuned."""


@one_thread()
def graded(
    target: Target,
    *,
    eps: float | None = None,
    num_anchors: int | None = None,
    kinks: Sequence[float | Kink] | None = None,
    max_value: float = 10.0,
    dtype: str = "float64",
    max_anchors: int = MAX_GRADED_KEYS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One head has a group of keys for every smooth piece of f. At a kink the weight passes from a group to the next.

    Theorem.  Let A_i be the output of group i of keys by itself, W_i(x) the weight of all its keys, and let x lie in
              piece j. Then |out − f| ≤ |A_j − f| + Σ_{i≠j} W_i·|A_i − A_j| at x. Let the log-sum-exps of two groups
              differ by B(x − κ), and the slopes of their pieces by J at κ. Then the sum is to first order ≤ 0.2785·J/B.
    Weights.  Inside a group scores are the tangents of a convex φ at its anchors, φ″ = c/h² with h the local spacing.
              h is constant on a smooth piece, and ∝ t0 + |x − κ| towards a singular point κ (√x at 0): anchors are at
              κ ± t0(e^{|s|} − 1), s uniform. Reweighted least squares on a sample of f give the values, with
              |v| ≤ max_value·max|f|. All keys of group i share an affine ψ_i, and ψ_{i+1} − ψ_i has slope B at κ_i.
    Rate.     The error falls like e^{−Cp} with the number p of keys of a smooth piece, and like e^{−C√p} where f is
              singular. This is observed, not proved. A kink itself costs no keys, but scores of size B ~ 1/ε.

    Kinks are read from an expression. For Python code they are found on samples, or given as `kinks`. For a given eps,
    the function searches the number of keys, the spacings, c, t0 and B. With num_anchors, it searches the rest for the
    least error. The error is the largest seen on a sample that is densest at the kinks and refined at its peaks. That
    is an observation, not a bound.

    Parameters
    ----------
    target : Target
        A continuous function of one variable on a finite box.
    eps : float, optional
        The largest error allowed. Give either eps or num_anchors.
    num_anchors : int, optional
        The number of keys. The best head of this size is built.
    kinks : sequence of float or Kink, optional
        The points at which the function bends. By default they are found.
    max_value : float
        The largest |value| of a key, in units of max|f|.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program. Its `parameters` are the sizes and the largest error seen. It has no bound.

    Raises
    ------
    InputError
        If the target has more than one variable, or an argument is out of range.
    BoundNotMet
        If eps is not reached. The exception carries the best head that was found.
    DomainError
        If the target may jump.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("relu(x)", {"x": (-1, 1)})
    >>> built = attnc.constructions.graded(target, eps=1e-4)
    >>> built.program.num_anchors, dict(built.parameters)["keys_per_piece"]
    (5, '1 + 4')
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    most = allowed_anchors(target, request)
    check_unary("graded", target, request, num_anchors, max_value, most)
    if not target.is_continuous:
        raise DomainError(
            f"{target.describe()} may jump, and a softmax average is continuous. Use construction='max_affine' "
            "with an L_p norm (norm=2), or a box on which it does not jump."
        )
    line = PiecewiseFunction.of(target, kinks, max_value, request)
    return _built(target, line, _fitted(target, line, num_anchors, most))


def _fitted(target: Target, line: PiecewiseFunction, num_keys: int | None, most: int) -> JoinedHead:
    """Return the best head with num_keys keys, or one with the fewest keys within eps.

    Raise BoundNotMet if more than `most` keys are needed.
    """
    if num_keys is not None:
        return fit_size(line, num_keys)
    fitted = fit_within(line, most) if len(line.pieces) <= most else None
    if fitted is None or fitted.error > line.request.goal or fitted.p > most:
        raise _refusal(target, line, fitted, most)
    return fitted


def graded_keys(
    f: Callable[[np.ndarray], np.ndarray],
    lo: float,
    hi: float,
    kinks: Sequence[float | Kink] = (),
    *,
    eps: float | None = None,
    num_keys: int | None = None,
    max_value: float = 10.0,
    dtype: str = "float64",
) -> SoftHead[np.ndarray]:
    """Return only the head, for f from points (m,) to (m,) or (m, outputs).

    It is the best head with num_keys keys, or has the fewest keys for eps. If eps is not reached, BoundNotMet carries
    the best head as its `network`.
    """
    request, target = Request(eps, dtype), CallableTarget(lambda points: f(points[:, 0]), Box.parse([(lo, hi)]))
    check_unary("graded", target, request, num_keys, max_value, MAX_GRADED_KEYS)
    line = PiecewiseFunction.of(target, kinks, max_value, request)
    return _fitted(target, line, num_keys, MAX_GRADED_KEYS).head.keys_of_x()


def _inside(kinks: Sequence[float | Kink], lo: float, hi: float) -> tuple[Kink, ...]:
    """Return the kinks in the box, sorted. At an end of the box only singular kinks count."""
    found = {k if isinstance(k, Kink) else Kink(real_number("kinks", k)) for k in kinks}
    places = sorted(found, key=lambda kink: kink.x)
    return tuple(k for k in places if lo < k.x < hi or (k.is_singular and lo <= k.x <= hi))


def _built(target: Target, line: PiecewiseFunction, fitted: JoinedHead) -> Built:
    kinks = ", ".join(f"{kink.x:.6g}" for kink in line.kinks[:8]) + (", …" if len(line.kinks) > 8 else "")
    sizes = " + ".join(str(group.p) for group in fitted.fit[:12]) + (" + …" if len(fitted.fit) > 12 else "")
    largest = ("largest_slope", float(np.abs(fitted.head.keys.slopes).max()))
    named = ("keys_per_piece", sizes), ("kinks", kinks or "none")
    return Built(fitted.head.program(target), "graded", None, None, (*named, largest, *fitted.parameters))


def _refusal(target: Target, line: PiecewiseFunction, fitted: JoinedHead | None, most: int) -> BoundNotMet:
    eps, dtype = line.request.goal, line.request.dtype
    asked = f"cannot bring the error to eps={eps:g} for {target.describe()} on {target.box} with graded anchors"
    if fitted is None:
        return BoundNotMet(
            f"{asked}: it has {len(line.kinks):,} kinks, so {len(line.pieces):,} pieces that each need a key, and "
            f"max_anchors and max_bytes allow {most:,}. Choose a smaller box, or raise both.",
            eps=eps,
        )
    worst = next(group.piece for group in fitted.fit if fitted.at <= group.piece.hi)
    where = {target.box.names[0]: (worst.lo, worst.hi)}
    place = f"{target.box.names[0]} = {fitted.at:.6g}"
    seen = f"the largest error seen is {fitted.error:.3g} with {fitted.p:,} anchors, at {place}"
    change = f"Choose eps ≥ {round_above(fitted.error):.2g}"
    largest = float(np.abs(fitted.head.keys.slopes).max())
    felt = UNIT_ROUNDOFF[dtype] * largest * float(np.abs(fitted.head.keys.values).max())
    if fitted.p >= most or max(group.p for group in fitted.fit) >= LARGEST_GROUP:
        reason = f"more anchors than {min(most, LARGEST_GROUP * len(fitted.fit)):,} are needed"
        change += ", a smaller box, or raise max_anchors and max_bytes"
    elif felt > 0.01 * fitted.error:
        reason = f"the rest of the error is rounding in {dtype}, of scores of size {largest:.2g}"
        change += ", or float64" if dtype == "float32" else ""
    else:
        reason = f"more anchors help little while values are limited to {line.max_value:g} times max|f|"
        change += ", or a larger max_value"
    return BoundNotMet(
        f"{asked}: {seen}. {reason[0].upper()}{reason[1:]}. {change}.",
        eps=eps,
        worst_box=where,
        build=(lambda: _built(target, line, fitted)) if fitted.p <= most else None,
    )


# --- groups of keys: each computes one piece of the function ----------------------------------------------------------


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
    c, steps, shift = math.exp(shape[0]), math.exp(shape[1]), shape[2]
    t0, u = (math.exp(shape[3]), shape[4]) if piece.points else (1.0, 0.0)
    slopes, offsets, anchors = Grading(piece.lo, piece.hi, piece.points, t0, u).tangents(num_keys, c, steps, shift)
    x, f = piece.sample(anchors, t0)
    head = SoftHead.of_one_variable(slopes, offsets, np.zeros(num_keys))
    values, error = fit_values(head.weights(x[:, None]), f, piece.limits, passes, goal)
    return KeyGroup(piece, replace(head, values=values), anchors, error, shape)


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
AT_END = 1 / 16
"""Share of the width of a piece. A largest error this close to an end is taken to come from a singular point beyond the
end. Not tuned."""
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

    def attempt(shape: Shape) -> KeyGroup | None:
        is_legal = LEAST_STEPS <= math.exp(shape[1]) <= num_keys + 1 and abs(shape[2]) < num_keys
        is_legal = is_legal and CURVATURES[0] <= math.exp(shape[0]) <= CURVATURES[1]
        return _try(piece, num_keys, shape, 2, goal) if is_legal else None

    few = num_keys <= THOROUGH_KEYS
    factor = (4.0 if few else 2.5) if piece.points else DOWNHILL_FACTOR
    best = lowest(
        (_try(piece, num_keys, shape, 1, goal) for shape in _starts(piece, num_keys, goal, near)),
        attempt,
        axes,
        FIRST_STEP,
        LAST_STEP if few else 4 * LAST_STEP,
        goal or 2.0**-50 * float(piece.limits.max()),
        num_descents=0 if num_keys > MANY_KEYS else 1 if not few else 2 if piece.points else 3,
        near_enough=factor * goal or math.inf,
    )
    return best if goal else make_group(piece, num_keys, best.shape, 4 * GROUP_PASSES)


def _try(piece: SmoothPiece, num_keys: int, shape: Shape, passes: int, goal: float) -> KeyGroup:
    """Fit with few passes, and with more passes if these may reach the goal."""
    group = make_group(piece, num_keys, shape, passes, goal)
    if goal < group.error <= 1.5 * goal or (passes == 1 and goal < group.error <= 4 * goal):
        return make_group(piece, num_keys, shape, GROUP_PASSES, goal)
    return group


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


# --- joining the groups -----------------------------------------------------------------------------------------------

SAMPLED_SHARE = 0.97
"""The share of eps for the error on a sample. Between its points the error may be a little larger. Not tuned."""
EFFORTS = ((0.95, 1.0), (0.5, 1.0), (0.5, 0.4), (0.5, 0.2))
"""(share of eps for the fits, share of the largest value allowed), tried in turn. The rest of eps is for the switches
at kinks. The first row needs the fewest keys. Each later row makes scores or values, and so rounding, smaller."""
AFFORDABLE = 160
"""Largest number of keys whose values are solved together: the cost of a fit grows with its cube."""
MANY_PIECES = 12
"""With more pieces than this, a piece gets as many keys as its neighbour if these are enough: no fewer are tried."""


@dataclass(frozen=True, eq=False)
class PiecewiseFunction:
    """f on the box, its kinks, and the largest |value| of a key in units of max|f|."""

    f: Function
    box: Box
    kinks: tuple[Kink, ...]
    max_value: float
    request: Request

    @classmethod
    def of(
        cls, target: Target, kinks: Sequence[float | Kink] | None, max_value: float, request: Request
    ) -> PiecewiseFunction:
        """Make it from a target with these kinks, or with the kinks that `find_kinks` finds."""
        lo, hi = float(target.box.lo[0]), float(target.box.hi[0])
        found = find_kinks(target) if kinks is None else _inside(kinks, lo, hi)
        return cls(lambda x: target(x[:, None]), target.box, found, max_value, request)

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
    def pieces(self) -> list[SmoothPiece]:
        edges = [self.lo, *(kink.x for kink in self.kinks if self.lo < kink.x < self.hi), self.hi]
        return [self.piece(lo, hi) for lo, hi in itertools.pairwise(edges)]

    def piece(self, lo: float, hi: float) -> SmoothPiece:
        """Return the piece from lo to hi, graded towards the singular points in it."""
        points = tuple(kink.x for kink in self.kinks if kink.is_singular and lo <= kink.x <= hi)
        return SmoothPiece(self.f, lo, hi, self.limits, points, UNIT_ROUNDOFF[self.request.dtype])

    @property
    def centre(self) -> float | None:
        """The origin of y: the only kink, or the singular kink. Near it x − κ is exact."""
        singular = [kink.x for kink in self.kinks if kink.is_singular] or [kink.x for kink in self.kinks]
        return singular[0] if len(singular) == 1 else None


JoinedHead = MeasuredHead[tuple[KeyGroup, ...]]
"""One head made of the keys of all groups, and its error."""


def fit_within(line: PiecewiseFunction, most: int) -> JoinedHead:
    """Return a head with the fewest keys and an error of at most eps, or the best head found.

    If rounding is the limit, later attempts give the switches a larger part of eps, which makes their scores smaller,
    and then limit the values.
    """
    eps, is_met, tried = line.request.goal, True, list[JoinedHead]()
    for share, smaller in EFFORTS:
        if not is_met and smaller == 1.0:
            continue  # if rounding is the limit, a smaller share does not help
        careful = replace(line, max_value=max(1.0, smaller * line.max_value))
        groups = _groups_within(careful, share * eps, most)
        is_met = max(group.error for group in groups) <= share * eps
        # Values are solved again after joining, which halves the error at a kink.
        for allowed in (SAMPLED_SHARE * eps, 1.8 * eps):
            tried.append(_joined(careful, groups, allowed))
            if tried[-1].error <= SAMPLED_SHARE * eps:
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


def fit_size(line: PiecewiseFunction, num_keys: int) -> JoinedHead:
    """Return the head with the smallest error found for this number of keys."""
    candidates = [_groups_of_size(line, num_keys)] if num_keys >= len(line.pieces) else []
    if num_keys <= 2 * len(line.pieces) and len(line.pieces) > 1:
        whole, kinks = line.piece(line.lo, line.hi), tuple(kink.x for kink in line.kinks)
        candidates += [[search_group(replace(whole, points=points), num_keys)] for points in ((), kinks)]
    best = min((_best_joined(line, groups) for groups in candidates), key=lambda one: one.error)
    if len(best.fit) > 1 and best.error > 10 * max(group.error for group in best.fit) and line.max_value > 2:
        # The switches, not the fits, cause the rest of the error. Smaller values reduce their rounding.
        careful = replace(line, max_value=2.0)
        best = min(best, _best_joined(careful, _groups_of_size(careful, num_keys)), key=lambda one: one.error)
    line.request.report("fitting", 1.0)
    return best


def _groups_within(line: PiecewiseFunction, goal: float, most: int) -> list[KeyGroup]:
    groups: list[KeyGroup] = []
    for i, piece in enumerate(line.pieces):
        room = max(1, most - sum(group.p for group in groups) - (len(line.pieces) - i - 1))
        group = None
        if groups and len(line.pieces) > MANY_PIECES and 1 < groups[-1].p <= room:
            group = search_group(piece, groups[-1].p, goal, groups[-1])
        groups.append(group if group is not None and group.error <= goal else smallest_group(piece, goal, room))
        line.request.report("fitting", (i + 1) / len(line.pieces))
    return _merged(line, groups, goal)


def _merged(line: PiecewiseFunction, groups: list[KeyGroup], goal: float) -> list[KeyGroup]:
    """Merge neighbouring groups where one group needs fewer keys: at very weak kinks, and at singular ones."""
    i = 0
    while i + 1 < len(groups) and len(groups) <= MANY_PIECES:
        left, right = groups[i], groups[i + 1]
        piece = line.piece(left.piece.lo, right.piece.hi)
        size = left.p + right.p - 1
        together = constant_group(piece) if size == 1 else search_group(piece, size, goal, left)
        if together.error <= goal:
            groups[i : i + 2] = [smallest_group(piece, goal, size)]
        else:
            i += 1
    return groups


def _groups_of_size(line: PiecewiseFunction, num_keys: int) -> list[KeyGroup]:
    """Return one group per piece. The worst piece repeatedly gets more keys, in ever smaller portions."""
    groups = [constant_group(piece) for piece in line.pieces]
    left = num_keys - len(groups)
    while left > 0:
        worst = max(range(len(groups)), key=lambda i: groups[i].error)
        group = groups[worst]
        portion = left if len(groups) == 1 else max(1, left // (3 * len(groups)))
        larger = search_group(group.piece, group.p + portion, near=group)
        if larger.error > 0.9 * group.error and portion == 1 < left:  # one more key may not help where two do
            portion, larger = 2, search_group(group.piece, group.p + 2, near=group)
        groups[worst], left = larger, left - portion
    return groups


def _best_joined(line: PiecewiseFunction, groups: list[KeyGroup]) -> JoinedHead:
    """Return the best head over several steepnesses of the switches. Steeper switches have larger scores."""
    floor = max(max(group.error for group in groups), UNIT_ROUNDOFF[line.request.dtype] * float(line.limits.max()))
    if len(groups) == 1:
        return _joined(line, groups, floor)
    best = _joined(line, groups, 1.01 * floor)
    for factor in (1.1, 1.4, 2.0, 4.0, 10.0, 40.0, 200.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
        fitted = _joined(line, groups, factor * floor)
        if fitted.error > 4 * best.error:
            break
        best = min(best, fitted, key=lambda one: one.error)
    return best


def _joined(line: PiecewiseFunction, groups: Sequence[KeyGroup], allowed: float) -> JoinedHead:
    """Join the groups into one head, store it, solve its values again for the stored keys, and measure its error."""
    steep = [steepness(left, right, allowed) for left, right in itertools.pairwise(groups)]
    heads = [store(join(groups, steep), line.box, line.request.dtype, line.centre)]
    if heads[0].keys.num_keys <= AFFORDABLE:
        x = _sample(line, groups, steep, 5)
        values, _ = fit_values(heads[0].weights(x[:, None]), line.f(x), line.limits, 12, 0.5 * allowed)
        heads.append(heads[0].with_values(values))
    return measured(tuple(groups), heads, line.f, _sample(line, groups, steep, 14))


def _sample(
    line: PiecewiseFunction, groups: Sequence[KeyGroup], steep: Sequence[float], per_gap: int
) -> Float[np.ndarray, " points"]:
    """Return points that are dense between anchors, and ever denser towards kinks and singular points."""
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


STEEPEST = 1e15
"""The steepest switch, in units of 1/width. A steeper one would be narrower than the spacing of floats."""
_APART = np.concatenate([-np.geomspace(1.0, 1e-16, 129), np.geomspace(1e-16, 1.0, 129)])
"""Distances from a kink, in units of the narrower piece, at which the error of a switch is sampled."""


def steepness(left: KeyGroup, right: KeyGroup, allowed: float) -> float:
    """Return the least B, to 5 %, with which two neighbours alone have an error ≤ `allowed` near their kink."""
    kappa = left.piece.hi
    width = min(left.piece.width, right.piece.width)
    z = width * _APART
    x = np.clip(kappa + z, left.piece.lo, right.piece.hi)
    z = x - kappa
    a, b = left.keys(x[:, None]), right.keys(x[:, None])
    f = np.where(z[:, None] <= 0, left.piece.f(np.minimum(x, kappa)), right.piece.f(np.maximum(x, kappa)))
    bend = _bend(right, kappa, x) - _bend(left, kappa, x)

    def error(B: float) -> float:
        with np.errstate(over="ignore"):
            weight = 1 / (1 + np.exp(-(B * z + bend)))[:, None]
        return float(np.abs((1 - weight) * a + weight * b - f).max())

    low, high = math.log(1 / width), math.log(STEEPEST / width)
    if error(math.exp(high)) > allowed:
        return math.exp(high)
    return math.exp(least(low, high, lambda log_B: error(math.exp(log_B)) <= allowed, 0.05))


def join(groups: Sequence[KeyGroup], steep: Sequence[float]) -> SoftHead[np.ndarray]:
    """Join all keys of all groups into one head. At κ_i the log-sum-exps of groups i and i+1 are equal.

    There their difference has the slope steep[i].

    Add to the scores of group i an affine function ψ_i, the same for all its keys, with ψ_{i+1} − ψ_i rising at the
    kink κ_i. Weights inside a group do not change, and the weights of the groups are a softmax of their own. With
    D = B(x − κ) the difference of the log-sum-exps of two neighbours, the head is σ(−D)·A_i + σ(D)·A_{i+1}, so that

        |out − f| ≤ max(error of A_i, of A_{i+1}) + |A_i − A_{i+1}|·σ(−|D|),

    and where the slopes of two pieces differ by J the last term is at most J·max_z zσ(−Bz) = 0.2785·J/B.

    The scores of the group with the most keys do not change: rounding has the largest effect there.
    """
    tilts, lifts = [0.0], [0.0]
    for left, right, B in zip(groups, groups[1:], steep, strict=False):
        kappa = left.piece.hi
        at = np.array([[kappa]])
        jump = right.keys.log_sum(at) - left.keys.log_sum(at)
        rise = B - _mean_slope(right, kappa) + _mean_slope(left, kappa)
        tilts.append(tilts[-1] + rise)
        lifts.append(lifts[-1] - rise * kappa - float(jump[0]))
    chosen = max(range(len(groups)), key=lambda i: groups[i].p)
    slopes = [g.keys.slopes + (tilt - tilts[chosen]) for g, tilt in zip(groups, tilts, strict=True)]
    offsets = [g.keys.offsets + (lift - lifts[chosen]) for g, lift in zip(groups, lifts, strict=True)]
    return SoftHead(np.concatenate(slopes), np.concatenate(offsets), np.concatenate([g.keys.values for g in groups]))


def _mean_slope(group: KeyGroup, x: float) -> float:
    """Return the derivative of the log-sum-exp at x, which is the weighted average of the slopes."""
    return float((group.keys.weights(np.array([[x]])) @ group.keys.slopes[:, 0])[0])


def _bend(group: KeyGroup, kappa: float, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
    """Return the log-sum-exp minus its tangent at κ."""
    tangent = group.keys.log_sum(np.array([[kappa]])) + _mean_slope(group, kappa) * (x - kappa)
    return np.asarray(group.keys.log_sum(x[:, None]) - tangent)


def _suits(target: Target, request: Request) -> bool:
    """Accept expressions in one variable, also in L_p norms."""
    return target.kind == "function" and target.expression is not None and GRADED.why_not(target, request) is None


GRADED = unary_construction(graded, _suits)
