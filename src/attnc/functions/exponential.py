"""exp, log, sinh and cosh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnc.functions.function import ZERO, Asymptote, ElementaryFunction, at_least, exponential_remainder, smooth
from attnc.functions.gate_recipes import Decay
from attnc.numerics import elementary
from attnc.numerics.elementary import increasing
from attnc.numerics.intervals import Interval
from attnc.numerics.jet_equations import analytic, derivative, exponential, integrate, number, quotient
from attnc.numerics.jets import Jet, add, negate, scale


def sinh_range(x: Interval) -> Interval:
    """sinh t."""
    return increasing(np.sinh, x, 0.0)


def cosh_range(x: Interval) -> Interval:
    """cosh t ≥ 1: increasing in |t|."""
    y = increasing(np.cosh, abs(x), 1.0)
    return Interval(np.maximum(y.lo, 1.0), y.hi)


def _half_sum(p: Jet, order: int, sign: float) -> Jet:
    """(e^p + sign·e^{−p})/2."""
    return scale(add((exponential(p, order), scale(exponential(negate(p), order), number(sign)))), number(0.5))


def _log_jet(p: Jet, x: Interval, order: int) -> Jet:
    """E log p = Ep/p."""
    return integrate(quotient(derivative(p), p, x, order), elementary.log(p.value.interval), order)


EXP = ElementaryFunction(
    "exp",
    np.exp,
    elementary.exp,
    analytic(lambda p, x, order: exponential(p, order), elementary.exp, elementary.exp),
    slope=lambda x, y: y,
    asymptotes={-1: Asymptote(ZERO, 0, exponential_remainder(1.0, 1.0))},
    gate=Decay(),
    derivative="exp(t)",
)
POSITIVE = at_least(0.0, "the argument", strict=True)
LOG = replace(
    smooth("log", np.log, elementary.log, _log_jet, lambda x: 1.0 / x, "1/t"), domain=POSITIVE, other_names=("ln",)
)
SINH = smooth("sinh", np.sinh, sinh_range, lambda p, x, order: _half_sum(p, order, -1.0), cosh_range, "cosh(t)")
COSH = smooth("cosh", np.cosh, cosh_range, lambda p, x, order: _half_sum(p, order, 1.0), sinh_range, "sinh(t)")
