"""How far off a program is: targets, the largest error at points, and errors in L_p."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import DomainError
from attnc.ir import Affine, Attention, Program
from attnc.proofs.observed import sample_points
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.function_target import SequenceTarget
from attnc.targets.target import Target
from strategies.expressions import expressions


def target_of(text: str, *sides: tuple[float, float]) -> ExpressionTarget:
    parsed = Expression.parse(text)
    return ExpressionTarget(parsed, Box.parse(sides, parsed.variables))


def error_at(program: Program, target: Target, points: np.ndarray) -> float:
    found = NumpyEngine(program)(*target.split(points)).reshape(len(points), -1)
    return float(np.abs(found - target(points)).max())


def reference_error(program: Program, target: Target, points: np.ndarray) -> float:
    """The largest error of the plain reference, which folds nothing."""
    found = program(*target.split(points)).reshape(len(points), -1)
    return float(np.abs(found - target(points)).max())


def lp_error(run: Callable[[np.ndarray], np.ndarray], target: Target, p: float, per_axis: int) -> float:
    """The L_p error by midpoints of a fine grid: exact for steps on borders of its cells, second order elsewhere."""
    box, middles = target.box, (np.arange(per_axis) + 0.5) / per_axis
    axes = box.lo + middles[:, None] * box.widths
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes.T, indexing="ij")], axis=1)
    errors = np.abs(run(points).reshape(len(points), -1) - target(points)).max(axis=1)
    return float((box.widths.prod() * np.mean(errors**p)) ** (1 / p))


def form_error(program: Program, points: np.ndarray) -> float:
    """How far the engine is from the stored matrices multiplied out with a T×T softmax, for one attention layer."""
    embed, select, read = program.layers
    assert (type(embed), type(select), type(read)) == (Affine, Attention, Affine)
    assert not select.residual
    (head,) = select.heads
    worst = 0.0
    for point, engine in zip(points, NumpyEngine(program)(points), strict=True):
        Z = np.einsum("abcd,cd->ab", embed.weight.dense(), point[None, :]) + embed.constant.dense()
        scores = (Z @ head.W_Q) @ (Z @ head.W_K).T
        assert scores.shape == (program.num_anchors,) * 2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        Z = weights / weights.sum(axis=1, keepdims=True) @ (Z @ head.W_V) @ head.W_O
        out = np.einsum("abcd,cd->ab", read.weight.dense(), Z) + read.constant.dense()
        worst = max(worst, float(np.abs(out.ravel() - engine).max()))
    return worst


@st.composite
def random_requests(draw: st.DrawFn, least: float = 0.02, most: float = 0.5) -> tuple[ExpressionTarget, float]:
    """A random continuous expression on a random box, and a share of the spread of its values as eps."""
    parsed = Expression.parse(draw(expressions(("x", "y"))))
    assume(parsed.variables and not parsed.discontinuous)
    sides = [sorted(draw(st.lists(st.floats(-4, 4), min_size=2, max_size=2))) for _ in parsed.variables]
    assume(all(b - a > 1e-3 for a, b in sides))
    try:
        target = ExpressionTarget(parsed, Box.parse(sides, parsed.variables))
    except DomainError:
        assume(False)
    spread = float(np.ptp(target(sample_points(target.box, 500))))
    assume(1e-6 < spread < 1e6)
    return target, draw(st.floats(least, most)) * spread


def random_sequence(n: int, d: int, k: int, seed: int) -> SequenceTarget:
    """tanh(A·X·B) with its Lipschitz constant."""
    rng = np.random.default_rng(seed)
    mix, out = rng.normal(size=(n, n)), rng.normal(size=(d, k))
    lipschitz = float(np.linalg.norm(mix, 2) * np.linalg.norm(out, 2))
    return SequenceTarget(lambda X: np.tanh(mix @ X @ out), n, d, (-1, 1), lipschitz)
