"""The user's cache folder is that of the platform, and files that others can write are not safe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnc.exports import user_cache as module
from attnc.exports.user_cache import is_private, is_safe, user_cache


def test_the_cache_folder_is_that_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    end = os.path.join("attnc", "re-proved")
    for given, platform, expected in [
        (str(tmp_path / "given"), "linux", tmp_path / "given"),
        ("", "linux", tmp_path / ".cache"),
        ("relative", "linux", tmp_path / ".cache"),
        ("", "darwin", tmp_path / "Library" / "Caches"),
        ("", "win32", tmp_path / "local"),
    ]:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
        monkeypatch.setattr(module.sys, "platform", platform)
        assert user_cache("re-proved") == os.path.join(expected, end)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home
    monkeypatch.setattr(module.sys, "platform", "linux")
    assert user_cache("re-proved") is None


def test_files_that_others_can_write_are_not_safe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.touch()
    link.symlink_to(path)
    for mode, expected in [(0o644, True), (0o664, False), (0o646, False)]:
        path.chmod(mode)
        assert is_safe(path) is is_private(path) is expected
    assert not is_safe(link)
    path.chmod(0o644)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not is_private(path)
    assert is_safe(path) is (owner == 0)  # files of root are safe
