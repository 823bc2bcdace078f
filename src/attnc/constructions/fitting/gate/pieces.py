"""Activations of smooth pieces: a group of keys for the curved one, and a steep key for every line beside it.

A line that meets the curve G at κ is one more key: its value is the line, its score ±β(x − κ) + log Σ e^{s_k(κ)} over
the group. The ratios of the weights inside the group do not change, so the head is G + σ(±β(x − κ) + …)(line − G).
Where the slopes differ by J the error is J·W(1/e)/β, and where they do not, J₂·0.2415/β² with J₂ the difference of the
second derivatives, as max_s s²/(2(e^s + 1)) = 0.2415.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from attnc.constructions.fitting.gate.fitted import HINTS as IDENTITY_HINTS
from attnc.constructions.fitting.gate.fitted import identity
from attnc.constructions.fitting.gate.keys import (
    NEGLIGIBLE_SCORE,
    Gate,
    at_points,
    half_line,
    min_keys,
    observed,
    positive,
    power_of_two,
    reach_of,
    solved,
    tail,
)
from attnc.constructions.fitting.gate.kinks import W
from attnc.errors import real_number
from attnc.functions.gate_table import RECIPROCAL
from attnc.ir.soft_head import SoftHead

WEIGHT_RATIO = 8.0
"""Ratio of neighbouring weights of the exponential at y = 0; the largest value is about the same, and 8 is small."""
EXP_HINTS = {2: 2.1e-2, 3: 5.8e-4, 4: 1.7e-5, 5: 5.2e-7, 6: 1.6e-8, 7: 4.9e-10, 8: 1.5e-11, 9: 4.8e-13}
"""Number of keys of the exponential, and the largest error measured, rounded up; a test compares both."""
KINK_SHARE = 0.04
"""Part of eps that each kink may take; it is small, since a larger β costs nothing."""
BEND_ERROR = 0.2415
"""max_s s²/(2(e^s + 1)), rounded up."""
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # the constants of PyTorch, in float64


@functools.lru_cache(maxsize=16)
def decay(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Keys of A(y) ≈ e^{−y} on [0, ∞), and the largest error found.

    With scores k(y + log V), A is a quotient of polynomials of degree n = p − 1 in z = e^y, over
    D(z) = Σ (Vz)^k. Then D(z)(1/z − A) = 1/z − (a polynomial of degree n that the values choose), so with t = 1/z in
    (0, 1] the error is |t^p − q(t)|/Σ V^k t^{n−k}, q of degree ≤ n and q(0) = 0: about 2·4^{−p}·V^{−n}, with the
    Chebyshev polynomial above. Values are close to V, except the last, which is 0: the limit at ∞.
    """
    slopes = np.arange(p) - (p - 2.0)  # the keys that matter have small scores, and small rounding errors, near y = 0
    offsets = slopes * math.log(WEIGHT_RATIO)
    t = (1 - np.cos(np.linspace(0.0, math.pi, 300)))[1:] / 2
    keys = solved(SoftHead.of_one_variable(slopes, offsets, np.zeros(p)), -np.log(t), t, np.eye(p)[:, :-1])
    reach = reach_of(keys)
    core = observed(lambda y: at_points(keys, y) - np.exp(-y), half_line(reach), 1.0)
    return keys, max(core, tail(keys, reach) + math.exp(-reach))


def exp(eps: float, hi: float = 0.0) -> Gate:
    """eˣ on (−∞, hi]."""
    hi = real_number("hi", hi)
    scale = math.exp(min(hi, 700.0))

    def make(p: int) -> Gate:
        keys, error = decay(p)
        found = keys.shifted(hi).scaled(-1.0).combined(scale)
        return Gate("exp", found, error * scale * (1 + 1e-14), scale * (1 + 1e-15), domain=(-math.inf, hi))

    return min_keys("exp", eps, {p: hint * scale for p, hint in EXP_HINTS.items()}, make)


def _with_line(group: SoftHead[np.ndarray], kink: float, beta: float, line: float) -> SoftHead[np.ndarray]:
    """One more key with the value line·x, on the right of the kink for β > 0 and on its left for β < 0.

    Its score is steeper by |β| than the log-sum-exp of the group, and equal to it at the kink.
    """
    at_kink = np.array([[kink]])
    slope = float((group.weights(at_kink) @ group.slopes)[0, 0]) + beta
    offset = float(group.log_sum(at_kink)[0]) - slope * kink
    carried = np.zeros(group.num_keys) if group.carried is None else group.carried[:, 0, 0]
    return SoftHead.of_one_variable(
        np.append(group.slopes, slope),
        np.append(group.offsets, offset),
        np.append(group.values, 0.0),
        np.append(carried, line),
    )


def _near(kink: float, beta: float) -> np.ndarray:
    """Points about a kink, where the weight passes from one piece to the other."""
    t = np.concatenate([np.linspace(0.0, 8.0, 200), np.linspace(8.0, NEGLIGIBLE_SCORE, 100)[1:]]) / beta
    return np.concatenate([kink - t[:0:-1], kink + t])


def elu(eps: float, alpha: float = 1.0) -> Gate:
    """x above 0, α(eˣ − 1) below."""
    return _elu("elu", eps, positive("alpha", alpha), 1.0, 1.0)


def celu(eps: float, alpha: float = 1.0) -> Gate:
    """x above 0, α(e^{x/α} − 1) below: no kink."""
    alpha = positive("alpha", alpha)
    return _elu("celu", eps, alpha, alpha, 1.0)


def selu(eps: float) -> Gate:
    """1.0507·elu(x, α = 1.6733)."""
    return _elu("selu", eps, SELU_ALPHA, 1.0, SELU_SCALE)


def _elu(name: str, eps: float, alpha: float, width: float, scale: float) -> Gate:
    """scale·x above 0, scale·α(e^{x/width} − 1) below; one head."""
    jump, bend = scale * abs(alpha / width - 1), scale * alpha / width**2
    share = KINK_SHARE * positive("eps", eps)
    beta = power_of_two(max(2 * jump * W / share, math.sqrt(2 * BEND_ERROR * bend / share), 128 / width))

    def make(p: int) -> Gate:
        keys, _ = decay(p)
        curve = keys.scaled(-1.0 / width).combined(scale * alpha, constant=-scale * alpha)
        joined = _with_line(curve, 0.0, beta, scale)

        def error_at(x: np.ndarray) -> np.ndarray:
            return at_points(joined, x) - np.where(
                x > 0, scale * x, scale * alpha * np.expm1(np.minimum(x, 0.0) / width)
            )

        reach = width * reach_of(keys)
        points = np.unique(np.concatenate([-half_line(reach, 12 * width), _near(0.0, beta)]))
        core = observed(error_at, points, scale * alpha)
        # Beyond 60/β on the right the group is behind by (β − (p − 1)/width)·x or more.
        most = scale * alpha * (1 + float(np.abs(keys.values).max()))
        right = math.exp(-NEGLIGIBLE_SCORE * (1 - (p - 1) / width / beta)) * (most + scale * NEGLIGIBLE_SCORE / beta)
        left = scale * alpha * (tail(keys, reach / width) + math.exp(-reach / width))
        left += math.exp(-(beta - p / width) * reach) * (most + scale * reach)
        return Gate(name, joined, max(core, right, left), scale * max(1.0, alpha / width))

    return min_keys(name, eps, {p + 1: hint * scale * alpha for p, hint in EXP_HINTS.items()}, lambda q: make(q - 1))


def hardswish(eps: float) -> Gate:
    """0 below −3, x(x + 3)/6, x above 3: a product of x with itself between two steep keys; one head."""
    beta = power_of_two(0.5 * W / (KINK_SHARE * positive("eps", eps)) + 64.0)

    def make(p: int) -> Gate:
        keys, _ = identity(p)
        carried = keys.values[:, 0] / 2 + 0.5
        middle = SoftHead.of_one_variable(keys.slopes[:, 0] / 3, keys.offsets, np.zeros(p), carried)
        joined = _with_line(_with_line(middle, -3.0, -beta, 0.0), 3.0, beta, 1.0)

        def error_at(x: np.ndarray) -> np.ndarray:
            return at_points(joined, x) - x * np.clip(x + 3, 0.0, 6.0) / 6

        points = np.concatenate([_near(-3.0, beta), np.linspace(-3.0, 3.0, 800), _near(3.0, beta)])
        core = observed(error_at, np.unique(points), 3 * float(np.abs(carried).max()))
        # Beyond ±(3 + 60/β) the middle is behind by (β − 2·its largest slope)·60/β and falls back further.
        steepest = float(np.abs(middle.slopes).max())
        outside = (
            (p + 1)
            * math.exp(-NEGLIGIBLE_SCORE * (1 - 2 * steepest / beta))
            * (3 + NEGLIGIBLE_SCORE / beta)
            * (1 + float(np.abs(carried).max()))
        )
        return Gate("hardswish", joined, max(core, outside), 1.5)

    return min_keys("hardswish", eps, {p + 2: 1.5 * hint for p, hint in IDENTITY_HINTS.items()}, lambda q: make(q - 2))


@functools.lru_cache(maxsize=16)
def reciprocal(p: int) -> tuple[SoftHead[np.ndarray], float]:
    """Keys of A(y) ≈ 1/(1 + y) on [0, ∞), and the largest error found."""
    return reciprocal_keys(p, *RECIPROCAL[p][:3])


def reciprocal_keys(p: int, K: float, step: float, first: float) -> tuple[SoftHead[np.ndarray], float]:
    """Slopes −e^{−s_j} with evenly spaced s_j: the weights look the same at every scale of 1 + y, as the function does.

    The values are solved. The second number is the largest error found.
    """
    s = first + step * np.arange(p)
    slopes, offsets = -np.exp(-s), -K * s
    no_values = SoftHead.of_one_variable(slopes, offsets, np.zeros(p))
    reach = reach_of(no_values)
    y = np.concatenate([[0.0], np.geomspace(1e-4, reach, 300)])
    keys = solved(no_values, y, 1 / (1 + y), np.eye(p)[:, :-1])
    points = np.concatenate([[0.0], np.geomspace(1e-5, reach, 1500)])
    core = observed(lambda t: at_points(keys, t) - 1 / (1 + t), points, float(np.abs(keys.values).max()))
    return keys, max(core, tail(keys, reach) + 1 / reach)


def softsign(eps: float) -> Gate:
    """x/(1 + |x|) in two layers: s = tanh(βx) and y = x·tanh(βx) by two keys, then s·(1 − A(y)), A(y) ≈ 1/(1 + y).

    Error.  |s(1 − A(y)) − sy/(1 + y)| ≤ error of A on y ≥ 0. With T = |s|, |sy/(1 + y) − x/(1 + |x|)| is
            |x|(1 − T)(1 + T + T|x|)/((1 + |x|)(1 + T|x|)) ≤ |x|(1 − T²) = |x|/cosh²(βx) ≤ 0.4478/β.
    Two layers, since float32 would not resolve keys of such different scales beside steep ones.
    """
    beta = power_of_two(0.4478 / (0.005 * positive("eps", eps)))

    def make(p: int) -> Gate:
        keys, error = reciprocal(p)
        complement = keys.combined(-1.0, constant=1.0)
        return Gate("softsign", complement, error + 0.4478 / beta, 1.0, sign=beta)

    return min_keys("softsign", eps, {2 + p: row[-1] for p, row in RECIPROCAL.items()}, lambda q: make(q - 2))
