"""Where the values of a part lie: its expression in the inputs, over many sub-boxes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.evaluation import evaluate_boxes
from attnc.targets.expression import Expression
from attnc.targets.parts import Combination, Multiply, Part, Source, Unary, substitute
from attnc.targets.tree import Node, Product, Sum, Variable, to_text

MAX_BOXES = 4096


class PartRanges:
    """[lo, hi] of every part over the box, enclosed by interval arithmetic."""

    def __init__(self, box: Box, variables: Sequence[str]) -> None:
        self._variables = tuple(variables)
        self._boxes = sub_boxes(box)
        self._is_centred = False
        self._trees: dict[int, Node] = {}
        self._found: dict[int, tuple[float, float]] = {}
        self._kept: list[Part] = []  # so that identities stay

    def __call__(self, part: Part) -> tuple[float, float]:
        if id(part) not in self._found:
            tree = self.tree(part)
            # The text is for messages only, and may be long.
            expression = Expression("", (tree,), self._variables, False, ())
            ranges = expression.ranges(self._boxes, violations="infinite")
            if self._is_centred:
                ranges = self._centred(expression, ranges)
            self._found[id(part)] = float(ranges.lo.min()), float(ranges.hi.max())
        return self._found[id(part)]

    def require_bounded(self, parts: Sequence[Part]) -> None:
        """By mean value forms from now on, if one of these seems to leave a domain: max(u, v) = u + relu(v − u) may."""
        if not all(math.isfinite(self.size(part)) for part in parts):
            self._is_centred = True
            self._found.clear()

    def _centred(self, expression: Expression, natural: Interval) -> Interval:
        steps, (last,) = expression.schedule
        found = evaluate_boxes(steps, self._variables, self._boxes, gradients=True, centred=True)
        return natural if found.violations else found.ranges[last]

    def size(self, part: Part) -> float:
        return max(map(abs, self(part)))

    def tree(self, part: Part) -> Node:
        """The part as an expression of the inputs."""
        if id(part) not in self._trees:
            self._kept.append(part)
            match part:
                case Source(index):
                    tree: Node = Variable(self._variables[index])
                case Combination(_, _, Unary() as known):
                    tree = self.tree(known)
                case Combination(terms, constant):
                    scaled = [Product((c.tree, self.tree(inner))) for inner, c in terms]
                    tree = Sum((*scaled, constant.tree))
                case Unary(base, inner):
                    tree = substitute(inner, self.tree(base))
                case Multiply(left, right):
                    tree = Product((self.tree(left), self.tree(right)))
            self._trees[id(part)] = tree
        return self._trees[id(part)]

    def describe(self, part: Part) -> str:
        return to_text(self.tree(part))


def sub_boxes(box: Box) -> Interval:
    """Equal parts of the box, at most MAX_BOXES."""
    per_axis = int(MAX_BOXES ** (1 / box.d))
    if per_axis < 2 or math.isinf(float(box.widths.max())):
        return Interval(box.lo[None], box.hi[None])
    ends = [np.linspace(lo, hi, per_axis + 1) for lo, hi in zip(box.lo, box.hi, strict=True)]
    lo = np.stack([e.ravel() for e in np.meshgrid(*[end[:-1] for end in ends], indexing="ij")], axis=1)
    hi = np.stack([e.ravel() for e in np.meshgrid(*[end[1:] for end in ends], indexing="ij")], axis=1)
    return Interval(lo, hi)
