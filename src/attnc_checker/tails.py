"""Beyond a bounded core: x = start ± s for all s ≥ 0, in exact arithmetic.

The function becomes P(s) + E(s) with a polynomial P and |E(s)| ≤ size·e^{−rate·s}. Of a head, the keys with the
steepest score win: if their weights e^{c_j} at s = 0 add up to W, then p_k ≤ e^{c_k}/W·e^{−λ_k s} for any other key,
λ_k > 0 the difference of slopes. With the winners' value v + V·s,
    |A − v − V·s| ≤ Σ_k e^{c_k}/W·sup_s e^{−λ_k s}(|v_k − v| + |V_k − V|·s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flint import arb, arb_series

from attnc_checker.averages import total
from attnc_checker.expressions import Function, Rules, evaluate
from attnc_checker.network import Form, Head, Stage, dense
from attnc_checker.ranges import NAMED, SERIES
from attnc_checker.rounding import most


class Undecided(ArithmeticError):
    """What happens far out is not known."""


class Tail(NamedTuple):
    poly: tuple[Any, ...]  # by powers of s
    size: Any = arb(0)
    rate: Any = arb(1)


def _peak(poly: Sequence[Any], rate: Any) -> Any:
    """Above |P(s)| e^{−rate·s}, as s^n e^{−rate·s} ≤ (n/(e·rate))^n. |p| + |q|s peaks at s = 1/rate − |p|/|q|, or 0."""
    p, *others = map(abs, poly)
    if len(others) == 1 and others[0] != 0:
        q = others[0]
        return p if p * rate >= q else q / rate * (rate * p / q - 1).exp()
    return p + total(x * (n / (arb.const_e() * rate)) ** n for n, x in enumerate(others, 1))


class _Tails(Rules):
    """Rules for functions of s ≥ 0, where x = start + side·s."""

    def __init__(self, start: Any, side: int) -> None:
        self.start, self.side = start, side

    def constant(self, x: Any) -> Tail:
        return Tail((arb(x),))

    def named(self, name: str) -> Tail:
        return self.constant(NAMED[name]())

    def variable(self, i: int) -> Tail:
        return Tail((arb(self.start), arb(self.side)))

    def plus(self, a: Tail, b: Tail, sign: int = 1) -> Tail:
        length = max(len(a.poly), len(b.poly))
        p, q = ([*t.poly, *[arb(0)] * (length - len(t.poly))] for t in (a, b))
        poly = [x + sign * y for x, y in zip(p, q, strict=True)]
        while len(poly) > 1 and poly[-1] == 0:
            poly.pop()
        return Tail(tuple(poly), a.size + b.size, a.rate.min(b.rate))

    def times(self, a: Tail, b: Tail) -> Tail:
        product = Tail((arb(0),), a.size * b.size, a.rate + b.rate)
        for n, x in enumerate(a.poly):
            product = self.plus(product, Tail((*[arb(0)] * n, *(x * y for y in b.poly))))
        return self.plus(self.plus(product, self._damped(a.poly, b)), self._damped(b.poly, a))

    def _damped(self, poly: tuple[Any, ...], e: Tail) -> Tail:
        """P·E. Half of the rate is spent on the growth of P."""
        if e.size == 0:
            return Tail((arb(0),))
        if len(poly) > 1 and not e.rate > 0:
            raise Undecided("on the tail, what is only bounded is multiplied by what is not")
        size = e.size * (_peak(poly, e.rate / 2) if len(poly) > 1 else abs(poly[0]))
        return Tail((arb(0),), size, e.rate / 2)

    def maximum(self, a: Tail, b: Tail) -> Tail:
        for u, v in ((a, b), (b, a)):
            difference = self.plus(u, v, -1)
            if all(x >= 0 for x in difference.poly[1:]) and difference.poly[0] >= difference.size:
                return u
        raise Undecided("which side of a kink counts is not decided on the tail")

    def step(self, name: str, a: Tail) -> Tail:
        raise Undecided(f"{name} may jump on the tail")

    def apply(self, name: str, y: Tail) -> Tail:
        if len(y.poly) == 1:  # y = p + E stays in a ball, on which |g(y) − g(p)| ≤ sup|g′|·|E|
            slope = SERIES[name](arb_series([y.poly[0] + y.size * arb(0, 1), 1], 2))[1]
            return Tail((SERIES[name](arb_series([y.poly[0], 1], 1))[0],), abs(slope) * y.size, y.rate)
        if len(y.poly) > 2:
            raise Undecided(f"{name} of a polynomial is not followed on the tail")
        if not y.poly[1] != 0:
            raise Undecided(f"whether the argument of {name} rises or falls on the tail is not decided")
        side = 1 if y.poly[1] > 0 else -1
        low, rate = side * y.poly[0] - y.size, side * y.poly[1]  # side·y ≥ low + rate·s
        fall = Tail((arb(0),), (-low).exp(), rate)  # ≥ e^{−side·y}
        zero, one, two = (self.constant(arb(n)) for n in (0, 1, 2))
        match name:
            case "exp" if side < 0:
                return fall
            case "sigmoid":  # 1 − σ(y) = σ(−y) ≤ e^{−y}
                return self.plus(one if side > 0 else zero, fall)
            case "softplus":  # log(1 + e^y) = y + log(1 + e^{−y}), and log(1 + z) ≤ z
                return self.plus(y if side > 0 else zero, fall)
            case "tanh":  # 2σ(2y) − 1
                return self.plus(self.times(two, self.apply("sigmoid", self.plus(y, y))), one, -1)
            case "silu":
                return self.times(y, self.apply("sigmoid", y))
            case "erf" if low > 0:  # e^{y²} erfc(y) falls, and y² ≥ low² + 2·low·rate·s
                return Tail((arb(side),), low.erfc(), 2 * low * rate)
            case "gelu":
                erf = self.apply("erf", self.times(y, self.constant(1 / arb(2).sqrt())))
                return self.times(self.times(y, self.plus(erf, one)), self.constant(arb(1) / 2))
        raise Undecided(f"{name} is not followed on the tail")


def _average(head: Head, o: int, start: Any, side: int) -> tuple[Tail, Any]:
    """(the winners' value, how far the average may be from it)."""

    def along(form: Form) -> tuple[Any, Any]:
        constant, slope = dense(form.terms, [0])
        return constant + slope * start, slope * side

    keys = [(*along(key.score), *along(key.values[o])) for key in head.keys]
    steepest = max(slope for _, slope, _, _ in keys)
    winners = [key for key in keys if key[1] == steepest]
    (top, _, v, V) = max(winners)
    if any(key[2:] != (v, V) for key in winners):
        raise Undecided("keys with different values win together on the tail")
    weight = total(arb(c - top).exp() for c, _, _, _ in winners)
    error = total(
        arb(c - top).exp() / weight * _peak((arb(v_k - v), arb(V_k - V)), arb(steepest - slope))
        for c, slope, v_k, V_k in keys
        if slope != steepest
    )
    return Tail((arb(v), arb(V))), error


def tail_error(stage: Stage, function: Function, start: Any, side: int) -> Any:
    """Above sup |f − network| beyond `start` on that side, over all outputs, in exact arithmetic."""
    rules = _Tails(start, side)
    errors = []
    for o, left in enumerate(evaluate(function, rules)):
        b, B = dense(stage.affine[o].terms, [0])
        left, error = rules.plus(left, Tail((arb(b + B * start), arb(B * side))), -1), arb(0)
        for head in stage.heads:
            if o in head.outputs:
                value, more = _average(head, o, start, side)
                left, error = rules.plus(left, value, -1), error + more
        if len(left.poly) > 1:
            raise Undecided("function and network drift apart without bound on the tail")
        errors.append(abs(left.poly[0]) + left.size + error)
    return most(errors)
