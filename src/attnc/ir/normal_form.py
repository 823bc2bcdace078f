"""The normal form: a program reduced, by data flow, to softmax stages over the variables that depend on the input.

Between stages everything is affine. So every state Z is an affine form of a vector u of variables: first the inputs,
then the entries that the last stage wrote. Each head of an attention layer is a softmax of queries(u)·keys(u)ᵀ applied
to values(u). Everything that does not depend on the input is folded into constants here, once. In the constructions
all keys are such constants, which leaves scores s_k(u) = a_k·u + c_k and values v_k.

The folding is written once, for any type of numbers (`AffineForm`). Engines and exports fold floats (`FloatForm`).
Proofs fold enclosures of the reals that the stored weights define, the sizes of all summands, and the number of
roundings (`attnc.proofs.stages.enclosed_sparse`, `attnc.proofs.rounding.program`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np

from attnc.ir.layers import Affine, Attention, Mask
from attnc.ir.program import Program
from attnc.ir.shapes import Stream, streams
from attnc.ir.soft_head import SoftHead, unpacked
from attnc.numerics.arrays import Bool, Float, Int

if TYPE_CHECKING:
    from typing import Self

    from scipy.sparse import csr_array
    from typing_extensions import TypeVar
else:
    from typing import TypeVar


DENSE_BYTES = 2**27
"""Constants up to this size in bytes are dense in evaluation. Larger ones are unpacked block by block. It
is an eighth of the memory that a network may take by default (MAX_BYTES)."""
FEW_ENTRIES = 2**14
"""Up to this number of entries, sums of products with a matrix are made densely: 128 KiB of float64."""


class AffineForm(Protocol):
    """A (rows, columns) array of affine functions of u, in some type of numbers. Entries are numbered row by row."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_variables(self) -> int: ...

    @classmethod
    def identity(
        cls, shape: tuple[int, int], variables: Int[np.ndarray, " entries"], count: int, dtype: np.dtype[Any]
    ) -> Self:
        """Return the form whose entry i is variable variables[i] of `count`."""
        ...

    @classmethod
    def after_stage(
        cls, writes: Bool[np.ndarray, "rows columns"], residual: Self | None, num_carried: int, dtype: np.dtype[Any]
    ) -> tuple[Self, Int[np.ndarray, " written"]]:
        """Return the state after an attention layer, and those of its entries that become the first variables.

        `writes` are the entries that a head may write. Carried variables come after the written ones.
        """
        ...

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> Self: ...

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> Self:
        """Return form @ matrix."""
        ...

    def through(self, layer: Affine) -> Self:
        """Return the affine map applied to the form."""
        ...

    def variables_used(self) -> Int[np.ndarray, " used"]: ...

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> Self:
        """Return the same form over a vector of `count` variables in which variable i is at positions[i]."""
        ...


@dataclass(frozen=True, eq=False)
class FloatForm:
    """Affine functions of u in floats: entry (i, j) is linear[i·columns + j]·u + constant[i, j]."""

    linear: csr_array  # (rows·columns, variables)
    constant: csr_array  # (rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.constant.shape

    @property
    def num_variables(self) -> int:
        return int(self.linear.shape[1])

    @property
    def is_constant(self) -> bool:
        return self.linear.nnz == 0

    @classmethod
    def identity(cls, shape: tuple[int, int], variables: np.ndarray, count: int, dtype: np.dtype[Any]) -> FloatForm:
        from scipy.sparse import csr_array

        size = shape[0] * shape[1]
        return cls(_ones((np.arange(size), variables), (size, count), dtype), csr_array(shape, dtype=dtype))

    @classmethod
    def after_stage(
        cls, writes: np.ndarray, residual: FloatForm | None, num_carried: int, dtype: np.dtype[Any]
    ) -> tuple[FloatForm, np.ndarray]:
        """See `AffineForm`. An entry that no head writes and whose residual is constant remains a constant."""
        from scipy.sparse import csr_array

        constant = csr_array(writes.shape, dtype=dtype)
        if residual is not None:
            writes = writes | (np.diff(residual.linear.indptr) > 0).reshape(writes.shape)
            constant = csr_array(residual.constant.multiply(~writes))
            constant.eliminate_zeros()
        written = np.flatnonzero(writes)
        count = len(written)
        return cls(_ones((written, np.arange(count)), (writes.size, count + num_carried), dtype), constant), written

    @cached_property
    def constants(self) -> Any:
        """The constant part: dense, or sparse if it would be larger than DENSE_BYTES."""
        size = self.shape[0] * self.shape[1] * self.constant.dtype.itemsize
        return self.constant.toarray() if size <= DENSE_BYTES else self.constant

    def __call__(self, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "batch rows columns"]:
        whole = self.block(slice(0, self.shape[0]), u)
        return whole if whole.ndim == 3 else np.broadcast_to(whole, (len(u), *whole.shape))

    def block(self, rows: slice, u: Float[np.ndarray, "batch variables"]) -> Float[np.ndarray, "*batch rows columns"]:
        """Return some of the rows at every u. A constant form has no batch axis."""
        constant = unpacked(self.constants[rows])
        if self.is_constant:
            return constant
        num_rows, columns = constant.shape
        linear = self.linear if num_rows == self.shape[0] else self.linear[rows.start * columns : rows.stop * columns]
        moving: np.ndarray = (linear @ u.T).T.reshape(len(u), num_rows, columns)
        moving += constant
        return moving

    def astype(self, dtype: Any) -> FloatForm:
        return FloatForm(self.linear.astype(dtype), self.constant.astype(dtype))

    def rows(self, rows: Int[np.ndarray, " chosen"]) -> FloatForm:
        entries = (np.asarray(rows)[:, None] * self.shape[1] + np.arange(self.shape[1])).ravel()
        return FloatForm(self.linear[entries], self.constant[rows])

    def columns(self, columns: Int[np.ndarray, " chosen"]) -> FloatForm:
        entries = (np.arange(self.shape[0])[:, None] * self.shape[1] + np.asarray(columns)).ravel()
        return FloatForm(self.linear[entries], self.constant[:, columns])

    def only(self, entries: Int[np.ndarray, " kept"]) -> FloatForm:
        """Return the form in which all entries but these are constant 0."""
        from scipy.sparse import csr_array

        is_kept = np.isin(np.arange(self.shape[0] * self.shape[1]), entries)
        linear = csr_array(self.linear.multiply(is_kept[:, None]))
        linear.eliminate_zeros()
        return FloatForm(linear, csr_array(self.constant.multiply(is_kept.reshape(self.shape))))

    def times(self, matrix: Float[np.ndarray, "columns new_columns"]) -> FloatForm:
        from scipy.sparse import csr_array

        linear = _multiply_columns(self.linear, self.shape, matrix)
        return FloatForm(linear, csr_array(self.constant @ csr_array(matrix)))

    def through(self, layer: Affine) -> FloatForm:
        from scipy.sparse import csr_array

        weight, constant = layer.weight.matrix(2), layer.constant.matrix(1)
        if self.constant.nnz:
            moved = weight @ self.constant.reshape((-1, 1)).tocsr()
            constant = constant + csr_array(moved.reshape(layer.constant.shape))
        linear = csr_array(weight @ self.linear)
        linear.eliminate_zeros()
        return FloatForm(linear, csr_array(constant))

    def variables_used(self) -> Int[np.ndarray, " used"]:
        return np.unique(self.linear.indices)

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> FloatForm:
        from scipy.sparse import csr_array

        linear = csr_array(
            (self.linear.data, positions[self.linear.indices], self.linear.indptr), (self.linear.shape[0], count)
        )
        return FloatForm(linear, self.constant)


def _ones(places: tuple[np.ndarray, np.ndarray], shape: tuple[int, int], dtype: np.dtype[Any]) -> csr_array:
    """Return the matrix with ones at these (rows, columns)."""
    from scipy.sparse import coo_array

    return coo_array((np.ones(len(places[0]), dtype), places), shape=shape).tocsr()


def _multiply_columns(linear: csr_array, shape: tuple[int, int], matrix: np.ndarray) -> csr_array:
    """Return the linear part of (form @ matrix): rows (i, m) = Σ_j matrix[j, m]·linear[(i, j)]."""
    from scipy.sparse import coo_array, csr_array

    if linear.shape[0] * max(1, linear.shape[1]) * matrix.shape[1] <= FEW_ENTRIES:
        # The same sums, in the same order. Conversions of small sparse matrices take ten times as long.
        parts = linear.toarray().reshape(*shape, 1, linear.shape[1])
        total = np.zeros((shape[0], matrix.shape[1], linear.shape[1]), np.result_type(linear, matrix))
        for j in range(shape[1]):
            total += matrix[j][:, None] * parts[:, j]
        return csr_array(total.reshape(shape[0] * matrix.shape[1], linear.shape[1]))

    entries = linear.tocoo()
    row, column = np.divmod(entries.coords[0], shape[1])
    pairs, which = np.unique(row.astype(np.int64) * linear.shape[1] + entries.coords[1], return_inverse=True)
    by_pair = csr_array((entries.data, (which, column)), shape=(len(pairs), shape[1])) @ csr_array(matrix)
    product = by_pair.tocoo()
    pair_row, variable = np.divmod(pairs, max(1, linear.shape[1]))
    where = (pair_row[product.coords[0]] * matrix.shape[1] + product.coords[1], variable[product.coords[0]])
    linear = coo_array((product.data, where), shape=(shape[0] * matrix.shape[1], linear.shape[1])).tocsr()
    linear.eliminate_zeros()  # an entry that cancels exactly does not depend on the input
    return linear


if TYPE_CHECKING:
    F = TypeVar("F", bound=AffineForm, default=FloatForm)
else:
    F = TypeVar("F")


@dataclass(frozen=True, eq=False)
class FoldedHead(Generic[F]):
    """A head between affine forms: softmax(queries·keysᵀ)·values·W_O, over the keys that the mask allows."""

    queries: F  # (queries, d_k)
    keys: F  # (keys, d_k)
    values: F  # (keys, d_v)
    W_O: Float[np.ndarray, "d_v width_out"]
    mask: Mask | None

    def seen(self, query: int) -> Int[np.ndarray, " seen"]:
        """Return the keys that one query sees."""
        if self.mask is None:
            return np.arange(self.keys.shape[0])
        return np.flatnonzero(self.mask.visible(slice(query, query + 1))[0])

    def over_queries(self: FoldedHead[FloatForm]) -> SoftHead[Any]:
        """Return the head, before W_O, as a function of its query vector. Its slopes are the keys, which are constant.

        It covers all keys, whatever the mask. If values depend on u, it has no outputs. Large parts stay sparse.
        """
        assert self.keys.is_constant
        num_keys, dtype = self.keys.shape[0], self.W_O.dtype
        values = self.values.constants if self.values.is_constant else np.zeros((num_keys, 0), dtype)
        return SoftHead(self.keys.constants, np.zeros(num_keys, dtype), values)

    def soft_head(self: FoldedHead[FloatForm], query: int) -> SoftHead[Any] | None:
        """Return the head for one query, in float64, as a function of u over the keys that the query sees.

        The slopes are sparse. Return None if the same entry depends on u in the query and in a key: then scores are
        not affine in u.
        """
        from scipy.sparse import csr_array

        seen, one = self.seen(query), self.queries.rows(np.array([query])).astype(np.float64)
        keys, values = self.keys.astype(np.float64), self.values.astype(np.float64)
        if len(seen) < keys.shape[0]:
            keys, values = keys.rows(seen), values.rows(seen)
        moved = np.unique(np.flatnonzero(np.diff(keys.linear.indptr)) % max(1, keys.shape[1]))
        if np.intersect1d(np.flatnonzero(np.diff(one.linear.indptr)), moved).size:
            return None
        still, written = keys.times(one.constant.toarray().T), values.times(self.W_O)
        slopes, offsets = csr_array(keys.constant @ one.linear + still.linear), still.constant.toarray()[:, 0]
        carried = None if written.is_constant else written.linear.toarray().reshape(*written.shape, -1)
        return SoftHead(slopes, offsets, written.constant.toarray(), carried)


@dataclass(frozen=True, eq=False)
class AttentionStage(Generic[F]):
    """The next u: [the `written` entries of residual(u) + Σ_h out_h, a (queries × width) array] ++ u[carried]."""

    name: str
    channels: tuple[str, ...]
    tokens: Int[np.ndarray, " queries"]  # the numbers of the query tokens among all tokens
    heads: tuple[FoldedHead[F], ...]
    queried: F  # (queries, width_in): the state from which the queries are made
    is_residual: bool
    written: Int[np.ndarray, " entries"]  # flat (query, channel) entries that become variables
    carried: Int[np.ndarray, " kept"]

    @property
    def num_variables(self) -> int:
        """The length of the u before the stage."""
        return self.queried.num_variables

    @property
    def residual(self) -> F | None:
        return self.queried if self.is_residual else None

    def variables_used(self) -> Int[np.ndarray, " used"]:
        forms = (self.queried, *(form for head in self.heads for form in (head.keys, head.values)))
        return np.unique(np.concatenate([form.variables_used() for form in forms]))

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> AttentionStage[F]:
        def moved(form: F) -> F:
            return form.renumbered(positions, count)

        heads = (replace(h, queries=moved(h.queries), keys=moved(h.keys), values=moved(h.values)) for h in self.heads)
        return replace(self, heads=tuple(heads), queried=moved(self.queried))


@dataclass(frozen=True, eq=False)
class SoftmaxStage(Generic[F]):
    """The next u: softmax over each row of logits(u), flattened, ++ u[carried].

    It is attention with constant keys: for the query of a row the scores are the logits, and the values unit vectors.
    """

    name: str
    channels: tuple[str, ...]
    tokens: Int[np.ndarray, " rows"]  # the numbers of the rows among all tokens
    logits: F
    carried: Int[np.ndarray, " kept"]

    @property
    def num_variables(self) -> int:
        """The length of the u before the stage."""
        return self.logits.num_variables

    @property
    def written(self) -> Int[np.ndarray, " entries"]:
        """The flat (row, channel) entries that become variables: all of them."""
        return np.arange(self.logits.shape[0] * self.logits.shape[1])

    def soft_head(self: SoftmaxStage[FloatForm], row: int) -> SoftHead[Any]:
        """Return one row, in float64. Slopes are sparse, and the value of each key is a sparse unit vector."""
        from scipy.sparse import eye_array

        one = self.logits.rows(np.array([row])).astype(np.float64)
        return SoftHead(one.linear, one.constant.toarray()[0], eye_array(one.shape[1], format="csr"))

    def variables_used(self) -> Int[np.ndarray, " used"]:
        return self.logits.variables_used()

    def renumbered(self, positions: Int[np.ndarray, " variables"], count: int) -> SoftmaxStage[F]:
        return replace(self, logits=self.logits.renumbered(positions, count))


Stage = AttentionStage[F] | SoftmaxStage[F]


def entry_name(stage: Stage[F], entry: int) -> str:
    """Return the name of a flat entry of the state after a stage: channel, or channel@token after the first token."""
    row, column = divmod(entry, len(stage.channels))
    token = stage.tokens[row]
    return stage.channels[column] if token == 0 else f"{stage.channels[column]}@{token}"


@dataclass(frozen=True, eq=False)
class NormalForm(Generic[F]):
    """u₀ is the inputs, flattened and concatenated. Each stage makes the next u. The output is affine in the last u."""

    stages: tuple[Stage[F], ...]
    output: F
    num_inputs: int

    @property
    def num_scores(self) -> int:
        """The number of scores of one point: queries × keys, whatever a mask hides."""
        heads = (head for stage in self.stages if isinstance(stage, AttentionStage) for head in stage.heads)
        return sum(head.queries.shape[0] * head.keys.shape[0] for head in heads)


def normal_form(program: Program, numbers: type[F] = FloatForm) -> NormalForm[F]:  # type: ignore[assignment]
    """Fold the layers of the memory and then those of the main stream, in one type of numbers."""
    starts = program.starts
    sizes = [tokens * width for tokens, width in starts]
    num_inputs, dtype = sum(sizes), program.dtype
    main = numbers.identity(starts[0], np.arange(sizes[0]), num_inputs, dtype)
    memory = numbers.identity(starts[1], sizes[0] + np.arange(sizes[1]), num_inputs, dtype)
    stages: list[Stage[F]] = []
    of_memory, of_main = streams(program)
    memory, main = _fold_stream(of_memory, memory, main, None, stages, dtype)
    output, _ = _fold_stream(of_main, main, memory, memory, stages, dtype)
    return NormalForm(tuple(stages), output, num_inputs)


def pruned(form: NormalForm) -> NormalForm:
    """Return the normal form without the variables that nothing reads later, so that engines do not compute them."""
    stages: list[Stage] = []
    output, reads = form.output, form.output.variables_used()
    for stage in reversed(form.stages):
        count = len(stage.written)
        own = reads[reads < count] if isinstance(stage, AttentionStage) else np.arange(count)
        kept = np.concatenate([own, reads[reads >= count]])
        positions = np.zeros(count + len(stage.carried), np.int64)
        positions[kept] = np.arange(len(kept))
        if stages:
            after = stages[-1].renumbered(positions, len(kept))
            stages[-1] = replace(after, carried=positions[after.carried])
        else:
            output = output.renumbered(positions, len(kept))
        carried = stage.carried[kept[len(own) :] - count]
        if isinstance(stage, AttentionStage):
            written = stage.written[own]
            residual = stage.queried.only(written if stage.is_residual else written[:0])
            stages.append(replace(stage, queried=residual, written=written, carried=carried))
            forms = (residual, *(each for head in stage.heads for each in (head.queries, head.keys, head.values)))
        else:
            stages.append(replace(stage, carried=carried))
            forms = (stage.logits,)
        reads = np.unique(np.concatenate([carried, *(each.variables_used() for each in forms)]))
    return NormalForm(tuple(reversed(stages)), output, form.num_inputs)


def _fold_stream(
    stream: Stream, state: F, other: F, memory: F | None, stages: list[Stage[F]], dtype: np.dtype[Any]
) -> tuple[F, F]:
    """Fold one stream. `other` is the form that its stages must carry along (for the main stream, the memory)."""
    state = state.rows(stream.first)
    for number, step in enumerate(stream.steps):
        layer, tokens = step.live_layer, step.tokens
        if isinstance(layer, Affine):
            state = state.through(layer)
            continue
        if not len(tokens):  # nothing later reads the state after this layer
            state = state.identity((0, len(layer.channels)), np.zeros(0, np.int64), state.num_variables, dtype)
            continue
        needs_other = memory is None or any(later.layer.cross for later in stream.steps[number + 1 :])
        carried = other.variables_used() if needs_other else np.zeros(0, np.int64)
        if isinstance(layer, Attention):
            keyed = memory if layer.cross and memory is not None else state
            queried = state.rows(step.rows)
            heads = tuple(
                FoldedHead(
                    queried.times(head.W_Q),
                    keyed.times(head.W_K),
                    keyed.times(head.W_V),
                    head.W_O,
                    None if head.mask is None else head.mask.for_queries(tokens),
                )
                for head in layer.heads
            )
            writes = np.zeros((len(tokens), len(layer.channels)), bool)
            for head in layer.heads:
                writes |= (head.W_O != 0).any(axis=0)
            state, written = state.after_stage(writes, queried if layer.residual else None, len(carried), dtype)
            stages.append(
                AttentionStage(layer.name, layer.channels, tokens, heads, queried, layer.residual, written, carried)
            )
        else:
            size = state.shape[0] * state.shape[1]
            stages.append(SoftmaxStage(layer.name, layer.channels, tokens, state, carried))
            state = state.identity(state.shape, np.arange(size), size + len(carried), dtype)
        if needs_other:
            positions = np.zeros(other.num_variables, np.int64)
            positions[carried] = state.num_variables - len(carried) + np.arange(len(carried))
            other = other.renumbered(positions, state.num_variables)
            memory = None if memory is None else other
    return state, other
