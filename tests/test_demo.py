from __future__ import annotations

import json
import sys
from pathlib import Path

from attnc.demo import FIGURES, run_demo


def test_the_demo_prints_a_table_and_draws(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    figures = run_demo(Path("a/b"))
    out = capsys.readouterr().out
    assert [path.name for path in figures] == list(FIGURES) == ["demo.png", "demo-fine.png"]
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["a/b/demo-fine.png", "a/b/demo.png"]
    for path in figures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"wrote {path}" in out
    sizes = ("eps", "anchors", "heads", "layers", "parameters", "1e-06")
    for word in ("construction", *sizes, "(proven)", "(sampled)", "max_affine", "compose"):
        assert word in out
    assert "…" not in out  # nothing is cut off on a terminal of 80 columns


def test_the_demo_as_json(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("attnc.plots.plot", lambda network, path: path.write_bytes(b""))
    monkeypatch.setattr("attnc.plots.plot_demonstration", lambda path, *networks: path.write_bytes(b""))
    run_demo(tmp_path, json_output=True)
    found = json.loads(capsys.readouterr().out)
    papers, coarse, fine = found["networks"]
    assert len({papers["name"], coarse["name"], fine["name"]}) == 3
    assert found["figures"] == [str(tmp_path / name) for name in FIGURES]
    for row in (papers, coarse, fine):
        assert row["observed"] <= row["bound"] <= row["eps"]
        assert row["bound"] <= 3 * row["observed"]
    assert fine["num_anchors"] > coarse["num_anchors"]
    assert papers["eps"] == coarse["eps"] > 1e4 * fine["eps"]
    assert papers["num_anchors"] > 50 * fine["num_anchors"]


def test_without_matplotlib_the_table_is_still_there(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run_demo(tmp_path) == []
    out = capsys.readouterr().out
    assert all(words in out for words in ("max_affine", "compose", "pip install 'attnc[plots]'"))
    assert list(tmp_path.iterdir()) == []
