"""The observed error: the largest difference seen at a dense sample. It proves nothing, and is never called a bound."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.proofs.leaves.expression_tails import expression_tails
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.kinks import REACH
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_POINTS = 20_000
MAX_WORK = 4 * 10**8
"""Scores that a sample may cost: about two seconds of exponentials."""
OCTAVES, PER_OCTAVE = 44, 8
"""Points ever closer to the ends of an interval: keys may be graded to an end, and errors are then waves in log x."""
FLAT = 1e-3
"""How far from its asymptotes an expression may be where samples of an infinite box end."""
STARTS, ROUNDS = 32, 6
"""From how many of the worst points the error is followed uphill, and how often the steps are halved."""


def sample_points(box: Box, count: int, seed: int = 0) -> Float[np.ndarray, "points d"]:
    """A grid over the box, its corners included, and as many points at random; sorted along the first axis.

    In so many dimensions that a grid of two points an axis is too large, corners at random instead.
    """
    rng = np.random.default_rng(seed)
    if box.d > math.log2(count / 2):
        regular = np.where(rng.random((count // 2, box.d)) < 0.5, box.lo, box.hi)
    else:
        per_axis = int((count / 2) ** (1 / box.d))
        axes = [np.linspace(lo, hi, per_axis) for lo, hi in zip(box.lo, box.hi, strict=True)]
        regular = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    scattered = box.lo + rng.random((max(1, count - len(regular)), box.d)) * box.widths
    points = np.clip(np.concatenate([regular, scattered]), box.lo, box.hi)
    return points[np.argsort(points[:, 0], kind="stable")]


def observed_error(
    evaluate: Callable[[np.ndarray], np.ndarray],
    target: Target,
    work_per_point: int,
    p: float = math.inf,
    seed: int = 0,
) -> float:
    """The error seen at kinks and at a sample as dense as MAX_WORK allows; `evaluate` maps flat points to flat ones.

    For p = ∞ the largest, followed uphill from the worst points; otherwise the L_p norm over the box, by quadrature:
    the mean over one random point in each cell of a regular grid, whose error is of higher order than that of as many
    points at random.
    Where the claim is about finitely many points, all of them are looked at, and none else.
    """
    claimed = target.check_points()
    if claimed is not None:
        return float(np.abs(evaluate(claimed) - target(claimed)).max())
    count = int(min(MAX_POINTS, max(200, MAX_WORK // max(1, work_per_point))))
    box = target.box if target.box.is_bounded else target.box.core(_reach(target))
    points = sample_points(box, count, seed) if p == math.inf else _stratified(box, count, seed)
    if p == math.inf:
        critical = np.concatenate([target.critical_points(), _at_ends(box)])
        points = np.concatenate([points, critical[:: max(1, 2 * len(critical) // count)]])

    def errors_at(points: np.ndarray) -> np.ndarray:
        return np.abs(evaluate(points) - target(points)).max(axis=1)

    errors = errors_at(points)
    worst = float(errors.max())
    if p == math.inf:
        return max(worst, _uphill(errors_at, box, points, errors))
    if not 0 < worst < math.inf:
        return worst
    volume = math.exp(float(np.log(target.box.widths).sum()) / p)
    return worst * float(np.mean((errors / worst) ** p)) ** (1 / p) * volume


def _reach(target: Target) -> float:
    """Of an infinite box: beyond it the target is nearly affine, if that can be known."""
    box = target.box
    if not isinstance(target, ExpressionTarget) or box.d > 1:
        return REACH
    sides = [side for side, end in ((-1, box.lo[0]), (1, box.hi[0])) if np.isinf(end)]
    for reach in (REACH * 2.0**n for n in range(7)):
        core = box.core(reach)
        starts = {-1: -float(core.lo[0]), 1: float(core.hi[0])}
        with contextlib.suppress(InputError):
            tails = [tail for side in sides for tail in expression_tails(target.expression, side, starts[side])]
            if all(tail.error <= FLAT for tail in tails):
                return reach
    return REACH


def _at_ends(box: Box) -> Float[np.ndarray, "points d"]:
    """Of an interval: PER_OCTAVE points in every octave towards each end."""
    if box.d > 1:
        return np.zeros((0, box.d))
    inward = box.widths * 2.0 ** -(1 + np.arange(OCTAVES * PER_OCTAVE)[:, None] / PER_OCTAVE)
    return np.clip(np.concatenate([box.lo + inward, box.hi - inward]), box.lo, box.hi)


def _uphill(errors_at: Callable[[np.ndarray], np.ndarray], box: Box, points: np.ndarray, errors: np.ndarray) -> float:
    """The largest error found by steps at random from the worst points of a sample, ever shorter."""
    rng = np.random.default_rng(1)
    kept = max(1, min(STARTS, len(points) // 64))
    best, found, step = np.clip(points[np.argsort(errors)[-kept:]], box.lo, box.hi), 0.0, len(points) ** (-1 / box.d)
    for _ in range(ROUNDS):
        moved = best[:, None] + step * rng.normal(size=(len(best), 8, box.d)) * box.widths
        moved = np.clip(moved, box.lo, box.hi).reshape(-1, box.d)
        errors = errors_at(moved)
        found, step = max(found, float(errors.max())), step / 2
        best = moved[np.argsort(errors)[-kept:]]
    return found


def _stratified(box: Box, count: int, seed: int) -> Float[np.ndarray, "points d"]:
    per_axis = int(count ** (1 / box.d))
    if per_axis < 2:
        return box.lo + np.random.default_rng(seed).random((count, box.d)) * box.widths
    corners = np.stack(np.meshgrid(*[np.arange(per_axis)] * box.d, indexing="ij"), axis=-1).reshape(-1, box.d)
    shift = np.random.default_rng(seed).random(corners.shape)
    return np.clip(box.lo + (corners + shift) / per_axis * box.widths, box.lo, box.hi)
