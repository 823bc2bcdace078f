"""Re-prove a saved network, and remember on this machine which files were re-proved.

A record is a small file in the user's cache folder, named by a fingerprint: the hash of the files that a claim depends
on, and of the checker. The fingerprint includes a hash of the checker's source files, so any change of the checker
makes old records invalid. A record is ignored if another user could have written it. If the cache folder cannot be read
or written, every network counts as not re-proved.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnc.errors import FileError, positive_number, whole_number
from attnc.exports.directory import CERTIFICATE, MAX_CERTIFICATES, WEIGHTS, folder_named, require_folder
from attnc.exports.safe_files import CONFIG, sha256_of, write_file_whole
from attnc.exports.user_cache import is_private, user_cache
from attnc.opening import open_regular

MAX_HASHED_BYTES = 2**30
"""The largest file of a network that is hashed. The checker reads none that is larger."""
RECORDS = "re-proved"
MAX_RECORDS = 1024
"""Maximum number of records, of which the oldest are deleted first. On most disks a file takes 4 KiB, and all of them
4 MiB."""


def verify(
    path: str | Path, *, processes: int | None = None, seconds: float | None = None, memory: int | None = None
) -> dict[str, Any]:
    """Re-prove a saved network's bound by a separate program that shares no code with this one.

    If every certificate in the folder is re-proved, that is remembered on this machine, for these files.

    Parameters
    ----------
    path : str or path
        The folder that `Network.save` wrote.
    processes : int, optional
        The number of processes to use. By default, one per core.
    seconds : float, optional
        The time limit. By default, 600 seconds.
    memory : int, optional
        The memory limit of all processes together, in MB. By default, 1000 for each.

    Returns
    -------
    dict
        The verdict, as `attnc verify --json` prints it: `proved`, `bound`, `reason` and more. `decided` is False if a
        limit was reached.

    Raises
    ------
    FileError
        If the files cannot be read.
    InputError
        If `path` is not a path, or a limit not a number above 0.

    Examples
    --------
    >>> import tempfile, attnc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3).save(f"{folder}/net")
    ...     attnc.verify(f"{folder}/net", processes=1)["proved"]
    True
    """
    folder = require_folder(folder_named(path))
    command = checker_command(folder, processes, seconds, memory, as_json=True)
    before = fingerprints(folder)
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    try:
        verdict: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        problem = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise FileError(f"the checker broke off, and nothing was decided: {problem[0]}") from None
    if done.returncode > 1:
        raise FileError(verdict["reason"])
    if done.returncode == 0:
        remember(folder, before)
    return verdict


def checker_command(
    folder: str,
    processes: int | None,
    seconds: float | None,
    memory: int | None,
    *,
    as_json: bool,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    table: str | None = None,
) -> list[str]:
    """Return the command of the checker for a folder. It ends with this process, even if this process is killed.

    With -P Python imports nothing from the current folder, where a stranger's files may be.
    """
    options = ["--json"] if as_json else []
    if shard is not None:
        options += ["--shard", f"{shard[0]}/{shard[1]}"]
    if merge:
        options += ["--merge"]
    if table is not None:
        options += ["--table", table]
    for name, given in (("processes", processes), ("seconds", seconds), ("memory", memory)):
        if given is not None:
            number = positive_number(name, given) if name == "seconds" else whole_number(name, given, 1)
            options += [f"--{name}", str(number)]
    return [sys.executable, "-P", "-m", "attnc_checker", "--parent", str(os.getpid()), *options, "--", folder]


def fingerprint(digests: Mapping[str, str], certificate: str) -> str | None:
    """Return the fingerprint of a claim, from the hashes of its files by name; None if there is no checker to name.

    The structure of a network, its expression and its box are in config.json, so the hash of the weights is not enough.
    """
    checker = _checker_digest()
    if checker is None:
        return None
    parts = (checker, digests[CONFIG], digests[WEIGHTS], certificate, digests[certificate])
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fingerprints(folder: str | Path) -> frozenset[str]:
    """Return the fingerprints of all certificates in a folder; none if a file cannot be read, or is too large."""
    try:
        names = [name for name in os.listdir(folder) if CERTIFICATE.fullmatch(name)]
        if len(names) > MAX_CERTIFICATES:
            return frozenset()
        digests = {name: sha256_of(os.path.join(folder, name), MAX_HASHED_BYTES) for name in (CONFIG, WEIGHTS, *names)}
    except (OSError, FileError):
        return frozenset()
    found = (fingerprint(digests, name) for name in names)
    return frozenset(each for each in found if each is not None)


def remember(folder: str | Path, before: frozenset[str]) -> bool:
    """Record that a folder was re-proved. Return whether that was possible.

    `before` are its fingerprints from before the proof: if a file was changed since, nothing is recorded.
    """
    records = user_cache(RECORDS)
    if records is None or not before or fingerprints(folder) != before:
        return False
    try:
        os.makedirs(os.path.dirname(records), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(records, 0o700)
        if not is_private(records):
            return False
        for each in before:
            path = os.path.join(records, each)
            write_file_whole(path, _content(each))
            os.chmod(path, 0o600)
        entries = sorted(os.scandir(records), key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
        for entry in entries[:-MAX_RECORDS]:
            os.unlink(entry.path)
    except (OSError, FileError):
        return False
    return True


def is_remembered(wanted: str | None) -> bool:
    """Return whether the files of this fingerprint were re-proved on this machine, by this user."""
    records = user_cache(RECORDS)
    if records is None or wanted is None:
        return False
    path = os.path.join(records, wanted)
    try:
        if not (is_private(records) and is_private(path)):
            return False
        with open_regular(path) as file:
            return file.read(len(_content(wanted)) + 1) == _content(wanted)
    except (OSError, FileError):
        return False


def _content(wanted: str) -> bytes:
    return f"re-proved by attnc verify: {wanted}\n".encode()


@functools.cache
def _checker_digest() -> str | None:
    """Return the hash of the checker: its sources, and the version of the arithmetic that it computes with."""
    spec = find_spec("attnc_checker")
    if spec is None or not spec.submodule_search_locations:
        return None
    digest = hashlib.sha256()
    try:
        digest.update(version("python-flint").encode())
        for root in spec.submodule_search_locations:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(f"\n{path.relative_to(root).as_posix()} {sha256_of(path, MAX_HASHED_BYTES)}".encode())
    except (OSError, FileError, PackageNotFoundError):
        return None
    return digest.hexdigest()
