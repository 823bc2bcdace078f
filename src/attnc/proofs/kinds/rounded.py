"""The rounding of engines and the room for the checker: both are added here, to the bounds of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Float
from attnc.numerics.rounding import up
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.margins import ANY_ORDER_ROUNDING, LEAF_ROOM, STAGE_ROUNDING
from attnc.proofs.rounding.program import Roundings
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.stages.extraction import OneStage


@dataclass(frozen=True, eq=False)
class StageRounding:
    """Bounds of |computed − exact| for one attention stage. `truncation` is a further error that engines may have."""

    stage: OneStage
    roundings: Roundings
    truncation: float = 0.0
    level: float = 0.0  # about the largest rounding at points; this part of the goal is left to rounding
    spare: float = STAGE_ROUNDING  # the factor that leaves room for the checker

    @classmethod
    def of(cls, stage: OneStage, roundings: Roundings, truncation: float) -> StageRounding:
        """Return the rounding with the room that sums over keys need, in blocks or in any order."""
        room = ANY_ORDER_ROUNDING if roundings.is_in_any_order else STAGE_ROUNDING
        return cls(stage, roundings, truncation, spare=room)

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

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        if self.kind.covers_computed_weights:
            found = self.kind.bounds(centres, radii, goal).enlarged(1 + LEAF_ROOM)
            rounding = self.rounding.over(centres, radii, for_any_weights=True)
            return self._sum(found, rounding, rounding)
        level = self.rounding.level
        found = self.kind.bounds(centres, radii, Goal(goal.value - level, goal.growth)).enlarged(1 + LEAF_ROOM)
        # A cell that misses the goal before rounding is added must be halved in any case, so its rounding is not
        # sharpened. A cell far below the goal gets a sharp rounding too, so that the ledger shows its true cost, unless
        # it is smaller than the room for the checker.
        used, enough = found.upper.max(axis=1), np.full(len(centres), np.inf)
        is_open, least = used < goal.value, LEAF_ROOM * goal.value
        enough[is_open] = np.clip(goal.value - used[is_open], least, max(least, level))
        rounding = self.rounding.over(centres, radii, enough, for_any_weights=False)
        return self._sum(found, rounding, found.floor + self._unexpected(centres, up(found.upper + rounding), goal))

    def _sum(self, found: Bounds, rounding: np.ndarray, floor: np.ndarray) -> Bounds:
        terms = {**(found.terms or {self.name: found.upper}), "rounding": rounding}
        return Bounds(up(found.upper + rounding), terms, found.seen, floor)

    def _unexpected(self, centres: np.ndarray, upper: np.ndarray, goal: Goal) -> Float[np.ndarray, "cells outputs"]:
        """Return the rounding above the level at the centres of cells that miss the goal: halving cannot remove it."""
        found, misses = np.zeros(upper.shape), np.flatnonzero(upper.max(axis=1) > goal.value)
        if len(misses):
            found[misses] = np.maximum(0.0, self.rounding.at(centres[misses]) - self.rounding.level)
        return found
