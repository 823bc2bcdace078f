"""The pages of the papers and of the lab: every command exists, and every verdict is that of the stored run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

from attnc.cli import app
from attnc_lab import EXPERIMENTS, named
from attnc_lab.experiment import CPU_SECONDS, PEAK_MIB, Experiment
from attnc_lab.folder import Folder
from attnc_lab.report import findings

ROOT = Path(__file__).resolve().parents[2]
DOCS, STORED = ROOT / "docs", ROOT / "docs" / "lab"
NUM_ITEMS = 52
BY_EXPERIMENT = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)


@pytest.fixture(scope="module")
def builder() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "builders/lab_pages.py"), run_name="lab_pages")


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of the numbered rows of a page's tables."""
    lines = re.findall(r"^\| (\d+ \|.*) \|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def test_the_pages_have_the_verdicts_of_the_stored_run(builder: dict[str, Any]) -> None:
    """The verdicts are judged anew from the stored tables by the code of today."""
    for name, text in builder["pages"]().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"{name}: python docs/builders/lab_pages.py"


@BY_EXPERIMENT
def test_the_stored_run_is_one_of_todays_experiments(experiment: Experiment) -> None:
    """It is of the profile full, and has exactly the cells that the code of today would measure."""
    folder = Folder.read(STORED)
    assert folder.profile == "full"
    table = folder.table(experiment)
    assert table is not None
    cells = experiment.cells("full")
    first = [row for row in table if CPU_SECONDS in row]  # of every cell
    assert len(first) == len(cells)
    for cell, row in zip(cells, first, strict=True):
        assert {name: row[name] for name in cell} == dict(cell)
        assert row[CPU_SECONDS] >= 0
        assert row.get(PEAK_MIB, 0) >= 0


@BY_EXPERIMENT
def test_the_page_of_results_shows_every_figure(experiment: Experiment) -> None:
    figure = DOCS / f"figures/lab/{experiment.name}.svg"
    assert f"](figures/lab/{experiment.name}.svg)" in (DOCS / "lab-results.md").read_text(encoding="utf-8")
    text = figure.read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert len(text) < 160_000
    assert "<script" not in text


def test_every_item_has_a_place_a_command_a_verdict_and_a_figure() -> None:
    rows = rows_of("papers.md")
    assert [int(row[0]) for row in rows] == list(range(1, NUM_ITEMS + 1))
    found = {finding.experiment.number: finding for finding in findings(STORED)}
    for number, text, place, command, verdicts, figures in rows:
        assert text, number
        assert re.search("abstract|summary only|Theorem 4.1|Proposition 3|Section 6", place), number
        names = re.search(r"`attnc lab run ([a-z_ ]+)`", command)
        assert names is not None, number
        numbers = [named(name).number for name in names[1].split()]
        shown = re.findall(r"(\d+)\.(\d+): ([^;]+?)(?=; \d+\.|$)", verdicts)
        assert {int(experiment) for experiment, _, _ in shown} == set(numbers), number
        for experiment, verdict, label in shown:
            assert found[int(experiment)].verdicts[int(verdict) - 1].label == label, number
        assert [int(figure) for figure in re.findall(r"\[(\d+)\]\(lab-results\.md#", figures)] == numbers, number


def test_every_command_of_the_papers_page_exists() -> None:
    commands = re.findall(r"`attnc ([a-z -]+)`", (DOCS / "papers.md").read_text(encoding="utf-8"))
    assert {"diagnose", "plan", "icl"} <= set(commands)
    main: Any = typer.main.get_command(app)
    for command in commands:
        first, *rest = command.split()
        assert first in main.commands, command
        if first == "lab":
            assert rest[0] in main.commands["lab"].commands, command
            assert [named(name).name for name in rest[1:]] == rest[1:]


def test_every_experiment_is_on_the_page_of_the_lab() -> None:
    text = (DOCS / "lab.md").read_text(encoding="utf-8")
    for experiment in EXPERIMENTS:
        assert f"| `{experiment.name}` | {experiment.question} |" in text
