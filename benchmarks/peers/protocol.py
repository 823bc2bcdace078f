"""How a peer is run: a script of this folder, in an environment of its own, with one job on its command line.

    PYTHONPATH=benchmarks python benchmarks/peers/PEER.py JOB.json

The job names the function and a file of test points. The script fits, and prints one line of JSON per fitted method.
Error and times are measured here, the same way for all: the largest error at the test points, which no method was
fitted at, and the time per point relative to numpy's own expression, which takes turns with the method in the same
process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bench_functions import COMPARED, Function
from timing import alternated

Evaluate = Callable[[np.ndarray], np.ndarray]
SECONDS_PER_EVALUATION = 0.3
"""A method is timed on as many of the test points as it evaluates in this time, if that is at least LEAST_POINTS."""
LEAST_POINTS = 2048
TURNS = 5
STALLED = 6
"""Splines of a steep function are better with an odd number of nodes: their error falls in five sizes, not in each."""
NUM_FITTED = 20_000
"""Number of points at which a size is chosen; they are not test points."""


@dataclass(frozen=True)
class Job:
    """A task for a peer."""

    function: str  # the text of one of `bench_functions.COMPARED`
    points: str  # a .npy file with the test points
    accuracies: tuple[float, ...]
    seconds: float  # training time of each method that is trained
    search_seconds: float  # time in which a method without training looks for its sizes
    folder: str  # where attnc leaves the heads that are evaluated as dense attention

    def target(self) -> Function:
        return next(function for function in COMPARED if function.text == self.function)


@dataclass(frozen=True)
class Fitted:
    """A method that is ready to be measured."""

    method: str
    eps: float | None  # the smallest accuracy that it was asked for, or that it met; None if it met none
    size: int  # numbers stored
    build_seconds: float
    evaluate: Evaluate
    threads: int
    bound: float | None = None  # proven
    keys: int | None = None


@dataclass(frozen=True)
class Row:
    """The measured results."""

    function: str
    method: str
    eps: float | None
    size: int
    keys: int | None
    build_seconds: float
    error: float  # observed
    bound: float | None  # proven
    seconds_per_point: float
    time: float  # relative to numpy's expression
    num_timed: int
    threads: int


def serve(fit: Callable[[Job, Function], Iterator[Fitted]]) -> None:
    """Read the job, and print a row for every method."""
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    job = Job(**content | {"accuracies": tuple(content["accuracies"])})
    target, points = job.target(), np.load(job.points, allow_pickle=False)
    for fitted in fit(job, target):
        print(json.dumps(asdict(measured(fitted, target, points))), flush=True)


def measured(fitted: Fitted, target: Function, points: np.ndarray) -> Row:
    """Return the error at all points, and the times for as many of them as the method evaluates in a moment."""
    few = points[:LEAST_POINTS]
    per_point = alternated({"method": lambda: fitted.evaluate(few)}, 1)["method"] / len(few)
    count = min(len(points), max(LEAST_POINTS, int(SECONDS_PER_EVALUATION / per_point)))
    some = points[:count]
    took = alternated({"unit": lambda: target(some), "method": lambda: fitted.evaluate(some)}, TURNS, turn_seconds=0.02)
    error = float(np.abs(np.asarray(fitted.evaluate(points), np.float64).ravel() - target(points)).max())
    return Row(
        function=target.text,
        method=fitted.method,
        eps=fitted.eps,
        size=fitted.size,
        keys=fitted.keys,
        build_seconds=fitted.build_seconds,
        error=error,
        bound=fitted.bound,
        seconds_per_point=took["method"] / count,
        time=took["method"] / took["unit"],
        num_timed=count,
        threads=fitted.threads,
    )


def smallest(
    method: str,
    job: Job,
    target: Function,
    sizes: Sequence[int],
    fit: Callable[[int], tuple[Evaluate, int]],
    threads: int = 1,
    num_fitted: int = NUM_FITTED,
) -> Iterator[Fitted]:
    """Fit with growing sizes. Yield the first that meets each accuracy, and at the end the best if it met none.

    Stop when the time is over, or STALLED sizes in a row have not lowered the error.
    """
    points = target.sample(num_fitted, seed=1)
    wanted, open_accuracies = target(points), sorted(job.accuracies, reverse=True)
    end, best, stalled = time.perf_counter() + job.search_seconds, None, 0
    lowest = np.inf
    for size in sizes:
        if not open_accuracies or stalled == STALLED or time.perf_counter() > end:
            break
        start = time.perf_counter()
        evaluate, stored = fit(size)
        built = time.perf_counter() - start
        error = float(np.abs(np.asarray(evaluate(points), np.float64).ravel() - wanted).max())
        stalled = 0 if error < lowest else stalled + 1
        met = [eps for eps in open_accuracies if error <= eps]
        fitted = Fitted(method, met[-1] if met else None, stored, built, evaluate, threads)
        if error < lowest:
            lowest, best = error, fitted
        if met:
            open_accuracies = open_accuracies[len(met) :]
            yield fitted
    if best is not None and best.eps is None:
        yield best
