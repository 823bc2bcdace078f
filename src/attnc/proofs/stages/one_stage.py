"""A stage as provers take it: out(x) = b + B·x + Σ_h A_h(x), from the stored weights."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.ir.soft_head import Enclosed, SoftHead


@dataclass(frozen=True, eq=False)
class OneStage:
    """The function that the stored weights define in exact arithmetic, for every output."""

    heads: tuple[SoftHead[Enclosed], ...]
    constant: Enclosed  # (outputs,)
    linear: Enclosed  # (outputs, d)
