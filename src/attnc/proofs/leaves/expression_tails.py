"""Expressions of one variable on a half-line: an affine function and a remainder that falls exponentially.

On x = ±(R + t), t ≥ 0, a sub-expression is either p + q·t + r(t) with |r(t)| ≤ error·e^{−rate·t} (`Tail`), or a
function that grows at least linearly (`GrowingTail`). There are rules for sums, products and functions. If an argument
grows, a function is replaced by its asymptote, and a decreasing exponential bounds the remainder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc.errors import DomainError, InputError
from attnc.functions.function import ZERO
from attnc.functions.powers import real_power
from attnc.functions.registry import FUNCTIONS
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.expressions.evaluation import enclose
from attnc.targets.expressions.expression import Expression
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
    to_text,
)


@dataclass(frozen=True)
class Tail:
    """p + q·t + r(t), |r(t)| ≤ error·e^{−rate·t}, for all t ≥ 0."""

    p: Interval
    q: Interval
    error: float = 0.0
    rate: float = math.inf

    @property
    def is_bounded(self) -> bool:
        return float(self.q.lo) == 0 == float(self.q.hi)

    @property
    def is_constant(self) -> bool:
        return self.is_bounded and self.error == 0

    @property
    def range(self) -> Interval:
        """All values; q must be 0."""
        return self.p + Interval(np.array(-self.error), np.array(self.error))


@dataclass(frozen=True)
class GrowingTail:
    """sign·value ≥ low + rate·t for all t ≥ 0, with rate > 0; and ≥ scale·e^{exponent·t}."""

    sign: int
    low: float
    rate: float
    scale: float = 0.0
    exponent: float = 0.0


Known = Tail | GrowingTail


def expression_tails(expression: Expression, side: int, R: float) -> list[Tail]:
    """The tail of every output on x ≥ R (side = 1) or x ≤ −R (side = −1), with x = side·(R + t).

    Raises an InputError if an output is not affine up to a bounded remainder, or no rule here shows that it is.
    """
    if len(expression.variables) != 1 or side not in (1, -1) or not math.isfinite(R):
        raise InputError(
            f"tails are of expressions of one variable, on x ≥ R (side 1) or x ≤ −R (side −1) with a finite R; found "
            f"{len(expression.variables)} variable(s), side {side!r}, R = {R!r}"
        )
    steps, outputs = expression.schedule
    variable = Tail(Interval.point(side * R), Interval.point(float(side)))
    known: list[Known] = []
    for step in steps:
        known.append(_known(step.node, [known[i] for i in step.arguments], variable))
    found = []
    for node, number in zip(expression.outputs, outputs, strict=True):
        tail = known[number]
        if not isinstance(tail, Tail):
            raise _refusal(node, "grows faster than an affine function, or no rule shows that it does not")
        found.append(tail)
    return found


def _refusal(node: Node, reason: str) -> InputError:
    return InputError(f"cannot bound the tail of {to_text(node)}: it {reason}. Certify it on a bounded box instead.")


def _known(node: Node, a: Sequence[Known], variable: Tail) -> Known:
    match node:
        case Number() as number:
            return Tail(enclose(number), ZERO)
        case Constant(name):
            return Tail(elementary.PI if name == "pi" else elementary.E, ZERO)
        case Variable():
            return variable
        case Sum():
            total = a[0]
            for term in a[1:]:
                total = _sum(total, term, node)
            return total
        case Product():
            total = a[0]
            for factor in a[1:]:
                total = _product(total, factor, node)
            return total
        case Quotient():
            return _product(a[0], _reciprocal(a[1], node), node)
        case Power(_, Number(value)) if value.denominator == 1 and 0 < abs(value) <= 64:
            total = a[0]
            for _ in range(abs(int(value)) - 1):
                total = _product(total, a[0], node)
            return total if value > 0 else _reciprocal(total, node)
        case Power():
            base, exponent = a
            if isinstance(base, Tail) and isinstance(exponent, Tail) and base.is_constant and exponent.is_constant:
                return Tail(real_power(base.p, exponent.p), ZERO)
        case Negate():
            return _negated(a[0])
        case Call(name):
            return _call(name, a, node)
    raise _refusal(node, "is a power that has no rule here")


def _plus(a: float, b: float) -> float:
    """a + b ≥ 0 rounded up, exact if one is 0."""
    return a + b if a == 0 or b == 0 else float(up(a + b))


def _times(a: float, b: float) -> float:
    """a·b ≥ 0 rounded up, exact if one is 0."""
    return 0.0 if a == 0 or b == 0 else float(up(a * b))


def _negated(a: Known) -> Known:
    return Tail(-a.p, -a.q, a.error, a.rate) if isinstance(a, Tail) else replace(a, sign=-a.sign)


def growing(a: Known) -> GrowingTail | None:
    """The growth of a function whose slope has a sign; None if it is bounded or its growth is not known."""
    if isinstance(a, GrowingTail):
        return a
    for sign, p, q in ((1, a.p, a.q), (-1, -a.p, -a.q)):
        if q.lo > 0:
            return GrowingTail(sign, float(-up(a.error - p.lo)), float(q.lo))
    return None


def _sum(a: Known, b: Known, node: Node) -> Known:
    if isinstance(a, Tail) and isinstance(b, Tail):
        return Tail(a.p + b.p, a.q + b.q, _plus(a.error, b.error), min(a.rate, b.rate))
    grows, other = (a, b) if isinstance(a, GrowingTail) else (b, a)
    assert isinstance(grows, GrowingTail)
    if isinstance(other, Tail):  # its remainder counts as a constant
        slope = other.q if grows.sign > 0 else -other.q
        low = other.p if grows.sign > 0 else -other.p
        other = GrowingTail(grows.sign, float(-up(other.error - low.lo)), float(slope.lo))
    rate = float(-up(-grows.rate - other.rate))
    if other.sign != grows.sign or rate <= 0:
        raise _refusal(node, "is a sum of terms that grow against each other")
    # S·e^{κt} − c ≥ (S − c)·e^{κt} for c ≥ 0, if nothing else falls
    scale = max(0.0, -float(up(max(0.0, -other.low) - grows.scale))) if other.rate >= 0 else 0.0
    return GrowingTail(grows.sign, float(-up(-grows.low - other.low)), rate, scale, grows.exponent)


def _product(a: Known, b: Known, node: Node) -> Known:
    if isinstance(a, Tail) and isinstance(b, Tail) and (a.is_bounded or b.is_bounded):
        return _tail_product(a, b, node)
    one, other = growing(a), growing(b)
    if one is not None and other is not None:
        if one.low < 0 or other.low < 0:
            raise _refusal(node, "is a product of factors that may still change sign")
        low = -float(up(-one.low * other.low))
        rate = -float(up(up(-one.low * other.rate) + up(-one.rate * other.low)))
        if rate <= 0:
            raise _refusal(node, "is a product that may stand still at first")
        scale = max(0.0, -float(up(-max(one.scale, one.low) * max(other.scale, other.low))))
        exponent = sum(factor.exponent for factor in (one, other) if factor.scale >= factor.low)
        return GrowingTail(one.sign * other.sign, low, rate, scale, exponent)
    grows, bounded = (one, b) if one is not None else (other, a)
    if grows is None or not isinstance(bounded, Tail) or not bounded.is_bounded or grows.low < 0:
        raise _refusal(node, "is a product whose growth is not known")
    least = float(bounded.range.mig)
    rate = -float(up(-grows.rate * least))
    if rate <= 0:
        raise _refusal(node, "is a product whose growth is not known")
    sign, low = grows.sign if bounded.range.lo > 0 else -grows.sign, -float(up(-grows.low * least))
    return GrowingTail(sign, low, rate, max(0.0, -float(up(-grows.scale * least))), grows.exponent)


def _tail_product(a: Tail, b: Tail, node: Node) -> Tail:
    """r_a(p_b + q_b·t + r_b) + r_b(p_a + q_a·t) is the new remainder; one of the slopes is 0."""
    error, rate = _times(a.error, b.error), min(a.rate, b.rate)
    for one, other in ((a, b), (b, a)):
        if one.error == 0:
            continue
        error = _plus(error, _times(one.error, float(other.p.mag)))
        if not other.is_bounded:
            if one.rate == 0:
                raise _refusal(node, "multiplies a growing factor by a remainder that does not fall")
            # t·e^{−λt} ≤ 2/(eλ)·e^{−λt/2}, and 2/e < 0.7358
            longest = float(up(0.7358 / one.rate))
            error = _plus(error, _times(_times(one.error, float(other.q.mag)), longest))
            rate = min(rate, one.rate / 2)
    return Tail(a.p * b.p, a.p * b.q + a.q * b.p, error, rate)


def _reciprocal(a: Known, node: Node) -> Known:
    if isinstance(a, Tail) and a.is_bounded:
        if not a.range.mig > 0:
            raise _refusal(node, "divides by a number that may be zero")
        steep = (1.0 / a.range.square()).mag
        return Tail(1.0 / a.p, ZERO, _times(float(steep), a.error), a.rate)
    grows = growing(a)
    if grows is None or grows.low <= 0:
        raise _refusal(node, "divides by a number that may be zero")
    if grows.exponent > 0 and grows.scale > 0:
        return Tail(ZERO, ZERO, float(up(1.0 / grows.scale)), grows.exponent)
    return Tail(ZERO, ZERO, float(up(1.0 / grows.low)), 0.0)


def _call(name: str, a: Sequence[Known], node: Node) -> Known:
    if name == "abs":
        return _sum(_call("relu", a, node), _call("relu", [_negated(a[0])], node), node)
    if name in ("max", "min"):  # max(a, b) = b + relu(a − b), min(a, b) = b − relu(b − a)
        total = a[0]
        for other in a[1:]:
            lead = _sum(total, _negated(other), node)
            ahead = _call("relu", [lead if name == "max" else _negated(lead)], node)
            total = _sum(other, ahead if name == "max" else _negated(ahead), node)
        return total
    if name == "clip":
        return _call("min", [_call("max", a[:2], node), a[2]], node)
    argument = a[0]
    if isinstance(argument, Tail) and argument.is_bounded:
        return _at_bounded(name, argument, node)
    grows = growing(argument)
    if name == "exp" and grows is not None and grows.sign > 0:  # e^s ≥ e^low·(1 + s − low)
        least = float(elementary.exp(Interval.point(grows.low)).lo)
        if least > 0:
            return GrowingTail(1, least, -float(up(-least * grows.rate)), least, grows.rate)
    asymptote = None if grows is None else FUNCTIONS[name].asymptotes.get(grows.sign)
    if grows is None or asymptote is None:
        raise _refusal(node, "has no rule here for an argument that is not bounded")
    remainder = asymptote.remainder(grows.low)
    if remainder is None:
        raise _refusal(
            node, f"has an argument that is too small at the start of the half-line ({grows.low:.3g}): raise R"
        )
    error, rate = remainder[0], max(0.0, math.nextafter(remainder[1] * grows.rate, 0.0))
    if asymptote.slope == 0:
        return Tail(asymptote.limit, ZERO, error, rate)
    if isinstance(argument, GrowingTail):
        return GrowingTail(1, -float(up(error - grows.low)), grows.rate)
    return Tail(argument.p + asymptote.limit, argument.q, _plus(argument.error, error), min(rate, argument.rate))


def _at_bounded(name: str, a: Tail, node: Node) -> Tail:
    """g(p + r) = g(p) + G·r with G a slope of g on all values."""
    function, values = FUNCTIONS[name], a.range
    if function.domain is not None and np.any(function.domain.may_leave([values])):
        raise DomainError(f"{to_text(node)} is not defined on all of the half-line")
    error = 0.0
    if a.error > 0:
        if function.slope is None:
            raise _refusal(node, "has no slope here")
        steep = float(function.slope(values, function.range(values)).mag)
        error = _times(steep, a.error)
    if not math.isfinite(error):
        raise _refusal(node, "has an unbounded slope")
    return Tail(function.range(a.p), ZERO, error, a.rate)
