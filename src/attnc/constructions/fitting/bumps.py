"""Bumps: a first attention layer that indicates, for each coordinate, the grid cell of the input.

In coordinates y in which cells have width 1, axis i has inner edges E_1 … E_{P−1}. Token (i, m) makes the step
T_m = clip((y_i − E_m)/2δ + ½, 0, 1); with T_0 = 1 and T_P = 0 the bumps b_m = T_m − T_{m+1}, m < P, sum to 1.
A softmax over cells v of β·Σ_i b_{v_i} then selects the cell that holds x; `BumpCells` has the proof.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from attnc.constructions.construction import Construction, Estimate, Request, one_input, refuse
from attnc.constructions.fitting.clips import ClipLayer
from attnc.constructions.fitting.grid_partition import CELL_CONDITIONS, CellGrid, Counts, GridBuilder, GridPartition
from attnc.constructions.fitting.selection import CellSelection, num_positions, round_up, score_error
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import token_shape
from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma
from attnc.targets.target import Target

STEP_ANCHORS = (33, 17, 9)
"""Numbers of anchors of a step, tried in order. With 33 its error is 0.062/32 = 0.002. With fewer, the rounding of Y
differs less between heads."""
LEAST_LOG_WIDTH, LEAST_LOG_WIDTH_LP = -6, -13
"""log₂ of the least 2δ, for the largest error and for L_p norms. 2δ = 2⁻⁶ costs 1.6 % of the bound. In L_p a whole jump
can be lost on a layer of this width, so it is thinner."""
GOOD_STEP_ERROR = 1 / 16
"""A good enough step error η: with it β is 1/(1 − 6η) = 1.6 times the β for exact steps."""


@lru_cache(maxsize=64)
def _clip_layer(heads: int | None, num_anchors: int, dtype: str) -> ClipLayer:
    if heads is None:
        return ClipLayer(num_anchors, dtype=dtype)
    num_keys = 2 + max(1 + (heads == 1), math.ceil(num_anchors / heads))
    return ClipLayer(num_keys, None, dtype, heads, sentinels=1)


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a grid by one attention layer, each exact to `eta` for edges moved by at most `shift`.

    Weights.  Token (i, m) carries Y = K(y_i − E_m), K = (q−1)/2δ, which a `ClipLayer` of q anchors clips
              to ±(q−1)/2, so T = out/(q−1) + ½. The layer's keys are repeated until there is one for every
              token. Equal repetition does not change a softmax. So q, and with it the rounding of scores, does not
              grow with the grid.
    Proof.    An error of Y moves the edge by 1/K times the error: `shift`, in units of a cell, for any δ. The rest is
              an error of T: the error of the layer, the different roundings of Y in its heads, and the sums over keys.
              These are in spacings, and T is q−1 spacings wide.
    """

    grid: CellGrid
    clip: ClipLayer
    width: float  # 2δ in units of a cell: a power of two, so that K is exact

    @property
    def delta(self) -> float:
        return self.width / 2

    @property
    def num_steps(self) -> int:
        return sum(self.grid.counts) - self.grid.box.d

    @property
    def repeats(self) -> int:
        return max(1, math.ceil(self.num_steps / self.clip.num_keys))

    @property
    def num_tokens(self) -> int:
        return self.repeats * self.clip.num_keys

    @property
    def num_anchors(self) -> int:
        return self.num_tokens * self.clip.num_heads

    @property
    def gain(self) -> float:
        """T = gain·out + ½."""
        return 1 / (self.clip.num_anchors - 1)

    @cached_property
    def shift(self) -> float:
        """A bound on |computed Y − K(y − E)|/K.

        x is cast, K·scale is made and cast, and one product and one sum follow. K(offset − E), |E| ≤ P/2, and the
        centre of a head, at most K·δ ≤ K, take two sums, a product and casts. Each has fewer than 8 roundings.
        """
        grid, u = self.grid, UNIT_ROUNDOFF[self.grid.dtype]
        size = grid.scale * grid.box.magnitude + np.abs(grid.offset) + np.array(grid.counts) / 2 + 1
        return round_up(gamma(8, u) * float(size.max()))

    @cached_property
    def eta(self) -> float:
        """A bound on |computed T − T| for the moved edge: the layer's error, and 4 roundings of the map to T."""
        clip, u = self.clip, UNIT_ROUNDOFF[self.grid.dtype]
        num_terms = 2 * self.num_tokens + clip.num_heads + 16
        if num_terms * u > 0.5:
            return math.inf  # no bound holds for sums of this length
        sums = gamma(num_terms, u) * 2 * clip.radius
        return round_up(self.gain * (clip.error + clip.leak(self.shift / self.width / self.gain) + sums) + gamma(4, u))

    def tokens(self, axis: int) -> Int[np.ndarray, " inner_edges"]:
        """Return the tokens of the steps of an axis. Edge m is at position m − 1."""
        start = sum(self.grid.counts[:axis]) - axis
        return start + np.arange(self.grid.counts[axis] - 1)

    def bump_parts(self, axis: int) -> tuple[Int[np.ndarray, "bumps two"], Float[np.ndarray, " bumps"]]:
        """Return t and constant of b_m = gain·(out[t_m0] − out[t_m1]) + constant_m. At an end t is −1: no step."""
        tokens = np.concatenate([[-1], self.tokens(axis), [-1]])
        parts = np.stack([tokens[:-1], tokens[1:]], axis=1)
        # b_0 = 1 − T_1 has the constant 1 − ½, and b_{P−1} = T_{P−1} has ½. With one cell both apply: b = 1.
        return parts, 0.5 * (parts < 0).sum(axis=1)

    def layers(self, target: Target) -> tuple[Affine, Attention]:
        """Return the layers from the input to `clip.output` at every token."""
        grid, clip, dtype = self.grid, self.clip, self.grid.dtype
        tokens_in, width_in = token_shape(target.input_shapes[0])
        inputs = [f"in.{c}" for c in range(width_in)]
        embed = AffineBuilder(tokens_in, inputs, self.num_tokens, clip.channels)
        K = (clip.num_anchors - 1) / self.width
        for axis, count in enumerate(grid.counts):
            token, column = divmod(axis, width_in)
            edges = np.arange(1, count) - count / 2
            embed.link(self.tokens(axis), "y", token, inputs[column], K * grid.scale[axis])
            embed.set(self.tokens(axis), "y", K * (grid.offset[axis] - edges))
        keys = AffineBuilder(0, (), clip.num_keys, clip.channels)
        clip.place(keys, np.arange(0))
        for column, once in enumerate(keys.build("keys").constant.dense().T):
            embed.set(np.arange(self.num_tokens), clip.channels[column], np.tile(once, self.repeats))
        embed.set(np.arange(self.num_steps), "one", 1.0)
        return embed.build("embed", dtype), clip.attention("steps")


def choose_steps(grid: CellGrid, request: Request) -> Steps:
    """Return steps with the thinnest transition and the most anchors that have a small enough error.

    If none has, return the steps with the smallest error.
    """
    least = LEAST_LOG_WIDTH if request.p == math.inf else LEAST_LOG_WIDTH_LP
    tried = []
    for log_width in range(least, 0):
        for q in STEP_ANCHORS if request.num_step_anchors is None else (request.num_step_anchors,):
            steps = Steps(grid, _clip_layer(request.heads, q, grid.dtype), 2.0**log_width)
            if steps.eta <= GOOD_STEP_ERROR:
                return steps
            tried.append(steps)
            if request.heads is None:
                return steps  # one head does not depend on the width
    return min(tried, key=lambda steps: steps.eta)


@dataclass(frozen=True, eq=False)
class BumpCells(GridPartition):
    """A grid whose cells v are selected by a softmax of β·Σ_i b_{v_i}, plus M at the same position.

    Theorem.  Let steps be exact to η for edges moved by at most e, and 2δ ≤ 1 − 2e. Then all cells that do not hold x
              when widened to ½ + δ + e have together weight at most
              Σ_i max((P_i−1)·e^{−β(1−4η)}, ½(P_i−2)·e^{−β(½−3η)}), times e^{2δ_s} if scores are off by δ_s.
    Proof.    The weights factorise over the axes. On one axis they are ∝ e^{β·b̃_m}. Here b̃ are the bumps of steps T̃
              that are off by η, and b the bumps of exact steps for the moved edges. Moved edges are ≥ 1 − 2e ≥ 2δ
              apart, so y is in the transition of at most one of them.
              If in none: T_j = 1 up to the cell m of y and 0 beyond, so b_m = 1 and b̃_m ≥ 1 − 2η. The other P−1 bumps
              are 0, and b̃_j ≤ 2η: together they have at most (P−1)e^{−β(1−4η)} times the weight of m.
              If in that of edge m: T_{m−1} = 1 and T_{m+1} = 0, so b̃_{m−1} + b̃_m = T̃_{m−1} − T̃_{m+1} ≥ 1 − 2η.
              By convexity these two weigh at least 2e^{β(½−η)}, and the other P−2 at most e^{2ηβ} each.
              A cell m with b_m > 0 has E_m − δ − e < y < E_{m+1} + δ + e: it holds x when widened to ½ + δ + e.
              There are at most two such cells per axis. T̃_0 = 1 and T̃_P = 0 are exact. Outside the grid the end cell
              has b = 1.
    """

    steps: Steps

    @cached_property
    def selection(self) -> CellSelection:
        steps, counts, beta, eta = self.steps, self.grid.counts, self.beta, self.steps.eta
        delta = _score_error(steps, beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, 2) for count in counts)
        if steps.width + 2 * steps.shift > 1 or 2 * delta >= beta * (0.5 - 3 * eta):
            return CellSelection(delta, 1.0, near)
        sure = [(count - 1) * math.exp(2 * delta - beta * (1 - 4 * eta)) for count in counts]
        torn = [(count - 2) / 2 * math.exp(2 * delta - beta * (0.5 - 3 * eta)) for count in counts]
        leak = sum(max(pair) for pair in zip(sure, torn, strict=True))
        return CellSelection(delta, min(1.0, round_up(leak)), near)

    @property
    def parameters(self) -> tuple[tuple[str, float | int | str], ...]:
        clip = self.steps.clip
        more = (("step_anchors", clip.num_anchors), ("step_width", self.steps.width), ("step_heads", clip.num_heads))
        return (*super().parameters, *more)


def _score_error(steps: Steps, beta: float, margin: float) -> float:
    """Return δ_s, a bound on the error of a score.

    A score is M plus β times a sum over the axes of two steps, or of a step and ½, with |gain·out| ≤ ½ + η. These are
    three terms per axis, and M. Eight more roundings than usual cover making and casting gain and β, and the sums that
    make the bumps.
    """
    d, u = steps.grid.box.d, UNIT_ROUNDOFF[steps.grid.dtype]
    return score_error(3 * d + 9, (1 + 2 * steps.eta) * d * beta + margin, u)


@dataclass(frozen=True, eq=False)
class BumpBuilder(GridBuilder[BumpCells]):
    """The builder of a program of `layers` attention layers that selects the cells of a grid by bumps."""

    layers: int

    def __post_init__(self) -> None:
        refuse(self.name, self.target, self.request, one_input)

    @abc.abstractmethod
    def cost_on(self, steps: Steps) -> tuple[int, int]:
        """Return the anchors and bytes of a program on these steps."""

    def cost(self, counts: Counts) -> tuple[int, int]:
        return self.cost_on(choose_steps(CellGrid(self.target.box, counts, self.request.dtype), self.request))

    def eta(self, grid: CellGrid) -> float:
        steps = choose_steps(grid, self.request)
        return steps.delta + steps.shift

    def partition(self, grid: CellGrid, values: Float[np.ndarray, "cells outputs"]) -> BumpCells:
        steps, request = choose_steps(grid, self.request), self.request
        beta = request.beta if request.beta is not None else _sufficient_beta(values, steps, request)
        eta = steps.delta + steps.shift
        return BumpCells(self.target, grid, values, beta, eta, self.positions, request.p, steps)

    def estimate(self) -> Estimate:
        counts, d, n = self.estimated_counts(), self.target.box.d, num_positions(self.target)
        keys, outputs, steps = n * math.prod(counts), self.target.num_outputs // n, sum(counts) - d
        step_keys = STEP_ANCHORS[0] * max(1, math.ceil(steps / STEP_ANCHORS[0]))  # repeated: each step needs a token
        of_cells = keys * (d + outputs)
        parameters, multiply_adds = of_cells + 6 * step_keys, of_cells + 3 * steps * step_keys
        sizes = keys + step_keys, self.layers, self.layers, parameters, multiply_adds
        found = Estimate(self.name, *sizes, self.request.eps).within(self.request)
        if self.layers == 2 or found.why_not is not None:
            return found
        return replace(found, anchors=step_keys)  # cells are features of a softmax, and count for max_anchors only


def bump_construction(builder: Callable[[Target, Request], BumpBuilder], name: str) -> Construction:
    """Return the construction of a theorem whose cells are selected by bumps."""
    return Construction(
        name,
        lambda target, request: builder(target, request).build(),
        (one_input, *CELL_CONDITIONS),
        estimated=lambda target, request: builder(target, request).estimate(),
        options=frozenset({"heads", "norm", "beta", "points_per_axis"}),
    )


def _sufficient_beta(values: np.ndarray, steps: Steps, request: Request) -> float:
    """Return a β for which the leak costs less than 0.2 % of eps, or of osc/P if no eps is given.

    The leak costs at most leak·(4 osc + 5 max|v|), from `GridPartition.bound` and `average_error`. In L_p it costs
    vol^{1/p} times as much.
    """
    grid, spread = steps.grid, float(np.ptp(values, axis=0).max())
    size = 4 * spread + 5 * float(np.abs(values).max()) or 1.0
    eps = request.eps if request.eps is not None else (spread or size) / max(grid.counts)
    if request.eps is not None and request.p < math.inf:
        eps /= float(grid.box.widths.prod()) ** (1 / request.p)
    gap = max(1 / 64, 0.5 - 3 * steps.eta - 2 * _score_error(steps, 1.0, 0.0))
    beta = max(4.0, math.log(max(2.0, grid.box.d * max(grid.counts) * size / (0.002 * eps))) / gap)
    return 2.0 ** math.ceil(math.log2(beta))  # a power of two: β·½ and β times an incidence are exact
