"""A bound is a ledger: named terms, each rounded outward, whose sum (rounded up) is the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One source of error: its size and its cause.

    Attributes
    ----------
    name : str
        The kind of error.
    value : float
        An upper bound on its size.
    reason : str
        Its cause, in a few words.

    Examples
    --------
    >>> import attnc
    >>> attnc.Term("rounding", 1e-15, "of the engine").name
    'rounding'
    """

    name: str
    value: float
    reason: str


@dataclass(frozen=True)
class Bound:
    """A bound on the norm of f − program over the domain: the sum of its terms. The default norm is the largest error.

    Attributes
    ----------
    terms : tuple of Term
        The sources of error.

    Examples
    --------
    >>> import attnc
    >>> terms = attnc.Term("leak", 0.25, "weights of far keys"), attnc.Term("spacing", 0.5, "between two anchors")
    >>> print(attnc.Bound(terms))
    0.25 (leak) + 0.5 (spacing)
    """

    terms: tuple[Term, ...]

    @property
    def value(self) -> float:
        """The sum of the terms, rounded up.

        Examples
        --------
        >>> import attnc
        >>> terms = attnc.Term("leak", 0.25, "weights of far keys"), attnc.Term("spacing", 0.5, "between two anchors")
        >>> bound = attnc.Bound(terms)
        >>> 0.75 <= bound.value < 0.75 + 1e-15
        True
        """
        exact = math.fsum(term.value for term in self.terms)  # correctly rounded, so one step up is above the sum
        return math.nextafter(exact, math.inf) if exact > 0 else exact

    def __str__(self) -> str:
        return " + ".join(f"{term.value:.3g} ({term.name})" for term in self.terms)
