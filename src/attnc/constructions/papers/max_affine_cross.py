"""Cross-attention to a max-affine partition: f(X) with a constant memory, or f(X, Y) (arXiv 2504.19901)."""

from __future__ import annotations

import math

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request
from attnc.constructions.fitting.adaptive_partition import cell_construction
from attnc.constructions.fitting.cell_head import CellHead
from attnc.ir.building import AffineBuilder
from attnc.ir.program import Program, token_shape
from attnc.ir.spec import check
from attnc.targets.target import Target


def max_affine_cross(
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
    """One cross-attention head selects a cell. Queries come from X, keys and values from a memory.

    Theorem.  The bound of `max_affine`, for f(X) with a constant memory and for f(X, Y) with a memory made from Y.
    Weights.  Query i of X carries y, 1 and its position. Key (j, i) of the memory carries L_j on the axes of X. Its
              bias is −|L_j|² + 2L_j·y over the axes of Y, which is affine in Y. So the score is β(2L_j·y − |L_j|²)
              over all axes, plus M at the same position.
    Proof.    The scores are those of `max_affine`, so its proof applies.

    Parameters
    ----------
    target : Target
        The function on a finite box: an expression, or Python code with a Lipschitz constant. A sequence target may
        have two inputs.
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
    >>> target = attnc.SequenceTarget(lambda X, Y: X + Y, tokens=(1, 1), width=(1, 1), box=(0, 1), lipschitz=2.0)
    >>> built = attnc.constructions.max_affine_cross(target, eps=0.5)
    >>> built.program([[[0.5]]], [[[0.25]]]).shape, built.bound.value <= 0.5
    ((1, 1, 1), True)
    """
    request = Request(
        eps, dtype, norm, max_anchors, max_bytes, centres, None, progress, points_per_axis, beta, None, margin,
        position_channels,
    )  # fmt: skip
    return MAX_AFFINE_CROSS.build(target, request)


def _program(head: CellHead) -> Program:
    target, n = head.target, head.positions.n
    ask = head.embedding(n, head.query_channels)
    tokens, width = token_shape(target.input_shapes[1]) if len(target.input_shapes) > 1 else (0, 0)
    remember = AffineBuilder(tokens, [f"in.{c}" for c in range(width)], head.num_keys, head.key_channels)
    head.place_keys(remember)
    select = head.attention(head.query_channels, head.key_channels)
    layers = (ask.build("ask", head.dtype), select, head.read(n))
    memory = (remember.build("remember", head.dtype),)
    return check(Program(layers, target.input_shapes, target.output_shape, memory))


def _suits(target: Target, request: Request) -> bool:
    """Accept functions of two sequences, which no other construction takes."""
    return target.kind == "function" and target.box.is_bounded and len(target.input_shapes) > 1


MAX_AFFINE_CROSS = cell_construction("max_affine_cross", _program, (), _suits)
