"""What a construction returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnc.errors import BoundNotMet
from attnc.ir.program import Program
from attnc.numerics.bound import Bound
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done."""


@dataclass(frozen=True)
class Built:
    """A program, the name of the theorem that made it, and the theorem's bound for it (None where there is none)."""

    program: Program
    construction: str
    bound: Bound | None
    worst_box: dict[str, tuple[float, float]] | None = None
    parameters: tuple[tuple[str, float | int | str], ...] = ()
    derivation: Derivation | None = None  # of a deep program: what every head is for
    again: Callable[[Mapping[str, float]], Built] | None = None
    """Built again, with the errors of heads as they were proved, by the channels that these write."""


def require(built: Built, eps: float | None, target: Target) -> Built:
    """What was built, or BoundNotMet where its bound is above eps: rounding is the limit, more anchors do not help."""
    bound = built.bound
    if eps is None or bound is None or bound.value <= eps:
        return built
    dtype = str(built.program.dtype)
    raise BoundNotMet(
        f"cannot bring the bound to eps={eps:g} for {target.describe()} on {target.box} with {built.construction}: "
        f"it is {bound.value:.3g} = {bound}. Rounding in {dtype} limits what can be proved here; choose a larger "
        f"eps{', float64' if dtype == 'float32' else ''}, or a box closer to 0.",
        eps=eps,
        bound=bound.value,
        worst_box=built.worst_box,
        build=lambda: built,
    )
