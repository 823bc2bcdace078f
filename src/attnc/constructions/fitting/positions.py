"""Output positions: one head tells them apart by a score bonus, and its values undo the leak between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Positions:
    """n output positions, told apart by a score bonus of M; a = e^M − 1.

    A query at position i gives its keys weights in proportion to C = (aI + 11ᵀ)/(a + n) over positions, so values
    C⁻¹f return f exactly, for every M > 0.
    """

    n: int
    M: float

    @property
    def a(self) -> float:
        return math.expm1(self.M)

    @property
    def margin(self) -> float:
        return self.M if self.n > 1 else 0.0

    def undo_leak(self, f: Float[np.ndarray, "cells n k"]) -> Float[np.ndarray, "cells n k"]:
        """C⁻¹f = ((a+n) f_i − Σ f)/a."""
        return f if self.n == 1 else f + (self.n * f - f.sum(axis=1, keepdims=True)) / self.a

    def residue(self, f: np.ndarray, stored: np.ndarray) -> tuple[float, float]:
        """(max Σ_i' C_ii'|stored_i' − f_i|, rounding of `stored`).

        The sum without absolute values is 0; weights off by factors e^{±2δ} leave e^{2δ} − 1 of the first figure.
        """
        own = float(np.abs(stored - f).max())
        elsewhere = float(max(stored.max() - f.min(), f.max() - stored.min()))
        off = (self.a + 1) / (self.a + self.n) * own + (self.n - 1) / (self.a + self.n) * elsewhere
        return off, 4 * UNIT_ROUNDOFF["float64"] * self.n * float(np.abs(f).max()) * (1 + 1 / self.a)


def num_positions(target: Target) -> int:
    """The tokens of the output: n for (n, k), one for (k,) and ()."""
    return target.output_shape[0] if len(target.output_shape) == 2 else 1


def bytes_per_anchor(target: Target) -> int:
    """Bytes of one anchor: 16 stored per non-zero (index and value), the folded copy, and the copies on the way."""
    numbers = target.box.d + 1 + target.num_outputs // num_positions(target) + (num_positions(target) > 1)
    return 64 * numbers
