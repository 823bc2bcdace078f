"""Tasks in processes of their own: on this machine, or by the workers of a dask.distributed cluster.

Tasks do not depend on each other. If a worker is lost, its task is given to another one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from attnc.errors import FileError, InputError, MissingExtra

LOCAL = "local"
"""The name of this machine as a cluster."""
CONNECT_SECONDS = 10
"""Longest wait in seconds for the scheduler of a cluster."""
MOST_LOSSES = 5
"""Number of times that workers of this machine may be lost without a finished task between them."""
Key = TypeVar("Key", bound=Hashable)


def finished(
    function: Callable[..., Any], tasks: Mapping[Key, tuple[Any, ...]], cluster: str, processes: int | None = None
) -> Iterator[tuple[Key, Any]]:
    """Run function(*arguments) for every task. Yield the key and the result of each as soon as it is done.

    Raises InputError if the cluster cannot be reached, and FileError if workers are lost again and again.
    """
    waiting, losses = dict(tasks), 0
    while waiting:
        with _workers(cluster, processes) as executor:
            futures: dict[Future[Any], Key] = {executor.submit(function, *waiting[key]): key for key in waiting}
            try:
                for future in as_completed(futures):
                    result = future.result()
                    losses = 0
                    del waiting[futures[future]]
                    yield futures[future], result
            except BrokenProcessPool:
                losses += 1
            if losses > MOST_LOSSES:
                raise FileError(
                    f"worker processes ended {losses} times without a result, most likely for want of memory. The "
                    "finished tasks are kept: the same command goes on from there."
                )


def require_cluster(cluster: str) -> None:
    """Raise InputError or MissingExtra unless the cluster answers and has workers."""
    if cluster != LOCAL:
        with _dask(cluster):
            pass


@contextmanager
def _workers(cluster: str, processes: int | None) -> Iterator[Executor]:
    with _processes(processes) if cluster == LOCAL else _dask(cluster) as executor:
        yield executor


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
            worker.terminate()  # its task is not finished, and nobody waits for it
        raise
    pool.shutdown()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Connect to a dask.distributed scheduler that has workers."""
    try:
        client = importlib.import_module("distributed").Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except ImportError as error:
        raise MissingExtra("a cluster needs", "distributed", "cluster", error) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"no dask scheduler answers at {address!r} ({type(error).__name__}). Start one with `dask scheduler`, and "
            "workers with `dask worker ADDRESS`; nothing was proved."
        ) from None
    try:
        if not client.scheduler_info()["workers"]:
            raise InputError(
                f"the scheduler at {address!r} has no workers: start some with `dask worker {address}`; nothing was "
                "proved."
            )
        yield client.get_executor(pure=False)
    finally:
        client.close()
