"""The methods of branch and bound for one stage against an expression: Taylor leaves, and mean values at kinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import TINY, U, above
from attnc.numerics.jet_tables import num_monomials
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Bounds, Kind
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.leaves.deviations import cells_within
from attnc.proofs.leaves.taylor import taylor_enclosures
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import Taylor, taylor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_MEAN_VALUE_ORDER = 3  # of the network, on cells so small that f is known to first order only
_ORDERS = {1: (6, 8, 10, 12, 14, 16), 2: (6, 8, 10, 12, 14, 16), 3: (4, 6, 8, 10, 12), 4: (4, 6, 8)}
_PILOTS = 12  # cells that stand for all others in the choice of an order
_MOST = 0.7  # of them
_OVERHEAD = 80  # monomials that cost as much as all that does not depend on their number
_FINEST = 22  # log₂ of the number of cells up to which an order is thought of
_MOST_AT_ONCE = 12  # log₂ of the number of cells to start from


def taylor_kind(stage: OneStage, expression: Expression, order: int) -> Kind:
    """Taylor polynomials of this order on both sides; no bound where the expression has a kink inside the cell."""

    def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        return model_bounds(stage, taylor(expression, centres, radii, order), centres, radii, order, goal)

    return Kind("taylor", order, bounds)


def mean_value_kind(stage: OneStage, expression: Expression, box: Box) -> Kind:
    """The expression by its gradients over the cell, at a kink the hull of both sides: for tiny cells there."""

    def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        f = mean_value_model(expression, box, centres, radii, _MEAN_VALUE_ORDER)
        return model_bounds(stage, f, centres, radii, _MEAN_VALUE_ORDER, goal)

    return Kind("taylor", _MEAN_VALUE_ORDER, bounds, is_fallback=True)


def model_bounds(stage: OneStage, f: Taylor, centres: np.ndarray, radii: np.ndarray, order: int, goal: Goal) -> Bounds:
    """Of |f − stage|, with a polynomial of the target on every cell."""
    found = taylor_enclosures(stage, f, centres, radii, order, goal)
    attained = found.seen - found.remainder
    return Bounds(
        found.upper,
        {"approximation": found.polynomial, "remainder": found.remainder},
        float(np.max(attained, initial=0.0, where=np.isfinite(attained))),
        found.rounding,
    )


def mean_value_model(
    expression: Expression,
    box: Box,
    centres: Float[np.ndarray, "cells d"],
    radii: Float[np.ndarray, "cells d"],
    order: int,
) -> Taylor:
    """f(c + rτ) = f(c) + Σ_i g_i r_i τ_i with g in the gradients over the cell; or the middle of the range.

    The second where it is the better of the two, as for √x at 0. Only that part of the cell counts which is in the box.
    """
    cells = cells_within(box, centres, radii)
    ranges, gradients = expression.ranges_and_gradients(cells, violations="infinite")
    at_centre = expression.ranges(Interval.point(centres), violations="infinite")
    n, outputs, d = gradients.shape
    mid, radius = np.zeros((2, n, outputs, num_monomials(d, order)))
    with np.errstate(all="ignore"):
        slope, value, middle = gradients.mid, at_centre.mid, ranges.mid
        spread = up(np.maximum(gradients.hi - slope, slope - gradients.lo))
        # g_i r_i is rounded once more, in the coefficient of τ_i.
        first = above((spread * radii[:, None]).sum(axis=2) + U * (np.abs(slope) * radii[:, None]).sum(axis=2))
        first = above(first + np.maximum(at_centre.hi - value, value - at_centre.lo))
        zeroth = above(np.maximum(ranges.hi - middle, middle - ranges.lo))
    first, zeroth = (np.where(np.isnan(part), np.inf, part) for part in (first, zeroth))
    by_slope = first <= zeroth
    mid[:, :, 0] = np.where(by_slope, value, middle)
    mid[:, :, 1 : d + 1] = np.where(by_slope[:, :, None], slope * radii[:, None], 0.0)
    remainder = np.minimum(first, zeroth)
    mid[np.isinf(remainder)] = 0.0
    return Taylor(mid, radius, remainder)


def choose_order(
    kind_of: Callable[[int], Kind],
    box: Box,
    goal: float,
    *,
    orders: Sequence[int] | None = None,
) -> tuple[int, int]:
    """The order whose leaves will cost least, for bounds of at most `goal`, and a level from which to start.

    For every order, the coarsest level is found at which most of a few cells at random meet the goal; the cost of a
    leaf is nearly linear in the number of monomials.
    """
    d = box.d
    tried = tuple(orders) if orders is not None else _ORDERS.get(d, (3, 4))
    places = np.random.default_rng(0).random((_PILOTS, d))
    wanted = Goal(max(goal, TINY))
    best, level = (math.inf, tried[len(tried) // 2], 1), _FINEST // d
    for order in tried:
        found = _coarsest(kind_of(order), box, places, wanted, level)
        if found is not None:
            level = found
            best = min(best, (2.0 ** (d * level) * (_OVERHEAD + num_monomials(d, order)), order, level))
    return best[1], max(0, min(best[2] - 1, _MOST_AT_ONCE // d))


def _coarsest(kind: Kind, box: Box, places: np.ndarray, goal: Goal, finest: int) -> int | None:
    """The coarsest level at which most cells meet the goal; None if that is beyond `finest`.

    By bisection. In one variable cells are so cheap that those of all levels take no longer than those of a few.
    """

    def are_met(levels: Sequence[int]) -> Bool[np.ndarray, " levels"]:
        boxes = [cell_boxes(box, level, np.floor(places * 2.0**level).astype(np.int64)) for level in levels]
        centres, radii = (np.concatenate(parts) for parts in zip(*boxes, strict=True))
        met = kind.bounds(centres, radii, goal).meet(goal.value)
        return np.asarray(met.reshape(len(levels), -1).mean(axis=1) >= _MOST)

    if box.d == 1:
        met = are_met(range(finest + 1))
        return int(np.argmax(met)) if met[-1] else None
    low, high = -1, finest  # not met at `low`, met at `high`
    if not are_met([high])[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if are_met([middle])[0] else (middle, high)
    return high
