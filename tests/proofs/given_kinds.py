"""A kind of leaf whose bounds are any function of the cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnc.proofs.cells.kind import Bounds, Goal, Kind


@dataclass(frozen=True, eq=False)
class GivenKind(Kind):
    title: str
    find: Callable[[np.ndarray, np.ndarray, Goal], Bounds]
    stated_order: int | None = None

    @property
    def name(self) -> str:
        return self.title

    @property
    def order(self) -> int | None:
        return self.stated_order

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        return self.find(centres, radii, goal)
