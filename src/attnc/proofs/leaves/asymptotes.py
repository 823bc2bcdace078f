"""How the elementary functions approach their asymptotes.

1 − tanh s ≤ 2e^{−2s},  1 − σ(s) ≤ e^{−s},  erfc(s) ≤ e^{−s²},  s − gelu(s) ≤ φ(s) (Mills),  s − silu(s) ≤ s·e^{−s},
softplus(s) − s ≤ e^{−s},  π/2 − atan(s) ≤ 1/s;  and the same at −∞ by symmetry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up

ZERO = Interval.point(0.0)


@dataclass(frozen=True)
class Asymptote:
    """g(±s) = limit + slope·s + r(s), and `remainder(low)` = (C, μ) with |r(s)| ≤ C·e^{−μ(s − low)} for s ≥ low."""

    limit: Interval
    slope: float
    remainder: Callable[[float], tuple[float, float] | None]


def _exp(x: Interval) -> float:
    return float(elementary.exp(x).hi)


def _exponential(scale: float, rate: float) -> Callable[[float], tuple[float, float] | None]:
    """scale·e^{−rate·s}."""
    return lambda low: (float(up(scale * _exp(Interval.point(low) * -rate))), rate)


def _gaussian(scale: float, rate: float) -> Callable[[float], tuple[float, float] | None]:
    """scale·e^{−rate·s²}: beyond low > 0 it falls at least like e^{−2·rate·low·(s − low)}."""

    def remainder(low: float) -> tuple[float, float] | None:
        if low <= 0:
            return None
        return float(up(scale * _exp(Interval.point(low).square() * -rate))), math.nextafter(2 * rate * low, 0.0)

    return remainder


def _linear_exponential(low: float) -> tuple[float, float] | None:
    """s·e^{−s}: its logarithm has slope 1/s − 1 ≤ 1/low − 1."""
    if low <= 1:
        return None
    return float(up(low * _exp(Interval.point(-low)))), max(0.0, math.nextafter(1 - up(1 / low).item(), 0.0))


def _kink(low: float) -> tuple[float, float] | None:
    return max(0.0, -low), math.inf if low >= 0 else 0.0


def _hyperbolic(low: float) -> tuple[float, float] | None:
    return (float(up(1 / low)), 0.0) if low > 0 else None


_ONE, _HALF_PI = Interval.point(1.0), elementary.PI * 0.5
_BELL = 0.39894228040143274  # ≥ 1/√(2π) = 0.398942280401432677…

ASYMPTOTES: dict[tuple[str, int], Asymptote] = {
    ("tanh", 1): Asymptote(_ONE, 0, _exponential(2.0, 2.0)),
    ("tanh", -1): Asymptote(-_ONE, 0, _exponential(2.0, 2.0)),
    ("sigmoid", 1): Asymptote(_ONE, 0, _exponential(1.0, 1.0)),
    ("sigmoid", -1): Asymptote(ZERO, 0, _exponential(1.0, 1.0)),
    ("erf", 1): Asymptote(_ONE, 0, _gaussian(1.0, 1.0)),
    ("erf", -1): Asymptote(-_ONE, 0, _gaussian(1.0, 1.0)),
    ("gelu", 1): Asymptote(ZERO, 1, _gaussian(_BELL, 0.5)),
    ("gelu", -1): Asymptote(ZERO, 0, _gaussian(_BELL, 0.5)),
    ("silu", 1): Asymptote(ZERO, 1, _linear_exponential),
    ("silu", -1): Asymptote(ZERO, 0, _linear_exponential),
    ("softplus", 1): Asymptote(ZERO, 1, _exponential(1.0, 1.0)),
    ("softplus", -1): Asymptote(ZERO, 0, _exponential(1.0, 1.0)),
    ("exp", -1): Asymptote(ZERO, 0, _exponential(1.0, 1.0)),
    ("relu", 1): Asymptote(ZERO, 1, _kink),
    ("relu", -1): Asymptote(ZERO, 0, _kink),
    ("atan", 1): Asymptote(_HALF_PI, 0, _hyperbolic),
    ("atan", -1): Asymptote(-_HALF_PI, 0, _hyperbolic),
    ("sign", 1): Asymptote(_ONE, 0, lambda low: (0.0, math.inf) if low > 0 else None),
    ("sign", -1): Asymptote(-_ONE, 0, lambda low: (0.0, math.inf) if low > 0 else None),
}
"""By the function's name and the sign of the infinity that its argument goes to."""
