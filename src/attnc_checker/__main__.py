"""python -m attnc_checker net/ [--json]: exit 0 only if every bound is re-proved, 1 if not, 2 for bad files.

The check runs in processes of its own, within limits of time and memory. They end when the program that started them
ends, even if that was killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING

from attnc_checker.checking import OF_SHARD, RE_PROVED, Verdict, certificates, check, check_shard, merge
from attnc_checker.claims import rounded
from attnc_checker.limits import ALLOW_MORE, end_with, limit_memory
from attnc_checker.proving import Job, Proof

SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
SECONDS = 600
"""The default limit on the time of a check. The slowest honest certificate that is known, of sin(x) on ±1e6, takes
270 s on two cores."""
LONGEST = 10**6
"""Longest wait in seconds (twelve days). Some systems refuse longer timeouts."""
MEGABYTES = 1000
"""The default limit on the memory of each process. A network of 10,585 keys takes 124 MB."""
GRACE = 2
"""The seconds that a check has to end with a verdict of its own. A pool of processes takes 0.1 s."""


def program() -> int:
    """Run `main` in a process of its own, and end it at its limits."""
    chosen = _read_arguments(None)
    if chosen.parent is not None:
        end_with(chosen.parent)
    started, child = time.monotonic(), multiprocessing.Process(target=_in_child, args=(chosen, os.getpid()))
    child.start()
    try:
        child.join(min(chosen.seconds + GRACE, LONGEST))
        is_over = child.is_alive()
    except KeyboardInterrupt:
        print("interrupted: nothing was decided", file=sys.stderr)
        return 130
    finally:
        child.kill()
        child.join()
    if not is_over and child.exitcode is not None and child.exitcode >= 0:
        return child.exitcode
    reason = f"the check did not end within {chosen.seconds:g} s. Allow more with --seconds."
    if not is_over:
        reason = f"a process of the check was ended, most likely for want of memory. {ALLOW_MORE}"
    _tell([Verdict(chosen.net, False, reason, 1, time.monotonic() - started, decided=False)], chosen.json)
    return 1


def _in_child(chosen: argparse.Namespace, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends this process
    end_with(parent)
    limit_memory(chosen.memory / (1 + chosen.processes) if chosen.memory else MEGABYTES)
    sys.exit(_check(chosen))


def main(arguments: list[str] | None = None) -> int:
    """Check in this process. Return the exit code."""
    return _check(_read_arguments(arguments))


def _read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("attnc_checker", description="Re-prove the error bound of a saved network.")
    parser.add_argument("net", help="the folder of a saved network")
    parser.add_argument("--json", action="store_true", help="print the verdict as a JSON object")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=cores, help="number of processes (default: one per core)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit on the time (default: {SECONDS})")
    memory = f"limit on the memory of all processes together, in MB (default: {MEGABYTES} for each)"
    parser.add_argument("--memory", type=int, default=None, help=memory)
    parser.add_argument("--shard", default=None, metavar="K/N", help="prove only shard K of N, and write its verdict")
    parser.add_argument("--table", default=None, metavar="FILE", help="the rows of a large table that is not stored")
    parser.add_argument("--merge", action="store_true", help="decide by the verdicts of all shards, and a sample")
    parser.add_argument(
        "--parent", type=int, default=None, help="end when the process of this number, the parent, ends"
    )
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1:
        parser.error(f"--processes is {chosen.processes}, and must be 1 or more")
    if not chosen.seconds > 0:
        parser.error(f"--seconds is {chosen.seconds:g}, and must be above 0")
    if chosen.shard is not None:
        found = SHARD.fullmatch(chosen.shard)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            parser.error(f"--shard is {chosen.shard!r:.40}, and must be K/N with 1 ≤ K ≤ N")
        if chosen.merge:
            parser.error("--shard proves one shard, and --merge decides about all: give one of them")
        chosen.shard = int(found[1]), int(found[2])
    if chosen.memory is not None and chosen.memory < 1:
        parser.error(f"--memory is {chosen.memory}, and must be 1 or more")
    return chosen


def _check(chosen: argparse.Namespace) -> int:
    show, end = _progress if sys.stderr.isatty() else None, time.monotonic() + chosen.seconds
    if chosen.shard is not None:
        k, n = chosen.shard
        verdicts = check_shard(chosen.net, k, n, chosen.processes, show, chosen.seconds, chosen.table)
    elif chosen.merge:
        verdicts = merge(chosen.net, chosen.seconds, chosen.table)
    else:
        verdicts = [
            check(chosen.net, chosen.processes, show, name, max(0.0, end - time.monotonic()), chosen.table)
            for name in certificates(chosen.net)
        ]
    if show:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    _tell(verdicts, chosen.json)
    return max(verdict.exit_code for verdict in verdicts)


def _tell(verdicts: Sequence[Verdict], as_json: bool) -> None:
    try:
        if as_json:
            first, *others = map(dataclasses.asdict, verdicts)
            whole = {"proved": all(verdict.proved for verdict in verdicts), "others": others} if others else {}
            print(json.dumps({**first, **whole}, indent=2))
        else:
            for verdict in verdicts:
                _tell_one(verdict)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_one(verdict: Verdict) -> None:
    if verdict.proved and verdict.reason.startswith(OF_SHARD):
        print(f"{verdict.reason} ({verdict.reproved:.6g} found here, {verdict.seconds:.1f} s)")
    elif verdict.bound is not None and verdict.proved:
        bound = rounded(verdict.bound, 6, ROUND_CEILING)
        print(f"re-proved: the error is at most {bound} {verdict.scope}, in {verdict.dtype} ", end="")
        leaves = {0: "", 1: "1 leaf, "}.get(verdict.leaves, f"{verdict.leaves:,} leaves, ")
        print(f"({leaves}{verdict.reproved:.6g} found here, {verdict.seconds:.1f} s)")
        if verdict.gradient_bound is not None:
            gradient = rounded(verdict.gradient_bound, 6, ROUND_CEILING)
            print(f"re-proved: the error of every partial derivative is at most {gradient}", end="")
            bands = " or ".join(f"{argument} ∈ [{lo:.6g}, {hi:.6g}]" for argument, lo, hi in verdict.excluded)
            print(f", except where {bands}" if bands else "")
        if verdict.reason != RE_PROVED:
            print(f"  {verdict.reason}")
        print(*(f"  assumed: {text}" for text in verdict.assumptions), sep="\n")
    else:
        found = "error" if verdict.exit_code == 2 else "not re-proved" if verdict.decided else "not decided"
        arithmetic = f" in {verdict.dtype}" if verdict.dtype else ""
        print(f"{found}{arithmetic}: {verdict.reason}", file=sys.stderr)


def _progress(proof: Proof, jobs: Sequence[Job], found: Mapping[Job, float]) -> None:
    count = proof.num_leaves or len(jobs)
    print(f"\r{len(found) * count // max(1, len(jobs)):,} of {count:,} leaves", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(program())
