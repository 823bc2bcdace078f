"""Proven bounds on the rounding of an activation by attention, for every way in which it is evaluated.

A bound is on |G as computed − G in exact arithmetic|, with the keys as the dtype stores them. Cells of |x| in a
geometric progression cover the range where more than one key has weight. The bounds hold for compiled loops and for a
softmax.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from attnc.constructions.fitting.gate import W
from attnc.converting.activations import Solved, key_arrays, stored_keys
from attnc.converting.evaluation import (
    KINKS_APART,
    LARGE,
    MOST_EXPONENT,
    Evaluation,
    evaluation_of,
    powers_weights,
    symmetric_parts,
    value_part,
)
from attnc.engines.powers import ROUGH_POWER_ERROR
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, Array, gamma, up

CELL_RATIO = 1.05
"""Ratio of the ends of the cells on which the rounding of a gate is bounded. Scores up to 20, where weights still
count, change by at most 1 on a cell."""
SLACK = 1 + 2.0**-20
"""Factor for the rounding of sums here. They have fewer than 10⁴ positive terms, each with a relative error below
10⁻¹²."""
NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}
"""The smallest normal number. A smaller result may become zero, so it is off by at most this."""
KeyNumbers = tuple[tuple[float, ...], ...]
"""Slopes, offsets, values and carried parts, as they are stored in the dtype."""


KEY_NAMES = ("slopes", "offsets", "values", "carried")


def evaluation(keys: KeyNumbers, dtype: str, is_product: bool = False) -> Evaluation:
    return evaluation_of(dict(zip(KEY_NAMES, map(np.array, keys), strict=True)), dtype, is_product=is_product)


def key_numbers(solved: Solved, dtype: str) -> KeyNumbers:
    return tuple(tuple(numbers.tolist()) for numbers in key_arrays(stored_keys(solved.keys, dtype)).values())


@functools.lru_cache(maxsize=256)
def cells(keys: KeyNumbers, reach: float) -> tuple[Array, Array]:
    """Return the ends of cells of |x| that cover [0, reach]."""
    first = 1 / (64 * max(1.0, max(map(abs, keys[0]))))
    count = max(1, math.ceil(math.log(max(reach, first) / first) / math.log(CELL_RATIO)))
    ends = np.concatenate([[0.0], first * CELL_RATIO ** np.arange(count), [reach * CELL_RATIO]])
    return ends[:-1], np.maximum(ends[1:], ends[:-1])


def on_cells(keys: KeyNumbers, dtype: str, x: Interval) -> Array:
    """Bound the rounding of any evaluation on cells that do not contain 0 inside."""
    powers = powers_rounding(keys, dtype, x)
    found = softmax_rounding(keys, dtype, x, curve_scores(keys, dtype, x))
    return found if powers is None else np.maximum(found, powers)


def curve_scores(keys: KeyNumbers, dtype: str, x: Interval) -> Array | float:
    """Bound how far the weights of a curve are from those of a softmax, as errors of scores, per cell and key.

    Proof.  In units of the weight of key 0 of the curve, a weight is C_k·E^k. E is within 2u·δ|x| + ROUGH_POWER_ERROR·u
            of e^{−δ|x|}, relatively. The term k of N and D has at most 2k + 3 roundings, and two of its coefficient.
            The weight of the line has an exponent with four roundings, ENGINE_ULPS of the exponential, and the
            roundings of two sums. Where that exponent is beyond ±LARGEST_OFFSET_RANGE it is cut off. A weight is then
            off by e^{−60} or so, far below γ times the terms of the sums, which `softmax_rounding` adds.
    """
    if evaluation(keys, dtype).kind != "curve":
        return 0.0
    u, (a, c) = UNIT_ROUNDOFF[dtype], (np.array(numbers) for numbers in keys[:2])
    order = np.argsort(a)
    k, ahead, size = np.arange(len(a)), a[order] - a[order[0]], x.mag[:, None]
    found = k * (2 * u * (a[order[1]] - a[order[0]]) * size + ROUGH_POWER_ERROR * u) + gamma(2 * len(a) + 6, u)
    line = 4 * u * (ahead[-1] * size[:, 0] + abs(c[order[-1]] - c[order[0]])) + 2 * ENGINE_ULPS[dtype] * u
    found[:, -1] = line + gamma(8, u)
    return np.asarray(found[:, np.argsort(order)] * SLACK)


def softmax_rounding(keys: KeyNumbers, dtype: str, x: Interval, more: Array | float = 0.0) -> Array:
    """Bound the rounding of a softmax over the keys whose scores are off by `more` than those of torch.

    Proof.  y = Σ w_k·y_k with y_k = v_k + u_k·x and w = softmax(s). The computed weights belong to scores that are off
            by at most e_k: two roundings of a_k·x + c_k, one of the difference from the maximum, and the error of the
            exponential. With w̃_k ∝ w_k·e^{η_k}, |η_k| ≤ e_k, and since Σ w_k(y_k − y) = 0,

                |ỹ − y| ≤ Σ_k w_k(e^{e_k} − 1)|y_k − y| / Σ_k w_k·e^{−e_k},   |y_k − y| ≤ Σ_j w_j|y_k − y_j|.

            The divisor is at least e^{−Σ w_k·e_k} by Jensen's inequality. Sums, products and the division add
            γ_{2p+8}·Σ w̃_k(|v_k| + |u_k·x|), and a weight that becomes zero adds the smallest normal number times
            |y_k − y|.
    """
    u, ulps, normal = UNIT_ROUNDOFF[dtype], ENGINE_ULPS[dtype], NORMAL[dtype]
    a, c, v, carried = (np.array(numbers) for numbers in keys)
    p = len(a)
    each = Interval(x.lo[:, None, None], x.hi[:, None, None])
    between = Interval.point(a[:, None]) - a[None], Interval.point(c[:, None]) - c[None]
    ahead = each * Interval(between[0].lo[None], between[0].hi[None]) + Interval(
        between[1].lo[None], between[1].hi[None]
    )  # s_j − s_k, of shape (cells, j, k)
    with np.errstate(all="ignore"):
        weights = up(1 / elementary.exp(ahead).lo.sum(axis=1)) * SLACK  # w_k = 1/Σ_j e^{s_j − s_k}
        weights = np.minimum(weights, 1.0)
        logs = -ahead.lo.max(axis=1)  # an upper bound of log w_k
        size = x.mag[:, None]
        scores = size * np.abs(a) + np.abs(c)
        may_lead = (ahead.lo <= 0).all(axis=1)  # the largest score is one of these
        top = np.where(may_lead, scores, 0.0).max(axis=1, keepdims=True)
        e = SLACK * (gamma(3, u) * scores + u * (scores + top) + 2 * ulps * u) + more
        moved = np.where(e < 1, weights * np.expm1(np.minimum(e, 1.0)), np.exp(np.minimum(e + logs, 700.0)))
        moved = np.where(e + logs > 700, np.inf, moved)
        apart = np.abs(v[:, None] - v[None]) + size[:, :, None] * np.abs(carried[:, None] - carried[None])
        distance = (apart * weights[:, None, :]).sum(axis=2)  # |y_k − y|
        divisor = np.exp(-np.minimum((weights * e).sum(axis=1), 700.0))
        shifted = (moved * distance).sum(axis=1) / divisor
        computed = np.minimum((weights + moved) / divisor[:, None] * SLACK, 1.0)  # an upper bound of w̃_k
        terms = (computed * (np.abs(v) + size * np.abs(carried))).sum(axis=1)
        lost = gamma(2 * p + 8, u) * terms + 2 * p * normal * (1 + apart.max(axis=(1, 2)))
    return SLACK * SLACK * (shifted + SLACK * lost)


def powers_rounding(keys: KeyNumbers, dtype: str, x: Interval) -> Array | None:
    """Bound the rounding of powers of one exponential, or return None if the keys have no such form.

    Proof.  On one side of 0, y = u_0·x + v_0 + R, R = Σ_k w_k·r_k, with r_k = (v_k − v_0) + (u_k − u_0)x and
            w_k = C_k·E^k/D, k from 0. The computed E is e^{−δ|x| + η} with |η| ≤ 2u·δ|x| + ROUGH_POWER_ERROR·u: the
            rate is rounded, and its product with |x| may be. So it is E at a shifted x, and
            |dR/dη| = |Σ w_k·(k − k̄)(r_k − R)|. Given E, the term k of each polynomial has at most 2k + 5 roundings: k
            products, k sums, and those of its coefficient. The product with x, the sum and the division add three. Of
            two sums with relative errors ≤ γ per term, the quotient is off by Σ w_k·γ_{2k+8}(|r_k| + |R|), up to a
            factor 1 + γ. In q there is another bound, `symmetric_rounding`. The last sums add
            γ_4(|v_0| + |u_0·x| + |R|). Where the exponent is cut off, and where |x| > LARGE and the line is computed,
            the rest is at most Σ_{k>0} C_k·e^{−k·MOST_EXPONENT}|r_k|.
    """
    found = evaluation(keys, dtype)
    step = found.step
    if step is None or found.kinks is not None:
        return None
    order = np.argsort(keys[0], kind="stable")
    left = [np.array(numbers)[order] for numbers in keys[1:]]
    sides = [left] * bool((x.lo < 0).any()) + [[a[::-1] for a in left]] * bool((x.hi > 0).any())
    u, normal = UNIT_ROUNDOFF[dtype], NORMAL[dtype]
    near, far = np.minimum(np.abs(x.lo), np.abs(x.hi)), x.mag
    worst = np.zeros(len(near))
    for c, v, carried in sides:
        p, log_C = len(c), np.log(powers_weights(c))
        k = np.arange(p)
        with np.errstate(all="ignore"):
            low, high = (log_C - step * k * ends[:, None] for ends in (far, near))  # of C_k·E^k
            top = high.max(axis=1, keepdims=True)
            least, most = np.exp(low - top) * (1 - 1e-10), np.exp(high - top) * (1 + 1e-10)
            others = least.sum(axis=1, keepdims=True) - least
            weights = np.minimum(1.0, most / (most + others) * SLACK)
            size = far[:, None]
            r = np.abs(v - v[0]) + np.abs(carried - carried[0]) * size
            R = (weights * r).sum(axis=1) * SLACK
            spread = (weights * k).sum(axis=1, keepdims=True)  # an upper bound of k̄
            apart = np.minimum(k + spread, p - 1)
            eta = SLACK * (2 * u * step * far + ROUGH_POWER_ERROR * u)
            shifted = eta * (1 + eta * p) * (weights * apart * (r + R[:, None])).sum(axis=1) * np.exp(2 * p * eta)
            rounded = (weights * np.array([gamma(2 * i + 8, u) for i in range(p)]) * (r + R[:, None])).sum(axis=1)
            if found.kind != "sided":
                rounded = symmetric_rounding(found.kind, step, c, v, carried, u, near, far)
            rounded = rounded * np.exp(2 * p * eta)
            ends = gamma(4, u) * (abs(v[0]) + abs(carried[0]) * far + R)
            cut = np.where(
                step * far >= MOST_EXPONENT[dtype] * (1 - 4 * u),
                (np.exp(np.minimum(log_C[1:] - k[1:] * MOST_EXPONENT[dtype] * (1 - 8 * u), 700.0)) * r[:, 1:]).sum(
                    axis=1
                ),
                0.0,
            )
        worst = np.maximum(worst, SLACK * SLACK * (shifted + SLACK * rounded + ends + cut + 8 * p * normal * (1 + far)))
    return worst


def symmetric_rounding(
    kind: str, step: float, c: Array, v: Array, carried: Array, u: float, near: Array, far: Array
) -> Array:
    """Bound the rounding of B = Jσ + (1 − 2σ)A(q)/P(q), times |x| in a ramp, and of V(q)/P(q), for a given E.

    Proof.  σ = E/(1 + E) has a relative error of γ_2, and q = σ − σ² one of γ_6: σ² ≤ q(1 + E) ≤ 2q has a rounding, the
            difference another, and |dq| ≤ |dσ| moves it by γ_2·σ ≤ 2γ_2·q. The term k of A, P and V has at most
            6k + 2k + 2 roundings, those of q^k, of k products and sums, and of its coefficient. m = 1 − 2σ is off by
            u + 2γ_2·σ at most, and |m| ≤ 1. With Ā and V̄ sums of absolute terms, and e_A, e_P, e_V sums of terms times
            γ_{8k+2}, the quotient mA/P is off by ((u + 2γ_2·σ)Ā + e_A + γ_2·Ā + e_P·Ā/P)/P, and V/P by
            (e_V + γ_1·V̄ + e_P·V̄/P)/P, up to factors 1 + γ. Jσ has γ_3, and the last sums and the product with |x|
            have four roundings of terms that are at most |J|σ, Ā/P and V̄/P. P = D/(1 + E)^{p−1} ≥ 1, as
            D = Σ C_k·E^k, is bounded from below at the ends of the cell.
    """
    p = len(c)
    values = v if kind == "odd" else carried
    J, A, P = symmetric_parts(c, values)
    V = value_part(c, v) if kind == "ramp_values" else [0.0]
    with np.errstate(all="ignore"):
        high, low = np.exp(-step * near) * (1 + 1e-10), np.exp(-step * far) * (1 - 1e-10)
        D_low = (powers_weights(c) * low[:, None] ** np.arange(p)).sum(axis=1)
        P_low = D_low / (1 + high) ** (p - 1) / SLACK
    sigma = high / (1 + high) * SLACK
    q = sigma * SLACK  # σ(1 − σ) ≤ min(σ, 1/4)
    q = np.minimum(q, 0.25 * SLACK)

    def sums(numbers: list[float]) -> tuple[Array, Array]:
        terms = np.abs(numbers) * q[:, None] ** np.arange(len(numbers)) * SLACK
        return terms.sum(axis=1), (terms * [gamma(8 * k + 2, u) for k in range(len(numbers))]).sum(axis=1)

    (A_size, A_error), (_, P_error), (V_size, V_error) = sums(A), sums(P), sums(V)
    factor = far if kind != "odd" else np.ones_like(far)
    m_error = u + 2 * gamma(2, u) * sigma
    ramp = (m_error * A_size + A_error + gamma(6, u) * A_size + P_error * A_size / P_low) / P_low
    ramp = ramp + gamma(7, u) * abs(J) * sigma
    bump = (V_error + gamma(5, u) * V_size + P_error * V_size / P_low) / P_low
    return np.asarray(SLACK * SLACK * (factor * ramp + bump))


@functools.lru_cache(maxsize=256)
def _relative_rounding(keys: KeyNumbers, dtype: str, is_product: bool) -> float | None:
    """Return K with |G̃(x) − G(x)| ≤ K(1 + |G(x)|) for all x whose scores are finite, or None."""
    kinks = evaluation(keys, dtype, is_product).kinks
    if kinks is not None:
        return _lines_rounding(keys, kinks, dtype, is_product)
    if is_product:
        return None
    a, c, v, carried = (np.array(numbers) for numbers in keys)
    worst = 0.0
    for sign in (-1.0, 1.0):
        end = int((sign * a).argmax())
        gaps = sign * (a[end] - a)
        behind = np.maximum(c - c[end], 0.0)
        others = np.arange(len(a)) != end
        if not (gaps[others] > 0).all():
            return None
        # Beyond `reach` all other weights are below e^{−2·MOST_EXPONENT}, and fall faster than |x| grows.
        reach = float(((2 * MOST_EXPONENT[dtype] + behind[others]) / gaps[others]).max())
        low, high = cells(keys, reach)
        x = Interval(low, high) if sign > 0 else Interval(-high, -low)
        error = on_cells(keys, dtype, x)
        # |G| ≥ |line of the end key| − Σ w_k|y_k − y_end|
        scores = Interval(x.lo[:, None], x.hi[:, None]) * Interval.point((a - a[end])[None]) + (c - c[end])[None]
        rest = np.abs(v - v[end]) + np.abs(carried - carried[end]) * x.mag[:, None]
        with np.errstate(all="ignore"):
            pulled = (np.minimum(elementary.exp(scores).hi, 1.0) * rest).sum(axis=1) * SLACK
        line = Interval.point(np.array(v[end])) + x * Interval.point(np.array(carried[end]))
        size = np.maximum(0.0, np.where((line.lo <= 0) & (line.hi >= 0), 0.0, np.minimum(abs(line.lo), abs(line.hi))))
        worst = max(worst, float((error / (1 + np.maximum(size - pulled, 0.0))).max()))
        # Beyond reach: γ(|v| + |u·x|), and |G| ≥ |u·x| − |v| − 1. Powers are cut off, where |x| ≤ LARGE.
        most = max(1.0, math.exp(min(float(np.ptp(c)), 60.0))) * (float(np.ptp(v)) + float(np.ptp(carried)) * LARGE)
        cut = len(a) * most * math.exp(-MOST_EXPONENT[dtype] * (1 - 2.0**-20))
        worst = max(worst, gamma(2 * len(a) + 8, UNIT_ROUNDOFF[dtype]) * (3 + 2 * abs(v[end])) + cut + 1e-40)
    return float(up(worst * SLACK)) if math.isfinite(worst) else None


def _lines_rounding(keys: KeyNumbers, kinks: tuple[float, ...], dtype: str, is_product: bool) -> float | None:
    """Bound the rounding of steep keys, two or three, whose lines almost meet at the kinks.

    Proof.  Near a kink κ two keys have weight, σ(±βt) with t = x − κ: the third is behind by 200 or more, and so is
            everything beyond |t| = T = (MOST_EXPONENT + 16)/β, for errors ε of a score difference up to 8. From
            w̃ ≤ e^ε·w and 1 − w̃ ≤ e^ε(1 − w), |w̃ − w| ≤ (e^ε − 1)·σ(−β|t|). The values of the two keys differ by at
            most J|t| + m, with m the gap of the lines at κ, and |t|σ(−β|t|) ≤ W(1/e)/β. So the output is off by
            (e^ε − 1)(J·W(1/e)/β + m). Scores have two roundings of a·x + c and one of a difference, with
            |x| ≤ |κ| + T, and the exponential is within ENGINE_ULPS. Sums, products and the division add
            γ_{2p+8}(|v| + |u·x|), which is ≤ γ_{2p+8}(2|v| + 2)(1 + |G|), because |u·x| ≤ |G| + |v| + 1. A product
            with x has a line 0 on the left and a constant on the right, and is at most |κ| times as large between.
    """
    u, ulps = UNIT_ROUNDOFF[dtype], ENGINE_ULPS[dtype]
    a, c, v, carried = (np.array(numbers) for numbers in keys)
    beta, p = float(np.diff(np.sort(a)).min()), len(a)
    if len(kinks) == 2 and beta * (kinks[1] - kinks[0]) < KINKS_APART:
        return None
    order = np.argsort(a)
    a, c, v, carried = a[order], c[order], v[order], carried[order]
    moved = 0.0
    for i, kink in enumerate(kinks):
        size = abs(kink) + (MOST_EXPONENT[dtype] + 16) / beta
        pair = slice(i, i + 2)
        scores = float((np.abs(a[pair]) * size + np.abs(c[pair])).max()) if c.any() else MOST_EXPONENT[dtype] + 16
        eps = 2 * (gamma(3, u) * scores + u * 2 * scores + 2 * ulps * u)
        jump = abs(carried[i + 1] - carried[i])
        gap = abs((v[i + 1] - v[i]) + (carried[i + 1] - carried[i]) * kink) + 4 * u * (abs(v[i]) + abs(kink))
        if eps > 8:
            return None
        moved = max(moved, math.expm1(eps) * (W * jump / beta + gap) * (size if is_product else 1.0))
    if is_product and (v[0] or carried[0] or carried[-1]):
        return None
    sizes = (2 * float(np.abs(v).max()) + 2) * (1 + max(map(abs, kinks)) if is_product else 1.0)
    return float(up((moved + gamma(2 * p + 8 + is_product, u) * sizes + 1e-30) * SLACK))


def rounding_of(solved: Solved, dtype: str) -> float | None:
    """Return K with |computed − exact gate| ≤ K(1 + |gate|) for all x, or None if there is no rule for the gate."""
    if solved.sign is not None or solved.activation.name == "prelu":
        return None
    return _relative_rounding(key_numbers(solved, dtype), dtype, solved.is_product)
