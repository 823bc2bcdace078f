"""One attention layer and a softmax: bumps, then softmax(βR)·F (arXiv 2504.15956)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import MAX_ANCHORS, MAX_BYTES, Request
from attnc.constructions.fitting.bumps import BumpBuilder, BumpCells, Steps, bump_construction
from attnc.constructions.fitting.selection import Positions, num_positions
from attnc.ir.layers import Affine, Softmax
from attnc.ir.program import Program
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.targets.target import Target


def attention_softmax(
    target: Target,
    *,
    eps: float | None = None,
    points_per_axis: int | tuple[int, ...] | None = None,
    beta: float | None = None,
    norm: float = math.inf,
    dtype: str = "float64",
    heads: int | None = None,
    num_step_anchors: int | None = None,
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """One attention layer makes bumps. A softmax over the features of one token then selects a cell of a grid.

    Theorem.  On a grid of P_1 × … × P_D cells of width 1 in coordinates y = scale·x + offset, with steps of width 2δ
              that are exact to η for edges moved by at most e (rounding), 2δ ≤ 1 − 2e, and ρ = ½ + δ + e:
              |out − f| ≤ max_v sup{|f(x) − f(v)| : |y − L_v|_∞ ≤ ρ} + leak·osc + rounding,
              leak ≤ Σ_i max((P_i−1)e^{−β(1−4η)}, ½(P_i−2)e^{−β(½−3η)}).
              For norm = p the first term is an L_p norm, the values are averages over cells, and f may jump.
    Weights.  Layer 1 (`bumps.Steps`) has one head or `heads` of them: token (i, m) clips (y_i − E_m)/2δ + ½ to [0, 1].
              An affine map makes the G features R_v = β·Σ_i b_{v_i}, b_m = T_m − T_{m+1}, of one token. A softmax over
              these features follows, and then an affine map: Σ_v w_v·f(v), with row i of f(v) at output token i.
    Proof.    As for `two_layer`: the weights are those of `BumpCells`. `selection.average_error` counts the sums of the
              softmax over G features and the sums of the last map.

    The features of the softmax count as anchors for max_anchors, although no query meets them as keys.

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
    >>> built = attnc.constructions.attention_softmax(target, eps=0.1)
    >>> [type(layer).__name__ for layer in built.program.layers]
    ['Affine', 'Attention', 'Affine', 'Softmax', 'Affine']
    """
    request = Request(
        eps, dtype, norm, max_anchors, max_bytes, None, heads, progress, points_per_axis, beta, num_step_anchors
    )
    return ATTENTION_SOFTMAX.build(target, request)


@dataclass(frozen=True, eq=False)
class _SoftmaxBuilder(BumpBuilder):
    name: str = "attention_softmax"
    layers: int = 1

    @property
    def positions(self) -> Positions:
        """One position, since the last map makes all tokens of the output."""
        return Positions(1, self.request.margin)

    def cost_on(self, steps: Steps) -> tuple[int, int]:
        G = steps.grid.num_cells
        # A non-zero number takes 16 bytes (index and value), and is copied, folded and copied again: 64 bytes. A
        # feature also has a name.
        per_cell = 64 * (2 * self.target.box.d + self.target.num_outputs + 2)
        return steps.num_anchors + G, G * per_cell + 8 * 64 * steps.num_tokens

    def program(self, partition: BumpCells) -> Program:
        target, G, dtype = self.target, partition.grid.num_cells, partition.grid.dtype
        names, n = tuple(f"cell.{v}" for v in range(G)), num_positions(target)
        k = target.num_outputs // n
        F = Sparse.from_dense(partition.values.T.reshape(n, k, 1, G).astype(dtype))
        read = Affine("read", F, Sparse.zeros((n, k), dtype), tuple(f"out.{j}" for j in range(k)))
        layers = (*partition.steps.layers(target), _scores(partition, names), Softmax("select", names), read)
        return check(Program(layers, target.input_shapes, target.output_shape))


def _scores(partition: BumpCells, names: tuple[str, ...]) -> Affine:
    """R_v = β·Σ_i b_{v_i} = Σ_i β(gain·out[left] − gain·out[right] + constant), for all cells at once."""
    grid, steps, beta = partition.grid, partition.steps, partition.beta
    cells = np.arange(grid.num_cells)
    constant, found, coefficients = np.zeros(grid.num_cells), [], []
    for axis, where in enumerate(np.unravel_index(cells, grid.counts)):
        parts, constants = steps.bump_parts(axis)
        constant += beta * constants[where]
        for side, sign in enumerate((1, -1)):
            tokens = parts[where, side]
            inner = tokens >= 0
            index = np.zeros((np.count_nonzero(inner), 4), np.int32)
            index[:, 1], index[:, 2] = cells[inner], tokens[inner]
            found.append(index)
            coefficients.append(np.full(len(index), sign * beta * steps.gain))
    weight = Sparse(
        (1, grid.num_cells, steps.num_tokens, 1),
        np.concatenate(found),
        np.concatenate(coefficients).astype(grid.dtype),
    )
    return Affine("cells", weight, Sparse.from_dense(constant[None].astype(grid.dtype)), names)


ATTENTION_SOFTMAX = bump_construction(_SoftmaxBuilder, "attention_softmax")
