"""Leaves of gradients: sup |∂f/∂x_i − ∂stage/∂x_i| over small boxes, for every output and every variable.

On {c + rτ : τ ∈ [−1, 1]^d} the partial derivatives of f, which are an expression, have Taylor polynomials T_i of degree
m − 1 with remainders R_i. Those of a head are P_i/r_i with an error E_i/r_i (`taylor.head_slopes`). So
    sup |∂_i f − ∂_i stage| ≤ max |T_i − B_i − Σ_h P_hi/r_i| + R_i + Σ_h E_hi/r_i.

A cell that lies in an excluded neighbourhood of a kink has no bound, and needs none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.jet_balls import U, above
from attnc.numerics.jet_tables import embedding
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import up
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.kinds.taylor import head_slopes, prepared
from attnc.proofs.margins import LEAF_ROOM
from attnc.proofs.rounding.slopes import SlopeRounding
from attnc.proofs.stages.extraction import OneStage
from attnc.proofs.taylor.polynomials import gamma, layout
from attnc.proofs.taylor.ranges import largest
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.taylor import Taylor, taylor


@dataclass(frozen=True, eq=False)
class GradientKind(Kind):
    """Taylor polynomials of all partial derivatives, of the network of one degree m and of f of degree m − 1.

    `gradient` has the outputs ∂f_o/∂x_i, ordered by o, then by i. The bounds have the same order.
    """

    stage: OneStage
    gradient: Expression
    degree: int
    rounding: SlopeRounding
    is_everywhere: bool = True  # False: errors that are seen may be those of excluded points, and do not count
    name = "taylor"

    @property
    def order(self) -> int:
        return self.degree

    def model(self, centres: np.ndarray, radii: np.ndarray) -> Taylor:
        """Return the Taylor polynomials of all partial derivatives of f."""
        return taylor(self.gradient, centres, radii, self.degree - 1)

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        return self.of_model(self.model(centres, radii), centres, radii, goal)

    def of_model(self, f: Taylor, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        """Return the bounds for these polynomials of the derivatives."""
        level = self.rounding.level
        sharp = Goal(goal.value - level, goal.growth)
        boxes, outputs, _ = f.mid.shape
        polynomial, remainder = np.full((2, boxes, outputs), np.inf)
        seen, floor = np.zeros((boxes, outputs)), np.zeros((boxes, outputs))
        some = np.flatnonzero(np.isfinite(f.remainder).any(axis=1))
        if len(some):
            with quiet():
                part = Taylor(f.mid[some], f.radius[some], f.remainder[some])
                found = self._differences(part, centres[some], radii[some], sharp)
                polynomial[some], remainder[some], seen[some] = found
        rounding = self.rounding.over(centres, radii, goal.value)
        exact = above(polynomial + remainder) * (1 + LEAF_ROOM)
        upper = np.asarray(up(exact + rounding))
        misses = np.flatnonzero(upper.max(axis=1) > goal.value)
        if level and len(misses):  # rounding above its level at the centre, which halving does not remove
            at_centre = self.rounding.on(centres[misses], np.zeros_like(radii[misses]))
            floor[misses] = np.maximum(0.0, at_centre - level)
        attained = seen - remainder
        terms = {
            "approximation": polynomial * (1 + LEAF_ROOM),
            "remainder": above(remainder) * (1 + LEAF_ROOM),
            "rounding": rounding,
        }
        at_least = float(np.max(attained, initial=0.0, where=np.isfinite(attained) & self.is_everywhere))
        return Bounds(np.where(np.isnan(upper), np.inf, upper), terms, at_least, floor)

    def _differences(
        self, f: Taylor, centres: np.ndarray, radii: np.ndarray, goal: Goal
    ) -> tuple[Float[np.ndarray, "boxes outputs"], ...]:
        """Return bounds of the polynomials and of the remainders, and the largest values seen."""
        boxes, d = centres.shape
        space, outputs = layout(d, self.degree - 1), len(self.stage.constant.mid)
        # (count, outputs, axes, boxes)
        difference = f.mid.transpose(2, 1, 0).reshape(space.count, outputs, d, boxes).copy()
        remainder = f.remainder.T.reshape(outputs, d, boxes).copy()
        remainder += f.radius.sum(axis=2).T.reshape(outputs, d, boxes)
        size = np.abs(difference).sum(axis=0)
        difference[0] -= self.stage.linear.mid[:, :, None]
        remainder += self.stage.linear.radius[:, :, None]
        size += np.abs(self.stage.linear.mid)[:, :, None]
        for head in prepared(self.stage):
            model = head_slopes(head, centres, radii, self.degree)
            places = embedding(tuple(model.axes.tolist()), self.degree - 1, d)
            for own, axis in enumerate(model.axes):
                slope = model.slopes[own] / radii[:, axis]
                difference[places, :, axis] -= slope
                size[:, axis] += np.abs(slope).sum(axis=0)
                remainder[:, axis] += above(model.errors[own] / radii[:, axis])
            if not head.is_exact and head.keys.num_keys > 1:
                # Along other axes slopes differ by their radii alone: |∂_i A| = |Σ p_k (v_k − A)(a_ki − ā_i)|.
                keys = head.head
                largest_value = (np.abs(keys.values.mid) + keys.values.radius).max(axis=0)[:, None]
                if keys.carried is not None:
                    gates = (np.abs(keys.carried.mid) + keys.carried.radius).max(axis=0)
                    largest_value = largest_value + gates @ (np.abs(centres) + radii).T
                for axis in np.setdiff1d(np.arange(d), model.axes):
                    remainder[:, axis] += above(4 * keys.slopes.radius[:, axis].max() * largest_value)
        # A coefficient of P_i is a product of three numbers, and a difference has H + 2 terms.
        remainder = above(remainder + gamma(2 * len(self.stage.heads) + 8) * size)
        flat = difference.reshape(space.count, -1)
        polynomial, seen = largest(space, flat, remainder.ravel(), goal)
        shape = (outputs * d, boxes)
        return polynomial.reshape(shape).T, remainder.reshape(shape).T, seen.reshape(shape).T


@dataclass(frozen=True, eq=False)
class ExcludedKind(Kind):
    """Cells of one variable that lie in one of the excluded intervals. Nothing is claimed there."""

    intervals: Sequence[tuple[float, float]]
    outputs: int
    name = "excluded"

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        # The ends of a cell are within 4 units in the last place of the numbers computed here.
        room = 8 * U * (np.abs(centres) + radii)
        lo, hi = (centres - radii - room)[:, 0], (centres + radii + room)[:, 0]
        is_inside = functools.reduce(np.logical_or, [(lo >= a) & (hi <= b) for a, b in self.intervals])
        return Bounds(np.repeat(np.where(is_inside, 0.0, np.inf)[:, None], self.outputs, axis=1))
