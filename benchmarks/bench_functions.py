"""The functions that are measured, each as text for attnc and as numpy code, which is the unit of every time.

Peers import this module in environments of their own, so it needs numpy alone. The numpy code is written by hand:
attnc's own evaluation of an expression takes up to three times as long, and the unit must be numpy's own speed.
`tests/test_benchmarks.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Columns = Callable[..., np.ndarray]
SUM, NESTED = 1.0, 2.0
"""Largest time that is aimed at, relative to numpy's: for sums of functions of one variable, and for all others."""


@dataclass(frozen=True)
class Function:
    """A function on a box. `numpy` takes one array per variable, in the order of `box`."""

    text: str
    box: dict[str, tuple[float, float]]
    numpy: Columns
    eps: float = 1e-6  # the accuracy at which its speed is measured
    goal: float = NESTED
    dtype: str = "float64"

    @property
    def name(self) -> str:
        return self.text if self.dtype == "float64" else f"{self.text}, {self.dtype}"

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper ends of the box."""
        lo, hi = np.array(list(self.box.values()), dtype=np.float64).T
        return lo, hi

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """Return the values at points (batch, d), with the columns as numpy slices them: strided views."""
        return self.numpy(*points.T)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Return uniform random points of the box, (count, d), in the function's dtype."""
        lo, hi = self.ends
        points = lo + np.random.default_rng(seed).random((count, len(lo))) * (hi - lo)
        return np.clip(points.astype(self.dtype), lo, hi, dtype=self.dtype)


def cube(names: str, reach: float) -> dict[str, tuple[float, float]]:
    return {name: (-reach, reach) for name in names}


WAVE = Function("sin(x)+cos(y)", cube("xy", 3), lambda x, y: np.sin(x) + np.cos(y), goal=SUM)
TWISTED = Function("exp(sin(x)*y)", cube("xy", 2), lambda x, y: np.exp(np.sin(x) * y))
RUNGE = Function("1/(1+25*x**2)", cube("x", 1), lambda x: 1 / (1 + 25 * x**2))
CREASE = Function("abs(x-y)", cube("xy", 1), lambda x, y: np.abs(x - y))
TEN = Function(
    "sin(a)*exp(b)*cos(c)+tanh(d)*f/(2+g)+log(3+h)*sqrt(4+i)-atan(j)*k**2",
    cube("abcdfghijk", 1),
    lambda a, b, c, d, f, g, h, i, j, k: (
        np.sin(a) * np.exp(b) * np.cos(c)
        + np.tanh(d) * f / (2 + g)
        + np.log(3 + h) * np.sqrt(4 + i)
        - np.atan(j) * k**2
    ),
)

COMPARED = (WAVE, TWISTED, CREASE, RUNGE, TEN)
"""The functions of `make bench`: a sum, a function that does not separate, a kink, a steep one, and ten variables."""

NAMED = (
    WAVE,
    TWISTED,
    Function("log(1+x**2+y**2)*tanh(x-y)", cube("xy", 2), lambda x, y: np.log(1 + x**2 + y**2) * np.tanh(x - y)),
    Function("max(sin(3*x), y**2-0.5)", cube("xy", 1), lambda x, y: np.maximum(np.sin(3 * x), y**2 - 0.5), eps=1e-5),
)
"""The compositions for which figures to reach are stated."""

TIMED = (
    *NAMED,
    Function("sin(x)", cube("x", 3), np.sin, eps=1e-8, goal=SUM),
    Function("tanh(x)+exp(y)+atan(z)", cube("xyz", 2), lambda x, y, z: np.tanh(x) + np.exp(y) + np.atan(z), goal=SUM),
    Function(
        "cos(x)+log(2+y)+tanh(z)+w**2+atan(v)",
        cube("xyzwv", 1),
        lambda x, y, z, w, v: np.cos(x) + np.log(2 + y) + np.tanh(z) + w**2 + np.atan(v),
        goal=SUM,
    ),
    Function(WAVE.text, WAVE.box, WAVE.numpy, eps=1e-4, goal=SUM, dtype="float32"),
    Function("x*y", cube("xy", 1), lambda x, y: x * y, eps=1e-8),
    Function("x*y*z", cube("xyz", 1), lambda x, y, z: x * y * z),
    Function("exp(-x**2-y**2)*sin(3*x+y)", cube("xy", 2), lambda x, y: np.exp(-(x**2) - y**2) * np.sin(3 * x + y)),
    Function(
        "(sin(x)*y+cos(z)*w)*tanh(v)",
        cube("xyzwv", 1),
        lambda x, y, z, w, v: (np.sin(x) * y + np.cos(z) * w) * np.tanh(v),
    ),
    Function("sin(exp(x))", cube("x", 1), lambda x: np.sin(np.exp(x))),
    Function("sqrt(1+sin(x)**2+exp(y))", cube("xy", 2), lambda x, y: np.sqrt(1 + np.sin(x) ** 2 + np.exp(y))),
    RUNGE,
    Function("sin(x)/(2+cos(y))", cube("xy", 3), lambda x, y: np.sin(x) / (2 + np.cos(y))),
    CREASE,
    Function("max(sin(x), cos(y), z)", cube("xyz", 2), lambda x, y, z: np.maximum(np.maximum(np.sin(x), np.cos(y)), z)),
    Function(TWISTED.text, TWISTED.box, TWISTED.numpy, eps=1e-4, dtype="float32"),
)
"""The functions of `make bench-speed`: sums, products, nested functions, divisions, kinks, one to five variables."""
