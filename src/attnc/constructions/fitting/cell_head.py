"""The weights that select a cell of a partition, as queries and keys, wherever these live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.constructions.construction import Estimate
from attnc.constructions.fitting.grid_partition import (
    CELL_OVERHANG,
    CellGrid,
    Counts,
    GridBuilder,
    GridPartition,
    variation_norm,
)
from attnc.constructions.fitting.selection import CellSelection, Positions, bytes_per_anchor, far_weight, score_error
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program, token_shape
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target

CELL_OVERHANG_LP = 2.0**-14
"""CELL_OVERHANG for L_p norms, where the whole jump is lost on a layer of this width about the cells' borders."""
OVERHANGS = (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Values of η, in cells, that are compared for a given β: about a factor of four apart."""


@dataclass(frozen=True, eq=False)
class CellHead:
    """A soft head in the coordinates y = scale·x + offset, whose scores are multiplied by β.

    Query token i < n carries y, 1 and its position; key (j, i) carries L_j, a bias, its position and its value:
    score = β(2L_j·y + bias_j) + M·[same position]. To bias_j is added 2L_j·y over the axes of the second input, if
    any: those are on the side of the keys, and linear in that input.
    """

    target: Target
    dtype: str
    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]
    cells: SoftHead[np.ndarray]  # slopes 2L_j and offsets bias_j; values of all positions, cells first
    beta: float
    positions: Positions

    @property
    def num_keys(self) -> int:
        return self.positions.n * len(self.cells.offsets)

    @property
    def anchors(self) -> Float[np.ndarray, "cells d"]:
        """The L_j: half the slopes, which is exact."""
        return self.cells.slopes / 2

    @property
    def query_axes(self) -> tuple[str, ...]:
        """The variables of the first input."""
        return self.target.box.names[: math.prod(self.target.input_shapes[0])]

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"out.{j}" for j in range(self.target.num_outputs // self.positions.n))

    @property
    def query_channels(self) -> tuple[str, ...]:
        return (*(f"query.{name}" for name in (*self.query_axes, *self.positions.names)), "one")

    @property
    def key_channels(self) -> tuple[str, ...]:
        return (
            *(f"anchor.{name}" for name in self.query_axes),
            "bias",
            *(f"key.{place}" for place in self.positions.names),
            *(f"value.{j}" for j in range(len(self.outputs))),
        )

    def embedding(self, num_tokens: int, channels: tuple[str, ...]) -> AffineBuilder:
        """A map from the first input to tokens, with the queries in the first n."""
        tokens_in, width_in = token_shape(self.target.input_shapes[0])
        builder = AffineBuilder(tokens_in, tuple(f"in.{c}" for c in range(width_in)), num_tokens, channels)
        tokens = np.arange(self.positions.n)
        for axis, name in enumerate(self.query_axes):
            token, column = divmod(axis, width_in)
            builder.link(tokens, f"query.{name}", token, builder.channels_in[column], self.scale[axis])
            builder.set(tokens, f"query.{name}", self.offset[axis])
        for i, place in enumerate(self.positions.names):
            builder.set(i, f"query.{place}", 1.0)
        builder.set(tokens, "one", 1.0)
        return builder

    def place_keys(self, builder: AffineBuilder) -> None:
        """Set the keys in all tokens; axes beyond those of the query are taken from the builder's input."""
        keys, n, axes = np.arange(self.num_keys), self.positions.n, self.query_axes
        bias = self.cells.offsets.copy()
        for axis, L in enumerate(self.anchors.T):
            if axis < len(axes):
                builder.set(keys, f"anchor.{axes[axis]}", np.repeat(L, n))
            else:
                token, column = divmod(axis - len(axes), len(builder.channels_in))
                slope = np.repeat(2 * L * self.scale[axis], n)
                builder.link(keys, "bias", token, builder.channels_in[column], slope)
                bias += 2 * L * self.offset[axis]
        builder.set(keys, "bias", np.repeat(bias, n))
        for i, place in enumerate(self.positions.names):
            builder.set(np.arange(i, self.num_keys, n), f"key.{place}", 1.0)
        for j in range(len(self.outputs)):
            builder.set(keys, f"value.{j}", self.cells.values[:, j])

    def attention(self, query_channels: tuple[str, ...], key_channels: tuple[str, ...]) -> Attention:
        """One head over states with these channels: cross-attention if the two sides differ."""
        named = (*self.query_axes, *self.positions.names)
        # Scores have prefixes, since a variable may have any name.
        queries = {(f"query.{name}", f"by.{name}"): 1.0 for name in named} | {("one", "constant"): 1.0}
        keys = {(f"anchor.{name}", f"by.{name}"): 2 * self.beta for name in self.query_axes}
        keys |= {(f"key.{place}", f"by.{place}"): self.positions.M for place in self.positions.names}
        keys |= {("bias", "constant"): self.beta}
        values = {(f"value.{j}", name): 1.0 for j, name in enumerate(self.outputs)}
        head = Attending(query_channels, key_channels, self.dtype).head(queries, keys, values)
        return Attention("select", (head,), self.outputs, cross=query_channels != key_channels)


def read_first(num_tokens: int, n: int, outputs: Sequence[str], dtype: str) -> Affine:
    """The map that reads the outputs of the first n tokens."""
    return reading("read", num_tokens, outputs, np.arange(n), dict(zip(outputs, outputs, strict=True)), dtype)


def self_attention(head: CellHead) -> Program:
    """One head in which every token is a key, and the first n are queries."""
    embed = head.embedding(head.num_keys, head.query_channels + head.key_channels)
    head.place_keys(embed)
    select = head.attention(embed.channels_out, embed.channels_out)
    read = read_first(head.num_keys, head.positions.n, head.outputs, head.dtype)
    layers = (embed.build("embed", head.dtype), select, read)
    return check(Program(layers, head.target.input_shapes, head.target.output_shape))


class NearestCentres(GridPartition):
    """A grid in which the nearest centre wins: the scores are −β|y − L|², up to a term that all cells share.

    The weights factorise over the axes. Centres farther than ρ from y on some axis get at most `leak`
    (`selection.far_weight`, the union over axes).
    """

    @cached_property
    def selection(self) -> CellSelection:
        delta = _score_error(self.target, self.grid, self.beta, self.positions.margin)
        near = self.positions.n * math.prod(min(count, math.floor(1 + 2 * self.eta) + 1) for count in self.grid.counts)
        return CellSelection(delta, _leak(self.grid, self.beta, self.eta, delta), near)

    @property
    def head(self) -> CellHead:
        """The head with bias = −|L|²."""
        grid = self.grid
        index = np.unravel_index(np.arange(grid.num_cells), grid.counts)
        anchors = np.stack([grid.lattice(axis)[i] for axis, i in enumerate(index)], axis=1)
        cells = SoftHead(2 * anchors, -(anchors**2).sum(axis=1), self.stored_values)
        return CellHead(self.target, grid.dtype, grid.scale, grid.offset, cells, self.beta, self.positions)


def _score_error(target: Target, grid: CellGrid, beta: float, margin: float) -> float:
    """δ of the scores: the sum of 2βL_i·y_i over the axes, −β|L|², and M.

    An axis of the second input is on the side of the keys: its 2L_i(scale·x_i + offset) is multiplied out there, so
    the sizes of both parts count. Four roundings more than usual cover the making of those coefficients.
    """
    reach = grid.radius + 0.5 + grid.query_error
    if len(target.input_shapes) > 1:
        start = math.prod(target.input_shapes[0])
        reach[start:] = (grid.scale * grid.box.magnitude + np.abs(grid.offset))[start:]
    with np.errstate(over="ignore"):
        size = beta * float((2 * grid.radius * reach + grid.radius**2).sum()) + margin
    return score_error(grid.box.d + 6, size, UNIT_ROUNDOFF[grid.dtype])


def _leak(grid: CellGrid, beta: float, eta: float, delta: float) -> float:
    """The weight of all centres farther than ½ + η on some axis: the union over the axes."""
    overhang = float(grid.query_error.max())  # at the ends of the box r may exceed ½ by this much
    if eta <= overhang:
        return 1.0
    return min(1.0, sum(far_weight(beta, 0.5 + eta, count, delta, overhang) for count in grid.counts))


@dataclass(frozen=True, eq=False)
class NearestCentresBuilder(GridBuilder[NearestCentres]):
    """One head that selects the nearest centre of a grid; `make` turns the head into a program."""

    make: Callable[[CellHead], Program]

    def cost(self, counts: Counts) -> tuple[int, int]:
        anchors = self.positions.n * math.prod(counts)
        return anchors, anchors * bytes_per_anchor(self.target)

    def eta(self, grid: CellGrid) -> float:
        """At least twice the error of a score per unit of β, so that a large β always separates."""
        overhang = CELL_OVERHANG if self.request.p == math.inf else CELL_OVERHANG_LP
        return max(overhang, 2 * _score_error(self.target, grid, 1.0, 0.0), 2 * float(grid.query_error.max()))

    def partition(self, grid: CellGrid, values: Float[np.ndarray, "cells outputs"]) -> NearestCentres:
        request, spread = self.request, float(np.ptp(values, axis=0).max())
        if request.beta is None:
            eta = self.eta(grid)
            beta = _sufficient_beta(spread or 1.0, grid, eta, request.eps)
        else:
            beta, eta = request.beta, self._best_eta(grid, request.beta, spread)
        return NearestCentres(self.target, grid, values, beta, eta, self.positions, request.p)

    def program(self, partition: NearestCentres) -> Program:
        return self.make(partition.head)

    def estimate(self) -> Estimate:
        n, target = self.positions.n, self.target
        anchors, outputs = n * math.prod(self.estimated_counts()), target.num_outputs // n
        return Estimate.one_layer(self.name, anchors, target.box.d, outputs, self.request.goal).within(self.request)

    def _best_eta(self, grid: CellGrid, beta: float, spread: float) -> float:
        """For a given β: the η with the smallest variation + leak."""
        best, chosen = math.inf, CELL_OVERHANG
        for eta in OVERHANGS:
            total = _leak(grid, beta, eta, 0.0) * spread
            if total < best and eta <= 2 * max(grid.counts):
                total += variation_norm(self.target, grid, 0.5 + eta, self.request.p).value
                best, chosen = (total, eta) if total < best else (best, chosen)
        return chosen


def _sufficient_beta(spread: float, grid: CellGrid, eta: float, eps: float | None) -> float:
    """A β for which leak·osc is below 0.2 % of eps (or of the variation): leak ≈ e^{−β(2η − 2δ)}, δ ≤ η/2 per β."""
    goal = 0.002 * (eps if eps is not None else spread / max(grid.counts))
    ratio = min(1e300, spread / max(goal, 1e-300))
    beta = max(math.log(max(2.0, 64 * grid.box.d * ratio)) / eta, 4.0)
    return 2.0 ** math.ceil(math.log2(beta))  # a power of two: 2βL and β|L|² are then exact
