"""The normal form: a program reduced, by data flow, to softmax stages over the variables that move.

Between stages everything is affine. So every state Z is an affine form of a vector u of variables (the inputs at
first, then the entries that the last stage wrote), and an attention layer is, head by head, a softmax of
queries(u)·keys(u)ᵀ applied to values(u). Whatever does not depend on the input is folded into constants here, once:
for the constructions that is all of the keys, which leaves scores s_k(u) = a_k·u + c_k and values v_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.layers import Affine, Attention, Head, Layer
from attnc.ir.program import Program
from attnc.ir.shapes import live_tokens, main_start, memory_start, stream_shapes

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from scipy.sparse import csr_array


@dataclass(frozen=True, eq=False)
class Form:
    """An array of affine functions of u: entry (i, j) is linear[i·columns + j]·u + constant[i, j]."""

    linear: csr_array  # (rows·columns, variables)
    constant: csr_array  # (rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.constant.shape

    @property
    def is_constant(self) -> bool:
        return self.linear.nnz == 0

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        moved: np.ndarray = (self.linear @ u.T).T.reshape(len(u), *self.shape)
        moved += self.constant.toarray()
        return moved

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> Form:
        entries = (np.asarray(rows)[:, None] * self.shape[1] + np.arange(self.shape[1])).ravel()
        return Form(self.linear[entries], self.constant[rows])

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> Form:
        """Entry-wise affine still: form @ matrix."""
        from scipy.sparse import csr_array

        linear = _multiply_columns(self.linear, self.shape, matrix)
        return Form(linear, csr_array(self.constant @ csr_array(matrix)))

    def variables_used(self) -> Int[np.ndarray, " used"]:
        return np.unique(self.linear.indices)

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> Form:
        """The same form over a vector of `count` variables in which variable i stands at positions[i]."""
        from scipy.sparse import csr_array

        linear = csr_array(
            (self.linear.data, positions[self.linear.indices], self.linear.indptr), (self.linear.shape[0], count)
        )
        return Form(linear, self.constant)


def _multiply_columns(linear: csr_array, shape: tuple[int, int], matrix: np.ndarray) -> csr_array:
    """The linear part of (form @ matrix): rows (i, m) = Σ_j matrix[j, m]·linear[(i, j)]."""
    from scipy.sparse import coo_array, csr_array

    entries = linear.tocoo()
    row, column = np.divmod(entries.coords[0], shape[1])
    pairs, which = np.unique(row.astype(np.int64) * linear.shape[1] + entries.coords[1], return_inverse=True)
    by_pair = csr_array((entries.data, (which, column)), shape=(len(pairs), shape[1])) @ csr_array(matrix)
    product = by_pair.tocoo()
    pair_row, variable = np.divmod(pairs, max(1, linear.shape[1]))
    where = (pair_row[product.coords[0]] * matrix.shape[1] + product.coords[1], variable[product.coords[0]])
    linear = coo_array((product.data, where), shape=(shape[0] * matrix.shape[1], linear.shape[1])).tocsr()
    linear.eliminate_zeros()  # what cancels exactly does not depend on the input
    return linear


@dataclass(frozen=True, eq=False)
class FoldedHead:
    queries: Form  # (queries, d_k)
    keys: Form  # (keys, d_k)
    values: Form  # (keys, d_v)
    W_O: Float[np.ndarray, "d_v width_out"]
    query_segments: Int[np.ndarray, " queries"] | None
    key_segments: Int[np.ndarray, " keys"] | None

    def scores(self, query: int) -> tuple[Float[np.ndarray, "keys variables"], Float[np.ndarray, " keys"]]:
        """(a, c) of the scores a_k·u + c_k that one query meets; the keys must be constant."""
        assert self.keys.is_constant
        one = self.queries.rows(np.array([query]))
        keys = self.keys.constant
        return keys @ one.linear.toarray(), keys @ one.constant.toarray()[0]


@dataclass(frozen=True, eq=False)
class AttentionStage:
    """The next u: [what `written` picks of residual(u) + Σ_h out_h, a (queries × width) array] ++ u[carried]."""

    name: str
    heads: tuple[FoldedHead, ...]
    residual: Form | None
    written: Int[np.ndarray, " entries"]  # flat (query, channel) entries that become variables
    carried: Int[np.ndarray, " kept"]


@dataclass(frozen=True, eq=False)
class SoftmaxStage:
    """The next u: softmax over each row of logits(u), flattened, ++ u[carried]."""

    name: str
    logits: Form
    carried: Int[np.ndarray, " kept"]


Stage = AttentionStage | SoftmaxStage


@dataclass(frozen=True, eq=False)
class NormalForm:
    """u₀ = the inputs, flattened and concatenated; each stage makes the next u; the output is affine in the last."""

    stages: tuple[Stage, ...]
    output: Form
    num_inputs: int


def normal_form(program: Program) -> NormalForm:
    """Folds the memory's layers first, then the main stream's."""
    starts = [main_start(program), memory_start(program)]
    sizes = [tokens * width for tokens, width in starts]
    num_inputs, dtype = sum(sizes), program.dtype
    main = _identity_form(starts[0], np.arange(sizes[0]), num_inputs, dtype)
    memory = _identity_form(starts[1], sizes[0] + np.arange(sizes[1]), num_inputs, dtype)
    stages: list[Stage] = []
    memory, main = _fold_stream(program.memory, memory, main, None, stages)
    output, _ = _fold_stream(program.layers, main, memory, memory, stages)
    return NormalForm(tuple(stages), output, num_inputs)


def _identity_form(shape: tuple[int, int], variables: np.ndarray, count: int, dtype: np.dtype[np.floating]) -> Form:
    from scipy.sparse import coo_array, csr_array

    size = shape[0] * shape[1]
    linear = coo_array((np.ones(size, dtype), (np.arange(size), variables)), shape=(size, count)).tocsr()
    return Form(linear, csr_array(shape, dtype=dtype))


def _fold_stream(
    layers: tuple[Layer, ...], state: Form, other: Form, memory: Form | None, stages: list[Stage]
) -> tuple[Form, Form]:
    """Folds one stream; `other` is the form that must survive its stages (for the main stream, the memory)."""
    from scipy.sparse import csr_array

    dtype = state.linear.dtype
    shapes = stream_shapes(layers, state.shape)
    live = live_tokens(layers, shapes[0][0], shapes[-1][0])
    state = state.rows(live[0])
    for i, layer in enumerate(layers):
        if isinstance(layer, Affine):
            state = _compose(layer, state, live[i], live[i + 1])
            continue
        if not len(live[i + 1]):  # nothing later reads what this layer makes
            state = Form(
                csr_array((0, state.linear.shape[1]), dtype=dtype), csr_array((0, shapes[i + 1][1]), dtype=dtype)
            )
            continue
        needs_other = memory is None or any(isinstance(later, Attention) and later.cross for later in layers[i + 1 :])
        carried = other.variables_used() if needs_other else np.zeros(0, np.int64)
        if isinstance(layer, Attention):
            keyed = memory if layer.cross and memory is not None else state
            queried = state.rows(np.searchsorted(live[i], live[i + 1]))
            stage: Stage
            stage, state = _fold_attention(layer, queried, keyed, live[i + 1], carried)
        else:
            size = state.shape[0] * state.shape[1]
            stage = SoftmaxStage(layer.name, state, carried)
            state = _identity_form(state.shape, np.arange(size), size + len(carried), state.linear.dtype)
        stages.append(stage)
        if needs_other:
            positions = np.zeros(other.linear.shape[1], np.int64)
            count = state.linear.shape[1]
            positions[carried] = count - len(carried) + np.arange(len(carried))
            other = other.renumbered(positions, count)
            memory = None if memory is None else other
    return state, other


def _compose(layer: Affine, state: Form, live_in: np.ndarray, live_out: np.ndarray) -> Form:
    """The affine map applied to the form, on the tokens that are read."""
    from scipy.sparse import csr_array

    _, width_out, tokens_in, width_in = layer.weight.shape
    weight = layer.weight.matrix(2)
    constant = layer.constant.matrix(1)
    if len(live_out) < layer.weight.shape[0]:
        weight = weight[(live_out[:, None] * width_out + np.arange(width_out)).ravel()]
        constant = constant[live_out]
    if len(live_in) < tokens_in:
        weight = weight[:, (live_in[:, None] * width_in + np.arange(width_in)).ravel()]
    shape = (len(live_out), width_out)
    if state.constant.nnz:
        moved = weight @ state.constant.reshape((-1, 1)).tocsr()
        constant = constant + csr_array(moved.reshape(shape))
    linear = csr_array(weight @ state.linear)
    linear.eliminate_zeros()
    return Form(linear, csr_array(constant))


def _fold_attention(
    layer: Attention, queried: Form, keyed: Form, tokens: np.ndarray, carried: np.ndarray
) -> tuple[AttentionStage, Form]:
    from scipy.sparse import coo_array, csr_array

    heads = tuple(_fold_head(head, queried, keyed, tokens) for head in layer.heads)
    shape = (len(tokens), len(layer.channels))
    residual = queried if layer.residual else None
    is_written = np.zeros(shape, bool)
    for head in layer.heads:
        is_written |= (head.W_O != 0).any(axis=0)
    if residual is not None:
        is_written |= (np.diff(residual.linear.indptr) > 0).reshape(shape)
    written = np.flatnonzero(is_written)
    count = len(written) + len(carried)
    dtype = queried.linear.dtype
    linear = coo_array(
        (np.ones(len(written), dtype), (written, np.arange(len(written)))), shape=(is_written.size, count)
    ).tocsr()
    # An entry that no head writes and whose residual is constant stays the constant that it is.
    constant = csr_array(shape, dtype=dtype)
    if residual is not None:
        constant = csr_array(residual.constant.multiply(~is_written))
        constant.eliminate_zeros()
    return AttentionStage(layer.name, heads, residual, written, carried), Form(linear, constant)


def _fold_head(head: Head, queried: Form, keyed: Form, tokens: np.ndarray) -> FoldedHead:
    mask = head.mask
    return FoldedHead(
        queried.times(head.W_Q),
        keyed.times(head.W_K),
        keyed.times(head.W_V),
        head.W_O,
        None if mask is None else mask.query_segments[tokens],
        None if mask is None else mask.key_segments,
    )
