"""A program as an ONNX file: the normal form, written out as matrix products and softmaxes, in the program's dtype.

Nothing is fused: a fused attention operator may compute in float32 whatever it is given. The batch is symbolic; the
runtime holds whole attention maps, batch × queries × keys, so a large batch is for the caller to cut.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import FileError, InputError
from attnc.ir.normal_form import AttentionStage, normal_form
from attnc.ir.program import Program

if TYPE_CHECKING:
    pass

INSTALL = "Install it with: pip install -c constraints.txt 'attnc[onnx]'"
try:
    import onnx
    from onnx import checker, helper

    from attnc.exports.onnx_graph import Graph, attention_stage, softmax_stage, variables
except ImportError as error:
    raise InputError(f"ONNX files need onnx, which cannot be imported ({error}). {INSTALL}") from error

Path = str | os.PathLike[str]

IN_BLOCKS = frozenset({"Div", "Mul", "ReduceSum"})
ALLOWED = IN_BLOCKS | {"Add", "Concat", "Equal", "Gather", "MatMul", "Or", "Reshape", "Softmax", "Transpose", "Where"}
"""Every operator that a file may hold. Those IN_BLOCKS are in float32 alone: products of weights and values, their sums
in blocks, and the sum of the weights, 1 but for rounding, by which these are divided. In float64 there is no Mul:
onnxruntime fuses one by a number into the MatMul after it, as an attribute in float32, which moves results by 3e-8."""
OPSET = 17
OLDEST_OPSET = 13  # Softmax along one axis, as it is meant here


def export_onnx(program: Program, path: Path, *, metadata: Mapping[str, str] | None = None, opset: int = OPSET) -> None:
    """Writes the file, whole or not at all, over whatever file was there; `metadata` goes into its metadata_props.

    One input is called `input`, two are `input0` and `input1`; the result is `output`; shapes are the program's.
    """
    newest = onnx.defs.onnx_opset_version()
    if isinstance(opset, bool) or not isinstance(opset, int) or not OLDEST_OPSET <= opset <= newest:
        raise InputError(f"opset must be a whole number from {OLDEST_OPSET} to {newest}, found {opset!r}")
    target = _checked_target(path)
    model = to_model(program, metadata or {}, opset)
    check_operators(model)
    checker.check_model(model, full_check=True)
    _write_whole(target, model.SerializeToString())


def check_operators(model: onnx.ModelProto) -> None:
    """Raises FileError if the model holds an operator that is not in ALLOWED, or a function of its own."""
    if len(model.functions):
        raise FileError(f"the model defines the function {model.functions[0].name!r}; only operators are allowed")
    for node in model.graph.node:
        if node.op_type not in ALLOWED or node.domain not in ("", "ai.onnx"):
            name = f"{node.domain}.{node.op_type}".lstrip(".")
            raise FileError(f"the node {node.name!r} is {name}; allowed are {', '.join(sorted(ALLOWED))}")


def run_onnx(path: Path, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What the file returns, run by onnxruntime on the CPU with the optimisations that users get."""
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(f"running ONNX files needs onnxruntime, which is missing ({error}). {INSTALL}") from error
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()
    dtype = np.float32 if wanted[0].type == "tensor(float)" else np.float64
    given = {port.name: np.asarray(array, dtype) for port, array in zip(wanted, inputs, strict=True)}
    (found,) = session.run(None, given)
    return np.asarray(found)


def to_model(program: Program, metadata: Mapping[str, str], opset: int = OPSET) -> onnx.ModelProto:
    """The graph, with its weights as initializers."""
    form, graph = normal_form(program), Graph(program.dtype)
    element = helper.np_dtype_to_tensor_dtype(program.dtype)
    names = ["input"] if len(program.input_shapes) == 1 else ["input0", "input1"]
    u = variables(graph, names, program.input_shapes)
    for number, stage in enumerate(form.stages):
        name = f"{number}_{stage.name}"
        u = (
            attention_stage(graph, name, stage, u)
            if isinstance(stage, AttentionStage)
            else softmax_stage(graph, name, stage, u)
        )
    last = graph.affine("last", form.output, u)
    graph.node("Reshape", "output", last, graph.constant("output/shape", np.array([0, *program.output_shape])))
    made = helper.make_graph(
        graph.nodes,
        "attnc",
        [
            helper.make_tensor_value_info(name, element, ["batch", *shape])
            for name, shape in zip(names, program.input_shapes, strict=True)
        ],
        [helper.make_tensor_value_info("output", element, ["batch", *program.output_shape])],
        graph.initializers,
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))
    model.producer_name, model.producer_version = "attnc", version("attnc")
    helper.set_model_props(model, dict(metadata))
    return model


def _checked_target(path: Path) -> str:
    try:
        target = os.path.realpath(path)
    except (OSError, ValueError) as error:  # a link to itself; a NUL in the path
        raise FileError(f"cannot write {os.fspath(path)!r}: {error}") from error
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise FileError(f"cannot write {os.fspath(path)!r}: the folder {parent!r} does not exist. Create it first.")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise FileError(f"cannot write {os.fspath(path)!r}: what is there already is not a file. Choose another name.")
    return target


def _write_whole(target: str, content: bytes) -> None:
    new = os.path.join(os.path.dirname(target), f".attnc-{secrets.token_hex(8)}.new")
    try:
        with open(new, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except OSError as error:
        raise FileError(f"cannot write {target!r}: {error.strerror or error}. Nothing was changed.") from error
    finally:
        with suppress(OSError):  # it is still there only if something went wrong
            os.unlink(new)
