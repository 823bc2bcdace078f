"""A program as an ONNX file: the normal form as matrix products, sums and softmaxes, in the program's dtype.

Nothing is fused, because a fused attention operator may compute in float32 even on float64 inputs. The batch is
symbolic. The runtime holds whole attention maps, batch × queries × keys, so the caller has to split a large batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import FileError, InputError, MissingExtra
from attnc.exports.safe_files import PathLike, why_not_into, write_file_whole
from attnc.ir.layers import EVERY_QUERY, Mask
from attnc.ir.normal_form import FloatForm, FoldedHead, SoftmaxStage, Stage, normal_form
from attnc.ir.program import Program
from attnc.ir.summing import BLOCK

if TYPE_CHECKING:
    from scipy.sparse import csc_array, csr_array

try:
    import onnx
    from onnx import checker, helper, numpy_helper
except ImportError as error:
    raise MissingExtra("ONNX files need", "onnx", "onnx", error) from error

IN_BLOCKS = frozenset({"Div", "Mul", "ReduceSum"})
AT_THE_BOX = frozenset({"Max", "Min", "ReduceSum"})
ALLOWED = {"Add", "Concat", "Equal", "Gather", "MatMul", "Or", "Reshape", "Softmax", "Transpose", "Where"}
ALLOWED |= IN_BLOCKS | AT_THE_BOX
"""Every operator that a file may hold. Those AT_THE_BOX occur if inputs are kept to a box. Those IN_BLOCKS occur in
float32 besides: products of weights and values, their sums in blocks, and the division by the sum of the weights, which
is 1 up to rounding. In float64 there is no Mul: onnxruntime fuses a product with a number into the next MatMul, as a
float32 attribute, which moves results by 3e-8."""
OPSET = 17
"""The default opset, from 2022. onnxruntime reads it since version 1.12."""
OLDEST_OPSET = 13
"""The oldest opset allowed. It is the first in which Softmax works along one axis."""
MAX_ONNX_BYTES = 2**31 - 2**20
"""Maximum size of the weights, in bytes. A protocol buffer has at most 2 GiB, and 1 MiB of it is kept for the rest."""
Limits = tuple[np.ndarray, np.ndarray]
"""The least and the largest value of every variable."""
NOBODY = -2
"""The segment of a key that no query sees."""
DENSE_CELLS = 2**16
"""Maximum number of entries of a linear map that is always one matrix product. A larger map with few entries per row is
gathered."""


def export_onnx(
    program: Program,
    path: PathLike,
    *,
    metadata: Mapping[str, str] | None = None,
    opset: int = OPSET,
    limits: Limits | None = None,
    is_nan_outside: bool = False,
    accept: Callable[[bytes], object] = lambda content: None,
) -> None:
    """Write the file, whole or not at all, over whatever file was there; `metadata` goes into its metadata_props.

    One input is called `input`, two are `input0` and `input1`; the result is `output`; shapes are the program's. Points
    beyond `limits`, if there are any, are moved to them, or their outputs are NaN. `accept` is called with the content
    before it is written: if it raises, nothing is written.
    """
    newest = onnx.defs.onnx_opset_version()
    if isinstance(opset, bool) or not isinstance(opset, int) or not OLDEST_OPSET <= opset <= newest:
        raise InputError(f"opset must be a whole number from {OLDEST_OPSET} to {newest}, found {opset!r}")
    target = checked_target(path)
    model = to_model(program, metadata or {}, opset, limits, is_nan_outside=is_nan_outside)
    check_operators(model)
    checker.check_model(model, full_check=True)
    content = model.SerializeToString()
    accept(content)
    write_file_whole(target, content)


def check_operators(model: onnx.ModelProto) -> None:
    """Raise FileError if the model holds an operator that is not in ALLOWED, or a function of its own."""
    if len(model.functions):
        raise FileError(f"the model defines the function {model.functions[0].name!r}; only operators are allowed")
    for node in model.graph.node:
        if node.op_type not in ALLOWED or node.domain not in ("", "ai.onnx"):
            name = f"{node.domain}.{node.op_type}".lstrip(".")
            raise FileError(f"the node {node.name!r} is {name}; allowed are {', '.join(sorted(ALLOWED))}")


def run_onnx(model: PathLike | bytes, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Run a file, or the content of one, by onnxruntime on the CPU, with its default optimisations."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("running ONNX files needs", "onnxruntime", "onnx", error) from error
    model = model if isinstance(model, bytes) else os.fspath(model)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()
    dtype = np.float32 if wanted[0].type == "tensor(float)" else np.float64
    given = {port.name: np.asarray(array, dtype) for port, array in zip(wanted, inputs, strict=True)}
    (found,) = session.run(None, given)
    return np.asarray(found)


def to_model(
    program: Program,
    metadata: Mapping[str, str],
    opset: int = OPSET,
    limits: Limits | None = None,
    *,
    is_nan_outside: bool = False,
) -> onnx.ModelProto:
    """Return the graph, with its weights as initializers."""
    form, graph = normal_form(program), Graph(program.dtype)
    element = helper.np_dtype_to_tensor_dtype(program.dtype)
    names = ["input"] if len(program.input_shapes) == 1 else ["input0", "input1"]
    asked = variables(graph, names, program.input_shapes)
    u = moved = asked if limits is None else _moved(graph, asked, limits)
    for number, stage in enumerate(form.stages):
        u = add_stage(graph, f"{number}_{stage.name}", stage, u)
    last = graph.affine("last", form.output, u)
    if moved != asked and is_nan_outside:
        last = graph.node("Add", "marked", last, _mark(graph, asked, moved))
    graph.node("Reshape", "output", last, graph.constant("output/shape", np.array([0, *program.output_shape])))
    shapes = zip([*names, "output"], [*program.input_shapes, program.output_shape], strict=True)
    *given, result = (helper.make_tensor_value_info(name, element, ["batch", *shape]) for name, shape in shapes)
    return finished(graph, given, result, metadata, opset)


def finished(
    graph: Graph,
    given: list[onnx.ValueInfoProto],
    result: onnx.ValueInfoProto,
    metadata: Mapping[str, str],
    opset: int,
) -> onnx.ModelProto:
    """Return the model of a graph with these inputs and this output."""
    made = helper.make_graph(graph.nodes, "attnc", given, [result], graph.initializers)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))
    model.producer_name, model.producer_version = "attnc", version("attnc")
    helper.set_model_props(model, dict(metadata))
    return model


def _moved(graph: Graph, u: str, limits: Limits) -> str:
    """Add the variables (batch, d), moved to the limits."""
    least, most = (np.asarray(ends, graph.dtype)[None] for ends in limits)
    raised = graph.node("Max", "limits/raised", u, graph.constant("limits/least", least))
    return graph.node("Min", "limits/moved", raised, graph.constant("limits/most", most))


def _mark(graph: Graph, u: str, moved: str) -> str:
    """Add an array (batch, 1, 1) that is NaN where a variable was moved, and 0 elsewhere."""
    kept = graph.node("Equal", "limits/kept", u, moved)
    zero, nan = (graph.constant(f"limits/{x}", np.array(x, graph.dtype)) for x in (0.0, np.nan))
    marks = graph.node("Where", "limits/marks", kept, zero, nan)
    summed = graph.node("ReduceSum", "limits/mark", marks, graph.constant("limits/axis", np.array([1])), keepdims=1)
    return graph.node("Reshape", "limits/out", summed, graph.constant("limits/shape", np.array([0, 1, 1])))


def checked_target(path: PathLike) -> str:
    """Return the path of a file that can be written, or raise FileError."""
    try:
        target = os.path.realpath(path)
    except (OSError, ValueError) as error:  # a link to itself; a NUL in the path
        raise FileError(f"cannot write {os.fspath(path)!r}: {error}") from error
    reason = why_not_into(os.path.dirname(target))
    if reason is not None:
        raise FileError(f"cannot write {os.fspath(path)!r}: {reason}")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise FileError(f"cannot write {os.fspath(path)!r}: it exists and is not a file. Choose another name.")
    return target


class Graph:
    """The nodes and initializers of a graph under construction. A node has the name of its output."""

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
        if self._num_bytes > MAX_ONNX_BYTES:
            raise FileError(
                f"the weights up to {name!r} take {self._num_bytes / 2**30:.2f} GiB, more than the 2 GiB of an ONNX "
                "file. Export a network with fewer anchors, or save it as a directory."
            )
        dense = array if isinstance(array, np.ndarray) else array.toarray()
        self.initializers.append(numpy_helper.from_array(np.asarray(dense, order="C"), name))
        return name

    def affine(self, name: str, form: FloatForm, u: str) -> str:
        """Add (batch, rows, columns) of a form. If nothing depends on u, a product with zeros adds the batch axis."""
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
    """Return the rows of a sparse matrix as (rows, longest) columns and values, padded with zeros in column 0."""
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


def add_stage(graph: Graph, name: str, stage: Stage, u: str) -> str:
    """Add the variables after a stage: the `written` entries of its flattened array, and those carried on."""
    if isinstance(stage, SoftmaxStage):
        array = graph.node("Softmax", f"{name}/softmax", graph.affine(f"{name}/logits", stage.logits, u), axis=-1)
    else:
        parts = [_head(graph, f"{name}/head{h}", head, u) for h, head in enumerate(stage.heads)]
        if stage.residual is not None:
            parts.append(graph.affine(f"{name}/residual", stage.residual, u))
        array = parts[0]
        for number, part in enumerate(parts[1:], 1):
            array = graph.node("Add", f"{name}/sum{number}", array, part)
    size = len(stage.tokens) * len(stage.channels)
    made = graph.node("Reshape", f"{name}/flat", array, graph.constant(f"{name}/size", np.array([0, size])))
    if len(stage.written) < size:
        made = graph.node("Gather", f"{name}/written", made, graph.constant(f"{name}/writes", stage.written), axis=1)
    if not len(stage.carried):
        return made
    kept = graph.node("Gather", f"{name}/carried", u, graph.constant(f"{name}/carries", stage.carried), axis=1)
    return graph.node("Concat", f"{name}/next", made, kept, axis=1)


def _head(graph: Graph, name: str, head: FoldedHead, u: str) -> str:
    queries, num_queries = graph.affine(f"{name}/queries", _not_empty(head.queries), u), head.queries.shape[0]
    keys, values = _not_empty(head.keys), _not_empty(head.values)
    mask = head.mask or Mask(np.zeros(num_queries, np.int64), np.full(keys.shape[0], EVERY_QUERY))
    asks, shown, groups = mask.query_segments, mask.key_segments, mask.groups()
    is_masked = len(groups) > 1
    if not is_masked:  # all queries see the same keys
        seen = np.sort(np.concatenate([mask.shared, *(own for _, own in groups)]))
        keys, values, shown = keys.rows(seen), values.rows(seen), shown[seen]
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
    """Add pattern @ values.

    In float32 sums are made in blocks (`ir.summing`): the sums of products, column by column, and the sum of the
    weights, by which they are divided. The reason is that Softmax sums weights in an unknown order. (onnxruntime
    crashes on products of three axes with an empty batch.)
    """
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
    """Return a column of a form as one row."""
    keys, columns = values.shape
    return FloatForm(values.linear[np.arange(keys) * columns + column], values.constant[:, [column]].T.tocsr())


def _array(graph: Graph, name: str, form: FloatForm, u: str) -> str:
    return graph.constant(name, form.constant) if form.is_constant else graph.affine(name, form, u)


def _is_summed_in_blocks(graph: Graph, keys: int) -> bool:
    return graph.dtype == np.float32 and keys > BLOCK


def _sum(graph: Graph, name: str, terms: str, queries: int, keys: int) -> str:
    """Add the sums (batch, queries, 1) of (batch, queries, keys), in blocks.

    Blocks of blocks are products with a matrix of zeros and ones. Adding zeros causes no rounding.
    """
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
    """Pad the last block with copies of the first key, in a segment that no query sees."""
    spare = -keys.shape[0] % BLOCK
    rows = np.concatenate([np.arange(keys.shape[0]), np.zeros(spare, np.int64)])
    return keys.rows(rows), values.rows(rows), np.concatenate([segments, np.full(spare, NOBODY)])


def _not_empty(form: FloatForm) -> FloatForm:
    """Return the form, or one column of zeros if it has no column, because Reshape cannot make an axis of length 0."""
    return form if form.shape[1] else form.times(np.zeros((0, 1), form.constant.dtype))


def _visible(graph: Graph, name: str, query_segments: np.ndarray, key_segments: np.ndarray) -> str:
    """Add the mask (queries, keys). The graph computes it from the segments, so the file never holds a mask."""
    of_queries = graph.constant(f"{name}/query_segments", query_segments.astype(np.int64)[:, None])
    of_keys = graph.constant(f"{name}/key_segments", key_segments.astype(np.int64))
    is_own = graph.node("Equal", f"{name}/is_own", of_queries, of_keys)
    every = graph.constant(f"{name}/every_query", np.array(EVERY_QUERY))
    return graph.node("Or", f"{name}/visible", is_own, graph.node("Equal", f"{name}/is_shared", of_keys, every))
