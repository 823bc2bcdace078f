"""Run the unfinished cells of experiments, in local processes or on a dask.distributed cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import attnc
from attnc_lab.catalogue import EXPERIMENTS, named
from attnc_lab.costs import metered
from attnc_lab.experiment import PROFILES, Cell, Experiment, Row
from attnc_lab.folder import Folder

Progress = Callable[[str, float], None]
Measured = tuple[list[Row], str | None]
"""The rows of a cell, and the reason if there are none."""
Submit = Callable[[str, Cell, int], Future[Measured]]
PACKAGES = ("numpy", "scipy", "torch", "matplotlib", "jinja2")
"""The packages whose versions may change the numbers."""
CONNECT_SECONDS = 10
"""The time that a scheduler has to answer. It is far more than a network needs."""
ONE_AT_A_TIME = threading.Lock()


class RunFailed(attnc.AttncError):
    """Raised if some cells could not be measured. All others are kept."""


def run(
    names: Sequence[str],
    out: str | Path,
    *,
    profile: str = "quick",
    seed: int = 0,
    cluster: str | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    command: str = "attnc_lab.run",
) -> Folder:
    """Measure the missing cells of experiments, and write a CSV for each. An interrupted run is continued.

    Parameters
    ----------
    names : sequence of str
        Names from `attnc lab list`, or ["all"].
    out : path
        The folder of the run.
    profile : str
        The size of the run: "quick" takes minutes, "full" takes hours.
    seed : int
        The seed of random numbers. The same seed gives the same results.
    cluster : str, optional
        The address of a dask.distributed scheduler.
    processes : int, optional
        The number of processes. By default one for each core.
    progress : callable, optional
        Called with a text and the finished fraction.
    command : str
        The command that the report names.

    Returns
    -------
    Folder
        The folder of the run, which `report` takes by its `path`.

    Raises
    ------
    InputError
        If a name, the profile or the seed is wrong.
    RunFailed
        If a measurement failed. The finished cells are kept.

    Examples
    --------
    A misspelt name is refused at once. `attnc_lab.run(["frequency"], "results")` would take some seconds.

    >>> import attnc, attnc_lab
    >>> try:
    ...     attnc_lab.run(["frequencies"], "results")
    ... except attnc.InputError as error:
    ...     print(error)
    there is no experiment 'frequencies'. Did you mean sequences or frequency?
    """
    experiments = list(EXPERIMENTS) if list(names) == ["all"] else [named(name) for name in names]
    if not experiments:
        raise attnc.InputError("no experiment was named: give names, or all; `attnc lab list` shows them")
    if profile not in PROFILES:
        raise attnc.InputError(f"profile must be one of {', '.join(PROFILES)}; found {profile!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise attnc.InputError(f"seed must be a whole number from 0 to 2³²−1, found {seed!r}")
    found = versions()
    with _processes(processes) if cluster is None else _cluster(cluster) as executor:
        folder = Folder.open(Path(out), profile, seed, found, command)
        _measure(folder, experiments, lambda *job: executor.submit(measure_cell, *job), progress)
    return folder


def versions() -> dict[str, str]:
    """Return the versions of Python, of attnc, and of the packages that its numbers depend on."""
    found = {"attnc": attnc.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise attnc.MissingExtra("the lab needs", name, "lab") from None
    return found


def _measure(folder: Folder, experiments: Sequence[Experiment], submit: Submit, progress: Progress | None) -> None:
    waiting: dict[Future[Measured], tuple[Experiment, Cell]] = {}
    for experiment in experiments:
        cells = folder.missing(experiment)
        waiting |= {submit(experiment.name, cell, folder.seed): (experiment, cell) for cell in cells}
        if not cells:
            folder.finish(experiment)
    failures = []
    for done, future in enumerate(as_completed(waiting), 1):
        experiment, cell = waiting[future]
        rows, failure = _result(future, folder)
        if failure is None:
            folder.add(experiment, cell, rows)
        else:
            failures.append(f"{experiment.name} {dict(cell)}: {failure}")
        if progress:
            progress(experiment.name, done / len(waiting))
    if failures:
        raise RunFailed(
            f"{len(failures)} of {len(waiting)} cells could not be measured; the others are in {folder.path}, and the "
            f"same command tries these again. The first:\n{failures[0]}"
        )


def _result(future: Future[Measured], folder: Folder) -> Measured:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RunFailed(
            f"a worker process died (out of memory, or killed). The finished cells are in {folder.path}: the same "
            "command goes on from there."
        ) from None
    except Exception as error:  # a worker of the cluster was lost
        return [], f"{type(error).__name__}: {error}"


def measure_cell(name: str, cell: Cell, seed: int) -> Measured:
    """Return the rows of a cell, or the reason why there are none.

    A process measures one cell at a time, because torch's random numbers belong to the process. It uses one thread,
    because sums must be taken in the same order everywhere. So a cell's numbers do not depend on the machine's other
    work. The first row also has the costs of the cell, which do.
    """
    import torch
    from threadpoolctl import threadpool_limits

    try:
        with ONE_AT_A_TIME, threadpool_limits(1):
            torch.set_num_threads(1)
            rows, costs = metered(lambda: named(name).rows(cell, seed))
        return [{**rows[0], **costs}, *rows[1:]] if rows else rows, None
    except Exception:
        return [], traceback.format_exc(limit=-4)


@contextmanager
def _processes(count: int | None) -> Iterator[Executor]:
    """Start processes that end at once when they are interrupted, or when the process that started them ends."""
    pool = ProcessPoolExecutor(
        count or os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
    )
    others = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # its cell is not finished, and nobody waits for it
        raise
    pool.shutdown()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    """Connect to a dask.distributed scheduler that has workers."""
    try:
        client = importlib.import_module("distributed").Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except ImportError as error:
        raise attnc.MissingExtra("a cluster needs", "distributed", "cluster", error) from None
    except (OSError, ValueError, TypeError) as error:
        raise attnc.InputError(
            f"no dask scheduler answers at {address!r} ({type(error).__name__}: {error}). Start one with `dask "
            "scheduler`, and workers with `dask worker ADDRESS`; nothing was run."
        ) from None
    try:
        if not client.scheduler_info()["workers"]:
            raise attnc.InputError(
                f"the scheduler at {address!r} has no workers: start some with `dask worker {address}`"
            )
        yield client.get_executor(pure=False)
    finally:
        client.close()
