"""The weights that select a cell of a partition, as queries and keys, wherever these live."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built, require
from attnc.constructions.construction import Estimate, Request
from attnc.constructions.fitting.grid_partition import GridPartition, estimated_counts, make_partition
from attnc.constructions.fitting.positions import Positions, num_positions
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Affine, Attention, Head
from attnc.ir.program import Program, token_shape
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class CellHead:
    """A soft head in the coordinates y = scale·x + offset, whose scores are multiplied by β.

    Cell j has the score β(2L_j·y + bias_j), and a value for each position: key (j, i) is the one for position i.
    """

    target: Target
    dtype: str
    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]
    cells: SoftHead[np.ndarray]  # slopes 2L_j and offsets bias_j; values of all positions, cells first
    beta: float
    positions: Positions

    @classmethod
    def of_grid(cls, partition: GridPartition) -> CellHead:
        """The head in which the nearest centre of the grid wins: bias = −|L|²."""
        grid = partition.grid
        index = np.unravel_index(np.arange(grid.num_cells), grid.counts)
        anchors = np.stack([grid.lattice(axis)[i] for axis, i in enumerate(index)], axis=1)
        cells = SoftHead(2 * anchors, -(anchors**2).sum(axis=1), partition.stored_values)
        return cls(partition.target, grid.dtype, grid.scale, grid.offset, cells, partition.beta, partition.positions)

    @property
    def anchors(self) -> Float[np.ndarray, "cells d"]:
        """The L_j: half the slopes, which is exact."""
        return self.cells.slopes / 2


def build_on_grid(target: Target, request: Request, name: str, program: Callable[[CellHead], Program]) -> Built:
    """Choose a grid of cells with its bound, and build the program that `program` makes of its cells."""

    def rebuild(counts: tuple[int, ...]) -> Built:
        return build_on_grid(target, replace(request, eps=None, points_per_axis=counts), name, program)

    partition = make_partition(target, request, rebuild)
    made = program(CellHead.of_grid(partition))
    return require(
        Built(made, name, partition.bound, partition.variation.cell, partition.parameters), request.eps, target
    )


def estimate_on_grid(name: str, target: Target, request: Request) -> Estimate:
    """The cost of a grid of cells that one head selects."""
    n = num_positions(target)
    anchors, outputs = n * math.prod(estimated_counts(target, request)), target.num_outputs // n
    return Estimate.one_layer(name, anchors, target.box.d, outputs, request.goal).within(request)


class CellWeights:
    """Query token i < n carries y, 1 and its position; key (j, i) carries L_j, a bias, its position and its value.

    score = β(2L_j·y + bias_j) + M·[same position]; to bias_j is added 2L_j·y over the axes of the second input, if any:
    those are on the side of the keys, and linear in that input.
    """

    def __init__(self, cells: CellHead) -> None:
        self.cells, self.positions, self.dtype = cells, cells.positions, cells.dtype
        target, names = cells.target, cells.target.box.names
        self.n = self.positions.n
        self.num_keys = self.n * len(cells.cells.offsets)
        self.k = target.num_outputs // self.n
        self.tokens_in, self.width_in = token_shape(target.input_shapes[0])
        self.inputs = tuple(f"in.{c}" for c in range(self.width_in))
        self.query_axes = names[: math.prod(target.input_shapes[0])]
        self.places = tuple(f"position.{i}" for i in range(self.n)) if self.n > 1 else ()
        self.outputs = tuple(f"out.{j}" for j in range(self.k))
        self.query_channels = (*(f"query.{name}" for name in (*self.query_axes, *self.places)), "one")
        self.key_channels = (
            *(f"anchor.{name}" for name in self.query_axes),
            "bias",
            *(f"key.{place}" for place in self.places),
            *(f"value.{j}" for j in range(self.k)),
        )

    def place_queries(self, builder: AffineBuilder) -> None:
        """Into the first n tokens, from the first input."""
        tokens = np.arange(self.n)
        for axis, name in enumerate(self.query_axes):
            token, column = divmod(axis, self.width_in)
            builder.link(tokens, f"query.{name}", token, self.inputs[column], self.cells.scale[axis])
            builder.set(tokens, f"query.{name}", self.cells.offset[axis])
        for i, place in enumerate(self.places):
            builder.set(i, f"query.{place}", 1.0)
        builder.set(tokens, "one", 1.0)

    def place_keys(self, builder: AffineBuilder) -> None:
        """Into all tokens; axes beyond those of the query are taken from the builder's input."""
        keys, n, cells = np.arange(self.num_keys), self.n, self.cells
        bias = cells.cells.offsets.copy()
        width = len(builder.channels_in)
        for axis, L in enumerate(cells.anchors.T):
            if axis < len(self.query_axes):
                builder.set(keys, f"anchor.{self.query_axes[axis]}", np.repeat(L, n))
            else:
                token, column = divmod(axis - len(self.query_axes), width)
                slope = np.repeat(2 * L * cells.scale[axis], n)
                builder.link(keys, "bias", token, builder.channels_in[column], slope)
                bias += 2 * L * cells.offset[axis]
        builder.set(keys, "bias", np.repeat(bias, n))
        for i, place in enumerate(self.places):
            builder.set(np.arange(i, self.num_keys, n), f"key.{place}", 1.0)
        for j in range(self.k):
            builder.set(keys, f"value.{j}", cells.cells.values[:, j])

    def attention(
        self, query_channels: tuple[str, ...], key_channels: tuple[str, ...], cross: bool = False
    ) -> Attention:
        """One head over states with these channels."""
        beta, named = self.cells.beta, (*self.query_axes, *self.places)
        scores = (*(f"by.{name}" for name in named), "constant")  # a variable may be called anything
        queries = {(f"query.{name}", f"by.{name}"): 1.0 for name in named} | {("one", "constant"): 1.0}
        keys = {(f"anchor.{name}", f"by.{name}"): 2 * beta for name in self.query_axes} | {("bias", "constant"): beta}
        keys |= {(f"key.{place}", f"by.{place}"): self.positions.M for place in self.places}
        values = {(f"value.{j}", name): 1.0 for j, name in enumerate(self.outputs)}
        head = Head(
            projection(query_channels, scores, queries, self.dtype),
            projection(key_channels, scores, keys, self.dtype),
            projection(key_channels, self.outputs, values, self.dtype),
            np.eye(self.k, dtype=self.dtype),
        )
        return Attention("select", (head,), self.outputs, cross=cross)

    def read(self, num_tokens: int) -> Affine:
        """The first n tokens."""
        builder = AffineBuilder(num_tokens, self.outputs, self.n, self.outputs)
        for name in self.outputs:
            builder.link(np.arange(self.n), name, np.arange(self.n), name)
        return builder.build("read", self.dtype)


def self_attention(cells: CellHead) -> Program:
    """One head in which every token is a key, and the first n are queries."""
    weights = CellWeights(cells)
    embed = AffineBuilder(
        weights.tokens_in, weights.inputs, weights.num_keys, weights.query_channels + weights.key_channels
    )
    weights.place_queries(embed)
    weights.place_keys(embed)
    select = weights.attention(embed.channels_out, embed.channels_out)
    read = weights.read(weights.num_keys)
    layers = (embed.build("embed", weights.dtype), select, read)
    return check(Program(layers, cells.target.input_shapes, cells.target.output_shape))
