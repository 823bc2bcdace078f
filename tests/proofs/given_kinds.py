"""A kind of leaf whose bounds are any function of the cells."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnc.proofs.cells.kind import Bounds, Goal, Kind


class GivenKind(Kind):
    name, order, bounds = "", None, None  # set for each instance

    def __init__(
        self, name: str, bounds: Callable[[np.ndarray, np.ndarray, Goal], Bounds], order: int | None = None
    ) -> None:
        self.name, self.bounds, self.order = name, bounds, order
