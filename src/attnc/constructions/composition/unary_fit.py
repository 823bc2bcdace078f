"""A function of one number by one head: the cheapest keys that are within δ of it on an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.circuit import Circuit, Wire
from attnc.constructions.spectral.axis import MAX_P, Axis, value_limit
from attnc.constructions.spectral.lines import Lines
from attnc.constructions.unary.keys import Function, Keys

if TYPE_CHECKING:
    from jaxtyping import Float

EDGE = 1e-7
"""Samples crowd towards the ends of the interval down to this part of it."""

BETWEEN = 1.01
"""Between the points of a sample an error is a little larger."""


@dataclass(frozen=True, eq=False)
class UnaryFit:
    """A(y) at y = scale·t + shift is within `error` of the function, as far as a dense sample shows."""

    keys: Keys
    scale: float
    shift: float
    error: float

    @property
    def num_anchors(self) -> int:
        return self.keys.p

    def __call__(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        return self.keys(self.scale * t + self.shift)

    def apply(self, circuit: Circuit, argument: Wire, name: str) -> Wire:
        return circuit.apply(self.keys, argument * self.scale + self.shift, name=name)

    def gate(self, circuit: Circuit, argument: Wire, carrier: Wire, name: str) -> Wire:
        """carrier·A(argument)."""
        return circuit.gate(self.keys, argument * self.scale + self.shift, carrier, name=name)


def sample_interval(lo: float, hi: float, count: int = 2001) -> Float[np.ndarray, " points"]:
    """Equally spaced, and crowding towards both ends."""
    edge = (hi - lo) * np.geomspace(EDGE, 0.1, count // 8)
    return np.clip(np.concatenate([np.linspace(lo, hi, count), lo + edge, hi - edge]), lo, hi)


def fit_unary(
    f: Function, lo: float, hi: float, delta: float, most: int = MAX_P, dtype: str = "float64"
) -> UnaryFit | None:
    """The fewest equally spaced anchors; None where `most` of them do not suffice."""
    t = sample_interval(lo, hi)
    wanted = f(t)
    size = float(np.abs(wanted).max())
    if not math.isfinite(size):
        return None
    if hi - lo <= 1e-9 * max(abs(lo), abs(hi)) or size == 0:
        constant = Keys(np.zeros(1), np.zeros(1), np.array([float(wanted[0])]))
        return UnaryFit(constant, 0.0, 0.0, float(np.abs(wanted - wanted[0]).max()))

    def sections(x: np.ndarray) -> np.ndarray:
        return f(x)[:, None]

    lines = Lines(lo, hi, sections, sections)
    goal = delta
    for _ in range(4):
        found = lines.smallest(goal, value_limit(delta, size, dtype) * size, most=most)
        if found is None:
            return None
        fitted = from_axis(found[0], f)
        error = BETWEEN * float(np.abs(fitted(t) - wanted).max())
        if error <= delta:
            return UnaryFit(fitted.keys, fitted.scale, fitted.shift, error)
        goal *= 0.5 * delta / error
    return None


def from_axis(axis: Axis, f: Function) -> UnaryFit:
    """In y = c(t − middle)/h a key is (2L, −cL²), L whole halves: exact."""
    values = axis.solve(f(axis.nodes())[:, None])[:, 0]
    keys = Keys(2 * axis.lattice, -axis.c * axis.lattice**2, values)
    scale = axis.c / axis.h
    return UnaryFit(keys, scale, -(axis.lo / 2 + axis.hi / 2) * scale, math.nan)
