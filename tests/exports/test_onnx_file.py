"""An ONNX file computes what the reference computes, in the same dtype, for any batch, with the allowed operators only.

The tolerance is `ir.rounding`: what any evaluation in the program's dtype may be off by. onnxruntime is run as users
run it, with all of its optimisations, and some of the time with none.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import attnc
from attnc.errors import FileError, InputError
from attnc.ir import Attention, Head, Mask, Program
from attnc.ir.spec import check
from engines import agreement
from ir.random_programs import programs, random_inputs
from ir.rounding import assert_agrees

EXTRA = "is not installed: pip install -c constraints.txt -e '.[onnx]'"
onnx = pytest.importorskip("onnx", reason=f"onnx {EXTRA}")
onnxruntime = pytest.importorskip("onnxruntime", reason=f"onnxruntime {EXTRA}")
from attnc.exports import onnx_file  # noqa: E402  (imports onnx)
from attnc.exports.onnx_file import ALLOWED, check_operators, export_onnx, run_onnx, to_model  # noqa: E402


def session(model, is_optimised: bool = True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not is_optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session, inputs) -> np.ndarray:
    names = [wanted.name for wanted in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


@pytest.mark.parametrize("dense_cells", [onnx_file.DENSE_CELLS, 0])
@pytest.mark.parametrize("is_optimised", [True, False])
def test_random_programs(dense_cells, is_optimised):
    def run_checked(program, inputs):
        model = to_model(program, {})
        check_operators(model)
        onnx.checker.check_model(model, full_check=True)
        return run(session(model, is_optimised), inputs)

    sizes = {(onnx_file, "DENSE_CELLS"): dense_cells}
    agreement.assert_random_programs_agree(run_checked, sizes, max_tokens=6, scales=(0.1, 1.0, 400.0))


@settings(max_examples=30, deadline=None)
@given(programs())
def test_any_layer_name(program):
    inputs = random_inputs(program, 2, 0)
    assert_agrees(program, inputs, run(session(to_model(program, {})), inputs))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", agreement.NETWORKS)
def test_constructions(name, dtype, tmp_path):
    network = agreement.NETWORKS[name](dtype)
    program, path = network.program, tmp_path / "f.onnx"
    export_onnx(program, path)
    agreement.assert_batches_agree(program, lambda _, inputs: run(session(onnx.load(path)), inputs))
    inputs = tuple(array / 2 for array in random_inputs(program, 1000, 0))
    expected = network(*inputs)
    scale = np.abs(expected).max()
    difference = np.abs(run_onnx(path, inputs) - expected).max()
    assert difference <= 1000 * np.finfo(dtype).eps * scale  # with float32 inside it is 1e8


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_logits_that_span_a_million_give_no_nan(dtype):
    agreement.assert_wide_logits_agree(dtype, lambda program, inputs: run(session(to_model(program, {})), inputs))


def test_a_mask_is_made_of_its_segments():
    """1,000 × 1,000 entries would take a megabyte; the file has no such constant."""
    segments = np.arange(1000) // 2
    head = Head(*(np.ones((1, 1)) for _ in range(4)), Mask(segments, segments))
    program = check(Program((Attention("pairs", (head,), ("y",)),), ((1000, 1),), (1000, 1)))
    model = to_model(program, {})
    assert len(model.SerializeToString()) < 200_000
    x = np.random.default_rng(0).normal(size=(2, 1000, 1))
    pairs = x.reshape(2, 500, 2)
    expected = [np.exp(x[0, i] * pairs[0, i // 2]) for i in range(4)]
    expected = [(weights * pairs[0, i // 2]).sum() / weights.sum() for i, weights in enumerate(expected)]
    np.testing.assert_allclose(run(session(model), (x,))[0, :4, 0], expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_contract_of_the_file(tmp_path, dtype):
    """One input (batch, d), a symbolic batch, one output, all in the program's dtype, with names that can be read."""
    path = tmp_path / "f.onnx"
    export_onnx(agreement.small_program(dtype), path, metadata={"expression": "cos(x)", "bound": "0.1"})
    model = onnx.load(path)
    (given,), (made,) = model.graph.input, model.graph.output
    assert [(dim.dim_param, dim.dim_value) for dim in given.type.tensor_type.shape.dim] == [("batch", 0), ("", 1)]
    assert [(dim.dim_param, dim.dim_value) for dim in made.type.tensor_type.shape.dim] == [("batch", 0)]
    floats = {onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) for tensor in model.graph.initializer}
    assert floats - {np.dtype(np.int64)} == {np.dtype(dtype)}
    assert {"0_select/head0/scores", "0_select/head0/pattern"} <= {node.name for node in model.graph.node}
    assert "0_select/head0/keys" in {tensor.name for tensor in model.graph.initializer}
    assert {entry.key: entry.value for entry in model.metadata_props} == {"expression": "cos(x)", "bound": "0.1"}
    assert (model.producer_name, model.producer_version) == ("attnc", attnc.__version__)
    assert {node.op_type for node in model.graph.node} <= ALLOWED


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_opsets(opset, tmp_path):
    program, path = agreement.small_program(), tmp_path / "f.onnx"
    export_onnx(program, path, opset=opset)
    points = np.linspace(-1, 1, 5)[:, None]
    assert_agrees(program, (points,), run(session(onnx.load(path)), (points,)))


@pytest.mark.parametrize("opset", [12, 10**6, True, 17.0])
def test_opsets_that_do_not_serve_are_refused(opset, tmp_path):
    with pytest.raises(InputError, match="opset must be"):
        export_onnx(agreement.small_program(), tmp_path / "f.onnx", opset=opset)


@pytest.mark.parametrize(("operator", "domain"), [("Exp", ""), ("Attention", ""), ("MatMul", "com.microsoft")])
def test_a_foreign_operator_and_a_function_are_refused(operator, domain):
    model = to_model(agreement.small_program(), {})
    check_operators(model)
    model.graph.node.append(onnx.helper.make_node(operator, ["input"], ["z"], "stranger", domain=domain))
    with pytest.raises(FileError, match=f"'stranger' is .*{operator}"):
        check_operators(model)
    model.functions.add().name = "hidden"
    with pytest.raises(FileError, match="hidden"):
        check_operators(model)


def test_files_are_run_in_their_own_dtype(tmp_path):
    program, path, points = agreement.small_program(), tmp_path / "f.onnx", np.linspace(-1, 1, 5)[:, None]
    export_onnx(program, path)
    found = run_onnx(path, [points.astype(np.float32).astype(np.float64)])
    assert found.dtype == np.float64
    assert np.abs(run_onnx(path, [points]) - program(points)).max() <= 4 * np.finfo(float).eps
    assert run_onnx(path, [points[:0]]).shape == program(points[:0]).shape


@pytest.mark.parametrize(("name", "complaint"), [("none/f.onnx", "does not exist"), ("", "not a file"), ("\0", "null")])
def test_paths_that_cannot_be_written(tmp_path, name, complaint):
    with pytest.raises(FileError, match=complaint):
        export_onnx(agreement.small_program(), f"{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "f.onnx"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(FileError, match="No space left on device"):
            export_onnx(agreement.small_program(), path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("f.onnx", b"old")]
    export_onnx(agreement.small_program(), path)  # a success replaces it, and leaves nothing else
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.onnx"]
    assert onnx.load(path).producer_name == "attnc"


def test_a_model_above_two_gibibytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "MAX_ONNX_BYTES", 200)
    with pytest.raises(FileError, match="2 GiB"):
        export_onnx(agreement.small_program(), tmp_path / "f.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_the_extra_the_error_says_what_to_install(missing):
    code = (
        f"import sys; sys.modules['{missing}'] = None; from attnc.exports.onnx_file import run_onnx; run_onnx('f', [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "InputError" in done.stderr
    assert "pip install -c constraints.txt 'attnc[onnx]'" in done.stderr
