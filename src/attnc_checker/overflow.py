"""The check that no number overflows. It includes numbers that no output needs: engines may compute 0·∞, which is nan.

Sizes go through the layers as |W|·sizes + |c|. The average of a head is at most its largest value. A variable counts
with a size of at least 1, so that the products of weights that engines fold do not overflow.
"""

from __future__ import annotations

from flint import arb

from attnc_checker.files import require
from attnc_checker.forms import Terms
from attnc_checker.program import AffineLayer, Matrix, Program, SoftmaxLayer, Stream
from attnc_checker.vectors import most, total

OVERFLOW_LIMITS = {"float64": arb(2) ** 1000, "float32": arb(2) ** 102}
"""A sum of MAX_TOKENS terms below these numbers does not overflow, though every addition may round up."""


def require_finite(program: Program, reach: Terms) -> None:
    """Refuse if a number may overflow. `reach` has the largest absolute value of every variable."""
    _through(program, program.main, reach, _through(program, program.memory, reach, []))


def _through(program: Program, stream: Stream, reach: Terms, memory: list[arb]) -> list[arb]:
    """Return the largest absolute value of every feature of the last state, over all tokens."""
    (tokens, width), first = stream.shapes[0], stream.first
    sizes = [most([arb(1), *(reach[first + t * width + f] for t in range(tokens))]) for f in range(width)]
    _require(program, [arb(0), *sizes])  # points are float64 numbers, which are cast to the dtype
    for (_, width), layer in zip(stream.shapes[1:], stream.layers, strict=True):
        if isinstance(layer, AffineLayer):
            made = [*map(arb, layer.constant.largest())]
            for (token, f), row in layer.rows.items():
                size = total(abs(arb(x)) * sizes[read] for (_, read), x in row)
                made[f] = made[f].max(abs(arb(layer.constant.at(token, f))) + size)
            sizes = made
        elif isinstance(layer, SoftmaxLayer):
            sizes = [arb(1)] * width
        else:
            written = sizes if layer.residual else [arb(0)] * width
            read = memory if layer.cross else sizes
            for head in layer.heads:
                Q, K, V = (_products(W, x) for W, x in ((head.W_Q, sizes), (head.W_K, read), (head.W_V, read)))
                _require(program, [total(q * k for q, k in zip(Q, K, strict=True)), *Q, *K, *V])
                written = [x + y for x, y in zip(written, _products(head.W_O, V), strict=True)]
            sizes = written
        _require(program, [arb(0), *sizes])
    return sizes


def _products(columns: Matrix, sizes: list[arb]) -> list[arb]:
    return [total(abs(arb(x)) * sizes[row] for row, x in column) for column in columns]


def _require(program: Program, sizes: list[arb]) -> None:
    require(most(sizes) < OVERFLOW_LIMITS[program.dtype], f"the network may overflow in {program.dtype} on the box")
