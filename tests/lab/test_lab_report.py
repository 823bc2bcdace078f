"""The report: whole by itself, and every number in it follows from the CSV files."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest

from attnc.errors import FileError, InputError
from attnc.lab import EXPERIMENTS, report, run
from attnc.lab.report import findings

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
CHEAP = ("range_length", "selection", "frequency")
"""Those that take seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "run"
    run(CHEAP, path, seed=3, processes=2, command="attnc lab run & more")
    report(path)
    return path


def numbers(page: str) -> dict[str, float]:
    """Every number of the verdicts, by its id."""
    return {name: float(value) for name, value in re.findall(r'<data id="([^"]+)" value="([^"]+)">', page)}


def rows(folder: Path, name: str, **wanted: str) -> list[dict[str, str]]:
    """By the standard library alone: the test has its own way from the CSV to the number."""
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def column(found: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in found])


def test_numbers_are_recomputed_from_the_csv(folder: Path) -> None:
    shown = numbers((folder / "report.html").read_text(encoding="utf-8"))
    hard = rows(folder, "range_length", kind="hard", middle="0.0")
    slope, intercept = np.polyfit(np.log(column(hard, "length")), np.log(column(hard, "max_error")), 1)
    assert shown["range_length-0-hard_exponent"] == pytest.approx(slope, rel=1e-9)
    assert shown["range_length-0-hard_constant"] == pytest.approx(32 * math.exp(intercept), rel=1e-9)
    sampled = rows(folder, "frequency", kind="sampled")
    omega, error = column(sampled, "omega"), column(sampled, "max_error")
    bound = np.where(omega / 16 < 2 * math.pi, 2 * np.sin(omega / 64), 2.0)
    assert shown["frequency-0-largest_ratio"] == pytest.approx((error / bound).max(), rel=1e-9)
    assert shown["frequency-1-breaks_at"] == pytest.approx(omega[error > 0.5].min() / 16 / math.pi, rel=1e-9)
    entropies = rows(folder, "selection", kind="entropy", p="64")
    assert shown["selection-1-uniform"] == pytest.approx(float(entropies[0]["entropy"]) / math.log(64), rel=1e-9)


def test_every_number_of_the_page_is_a_verdict_of_the_tables(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    wanted = {
        f"{experiment.name}-{i}-{name}": value
        for experiment, _, verdicts in findings(folder)
        for i, verdict in enumerate(verdicts)
        for name, value in verdict.numbers.items()
    }
    assert len(wanted) > 10
    assert numbers(page) == wanted
    (folder / "report.html").unlink()
    assert report(folder).read_text(encoding="utf-8") == page


def test_the_page_needs_nothing_else(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == len(CHEAP)
    assert not re.findall(r'(?:src|href)="(?!#|data:image/png;|[a-z_]+\.csv)[^"]*"', page)
    assert "<script" not in page
    assert not re.findall(r"@import|url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {name[1:] for name in re.findall(r'href="(#[^"]+)"', page)} <= set(ids)
    assert "attnc lab run &amp; more" in page
    assert "seed 3" in page


def test_unfinished_experiments_are_named(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Not in this run: Rate in the number of anchors" in page


def test_tables_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes((folder / "settings.json").read_bytes())
    with pytest.raises(InputError, match="no experiment of"):
        report(tmp_path)
    (tmp_path / "selection.csv").write_text("kind,p\nmap,8\n")
    with pytest.raises(FileError, match="not what this version measures"):
        report(tmp_path)


def test_the_same_seed_gives_the_same_table(folder: Path, tmp_path: Path) -> None:
    run(["frequency"], tmp_path / "again", seed=3, processes=1)
    assert (tmp_path / "again/frequency.csv").read_bytes() == (folder / "frequency.csv").read_bytes()


def test_experiments_are_told_apart() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert [experiment.number for experiment in EXPERIMENTS] == sorted(experiment.number for experiment in EXPERIMENTS)
    for experiment in EXPERIMENTS:
        for profile in ("quick", "full"):
            cells = [tuple(sorted(cell.items())) for cell in experiment.cells(profile)]
            assert len(set(cells)) == len(cells) > 0, experiment.name
        assert re.search(r"2504\.(15956|19901)|beyond the papers", experiment.source), experiment.name
