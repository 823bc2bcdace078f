"""The normal form as an ONNX graph: matrix products, sums, softmaxes, and moving of entries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from attnc.errors import FileError
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, SoftmaxStage
from attnc.ir.summing import BLOCK

if TYPE_CHECKING:
    from scipy.sparse import csc_array, csr_array

MAX_BYTES = 2**31 - 2**20
"""Protocol buffers end at 2 GiB; a MiB is kept for what is not weights."""
NOBODY = -2
"""The segment of a key that no query sees."""
DENSE_CELLS = 2**16
"""A linear map of up to this many entries is one matrix product; a larger one with few in each row is gathered."""


class Graph:
    """Nodes and initializers as they are added; a node is named as its output."""

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._num_bytes = 0

    def node(self, operator: str, name: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, array: np.ndarray | csr_array | csc_array) -> str:
        self._num_bytes += math.prod(array.shape) * array.dtype.itemsize
        if self._num_bytes > MAX_BYTES:
            raise FileError(
                f"the weights up to {name!r} take {self._num_bytes / 2**30:.2f} GiB, more than the 2 GiB of an ONNX "
                "file. Export a network with fewer anchors, or save it as a directory."
            )
        dense = array if isinstance(array, np.ndarray) else array.toarray()
        self.initializers.append(numpy_helper.from_array(np.asarray(dense, order="C"), name))
        return name

    def affine(self, name: str, form: FloatForm, u: str) -> str:
        """(batch, rows, columns) of a form; if nothing depends on u, a product with zeros gives it the batch."""
        linear, variables = form.linear, form.linear.shape[1]
        longest = int(np.diff(linear.indptr).max(initial=0))
        if linear.shape[0] * variables <= DENSE_CELLS or 4 * longest > variables:
            weight = self.constant(f"{name}/weight", linear.T)
            moved = self.node("MatMul", f"{name}/product", u, weight)
        else:
            columns, weights = _padded(linear.indptr, linear.indices, linear.data, longest)
            of_rows = self.constant(f"{name}/variables", columns)
            terms = self.node("Gather", f"{name}/terms", self.node("Transpose", f"{name}/u.T", u), of_rows, axis=0)
            sums = self.node("MatMul", f"{name}/sums", self.constant(f"{name}/weights", weights[:, None]), terms)
            moved = self.node("Transpose", f"{name}/sums.T", sums, perm=[2, 0, 1])  # (rows, 1, batch) before
        moved = self.node("Reshape", f"{name}/array", moved, self.constant(f"{name}/shape", np.array([0, *form.shape])))
        return self.node("Add", f"{name}/moved", moved, self.constant(f"{name}/constant", form.constant))


def _padded(indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a sparse matrix as (rows, longest) columns and values, filled up with zeros in the first column."""
    counts = np.diff(indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(data)) - np.repeat(indptr[:-1], counts)
    columns, values = np.zeros((len(counts), longest), np.int64), np.zeros((len(counts), longest), data.dtype)
    columns[rows, places], values[rows, places] = indices, data
    return columns, values


def variables(graph: Graph, names: list[str], shapes: tuple[tuple[int, ...], ...]) -> str:
    flat = [
        graph.node("Reshape", f"{name}/flat", name, graph.constant(f"{name}/size", np.array([0, math.prod(shape)])))
        for name, shape in zip(names, shapes, strict=True)
    ]
    return flat[0] if len(flat) == 1 else graph.node("Concat", "inputs", *flat, axis=1)


def softmax_stage(graph: Graph, name: str, stage: SoftmaxStage, u: str) -> str:
    weights = graph.node("Softmax", f"{name}/softmax", graph.affine(f"{name}/logits", stage.logits, u), axis=-1)
    return _next(graph, name, weights, stage.logits.shape, np.arange(stage.logits.linear.shape[0]), u, stage.carried)


def attention_stage(graph: Graph, name: str, stage: AttentionStage, u: str) -> str:
    parts = [_head(graph, f"{name}/head{h}", head, u) for h, head in enumerate(stage.heads)]
    if stage.residual is not None:
        parts.append(graph.affine(f"{name}/residual", stage.residual, u))
    total = parts[0]
    for number, part in enumerate(parts[1:], 1):
        total = graph.node("Add", f"{name}/sum{number}", total, part)
    shape = (stage.heads[0].queries.shape[0], stage.heads[0].W_O.shape[1])
    return _next(graph, name, total, shape, stage.written, u, stage.carried)


def _head(graph: Graph, name: str, head: FoldedHead, u: str) -> str:
    queries, num_queries = graph.affine(f"{name}/queries", _not_empty(head.queries), u), head.queries.shape[0]
    keys, values = _not_empty(head.keys), _not_empty(head.values)
    asks, shown = head.query_segments, head.key_segments
    if asks is None or shown is None:
        asks, shown = np.zeros(num_queries, np.int64), np.full(keys.shape[0], EVERY_QUERY)
    seen_by_all = _seen_by_all(asks, shown)
    is_masked = seen_by_all is None
    if seen_by_all is not None and len(seen_by_all) < len(shown):
        keys, values, shown = keys.rows(seen_by_all), values.rows(seen_by_all), shown[seen_by_all]
    if _is_summed_in_blocks(graph, len(shown)) and len(shown) % BLOCK:
        keys, values, shown = _filled(keys, values, shown)
        is_masked = True
    if keys.is_constant:
        transposed = graph.constant(f"{name}/keys", keys.constant.T)
    else:
        transposed = graph.node("Transpose", f"{name}/keys.T", graph.affine(f"{name}/keys", keys, u), perm=[0, 2, 1])
    scores = graph.node("MatMul", f"{name}/scores", queries, transposed)
    if is_masked:
        hidden = graph.constant(f"{name}/hidden", np.array(-np.inf, graph.dtype))
        scores = graph.node("Where", f"{name}/masked", _visible(graph, name, asks, shown), scores, hidden)
    pattern = graph.node("Softmax", f"{name}/pattern", scores, axis=-1)
    mixed = _mix(graph, f"{name}/mixed", pattern, num_queries, values, u)
    W_O = head.W_O if len(head.W_O) else np.zeros((1, head.W_O.shape[1]), graph.dtype)
    return graph.node("MatMul", f"{name}/out", mixed, graph.constant(f"{name}/W_O", W_O))


def _mix(graph: Graph, name: str, pattern: str, queries: int, values: FloatForm, u: str) -> str:
    """pattern @ values. Of float32, sums are made in blocks (`ir.summing`): of products, column by column, and of the
    weights, by whose sum they are divided, as Softmax adds them up in any order. (Of products of three axes with an
    empty batch onnxruntime dies.)"""
    keys, columns = values.shape
    if not _is_summed_in_blocks(graph, keys):
        return graph.node("MatMul", name, pattern, _array(graph, f"{name}/values", values, u))
    found = []
    for column in range(columns):
        row = _array(graph, f"{name}/values{column}", _row(values, column), u)
        terms = graph.node("Mul", f"{name}/terms{column}", pattern, row)
        found.append(_sum(graph, f"{name}/sum{column}", terms, queries, keys))
    sums = found[0] if columns == 1 else graph.node("Concat", f"{name}/sums", *found, axis=-1)
    return graph.node("Div", name, sums, _sum(graph, f"{name}/total", pattern, queries, keys))


def _row(values: FloatForm, column: int) -> FloatForm:
    """A column of a form, as one row."""
    keys, columns = values.shape
    return FloatForm(values.linear[np.arange(keys) * columns + column], values.constant[:, [column]].T.tocsr())


def _array(graph: Graph, name: str, form: FloatForm, u: str) -> str:
    return graph.constant(name, form.constant) if form.is_constant else graph.affine(name, form, u)


def _is_summed_in_blocks(graph: Graph, keys: int) -> bool:
    return graph.dtype == np.float32 and keys > BLOCK


def _sum(graph: Graph, name: str, terms: str, queries: int, keys: int) -> str:
    """(batch, queries, 1) of (batch, queries, keys), in blocks. Blocks of blocks are products with ones where a term
    belongs to a block, as adding zeros rounds nothing."""
    m = keys // BLOCK
    shape = graph.constant(f"{name}/shape", np.array([0, queries, BLOCK, m]))
    blocks = graph.node("Reshape", f"{name}/blocks", terms, shape)
    sums = graph.node("ReduceSum", f"{name}/{m}", blocks, graph.constant(f"{name}/axis", np.array([2])), keepdims=0)
    while m > 1:
        fewer = -(-m // BLOCK)
        members = (np.arange(m)[:, None] // BLOCK == np.arange(fewer)).astype(graph.dtype)
        sums = graph.node("MatMul", f"{name}/{fewer}", sums, graph.constant(f"{name}/members{fewer}", members))
        m = fewer
    return sums


def _filled(keys: FloatForm, values: FloatForm, segments: np.ndarray) -> tuple[FloatForm, FloatForm, np.ndarray]:
    """Whole blocks: copies of the first key, of a segment that no query sees."""
    spare = -keys.shape[0] % BLOCK
    rows = np.concatenate([np.arange(keys.shape[0]), np.zeros(spare, np.int64)])
    return keys.rows(rows), values.rows(rows), np.concatenate([segments, np.full(spare, NOBODY)])


def _not_empty(form: FloatForm) -> FloatForm:
    """The form itself, or one column of zeros if it has none: Reshape cannot make an axis of length 0."""
    return form if form.shape[1] else form.times(np.zeros((0, 1), form.constant.dtype))


def _seen_by_all(query_segments: np.ndarray, key_segments: np.ndarray) -> np.ndarray | None:
    """The keys that the queries see if they all see the same ones, otherwise None."""
    segments = np.unique(np.where(np.isin(query_segments, key_segments), query_segments, EVERY_QUERY))
    if len(segments) > 1:
        return None
    return np.flatnonzero(np.isin(key_segments, [*segments, EVERY_QUERY]))


def _visible(graph: Graph, name: str, query_segments: np.ndarray, key_segments: np.ndarray) -> str:
    """(queries, keys), from the segments and within the graph: the file never holds a mask."""
    of_queries = graph.constant(f"{name}/query_segments", query_segments.astype(np.int64)[:, None])
    of_keys = graph.constant(f"{name}/key_segments", key_segments.astype(np.int64))
    is_own = graph.node("Equal", f"{name}/is_own", of_queries, of_keys)
    every = graph.constant(f"{name}/every_query", np.array(EVERY_QUERY))
    return graph.node("Or", f"{name}/visible", is_own, graph.node("Equal", f"{name}/is_shared", of_keys, every))


def _next(
    graph: Graph, name: str, array: str, shape: tuple[int, int], written: np.ndarray, u: str, carried: np.ndarray
) -> str:
    """The variables after a stage: what `written` picks of its flattened array, and those that are carried on."""
    size = shape[0] * shape[1]
    made = graph.node("Reshape", f"{name}/flat", array, graph.constant(f"{name}/size", np.array([0, size])))
    if len(written) < size:
        made = graph.node("Gather", f"{name}/written", made, graph.constant(f"{name}/writes", written), axis=1)
    if not len(carried):
        return made
    kept = graph.node("Gather", f"{name}/carried", u, graph.constant(f"{name}/carries", carried), axis=1)
    return graph.node("Concat", f"{name}/next", made, kept, axis=1)
