"""Run a deep program over one long prompt. Time and memory of a layer are linear in the keys that its queries see.

The results are those of the reference, in another order of summation. Shared parts are computed once:
- layers that share their weights (T equal steps) are prepared once;
- a mask's segments split queries into groups, and a group computes only with the keys that it sees;
- scores of the heads are combinations Σ_f α_hf·S_f of few forms S_f, and each form is one product over the keys;
- the attention weights of heads with the same values are added up before they are multiplied by the values;
- keys of a memory whose values and own scores are zero (padding, sinks) only add to the denominators.
States are changed in place: a layer with a residual touches the channels that it writes, an affine map those that
change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from attnc.errors import InputError
from attnc.ir.layers import Affine, Attention, Head, Layer, Mask, Softmax
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.arrays import Float

if TYPE_CHECKING:
    from scipy.sparse import csr_array

SMALL_MATRIX = 2**16
"""Maximum number of entries of an affine map that is kept dense: 512 KiB in float64, which fit into the cache."""
WORKING_CELLS = 2**22
"""Number of scores held at a time: 32 MiB of float64. Queries are taken in blocks."""
WIDE = 2**20
"""Maximum number of entries of a projection that is kept dense whatever it holds: 8 MiB of float64."""
SAFE_SPREAD = {"float64": 300.0, "float32": 30.0}
"""Largest spread of scores at which exponentials neither overflow nor vanish without a shift."""

MANY_SEGMENTS = 4
"""Maximum number of query segments that are evaluated one by one. With more, the queries that are alone in their
segment are taken together. Measured: a segment takes 0.15 ms, and any number of single queries together takes 0.3
ms."""

Rows = slice | np.ndarray

Watch = Callable[[Layer, np.ndarray], None]
"""A function that is called with each layer and the state after it. The engine overwrites that array later."""


def run(
    program: Program,
    inputs: Sequence[Float[np.ndarray, "tokens width"]],
    watch: Watch | None = None,
    memory: Float[np.ndarray, "tokens width"] | None = None,
) -> np.ndarray:
    """Run the program on one prompt, without batch axis. A memory from `remember` is not computed again."""
    states = _states(program, inputs)
    with threadpool_limits(1):  # products are small and number thousands: waking threads costs more than they save
        if memory is None:
            memory = _memory(program, states)
        state = _run_layers(program.unrolled_layers, states[0], memory, watch)
    return program.from_tokens(state[None])[0]


def remember(
    program: Program, inputs: Sequence[Float[np.ndarray, "tokens width"]], watch: Watch | None = None
) -> Float[np.ndarray, "tokens width"]:
    """Run the layers of the memory on the second input, and call `watch` after each of them."""
    with threadpool_limits(1):
        return _memory(program, _states(program, inputs), watch)


def _states(program: Program, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    batched = [np.asarray(given, program.dtype)[None] for given in inputs]
    states = [state[0].copy() for state in program.as_tokens(tuple(batched))]  # layers work in place
    if not all(np.isfinite(state).all() for state in states):
        raise InputError("the prompt has a value that is NaN or infinite")
    return states


def _memory(program: Program, states: list[np.ndarray], watch: Watch | None = None) -> np.ndarray:
    start = states[1] if len(states) > 1 else np.zeros((0, 0), program.dtype)
    # In Fortran's order, a product with one query runs along the tokens.
    return np.asfortranarray(_run_layers(program.unrolled_memory, start, None, watch))


def _run_layers(
    layers: Sequence[Layer], state: np.ndarray, memory: np.ndarray | None, watch: Watch | None
) -> np.ndarray:
    plans: dict[tuple[int, int], _AffinePlan | _AttentionPlan] = {}  # layers that share their weights have one plan
    key = (0, 0)
    for layer in layers:
        if isinstance(layer, Affine):
            key = (id(layer.weight), id(layer.constant))
            plans[key] = plans.get(key) or _AffinePlan.of(layer)
        elif isinstance(layer, Attention):
            key = (id(layer.heads), layer.residual)
            plans[key] = plans.get(key) or _AttentionPlan.of(layer, state, memory)
        state = softmax(state) if isinstance(layer, Softmax) else plans[key](state, memory)
        if watch is not None:
            watch(layer, state)
    return state


@dataclass(frozen=True, eq=False)
class _AffinePlan:
    """An affine map. If it keeps the shape of the state, only the entries that change are computed, in place."""

    changed: np.ndarray | None  # flat positions of the entries that change; None if the map makes a new state
    weight: np.ndarray | csr_array
    constant: np.ndarray

    @classmethod
    def of(cls, layer: Affine) -> _AffinePlan:
        from scipy.sparse import eye_array

        before, after, constant = layer.weight.shape[2:], layer.weight.shape[:2], layer.constant.dense()
        if math.prod(layer.weight.shape) <= SMALL_MATRIX:
            return cls(None, layer.weight.dense().reshape(constant.size, math.prod(before)), constant)
        matrix = layer.weight.matrix(2)
        if before != after:
            return cls(None, matrix, constant)
        is_changed = np.diff((matrix - eye_array(constant.size, format="csr")).indptr) > 0
        changed = np.flatnonzero(is_changed | (constant.ravel() != 0))
        return cls(changed, matrix[changed], constant.ravel()[changed])

    def __call__(self, state: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        made: np.ndarray = (self.weight @ state.reshape(-1)).reshape(self.constant.shape) + self.constant
        if self.changed is None:
            return made
        state.reshape(-1)[self.changed] = made
        return state


@dataclass(frozen=True, eq=False)
class _AttentionPlan:
    """An attention layer. Its heads are grouped into families that share a mask and W_V."""

    layer: Attention
    families: tuple[HeadFamily, ...]

    @classmethod
    def of(cls, layer: Attention, state: np.ndarray, memory: np.ndarray | None) -> _AttentionPlan:
        keyed = memory if layer.cross and memory is not None else state
        shared: dict[tuple[int, ...], list[Head]] = {}
        for head in layer.heads:
            segments = () if head.mask is None else (id(head.mask.query_segments), id(head.mask.key_segments))
            shared.setdefault((*segments, id(head.W_V)), []).append(head)
        families = (HeadFamily.of(heads, len(state), keyed, layer.cross) for heads in shared.values())
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


@dataclass(frozen=True, eq=False)
class ScoreForm:
    """Scores S = queries[:, q]·A·keys[:, k]ᵀ, of which head h uses α_h·S."""

    A: np.ndarray | csr_array
    q: slice
    k: slice
    alphas: np.ndarray

    @cached_property
    def is_common(self) -> bool:
        """Whether the form is the same for all heads."""
        return bool((self.alphas == self.alphas[0]).all())

    def __call__(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the scores for keys (seen, width) of all queries, or for keys (queries, seen, width) per query."""
        left, right = queries[:, self.q], keys[..., self.k]
        if right.ndim == 3:
            return np.asarray(np.einsum("qa,qsa->qs", left @ self.A, right))
        if right.shape[1] == 1:
            return np.multiply.outer((left @ self.A)[:, 0], right[:, 0])
        if len(queries) <= len(keys):
            return (left @ self.A) @ right.T
        return left @ (self.A @ right.T)


@dataclass(frozen=True, eq=False)
class HeadFamily:
    """Heads with one mask and one W_V, evaluated together. They share scores, exponentials and values."""

    forms: tuple[ScoreForm, ...]
    values: slice
    W_V: np.ndarray | csr_array
    outputs: tuple[tuple[np.ndarray, Rows, np.ndarray | csr_array], ...]  # (weights of the heads, columns, W_O)
    groups: tuple[tuple[Rows, Rows, Rows], ...]  # (queries, the keys that they see, those of them that are silent)
    own: tuple[tuple[np.ndarray, np.ndarray], ...]  # (queries, for each of them the keys that it sees)
    buffers: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, heads: Sequence[Head], num_queries: int, keyed: np.ndarray, is_fixed: bool) -> HeadFamily:
        W_V = heads[0].W_V
        values = _cover(np.flatnonzero(W_V.any(axis=1)))
        groups, own = _groups(heads[0].mask, num_queries, len(keyed))
        forms = _forms(heads)
        is_silent = np.zeros(len(keyed), bool)
        if is_fixed and sum(form.is_common for form in forms) <= 1:
            own_parts = [keyed[:, form.k] for form in forms if not form.is_common]
            is_silent = ~np.any([part.any(axis=1) for part in (*own_parts, keyed[:, values])], axis=0)
        split = tuple((rows, *_split(seen, is_silent)) for rows, seen in groups)
        outputs = tuple((weights, columns, _thin(W_O)) for weights, columns, W_O in _outputs(heads))
        return cls(forms, values, _thin(W_V[values]), outputs, split, own)

    def __call__(self, state: np.ndarray, keyed: np.ndarray) -> list[tuple[Rows, Rows, np.ndarray]]:
        made: list[tuple[Rows, Rows, np.ndarray]] = []
        for rows, seen, silent in self.groups:
            queries, keys, quiet = state[rows], keyed[seen], keyed[silent]
            step = max(1, WORKING_CELLS // (len(self.alphas) * max(1, len(keys) + len(quiet))))
            if len(keys) == 1 and not len(quiet):
                parts = self._alone(keys)
            elif step >= len(queries):
                parts = self._group(queries, keys, quiet)
            else:
                blocks = [self._group(queries[i : i + step], keys, quiet) for i in range(0, len(queries), step)]
                parts = [
                    (same[0][0], np.concatenate([added for _, added in same])) for same in zip(*blocks, strict=True)
                ]
            made += [(rows, columns, added) for columns, added in parts]
        for own_rows, seen in self.own:
            parts = self._group(state[own_rows], keyed[seen], keyed[:0])
            made += [(own_rows, columns, added) for columns, added in parts]
        return made

    def _alone(self, keys: np.ndarray) -> list[tuple[Rows, np.ndarray]]:
        """Return the outputs if one key has the whole weight."""
        value = keys[:, self.values] @ self.W_V
        added = [(columns, (alphas.sum() * value) @ W_O) for alphas, columns, W_O in self.outputs]
        return [(columns, row) for columns, row in added if row.any()]

    def _group(self, queries: np.ndarray, keys: np.ndarray, silent: np.ndarray) -> list[tuple[Rows, np.ndarray]]:
        if len(self.alphas) == 1 and not len(silent) and keys.ndim == 2:
            return self._single(queries, keys)
        quiet = None
        if len(silent):
            common = [form.alphas[0] * form(queries, silent) for form in self.forms if form.is_common]
            quiet = common[0] if common else np.zeros((len(queries), len(silent)), queries.dtype)
        attention = self._attention([form(queries, keys) for form in self.forms], quiet)
        seen = keys[..., self.values]
        mixed = (total @ seen if seen.ndim == 2 else np.einsum("qs,qsa->qa", total, seen) for total in attention)
        outputs = zip(mixed, self.outputs, strict=True)
        return [(columns, values @ self.W_V @ W_O) for values, (_, columns, W_O) in outputs]

    def _single(self, queries: np.ndarray, keys: np.ndarray) -> list[tuple[Rows, np.ndarray]]:
        """Return the outputs of one head. Its values are averaged before they are divided, and scores stay in place."""
        scores = self._buffer("scores", len(queries), keys[:, 0])
        first, *others = self.forms
        np.matmul(queries[:, first.q] @ first.A * first.alphas[0], keys[:, first.k].T, out=scores)
        for form in others:
            scores += form.alphas[0] * form(queries, keys)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = (scores @ keys[:, self.values]) / scores.sum(axis=1)[:, None]
        return [(columns, weights[0] * mixed @ self.W_V @ W_O) for weights, columns, W_O in self.outputs]

    def _attention(
        self, scores: Sequence[np.ndarray], quiet: Float[np.ndarray, "queries silent"] | None = None
    ) -> list[Float[np.ndarray, "queries keys"]]:
        """Return Σ_h weight_h·softmax(Σ_f α_hf·S_f) for each output. `quiet` scores only add to the denominators."""
        shape = scores[0].shape
        stacked = self._buffer("scores", len(scores), scores[0])
        for row, score in zip(stacked, scores, strict=True):
            row[...] = score.reshape(-1)
        spread, is_led = 0.0, False
        for row, form in zip(stacked, self.forms, strict=True):
            if form.is_common and not is_led:
                is_led = True
                quiet = _shift(row.reshape(shape), quiet)
            else:
                spread += float(np.abs(form.alphas).max()) * max(float(row.max()), -float(row.min()))
        flat = np.matmul(self.alphas, stacked, out=self._buffer("patterns", len(self.alphas), scores[0]))
        patterns = flat.reshape(len(self.alphas), *shape)
        # The key of the largest common score has an exponential of at least e^{−spread}: no shift is needed.
        if not spread <= SAFE_SPREAD[str(patterns.dtype)]:
            quiet = _shift(patterns, quiet)
        np.exp(patterns, out=patterns)
        norms = patterns.sum(axis=-1)
        if quiet is not None:
            norms = norms + np.exp(quiet).sum(axis=-1)
        if shape[0] == 1:  # there are fewer weights than attention patterns: divide the weights
            return [((weights / norms[:, 0]) @ flat).reshape(shape) for weights, _, _ in self.outputs]
        patterns /= norms[..., None]
        return [np.tensordot(weights, patterns, 1) for weights, _, _ in self.outputs]

    def _buffer(self, use: str, rows: int, like: np.ndarray) -> np.ndarray:
        """Return memory that the next step uses again. Fresh pages would cost as much time as the arithmetic."""
        key = (use, rows, like.size)
        if key not in self.buffers:
            self.buffers[key] = np.empty((rows, like.size), like.dtype)
        return self.buffers[key]

    @cached_property
    def alphas(self) -> Float[np.ndarray, "heads forms"]:
        return np.stack([form.alphas for form in self.forms], axis=1)


def _shift(scores: np.ndarray, quiet: np.ndarray | None) -> np.ndarray | None:
    """Subtract each query's largest score from its scores, in place. Return the quiet scores less the same number."""
    top = scores.max(axis=-1, keepdims=True)
    top = top if quiet is None else np.maximum(top, quiet.max(axis=-1, keepdims=True))
    scores -= top
    return None if quiet is None else quiet - top


def _forms(heads: Sequence[Head]) -> tuple[ScoreForm, ...]:
    """Return the score forms. Columns of A_h = W_Q W_Kᵀ that are the same multiples of the first head's make one form.

    If some column is no multiple, every head has a form of its own.
    """
    if len(heads) == 1 and max(heads[0].W_Q.size, heads[0].W_K.size) > WIDE:
        from scipy.sparse import csr_array

        product = csr_array(heads[0].W_Q) @ csr_array(heads[0].W_K).T
        return (ScoreForm(product, slice(None), slice(None), np.ones(1, heads[0].W_Q.dtype)),)
    # A wide state has few channels that scores read.
    asked, keyed = (
        np.flatnonzero(np.any([W.any(axis=1) for W in given], axis=0))
        for given in ([head.W_Q for head in heads], [head.W_K for head in heads])
    )
    products = np.stack([head.W_Q[asked] @ head.W_K[keyed].T for head in heads])
    first = products[0]
    used = np.flatnonzero(products.any(axis=(0, 1)))
    by_ratio: dict[tuple[float, ...], list[int]] = {}
    for column in used:
        pivot = int(np.argmax(np.abs(first[:, column])))
        if first[pivot, column] == 0:
            break
        ratios = products[:, pivot, column] / first[pivot, column]
        if (np.multiply.outer(ratios, first[:, column]) != products[:, :, column]).any():
            break
        by_ratio.setdefault(tuple(ratios), []).append(int(column))
    else:
        return tuple(
            _form(first, columns, np.array(ratios, first.dtype), asked, keyed) for ratios, columns in by_ratio.items()
        ) or (ScoreForm(np.zeros((0, 0), first.dtype), slice(0, 0), slice(0, 0), np.ones(len(heads), first.dtype)),)
    unit = np.eye(len(heads), dtype=first.dtype)
    return tuple(_form(product, used.tolist(), unit[h], asked, keyed) for h, product in enumerate(products))


def _thin(matrix: np.ndarray) -> np.ndarray | csr_array:
    """Return a large matrix that is mostly zero without its zeros."""
    if matrix.size <= WIDE or 100 * np.count_nonzero(matrix) > matrix.size:
        return matrix
    from scipy.sparse import csr_array

    return csr_array(matrix)


def _form(
    product: np.ndarray, columns: list[int], alphas: np.ndarray, asked: np.ndarray, keyed: np.ndarray
) -> ScoreForm:
    """Return the form of these columns of a product, whose rows and columns are the channels `asked` and `keyed`."""
    rows = np.flatnonzero(product[:, columns].any(axis=1))
    kept = np.array([column for column in columns if product[:, column].any()], np.int64)
    q, k = _cover(asked[rows]), _cover(keyed[kept])
    A = np.zeros((q.stop - q.start, k.stop - k.start), product.dtype)
    A[np.ix_(asked[rows] - q.start, keyed[kept] - k.start)] = product[np.ix_(rows, kept)]
    return ScoreForm(A, q, k, alphas)


def _outputs(heads: Sequence[Head]) -> tuple[tuple[np.ndarray, Rows, np.ndarray], ...]:
    """Group heads whose W_O are multiples of one another.

    Their weights are added up before the values are multiplied.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for h, head in enumerate(heads):
        pivot = np.unravel_index(int(np.argmax(np.abs(head.W_O))), head.W_O.shape) if head.W_O.size else ()
        if not head.W_O.any():
            continue
        for weights, W_O in found:
            ratio = head.W_O[pivot] / W_O[pivot] if W_O[pivot] else 0.0
            if ratio and np.allclose(ratio * W_O, head.W_O, rtol=4 * np.finfo(W_O.dtype).eps, atol=0):
                weights[h] = ratio
                break
        else:
            weights = np.zeros(len(heads), head.W_O.dtype)
            weights[h] = 1
            found.append((weights, head.W_O))
    return tuple(
        (weights, span(columns), np.ascontiguousarray(W_O[:, columns]))
        for weights, W_O in found
        for columns in [np.flatnonzero(W_O.any(axis=0))]
    )


def _groups(
    mask: Mask | None, num_queries: int, num_keys: int
) -> tuple[tuple[tuple[Rows, Rows], ...], tuple[tuple[np.ndarray, np.ndarray], ...]]:
    """Group the queries of each segment, which see the same keys. Queries alone in their segment are taken together."""
    if mask is None:
        return ((slice(0, num_queries), slice(0, num_keys)),), ()
    is_split = len(np.unique(mask.query_segments)) > MANY_SEGMENTS
    groups: list[tuple[Rows, Rows]] = []
    alone = defaultdict[int, list[tuple[int, np.ndarray]]](list)
    for rows, own in mask.groups():
        seen = np.sort(np.concatenate([own, mask.shared]))
        if is_split and len(rows) == 1 and len(own):
            alone[len(seen)].append((int(rows[0]), seen))
        else:
            groups.append((span(rows), span(seen)))
    stacked = ((np.array([row for row, _ in found]), np.stack([seen for _, seen in found])) for found in alone.values())
    return tuple(groups), tuple(stacked)


def _split(seen: Rows, is_silent: np.ndarray) -> tuple[Rows, Rows]:
    """Return the keys that are seen, as two groups: those with values, and those that only add to the denominator."""
    keys = np.arange(len(is_silent))[seen]
    if is_silent[keys].all():
        return seen, keys[:0]
    return span(keys[~is_silent[keys]]), span(keys[is_silent[keys]])


def span(rows: np.ndarray) -> Rows:
    """Return a slice if the rows are consecutive, so that nothing is copied."""
    is_run = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows


def _cover(columns: np.ndarray) -> slice:
    """Return the smallest slice that holds the columns."""
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 0)
