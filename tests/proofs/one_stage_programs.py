"""Random programs of one attention stage, and what they compute exactly: in rationals, and Arb for exponentials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flint import arb, fmpq

from attnc.ir import Affine, Attention, Head, Mask, Program
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.program import token_shape
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.ir.sparse import Sparse
from attnc.ir.spec import check
from attnc.proofs.stages.extraction import OneStage

Rows = list[list[fmpq]]


def random_program(seed: int, *, scale: float | None = None, gates: bool | None = None) -> Program:
    """Affine maps, one attention layer, affine maps: all kinds of heads, masks, residuals, memories and dtypes.

    The first two channels of every state move with the input, the others are constant; keys are made from constants,
    values with `gates` from all. `scale` multiplies W_K: large ones make hard selections.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(rng.choice(["float64", "float32"]))
    gates = bool(rng.random() < 0.4) if gates is None else gates
    scale = float(10 ** rng.uniform(-2, 4)) if scale is None else scale
    make = _Maker(rng, dtype)
    input_shapes = [(int(rng.integers(1, 4)),), (int(rng.integers(1, 3)), int(rng.integers(1, 3)))][rng.integers(2)]
    memory_kind = rng.choice(["none", "constant", "second"], p=[0.5, 0.3, 0.2])
    shapes, memory, keyed = [input_shapes], [], None
    if memory_kind != "none":
        start = (0, 0)
        if memory_kind == "second":
            shapes.append((int(rng.integers(1, 3)), 2))
            start = token_shape(shapes[1])
        for i in range(rng.integers(1, 3)):
            memory.append(make.affine(f"memory{i}", start, (int(rng.integers(1, 9)), int(rng.integers(4, 6)))))
            start = memory[-1].weight.shape[:2]
        keyed = start
    state = token_shape(input_shapes)
    layers: list[Any] = []
    for i in range(rng.integers(1, 3)):
        layers.append(make.affine(f"embed{i}", state, (int(rng.integers(1, 9)), int(rng.integers(4, 6)))))
        state = layers[-1].weight.shape[:2]
    layers.append(make.attention(state, keyed, scale, gates))
    state = (state[0], len(layers[-1].channels))
    for i in range(rng.integers(0, 3)):
        layers.append(make.affine(f"read{i}", state, (int(rng.integers(1, 4)), int(rng.integers(1, 3))), dense=True))
        state = layers[-1].weight.shape[:2]
    return check(Program(tuple(layers), tuple(shapes), (state[0] * state[1],), tuple(memory)))


class _Maker:
    def __init__(self, rng: np.random.Generator, dtype: Any) -> None:
        self.rng, self.dtype = rng, dtype

    def numbers(self, *shape: int) -> np.ndarray:
        """Of mixed size and sign; some are powers of two, some zero."""
        values = self.rng.normal(size=shape) * 10.0 ** self.rng.uniform(-1.5, 1, shape)
        values = np.where(self.rng.random(shape) < 0.2, 2.0 ** self.rng.integers(-3, 4, shape), values)
        return np.where(self.rng.random(shape) < 0.2, 0.0, values).astype(self.dtype)

    def affine(self, name: str, start: tuple[int, int], shape: tuple[int, int], dense: bool = False) -> Affine:
        weight, constant = self.numbers(*shape, *start), self.numbers(*shape)
        if not dense:  # only the first two channels may move, and only by what moved before
            weight[:, 2:] = 0
            if name[-1] != "0":
                weight[..., 2:] = 0
                later = self.numbers(shape[0], shape[1] - 2, *start)
                later[..., :2] = 0
                weight[:, 2:] = later
        return Affine(name, Sparse.from_dense(weight), Sparse.from_dense(constant), _names(shape[1]))

    def attention(self, state: tuple[int, int], keyed: tuple[int, int] | None, scale: float, gates: bool) -> Attention:
        residual = bool(self.rng.random() < 0.5)
        width = state[1] if residual else int(self.rng.integers(1, 4))
        of_keys = state if keyed is None else keyed
        heads = tuple(self.head(state, of_keys, width, scale, gates) for _ in range(self.rng.integers(1, 4)))
        return Attention("attend", heads, _names(width), residual, keyed is not None)

    def head(self, state: tuple[int, int], keyed: tuple[int, int], width: int, scale: float, gates: bool) -> Head:
        d_k, d_v = int(self.rng.integers(1, 4)), int(self.rng.integers(1, 3))
        W_K, W_V = self.numbers(keyed[1], d_k) * self.dtype.type(scale), self.numbers(keyed[1], d_v)
        W_K[:2] = 0
        if not gates:
            W_V[:2] = 0
        mask = None
        if self.rng.random() < 0.4:
            of_keys = self.rng.integers(EVERY_QUERY, 2, keyed[0])
            of_keys[self.rng.integers(keyed[0])] = EVERY_QUERY
            mask = Mask(self.rng.integers(0, 2, state[0]), of_keys)
        return Head(self.numbers(state[1], d_k), W_K, W_V, self.numbers(d_v, width), mask)


def _names(width: int) -> tuple[str, ...]:
    return tuple(f"c{i}" for i in range(width))


def rational(x: float) -> fmpq:
    n, d = float(x).as_integer_ratio()
    return fmpq(n, d)


def _affine(layer: Affine, state: Rows) -> Rows:
    tokens, width = layer.constant.shape
    out = [[fmpq(0)] * width for _ in range(tokens)]
    for (token, channel), value in zip(layer.constant.index.tolist(), layer.constant.values.tolist(), strict=True):
        out[token][channel] = rational(value)
    for (t, c, i, j), value in zip(layer.weight.index.tolist(), layer.weight.values.tolist(), strict=True):
        out[t][c] += rational(value) * state[i][j]
    return out


def _times(row: list[fmpq], matrix: np.ndarray) -> list[Any]:
    return [
        sum((x * rational(w) for x, w in zip(row, column, strict=True) if w), fmpq(0)) for column in matrix.T.tolist()
    ]


def _split(program: Program, point: Sequence[fmpq]) -> list[Rows]:
    states, used = [], 0
    for shape in program.input_shapes:
        tokens, width = token_shape(shape)
        states.append([list(point[used + t * width : used + (t + 1) * width]) for t in range(tokens)])
        used += tokens * width
    return [*states, []][:2]


def _before(program: Program, point: Sequence[fmpq]) -> tuple[int, Attention, Rows, Rows]:
    number = next(i for i, layer in enumerate(program.layers) if isinstance(layer, Attention))
    state, memory = _split(program, point)
    for layer in program.memory:
        memory = _affine(layer, memory)
    for layer in program.layers[:number]:
        state = _affine(layer, state)
    attention = program.layers[number]
    return number, attention, state, memory if attention.cross else state


def exact_head(program: Program, point: Sequence[fmpq], query: int, number: int) -> tuple[list[fmpq], Rows]:
    """(scores, values·W_O) that one query token meets in one head, over the keys that it sees."""
    _, attention, state, keyed = _before(program, point)
    head = attention.heads[number]
    seen = range(len(keyed))
    if head.mask is not None:
        seen = np.flatnonzero(head.mask.visible(np.array([query]), slice(None))[0]).tolist()
    q = _times(state[query], head.W_Q)
    scores = [sum((a * b for a, b in zip(q, _times(keyed[k], head.W_K), strict=True)), fmpq(0)) for k in seen]
    return scores, [_times(_times(keyed[k], head.W_V), head.W_O) for k in seen]


def read_out(program: Program, rows: list[list[Any]]) -> list[Any]:
    """The affine maps after the attention, applied to what it wrote."""
    number = next(i for i, layer in enumerate(program.layers) if isinstance(layer, Attention))
    for layer in program.layers[number + 1 :]:
        rows = _affine_of(layer, rows)
    return [entry for row in rows for entry in row]


def _affine_of(layer: Affine, state: list[list[Any]]) -> list[list[Any]]:
    if not state or not state[0] or isinstance(state[0][0], fmpq):
        return _affine(layer, state)
    tokens, width = layer.constant.shape
    out = [[arb(0)] * width for _ in range(tokens)]
    for (token, channel), value in zip(layer.constant.index.tolist(), layer.constant.values.tolist(), strict=True):
        out[token][channel] = arb(rational(value))
    for (t, c, i, j), value in zip(layer.weight.index.tolist(), layer.weight.values.tolist(), strict=True):
        out[t][c] += arb(rational(value)) * state[i][j]
    return out


def exact_output(program: Program, point: Sequence[float]) -> list[arb]:
    """The program in Arb at a point of floats, to the precision in force."""
    exact = [rational(x) for x in point]
    _, attention, state, _ = _before(program, exact)
    written = []
    for query, row in enumerate(state):
        out = [arb(entry) for entry in row] if attention.residual else [arb(0)] * len(attention.channels)
        for number in range(len(attention.heads)):
            scores, values = exact_head(program, exact, query, number)
            weights = softmax(scores)
            for c in range(len(out)):
                out[c] += sum((w * arb(v[c]) for w, v in zip(weights, values, strict=True)), arb(0))
        written.append(out)
    return read_out(program, written)


def softmax(scores: Sequence[fmpq | arb]) -> list[arb]:
    top = max(arb(s).mid() for s in scores)
    weights = [(arb(s) - top).exp() for s in scores]
    total = sum(weights, arb(0))
    return [w / total for w in weights]


def ball(enclosed: Enclosed, index: Any) -> arb:
    return arb(rational(enclosed.mid[index]), rational(enclosed.radius[index]))


def ball_dot(enclosed: Enclosed, index: Any, x: Sequence[fmpq]) -> arb:
    """A row of an enclosure times x."""
    parts = zip(enclosed.mid[index], enclosed.radius[index], x, strict=True)
    return sum((arb(rational(m), rational(r)) * arb(y) for m, r, y in parts), arb(0))


def stage_output(stage: OneStage, point: np.ndarray, shifts: Sequence[np.ndarray] | None = None) -> list[arb]:
    """The stage in Arb, its numbers as balls; `shifts` are added to the scores of each head."""
    x, outputs = [rational(entry) for entry in point], range(len(stage.constant.mid))
    total = [ball(stage.constant, j) + ball_dot(stage.linear, j, x) for j in outputs]
    for number, head in enumerate(stage.heads):
        scores = [ball(head.offsets, k) + ball_dot(head.slopes, k, x) for k in range(len(head.offsets.mid))]
        if shifts is not None:
            scores = [s + arb(rational(by)) for s, by in zip(scores, shifts[number], strict=True)]
        weights = softmax(scores)
        for j in outputs:
            for k, weight in enumerate(weights):
                value = ball(head.values, (k, j))
                if head.carried is not None:
                    value += ball_dot(head.carried, (k, j), x)
                total[j] += weight * value
    return total


def enclosed(mid: Any, radius: float = 0.0) -> Enclosed:
    """Numbers, each known to a relative `radius`."""
    mid = np.array(mid, np.float64)
    return Enclosed(mid, np.abs(mid) * radius)


def random_stage(
    rng: np.random.Generator, d: int, num_outputs: int = 1, *, num_heads: int = 1, gates: bool = False
) -> OneStage:
    """Anchors in clusters, on grids or anywhere, β from 10⁻² to 10⁸, values of mixed sign and size."""
    heads = []
    for _ in range(num_heads):
        p = int(rng.integers(1, 14))
        anchors = rng.uniform(-1.2, 1.2, (p, d))
        if rng.random() < 0.3:
            anchors = np.round(anchors * 3) / 3  # some twice
        if rng.random() < 0.3:
            anchors = anchors[rng.integers(0, p, p)] + rng.normal(size=(p, d)) * 10.0 ** rng.uniform(-8, -2)
        beta = 10 ** rng.uniform(-2, 8)
        offsets = -beta * (anchors**2).sum(axis=1) + rng.normal(size=p) * rng.choice([0.0, 1.0, 0.1 * beta])
        values = rng.normal(size=(p, num_outputs)) * 10.0 ** rng.uniform(-3, 2, (p, num_outputs))
        radius = float(rng.choice([0.0, 1e-16, 1e-12]))
        slopes = enclosed(rng.normal(size=(p, num_outputs, d)), radius) if gates else None
        heads.append(
            SoftHead(enclosed(2 * beta * anchors, radius), enclosed(offsets, radius), enclosed(values, radius), slopes)
        )
    linear = rng.normal(size=(num_outputs, d)) * float(rng.choice([0.0, 1.0]))
    return OneStage(tuple(heads), enclosed(rng.normal(size=num_outputs)), enclosed(linear))
