"""Runs of the lab: finished cells are kept, whatever happens, and are not measured again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc import scheduling
from attnc.errors import FileError, InputError
from attnc.scheduling import finished
from attnc_lab import running
from attnc_lab.experiment import Experiment, Status, Table, Verdict, fit_power
from attnc_lab.folder import Folder, from_csv, to_csv

VERSIONS = {"attnc": "0"}


def experiment(name: str, count: int) -> Experiment:
    facts: Any = {"number": 1, "name": name, **dict.fromkeys(("title", "question", "prediction", "source"), "")}
    return Experiment(
        **facts,
        cells=lambda profile: [{"k": k} for k in range(count)],
        measure=lambda cell, seed: [{"square": float(cell["k"]) ** 2 + seed}],
        judge=lambda table: iter([Verdict("", Status.HOLDS, "", {})]),
        draw=lambda table, picture: None,
    )


def at_once(called: list[Any], fails: Callable[[int], bool] = lambda k: False) -> running.Start:
    """Return a start of jobs that measures at once, and notes the cells that it was asked for."""

    def start(jobs: dict[running.Place, running.Job]) -> Iterator[tuple[running.Place, running.Measured]]:
        for key, (name, cell, seed) in jobs.items():
            called.append((name, cell["k"]))
            rows: Any = experiment(name, 0).measure(cell, seed)
            yield key, ([], "no luck") if fails(cell["k"]) else (rows, None)

    return start


def open_run(path: Path, **changed: Any) -> Folder:
    settings = {"profile": "quick", "seed": 7, "versions": VERSIONS, "command": "a command"} | changed
    return Folder.open(path, **settings)


def test_finished_cells_are_not_measured_again(tmp_path: Path) -> None:
    made, called = experiment("squares", 5), []
    with pytest.raises(running.RunFailed, match="2 of 5 cells"):
        running._measure(open_run(tmp_path / "run"), [made], at_once(called, lambda k: k in (1, 3)), None)
    assert not (tmp_path / "run/squares.csv").exists()
    called.clear()
    seen: list[float] = []
    folder = open_run(tmp_path / "run")
    running._measure(folder, [made], at_once(called), lambda what, fraction: seen.append(fraction))
    assert called == [("squares", 1), ("squares", 3)]
    assert seen == [0.5, 1.0]
    table = folder.table(made)
    assert table is not None
    assert [row["square"] for row in table] == [k**2 + 7 for k in range(5)]  # in the order of the cells
    called.clear()
    running._measure(folder, [made], at_once(called), None)
    assert called == []


def test_another_runs_settings_are_refused(tmp_path: Path) -> None:
    open_run(tmp_path / "run")
    for changed, word in (
        ({"seed": 8}, "seed 7"),
        ({"profile": "full"}, "profile quick"),
        ({"versions": {"attnc": "1"}}, "attnc 0"),
    ):
        with pytest.raises(InputError, match=word):
            open_run(tmp_path / "run", **changed)
    assert open_run(tmp_path / "run", command="another").commands == ("a command", "another")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="no run of the lab"):
        open_run(tmp_path / "other")
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": "attnc.lab/1"}', '{"format": "x", "profile": "quick"}'])
def test_settings_that_do_not_fit(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(FileError, match="does not fit"):
        Folder.read(tmp_path)
    with pytest.raises(InputError, match="no run of the lab"):
        Folder.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"names": ["rate_in_q"]}, "rate_in_p"),
        ({"names": []}, "no experiment was named"),
        ({"profile": "slow"}, "quick, full"),
        ({"seed": -1}, "whole number"),
        ({"seed": True}, "whole number"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    names = changed.pop("names", ["selection"])
    with pytest.raises(InputError, match=word):
        running.run(names, tmp_path / "run", **changed)
    assert not (tmp_path / "run").exists()


numbers = st.one_of(
    st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.sampled_from(["hard", "one head", 'a,"b"'])
)


@given(st.lists(st.dictionaries(st.sampled_from(["p", "error", "kind"]), numbers, min_size=1), min_size=1))
def test_a_table_is_read_as_it_was_written(rows: list[dict[str, Any]]) -> None:
    assert from_csv(to_csv(rows)) == rows


def test_a_torn_table_is_refused(tmp_path: Path) -> None:
    made, folder = experiment("squares", 2), open_run(tmp_path / "run")
    folder.table_path(made).write_text("k,square\n1,2\n3\n")
    with pytest.raises(FileError, match="line 3"):
        folder.table(made)


def test_tables_select_rows() -> None:
    table = Table([{"kind": "a", "x": 1}, {"kind": "b", "x": 2, "y": 3.0}, {"kind": "b", "x": 4}])
    assert table.where(kind="b").column("x").tolist() == [2, 4]
    assert table.distinct("kind") == ["a", "b"]
    assert len(table.having("y")) == 1


def test_a_power_is_recognised_with_its_confidence() -> None:
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    exact = fit_power(x, [3 * t**-1.5 for t in x])
    assert exact.exponent == pytest.approx(-1.5)
    assert exact.factor == pytest.approx(3)
    assert exact.high - exact.low < 1e-9
    rough = fit_power(x, [3 * t**-1.5 * (1.2 if i % 2 else 0.8) for i, t in enumerate(x)])
    assert rough.low < -1.5 < rough.high
    assert rough.high - rough.low > 0.1
    assert math.isinf(fit_power([1, 2], [1, 2]).high)


def started(path: Path, num_cells: int) -> tuple[list[str], subprocess.Popen[str], Path]:
    """A run in a session of its own, after more than this number of cells: the command, the process, the cells."""
    command = [sys.executable, "-m", "attnc", "lab", "run", "temperature", "--out"]
    process = subprocess.Popen([*command, str(path)], start_new_session=True, stderr=subprocess.PIPE, text=True)
    cells, until = path / "cells/temperature", time.monotonic() + 300
    while time.monotonic() < until and not (cells.exists() and len(os.listdir(cells)) > num_cells):
        time.sleep(0.01)
    return command, process, cells


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """SIGKILL in the middle: no worker is left, cells are whole, and the end is as if nothing had happened."""
    command, killed, cells = started(tmp_path / "killed", 5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=300)  # until its workers have ended as well
    done = {path.name: path.read_bytes() for path in cells.glob("*.csv")}
    assert 5 < len(done) < 87
    until = time.monotonic() + 300
    while time.monotonic() < until and _alive(killed.pid):
        time.sleep(0.1)
    assert not _alive(killed.pid)
    for name in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    assert measured(tmp_path / "killed/temperature.csv") == measured(tmp_path / "whole/temperature.csv")
    assert all((cells / name).read_bytes() == content for name, content in done.items())
    assert json.loads((tmp_path / "killed/settings.json").read_text())["seed"] == 0


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    _, process, _ = started(tmp_path / "run", 2)
    process.send_signal(signal.SIGINT)  # to this process alone: it ends its workers
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert not _alive(process.pid)


def test_an_unreachable_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(scheduling, "CONNECT_SECONDS", 0.5)
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with pytest.raises(InputError, match="no dask scheduler answers"):
            running.run(["selection"], tmp_path / "run", cluster=address)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_gives_the_same_numbers(tmp_path: Path) -> None:
    """A real scheduler, a worker process of two threads; four trained cells compete for it."""
    distributed = pytest.importorskip("distributed")
    trained = [
        {"kind": kind, "d": 2, "target": name, "steps": 40} for kind in ("adam", "sgd") for name in ("smooth", "kinked")
    ]
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None) as cluster:
        there = running.run(["range_length"], tmp_path / "there", cluster=cluster.scheduler_address)
        with distributed.Client(cluster) as client:
            futures = [client.submit(running.measure_cell, "learnability", cell, 0, pure=False) for cell in trained]
            far = client.gather(futures)
    here = running.run(["range_length"], tmp_path / "here", processes=1)
    near = [running.measure_cell("learnability", cell, 0) for cell in trained]
    assert [Table(rows).without_costs() for rows, _ in near] == [Table(rows).without_costs() for rows, _ in far]
    assert all(failure is None and len(rows) > 10 for rows, failure in far)
    assert measured(there.path / "range_length.csv") == measured(here.path / "range_length.csv")


def lost(*_: Any) -> Any:
    raise RuntimeError("the worker was lost")


def test_a_lost_worker_loses_nothing_else(tmp_path: Path) -> None:
    made, measure = experiment("squares", 3), at_once([])

    def start(jobs: dict[running.Place, running.Job]) -> Iterator[tuple[running.Place, running.Measured]]:
        first, second, third = jobs
        yield from measure({first: jobs[first], third: jobs[third]})
        yield from finished(lost, {second: jobs[second]}, None, failed=running._failure)

    with pytest.raises(running.RunFailed, match=r"1 of 3 cells(.|\n)*worker was lost"):
        running._measure(open_run(tmp_path / "run"), [made], start, None)
    assert open_run(tmp_path / "run").missing(made) == [{"k": 1}]


def measured(path: Path) -> Table:
    """Read a table without the costs of its measurement, which differ from run to run."""
    return Table(from_csv(path.read_text(encoding="utf-8"))).without_costs()


def _alive(leader: int) -> bool:
    """Whether any process that `leader` began is left."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(leader)], capture_output=True, text=True, check=False)
    return any("Z" not in line.split()[1] for line in listed.stdout.splitlines())
