"""make attack, or python -m attack [--minutes N] [--seed S] [--processes N] [--only honest|forged] [--cluster A]
[--out FILE].

Random networks are compiled, searched for errors above their bounds, and re-proved. Files of networks are forged, and
the checker has to refuse every false one. Counts are printed every minute and at the end, and are kept in the file with
all failures and a command that repeats each. A run with the same file and seed goes on where the last one ended. Ctrl-C
ends it and keeps the counts. The exit code is 1 if there is a failure.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: processes are forked, and each has one core

import argparse
import json
import sys
import time
from pathlib import Path

from attack.grammar import random_case
from attack.honest import warm_up
from attack.jobs import run_all, run_job
from attack.tally import Tally
from attnc.scheduling import LOCAL

KINDS = ("honest", "forged")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("attack", description="Attack certificates: random networks and forged files.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to attack (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each core")
    parser.add_argument("--cluster", default=LOCAL, help="the address of a dask scheduler (workers with --no-nanny)")
    parser.add_argument("--only", choices=KINDS, help="only honest networks, or only forged files")
    parser.add_argument("--out", type=Path, default=Path("attack.json"), help="the file of the counts and failures")
    parser.add_argument("--job", metavar="KIND:NUMBER", help="run one job in this process, and print its result")
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1:
        parser.error(f"--processes must be at least 1, found {chosen.processes}")
    if chosen.job:
        warm_up()
        kind, _, number = chosen.job.partition(":")
        if kind == "honest":
            print(random_case(chosen.seed, int(number)))
        found = run_job(kind, chosen.seed, int(number))
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 1 if found["failures"] else 0
    tally = Tally.read(chosen.out, chosen.seed)
    told = [time.monotonic()]

    def report() -> None:
        if time.monotonic() - told[0] >= 60:
            told[0] = time.monotonic()
            tally.write(chosen.out)
            print(f"\n{tally}", flush=True)

    try:
        kinds = [chosen.only] if chosen.only else list(KINDS)
        run_all(tally, kinds, chosen.processes, 60 * chosen.minutes, report, cluster=chosen.cluster)
    except KeyboardInterrupt:
        print("\ninterrupted")
    tally.write(chosen.out)
    print(f"\n{tally}\nkept in {chosen.out}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
