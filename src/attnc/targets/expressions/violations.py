"""The message for an operation that leaves its domain: which one, where, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnc.functions.function import BOUNDED
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Mask
from attnc.targets.expressions.evaluation import Evaluated, Violation
from attnc.targets.expressions.tree import Node, Step, children, to_text

MAX_SHOWN_TEXT = 200  # characters of an expression in a message: two or three lines of a terminal


def violated(evaluated: Evaluated, num_boxes: int) -> Mask:
    """The boxes on which some operation may leave its domain."""
    broken = np.zeros(num_boxes, dtype=bool)
    for violation in evaluated.violations:
        broken |= violation.mask
    return broken


def first_violation(evaluated: Evaluated, num_boxes: int) -> tuple[int, Violation]:
    """The first box concerned, and the first operation that fails on it: those before it are sound there."""
    row = int(np.argmax(violated(evaluated, num_boxes)))
    for violation in evaluated.violations:
        if np.broadcast_to(violation.mask, num_boxes)[row]:
            return row, violation
    raise AssertionError("no box is violated")


def box_text(names: Sequence[str], box: Interval) -> str:
    """x in [0, 1], y in [2, 3]."""
    sides = zip(names, box.lo.tolist(), box.hi.tolist(), strict=True)
    return ", ".join(f"{name} in [{number_text(lo)}, {number_text(hi)}]" for name, lo, hi in sides) or "the empty box"


def number_text(x: float) -> str:
    """The shortest decimal that gives this float64, without a trailing .0."""
    return repr(float(x)).removesuffix(".0")


def blamed(violation: Violation, steps: Sequence[Step]) -> Node:
    """The operand that leaves the domain of its operation; for an overflow, the operation itself."""
    node = steps[violation.step].node
    return node if violation.domain is BOUNDED else children(node)[violation.domain.operand]


def describe(
    text: str,
    steps: Sequence[Step],
    names: Sequence[str],
    boxes: Interval,
    row: int,
    violation: Violation,
    verdict: str = "",
) -> str:
    """What was asked, the operation and range found on box number `row`, why that cannot be, and what to change."""
    operand = _shortened(to_text(blamed(violation, steps)))
    found = violation.operands[0 if violation.domain is BOUNDED else violation.domain.operand]
    lo, hi = (np.broadcast_to(end, len(boxes))[row] for end in (found.lo, found.hi))
    complaint, remedy = violation.domain.complaint.format(operand), violation.domain.remedy.format(operand)
    return (
        f"cannot bound {_shortened(text)}: {complaint} on {box_text(names, boxes[row])}. "
        f"There {operand} was found to lie in [{number_text(lo)}, {number_text(hi)}]{verdict}. {remedy}."
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_TEXT else text[: MAX_SHOWN_TEXT - 3] + "..."
