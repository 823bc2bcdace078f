"""Outside the box, exported networks move a point to it, return NaN, or compute without a claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.errors import InputError

torch = pytest.importorskip("torch")
INSIDE = np.array([[0.0, 0.05], [3.0, 0.1], [-3.0, 0.0]])  # with the corners, which float32 does not hold exactly
OUTSIDE = np.array([[4.0, 0.05], [0.0, -0.001], [100.0, 9.0]])
POINTS = np.concatenate([INSIDE, OUTSIDE])


@pytest.fixture(scope="module", params=["float64", "float32"])
def net(request) -> attnc.Network:
    """One of two outputs is constant: it must be NaN outside, too."""
    return attnc.compile("(x*y, 3)", {"x": (-3, 3), "y": (0, 0.1)}, 1e-2, dtype=request.param)


def by_torch(net: attnc.Network, outside: str, path: Path) -> np.ndarray:
    return net.to_torch(outside=outside)(torch.tensor(POINTS)).numpy()


def by_onnx(net: attnc.Network, outside: str, path: Path) -> np.ndarray:
    pytest.importorskip("onnxruntime")
    from attnc.exports.onnx_file import run_onnx

    assert net.export_onnx(path / "net.onnx", outside=outside).is_within
    return run_onnx(path / "net.onnx", [POINTS])


@pytest.mark.parametrize("export", [by_torch, by_onnx])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_three_ways(net: attnc.Network, export, tmp_path: Path) -> None:
    tolerance = 1e-5 if net.dtype == "float32" else 1e-13
    np.testing.assert_allclose(export(net, "clamp", tmp_path), net(POINTS, outside="clamp"), atol=tolerance)
    np.testing.assert_allclose(export(net, "allow", tmp_path), net(POINTS, outside="allow"), rtol=1e-5, atol=tolerance)
    marked = export(net, "nan", tmp_path)
    np.testing.assert_allclose(marked[: len(INSIDE)], net(INSIDE), atol=tolerance)
    assert np.isnan(marked[len(INSIDE) :]).all()


def test_gradients_stay_finite_inside(net: attnc.Network) -> None:
    points = torch.tensor(POINTS, requires_grad=True)
    net.to_torch(outside="nan")(points)[: len(INSIDE)].sum().backward()
    assert torch.isfinite(points.grad).all()


@pytest.mark.parametrize("word", ["raise", "", None])
def test_other_words_are_refused(net: attnc.Network, word, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="outside must be one of clamp, nan, allow"):
        net.to_torch(outside=word)
    pytest.importorskip("onnx")
    with pytest.raises(InputError, match="outside must be one of clamp, nan, allow"):
        net.export_onnx(tmp_path / "net.onnx", outside=word)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_and_cards_state_the_box_and_what_is_outside(net: attnc.Network, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    net.export_onnx(tmp_path / "net.onnx", outside="nan")
    stated = {prop.key: prop.value for prop in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert stated["box"] == "x ∈ [-3, 3], y ∈ [0, 0.1]"
    assert stated["outside the box"] == "the value is NaN"
    net.save(tmp_path / "net")
    card = (tmp_path / "net" / "README.md").read_text(encoding="utf-8")
    assert "**Outside the box:** nothing is claimed." in card
    assert "`x` ∈ [-3.0, 3.0]" in card
