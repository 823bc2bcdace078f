"""Tail leaves: the error of a one-dimensional stage on a half-line, by the limits of its weights.

On x = ±(R + t), t ≥ 0, the key of the steepest score wins. Let T be the keys that share the largest slope; the weight
of any other, at a distance Δ_k > 0 in slope, is at most e_k·e^{−Δ_k t}, e_k its weight relative to T at t = 0. So

    A = Σ_{k∈T} π_k·value_k + Σ_{k∉T} p_k (value_k − mean of T),    |p_k| ≤ e_k e^{−Δ_k t},

the first sum is affine in t, and for values affine in t each term of the second has its largest size at
t = max(0, 1/Δ_k − |u_0|/|u_1|), where |u_0| + |u_1|t bounds the difference. The expression is affine, too, up to a
remainder; the bound is finite only where both have exactly the same slope.

An expression of one variable on a half-line is an affine function and a remainder that falls exponentially. A
sub-expression is either p + q·t + r(t) with |r(t)| ≤ error·e^{−rate·t} (`Tail`), or a function that grows at least
linearly (`GrowingTail`). There are rules for sums, products and functions. If an argument grows, a function is replaced
by its asymptote (`attnc.functions`), and a decreasing exponential bounds the remainder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import DomainError, InputError
from attnc.functions.function import ZERO
from attnc.functions.powers import real_power
from attnc.functions.registry import FUNCTIONS
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.cells.intervals import interval
from attnc.proofs.cells.kind import Bounds, Kind
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.ranges import Goal
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

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class TailKind(Kind):
    """Half-lines: on the side −1 or 1 the cell of a centre is all that lies beyond it, and its radius is infinite."""

    stage: OneStage
    expression: Expression
    side: int
    name = "tail"

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        starts = (self.side * centres[:, 0]).tolist()
        return Bounds(np.array([tail_bound(self.stage, self.expression, self.side, start) for start in starts]))


def tail_bound(stage: OneStage, expression: Expression, side: int, R: float) -> Float[np.ndarray, " outputs"]:
    """Upper bounds of |f(x) − stage(x)| over all x ≥ R (side = 1) or all x ≤ −R (side = −1), ∞ where there is none."""
    if stage.linear.mid.shape[1] != 1:
        raise InputError(f"tails are of stages of one variable; this one has {stage.linear.mid.shape[1]}")
    tails = expression_tails(expression, side, R)
    if len(tails) != len(stage.constant.mid):
        raise InputError(f"the expression has {len(tails)} outputs, the stage {len(stage.constant.mid)}")
    start, slopes = _affine(stage.constant, stage.linear, side, R)
    remainder = np.zeros(len(tails))
    for head in stage.heads:
        limit = _limit(head, side, R)
        start, slopes, remainder = start + limit.start, slopes + limit.slopes, up(remainder + limit.remainder)
    same = np.array([_is_same(tail, slopes, i) for i, tail in enumerate(tails)])
    p = Interval(np.array([float(tail.p.lo) for tail in tails]), np.array([float(tail.p.hi) for tail in tails]))
    found = up(up((p - start).mag + np.array([tail.error for tail in tails])) + remainder)
    return np.where(same, found, np.inf)


def _is_same(tail: Tail, slopes: Interval, output: int) -> bool:
    """Both slopes are one and the same number."""
    return bool(tail.q.lo == tail.q.hi == slopes.lo[output] == slopes.hi[output])


def _exact(enclosed: Enclosed) -> Interval:
    """The enclosure, a point where the radius is zero."""
    around = interval(enclosed)
    is_point = enclosed.radius == 0
    return Interval(np.where(is_point, enclosed.mid, around.lo), np.where(is_point, enclosed.mid, around.hi))


def _affine(constant: Enclosed, slopes: Enclosed | None, side: int, R: float) -> tuple[Interval, Interval]:
    """(value at t = 0, slope in t) of constant + slopes·x."""
    if slopes is None:
        return _exact(constant), Interval.point(np.zeros(constant.mid.shape))
    slope = _exact(Enclosed(slopes.mid[..., 0], slopes.radius[..., 0])) * float(side)
    return _exact(constant) + slope * R, slope


@dataclass(frozen=True, eq=False)
class _Limit:
    """A head is start + slopes·t, up to `remainder`."""

    start: Interval
    slopes: Interval
    remainder: Float[np.ndarray, " outputs"]


def _limit(head: SoftHead[Enclosed], side: int, R: float) -> _Limit:
    offsets, steepness = _affine(head.offsets, head.slopes, side, R)
    start, slopes = _affine(head.values, head.carried, side, R)
    best = int(np.argmax(steepness.lo))
    top = (steepness.lo == steepness.lo[best]) & (steepness.hi == steepness.lo[best])
    if not top.any():
        top[best] = True  # alone, with an enclosure that is no point
    weights = _softmax(offsets[top])
    mean, slope = _mean(weights, start[top]), _mean(weights, slopes[top])
    rest = ~top
    if not rest.any():
        return _Limit(mean, slope, np.zeros(mean.shape))
    # log Σ_T e^{offset} is the offset of any of its keys less the logarithm of its weight.
    first = int(np.argmax(offsets[top].lo))
    reference = offsets[top][first] - elementary.log(weights[first])
    gaps = (Interval.point(steepness.lo[best]) - steepness[rest]).lo
    with np.errstate(under="ignore", over="ignore", invalid="ignore", divide="ignore"):
        shares = elementary.exp(offsets[rest] - reference).hi
        at_start, growth = (start[rest] - mean).mag, (slopes[rest] - slope).mag
        falls = gaps[:, None] > 0
        when = np.where(growth > 0, np.maximum(0.0, 1 / gaps[:, None] - at_start / growth), 0.0)
        size = up(up(at_start + up(growth * when)) * np.exp(-gaps[:, None] * when), 64)
        size = np.where(falls, size, np.where((at_start == 0) & (growth == 0), 0.0, np.inf))
        total = np.where(size == 0, 0.0, shares[:, None] * size).sum(axis=0)
    return _Limit(mean, slope, up(total * (1 + 2.0**-52 * (len(shares) + 4))))


def _softmax(scores: Interval) -> Interval:
    if len(scores) == 1:
        return Interval.point(np.ones(1))
    weights = elementary.exp(scores - scores.hi.max())
    total = weights[0]
    for k in range(1, len(weights)):
        total = total + weights[k]
    return weights / total


def _mean(weights: Interval, values: Interval) -> Interval:
    """Σ weights·values over the first axis; exactly the value where all are one number."""
    if len(weights) == 1:
        return values[0]
    total = weights[0] * values[0]
    for k in range(1, len(weights)):
        total = total + weights[k] * values[k]
    lo, hi = values.lo.min(axis=0), values.hi.max(axis=0)
    return Interval(np.maximum(total.lo, lo), np.minimum(total.hi, hi))


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
            raise _refusal(node, "divides by an expression that may be zero")
        steep = (1.0 / a.range.square()).mag
        return Tail(1.0 / a.p, ZERO, _times(float(steep), a.error), a.rate)
    grows = growing(a)
    if grows is None or grows.low <= 0:
        raise _refusal(node, "divides by an expression that may be zero")
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
