"""Recipes for functions that attention computes with few keys. `constructions` builds gates from them.

A gate is a head G(x) = Σ_k w_k(x)(v_k + u_k·x), w = softmax(a_k·x + c_k), whose values carry the argument x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attnc.numerics.rounding import Array

TableRow = tuple[tuple[float, ...], tuple[float, ...], float]
"""The slopes and offsets of the keys to the right of 0, and the largest error of the gate, rounded to two digits."""

LatticeRow = tuple[float, tuple[float, ...], float]
"""The step of equally spaced slopes, the offsets of the keys to the right of 0 (without the first if it is 0), and the
largest error of the gate. All weights are powers of one exponential."""


@dataclass(frozen=True)
class ExactKeys:
    """The function is itself a head: these keys compute it on all of R."""

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
    """The function picks one of its arguments by size, as max, min and clip do. A head has one key per argument."""


@dataclass(frozen=True)
class Decay:
    """The function is eˣ: a gate exists on every half-line (−∞, b]."""


@dataclass(frozen=True, eq=False)
class FittedKeys:
    """A smooth function. Slopes and offsets come from a table, and values are solved for when they are used.

    `below(x)` computes the function for x ≤ 0, where it is accurate; symmetry gives the rest. A *ramp* is x/2 plus an
    even function, with the limits 0 and x. Its carried parts are ½ ± μ_k and its values ν_k on either side; the keys at
    the ends have ½ ± ½ and 0. With `is_pure` all values are 0, and the gate is x times a weight. An *odd* function has
    values ±ν_k, and its limits at the ends. `tail(x)` bounds the distance of the function from its limit beyond −x.
    """

    below: Callable[[Array], Array]
    tail: Callable[[float], float]
    lipschitz: float
    rows: Mapping[int, TableRow]
    limit: float | None = None  # of an odd function; None for a ramp
    is_pure: bool = True
    lattice: Mapping[int, LatticeRow] = field(default_factory=dict)
    is_economical: bool = True  # False if soft anchors on a bounded interval take fewer keys


GateRecipe = ExactKeys | TwoLines | PickedValue | Decay | FittedKeys


def has_two_keys(recipe: GateRecipe | None) -> bool:
    """Whether two keys are enough for every requested error."""
    return isinstance(recipe, TwoLines) or (isinstance(recipe, ExactKeys) and len(recipe.slopes) == 2)


def may_carry(recipe: GateRecipe | None) -> bool:
    """Whether the keys may carry the argument. They then cannot also carry the other factor of a product."""
    if isinstance(recipe, ExactKeys):
        return any(recipe.carried)
    return isinstance(recipe, TwoLines) or (isinstance(recipe, FittedKeys) and recipe.is_economical)


def is_economical(recipe: GateRecipe | None) -> bool:
    """Whether a head computes the function with few keys on all of R. It is then worth a head of its own."""
    return isinstance(recipe, ExactKeys | TwoLines) or (isinstance(recipe, FittedKeys) and recipe.is_economical)
