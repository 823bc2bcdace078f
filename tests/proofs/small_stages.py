"""Stages to prove things about: random ones, spectral fits, and their values in Arb and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flint import arb

from attnc.ir.reference import softmax
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.observed import sample_points
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from proofs.exact_programs import softmax_average
from strategies.reference import tree_value

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""Slopes, offsets, values and value slopes."""
VARIABLES = ("x", "y", "z", "t")


def enclosed(mid: Any, radius: float = 0.0) -> Enclosed:
    """Numbers, each known to a relative `radius`."""
    mid = np.array(mid, np.float64)
    return Enclosed(mid, np.abs(mid) * radius)


def stage_of(heads: Sequence[SoftHead], d: int) -> OneStage:
    outputs = heads[0].values.mid.shape[1]
    return OneStage(tuple(heads), enclosed(np.zeros(outputs)), enclosed(np.zeros((outputs, d))))


def head_of(arrays: Arrays, radius: float = 0.0) -> SoftHead:
    """A head whose weights are known to a relative `radius`."""
    return SoftHead(*(None if part is None else enclosed(part, radius) for part in arrays))


def random_arrays(rng: np.random.Generator, kind: str, d: int) -> Arrays:
    """Wide and narrow logits, clusters, Gaussians of any temperature, tensor grids, gates; values of all sizes."""
    p, outputs = int(rng.integers(1, 24)), int(rng.integers(1, 3))
    scale = 10.0 ** rng.uniform(-2, 4)
    slopes, offsets = rng.normal(size=(p, d)) * scale, rng.normal(size=p) * 10.0 ** rng.uniform(-2, 3)
    if kind == "cluster":
        slopes = slopes[:1] + rng.normal(size=(p, d)) * scale * 1e-6 * rng.integers(0, 2, (p, 1))
    if kind in ("gauss", "grid"):
        anchors, beta = rng.uniform(-1.5, 1.5, (p, d)), 10.0 ** rng.uniform(-1, 5)
        if kind == "grid":
            axes = [np.sort(rng.uniform(-1.5, 1.5, int(rng.integers(2, 5)))) for _ in range(d)]
            anchors = rng.permutation(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, d))
            beta = 10.0 ** rng.uniform(-1, 3)
        p = len(anchors)
        slopes, offsets = 2 * beta * anchors, -beta * (anchors**2).sum(axis=1)
        if rng.random() < 0.5:  # as a narrower format, or noise, leaves it
            offsets = np.float32(offsets).astype(float) if rng.random() < 0.5 else offsets + rng.uniform(-0.3, 0.3, p)
    if d > 1 and rng.random() < 0.2:
        slopes[:, 1] = slopes[0, 1]
    spread = rng.uniform(-8, 8, size=(p, 1)) if rng.random() < 0.3 else rng.uniform(-8, 8)
    values = rng.normal(size=(p, outputs)) * 10.0**spread
    gates = rng.normal(size=(p, outputs, d)) * 10.0 ** rng.uniform(-3, 3) if kind == "gate" else None
    return slopes, offsets, values, gates


def random_stage(
    rng: np.random.Generator, d: int, num_outputs: int = 1, *, num_heads: int = 1, gates: bool = False
) -> OneStage:
    """Anchors in clusters, on grids or anywhere, β from 10⁻² to 10⁸, values of mixed sign and size."""
    heads = []
    for _ in range(num_heads):
        p = int(rng.integers(1, 14))
        anchors = rng.uniform(-1.2, 1.2, (p, d))
        if rng.random() < 0.3:
            anchors = np.round(anchors * 3) / 3  # some twice
        if rng.random() < 0.3:
            anchors = anchors[rng.integers(0, p, p)] + rng.normal(size=(p, d)) * 10.0 ** rng.uniform(-8, -2)
        beta = 10 ** rng.uniform(-2, 8)
        offsets = -beta * (anchors**2).sum(axis=1) + rng.normal(size=p) * rng.choice([0.0, 1.0, 0.1 * beta])
        values = rng.normal(size=(p, num_outputs)) * 10.0 ** rng.uniform(-3, 2, (p, num_outputs))
        radius = float(rng.choice([0.0, 1e-16, 1e-12]))
        slopes = rng.normal(size=(p, num_outputs, d)) if gates else None
        heads.append(head_of((2 * beta * anchors, offsets, values, slopes), radius))
    linear = rng.normal(size=(num_outputs, d)) * float(rng.choice([0.0, 1.0]))
    return OneStage(tuple(heads), enclosed(rng.normal(size=num_outputs)), enclosed(linear))


def weights_within(rng: np.random.Generator, head: SoftHead) -> SoftHead:
    """Exact weights that the head may have."""
    parts = (head.slopes, head.offsets, head.values, head.carried)
    return head_of(
        tuple(
            None if part is None else part.mid + rng.uniform(-0.99, 0.99, part.mid.shape) * part.radius
            for part in parts
        )
    )


def head_value(head: SoftHead, x: Sequence[arb], shifts: Sequence[float] | None = None) -> list[arb]:
    """Σ_k softmax_k(a_k·x + c_k + shift_k)(v_k + V_k·x), its numbers as balls."""
    scores = [c + dot(row, x) for row, c in zip(balls(head.slopes), balls(head.offsets), strict=True)]
    if shifts is not None:
        scores = [score + float(by) for score, by in zip(scores, shifts, strict=True)]
    values = balls(head.values)
    if head.carried is not None:
        pairs = zip(values, balls(head.carried), strict=True)
        values = [[v + dot(row, x) for v, row in zip(row_of_v, rows, strict=True)] for row_of_v, rows in pairs]
    return softmax_average(scores, values)


def stage_output(stage: OneStage, point: Sequence[float | arb], shifts: Sequence[Any] | None = None) -> list[arb]:
    """The stage in Arb, its numbers as balls; `shifts` are added to the scores of each head."""
    x = [arb(entry) for entry in point]
    total = [c + dot(row, x) for c, row in zip(balls(stage.constant), balls(stage.linear), strict=True)]
    for number, head in enumerate(stage.heads):
        found = head_value(head, x, None if shifts is None else shifts[number])
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


def exact_errors(
    stage: OneStage, expression: Expression, point: Sequence[float | arb], shifts: Sequence[Any] | None = None
) -> list[arb]:
    """|stage − f| in Arb, for every output."""
    at = {name: arb(x) for name, x in zip(expression.variables, point, strict=True)}
    found = stage_output(stage, point, shifts)
    return [abs(a - tree_value(node, at)) for a, node in zip(found, expression.outputs, strict=True)]


def balls(part: Enclosed) -> Any:
    """Nested lists of balls, in the shape of the numbers."""

    def nested(mid: Any, radius: Any) -> Any:
        if isinstance(mid, float):
            return arb(mid, radius)
        return [nested(*pair) for pair in zip(mid, radius, strict=True)]

    return nested(part.mid.tolist(), part.radius.tolist())


def dot(row: Sequence[arb], x: Sequence[arb]) -> arb:
    return sum((a * t for a, t in zip(row, x, strict=True)), arb(0))


def spectral_stage(text: str, box: list[tuple[float, float]], n: int, *, c=0.3, pad=None, cut=1e-9):
    """Anchors on a lattice that reaches beyond the box, values solved on Chebyshev points: the stage and f."""
    d = len(box)
    expression = Expression.parse(text).with_variables(VARIABLES[:d])
    pad = min(5, max(2, (n - 5) // 2)) if pad is None else pad
    axes, inverses, nodes = [], [], []
    for lo, hi in box:
        h = (hi - lo) / (n - 1 - 2 * pad)
        anchors, beta = lo + (np.arange(n) - pad) * h, c / h**2
        count = max(60, 4 * n)
        x = (lo + hi) / 2 + (hi - lo) / 2 * np.cos((np.arange(count) + 0.5) * np.pi / count)
        axes.append((2 * beta * anchors, -beta * anchors**2))
        nodes.append(x)
        inverses.append(np.linalg.pinv(softmax(np.outer(x, axes[-1][0]) + axes[-1][1]), rcond=cut))
    points = np.stack(np.meshgrid(*nodes, indexing="ij"), axis=-1).reshape(-1, d)
    values = expression(points).reshape(*(len(x) for x in nodes), -1)
    for i, inverse in enumerate(inverses):
        values = np.moveaxis(np.tensordot(inverse, values, axes=(1, i)), 0, i)
    slopes = np.stack(np.meshgrid(*(a for a, _ in axes), indexing="ij"), axis=-1).reshape(-1, d)
    offsets = np.asarray(sum(np.meshgrid(*(b for _, b in axes), indexing="ij"))).ravel()
    head = head_of((slopes, offsets, values.reshape(len(slopes), -1), None))
    return stage_of([head], d), expression


def stage_values(stage: OneStage, points: np.ndarray) -> np.ndarray:
    """In float64, at samples."""
    result = stage.constant.mid + points @ stage.linear.mid.T
    for head in stage.heads:
        weights = softmax(points @ head.slopes.mid.T + head.offsets.mid)
        result = result + weights @ head.values.mid
        if head.carried is not None:
            result = result + np.einsum("bk,koi,bi->bo", weights, head.carried.mid, points)
    return result


def seen_error(stage: OneStage, expression: Expression, box: list[tuple[float, float]], count: int = 4000) -> float:
    """The largest error at random points and on a grid."""
    points = sample_points(Box.parse(box), 2 * count)
    return float(np.abs(stage_values(stage, points) - expression(points)).max())
