"""The report: whole by itself, and every number in it follows from the CSV files."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnc.errors import FileError, InputError
from attnc_lab import EXPERIMENTS, report, run
from attnc_lab.experiment import Status
from attnc_lab.folder import Folder
from attnc_lab.report import findings
from attnc_lab.running import measure_cell

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
CHEAP = ("range_length", "selection", "frequency", "incontext")
"""Those that take seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "run"
    run(CHEAP, path, seed=3, processes=1, command="attnc lab run & more")
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


def slope(found: list[dict[str, str]], x: str, y: str, shift: float = 0.0) -> float:
    """Of log y over log(x + shift), by least squares."""
    return float(np.polyfit(np.log(column(found, x) + shift), np.log(column(found, y)), 1)[0])


def last_steps(found: list[dict[str, str]]) -> list[dict[str, str]]:
    end = column(found, "step").max()
    return [row for row in found if float(row["step"]) == end]


def ratio_of_medians(found: list[dict[str, str]], name: str) -> float:
    sigma, values = column(found, "sigma"), column(found, name)
    return float(np.median(values[sigma >= 0.4]) / np.median(values[sigma <= 0.1]))


def entropy_share(folder: Path) -> float:
    return float(rows(folder, "selection", kind="entropy", p="64")[0]["entropy"]) / math.log(64)


def oscillation_ratio(folder: Path) -> float:
    sampled = rows(folder, "frequency", kind="sampled")
    omega = column(sampled, "omega")
    bound = np.where(omega / 16 < 2 * math.pi, 2 * np.sin(omega / 64), 2.0)
    return float((column(sampled, "max_error") / bound).max())


def median_of_bounds(folder: Path) -> float:
    seen = [row for row in rows(folder, "beyond") if row["bound"] and float(row["observed"]) > 0]
    return float(np.median(column(seen, "bound") / column(seen, "observed")))


RECOMPUTED: dict[str, Callable[[Path], float]] = {
    "rate_in_p-0-max_exponent": lambda f: slope(
        rows(f, "rate_in_p", kind="hard", setting="decades"), "p", "max_error", -1
    ),
    "rate_in_p-2-mse_exponent": lambda f: slope(
        rows(f, "rate_in_p", kind="trained", setting="decades"), "p", "mse", -1
    ),
    "rate_in_heads-0-exponent": lambda f: slope(rows(f, "rate_in_heads", kind="hard"), "N", "max_error", -1),
    "rate_in_heads-1-exponent": lambda f: slope(rows(f, "rate_in_heads", kind="trained"), "H", "max_error"),
    "range_length-0-hard_exponent": lambda f: slope(
        rows(f, "range_length", kind="hard", middle="0.0"), "length", "max_error"
    ),
    "selection-1-uniform": entropy_share,
    "temperature-1-float32_error": lambda f: column(
        rows(f, "temperature", sweep="beta", dtype="float32"), "max_error"
    ).max(),
    "boundary-3-exponent": lambda f: slope(rows(f, "boundary", kind="jump", place="inside"), "P", "l2"),
    "frequency-0-largest_ratio": oscillation_ratio,
    "scaling-2-exponent": lambda f: slope(rows(f, "scaling", kind="compose"), "D", "anchors", -1),
    "two_dimensional-0-exponent": lambda f: -slope(rows(f, "two_dimensional", kind="self"), "eps", "anchors"),
    "learnability-3-drift": lambda f: column(
        last_steps(rows(f, "learnability", kind="from construction")), "distance"
    ).max(),
    "noise-1-norms_random": lambda f: ratio_of_medians(rows(f, "noise", kind="trained", start="random"), "norm"),
    "perturbation-1-hard_clip": lambda f: column(rows(f, "perturbation", subject="hard clip"), "adversarial_slope")[0],
    "sequences-0-exponent_2": lambda f: slope(
        rows(f, "sequences", kind="constructed", model="two layers", n="2"), "P", "max_error"
    ),
    "incontext-0-one_head": lambda f: slope(rows(f, "incontext", kind="step", heads="1"), "eps", "error"),
    "beyond-1-median": median_of_bounds,
}
"""A number of every experiment, by a way of its own from the CSV."""


def check_recomputed(folder: Path) -> int:
    """How many numbers were compared."""
    shown = numbers((folder / "report.html").read_text(encoding="utf-8"))
    compared = [name for name in RECOMPUTED if (folder / f"{name.partition('-')[0]}.csv").exists()]
    for name in compared:
        assert shown[name] == pytest.approx(RECOMPUTED[name](folder), rel=1e-9), name
    return len(compared)


def test_numbers_are_recomputed_from_the_csv(folder: Path) -> None:
    assert check_recomputed(folder) == len(CHEAP)


@pytest.mark.slow
def test_the_whole_quick_profile(tmp_path: Path) -> None:
    """Every experiment; what theory proves holds, and only claims about training fail."""
    run(["all"], tmp_path / "run")
    report(tmp_path / "run")
    assert {name.partition("-")[0] for name in RECOMPUTED} == {experiment.name for experiment in EXPERIMENTS}
    assert check_recomputed(tmp_path / "run") == len(RECOMPUTED)
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == len(EXPERIMENTS)
    for _, _, verdicts in findings(tmp_path / "run"):
        for verdict in verdicts:
            is_about_training = re.search("[Tt]rain|[Gg]radient descent finds", verdict.claim)
            assert verdict.status is not Status.FAILS or is_about_training, verdict


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
    assert "Not in this run: Rate in the number of anchors" in page


def test_tables_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes((folder / "settings.json").read_bytes())
    with pytest.raises(InputError, match="no experiment of"):
        report(tmp_path)
    (tmp_path / "selection.csv").write_text("kind,p\nmap,8\n")
    with pytest.raises(FileError, match="not what this version measures"):
        report(tmp_path)


def test_the_same_seed_gives_the_same_numbers(folder: Path) -> None:
    """Measured in another process, in another order."""
    experiment = next(experiment for experiment in EXPERIMENTS if experiment.name == "frequency")
    cells = experiment.cells("quick")
    again = {i: measure_cell("frequency", cells[i], 3) for i in (30, 7, 0)}
    table = Folder.read(folder).table(experiment)
    assert table is not None
    for i, (found, failure) in again.items():
        assert failure is None
        assert table[i] == {**cells[i], **found[0]}


def test_experiments_are_told_apart() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert [experiment.number for experiment in EXPERIMENTS] == sorted(experiment.number for experiment in EXPERIMENTS)
    for experiment in EXPERIMENTS:
        for profile in ("quick", "full"):
            cells = [tuple(sorted(cell.items())) for cell in experiment.cells(profile)]
            assert len(set(cells)) == len(cells) > 0, experiment.name
        assert re.search(r"2504\.(15956|19901)|beyond the papers", experiment.source), experiment.name
