"""A program as a pure function of JAX arrays, in the program's dtype: jit, vmap and grad take it.

It works on the normal form. A program with few keys is a list of instructions (`fused`): every number of a point is a
row of its own, and XLA fuses all operations on the rows into few loops. This took a third of the time of arrays of
scores. A larger program runs stage by stage, with a row of scores for each query of a point. Then points are taken in
blocks, and a gradient computes every block again, so that memory stays bounded.

XLA on a CPU takes subnormal numbers as zero. The rounding term of a certificate covers this: it counts the least normal
number for every underflow (`proofs.rounding.program`). XLA may merge two sums over axes into one, whose order is
unknown. So sums over keys in float32 are chains of additions, which it leaves as they are (`ir.summing`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from attnc.engines.fused import AFFINE, HEAD, MOVING, PAIR, PRODUCT, SIMPLE_HEAD, Instructions, instructions
from attnc.engines.query_pieces import QueryPieces
from attnc.errors import InputError, MissingExtra
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, normal_form, pruned
from attnc.ir.program import Program, require_shapes
from attnc.ir.summing import BLOCK

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise MissingExtra("to_jax needs", "jax", "jax", error) from error

MOST_TERMS = 512
"""The largest number of terms of scores, averages and affine maps, summed over all instructions, that are written out.
XLA took 0.6 s to compile 128 keys, and 1.7 s with a gradient, both in proportion to the keys."""
CELLS_PER_JAX_BLOCK = 2**20
"""Number of array cells of a block of points in stages: 8 MiB of float64. A single row of scores may be longer."""
DENSE_CELLS = 2**16
"""Maximum number of entries of a linear map that is always dense: 512 KiB. A larger map has an index per term."""

Array = Any
Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable."""
Run = Callable[[Array], Array]
"""Maps the variables of points, (batch, variables), to an array whose first axis is the batch."""


def to_jax(program: Program, limits: Limits | None = None, *, is_nan_outside: bool = False) -> Callable[..., Array]:
    """Return the program as a function that is compiled at the first call with arrays of some shape.

    Points beyond `limits`, if there are any, are moved to them, or their outputs are NaN.
    """
    dtype, shapes = program.dtype, program.input_shapes
    _require_dtype(dtype)
    run = _evaluator(pruned(normal_form(program)), dtype)
    least, most = (None, None) if limits is None else (end.astype(dtype) for end in limits)

    def network(*inputs: Array) -> Array:
        _require_dtype(dtype)
        for given in inputs:
            if not isinstance(given, jax.Array | np.ndarray | float | int) or jnp.iscomplexobj(given):
                raise InputError(f"the network takes real arrays; found {getattr(given, 'dtype', type(given))}")
        arrays = [jnp.asarray(given, dtype) for given in inputs]
        is_one = [array.ndim for array in arrays] == [len(shape) for shape in shapes]
        arrays = [array[None] for array in arrays] if is_one else arrays
        require_shapes("network", shapes, arrays)
        given = jnp.concatenate([jax.lax.collapse(array, 1) for array in arrays], axis=1)
        u = given if least is None else jnp.clip(given, least, most)
        out = run(u)
        if is_nan_outside:
            is_moved = (given != u).any(axis=1, keepdims=True)  # a NaN differs from itself
            out = jnp.where(is_moved, jnp.nan, out)
        out = out.reshape(len(u), *program.output_shape)
        return out[0] if is_one else out

    return jax.jit(network)


def _require_dtype(dtype: np.dtype[Any]) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InputError(
            f'the network computes in {dtype}, which JAX has switched off. Call jax.config.update("jax_enable_x64", '
            'True) first, or take net.astype("float32"), or compile with dtype="float32".'
        )


def _evaluator(form: NormalForm, dtype: np.dtype[Any]) -> Run:
    given = instructions(form, dtype)
    if given is not None:
        _, keys, queries, columns, *_ = given.table.T
        if (1 + keys * np.maximum(1, np.maximum(queries, columns))).sum() <= MOST_TERMS:
            return functools.partial(_written_out, given)
    return _staged(form)


# --- instructions -----------------------------------------------------------------------------------------------------


def _written_out(given: Instructions, u: Array) -> Array:
    """Run the instructions, each on whole rows. `fused` says what they mean."""
    state = dict[int, Array](enumerate(u.T))
    rows, numbers = given.rows.tolist(), given.numbers
    for kind, keys, queries, columns, at, first, second, third in given.table.tolist():
        if kind == AFFINE:
            constant = jnp.full(len(u), numbers[first])
            terms = [numbers[first + i] * state[rows[at + i]] for i in range(1, keys + 1)]
            state[rows[at]] = functools.reduce(operator.add, terms, constant)
        elif kind == PRODUCT:
            state[rows[at]] = state[rows[at]] + state[rows[at + 1]] * state[rows[at + 2]]
        elif kind in (SIMPLE_HEAD, HEAD, PAIR):
            slopes = numbers[second : second + keys * queries].reshape(keys, queries)
            values = numbers[third : third + keys * columns].reshape(keys, columns)
            read = [state[row] for row in rows[at : at + queries]]
            averages = _head(slopes, numbers[first : first + keys], values)(jnp.zeros(len(u), numbers.dtype), *read)
            state.update(zip(rows[at + queries :], averages, strict=False))
        elif kind == MOVING:
            read = [state[row] for row in rows[at : at + queries]]
            own = [state[row] for row in rows[at + queries : at + (1 + keys) * queries]]
            after = at + (1 + keys) * queries
            moving = [[state[rows[after + k * columns + c]] for c in range(columns)] for k in range(keys)]
            none = jnp.zeros(len(u), numbers.dtype)
            scores = [_inner(own[k * queries : (k + 1) * queries], read, none) for k in range(keys)]
            state.update(zip(rows[after + keys * columns :], _averages(scores, moving), strict=False))
        else:
            weights = _exponentials([state[row] for row in rows[at : at + keys]])
            total = _sum(weights)
            state.update(zip(rows[at + keys : at + 2 * keys], [weight / total for weight in weights], strict=True))
    return jnp.stack([state[row] for row in given.outputs.tolist()], axis=1)


def _head(slopes: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> Callable[..., tuple[Array, ...]]:
    """Return the averages of a head with constant keys as a function of a row of zeros and the rows of its query.

    The derivative of an average A along query entry j is Σ_k p_k·slope_kj·(v_k − A). It is written here, because the
    derivatives of all operations one by one take XLA twenty times as long to compile.
    """

    def run(zero: Array, *read: Array) -> tuple[Array, ...]:
        scores = [_inner(own, read, offset) + zero for own, offset in zip(slopes, offsets, strict=True)]
        return tuple(_averages(scores, values))

    def derivative(read: Sequence[Array], moved: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        found = averages(*read)
        # Exponentials are computed again. Else XLA would store each of them, in a loop of its own.
        (zero, *again), *means = jax.lax.optimization_barrier((tuple(read), *found))
        weights = _exponentials(
            [_inner(own, again, offset) + zero for own, offset in zip(slopes, offsets, strict=True)]
        )
        total = _sum(weights)
        changes = [zero for _ in found]
        for c, average in enumerate(means):
            for j, change in enumerate(moved[1:]):
                terms = [weight * (slopes[k, j] * (values[k, c] - average)) for k, weight in enumerate(weights)]
                changes[c] = changes[c] + _sum(terms) / total * change
        return found, tuple(changes)

    averages: Callable[..., tuple[Array, ...]] = jax.custom_jvp(run)
    averages.defjvp(derivative)  # type: ignore[attr-defined]
    return averages


def _inner(factors: Iterable[Array], rows: Sequence[Array], constant: Array) -> Array:
    """Return constant + Σ factors·rows. The products are added up first."""
    products = [factor * row for factor, row in zip(factors, rows, strict=True)]
    return functools.reduce(operator.add, [*products, constant])


def _exponentials(scores: Sequence[Array]) -> list[Array]:
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, scores))
    return [jnp.exp(score - top) for score in scores]


def _averages(scores: Sequence[Array], values: Iterable[Iterable[Array]]) -> list[Array]:
    """Return the average of each column of the values, (keys, columns), with the softmax of the scores as weights."""
    weights = _exponentials(scores)
    total = _sum(weights)
    return [
        _sum([weight * value for weight, value in zip(weights, column, strict=True)]) / total
        for column in zip(*values, strict=True)
    ]


def _sum(terms: Sequence[Array]) -> Array:
    """Return the sum, in blocks as in `ir.summing`."""
    while len(terms) > 1:
        terms = [functools.reduce(operator.add, terms[i : i + BLOCK]) for i in range(0, len(terms), BLOCK)]
    return terms[0]


# --- stages -----------------------------------------------------------------------------------------------------------


def _staged(form: NormalForm) -> Run:
    stages = [_Attention(stage) if isinstance(stage, AttentionStage) else _Softmax(stage) for stage in form.stages]
    output, num_outputs = _Form(form.output), math.prod(form.output.shape)
    step = max(1, CELLS_PER_JAX_BLOCK // max(1, num_outputs, *(stage.cells_per_point for stage in stages)))

    def run(u: Array) -> Array:
        for stage in stages:
            u = stage(u)
        return jnp.broadcast_to(output(u), (len(u), *form.output.shape)).reshape(len(u), num_outputs)

    def in_blocks(u: Array) -> Array:
        if len(u) <= step:
            return run(u)
        blocks = jnp.pad(u, ((0, -len(u) % step), (0, 0)), mode="edge").reshape(-1, step, u.shape[1])
        return jax.lax.map(jax.checkpoint(run), blocks).reshape(-1, num_outputs)[: len(u)]

    return in_blocks


class _Form:
    """An array of affine functions of u: (batch, variables) → (batch, rows, columns), or (rows, columns) if constant.

    A linear map that is large has, for each entry, the numbers of its variables and their coefficients.
    """

    def __init__(self, form: FloatForm) -> None:
        self.is_constant, self.constant, self._shape = form.is_constant, form.constant.toarray(), form.shape
        num_entries, num_variables = form.linear.shape
        self._is_dense = num_entries * num_variables <= DENSE_CELLS
        if self.is_constant or self._is_dense:
            self._weight, self.cells_per_point = form.linear.toarray().T if not self.is_constant else None, num_entries
            return
        counts = np.diff(form.linear.indptr)
        self._which, self._coefficients = (
            np.zeros((num_entries, counts.max()), dtype) for dtype in (np.int64, form.linear.dtype)
        )
        places = np.arange(counts.max()) < counts[:, None]
        self._which[places], self._coefficients[places] = form.linear.indices, form.linear.data
        self.cells_per_point = 2 * self._which.size + num_entries

    def __call__(self, u: Array) -> Array:
        if self.is_constant:
            return self.constant
        moved = matmul(u, self._weight) if self._is_dense else (u[:, self._which] * self._coefficients).sum(axis=-1)
        return moved.reshape(len(u), *self._shape) + self.constant


class _Attention:
    """An attention stage: (batch, variables) → (batch, moved)."""

    def __init__(self, stage: AttentionStage) -> None:
        width = stage.heads[0].W_O.shape[1]
        columns, places = np.unique(stage.written % width, return_inverse=True)  # the channels that are read later
        self._heads = [_Head(head, columns) for head in stage.heads]
        self._written, self._carried = stage.written // width * len(columns) + places, stage.carried
        self._residual = _Form(stage.queried.columns(columns)) if stage.is_residual else None
        cells = stage.heads[0].queries.shape[0] * len(columns)
        self.cells_per_point: int = sum(head.cells_per_point + cells for head in self._heads) + 3 * cells
        self.cells_per_point += 0 if self._residual is None else self._residual.cells_per_point

    def __call__(self, u: Array) -> Array:
        total = functools.reduce(operator.add, [head(u) for head in self._heads])
        if self._residual is not None:
            total = total + self._residual(u)
        return jnp.concatenate([jax.lax.collapse(total, 1)[:, self._written], u[:, self._carried]], axis=1)


class _Softmax:
    """A softmax stage, with the same call."""

    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._shape, self._carried = _Form(stage.logits), stage.logits.shape, stage.carried
        self.cells_per_point = 3 * math.prod(stage.logits.shape) + self._logits.cells_per_point

    def __call__(self, u: Array) -> Array:
        weights = exponentials(jnp.broadcast_to(self._logits(u), (len(u), *self._shape)))
        weights = weights / _key_sum(weights)[..., None]
        return jnp.concatenate([jax.lax.collapse(weights, 1), u[:, self._carried]], axis=1)


class _Head:
    """softmax(queries·keysᵀ)·values·W_O: (batch, variables) → (batch, queries, columns that are read later)."""

    def __init__(self, head: FoldedHead, columns: np.ndarray) -> None:
        plan = QueryPieces(head, CELLS_PER_JAX_BLOCK)
        self._queries, self._keys, self._values = _Form(head.queries), _Form(plan.keys), _Form(plan.values)
        self._shape, self._W_O, self._shared = head.queries.shape, head.W_O[:, columns], plan.shared
        self._pieces, self._order = plan.pieces, np.argsort(np.concatenate([which.ravel() for which, _ in plan.pieces]))
        self.cells_per_point = plan.cells_per_point + sum(
            form.cells_per_point for form in (self._queries, self._keys, self._values) if not form.is_constant
        )

    def __call__(self, u: Array) -> Array:
        queries = jnp.broadcast_to(self._queries(u), (len(u), *self._shape))
        keys, values = self._keys(u), self._values(u)
        pieces = [self._average(queries[:, which], keys, values, own) for which, own in self._pieces]
        mixed = jnp.concatenate([jax.lax.collapse(piece, 1, -1) for piece in pieces], axis=1)
        return matmul(mixed[:, self._order], self._W_O)

    def _average(self, queries: Array, keys: Array, values: Array, own: np.ndarray | None) -> Array:
        """Return the averages for some queries: (batch, queries, …), or (batch, s, q, …) if row s sees keys own[s]."""
        if own is not None:
            seen = np.concatenate([np.broadcast_to(self._shared, (len(own), len(self._shared))), own], axis=1)
            keys, values = keys[..., seen, :], values[..., seen, :]
        weights = exponentials(matmul(queries, jnp.swapaxes(keys, -1, -2)))
        return _key_mix(weights, values) / _key_sum(weights)[..., None]


def matmul(a: Array, b: Array) -> Array:
    """Return a @ b. Some devices would use fewer digits by default."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def exponentials(scores: Array) -> Array:
    """Return exponentials of the scores less the largest, over the last axis."""
    return jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))


def _key_sum(terms: Array) -> Array:
    """Return the sum over the last axis, in blocks for float32."""
    return _sum_of_runs(jnp.moveaxis(terms, -1, 0)) if terms.dtype == jnp.float32 else terms.sum(axis=-1)


def _key_mix(weights: Array, values: Array) -> Array:
    """Return weights @ values, (…, q, keys) and (…, keys, v) → (…, q, v), in blocks for float32."""
    n, v = values.shape[-2:]
    if weights.dtype != jnp.float32 or n <= BLOCK:
        return matmul(weights, values)
    whole = n - n % BLOCK
    values = values.reshape(*(1,) * (weights.ndim - values.ndim), *values.shape)
    of_blocks = jnp.moveaxis(weights[..., :whole].reshape(*weights.shape[:-1], whole // BLOCK, BLOCK), -2, 0)
    by_blocks = jnp.moveaxis(values[..., :whole, :].reshape(*values.shape[:-2], whole // BLOCK, BLOCK, v), -3, 0)
    sums = matmul(of_blocks, by_blocks)
    if whole < n:
        sums = jnp.concatenate([sums, matmul(weights[..., whole:], values[..., whole:, :])[None]])
    return _sum_of_runs(sums)


def _sum_of_runs(terms: Array) -> Array:
    """Return the sum over the first axis. A block takes one term from each of 8 runs, so that long rows are added."""
    while (n := len(terms)) > BLOCK:
        step = n // BLOCK
        runs = [terms[i * step : (i + 1) * step] for i in range(BLOCK)]
        rest = [functools.reduce(operator.add, list(terms[step * BLOCK :]))[None]] if n % BLOCK else []
        terms = jnp.concatenate([functools.reduce(operator.add, runs), *rest])
    return functools.reduce(operator.add, list(terms))
