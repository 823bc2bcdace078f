"""The check: files → verdict. Every leaf is proved again, in 128-bit Arb arithmetic, on all cores."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flint import arb, ctx

from attnc_checker.claims import Leaf, read_claim
from attnc_checker.files import (
    MAX_JSON,
    MAX_WEIGHTS,
    BadFile,
    Refused,
    parse_json,
    parse_safetensors,
    read_bytes,
)
from attnc_checker.program import FLOATS
from attnc_checker.proving import Task, Worker

MAIN, CERTIFICATE = "certificate.json", re.compile(r"certificate\.[A-Za-z0-9_-]+\.json")
PRECISION, MAX_SERIES = 128, 64
FEW, FEW_IN_STAGES = 16, 500
"""Fewer leaves are not worth other processes, each of which goes through the stages for itself."""

ENGINE = "{dtype} evaluation in IEEE 754 arithmetic rounded to nearest: layer by layer or folded, sums in any order"
BLOCKS = "except sums over up to 4096 keys: of 8 terms each, then of 8 of these sums, and so on"
TRUNCATION = "if the engine leaves out keys that are far behind, that moves no output by more than {truncation:.3g}"
EXPONENTIAL = "an exponential within 4 ulp in the engine"
TAILS = "exact arithmetic beyond the core, where rounding grows with |x|"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verdict:
    """`bound` is what was claimed, `reproved` the largest bound of a leaf that was found here."""

    name: str
    proved: bool
    reason: str
    exit_code: int
    bound: float | None
    reproved: float | None
    dtype: str | None
    scope: str | None
    leaves: int
    assumptions: tuple[str, ...]
    seconds: float


def certificates(path: str | os.PathLike[str]) -> list[str]:
    """The names of all certificates in the folder, certificate.json first, whether it is there or not."""
    try:
        names = os.listdir(path)
    except OSError:
        names = []
    return [MAIN, *sorted(name for name in names if CERTIFICATE.fullmatch(name))]


def check(
    path: str | os.PathLike[str], processes: int | None = None, progress: Progress | None = None, name: str = MAIN
) -> Verdict:
    """Whether the certificate of a saved network is re-proved. It never raises for what the files say.

    `name`: another than certificate.json is for the weights rounded to a second dtype.
    """
    started, claim, worst, code = time.monotonic(), None, None, 0
    reason = "every leaf is re-proved"
    try:
        with _precision():
            task = read_task(Path(path), name)
            claim = task.claim
            worst = _prove_all(task, processes or os.cpu_count() or 1, progress)
    except BadFile as error:
        reason, code = str(error), 2
    except Refused as error:
        reason, code = str(error), 1
    except Exception as error:  # whatever else happens, nothing was proved
        reason, code = f"the check broke off: {type(error).__name__}: {error}", 1
    assumed = [ENGINE.format(dtype=claim.dtype), EXPONENTIAL] if claim and claim.dtype != "real" else []
    assumed += [BLOCKS] if claim and claim.dtype == "float32" else []
    assumed += [TRUNCATION.format(truncation=claim.truncation)] if claim and claim.dtype != "real" else []
    assumed += [TAILS] if claim and any(leaf.cell is None for leaf in claim.leaves) else []
    return Verdict(
        os.fspath(path) if name == MAIN else os.path.join(os.fspath(path), name),
        code == 0,
        reason,
        code,
        claim.bound if claim else None,
        worst,
        claim.dtype if claim else None,
        claim.scope if claim else None,
        claim.num_leaves if claim else 0,
        tuple(assumed),
        time.monotonic() - started,
    )


def read_task(folder: Path, name: str = MAIN) -> Task:
    if not folder.is_dir():
        raise BadFile(f"{folder} is not a folder")
    certificate = parse_json(read_bytes(folder / name, MAX_JSON), name)
    config = parse_json(read_bytes(folder / "config.json", MAX_JSON), "config.json")
    weights = read_bytes(folder / "model.safetensors", MAX_WEIGHTS)
    if config.get("format") != "attnc.network/1":
        raise BadFile(f"config.json has the format {config.get('format')!r:.40}, not 'attnc.network/1'")
    claim = read_claim(certificate)
    digest = hashlib.sha256(weights).hexdigest()
    if certificate["weights_sha256"] != digest:
        raise Refused(f"the certificate belongs to other weights: model.safetensors has SHA-256 {digest}")
    if config.get("variables") != list(claim.variables) or config.get("expression") != claim.expression:
        raise Refused(f"config.json and {name} differ in the variables or the expression")
    if config.get("box") != certificate["box"]:
        raise Refused(f"config.json and {name} differ in the box")
    structure, tensors = config.get("program"), parse_safetensors(weights)
    if name == MAIN:
        return Task(claim, structure, tensors)
    if not isinstance(structure, dict) or name != f"certificate.{claim.dtype}.json" or claim.dtype not in FLOATS:
        raise Refused(f"{name} is for the dtype {claim.dtype!r:.40}: its name should say so")
    rounded = {place: tensor.rounded_to(FLOATS[claim.dtype]) for place, tensor in tensors.items()}
    return Task(claim, {**structure, "dtype": claim.dtype}, rounded)


def _prove_all(task: Task, processes: int, progress: Progress | None) -> float:
    worker = Worker(task)
    done, worst, whole, count, p = 0, 0.0, arb(0), task.claim.num_leaves, task.claim.p
    few = FEW_IN_STAGES if task.claim.is_staged else FEW
    for leaves, found in _results(worker, processes if count >= few else 1):
        done, worst, whole = done + leaves, max(worst, found), whole + found
        if progress:
            progress(done, count)
    if done != count:
        raise Refused(f"only {done} of {count} leaves were looked at")
    if p is not None:  # ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p}
        norm = whole ** (1 / arb(p)) if whole > 0 else whole
        if not norm <= task.claim.bound:
            raise Refused(f"the leaves add up to the norm {float(norm):.9g}, the bound is {task.claim.bound:.9g}")
        return float(norm)
    return worst if worker.composed is None else worker.composed


def _results(worker: Worker, processes: int) -> Iterator[tuple[int, float]]:
    jobs = worker.jobs()
    if processes == 1:
        yield from (worker.prove(*job) for job in jobs)
        return
    with ProcessPoolExecutor(min(processes, len(jobs)), initializer=_start, initargs=(worker.task,)) as pool:
        try:
            for future in as_completed([pool.submit(_work, *job) for job in jobs]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_own: list[Worker] = []


def _start(task: Task) -> None:
    ctx.prec, ctx.cap = PRECISION, MAX_SERIES
    _own[:] = [Worker(task)]


def _work(number: int, leaves: tuple[Leaf, ...]) -> tuple[int, float]:
    return _own[0].prove(number, leaves)


@contextmanager
def _precision() -> Iterator[None]:
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = PRECISION, MAX_SERIES
    try:
        yield
    finally:
        ctx.prec, ctx.cap = before
