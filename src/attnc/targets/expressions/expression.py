"""An expression that can be evaluated at points and bounded over boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnc.errors import DomainError, InputError
from attnc.functions.registry import FUNCTIONS
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import Array
from attnc.targets.expressions.evaluation import Evaluated, evaluate_boxes, evaluate_points
from attnc.targets.expressions.parsing import parse
from attnc.targets.expressions.subdivision import check_domain
from attnc.targets.expressions.tree import Call, Node, Step, Variable, schedule, walk
from attnc.targets.expressions.violations import describe, first_violation, violated

Violations = Literal["raise", "infinite"]
BOXES_PER_CHUNK = 8192  # boxes evaluated at a time: the temporaries then stay in the cache


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
        parsed = parse(text)
        called = {node.name for node in walk(parsed.outputs) if isinstance(node, Call)}
        jumps = tuple(name for name, function in FUNCTIONS.items() if name in called and not function.is_continuous)
        return cls(text, parsed.outputs, parsed.variables, parsed.is_tuple, jumps)

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
        self._check_width(box.shape)
        lo, hi = np.empty((2, len(box), len(self.outputs)))
        for rows, evaluated in self._chunks(box, violations, gradients=False):
            self._store_ranges(evaluated, lo[rows], hi[rows])
        return Interval(lo, hi)

    def ranges_and_gradients(self, box: Interval, *, violations: Violations = "raise") -> tuple[Interval, Interval]:
        """The ranges (n, k), and gradients G (n, k, d) with f(x) − f(c) ∈ Σ_i G_i·(x_i − c_i) for x, c in a box.

        At kinks G is the hull of both sides; where the derivative is unbounded it is infinite on that side.
        """
        self._check_width(box.shape)
        n, k, d = len(box), len(self.outputs), len(self.variables)
        lo, hi = np.empty((2, n, k))
        slope_lo, slope_hi = np.zeros((2, n, k, d))
        for rows, evaluated in self._chunks(box, violations, gradients=True):
            self._store_ranges(evaluated, lo[rows], hi[rows])
            for column, number in enumerate(self.schedule[1]):
                for i, g in evaluated.gradients[number].items():
                    slope_lo[rows, column, i], slope_hi[rows, column, i] = g.lo, g.hi
            if evaluated.violations:
                broken = violated(evaluated, rows.stop - rows.start)
                slope_lo[rows][broken], slope_hi[rows][broken] = -np.inf, np.inf
        return Interval(lo, hi), Interval(slope_lo, slope_hi)

    def check_domain(
        self, box: Mapping[str, tuple[float, float]] | Sequence[tuple[float, float]], *, budget: int = 20_000
    ) -> None:
        """Prove that every operation is defined and bounded on the box, or raise a DomainError.

        Subdivides, widest boxes first, while `ranges` cannot tell; the error says whether the violation is real or
        only undecided after `budget` sub-boxes. A sequence has the order of `variables`.
        """
        if isinstance(box, Mapping):
            missing = [name for name in self.variables if name not in box]
            if missing:
                raise InputError(f"the box of {self.text!r} lacks {', '.join(missing)}. Give each variable (lo, hi).")
            box = [box[name] for name in self.variables]
        self._check_width((1, len(box)))
        ends = np.asarray(box, dtype=np.float64).reshape(len(self.variables), 2)
        if not np.isfinite(ends).all():
            raise InputError(f"the domain of {self.text!r} can be checked on a bounded box only, not on {list(box)}.")
        whole = Interval(ends[None, :, 0], ends[None, :, 1])
        check_domain(self.text, self.schedule[0], self.variables, whole, budget, continuous=not self.discontinuous)

    def _chunks(self, box: Interval, mode: Violations, *, gradients: bool) -> Iterator[tuple[slice, Evaluated]]:
        if mode not in ("raise", "infinite"):
            raise InputError(f"violations is 'raise' or 'infinite', not {mode!r}.")
        steps = self.schedule[0]
        for start in range(0, len(box), BOXES_PER_CHUNK):
            part = box[start : start + BOXES_PER_CHUNK]
            evaluated = evaluate_boxes(steps, self.variables, part, gradients=gradients)
            if evaluated.violations and mode == "raise":
                row, violation = first_violation(evaluated, len(part))
                raise DomainError(describe(self.text, steps, self.variables, part, row, violation))
            yield slice(start, start + len(part)), evaluated

    def _store_ranges(self, evaluated: Evaluated, lo: Array, hi: Array) -> None:
        for column, number in enumerate(self.schedule[1]):
            lo[:, column], hi[:, column] = evaluated.ranges[number].lo, evaluated.ranges[number].hi
        if evaluated.violations:
            broken = violated(evaluated, len(lo))
            lo[broken], hi[broken] = -np.inf, np.inf

    def _check_width(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != len(self.variables):
            raise InputError(
                f"{self.text!r} has the variables ({', '.join(self.variables)}), so that points and boxes have the "
                f"shape (n, {len(self.variables)}), not {shape}."
            )
