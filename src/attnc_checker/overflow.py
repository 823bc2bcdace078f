"""The check that no number overflows. It includes numbers that no output needs: engines may compute 0·∞, which is nan.

Sizes go through the layers as |W|·sizes + |c|. The average of a head is at most its largest value. A variable counts
with a size of at least 1, so that the products of weights that engines fold do not overflow. An entry that attention
wrote is a variable of later layers.

Slopes.  Tangents go forwards as |W|·tangents, and cotangents backwards as |W|ᵀ·cotangents, through every matrix of a
head by itself. Scores have tangents of at most S = |Q′|·|K| + |Q|·|K′|, so averages have 4 S·|V| + 2 |V′|, with centred
factors. Backwards, weights have cotangents of at most P = |ō|·|V|, so queries have 4 P·|K|, keys 4 P·|Q| and values
2 |ō| for each query. Before every layer both count as at least 1, as products that engines fold may begin there. Let F
and B be the largest tangent and the largest cotangent at any place. If both are far from overflow, no engine overflows
in any order. A product that underflows is off by at most the smallest normal number. That moves a slope by at most F·B
times as much: by the tangents of what comes before it, and by the cotangents of what comes after it. With N the length
of all sums in all layers together, a point has less than N³ products.
"""

from __future__ import annotations

import math

from flint import arb

from attnc_checker.files import require
from attnc_checker.forms import SMALLEST, Terms
from attnc_checker.program import AffineLayer, AttentionLayer, Layer, Matrix, Program, SoftmaxLayer, Stream
from attnc_checker.vectors import most, total

OVERFLOW_LIMITS = {"float64": arb(2) ** 1000, "float32": arb(2) ** 102}
"""A sum of MAX_TOKENS terms below these numbers does not overflow, though every addition may round up."""
CENTRED, GATED = arb(4.25), arb(2.125)
"""Largest Σ |d_k| in units of max |v_k|, and largest Σ p_k |V_k − E[V]| in units of max |V_k|, for slopes that may be
centred. Both have room for computed weights, which add up to at most 1 + 2^−10."""
FURTHER = 64
"""Roundings of a product in a layer besides those of sums."""

Sizes = list[arb]
"""A number for every feature, the largest one over all tokens."""


def require_finite(program: Program, reach: Terms) -> None:
    """Refuse if a number may overflow. `reach` has the largest absolute value of every variable."""
    memory = _through(program, program.memory, reach, [])
    _through(program, program.main, reach, memory[-1])


def num_roundings(program: Program) -> int:
    """Return the largest number of roundings of a product along a path, for any order of products and sums."""
    found = 0
    for stream in (program.main, program.memory):
        for number, layer in enumerate(stream.layers):
            before, after = stream.shapes[number], stream.shapes[number + 1]
            found += math.prod(before) + math.prod(after) + FURTHER
            if not isinstance(layer, AffineLayer):
                found += 2 * before[0]
            if isinstance(layer, AttentionLayer):
                found += 2 * (program.memory.shapes[-1][0] if layer.cross else 0)
                found += sum(len(head.W_Q) + len(head.W_V) + 1 for head in layer.heads)
    return found


def lost(program: Program, reach: Terms) -> arb:
    """Bound the effect of underflow on a slope, N³ times the smallest number times F·B.

    Refuse if a product in a gradient may overflow. `reach` has the largest absolute value of every variable.
    """
    of_memory = _through(program, program.memory, reach, [])
    of_main = _through(program, program.main, reach, of_memory[-1])
    moved, memory = _tangents(program.memory, of_memory, [], [])
    tangents, _ = _tangents(program.main, of_main, of_memory[-1], memory)
    cotangents, memory = _cotangents(program.main, of_main, of_memory[-1], [arb(1)] * program.main.shapes[-1][1])
    moved_back, _ = _cotangents(program.memory, of_memory, [], memory)
    F, B = moved.max(tangents), moved_back.max(cotangents)
    require(F.max(B) < OVERFLOW_LIMITS[program.dtype], "a product in the gradient may overflow")
    return num_roundings(program) ** 3 * SMALLEST[program.dtype] * F * B


def _through(program: Program, stream: Stream, reach: Terms, memory: Sizes) -> list[Sizes]:
    """Return the largest absolute values before every layer of a stream, and after the last one."""
    (tokens, width), first = stream.shapes[0], stream.first
    sizes = [most([arb(1), *(reach[first + t * width + f] for t in range(tokens))]) for f in range(width)]
    _require(program, [arb(0), *sizes])  # points are float64 numbers, which are cast to the dtype
    found = [sizes]
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
                _require(program, [_inner(Q, K), *Q, *K, *V])
                written = _sum(written, _products(head.W_O, V))
            sizes = _at_least_one(written)
        _require(program, [arb(0), *sizes])
        found.append(sizes)
    return found


def _tangents(stream: Stream, sizes: list[Sizes], memory: Sizes, memory_moved: Sizes) -> tuple[arb, Sizes]:
    """Return the largest tangent of a stream at any place, and those of the features of its last state."""
    (tokens, _), peak = stream.shapes[0], arb(1)
    least = arb(1 if tokens else 0)  # a stream without variables has no tangents
    moved = [least] * stream.shapes[0][1]
    for (_, width), layer, own in zip(stream.shapes[1:], stream.layers, sizes, strict=False):
        if isinstance(layer, AffineLayer):
            made = [arb(0)] * width
            for (_, f), row in layer.rows.items():
                made[f] = made[f].max(total(abs(arb(x)) * moved[read] for (_, read), x in row))
        elif isinstance(layer, SoftmaxLayer):
            made = [GATED * most([arb(0), *moved])] * width
        else:
            made = moved if layer.residual else [arb(0)] * width
            read, change = (memory, memory_moved) if layer.cross else (own, moved)
            for head in layer.heads:
                Q, K, V = (_products(W, x) for W, x in ((head.W_Q, own), (head.W_K, read), (head.W_V, read)))
                dQ, dK, dV = (_products(W, x) for W, x in ((head.W_Q, moved), (head.W_K, change), (head.W_V, change)))
                scores = CENTRED * (_inner(dQ, K) + _inner(Q, dK))
                averages = [scores * v + GATED * dv for v, dv in zip(V, dV, strict=True)]
                peak = most([peak, scores, *dQ, *dK, *dV, *averages])
                made = _sum(made, _products(head.W_O, averages))
        peak = most([peak, *made])
        moved = [x.max(least) for x in made]
    return peak, moved


def _cotangents(stream: Stream, sizes: list[Sizes], memory: Sizes, cotangents: Sizes) -> tuple[arb, Sizes]:
    """Return the largest cotangent of a stream at any place, and those of the features of the memory that it reads."""
    peak, of_memory = arb(1), [arb(0)] * len(memory)
    layers = [*zip(stream.shapes, stream.layers, sizes, strict=False)]
    for (tokens, width), layer, own in reversed(layers):
        after = _at_least_one(cotangents)
        cotangents = after if isinstance(layer, AttentionLayer) and layer.residual else [arb(0)] * width
        if isinstance(layer, AffineLayer):
            cotangents = _through_columns(layer, after, width)
        elif isinstance(layer, SoftmaxLayer):
            cotangents = [GATED * most(after)] * width
        else:
            read = memory if layer.cross else own
            of_read = [arb(0)] * len(read)
            for head in layer.heads:
                Q, K, V = (_products(W, x) for W, x in ((head.W_Q, own), (head.W_K, read), (head.W_V, read)))
                back = _transposed(head.W_O, after, len(V))
                weights = CENTRED * _inner(back, V)
                queries, keys = [weights * k for k in K], [tokens * weights * q for q in Q]
                values = [tokens * GATED * x for x in back]
                peak = most([peak, weights, *back, *queries, *keys, *values])
                cotangents = _sum(cotangents, _transposed(head.W_Q, queries, width))
                for W, x in ((head.W_K, keys), (head.W_V, values)):
                    of_read = _sum(of_read, _transposed(W, x, len(read)))
            if layer.cross:
                of_memory = _sum(of_memory, of_read)
            else:
                cotangents = _sum(cotangents, of_read)
        peak = most([peak, *cotangents])
    return peak, of_memory


def _through_columns(layer: Layer, after: Sizes, width: int) -> Sizes:
    """Return the sums of columns of an affine layer, times the cotangents after it."""
    assert isinstance(layer, AffineLayer)
    sums = dict[tuple[int, int], arb]()
    for (_, f), row in layer.rows.items():
        for place, x in row:
            sums[place] = sums.get(place, arb(0)) + abs(arb(x)) * after[f]
    found = [arb(0)] * width
    for (_, f), size in sums.items():
        found[f] = found[f].max(size)
    return found


def _products(columns: Matrix, sizes: Sizes) -> Sizes:
    return [total(abs(arb(x)) * sizes[row] for row, x in column) for column in columns]


def _transposed(columns: Matrix, sizes: Sizes, rows: int) -> Sizes:
    """Return the products of the transposed matrix, which has this number of columns."""
    found = [arb(0)] * rows
    for column, size in zip(columns, sizes, strict=True):
        for row, x in column:
            found[row] += abs(arb(x)) * size
    return found


def _inner(one: Sizes, other: Sizes) -> arb:
    return total(x * y for x, y in zip(one, other, strict=True))


def _sum(one: Sizes, other: Sizes) -> Sizes:
    return [x + y for x, y in zip(one, other, strict=True)]


def _at_least_one(sizes: Sizes) -> Sizes:
    return [x.max(arb(1)) for x in sizes]


def _require(program: Program, sizes: list[arb]) -> None:
    require(most(sizes) < OVERFLOW_LIMITS[program.dtype], f"the network may overflow in {program.dtype} on the box")
