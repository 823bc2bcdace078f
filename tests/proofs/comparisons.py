"""Bounds against errors: every engine at many points, and exact arithmetic where a bound is nearly reached.

That |f − y| ≤ bound at a point is decided in float64 with intervals where f's own enclosure is tight enough for it,
which is nearly everywhere; otherwise in Arb. So a comparison that passes is a proof for its point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from flint import arb

from attnc.engines.numpy_engine import NumpyEngine
from attnc.ir.program import Program
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.target import Target
from proofs.exact_programs import exact_output, exact_values
from strategies.reference import precision

Engine = Callable[..., np.ndarray]
BITS = 200
"""Precision of Arb: errors of 1e-50 are far below every bound."""
LEAST_BITS = 64
"""Fewer bits of an exact output than this are too few. Far out on a tail, terms of 1e55 may cancel."""
ONNX_POINTS = 512
"""Points of a call of ONNX Runtime, which holds every intermediate tensor of all points: 1 GB for 2,000 points and 369
keys in two layers."""
MOST_IN_ARB = 60
"""Points that Arb decides for an engine: those where the error is largest. The others are not counted."""
MOST_EXACT = 6
"""Points at which the program itself is evaluated in Arb."""


def torch_engine(program: Program) -> Engine:
    torch = pytest.importorskip("torch")
    from attnc.engines.torch_engine import to_torch

    module = to_torch(program)
    return lambda *inputs: module(*map(torch.as_tensor, inputs)).numpy()


def onnx_engine(program: Program) -> Engine:
    onnxruntime = pytest.importorskip("onnxruntime")
    from attnc.exports.onnx_file import to_model

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    model = to_model(program, {}).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]

    def run(*inputs: np.ndarray) -> np.ndarray:
        blocks = range(0, max(1, len(inputs[0])), ONNX_POINTS)
        given = [
            {n: np.asarray(x, program.dtype)[i : i + ONNX_POINTS] for n, x in zip(names, inputs, strict=True)}
            for i in blocks
        ]
        return np.concatenate([session.run(None, each)[0] for each in given])

    return run


ENGINES: dict[str, Callable[[Program], Engine]] = {
    "reference": lambda program: program,
    "numpy": NumpyEngine,
    "torch": torch_engine,
    "onnxruntime": onnx_engine,
}
"""The engines that a certificate names."""


def engines_of(program: Program, names: Iterable[str] = ("reference", "numpy")) -> dict[str, Engine]:
    return {name: ENGINES[name](program) for name in names}


def exactly(program: Program, point: Sequence[float]) -> list[arb]:
    """The outputs in Arb, with more bits where scores are so large that their differences need them."""
    for bits in (BITS, 16 * BITS):
        with precision(bits):
            y = exact_output(program, point)
        if all(value.is_finite() and value.rel_accuracy_bits() >= LEAST_BITS for value in y):
            break
    return y


def errors_at(engine: Engine, target: Target, points: np.ndarray) -> np.ndarray:
    """The largest error over the outputs at each point, in float64."""
    return np.abs(engine(*target.split(points)).reshape(len(points), -1) - target(points)).max(axis=1)


def worst_error(program: Program, target: ExpressionTarget, bound: float, count: int, seed: int = 0) -> float:
    """The largest error at adversarial points, all of which are within the bound."""
    return Comparisons().check(program, target, bound, adversarial_points(program, target, count, seed))


@dataclass
class Comparisons:
    """How many were made, and how close a bound came to be reached."""

    in_arb: int = 0
    proofs: int = 0
    closest: float = 0.0  # the largest error/bound
    unproved: int = 0  # programs whose bound was ∞
    seen: Counter[str] = field(default_factory=Counter)  # comparisons by each engine

    def check(
        self,
        program: Program,
        target: ExpressionTarget,
        bound: float | np.ndarray,
        points: np.ndarray,
        engines: Mapping[str, Engine] | None = None,
    ) -> float:
        """Raises AssertionError where an error is above the bound; returns the largest error of any engine.

        There is one bound, or one for each point.
        """
        bounds = np.broadcast_to(bound, len(points))
        assert not np.isnan(bounds).any()
        if np.isinf(bounds).any():
            self.unproved += 1
            return np.inf
        self.proofs += 1
        f = target.expression.ranges(Interval.point(points), violations="infinite")
        middle = target.expression(points)
        worst, order = 0.0, np.arange(0)
        for name, engine in (engines_of(program) if engines is None else engines).items():
            y = np.asarray(engine(*target.split(points)), np.float64).reshape(len(points), -1)
            assert np.isfinite(y).all(), f"{name}: not finite, with a bound of {bounds.max()}"
            upper = np.maximum(up(np.abs(f.hi - y)), up(np.abs(y - f.lo))).max(axis=1)
            doubtful = np.flatnonzero(~(upper <= bounds))
            error = np.abs(middle - y).max(axis=1)
            order = np.argsort(-error)
            chosen = doubtful[np.argsort(-error[doubtful])][:MOST_IN_ARB]
            self.seen[name] += len(points) - len(doubtful) + len(chosen)
            for i in chosen:
                self.decide(name, target, bounds[i], points[i], [arb(float(value)) for value in y[i]])
            worst = max(worst, float(error[order[0]]))
            least = np.maximum(np.maximum(y - f.hi, f.lo - y), 0.0).max(axis=1)  # the error is surely as large
            ratios = np.divide(least, bounds, out=np.zeros(len(points)), where=bounds > 0)
            self.closest = max(self.closest, float(ratios.max(initial=0.0)))
        for i in order[:MOST_EXACT]:
            self.seen["exact"] += 1
            self.decide("exact", target, bounds[i], points[i], exactly(program, points[i]))
        return worst

    @property
    def count(self) -> int:
        return self.seen.total()

    def decide(self, name: str, target: ExpressionTarget, bound: float, point: np.ndarray, y: list[arb]) -> None:
        """Raise AssertionError unless |f − y| ≤ bound at the point, in Arb."""
        self.in_arb += 1
        with precision(BITS):
            for j, (exact, value) in enumerate(zip(exact_values(target.expression, point), y, strict=True)):
                error = abs(exact - value)
                assert error <= arb(float(bound)), (
                    f"{name}: |f − y| = {error.str(12)} > {float(bound)!r} at {point.tolist()}, output {j}, of "
                    f"{target.text}"
                )

    def __str__(self) -> str:
        by_name = ", ".join(f"{name} {number:,}" for name, number in self.seen.items())
        return (
            f"{self.count:,} comparisons ({by_name}; {self.in_arb:,} decided in Arb) of {self.proofs} proofs, "
            f"{self.unproved} without a bound, largest error/bound {self.closest:.4f}"
        )


def uphill(engine: Engine, target: ExpressionTarget, points: np.ndarray, seed: int) -> np.ndarray:
    """Points on the way up from the worst of these, in ever shorter steps, some along one axis."""
    rng = np.random.default_rng(seed)
    box, found, step = target.box, [], 0.1

    def worst_of(candidates: np.ndarray) -> np.ndarray:
        return candidates[np.argsort(-errors_at(engine, target, candidates))[:8]]

    best = worst_of(points)
    for _ in range(14):
        moves = rng.normal(size=(len(best), 12, box.d)) * step * box.widths
        moves[:, ::3] *= rng.random((len(best), 4, box.d)) < 1 / box.d
        near = np.concatenate([best, np.clip(best[:, None] + moves, box.lo, box.hi).reshape(-1, box.d)])
        found.append(near)
        best, step = worst_of(near), step * 0.35
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
    return np.concatenate([points, uphill(NumpyEngine(program), target, points, seed)])
