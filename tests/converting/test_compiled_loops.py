"""Loops are compiled once on a machine, and kept as libraries that need no numba."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from attnc.converting import compiled_loops
from attnc.converting.compiled_loops import ENTRY, Function, loop
from attnc.converting.shared_library import NotLinked, linked

POINTS = np.linspace(-3, 3, 501, dtype=np.float32)
NUMBERS = np.array([2, -1, 1], np.float32)  # of `saved_slope`: 2(y + 1)(1 − y), times the gradient


def computed(run: Function) -> np.ndarray:
    y, grad = np.empty_like(POINTS), np.full_like(POINTS, 0.5)
    addresses = [a.ctypes.data for a in (POINTS, y, grad)]
    given = (ctypes.c_int64 * 9)(*addresses, len(y), NUMBERS.ctypes.data, len(NUMBERS), 2, 1, 0)
    run(ctypes.addressof(given))
    return y


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for libraries, and no other."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(compiled_loops, "_folders", lambda: [tmp_path])
    return tmp_path


def test_a_library_computes_what_numba_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_library = computed(loop.__wrapped__("saved_slope", "float32")[0])
    (made,) = folder.glob("loop-saved_slope-float32-*.so")
    assert ENTRY.encode() in made.read_bytes()
    monkeypatch.setattr(compiled_loops, "_machine", lambda: None)  # as on other processors
    by_numba = computed(loop.__wrapped__("saved_slope", "float32")[0])
    assert np.array_equal(by_library, by_numba)
    assert np.abs(by_library - (1 + POINTS) * (1 - POINTS)).max() <= 1e-6


def test_a_process_that_computes_loads_no_numba(folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from attnc.converting import compiled_loops
compiled_loops._folders = lambda: [Path({str(folder)!r})]
compiled_loops.loop("saved_slope", "float32")
assert not {{"numba", "llvmlite"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(folder.glob("*.so"))) == 1


def test_a_library_that_others_can_write_is_not_loaded(folder: Path) -> None:
    loop.__wrapped__("saved_slope", "float32")
    (made,) = folder.glob("*.so")
    assert compiled_loops._loaded(made) is not None
    made.chmod(0o666)
    assert compiled_loops._loaded(made) is None
    made.chmod(0o644)
    folder.chmod(0o777)
    assert compiled_loops._loaded(made) is None
    folder.chmod(0o700)
    other = folder / "loop-other.so"
    other.write_bytes(made.read_bytes()[:100])
    assert compiled_loops._loaded(other) is None


def test_numba_computes_where_no_library_can_be_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loops, "_folders", lambda: [Path("/dev/null/none")])
    assert np.isfinite(computed(loop.__wrapped__("saved_slope", "float32")[0])).all()
    monkeypatch.setattr(compiled_loops, "_folders", lambda: [folder])
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "executable", "/dev/null")  # no second process
    assert not compiled_loops._compile("saved_slope", "float32", folder / "loop.so")
    assert not list(folder.iterdir())


def test_the_oldest_libraries_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loops, "MAX_LIBRARIES", 2)
    for number in range(4):
        (folder / f"loop-{number}.so").touch()
    loop.__wrapped__("saved_slope", "float32")
    assert len(list(folder.iterdir())) == 2
    assert list(folder.glob("loop-saved_slope-*"))


def test_objects_of_other_kinds_are_not_linked() -> None:
    for content in (b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100), bytes(64)):
        with pytest.raises(NotLinked):
            linked(content, ENTRY)
