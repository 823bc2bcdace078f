"""One head, one layer: a max-affine partition of the box, with a value per cell (arXiv 2504.19901, Theorem 4.1)."""

from __future__ import annotations

import math

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request, one_input
from attnc.constructions.fitting.adaptive_partition import cell_construction
from attnc.constructions.fitting.cell_head import self_attention
from attnc.targets.target import Target


def max_affine(
    target: Target,
    *,
    eps: float | None = None,
    centres: str = "grid",
    points_per_axis: int | tuple[int, ...] | None = None,
    beta: float | None = None,
    margin: float = 40.0,
    position_channels: bool = True,
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
              With centres="adaptive" cells are small where f varies most: see `AdaptivePartition`.
    Weights.  Token (j, i) of n·G carries L_j, −|L_j|², the position e_i and the value; the first n also carry y, 1 and
              their own position: score = β(2L_j·y − |L_j|²) + M·[same position], so weights ∝ exp(−β|y − L_j|²).
              `Positions` undoes the leak between positions exactly, for every M > 0 (M is `margin`).
              With position_channels=False there are G tokens, the first asks, and the read-out makes the n outputs.
    Proof.    See `GridPartition`.

    Parameters
    ----------
    target : Target
        The function on a finite box: an expression, or Python code with a Lipschitz constant.
    eps : float, optional
        The largest error allowed. Give either this or points_per_axis.
    centres : {"grid", "adaptive"}
        Equal cells, or cells that are small where f varies most. The second needs eps and chooses beta itself.
    points_per_axis : int or tuple of int, optional
        The number of cells on each axis, or one number for all axes.
    beta : float, optional
        The inverse temperature, in units of a cell. By default it is chosen for eps.
    margin : float
        The score bonus M for keys at the position of the query, where the output has several tokens.
    position_channels : bool
        Whether the keys have a channel for each position of the output. Without them one query returns the outputs of
        all positions, and the read-out, a sum of linear maps, writes each to its token.
    norm : float
        The exponent p of the L_p norm in which the error is measured.
    dtype : {"float64", "float32"}
        The arithmetic that the program runs in, and that the bound holds in.
    max_anchors, max_bytes : int
        Limits on the number of (head, key) pairs, and on the bytes of the program and of the arrays for building it.
    progress : callable, optional
        Called with the current step and the fraction of it that is done.

    Returns
    -------
    Built
        The program, and the bound of the theorem for it.

    Raises
    ------
    InputError
        If the target or the parameters do not fit the theorem.
    BoundNotMet
        If the bound cannot be brought to eps within the limits.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("sin(x)", {"x": (-1, 1)})
    >>> built = attnc.constructions.max_affine(target, eps=0.1)
    >>> built.program.num_anchors, built.bound.value <= 0.1
    (11, True)
    """
    request = Request(
        eps, dtype, norm, max_anchors, max_bytes, centres, None, progress, points_per_axis, beta, None, margin,
        position_channels,
    )  # fmt: skip
    return MAX_AFFINE.build(target, request)


def _suits(target: Target, request: Request) -> bool:
    """Accept every function. No other construction takes jumps, and for a coarse eps its few cells may be cheapest."""
    return target.kind == "function" and target.box.is_bounded and len(target.input_shapes) == 1


MAX_AFFINE = cell_construction("max_affine", self_attention, (one_input,), _suits)
