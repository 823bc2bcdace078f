"""Selection among the cells of a grid: what is proved of it.

A softmax over scores β(2L_j·y − |L_j|²) picks the centre L_j nearest to y, and what follows is how far the value of its
cell can be from the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.partition.grid import Grid, Variation, constant_norm, variation_norm
from attnc.constructions.partition.positions import Positions
from attnc.constructions.partition.selection import average_error, far_weight, round_up, score_error, underflow
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Selection:
    """How well a softmax over cells selects those that hold x when widened."""

    delta: float  # the error of a score
    leak: float  # the weight of all other cells, score errors included
    near: int  # how many keys can belong to the widened cells that hold x


@dataclass(frozen=True, eq=False)
class Partition:
    """A grid with a value per cell, a temperature, and the proof of `bound`.

    Theorem.  With ρ = ½ + η, |out − f| at x is at most the largest |f(x) − value of C| over the cells C that hold x
              when widened to ρ, plus leak(β, η)·osc + rounding. In L_p: the norms of both.
    Proof.    The weights factorise over the axes. Centres farther than ρ from y on some axis get at most `leak`
              (`selection.far_weight`, the union over axes). All others have cells that hold x when widened to ρ, and an
              average of their values is off by at most the largest, whatever their weights. That is why errors in
              the scores do no harm beyond the leak: a score off by δ multiplies the leak by e^{2δ}, no more.
    """

    target: Target
    grid: Grid
    values: Float[np.ndarray, "cells outputs"]
    beta: float
    eta: float
    positions: Positions
    p: float
    given_selection: Selection | None = None  # of other scores than these, with a proof of their own

    @cached_property
    def selection(self) -> Selection:
        if self.given_selection is not None:
            return self.given_selection
        grid = self.grid
        delta = grid_score_error(self.target, grid, self.beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, math.floor(1 + 2 * self.eta) + 1) for count in grid.counts)
        return Selection(delta, grid_leak(grid, self.beta, self.eta, delta), near)

    @cached_property
    def variation(self) -> Variation:
        """Over the cells widened to ρ."""
        return variation_norm(self.target, self.grid, 0.5 + self.eta, self.p)

    @cached_property
    def _variation_terms(self) -> list[Term]:
        """In L_∞ the variation over widened cells. In L_p that, or what holds for jumps at the cells' borders:

        farther than η from every border x has one near cell, so the variation over cells narrowed by η counts there;
        the rest, a fraction 1 − ((1−2η)/(1+2η))^d of the widened cells, is the boundary layer.
        """
        what = f"the change of f over cells widened by η = {self.eta:.3g}"
        if self.p == math.inf:
            return [Term("variation", self.variation.value, what)]
        widened = Term("variation", self.variation.value, f"the L{self.p:g} norm of {what}")
        if self.eta >= 0.25:
            return [widened]
        inner = variation_norm(self.target, self.grid, 0.5 - self.eta, self.p).value
        wide = self.eta + float(self.grid.query_error.max())  # which border y is near is known to this
        fraction = 1 - ((1 - 2 * wide) / (1 + 2 * wide)) ** self.grid.box.d
        layer = round_up(self.variation.value * fraction ** (1 / self.p))
        if inner + layer >= widened.value:
            return [widened]
        return [
            Term("variation", inner, f"the L{self.p:g} norm of the change of f inside the cells"),
            Term("boundary layer", layer, f"the same on a layer of width {2 * self.eta:.2g} cells about their borders"),
        ]

    @cached_property
    def stored_values(self) -> Float[np.ndarray, "keys outputs_per_position"]:
        """The value of key (j, i), in the order of keys: cells first, positions within them."""
        by_position = self.values.reshape(len(self.values), self.positions.n, -1)
        return self.positions.undo_leak(by_position).reshape(len(self.values) * self.positions.n, -1)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        return (("points_per_axis", " × ".join(map(str, self.grid.counts))), ("beta", self.beta), ("eta", self.eta))

    @cached_property
    def bound(self) -> Bound:
        grid, positions, u = self.grid, self.positions, UNIT_ROUNDOFF[self.grid.dtype]
        num_keys = grid.num_cells * positions.n
        delta, leak, near = self.selection.delta, self.selection.leak, self.selection.near
        largest = float(np.abs(self.stored_values).max(initial=0.0))
        cast = float(np.abs(self.stored_values - self.stored_values.astype(grid.dtype)).max(initial=0.0))
        rounding = average_error(num_keys, near, leak, u) * largest + cast + underflow(num_keys, grid.dtype)
        terms = [
            Term("leak", leak * self._spread, f"weight of all farther cells at β = {self.beta:.6g} in units of a cell"),
        ]
        if positions.n > 1:
            by_position = self.values.reshape(len(self.values), positions.n, -1)
            off, undone = positions.residue(by_position, self.stored_values.reshape(by_position.shape))
            rounding += undone
            wrong = math.expm1(2 * delta) if delta < 300 else math.inf
            terms.append(Term("position", wrong * off, "weights of other positions, not undone"))
        reason = f"{grid.dtype} sums over {num_keys:,} keys in any order, {near} of them near"
        terms.append(Term("rounding", rounding, reason))
        # ‖constant‖_p over the box is the constant times vol^{1/p}.
        volume = constant_norm(grid.box, self.p)
        constants = (Term(t.name, round_up(t.value * volume), t.reason) for t in terms)
        return Bound((*self._variation_terms, *constants))

    @property
    def _spread(self) -> float:
        """|f(x) − v_j| ≤ |v_near − v_j| + variation, as x lies in some cell."""
        largest = self.variation.value
        if self.p < math.inf:
            largest = variation_norm(self.target, self.grid, 0.5 + self.eta).value
            largest += float(np.ptp(self.values, axis=0).max())  # the average of a cell is within its variation
        return float(np.ptp(self.values, axis=0).max()) + largest


def grid_score_error(target: Target, grid: Grid, beta: float, margin: float) -> float:
    """δ of the scores: the sum of 2βL_i·y_i over the axes, −β|L|², and M.

    An axis of the second input is on the side of the keys: its 2L_i(scale·x_i + offset) is multiplied out there, so
    the sizes of both parts count. Four roundings more than usual cover the making of those coefficients.
    """
    reach = grid.radius + 0.5 + grid.query_error
    if len(target.input_shapes) > 1:
        start = math.prod(target.input_shapes[0])
        reach[start:] = (grid.scale * grid.box.magnitude + np.abs(grid.offset))[start:]
    with np.errstate(over="ignore"):
        size = beta * float((2 * grid.radius * reach + grid.radius**2).sum()) + margin
    return score_error(grid.box.d + 6, size, UNIT_ROUNDOFF[grid.dtype])


def grid_leak(grid: Grid, beta: float, eta: float, delta: float) -> float:
    """The weight of all centres farther than ½ + η on some axis: the union over the axes."""
    overhang = float(grid.query_error.max())  # at the ends of the box r may exceed ½ by this much
    if eta <= overhang:
        return 1.0
    return min(1.0, sum(far_weight(beta, 0.5 + eta, count, delta, overhang) for count in grid.counts))
