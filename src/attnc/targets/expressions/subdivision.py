"""Decide by subdivision whether an expression is defined and bounded on a box.

Interval arithmetic overestimates, so that a wide box may seem to leave a domain though no point of it does. Boxes in
doubt are halved, the widest first. At points of a box in doubt a violation can be proved: the range over a point lies
outside the domain, or a continuous quantity that must not vanish has both signs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import DomainError
from attnc.functions.function import BOUNDED
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array
from attnc.targets.expressions.evaluation import evaluate_boxes, number_text

if TYPE_CHECKING:
    from attnc.targets.expressions.expression import Expression

BOXES_PER_ROUND = 2048
"""Number of boxes evaluated at a time: the temporaries then stay in the cache."""
LEAST_WIDTH = 2.0**-45
"""In widths of the whole box. Smaller boxes are not halved, since rounding decides there."""
BOXES_PROBED = 16
"""Number of boxes in doubt that are probed at points in each round; one real violation is enough."""


def check_domain(expression: Expression, whole: Interval, budget: int) -> None:
    """Raise a DomainError unless every operation is proved to stay in its domain on the box `whole` (1, d)."""
    steps, names = expression.schedule[0], expression.variables
    scale = np.where(whole.width > 0, whole.width, 1.0)
    doubtful, spent = whole, 0
    while len(doubtful):
        order = np.argsort(-(doubtful.width / scale).max(axis=1, initial=0.0), kind="stable")
        now, rest = doubtful[order[:BOXES_PER_ROUND]], doubtful[order[BOXES_PER_ROUND:]]
        evaluated = evaluate_boxes(steps, names, now, gradients=False, centred=True)
        spent += len(now)
        broken = evaluated.broken
        for row in np.flatnonzero(broken)[:BOXES_PROBED]:
            _raise_if_real(expression, now[row : row + 1])
        halves, stuck = _halved(now[broken], scale)
        if broken.any() and (stuck or spent + len(halves) > budget):
            verdict = f", which {spent} sub-boxes could neither confirm nor refute"
            raise DomainError(evaluated.describe(expression.text, *evaluated.first_violation(), verdict))
        doubtful = Interval(np.concatenate([rest.lo, halves.lo]), np.concatenate([rest.hi, halves.hi]))


def _halved(boxes: Interval, scale: Array) -> tuple[Interval, bool]:
    """Both halves of each box, cut across its widest side; and whether one is too small to be cut."""
    if not boxes.shape[1]:
        return boxes, len(boxes) > 0
    rows, side = np.arange(len(boxes)), np.argmax(boxes.width / scale, axis=1)
    middle = boxes.mid[rows, side]
    stuck = bool(((boxes.width / scale)[rows, side] <= LEAST_WIDTH).any())
    left, right = boxes.hi.copy(), boxes.lo.copy()
    left[rows, side] = right[rows, side] = middle
    return Interval(np.concatenate([boxes.lo, right]), np.concatenate([left, boxes.hi])), stuck


def _raise_if_real(expression: Expression, box: Interval) -> None:
    """Probe one box in doubt at some of its points, and raise if they prove a violation."""
    steps, names, points = expression.schedule[0], expression.variables, _probes(box)
    over_box = evaluate_boxes(steps, names, box, gradients=False)
    at_points = evaluate_boxes(steps, names, Interval.point(points), gradients=False)
    for proved in at_points.violations:
        sure = proved.mask & proved.domain.must_leave(proved.operands)
        if sure.any():
            point = points[int(np.argmax(np.broadcast_to(sure, len(points))))]
            where = ", ".join(f"{name} = {number_text(x)}" for name, x in zip(names, point.tolist(), strict=True))
            # The operands of BOUNDED are the step itself.
            numbers = steps[proved.step].arguments if proved.domain is not BOUNDED else (proved.step,)
            seen = replace(proved, operands=tuple(over_box.ranges[i] for i in numbers))
            verdict = f"; the violation is at {where or 'any point'}"
            raise DomainError(over_box.describe(expression.text, 0, seen, verdict))
    _, first = over_box.first_violation()
    if not expression.discontinuous and first.domain.guard is not None:
        # The steps before the first violation are defined on the whole box, hence the guard is continuous on it.
        guard = first.domain.guard([at_points.ranges[i] for i in steps[first.step].arguments])
        if (guard.hi < 0).any() and (guard.lo > 0).any():
            raise DomainError(over_box.describe(expression.text, 0, first, first.domain.proof))


def _probes(box: Interval) -> Array:
    """The centre, up to 16 corners and the middles of the faces."""
    lo, hi, middle = box.lo[0], box.hi[0], box.mid[0]
    d = len(middle)
    points = [middle]
    for corner in itertools.islice(itertools.product((False, True), repeat=d), 16):
        points.append(np.where(np.array(corner, dtype=bool), hi, lo))
    for i in range(d):
        for end in (lo, hi):
            points.append(np.where(np.arange(d) == i, end, middle))
    return np.array(points).reshape(len(points), d)
