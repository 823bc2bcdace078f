"""The benchmarks of benchmarks/bench.py and speed.py run, at tiny sizes and without the environments of the peers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attnc

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
MODULES = ("bench", "bench_functions", "speed", "timing", "peers.protocol")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The modules of the benchmarks, which import one another by their file names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in MODULES})
        for name in (*MODULES, "peers"):
            sys.modules.pop(name, None)


def rows(scripts: Any) -> list[Any]:
    row = scripts.protocol.Row(
        function="", method="attnc", eps=1e-6, size=79, keys=22, build_seconds=0.5, error=3e-7, bound=3.04e-7,
        seconds_per_point=1e-8, time=0.5, num_timed=1000, threads=2,
    )  # fmt: skip
    poor = replace(row, method="torch, trained MLP", eps=None, error=0.02, bound=None, keys=None, time=1234.0)
    unit = replace(row, method="numpy, the expression", eps=None, size=0, error=0.0, bound=None, time=1.0)
    worse = replace(row, eps=1e-2, error=2e-3, size=40)
    return [replace(each, function=f.text) for f in scripts.bench.COMPARED for each in (worse, row, poor, unit)]


def test_numpy_code_and_text_are_the_same_function(scripts: Any) -> None:
    """The text is read by attnc's own parser. The code in numpy beside it is the unit of all times."""
    functions = scripts.bench_functions
    assert len(functions.COMPARED) == 5
    assert len({function.name for function in functions.TIMED}) >= 16
    for function in (*functions.COMPARED, *functions.TIMED):
        target = attnc.as_target(function.text, function.box)
        assert target.box.names == tuple(function.box)
        points = replace(function, dtype="float64").sample(1000, seed=1)
        assert function(points) == pytest.approx(target(points)[:, 0], rel=1e-13, abs=1e-13)


def test_a_sample_stays_in_the_box(scripts: Any) -> None:
    single = next(function for function in scripts.bench_functions.TIMED if function.dtype == "float32")
    points = single.sample(100_000, seed=0)
    lo, hi = single.ends
    assert points.dtype == np.float32
    assert ((points >= lo) & (points <= hi)).all()


@pytest.mark.parametrize("peer", ["interpolation", "attnc_networks"])
def test_a_peer_fits_and_prints_rows(scripts: Any, peer: str, tmp_path: Path) -> None:
    """In a process of its own, as the benchmark runs it; these two need no other packages."""
    function = scripts.bench_functions.RUNGE
    np.save(tmp_path / "points.npy", function.sample(3000, seed=3))
    job = scripts.protocol.Job(function.text, str(tmp_path / "points.npy"), (1e-2,), 0.5, 0.5, str(tmp_path))
    script = scripts.bench.Peer(peer)
    found, reason = scripts.bench.run_peer(Path(sys.executable), script, job, limit=120)
    assert reason is None
    assert {row.function for row in found} == {function.text}
    for row in found:
        assert row.time > 0
        if row.eps is not None:
            assert row.error <= (1.1 * row.eps if row.bound is None else row.bound)
    if peer == "attnc_networks":
        assert [row.method for row in found if row.bound is not None] == [row.method for row in found]
        with np.load(tmp_path / "head_1e-02.npz", allow_pickle=False) as head:
            assert len(head["slopes"]) == len(head["offsets"]) == len(head["values"])


def test_sizes_grow_until_every_accuracy_is_met(scripts: Any) -> None:
    function, protocol = scripts.bench_functions.RUNGE, scripts.protocol
    job = protocol.Job(function.text, "", (1e-1, 1e-2, 1e-9), 10.0, 10.0, "")

    def off_by(size: int) -> Any:
        return (lambda points: function(points) + 1 / size), size

    found = list(protocol.smallest("off", job, function, [1, 20, 40, 200], off_by))
    assert [(each.eps, each.size) for each in found] == [(1e-1, 20), (1e-2, 200)]
    found = list(protocol.smallest("off", job, function, [1, 2, 5], off_by))
    assert [(each.eps, each.size) for each in found] == [(None, 5)]


def test_a_peer_that_cannot_be_installed_is_named(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Path:
        raise subprocess.CalledProcessError(1, "pip", stderr="notes\nERROR: No matching distribution found for nothing")

    monkeypatch.setattr(scripts.bench, "python_of", fail)
    peer = scripts.bench.Peer("nothing_networks", ("nothing",))
    found, notes = scripts.bench.measure(scripts.bench.COMPARED, [peer], (1e-2,), 0.1, 100, lambda words: None)
    assert found == []
    assert notes == ["nothing cannot be installed: ERROR: No matching distribution found for nothing."]


def test_a_peer_that_fails_says_why(scripts: Any, tmp_path: Path) -> None:
    job = scripts.protocol.Job("no such function", "", (1e-2,), 0.1, 0.1, str(tmp_path))
    found, reason = scripts.bench.run_peer(Path(sys.executable), scripts.bench.Peer("interpolation"), job, limit=60)
    assert found == []
    assert "StopIteration" in reason


def test_tables_and_figure(scripts: Any, tmp_path: Path) -> None:
    """The row at the accuracy that is shown is the smallest; a method that misses it is in italics."""
    scripts.bench.write(tmp_path, rows(scripts), ["a cannot be installed."], "facts.", in_docs=False)
    small, full = scripts.bench.readme_table(rows(scripts), [], ""), (tmp_path / "bench.md").read_text("utf-8")
    assert "| **attnc** | 3.0e-7, 0.5 ×" in small
    assert "*0.02, 1,234 ×*" in small
    assert "a cannot be installed." in full
    assert "| 3.0e-7 | 3.04e-7 |" in full
    assert len(json.loads((tmp_path / "bench.json").read_text("utf-8"))["rows"]) == len(rows(scripts))
    assert (tmp_path / "bench.svg").read_text("utf-8").count("<svg") == 1


def test_stored_rows_make_the_same_tables(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in ("README.md", "docs/benchmarks.md", "docs/comparison.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text("utf-8"), encoding="utf-8")
    (tmp_path / "docs/figures").mkdir()
    monkeypatch.setattr(scripts.bench, "ROOT", tmp_path)
    stored = tmp_path / "rows.json"
    stored.write_text(json.dumps({"facts": "Facts.", "notes": [], "rows": list(map(asdict, rows(scripts)))}))
    assert scripts.bench.main(["--from", str(stored), "--out", str(tmp_path / "out")]) == 0
    pages = [(tmp_path / page).read_text("utf-8") for page in ("README.md", "docs/benchmarks.md")]
    assert "| attnc | 3.0e-7 | 3.04e-7 |" in (tmp_path / "docs/comparison.md").read_text("utf-8")
    assert all("Facts." in page and "3.0e-7" in page for page in pages)
    assert (tmp_path / "docs/figures/benchmarks.svg").exists()
    assert scripts.bench.replaced(pages[0], "summary", "again").count("<!-- bench: summary -->") == 1
    with pytest.raises(ValueError, match="no place <!-- bench: nothing"):
        scripts.bench.replaced(pages[0], "nothing", "")


def test_the_pages_have_filled_places(scripts: Any) -> None:
    places = (("README.md", "summary"), ("docs/benchmarks.md", "all"), ("docs/comparison.md", "comparison"))
    for page, name in places:
        _, _, rest = (ROOT / page).read_text("utf-8").partition(f"<!-- bench: {name} -->")
        table, found, _ = rest.partition("<!-- end of bench -->")
        assert found
        assert "| attnc |" in table or "| **attnc** |" in table


def test_the_speed_of_a_function(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed, functions = scripts.speed, scripts.bench_functions
    monkeypatch.setattr(speed, "TURN_SECONDS", 0.0)
    found = [speed.timed(function, 500, 100, 1) for function in (functions.WAVE, functions.RUNGE)]
    assert found[0].spline is not None
    assert found[1].spline is None
    assert all(one.unit > 0 and one.plain > 0 and one.point > 0 for one in found)
    table = list(speed.speed_table(found, 500))
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    speed.figure(found, tmp_path / "speed.svg")
    assert "sin(x)+cos(y)" in (tmp_path / "speed.svg").read_text("utf-8")


def test_the_speed_of_a_grid_and_of_a_proof(scripts: Any) -> None:
    grid = scripts.speed.timed_grid("sin(x)*y", 17, 200, 1)
    assert grid.scipy > 0
    assert grid.error < 1e-3
    proof = scripts.speed.proved("sin(x)", {"x": (-1, 1)}, 1e-2, "auto")
    assert proof.check is not None
    lines = [*scripts.speed.grid_table([grid]), *scripts.speed.proof_table([proof])]
    assert lines[2].startswith("| `sin(x)*y` | 17² |")
    assert lines[5].startswith("| `sin(x)` | 1e-02 |")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_memory_of_an_engine(scripts: Any) -> None:
    peak, is_done = scripts.speed.peak_memory("grid, numpy", 9, 1000, 60.0)
    assert is_done
    assert 2**24 < peak < 2**33
    table = list(scripts.speed.memory_table({"grid, numpy": (peak, False), "torch": None}, 1000, 9))
    assert any("ended after" in line for line in table)
    assert any("failed" in line for line in table)
    assert any("not installed, or no such engine" in line for line in table)


def test_a_goal_that_is_missed_is_bold(scripts: Any) -> None:
    ratio = scripts.speed.ratio
    assert ratio(3.0, 2.0, 2.0) == "1.5"
    assert ratio(3.0, 1.0, 2.0) == "**3**"
    assert ratio(3.0, 1.0, 4.0, is_least=True) == "**3**"
    assert ratio(None, 1.0) == ratio(1.0, None) == "–"


def test_contenders_take_turns(scripts: Any) -> None:
    calls: list[str] = []
    took = scripts.timing.alternated({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert all(seconds >= 0 for seconds in took.values())
    assert scripts.timing.busy_warning(0.1) is None
    assert "busy" in scripts.timing.busy_warning(2.0)
    assert "numpy " in scripts.timing.versions(["numpy", "no-such-package"])


def test_layers_beside_interpolation(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a time of both contenders, and an error within the bound where the table is smooth."""
    pytest.importorskip("torch")
    layers = importlib.import_module("layers")
    for name, value in (("NODES", 40), ("TURNS", 1)):
        monkeypatch.setattr(layers, name, value)
    found = layers.one_variable(600)
    sys.modules.pop("layers")
    assert [row.peer for row in found] == 2 * ["np.interp", "grid_sample", "grid_sample"]
    assert all(row.layer_ms > 0 and row.peer_ms > 0 for row in found)
    assert found[0].error is not None
    assert found[3].error is None
    assert len(layers.table(found).splitlines()) == 8
