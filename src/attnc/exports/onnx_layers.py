"""A deep program as an ONNX file, layer by layer: equal layers are one Loop, and no map is a dense matrix.

`onnx_file` folds a program into few stages, which suits a network whose queries are few numbers. A program that takes a
thousand steps on a prompt would become a thousand stages. Here a state is carried from layer to layer as it is, layers
that repeat (`ir.repeats`) are the body of one Loop, and an affine map computes the numbers that change
(`ir.affine_rows`). The queries of a mask's segment meet the keys that they see, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx  # `onnx_file` has raised MissingExtra if it is missing
from onnx import checker, helper, numpy_helper

from attnc.exports.onnx_file import OPSET, Graph, checked_target, finished
from attnc.exports.safe_files import PathLike, write_file_whole
from attnc.ir.affine_rows import AffineRows, ByTurn
from attnc.ir.layers import MOST_VIEWS, Affine, Attention, Head
from attnc.ir.program import Program
from attnc.ir.repeats import Part, Repeat, runs

OPERATORS = frozenset(
    {
        "Add",
        "Concat",
        "ConstantOfShape",
        "CumSum",
        "Gather",
        "Identity",
        "Loop",
        "MatMul",
        "Mul",
        "ReduceSum",
        "Reshape",
        "ScatterND",
        "Softmax",
    }
    | {"Transpose", "Where"}
)
"""Every operator that a file may hold."""


def export_layers(program: Program, path: PathLike, *, metadata: Mapping[str, str], opset: int = OPSET) -> None:
    """Write the file, whole or not at all. Inputs and output have the names that `onnx_file.export_onnx` gives them."""
    target = checked_target(path)
    model = layered_model(program, metadata, opset)
    checker.check_model(model, full_check=True)
    write_file_whole(target, model.SerializeToString())


def layered_model(program: Program, metadata: Mapping[str, str], opset: int = OPSET) -> onnx.ModelProto:
    """Return the graph, with its weights as initializers."""
    graph = _LayerGraph(program.dtype)
    element = helper.np_dtype_to_tensor_dtype(program.dtype)
    names = ["input"] if len(program.input_shapes) == 1 else ["input0", "input1"]
    flat = [
        graph.reshaped(f"{name}/flat", name, math.prod(shape))
        for name, shape in zip(names, program.input_shapes, strict=True)
    ]
    if len(flat) == 1:
        flat.append(graph.node("Gather", "none", flat[0], graph.shared("none/index", np.zeros(0, np.int64)), axis=1))
    main, second = program.starts
    memory = _stream(graph, "memory", program.memory, _FlatState(flat[1], second), None)
    state = _stream(graph, "main", program.layers, _FlatState(flat[0], main), memory)
    graph.node("Reshape", "output", state.name, graph.shared("output/shape", np.array([0, *program.output_shape])))
    ports = zip([*names, "output"], [*program.input_shapes, program.output_shape], strict=True)
    graph.nodes[:0] = graph.leading
    *given, result = (helper.make_tensor_value_info(name, element, ["batch", *shape]) for name, shape in ports)
    return finished(graph, given, result, metadata, opset)


@dataclass(frozen=True)
class _FlatState:
    """A flat state in the graph: its name, and its shape (tokens, width) for one point."""

    name: str
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _LayerGraph(Graph):
    """A graph that stores equal constants once, and can collect nodes for the body of a loop."""

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        super().__init__(dtype)
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.leading: list[onnx.NodeProto] = []  # nodes that come before all others, as loops refer to them

    def shared(self, name: str, array: np.ndarray) -> str:
        """Add a constant, or return the name of an equal one."""
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.constant(name, array)
        return self._known[key]

    def sparse(self, name: str, array: np.ndarray) -> str:
        """Add a constant as its entries and their places, if that takes fewer bytes than all its numbers."""
        places = np.argwhere(array)
        if len(places) * (array.itemsize + places.itemsize * array.ndim) >= array.nbytes:
            return self.shared(name, array)
        key = (f"sparse {array.dtype}", array.shape, array.tobytes())
        if key not in self._known:
            shape = self.shared(f"{name}/shape", np.array(array.shape, np.int64))
            zero = numpy_helper.from_array(np.zeros(1, array.dtype))
            index = self.shared(f"{name}/places", places)
            entries = self.shared(f"{name}/entries", array[tuple(places.T)])
            self.leading += [
                helper.make_node("ConstantOfShape", [shape], [f"{name}/zeros"], name=f"{name}/zeros", value=zero),
                helper.make_node("ScatterND", [f"{name}/zeros", index, entries], [name], name=name),
            ]
            self._known[key] = name
        return self._known[key]

    def reshaped(self, name: str, source: str, *shape: int) -> str:
        """Give an array (batch, …) the shape (batch, *shape)."""
        return self.node("Reshape", name, source, self.shared(f"{name}/shape", np.array([0, *shape], np.int64)))

    def rows(self, name: str, source: str, chosen: np.ndarray, total: int) -> str:
        """Take these of `total` rows along axis 1."""
        if np.array_equal(chosen, np.arange(total)):
            return source
        return self.node("Gather", name, source, self.index(f"{name}/index", chosen.astype(np.int32)), axis=1)

    def index(self, name: str, chosen: np.ndarray) -> str:
        """Add an index by its second differences, if that takes fewer bytes: runs of it then take two numbers each."""
        twice = np.diff(chosen, 2, prepend=np.zeros(2, np.int32)).astype(np.int32)
        places = np.argwhere(twice)
        if places.nbytes + 4 * len(places) >= chosen.nbytes:
            return self.shared(name, chosen)
        key = ("index", chosen.shape, chosen.tobytes())
        if key not in self._known:
            sparse, axis = self.sparse(f"{name}/differences", twice), self.shared("axis", np.array(0, np.int64))
            for source, sums in ((sparse, f"{name}/runs"), (f"{name}/runs", name)):
                self.leading.append(helper.make_node("CumSum", [source, axis], [sums], name=sums))
            self._known[key] = name
        return self._known[key]

    @contextmanager
    def body(self) -> Iterator[list[onnx.NodeProto]]:
        """Collect the nodes that are added meanwhile. Constants stay with the graph, and the body refers to them."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer


def _stream(
    graph: _LayerGraph, prefix: str, parts: Sequence[Part], state: _FlatState, memory: _FlatState | None
) -> _FlatState:
    """Add the layers of a stream."""
    for number, run in enumerate(runs(parts)):
        name = f"{prefix}/{number}"
        state = _turn(graph, name, run, state, memory) if run.count == 1 else _loop(graph, name, run, state, memory)
    return state


def _loop(graph: _LayerGraph, name: str, run: Repeat, state: _FlatState, memory: _FlatState | None) -> _FlatState:
    """Add a Loop that carries the state through all turns."""
    turn, going, entering = f"{name}/turn", f"{name}/going", f"{name}/state"
    with graph.body() as nodes:
        made = _turn(graph, f"{name}/body", run, _FlatState(entering, state.shape), memory, turn)
        graph.node("Identity", f"{name}/still", going)
    element = helper.np_dtype_to_tensor_dtype(graph.dtype)
    carried = [helper.make_tensor_value_info(each, element, ["batch", state.size]) for each in (entering, made.name)]
    count = helper.make_tensor_value_info(turn, onnx.TensorProto.INT64, [])
    flags = [helper.make_tensor_value_info(each, onnx.TensorProto.BOOL, []) for each in (going, f"{name}/still")]
    body = helper.make_graph(nodes, f"{name}/body", [count, flags[0], carried[0]], [flags[1], carried[1]])
    times = graph.shared(f"{name}/times", np.array(run.count, np.int64))
    return _FlatState(graph.node("Loop", f"{name}/end", times, "", state.name, body=body), made.shape)


def _turn(
    graph: _LayerGraph, prefix: str, run: Repeat, state: _FlatState, memory: _FlatState | None, turn: str | None = None
) -> _FlatState:
    """Add the layers of one turn. `turn` names its number, if values vary from turn to turn."""
    for place, layer in enumerate(run.layers):
        name = f"{prefix}/{layer.name}" if turn is None else f"{prefix}/{place}"
        if isinstance(layer, Affine):
            of_turns = (run.varying.get((place, part)) for part in ("weight", "constant"))
            state = _affine(graph, name, AffineRows.of(layer, *of_turns), state, turn)
        elif isinstance(layer, Attention):
            state = _attention(graph, name, layer, state, memory)
        else:
            tokens = graph.reshaped(f"{name}/tokens", state.name, *state.shape)
            weights = graph.node("Softmax", f"{name}/softmax", tokens, axis=-1)
            state = _FlatState(graph.reshaped(f"{name}/flat", weights, state.size), state.shape)
    return state


def _affine(graph: _LayerGraph, name: str, rows: AffineRows, state: _FlatState, turn: str | None) -> _FlatState:
    """Add the numbers that are computed, and select the next state from them and the old one."""
    num_made, entries = rows.columns.shape
    source = state.name
    if num_made:
        weights, constants = (
            _of_turn(graph, f"{name}/{part}", numbers, turn)
            for part, numbers in (("weights", rows.weights), ("constants", rows.constants))
        )
        if state.size:
            columns = graph.shared(f"{name}/columns", rows.columns.reshape(-1).astype(np.int32))
            terms = graph.node("Gather", f"{name}/terms", state.name, columns, axis=1)
            apart = graph.reshaped(f"{name}/apart", terms, num_made, entries)
            products = graph.node("Mul", f"{name}/products", apart, weights)
            last = graph.shared("last", np.array([2], np.int64))
            sums = graph.node("ReduceSum", f"{name}/sums", products, last, keepdims=0)
        else:  # a product with zeros adds the batch axis
            none = graph.shared(f"{name}/none", np.zeros((0, num_made), graph.dtype))
            sums = graph.node("MatMul", f"{name}/sums", state.name, none)
        made = graph.node("Add", f"{name}/made", sums, constants)
        source = graph.node("Concat", f"{name}/both", state.name, made, axis=1)
    return _FlatState(graph.rows(f"{name}/next", source, rows.selected, state.size + num_made), rows.shape)


def _of_turn(graph: _LayerGraph, name: str, numbers: ByTurn, turn: str | None) -> str:
    """Return the numbers of the turn that runs."""
    distinct, of_turn = numbers.distinct, numbers.of_turn
    if turn is None or len(distinct) == 1:
        return graph.shared(name, distinct[of_turn[0] if len(of_turn) else 0])
    kinds = graph.shared(f"{name}/kinds", of_turn.astype(np.int64))
    kind = graph.node("Gather", f"{name}/kind", kinds, turn, axis=0)
    return graph.node("Gather", f"{name}/now", graph.shared(name, distinct), kind, axis=0)


def _attention(
    graph: _LayerGraph, name: str, layer: Attention, state: _FlatState, memory: _FlatState | None
) -> _FlatState:
    tokens = graph.reshaped(f"{name}/tokens", state.name, *state.shape)
    keyed, num_keys = tokens, state.shape[0]
    if layer.cross and memory is not None:
        keyed, num_keys = graph.reshaped(f"{name}/memory", memory.name, *memory.shape), memory.shape[0]
    total = tokens if layer.residual else None
    for number, head in enumerate(layer.heads):
        out = _head(graph, f"{name}/head{number}", head, tokens, keyed, (state.shape[0], num_keys))
        total = out if total is None else graph.node("Add", f"{name}/sum{number}", total, out)
    assert total is not None  # `ir.spec` refuses a layer without heads
    shape = (state.shape[0], len(layer.channels))
    return _FlatState(graph.reshaped(f"{name}/flat", total, math.prod(shape)), shape)


def _head(graph: _LayerGraph, name: str, head: Head, tokens: str, keyed: str, sizes: tuple[int, int]) -> str:
    """Add the output of a head for all queries: each segment of its mask apart, or all behind a Where."""
    num_queries, num_keys = sizes
    everyone = [(np.arange(num_queries), np.arange(num_keys))]
    groups = everyone
    if head.mask is not None:
        views = head.mask.views()
        groups = views if len(views) <= MOST_VIEWS else everyone
    parts = []
    for number, (queries, seen) in enumerate(groups):
        where = f"{name}/group{number}"
        asking = graph.rows(f"{where}/asking", tokens, queries, num_queries)
        shown = graph.rows(f"{where}/shown", keyed, seen, num_keys)
        Q, K, V = (
            graph.node("MatMul", f"{where}/{letter}", source, graph.sparse(f"{name}/W_{letter}", W))
            for letter, source, W in (("Q", asking, head.W_Q), ("K", shown, head.W_K), ("V", shown, head.W_V))
        )
        transposed = graph.node("Transpose", f"{where}/K.T", K, perm=[0, 2, 1])
        scores = graph.node("MatMul", f"{where}/scores", Q, transposed)
        if head.mask is not None and groups is everyone:
            visible = graph.shared(f"{name}/visible", head.mask.visible(slice(None)))
            hidden = graph.shared("hidden", np.array(-np.inf, graph.dtype))
            scores = graph.node("Where", f"{where}/masked", visible, scores, hidden)
        pattern = graph.node("Softmax", f"{where}/pattern", scores, axis=-1)
        z = graph.node("MatMul", f"{where}/z", pattern, V)
        parts.append(graph.node("MatMul", f"{where}/out", z, graph.sparse(f"{name}/W_O", head.W_O)))
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([queries for queries, _ in groups]))
    return graph.rows(f"{name}/out", graph.node("Concat", f"{name}/parts", *parts, axis=1), order, num_queries)
