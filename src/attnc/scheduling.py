"""Tasks in this process, in other processes of this machine, or by the workers of a dask.distributed cluster.

Tasks do not depend on each other. If a worker is lost, its task is given to another one.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from attnc.errors import FileError, InputError, MissingExtra

__all__ = ["LOCAL", "begin_worker", "finished", "require_cluster"]

LOCAL = "local"
"""The name of this machine as a cluster."""
CONNECT_SECONDS = 10
"""Longest wait in seconds for the scheduler of a cluster."""
MOST_LOSSES = 5
"""Number of times that workers of this machine may be lost without a finished task between them."""
AHEAD = 2
"""Number of tasks for each worker that are submitted at a time, so that no worker waits for its next one."""
KEPT = "The finished tasks are kept: the same command goes on from there."
Key = TypeVar("Key", bound=Hashable)


def finished(
    function: Callable[..., Any],
    tasks: Mapping[Key, tuple[Any, ...]] | Iterable[tuple[Key, tuple[Any, ...]]],
    cluster: str | None,
    processes: int | None = None,
    failed: Callable[[Exception], Any] | None = None,
) -> Iterator[tuple[Key, Any]]:
    """Run function(*arguments) for every task, and yield the key and the result of each as soon as it is done.

    Parameters
    ----------
    function : callable
        A function of a module, which the workers import.
    tasks : mapping, or iterable of pairs
        The arguments by key. An iterable is read when a worker is free, so that it may decide then.
    cluster : str or None
        "local" for processes of this machine, the address of a dask.distributed scheduler, or None for this process.
    processes : int, optional
        The number of processes on this machine. By default one for each core.
    failed : callable, optional
        The result of a task that raises, from its exception. By default the exception is raised.

    Yields
    ------
    tuple
        A key and a result.

    Raises
    ------
    InputError
        If the cluster cannot be reached, or has no workers.
    FileError
        If workers are lost again and again.

    Examples
    --------
    >>> from attnc.scheduling import finished
    >>> dict(finished(pow, {"a": (2, 3), "b": (2, 4)}, cluster=None))
    {'a': 8, 'b': 16}
    """
    source = iter(tasks.items() if isinstance(tasks, Mapping) else tasks)
    if cluster is None:
        for key, arguments in source:
            yield key, _outcome(functools.partial(function, *arguments), failed)
        return
    waiting, losses, ends = dict[Key, tuple[Any, ...]](), 0, False
    while waiting or not ends:
        with _workers(cluster, processes) as (executor, slots):
            futures: dict[Future[Any], Key] = {executor.submit(function, *waiting[key]): key for key in waiting}
            try:
                while True:
                    for key, arguments in itertools.islice(source, max(0, slots - len(futures))):
                        waiting[key] = arguments
                        futures[executor.submit(function, *arguments)] = key
                    if not futures:
                        ends = True
                        break
                    for future in wait(futures, return_when=FIRST_COMPLETED).done:
                        result = _outcome(future.result, failed)
                        losses, key = 0, futures.pop(future)
                        del waiting[key]
                        yield key, result
            except BrokenProcessPool:
                losses += 1
            if losses > MOST_LOSSES:
                raise FileError(
                    f"worker processes ended {losses} times without a result, most likely for want of memory. {KEPT}"
                )


def _outcome(run: Callable[[], Any], failed: Callable[[Exception], Any] | None) -> Any:
    """Return the result of a task, or what stands for its exception. A broken pool is no failure of a task."""
    try:
        return run()
    except BrokenProcessPool:
        raise
    except (Exception, CancelledError) as error:
        if failed is not None:
            return failed(RuntimeError(str(error)) if isinstance(error, CancelledError) else error)
        if isinstance(error, CancelledError) or type(error).__name__ in ("KilledWorker", "CommClosedError"):
            raise FileError(f"workers of the cluster were lost ({type(error).__name__}). {KEPT}") from None
        raise


def require_cluster(cluster: str) -> None:
    """Raise InputError or MissingExtra unless the cluster answers and has workers."""
    if cluster != LOCAL:
        with _dask(cluster):
            pass


@contextmanager
def _workers(cluster: str, processes: int | None) -> Iterator[tuple[Executor, int]]:
    """Yield an executor, and the number of tasks that are submitted to it at a time."""
    if cluster == LOCAL:
        count = processes or os.cpu_count() or 1
        with _processes(count) as pool:
            yield pool, AHEAD * count
        return
    with _dask(cluster) as client:
        yield client.get_executor(pure=False), AHEAD * sum(client.nthreads().values())


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Start processes that end at once when they are interrupted, or when the process that started them ends."""
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=begin_worker)
    others = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # its task is not finished, and nobody waits for it
        raise
    pool.shutdown()


def begin_worker() -> None:
    """Leave Ctrl-C to the process that started this one, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _dask(address: str) -> Iterator[Any]:
    """Connect to a dask.distributed scheduler that has workers."""
    try:
        client = importlib.import_module("distributed").Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except ImportError as error:
        raise MissingExtra("a cluster needs", "distributed", "cluster", error) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"no dask scheduler answers at {address!r} ({type(error).__name__}). Start one with `dask scheduler`, and "
            "workers with `dask worker ADDRESS`; nothing was done."
        ) from None
    try:
        if not client.nthreads():
            raise InputError(
                f"the scheduler at {address!r} has no workers: start some with `dask worker {address}`; nothing was "
                "done."
            )
        yield client
    finally:
        client.close()
