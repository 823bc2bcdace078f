"""What was proved of a deep program, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import Covering

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class HeadProof:
    """|A(t) − g(t)| ≤ delta for t in [lo, hi], for the head that writes `channel`; on every leaf, one of deltas."""

    stage: str
    channel: str
    claim: Mapping[str, Any]  # what it is for, in the names of the inputs and of the heads before it
    lo: float
    hi: float
    deltas: Float[np.ndarray, " leaves"]  # rounding included, in units of the carrier's largest
    held: tuple[float, float] | None  # where g is held at its ends, beyond which it is not defined
    proof: Covering

    @property
    def delta(self) -> float:
        return float(self.deltas.max())

    def as_json(self) -> dict[str, Any]:
        """The claim with the leaves that prove it."""
        return {
            "stage": self.stage,
            "channel": self.channel,
            **self.claim,
            "interval": [self.lo, self.hi],
            "held": None if self.held is None else list(self.held),
            "bound": self.delta,
            "leaves": [leaf.as_json() for leaf in self.proof.leaves],
            "leaf_bounds": self.deltas.tolist(),
        }


@dataclass(frozen=True, eq=False)
class StagedProof:
    """sup |f − program| ≤ bound: the errors of all heads, carried to the outputs, which are combinations of heads."""

    bound: float
    terms: tuple[Term, ...]
    heads: tuple[HeadProof, ...]
    outputs: tuple[str, ...]
    axes: tuple[int, ...]  # along which the box was halved, one after the other

    @property
    def complete(self) -> bool:
        return all(head.proof.complete for head in self.heads)

    def as_json(self) -> tuple[dict[str, Any], ...]:
        return tuple(head.as_json() for head in self.heads)
