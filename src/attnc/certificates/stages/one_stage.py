"""A program of one attention stage as the prover sees it: out(x) = b + B·x + Σ_h A_h(x), from the stored weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Enclosed:
    """An array of reals, each within `radius` of the float64 `mid`."""

    mid: Float[np.ndarray, "any ..."]
    radius: Float[np.ndarray, "any ..."]


@dataclass(frozen=True, eq=False)
class StageHead:
    """A(x) = Σ_k e^{s_k(x)} (v_k + V_k·x) / Σ_k e^{s_k(x)}, s_k(x) = a_k·x + c_k; W_O and the read-out are in v, V."""

    slopes: Enclosed  # (p, d): the a_k
    offsets: Enclosed  # (p,): the c_k
    values: Enclosed  # (p, outputs): the v_k
    value_slopes: Enclosed | None = None  # (p, outputs, d): the V_k of a gate


@dataclass(frozen=True, eq=False)
class OneStage:
    """What the stored weights compute in exact arithmetic, for every output."""

    heads: tuple[StageHead, ...]
    constant: Enclosed  # (outputs,)
    linear: Enclosed  # (outputs, d)
