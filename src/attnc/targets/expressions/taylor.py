"""Taylor polynomials of expressions over boxes, with enclosed coefficients and a proved remainder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_balls import Ball, above
from attnc.numerics.jet_tables import degree_blocks, embedding, num_monomials
from attnc.numerics.jets import Jet, constant, variable
from attnc.numerics.limits import spend
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import Array, Mask, add_down, add_up
from attnc.targets.expressions.evaluation import evaluate_boxes, operation
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Variable

MAX_MONOMIALS = 20_000
"""Maximum number of monomials of a jet; the bounds of rounding errors in `jet_balls` hold for 2¹⁶ summands."""
JET_SECONDS, COEFFICIENT_SECONDS = 1e-4, 3e-8
"""Counted seconds of a step of the evaluation in jets, and for each coefficient of them. Measured, as STEP_SECONDS."""
COEFFICIENTS_PER_CHUNK = 2**16
"""Number of coefficients of a jet that are computed at a time. A few jets of this size fit into the cache."""


@dataclass(frozen=True, eq=False)
class Taylor:
    """f(c + rτ) = Σ_j p_j τ^j + e(τ) on τ ∈ [−1, 1]^d, |p_j − mid_j| ≤ radius_j, |e| ≤ remainder.

    The p_j are the Taylor coefficients of f at the centre times r^j, in the order of `jets.monomials`. The error falls
    towards the centre: |e(sτ)| ≤ s^{order+1}·remainder for 0 ≤ s ≤ 1. Where there is no jet (a kink, a value outside
    the domain, an overflow) the remainder is infinite, and mid and radius are meaningless zeros.
    """

    mid: Float[np.ndarray, "boxes outputs count"]
    radius: Float[np.ndarray, "boxes outputs count"]
    remainder: Float[np.ndarray, "boxes outputs"]


def taylor(
    expression: Expression, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"], order: int
) -> Taylor:
    """Return the Taylor polynomials of the outputs, up to degree `order`, on the boxes {c + rτ : τ ∈ [−1, 1]^d}.

    Jets are computed to one order more. Their last terms are added to the remainder, which makes it tighter.
    All bounds assume IEEE arithmetic and `rounding.LIBM_ASSUMPTION`.
    """
    centres, radii = np.asarray(centres, dtype=np.float64), np.asarray(radii, dtype=np.float64)
    d, outputs = len(expression.variables), expression.schedule[1]
    _check(expression, centres, radii, order)
    count = num_monomials(d, order)
    mid, radius = np.zeros((2, len(centres), len(outputs), count))
    remainder = np.empty((len(centres), len(outputs)))
    spend(len(expression.schedule[0]) * (JET_SECONDS + COEFFICIENT_SECONDS * count * len(centres)))
    chunk = max(64, COEFFICIENTS_PER_CHUNK // count)
    with quiet():
        for start in range(0, len(centres), chunk):
            rows = slice(start, start + chunk)
            done = _jets(expression, centres[rows], radii[rows], order + 1)
            for column, number in enumerate(outputs):
                _store(done[number], d, order, mid[rows, column], radius[rows, column], remainder[rows, column])
    return Taylor(mid, radius, remainder)


def _check(expression: Expression, centres: Array, radii: Array, order: int) -> None:
    d = len(expression.variables)
    if centres.ndim != 2 or centres.shape[1] != d or radii.shape != centres.shape:
        raise InputError(
            f"{expression.text!r} has the variables ({', '.join(expression.variables)}), so that centres and radii "
            f"have the shape (n, {d}), not {centres.shape} and {radii.shape}."
        )
    if not (np.isfinite(centres).all() and np.isfinite(radii).all() and (radii >= 0).all()):
        raise InputError("the centres and radii of boxes must be finite numbers, the radii not negative.")
    if order < 0:
        raise InputError(f"the order of a Taylor polynomial is at least 0, not {order}.")
    if num_monomials(d, order + 1) > MAX_MONOMIALS:
        raise InputError(
            f"cannot expand {expression.text!r} to order {order}: up to order {order + 1}, which bounds the remainder, "
            f"there are {num_monomials(d, order + 1)} monomials in {d} variables, more than {MAX_MONOMIALS}. "
            "Choose a smaller order."
        )


@dataclass(frozen=True, eq=False)
class _Done:
    """The jet of a step, the boxes where it holds, and the range of the step."""

    jet: Jet
    holds: Mask
    range: Interval


def _jets(expression: Expression, centres: Array, radii: Array, order: int) -> dict[int, _Done]:
    """Return the jets of the outputs, by the numbers of their steps."""
    (steps, outputs), names = expression.schedule, expression.variables
    box = Interval(add_down(centres, -radii), add_up(centres, radii))
    natural = evaluate_boxes(steps, names, box, gradients=False).ranges
    columns = {
        name: variable(i, np.ascontiguousarray(centres[:, i]), np.ascontiguousarray(radii[:, i]))
        for i, name in enumerate(names)
    }
    last_use = {i: number for number, step in enumerate(steps) for i in step.arguments}
    done: dict[int, _Done] = {}
    for number, (step, known) in enumerate(zip(steps, natural, strict=True)):
        arguments = [done[i] for i in step.arguments]
        if arguments:
            jet = operation(step).jet([a.jet for a in arguments], [a.range for a in arguments], order)
        else:
            jet = columns[step.node.name] if isinstance(step.node, Variable) else constant(Ball.around(known))
        holds = jet.is_finite
        for argument in arguments:
            holds = holds & argument.holds
        done[number] = _Done(jet, holds, _common(known, jet.range, holds))
        for i in set(step.arguments):  # frees memory: jets are large
            if last_use[i] == number and i not in outputs:
                del done[i]
    return done


def _common(a: Interval, b: Interval, holds: Mask) -> Interval:
    """Return the intersection of two enclosures of the same values, or all reals where there is no jet."""
    lo, hi = np.maximum(a.lo, b.lo), np.minimum(a.hi, b.hi)
    known = holds & (lo <= hi)
    return Interval(np.where(known, lo, -np.inf), np.where(known, hi, np.inf))


def _store(done: _Done, d: int, order: int, mid: Array, radius: Array, remainder: Array) -> None:
    """Write the jet with all monomials in d variables. Its degree order + 1 is added to the remainder."""
    jet, holds = done.jet, done.holds
    degree = min(jet.degree, order)
    where = embedding(jet.variables, degree, d)
    sizes = [block.stop - block.start for block in degree_blocks(len(jet.variables), degree)]
    mid[:, where] = np.where(holds, jet.mid[: sum(sizes)], 0.0).T
    radius[:, where] = np.repeat(np.where(holds, jet.radius[: degree + 1], 0.0), sizes, axis=0).T
    beyond = jet.remainder if jet.degree == degree else above(jet.remainder + jet.total[degree + 1])
    remainder[:] = np.where(holds, beyond, np.inf)
