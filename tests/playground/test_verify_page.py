"""The verify page as files: the checker's source, the list of networks, and downloads whose hashes must match."""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import attnc_checker
from attnc_playground import verify_page


def test_the_archive_has_the_checker_and_nothing_else() -> None:
    raw = verify_page.checker_archive()
    assert raw == verify_page.checker_archive()
    source = Path(attnc_checker.__file__).parent
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        stored = {name: archive.read(name) for name in archive.namelist()}
    assert stored == {f"attnc_checker/{path.relative_to(source)}": path.read_bytes() for path in source.rglob("*.py")}


def test_the_networks_of_a_gallery_are_offered(tmp_path: Path) -> None:
    assert verify_page.gallery(tmp_path / "gallery") == []
    (tmp_path / "gallery").mkdir()
    rows = [{"name": "bell", "title": "One head over a grid", "bound": 1e-3}]
    (tmp_path / "gallery" / "index.json").write_text(json.dumps(rows), encoding="utf-8")
    offered = verify_page.gallery(tmp_path / "gallery")
    assert offered == [("One head over a grid", "../gallery/bell/")]
    (entry,) = json.loads(verify_page.generated(offered)[verify_page.NETWORKS])
    assert entry == {"title": "One head over a grid", "url": "../gallery/bell/"}


OLD = Path(__file__).parents[1] / "data" / "network-1"
STATIC = Path(verify_page.__file__).parent / "static" / "verify"


def told(folder: Path) -> list[dict[str, Any]]:
    """Return what the page is told while its checker reads a network."""
    messages: list[dict[str, Any]] = []
    driver = runpy.run_path(str(STATIC / "driver.py"), run_name="driver")
    driver["check"](str(folder), 60.0, lambda text: messages.append(json.loads(text)))
    return messages


@pytest.mark.parametrize(
    "name", ["leaves", "stages", "tails", "table", "norm", "second-dtype", "chain", "definitions", "gradient"]
)
def test_the_page_is_told_every_leaf(name: str) -> None:
    messages = told(OLD / name)
    verdicts = [message for message in messages if message["type"] == "verdict"]
    layouts = [message for message in messages if message["type"] == "layout"]
    leaves = [leaf[:2] for message in messages if message["type"] == "leaves" for leaf in message["proved"]]
    assert all(verdict["proved"] for verdict in verdicts)
    assert [layout["count"] for layout in layouts] == [verdict["leaves"] for verdict in verdicts]
    assert len(leaves) == sum(verdict["leaves"] for verdict in verdicts)
    places = [[i, n] for layout in layouts for i, one in enumerate(layout["subjects"]) for n in range(one["count"])]
    assert sorted(leaves) == sorted(places)


def test_the_row_that_is_refused_is_the_row_of_the_reason(tmp_path: Path) -> None:
    shutil.copytree(OLD / "table", tmp_path / "table")
    path = tmp_path / "table" / "certificate.json"
    claim = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(claim | {"bound": claim["bound"] / 1.01, "observed": 0.0}), encoding="utf-8")
    (verdict,) = (message for message in told(path.parent) if message["type"] == "verdict")
    assert not verdict["proved"]
    assert verdict["failed"] == [0, 1]  # the second row of its block
    assert f"the row leaf {verdict['failed'][1]}," in verdict["reason"]


def installed(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in (*verify_page.PYODIDE_FILES, verify_page.WHEEL):
        (folder / name).write_bytes(b"")


def test_the_page_is_written_to_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "payload")
    monkeypatch.setattr(verify_page, "PAYLOAD", tmp_path / "payload")
    site = tmp_path / "site"
    for _ in range(2):  # the second page replaces the first
        verify_page.write(site / "verify")
        assert (site / "verify" / "index.html").is_file()
        assert (site / "verify" / verify_page.CHECKER).read_bytes() == verify_page.checker_archive()
        assert (site / "css" / "tokens.css").is_file()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(verify_page.FetchError, match="has other files"):
        verify_page.write(other)
    assert (other / "thesis.txt").is_file()


def test_without_the_payload_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_page, "PAYLOAD", tmp_path / "payload")
    assert not verify_page.is_installed()
    with pytest.raises(verify_page.FetchError, match="Pyodide and python-flint are not there"):
        verify_page.write(tmp_path / "verify")
    monkeypatch.setattr(verify_page, "_npm", lambda folder: ["no-such-program"])
    assert verify_page.main([]) == 1
    assert "no-such-program cannot be started" in capsys.readouterr().err
    assert not verify_page.is_installed()


def test_a_download_with_another_hash_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "open('got.whl', 'wb').write(b'wheel')"]
    digest = hashlib.sha256(b"wheel").hexdigest()
    assert verify_page._fetched(tmp_path, command, [], "*.whl", "sha256", digest).name == "got.whl"
    with pytest.raises(verify_page.FetchError, match="not the file that was pinned"):
        verify_page._fetched(tmp_path, command, [], "*.whl", "sha256", "0" * 64)
