"""Compile and check the corpus of `corpus_cases.py`, and compare the results with a stored baseline.

`make corpus`, or `python benchmarks/corpus.py [-k TEXT] [--jobs N] [--no-times] [--write [--keep-times]]
[--baseline PATH]`.

Only the public API is used: `attnc.compile`, `net.save`, `attnc_checker`. Each case runs in its own process, which is
forked from one that has imported everything and compiled once. So imports are not timed, and the order of the cases
does not matter. Times are CPU seconds. Proofs are not timed alone: the time of a compilation stands for its proof.

A case is worse than its baseline if it has more anchors, misses an eps that it met, has a bound more than 5 % larger,
is no longer re-proved by the checker, or is refused in another way. Two things are not worse: a larger bound within eps
of a smaller network, or far below eps; and more anchors of another construction with fewer parameters, since `auto`
compares the work of a query and not the anchors. The exit code is 1 if a case is worse, or if all
cases together take more than 1.2 times as long. A calibration workload is timed beside the cases, so that times of
different machines can be compared. Proofs stop at limits in wall-clock time, which a busy machine may reach.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from corpus_cases import Case, corpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import attnc
import attnc_checker

BASELINE = Path(__file__).with_name("corpus_baseline.json")
TIMES = ("compile_seconds", "check_seconds")
WALL_LIMIT = 180.0  # seconds per case; on an idle machine the slowest case takes 8 s
LOOSER = 1.05  # bounds may grow by 5 %: a refactoring may add roundings in another order
SLOWER = 1.2  # limit of the summed time; with a load of 6 on 2 cores, the calibrated sum changed by 3 %
FAR_BELOW = 1e-6  # bounds below this share of eps are rounding: whether they are larger does not matter
SAME = 1e-6  # bounds that differ by less than this fraction are called equal


@dataclass(frozen=True)
class Record:
    """The result of one call. `error` is the type of a refusal, and then `bound` is the best bound that it states."""

    eps: float
    error: str | None = None
    construction: str | None = None
    num_anchors: int | None = None
    num_parameters: int | None = None
    bound: float | None = None
    also_bound: float | None = None  # in the second dtype
    observed: float | None = None
    method: str | None = None
    leaves: int | None = None
    stages: int | None = None
    complete: bool | None = None
    reproved: bool | None = None  # None: nothing to check
    reason: str | None = None  # why the checker did not re-prove it
    found: float | None = None  # the bound that the checker found, over the claimed one
    compile_seconds: float = 0.0
    check_seconds: float = 0.0


def measure(case: Case) -> Record:
    """Compile, save and check one case in this process."""
    start = time.process_time()
    try:
        net = attnc.compile(case.source, case.box, case.eps, **case.options)
    except attnc.AttncError as refusal:
        bound = finite(getattr(refusal, "bound", None))
        return Record(case.eps, type(refusal).__name__, bound=bound, compile_seconds=time.process_time() - start)
    compiled = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        net.save(f"{folder}/net")
        stored = json.loads(Path(folder, "net", "certificate.json").read_text())
        saved, names = time.process_time(), attnc_checker.certificates(f"{folder}/net")
        verdicts = [attnc_checker.check(f"{folder}/net", processes=1, name=name) for name in names]
        checked = time.process_time()
    claim, also = net.certificate, case.options.get("also")
    second = None if also is None else net.certified_in(also)
    return Record(
        case.eps,
        construction=net.construction,
        num_anchors=net.num_anchors,
        num_parameters=net.num_parameters,
        bound=finite(claim.bound),
        also_bound=None if second is None else finite(second.bound),
        observed=finite(claim.observed),
        method=claim.method,
        leaves=len(stored["leaves"]),
        stages=len(stored["stages"]),
        complete=claim.complete,
        reproved=all(verdict.proved for verdict in verdicts),
        reason=next((verdict.reason for verdict in verdicts if not verdict.proved), None),
        found=max(map(found_part, verdicts)) if all(verdict.proved for verdict in verdicts) else None,
        compile_seconds=compiled - start,
        check_seconds=checked - saved,
    )


def found_part(verdict: attnc_checker.Verdict) -> float:
    """The bound that the checker found, over the claimed one; 1 where both are 0."""
    return verdict.reproved / verdict.bound if verdict.reproved and verdict.bound else float(verdict.bound == 0)


def finite(x: float | None) -> float | None:
    """The number, or None for infinity, which JSON does not have."""
    return None if x is None or not math.isfinite(x) else float(x)


def calibrate() -> float:
    """Return the CPU seconds of 7,000 rounds of a small matrix product and Python arithmetic: about half a second."""
    start, matrix, total = time.process_time(), np.random.default_rng(0).normal(size=(60, 60)) / 10, 0.0
    for step in range(7_000):
        product = np.exp(-np.abs(matrix @ matrix.T))
        total += float(product.sum()) + sum(math.sqrt(i + step) for i in range(300))
    assert total > 0
    return time.process_time() - start


def work(case: Case | None, answer: Connection) -> None:
    """Send a record as a dictionary; or the calibration time, if there is no case."""
    answer.send(calibrate() if case is None else asdict(measure(case)))


def run(cases: Sequence[Case], jobs: int, report: Callable[[str], None]) -> tuple[float, dict[str, Record]]:
    """Return the calibration time and a record per case. Up to `jobs` processes run side by side.

    The calibration runs before and after the cases, in as many processes side by side.
    """
    attnc.compile("sin(x)*y", [(-1, 1)] * 2, 1e-3, construction="spectral_grid")  # triggers the late imports
    fork = multiprocessing.get_context("fork")
    waiting: list[Case | None] = [*[None] * jobs, *cases, *[None] * jobs]
    running: dict[Connection, tuple[Case | None, BaseProcess, float]] = {}
    found, calibrations = dict[str, Record](), list[float]()
    while waiting or running:
        while waiting and len(running) < jobs:
            next_case = waiting.pop(0)
            answer, sender = fork.Pipe(duplex=False)
            child = fork.Process(target=work, args=(next_case, sender))
            child.start()
            sender.close()
            running[answer] = (next_case, child, time.monotonic() + WALL_LIMIT)
        ready = wait(list(running), timeout=1.0)
        for answer, (case, process, end) in list(running.items()):
            if answer not in ready and time.monotonic() < end:
                continue
            del running[answer]
            sent = received(answer) if answer in ready else "timed out"
            process.kill()
            process.join()
            if case is None:
                calibrations.append(float(sent))
            else:
                found[case.name] = Record(case.eps, sent) if isinstance(sent, str) else Record(**sent)
                report(case.name)
    return statistics.mean(calibrations), {case.name: found[case.name] for case in cases}


def received(answer: Connection) -> Any:
    """The answer of a process; "crashed" if it ended without an answer. Its traceback is on stderr."""
    try:
        return answer.recv()
    except EOFError:
        return "crashed"


def compared(new: Record | None, old: Record | None) -> tuple[str, str]:
    """One of better, equal, changed, worse, new, missing; and the differences in words.

    `observed` is not compared: it follows from the weights. Nor is `found`, which only has to be at most 1.
    """
    if new is None or old is None:
        return ("missing", "in the baseline only") if new is None else ("new", "not in the baseline")
    worse, better, changed = list[str](), list[str](), list[str]()
    if new.eps != old.eps:
        worse.append(f"eps {old.eps:g} → {new.eps:g}: another case, which needs a new baseline")
    if old.error == "BoundNotMet" and new.error is None:
        better.append("eps is met now")
    elif new.error != old.error:
        worse.append(f"{old.error or 'compiled'} → {new.error or 'compiled'}")
    is_cheaper = False
    if new.num_anchors is not None and old.num_anchors is not None and new.num_anchors != old.num_anchors:
        is_other = new.construction != old.construction and (new.num_parameters or 0) < (old.num_parameters or 0)
        is_cheaper = new.num_anchors < old.num_anchors or is_other
        side = better if new.num_anchors < old.num_anchors else changed if is_other else worse
        side.append(f"anchors {old.num_anchors:,} → {new.num_anchors:,}")
    for field in ("bound", "also_bound"):
        now, before = getattr(new, field), getattr(old, field)
        if now is None or before is None:
            if now is not before:
                (worse if now is None else better).append(f"{field} {before} → {now}")
            continue
        step = f"{field} {before:.4g} → {now:.4g}"
        if field == "bound" and new.error is None and before <= old.eps and now > new.eps:
            worse.append(f"eps not met: {step}")
        elif now > LOOSER * before:
            is_met = field == "bound" and new.error is None and now <= new.eps
            is_allowed = is_met and (is_cheaper or now <= FAR_BELOW * new.eps)
            (changed if is_allowed else worse).append(f"looser: {step}")
        elif LOOSER * now < before:
            better.append(f"closer: {step}")
        elif abs(now - before) > SAME * before:
            changed.append(step)
    if new.error is None and old.reproved is not None and new.reproved != old.reproved:
        (better if new.reproved else worse).append("re-proved now" if new.reproved else f"not re-proved: {new.reason}")
    for field in ("construction", "method", "num_parameters", "leaves", "stages", "complete"):
        if getattr(new, field) != getattr(old, field):
            changed.append(f"{field} {getattr(old, field)} → {getattr(new, field)}")
    word = "worse" if worse else "better" if better else "changed" if changed else "equal"
    return word, "; ".join([*worse, *better, *changed])


def time_ratio(
    new: Mapping[str, Record], old: Mapping[str, Record], calibrations: float, fields: Sequence[str] = TIMES
) -> float:
    """Summed seconds now, over those of the baseline for the same cases; divided by the ratio of calibration times."""
    both = [name for name in new if name in old]
    now, before = (sum(getattr(side[name], field) for name in both for field in fields) for side in (new, old))
    return now / before / calibrations if before > 0 else 1.0


def read(path: Path) -> tuple[float, dict[str, Record]]:
    stored = json.loads(path.read_text())
    return stored["calibration"], {name: Record(**record) for name, record in stored["cases"].items()}


def write(path: Path, calibration: float, records: Mapping[str, Record]) -> None:
    """One line per case, without the fields that are None."""
    lines = []
    for name, record in records.items():
        rounded = asdict(record) | {field: round(getattr(record, field), 3) for field in TIMES}
        kept = {field: value for field, value in rounded.items() if value is not None}
        lines.append(f"{json.dumps(name)}: {json.dumps(kept)}")
    path.write_text(f'{{"calibration": {calibration:.3f}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n")


def write_some(path: Path, calibration: float, records: Mapping[str, Record], keeps_times: bool = False) -> None:
    """Write these cases into the baseline, as if they had run beside the others. Drop cases that no longer exist.

    With `keeps_times` cases that the baseline has keep their times there.
    """
    before, old = read(path)
    factor = before / calibration
    for name, record in records.items():
        times = {field: factor * getattr(record, field) for field in TIMES}
        if keeps_times and name in old:
            times = {field: getattr(old[name], field) for field in TIMES}
        old[name] = replace(record, **times)
    write(path, before, {name: old[name] for name in corpus() if name in old})


def tell(found: Mapping[str, tuple[str, str]]) -> bool:
    """Print a row per difference, and the counts. Return whether no case is worse or missing."""
    for name, (word, why) in found.items():
        if word != "equal":
            print(f"{word:<8} {name}: {why}")
    words = [word for word, _ in found.values()]
    counts = {word: words.count(word) for word in ("better", "equal", "worse", "changed", "missing", "new")}
    print(", ".join(f"{count} {word}" for word, count in counts.items() if count or word in ("better", "worse")))
    return counts["worse"] == counts["missing"] == 0


def run_with_progress(cases: Sequence[Case], jobs: int) -> tuple[float, dict[str, Record]]:
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Without automatic refreshes there is no second thread, so it is safe to fork.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        return run(cases, jobs, lambda name: progress.update(task, advance=1, description=name, refresh=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile and check the corpus, and compare with the baseline.")
    parser.add_argument("-k", metavar="TEXT", default="", help="only the cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes side by side (default: 2)")
    parser.add_argument("--no-times", action="store_true", help="do not compare times")
    parser.add_argument("--write", action="store_true", help="write the baseline; with -k, only these cases of it")
    parser.add_argument(
        "--keep-times", action="store_true", help="with --write, keep the times of the baseline as the reference"
    )
    parser.add_argument("--baseline", type=Path, default=BASELINE, help=f"default: benchmarks/{BASELINE.name}")
    chosen = parser.parse_args(arguments)
    cases = [case for case in corpus().values() if chosen.k in case.name]
    if not cases:
        parser.error(f"no case has a name that contains {chosen.k!r}")
    if chosen.jobs < 1:
        parser.error(f"--jobs must be at least 1, found {chosen.jobs}")
    if chosen.keep_times and not chosen.write:
        parser.error("--keep-times needs --write")
    if not chosen.baseline.exists() and not (chosen.write and not chosen.k and not chosen.keep_times):
        parser.error(f"there is no baseline {chosen.baseline}: --write without -k or --keep-times makes one")
    calibration, records = run_with_progress(cases, chosen.jobs)
    seconds = [sum(getattr(record, field) for record in records.values()) for field in TIMES]
    print("{} cases; CPU seconds: compile {:.0f}, check {:.0f}".format(len(cases), *seconds))
    if chosen.write:
        if chosen.k or chosen.keep_times:
            write_some(chosen.baseline, calibration, records, chosen.keep_times)
        else:
            write(chosen.baseline, calibration, records)
        return 0
    before, stored = read(chosen.baseline)
    old = {name: record for name, record in stored.items() if chosen.k in name}
    is_good = tell({name: compared(records.get(name), old.get(name)) for name in {**records, **old}})
    if not chosen.no_times:
        ratios = [time_ratio(records, old, calibration / before, fields) for fields in (TIMES[:1], TIMES[1:], TIMES)]
        print("times relative to the baseline: compile {:.2f}, check {:.2f}, both {:.2f}".format(*ratios))
        is_good &= bool(chosen.k) or ratios[2] <= SLOWER  # the times of a few cases vary too much
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
