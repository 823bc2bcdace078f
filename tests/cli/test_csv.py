"""`attnc compile --csv`: files as people have them, networks that survive saving, and errors with line and column."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.cli import tables
from attnc.targets import csv_rows
from cli.running import Ran


@pytest.fixture
def surface(tmp_path: Path) -> Path:
    """z = sin(x) + y² and w = x·y on a grid, rows shuffled, with a column that nobody asks for."""
    p = np.stack(np.meshgrid(np.linspace(-1, 1, 12), np.linspace(0, 2, 9), indexing="ij"), axis=-1).reshape(-1, 2)
    p = p[np.random.default_rng(0).permutation(len(p))]
    lines = ["x,note,y,z,w"]
    lines += [f"{x!r},n/a,{y!r},{np.sin(x) + y**2!r},{x * y!r}" for x, y in p.tolist()]
    path = tmp_path / "surface.csv"
    path.write_text("\n".join(lines).replace("np.float64(", "").replace(")", ""), encoding="utf-8")
    return path


def compiled(run, surface: Path, *options: str | Path, output: str = "z") -> Ran:
    return run("compile", "--csv", surface, "--inputs", "x,y", "--output", output, *options)


def test_a_dash_is_standard_input(run, surface: Path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(surface.read_bytes())))
    ran = run("compile", "--csv", "-", "--inputs", "x,y", "--output", "z", "--eps", "1e-2", "--json")
    assert ran.json["num_points"] == 108


def test_from_file_to_saved_network_and_back(run, surface: Path, tmp_path: Path):
    net = tmp_path / "net"
    ran = compiled(run, surface, "--eps", "1e-4", "--out", net)
    assert (ran.code, ran.err) == (0, "")
    for needed in (
        "table of 108 points",
        "table_grid",
        "at the table's 108 points in float64, rounding",
        "points, all checked",
    ):
        assert needed in ran.out
    assert "sample" not in ran.out
    loaded = attnc.load(net)
    table = tables.read_csv(surface, "x,y", "z")
    error = np.abs(loaded.at(table.points) - table.values).max()
    assert error == loaded.certificate.observed <= loaded.certificate.bound <= 1e-4
    assert loaded.certificate.method == "proof at the table's 108 points"
    assert loaded.certificate.num_points == 108
    assert loaded.certificate.pointwise_bound is None
    assert "the table's 108 points" in loaded.certificate.assumptions[0]
    assert loaded.expression is None
    assert loaded.variables == ("x", "y")
    assert loaded.num_anchors < 60
    card = (net / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# Table of 108 points as softmax attention")
    assert "at the table's 108 points, rounding included (arithmetic: float64)" in card
    assert "the largest at the table's 108 points, each of which was checked" in card
    assert "nothing is claimed. The table has no values there" in card
    assert "sampled" not in card
    assert f"attnc compile --csv {surface} --inputs x,y --output z --eps 0.0001" in card
    at = run("eval", net, "x=1", "y=2", "--json").json
    assert abs(at["value"] - (np.sin(1) + 4)) <= 1e-4
    assert at["bound"] is None
    assert at["points"] == 108
    assert at["bound_at_points"] <= 1e-4
    assert "at the table's 108 points; nothing is claimed between them)" in run("eval", net, "x=1", "y=2").out
    assert run("eval", net, "x=3", "y=2").code == 2
    facts = run("info", net, "--json").json
    assert facts["name"] == "table of 108 points"
    assert facts["method"] == "proof at the table's 108 points"
    assert facts["num_points"] == 108
    assert facts["parameters"]["points"] == 108
    assert "all checked" in run("info", net).out


def test_the_stored_command_makes_the_same_network(run, surface: Path, tmp_path: Path):
    first = compiled(run, surface, "--eps", "1e-3", "--dtype", "float32", "--json", output="w").json
    again = run(*shlex.split(first["command"])[1:], "--json").json
    assert first["num_anchors"] == again["num_anchors"]
    assert first["observed"] == again["observed"] <= 1e-3
    assert first["dtype"] == "float32"


def test_several_outputs(run, surface: Path, tmp_path: Path):
    net = tmp_path / "net"
    assert compiled(run, surface, "--eps", "1e-3", "--out", net, output="z, w").code == 0
    outputs = run("eval", net, "x=1", "y=2", "--json").json["outputs"]
    assert [row["name"] for row in outputs] == ["out[0]", "out[1]"]
    assert abs(outputs[1]["value"] - 2) <= 1e-3


@pytest.mark.parametrize(
    "raw",
    [
        b"x,z\n1,2\n2,3\n4,5\n",
        b"\xef\xbb\xbfx,z\r\n1,2\r\n2,3\r\n4,5",
        b"x;z\n1;2\n2;3\n4;5\n",
        b"x\tz\n1\t2\n2\t3\n4\t5\n",
        b'"x","z"\n"1","2"\n2,3\n4,5\n',
        b"\n\n x , z \n 1 , 2\n\n2, 3 \n4,5,\n\n",
        b'a;b, c;x;z\n;1,2;1.;2e0\n7;;+.2E1;3\n"x\ny";;4;5\n',
        b"x,z\n1,2\n1,2\n2,3\n4,5\n",
        b"x,z\n4,5\n1,2\n2,3\n",
    ],
)
def test_files_as_people_have_them(tmp_path: Path, raw: bytes):
    path = tmp_path / "t.csv"
    path.write_bytes(raw)
    table = tables.read_csv(path, "x", "z")
    assert table.points.tolist() == [[1], [2], [4]]
    assert table.values.tolist() == [[2], [3], [5]]
    assert table.box.names == ("x",)


@pytest.mark.parametrize(
    ("raw", "inputs", "output", "message"),
    [
        ("x,z\n1,2\n2,\n", "x", "z", "line 3, column 'z': the cell is empty"),
        ("x,z\n1,2\n\n2,abc\n", "x", "z", "line 4, column 'z': 'abc' is not a number"),
        ('x,z,c\n1,2,"a\nb"\n2,abc,\n', "x", "z", "line 4, column 'z': 'abc' is not a number"),
        ("x,z\n1,2\n1_0,3\n", "x", "z", "line 3, column 'x': '1_0' is not a number"),
        ("x,z\n1,2\n２,3\n", "x", "z", "line 3, column 'x': '２' is not a number"),
        ("x,z\n1,2\n2,NaN\n", "x", "z", "line 3, column 'z': NaN is not finite"),
        ("x,z\n1,2\n2,-inf\n", "x", "z", "line 3, column 'z': -inf is not finite"),
        ("x,z\n1,2\n2,1e999\n", "x", "z", "line 3, column 'z': 1e999 is not finite"),
        ("x;z\n1;2\n2;1,5\n", "x", "z", "line 3, column 'z': '1,5' has a decimal comma; write 1.5"),
        ("x,z\n1,2\n2\n", "x", "z", "line 3: 1 cell, but the header names 2 columns"),
        ("x,z\n1,2\n2,3,4\n", "x", "z", "line 3: 3 cells, but the header names 2 columns"),
        ("x,z\n1,2\n", "y", "z", "there is no column 'y'; the header names 'x', 'z'"),
        ("x,x,z\n1,2,3\n", "x", "z", "2 columns are named 'x'; rename all but one"),
        ("0,1\n1,2\n", "x", "z", "the first line must name the columns; found numbers, 0, 1"),
        ("", "x", "z", "the file is empty; its first line must name the columns"),
        ("x,z\n\n", "x", "z", "there is no row below the header"),
        ("x,z\n1,2\n", "x", "z", "a table needs at least two points; found 1"),
        ("x,y,z\n1,5,2\n2,5,3\n", "x,y", "z", "column y is 5 in all 2 rows"),
        ("x,z\n1,2\n2,3\n1,4\n", "x", "z", "line 2 and line 4 are one point, x = 1, with two values, 2 and 4"),
        ('x,z\n1,2\n2,"3\n', "x", "z", "not CSV"),
        ("x,z\n1,2\n", "x,x", "z", "--inputs 'x,x': column 'x' is named twice"),
        ("x,z\n1,2\n", "x", "x", "column 'x' is both an input and an output"),
        ("x,z\n1,2\n", "x,", "z", "--inputs 'x,': expected names of columns, e.g. --inputs x,y"),
        ("a,b,c,d,z\n1,2,3,4,5\n1,3,4,5,6\n", "a,b,c,d", "z", "column a is 1 in all"),
    ],
)
def test_errors_say_where(run, tmp_path: Path, raw: str, inputs: str, output: str, message: str):
    path = tmp_path / "t.csv"
    path.write_text(raw, encoding="utf-8")
    ran = run("compile", "--csv", path, "--inputs", inputs, "--output", output, "--json")
    assert ran.code == 2
    assert message in ran.json["error"]["message"]
    assert "Traceback" not in ran.err


def test_options_that_do_not_go_together(refused, tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("x,z\n1,2\n2,3\n")
    table = ("--csv", path, "--inputs", "x", "--output", "z")
    for arguments, message in (
        ((), "there is no function: give an expression, or a table with --csv FILE"),
        (("x", *table), "give an expression or a table, not both"),
        ((*table, "--box", "x=0:1"), "--box x=0:1: the box of a table is that of its points"),
        (("--csv", path, "--output", "z"), "--csv needs --inputs: the names of columns, e.g. --inputs x,y"),
        (("--csv", path, "--inputs", "x"), "--csv needs --output"),
        (("x", "--box", "x=0:1", "--inputs", "x"), "--inputs names columns of a table"),
        (("x", "--box", "x=0:1", "--output", "x"), "--output names columns of a table"),
        ((*table, "--norm", "2"), "norm=2.0 is not an option of table_grid"),
        ((*table, "--construction", "max_affine"), "a table has no values between its points"),
    ):
        assert message in refused("compile", "--eps", "0.1", *arguments)


def test_files_that_cannot_be_read(refused, tmp_path: Path, monkeypatch):
    def refusal(path: Path, content: bytes | None = None) -> str:
        if content is not None:
            path.write_bytes(content)
        return refused("compile", "--csv", path, "--inputs", "x", "--output", "z")

    path, long = tmp_path / "t.csv", b"x,z\n" + b"\n".join(b"%d,%d" % (i, i) for i in range(50))
    assert "is missing" in refusal(tmp_path / "none.csv")
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "line 3: not UTF-8 (byte 0xe9); save the file as UTF-8" in refusal(path, b"x,z\n1,2\n\xe9,3\n")
    assert refusal(path, b"x,z\n1,2\x00\n")
    monkeypatch.setattr(csv_rows, "MAX_ROWS", 40)
    assert "more than 40 rows" in refusal(path, long)
    monkeypatch.setattr(csv_rows, "MAX_LINE", 100)
    assert "a line has more than 100 characters" in refusal(path, b"x,z\n1,2\n2," + b"?" * 200)


def test_an_eps_out_of_reach_is_exit_code_one(run, tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("x,z\n" + "\n".join(f"{i},{np.sin(i)}" for i in range(30)))
    ran = run("compile", "--csv", path, "--inputs", "x", "--output", "z", "--eps", "1e-12", "--dtype", "float32")
    assert ran.code == 1
    assert "float32" in ran.err
    met = re.match(r"error: eps=(\S+) is (?:expected to be )?met, eps=1e-12 is not\.\n", ran.err)[1]
    again = run("compile", "--csv", path, "--inputs", "x", "--output", "z", "--eps", met, "--dtype", "float32")
    assert again.code == 0, again.err


def test_options_of_the_command(run, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("# station 7\nx;z\nm;K\n0;1,5\n0;1,7\n1;\n2;2,5\n3;4\n", encoding="utf-8")
    given = ("--csv", path, "--inputs", "x", "--output", "z", "--eps", "1e-3", "--json")
    ran = run("compile", *given, "--decimal", ",", "--skip-missing", "--duplicates", "mean")
    assert ran.code == 0, ran.err
    assert ran.json["num_points"] == 3
    assert len(ran.json["remarks"]) == 3
    assert run("compile", *given, "--decimal", ",").code == 2


def test_parquet_and_zarr(run, tmp_path):
    pyarrow, zarr = pytest.importorskip("pyarrow"), pytest.importorskip("zarr")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"x": np.linspace(0, 1, 30), "z": np.exp(np.linspace(0, 1, 30))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    group = zarr.open_group(tmp_path / "t.zarr", mode="w")
    for name, column in columns.items():
        group.create_array(name, data=column)
    for path in (tmp_path / "t.parquet", tmp_path / "t.zarr"):
        ran = run("compile", "--csv", path, "--inputs", "x", "--output", "z", "--eps", "1e-6", "--json")
        assert (ran.code, ran.err) == (0, "")
        assert ran.json["num_points"] == 30
        assert run("compile", "--csv", path, "--inputs", "x", "--output", "z", "--decimal", ",").code == 2


def test_verify_takes_the_rows_from_the_users_own_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr("attnc.proofs.kinds.point.MAX_STORED", 100)
    lines = [f"{i / 100!r},{i / 50!r}" for i in range(200)]
    path, net = tmp_path / "t.csv", tmp_path / "net"
    path.write_text("x,z\n" + "\n".join(lines))
    named = ("--csv", path, "--inputs", "x", "--output", "z")
    assert run("compile", *named, "--eps", "1e-3", "--out", net).code == 0
    (net / "table.f64").unlink()
    assert run("verify", net).code == 1
    assert run("verify", net, *named).code == 0
    assert run("verify", net, *named, "--merge").code == 2  # there are no verdicts
    path.write_text("x,z\n" + "\n".join(lines[:-1]) + "\n1.99,4.5")
    assert run("verify", net, *named).code == 1
    assert run("verify", net, "--inputs", "x").code == 2
