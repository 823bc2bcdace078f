"""Run a deep program over one long prompt: time and memory of a layer are linear in the keys that its queries see.

The results are those of the reference, in another order of summation. Shared parts are computed once:
- layers that share their weights (T equal steps) are prepared once;
- a mask's segments split queries into groups, and a group meets only the keys that it sees;
- scores of the heads are combinations Σ_f α_hf·S_f of few forms S_f, each one product over the keys;
- heads with the same values add up their attention before it meets the values;
- keys of a memory whose values and own scores are zero (padding, sinks) only add to the denominators.
States are kept in place: a layer with a residual touches the channels that it writes, an affine map those that change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from attnc.engines.head_family import HeadFamily, Rows, span
from attnc.errors import InputError
from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.reference import softmax

if TYPE_CHECKING:
    from jaxtyping import Float
    from scipy.sparse import csr_array

SMALL_MATRIX = 2**16
"""Maximum number of entries of an affine map that is kept dense, 512 KiB in float64: it fits into the cache."""

Watch = Callable[[Layer, np.ndarray], None]
"""Called with each layer and the state after it; the engine overwrites this state later."""


def run(
    program: Program,
    inputs: Sequence[Float[np.ndarray, "tokens width"]],
    watch: Watch | None = None,
    memory: Float[np.ndarray, "tokens width"] | None = None,
) -> np.ndarray:
    """Run the program on one prompt, without batch axis. A memory made before by `remember` is not made again."""
    states = _states(program, inputs)
    prepared: dict[tuple[int, int], _Plan] = {}
    with threadpool_limits(1):  # thousands of small products: waking threads costs more than they save
        if memory is None:
            memory = _remember(program, states, prepared)
        state = states[0]
        for layer in program.layers:
            state = _apply(layer, state, memory, prepared)
            if watch is not None:
                watch(layer, state)
    return program.from_tokens(state[None])[0]


def remember(
    program: Program, inputs: Sequence[Float[np.ndarray, "tokens width"]], watch: Watch | None = None
) -> Float[np.ndarray, "tokens width"]:
    """Run the layers of the memory on the second input; `watch` is called after each of them."""
    with threadpool_limits(1):
        return _remember(program, _states(program, inputs), {}, watch)


def _states(program: Program, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    batched = [np.asarray(given, program.dtype)[None] for given in inputs]
    states = [state[0].copy() for state in program.as_tokens(tuple(batched))]  # layers work in place
    if not all(np.isfinite(state).all() for state in states):
        raise InputError("the prompt has a value that is NaN or infinite")
    return states


def _remember(
    program: Program, states: list[np.ndarray], prepared: dict[tuple[int, int], _Plan], watch: Watch | None = None
) -> np.ndarray:
    memory = states[1] if len(states) > 1 else np.zeros((0, 0), program.dtype)
    for layer in program.memory:
        memory = _apply(layer, memory, None, prepared)
        if watch is not None:
            watch(layer, memory)
    return np.asfortranarray(memory)  # a product with one query then runs along the tokens


def _apply(
    layer: Layer, state: np.ndarray, memory: np.ndarray | None, prepared: dict[tuple[int, int], _Plan]
) -> np.ndarray:
    if isinstance(layer, Affine):
        parts = (id(layer.weight), id(layer.constant))
        plan = prepared.get(parts)
        if plan is None:
            plan = prepared[parts] = _Move.of(layer)
    elif isinstance(layer, Attention):
        parts = (id(layer.heads), layer.residual)
        plan = prepared.get(parts)
        if plan is None:
            keys = memory if layer.cross and memory is not None else state
            plan = prepared[parts] = _Attend.of(layer, len(state), keys)
    else:
        return softmax(state)
    return plan(state, memory)


class _Plan:
    def __call__(self, state: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Move(_Plan):
    """An affine map: channels of tokens that stay as they are stay where they are, the others are computed."""

    is_in_place: bool
    moved: Rows
    weight: np.ndarray | csr_array
    constant: np.ndarray
    cleared: np.ndarray  # flat positions that become zero, in tokens that stay otherwise

    @classmethod
    def of(cls, layer: Affine) -> _Move:
        tokens, width, tokens_in, width_in = layer.weight.shape
        none = np.zeros(0, np.int64)
        if tokens * width * tokens_in * width_in <= SMALL_MATRIX:
            dense = layer.weight.dense().reshape(tokens * width, tokens_in * width_in)
            return cls(False, slice(None), dense, layer.constant.dense(), none)
        index, values = layer.weight.index, layer.weight.values
        is_in_place = (tokens, width) == (tokens_in, width_in)
        is_same = (index[:, 0] == index[:, 2]) & (index[:, 1] == index[:, 3]) & (values == 1)
        others = np.bincount(index[~is_same, 0], minlength=tokens)
        others += np.bincount(layer.constant.index[:, 0], minlength=tokens)
        does_stay = (others == 0) & is_in_place
        moved = np.flatnonzero(~does_stay)
        is_kept = np.zeros((tokens, width), bool)
        is_kept[index[is_same, 0], index[is_same, 1]] = True
        cleared = np.flatnonzero(~is_kept & does_stay[:, None]) if is_in_place else none
        rows = (moved[:, None] * width + np.arange(width)).ravel()
        matrix = layer.weight.matrix(2)[rows]
        return cls(is_in_place, span(moved), matrix, layer.constant.dense()[moved], cleared)

    def __call__(self, state: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        made: np.ndarray = (self.weight @ state.reshape(-1)).reshape(self.constant.shape) + self.constant
        if not self.is_in_place:
            return made
        state[self.moved] = made
        state.reshape(-1)[self.cleared] = 0
        return state


@dataclass(frozen=True, eq=False)
class _Attend(_Plan):
    layer: Attention
    families: tuple[HeadFamily, ...]

    @classmethod
    def of(cls, layer: Attention, num_queries: int, keyed: np.ndarray) -> _Attend:
        shared: dict[tuple[int, int], list[Head]] = {}
        for head in layer.heads:
            shared.setdefault((id(head.mask), id(head.W_V)), []).append(head)
        families = (HeadFamily.of(heads, num_queries, keyed, layer.cross) for heads in shared.values())
        return cls(layer, tuple(families))

    def __call__(self, state: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        layer = self.layer
        keyed = memory if layer.cross and memory is not None else state
        parts = [part for family in self.families for part in family(state, keyed)]
        out = state if layer.residual else np.zeros((len(state), len(layer.channels)), state.dtype)
        for rows, columns, added in parts:  # after all heads have read the state
            if isinstance(rows, slice) or isinstance(columns, slice):
                out[rows, columns] += added
            else:
                out[np.ix_(rows, columns)] += added
        return out
