"""`attnc eval`: values, bounds, and points at which there is none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import attnc


def test_eval_prints_value_and_bound(run, net: Path) -> None:
    ran = run("eval", net, "x=0.5", "y=1")
    assert (ran.code, ran.err) == (0, "")
    shown, standing = ran.out.split(" (")
    assert standing == "stated by the certificate; `attnc verify` re-proves it)\n"
    value, bound = (float(part) for part in shown.split("±"))
    network = attnc.load(net)
    assert value == network.at(np.array([[0.5, 1.0]]))[0, 0]
    assert bound >= network.certificate.bound
    assert abs(value - math.sin(0.5) - math.cos(1)) <= bound
    assert run("eval", net, "y=1", "x=0.5").out == ran.out


def test_eval_as_json(run, net: Path) -> None:
    found = run("eval", net, "x=pi/4", "y=-1e-3", "--json").json
    network = attnc.load(net)
    assert found["point"] == {"x": math.pi / 4, "y": -1e-3}
    assert found["value"] == network.at(np.array([[math.pi / 4, -1e-3]]))[0, 0]
    assert found["bound"] == network.certificate.bound
    assert (found["dtype"], found["standing"]) == ("float64", "stated")
    assert found["outputs"] == [{"name": "out", "value": found["value"], "bound": found["bound"]}]


def test_several_outputs_have_a_line_each(run, pair: Path) -> None:
    ran = run("eval", pair, "x=0.25")
    first, second = ran.out.splitlines()
    assert first.startswith("out[0] = ")
    assert second.startswith("out[1] = ")
    bound = attnc.load(pair).certificate.bound
    for line, true in ((first, 0.25), (second, 2 + 0.25**2)):
        value = float(line.split("=")[1].split("±")[0])
        assert abs(value - true) <= bound + 1e-6
    found = run("eval", pair, "x=0.25", "--json").json
    assert [row["name"] for row in found["outputs"]] == ["out[0]", "out[1]"]
    assert found["value"] == [row["value"] for row in found["outputs"]]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["x=1"], "no value for y"),
        (["x=1", "y=2", "z=3"], "z is not a variable of this network (its variables: x, y)"),
        (["x=1", "x=2", "y=1"], "'x=2': x has a value already, 1"),
        (["x", "y=1"], "'x': expected NAME=VALUE"),
        (["=1", "y=1"], "'=1': expected NAME=VALUE"),
        (["x=one", "y=1"], "'x=one': 'one' is not a number"),
        (["x=", "y=1"], "'x=': '' is not a number"),
        (["x=nan", "y=1"], "nan is not finite"),
        (["x=4", "y=1"], "outside the box"),
        (["x=1", "y=1", "--outside", "maybe"], "outside must be one of"),
    ],
)
def test_bad_points_are_refused(refused, net: Path, assignments: list[str], message: str) -> None:
    assert message in refused("eval", net, *assignments)


def test_points_outside(run, net: Path) -> None:
    clamped = run("eval", net, "x=4", "y=1", "--outside", "clamp")
    assert clamped.out == run("eval", net, "x=3", "y=1").out
    assert "moved into the box, to x = 3, y = 1" in clamped.err
    allowed = run("eval", net, "x=4", "y=1", "--outside", "allow")
    assert allowed.code == 0
    assert "±" not in allowed.out
    assert "no bound" in allowed.out
    found = run("eval", net, "x=4", "y=1", "--outside", "allow", "--json").json
    assert found["bound"] is None
    assert found["inside"] is False


def test_a_norm_bound_is_not_printed_at_a_point(run, tmp_path):
    """An L2 bound says nothing about one point: eval must not print it as ±."""
    net = tmp_path / "net"
    made = run("compile", "sign(x)", "--box", "x=-1:1", "--eps", "0.2", "--norm", "2", "--out", net)
    assert made.code == 0, made.err
    assert "L2 norm" in made.out
    said = run("eval", net, "x=0.5").out
    assert "no bound at a single point: the L2 norm of the error over the box is at most" in said
    assert "±" not in said
    facts = run("info", net, "--json").json
    assert facts["norm"] == "2"
    assert facts["bound"] <= 0.2


def test_a_point_without_a_value_is_refused(run, tmp_path):
    net = tmp_path / "net"
    run("compile", "gelu(x)", "--box", "x=-inf:inf", "--out", net)
    ran = run("eval", net, "x=1e308", "--json")
    assert ran.code == 2
    assert "overflow" in ran.json["error"]["message"]


def test_eval_beyond_the_core_of_an_infinite_box_counts_rounding_relative_to_x(run, tmp_path):
    net = attnc.compile("silu(x)", box={"x": (-math.inf, math.inf)}, eps=1e-3)
    net.save(tmp_path / "net")
    far = run("eval", tmp_path / "net", "x=1e9", "--json").json
    assert far["bound"] == net.certificate.bound_at(1e9) > 1e-8 > net.certificate.bound
    assert "± 6.73e-07" in run("eval", tmp_path / "net", "x=1e9").out
    assert "in exact arithmetic, numbers may overflow beyond" in run("eval", tmp_path / "net", "x=1e307").out
    for x, is_counted in ((1, True), (12345.678, True), (1e307, False)):
        assert run("eval", tmp_path / "net", f"x={x}", "--json").json["rounding_included"] is is_counted
