"""An expression that can be evaluated at points and bounded over boxes.

Subdivision decides whether it is defined and bounded on a box. Interval arithmetic overestimates, so a wide box may
seem to leave a domain though no point of it does. Such boxes are in doubt. They are halved, the widest first. Points of
such a box can prove a violation: the range over a point lies outside the domain, or a continuous quantity that must not
vanish has both signs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnc.errors import DomainError, ExpressionError, InputError
from attnc.functions.function import BOUNDED
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval, halved
from attnc.numerics.limits import spend
from attnc.numerics.rounding import Array
from attnc.targets.expressions.evaluation import evaluate_boxes, evaluate_points, number_text
from attnc.targets.expressions.parsing import MAX_WRITTEN_EXPONENT, TOO_LARGE, parse
from attnc.targets.expressions.tree import Call, Node, Number, Power, Step, Variable, is_constant, schedule, walk

Violations = Literal["raise", "infinite"]
BOXES_PER_CHUNK = 8192
"""Number of boxes evaluated at a time. Temporary arrays then stay in the cache."""
STEP_SECONDS, BOX_SECONDS = 3e-5, 4e-8
"""Counted seconds of a step of the evaluation, and for each box of it; as much again for every partial derivative.
Measured with expressions of 2 to 13 steps and up to 8192 boxes, within a factor of 2."""
BOXES_PER_ROUND = 2048
"""Number of boxes in doubt that are evaluated in each round. Temporary arrays then stay in the cache."""
LEAST_WIDTH = 2.0**-45
"""Smallest width of a box that is halved, as a fraction of the whole box. In smaller boxes rounding decides."""
BOXES_PROBED = 16
"""Number of boxes in doubt that are probed at points in each round. One real violation is enough."""


@dataclass(frozen=True)
class Expression:
    """k functions of d variables. The columns of the points are in the order of `variables`.

    `variables` are in the order of their first appearance in the text. `discontinuous` lists which of sign and floor
    occur.
    """

    text: str
    outputs: tuple[Node, ...]
    variables: tuple[str, ...]
    is_tuple: bool
    discontinuous: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read the text. An ExpressionError names the part that is not allowed, and its position."""
        outputs, variables, is_tuple = parse(text)
        for node in walk(outputs):
            if isinstance(node, Power) and not isinstance(node.exponent, Number) and is_constant(node.exponent):
                _require_small(node.exponent, text)
        called = {node.name for node in walk(outputs) if isinstance(node, Call)}
        jumps = tuple(name for name, function in FUNCTIONS.items() if name in called and not function.is_continuous)
        return cls(text, outputs, variables, is_tuple, jumps)

    def with_variables(self, names: Sequence[str]) -> Expression:
        """Return the same functions with these columns: reordered, or with columns that they do not depend on."""
        used = {step.node.name for step in self.schedule[0] if isinstance(step.node, Variable)}
        missing = sorted(used - set(names))
        if missing or len(set(names)) != len(names):
            problem = f"{', '.join(missing)} is used in {self.text!r}" if missing else "a name occurs twice"
            raise InputError(f"cannot take the variables {', '.join(names)}: {problem}. Name every variable once.")
        return replace(self, variables=tuple(names))

    @cached_property
    def schedule(self) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        """The steps of the evaluation and the numbers of the outputs among them. Equal sub-expressions are one step."""
        return schedule(self.outputs)

    def __call__(self, points: npt.ArrayLike) -> Array:
        """Return the values (batch, k) at points (batch, d), in float64.

        They are NaN or inf only outside the domain.
        """
        points = np.asarray(points, dtype=np.float64)
        self._check_width(points.shape)
        steps, outputs = self.schedule
        values = evaluate_points(steps, {name: points[:, i] for i, name in enumerate(self.variables)})
        result = np.empty((len(points), len(outputs)))
        for column, number in enumerate(outputs):
            result[:, column] = values[number]
        return result

    def ranges(self, box: Interval, *, violations: Violations = "raise") -> Interval:
        """Return intervals (n, k) that contain the values over boxes (n, d): the natural interval extension.

        If an operation may leave its domain, raise DomainError, or return [−∞, ∞] with violations="infinite".
        """
        return self._enclosed(box, violations, gradients=False)[0]

    def ranges_and_gradients(self, box: Interval, *, violations: Violations = "raise") -> tuple[Interval, Interval]:
        """Return ranges (n, k), and gradients G (n, k, d) with f(x) − f(c) ∈ Σ_i G_i·(x_i − c_i) for x, c in a box.

        At kinks G is the hull of both sides. Where the derivative is unbounded, G is infinite on that side.
        """
        return self._enclosed(box, violations, gradients=True)

    def _enclosed(self, box: Interval, mode: Violations, *, gradients: bool) -> tuple[Interval, Interval]:
        self._check_width(box.shape)
        if mode not in ("raise", "infinite"):
            raise InputError(f"violations is 'raise' or 'infinite', not {mode!r}.")
        (steps, outputs), d = self.schedule, len(self.variables) if gradients else 0
        spend(len(steps) * (1 + d) * (STEP_SECONDS + BOX_SECONDS * len(box)))
        lo, hi = np.empty((2, len(box), len(outputs)))
        slope_lo, slope_hi = np.zeros((2, len(box), len(outputs), d))
        for start in range(0, len(box), BOXES_PER_CHUNK):
            rows = slice(start, start + BOXES_PER_CHUNK)
            found = evaluate_boxes(steps, self.variables, box[rows], gradients=gradients)
            for column, number in enumerate(outputs):
                lo[rows, column], hi[rows, column] = found.ranges[number].lo, found.ranges[number].hi
                for i, g in found.gradients[number].items() if gradients else ():
                    slope_lo[rows, column, i], slope_hi[rows, column, i] = g.lo, g.hi
            if found.violations and mode == "raise":
                raise DomainError(found.describe(self.text, *found.first_violation()))
            if found.violations:
                lo[rows][found.broken] = slope_lo[rows][found.broken] = -np.inf
                hi[rows][found.broken] = slope_hi[rows][found.broken] = np.inf
        return Interval(lo, hi), Interval(slope_lo, slope_hi)

    def check_domain(self, box: Sequence[tuple[float, float]], *, budget: int = 20_000) -> None:
        """Prove that every operation is defined and bounded on the box, or raise a DomainError.

        The box has one (lo, hi) for each of `variables`. It is subdivided, widest boxes first, while a violation is in
        doubt. The error states whether the violation is real, or undecided after `budget` sub-boxes.
        """
        self._check_width((1, len(box)))
        ends = np.asarray(box, dtype=np.float64).reshape(len(self.variables), 2)
        if not np.isfinite(ends).all():
            raise InputError(f"the domain of {self.text!r} can be checked on a bounded box only, not on {list(box)}.")
        _check_domain(self, Interval(*ends.T[:, None]), budget)

    def _check_width(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != len(self.variables):
            raise InputError(
                f"{self.text!r} has the variables ({', '.join(self.variables)}), so that points and boxes have the "
                f"shape (n, {len(self.variables)}), not {shape}."
            )


def _check_domain(expression: Expression, whole: Interval, budget: int) -> None:
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
        doubtful = Interval.joined(rest, halves)


def _require_small(exponent: Node, text: str) -> None:
    """Raise ExpressionError if a constant exponent that is no single number, such as 2**60, is too large."""
    size = Expression("", (exponent,), (), False, ()).ranges(Interval.point(np.zeros((1, 0))), violations="infinite")
    if size.mig.min() > MAX_WRITTEN_EXPONENT:
        raise ExpressionError(TOO_LARGE, text)


def _halved(boxes: Interval, scale: Array) -> tuple[Interval, bool]:
    """Return both halves of each box, cut across its widest side, and whether some box is too small to cut."""
    if not boxes.shape[1]:
        return boxes, len(boxes) > 0
    widths = boxes.width / scale
    return halved(boxes, np.argmax(widths, axis=1)), bool((widths.max(axis=1) <= LEAST_WIDTH).any())


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
        # The steps before the first violation are defined on the whole box, so the guard is continuous on it.
        guard = first.domain.guard([at_points.ranges[i] for i in steps[first.step].arguments])
        if (guard.hi < 0).any() and (guard.lo > 0).any():
            raise DomainError(over_box.describe(expression.text, 0, first, first.domain.proof))


def _probes(box: Interval) -> Array:
    """Return the centre, up to 16 corners and the middles of the faces."""
    lo, hi, middle = box.lo[0], box.hi[0], box.mid[0]
    corners = [
        np.where(np.array(corner, bool), hi, lo) for corner in itertools.islice(np.ndindex(*[2] * len(middle)), 16)
    ]
    faces = [np.where(axis, end, middle) for axis in np.eye(len(middle), dtype=bool) for end in (lo, hi)]
    return np.stack([middle, *corners, *faces])
