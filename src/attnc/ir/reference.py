"""The reference evaluates a program as it is written, in plain numpy, in the program's own dtype.

Nothing is folded: every token is made and every key is projected, for every point. Rows of attention that no later
layer reads are left out, which changes no bit of the result. If a mask has few segments, the keys that a query may not
see are left out too, which changes no weight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnc.errors import InputError
from attnc.ir.layers import Affine, Attention, Mask
from attnc.ir.program import Program
from attnc.ir.shapes import PlacedLayer, Stream, streams
from attnc.ir.summing import key_mix, key_sum
from attnc.numerics.arrays import Float

FEW_SEGMENTS = 4
"""The largest number of segments of a mask that is evaluated segment by segment, each with its own keys.
With more, all keys are masked at once. Measured with 2,000 points of converted MLPs: 3 segments take 5 ms either way, 6
take 5 ms instead of 12, and 12 take 10 ms instead of 31. Circuits have one segment."""
MEMORY = "memory."
"""The beginning of the names of layers in the memory."""
WORKING_BYTES = 2**28
"""The approximate limit, in bytes, of an intermediate array. Points are taken in chunks, and queries in blocks."""

Visit = Callable[[str, np.ndarray], np.ndarray]
"""Takes the name of an activation or an attention map and its array. Returns the array with which to go on."""


def evaluate(program: Program, inputs: tuple[np.ndarray, ...], visit: Visit | None = None) -> np.ndarray:
    """Return the outputs for a batch. `visit(name, array)` sees every activation and attention map, and may change it.

    The names and shapes are those of `activation_shapes`.
    """
    states = program.as_tokens(inputs)
    batch, of_program = len(states[0]), streams(program)
    states += [np.zeros((batch, 0, 0), program.dtype)] * (2 - len(states))
    step = batch if visit else max(1, WORKING_BYTES // bytes_per_point(program))
    out = np.empty((batch, *of_program[1].end), program.dtype)
    for i in range(0, batch, step or 1):
        main, memory = (state[i : i + step] for state in states)
        memory = _run_stream(of_program[0], memory, None, visit, MEMORY)
        out[i : i + step] = _run_stream(of_program[1], main, memory, visit, "")
    return program.from_tokens(out)


def evaluate_visited(program: Program, inputs: tuple[np.ndarray, ...], visit: Visit, max_bytes: int) -> np.ndarray:
    """Return the outputs for a batch, evaluated at once. Raise InputError if that needs more than `max_bytes`."""
    needed = bytes_per_point(program) * len(inputs[0])
    if needed > max_bytes:
        raise InputError(
            f"recording every activation of {len(inputs[0])} points needs about {needed / 2**20:,.0f} MiB, more than "
            f"max_bytes = {max_bytes / 2**20:,.0f} MiB. Pass fewer points, or a larger max_bytes."
        )
    return evaluate(program, inputs, visit)


def activation_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the shape for one point of every array that a visit sees, by name, in the order of the visits.

    `layer.channel` is (tokens,), `layer.head0.scores` and `.pattern` are (queries, keys), and `layer.head0.z` is
    (queries, d_v). Names in the memory begin with `memory.`. Tokens that nothing reads are left out,
    and so are heads without a query.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    memory, main = streams(program)
    for prefix, stream in ((MEMORY, memory), ("", main)):
        for step in stream.steps:
            num_queries, name = len(step.tokens), prefix + step.layer.name
            num_keys = step.num_keys if step.layer.cross else len(step.read)
            for h, head in enumerate(step.layer.heads if num_queries else ()):
                shapes |= {f"{name}.head{h}.{part}": (num_queries, num_keys) for part in ("scores", "pattern")}
                shapes[f"{name}.head{h}.z"] = (num_queries, head.W_V.shape[1])
            shapes |= {f"{name}.{channel}": (num_queries,) for channel in step.layer.channels}
    return shapes


def bytes_per_point(program: Program) -> int:
    """Estimate the bytes that the states and attention maps of one point take."""
    cells = 1
    for step in (step for stream in streams(program) for step in stream.steps):
        live = len(step.tokens)
        cells += live * step.after[1]
        cells += sum(
            step.num_keys * (2 * live + h.W_K.shape[1] + h.W_V.shape[1]) + live * h.W_V.shape[1]
            for h in step.layer.heads
        )
    return 2 * cells * program.dtype.itemsize


def _run_stream(
    stream: Stream, state: np.ndarray, memory: np.ndarray | None, visit: Visit | None, prefix: str
) -> np.ndarray:
    """Run the layers. A state holds only the rows of the live tokens."""
    state = state[:, stream.first]
    for step in stream.steps:
        layer, name = step.live_layer, prefix + step.layer.name
        if isinstance(layer, Affine):
            state = _affine(layer, state)
        elif isinstance(layer, Attention):
            state = _attention(layer, state, step, memory, visit, name)
        else:
            state = softmax(state)
        if visit:
            for column, channel in enumerate(layer.channels):
                state[:, :, column] = visit(f"{name}.{channel}", state[:, :, column])
    return state


def _affine(layer: Affine, state: Float[np.ndarray, "batch tokens_in width_in"]) -> np.ndarray:
    batch = len(state)
    moved: np.ndarray = (layer.weight.matrix(2) @ state.reshape(batch, -1).T).T.reshape(batch, *layer.constant.shape)
    moved += layer.constant.dense()
    return moved


def _attention(
    layer: Attention,
    state: Float[np.ndarray, "batch live_in width"],
    step: PlacedLayer,
    memory: np.ndarray | None,
    visit: Visit | None,
    name: str,
) -> Float[np.ndarray, "batch queries width_out"]:
    keyed = memory if layer.cross and memory is not None else state
    queried = state[:, step.rows]
    out = queried.copy() if layer.residual else np.zeros((*queried.shape[:2], len(layer.channels)), state.dtype)
    for h, head in enumerate(layer.heads):
        K, V = keyed @ head.W_K, keyed @ head.W_V
        mask = None if head.mask is None else head.mask.for_queries(step.tokens)
        for chosen, keys in _views(mask, len(step.tokens), whole=visit is not None):
            seen_K, seen_V = K[:, keys], V[:, keys]
            cells = state.dtype.itemsize * max(1, seen_K.shape[0] * seen_K.shape[1])
            size = len(chosen) if visit else WORKING_BYTES // cells
            for i in range(0, len(chosen), max(1, size)):
                block = chosen[i : i + max(1, size)]
                scores = queried[:, block] @ head.W_Q @ seen_K.transpose(0, 2, 1)
                if mask is not None and isinstance(keys, slice):
                    scores = np.where(mask.visible(block), scores, -np.inf)
                scores = scores if visit is None else visit(f"{name}.head{h}.scores", scores)
                pattern = softmax(scores)
                pattern = pattern if visit is None else visit(f"{name}.head{h}.pattern", pattern)
                z = key_mix(pattern, seen_V)
                z = z if visit is None else visit(f"{name}.head{h}.z", z)
                out[:, block] += z @ head.W_O
    return out


def _views(mask: Mask | None, num_queries: int, *, whole: bool) -> list[tuple[np.ndarray, np.ndarray | slice]]:
    """Pair the queries of each segment with their visible keys if a mask has few segments, otherwise all with all."""
    if mask is not None and not whole and len(np.unique(mask.query_segments)) <= FEW_SEGMENTS:
        return list(mask.views())
    return [(np.arange(num_queries), slice(None))]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis, shifted by the maximum, so that no exponential overflows."""
    weights: np.ndarray = scores - scores.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= key_sum(weights)[..., None]
    return weights
