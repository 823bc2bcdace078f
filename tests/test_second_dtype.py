"""A network of float64 weights that is certified in float32 as well: the weights rounded, and evaluated there."""

import json

import numpy as np
import pytest

import attnc
from attnc.model_card import model_card, summary
from attnc_checker.__main__ import main as verify
from checker.tampering import edit

BOX = {"x": (-2, 2), "y": (-1, 1)}


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return attnc.compile("exp(-x*x)*y", box=BOX, eps=1e-4, also="float32", construction="spectral_grid")


@pytest.fixture
def saved(net, tmp_path):
    net.save(tmp_path / "net")
    return tmp_path / "net"


def test_the_second_bound_is_of_the_rounded_weights(net):
    claim = net.certified_in("float32")
    assert net.certified_in("float64") is net.certificate
    assert claim.dtype == "float32"
    assert net.certificate.bound < claim.bound < 1.3 * net.certificate.bound
    cast = net.astype("float32")
    assert cast.dtype == "float32"
    assert cast.certificate is claim
    x = np.random.default_rng(0).uniform([-2, -1], [2, 1], (500, 2))
    exact = np.exp(-(x[:, 0] ** 2)) * x[:, 1]
    torch = pytest.importorskip("torch")
    for run in (cast, cast.program, lambda x: cast.to_torch()(torch.tensor(x)).numpy()):
        out = run(x)
        assert out.dtype == np.float32
        assert np.abs(out - exact).max() <= claim.bound


def test_a_dtype_without_a_certificate_is_not_certified():
    net = attnc.compile("sin(x)", box={"x": (-2, 2)}, eps=1e-3)
    assert net.certified_in("float32") is None
    cast = net.astype("float32")
    assert cast.certificate.bound is None
    assert cast.certificate.method == "not certified"
    assert "**In float32:** not certified." in model_card(net)
    rows = {row["name"]: row for row in summary(net)["certificates"]}
    assert rows["float64"]["certified"]
    facts = dict.fromkeys(("bound", "observed", "method", "standing"))
    assert rows["float32"] == {"name": "float32", "certified": False, **facts}
    with pytest.raises(attnc.InputError, match="float64, float32; found 'float16'"):
        net.certified_in("float16")


def test_both_certificates_are_saved_loaded_and_reproved(net, saved, capsys):
    assert {path.name for path in saved.glob("certificate*")} == {"certificate.json", "certificate.float32.json"}
    again = attnc.load(saved)
    assert again.certified_in("float32") == net.certified_in("float32")
    assert "In float32:** ≤ " in model_card(again)
    assert verify([str(saved)]) == 0
    told = capsys.readouterr().out
    assert "in float64" in told
    assert "in float32" in told
    assert verify([str(saved), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["proved"]
    assert [other["dtype"] for other in verdict["others"]] == ["float32"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data, _: data.update(bound=0.99 * data["observed"]), "below the observed error"),
        (lambda data, _: data.update(bound=1.0001 * data["observed"]), "is not re-proved to"),
        (lambda data, _: data.update(dtype="float64"), "its name should contain the dtype"),
        (lambda data, _: data["leaves"].pop(), "do not cover the box"),
        # the same leaves and bound do not hold for rounded weights
        (lambda data, of_float64: data.update(of_float64 | {"dtype": "float32"}), "is not re-proved to"),
    ],
)
def test_one_false_certificate_is_enough_to_refuse(saved, capsys, change, reason):
    of_float64 = json.loads((saved / "certificate.json").read_text(encoding="utf-8"))
    edit(saved, "certificate.float32.json", lambda data: change(data, of_float64))
    assert verify([str(saved)]) == 1
    told = capsys.readouterr()
    assert "re-proved: the error is at most" in told.out  # the float64 one still is
    assert reason in told.err


def test_a_certificate_of_another_dtype_than_its_name_is_not_loaded(saved):
    edit(saved, "certificate.float32.json", lambda data: data.update(dtype="float64"))
    with pytest.raises(attnc.FileError, match="dtype"):
        attnc.load(saved)
