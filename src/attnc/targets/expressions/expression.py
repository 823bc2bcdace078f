"""An expression that can be evaluated at points and bounded over boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnc.errors import DomainError, InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array
from attnc.targets.expressions.evaluation import evaluate_boxes, evaluate_points
from attnc.targets.expressions.parsing import parse
from attnc.targets.expressions.subdivision import check_domain
from attnc.targets.expressions.tree import Call, Node, Step, Variable, schedule, walk

Violations = Literal["raise", "infinite"]
BOXES_PER_CHUNK = 8192
"""Number of boxes evaluated at a time: the temporaries then stay in the cache."""


@dataclass(frozen=True)
class Expression:
    """k functions of d variables, the columns of the points in the order of `variables`.

    `variables` are in order of first appearance in the text; `discontinuous` lists which of sign and floor occur.
    """

    text: str
    outputs: tuple[Node, ...]
    variables: tuple[str, ...]
    is_tuple: bool
    discontinuous: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read the text; an ExpressionError names the part that is not allowed, and its position."""
        outputs, variables, is_tuple = parse(text)
        called = {node.name for node in walk(outputs) if isinstance(node, Call)}
        jumps = tuple(name for name, function in FUNCTIONS.items() if name in called and not function.is_continuous)
        return cls(text, outputs, variables, is_tuple, jumps)

    def with_variables(self, names: Sequence[str]) -> Expression:
        """The same functions with these columns: reordered, or with columns that they do not depend on."""
        used = {step.node.name for step in self.schedule[0] if isinstance(step.node, Variable)}
        missing = sorted(used - set(names))
        if missing or len(set(names)) != len(names):
            problem = f"{', '.join(missing)} is used in {self.text!r}" if missing else "a name occurs twice"
            raise InputError(f"cannot take the variables {', '.join(names)}: {problem}. Name every variable once.")
        return replace(self, variables=tuple(names))

    @cached_property
    def schedule(self) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        """The steps of the evaluation, equal sub-expressions once, and the numbers of the outputs among them."""
        return schedule(self.outputs)

    def __call__(self, points: npt.ArrayLike) -> Array:
        """The values (batch, k) at points (batch, d), in float64; NaN or inf only outside the domain."""
        points = np.asarray(points, dtype=np.float64)
        self._check_width(points.shape)
        steps, outputs = self.schedule
        values = evaluate_points(steps, {name: points[:, i] for i, name in enumerate(self.variables)})
        result = np.empty((len(points), len(outputs)))
        for column, number in enumerate(outputs):
            result[:, column] = values[number]
        return result

    def ranges(self, box: Interval, *, violations: Violations = "raise") -> Interval:
        """Intervals (n, k) that contain the values over boxes (n, d): the natural interval extension.

        Where an operation may leave its domain: a DomainError, or [−∞, ∞] with violations="infinite".
        """
        return self._enclosed(box, violations, gradients=False)[0]

    def ranges_and_gradients(self, box: Interval, *, violations: Violations = "raise") -> tuple[Interval, Interval]:
        """The ranges (n, k), and gradients G (n, k, d) with f(x) − f(c) ∈ Σ_i G_i·(x_i − c_i) for x, c in a box.

        At kinks G is the hull of both sides; where the derivative is unbounded it is infinite on that side.
        """
        return self._enclosed(box, violations, gradients=True)

    def _enclosed(self, box: Interval, mode: Violations, *, gradients: bool) -> tuple[Interval, Interval]:
        self._check_width(box.shape)
        if mode not in ("raise", "infinite"):
            raise InputError(f"violations is 'raise' or 'infinite', not {mode!r}.")
        (steps, outputs), d = self.schedule, len(self.variables) if gradients else 0
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

        The box has one (lo, hi) for each of `variables`. It is subdivided, widest boxes first, while `ranges` cannot
        tell. The error says whether the violation is real or only undecided after `budget` sub-boxes.
        """
        self._check_width((1, len(box)))
        ends = np.asarray(box, dtype=np.float64).reshape(len(self.variables), 2)
        if not np.isfinite(ends).all():
            raise InputError(f"the domain of {self.text!r} can be checked on a bounded box only, not on {list(box)}.")
        check_domain(self, Interval(ends[None, :, 0], ends[None, :, 1]), budget)

    def _check_width(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != len(self.variables):
            raise InputError(
                f"{self.text!r} has the variables ({', '.join(self.variables)}), so that points and boxes have the "
                f"shape (n, {len(self.variables)}), not {shape}."
            )
