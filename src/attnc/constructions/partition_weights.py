"""The weights that select a cell of a partition, as queries and keys, wherever these live."""

from __future__ import annotations

import math

import numpy as np

from attnc.constructions.partition import Partition
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Affine, Attention, Head
from attnc.ir.program import token_shape


class PartitionWeights:
    """Query token i < n carries y, 1 and its position; key (j, i) carries L_j, a bias, its position and its value.

    score = β(2L_j·y + bias_j) + M·[same position], bias_j = −|L_j|² + 2L_j·y over the axes of the second input, if any:
    those are on the side of the keys, and linear in that input.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition, self.grid, self.positions = partition, partition.grid, partition.positions
        target, names = partition.target, partition.grid.box.names
        self.dtype, self.n = self.grid.dtype, self.positions.n
        self.num_keys = self.n * self.grid.num_cells
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
            builder.link(tokens, f"query.{name}", token, self.inputs[column], self.grid.scale[axis])
            builder.set(tokens, f"query.{name}", self.grid.offset[axis])
        for i, place in enumerate(self.places):
            builder.set(i, f"query.{place}", 1.0)
        builder.set(tokens, "one", 1.0)

    def place_keys(self, builder: AffineBuilder) -> None:
        """Into all tokens; axes beyond those of the query are taken from the builder's input."""
        keys, n, grid = np.arange(self.num_keys), self.n, self.grid
        index = np.unravel_index(np.arange(grid.num_cells), grid.counts)
        bias = np.zeros(grid.num_cells)
        width = len(builder.channels_in)
        for axis in range(grid.box.d):
            L = grid.lattice(axis)[index[axis]]
            bias -= L * L
            if axis < len(self.query_axes):
                builder.set(keys, f"anchor.{self.query_axes[axis]}", np.repeat(L, n))
            else:
                token, column = divmod(axis - len(self.query_axes), width)
                slope = np.repeat(2 * L * grid.scale[axis], n)
                builder.link(keys, "bias", token, builder.channels_in[column], slope)
                bias += 2 * L * grid.offset[axis]
        builder.set(keys, "bias", np.repeat(bias, n))
        for i, place in enumerate(self.places):
            builder.set(np.arange(i, self.num_keys, n), f"key.{place}", 1.0)
        for j in range(self.k):
            builder.set(keys, f"value.{j}", self.partition.stored_values[:, j])

    def attention(
        self, query_channels: tuple[str, ...], key_channels: tuple[str, ...], cross: bool = False
    ) -> Attention:
        """One head over states with these channels."""
        beta, scores = self.partition.beta, (*self.query_axes, "bias", *self.places)
        queries = {(f"query.{name}", name): 1.0 for name in (*self.query_axes, *self.places)} | {("one", "bias"): 1.0}
        keys = {(f"anchor.{name}", name): 2 * beta for name in self.query_axes} | {("bias", "bias"): beta}
        keys |= {(f"key.{place}", place): self.positions.M for place in self.places}
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
