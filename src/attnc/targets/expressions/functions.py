"""The table of elementary functions: to add one, add a row to `FUNCTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.numerics import activations, elementary, jet_kinks, jet_rules
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array
from attnc.targets.expressions.domains import TANGENT, Domain, at_least, within

Gradient = dict[int, Interval]
"""The slopes with respect to the variables, by number; a missing one is zero."""


@dataclass(frozen=True)
class Function:
    """One row of the table.

    `value` computes in float64, `range` encloses the values over intervals. `slope(x, y)`, y the range over x, encloses
    all difference quotients (f(s) − f(t))/(s − t) of members, which for a kink inside is the hull of both sides
    (Clarke's derivative, with Lebourg's mean value theorem). A function of several arguments has a `gradient` instead,
    from the ranges and the gradients of its arguments. `jet` makes the Taylor jet over boxes from the arguments' jets.
    """

    value: Callable[..., Array]
    range: Callable[..., Interval]
    slope: Callable[[Interval, Interval], Interval] | None = None
    gradient: Callable[[Sequence[Interval], Sequence[Gradient]], Gradient] | None = None
    arity: int = 1
    variadic: bool = False
    domain: Domain | None = None
    continuous: bool = True
    jet: jet_rules.Rule | None = None


def _special(name: str) -> Callable[..., Array]:
    """A function of scipy.special, imported when first used."""

    def value(x: Array) -> Array:
        import scipy.special

        return np.asarray(getattr(scipy.special, name)(x), dtype=np.float64)

    return value


def _times(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x: x * f(x)


def _sides(x: Interval, left: float, right: float) -> Interval:
    """The slopes of a function with slope `left` below 0 and `right` above."""
    below, above = x.lo < 0, x.hi > 0
    at_kink = below == above  # on both sides of it, or the point 0 itself
    only = np.where(below, left, right)
    return Interval(np.where(at_kink, min(left, right), only), np.where(at_kink, max(left, right), only))


def _jump(inside: Any) -> Interval:
    """The slopes of an increasing step function: 0, and unbounded above over a jump."""
    return Interval(np.zeros(np.shape(inside)), np.where(inside, np.inf, 0.0))


def _hull(a: Gradient, b: Gradient, only_a: Any, only_b: Any) -> Gradient:
    """Where a (b) alone counts, its gradient; elsewhere the hull of both."""
    zero = Interval.point(0.0)
    result: Gradient = {}
    for i in a.keys() | b.keys():
        g, h = a.get(i, zero), b.get(i, zero)
        both = g.hull(h)
        lo = np.where(only_a, g.lo, np.where(only_b, h.lo, both.lo))
        result[i] = Interval(lo, np.where(only_a, g.hi, np.where(only_b, h.hi, both.hi)))
    return result


def _max_gradient(ranges: Sequence[Interval], gradients: Sequence[Gradient]) -> Gradient:
    """max(u, v)(x) − max(u, v)(c) lies between u(x) − u(c) and v(x) − v(c), or equals one of them."""
    total, gradient = ranges[0], gradients[0]
    for x, g in zip(ranges[1:], gradients[1:], strict=True):
        gradient = _hull(gradient, g, total.lo >= x.hi, x.lo >= total.hi)
        total = total.max(x)
    return gradient


def _min_gradient(ranges: Sequence[Interval], gradients: Sequence[Gradient]) -> Gradient:
    """As for max: the gradients of min(u, …) are those of −max(−u, …)."""
    total, gradient = ranges[0], gradients[0]
    for x, g in zip(ranges[1:], gradients[1:], strict=True):
        gradient = _hull(gradient, g, total.hi <= x.lo, x.hi <= total.lo)
        total = total.min(x)
    return gradient


def _clip_gradient(ranges: Sequence[Interval], gradients: Sequence[Gradient]) -> Gradient:
    x, low, high = ranges
    return _min_gradient((x.max(low), high), (_max_gradient((x, low), gradients[:2]), gradients[2]))


def _fold(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def value(*arguments: Any) -> Any:
        result = arguments[0]
        for argument in arguments[1:]:
            result = operation(result, argument)
        return result

    return value


def _clip(x: Array, low: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _root_slope(x: Interval) -> Interval:
    """1/√(1 − t²) = 1/√((1 − |t|)(1 + |t|)), which does not cancel; it grows with |t|."""
    size = abs(Interval(np.clip(x.lo, -1, 1), np.clip(x.hi, -1, 1)))
    least, greatest = (1.0 / elementary.sqrt((1.0 - t) * (1.0 + t)) for t in map(Interval.point, (size.lo, size.hi)))
    # At |t| = 1 the quotient 1/[0, 0] is [−∞, ∞].
    return Interval(np.maximum(least.lo, 1.0), greatest.hi)


_TWO_OVER_SQRT_PI = 2.0 / elementary.sqrt(elementary.PI)
_el, _ac, _jets = elementary, activations, jet_rules

FUNCTIONS: dict[str, Function] = {
    "sin": Function(np.sin, _el.sin, lambda x, y: _el.cos(x), jet=_jets.sin),
    "cos": Function(np.cos, _el.cos, lambda x, y: -_el.sin(x), jet=_jets.cos),
    "tan": Function(np.tan, _el.tan, lambda x, y: y.square() + 1.0, domain=TANGENT, jet=_jets.tan),
    "exp": Function(np.exp, _el.exp, lambda x, y: y, jet=_jets.exp),
    "log": Function(
        np.log, _el.log, lambda x, y: 1.0 / x, domain=at_least(0.0, "the argument", strict=True), jet=_jets.log
    ),
    "sqrt": Function(
        np.sqrt,
        _el.sqrt,
        lambda x, y: 0.5 / y,
        domain=at_least(0.0, "the argument", strict=False),
        jet=_jets.sqrt,
    ),
    "abs": Function(np.abs, abs, lambda x, y: _sides(x, -1.0, 1.0), jet=jet_kinks.pieces(-1.0, 1.0)),
    "tanh": Function(np.tanh, _el.tanh, lambda x, y: (1.0 / _el.cosh(x)).square(), jet=_jets.tanh),
    "sinh": Function(np.sinh, _el.sinh, lambda x, y: _el.cosh(x), jet=_jets.sinh),
    "cosh": Function(np.cosh, _el.cosh, lambda x, y: _el.sinh(x), jet=_jets.cosh),
    "atan": Function(np.arctan, _el.atan, lambda x, y: 1.0 / (x.square() + 1.0), jet=_jets.atan),
    "asin": Function(
        np.arcsin,
        _el.asin,
        lambda x, y: _root_slope(x),
        domain=within(-1.0, 1.0, "the argument"),
        jet=_jets.asin,
    ),
    "acos": Function(
        np.arccos,
        _el.acos,
        lambda x, y: -_root_slope(x),
        domain=within(-1.0, 1.0, "the argument"),
        jet=_jets.acos,
    ),
    "erf": Function(_special("erf"), _el.erf, lambda x, y: _TWO_OVER_SQRT_PI * _el.exp(-x.square()), jet=_jets.erf),
    "sigmoid": Function(_el.logistic, _el.sigmoid, lambda x, y: _ac.sigmoid_slope(x), jet=_jets.sigmoid),
    "relu": Function(
        lambda x: np.maximum(x, 0.0), _el.relu, lambda x, y: _sides(x, 0.0, 1.0), jet=jet_kinks.pieces(0.0, 1.0)
    ),
    "gelu": Function(_times(_special("ndtr")), _ac.gelu, lambda x, y: _ac.gelu_slope(x), jet=_jets.gelu),
    "silu": Function(_times(_el.logistic), _ac.silu, lambda x, y: _ac.silu_slope(x), jet=_jets.silu),
    "softplus": Function(lambda x: np.logaddexp(0.0, x), _el.softplus, lambda x, y: _el.sigmoid(x), jet=_jets.softplus),
    "min": Function(
        _fold(np.minimum), _fold(Interval.min), gradient=_min_gradient, arity=2, variadic=True, jet=jet_kinks.minimum
    ),
    "max": Function(
        _fold(np.maximum), _fold(Interval.max), gradient=_max_gradient, arity=2, variadic=True, jet=jet_kinks.maximum
    ),
    "clip": Function(_clip, _el.clip, gradient=_clip_gradient, arity=3, jet=jet_kinks.clip),
    "sign": Function(
        np.sign,
        _el.sign,
        lambda x, y: _jump((x.lo <= 0) & (x.hi >= 0) & (x.lo < x.hi)),
        continuous=False,
        jet=jet_kinks.step(np.sign),
    ),
    "floor": Function(
        np.floor, _el.floor, lambda x, y: _jump(y.lo < y.hi), continuous=False, jet=jet_kinks.step(np.floor)
    ),
}
