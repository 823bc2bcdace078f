"""Graded anchors: one head for a function of one variable that has kinks and singular points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.constructions.built import Built, Progress, round_above
from attnc.constructions.construction import MAX_BYTES, Request
from attnc.constructions.fitting.key_group import (
    LARGEST_GROUP,
    KeyGroup,
    SmoothPiece,
    constant_group,
    graded_points,
    search_group,
    smallest_group,
)
from attnc.constructions.fitting.kinks import Kink, find_kinks
from attnc.constructions.fitting.minimax import Function, chebyshev, fit_values
from attnc.constructions.fitting.selection import allowed_anchors
from attnc.constructions.fitting.stored_head import MeasuredHead, check_unary, measured, store, unary_construction
from attnc.errors import BoundNotMet, DomainError, real_number
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.bisection import least
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.threads import one_thread
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget
from attnc.targets.target import Target

MAX_GRADED_KEYS = 4096
"""Default limit on the number of keys. It bounds the time of a fit. Measured with five functions, of up to 44 keys:
half and twice as many give the same networks."""


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
    made, error = fitted.head.program(target), fitted.error
    return Built(made, "graded", None, None, (*named, largest, *fitted.parameters), observed=error)


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


SAMPLED_SHARE = 0.97
"""The share of eps for the error on a sample. Between its points the error may be a little larger. Measured with five
functions: 0.94 and 0.985 take as many keys."""
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
        with quiet():
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
    """Accept functions of one variable, also in L_p norms, for which the prover is expected to reach eps."""
    return target.kind == "function" and GRADED.why_not(target, request) is None and request.is_short_proof(target)


GRADED = unary_construction(graded, _suits)
