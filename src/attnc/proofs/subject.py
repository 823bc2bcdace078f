"""What is proved of one stage: which kinds of leaves it takes, each with the rounding of the engines."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Bounds, Kind
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.integral import Integral
from attnc.proofs.leaves.deviations import cells_within
from attnc.proofs.leaves.interpolants import ORDERS, interpolant_kind
from attnc.proofs.leaves.kinds import choose_order, mean_value_kind, taylor_kind
from attnc.proofs.leaves.selection import selection_bounds
from attnc.proofs.leaves.tails import tail_bound
from attnc.proofs.rounding.program import Roundings
from attnc.proofs.rounding.stage import rounding_bounds, score_errors
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.function_target import FunctionTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

ENOUGH = 1e-3
"""A rounding below this part of the goal is not made sharper."""
ROUNDING_POINTS = 256
ROUNDING_TOLERANCE = 1.2
"""Of a bound of rounding over a cell, against those at points."""
FEW_KEYS = 64
"""Up to so many keys both kinds of leaf are tried on every cell: a gate is hard in one place and soft in another."""
PILOTS = 64
"""Cells on which Taylor and selection leaves are compared before the work begins."""
REACHES = (4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, *(2.0**n for n in (7, 8, 9, 10, 12, 14, 17, 20)))
"""Where the tails of an infinite box may begin."""
SPARE = 1.01
"""Rounding is stated so much larger than it is proved to be: a checker groups its terms in another way."""
ORDER_OF_NORM = 4


@dataclass(frozen=True, eq=False)
class Way:
    """Kinds of leaves to try, and the level of the first cells."""

    kinds: tuple[Kind, ...]
    start_level: int | None
    selects: bool = False


@dataclass(eq=False)
class Subject:
    """What is proved: a stage with the roundings of its program against a target."""

    stage: OneStage
    roundings: Roundings
    target: Target
    truncation: float
    rounding_level: float = 0.0

    def cut_tails(self, goal: float) -> dict[int, float]:
        """Of an infinite box: the finite part that leaves have to cover, and bounds beyond it, by side.

        The smallest core beyond which bounds meet the goal, or are below what rounding costs at its ends; else that
        with the smallest bounds. Of gelu(x − 20) nothing is known beyond 16: InputError if that is so for every core.
        """
        box = self.target.box
        if box.is_bounded or not isinstance(self.target, ExpressionTarget):
            return {}
        sides = [side for side, end in ((-1, box.lo[0]), (1, box.hi[0])) if np.isinf(end)]
        refusal, found = None, None
        cores = [box.core(reach) for reach in REACHES]
        rounding = self._rounding_at(np.array([[core.lo, core.hi] for core in cores]).reshape(-1, 1))
        for core, at_ends in zip(cores, rounding.reshape(len(cores), 2).max(axis=1), strict=True):
            starts = {-1: -float(core.lo[0]), 1: float(core.hi[0])}
            try:
                tails = {
                    side: float(tail_bound(self.stage, self.target.expression, side, starts[side]).max())
                    for side in sides
                }
            except InputError as error:
                refusal = error
                continue
            if found is None or max(tails.values()) < max(found[0].values()):
                found = tails, core
            if max(tails.values()) <= max(goal, at_ends):
                break
        if found is None:
            assert refusal is not None
            raise refusal
        self.target = copy.copy(self.target)
        self.target.box = found[1]
        return found[0]

    def sampled_rounding(self) -> float:
        """A little above the largest cost of rounding at points here and there."""
        box = self.target.box.core(REACHES[0])
        places = np.random.default_rng(0).random((ROUNDING_POINTS, box.d))
        corners = np.array(list(itertools.product((0.0, 1.0), repeat=box.d)))
        points = box.lo + np.concatenate([places, corners]) * box.widths
        return ROUNDING_TOLERANCE * float(self._rounding_at(points).max())

    def _rounding_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
        found = rounding_bounds(self.stage, self.roundings, points, np.zeros_like(points), truncation=self.truncation)
        return np.asarray(found.max(axis=1))

    def ways(self, goal: float) -> list[Way]:
        """Taylor leaves with mean values where there is a kink, or selection leaves: what promises more comes first."""
        stage, box = self.stage, self.target.box
        orders = ORDERS if isinstance(self.target, FunctionTarget) else None
        order, level = choose_order(self._local, box, goal, orders=orders)
        taylor, selection = self._rounded(self._local(order)), self._selection()
        few_keys = all(len(head.offsets.mid) <= FEW_KEYS for head in stage.heads)
        selects = all(self._selects(taylor, selection, at) for at in (level, level + 1))
        if few_keys:
            kinds = (*((selection, taylor) if selects else (taylor, selection)), *self._at_kinks(is_fallback=False))
            return [Way(kinds, None if selects else level)]
        by_taylor = Way((taylor, *self._at_kinks(is_fallback=True)), level)
        return [Way((selection,), None, selects=True), by_taylor] if selects else [by_taylor]

    def way_of_norm(self, goal: float) -> Way:
        """The same for an L_p norm, to which all cells matter: chosen on cells of the size of a key's own.

        `goal` is about what is wanted at points: cells across a jump never come there.
        """
        d, num_keys = self.target.box.d, max((len(head.offsets.mid) for head in self.stage.heads), default=1)
        taylor, selection = self._rounded(self._local(ORDER_OF_NORM)), self._selection()
        if num_keys > FEW_KEYS and self._selects(taylor, selection, math.ceil(math.log2(8 * num_keys) / d)):
            return Way((selection,), None)
        level = None
        if isinstance(self.target, ExpressionTarget) and self.target.is_continuous:
            order, level = choose_order(self._local, self.target.box, goal)
            taylor = self._rounded(self._local(order))
        if num_keys <= FEW_KEYS:
            return Way((taylor, selection, *self._at_kinks(is_fallback=False)), level)
        # Coarse cells have no Taylor bound at all: something finite must tell which of them to halve.
        fallbacks = (*self._at_kinks(is_fallback=True), dataclasses.replace(selection, is_fallback=True))
        return Way((taylor, *fallbacks), level)

    def _at_kinks(self, is_fallback: bool) -> tuple[Kind, ...]:
        """Selection leaves are finite everywhere: beside them mean values must be tried although there is a bound."""
        if not isinstance(self.target, ExpressionTarget):
            return ()
        found = mean_value_kind(self.stage, self.target.expression, self.target.box)
        return (dataclasses.replace(self._rounded(found), is_fallback=is_fallback),)

    def _local(self, order: int) -> Kind:
        """Polynomials on both sides."""
        if isinstance(self.target, ExpressionTarget):
            return taylor_kind(self.stage, self.target.expression, order)
        assert isinstance(self.target, FunctionTarget)
        return interpolant_kind(self.stage, self.target, max(order, self.target.box.d))

    def with_jumps(self, found: Integral) -> dict[str, float]:
        """The terms of an L_p norm, with that of cells across which the target jumps apart."""
        target, terms = self.target, dict(found.terms)
        if not isinstance(target, ExpressionTarget) or target.is_continuous:
            return terms
        is_jump = np.zeros(len(found.leaves), dtype=bool)
        levels = np.array([leaf.level for leaf in found.leaves])
        for level in np.unique(levels):
            (rows,) = np.nonzero(levels == level)
            cells = cells_within(
                target.box, *cell_boxes(target.box, int(level), np.array([found.leaves[i].index for i in rows]))
            )
            slopes = target.expression.ranges_and_gradients(cells, violations="infinite")[1]
            is_jump[rows] = ~np.isfinite(slopes.mag).all(axis=(1, 2))
        share = float(found.shares[is_jump].sum())
        jump = float(up(share * found.bound, 16))
        return {name: float(up((1 - share) * value, 16)) for name, value in terms.items()} | {"jump": jump}

    def _selects(self, taylor: Kind, selection: Kind, level: int) -> bool:
        """Whether selection leaves do better on a few cells of the level at random.

        Cells may be too coarse for any Taylor leaf where those half as wide are easy for it.
        """
        d = self.target.box.d
        index = np.random.default_rng(0).integers(0, 2**level, (PILOTS, d))
        boxes = cell_boxes(self.target.box, level, index)
        goal = Goal(np.inf, 1.0)
        by_taylor, by_selection = (kind.bounds(*boxes, goal).upper.max(axis=1) for kind in (taylor, selection))
        return bool(np.median(by_selection) < np.median(by_taylor))

    def _rounded(self, kind: Kind) -> Kind:
        """The same, with the rounding of the engines on the cell."""

        def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
            found = kind.bounds(centres, radii, Goal(goal.value - self.rounding_level, goal.growth))
            # A cell that has no room for rounding must be halved; nothing is gained by a sharp bound there. Where there
            # is much room, it is not used up: the ledger is to say what rounding costs.
            used, enough = found.upper.max(axis=1), np.full(len(centres), np.inf)
            is_open = used < goal.value
            least = ENOUGH * goal.value
            enough[is_open] = np.clip(goal.value - used[is_open], least, max(least, self.rounding_level))
            rounding = SPARE * rounding_bounds(
                self.stage, self.roundings, centres, radii, truncation=self.truncation, enough=enough
            )
            terms, upper = {**found.terms, "rounding": rounding}, up(found.upper + rounding)
            return Bounds(upper, terms, found.seen, found.floor + self._unexpected(centres, upper, goal))

        return dataclasses.replace(kind, bounds=bounds)

    def _unexpected(self, centres: np.ndarray, upper: np.ndarray, goal: Goal) -> Float[np.ndarray, "cells outputs"]:
        """What rounding costs at the centres of the cells that miss the goal, beyond the level that the goal knows."""
        found, misses = np.zeros(upper.shape), np.flatnonzero(upper.max(axis=1) > goal.value)
        points = centres[misses]
        if len(points):
            at_points = rounding_bounds(self.stage, self.roundings, points, np.zeros_like(points))
            found[misses] = np.maximum(0.0, at_points - self.rounding_level)
        return found

    def _selection(self) -> Kind:
        def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
            errors = score_errors(self.roundings, centres, radii)
            upper = selection_bounds(self.stage, self.target, centres, radii, score_errors=errors)
            rounding = SPARE * rounding_bounds(
                self.stage, self.roundings, centres, radii, truncation=self.truncation, for_any_weights=True
            )
            return Bounds(up(upper + rounding), {"selection": upper, "rounding": rounding}, 0.0, rounding)

        return Kind("selection", 0, bounds)
