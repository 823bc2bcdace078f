"""A way to bound |f − network| on cells, and the bounds that it finds.

A new way is a subclass of `Kind` with a name and `bounds`. The searches (`branching`, `integral`) and the certificate
accept it without changes.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from attnc.numerics.arrays import Bool, Float
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import up


@dataclass(frozen=True)
class Goal:
    """The size that a bound of |p| + remainder should have: `value`, or `growth` times the largest |p| − remainder.

    A bound that cannot reach the goal is not sharpened. With `value` 0 every bound is sharpened.
    """

    value: float = 0.0
    growth: float = 1.0


SHARP = Goal()


@dataclass(frozen=True, eq=False)
class Bounds:
    """Upper bounds of |f − network| on cells.

    `terms`, if given, add up to `upper`. `seen` is an error that is attained in one of the cells, up to rounding, or 0
    if none is known. `floor` is the part of `upper` that halving does not remove.
    """

    upper: Float[np.ndarray, "cells outputs"]
    terms: Mapping[str, Float[np.ndarray, "cells outputs"]] = field(default_factory=dict)
    seen: float = 0.0
    floor: Float[np.ndarray, "cells outputs"] | float = 0.0

    @property
    def floors(self) -> Float[np.ndarray, " cells"]:
        return np.asarray(np.broadcast_to(self.floor, self.upper.shape).max(axis=1))

    def enlarged(self, factor: float) -> Bounds:
        """Return the bounds and their terms, multiplied by a factor of at least 1."""
        terms = {name: up(factor * term) for name, term in self.terms.items()}
        return Bounds(up(factor * self.upper, 2), terms, self.seen, factor * self.floor)


FLOOR_FACTOR = 1.25
"""Factor on the part of a bound that halving a cell does not remove. Measured with five networks: 1, 1.5 and 2 give the
same leaves and bounds."""


def meets(upper: np.ndarray, floors: np.ndarray, goal: float) -> Bool[np.ndarray, " cells"]:
    """Return which cells need not be halved.

    Their bound is finite, and at most the goal plus FLOOR_FACTOR times the part that halving does not remove.
    """
    largest = upper.max(axis=1)
    with quiet():
        return np.asarray((largest <= goal + FLOOR_FACTOR * np.nan_to_num(floors)) & np.isfinite(largest))


class Kind(abc.ABC):
    """A way to bound |f − network| on cells {c + rτ : τ ∈ [−1, 1]^d}."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of this kind in stored leaves and in the ledger."""

    @property
    def order(self) -> int | None:
        """The order of the polynomials of a leaf, if a checker needs it to prove the leaf again."""
        return None

    @property
    def covers_computed_weights(self) -> bool:
        """Whether the bounds hold for the softmax weights that engines compute, and not only for the exact ones."""
        return False

    @abc.abstractmethod
    def bounds(self, centres: Float[np.ndarray, "cells d"], radii: Float[np.ndarray, "cells d"], goal: Goal) -> Bounds:
        """Return bounds for every cell, ∞ where there is none. They need not be smaller than the goal."""

    def least(self, centres: Float[np.ndarray, "cells d"]) -> Float[np.ndarray, " cells"]:
        """Return about the least bound that a cell around each centre can have, or 0 if that is not known.

        Cells with a smaller bound of another kind are not examined by this one.
        """
        return np.zeros(len(centres))
