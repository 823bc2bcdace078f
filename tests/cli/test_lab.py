"""`attnc lab`."""

from __future__ import annotations

import re
from pathlib import Path

from attnc_lab import EXPERIMENTS
from attnc_lab.experiment import Status


def test_the_list_names_every_experiment(run) -> None:
    listed = run("lab", "list", "--json").json
    assert [row["name"] for row in listed] == [experiment.name for experiment in EXPERIMENTS]
    assert all(row["prediction"] and row["question"] and row["source"] for row in listed)
    shown = run("lab", "list").out
    assert all(experiment.name in shown for experiment in EXPERIMENTS)


def test_a_run_writes_tables_and_a_report(run, refused, tmp_path: Path) -> None:
    done = run("lab", "run", "frequency", "--out", str(tmp_path / "run"), "--json")
    assert done.code == 0, done.err
    found = done.json
    assert Path(found["report"]) == tmp_path / "run/report.html"
    assert {row["verdict"] for row in found["verdicts"]} <= {str(status) for status in Status}
    assert any(re.fullmatch(r"holds with the constant \d.*", row["label"]) for row in found["verdicts"])
    assert "attnc lab run frequency --profile quick --seed 0" in (tmp_path / "run/settings.json").read_text()
    again = run("lab", "report", str(tmp_path / "run"), "--json")
    assert again.json == found
    assert "holds another run" in refused("lab", "run", "frequency", "--seed", "1", "--out", tmp_path / "run")


def test_bad_requests(refused, tmp_path: Path) -> None:
    assert "Did you mean rate_in_p" in refused("lab", "run", "rate_in_pp", "--out", tmp_path / "x")
    assert "rate_in_heads" in refused("lab", "run", "xyzzy", "--out", tmp_path / "x")
    assert refused("lab", "run", "selection", "--profile", "slow", "--out", tmp_path / "x")
    assert "no run of the lab" in refused("lab", "report", tmp_path)
    assert not (tmp_path / "x").exists()
