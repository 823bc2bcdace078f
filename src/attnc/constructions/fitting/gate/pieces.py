"""Activations that are a softmax already, and activations of pieces: lines, or curves with lines beside them.

Piecewise linear activations are a steep softmax between lines, with an error of W(1/e)/β on all of R. Two lines that
meet at κ and whose slopes differ by J have weights σ(±β(x − κ)): the error is J·|t|σ(−β|t|), t = x − κ, at most
J·max_s s/(e^s + 1)/β = J·W(1/e)/β, with W Lambert's function. Far from κ it is zero in floating point as well.

A curve G is a group of keys, and every line beside it is a steep key. The line that meets the curve at κ has the score
±β(x − κ) + log Σ e^{s_k(κ)}, summed over the group. The ratios of the weights inside the group do not change, so the
head is G + σ(±β(x − κ) + …)(line − G). Where the slopes differ by J the error is J·W(1/e)/β, and where they do not,
J₂·0.2415/β² with J₂ the difference of the second derivatives, as max_s s²/(2(e^s + 1)) = 0.2415.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
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
from attnc.errors import InputError, real_number
from attnc.functions.gate_recipes import ExactKeys
from attnc.functions.gate_table import RECIPROCAL
from attnc.functions.logistic import SILU_SLOPE_TURNS
from attnc.ir.soft_head import SoftHead

# Closed forms and lines

W = 0.2784645427610739
"""W(1/e), rounded up."""
ROUNDED_UP = 1 + 2.0**-50
"""Factor that covers the roundings of the few products and quotients of an error."""


CLOSED_FORMS = {
    # x − tanh x: the weights of tanh, values x ± 1
    "tanhshrink": ExactKeys((-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (1.0, 1.0), lipschitz=1.0),
    # x·σ(1.702x); 1.702 is stored with a relative error of 2⁻⁵³, and s²σ′(s)/1.702 ≤ 0.26
    "quick_gelu": ExactKeys((0.0, 1.702), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), SILU_SLOPE_TURNS[1][2], 2.0**-54),
    # x·tanh(log(1 + eˣ)): with z = eˣ, tanh(log(1 + z)) = ((1 + z)² − 1)/((1 + z)² + 1) = (2z + z²)/(2 + 2z + z²);
    # log 2 is stored to within 2⁻⁵⁴, which moves the output by |x|·w₀(1 − w₀)·2⁻⁵⁴, and |x|·w₀(1 − w₀) < ½
    "mish": ExactKeys(
        (0.0, 1.0, 2.0), (math.log(2), math.log(2), 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0), 1.088498161251728, 2.0**-55
    ),
}
"""Activations that are a softmax and are not in the expression language."""


def steepness(jump: float, eps: float) -> float:
    """The power of two β with jump·W(1/e)/β ≤ eps."""
    return power_of_two(jump * W / eps * ROUNDED_UP)


def two_lines(name: str, eps: float, left: float, right: float) -> Gate:
    """Slope `left` below 0, `right` above: scores 0, βx and values left·x, right·x. relu is x·σ(βx)."""
    return _lines(name, eps, (0.0, 1.0), (0.0, 0.0), [(0.0, left), (0.0, right)])


def leaky_relu(eps: float, slope: float = 0.01, name: str = "leaky_relu") -> Gate:
    """Values slope·x, x."""
    return two_lines(name, eps, real_number("slope", slope), 1.0)


def _lines(
    name: str, eps: float, slopes: tuple[float, ...], offsets: tuple[float, ...], lines: list[tuple[float, float]]
) -> Gate:
    """Scores β(slope·x + offset) between lines (value, slope) whose slopes differ by J from one to the next."""
    jump = abs(lines[1][1] - lines[0][1])
    beta = steepness(jump, positive("eps", eps))
    values, carried = np.array(lines).T
    keys = SoftHead.of_one_variable(beta * np.array(slopes), beta * np.array(offsets), values, carried)
    return Gate(name, keys, jump * W / beta * ROUNDED_UP, max(abs(u) for _, u in lines), is_proved=True)


def _three_lines(name: str, eps: float, kinks: tuple[float, float], lines: list[tuple[float, float]]) -> Gate:
    """Lines (value, slope) that meet at the kinks; the outer two have equal slopes.

    Theorem.  |gate − f| ≤ J·W(1/e)/β on all of R.
    Weights.  Scores 0, β(x − lo), β(x − lo) + β(x − hi): the middle line leads between the kinks.
    Proof.    Let u = x − lo, v = hi − x. Between the kinks the outer two lines are off by −Ju and +Jv, so the error is
              J(v·e^{−βv} − u·e^{−βu})/(1 + e^{−βu} + e^{−βv}): two terms of opposite signs, and neither exceeds
              J·s·e^{−s}/(1 + e^{−s})/β, s = βv or βu. Below lo, with t = lo − x, the others are off by −Jt, weighted
              e^{−βt}, and by +J(hi − lo), weighted e^{−β(hi − lo)}e^{−2βt}: again of opposite signs, and no larger.
    """
    lo, hi = kinks
    # Middle line at score 0 instead of β(x − lo): the same weights, and each score has one rounding.
    return _lines(name, eps, (-1.0, 0.0, 1.0), (lo, 0.0, -hi), lines)


def clip(eps: float, lo: float = -1.0, hi: float = 1.0, name: str = "clip") -> Gate:
    """min(max(x, lo), hi): values lo, x, hi. No digits cancel, even for large x."""
    lo, hi = real_number("lo", lo), real_number("hi", hi)
    if not lo < hi:
        raise InputError(f"{name} needs lo < hi, found lo={lo:g}, hi={hi:g}")
    return _three_lines(name, eps, (lo, hi), [(lo, 0.0), (0.0, 1.0), (hi, 0.0)])


def hardsigmoid(eps: float) -> Gate:
    """clip(x/6 + ½, 0, 1)."""
    gate = _three_lines("hardsigmoid", eps, (-3.0, 3.0), [(0.0, 0.0), (0.5, 1 / 6), (1.0, 0.0)])
    return replace(gate, error=gate.error + 2.0**-54)  # 1/6 is stored rounded


def soft_threshold(eps: float, threshold: float = 0.5) -> Gate:
    """x ∓ λ beyond ±λ, 0 between: values x + λ, 0, x − λ."""
    threshold = positive("threshold", threshold)
    lines = [(threshold, 1.0), (0.0, 0.0), (-threshold, 1.0)]
    return _three_lines("soft_threshold", eps, (-threshold, threshold), lines)


@dataclass(frozen=True, eq=False)
class ChoiceGate:
    """max or min of several wires: `build(circuit, x, y, …)`. The error holds on all of R^count."""

    name: str
    error: float
    count: int
    beta: float  # negative for min

    @property
    def num_anchors(self) -> int:
        return self.count

    @property
    def keys(self) -> SoftHead[np.ndarray]:
        """A key for each wire, with the score β·wire, that carries the wire."""
        unit = np.eye(self.count)
        return SoftHead(self.beta * unit, np.zeros(self.count), np.zeros((self.count, 1)), unit[:, None, :])

    def build(self, circuit: Circuit, *wires: Wire) -> Wire:
        if len(wires) != self.count:
            raise InputError(f"this {self.name} gate is for {self.count} wires, {len(wires)} given")
        return circuit.head(wires, self.keys, name=self.name)[0]


def max_gate(eps: float, count: int = 2) -> ChoiceGate:
    """One key for each of n wires: score βx_i, value x_i.

    Theorem.  0 ≤ max x − Σ w_i x_i ≤ W((n − 1)/e)/β.
    Proof.    With d_i = max x − x_i the error is Σ d_i e^{−βd_i}/(1 + Σ e^{−βd_i}), sums over the other n − 1. It is at
              most λ where Σ (d_i − λ)e^{−βd_i} ≤ λ for all d; the terms are alike, so the worst d_i are equal, and
              (n − 1)s/(e^s + n − 1) is largest, W((n − 1)/e), where (s − 1)e^{s−1} = (n − 1)/e.
    """
    return _choice("max", eps, count, 1.0)


def min_gate(eps: float, count: int = 2) -> ChoiceGate:
    """−max(−x): scores −βx_i, values x_i."""
    return _choice("min", eps, count, -1.0)


def _choice(name: str, eps: float, count: int, sign: float) -> ChoiceGate:
    import scipy.special

    positive("eps", eps)
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise InputError(f"{name} needs two wires or more, found count={count!r}")
    largest = float(scipy.special.lambertw((count - 1) / math.e).real) * (1 + 1e-12)  # its error is far smaller
    beta = power_of_two(largest / eps * ROUNDED_UP)
    return ChoiceGate(name, largest / beta * ROUNDED_UP, count, sign * beta)


# Smooth pieces and lines

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
