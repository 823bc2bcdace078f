"""Interval arithmetic with exact ends: the range of an expression on a box.

Ends may be infinite, and nan if nothing is known. Every function of one variable is monotone between its turns.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

from flint import arb, arb_poly, arb_series, ctx, fmpq

from attnc_checker.expressions import Rules, Smooth

Range = tuple[arb, arb]
SLICES = 8
"""The number of pieces into which a wide range is cut before Taylor coefficients on it are enclosed."""
EXTRA_TERMS = 8
"""The number of extra Taylor coefficients that Lagrange's form uses."""

Series = arb | arb_series
"""A number, or a power series around one."""


def _first(s: Series) -> arb:
    return s if isinstance(s, arb) else s[0]


def _sigmoid(s: Series) -> Any:
    """Return 1/(1 + e^−s), for small arguments as e^s/(e^s + 1), in which balls stay narrow."""
    return 1 / ((-s).exp() + 1) if _first(s) > -1 else s.exp() / (s.exp() + 1)


def _softplus(s: Series) -> Any:
    """Return log(1 + e^s), for large arguments as s + log(1 + e^−s), in which balls stay narrow."""
    return s + ((-s).exp() + 1).log() if _first(s) > 0 else (s.exp() + 1).log()


SERIES: dict[str, Callable[[Any], Any]] = {
    **{
        name: operator.methodcaller(name) for name in ["sin", "cos", "tan", "exp", "log", "atan", "asin", "acos", "erf"]
    },
    "tanh": lambda s: 1 - 2 * _sigmoid(s * -2) if _first(s) > 0 else 2 * _sigmoid(s * 2) - 1,
    "sinh": lambda s: (s.exp() - (-s).exp()) / 2,
    "cosh": lambda s: (s.exp() + (-s).exp()) / 2,
    "sigmoid": _sigmoid,
    "silu": lambda s: s * _sigmoid(s),
    "gelu": lambda s: s * ((s / arb(2).sqrt()).erf() + 1) / 2,
    "softplus": _softplus,
}
"""Functions of a number or of a power series (`Series`), with a result of the same type. Where a function is not
defined, the result is nan or an error."""

TURNS = {
    "cosh": arb(0),
    "silu": arb("-1.27846454276107379511 +/- 1e-20"),
    "gelu": arb("-0.75179152469356445746 +/- 1e-20"),
}
"""The turning points of functions that fall and then rise."""

WAVES = {
    "sin": ((0.5, arb(1)), (-0.5, arb(-1))),
    "cos": ((0, arb(1)), (1, arb(-1))),
    "tan": ((0.5, arb("nan")), (-0.5, arb("nan"))),
}
"""Turns or poles at (this + 2n)·π for all integers n, and the value there."""


REALS, UNKNOWN = (arb("-inf"), arb("inf")), (arb("nan"), arb("nan"))
LIMITS = {name: (arb(-1), arb(1)) for name in ("sin", "cos", "tanh", "erf")}
"""Ranges that rounding must not leave, because the domains of other functions end there."""


def hull(x: Range) -> arb:
    return x[0].union(x[1])


@dataclass(frozen=True)
class Box:
    """centre ± half."""

    centre: list[arb]
    half: list[arb]

    @classmethod
    def between(cls, sides: Sequence[Range | tuple[fmpq, fmpq]]) -> Box:
        return cls([arb((lo + hi) / 2) for lo, hi in sides], [arb((hi - lo) / 2) for lo, hi in sides])

    @property
    def is_point(self) -> bool:
        return all(r == 0 for r in self.half)

    @property
    def sides(self) -> list[Range]:
        return [((c - r).lower(), (c + r).upper()) for c, r in zip(self.centre, self.half, strict=True)]

    @property
    def reach(self) -> list[arb]:
        return [(abs(c) + r).upper() for c, r in zip(self.centre, self.half, strict=True)]

    def cut(self, i: int, place: arb) -> Iterator[Box]:
        """Yield the parts below and above an exact place on the axis i."""
        for a, b in ((self.centre[i] - self.half[i], place), (place, self.centre[i] + self.half[i])):
            centre, half = [*self.centre], [*self.half]
            centre[i], half[i] = (a + b) / 2, (b - a) / 2
            yield Box(centre, half)


def outward(values: Sequence[arb]) -> Range:
    """Return the smallest range around the values, or nan if any value is nan."""
    return reduce(arb.min, values).lower(), reduce(arb.max, values).upper()


def _product(x: arb, y: arb) -> arb:
    """Return x·y, with 0 times an infinite end equal to 0."""
    return arb(0) if (x == 0 and not y.is_nan()) or (y == 0 and not x.is_nan()) else x * y


class Ranges(Rules[Range]):
    """Rules for the ranges on a box with these ends."""

    def __init__(self, ends: Sequence[Range]) -> None:
        self.ends = list(ends)

    def constant(self, x: fmpq | arb) -> Range:
        return outward([arb(x)])

    def variable(self, i: int) -> Range:
        return self.ends[i]

    def plus(self, a: Range, b: Range, sign: int = 1) -> Range:
        return (a[0] + sign * b[sign < 0]).lower(), (a[1] + sign * b[sign > 0]).upper()

    def times(self, a: Range, b: Range) -> Range:
        return outward([_product(x, y) for x in a for y in b])

    def raised(self, a: Range, b: Range) -> Range:
        """Return a^b. 0 to a power above 0 is 0."""
        if not (a[0] == 0 and b[0] > 0):
            return super().raised(a, b)
        return arb(0), super().raised((a[1], a[1]), b)[1] if a[1] > 0 else a[1]

    def maximum(self, a: Range, b: Range) -> Range:
        return a[0].max(b[0]), a[1].max(b[1])

    def magnitude(self, a: Range) -> Range:
        return a[0].max(-a[1]).max(arb(0)), a[1].max(-a[0])

    def apply(self, name: Smooth, a: Range) -> Range:
        """Return the range from the values at the ends, and at the turns that may lie between them."""
        if any(x.is_nan() for x in a):  # Arb's acos of nan is π
            return UNKNOWN
        if isinstance(name, fmpq):
            return self._raised(a, name)
        values = [SERIES[name](x) for x in a]
        if name in TURNS and not (a[1] < TURNS[name] or TURNS[name] < a[0]):
            values.append(SERIES[name](TURNS[name]))
        for turn, value in WAVES.get(name, ()):
            first, last = ((x / arb.pi() - turn) / 2 for x in a)  # a turn is between the ends if a whole number is
            if not last.floor() < first:
                values.append(value)
        (low, high), (least, most) = outward(values), LIMITS.get(name, REALS)
        return low.max(least), high.min(most)

    def _raised(self, a: Range, q: fmpq) -> Range:
        a = self.magnitude(a) if q.q == 1 and q.p % 2 == 0 else a
        if q < 0 and not (a[0] > 0 or a[1] < 0):
            return UNKNOWN
        return outward([arb(0) if x == 0 and q > 0 else x ** arb(q) for x in a])

    def step(self, name: str, a: Range) -> Range:
        return outward([x if x.is_nan() else x.sgn() if name == "sign" else x.floor() for x in a])


def coefficients(name: Smooth, y: Range, count: int) -> list[arb]:
    """Return balls that hold the first Taylor coefficients of a function at all points of a range.

    For y^q they are q(q − 1)…(q − n + 1)/n!·y^{q − n}, which is also finite at 0 if n ≤ q.
    """
    if isinstance(name, fmpq):
        factors = [*accumulate(range(count - 1), lambda factor, n: factor * (name - n) / (n + 1), initial=fmpq(1))]
        powers = (hull(Ranges([]).apply(name - n, y)) if x != 0 else arb(0) for n, x in enumerate(factors))
        return [arb(x) * power for x, power in zip(factors, powers, strict=True)]
    found = _series(name, hull(y), count)
    if y[0] < y[1] and not found[-1].rad() <= abs(found[-1].mid()):  # coefficients on wide balls blow up
        step = (y[1] - y[0]) / SLICES
        slices = [_series(name, (y[0] + n * step).union(y[0] + (n + 1) * step), count) for n in range(SLICES)]
        found = [reduce(arb.union, same) for same in zip(*slices, strict=True)]
    return found


def expansion(name: Smooth, p: arb, y: Range, count: int) -> tuple[list[arb], list[arb]]:
    """Return the first Taylor coefficients g_n at p, and balls that hold d_n(x) for all x in the range, which holds p.

    d_0 = g and d_{n+1}(x) = (d_n(x) − g_n)/(x − p), so that g(x) = Σ_{k<n} g_k (x − p)^k + d_n(x) (x − p)^n. By
    Lagrange d_n(x) is the coefficient n at some point of the range, and its derivative is the coefficient n + 1 at
    another. Where the latter has one sign, d_n lies between its values at the ends of the range.
    """
    at_p, wide = coefficients(name, (p, p), count), coefficients(name, y, count + 1)

    def at(x: arb) -> Iterator[arb]:
        value = coefficients(name, (x, x), 1)[0]
        for g in at_p:
            yield value
            value = (value - g) / (x - p)

    found = zip(at(y[0]), at(y[1]), wide[:-1], wide[1:], strict=True)
    return at_p, [
        min(ball, low.union(high), key=arb.rad) if slope >= 0 or slope <= 0 else ball
        for low, high, ball, slope in found
    ]


def _series(name: str, ball: arb, count: int) -> list[arb]:
    """Return the coefficients on the ball, directly or from those at its centre c, whichever are narrower.

    By Lagrange, g_n(c + h) = Σ_{k<N} C(k, n) g_k(c) h^{k−n} + C(N, n) g_N(y) h^{N−n} with some y between. Only g_N is
    taken on the whole ball.
    """
    N, c = count + EXTRA_TERMS, ball.mid()
    if ball.is_finite() and ctx.cap > N:  # coefficients beyond it would be 0
        with contextlib.suppress(ValueError):  # a divisor that may be 0
            if ball.is_exact():
                near = SERIES[name](arb_series([c, 1], count))
                return [near[n] for n in range(count)]
            wide, near = (SERIES[name](arb_series([x, 1], N + 1)) for x in (ball, c))
            moved = arb_poly([*(near[k] for k in range(N)), wide[N]])(arb_poly([ball - c, 1]))
            return [min(wide[n], moved[n], key=arb.rad) for n in range(count)]
    return [arb("nan")] * count
