"""The functions in Arb ball arithmetic, as a reference for float64 intervals."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import flint
from flint import arb, fmpq

from attnc.numerics.intervals import Interval
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    children,
)


@contextmanager
def precision(bits: int = 300) -> Iterator[None]:
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


def _sigmoid(x: arb) -> arb:
    return 1 / (1 + (-x).exp()) if not x < 0 else x.exp() / (1 + x.exp())  # an exponential may overflow, even in Arb


def _normal_cdf(x: arb) -> arb:
    return (-x / arb(2).sqrt()).erfc() / 2


def _softplus(x: arb) -> arb:
    return x + (-x).exp().log1p() if x > 0 else x.exp().log1p()


VALUES: dict[str, Callable[..., arb]] = {
    **{name: getattr(arb, name) for name in ("sin", "cos", "tan", "atan", "asin", "acos", "tanh", "sinh", "cosh")},
    **{name: getattr(arb, name) for name in ("exp", "log", "sqrt", "erf", "floor")},
    "abs": abs,
    "sigmoid": _sigmoid,
    "relu": lambda x: x.max(arb(0)),
    "gelu": lambda x: x * _normal_cdf(x),
    "silu": lambda x: x * _sigmoid(x),
    "softplus": _softplus,
    "min": lambda *a: reduce(arb.min, a),  # not the built-in: balls need not be ordered
    "max": lambda *a: reduce(arb.max, a),
    "clip": lambda x, low, high: x.max(low).min(high),
    "sign": arb.sgn,
}

DERIVATIVES: dict[str, Callable[[arb], arb]] = {
    "sin": arb.cos,
    "cos": lambda x: -x.sin(),
    "tan": lambda x: 1 / (x.cos() * x.cos()),
    "exp": arb.exp,
    "log": lambda x: 1 / x,
    "sqrt": lambda x: 1 / (2 * x.sqrt()),
    "tanh": lambda x: 1 / (x.cosh() * x.cosh()),
    "sinh": arb.cosh,
    "cosh": arb.sinh,
    "atan": lambda x: 1 / (1 + x * x),
    "asin": lambda x: 1 / (1 - x * x).sqrt(),
    "acos": lambda x: -1 / (1 - x * x).sqrt(),
    "erf": lambda x: 2 * (-x * x).exp() / arb.pi().sqrt(),
    "sigmoid": lambda x: _sigmoid(x) * _sigmoid(-x),
    "gelu": lambda x: _normal_cdf(x) + x * (-x * x / 2).exp() / (2 * arb.pi()).sqrt(),
    "silu": lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x)),
    "softplus": _sigmoid,
}


def rational(value: Fraction) -> arb:
    return arb(fmpq(value.numerator, value.denominator))


@dataclass(frozen=True)
class TreeArithmetic:
    """Functions of any numbers that can be added, multiplied and divided; `constant` makes one of a ball."""

    functions: Mapping[str, Callable[..., Any]]
    constant: Callable[[arb], Any] = lambda ball: ball
    power: Callable[[Any, Any], Any] = operator.pow

    def value(self, node: Node, point: Mapping[str, Any]) -> Any:
        """The value of a tree at a point."""
        a = [self.value(child, point) for child in children(node)]
        match node:
            case Number(value):
                return self.constant(rational(value))
            case Constant(name):
                return self.constant(arb.pi() if name == "pi" else arb(1).exp())
            case Variable(name):
                return point[name]
            case Sum():
                return reduce(operator.add, a)
            case Product():
                return reduce(operator.mul, a)
            case Quotient():
                return a[0] / a[1]
            case Power(_, Number(value)) if value.denominator == 1:
                one = self.constant(arb(1))
                result = reduce(operator.mul, [a[0]] * abs(int(value))) if value else one
                return one / result if value < 0 else result
            case Power():
                return self.power(*a)
            case Negate():
                return -a[0]
            case Call(name):
                return self.functions[name](*a)
        raise AssertionError(node)


tree_value = TreeArithmetic(VALUES).value


def monomial(tau: Sequence[arb], exponents: Sequence[int]) -> arb:
    return math.prod((t for t, times in zip(tau, exponents, strict=True) for _ in range(times)), start=arb(1))


def surely_outside(value: arb, interval: Interval) -> bool:
    """Whether the ball lies outside the interval, for certain."""
    lo, hi = float(interval.lo), float(interval.hi)
    return bool((lo > -float("inf") and value < arb(lo)) or (hi < float("inf") and value > arb(hi)))
