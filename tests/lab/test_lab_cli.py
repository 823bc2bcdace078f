"""`attnc lab`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from attnc.cli import main
from attnc.lab import EXPERIMENTS


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ending:
            main(["lab", *arguments])
        return Ran(int(ending.value.code or 0), *capsys.readouterr())

    return run


def test_the_list_names_every_experiment(call) -> None:
    listed = json.loads(call("list", "--json").out)
    assert [row["name"] for row in listed] == [experiment.name for experiment in EXPERIMENTS]
    assert all(row["prediction"] and row["question"] and row["source"] for row in listed)
    shown = call("list").out
    assert all(experiment.name in shown for experiment in EXPERIMENTS)


def test_a_run_writes_tables_and_a_report(call, tmp_path: Path) -> None:
    done = call("run", "range_length", "--out", str(tmp_path / "run"), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert Path(found["report"]) == tmp_path / "run/report.html"
    assert {row["verdict"] for row in found["verdicts"]} <= {"holds", "holds with a constant", "fails"}
    assert "attnc lab run range_length --profile quick --seed 0" in (tmp_path / "run/settings.json").read_text()
    again = call("report", str(tmp_path / "run"), "--json")
    assert json.loads(again.out) == found
    other = call("run", "range_length", "--seed", "1", "--out", str(tmp_path / "run"))
    assert other.code == 2
    assert "holds another run" in other.err


def test_bad_requests(call, tmp_path: Path) -> None:
    assert "Did you mean rate_in_p" in call("run", "rate_in_pp", "--out", str(tmp_path / "x")).err
    assert "rate_in_heads" in call("run", "xyzzy", "--out", str(tmp_path / "x")).err
    assert call("run", "selection", "--profile", "slow", "--out", str(tmp_path / "x")).code == 2
    assert "no run of the lab" in call("report", str(tmp_path)).err
    assert not (tmp_path / "x").exists()
