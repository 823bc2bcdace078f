"""Fitted laws: a power by least squares on logarithms, with the confidence interval of its exponent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

LEVEL = 0.95


class Power(NamedTuple):
    """y ≈ factor·x^exponent; the exponent lies in [low, high] with 95 % confidence if the residuals are normal."""

    exponent: float
    low: float
    high: float
    factor: float

    def __call__(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        return self.factor * np.asarray(x, float) ** self.exponent

    def __str__(self) -> str:
        return f"{self.exponent:.3f} [{self.low:.3f}, {self.high:.3f}]"


def fit_power(x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"]) -> Power:
    from scipy import stats

    logs_x, logs_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    fit = stats.linregress(logs_x, logs_y)
    free = len(logs_x) - 2
    reach = float(stats.t.ppf((1 + LEVEL) / 2, free) * fit.stderr) if free > 0 else np.inf
    slope = float(fit.slope)
    return Power(slope, slope - reach, slope + reach, float(np.exp(fit.intercept)))
