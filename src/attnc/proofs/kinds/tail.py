"""Tail leaves: the error of a one-dimensional stage on a half-line, by the limits of its weights.

On x = ±(R + t), t ≥ 0, the key of the steepest score wins. Let T be the keys that share the largest slope. The weight
of any other key, at a distance Δ_k > 0 in slope, is at most e_k·e^{−Δ_k t}, with e_k its weight relative to T at t = 0.
So

    A = Σ_{k∈T} π_k·value_k + Σ_{k∉T} p_k (value_k − mean of T),    |p_k| ≤ e_k e^{−Δ_k t},

where the first sum is affine in t. If values are affine in t, and |u_0| + |u_1|t bounds the difference, each term of
the second sum is largest at t = max(0, 1/Δ_k − |u_0|/|u_1|). The expression is also affine, up to a remainder. The
bound is finite only if both have exactly the same slope.

An expression of one variable on a half-line is an affine function and a remainder that falls exponentially. A
sub-expression is either p + q·t + r(t) with |r(t)| ≤ error·e^{−rate·t} (`Tail`), or a function that grows at least
linearly (`GrowingTail`). There are rules for sums, products and functions. If an argument grows, a function is replaced
by its asymptote (`attnc.functions`), and a decreasing exponential bounds the remainder.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from attnc.errors import AttncError, DomainError, InputError
from attnc.functions.function import ZERO
from attnc.functions.powers import real_power
from attnc.functions.registry import FUNCTIONS
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics import elementary
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, down, gamma, up
from attnc.proofs.cells.intervals import interval, is_same_number
from attnc.proofs.margins import STAGE_ROUNDING
from attnc.proofs.rounding.program import HeadRoundings, Roundings
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.expressions import tree
from attnc.targets.expressions.evaluation import enclose
from attnc.targets.expressions.expression import Expression

NOT_DEFINED = "is not defined on all of the half-line"


@dataclass(frozen=True, eq=False)
class TailBound:
    """|f − network| ≤ constant + slope·|x| on a half-line, for every output; ∞ where there is no bound."""

    constant: Float[np.ndarray, " outputs"]
    slope: Float[np.ndarray, " outputs"]


def tail_bound(
    stage: OneStage, expression: Expression, side: int, R: float, roundings: Roundings | None = None
) -> TailBound:
    """Bound the error of a stage over all x ≥ R (side = 1) or all x ≤ −R (side = −1).

    With `roundings` it is the error of the stage as any engine computes it, otherwise that of exact arithmetic.
    """
    if stage.linear.mid.shape[1] != 1:
        raise InputError(f"only a stage of one variable has tails; this one has {stage.linear.mid.shape[1]} variables")
    if roundings is not None and R < 0:
        raise InputError(f"rounding is bounded on a half-line that does not hold 0; this one begins at {side * R:g}")
    tails = expression_tails(expression, side, R)
    if len(tails) != len(stage.constant.mid):
        raise InputError(f"the expression has {len(tails)} outputs, the stage {len(stage.constant.mid)}")
    start, slopes = _affine(stage.constant, stage.linear, side, R)
    remainder = np.array([tail.error for tail in tails])
    rounding = np.zeros((2, len(tails))) if roundings is None else _rounding_of_maps(roundings)  # constants, slopes
    for number, head in enumerate(stage.heads):
        errors = None if roundings is None else _score_errors(head, roundings.heads[number], roundings.dtype, side, R)
        found = _limit(head, side, R, errors)
        start, slopes, remainder = start + found.start, slopes + found.slopes, up(remainder + found.remainder)
        if roundings is not None:
            rounding = up(rounding + _rounding_of_sums(found.weights, roundings.heads[number], roundings.dtype))
    constant, slope = STAGE_ROUNDING * rounding
    p, q = (
        Interval(np.array([float(part.lo) for part in parts]), np.array([float(part.hi) for part in parts]))
        for parts in zip(*((tail.p, tail.q) for tail in tails), strict=True)
    )
    off = up(up((p - start).mag + remainder) + constant)
    return TailBound(np.where(is_same_number(q, slopes), off, np.inf), slope)


@dataclass(frozen=True, eq=False)
class _ScoreErrors:
    """A computed weight at t is within e^{±(start + growth·t)} of the exact one, up to a factor that all keys share."""

    start: Float[np.ndarray, " keys"]
    growth: Float[np.ndarray, " keys"]


def _score_errors(head: SoftHead[Enclosed], rounds: HeadRoundings, dtype: str, side: int, R: float) -> _ScoreErrors:
    """y_k = δ_k(1 + u) + u(behind_k + max δ) + 2Ku, δ_k the error of score k, and behind_k its distance to the largest.

    All of these are affine in |x| = R + t; see `proofs.rounding.stage`. A cast enlarges |x| by u|x|.
    """
    u, K = UNIT_ROUNDOFF[dtype], ENGINE_ULPS[dtype]
    offsets, steepness = _affine(head.offsets, head.slopes, side, R)
    growth, constant = up(rounds.score_errors + rounds.score_underflow[:, None]).T
    at_start = up(constant + up(growth * R))
    ulps = 2 * K * u / (1 - 2 * K * u)
    found = [
        up((1 + 3 * u) * delta + u * (behind.hi.max() - behind.lo + delta.max()) + known, 8)
        for delta, behind, known in ((at_start, offsets, ulps), (growth, steepness, 0.0))
    ]
    return _ScoreErrors(*(STAGE_ROUNDING * part for part in found))


def _rounding_of_maps(roundings: Roundings) -> Float[np.ndarray, "two outputs"]:
    """(constant, slope in |x|) of the rounding of the residual and of the read-out."""
    slope, constant = roundings.sizes.T
    share = gamma(roundings.count, roundings.unit) * (1 + 2 * roundings.unit)
    # Only numbers that depend on x underflow in proportion to it.
    lost = (np.ones_like(constant), slope > 0)
    sizes = zip((constant, slope), lost, strict=True)
    return np.stack([up(share * size + 2 * roundings.underflow * part, 4) for size, part in sizes])


def _rounding_of_sums(
    weights: Float[np.ndarray, " keys"], rounds: HeadRoundings, dtype: str
) -> Float[np.ndarray, "two outputs"]:
    """(constant, slope in |x|) of the rounding of the sums over keys, for computed weights of at most `weights`.

    This is the theorem of `proofs.rounding.stage`, once for the constant parts of the sizes and once for their slopes:
    Σ p̂_k|v_k| is the sum of both.
    """
    u, num_keys = UNIT_ROUNDOFF[dtype], len(weights)
    is_big = (weights > u / 16) | (num_keys * u > 0.1)  # half of the checker's limit: weights may differ by a factor 2
    sizes = np.zeros((num_keys, len(rounds.underflow), 2))  # slopes and constants
    sizes[..., -rounds.value_sizes.shape[2] :] = rounds.value_sizes
    B, far = int(is_big.sum()), np.where(is_big, 0.0, weights)
    if rounds.depth < B:
        B, far = rounds.depth + 1, np.zeros(num_keys)
    below, above = gamma(B, u), gamma(B + 3 + rounds.count, u)
    unseen = 4 * num_keys * (math.exp(NEGLIGIBLE[dtype]) + float(np.finfo(dtype).smallest_normal))
    found = []
    for size, loses in ((sizes[..., 1], True), (sizes[..., 0], rounds.value_sizes.shape[2] > 1)):
        largest = size.max(axis=0)
        mean = np.minimum((weights - far) @ size, largest) + far @ size
        small = 2 * (far @ size + far.sum() * largest)
        of_sums = (above * (1 + below) + below) * mean + small + unseen * largest
        of_sums = of_sums * (1 + 2 * u) * (1 + 4 * UNIT_ROUNDOFF["float64"] * (num_keys + 16))  # a cast; the sums here
        found.append(up(of_sums + rounds.underflow, 4) if loses else np.zeros_like(of_sums))
    return np.stack(found)


def _affine(constant: Enclosed, slopes: Enclosed | None, side: int, R: float) -> tuple[Interval, Interval]:
    """Return the value at t = 0 and the slope in t of constant + slopes·x."""
    if slopes is None:
        return interval(constant), Interval.point(np.zeros(constant.mid.shape))
    slope = interval(slopes[..., 0]) * float(side)
    return interval(constant) + slope * R, slope


@dataclass(frozen=True, eq=False)
class _Limit:
    """A head is start + slopes·t on the half-line, up to the remainder; its weights are at most `weights`."""

    start: Interval
    slopes: Interval
    remainder: Float[np.ndarray, " outputs"]
    weights: Float[np.ndarray, " keys"]


def _limit(head: SoftHead[Enclosed], side: int, R: float, errors: _ScoreErrors | None) -> _Limit:
    """Return the limit of a head by its exact weights, or by those that an engine computes."""
    offsets, steepness = _affine(head.offsets, head.slopes, side, R)
    start, slopes = _affine(head.values, head.carried, side, R)
    best = int(np.argmax(steepness.lo))
    top = is_same_number(steepness, steepness[best])
    top[best] = True  # if its enclosure is not a point, it is the only key of T
    weights = _softmax(offsets[top])
    mean, slope = _mean(weights, start[top]), _mean(weights, slopes[top])
    largest = np.ones(len(top))
    if errors is not None and not all(is_same_number(part[top], part[best]).all() for part in (start, slopes)):
        raise InputError("keys with different values win together on the half-line: rounding moves their average")
    if top.all():
        return _Limit(mean, slope, np.zeros(mean.shape), largest)
    # log Σ_T e^{offset} is the offset of any key of T minus the logarithm of its weight.
    first = int(np.argmax(offsets[top].lo))
    reference = offsets[top][first] - elementary.log(weights[first])
    gaps = (Interval.point(steepness.lo[best]) - steepness[~top]).lo[:, None]
    lead = offsets[~top] - reference
    if errors is not None:
        lead = lead + Interval.point(up(errors.start[~top] + errors.start[top].max()))
        gaps = down(gaps - up(errors.growth[~top] + errors.growth[top].max())[:, None])
    with quiet():
        shares = elementary.exp(lead).hi
        at_start, growth = (start[~top] - mean).mag, (slopes[~top] - slope).mag
        when = np.where(growth > 0, np.maximum(0.0, 1 / gaps - at_start / growth), 0.0)
        size = up(up(at_start + up(growth * when)) * np.exp(-gaps * when), 64)
        size = np.where(gaps > 0, size, np.where((at_start == 0) & (growth == 0), 0.0, np.inf))
        total = np.where(size == 0, 0.0, shares[:, None] * size).sum(axis=0)
    largest[~top] = np.where(gaps[:, 0] > 0, np.minimum(shares, 1.0), 1.0)
    return _Limit(mean, slope, up(total * (1 + 2.0**-52 * (len(shares) + 4))), largest)


def _softmax(scores: Interval) -> Interval:
    """Return the weights of the scores: exactly 1 for a single one."""
    if len(scores) == 1:
        return Interval.point(np.ones(1))
    weights = elementary.exp(scores - scores.hi.max())
    return weights / reduce(operator.add, (weights[k] for k in range(len(weights))))


def _mean(weights: Interval, values: Interval) -> Interval:
    """Return Σ weights·values over the first axis: exactly the value if all values are one number."""
    total = reduce(operator.add, (weights[k] * values[k] for k in range(len(weights))))
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

    def __neg__(self) -> Tail:
        return Tail(-self.p, -self.q, self.error, self.rate)

    def below(self, sign: int) -> GrowingTail:
        """Return a lower bound of sign·value. It grows only if its rate is positive."""
        a = self if sign > 0 else -self
        return GrowingTail(sign, float(down(a.p.lo - a.error)), float(a.q.lo))


@dataclass(frozen=True)
class GrowingTail:
    """sign·value ≥ low + rate·t for all t ≥ 0, with rate > 0; and ≥ scale·e^{exponent·t}."""

    sign: int
    low: float
    rate: float
    scale: float = 0.0
    exponent: float = 0.0

    def __neg__(self) -> GrowingTail:
        return replace(self, sign=-self.sign)


Known = Tail | GrowingTail


class _NoRule(Exception):
    """No rule bounds this sub-expression. The message completes "cannot bound the tail of …: it"."""


def expression_tails(expression: Expression, side: int, R: float) -> list[Tail]:
    """Find the tail of every output on x ≥ R (side = 1) or x ≤ −R (side = −1), with x = side·(R + t).

    Raises an InputError if an output is not affine up to a bounded remainder, or no rule here shows that it is.
    """
    if len(expression.variables) != 1 or side not in (1, -1) or not math.isfinite(R):
        raise InputError(
            f"a tail needs an expression of one variable, on x ≥ R (side 1) or x ≤ −R (side −1) with a finite R; found "
            f"{len(expression.variables)} variable(s), side {side!r}, R = {R!r}"
        )
    steps, outputs = expression.schedule
    variable = Tail(Interval.point(side * R), Interval.point(float(side)))
    known: list[Known] = []
    for step in steps:
        try:
            known.append(_known(step.node, [known[i] for i in step.arguments], variable))
        except _NoRule as reason:
            raise _refusal(step.node, str(reason)) from None
    found = []
    for node, number in zip(expression.outputs, outputs, strict=True):
        tail = known[number]
        if not isinstance(tail, Tail):
            raise _refusal(node, "grows faster than an affine function, or no rule shows that it does not")
        found.append(tail)
    return found


def _refusal(node: tree.Node, reason: str) -> AttncError:
    if reason == NOT_DEFINED:
        return DomainError(f"{tree.to_text(node)} {reason}")
    return InputError(
        f"cannot bound the tail of {tree.to_text(node)}: it {reason}. Certify it on a bounded box instead."
    )


def _known(node: tree.Node, a: Sequence[Known], variable: Tail) -> Known:
    match node:
        case tree.Number() as number:
            return Tail(enclose(number), ZERO)
        case tree.Constant(name):
            return Tail(elementary.PI if name == "pi" else elementary.E, ZERO)
        case tree.Variable():
            return variable
        case tree.Sum():
            return reduce(_sum, a)
        case tree.Product():
            return reduce(_product, a)
        case tree.Quotient():
            return _product(a[0], _reciprocal(a[1]))
        case tree.Power(_, tree.Number(value)) if value.denominator == 1 and 0 < abs(value) <= 64:
            total = reduce(_product, [a[0]] * abs(int(value)))
            return total if value > 0 else _reciprocal(total)
        case tree.Power():
            base, exponent = a
            if isinstance(base, Tail) and isinstance(exponent, Tail) and base.is_constant and exponent.is_constant:
                return Tail(real_power(base.p, exponent.p), ZERO)
        case tree.Negate():
            return -a[0]
        case tree.Call(name):
            return _call(name, a)
    raise _NoRule("is a power that has no rule here")


def _plus(a: float, b: float) -> float:
    """Return a + b ≥ 0 rounded up, exactly if one of them is 0."""
    return a + b if a == 0 or b == 0 else float(up(a + b))


def _times(a: float, b: float) -> float:
    """Return a·b ≥ 0 rounded up, exactly if one of them is 0."""
    return 0.0 if a == 0 or b == 0 else float(up(a * b))


def growing(a: Known) -> GrowingTail | None:
    """Return the growth of a function whose slope has a sign, or None if it is bounded or its growth is not known."""
    if isinstance(a, GrowingTail):
        return a
    return next((found for found in (a.below(1), a.below(-1)) if found.rate > 0), None)


def _sum(a: Known, b: Known) -> Known:
    if isinstance(a, Tail) and isinstance(b, Tail):
        return Tail(a.p + b.p, a.q + b.q, _plus(a.error, b.error), min(a.rate, b.rate))
    grows, other = (a, b) if isinstance(a, GrowingTail) else (b, a)
    assert isinstance(grows, GrowingTail)
    if isinstance(other, Tail):  # its remainder is bounded by a constant
        other = other.below(grows.sign)
    rate = float(down(grows.rate + other.rate))
    if other.sign != grows.sign or rate <= 0:
        raise _NoRule("is a sum of terms that grow against each other")
    # S·e^{κt} − c ≥ (S − c)·e^{κt} for c ≥ 0, if nothing else falls
    scale = max(0.0, float(down(grows.scale - max(0.0, -other.low)))) if other.rate >= 0 else 0.0
    return GrowingTail(grows.sign, float(down(grows.low + other.low)), rate, scale, grows.exponent)


def _product(a: Known, b: Known) -> Known:
    if isinstance(a, Tail) and isinstance(b, Tail) and (a.is_bounded or b.is_bounded):
        return _tail_product(a, b)
    one, other = growing(a), growing(b)
    if one is not None and other is not None:
        if one.low < 0 or other.low < 0:
            raise _NoRule("is a product of factors that may still change sign")
        rate = float(down(down(one.low * other.rate) + down(one.rate * other.low)))
        if rate <= 0:
            raise _NoRule("is a product that may stand still at first")
        scale = max(0.0, float(down(max(one.scale, one.low) * max(other.scale, other.low))))
        exponent = sum(factor.exponent for factor in (one, other) if factor.scale >= factor.low)
        return GrowingTail(one.sign * other.sign, float(down(one.low * other.low)), rate, scale, exponent)
    grows, bounded = (one, b) if one is not None else (other, a)
    if grows is None or not isinstance(bounded, Tail) or not bounded.is_bounded or grows.low < 0:
        raise _NoRule("is a product whose growth is not known")
    low, rate, scale = (float(down(x * bounded.range.mig)) for x in (grows.low, grows.rate, grows.scale))
    if rate <= 0:
        raise _NoRule("is a product whose growth is not known")
    return GrowingTail(grows.sign if bounded.range.lo > 0 else -grows.sign, low, rate, max(0.0, scale), grows.exponent)


def _tail_product(a: Tail, b: Tail) -> Tail:
    """Multiply two tails, one of which has the slope 0: the remainder is r_a(p_b + q_b·t + r_b) + r_b(p_a + q_a·t)."""
    error, rate = _times(a.error, b.error), min(a.rate, b.rate)
    for one, other in ((a, b), (b, a)):
        if one.error == 0:
            continue
        error = _plus(error, _times(one.error, float(other.p.mag)))
        if not other.is_bounded:
            if one.rate == 0:
                raise _NoRule("multiplies a growing factor by a remainder that does not fall")
            # t·e^{−λt} ≤ 2/(eλ)·e^{−λt/2}, and 2/e < 0.7358
            longest = float(up(0.7358 / one.rate))
            error = _plus(error, _times(_times(one.error, float(other.q.mag)), longest))
            rate = min(rate, one.rate / 2)
    return Tail(a.p * b.p, a.p * b.q + a.q * b.p, error, rate)


def _reciprocal(a: Known) -> Known:
    if isinstance(a, Tail) and a.is_bounded:
        if not a.range.mig > 0:
            raise _NoRule("divides by an expression that may be zero")
        steep = (1.0 / a.range.square()).mag
        return Tail(1.0 / a.p, ZERO, _times(float(steep), a.error), a.rate)
    grows = growing(a)
    if grows is None or grows.low <= 0:
        raise _NoRule("divides by an expression that may be zero")
    if grows.exponent > 0 and grows.scale > 0:
        return Tail(ZERO, ZERO, float(up(1.0 / grows.scale)), grows.exponent)
    return Tail(ZERO, ZERO, float(up(1.0 / grows.low)), 0.0)


def _call(name: str, a: Sequence[Known]) -> Known:
    match name:
        case "abs":
            return _sum(_call("relu", a), _call("relu", [-a[0]]))
        case "max":  # max(a, b) = b + relu(a − b)
            return reduce(lambda total, other: _sum(other, _call("relu", [_sum(total, -other)])), a)
        case "min":
            return -_call("max", [-each for each in a])
        case "clip":
            return _call("min", [_call("max", a[:2]), a[2]])
    argument = a[0]
    if isinstance(argument, Tail) and argument.is_bounded:
        return _at_bounded(name, argument)
    grows = growing(argument)
    if name == "exp" and grows is not None and grows.sign > 0:  # e^s ≥ e^low·(1 + s − low)
        least = float(elementary.exp(Interval.point(grows.low)).lo)
        if least > 0:
            return GrowingTail(1, least, float(down(least * grows.rate)), least, grows.rate)
    asymptote = None if grows is None else FUNCTIONS[name].asymptotes.get(grows.sign)
    if grows is None or asymptote is None:
        raise _NoRule("has no rule here for an argument that is not bounded")
    remainder = asymptote.remainder(grows.low)
    if remainder is None:
        raise _NoRule(f"has an argument that is too small at the start of the half-line ({grows.low:.3g}): raise R")
    error, rate = remainder[0], max(0.0, math.nextafter(remainder[1] * grows.rate, 0.0))
    if asymptote.slope == 0:
        return Tail(asymptote.limit, ZERO, error, rate)
    if isinstance(argument, GrowingTail):
        return GrowingTail(1, float(down(grows.low - error)), grows.rate)
    return Tail(argument.p + asymptote.limit, argument.q, _plus(argument.error, error), min(rate, argument.rate))


def _at_bounded(name: str, a: Tail) -> Tail:
    """Apply a function to a bounded tail: g(p + r) = g(p) + G·r, with G a slope of g on the range of the argument."""
    function, values = FUNCTIONS[name], a.range
    if function.domain is not None and np.any(function.domain.may_leave([values])):
        raise _NoRule(NOT_DEFINED)
    error = 0.0
    if a.error > 0:
        if function.slope is None:
            raise _NoRule("has no slope here")
        error = _times(float(function.slope(values, function.range(values)).mag), a.error)
    if not math.isfinite(error):
        raise _NoRule("has an unbounded slope")
    return Tail(function.range(a.p), ZERO, error, a.rate)
