"""`attnc info`, `attnc export` and `attnc demo`: their words about a network."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import attnc
from attnc.wording import percent


def test_info_shows_layers_and_ledger(run, net: Path) -> None:
    ran = run("info", str(net))
    network = attnc.load(net)
    assert (ran.code, ran.err) == (0, "")
    for needed in (
        *(layer.name for layer in network.program.layers),
        f"{network.num_anchors:,} anchors",
        f"{network.num_parameters:,} parameters",
        *(term.name for term in network.certificate.terms),
        "share",
        *(percent(term.value / network.certificate.bound) for term in network.certificate.terms),
        "Assumptions",
        f"{network.certificate.observed:.3g}",
    ):
        assert needed in ran.out
    squeezed = " ".join(ran.out.split())
    for sentence in network.certificate.assumptions:
        assert sentence[:60] in squeezed


def test_info_as_json(run, net: Path) -> None:
    found = run("info", str(net), "--json").json
    assert [row["name"] for row in found["layers"]] == [layer.name for layer in attnc.load(net).program.layers]
    assert sum(term["share"] for term in found["terms"]) == pytest.approx(1)
    assert found["assumptions"]
    assert found["observed"] <= found["bound"]


def test_a_strangers_network_cannot_write_escape_codes(run, net: Path, tmp_path: Path) -> None:
    import dataclasses

    hostile = dataclasses.replace(attnc.load(net), expression="x\x1b]0;boo\x07[bold]", construction="\x1b[31mred")
    hostile.save(tmp_path / "net")
    ran = run("info", str(tmp_path / "net"))
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "[bold]" in ran.out


def test_demo_goes_where_it_is_told(run, refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnc.plots.plot", lambda network, path: path.write_bytes(b"png"))
    ran = run("demo", "--json")
    assert ran.code == 0
    assert [Path(path) for path in ran.json["figures"]] == [Path("demo/demo.png"), Path("demo/demo-fine.png")]
    assert run("demo", "--out", "other").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "other"]
    (tmp_path / "taken").write_text("mine")
    assert "cannot write the demo to 'taken'" in refused("demo", "--out", "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_export_prints_the_parity(run, refused, net, tmp_path):
    pytest.importorskip("onnxruntime")
    out = tmp_path / "net.onnx"
    ran = run("export", str(net), "--to", "onnx", "--out", str(out), "--json")
    assert ran.code == 0, ran.err
    assert out.stat().st_size > 1000
    assert ran.json["is_within"]
    assert ran.json["difference"] <= ran.json["allowed"] < 1e-6
    assert refused("export", net, "--to", "tflite", "--out", out)
    assert refused("export", tmp_path / "nothing", "--to", "onnx", "--out", out)


def test_export_to_hf_and_verify(run, refused, net: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint"
    ran = run("export", net, "--to", "hf", "--out", out, "--json")
    assert ran.code == 0
    assert ran.json["observed"] <= ran.json["bound"]
    assert ran.json["dtype"] == "float32"
    assert run("verify", out, "--processes", "1").code == 0
    assert "at most" in run("export", net, "--to", "hf", "--out", out).out  # it is replaced
    assert refused("export", net, "--to", "hf", "--out", net)
    assert refused("export", net, "--to", "hf", "--out", out, "--outside", "nan")
    assert "stock checkpoint" in run("info", out).err


def test_an_export_that_differs_ends_with_exit_code_1(run, net, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from attnc.exports import onnx_file

    right, out = onnx_file.run_onnx, tmp_path / "net.onnx"
    monkeypatch.setattr(onnx_file, "run_onnx", lambda model, inputs: right(model, inputs) + 1e-6)
    ran = run("export", net, "--to", "onnx", "--out", out)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(
        f"error: {out} was not written: on 200 points ONNX Runtime and the reference differ by 1e-06"
    )
    refusal = run("export", net, "--to", "onnx", "--out", out, "--json").json["error"]
    assert (refusal["type"], refusal["is_within"]) == ("ParityExceeded", False)
    assert refusal["difference"] > refusal["allowed"]
    assert not out.exists()


def test_what_is_said_of_a_second_dtype_on_an_infinite_box(run, tmp_path):
    attnc.compile("tanh(x)", box={"x": (-math.inf, math.inf)}, eps=1e-3, also="float32").save(tmp_path / "net")
    shown = run("info", str(tmp_path / "net")).out.replace("│", " ")
    line = " ".join(shown.split("in float32 ")[1].split("╰")[0].split())
    assert "beyond, it adds at most" in line


def test_what_is_said_of_small_things(run, refused, tmp_path):
    """An identity, a sum of one term and its negative, a function without a gate, a folder that cannot be made."""
    passed_on = run("compile", "x", "--box", "x=-1:1", "--out", str(tmp_path / "x")).out
    assert "0 heads; " not in passed_on
    assert "0  proven on the whole box" in passed_on
    boxes = ("--box", "x=-1:1", "--box", "y=-1:1")
    run("compile", "max(x,y)+sin(x*y)", *boxes, "--construction", "compose", "--out", tmp_path / "m")
    assert "relu(y - x)" in run("info", str(tmp_path / "m")).out
    assert "On a finite box construction='compose' takes" in refused("compile", "sin(x)", "--box", "x=-inf:inf")
    assert ".new" not in refused("compile", "x", "--box", "x=-1:1", "--out", "/proc/net-of-attnc")


def test_ends_of_intervals_are_shown_as_people_write_them(run, tmp_path):
    """That of a head's argument on [0, π] is [−3e-323, 3.14…], rounded outward."""
    folder = str(tmp_path / "net")
    run("compile", "exp(-x*x)*cos(y)", "--box", "x=-2:1.5", "--box", "y=0:pi", "--eps", "1e-3", "--out", folder)
    shown = " ".join(run("info", folder).out.split())
    assert "on [0, 3.14]" in shown
    assert "mask in 1 heads" not in shown


@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_no_digit_is_lost_on_a_narrow_terminal(run, net, tmp_path, monkeypatch, columns):
    folder = tmp_path / "deep"
    attnc.compile("exp(-x*x)*cos(y)", {"x": (-2, 1.5), "y": (0, 2)}, eps=0.3).save(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    planned = run("plan", "sin(x)+cos(y)", "--box", "x=-3:3", "--box", "y=-3:3", "--eps", "0.01").out.split("\n\n")[0]
    assert "…" not in planned
    assert "1,517,834" in planned, "the parameters of max_affine"
    for path in (net, folder):
        ledger = run("info", str(path)).out.split("Where the bound comes from")[1].split("Assumptions")[0]
        assert "100.0 %" in ledger
        assert "share" in ledger
        assert "…" not in ledger
    panel = run("info", str(net)).out.split("Layers")[0]
    assert max(map(len, panel.splitlines())) <= max(40, columns)
