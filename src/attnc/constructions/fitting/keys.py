"""One head over constant keys and one variable: what the fits of Part II choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float

Function = Callable[[np.ndarray], np.ndarray]
"""A function of one variable, on arrays of points."""


@dataclass(frozen=True, eq=False)
class Keys:
    """A(x) = Σ_k v_k e^{a_k x + c_k} / Σ_k e^{a_k x + c_k}; of several outputs when each v_k is a row."""

    slopes: Float[np.ndarray, " p"]  # the a_k
    offsets: Float[np.ndarray, " p"]  # the c_k
    values: Float[np.ndarray, "p ..."]  # the v_k

    @property
    def p(self) -> int:
        return len(self.slopes)

    def weights(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points p"]:
        return softmax(x[:, None] * self.slopes + self.offsets)

    def __call__(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points ..."]:
        return self.weights(x) @ self.values

    def scaled(self, factor: float) -> Keys:
        """The keys of factor·A."""
        return Keys(self.slopes, self.offsets, factor * self.values)
