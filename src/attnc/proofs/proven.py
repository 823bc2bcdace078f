"""What a proof by leaves found: the bound, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.bound import Term
from attnc.proofs.cells.branching import Covering, Leaf
from attnc.proofs.cells.integral import Integral
from attnc.targets.box import Box

if TYPE_CHECKING:
    from jaxtyping import Float

REASONS = {
    "jump": "cells across which f jumps, or is infinitely steep: at most its whole height, on their small volume",
    "tail": "beyond the core of an infinite box, by the limits of the weights",
    "approximation": "the difference of the Taylor polynomials of f and of the network on the worst cell",
    "remainder": "what these polynomials leave out, and the rounding of the proof itself",
    "selection": "f against the values of the keys that can win on the worst cell, and the leak of the others",
    "enclosure": "f against all that the stages can say on the worst cell, rounding included",
    "rounding": "of the engine on the worst cell: scores, exponentials, sums",
}


@dataclass(frozen=True, eq=False)
class Proven:
    """sup |f − network| ≤ bound on the box: the largest of the leaves, which cover it, and of the tails beyond `core`.

    `complete` unless time or cells ran out before the bound was within the tolerance of an error that was seen.
    """

    bound: float
    terms: tuple[Term, ...]
    leaves: tuple[Leaf, ...]
    leaf_bounds: Float[np.ndarray, " leaves"]
    core: Box  # the box, or the finite part of an infinite one
    tails: dict[int, float]  # side (−1, 1) → bound
    complete: bool
    cuts: tuple[tuple[float, ...], ...] = ()  # of enclosure leaves: where cells were cut, axis by axis


def summed(found: Integral, terms: Mapping[str, float], box: Box) -> Proven:
    """An L_p norm, with what it is made of."""
    reasons = {
        name: reason.replace("on the worst cell", "on all cells, as the norm weighs them")
        for name, reason in REASONS.items()
    }
    ledger = tuple(Term(name, value, reasons[name]) for name, value in terms.items())
    return Proven(found.bound, ledger, found.leaves, found.leaf_bounds, box, {}, found.complete)


def proven(proof: Covering, core: Box, tails: dict[int, float]) -> Proven:
    """With what the bound of the worst leaf is made of."""
    terms = tuple(Term(name, value, REASONS[name]) for name, value in proof.worst_terms.items())
    beyond = max(tails.values(), default=0.0)
    if beyond > proof.bound:
        terms = (Term("tail", beyond, REASONS["tail"]),)
    bounds = proof.leaf_bounds.max(axis=1)
    return Proven(max(proof.bound, beyond), terms, proof.leaves, bounds, core, tails, proof.complete)
