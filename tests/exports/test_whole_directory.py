"""Directories are written whole or not at all, and only saved networks are replaced."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnc.errors import FileError
from attnc.exports import safe_files
from attnc.exports.directory import FORMAT, NETWORK
from attnc.exports.safe_files import write_whole

OLD = {"config.json": json.dumps({"format": FORMAT}).encode(), "model.safetensors": b"old", "README.md": b"old"}
NEW = {"config.json": json.dumps({"format": FORMAT}).encode(), "model.safetensors": b"new", "certificate.json": b"{}"}


PIPE = object()


def make(folder: Path, scene: dict[str, Any]) -> None:
    """Make files of bytes, links of texts, a folder of None, and a pipe; the opposite of `contents`."""
    for name, content in scene.items():
        path = folder / name
        if content is None or content is PIPE:
            (os.mkfifo if content is PIPE else os.mkdir)(path)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def network(extra: str, content: Any) -> dict[str, Any]:
    return {"net": None, **{f"net/{name}": old for name, old in OLD.items()}, f"net/{extra}": content}


def contents(folder: Path) -> dict[str, Any]:
    """Everything below, links as links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
    return found


def test_a_new_directory_whose_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "net", NEW, NETWORK)
    finally:
        os.umask(before)
    assert contents(tmp_path) == {"net": None, **{f"net/{name}": content for name, content in NEW.items()}}
    assert stat.S_IMODE((tmp_path / "net").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "net" / "config.json").stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["net/", "net//", "./net", "sub/../net", "sub/./../net/"])
def test_ways_to_spell_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    write_whole(name, OLD, NETWORK)
    assert contents(tmp_path / "net") == OLD
    write_whole(name, NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW
    assert sorted(os.listdir(tmp_path)) == ["net", "sub"]


def test_a_link_to_a_saved_network_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write_whole(tmp_path / "deep" / "real", OLD, NETWORK)
    (tmp_path / "net").symlink_to("deep/real")
    write_whole(f"{tmp_path}/net/", NEW, NETWORK)
    assert contents(tmp_path) == {
        "deep": None,
        "deep/real": None,
        "net": "deep/real",
        **{f"deep/real/{name}": content for name, content in NEW.items()},
    }


@pytest.mark.parametrize(
    ("scene", "found"),
    [
        ({"net": b"precious"}, "a file, not a folder"),
        ({"other": b"precious", "net": "other"}, "a file, not a folder"),
        ({"net": "nowhere"}, "leads nowhere"),
        ({"net": "net"}, "leads nowhere"),
        ({"net": None}, "an empty folder"),
        ({"net": None, "net/thesis.tex": b"precious"}, "not a saved network"),
        ({"other": None, "other/thesis.tex": b"precious", "net": "other"}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": "pt", "model_type": "bert"}'}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": "attnc.network/1"'}, "not a saved network"),
        ({"net": None, "net/config.json": b'{"format": ["attnc.network/1"]}'}, "not a saved network"),
        (network("notes.txt", b"precious"), "'notes.txt'"),
        (network("certificate.more.json", None), "'certificate.more.json'"),
        ({"net": PIPE}, "neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("ending", ["", "/"])
def test_anything_else_is_refused_and_untouched(tmp_path: Path, scene: dict[str, Any], found: str, ending: str) -> None:
    make(tmp_path, scene)
    before = contents(tmp_path)
    with pytest.raises(FileError, match=found) as caught:
        write_whole(f"{tmp_path}/net{ending}", NEW, NETWORK)
    assert "Choose another name" in str(caught.value)
    assert contents(tmp_path) == before


def test_only_the_last_folder_is_created(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"the folder .*/missing' does not exist"):
        write_whole(tmp_path / "missing" / "net", NEW, NETWORK)
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileError, match="is not a folder"):
        write_whole(tmp_path / "file" / "net", NEW, NETWORK)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["", "/", ".", "..", "n" * 300, "nul\0", "\ud800", "/proc/net-of-attnc"])
def test_impossible_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileError):
        write_whole(path, NEW, NETWORK)
    assert contents(tmp_path) == {"here": None}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0"])
def test_files_have_plain_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="plain name"):
        write_whole(tmp_path / "net", {**NEW, name: b""}, NETWORK)
    assert not os.listdir(tmp_path)


class Calls:
    """Stands in for a function: the call of this number fails, before it does anything."""

    def __init__(self, function: Callable[..., Any], fails_at: int, error: BaseException) -> None:
        self.function, self.fails_at, self.error, self.count = function, fails_at, error, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self.fails_at:
            raise self.error
        return self.function(*arguments, **options)


ERRORS = [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), KeyboardInterrupt()]
STEPS = [(os, "mkdir", 1), (os, "rename", 2), (os, "fsync", 4), (safe_files, "_write_file", 3)]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("owner", "name", "num_calls"), STEPS)
def test_a_crash_midway_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    num_calls: int,
    is_new: bool,
    error: BaseException,
) -> None:
    if not is_new:
        write_whole(tmp_path / "net", OLD, NETWORK)
    before = contents(tmp_path)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FileError
    for fails_at in range(1, num_calls + 1):
        never_happens = is_new and name == "rename" and fails_at == 2
        is_folder = name == "fsync" and fails_at == 4  # folders are flushed only where the file system can
        if never_happens or (is_folder and expected is FileError):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Calls(getattr(owner, name), fails_at, error))
            with pytest.raises(expected):
                write_whole(tmp_path / "net", NEW, NETWORK)
        assert contents(tmp_path) == before
    write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


def test_folders_that_cannot_be_flushed_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", Calls(os.open, 1, OSError(22, "Invalid argument")))
    write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


def test_an_old_network_that_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    monkeypatch.setattr(os, "rename", Calls(os.rename, 2, OSError(5, "Input/output error")))
    monkeypatch.setattr(os, "replace", Calls(os.replace, 1, OSError(5, "Input/output error")))
    with pytest.raises(FileError, match="The former content is now in") as caught:
        write_whole(tmp_path / "net", NEW, NETWORK)
    (left,) = os.listdir(tmp_path)
    assert left in str(caught.value)
    assert contents(tmp_path / left) == OLD


def test_an_old_network_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    monkeypatch.setattr(shutil, "rmtree", Calls(shutil.rmtree, 2, OSError(5, "Input/output error")))
    with pytest.raises(FileError, match="was saved, but"):
        write_whole(tmp_path / "net", NEW, NETWORK)
    assert contents(tmp_path / "net") == NEW


def test_what_is_a_saved_network(tmp_path: Path) -> None:
    write_whole(tmp_path / "net", OLD, NETWORK)
    assert NETWORK.includes(tmp_path / "net")
    assert NETWORK.includes(f"{tmp_path}/net/")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "config.json").write_text('{"format": "attnc.network/99"}')
    assert NETWORK.includes(tmp_path / "later")
    assert not NETWORK.includes(tmp_path)
    assert not NETWORK.includes(tmp_path / "absent")
    assert not NETWORK.includes(tmp_path / "net" / "config.json")
    assert not NETWORK.includes("nul\0")
