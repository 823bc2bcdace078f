"""What may be asked of a max-affine construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnc.constructions.built import Progress
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.errors import InputError


@dataclass(frozen=True)
class Request:
    """What was asked of a max-affine construction."""

    eps: float | None = None
    points_per_axis: int | tuple[int, ...] | None = None
    beta: float | None = None
    margin: float = 40.0
    p: float = math.inf
    dtype: str = "float64"
    max_anchors: int = MAX_ANCHORS
    max_bytes: int = MAX_BYTES
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if (self.eps is None) == (self.points_per_axis is None):
            raise InputError("give either eps or points_per_axis")
        if self.beta is not None and not (math.isfinite(self.beta) and self.beta > 0):
            raise InputError(f"beta must be a finite number > 0, found {self.beta}")
        if not 0 < self.margin <= 700:
            raise InputError(f"margin must be in (0, 700], found {self.margin}")
        if not self.p >= 1:
            raise InputError(f"norm must be 'inf' or a number ≥ 1, found {self.p}")
