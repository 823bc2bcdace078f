"""Networks saved and read back, bit for bit; files that do not fit are refused."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.errors import FileError
from checker.tampering import edit


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return attnc.compile("x - 2*y", {"x": (-1, 1), "y": (0, 2)}, eps=0.5, construction="max_affine")


@pytest.fixture
def saved(net, tmp_path):
    net.save(tmp_path / "net")
    return tmp_path / "net"


def replace_text(path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_save_and_load_bit_for_bit(net, saved, tmp_path):
    again = attnc.load(saved)
    points = np.random.default_rng(0).uniform([-1, 0], [1, 2], (100, 2))
    assert (again(points) == net(points)).all()
    assert again.certificate == net.certificate
    assert (again.variables, again.construction, again.dtype) == (net.variables, net.construction, net.dtype)
    assert again.num_parameters == net.num_parameters
    again.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "certificate.json", "README.md"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("certificate.json", '"bound": ', '"bound": -', "found -"),
        ("certificate.json", '"dtype": "float64"', '"dtype": "float32"', "dtype"),
        ("certificate.json", '"expression": "x - 2*y"', '"expression": "x - 3*y"', "expression"),
        ("certificate.json", '"y": [0.0, 2.0]', '"y": [0.0, 3.0]', "box"),
        ("config.json", '"expression": "x - 2*y"', '"expression": "x"', "expression"),
        ("config.json", '"eps": 0.5', '"eps": "0.5"', "eps"),
        ("config.json", '"y": [\n      0.0,\n      2.0\n', '"y": [\n      2.0,\n      0.0\n', "reversed"),
    ],
)
def test_files_that_contradict_each_other_are_refused(saved, name, old, new, message):
    replace_text(saved / name, old, new)
    with pytest.raises(FileError, match=message):
        attnc.load(saved)


def test_a_file_that_claims_more_tokens_than_it_holds(net, saved):
    replace_text(saved / "config.json", f"{net.num_anchors},", f"{10**8},")
    with pytest.raises(FileError, match="100,000,000 tokens"):
        attnc.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(bound=0.9 * data["bound"], terms=[]), "is below its largest leaf, "),
        (lambda data: data.update(bound=0.5 * data["bound"], leaf_bounds=[]), "is below the sum of its terms, "),
        (lambda data: data.update(observed=2 * data["bound"]), "is below the observed error, "),
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
    edit(tmp_path / "net", "certificate.json", change)
    with pytest.raises(FileError, match=message):
        attnc.load(tmp_path / "net")


def test_a_certificate_without_room_for_what_grids_leave_out_is_evaluated_without_grids(tmp_path):
    """The checker adds `truncation` to every leaf, and believes that engines leave out no more than that."""
    net = attnc.compile("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, construction="spectral_grid")
    assert 0 < net.truncation == net.certificate.truncation
    assert net.work_per_point < net.num_anchors
    net.save(tmp_path / "net")
    edit(tmp_path / "net", "certificate.json", lambda data: data.update(truncation=0.0))
    again = attnc.load(tmp_path / "net")
    assert again.truncation == 0
    assert again.work_per_point == net.num_anchors
    points = np.random.default_rng(0).uniform(-3, 3, (100, 2))
    assert np.abs(again(points) - net(points)).max() <= 2 * net.certificate.bound
