"""Two attention layers: bumps, then a single head that looks up the value of the cell (arXiv 2504.15956)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request
from attnc.constructions.fitting.bumps import BumpBuilder, BumpCells, Steps, bump_construction
from attnc.constructions.fitting.cell_head import read_first
from attnc.constructions.fitting.selection import bytes_per_anchor
from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.targets.target import Target


def two_layer(
    target: Target,
    *,
    eps: float | None = None,
    points_per_axis: int | tuple[int, ...] | None = None,
    beta: float | None = None,
    margin: float = 40.0,
    norm: float = math.inf,
    dtype: str = "float64",
    heads: int | None = None,
    num_step_anchors: int | None = None,
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """Layer 1 makes bumps. Layer 2, a single head, selects a cell of a grid by the bumps and returns its value.

    Theorem.  On a grid of P_1 × … × P_D cells of width 1 in coordinates y = scale·x + offset, with steps of width 2δ
              that are exact to η for edges moved by at most e (rounding), 2δ ≤ 1 − 2e, and ρ = ½ + δ + e:
              |out − f| ≤ max_v sup{|f(x) − f(v)| : |y − L_v|_∞ ≤ ρ} + leak·osc + rounding,
              leak ≤ Σ_i max((P_i−1)e^{−β(1−4η)}, ½(P_i−2)e^{−β(½−3η)}).
              For norm = p the first term is an L_p norm, the values are averages over cells, and f may jump.
    Weights.  Layer 1 (`bumps.Steps`) has one head or `heads` of them: token (i, m) clips (y_i − E_m)/2δ + ½ to [0, 1].
              Then token (v, j) of G·n carries the incidence vector of cell v (D ones among Σ P_i), position e_j and
              value. The first n also carry all bumps of the point and their own position. The query is bumps and
              position, the key β·incidence and M·position. `Positions` undoes the leak between positions.
    Proof.    The score of (v, j) is β·Σ_i b_{v_i}: `BumpCells` bounds the weight of all cells but those that hold x
              when widened to ρ. An average of the values of these cells is off by at most their largest |f(x) − f(v)|,
              whatever their weights. So an error δ_s of the scores only multiplies the leak, by e^{2δ_s}.

    Parameters
    ----------
    target : Target
        The function on a finite box: an expression, or Python code with a Lipschitz constant.
    eps : float, optional
        The largest error allowed. Give either this or points_per_axis.
    points_per_axis : int or tuple of int, optional
        The number of cells on each axis, or one number for all axes.
    beta : float, optional
        The inverse temperature, in units of a cell. By default it is chosen for eps.
    margin : float
        The score bonus M for keys at the position of the query, where the output has several tokens.
    norm : float
        The exponent p of the L_p norm in which the error is measured.
    dtype : {"float64", "float32"}
        The arithmetic that the program runs in, and that the bound holds in.
    heads : int, optional
        The number of heads of the first layer. By default one head without sentinels.
    num_step_anchors : int, optional
        The number of anchors of a step. By default up to 33.
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
    >>> built = attnc.constructions.two_layer(target, eps=0.1)
    >>> built.program.num_attention_layers, built.bound.value <= 0.1
    (2, True)
    """
    request = Request(
        eps, dtype, norm, max_anchors, max_bytes, None, heads, progress, points_per_axis, beta, num_step_anchors, margin
    )
    return TWO_LAYER.build(target, request)


@dataclass(frozen=True, eq=False)
class _TwoLayerBuilder(BumpBuilder):
    name: str = "two_layer"
    layers: int = 2

    def cost_on(self, steps: Steps) -> tuple[int, int]:
        n = self.positions.n
        num_keys, d_k = n * steps.grid.num_cells, sum(steps.grid.counts) + n
        width = 2 * d_k + self.target.num_outputs // n
        # W_Q and W_K are dense, 8 bytes per entry, and folded once; tokens of layer 1 have 8 channels at most. Folding
        # the second layer counts the rows of a matrix with one row for every channel of every token.
        size = 2 * 2 * 8 * width * d_k + 8 * num_keys * width + 8 * 64 * steps.num_tokens
        return steps.num_anchors + num_keys, num_keys * bytes_per_anchor(self.target, self.request) + size

    def program(self, partition: BumpCells) -> Program:
        target, grid, positions = self.target, partition.grid, partition.positions
        features = [
            f"{name}.{m}" for name, count in zip(grid.box.names, grid.counts, strict=True) for m in range(count)
        ]
        outputs = [f"out.{j}" for j in range(target.num_outputs // positions.n)]
        scores = [*features, *positions.names]
        channels = [
            *(f"bump.{feature}" for feature in scores),
            *(f"cell.{feature}" for feature in scores),
            *(f"value.{j}" for j in range(len(outputs))),
        ]
        keys = {(f"cell.{feature}", feature): partition.beta for feature in features}
        keys |= {(f"cell.{place}", place): positions.M for place in positions.names}
        queries = {(f"bump.{name}", name): 1.0 for name in scores}
        values = {(f"value.{j}", name): 1.0 for j, name in enumerate(outputs)}
        head = Attending(channels, channels, grid.dtype).head(queries, keys, values)
        layers = (
            *partition.steps.layers(target),
            _tokens(partition, channels),
            Attention("select", (head,), tuple(outputs)),
            read_first(positions.n * grid.num_cells, positions.n, outputs, grid.dtype),
        )
        return check(Program(layers, target.input_shapes, target.output_shape))


def _tokens(partition: BumpCells, channels: list[str]) -> Affine:
    """Return the map from the steps to the tokens of layer 2."""
    grid, steps, positions = partition.grid, partition.steps, partition.positions
    n, G, step = positions.n, grid.num_cells, steps.clip.output
    builder = AffineBuilder(steps.num_tokens, (step,), n * G, channels)
    read, cells = np.arange(n), np.arange(G).reshape(grid.counts)
    for axis, name in enumerate(grid.box.names):
        for m, ((left, right), constant) in enumerate(zip(*steps.bump_parts(axis), strict=True)):
            bump = f"bump.{name}.{m}"
            for token, gain in ((left, steps.gain), (right, -steps.gain)):
                if token >= 0:
                    builder.link(read, bump, token, step, gain)
            builder.set(read, bump, constant)
            inside = cells.take(m, axis).ravel()
            builder.set((inside[:, None] * n + read).ravel(), f"cell.{name}.{m}", 1.0)
    for i, place in enumerate(positions.names):
        builder.set(i, f"bump.{place}", 1.0)
        builder.set(np.arange(i, n * G, n), f"cell.{place}", 1.0)
    for j in range(partition.stored_values.shape[1]):
        builder.set(np.arange(n * G), f"value.{j}", partition.stored_values[:, j])
    return builder.build("bumps", grid.dtype)


TWO_LAYER = bump_construction(_TwoLayerBuilder, "two_layer")
