"""The reference: a program evaluated as it is written, in plain numpy, in the program's own dtype.

Nothing is folded: every token is made, every key is projected, for every point. Rows of attention that no later
layer reads are left out, which changes no bit of the result; so are keys that a query may not see, where a mask has few
segments, which changes no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.shapes import live_layers, live_tokens, main_start, memory_start, stream_shapes
from attnc.ir.summing import key_mix, key_sum

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FEW_SEGMENTS = 4
"""The largest number of segments of a mask that is evaluated segment by segment, with the keys that each sees."""
WORKING_BYTES = 2**28
"""The size, in bytes, that no intermediate array much exceeds: points are taken in chunks, and queries in blocks."""

Record = Callable[[str, np.ndarray], None]


def evaluate(program: Program, inputs: tuple[np.ndarray, ...], record: Record | None = None) -> np.ndarray:
    """Outputs for a batch; `record(name, array)` is called with every activation and attention map on the way."""
    states = program.as_tokens(inputs)
    batch = len(states[0])
    step = batch if record else max(1, WORKING_BYTES // bytes_per_point(program))
    chunks = [_evaluate_chunk(program, [s[i : i + step] for s in states], record) for i in range(0, batch, step or 1)]
    if not chunks:
        return np.zeros((0, *program.output_shape), program.dtype)
    return program.from_tokens(np.concatenate(chunks))


def evaluate_recorded(
    program: Program, inputs: tuple[np.ndarray, ...], max_bytes: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Outputs and every named array: `layer.channel` (batch, tokens), `layer.head0.scores` and `.pattern`."""
    needed = bytes_per_point(program) * len(inputs[0])
    if needed > max_bytes:
        raise InputError(
            f"recording every activation of {len(inputs[0])} points needs about {needed / 2**20:,.0f} MiB, more than "
            f"max_bytes = {max_bytes / 2**20:,.0f} MiB. Pass fewer points, or a larger max_bytes."
        )
    cache: dict[str, np.ndarray] = {}
    outputs = evaluate(program, inputs, cache.__setitem__)
    return outputs, cache


def bytes_per_point(program: Program) -> int:
    """An estimate of the bytes that the states and attention maps of one point take."""
    memory = stream_shapes(program.memory, memory_start(program))
    main = stream_shapes(program.layers, main_start(program))
    cells = 1
    for layers, shapes in ((program.memory, memory), (program.layers, main)):
        live = live_tokens(layers, shapes[0][0], shapes[-1][0])
        for i, layer in enumerate(layers):
            cells += len(live[i + 1]) * shapes[i + 1][1]
            if isinstance(layer, Attention):
                keys = memory[-1][0] if layer.cross else shapes[i][0]
                cells += sum(keys * (2 * len(live[i + 1]) + h.W_K.shape[1] + h.W_V.shape[1]) for h in layer.heads)
    return 2 * cells * program.dtype.itemsize


def _evaluate_chunk(program: Program, states: list[np.ndarray], record: Record | None) -> np.ndarray:
    empty = np.zeros((len(states[0]), 0, 0), program.dtype)
    memory = _run_stream(program.memory, states[1] if len(states) > 1 else empty, None, record, "memory.")
    return _run_stream(program.layers, states[0], memory, record, "")


def _run_stream(
    layers: Sequence[Layer], state: np.ndarray, memory: np.ndarray | None, record: Record | None, prefix: str
) -> np.ndarray:
    """`state` holds the rows of the live tokens only."""
    first, live = live_layers(layers, state.shape[1:])
    state = state[:, first]
    for layer, tokens, rows in live:
        name = prefix + layer.name
        if isinstance(layer, Affine):
            state = _affine(layer, state)
        elif isinstance(layer, Attention):
            state = _attention(layer, state, rows, tokens, memory, record, name)
        else:
            state = softmax(state)
        if record:
            for column, channel in enumerate(layer.channels):
                record(f"{name}.{channel}", state[:, :, column])
    return state


def _affine(layer: Affine, state: Float[np.ndarray, "batch tokens_in width_in"]) -> np.ndarray:
    batch = len(state)
    moved: np.ndarray = (layer.weight.matrix(2) @ state.reshape(batch, -1).T).T.reshape(batch, *layer.constant.shape)
    moved += layer.constant.dense()
    return moved


def _attention(
    layer: Attention,
    state: Float[np.ndarray, "batch live_in width"],
    rows: Int[np.ndarray, " queries"],
    tokens: Int[np.ndarray, " queries"],
    memory: np.ndarray | None,
    record: Record | None,
    name: str,
) -> Float[np.ndarray, "batch queries width_out"]:
    keyed = memory if layer.cross and memory is not None else state
    queried = state[:, rows]
    out = queried.copy() if layer.residual else np.zeros((*queried.shape[:2], len(layer.channels)), state.dtype)
    for h, head in enumerate(layer.heads):
        K, V = keyed @ head.W_K, keyed @ head.W_V
        for chosen, keys in _views(head, tokens, whole=record is not None):
            seen_K, seen_V = K[:, keys], V[:, keys]
            cells = state.dtype.itemsize * max(1, seen_K.shape[0] * seen_K.shape[1])
            step = len(rows) if record else max(1, WORKING_BYTES // cells)
            for i in range(0, len(chosen), max(1, step)):
                block = chosen[i : i + step]
                scores = queried[:, block] @ head.W_Q @ seen_K.transpose(0, 2, 1)
                scores = _masked(scores, head, tokens[block], keys)
                pattern = softmax(scores)
                out[:, block] += key_mix(pattern, seen_V) @ head.W_O
                if record:
                    record(f"{name}.head{h}.scores", scores)
                    record(f"{name}.head{h}.pattern", pattern)
    return out


def _views(head: Head, tokens: np.ndarray, *, whole: bool) -> list[tuple[np.ndarray, np.ndarray | slice]]:
    """Pair the queries of each segment with the keys that they see, where a mask has few; otherwise all with all."""
    if head.mask is not None and not whole:
        segments = head.mask.query_segments[tokens]
        distinct = np.unique(segments)
        if len(distinct) <= FEW_SEGMENTS:
            queries = [np.flatnonzero(segments == segment) for segment in distinct]
            return [(q, np.flatnonzero(head.mask.visible(tokens[q[:1]], slice(None))[0])) for q in queries]
    return [(np.arange(len(tokens)), slice(None))]


def _masked(scores: np.ndarray, head: Head, tokens: np.ndarray, keys: np.ndarray | slice) -> np.ndarray:
    if head.mask is None or not isinstance(keys, slice):
        return scores
    return np.where(head.mask.visible(tokens, keys), scores, -np.inf)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, shifted by the maximum, so that no exponential overflows."""
    weights: np.ndarray = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= key_sum(weights)[..., None]
    return weights
