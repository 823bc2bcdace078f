"""The loops as machine code, compiled once on a machine. This module imports no numba.

numba and LLVM take about 100 MB of memory, and loading code takes next to none. So a second process compiles a loop,
and keeps it as a shared library (`shared_library`) beside this module, or in the user's cache if that cannot be
written. This process loads the library. If numba is loaded already, or there can be no library, numba compiles here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnc.engines import powers
from attnc.errors import FileError
from attnc.exports.safe_files import write_file_whole
from attnc.exports.user_cache import is_safe, user_cache

ENTRY = "attnc_loop"
FOLDER = Path(__file__).parent
SOURCES = (*(FOLDER / f"{name}.py" for name in ("compiled_loops", "kernels_numba", "shared_library")),)
SOURCES += (Path(powers.__file__), Path(powers.__file__).with_name("exponential_numba.py"))
MAX_LIBRARIES = 200
"""Number of libraries in a folder above which the oldest is deleted. There are 36 loops, of 8 to 44 kB each."""
COMPILING_SECONDS = 300
"""Time for the second process. It needs 3 to 8 s, and longer on a machine that is very busy."""
Function = Any


@functools.cache
def loop(name: str, dtype: str) -> tuple[Function, int]:
    """Return a loop as a C function of the address of `kernels_numba.ARGUMENTS`, and its address."""
    file = _file_name(name, dtype)
    if file is not None:
        for folder in _folders():
            if (found := _loaded(folder / file)) is not None:
                return found
        for folder in _folders():
            if _is_ready(folder) and _compile(name, dtype, folder / file):
                if (found := _loaded(folder / file)) is not None:
                    return found
                break
    from attnc.converting.kernels_numba import worker

    made = worker(name, dtype)
    return made.ctypes, made.address


@functools.cache
def _machine() -> bytes | None:
    """Return a text that changes with the processor, and with all that compiles. None where there are no libraries."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        packages = [version("numba"), version("llvmlite")]
        sources = [path.read_bytes() for path in SOURCES]
    except (OSError, PackageNotFoundError):
        return None
    processor = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags"))]
    options = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_")]
    return "\n".join((*processor, *packages, *options)).encode() + b"".join(sources)


def _file_name(name: str, dtype: str) -> str | None:
    machine = _machine()
    return None if machine is None else f"loop-{name}-{dtype}-{hashlib.sha256(machine).hexdigest()[:24]}.so"


def _folders() -> Iterator[Path]:
    yield FOLDER / "__pycache__"
    if (own := user_cache("loops")) is not None:
        yield Path(own)


def _is_ready(folder: Path) -> bool:
    """Return whether libraries can be kept in a folder. It is created if necessary."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return is_safe(folder) and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _loaded(path: Path) -> tuple[Function, int] | None:
    """Load a library. Return None if there is none, or if others than this user and root can write it."""
    try:
        if not (is_safe(path.parent) and is_safe(path)):
            return None
        function = ctypes.CDLL(str(path))[ENTRY]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p,), None
    address = ctypes.cast(function, ctypes.c_void_p).value
    return None if address is None else (function, address)


def _compile(name: str, dtype: str, path: Path) -> bool:
    """Compile a loop into a library, here if numba is loaded already. Return whether that was possible."""
    if "numba" in sys.modules:
        return write_library(name, dtype, path)
    if not Path(sys.executable or "").name.startswith("python"):  # a program that embeds Python
        return False
    command = [sys.executable, "-P", "-m", "attnc.converting.compile_loop", name, dtype, str(path)]
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=silent, stdout=silent, stderr=silent, timeout=COMPILING_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def write_library(name: str, dtype: str, path: Path) -> bool:
    """Compile a loop and write its library. Return whether that was possible."""
    from attnc.converting.kernels_numba import library
    from attnc.converting.shared_library import NotLinked

    try:
        write_file_whole(str(path), library(name, dtype))
        path.chmod(0o644)
        kept = sorted(path.parent.glob("loop-*.so"), key=lambda each: each.stat().st_mtime)
        with suppress(OSError):  # another process may delete the same
            for each in kept[:-MAX_LIBRARIES]:
                each.unlink()
    except (FileError, NotLinked, OSError):
        return False
    return True
