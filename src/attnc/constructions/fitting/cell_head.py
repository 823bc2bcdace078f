"""One head over cells as a program: the channels of queries and keys, the projections, and the read-out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnc.constructions.fitting.selection import Positions, num_positions
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import Affine, Attention
from attnc.ir.program import Program, token_shape
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.arrays import Float
from attnc.targets.target import Target


@dataclass(frozen=True, eq=False)
class CellHead:
    """A soft head in the coordinates y = scale·x + offset, whose scores are multiplied by β.

    Query token i < n carries y, 1 and its position. Key (j, i) carries L_j, a bias, its position and its value:
    score = β(2L_j·y + bias_j) + M·[same position]. If there is a second input, 2L_j·y over its axes is added to bias_j:
    these axes are on the side of the keys, and the term is linear in that input. If `positions` is one and the target
    has more, one query returns the outputs of all positions side by side, and `read` writes each to its token.
    """

    target: Target
    dtype: str
    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]
    cells: SoftHead[np.ndarray]  # slopes 2L_j, offsets bias_j, values of all positions, cells first; carries x, not y
    beta: float
    positions: Positions

    @property
    def num_keys(self) -> int:
        return self.positions.n * len(self.cells.offsets)

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
        """Return a map from the first input to tokens, with the queries in the first n."""
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
        """Set the keys in all tokens. Axes of the second input are read from the builder's input."""
        keys, n, axes = np.arange(self.num_keys), self.positions.n, self.query_axes
        bias = self.cells.offsets.copy()
        for axis, L in enumerate(self.cells.slopes.T / 2):
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
        if self.cells.carried is not None:
            for j, axis in itertools.product(range(len(self.outputs)), range(len(axes))):
                token, column = divmod(axis, len(builder.channels_in))
                coefficients = self.cells.carried[:, j, axis]
                builder.link(keys, f"value.{j}", token, builder.channels_in[column], coefficients)

    def attention(self, query_channels: tuple[str, ...], key_channels: tuple[str, ...]) -> Attention:
        """Return one head over states with these channels. It is cross-attention if the two sides differ."""
        named = (*self.query_axes, *self.positions.names)
        # Scores have prefixes, since a variable may have any name.
        queries = {(f"query.{name}", f"by.{name}"): 1.0 for name in named} | {("one", "constant"): 1.0}
        keys = {(f"anchor.{name}", f"by.{name}"): 2 * self.beta for name in self.query_axes}
        keys |= {(f"key.{place}", f"by.{place}"): self.positions.M for place in self.positions.names}
        keys |= {("bias", "constant"): self.beta}
        values = {(f"value.{j}", name): 1.0 for j, name in enumerate(self.outputs)}
        head = Attending(query_channels, key_channels, self.dtype).head(queries, keys, values)
        return Attention("select", (head,), self.outputs, cross=query_channels != key_channels)

    def read(self, num_tokens: int) -> Affine:
        """Return the map that reads the output from the queries, the first of `num_tokens` tokens."""
        n = num_positions(self.target)
        if n == self.positions.n:
            return read_first(num_tokens, n, self.outputs, self.dtype)
        per_position = self.outputs[: len(self.outputs) // n]
        builder = AffineBuilder(num_tokens, self.outputs, n, per_position)
        for number, name in enumerate(self.outputs):
            token, column = divmod(number, len(per_position))
            builder.link(token, per_position[column], 0, name)
        return builder.build("read", self.dtype)


def read_first(num_tokens: int, n: int, outputs: Sequence[str], dtype: str) -> Affine:
    """Return the map that reads the outputs of the first n tokens."""
    return reading("read", num_tokens, outputs, np.arange(n), dict(zip(outputs, outputs, strict=True)), dtype)


def self_attention(head: CellHead) -> Program:
    """Return the program of one head in which every token is a key and the first n are queries."""
    embed = head.embedding(head.num_keys, head.query_channels + head.key_channels)
    head.place_keys(embed)
    select = head.attention(embed.channels_out, embed.channels_out)
    layers = (embed.build("embed", head.dtype), select, head.read(head.num_keys))
    return check(Program(layers, head.target.input_shapes, head.target.output_shape))
