"""Networks saved and read back, bit for bit; files that do not fit are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import attnc
from attnc.errors import FileError


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return attnc.compile("x - 2*y", {"x": (-1, 1), "y": (0, 2)}, eps=0.5, construction="max_affine")


def test_save_and_load_bit_for_bit(net, tmp_path):
    net.save(tmp_path / "net")
    again = attnc.load(tmp_path / "net")
    points = np.random.default_rng(0).uniform([-1, 0], [1, 2], (100, 2))
    assert (again(points) == net(points)).all()
    assert again.certificate == net.certificate
    assert (again.variables, again.construction, again.dtype) == (net.variables, net.construction, net.dtype)
    assert again.num_parameters == net.num_parameters
    again.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "certificate.json", "README.md"):
        assert (tmp_path / "net" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_box_that_does_not_fit_the_weights_is_refused(net, tmp_path):
    net.save(tmp_path / "net")
    config = tmp_path / "net" / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"y": [\n      0.0,\n      2.0\n    ]', '"y": [\n      2.0,\n      0.0\n    ]'))
    assert config.read_text(encoding="utf-8") != text
    with pytest.raises(FileError, match="reversed"):
        attnc.load(tmp_path / "net")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("certificate.json", '"bound": ', '"bound": -'),
        ("certificate.json", '"dtype": "float64"', '"dtype": "float32"'),
        ("certificate.json", '"expression": "x - 2*y"', '"expression": "x - 3*y"'),
        ("certificate.json", '"y": [0.0, 2.0]', '"y": [0.0, 3.0]'),
        ("config.json", '"expression": "x - 2*y"', '"expression": "x"'),
        ("config.json", '"eps": 0.5', '"eps": "0.5"'),
    ],
)
def test_files_that_contradict_each_other_are_refused(net, tmp_path, name, old, new):
    net.save(tmp_path / "net")
    file = tmp_path / "net" / name
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(FileError):
        attnc.load(tmp_path / "net")


def test_a_file_that_claims_more_tokens_than_it_holds(net, tmp_path):
    net.save(tmp_path / "net")
    config = tmp_path / "net" / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace(f"{net.num_anchors},", f"{10**8},"), encoding="utf-8")
    with pytest.raises(FileError, match="100,000,000 tokens"):
        attnc.load(tmp_path / "net")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(bound=0.9 * data["bound"], terms=[]), "is below its largest leaf, "),
        (lambda data: data.update(bound=0.5 * data["bound"], leaf_bounds=[]), "is below the sum of its terms, "),
        (lambda data: data.update(observed=2 * data["bound"]), "is below what was observed, "),
        (lambda data: data["leaf_bounds"].append(0.0), "leaf_bounds for"),
        (lambda data: data["leaves"].append([]), "leaf_bounds for"),
        (lambda data: data["terms"][0].pop("value"), "the field 'value' is missing"),
        (lambda data: data.update(terms=["rounding"]), "expected a term with a name, a value and a reason"),
        (lambda data: data.pop("method"), "the field 'method' is missing"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_not_loaded(tmp_path, change, message):
    net = attnc.compile("sin(x)", box={"x": (-1, 1)}, eps=1e-3, construction="spectral_grid")
    net.save(tmp_path / "net")
    path = tmp_path / "net" / "certificate.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileError, match=message):
        attnc.load(tmp_path / "net")


def test_a_certificate_without_room_for_what_grids_leave_out_is_evaluated_without_grids(tmp_path):
    """The checker adds `truncation` to every leaf, and believes that engines leave out no more than that."""
    net = attnc.compile("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, construction="spectral_grid")
    assert 0 < net.truncation == net.certificate.truncation
    assert net.work_per_point < net.num_anchors
    net.save(tmp_path / "net")
    path = tmp_path / "net" / "certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"truncation": 0.0}), encoding="utf-8")
    again = attnc.load(tmp_path / "net")
    assert again.truncation == 0
    assert again.work_per_point == net.num_anchors
    points = np.random.default_rng(0).uniform(-3, 3, (100, 2))
    assert np.abs(again(points) - net(points)).max() <= 2 * net.certificate.bound
