"""Jobs: one honest case, or the forgeries of one network. Each runs in a process of its own.

Processes are forked from one that has imported every engine. A job that hangs or crashes is a failure of its own, and
the others go on.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from attack.forged import Forgery
from attack.grammar import random_case
from attack.honest import Attack
from attack.limits import memory
from attack.tally import Tally

FORGERIES = 60
"""Forgeries of one network: about three seconds, five times as long as its compilation."""
WALL_LIMIT = 900.0
"""Seconds of a job on a busy machine. Limits of CPU time end it within about three minutes."""


class Running(NamedTuple):
    kind: str
    number: int
    process: BaseProcess
    started: float


def run_job(kind: str, seed: int, number: int) -> dict[str, Any]:
    """Run one job in this process."""
    before = memory("VmRSS")
    if kind == "honest":
        found = Attack(random_case(seed, number), number).run()
    else:
        found = Forgery(seed, number).run(FORGERIES)
    return {**found, "memory": memory() - before}


def _work(kind: str, seed: int, number: int, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    warnings.simplefilter("ignore")
    try:
        answer.send(run_job(kind, seed, number))
    except Exception:
        answer.send({"failures": [("the attack itself", traceback.format_exc())], "memory": 0})


def run_all(
    tally: Tally, kinds: list[str], processes: int, seconds: float, report: Callable[[], None], most_jobs: int = 0
) -> None:
    """Run jobs until the time is over, or as many as are asked for. Kinds take turns by the time that they took."""
    fork, end = multiprocessing.get_context("fork"), time.monotonic() + seconds
    running: dict[Connection, Running] = {}
    started = 0

    def is_over() -> bool:
        return time.monotonic() >= end or (most_jobs > 0 and started >= most_jobs)

    try:
        while running or not is_over():
            while len(running) < processes and not is_over():
                kind = min(
                    kinds, key=lambda kind: tally.seconds[kind] + sum(job.kind == kind for job in running.values())
                )
                number, started = tally.next[kind], started + 1
                tally.next[kind] += 1
                answer, sender = fork.Pipe(duplex=False)
                process = fork.Process(target=_work, args=(kind, tally.seed, number, sender))
                process.start()
                sender.close()
                running[answer] = Running(kind, number, process, time.monotonic())
            ready = wait(list(running), timeout=1.0)
            for answer, job in list(running.items()):
                took = time.monotonic() - job.started
                if answer in ready or took > WALL_LIMIT:
                    del running[answer]
                    found = _received(answer) if answer in ready else _lost(f"no answer within {WALL_LIMIT:g} s")
                    job.process.kill()
                    job.process.join()
                    tally.add(job.kind, job.number, found, took)
            report()
    finally:
        for job in running.values():
            job.process.kill()
            job.process.join()
            tally.next[job.kind] = min(tally.next[job.kind], job.number)


def _received(answer: Connection) -> dict[str, Any]:
    try:
        return answer.recv()
    except EOFError:
        return _lost("the process ended without an answer")


def _lost(why: str) -> dict[str, Any]:
    return {"failures": [("crashed or hung", why)], "memory": 0}
