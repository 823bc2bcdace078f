"""Interval arithmetic with exact ends: where the values of an expression lie on a box.

Ends may be infinite; nan says that nothing is known. Functions that are not monotone are taken piece by piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from flint import arb, arb_series

from attnc_checker.expressions import Rules

Range = tuple[Any, Any]
HALVINGS = 24
"""Of an interval on which a function is not known to be monotone."""


def _exp(s: Any) -> Any:
    """Of a + b·z: e^a from the ends of the ball a, as Arb's own radius is that of the upper end on both sides."""
    e = s[0].lower().exp().union(s[0].upper().exp()) if s[0].is_finite() else s[0].exp()
    return e * arb_series([0, s[1]], s.prec).exp()


def _sigmoid(s: Any) -> Any:
    return 1 / (_exp(-s) + 1)


def _softplus(s: Any) -> Any:
    """Of large arguments by log(1 + e^s) = s + log(1 + e^−s), in which balls stay narrow."""
    return s + (_exp(-s) + 1).log() if s[0] > 0 else (_exp(s) + 1).log()


SERIES: dict[str, Callable[[Any], Any]] = {
    **{name: operator.methodcaller(name) for name in ("sin", "cos", "tan", "log", "sqrt")},
    "exp": _exp,
    **{name: operator.methodcaller(name) for name in ("atan", "asin", "acos", "erf")},
    "tanh": lambda s: 1 - 2 / (_exp(s * 2) + 1),
    "sinh": lambda s: (_exp(s) - _exp(-s)) / 2,
    "cosh": lambda s: (_exp(s) + _exp(-s)) / 2,
    "sigmoid": _sigmoid,
    "silu": lambda s: s * _sigmoid(s),
    "gelu": lambda s: s * ((s / arb(2).sqrt()).erf() + 1) / 2,
    "softplus": _softplus,
    "inverse": lambda s: 1 / s,
}
"""Functions of one variable by Arb's own power series around a ball: nan or an error where they are not defined."""

NAMED: dict[str, Callable[[], Any]] = {"pi": arb.pi, "e": arb.const_e}

LIMITS: dict[str, Callable[[Any], Any]] = {
    "exp": arb.exp,
    "log": lambda x: arb("-inf") if x == 0 else x.log(),
    "sqrt": arb.sqrt,
    "asin": arb.asin,
    "acos": arb.acos,
    "tanh": arb.tanh,
    "atan": arb.atan,
}
"""Monotone functions where they end, too: at the edge of their domain or at infinity."""

TURNS = {
    "cosh": arb(0),
    "silu": arb("-1.27846454276107379511 +/- 1e-20"),
    "gelu": arb("-0.75179152469356445746 +/- 1e-20"),
}
"""Where functions that fall, and then rise, turn."""


def hull(x: Range) -> Any:
    return x[0].union(x[1])


def _outward(low: Any, high: Any) -> Range:
    return low.lower(), high.upper()


def _product(x: Any, y: Any) -> Any:
    """0 times an infinite end is 0."""
    return arb(0) if (x == 0 and not y.is_nan()) or (y == 0 and not x.is_nan()) else x * y


class Ranges(Rules):
    """Rules for the ranges on a box with these ends."""

    def __init__(self, ends: Sequence[Range]) -> None:
        self.ends = ends

    def constant(self, x: Any) -> Range:
        return _outward(arb(x), arb(x))

    def named(self, name: str) -> Range:
        return self.constant(NAMED[name]())

    def variable(self, i: int) -> Range:
        return self.ends[i]

    def plus(self, a: Range, b: Range, sign: int = 1) -> Range:
        return _outward(a[0] + sign * b[sign < 0], a[1] + sign * b[sign > 0])

    def times(self, a: Range, b: Range) -> Range:
        products = [_product(x, y) for x in a for y in b]
        return _outward(_least(products), -_least([-x for x in products]))

    def power(self, a: Range, n: int) -> Range:
        a = self.magnitude(a) if n % 2 == 0 else a
        return _outward(a[0] ** n, a[1] ** n)

    def maximum(self, a: Range, b: Range) -> Range:
        return a[0].max(b[0]), a[1].max(b[1])

    def magnitude(self, a: Range) -> Range:
        return a[0].max(-a[1]).max(arb(0)), a[1].max(-a[0])

    def apply(self, name: str, a: Range, halvings: int = HALVINGS) -> Range:
        if name in LIMITS:
            ends = [LIMITS[name](x) for x in a]
            return _outward(*(reversed(ends) if name == "acos" else ends))
        if name in ("sin", "cos"):
            return self._wave(a, arb(0) if name == "cos" else arb.pi() / 2)
        ball = hull(a)
        if name in TURNS and ball.is_finite():
            low, high, turn = (SERIES[name](arb_series([x, 1], 1))[0] for x in (*a, TURNS[name]))
            least = low.min(high)
            return _outward(least.min(turn) if ball.overlaps(TURNS[name]) else least, low.max(high))
        values, slope = SERIES[name](arb_series([ball, 1], 2)), arb("nan")
        if ball.is_finite():
            slope = values[1]
        if slope >= 0 or slope <= 0:
            ends = [SERIES[name](arb_series([x, 1], 1))[0] for x in a]
            return _outward(*(ends if slope >= 0 else reversed(ends)))
        if halvings == 0 or not ball.is_finite():
            return _outward(values[0], values[0])
        middle = ball.mid()
        halves = [self.apply(name, half, halvings - 1) for half in ((a[0], middle), (middle, a[1]))]
        return _least([low for low, _ in halves]), -_least([-high for _, high in halves])

    def _wave(self, a: Range, top: Any) -> Range:
        """cos(x − top): 1 and −1 are reached where (x − top)/2π is, or may be, an integer or a half beside one."""
        ends = [(x - top).cos() for x in a]

        def reaches(shift: Any) -> bool:
            first, last = ((x - top) / (2 * arb.pi()) - shift for x in a)
            return not last.floor() < first

        low = arb(-1) if reaches(arb(1) / 2) else ends[0].min(ends[1])
        return _outward(low, arb(1) if reaches(arb(0)) else ends[0].max(ends[1]))

    def step(self, name: str, a: Range) -> Range:
        low, high = (x.sgn() if name == "sign" else x.floor() for x in a)
        return _outward(low, high)


def _least(values: list[Any]) -> Any:
    """nan if any is."""
    least = values[0]
    for x in values[1:]:
        least = least.min(x)
    return least
