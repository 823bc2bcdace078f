"""What every prover returns: a bound, what it is made of, and the evidence from which it can be proved again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import Leaf

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class Leaves:
    """Cells that cover a box, each with a bound of its own.

    An infinite box of one variable has a finite `core`, which the leaves cover, and a tail on each side in `tails`.
    Enclosure leaves are cut further at the points `cuts`, one list for each variable.
    """

    leaves: tuple[Leaf, ...]
    bounds: Float[np.ndarray, " leaves"]
    core: tuple[float, float] | None = None
    tails: tuple[int, ...] = ()  # −1 for x → −∞, 1 for x → ∞
    cuts: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class HeadProof:
    """One channel that attention writes is within `bound` of carrier·function(t), in units of the largest carrier.

    t is the affine combination `argument` of the variables and of the heads before it; all texts are in their names.
    Heads that are the same function of t share one set of leaves: all but the first name it in `like` and have none.
    """

    stage: str  # the attention layer
    channel: str
    name: str  # of this head in the texts of later ones
    term: str  # of the ledger to which its error belongs
    function: str  # in t
    argument: str
    interval: tuple[float, float]  # of t
    bound: float
    argument_as: str | None = None  # the argument as an expression of the variables, where that tells its range better
    carrier: str | None = None
    carrier_as: str | None = None
    carrier_size: float | None = None
    held: tuple[float, float] | None = None  # the function is held constant beyond these ends
    like: str | None = None
    leaves: Leaves | None = None


@dataclass(frozen=True, eq=False)
class Stages:
    """A proof head by head: `outputs` are combinations of the heads, in their names."""

    heads: tuple[HeadProof, ...]
    outputs: tuple[str, ...]
    axes: tuple[int, ...] = ()  # the axes along which the box is halved in turn, to add up the errors of the heads


@dataclass(frozen=True, eq=False)
class Points:
    """A proof at the finitely many points of a table; `table` holds them with their values where they are few."""

    count: int
    table: tuple[tuple[float, ...], ...] = ()


Evidence = Leaves | Stages | Points


@dataclass(frozen=True, eq=False)
class Proof:
    """‖f − network‖ ≤ bound, rounding included; the terms add up to the bound.

    `complete` is False if time or cells ran out before the bound was as small as was asked for; it holds all the same.
    """

    bound: float
    terms: tuple[Term, ...]
    evidence: Evidence
    complete: bool = True
