"""That nothing overflows: no number that an output does not need, either, as engines may multiply it by 0, and 0·∞ is
nan.

Sizes go through the layers, |W|·sizes + |c|; what a head says is at most its largest value. Every variable counts as 1
at least, so that the products of weights that engines fold do not overflow.
"""

from __future__ import annotations

from typing import Any

from flint import arb

from attnc_checker.files import Refused
from attnc_checker.forms import Terms
from attnc_checker.program import Program
from attnc_checker.vectors import most, total

LARGEST = {"float64": arb(2) ** 1000, "float32": arb(2) ** 104}
"""MAX_TOKENS terms below these do not add up to an overflow."""


def require_finite(program: Program, reach: Terms) -> None:
    """`reach`: how large the variables are."""
    _through(program, "layers", reach, _through(program, "memory", reach, []))


def _through(program: Program, stream: str, reach: Terms, memory: list[Any]) -> list[Any]:
    """How large every feature is in the end, of whatever token."""
    (tokens, width), first = program.shapes[stream][0], program.firsts[stream]
    sizes = [most([arb(1), *(reach[first + t * width + f] for t in range(tokens))]) for f in range(width)]
    _require(program, [arb(0), *sizes])  # of float64 numbers, which are cast to the dtype
    for (_, width), layer in zip(program.shapes[stream][1:], program.layers[stream], strict=True):
        if layer["kind"] == "affine":
            made = {place: abs(arb(x)) for place, x in layer["constant"].items()}
            for place, row in layer["rows"].items():
                made[place] = made.get(place, arb(0)) + total(abs(arb(x)) * sizes[f] for (_, f), x in row)
            sizes = [arb(0)] * width
            for (_, f), x in made.items():
                sizes[f] = sizes[f].max(x)
        elif layer["kind"] == "softmax":
            sizes = [arb(1)] * width
        else:
            said = sizes if layer["residual"] else [arb(0)] * width
            read = memory if layer["cross"] else sizes
            for head in layer["heads"]:
                Q, K, V = (_products(head[W], x) for W, x in (("W_Q", sizes), ("W_K", read), ("W_V", read)))
                _require(program, [total(q * k for q, k in zip(Q, K, strict=True)), *Q, *K, *V])
                said = [x + y for x, y in zip(said, _products(head["W_O"], V), strict=True)]
            sizes = said
        _require(program, [arb(0), *sizes])
    return sizes


def _products(columns: list[list[tuple[int, Any]]], sizes: list[Any]) -> list[Any]:
    return [total(abs(arb(x)) * sizes[row] for row, x in column) for column in columns]


def _require(program: Program, sizes: list[Any]) -> None:
    if not most(sizes) < LARGEST[program.dtype]:
        raise Refused(f"the network may overflow in {program.dtype} on the box")
