"""ONNX files: their contract, their operators, and how they are written. Their values are tested in test_agreement."""

from __future__ import annotations

import os

import numpy as np
import pytest

import attnc
from attnc.errors import FileError, InputError
from attnc.ir import Attention, Head, Mask, Program
from attnc.ir.spec import check
from engines import agreement
from ir.random_programs import random_inputs
from ir.rounding import assert_agrees

EXTRA = "is not installed: pip install -c constraints.txt -e '.[onnx]'"
onnx = pytest.importorskip("onnx", reason=f"onnx {EXTRA}")
onnxruntime = pytest.importorskip("onnxruntime", reason=f"onnxruntime {EXTRA}")
from attnc.exports import onnx_file  # noqa: E402  (imports onnx)
from attnc.exports.onnx_file import ALLOWED, check_operators, export_onnx, run_onnx, to_model  # noqa: E402


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", agreement.NETWORKS)
def test_constructions(name, dtype, tmp_path):
    """In files, run by users' own call; test_agreement compares any batch with the reference."""
    network, path = agreement.network(name, dtype), tmp_path / "f.onnx"
    export_onnx(network.program, path)
    inputs = tuple(array / 2 for array in random_inputs(network.program, 1000, 0))
    expected = network(*inputs)
    difference = np.abs(run_onnx(path, inputs) - expected).max()
    assert difference <= 1000 * np.finfo(dtype).eps * np.abs(expected).max()  # with float32 inside it is 1e8


def test_a_mask_is_made_of_its_segments(tmp_path):
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
    onnx.save(model, tmp_path / "f.onnx")
    np.testing.assert_allclose(run_onnx(tmp_path / "f.onnx", [x])[0, :4, 0], expected, rtol=1e-14)


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
    assert_agrees(program, (points,), run_onnx(path, [points]))


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
