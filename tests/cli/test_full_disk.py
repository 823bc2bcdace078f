"""A full disk, an unreachable cluster, tables that are not served: a sentence, exit code 2, nothing half written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import attnc


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within the block, a file of more bytes cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    box = {"x": (-1, 1), "y": (-1, 1)}
    attnc.compile("sin(x + y)", box, 1e-3, construction="spectral_grid", proof=False).save(tmp_path / "net")
    return tmp_path / "net"


def test_a_full_disk(refused, net: Path, tmp_path: Path) -> None:
    points = tmp_path / "points.csv"
    points.write_text("x,y\n" + "0.25,0.5\n" * 2000, encoding="utf-8")
    before = everything(tmp_path)
    for command in (
        ("eval", net, "--csv", points, "--out", tmp_path / "values.csv"),
        ("prove", net, "--shard", "1/2", "--out", tmp_path / "parts"),
        ("compile", "sin(x)", "--box", "x=-1:1", "--out", tmp_path / "new"),
    ):
        with full_disk(200):
            said = refused(*command)
        assert "File too large" in said
        assert everything(tmp_path) == before


def test_no_cluster(refused, net: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("attnc.scheduling.CONNECT_SECONDS", 0.2)
    before, nowhere = everything(tmp_path), "tcp://127.0.0.1:9"
    assert "no dask scheduler answers at 'tcp://127.0.0.1:9'" in refused("prove", net, "--cluster", nowhere)
    made = ("compile", "sin(x)", "--box", "x=-1:1", "--cluster", nowhere, "--out", tmp_path / "new")
    assert "no dask scheduler answers" in refused(*made)
    assert everything(tmp_path) == before


def test_tables_that_are_not_served(refused, tmp_path: Path) -> None:
    columns = np.random.default_rng(0).uniform(size=(40, 8)).tolist()
    names = "abcdefgh"
    table = tmp_path / "table.csv"
    table.write_text("\n".join([",".join(names), *(",".join(map(repr, row)) for row in columns)]), encoding="utf-8")
    texts = tmp_path / "texts.csv"
    texts.write_text("a,b\n0,low\n1,high\n2,low\n", encoding="utf-8")
    for source, inputs, output, message in (
        (table, "a,b,c,d,e", "h", "has 1 to 4 input columns; these points have 5"),
        (table, "a,b,c,d,e,f,g", "h", "a table has 1 to 6 input columns; the points have 7"),
        (texts, "a", "b", "'high' is not a number"),
    ):
        out = tmp_path / "net"
        assert message in refused("compile", "--csv", source, "--inputs", inputs, "--output", output, "--out", out)
        assert not out.exists()
