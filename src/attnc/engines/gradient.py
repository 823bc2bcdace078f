"""Gradients of a program, forwards: every variable has a value, and a derivative by each input.

It works on the pruned normal form, in the program's dtype and in blocks of points. Affine forms have the derivative
linear·du. A head with the weights w_k = softmax of the scores s_k has, with the averages A = Σ w_k·v_k,

    dA = Σ_k w_k (v_k − A)(ds_k − Σ_m w_m·ds_m) + Σ_k w_k·dv_k.

Both factors are centred. The sum is the same without it, but rounding would grow with the sizes of values and slopes.
With constant keys a_k, ds_k = a_k·dq. So the sum is taken once per entry of the query q:
dA = Σ_j (Σ_k w_k (v_k − A)(a_kj − Σ_m w_m·a_mj))·dq_j. Sums over keys are those of `ir.summing`.

A grid of keys has gradients by windows as well (`GridGradients`), which are faster and are not within the rounding of a
certificate. Numpy runs the stages. If numba is installed, and the program has instructions (`fused`), compiled loops
run these.
"""

from __future__ import annotations

import functools
import math
import operator
from functools import cached_property

import numpy as np

from attnc.engines.fused import RunBlock, exponentials, instructions, is_between
from attnc.engines.grid import GridHead
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, NormalForm, SoftmaxStage, pruned
from attnc.ir.soft_head import unpacked
from attnc.ir.summing import key_mix, key_sum
from attnc.numerics.arrays import Float

CELLS_PER_BLOCK = 2**16
"""Number of array cells of the largest array of a block of points: 512 KiB of float64 stay in the cache of one core."""


class Gradients:
    """Computes the derivatives of all outputs by all inputs: (batch, inputs) → (batch, outputs·inputs)."""

    def __init__(self, form: NormalForm, dtype: np.dtype[np.floating]) -> None:
        self._form, self._dtype = pruned(form), dtype
        self.num_inputs = form.num_inputs
        self.num_outputs = math.prod(form.output.shape) * form.num_inputs

    def run(self, *, is_compiled: bool) -> RunBlock:
        """Return the function for parts of a batch: compiled loops if they are asked for and possible, or numpy."""
        return (self._compiled if is_compiled else None) or self._in_numpy

    @cached_property
    def _compiled(self) -> RunBlock | None:
        given = instructions(self._form, self._dtype)
        if given is None:
            return None
        from attnc.engines.gradient_numba import compiled

        return compiled(given)

    @cached_property
    def _stages(self) -> list[_AttentionGradient | _SoftmaxGradient]:
        return [
            _AttentionGradient(stage, self.num_inputs) if isinstance(stage, AttentionStage) else _SoftmaxGradient(stage)
            for stage in self._form.stages
        ]

    def _in_numpy(self, u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
        is_inside = is_between(u, least, most)
        cells = max([self.num_outputs, *(stage.cells_per_point for stage in self._stages)], default=1)
        step = max(1, CELLS_PER_BLOCK // max(1, cells))
        for start in range(0, len(u), step):
            block = slice(start, start + step)
            out[block] = self._block(u[block])
        return is_inside

    def _block(self, u: Float[np.ndarray, "batch inputs"]) -> Float[np.ndarray, "batch derivatives"]:
        d = self.num_inputs
        du = np.broadcast_to(np.eye(d, dtype=self._dtype), (len(u), d, d))
        for stage in self._stages:
            u, du = stage(u, du)
        return _derivative(self._form.output, du).reshape(len(u), d, -1).swapaxes(1, 2).reshape(len(u), -1)


def _derivative(
    form: FloatForm, du: Float[np.ndarray, "batch d variables"]
) -> Float[np.ndarray, "batch d rows columns"]:
    batch, d, count = du.shape
    return (form.linear @ du.reshape(batch * d, count).T).T.reshape(batch, d, *form.shape)


class GridGradients:
    """The same for one stage of heads whose keys form grids: windows of keys instead of all keys.

    With E for the average by the weights, Σ w_k (v_k − A)(a_k − Σ w_m·a_m) = E[v·a] − E[v]·E[a]. The head averages the
    columns v, a and v·a. Their differences lose about as many digits as there are keys per axis in digits, and the
    truncation of the windows counts for the largest |v·a|.
    """

    def __init__(self, form: NormalForm, heads: list[tuple[GridHead, FoldedHead, np.ndarray]]) -> None:
        self._output, self._stage, self._heads = form.output, form.stages[0], heads
        self.num_inputs = form.num_inputs
        self.num_outputs = math.prod(form.output.shape) * form.num_inputs

    @classmethod
    def of(cls, form: NormalForm) -> GridGradients | None:
        """Return None unless there is one stage without a residual, and the keys of all of its heads form grids."""
        form = pruned(form)
        stage = form.stages[0] if len(form.stages) == 1 else None
        if not isinstance(stage, AttentionStage) or stage.residual is not None:
            return None
        found = list[tuple[GridHead, FoldedHead, np.ndarray]]()
        for head in stage.heads:
            if not (head.keys.is_constant and head.values.is_constant and head.mask is None):
                return None
            moves = np.flatnonzero(np.diff(head.queries.linear.indptr))
            grid = _with_products(head, moves) if head.queries.shape[0] == 1 else None
            if grid is None:
                return None
            found.append((grid, head, moves))
        return cls(form, found)

    def run(self, *, is_compiled: bool) -> RunBlock:
        def run(u: np.ndarray, out: np.ndarray, least: np.ndarray, most: np.ndarray) -> bool:
            out[:] = self._block(u, is_compiled=is_compiled)
            return is_between(u, least, most)

        return run

    def _block(self, u: np.ndarray, *, is_compiled: bool) -> np.ndarray:
        changes = []
        for grid, head, moves in self._heads:
            d_v, j = head.values.shape[1], len(moves)
            v, a, both = np.split(grid(u, is_compiled=is_compiled)[:, 0].astype(np.float64), [d_v, d_v + j], axis=1)
            slopes = both.reshape(len(u), d_v, j) - v[:, :, None] * a[:, None]
            linear = head.queries.linear[moves].toarray().astype(np.float64)  # (moving, inputs)
            changes.append(np.swapaxes(slopes @ linear, 1, 2) @ head.W_O)  # (batch, inputs, width)
        change = functools.reduce(operator.add, changes)
        du = np.concatenate(
            [change[:, :, self._stage.written], _carried(self._stage.carried, len(u), self.num_inputs)], axis=2
        )
        return _derivative(self._output, du).reshape(len(u), self.num_inputs, -1).swapaxes(1, 2).reshape(len(u), -1)


def _with_products(head: FoldedHead, moves: np.ndarray) -> GridHead | None:
    """Return the grid whose values are v, a, and all products of an entry of v and a moving entry of a."""
    from scipy.sparse import csr_array

    v, a = (unpacked(form.constants).astype(np.float64) for form in (head.values, head.keys))
    a = a[:, moves] - a[:, moves].mean(axis=0)
    columns = np.concatenate([v, a, (v[:, :, None] * a[:, None]).reshape(len(v), -1)], axis=1)
    values = FloatForm(csr_array((columns.size, head.values.num_variables)), csr_array(columns))
    return GridHead.of(FoldedHead(head.queries, head.keys, values, np.eye(columns.shape[1]), None))


def _carried(carried: np.ndarray, batch: int, d: int) -> np.ndarray:
    return np.broadcast_to(np.eye(d)[:, carried], (batch, d, len(carried)))


class _SoftmaxGradient:
    """A softmax stage: (batch, variables) and (batch, d, variables) → those of the next stage."""

    def __init__(self, stage: SoftmaxStage) -> None:
        self._logits, self._carried = stage.logits, stage.carried
        self.cells_per_point = 3 * math.prod(stage.logits.shape)

    def __call__(self, u: np.ndarray, du: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, change = self._logits(u).copy(), _derivative(self._logits, du)
        weights = exponentials(scores, scores.max(axis=-1, keepdims=True))
        weights /= key_sum(weights)[..., None]
        mean = key_sum(weights[:, None] * change)[..., None]
        change = weights[:, None] * (change - mean)
        moved, changed = weights.reshape(len(u), -1), change.reshape(*du.shape[:2], -1)
        return (
            np.concatenate([moved, u[:, self._carried]], axis=1),
            np.concatenate([changed, du[:, :, self._carried]], axis=2),
        )


class _AttentionGradient:
    """An attention stage, with the same call."""

    def __init__(self, stage: AttentionStage, d: int) -> None:
        self._stage = stage
        self._heads = [_HeadGradient(head, d) for head in stage.heads]
        own = (1 + d) * (2 * stage.heads[0].queries.shape[0] * stage.heads[0].W_O.shape[1] + len(stage.carried))
        self.cells_per_point = max(own, *(head.cells_per_point for head in self._heads))

    def __call__(self, u: np.ndarray, du: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [run(u, du) for run in self._heads]
        mixed, changed = zip(*found, strict=True)
        total, change = (
            functools.reduce(
                operator.add, [each @ head.W_O for each, head in zip(parts, self._stage.heads, strict=True)]
            )
            for parts in (mixed, changed)
        )
        if self._stage.residual is not None:
            total, change = total + self._stage.residual(u), change + _derivative(self._stage.residual, du)
        written, carried = self._stage.written, self._stage.carried
        return (
            np.concatenate([total.reshape(len(u), -1)[:, written], u[:, carried]], axis=1),
            np.concatenate([change.reshape(*du.shape[:2], -1)[:, :, written], du[:, :, carried]], axis=2),
        )


class _HeadGradient:
    """The averages of a head before W_O, (batch, queries, d_v), and their derivatives, (batch, d, queries, d_v).

    A mask becomes groups: the queries of a group see its keys. The queries of a group are taken in pieces.
    """

    def __init__(self, head: FoldedHead, d: int) -> None:
        self._num_queries, self._d_v, self._dtype = head.queries.shape[0], head.W_O.shape[0], head.W_O.dtype
        groups = [(np.arange(self._num_queries), np.arange(head.keys.shape[0]))]
        if head.mask is not None:
            groups = [(queries, np.concatenate([head.mask.shared, own])) for queries, own in head.mask.groups()]
        self._pieces, self.cells_per_point = list[tuple[np.ndarray, FoldedHead]](), 1
        for queries, keys in groups:
            step = max(1, CELLS_PER_BLOCK // max(1, len(keys)))
            seen = head if head.mask is None else _only(head, keys)
            for start in range(0, len(queries), step):
                chosen = queries[start : start + step]
                self._pieces.append((chosen, _asked(seen, chosen)))
                scores = len(chosen) * len(keys) * (1 if head.keys.is_constant else d)
                moving = 0 if head.values.is_constant else len(keys) * self._d_v * (1 + d)
                self.cells_per_point = max(self.cells_per_point, scores, moving)

    def __call__(self, u: np.ndarray, du: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mixed = np.empty((len(u), self._num_queries, self._d_v), self._dtype)
        change = np.empty((len(u), du.shape[1], self._num_queries, self._d_v), self._dtype)
        for chosen, head in self._pieces:
            mixed[:, chosen], change[:, :, chosen] = _averages(head, u, du)
        return mixed, change


def _only(head: FoldedHead, keys: np.ndarray) -> FoldedHead:
    return FoldedHead(head.queries, head.keys.rows(keys), head.values.rows(keys), head.W_O, None)


def _asked(head: FoldedHead, queries: np.ndarray) -> FoldedHead:
    return FoldedHead(head.queries.rows(queries), head.keys, head.values, head.W_O, None)


def _averages(head: FoldedHead, u: np.ndarray, du: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    everything = slice(0, head.keys.shape[0])
    q, dq = head.queries(u), _derivative(head.queries, du)
    keys, values = head.keys.block(everything, u), head.values.block(everything, u)  # constant ones without a batch
    scores = q @ np.swapaxes(keys, -1, -2)
    weights = exponentials(scores, scores.max(axis=-1, keepdims=True))
    total = key_sum(weights)[..., None]
    A = key_mix(weights, values) / total
    if head.keys.is_constant:
        change = _by_query(head, weights, total, keys, values, A, dq)
    else:
        ds = dq @ np.swapaxes(keys, -1, -2)[:, None] + q[:, None] @ np.swapaxes(_derivative(head.keys, du), -1, -2)
        change = _by_score(weights, total, ds, values, A)
    if not head.values.is_constant:
        change += key_mix(weights[:, None], _derivative(head.values, du)) / total[:, None]
    return A, change


def _by_query(
    head: FoldedHead,
    weights: Float[np.ndarray, "batch queries keys"],
    total: Float[np.ndarray, "batch queries one"],
    keys: Float[np.ndarray, "keys d_k"],
    values: Float[np.ndarray, "*batch keys d_v"],
    A: Float[np.ndarray, "batch queries d_v"],
    dq: Float[np.ndarray, "batch d queries d_k"],
) -> Float[np.ndarray, "batch d queries d_v"]:
    """Return the derivatives through the scores, if the keys are constant."""
    moves = np.flatnonzero((np.diff(head.queries.linear.indptr).reshape(head.queries.shape) > 0).any(axis=0))
    mean = key_mix(weights, np.ascontiguousarray(keys[:, moves])) / total
    change = np.zeros((*dq.shape[:3], A.shape[2]), A.dtype)
    for c in range(A.shape[2]):
        deviation = weights * (values[..., None, :, c] - A[..., c, None])
        for place, j in enumerate(moves):
            slope = key_sum(deviation * (keys[:, j] - mean[..., place, None]))[..., None] / total
            change[..., c] += slope[:, None, :, 0] * dq[..., j]
    return change


def _by_score(
    weights: Float[np.ndarray, "batch queries keys"],
    total: Float[np.ndarray, "batch queries one"],
    ds: Float[np.ndarray, "batch d queries keys"],
    values: Float[np.ndarray, "*batch keys d_v"],
    A: Float[np.ndarray, "batch queries d_v"],
) -> Float[np.ndarray, "batch d queries d_v"]:
    """Return the derivatives through the scores, of which ds are the derivatives."""
    ds = ds - key_sum(weights[:, None] * ds)[..., None] / total[:, None]
    columns = [
        key_sum((weights * (values[..., None, :, c] - A[..., c, None]))[:, None] * ds) / total[:, None, :, 0]
        for c in range(A.shape[2])
    ]
    return np.stack(columns, axis=-1) if columns else np.zeros((*ds.shape[:3], 0), A.dtype)
