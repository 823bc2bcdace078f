"""The record of an elementary function: it holds everything that the rest of attnc needs to compute with it.

A file of this folder defines a family of functions, and `registry.FUNCTIONS` lists them all. The expression language,
interval arithmetic, Taylor jets, kink finders, proofs on half-lines and gates read this record and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnc.functions.gate_recipes import GateRecipe
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_equations import JetRule, analytic
from attnc.numerics.jets import Jet
from attnc.numerics.rounding import Array, Mask, up

Gradient = dict[int, Interval]
"""The slopes with respect to the variables, by number. A missing one is zero."""
Ranges = Sequence[Interval]
GradientRule = Callable[[Ranges, Sequence[Gradient], Interval], Gradient]
Remainder = Callable[[float], tuple[float, float] | None]
"""`remainder(low)` = (C, μ) with |r(s)| ≤ C·e^{−μ(s − low)} for s ≥ low; None if `low` is too small for a bound."""
ZERO = Interval.point(0.0)
ONE = Interval.point(1.0)


def scaled(slope: Interval, gradient: Gradient) -> Gradient:
    """slope·gradient."""
    return {i: slope if g is ONE else slope * g for i, g in gradient.items()}


def added(*gradients: Gradient) -> Gradient:
    """The sum of the gradients."""
    total: Gradient = {}
    for gradient in gradients:
        for i, g in gradient.items():
            total[i] = total[i] + g if i in total else g
    return total


@dataclass(frozen=True)
class DomainRule:
    """The domain of an operation, and the message for a box that leaves it.

    Three functions take the ranges of the operands. `may_leave`: a value may lie outside. `must_leave`: all values lie
    outside. It is evaluated at points, where it proves a violation. `guard`: a quantity that must not vanish. If it has
    both signs in a connected box, it has a zero between them. `complaint` and `remedy` contain {0} for the text of
    operand number `operand`, which caused the violation.
    """

    complaint: str
    remedy: str
    may_leave: Callable[[Ranges], Mask]
    must_leave: Callable[[Ranges], Mask]
    guard: Callable[[Ranges], Interval] | None = None
    operand: int = 0
    proof: str = ", and it takes both signs"


def at_least(low: float, name: str, *, strict: bool) -> DomainRule:
    """The first operand must be ≥ low, or > low if strict."""
    is_outside, outside, inside = (
        (np.less_equal, "not positive", "positive") if strict else (np.less, "negative", "not negative")
    )
    return DomainRule(
        f"{name} {{0}} is {outside}",
        f"Choose a box on which {{0}} is {inside}, or add a constant to it",
        lambda a: is_outside(a[0].lo, low),
        lambda a: is_outside(a[0].hi, low),
    )


def within(low: float, high: float, name: str) -> DomainRule:
    """The first operand must lie in [low, high]."""
    return DomainRule(
        f"{name} {{0}} leaves [{low:g}, {high:g}]",
        f"Choose a box on which {{0}} stays in [{low:g}, {high:g}], or write clip({{0}}, {low:g}, {high:g})",
        lambda a: (a[0].lo < low) | (a[0].hi > high),
        lambda a: (a[0].hi < low) | (a[0].lo > high),
    )


BOUNDED = DomainRule(
    "the value of {0} overflows: it is not bounded by the largest float64",
    "Choose a smaller box, or scale {0} down",
    lambda a: ~a[0].is_bounded,
    lambda a: a[0].mig > 1.7e308,
)
"""The rule that applies to the value of every operation."""


@dataclass(frozen=True)
class Asymptote:
    """g(±s) = limit + slope·s + r(s) for large s, with the bound of r that `remainder` gives."""

    limit: Interval
    slope: float
    remainder: Remainder


def levels(low: Interval, high: Interval, remainder: Remainder) -> dict[int, Asymptote]:
    """Asymptotes of a function with the limits `low` at −∞ and `high` at ∞."""
    return {1: Asymptote(high, 0, remainder), -1: Asymptote(low, 0, remainder)}


def ramp(remainder: Remainder) -> dict[int, Asymptote]:
    """Asymptotes of a function that approaches 0 at −∞ and its argument at ∞."""
    return {1: Asymptote(ZERO, 1, remainder), -1: Asymptote(ZERO, 0, remainder)}


def exponential_remainder(scale: float, rate: float) -> Remainder:
    """|r(s)| ≤ scale·e^{−rate·s}."""
    return lambda low: (float(up(scale * float(elementary.exp(Interval.point(low) * -rate).hi))), rate)


def gaussian_remainder(scale: float, rate: float) -> Remainder:
    """|r(s)| ≤ scale·e^{−rate·s²}. Beyond low > 0 it falls at least like e^{−2·rate·low·(s − low)}."""

    def remainder(low: float) -> tuple[float, float] | None:
        if low <= 0:
            return None
        at_low = float(elementary.exp(Interval.point(low).square() * -rate).hi)
        return float(up(scale * at_low)), math.nextafter(2 * rate * low, 0.0)

    return remainder


def linear_exponential_remainder(low: float) -> tuple[float, float] | None:
    """|r(s)| ≤ s·e^{−s}: the logarithm of this bound has slope 1/s − 1 ≤ 1/low − 1."""
    if low <= 1:
        return None
    at_low = float(elementary.exp(Interval.point(-low)).hi)
    return float(up(low * at_low)), max(0.0, math.nextafter(1 - up(1 / low).item(), 0.0))


@dataclass(frozen=True, eq=False)
class ElementaryFunction:
    """A function or an operation of the expression language.

    Parameters
    ----------
    name
        The name in expressions, as in ``gelu(x)``.
    value
        Computes the function in float64 from one array per argument.
    range
        Encloses the values over intervals, one per argument.
    jet
        Makes the Taylor jet over boxes from the jets and ranges of the arguments.
    slope
        ``slope(x, y)``, y the range over x, encloses all difference quotients (f(s) − f(t))/(s − t) of members of x.
        For a kink inside x, this is the hull of both sides (Clarke's derivative, with Lebourg's mean value theorem).
    gradient
        For several arguments, in place of `slope`: the slopes with respect to the variables, from the ranges and the
        gradients of the arguments, and the range of the value.
    arity, is_variadic
        The number of arguments, or the least number if more are allowed.
    domain
        The set where the function is defined; None if it is defined everywhere.
    kinks
        The arguments at which a continuous function of one variable changes its slope abruptly.
    singularities
        The arguments at which a slope is infinite, as for sqrt at 0.
    chooses
        Whether the function picks one of its arguments by size. It may then have a kink where two arguments are equal.
    jumps
        For a function that jumps: from an interval [lo, hi] to the arguments in it at which it does.
    asymptotes
        The asymptotes, by the sign of the infinity that the argument goes to.
    gate
        The recipe by which attention computes the function with few keys; None if there is none.
    other_names
        Names of the function in other software; the parser suggests `name` for them.
    derivative
        The derivative as an expression in t; None if there is none, or for several arguments, which max, min and clip
        choose from. At a kink it is any number between both sides.
    """

    name: str
    value: Callable[..., Array]
    range: Callable[..., Interval]
    jet: JetRule
    slope: Callable[[Interval, Interval], Interval] | None = None
    gradient: GradientRule | None = None
    arity: int = 1
    is_variadic: bool = False
    domain: DomainRule | None = None
    kinks: tuple[float, ...] = ()
    singularities: tuple[float, ...] = ()
    chooses: bool = False
    jumps: Callable[[float, float], Iterable[float]] | None = None
    asymptotes: Mapping[int, Asymptote] = field(default_factory=dict)
    gate: GateRecipe | None = None
    other_names: tuple[str, ...] = ()
    derivative: str | None = None

    @property
    def is_continuous(self) -> bool:
        return self.jumps is None

    @property
    def has_kinks(self) -> bool:
        return bool(self.kinks) or self.chooses

    def gradients(self, ranges: Ranges, gradients: Sequence[Gradient], y: Interval) -> Gradient:
        """The slopes with respect to the variables, for arguments with these ranges and gradients; y is the range."""
        if not any(gradients):
            return {}
        if self.slope is not None:
            return scaled(self.slope(ranges[0], y), gradients[0])
        assert self.gradient is not None
        return self.gradient(ranges, gradients, y)


def smooth(
    name: str,
    value: Callable[[Array], Array],
    range: Callable[[Interval], Interval],
    jet: Callable[[Jet, Interval, int], Jet],
    slope: Callable[[Interval], Interval],
    derivative: str,
) -> ElementaryFunction:
    """A smooth function of one variable, from its jet at a polynomial, the range of its derivative, and its text."""
    rule = analytic(jet, range, slope)
    return ElementaryFunction(name, value, range, rule, lambda x, y: slope(x), derivative=derivative)


def scipy_special(name: str) -> Callable[[Array], Array]:
    """A function of scipy.special, imported when first used."""

    def value(x: Array) -> Array:
        import scipy.special

        return np.asarray(getattr(scipy.special, name)(x), dtype=np.float64)

    return value
