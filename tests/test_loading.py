"""Networks saved and read back, bit for bit; files that do not fit are refused."""

from __future__ import annotations

from typing import Any

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


def claim_tokens(config: dict[str, Any]) -> None:
    """Let the first layer claim more tokens than the file holds."""
    embed, _, read = config["program"]["layers"]
    embed["weight"]["shape"][0] = embed["constant"]["shape"][0] = read["weight"]["shape"][2] = 10**8


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        # files that contradict each other
        ("certificate", lambda data: data.update(dtype="float32"), "dtype"),
        ("certificate", lambda data: data.update(expression="x - 3*y"), "expression"),
        ("certificate", lambda data: data["box"].update(y=[0.0, 3.0]), "box"),
        ("config", lambda data: data.update(expression="x"), "expression"),
        ("config", lambda data: data.update(eps="0.5"), "eps"),
        ("config", lambda data: data["box"].update(y=[2.0, 0.0]), "reversed"),
        ("config", claim_tokens, "100,000,000 tokens"),
        # a certificate that contradicts itself
        ("certificate", lambda data: data.update(bound=-data["bound"]), "found -"),
        ("certificate", lambda data: data.update(bound=0.9 * data["bound"], terms=[]), "is below its largest leaf, "),
        (
            "certificate",
            lambda data: data.update(bound=0.5 * data["bound"], leaf_bounds=[]),
            "below the sum of its terms",
        ),
        ("certificate", lambda data: data.update(observed=2 * data["bound"]), "is below the observed error, "),
        ("certificate", lambda data: data["leaf_bounds"].append(0.0), "leaf_bounds for"),
        ("certificate", lambda data: data["leaves"].append([]), "leaf_bounds for"),
        ("certificate", lambda data: data["terms"][0].pop("value"), "the field 'value' is missing"),
        ("certificate", lambda data: data.update(terms=["rounding"]), "a term with a name, a value and a reason"),
        ("certificate", lambda data: data.pop("method"), "the field 'method' is missing"),
    ],
)
def test_contradictions_are_refused(saved, name, change, message):
    edit(saved, f"{name}.json", change)
    with pytest.raises(FileError, match=message):
        attnc.load(saved)


def test_a_certificate_without_room_for_what_grids_leave_out_is_evaluated_without_grids(tmp_path):
    """The checker adds `truncation` to every leaf. Engines must not leave out more than that."""
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
