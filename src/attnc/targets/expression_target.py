"""An expression on a box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import DomainError, InputError
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ASSUMPTION, up
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import REACH, points_at_kinks
from attnc.targets.expressions.parsing import CONSTANTS
from attnc.targets.target import Target, show_point

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values


class ExpressionTarget(Target):
    """An expression. Everything about it is proved with intervals, and nothing is sampled."""

    expression: Expression
    assumptions = (LIBM_ASSUMPTION,)

    def __init__(self, expression: Expression, box: Box) -> None:
        _check_variables(expression, box)
        self.expression, self.box, self.text = expression.with_variables(box.names), box, expression.text
        if box.is_bounded:
            self.expression.check_domain(list(zip(box.lo, box.hi, strict=True)))
        else:
            self.expression.ranges(Interval(box.lo[None], box.hi[None]))  # raises DomainError if it may be undefined
        self.is_continuous = not expression.discontinuous
        self.input_shapes = ((box.d,),)
        self.output_shape = (len(expression.outputs),) if expression.is_tuple else ()

    def __call__(self, points: Points) -> Values:
        values = self.expression(points)
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            where = show_point(self.box.names, points[np.argmax(bad)])
            raise DomainError(f"{self.text} has no finite value at {where}; choose a box that leaves this point out")
        return values

    def critical_points(self) -> Float[np.ndarray, "points d"]:
        return points_at_kinks(self.expression, self.box if self.box.is_bounded else self.box.core(REACH))

    def variation(self, cells: Interval, centres: Points, values: Values | None = None) -> Float[np.ndarray, " cells"]:
        """Use the smaller enclosure: the interval range, or the mean value form f(c) + Σ ∂_i f(cell)·(x_i − c_i).

        The first also holds where derivatives are unbounded (√x at 0). The second is tight on small cells.
        """
        values = self(centres) if values is None else values
        ranges, gradients = self.expression.ranges_and_gradients(cells, violations="infinite")
        at_centre = self.expression.ranges(Interval(centres, centres), violations="infinite")
        by_range, off_centre = (
            np.maximum(up(found.hi - values), up(values - found.lo)) for found in (ranges, at_centre)
        )
        by_slope = up(off_centre + self._change(cells, centres, gradients, np.zeros(gradients.shape, bool)))
        return np.asarray(np.minimum(by_range, by_slope).max(axis=1))

    def _change(self, cells: Interval, centres: Points, gradients: Interval, is_exempt: np.ndarray) -> Values:
        """Return Σ |∂_i f(cell)|·reach_i from the centres over all axes that are not exempt, rounded up."""
        reach = up(np.maximum(cells.hi - centres, centres - cells.lo))[:, None]
        with quiet():
            steps = np.where(is_exempt | (reach <= 0), 0.0, up(gradients.mag * reach))
            return np.nan_to_num(up(steps.sum(axis=2), self.box.d), nan=np.inf, posinf=np.inf)

    def enclosure(self, cells: Interval) -> Interval:
        """Intersect the interval range with mean value forms about the corners that most likely have the extremes.

        Along an axis on which the derivative keeps its sign, the extremes are at the ends, and nothing is lost. Along
        the others, f changes by at most Σ |∂_i f(cell)|·reach_i from the middle.
        """
        ranges, gradients = self.expression.ranges_and_gradients(cells, violations="infinite")
        rises, falls, middle = gradients.lo >= 0, gradients.hi <= 0, cells.mid
        change = self._change(cells, middle, gradients, rises | falls)
        at_lo, at_hi, between = (part[:, None] for part in (cells.lo, cells.hi, middle))  # one for all outputs
        least = np.where(rises, at_lo, np.where(falls, at_hi, between))
        most = np.where(rises, at_hi, np.where(falls, at_lo, between))
        n, outputs, d = gradients.shape
        corners = np.stack([least, most]).reshape(-1, d)
        at_corners = self.expression.ranges(Interval.point(corners), violations="infinite")
        own = np.arange(outputs)  # each output has corners of its own
        below = at_corners.lo.reshape(2, n, outputs, outputs)[0][:, own, own]
        above = at_corners.hi.reshape(2, n, outputs, outputs)[1][:, own, own]
        lo = np.maximum(ranges.lo, -up(change - below))
        hi = np.minimum(ranges.hi, up(above + change))
        return Interval(lo, np.maximum(lo, hi))

    def describe(self) -> str:
        return str(self.text)


def _check_variables(expression: Expression, box: Box) -> None:
    missing = [name for name in expression.variables if name not in box.names]
    if missing:
        name = missing[0]
        raise InputError(
            f"the variable {name} of {expression.text!r} has no box; add {name}=(lo, hi) (on the command line: "
            f"--box {name}=LO:HI)"
        )
    unused = [name for name in box.names if name not in expression.variables]
    if unused:
        known = ", ".join(expression.variables) or "none"
        why = f". {unused[0]} is a number there: give the variable another name" if unused[0] in CONSTANTS else ""
        raise InputError(f"box: {unused[0]} is not a variable of {expression.text!r} (its variables: {known}){why}")
