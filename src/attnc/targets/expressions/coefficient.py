"""Exact constant coefficients: a tree without variables, a float64 number near it, and a bound of the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from attnc.errors import InputError
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node, Number, Product, Sum


@dataclass(frozen=True)
class Coefficient:
    """A number such as 1/3 or π/2. Its float64 `value` is within `slack` of it."""

    tree: Node

    @classmethod
    def of(cls, number: Fraction | int | float) -> Coefficient:
        return cls(Number(Fraction(number)))

    @cached_property
    def _enclosure(self) -> tuple[float, float]:
        if isinstance(self.tree, Number):
            exact = self.tree.value
            try:
                value = exact.numerator / exact.denominator
            except OverflowError:
                raise InputError(
                    "a coefficient of the expression is larger than float64 holds: scale the variables"
                ) from None
            off = abs(Fraction(value) - exact)
            return value, math.nextafter(float(off), math.inf) if off else 0.0
        found = Expression("", (self.tree,), (), False, ()).ranges(Interval(np.zeros((1, 0)), np.zeros((1, 0))))
        lo, hi = float(found.lo[0, 0]), float(found.hi[0, 0])
        value = lo / 2 + hi / 2
        return value, 0.0 if lo == hi else math.nextafter(max(hi - value, value - lo), math.inf)

    @property
    def value(self) -> float:
        return self._enclosure[0]

    @property
    def slack(self) -> float:
        return self._enclosure[1]

    @property
    def size(self) -> float:
        """An upper bound of the absolute value."""
        return math.nextafter(abs(self.value) + self.slack, math.inf) if self.slack else abs(self.value)

    def __add__(self, other: Coefficient) -> Coefficient:
        if isinstance(self.tree, Number) and isinstance(other.tree, Number):
            return Coefficient(Number(self.tree.value + other.tree.value))
        return other if self == ZERO else self if other == ZERO else Coefficient(Sum((self.tree, other.tree)))

    def __mul__(self, other: Coefficient) -> Coefficient:
        if isinstance(self.tree, Number) and isinstance(other.tree, Number):
            return Coefficient(Number(self.tree.value * other.tree.value))
        if ZERO in (self, other):
            return ZERO
        return other if self == UNIT else self if other == UNIT else Coefficient(Product((self.tree, other.tree)))

    def __neg__(self) -> Coefficient:
        return MINUS * self


ZERO, UNIT, MINUS, TWO = (Coefficient.of(number) for number in (0, 1, -1, 2))
