"""How attention computes a function with few keys: the data from which `constructions` builds a gate.

A gate is a head G(x) = Σ_k w_k(x)(v_k + u_k·x), w = softmax(a_k·x + c_k), whose values carry the argument x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnc.numerics.rounding import Array

TableRow = tuple[tuple[float, ...], tuple[float, ...], float]
"""Slopes and offsets of the keys to the right of 0, and the largest error of the gate, rounded to two digits."""


@dataclass(frozen=True)
class ExactKeys:
    """The function is a head already: these keys compute it on all of R."""

    slopes: tuple[float, ...]  # the a_k
    offsets: tuple[float, ...]  # the c_k
    values: tuple[float, ...]  # the v_k
    carried: tuple[float, ...]  # the u_k
    lipschitz: float
    error: float = 0.0  # the effect of rounding constants such as log 2 to float64


@dataclass(frozen=True)
class TwoLines:
    """The function is left·x for x ≤ 0 and right·x for x ≥ 0."""

    left: float
    right: float


@dataclass(frozen=True)
class PickedValue:
    """The function picks one of its arguments by size, as max, min and clip do: a head has a key for each of them."""


@dataclass(frozen=True)
class Decay:
    """The function is eˣ: a gate exists on every half-line (−∞, b]."""


@dataclass(frozen=True, eq=False)
class FittedKeys:
    """A smooth function: slopes and offsets come from a table, and values are solved when they are used.

    `below(x)` computes the function for x ≤ 0, where it is accurate; symmetry gives the rest. A *ramp* is x/2 + an even
    function, with limits 0 and x: carried parts ½ ± μ_k, values ν_k on either side, and at the ends ½ ± ½ and 0. With
    `is_pure` the values are 0: x times a weight. An *odd* function has values ±ν_k, at the ends its limits. `tail(x)`
    bounds the distance of the function from its limit beyond −x.
    """

    below: Callable[[Array], Array]
    tail: Callable[[float], float]
    lipschitz: float
    rows: Mapping[int, TableRow]
    limit: float | None = None  # of an odd function; None for a ramp
    is_pure: bool = True
    is_economical: bool = True  # False if soft anchors on a bounded interval take fewer keys


GateRecipe = ExactKeys | TwoLines | PickedValue | Decay | FittedKeys


def has_two_keys(recipe: GateRecipe | None) -> bool:
    """Whether two keys are enough, whatever error is asked for."""
    return isinstance(recipe, TwoLines) or (isinstance(recipe, ExactKeys) and len(recipe.slopes) == 2)


def may_carry(recipe: GateRecipe | None) -> bool:
    """Whether the keys may carry the argument, and so cannot carry the other factor of a product as well."""
    if isinstance(recipe, ExactKeys):
        return any(recipe.carried)
    return isinstance(recipe, TwoLines) or (isinstance(recipe, FittedKeys) and recipe.is_economical)


def is_economical(recipe: GateRecipe | None) -> bool:
    """Whether a head has few keys on all of R: it is then worth a head of its own."""
    return isinstance(recipe, ExactKeys | TwoLines) or (isinstance(recipe, FittedKeys) and recipe.is_economical)
