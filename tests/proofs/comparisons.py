"""Bounds against errors: every engine at many points, and exact arithmetic where a bound is nearly reached.

That |f − y| ≤ bound at a point is decided in float64 with intervals where f's own enclosure is tight enough for it,
which is nearly everywhere; otherwise in Arb. So a comparison that passes is a proof for its point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from flint import arb

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.program import Program
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.expression_target import ExpressionTarget
from proofs.exact_programs import exact_output, exact_values
from strategies.reference import precision

Engine = Callable[[np.ndarray], np.ndarray]
BITS = 200
"""Precision of Arb: errors of 1e-50 are far below every bound."""
MOST_IN_ARB = 60
"""Points that Arb decides for an engine: those where the error is largest. The others are not counted."""
MOST_EXACT = 6
"""Points at which the program itself is evaluated in Arb."""


def engines_of(program: Program, *, torch: bool = False) -> dict[str, Engine]:
    """Flat points to flat outputs, in float64."""
    fast = NumpyEngine(program)
    found: dict[str, Engine] = {"reference": lambda x: program(x), "numpy": lambda x: fast(x)}
    if torch:
        import torch as library

        from attnc.engines.torch_engine import to_torch

        network = to_torch(program)

        def run(x: np.ndarray) -> np.ndarray:
            with library.no_grad():
                return network(library.as_tensor(x, dtype=network.dtype)).numpy()

        found["torch"] = run
    return found


def worst_error(program: Program, target: ExpressionTarget, bound: float, count: int, seed: int = 0) -> float:
    """The largest error at adversarial points, all of which are within the bound."""
    return Comparisons().check(program, target, bound, adversarial_points(program, target, count, seed))


@dataclass
class Comparisons:
    """How many were made, and how close a bound came to be reached."""

    count: int = 0
    in_arb: int = 0
    proofs: int = 0
    closest: float = 0.0  # the largest error/bound
    unproved: int = 0  # programs whose bound was ∞
    seen: dict[str, int] = field(default_factory=dict)

    def check(
        self,
        program: Program,
        target: ExpressionTarget,
        bound: float,
        points: np.ndarray,
        engines: Mapping[str, Engine] | None = None,
    ) -> float:
        """Raises AssertionError where an error is above the bound; returns the largest error of any engine."""
        assert not np.isnan(bound)
        if np.isinf(bound):
            self.unproved += 1
            return np.inf
        self.proofs += 1
        f = target.expression.ranges(Interval.point(points), violations="infinite")
        middle = target.expression(points)
        worst, order = 0.0, np.arange(0)
        for name, engine in (engines_of(program) if engines is None else engines).items():
            y = np.asarray(engine(points), np.float64).reshape(len(points), -1)
            assert np.isfinite(y).all(), f"{name}: not finite, with a bound of {bound}"
            upper = np.maximum(up(np.abs(f.hi - y)), up(np.abs(y - f.lo))).max(axis=1)
            doubtful = np.flatnonzero(~(upper <= bound))
            error = np.abs(middle - y).max(axis=1)
            order = np.argsort(-error)
            chosen = doubtful[np.argsort(-error[doubtful])][:MOST_IN_ARB]
            self._count(name, len(points) - len(doubtful) + len(chosen))
            for i in chosen:
                self._decide(name, target, bound, points[i], [arb(float(value)) for value in y[i]])
            worst = max(worst, float(error[order[0]]))
        for i in order[:MOST_EXACT]:
            self._count("exact", 1)
            with precision(BITS):
                y = exact_output(program, points[i])
            self._decide("exact", target, bound, points[i], y)
        self.closest = max(self.closest, worst / bound if bound else 0.0)
        return worst

    def _count(self, name: str, number: int) -> None:
        self.count += number
        self.seen[name] = self.seen.get(name, 0) + number

    def _decide(self, name: str, target: ExpressionTarget, bound: float, point: np.ndarray, y: list[arb]) -> None:
        self.in_arb += 1
        with precision(BITS):
            for j, (exact, value) in enumerate(zip(exact_values(target.expression, point), y, strict=True)):
                error = abs(exact - value)
                assert error <= arb(bound), (
                    f"{name}: |f − y| = {error.str(12)} > {bound!r} at {point.tolist()}, output {j}, of {target.text}"
                )

    def __str__(self) -> str:
        by_name = ", ".join(f"{name} {number:,}" for name, number in self.seen.items())
        return (
            f"{self.count:,} comparisons ({by_name}; {self.in_arb:,} decided in Arb) of {self.proofs} proofs, "
            f"{self.unproved} without a bound, largest error/bound {self.closest:.4f}"
        )


def uphill(
    errors_at: Callable[[np.ndarray], np.ndarray], target: ExpressionTarget, points: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Points on the way up from the worst of these, in ever shorter steps, some along one axis."""
    rng = np.random.default_rng(seed)
    box, found = target.box, []
    errors = errors_at(points)
    best, step = points[np.argsort(-errors)[:8]], 0.1
    for _ in range(14):
        moves = rng.normal(size=(len(best), 12, box.d)) * step * box.widths
        moves[:, ::3] *= rng.random((len(best), 4, box.d)) < 1 / box.d
        near = np.concatenate([best, np.clip(best[:, None] + moves, box.lo, box.hi).reshape(-1, box.d)])
        found.append(near)
        best, step = near[np.argsort(-errors_at(near))[:8]], step * 0.35
    return np.concatenate(found)


def adversarial_points(
    program: Program, target: ExpressionTarget, count: int, seed: int = 0, borders: np.ndarray | None = None
) -> np.ndarray:
    """At random, at the corners and on the faces, at borders of cells and a float beside them, and uphill from all."""
    rng = np.random.default_rng(seed)
    box = target.box
    points = box.lo + rng.random((count, box.d)) * box.widths
    on_faces = box.lo + rng.random((count // 8, box.d)) * box.widths
    on_faces = np.where(
        rng.random(on_faces.shape) < 0.4, box.lo, np.where(rng.random(on_faces.shape) < 0.4, box.hi, on_faces)
    )
    dyadic = box.lo + rng.integers(0, 65, (count // 8, box.d)) / 64 * box.widths
    parts = [points, on_faces, dyadic, np.array([box.lo, box.hi, (box.lo + box.hi) / 2])]
    if borders is not None and len(borders):
        chosen = borders[rng.integers(0, len(borders), min(len(borders), count // 4))]
        parts += [chosen, np.nextafter(chosen, np.inf), np.nextafter(chosen, -np.inf)]
    points = np.clip(np.concatenate(parts), box.lo, box.hi)
    engine = NumpyEngine(program)

    def errors_at(x: np.ndarray) -> np.ndarray:
        return np.abs(target.expression(x) - engine(x).reshape(len(x), -1)).max(axis=1)

    return np.concatenate([points, uphill(errors_at, target, points, seed)])
