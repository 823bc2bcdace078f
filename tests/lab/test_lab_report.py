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
from attnc_lab.experiment import COSTS, Status, Table, Verdict
from attnc_lab.folder import Folder
from attnc_lab.report import findings
from attnc_lab.running import measure_cell

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
CHEAP = ("selection", "frequency", "incontext", "diagnosis")
"""The experiments that take seconds."""


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
    """Read rows by the standard library alone: the test has its own way from the CSV to the number."""
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def column(found: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in found])


def slope(x: str, y: str, shift: float = 0.0, **wanted: str) -> Callable[[Path, str], float]:
    """Return a function that fits the slope of log y over log(x + shift) by least squares."""

    def found(folder: Path, name: str) -> float:
        chosen = rows(folder, name, **wanted)
        return float(np.polyfit(np.log(column(chosen, x) + shift), np.log(column(chosen, y)), 1)[0])

    return found


def largest(y: str, **wanted: str) -> Callable[[Path, str], float]:
    return lambda folder, name: column(rows(folder, name, **wanted), y).max()


def final_distance(folder: Path, name: str) -> float:
    found = rows(folder, name, kind="from construction")
    step, distance = column(found, "step"), column(found, "distance")
    return float(distance[step == step.max()].max())


def interval(folder: Path, name: str, y: str, **wanted: str) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the geometric mean of five seeds, by Student's t for 4 degrees."""
    logs = np.log(column(rows(folder, name, **wanted), y))
    assert len(logs) == 5
    reach = 2.7764451051977987 * logs.std(ddof=1) / math.sqrt(5)
    return math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)


def change_of_norms(folder: Path, name: str) -> float:
    """The geometric mean of the norms over seeds at σ = 0.4 and 0.8, over that at 0.05 and 0.1."""
    found = rows(folder, name, kind="trained", what="random")
    sigma, norms = column(found, "sigma"), np.log(column(found, "norm"))
    return math.exp(norms[sigma >= 0.4].mean() - norms[sigma <= 0.1].mean())


def oscillation_ratio(folder: Path, name: str) -> float:
    sampled = rows(folder, name, kind="sampled")
    omega = column(sampled, "omega")
    bound = np.where(omega / 16 < 2 * math.pi, 2 * np.sin(omega / 64), 2.0)
    return float((column(sampled, "max_error") / bound).max())


def median_of_bounds(folder: Path, name: str) -> float:
    seen = [row for row in rows(folder, name) if row["bound"] and float(row["observed"]) > 0]
    return float(np.median(column(seen, "bound") / column(seen, "observed")))


def drift_ratio(folder: Path, name: str) -> float:
    found = rows(folder, name, kind="drift")
    beta, off = column(found, "beta"), column(found, "off")
    return float((off * beta)[beta > 4].max() / math.log(9))


def largest_looseness(folder: Path, name: str) -> float:
    """The largest ratio of the bound of a ball to the error of its heads."""
    found = rows(folder, name, kind="ball")
    return float((np.array(column(found, "bound")) / np.array(column(found, "error"))).max())


def correction_gain(folder: Path, name: str) -> float:
    """The least error without a correction over that with one, at the longest prompt on a grid."""
    found = rows(folder, name, kind="corrected", d="1", prompt="grid")
    fill, count, error = (column(found, each) for each in ("fill", "corrections", "inner_error"))
    last = fill == fill.min()
    return float(error[last & (count == 0)].min() / error[last & (count == 1)].min())


RECOMPUTED: dict[str, Callable[[Path, str], float]] = {
    "rate_in_p-0-max_exponent": slope("p", "max_error", -1, kind="hard", setting="decades"),
    "rate_in_p-2-mse_low": lambda f, name: interval(
        f, name, "mse", kind="trained", setting="decades", start="random", p="64"
    )[0],
    "rate_in_heads-0-exponent": slope("N", "max_error", -1, kind="hard"),
    "rate_in_heads-1-error_high": lambda f, name: interval(f, name, "max_error", kind="trained", start="random", H="8")[
        1
    ],
    "range_length-0-hard_exponent": slope("length", "max_error", kind="hard", middle="0.0"),
    "selection-1-uniform": lambda f, name: column(rows(f, name, kind="entropy", p="64"), "entropy")[0] / math.log(64),
    "temperature-1-float32_error": largest("max_error", sweep="beta", dtype="float32"),
    "boundary-3-exponent": slope("P", "l2", kind="jump", place="inside"),
    "frequency-0-largest_ratio": oscillation_ratio,
    "scaling-3-exponent": slope("D", "anchors", -1, kind="compose"),
    "two_dimensional-0-exponent": lambda f, name: -slope("eps", "anchors", kind="self")(f, name),
    "learnability-5-drift": final_distance,
    "noise-3-norms_random": change_of_norms,
    "perturbation-1-hard_clip": largest("slope", subject="hard clip", part="all"),
    "sequences-0-exponent_2": slope("P", "max_error", kind="constructed", model="two layers", n="2"),
    "incontext-0-one_head": slope("eps", "error", kind="step", heads="1"),
    "beyond-1-median": median_of_bounds,
    "diagnosis-2-largest_ratio": drift_ratio,
    "prompt_programs-0-largest_looseness": largest_looseness,
    "incontext_universal-2-gain_1": correction_gain,
    "convergence-0-difference_logistic": lambda f, name: column(
        rows(f, name, kind="path", model="logistic"), "difference"
    )[-1],
    "cross_inputs-1-largest_ratio": lambda f, name: (
        column(rows(f, name, kind="jump"), "bound") / column(rows(f, name, kind="jump"), "error")
    ).max(),
    "beyond_the_box-1-to_nearest": largest("to_nearest", kind="far", net="hard"),
    "dimension-2-grid_first": largest("unexplained", kind="equal grid", d="2"),
    "real_tasks-0-attention_only": lambda f, name: math.exp(
        np.log(column(rows(f, name, task="digits", model="attention only"), "error")).mean()
    ),
    "estimators-0-share_ridge": largest("share", kind="fit", model="ridge"),
}
"""A number of every experiment, by a way of its own from the CSV."""


def check_recomputed(folder: Path) -> int:
    """Compare the numbers of the page with recomputed ones, and return how many were compared."""
    shown = numbers((folder / "report.html").read_text(encoding="utf-8"))
    compared = {key: name for key in RECOMPUTED if (folder / f"{(name := key.partition('-')[0])}.csv").exists()}
    for key, name in compared.items():
        assert shown[key] == pytest.approx(RECOMPUTED[key](folder, name), rel=1e-9), key
    return len(compared)


def test_numbers_are_recomputed_from_the_csv(folder: Path) -> None:
    assert check_recomputed(folder) == len(CHEAP)


@pytest.mark.slow
def test_the_whole_quick_profile(tmp_path: Path) -> None:
    """Every experiment: claims that are proved hold, and only claims about training fail."""
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
        for name, value in {**verdict.numbers, **constant_of(verdict)}.items()
    }
    assert len(wanted) > 10
    assert numbers(page) == wanted
    (folder / "report.html").unlink()
    assert report(folder).read_text(encoding="utf-8") == page


def constant_of(verdict: Verdict) -> dict[str, float]:
    is_shown = verdict.status is Status.CONSTANT and verdict.constant is not None
    return {"c": verdict.constant.value} if is_shown and verdict.constant is not None else {}


def test_every_cell_has_its_costs(folder: Path) -> None:
    """Time and memory are in the first row of every cell, and the page sums them up."""
    for finding in findings(folder):
        cells = finding.experiment.cells("quick")
        for name in COSTS[: 2 if Path("/proc/self/clear_refs").exists() else 1]:
            costs = finding.table.having(name).column(name)
            assert len(costs) == len(cells)
            assert (costs >= 0).all()
            assert costs.max() > 0
        assert f"{len(cells):,} cells" in finding.costs
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(finding.costs in page for finding in findings(folder))


def test_the_page_says_which_profile_it_is(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Profile quick." in page[: page.index("<section>")]
    assert all(status.meaning in page for status in Status)


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
    with pytest.raises(FileError, match="does not fit this version"):
        report(tmp_path)


def test_the_same_seed_gives_the_same_numbers(folder: Path) -> None:
    """Measured in another process, in another order."""
    experiment = next(experiment for experiment in EXPERIMENTS if experiment.name == "frequency")
    cells = experiment.cells("quick")
    again = {i: measure_cell("frequency", cells[i], 3) for i in (30, 7, 0)}
    table = Folder.read(folder).table(experiment)
    assert table is not None
    table = table.without_costs()
    for i, (found, failure) in again.items():
        assert failure is None
        assert table[i] == {**cells[i], **Table(found).without_costs()[0]}


def test_experiments_are_told_apart() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert [experiment.number for experiment in EXPERIMENTS] == sorted(experiment.number for experiment in EXPERIMENTS)
    for experiment in EXPERIMENTS:
        for profile in ("quick", "full"):
            cells = [tuple(sorted(cell.items())) for cell in experiment.cells(profile)]
            assert len(set(cells)) == len(cells) > 0, experiment.name
        assert re.search(r"2504\.(15956|19901)|beyond the papers", experiment.source), experiment.name
