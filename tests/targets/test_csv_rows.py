"""CSV files as people have them: units, comments, gaps, decimal commas, quoted names, repeated points, bad rows."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

import attnc
from attnc.targets import csv_rows


def table(text: str | bytes, inputs=("x",), outputs=("z",), **options) -> attnc.TableTarget:
    raw = text.encode() if isinstance(text, str) else text
    return attnc.TableTarget.from_stream(io.BytesIO(raw), "t.csv", inputs, outputs, **options)


def rows_of(found: attnc.TableTarget) -> list[list[float]]:
    return np.hstack([found.points, found.values]).tolist()


@pytest.mark.parametrize("block", [16, 40, 2**24])
@pytest.mark.parametrize(
    ("text", "options", "rows", "remark"),
    [
        ("x,z\n0,1\n1,2\n", {}, [[0, 1], [1, 2]], ""),
        ("x,z\r\n0,1\r\n1,2", {}, [[0, 1], [1, 2]], ""),
        ("# made in May\n\nx,z\n# units follow\n0,1\n\n1,2\n", {}, [[0, 1], [1, 2]], ""),
        ("# x,z\n0,1\n1,2\n", {}, [[0, 1], [1, 2]], ""),
        ("x,z\nm,m/s\n0,1\n1,2\n", {}, [[0, 1], [1, 2]], "Line 2 has units and no numbers: it was left out."),
        ("x,z\n0,1\n1,\n2,NaN\n3,4\n", {"skip_missing": True}, [[0, 1], [3, 4]], "2 rows with missing cells were"),
        ("x;z\n0;1,5\n1;2,5e1\n", {"decimal": ","}, [[0, 1.5], [1, 25]], ""),
        ("x\tz\n0,5\t1\n1\t2\n", {"decimal": ","}, [[0.5, 1], [1, 2]], ""),
        ("x,z\n0,1\n0,2\n1,4\n", {"duplicates": "mean"}, [[0, 1.5], [1, 4]], "1 point with values up to 1 apart"),
        ("x,z\n0,1\n0,2\n1,4\n", {"duplicates": "first"}, [[0, 1], [1, 4]], "the first row counts"),
        ("x,z\n0,1\n0,1.5\n1,4\n", {"tolerance": 0.5}, [[0, 1.25], [1, 4]], "within eps: the middle counts"),
        ('"x",note,z\n0,"a, b",1\n1,"c ""d""\n e",2\n', {}, [[0, 1], [1, 2]], ""),
    ],
)
def test_files_as_people_have_them(monkeypatch, text, options, rows, remark, block):
    monkeypatch.setattr(csv_rows, "BLOCK_BYTES", block)
    found = table(text, **options)
    assert rows_of(found) == rows
    assert remark in " ".join(found.remarks)
    assert bool(found.remarks) == bool(remark)


def test_a_quoted_header_may_have_commas():
    found = table('"time, in s","T\n in K"\n0,1\n1,2\n', ["time, in s"], ["T\n in K"])
    assert found.box.as_dict() == {"time, in s": (0.0, 1.0)}


def test_all_bad_rows_are_reported_at_once(monkeypatch):
    monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 50)
    lines = [f"{i},{i}" if i % 10 else f"{i},oops" for i in range(400)]
    with pytest.raises(attnc.InputError) as refusal:
        table("x,z\n" + "\n".join(lines))
    said = str(refusal.value).splitlines()
    assert said[0] == "t.csv: 40 rows cannot be read. These are the first 20 of them:"
    assert [int(re.findall(r"line (\d+)", line)[0]) for line in said[1:]] == [2 + 10 * i for i in range(20)]
    assert "line 2, column 'z': 'oops' is not a number" in said[1]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x,z\n0,1\n1,\n", {}, "line 3, column 'z': the cell is empty"),
        ("x;z\n0;1,5\n1;2\n", {}, "line 2, column 'z': '1,5' has a decimal comma; write 1.5"),
        ("x;z\n0;1.5\n1;2\n", {"decimal": ","}, "line 2, column 'z': '1.5' has a decimal point; write 1,5"),
        ("x,z\n0,1\n0,2\n1,2\n", {}, "line 2 and line 3 are one point, x = 0, with two values, 1 and 2"),
        ("x,z\n0,1\n0,1.5\n1,2\n", {"tolerance": 0.4}, "line 2 and line 3 are one point"),
        ("x,z\n,\n", {"skip_missing": True}, "there is no row below the header"),
        ("x,z\n0,1\n1\n", {}, "line 3: 1 cell, but the header names 2 columns"),
        ("x,z\na,b\nc,d\n1,2\n", {}, "line 3, column 'x': 'c' is not a number"),
        ("x,z\n0,1\n1,2\n", {"decimal": "'"}, "expected '.' or ','"),
        ("x,z\n0,1\n1,2\n", {"duplicates": "last"}, "duplicates='last'"),
    ],
)
def test_bad_rows_are_named(text, options, message):
    with pytest.raises(attnc.InputError, match=re.escape(message)):
        table(text, **options)


def test_plain_blocks_and_cells_give_the_same_numbers(monkeypatch):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(500, 3)) * 10.0 ** rng.integers(-300, 300, (500, 1))
    lines = [",".join(map(repr, row)) for row in numbers.tolist()]
    text = "x,y,z\n" + "\n".join(lines)
    plain = table(text, ["x", "y"], ["z"])
    monkeypatch.setattr(csv_rows._Reading, "_plain", lambda self, block: None)
    by_cells = table(text, ["x", "y"], ["z"])
    assert rows_of(plain) == rows_of(by_cells)
    assert (np.sort(plain.values[:, 0]) == np.sort(numbers[:, 2])).all()


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("x,z\n" + "".join(f"{i},{i}\n" for i in range(100)))
    monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 100)
    inner = csv_rows._Reading._add

    def add(self, numbers, lines):
        with path.open("a") as file:
            file.write("1000,1\n")
            file.flush()
        monkeypatch.setattr(csv_rows._Reading, "_add", inner)
        inner(self, numbers, lines)

    monkeypatch.setattr(csv_rows._Reading, "_add", add)
    with pytest.raises(attnc.FileError, match="changed while it was read"):
        attnc.TableTarget.from_csv(path, "x", "z")
