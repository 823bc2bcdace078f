"""Evaluate a scheduled tree at points in float64, or over boxes in interval arithmetic with gradients.

Gradients are slopes: f(x) − f(c) ∈ Σ_i G_i·(x_i − c_i) for all x, c in the box. Each rule below preserves this. Where
an operation may leave its domain, the evaluation records a violation and continues.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add, and_, mul, neg, or_
from typing import Any

import numpy as np

from attnc.functions.function import BOUNDED, ONE, DomainRule, ElementaryFunction, Gradient, added, scaled
from attnc.functions.powers import QUOTIENT, REAL_POWER, integer_power, integer_power_jet, power
from attnc.functions.registry import FUNCTIONS
from attnc.numerics import elementary
from attnc.numerics.intervals import Interval
from attnc.numerics.jets import Jet, multiply, negate
from attnc.numerics.jets import add as add_jets
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import Array, Mask
from attnc.targets.expressions.tree import (
    Call,
    Constant,
    Negate,
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

MAX_SHOWN_TEXT = 200
"""Maximum number of characters of an expression in a message. They fill two or three lines of a terminal."""
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
        return reduce(or_, (violation.mask for violation in self.violations), np.zeros(len(self.boxes), dtype=bool))

    def note_violations(
        self, number: int, domain: DomainRule | None, operands: Sequence[Interval], y: Interval
    ) -> None:
        """Record the boxes on which this step may leave its domain, or may overflow though its operands are bounded."""
        broken = np.asarray(False) if domain is None else domain.may_leave(operands)
        if domain is not None and broken.any():
            self.violations.append(Violation(number, domain, broken, tuple(operands)))
        if not y.is_bounded.all():
            overflow = reduce(and_, (operand.is_bounded for operand in operands), ~y.is_bounded & ~broken)
            if overflow.any():
                self.violations.append(Violation(number, BOUNDED, overflow, (y,)))

    def first_violation(self) -> tuple[int, Violation]:
        """Return the first box with a violation, and the first operation that fails on it.

        Those before it are sound there.
        """
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
        """Return the text of a box, such as "x in [0, 1], y in [2, 3]"."""
        sides = zip(self.names, self.boxes.lo[row].tolist(), self.boxes.hi[row].tolist(), strict=True)
        texts = (f"{name} in [{number_text(lo)}, {number_text(hi)}]" for name, lo, hi in sides)
        return ", ".join(texts) or "the empty box"


def number_text(x: float) -> str:
    """Return the shortest decimal that gives this float64, without a trailing .0."""
    return repr(float(x)).removesuffix(".0")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_TEXT else text[: MAX_SHOWN_TEXT - 3] + "..."


@lru_cache(maxsize=1024)
def enclose(number: Number) -> Interval:
    """Return the number itself if it is a float64, else the two floats around it."""
    nearest = number.value.numerator / number.value.denominator  # correctly rounded
    exact = number.value
    below = nearest if nearest <= exact else math.nextafter(nearest, -math.inf)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return Interval(np.asarray(below), np.asarray(above))


def evaluate_points(steps: Sequence[Step], columns: Mapping[str, Array]) -> list[Array]:
    """Return the float64 value of every step. It is NaN or inf outside the domain."""
    values: list[Array] = []
    with quiet():
        for step in steps:
            match step.node:
                case Number(value):
                    values.append(np.asarray(value.numerator / value.denominator))
                case Constant(name):
                    values.append(_CONSTANTS[name].lo)
                case Variable(name):
                    values.append(columns[name])
                case _:
                    values.append(np.asarray(operation(step).value(*(values[i] for i in step.arguments))))
    return values


def evaluate_boxes(
    steps: Sequence[Step], names: Sequence[str], boxes: Interval, *, gradients: bool, centred: bool = False
) -> Evaluated:
    """Return ranges over boxes (n, d), and gradients if requested.

    `centred` also bounds every step by its mean value form f(c) + Σ_i G_i·(X_i − c_i), where c is the centre of the
    box. The excess of this form falls with the square of the width of the box. That of the natural extension falls with
    the width.
    """
    columns = {name: Interval(*np.ascontiguousarray([boxes.lo[:, i], boxes.hi[:, i]])) for i, name in enumerate(names)}
    centre = evaluate_boxes(steps, names, Interval.point(boxes.mid), gradients=False).ranges if centred else []
    offsets = [x - x.mid for x in columns.values()] if centred else []
    done = Evaluated(steps, names, boxes)
    for number, step in enumerate(steps):
        operands = [done.ranges[i] for i in step.arguments]
        gradient: Gradient = {}
        match step.node:
            case Number() as written:
                y = enclose(written)
            case Constant(name):
                y = _CONSTANTS[name]
            case Variable(name):
                y, gradient = columns[name], {names.index(name): ONE}
            case _:
                rules = operation(step)
                y = rules.range(*operands)
                done.note_violations(number, rules.domain, operands, y)
                if gradients or centred:
                    gradient = rules.gradients(operands, [done.gradients[i] for i in step.arguments], y)
                if centred:
                    for i, g in gradient.items():
                        centre[number] = centre[number] + g * offsets[i]
                    y = y.intersect(centre[number])
        done.gradients.append(gradient)
        done.ranges.append(y)
    return done


def operation(step: Step) -> ElementaryFunction:
    """Return the rules of a step that has operands."""
    match step.node:
        case Call(name):
            return FUNCTIONS[name]
        case Power(_, Number(exponent)) if exponent.denominator == 1:
            return integer_power(int(exponent))
        case Product():
            return _product(step.arguments)
        case node:
            return _OPERATIONS[type(node)]


def _product(arguments: Sequence[int]) -> ElementaryFunction:
    """Return the product of distinct factors, each to its multiplicity: x*x is bounded as x², which is not negative."""
    multiplicities = [(arguments.index(i), n) for i, n in Counter(arguments).items()]

    def powers(a: Sequence[Interval]) -> list[Interval]:
        return [power(a[i], n) for i, n in multiplicities]

    def gradient(a: Sequence[Interval], g: Sequence[Gradient], _: Interval) -> Gradient:
        """∏u − ∏u′ = Σ_i u_1⋯u_{i−1}·(u_i − u_i′)·u′_{i+1}⋯u′_k."""
        factors = powers(a)
        after = list(itertools.accumulate(factors[:0:-1], lambda b, factor: _times(factor, b), initial=ONE))[::-1]
        before, total = ONE, Gradient()
        for (i, n), factor, rest in zip(multiplicities, factors, after, strict=True):
            if g[i]:
                slope = _times(before, rest)
                if n > 1:
                    slope = _times(float(n) * power(a[i], n - 1), slope)
                total = added(total, scaled(slope, g[i]))
            before = _times(before, factor)
        return total

    def jet(jets: Sequence[Jet], ranges: Sequence[Interval], order: int) -> Jet:
        """Multiply constants first, then equal factors, then the rest in order of their number of variables."""
        factors = [integer_power_jet(jets[i], ranges[i], n, order) for i, n in multiplicities]
        factors.sort(key=lambda jet: (len(jet.variables), jet.degree))
        return reduce(lambda u, v: multiply(u, v, order), factors)

    return ElementaryFunction("*", lambda *a: reduce(mul, a), lambda *a: reduce(mul, powers(a)), jet, gradient=gradient)


def _sum(*a: Any) -> Any:
    return reduce(add, a)


_OPERATIONS = {
    Sum: ElementaryFunction(
        "+", _sum, _sum, lambda jets, ranges, order: add_jets(jets), gradient=lambda a, g, y: added(*g)
    ),
    Negate: ElementaryFunction(
        "-",
        neg,
        neg,
        lambda jets, ranges, order: negate(jets[0]),
        gradient=lambda a, g, y: {i: -slope for i, slope in g[0].items()},
    ),
    Quotient: QUOTIENT,
    Power: REAL_POWER,
}


def _times(a: Interval, b: Interval) -> Interval:
    return b if a is ONE else a if b is ONE else a * b
