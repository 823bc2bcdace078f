"""python -m attnc_checker net/ [--json]: exit 0 only if every bound is re-proved, 1 if not, 2 for bad files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from decimal import ROUND_CEILING

from attnc_checker.checking import Verdict, certificates, check
from attnc_checker.claims import rounded


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("attnc_checker", description="Re-prove the error bound of a saved network.")
    parser.add_argument("net", help="the folder of a saved network")
    parser.add_argument("--json", action="store_true", help="print the verdict as a JSON object")
    parser.add_argument("--processes", type=int, default=None, help="number of processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    if chosen.processes is not None and chosen.processes < 1:
        parser.error(f"--processes is {chosen.processes}, and must be 1 or more")
    show = _progress if sys.stderr.isatty() else None
    try:
        verdicts = [check(chosen.net, chosen.processes, show, name) for name in certificates(chosen.net)]
    except KeyboardInterrupt:
        print("interrupted: nothing was decided", file=sys.stderr)
        return 130
    if show:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    try:
        if chosen.json:
            first, *others = map(dataclasses.asdict, verdicts)
            whole = {"proved": all(verdict.proved for verdict in verdicts), "others": others} if others else {}
            print(json.dumps({**first, **whole}, indent=2))
        else:
            for verdict in verdicts:
                _tell(verdict)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return max(verdict.exit_code for verdict in verdicts)


def _tell(verdict: Verdict) -> None:
    if verdict.bound is not None and verdict.proved:
        bound = rounded(verdict.bound, 6, ROUND_CEILING)
        print(f"re-proved: the error is at most {bound} {verdict.scope}, in {verdict.dtype} ", end="")
        leaves = "1 leaf" if verdict.leaves == 1 else f"{verdict.leaves:,} leaves"
        print(f"({leaves}, {verdict.reproved:.6g} found here, {verdict.seconds:.1f} s)")
        print(*(f"  assumed: {text}" for text in verdict.assumptions), sep="\n")
    else:
        found = "not re-proved" if verdict.exit_code == 1 else "error"
        arithmetic = f" in {verdict.dtype}" if verdict.dtype else ""
        print(f"{found}{arithmetic}: {verdict.reason}", file=sys.stderr)


def _progress(done: int, count: int) -> None:
    print(f"\r{done:,} of {count:,} leaves", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
