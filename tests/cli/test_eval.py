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
    """An L2 bound is no bound at one point: eval must not print it as ±."""
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


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_of_points_has_a_row_of_values_each_in_order(run, net: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("attnc.cli.evaluating.ROWS_PER_BLOCK", 7)
    points = np.random.default_rng(0).uniform(-1, 1, (40, 2))
    rows = "\n".join(f"{y!r},note {i},{x!r}" for i, (x, y) in enumerate(points.tolist()))
    source = table(tmp_path / "points.csv", f"y,remark,x\n{rows}\n\n")
    ran = run("eval", net, "--csv", source, "--out", tmp_path / "values.csv")
    assert (ran.code, ran.out) == (0, "")
    header, *values = (tmp_path / "values.csv").read_text().splitlines()
    assert header == "out"
    assert [float(value) for value in values] == attnc.load(net)(points).tolist()
    summary = run("eval", net, "--csv", source, "--out", tmp_path / "values.csv", "--json").json
    assert (summary["rows"], summary["outputs"]) == (40, [{"name": "out"}])


def test_several_outputs_are_columns_and_tables_come_from_pipes(run, pair: Path, tmp_path: Path, monkeypatch) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfx\n0.25\n0.5\n")))
    ran = run("eval", pair, "--csv", "-", "--out", tmp_path / "values.csv")
    assert ran.code == 0, ran.err
    header, *rows = (tmp_path / "values.csv").read_text().splitlines()
    assert header == "out[0],out[1]"
    wanted = attnc.load(pair)(np.array([[0.25], [0.5]]))
    assert [[float(cell) for cell in row.split(",")] for row in rows] == wanted.tolist()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x,y\n0,0\n1,oops\n", "line 3, column 'y': 'oops' is not a number"),
        ("x,y\n0,0\n\n1,nan\n", "line 4, column 'y': nan is not finite"),
        ("x,y\n0,0\n1\n", "line 3: 1 cell, but the header names 2 columns"),
        ("x,y\n0,0\n1e9,0\n", "line 3: the point is outside the box"),
        ("x\n0\n", "there is no column 'y'"),
        ("x,y,x\n0,0,0\n", "2 columns are named 'x'"),
        ("", "the file is empty"),
        ("x;y\n0;1,5\n", "has a decimal comma; write 1.5"),
    ],
)
def test_a_bad_table_is_refused_and_nothing_is_written(refused, net: Path, tmp_path: Path, text, complaint) -> None:
    source, target = table(tmp_path / "points.csv", text), tmp_path / "values.csv"
    assert complaint in refused("eval", net, "--csv", source, "--out", target)
    assert sorted(path.name for path in tmp_path.iterdir() if path != net) == ["points.csv"]


def test_a_table_without_rows_has_only_a_header(run, net: Path, tmp_path: Path) -> None:
    run("eval", net, "--csv", table(tmp_path / "points.csv", "x,y\n"), "--out", tmp_path / "values.csv")
    assert (tmp_path / "values.csv").read_text() == "out\n"


def test_points_beyond_the_box_are_moved_if_asked(run, net: Path, tmp_path: Path) -> None:
    source = table(tmp_path / "points.csv", "x,y\n100,0\n")
    assert run("eval", net, "--csv", source, "--out", tmp_path / "values.csv", "--outside", "clamp").code == 0
    moved = attnc.load(net)(np.array([[100.0, 0.0]]), outside="clamp")
    assert float((tmp_path / "values.csv").read_text().splitlines()[1]) == moved[0]


def test_what_does_not_go_together(run, refused, net: Path, tmp_path: Path) -> None:
    source = table(tmp_path / "points.csv", "x,y\n0,0\n")
    assert "give a point or a table" in refused("eval", net, "x=0", "y=0", "--csv", source)
    assert "--out is for the values of a table" in refused("eval", net, "x=0", "y=0", "--out", tmp_path / "values.csv")
    assert "does not exist" in refused("eval", net, "--csv", source, "--out", tmp_path / "none" / "values.csv")
    assert "--gradient takes one point" in refused("eval", net, "--csv", source, "--gradient")
    ran = run("eval", net, "--csv", source, "--json")
    assert ran.code == 2
    assert "give the values a file of their own" in ran.json["error"]["message"]


def test_gradient(run, net: Path, pair: Path) -> None:
    lines = run("eval", net, "x=0.5", "y=1", "--gradient").out.splitlines()
    assert len(lines) == 3
    network = attnc.load(net)
    for line, name, expected in zip(lines[1:], "xy", network.gradient([[0.5, 1.0]])[0, 0], strict=True):
        assert line.startswith(f"∂out/∂{name} = ")
        assert float(line.split("=")[1].split()[0]) == expected
        assert "no bound" in line
    found = run("eval", net, "x=0.5", "y=1", "--gradient", "--json").json
    assert found["gradient"] == network.gradient([[0.5, 1.0]])[0].tolist()
    assert found["gradient_bound"] is None
    assert "gradient" not in run("eval", net, "x=0.5", "y=1", "--json").json
    assert [line.split(" =")[0] for line in run("eval", pair, "x=0.25", "--gradient").out.splitlines()[2:]] == [
        "∂out[0]/∂x",
        "∂out[1]/∂x",
    ]
    assert run("eval", net, "x=9", "y=1", "--gradient").code == 2
    assert run("eval", net, "x=9", "y=1", "--gradient", "--outside", "clamp").code == 0
