"""Gates in closed form: activations that are a softmax already, and piecewise linear ones.

Piecewise linear activations are a steep softmax between lines, with an error of W(1/e)/β on all of R.

Two lines that meet at κ and whose slopes differ by J, weights σ(±β(x − κ)): the error is J·|t|σ(−β|t|), t = x − κ, at
most J·max_s s/(e^s + 1)/β = J·W(1/e)/β, with W Lambert's function. Far from κ it is zero in floating point as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.fitting.circuit import Circuit, Wire
from attnc.constructions.fitting.gate.keys import Gate, positive, power_of_two
from attnc.errors import InputError, real_number
from attnc.functions.gate_recipes import ExactKeys
from attnc.functions.logistic import SILU_SLOPE_TURNS
from attnc.ir.soft_head import SoftHead

LOG_2 = math.log(2.0)
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
        (0.0, 1.0, 2.0), (LOG_2, LOG_2, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 1.0), 1.088498161251728, 2.0**-55
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
    positive("eps", eps)
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise InputError(f"{name} needs two wires or more, found count={count!r}")
    largest = _lambert((count - 1) / math.e) * (1 + 1e-12)  # Newton's last step is far smaller
    beta = power_of_two(largest / eps * ROUNDED_UP)
    return ChoiceGate(name, largest / beta * ROUNDED_UP, count, sign * beta)


def _lambert(z: float) -> float:
    """W(z) for z > 0, by Newton's method for w + log w = log z, which is concave: it converges from below."""
    w = min(z, 1.0) / math.e
    for _ in range(100):
        step = (math.log(z / w) - w) / (1 + 1 / w)
        w += step
        if abs(step) < 1e-15 * w:
            break
    return w
