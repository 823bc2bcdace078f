"""Tails: x = start ± s for all s ≥ 0, beyond a bounded core.

The function becomes P(s) + E(s) with a polynomial P and |E(s)| ≤ size·e^{−rate·s}. In a head the keys with the steepest
score win. If their weights e^{c_j} at s = 0 add up to W, then p_k ≤ e^{c_k}/W·e^{−λ_k s} for any other key, where
λ_k > 0 is the difference of slopes. With the winners' value v + V·s,
    |A − v − V·s| ≤ Σ_k e^{c_k}/W·sup_s e^{−λ_k s}(|v_k − v| + |V_k − V|·s).

Computed weights are off by factors e^{±y_k}. The errors of scores are affine in |x| = |start| + s, and so are the
distances of scores to the largest one. So y_k ≤ η_k + ε_k·s, and the same bound holds for computed weights with
c_k + η_k + η_j in place of c_k and λ_k − ε_k − ε_j in place of λ_k, j being a winner. The rounding of sums is linear in
the sizes of values. These are affine in |x|, so that rounding adds at most constant + slope·|x|.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flint import arb, arb_poly, fmpq

from attnc_checker.averages import Average
from attnc_checker.expressions import Function, Rules, Smooth, evaluate, parse
from attnc_checker.files import require
from attnc_checker.forms import Form, Head, dense
from attnc_checker.network import Stage
from attnc_checker.ranges import Box, coefficients
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Vector, most, total

SAME = {"tanh": "2*sigmoid(2*y) - 1", "silu": "y*sigmoid(y)", "gelu": "y*(erf(y/sqrt(2)) + 1)/2"}


class Undecided(ArithmeticError):
    """The behaviour on a tail cannot be decided here."""


class Tail(NamedTuple):
    """P(s) + E(s), |E(s)| ≤ size·e^{−rate·s}."""

    poly: arb_poly
    size: arb = arb(0)
    rate: arb = arb("inf")


def _peak(poly: arb_poly, rate: arb) -> arb:
    """Bound |P(s)| e^{−rate·s}, by s^n e^{−rate·s} ≤ (n/(e·rate))^n. |p| + |q|s peaks at s = 1/rate − |p|/|q|, or 0."""
    p, q = abs(poly[0]), abs(poly[1])
    if poly.degree() < 1 or (poly.degree() == 1 and p * rate >= q):
        return p
    if poly.degree() == 1 and q > 0:
        return q / rate * (rate * p / q - 1).exp()
    return total(abs(x) * (n / (arb.const_e() * rate)) ** n for n, x in enumerate(poly.coeffs()))


class _Tails(Rules[Tail]):
    """Rules for functions of s ≥ 0. The variable x is one of them."""

    def __init__(self, x: Tail) -> None:
        self.x = x

    def constant(self, x: fmpq | arb) -> Tail:
        return Tail(arb_poly([arb(x)]))

    def variable(self, i: int) -> Tail:
        return self.x

    def plus(self, a: Tail, b: Tail, sign: int = 1) -> Tail:
        return Tail(a.poly + sign * b.poly, a.size + b.size, a.rate.min(b.rate))

    def times(self, a: Tail, b: Tail) -> Tail:
        product = Tail(a.poly * b.poly, a.size * b.size, a.rate + b.rate)
        return self.plus(self.plus(product, self._damped(a.poly, b)), self._damped(b.poly, a))

    def _damped(self, poly: arb_poly, e: Tail) -> Tail:
        """Return P·E. Half of the rate covers the growth of P."""
        if e.size == 0 or poly.degree() < 1:
            return Tail(arb_poly([]), e.size * abs(poly[0]), e.rate)
        require(e.rate > 0, "on the tail, a factor that is only bounded is multiplied by one that grows", Undecided)
        return Tail(arb_poly([]), e.size * _peak(poly, e.rate / 2), e.rate / 2)

    def maximum(self, a: Tail, b: Tail) -> Tail:
        for u, v in ((a, b), (b, a)):
            difference = self.plus(u, v, -1)
            if all(x >= 0 for x in difference.poly.coeffs()[1:]) and difference.poly[0] >= difference.size:
                return u
        raise Undecided("which side of a kink counts is not decided on the tail")

    def step(self, name: str, a: Tail) -> Tail:
        raise Undecided(f"{name} may jump on the tail")

    def apply(self, name: Smooth, y: Tail) -> Tail:
        if y.poly.degree() < 1:  # y = p + E stays in a ball, on which |g(y) − g(p)| ≤ sup|g′|·|E|
            p, ball = y.poly[0], y.poly[0] + y.size * arb(0, 1)
            (value, _), (_, slope) = (coefficients(name, (x.lower(), x.upper()), 2) for x in (p, ball))
            return Tail(arb_poly([value]), abs(slope) * y.size, y.rate)
        if isinstance(name, fmpq) and name.q == 1 and name >= 0:
            return self.power(y, int(name.p))
        require(y.poly.degree() <= 1, f"{name} of a polynomial is not followed on the tail", Undecided)
        require(y.poly[1] != 0, f"whether the argument of {name} rises or falls on the tail is not decided", Undecided)
        if isinstance(name, str) and name in SAME:
            return evaluate(parse(SAME[name], ["y"]), _Tails(y))[0]
        side = 1 if y.poly[1] > 0 else -1
        low, rate = side * y.poly[0] - y.size, side * y.poly[1]  # side·y ≥ low + rate·s
        fall = Tail(arb_poly([]), (-low).exp(), rate)  # ≥ e^{−side·y}
        match name:
            case "exp" if side < 0:
                return fall
            case "sigmoid":  # 1 − σ(y) = σ(−y) ≤ e^{−y}
                return self.plus(self.constant(fmpq(side > 0)), fall)
            case "softplus":  # log(1 + e^y) = y + log(1 + e^{−y}), and log(1 + z) ≤ z
                return self.plus(y, fall) if side > 0 else fall
            case "erf" if low > 0:  # e^{y²} erfc(y) falls, and y² ≥ low² + 2·low·rate·s
                return Tail(arb_poly([side]), low.erfc(), 2 * low * rate)
            case "atan" if low > 0:  # it rises to π/2
                near, far = low.atan(), arb.pi() / 2
                return Tail(arb_poly([side * (near + far) / 2]), (far - near) / 2, arb(0))
        raise Undecided(f"{name} is not followed on the tail")


def _along(form: Form, start: fmpq, side: int) -> list[Any]:
    """Return (value, slope) of the form along x = start + side·s, for one form or for the forms of all keys at once."""
    constant, slope = dense(form.terms, [0])
    return [constant + slope * start, slope * side]


def _weight_errors(head: Head, start: fmpq, side: int, arithmetic: Arithmetic) -> tuple[Vector, Vector]:
    """Return η and ε for all keys. On boxes around 0 the errors of scores are affine in the half-width of the box."""
    average, middles = Average.of(head, [0]), [arb(0)] * len(head.parts)
    at_0, at_1 = (average.score_errors(Box([arb(0)], [arb(r)]), arithmetic, middles) for r in (0, 1))
    c, slopes = _along(head.scores, start, side)
    behind, falling = (Vector(arb(max(x) - each) for each in x) for x in (c, slopes))
    growth, none = at_1 - at_0, Vector([arb(0)] * head.num_keys)
    eta = arithmetic.weights(at_0 + growth * abs(arb(start)), behind)
    return eta, arithmetic.weights(growth, falling) - arithmetic.weights(none, none)


def _average(head: Head, o: int, start: fmpq, side: int, arithmetic: Arithmetic) -> tuple[Tail, arb, arb]:
    """Return the value of the winning keys with a bound on the distance of the average from it, constant and slope."""
    keys = [*zip(*_along(head.scores, start, side), *_along(head.values[o], start, side), strict=True)]
    steepest = max(slope for _, slope, _, _ in keys)
    winners = [key for key in keys if key[1] == steepest]
    (top, _, v, V) = max(winners)
    if any(key[2:] != (v, V) for key in winners):
        raise Undecided("keys with different values win together on the tail")
    eta, epsilon = _weight_errors(head, start, side, arithmetic)
    won = [(x, y) for key, x, y in zip(keys, eta, epsilon, strict=True) if key[1] == steepest]
    most_eta, most_epsilon = (most(x) for x in zip(*won, strict=True))
    weight, error, weights = total(arb(c - top).exp() for c, _, _, _ in winners), arb(0), []
    for (c, slope, v_k, V_k), x, y in zip(keys, eta, epsilon, strict=True):
        if slope == steepest:
            weights.append(arb(1))
            continue
        rate = arb(steepest - slope) - y - most_epsilon
        require(rate > 0, "rounding of scores may outgrow their differences on the tail", Undecided)
        weights.append((arb(c - top) + x + most_eta).exp() / weight)
        error += weights[-1] * _peak(arb_poly([v_k - v, V_k - V]), rate)
    upto = Vector(x.min(arb(1)) for x in weights)
    constant, growth = (arithmetic.summation(head, o, upto, sizes) for sizes in dense(head.values[o].sizes, [0]))
    return Tail(arb_poly([v, V]), error, arb(0)), constant, growth


def tail_error(stage: Stage, function: Function, start: fmpq, side: int, arithmetic: Arithmetic) -> tuple[arb, arb]:
    """Return (constant, slope): beyond `start` on that side |f − network| ≤ constant + slope·|x|, over all outputs."""
    require(side * start >= 0 or arithmetic.u == 0, "rounding is not followed on a tail that contains 0", Undecided)
    rules = _Tails(Tail(arb_poly([start, side])))
    constants, slopes = [], []
    for o, left in enumerate(evaluate(function, rules)):
        form = stage.affine[o]
        constant, slope = (arithmetic.gamma(form.n) * size for size in dense(form.sizes, [0]))
        left = rules.plus(left, Tail(arb_poly(_along(form, start, side))), -1)
        for head in stage.heads:
            if o in head.values:
                average, own, growth = _average(head, o, start, side, arithmetic)
                left, constant, slope = rules.plus(left, average, -1), constant + own, slope + growth
        require(left.poly.degree() <= 0, "function and network drift apart without bound on the tail", Undecided)
        constants.append(abs(left.poly[0]) + left.size + constant)
        slopes.append(slope)
    return most(constants), most(slopes)
