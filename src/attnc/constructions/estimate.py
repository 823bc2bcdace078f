"""What a construction would cost, before it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from attnc.constructions.built import Built
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.ir.layers import Attention
from attnc.ir.program import Program
from attnc.ir.shapes import key_counts
from attnc.targets.box import Box


@dataclass(frozen=True)
class Wanted:
    """What is asked of a construction."""

    eps: float
    dtype: str = "float64"
    p: float = math.inf
    max_anchors: int = MAX_ANCHORS
    max_bytes: int = MAX_BYTES

    def of_largest_error(self, box: Box) -> Wanted:
        """That of the largest error which is enough for the L_p norm: ‖g‖_p ≤ vol^{1/p}·sup |g|."""
        return replace(self, eps=self.eps / math.prod(width ** (1 / self.p) for width in box.widths), p=math.inf)


@dataclass(frozen=True)
class Estimate:
    """A row of `attnc plan`.

    `error` is what is expected, not a bound. `multiply_adds` are those of the heads for one query: a key costs as many
    as it has numbers. `why_not` says why a construction cannot serve; `build` goes on from what is known already.
    """

    name: str
    anchors: int = 0
    heads: int = 0
    layers: int = 0
    parameters: int = 0
    multiply_adds: int = 0
    error: float | None = None
    why_not: str | None = None
    build: Callable[[], Built] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def one_layer(
        cls,
        name: str,
        anchors: int,
        d: int,
        outputs: int,
        error: float,
        build: Callable[[], Built] | None = None,
    ) -> Estimate:
        """One head over constant keys: d slopes, an offset and the values each."""
        each = d + 1 + outputs
        embedding = 3 * d + 1 + 3 * outputs  # scale and offset of the query, the projections, the read-out
        return cls(name, anchors, 1, 1, anchors * each + embedding, anchors * each, error, build=build)

    @classmethod
    def of_built(cls, built: Built, error: float | None) -> Estimate:
        """The sizes of a program that is there already."""
        program = built.program
        heads, layers = program.num_heads, program.num_attention_layers
        adds = multiply_adds(program)
        return cls(
            built.construction,
            program.num_anchors,
            heads,
            layers,
            program.num_parameters,
            adds,
            error,
            build=lambda: built,
        )


def multiply_adds(program: Program) -> int:
    """Of all heads, for one query: (d_k + d_v) for each key that it meets."""
    heads = [head for layer in program.all_layers if isinstance(layer, Attention) for head in layer.heads]
    widths = [head.W_Q.shape[1] + head.W_V.shape[1] for head in heads]
    return sum(width * count for width, count in zip(widths, key_counts(program), strict=True))
