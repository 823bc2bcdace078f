"""Evaluate a scheduled tree: at points in float64, over boxes in interval arithmetic with gradients.

Gradients are slopes: f(x) − f(c) ∈ Σ_i G_i·(x_i − c_i) for all x, c in the box. Each rule below keeps that true.
Where an operation may leave its domain, the evaluation notes a violation and goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, mul
from typing import TypeVar

import numpy as np

from attnc.functions.function import BOUNDED, DomainRule, Gradient
from attnc.functions.powers import DIVISOR, NEGATIVE_POWER, REAL_POWER, power, real_power
from attnc.functions.registry import FUNCTIONS
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array, Mask
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Step,
    Sum,
    Variable,
    children,
    to_text,
)

Value = TypeVar("Value", Array, Interval)
ONE = Interval.point(1.0)
MAX_SHOWN_TEXT = 200
"""Maximum number of characters of an expression in a message: two or three lines of a terminal."""
_CONSTANTS = {"pi": elementary.PI, "e": elementary.E}


@dataclass(frozen=True)
class Violation:
    """Step number `step` may leave `domain` on the boxes of `mask`; `operands` are the ranges of its operands there."""

    step: int
    domain: DomainRule
    mask: Mask
    operands: tuple[Interval, ...]


@dataclass(frozen=True)
class Evaluated:
    """The ranges (and gradients) of every step over boxes (n, d), and all violations in the order of the steps."""

    steps: Sequence[Step]
    names: Sequence[str]
    boxes: Interval
    ranges: list[Interval] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    @property
    def broken(self) -> Mask:
        """The boxes on which some operation may leave its domain."""
        broken = np.zeros(len(self.boxes), dtype=bool)
        for violation in self.violations:
            broken |= violation.mask
        return broken

    def first_violation(self) -> tuple[int, Violation]:
        """The first box with a violation, and the first operation that fails on it: those before it are sound there."""
        row = int(np.argmax(self.broken))
        return row, next(v for v in self.violations if np.broadcast_to(v.mask, len(self.boxes))[row])

    def describe(self, text: str, row: int, violation: Violation, verdict: str = "") -> str:
        """Name the operation that fails on box number `row`, the range found there, the reason, and the remedy."""
        node, domain = self.steps[violation.step].node, violation.domain
        # The operand of an overflow is the operation itself.
        blamed, index = (node, 0) if domain is BOUNDED else (children(node)[domain.operand], domain.operand)
        operand, found = _shortened(to_text(blamed)), violation.operands[index]
        lo, hi = (number_text(np.broadcast_to(end, len(self.boxes))[row]) for end in (found.lo, found.hi))
        return (
            f"cannot bound {_shortened(text)}: {domain.complaint.format(operand)} on {self._box_text(row)}. "
            f"There {operand} was found to lie in [{lo}, {hi}]{verdict}. {domain.remedy.format(operand)}."
        )

    def _box_text(self, row: int) -> str:
        """x in [0, 1], y in [2, 3]."""
        sides = zip(self.names, self.boxes.lo[row].tolist(), self.boxes.hi[row].tolist(), strict=True)
        texts = (f"{name} in [{number_text(lo)}, {number_text(hi)}]" for name, lo, hi in sides)
        return ", ".join(texts) or "the empty box"


def number_text(x: float) -> str:
    """The shortest decimal that gives this float64, without a trailing .0."""
    return repr(float(x)).removesuffix(".0")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_TEXT else text[: MAX_SHOWN_TEXT - 3] + "..."


def enclose(number: Number) -> Interval:
    """The number exactly if it is a float64, else the two floats around it."""
    nearest = number.value.numerator / number.value.denominator  # correctly rounded
    exact = number.value
    below = nearest if nearest <= exact else math.nextafter(nearest, -math.inf)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return Interval(np.asarray(below), np.asarray(above))


def evaluate_points(steps: Sequence[Step], columns: Mapping[str, Array]) -> list[Array]:
    """The float64 value of every step; NaN or inf outside the domain."""
    values: list[Array] = []
    with np.errstate(all="ignore"):
        for step in steps:
            values.append(_value(step.node, [values[i] for i in step.arguments], columns))
    return values


def _value(node: Node, a: list[Array], columns: Mapping[str, Array]) -> Array:
    match node:
        case Number(value):
            return np.asarray(value.numerator / value.denominator)
        case Constant(name):
            return np.asarray(_CONSTANTS[name].lo)
        case Variable(name):
            return columns[name]
        case Product():
            return reduce(mul, a)
        case Power():
            return np.asarray(np.power(a[0], a[1]))
        case Call(name):
            return np.asarray(FUNCTIONS[name].value(*a))
        case _:
            return _arithmetic(node, a)


def _arithmetic(node: Sum | Quotient | Negate, a: list[Value]) -> Value:
    """A sum, a quotient or a negation, of numbers as of intervals."""
    match node:
        case Sum():
            return reduce(add, a)
        case Quotient():
            return a[0] / a[1]
        case Negate():
            return -a[0]


def evaluate_boxes(
    steps: Sequence[Step], names: Sequence[str], boxes: Interval, *, gradients: bool, centred: bool = False
) -> Evaluated:
    """Ranges over boxes (n, d), and gradients if asked.

    `centred` also bounds every step by its mean value form f(c) + Σ_i G_i·(X_i − c_i), c the centre of the box, whose
    excess falls with the square of the width of the box where that of the natural extension falls with the width.
    """
    columns = {
        name: (i, Interval(np.ascontiguousarray(boxes.lo[:, i]), np.ascontiguousarray(boxes.hi[:, i])))
        for i, name in enumerate(names)
    }
    centre = evaluate_boxes(steps, names, Interval.point(boxes.mid), gradients=False).ranges if centred else []
    offsets = [x - x.mid for _, x in columns.values()] if centred else []
    done = Evaluated(steps, names, boxes)
    for number, step in enumerate(steps):
        operands = [done.ranges[i] for i in step.arguments]
        y = _range(step, operands, columns)
        _note_violations(done, number, _domain(step.node), operands, y)
        if gradients or centred:
            gradient = _gradient(step, operands, y, done.gradients, columns)
            done.gradients.append(gradient)
            if centred and operands:
                for i, g in gradient.items():
                    centre[number] = centre[number] + g * offsets[i]
                y = y.intersect(centre[number])
        done.ranges.append(y)
    return done


def _note_violations(
    done: Evaluated, number: int, domain: DomainRule | None, operands: Sequence[Interval], y: Interval
) -> None:
    broken = domain.may_leave(operands) if domain is not None else np.asarray(False)
    if domain is not None and broken.any():
        done.violations.append(Violation(number, domain, broken, tuple(operands)))
    if operands and not y.is_bounded.all():
        # Unbounded boxes may have unbounded values; but from bounded operands only an overflow makes them.
        overflow = ~y.is_bounded & ~broken
        for operand in operands:
            overflow = overflow & operand.is_bounded
        if overflow.any():
            done.violations.append(Violation(number, BOUNDED, overflow, (y,)))


def _integer(node: Node) -> int | None:
    return int(node.value) if isinstance(node, Number) and node.value.denominator == 1 else None


def _domain(node: Node) -> DomainRule | None:
    match node:
        case Quotient():
            return DIVISOR
        case Power(_, exponent):
            n = _integer(exponent)
            return REAL_POWER if n is None else NEGATIVE_POWER if n < 0 else None
        case Call(name):
            return FUNCTIONS[name].domain
        case _:
            return None


def _powers(step: Step, a: Sequence[Interval]) -> list[Interval]:
    """The distinct factors with their multiplicities: x*x is bounded as x², which is not negative."""
    by_number = dict(zip(step.arguments, a, strict=True))
    return [power(by_number[i], n) for i, n in Counter(step.arguments).items()]


def _range(step: Step, a: list[Interval], columns: Mapping[str, tuple[int, Interval]]) -> Interval:
    match step.node:
        case Number() as number:
            return enclose(number)
        case Constant(name):
            return _CONSTANTS[name]
        case Variable(name):
            return columns[name][1]
        case Product():
            return reduce(mul, _powers(step, a))
        case Power(_, exponent):
            n = _integer(exponent)
            return real_power(a[0], a[1]) if n is None else power(a[0], n)
        case Call(name):
            return FUNCTIONS[name].range(*a)
        case node:
            return _arithmetic(node, a)


def _scaled(slope: Interval, gradient: Gradient) -> Gradient:
    """slope·gradient."""
    return {i: slope if g is ONE else slope * g for i, g in gradient.items()}


def _added(*gradients: Gradient) -> Gradient:
    total: Gradient = {}
    for gradient in gradients:
        for i, g in gradient.items():
            total[i] = total[i] + g if i in total else g
    return total


def _gradient(
    step: Step, a: list[Interval], y: Interval, done: list[Gradient], columns: Mapping[str, tuple[int, Interval]]
) -> Gradient:
    g = [done[i] for i in step.arguments]
    match step.node:
        case Number() | Constant():
            return {}
        case Variable(name):
            return {columns[name][0]: ONE}
        case Sum():
            return _added(*g)
        case Product():
            return _product_gradient(step, a, done)
        case Quotient():
            # u/v − u′/v′ = (u − u′)/v − (u′/v′)(v − v′)/v
            return _added(_scaled(1.0 / a[1], g[0]) if g[0] else {}, _scaled(-y / a[1], g[1]) if g[1] else {})
        case Power(_, exponent):
            n = _integer(exponent)
            if n is not None:
                return _scaled(float(n) * power(a[0], n - 1), g[0]) if n and g[0] else {}
            base = _scaled(a[1] * real_power(a[0], a[1] - 1.0), g[0]) if g[0] else {}
            return _added(base, _scaled(y * elementary.log(a[0]), g[1])) if g[1] else base
        case Negate():
            return {i: -slope for i, slope in g[0].items()}
        case Call(name):
            function = FUNCTIONS[name]
            if not any(g):
                return {}
            if function.slope is not None:
                return _scaled(function.slope(a[0], y), g[0])
            assert function.gradient is not None
            return function.gradient(a, g)


def _product_gradient(step: Step, a: Sequence[Interval], done: Sequence[Gradient]) -> Gradient:
    """∏u − ∏u′ = Σ_i u_1⋯u_{i−1}·(u_i − u_i′)·u′_{i+1}⋯u′_k, over the distinct factors with their multiplicities."""
    by_number = dict(zip(step.arguments, a, strict=True))
    factors = _powers(step, a)
    after = [ONE] * len(factors)
    for i in range(len(factors) - 2, -1, -1):
        after[i] = _times(factors[i + 1], after[i + 1])
    before, total = ONE, Gradient()
    for i, (number, n) in enumerate(Counter(step.arguments).items()):
        if done[number]:
            slope = _times(before, after[i])
            if n > 1:
                slope = _times(float(n) * power(by_number[number], n - 1), slope)
            total = _added(total, _scaled(slope, done[number]))
        before = _times(before, factors[i])
    return total


def _times(a: Interval, b: Interval) -> Interval:
    return b if a is ONE else a if b is ONE else a * b
