"""Tail leaves: the error of a one-dimensional stage on a half-line, by the limits of its weights.

On x = ±(R + t), t ≥ 0, the key of the steepest score wins. Let T be the keys that share the largest slope; the weight
of any other, at a distance Δ_k > 0 in slope, is at most e_k·e^{−Δ_k t}, e_k its weight relative to T at t = 0. So

    A = Σ_{k∈T} π_k·value_k + Σ_{k∉T} p_k (value_k − mean of T),    |p_k| ≤ e_k e^{−Δ_k t},

the first sum is affine in t, and for values affine in t each term of the second has its largest size at
t = max(0, 1/Δ_k − |u_0|/|u_1|), where |u_0| + |u_1|t bounds the difference. The expression is affine, too, up to a
remainder (`expression_tails`); the bound is finite only where both have exactly the same slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.leaves.deviations import interval
from attnc.proofs.leaves.expression_tails import Tail, expression_tails
from attnc.proofs.stages.one_stage import OneStage
from attnc.targets.expressions.expression import Expression

if TYPE_CHECKING:
    from jaxtyping import Float


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
