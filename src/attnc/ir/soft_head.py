"""A soft head: scores that are affine in the input, and values that are constant or affine in it.

Every attention head with constant keys is one of these once the affine maps around it are folded. Constructions choose
its numbers, provers enclose them, engines evaluate them and plots draw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Enclosed:
    """An array of real numbers, each within `radius` of the float64 number `mid`."""

    mid: Float[np.ndarray, "any ..."]
    radius: Float[np.ndarray, "any ..."]

    @classmethod
    def exact(cls, mid: Float[np.ndarray, "any ..."]) -> Enclosed:
        return cls(mid, np.zeros(mid.shape))


N = TypeVar("N", np.ndarray, Enclosed)
"""The numbers of a head: floats as they are, or enclosures of what the stored weights define."""


@dataclass(frozen=True, eq=False)
class SoftHead(Generic[N]):
    """A(x) = Σ_k e^{s_k(x)} (v_k + V_k·x) / Σ_k e^{s_k(x)} with scores s_k(x) = a_k·x + c_k."""

    slopes: N  # (keys, d): the a_k
    offsets: N  # (keys,): the c_k
    values: N  # (keys, outputs): the v_k
    carried: N | None = None  # (keys, outputs, d): the V_k of a gate, whose values move with the input
