"""Bounds of |f − network| over boxes by other mathematics: first derivatives in Arb balls, and halving where need be.

    |g(x)| ≤ |g(c)| + Σ_i r_i·sup |∂_i g| over the box,    g = f − network,

with g and its derivatives by forward differentiation through the expression and through every layer as it is stored.
No moments, no Taylor polynomials, no quotients of series; and nothing of the package but layers and trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flint import arb

from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Sum,
    Variable,
    children,
)
from strategies.reference import DERIVATIVES, VALUES, precision, rational

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

    def __sub__(self, other: Dual) -> Dual:
        return self + other.scaled(arb(-1))

    def __mul__(self, other: Dual) -> Dual:
        pairs = zip(self.slopes, other.slopes, strict=True)
        slopes = tuple(a * other.value + self.value * b for a, b in pairs)
        return self.tight(self.value * other.value, slopes, self.centre * other.centre)

    def scaled(self, factor: arb) -> Dual:
        slopes = tuple(slope * factor for slope in self.slopes)
        return Dual(self.value * factor, slopes, self.centre * factor, self.radii)

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


def differentiate(node: Node, at: dict[str, Dual], zero: Dual) -> Dual:
    a = [differentiate(child, at, zero) for child in children(node)]
    match node:
        case Number(value):
            return zero.constant(rational(value))
        case Constant(name):
            return zero.constant(arb.pi() if name == "pi" else arb(1).exp())
        case Variable(name):
            return at[name]
        case Sum():
            return sum(a[1:], a[0])
        case Product():
            result = a[0]
            for factor in a[1:]:
                result = result * factor
            return result
        case Quotient():
            return a[0] * a[1].inverse()
        case Negate():
            return a[0].scaled(arb(-1))
        case Power(_, Number(value)) if value.denominator == 1 and value > 0:
            result = a[0]
            for _ in range(int(value) - 1):
                result = result * a[0]
            return result
        case Call("abs" | "relu" as name):
            return kinked(a[0], -1 if name == "abs" else 0, 1)
        case Call("max"):
            result = a[0]
            for other in a[1:]:
                result = result + kinked(other - result, 0, 1)
            return result
        case Call(name):
            function = VALUES[name]
            return a[0].through(function(a[0].value), DERIVATIVES[name](a[0].value), function(a[0].centre))
    raise AssertionError(f"no rule for {node}")


def run(program: Program, x: Sequence[Dual]) -> list[Dual]:
    """The first token's outputs of a program whose queries are made in token 0."""
    zero = x[0].scaled(ZERO)
    state: list[list[Dual]] = [list(x)]
    for layer in program.layers:
        state = _affine(layer, state, zero) if isinstance(layer, Affine) else _attention(layer, state, zero)
    return [entry for row in state for entry in row]


def _affine(layer: Affine, state: list[list[Dual]], zero: Dual) -> list[list[Dual]]:
    tokens, width = layer.constant.shape
    out = [[zero] * width for _ in range(tokens)]
    for (t, c), value in zip(layer.constant.index.tolist(), layer.constant.values.tolist(), strict=True):
        out[t][c] = zero.constant(arb(value))
    for (t, c, i, j), value in zip(layer.weight.index.tolist(), layer.weight.values.tolist(), strict=True):
        out[t][c] = out[t][c] + state[i][j].scaled(arb(value))
    return out


def _attention(layer: Attention, state: list[list[Dual]], zero: Dual) -> list[list[Dual]]:
    """Of query 0. Averages are taken of the values less their mean at the centre: an average of 1 is 1."""
    first = list(state[0]) if layer.residual else [zero] * len(layer.channels)
    for head in layer.heads:
        q, keys, values = _times([state[0]], head.W_Q)[0], _times(state, head.W_K), _times(state, head.W_V)
        seen = np.flatnonzero(head.mask.visible(np.array([0]), slice(None))[0]) if head.mask else range(len(keys))
        scores = [sum((a * b for a, b in zip(q, keys[k], strict=True)), zero) for k in seen]
        best = max(scores, key=lambda score: float(score.centre))
        weights = [_exponential(score - best) for score in scores]
        below = sum(weights[1:], weights[0]).inverse()
        average = []
        for m in range(head.W_V.shape[1]):
            column = [values[k][m] for k in seen]
            middle = sum((w.centre * v.centre for w, v in zip(weights, column, strict=True)), ZERO) * below.centre
            shift = zero.constant(middle.mid())
            above = sum((w * (v - shift) for w, v in zip(weights, column, strict=True)), zero)
            average.append(above * below + shift)
        for c, entry in enumerate(_times([average], head.W_O)[0]):
            first[c] = first[c] + entry
    return [first, *([zero] * len(first) for _ in state[1:])]


def _exponential(x: Dual) -> Dual:
    power = x.value.exp()
    return x.through(power, power, x.centre.exp())


def _times(rows: list[list[Dual]], matrix: np.ndarray) -> list[list[Dual]]:
    columns = [[(i, arb(value)) for i, value in enumerate(column) if value] for column in matrix.T.tolist()]
    zero = rows[0][0].scaled(ZERO)
    return [[sum((row[i].scaled(w) for i, w in column), zero) for column in columns] for row in rows]


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
        zero = at[0].constant(ZERO)
        f = [differentiate(tree, named, zero) for tree in target.expression.outputs]
        return [a - b for a, b in zip(f, run(program, at), strict=True)]

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
