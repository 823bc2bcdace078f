"""A bound is a ledger: named terms, each rounded outward, whose sum (rounded up) is the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One source of error: how much, and why."""

    name: str
    value: float
    reason: str


@dataclass(frozen=True)
class Bound:
    """The norm of f − program over the domain (the largest error, unless another is named) is ≤ value = Σ terms."""

    terms: tuple[Term, ...]

    @property
    def value(self) -> float:
        exact = math.fsum(term.value for term in self.terms)  # correctly rounded, so one step up is above the sum
        return math.nextafter(exact, math.inf) if exact > 0 else exact

    def __str__(self) -> str:
        return " + ".join(f"{term.value:.3g} ({term.name})" for term in self.terms)
