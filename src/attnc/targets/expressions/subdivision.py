"""Decide by subdivision whether an expression is defined and bounded on a box.

Interval arithmetic overestimates, so that a wide box may seem to leave a domain though no point of it does. Boxes in
doubt are halved, the widest first. At points of a box in doubt a violation can be proved: the range over a point lies
outside the domain, or a continuous quantity that must not vanish has both signs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnc.errors import DomainError
from attnc.functions.function import BOUNDED
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array
from attnc.targets.expressions.evaluation import evaluate_boxes
from attnc.targets.expressions.tree import Step
from attnc.targets.expressions.violations import describe, first_violation, number_text, violated

BOXES_PER_ROUND = 2048  # boxes evaluated at a time: the temporaries then stay in the cache
LEAST_WIDTH = 2.0**-45  # in widths of the whole box; smaller boxes are not halved, since rounding decides there
BOXES_PROBED = 16  # boxes in doubt that are probed at points in each round; one real violation is enough


def check_domain(
    text: str, steps: Sequence[Step], names: Sequence[str], whole: Interval, budget: int, *, continuous: bool
) -> None:
    """Raise a DomainError unless every operation is proved to stay in its domain on the box `whole` (1, d)."""
    scale = np.where(whole.width > 0, whole.width, 1.0)
    doubtful, spent = whole, 0
    while len(doubtful):
        order = np.argsort(-(doubtful.width / scale).max(axis=1, initial=0.0), kind="stable")
        now, rest = doubtful[order[:BOXES_PER_ROUND]], doubtful[order[BOXES_PER_ROUND:]]
        evaluated = evaluate_boxes(steps, names, now, gradients=False, centred=True)
        spent += len(now)
        broken = violated(evaluated, len(now))
        for row in np.flatnonzero(broken)[:BOXES_PROBED]:
            _raise_if_real(text, steps, names, now[row : row + 1], continuous)
        halves, stuck = _halved(now[broken], scale)
        if stuck or spent + len(halves) > budget:
            row, violation = first_violation(evaluated, len(now)) if broken.any() else (0, None)
            if violation is not None:
                verdict = f", which {spent} sub-boxes could neither confirm nor refute"
                raise DomainError(describe(text, steps, names, now, row, violation, verdict))
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


def _raise_if_real(text: str, steps: Sequence[Step], names: Sequence[str], box: Interval, continuous: bool) -> None:
    """Probe one box in doubt at some of its points, and raise if they prove a violation."""
    points = _probes(box)
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
            raise DomainError(
                describe(text, steps, names, box, 0, seen, f"; the violation is at {where or 'any point'}")
            )
    first = first_violation(over_box, 1)[1]
    if continuous and first.domain.guard is not None:
        # The steps before the first violation are defined on the whole box, hence the guard is continuous on it.
        guard = first.domain.guard([at_points.ranges[i] for i in steps[first.step].arguments])
        if (guard.hi < 0).any() and (guard.lo > 0).any():
            raise DomainError(describe(text, steps, names, box, 0, first, first.domain.proof))


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
