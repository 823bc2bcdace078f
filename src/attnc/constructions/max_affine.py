"""One head, one layer: a max-affine partition of the box, with a value per cell (arXiv 2504.19901, Theorem 4.1)."""

from __future__ import annotations

import math

from attnc.constructions.built import Built, Progress
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.constructions.partition.adaptive import build_adaptive, check_centres
from attnc.constructions.partition.request import Request
from attnc.constructions.partition.weights import build_on_grid, self_attention
from attnc.errors import InputError
from attnc.targets.target import Target


def max_affine(
    target: Target,
    *,
    eps: float | None = None,
    centres: str = "grid",
    points_per_axis: int | tuple[int, ...] | None = None,
    beta: float | None = None,
    margin: float = 40.0,
    norm: float = math.inf,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One self-attention head selects the nearest of G centres and returns the target's value there.

    Theorem.  In coordinates y = scale·x + offset in which cells have width 1, with centres L_j and ρ = ½ + η:
              |out − f| ≤ max_j sup{|f(x) − f(v_j)| : |y − L_j|_∞ ≤ ρ} + leak(β, η)·osc + rounding, for every η > 0.
              For norm = p the first term is an L_p norm, the values are averages over cells, and f may jump.
              With centres="adaptive" cells are small where f varies most: see `partition.of_leaves`.
    Weights.  Token (j, i) of n·G carries L_j, −|L_j|², the position e_i and the value; the first n also carry y, 1 and
              their own position: score = β(2L_j·y − |L_j|²) + M·[same position], so weights ∝ exp(−β|y − L_j|²).
              `Positions` undoes the leak between positions exactly, for every M > 0 (M is `margin`).
    Proof.    See `Partition`.
    """
    if len(target.input_shapes) > 1:
        raise InputError("max_affine takes one input; for f(X, Y) use construction='max_affine_cross'")
    check_centres(centres)
    request = Request(eps, points_per_axis, beta, margin, norm, dtype, max_anchors, max_bytes, progress)
    build = build_adaptive if centres == "adaptive" else build_on_grid
    return build(target, request, "max_affine", self_attention)
