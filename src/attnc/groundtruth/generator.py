"""Random expressions of graded difficulty, from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.targets.expressions.expression import Expression

VARIABLES = ("x0", "x1", "x2", "x3", "x4")
SMOOTH = ("sin", "cos", "tanh", "sigmoid", "atan")
"""Smooth functions whose heads have few keys on the ranges of arguments used here."""
KINKED = ("relu", "abs")
WIDEST_ARGUMENT = 3.0
"""Largest absolute value of the argument of a function. Most of the functions bend within it, and one head computes
each of them with at most about 20 keys."""
WIDEST_KINK = 1.0
"""The same for relu and abs. Their heads have steep scores, and the rounding of scores grows with the argument."""
WEIGHTS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Sizes of coefficients. They are short numbers, so that expressions stay readable. None is so small that a term hardly
matters."""
SHIFTS = (-0.5, -0.25, 0.25, 0.5)


@dataclass(frozen=True)
class Example:
    """An expression on a box, and the level of difficulty at which it was drawn."""

    level: str
    text: str
    box: Mapping[str, tuple[float, float]]


class _Drawing:
    """Draws parts of one expression. A part is a text that is safe as an operand."""

    def __init__(self, rng: np.random.Generator, num_variables: int) -> None:
        self.rng = rng
        self.names = VARIABLES[:num_variables]
        halves = rng.choice((1.0, 1.5, 2.0), size=num_variables)
        self.box = {name: (-float(half), float(half)) for name, half in zip(self.names, halves, strict=True)}

    def range(self, text: str) -> tuple[float, float]:
        expression = Expression.parse(text).with_variables(self.names)
        ends = np.array(list(self.box.values()))
        found = expression.ranges(Interval(ends[None, :, 0], ends[None, :, 1]))
        return float(found.lo[0, 0]), float(found.hi[0, 0])

    def choice(self, options: tuple[str, ...]) -> str:
        return str(options[int(self.rng.integers(len(options)))])

    def weight(self) -> float:
        return float(self.rng.choice(WEIGHTS))

    def order(self) -> list[str]:
        """Return all variables, in random order."""
        return [str(name) for name in self.rng.permutation(self.names)]

    def scaled(self, text: str) -> str:
        """Return the part times a random coefficient, which keeps it within the widest argument."""
        lo, hi = self.range(text)
        size = max(abs(lo), abs(hi), 1e-9)
        weight = min(self.weight(), float(np.floor(4 * WIDEST_ARGUMENT / size)) / 4)
        return text if weight == 1 else f"{max(weight, 0.25):g}*{text}"

    def sum(self, parts: list[str]) -> str:
        """Return the parts with random coefficients and signs, added up."""
        signs = [" - " if self.rng.random() < 0.4 else " + " for _ in parts]
        text = "".join(sign + self.scaled(part) for sign, part in zip(signs, parts, strict=True))
        return text.removeprefix(" + ").strip() if text.startswith(" + ") else "-" + text.removeprefix(" - ")

    def apply(self, names: tuple[str, ...], argument: str) -> str:
        """Return a function of the argument, which is scaled if it is too wide, and sometimes shifted."""
        lo, hi = self.range(argument)
        size, widest = max(abs(lo), abs(hi)), WIDEST_KINK if names is KINKED else WIDEST_ARGUMENT
        if size > widest:
            argument = f"{max(1.0, np.floor(8 * widest / size)) / 8:g}*({argument})"
        elif self.rng.random() < 0.5:
            shift = float(self.rng.choice(SHIFTS))
            argument = f"{argument} {'+' if shift > 0 else '-'} {abs(shift):g}"
        return f"{self.choice(names)}({argument})"

    def leaf(self, names: tuple[str, ...], variable: str) -> str:
        return self.apply(names, self.scaled(variable))

    def extreme(self, one: str, other: str) -> str:
        return f"{self.choice(('max', 'min'))}({one}, {other})"


def _sums(draw: _Drawing) -> str:
    names = draw.order()
    extra = [draw.choice(tuple(names)) for _ in range(int(draw.rng.integers(0, 2)))]
    return draw.sum([draw.leaf(SMOOTH, name) for name in [*names, *extra]])


def _products(draw: _Drawing) -> str:
    first, second, *rest = draw.order()
    left = first if draw.rng.random() < 0.5 else draw.leaf(SMOOTH, first)
    return draw.sum([f"{left}*{second}", *(draw.leaf(SMOOTH, name) for name in rest or [first])])


def _nested(draw: _Drawing) -> str:
    first, *rest = draw.order()
    inner = draw.sum([draw.leaf(SMOOTH, first), *rest[:1]])
    outer = draw.apply(SMOOTH, inner)
    return draw.sum([outer, *(draw.leaf(SMOOTH, name) for name in rest[1:] or [first])])


def _kinked(draw: _Drawing) -> str:
    first, *rest = draw.order()
    bent = draw.apply(KINKED, draw.sum([draw.leaf(SMOOTH, first), *rest[:1]]))
    if len(rest) > 1 and draw.rng.random() < 0.5:
        bent = draw.extreme(bent, draw.scaled(rest[1]))
    return draw.sum([bent, *(draw.leaf(SMOOTH, name) for name in rest[1:] or [first])])


def _deep(draw: _Drawing) -> str:
    first, second, *rest = draw.order()
    inner = draw.apply(SMOOTH, draw.sum([draw.leaf(SMOOTH, first), second]))
    bent = draw.apply(KINKED, draw.sum([inner, *(rest[:1] or [second])]))
    outer = draw.apply(SMOOTH, draw.sum([bent, *(f"{name}*{first}" for name in rest[1:2])]))
    return draw.sum([outer, *(draw.leaf(SMOOTH, name) for name in rest[2:] or [second])])


LEVELS: Mapping[str, tuple[Callable[[_Drawing], str], tuple[int, int]]] = {
    "sums": (_sums, (1, 3)),
    "products": (_products, (2, 3)),
    "nested": (_nested, (2, 4)),
    "kinked": (_kinked, (2, 4)),
    "deep": (_deep, (3, 5)),
}
"""The levels by increasing difficulty: how an expression is drawn, and the fewest and most variables."""


def draw_example(number: int, rng: np.random.Generator) -> Example:
    """Return a random expression. The numbers 0, 1, 2, … go through the levels in turn.

    Examples
    --------
    >>> draw_example(0, np.random.default_rng(1)).level
    'sums'
    """
    level = list(LEVELS)[number % len(LEVELS)]
    drawn, (fewest, most) = LEVELS[level]
    draw = _Drawing(rng, int(rng.integers(fewest, most + 1)))
    return Example(level, drawn(draw), draw.box)
