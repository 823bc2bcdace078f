"""The comparison of an ONNX file with the reference: on bounded and infinite boxes, and with a file that is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.proofs.observed import sample_with_tails
from attnc.targets.box import Box

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from attnc.exports import onnx_file

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
INFINITE = [
    ("gelu(x)", (-math.inf, math.inf), 1e-4, "float64"),
    ("(gelu(x)+tanh(x), silu(x))", (-math.inf, math.inf), 1e-3, "float64"),
    ("tanh(x)", (-math.inf, math.inf), 1e-3, "float32"),
    ("tanh(x)", (0, math.inf), 1e-6, "float64"),
    ("atan(x)", (-math.inf, 3), 1e-2, "float64"),
]


@pytest.mark.parametrize("outside", ["allow", "nan", "clamp"])
@pytest.mark.parametrize(("text", "ends", "eps", "dtype"), INFINITE)
def test_infinite_boxes_are_compared_in_the_core_and_in_the_tails(text, ends, eps, dtype, outside, tmp_path):
    net, seen = attnc.compile(text, {"x": ends}, eps=eps, dtype=dtype), []
    evaluated = type(net.program).__call__

    def recorded(program, points):
        seen.append(points)
        return evaluated(program, points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(net.program), "__call__", recorded)
        parity = net.export_onnx(tmp_path / "net.onnx", outside=outside)
    assert parity.is_within
    assert parity.difference <= parity.allowed < eps
    (points,) = seen
    assert parity.num_points == len(points)
    lo, hi = net.certificate.core
    assert ((points >= lo) & (points <= hi)).sum() == 200
    for side, end in zip((-1, 1), (lo, hi), strict=True):
        beyond = (side * (points - end)).max()
        assert beyond > 1e3 * (hi - lo) if math.isinf(ends[side > 0]) else beyond == 0
    expected = net.program(np.array([[1.0], [2.0]]))
    found = onnx_file.run_onnx(tmp_path / "net.onnx", [np.array([[1.0], [2.0]])])
    np.testing.assert_allclose(found, expected, atol=parity.allowed)


def test_bounded_boxes_have_no_tails():
    box = Box.parse({"x": (-1, 1), "y": (0, 2)})
    points = sample_with_tails(box, box, 200, 2.0**26)
    assert len(points) == 200
    assert box.contains(points).all()


@pytest.mark.parametrize("old", [None, b"an older file"])
@pytest.mark.parametrize("ends", [(-1, 1), (-math.inf, math.inf)])
def test_a_file_that_is_wrong_is_not_written(monkeypatch, tmp_path: Path, ends, old):
    net, path, made = attnc.compile("tanh(x)", {"x": ends}, eps=1e-4), tmp_path / "net.onnx", onnx_file.to_model
    if old is not None:
        path.write_bytes(old)
    _spoil(monkeypatch, made, 1.0001)
    with pytest.raises(attnc.ParityExceeded, match=r"net.onnx was not written: .* differ by .*; rounding allows .*e-1"):
        net.export_onnx(path)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([] if old is None else [old])


def test_nan_in_a_tail_is_a_difference(monkeypatch, tmp_path: Path):
    """Only points without a value in the reference are left out."""
    net = attnc.compile("gelu(x)", {"x": (-math.inf, math.inf)}, eps=1e-3)
    run = onnx_file.run_onnx

    def broken(model, inputs):
        return np.where(np.abs(inputs[0][:, 0]) > 1e6, np.nan, run(model, inputs))

    monkeypatch.setattr(onnx_file, "run_onnx", broken)
    with pytest.raises(attnc.ParityExceeded, match="differ by nan") as refusal:
        net.export_onnx(tmp_path / "net.onnx")
    assert refusal.value.parity.num_points == 300
    assert not list(tmp_path.iterdir())


def _spoil(monkeypatch, made, factor: float) -> None:
    """Multiply the last weights of every file by a factor."""
    from onnx import numpy_helper

    def spoiled(*arguments, **options):
        model = made(*arguments, **options)
        weight = next(each for each in model.graph.initializer if each.name == "last/weight")
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * factor, weight.name))
        return model

    monkeypatch.setattr(onnx_file, "to_model", spoiled)
