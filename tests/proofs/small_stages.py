"""Stages to prove things about: random ones, spectral fits, and what they compute, in Arb and in float64."""

from __future__ import annotations

import numpy as np
from flint import arb

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.expressions.expression import Expression

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""Slopes, offsets, values and value slopes."""
VARIABLES = ("x", "y", "z", "t")


def exact(values) -> Enclosed:
    mid = np.asarray(values, dtype=np.float64)
    return Enclosed(mid, np.zeros(mid.shape))


def stage_of(heads: list[SoftHead], d: int) -> OneStage:
    outputs = heads[0].values.mid.shape[1]
    return OneStage(tuple(heads), exact(np.zeros(outputs)), exact(np.zeros((outputs, d))))


def head_of(arrays: Arrays) -> SoftHead:
    slopes, offsets, values, gates = arrays
    return SoftHead(exact(slopes), exact(offsets), exact(values), None if gates is None else exact(gates))


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


def enclosed(rng: np.random.Generator, arrays: Arrays, size: float) -> tuple[SoftHead, Arrays]:
    """A head that knows its weights to within a relative `size`, and weights that it may have."""
    parts = [None if part is None else Enclosed(part, np.abs(part) * size) for part in arrays]
    inside = [
        None if part is None else part.mid + rng.uniform(-0.99, 0.99, part.mid.shape) * part.radius for part in parts
    ]
    return SoftHead(*parts), tuple(inside)


def head_value(arrays: Arrays, x: list[arb]) -> list[arb]:
    """Σ_k softmax_k(a_k·x + c_k)(v_k + V_k·x), in balls."""
    slopes, offsets, values, gates = arrays
    scores = [dot(row, x) + arb(c) for row, c in zip(slopes.tolist(), offsets.tolist(), strict=True)]
    top = max(scores, key=lambda score: float(score.mid()))
    weights = [(score - top).exp() for score in scores]
    total = sum(weights[1:], weights[0])
    result = []
    for output in range(values.shape[1]):
        terms = [arb(float(v)) for v in values[:, output]]
        if gates is not None:
            terms = [v + dot(row, x) for v, row in zip(terms, gates[:, output].tolist(), strict=True)]
        result.append(sum((w * v for w, v in zip(weights, terms, strict=True)), arb(0)) / total)
    return result


def dot(row: list[float], x: list[arb]) -> arb:
    return sum((arb(a) * t for a, t in zip(row, x, strict=True)), arb(0))


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


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


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
    lo, hi = np.array(box, dtype=float).T
    per_axis = int(count ** (1 / len(box)))
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, per_axis)] * len(box)), axis=-1).reshape(-1, len(box))
    points = lo + np.concatenate([grid, np.random.default_rng(5).random((count, len(box)))]) * (hi - lo)
    return float(np.abs(stage_values(stage, points) - expression(points)).max())
