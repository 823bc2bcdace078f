"""One number for every key of a head, with arithmetic key by key, and affine forms of x."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import repeat
from typing import Any

from flint import arb

INFINITE = arb("inf")
Row = tuple[Any, ...]
"""An affine form (constant, coefficient of x_1, …, coefficient of x_d). Trailing zeros may be left out. The numbers are
balls or rationals, or vectors of them for the forms of all keys at once."""


class Vector(tuple[Any, ...]):
    """One number for every key, a ball or a rational. Arithmetic is key by key."""

    def each(self, rule: Callable[[Any], Any]) -> Vector:
        return Vector(map(rule, self))

    def _with(self, other: Any, rule: Callable[[Any, Any], Any]) -> Vector:
        if not isinstance(other, Vector):
            return Vector(map(rule, self, repeat(other)))
        self._require_alike(other)
        return Vector(map(rule, self, other))

    def _require_alike(self, other: Vector) -> None:
        if len(other) != len(self):
            raise ValueError(f"vectors of {len(self)} and {len(other)} numbers")

    def __add__(self, other: Any) -> Vector:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Vector:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Vector:
        return -self + other

    def __mul__(self, other: Any) -> Vector:
        return self._with(other, operator.mul)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Vector:
        return self._with(other, operator.truediv)

    def max(self, other: Vector) -> Vector:
        return self._with(other, arb.max)

    def __neg__(self) -> Vector:
        return self.each(operator.neg)

    def __abs__(self) -> Vector:
        return self.each(abs)

    def __matmul__(self, other: Vector) -> arb:
        self._require_alike(other)
        return total(map(operator.mul, self, other))


def total(terms: Iterable[Any]) -> Any:
    """Return the sum of balls or of vectors."""
    return sum(terms, arb(0))


def most(values: Iterable[arb]) -> arb:
    """Return the largest upper end, or nan if any value is nan (Python's max may lose a nan)."""
    return reduce(arb.max, values).upper()


def at(row: Row, x: Sequence[arb]) -> Any:
    """Return row[0] + Σ_i row[i+1]·x_i."""
    return sum(map(operator.mul, row[1:], x), row[0])


def swing(row: Row, half: Sequence[arb]) -> Any:
    """Return Σ_i |row[i+1]|·half_i."""
    swings = [*map(operator.mul, map(abs, row[1:]), half)]
    return reduce(operator.add, swings) if swings else arb(0)


def minus(a: Row, b: Row) -> Row:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def row_of(rows: Row, k: int) -> Row:
    """Return the form of one key."""
    return tuple(column[k] for column in rows)
