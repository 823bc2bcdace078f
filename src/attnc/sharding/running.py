"""Proofs in shards, one by one, by processes of this machine or on a cluster, and the certificate of all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnc.constructions.built import Progress
from attnc.errors import BoundNotMet, FileError, InputError
from attnc.exports.directory import MAX_SHARDS, shard_name
from attnc.exports.safe_files import write_file_whole
from attnc.network import Network
from attnc.scheduling import LOCAL, finished
from attnc.sharding.tasks import STEM, Task, task_of, task_of_files

NUM_SHARDS = 64
"""The number of shards, unless another is chosen. It does not depend on the machine, so that certificates do not."""
PART = re.compile(STEM + r"\.([1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})\.shard")


def prove_shard(source: str | dict[str, bytes], k: int, n: int, table: str | None = None) -> bytes:
    """Return the content of shard k of n of a saved network: of a folder, or of the contents of its files."""
    if isinstance(source, str):
        return bytes(_known_task(source, table, _state(source)).prove(k, n).content)
    with tempfile.TemporaryDirectory() as folder:
        return bytes(task_of_files(source, folder, k, n).prove(k, n).content)


@functools.lru_cache(maxsize=1)
def _known_task(folder: str, table: str | None, state: tuple[tuple[str, int, int], ...]) -> Task:
    """Return the task of a folder. A worker reads it once, and again if a file has changed."""
    return task_of(folder, table)


def _state(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Return the names, sizes and times of the last change of all files of a network."""
    with contextlib.suppress(OSError):
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
        states = [(entry.name, entry.stat()) for entry in found if entry.is_file()]
        return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)
    return ()


def write_shard(
    folder: str | os.PathLike[str],
    place: str | os.PathLike[str],
    k: int,
    n: int,
    table: str | None = None,
    progress: Progress | None = None,
) -> str:
    """Prove shard k of n, write it into the folder `place`, and return its path. A shard that is there is kept."""
    task, path = task_of(folder, table), os.path.join(place, shard_name(STEM, k, n))
    task.require_count(n)
    make_folder(place)
    if not _is_done(task, place, k, n):
        write_file_whole(path, task.prove(k, n, progress).content)
    return path


def merge_shards(folder: str | os.PathLike[str], place: str | os.PathLike[str], table: str | None = None) -> Network:
    """Return the network with the certificate of all shards in the folder `place`.

    Raise FileError if a shard is missing, changed, or of another network, request or division.
    """
    try:
        counts = {int(found[2]) for name in os.listdir(place) if (found := PART.fullmatch(name))}
    except OSError as error:
        raise FileError(f"{os.fspath(place)!r} cannot be read: {error.strerror or error}") from None
    if len(counts) != 1:
        several = f"shards of {len(counts)} divisions" if counts else "no shards"
        raise FileError(f"{os.fspath(place)!r} has {several}: prove those of one division there, k/n for all k")
    (n,) = counts
    missing = [k for k in range(1, n + 1) if not os.path.exists(os.path.join(place, shard_name(STEM, k, n)))]
    if missing:
        named = ", ".join(f"{k}/{n}" for k in missing[:10]) + (" …" if len(missing) > 10 else "")
        raise FileError(f"{os.fspath(place)!r} lacks {len(missing):,} of {n:,} shards: {named}. Prove these first.")
    return _merged(task_of(folder, table), place, n)


def prove_all(
    folder: str | os.PathLike[str],
    place: str | os.PathLike[str],
    n: int | None = None,
    cluster: str | None = LOCAL,
    processes: int | None = None,
    progress: Progress | None = None,
    table: str | None = None,
) -> Network:
    """Prove all shards that are not in the folder `place` yet, and return the network with their certificate.

    There are NUM_SHARDS of them, or as many as there are parts, unless another number is given.
    """
    if n is not None and not 1 <= n <= MAX_SHARDS:
        raise InputError(f"a proof has 1 to {MAX_SHARDS:,} shards, found {n:,}")
    task = task_of(folder, table)
    n = min(NUM_SHARDS, task.most) if n is None else n
    task.require_count(n)
    make_folder(place)
    done = {k for k in range(1, n + 1) if _is_done(task, place, k, n)}
    here = cluster is None or cluster == LOCAL
    left = (k for k in range(1, n + 1) if k not in done)
    tasks = ((k, (os.fspath(folder) if here else task.files(folder, k, n), k, n, table)) for k in left)
    if progress is not None:
        progress("proving", len(done) / n)
    for k, content in finished(prove_shard, tasks, cluster, processes):
        reason = task.why_not(task.read(content, f"shard {k} of {n}"), k, n)
        if reason is not None:
            raise FileError(f"a worker returned a wrong shard {k} of {n}: {reason}")
        write_file_whole(os.path.join(place, shard_name(STEM, k, n)), content)
        done.add(k)
        if progress is not None:
            progress("proving", len(done) / n)
    return _merged(task, place, n)


def _merged(task: Task, place: str | os.PathLike[str], n: int) -> Network:
    return task.merged([task.stored(place, k, n) for k in range(1, n + 1)])


def proved_on(cluster: str, network: Network, place: Path, n: int | None, progress: Progress | None) -> Network:
    """Return a new network with a certificate of n shards, which are kept in the folder `place` until all are proved.

    Call it again after an interruption: the same network has the same shards. The shards are then deleted.
    """
    make_folder(place)
    folder = place / "net"
    network.save(folder)
    found = prove_all(folder, place, n, cluster, progress=progress)
    claim = found.certificate
    if claim.bound is None or claim.bound > (network.eps or math.inf):
        raise BoundNotMet(
            f"the shards prove the bound {claim.bound:.3g}, above eps={network.eps:g}. The best network is in "
            f"{folder}: choose a larger eps, or another construction.",
            eps=network.eps or 0.0,
            bound=claim.bound,
            network=found,
        )
    if claim.at_points is not None:  # the rows are those that were compiled: their file is deleted now
        found = found._with_certificate(dataclasses.replace(claim, evidence=network.certificate.evidence))
    for path in (*shard_files(place), *folder.iterdir()):
        path.unlink()
    folder.rmdir()
    with contextlib.suppress(OSError):  # it holds files of somebody else
        place.rmdir()
    return dataclasses.replace(found, command=network.command)


def make_folder(place: str | os.PathLike[str]) -> None:
    try:
        os.makedirs(place, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {os.fspath(place)!r}: {error.strerror or error}") from None


def shard_files(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the shards in a folder."""
    return (path for path in Path(place).iterdir() if PART.fullmatch(path.name))


def _is_done(task: Task, place: str | os.PathLike[str], k: int, n: int) -> bool:
    try:
        task.stored(place, k, n)
    except FileError:
        return False
    return True
