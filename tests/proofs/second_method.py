"""Bounds of |f − network| over boxes by other mathematics: first derivatives in Arb balls, and halving where need be.

    |g(x)| ≤ |g(c)| + Σ_i r_i·sup |∂_i g| over the box,    g = f − network,

with g and its derivatives by forward differentiation through the expression and through every layer as it is stored.
No moments, no Taylor polynomials, no quotients of series; and nothing of the package but layers and trees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from flint import arb

from attnc.ir.program import Program
from attnc.targets.expression_target import ExpressionTarget
from proofs.exact_programs import LayerArithmetic
from strategies.reference import DERIVATIVES, VALUES, TreeArithmetic, precision

BITS = 120
ZERO, UNIT = arb(0), arb(0, 1)
MOST_PIECES = 8_000


@dataclass(frozen=True)
class Dual:
    """A function over a box of radii r: its values and its derivatives over the box, its value at the centre; balls."""

    value: arb
    slopes: tuple[arb, ...]
    centre: arb
    radii: tuple[arb, ...]

    def __add__(self, other: Dual) -> Dual:
        slopes = tuple(a + b for a, b in zip(self.slopes, other.slopes, strict=True))
        return self.tight(self.value + other.value, slopes, self.centre + other.centre)

    def __neg__(self) -> Dual:
        return self * arb(-1)

    def __sub__(self, other: Dual) -> Dual:
        return self + -other

    def __truediv__(self, other: Dual) -> Dual:
        return self * other.inverse()

    def __mul__(self, other: Dual | arb) -> Dual:
        if isinstance(other, arb):
            slopes = tuple(slope * other for slope in self.slopes)
            return Dual(self.value * other, slopes, self.centre * other, self.radii)
        pairs = zip(self.slopes, other.slopes, strict=True)
        slopes = tuple(a * other.value + self.value * b for a, b in pairs)
        return self.tight(self.value * other.value, slopes, self.centre * other.centre)

    def constant(self, value: arb) -> Dual:
        return Dual(value, (ZERO,) * len(self.radii), value, self.radii)

    def through(self, value: arb, slope: arb, centre: arb) -> Dual:
        return self.tight(value, tuple(slope * a for a in self.slopes), centre)

    def inverse(self) -> Dual:
        return self.through(1 / self.value, -1 / (self.value * self.value), 1 / self.centre)

    def tight(self, value: arb, slopes: tuple[arb, ...], centre: arb) -> Dual:
        """The values as they were found, or by the mean value theorem."""
        spread = sum((abs(s) * r for s, r in zip(slopes, self.radii, strict=True)), ZERO)
        moved = centre + spread * UNIT
        return Dual(moved if moved.rad() < value.rad() or not value.is_finite() else value, slopes, centre, self.radii)


def kinked(x: Dual, left: int, right: int) -> Dual:
    """|x| and relu(x): over the kink, the hull of both slopes."""
    if x.value > 0 or x.value < 0:
        slope = arb(right if x.value > 0 else left)
        return x.through(x.value * slope, slope, x.centre * slope)
    slope = arb(left).union(arb(right))
    values, centre = ((part * left).max(part * right) for part in (x.value, x.centre))
    return x.through(values, slope, centre)


def through_max(*operands: Dual) -> Dual:
    return reduce(lambda largest, x: largest + kinked(x - largest, 0, 1), operands)


def through_smooth(name: str) -> Callable[[Dual], Dual]:
    function, derivative = VALUES[name], DERIVATIVES[name]
    return lambda x: x.through(function(x.value), derivative(x.value), function(x.centre))


FUNCTIONS = {
    **{name: through_smooth(name) for name in DERIVATIVES},
    "abs": lambda x: kinked(x, -1, 1),
    "relu": lambda x: kinked(x, 0, 1),
    "max": through_max,
}


def average(scores: list[Dual], values: list[list[Dual]]) -> list[Dual]:
    """Average the values less their mean at the centre, and add it: an average of 1 is 1."""
    best = max(scores, key=lambda score: float(score.centre))
    weights = [FUNCTIONS["exp"](score - best) for score in scores]
    below = reduce(operator.add, weights).inverse()
    found = []
    for column in zip(*values, strict=True):
        middle = sum((w.centre * v.centre for w, v in zip(weights, column, strict=True)), ZERO) * below.centre
        shift = best.constant(middle.mid())
        above = reduce(operator.add, (w * (v - shift) for w, v in zip(weights, column, strict=True)))
        found.append(above * below + shift)
    return found


Gap = Callable[[Sequence[arb], Sequence[arb]], list[Dual]]


def gap_of(program: Program, target: ExpressionTarget) -> Gap:
    """f − network over a box of centres and radii."""

    def gap(centres: Sequence[arb], radii: Sequence[arb]) -> list[Dual]:
        d = len(centres)
        at = [
            Dual(centres[i] + radii[i] * UNIT, tuple(arb(int(i == j)) for j in range(d)), centres[i], tuple(radii))
            for i in range(d)
        ]
        named = dict(zip(target.expression.variables, at, strict=True))
        f = [TreeArithmetic(FUNCTIONS, at[0].constant).value(tree, named) for tree in target.expression.outputs]
        network = LayerArithmetic(constant=at[0].constant, average=average).outputs(program, at)
        return [a - b for a, b in zip(f, network, strict=True)]

    return gap


def bound_over(gap: Gap, lo: np.ndarray, hi: np.ndarray) -> float:
    """Over one box, rounded up; ∞ where nothing is known."""
    with precision(BITS):
        middle = [arb(c) for c in ((lo + hi) / 2).tolist()]
        ends = zip(lo.tolist(), hi.tolist(), middle, strict=True)
        radii = [(arb(b) - c).max(c - arb(a)) for a, b, c in ends]
        upper = [float(abs(part.value).upper()) * (1 + 2.0**-50) for part in gap(middle, radii)]
    return max(value if value == value else np.inf for value in upper)


def confirmed(gap: Gap, lo: np.ndarray, hi: np.ndarray, goal: float) -> float | None:
    """A bound of at most `goal` over the box, by halving; None where that takes too many pieces."""
    pending, worst = [(lo, hi)], 0.0
    for _ in range(MOST_PIECES):
        if not pending:
            return worst
        lo, hi = pending.pop()
        found = bound_over(gap, lo, hi)
        if found <= goal:
            worst = max(worst, found)
            continue
        axis = int(np.argmax(hi - lo))
        middle = (lo[axis] + hi[axis]) / 2
        below, above = hi.copy(), lo.copy()
        below[axis] = above[axis] = middle
        pending += [(lo, below), (above, hi)]
    return None
