"""The rounding of engines and the room for the checker: both are added here, to the bounds of any kind."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.cells.intervals import centred
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.margins import ANY_ORDER_ROUNDING, LEAF_ROOM, STAGE_ROUNDING
from attnc.proofs.rounding.program import Roundings
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.box import Box

NEGLIGIBLE_SHARE = 2.0**-24
"""The share of the goal below which rounding is not bounded cell by cell: the bound on the whole box is added instead.
It is below a thousandth of LEAF_ROOM."""


@dataclass(frozen=True, eq=False)
class StageRounding:
    """Bounds of |computed − exact| for one attention stage. `truncation` is a further error that engines may have."""

    stage: OneStage
    roundings: Roundings
    truncation: float = 0.0
    level: float = 0.0  # about the largest rounding at points; this part of the goal is left to rounding
    spare: float = STAGE_ROUNDING  # the factor that leaves room for the checker
    box: Box | None = None  # a finite box that holds all cells, if it is known

    def on_cells(
        self, centres: np.ndarray, radii: np.ndarray, goal: float, enough: np.ndarray | float, *, for_any_weights: bool
    ) -> Float[np.ndarray, "cells outputs"]:
        """Return bounds over cells of the box: those of `over`, or that of the box if it is negligible beside the goal.

        A bound over the box holds on every cell of it.
        """
        if (whole := self.negligible(goal, for_any_weights=for_any_weights)) is not None:
            return np.repeat(whole, len(centres), axis=0)
        return self.over(centres, radii, enough, for_any_weights=for_any_weights)

    def negligible(self, goal: float, *, for_any_weights: bool = False) -> Float[np.ndarray, "1 outputs"] | None:
        """Return the bound over the box if it is negligible beside the goal, else None. Without a goal nothing is."""
        if self.box is None or goal == np.inf:
            return None
        whole = self._without_weights if for_any_weights else self.on_box
        return whole if whole.max(initial=0.0) <= NEGLIGIBLE_SHARE * goal else None

    @functools.cached_property
    def on_box(self) -> Float[np.ndarray, "1 outputs"]:
        """The bound over the whole box."""
        return self.over(*self._whole, for_any_weights=False)

    @functools.cached_property
    def _without_weights(self) -> Float[np.ndarray, "1 outputs"]:
        return self.over(*self._whole, for_any_weights=True)

    @property
    def _whole(self) -> tuple[Float[np.ndarray, "1 d"], Float[np.ndarray, "1 d"]]:
        """The centre and the radii of the box.

        A cell centre ± radius may reach beyond the box by a unit in the last place of either: so the box is enlarged.
        """
        assert self.box is not None
        centre, radii = centred(Interval(self.box.lo[None], self.box.hi[None]))
        return centre, up(radii + 2.0**-50 * self.box.magnitude, 4)

    @classmethod
    def of(cls, stage: OneStage, roundings: Roundings, truncation: float, *, box: Box | None = None) -> StageRounding:
        """Return the rounding with the room that sums over keys need, in blocks or in any order."""
        room = ANY_ORDER_ROUNDING if roundings.is_in_any_order else STAGE_ROUNDING
        return cls(stage, roundings, truncation, spare=room, box=box)

    def over(
        self, centres: np.ndarray, radii: np.ndarray, enough: np.ndarray | float = np.inf, *, for_any_weights: bool
    ) -> Float[np.ndarray, "cells outputs"]:
        """Return bounds over cells, with room for the checker. A bound is not sharpened once it is at most `enough`.

        With `for_any_weights` the error of the weights is left out, because the kind covers it.
        """
        return self.spare * rounding_bounds(
            self.stage,
            self.roundings,
            centres,
            radii,
            truncation=self.truncation,
            for_any_weights=for_any_weights,
            enough=enough,
        )

    def at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """Return the rounding at points, without room for the checker."""
        return rounding_bounds(self.stage, self.roundings, points, np.zeros_like(points), truncation=self.truncation)


@dataclass(frozen=True, eq=False)
class RoundedKind(Kind):
    """The bounds of a kind, with room for the checker, and with the rounding of engines on the cell."""

    kind: Kind
    rounding: StageRounding

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def order(self) -> int | None:
        return self.kind.order

    def least(self, centres: Float[np.ndarray, "cells d"]) -> Float[np.ndarray, " cells"]:
        return self.kind.least(centres)

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        if self.kind.covers_computed_weights:
            found = self.kind.bounds(centres, radii, goal).enlarged(1 + LEAF_ROOM)
            rounding = self.rounding.on_cells(centres, radii, goal.value, np.inf, for_any_weights=True)
            return self._sum(found, rounding, rounding)
        level = self.rounding.level
        found = self.kind.bounds(centres, radii, Goal(goal.value - level, goal.growth)).enlarged(1 + LEAF_ROOM)
        # A cell that misses the goal before rounding is added must be halved in any case, so its rounding is not
        # sharpened. A cell far below the goal gets a sharp rounding too, so that the ledger shows its true cost, unless
        # it is smaller than the room for the checker.
        used, enough = found.upper.max(axis=1), np.full(len(centres), np.inf)
        is_open, least = used < goal.value, LEAF_ROOM * goal.value
        enough[is_open] = np.clip(goal.value - used[is_open], least, max(least, level))
        rounding = self.rounding.on_cells(centres, radii, goal.value, enough, for_any_weights=False)
        return self._sum(found, rounding, found.floor + self._unexpected(centres, up(found.upper + rounding), goal))

    def _sum(self, found: Bounds, rounding: np.ndarray, floor: np.ndarray) -> Bounds:
        terms = {**(found.terms or {self.name: found.upper}), "rounding": rounding}
        return Bounds(up(found.upper + rounding), terms, found.seen, floor)

    def _unexpected(self, centres: np.ndarray, upper: np.ndarray, goal: Goal) -> Float[np.ndarray, "cells outputs"]:
        """Return the rounding above the level at the centres of cells that miss the goal: halving cannot remove it."""
        found, misses = np.zeros(upper.shape), np.flatnonzero(upper.max(axis=1) > goal.value)
        if len(misses) and self.rounding.negligible(goal.value) is None:
            found[misses] = np.maximum(0.0, self.rounding.at(centres[misses]) - self.rounding.level)
        return found
