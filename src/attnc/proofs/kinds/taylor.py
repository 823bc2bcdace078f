"""Taylor leaves: sup |f − stage| over small boxes, from the Taylor polynomials of both sides.

Theorem.  On {c + rτ : τ ∈ [−1, 1]^d} let f = T_f ± R_f, and each head A = v0 + N/D with |N − ν| ≤ R_N, |D − δ| ≤ R_D,
          D ≥ D_lo for polynomials ν, δ of degree m (`taylor.moments`). For every polynomial Q of degree m
              |A − v0 − Q| ≤ (Σ_{|j|≤2m} |(ν − Q·δ)_j| + R_N + ‖Q‖₁ R_D)/D_lo,
          and sup |f − stage| ≤ max |T_f − b − B·x − Σ_h (v0 + Q)| + R_f + the sum of these over the heads.
Proof.    A − v0 − Q = (N − Q·D)/D, and N − Q·D = (ν − Q·δ) + (N − ν) − Q·(D − δ).
Q is the series quotient ν/δ as it is stored. So the first sum consists of rounding, and of terms of degree > m.

At a kink f has no Taylor polynomial. There, on tiny cells, T_f is a mean value form: f(c) and the gradients over the
cell. If only values of f are known, and a bound of its slopes or curvature, T_f is the multilinear interpolant at the
corners of the cell. Its error is bounded by these constants (the theorem is in `FunctionTarget`). Corners are floats in
the box between which the cell lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import TINY, U, above
from attnc.numerics.jet_tables import embedding, monomials, num_monomials
from attnc.numerics.limits import spend
from attnc.numerics.quiet import quiet
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.intervals import cells_within, centred
from attnc.proofs.cells.kind import SHARP, Bounds, Goal, Kind, meets
from attnc.proofs.stages.extraction import OneStage
from attnc.proofs.taylor.moments import KeyMoments, Moments, SlopeErrors
from attnc.proofs.taylor.polynomials import Layout, gamma, layout, quotient, residual
from attnc.proofs.taylor.ranges import largest
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import Taylor, taylor
from attnc.targets.function_target import FunctionTarget

_BATCH = 2**22  # coefficients that are held at a time: 32 MB
_CHUNK = 2**19  # numbers in the sums over keys that are held at a time: 4 MB, which stay in the cache
MEAN_VALUE_ORDER = 3  # the order of the network's polynomials at kinks and jumps, where f has first order at most
KEY_SECONDS, MONOMIAL_SECONDS = 8e-8, 5e-7
"""Counted seconds for a cell: per key, and as much again for 20 monomials; and per monomial. Measured in up to three
variables, with 6 to 3081 keys and 7 to 455 monomials, within a factor of 2."""
_ORDERS = {1: (6, 8, 10, 12, 14, 16), 2: (6, 8, 10, 12, 14, 16), 3: (4, 6, 8, 10, 12), 4: (4, 6, 8)}
"""Orders that are tried, by the number of variables."""
DEGREES = (2, 3, 4, 6)
"""Degrees of the network that are tried beside interpolants. The small cells that f needs make higher ones useless."""
_PILOTS, _MOST_PILOTS = 12, 0.7
"""The number of sampled cells by which an order is chosen, and the share of them that must meet the goal. Measured:
with 4 cells one proof has 4.5 times as many leaves, with 36 proofs take 20 % longer. With a share of 0.4 one proof has
5 times as many leaves and another one takes 4 times as long, with 0.95 one has 2,048 leaves instead of 14."""
_FINEST = 22  # log₂ of the largest number of cells for which an order is considered: far more than can be proved
_MOST_AT_ONCE = 12  # log₂ of the largest number of cells to start from: those examined at a time


Model = Callable[[np.ndarray, np.ndarray, int], Taylor]
"""A function of (centres, radii, degree) that returns polynomials of f on every cell, with their errors."""


@dataclass(frozen=True, eq=False)
class TaylorKind(Kind):
    """A model of f against Taylor polynomials of the network, of one degree. Where the model has no bound, it is ∞."""

    stage: OneStage
    model: Model
    degree: int
    name = "taylor"

    @classmethod
    def of(cls, stage: OneStage, expression: Expression, degree: int) -> TaylorKind:
        """Return the kind with Taylor polynomials of f. It has no bound if f has a kink inside the cell."""
        return cls(stage, functools.partial(taylor, expression), degree)

    @classmethod
    def at_kinks(cls, stage: OneStage, expression: Expression, box: Box) -> TaylorKind:
        """Return the kind that encloses f by its gradients over the cell, at a kink by the hull of both sides.

        It is stored as a Taylor leaf, because a checker that finds a kink inside the cell does the same.
        """
        return cls(stage, functools.partial(mean_value_model, expression, box), MEAN_VALUE_ORDER)

    @property
    def order(self) -> int | None:
        return self.degree

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        f = self.model(centres, radii, self.degree)
        return taylor_bounds(self.stage, f, centres, radii, self.degree, goal)


class InterpolantKind(TaylorKind):
    """Interpolants of f. A leaf states no degree, because no checker can prove it again without the code of f."""

    name = "interpolant"
    order = None

    @classmethod
    def at_corners(cls, stage: OneStage, target: FunctionTarget, degree: int) -> InterpolantKind:
        """Return the kind with multilinear interpolants at the corners, of a degree ≥ the number of variables."""
        return cls(stage, functools.partial(interpolant, target), max(degree, target.box.d))


def taylor_bounds(
    stage: OneStage, f: Taylor, centres: np.ndarray, radii: np.ndarray, order: int, goal: Goal = SHARP
) -> Bounds:
    """Return upper bounds of |f − stage| over every box {c + rτ}, for every output, ∞ where there is none.

    The term "approximation" bounds the difference of the Taylor polynomials, and "remainder" everything else. The floor
    is the part of the remainder that smaller boxes would not remove. Bounds are not sharpened beyond the goal. Boxes
    that are neighbours should be adjacent in the arrays.
    """
    boxes, outputs, count = f.mid.shape
    expected = (len(stage.constant.mid), num_monomials(centres.shape[1], order))
    if (outputs, count) != expected or order < 1:
        raise InputError(
            f"the Taylor polynomials have {outputs} outputs and {count} coefficients; the stage, with order {order} in "
            f"{centres.shape[1]} variables, needs {expected[0]} and {expected[1]}, and an order of 1 at least."
        )
    batch = max(64, _BATCH // (count * outputs))
    polynomial, remainder = np.full((2, boxes, outputs), np.inf)
    rounding, seen = np.zeros((2, boxes, outputs))
    some = np.flatnonzero(np.isfinite(f.remainder).any(axis=1))
    with quiet():
        for start in range(0, len(some), batch):
            rows = some[start : start + batch]
            part = Taylor(f.mid[rows], f.radius[rows], f.remainder[rows])
            found = _differences(stage, part, centres[rows], radii[rows], order, goal)
            polynomial[rows], remainder[rows], rounding[rows], seen[rows] = found
        upper, attained = above(polynomial + remainder), seen - remainder
    return Bounds(
        np.where(np.isnan(upper), np.inf, upper),
        {"approximation": polynomial, "remainder": remainder},
        float(np.max(attained, initial=0.0, where=np.isfinite(attained))),
        rounding,
    )


def _differences(
    stage: OneStage, f: Taylor, centres: np.ndarray, radii: np.ndarray, order: int, goal: Goal
) -> tuple[Float[np.ndarray, "boxes outputs"], ...]:
    """Return bounds of the polynomial, of the remainder and of its rounding, and the largest value seen."""
    boxes, outputs, _ = f.mid.shape
    d = centres.shape[1]
    space = layout(d, order)
    difference = np.ascontiguousarray(f.mid.transpose(2, 1, 0))
    size = np.abs(difference).sum(axis=0)  # the sum of all absolute values, to which rounding is relative
    b, slopes = stage.constant, stage.linear
    reach = np.abs(centres) + radii
    rounding = f.radius.sum(axis=2).T + b.radius[:, None] + slopes.radius @ reach.T
    remainder = f.remainder.T
    size += np.abs(b.mid)[:, None] + np.abs(slopes.mid) @ reach.T
    difference[0] -= b.mid[:, None] + slopes.mid @ centres.T
    if order and slopes.mid.any():
        difference[space.degree(1)] -= slopes.mid.T[:, :, None] * radii.T[:, None]

    for head in prepared(stage):
        model = head_model(head, centres, radii, order)
        difference[embedding(tuple(model.axes.tolist()), order, d)] -= model.quotient
        difference[0] -= model.shift
        size += model.size
        remainder = remainder + (model.error - model.rounding)
        rounding = rounding + model.rounding
    # A coefficient is a sum of d products and of fewer than 2H + 3 terms.
    rounding = rounding + gamma(d + 2 * len(stage.heads) + 4) * size
    remainder = above(remainder + rounding)

    flat = difference.reshape(space.count, outputs * boxes)
    polynomial, seen = largest(space, flat, remainder.ravel(), goal)
    return polynomial.reshape(outputs, boxes).T, remainder.T, rounding.T, seen.reshape(outputs, boxes).T


@dataclass(frozen=True, eq=False)
class HeadModel:
    """|A − shift − Q| ≤ error on the cube, with Q in the variables `axes`.

    `size` is |shift| + ‖Q‖₁, and `rounding` is the part of the error that does not shrink with the box.
    """

    axes: np.ndarray
    shift: Float[np.ndarray, "outputs boxes"]
    quotient: Float[np.ndarray, "count outputs boxes"]
    error: Float[np.ndarray, "outputs boxes"]
    rounding: Float[np.ndarray, "outputs boxes"]
    size: Float[np.ndarray, "outputs boxes"]


@functools.lru_cache(maxsize=4)
def prepared(stage: OneStage) -> tuple[KeyMoments, ...]:
    """Return the keys of every head, restricted to the axes along which their slopes differ."""
    return tuple(map(KeyMoments.of, stage.heads))


def head_model(head: KeyMoments, centres: np.ndarray, radii: np.ndarray, order: int) -> HeadModel:
    """Return the Taylor model of one head on every box, in chunks of boxes that stay in the cache."""
    space, parts = layout(len(head.axes), order), _chunks(head, order, len(centres))
    with quiet():
        m = Moments.joined([head.moments(space, centres[rows], radii[rows]) for rows in parts])
        q, norm, error = divided(space, m)
        rounding = np.where(error < np.inf, np.minimum(m.rounding / m.least, error), 0.0)
    return HeadModel(head.axes, m.shift, np.where(np.isfinite(q), q, 0.0), error, rounding, np.abs(m.shift) + norm)


def _chunks(head: KeyMoments, order: int, boxes: int) -> list[slice]:
    """Return parts of the boxes whose moments stay in the cache, and count the time that all of them take."""
    space = layout(len(head.axes), order)
    spend(boxes * (KEY_SECONDS * head.keys.num_keys * (1 + space.count / 20) + MONOMIAL_SECONDS * space.count))
    chunk = max(1, _CHUNK // head.numbers(space))
    return [slice(i, i + chunk) for i in range(0, boxes, chunk)]


def divided(space: Layout, m: Moments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the stored quotient Q = ν/δ, ‖Q‖₁, and a bound of |A − v0 − Q| on the cube, ∞ if there is none."""
    q = quotient(space, m.nu, m.delta)
    norm = above(np.abs(q).sum(axis=0))
    error = (residual(space, q, m.delta) + m.nu_error + norm * m.delta_error) / m.least
    return q, norm, np.where((m.least > 0) & (error >= 0), above(error), np.inf)


@dataclass(frozen=True, eq=False)
class HeadSlopes:
    """|∂A/∂τ_i − P_i| ≤ errors_i on the cube, with polynomials P_i of degree m − 1 in the variables `axes`."""

    axes: np.ndarray
    slopes: Float[np.ndarray, "axes count outputs boxes"]
    errors: Float[np.ndarray, "axes outputs boxes"]


def head_slopes(head: KeyMoments, centres: np.ndarray, radii: np.ndarray, order: int) -> HeadSlopes:
    """Return polynomials for the slopes of a head: the derivatives of the polynomial of its Taylor model.

    Theorem.  Let ν, δ, Q be those of `head_model`, |A − v0 − Q| ≤ e, and |∂_i N − ∂_i ν| ≤ R_Ni, |∂_i D − ∂_i δ| ≤ R_Di
              (`NearMoments.slope_errors`), |D − δ| ≤ R_D. With P = ∂_i Q and S_i = ‖∂_i δ‖₁ + R_Di
                  |∂_i A − P| ≤ (‖∂_i(ν − Q·δ)‖₁ + R_Ni + ‖Q‖₁ R_Di + e·S_i + ‖P‖₁ R_D)/D_lo.
    Proof.    ∂_i A·D = ∂_i N − (A − v0) ∂_i D, since A − v0 = N/D. So (∂_i A − P)·D is
              ∂_i N − (A − v0) ∂_i D − P·D = ∂_i(ν − Q·δ) + (∂_i N − ∂_i ν) − Q (∂_i D − ∂_i δ) − (A − v0 − Q) ∂_i D
              − P (D − δ), because ∂_i ν − Q ∂_i δ − P δ = ∂_i(ν − Q·δ); and |∂_i D| ≤ S_i.
    """
    space, parts = layout(len(head.axes), order), _chunks(head, order, len(centres))
    with quiet():
        near = [head.near(centres[rows], radii[rows]) for rows in parts]
        m = Moments.joined([each.moments(space) for each in near])
        off = SlopeErrors.joined([each.slope_errors(space) for each in near])
        q, norm, error = divided(space, m)
        left = residual(space, q, m.delta, by_degree=True)
        slopes, errors = [], []
        for axis in range(space.d):
            slope = space.differentiated(q, axis)
            of_delta = above(np.abs(space.differentiated(m.delta, axis)).sum(axis=0)) + off.delta[axis]
            size = above(np.abs(slope).sum(axis=0))
            total = left + off.nu[axis] + norm * off.delta[axis] + error * of_delta + size * m.delta_error
            total = above(total / m.least)
            errors.append(np.where((m.least > 0) & (total >= 0), total, np.inf))
            slopes.append(np.where(np.isfinite(slope), slope, 0.0))
    return HeadSlopes(head.axes, np.stack(slopes), np.stack(errors))


def mean_value_model(
    expression: Expression,
    box: Box,
    centres: Float[np.ndarray, "cells d"],
    radii: Float[np.ndarray, "cells d"],
    order: int,
) -> Taylor:
    """Return f(c + rτ) = f(c) + Σ_i g_i r_i τ_i with g in the gradients over the cell, or the middle of the range of f.

    The middle is taken where its error is smaller, as for √x at 0. Only the part of the cell that is in the box counts.
    """
    cells = cells_within(box, centres, radii)
    ranges, gradients = expression.ranges_and_gradients(cells, violations="infinite")
    at_centre = expression.ranges(Interval.point(centres), violations="infinite")
    n, outputs, d = gradients.shape
    mid, radius = np.zeros((2, n, outputs, num_monomials(d, order)))
    (slope, spread), (value, off), (middle, zeroth) = map(centred, (gradients, at_centre, ranges))
    with quiet():
        # g_i r_i is rounded once more, in the coefficient of τ_i.
        first = above((spread * radii[:, None]).sum(axis=2) + U * (np.abs(slope) * radii[:, None]).sum(axis=2) + off)
    first = np.where(np.isnan(first), np.inf, first)
    by_slope = first <= zeroth
    mid[:, :, 0] = np.where(by_slope, value, middle)
    mid[:, :, 1 : d + 1] = np.where(by_slope[:, :, None], slope * radii[:, None], 0.0)
    remainder = np.minimum(first, zeroth)
    mid[np.isinf(remainder)] = 0.0
    return Taylor(mid, radius, remainder)


def interpolant(
    target: FunctionTarget, centres: Float[np.ndarray, "cells d"], radii: Float[np.ndarray, "cells d"], order: int
) -> Taylor:
    """Return f(c + rτ) = Σ_{j ∈ {0,1}^d} p_j τ^j ± the error of interpolation, with enclosed p_j."""
    n, d = centres.shape
    cells = cells_within(target.box, centres, radii)
    lo, hi, c, r = (Interval.point(array) for array in (cells.lo, cells.hi, centres, radii))
    start, slope = (c - lo) / (hi - lo), r / (hi - lo)  # (x − a)/(b − a) = start + slope·τ
    coefficients: dict[tuple[int, ...], Interval] = {
        (): Interval.point(target.corners(cells).reshape(n, *[2] * d, target.num_outputs))
    }
    for axis in range(d):
        at = (slice(None), axis, *[None] * (d - axis))
        split: dict[tuple[int, ...], Interval] = {}
        for power, values in coefficients.items():
            below, change = values[:, 0], values[:, 1] - values[:, 0]
            split[*power, 0], split[*power, 1] = below + change * start[at], change * slope[at]
        coefficients = split
    rows = {tuple(power): row for row, power in enumerate(monomials(d, order).tolist())}
    mid, radius = np.zeros((2, n, target.num_outputs, len(rows)))
    for power, found in coefficients.items():
        mid[..., rows[power]], radius[..., rows[power]] = centred(found)
    remainder = np.repeat(target.interpolation_error(cells)[:, None], target.num_outputs, axis=1)
    return Taylor(mid, radius, remainder)


def choose_order(
    kind_of: Callable[[int], Kind],
    box: Box,
    goal: float,
    *,
    orders: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Return the order that needs fewest leaves for bounds of at most `goal`, and a level from which to start.

    For an order, the coarsest level is found at which most of a few random cells meet the goal. The highest order has
    the coarsest level, up to rounding. Bisection finds the lowest order that meets the goal at the same level.
    Measured: no case of the corpus has another order if the cost of a leaf, which grows with the number of monomials,
    is counted as well.
    """
    d = box.d
    tried = tuple(orders) if orders is not None else _ORDERS.get(d, (3, 4))
    places = np.random.default_rng(0).random((_PILOTS, d))
    wanted = Goal(max(goal, TINY))
    finest = _FINEST // d

    @functools.cache
    def cells_of(level: int) -> tuple[np.ndarray, np.ndarray]:
        return cell_boxes(box, level, np.floor(places * 2.0**level).astype(np.int64))

    def level_of(order: int, levels: range) -> int | None:
        """Return the coarsest of the levels at which most cells meet the goal, or None if the last one does not."""
        if not levels:
            return None
        centres, radii = (np.concatenate(parts) for parts in zip(*map(cells_of, levels), strict=True))
        found = kind_of(order).bounds(centres, radii, wanted)
        is_met = meets(found.upper, found.floors, wanted.value).reshape(len(levels), -1).mean(axis=1) >= _MOST_PILOTS
        return levels[int(np.argmax(is_met))] if is_met[-1] else None

    low, high, half = 0, len(tried) - 1, range(1 + finest // 2)
    level = level_of(tried[low], half)
    if level is None:
        level = level_of(tried[low], range(len(half), finest + 1))
    coarser = level_of(tried[high], range(finest + 1 if level is None else level))
    if coarser is None:
        if level is None:
            return tried[len(tried) // 2], 0
        return tried[low], max(0, min(level - 1, _MOST_AT_ONCE // d))
    level = coarser
    while high - low > 1:
        middle = (low + high) // 2
        is_met = level_of(tried[middle], range(level, level + 1)) is not None
        low, high = (low, middle) if is_met else (middle, high)
    return tried[high], max(0, min(level - 1, _MOST_AT_ONCE // d))
