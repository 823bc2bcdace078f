"""Jobs: one honest case, or the forgeries of one network. Each runs in a process of its own.

The jobs are tasks of `attnc.scheduling`: on this machine, or on a cluster. A worker forks a process for each job, after
it has imported every engine. A job that hangs or crashes is a failure of its own, and the others go on.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from attack.forged import Forgery
from attack.grammar import random_case
from attack.honest import Attack, warm_up
from attack.limits import memory
from attack.tally import Tally
from attnc.scheduling import LOCAL, begin_worker, finished

FORGERIES = 60
"""Forgeries of one network: about three seconds, five times as long as its compilation."""
WALL_LIMIT = 900.0
"""Seconds of a job on a busy machine. Limits of CPU time end it within about three minutes."""


def run_job(kind: str, seed: int, number: int) -> dict[str, Any]:
    """Run one job in this process."""
    before = memory("VmRSS")
    if kind == "honest":
        found = Attack(random_case(seed, number), number).run()
    else:
        found = Forgery(seed, number).run(FORGERIES)
    return {**found, "memory": memory() - before}


def run_apart(kind: str, seed: int, number: int) -> tuple[dict[str, Any], float]:
    """Run one job in a forked process. Return what it found, and the seconds that it took."""
    _warm_up()
    started, fork = time.monotonic(), multiprocessing.get_context("fork")
    answer, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(kind, seed, number, sender))
    process.start()
    sender.close()
    is_ready = answer.poll(WALL_LIMIT)
    found = _received(answer) if is_ready else _lost(f"no answer within {WALL_LIMIT:g} s")
    process.kill()
    process.join()
    return found, time.monotonic() - started


_warm_up = functools.cache(warm_up)


def _work(kind: str, seed: int, number: int, answer: Connection) -> None:
    begin_worker()
    warnings.simplefilter("ignore")
    try:
        answer.send(run_job(kind, seed, number))
    except Exception:
        answer.send({"failures": [("the attack itself", traceback.format_exc())], "memory": 0})


def run_all(
    tally: Tally,
    kinds: list[str],
    processes: int,
    seconds: float,
    report: Callable[[], None],
    most_jobs: int = 0,
    cluster: str = LOCAL,
) -> None:
    """Run jobs until the time is over, or as many as are asked for. Kinds take turns by the time that they took."""
    end = time.monotonic() + seconds
    running = set[tuple[str, int]]()

    def jobs() -> Iterator[tuple[tuple[str, int], tuple[str, int, int]]]:
        started = 0
        while time.monotonic() < end and not 0 < most_jobs <= started:
            kind = min(kinds, key=lambda kind: tally.seconds[kind] + sum(job[0] == kind for job in running))
            number, started = tally.next[kind], started + 1
            tally.next[kind] += 1
            running.add((kind, number))
            yield (kind, number), (kind, tally.seed, number)

    try:
        for (kind, number), (found, took) in finished(run_apart, jobs(), cluster, processes):
            running.remove((kind, number))
            tally.add(kind, number, found, took)
            report()
    finally:
        for kind, number in running:
            tally.next[kind] = min(tally.next[kind], number)


def _received(answer: Connection) -> dict[str, Any]:
    try:
        return answer.recv()
    except EOFError:
        return _lost("the process ended without an answer")


def _lost(why: str) -> dict[str, Any]:
    return {"failures": [("crashed or hung", why)], "memory": 0}
