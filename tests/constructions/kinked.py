"""Targets of one variable, and a search for the largest error at the places where it is likely to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.target import Target


def unary(text: str, lo: float = -1.0, hi: float = 1.0) -> ExpressionTarget:
    return ExpressionTarget(Expression.parse(text), Box.parse({"x": (lo, hi)}))


def hard_points(lo: float, hi: float, places: Sequence[float]) -> np.ndarray:
    """Everywhere, at random, and at all distances from the places and the ends."""
    rng = np.random.default_rng(3)
    near = (hi - lo) * np.geomspace(1e-17, 1.0, 400)
    around = [place + side * near for place in (*places, lo, hi) for side in (-1.0, 1.0)]
    x = np.concatenate([np.linspace(lo, hi, 2001), rng.uniform(lo, hi, 1000), *around, np.array(places)])
    return np.unique(x[(x >= lo) & (x <= hi)])


def largest_error(error: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> float:
    """On the points, and on ever closer ones about the worst of them."""
    found = error(x)
    for _ in range(3):
        worst = np.argsort(-found)[:12]
        closer = [np.linspace(x[max(0, i - 1)], x[min(len(x) - 1, i + 1)], 40) for i in worst]
        more = np.setdiff1d(np.concatenate(closer), x)
        if not len(more):
            break  # the worst points have no floats between them
        x, found = np.concatenate([x, more]), np.concatenate([found, error(more)])
        order = np.argsort(x)
        x, found = x[order], found[order]
    return float(found.max())


def program_error(built, target: Target, places: Sequence[float]) -> float:
    """Return the error of the program itself, in its own arithmetic."""

    def error(x: np.ndarray) -> np.ndarray:
        points = x[:, None]
        return np.abs(built.program(*target.split(points)).reshape(len(x), -1) - target(points)).max(axis=1)

    return largest_error(error, hard_points(float(target.box.lo[0]), float(target.box.hi[0]), places))


def fitted(construction, target, eps, places=(), dtype="float64", enough=10**9, slack=1e-9):
    """The network, whose error is ≤ eps, whose anchors are at most `enough`, and whose values are at most 10·max|f|."""
    built = construction(target, eps=eps, dtype=dtype)
    assert built.bound is None
    assert str(built.program.dtype) == dtype
    assert program_error(built, target, places) <= eps
    assert built.program.num_anchors <= enough
    embed = built.program.layers[0]
    columns = [i for i, name in enumerate(embed.channels) if name.startswith("value.")]
    scale = np.abs(target(np.linspace(target.box.lo, target.box.hi, 2001))).max(axis=0)
    assert (np.abs(embed.constant.dense()[:, columns]).max(axis=0) <= 10 * scale * (1 + slack)).all()
    return built
