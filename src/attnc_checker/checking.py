"""The check: files → verdict. Every leaf is proved again, in 128-bit Arb arithmetic, on all cores."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flint import arb, ctx, fmpq

from attnc_checker.averages import Average, Box
from attnc_checker.chains import Chain
from attnc_checker.claims import Cell, Claim, Leaf, read_claim
from attnc_checker.composition import lines
from attnc_checker.expressions import Function, parse
from attnc_checker.files import (
    MAX_JSON,
    MAX_WEIGHTS,
    BadFile,
    Refused,
    Tensor,
    parse_json,
    parse_safetensors,
    read_bytes,
)
from attnc_checker.leaves import Prover
from attnc_checker.network import FLOATS, Reduction, Stage, exact
from attnc_checker.rounding import Arithmetic, most
from attnc_checker.tails import tail_error

MAIN, CERTIFICATE = "certificate.json", re.compile(r"certificate\.[A-Za-z0-9_-]+\.json")
PRECISION, MAX_SERIES = 128, 64
PIECES = (16, 16, 64)
"""A leaf that does not pass whole may be cut into so many, in one, two, three variables: what holds on all, holds."""
LOOSE = 1.01
"""Of an L_p norm a leaf may be found so much worse than it is stated to be: what is found is added up."""
REGIONS = 256
"""The box is taken in at most so many parts, in each of which keys that are far behind are left out."""
FEW, FEW_IN_STAGES = 16, 500
"""Fewer leaves are not worth other processes, each of which goes through the stages for itself."""

ENGINE = "{dtype} evaluation in IEEE 754 arithmetic rounded to nearest: layer by layer or folded, sums in any order"
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
        claim.num_leaves if claim else 0,
        tuple(assumed),
        time.monotonic() - started,
    )


@dataclass(frozen=True)
class Subject:
    """Leaves that have to prove a stage, or the whole network, to be within `bound` of a function on a box."""

    name: str
    variables: tuple[str, ...]
    ends: tuple[tuple[float, float], ...]
    bound: float
    spent: float  # of the bound, in advance
    leaves: tuple[Leaf, ...]
    prover: Prover

    def cell_ends(self, cell: Cell) -> list[tuple[Any, Any]]:
        """Exact rationals, as the ends of the box are float64 numbers."""
        level, index = cell
        whole = [(exact(lo), (exact(hi) - exact(lo)) / 2**level) for lo, hi in self.ends]
        return [(lo + i * width, lo + (i + 1) * width) for (lo, width), i in zip(whole, index, strict=True)]

    def volume(self, leaf: Leaf) -> Any:
        return (
            arb(math.prod((hi - lo for lo, hi in self.cell_ends(leaf.cell)), start=fmpq(1)))
            if leaf.cell
            else arb("inf")
        )

    def box(self, cell: Cell) -> Box:
        ends = self.cell_ends(cell)
        return Box([arb((lo + hi) / 2) for lo, hi in ends], [arb((hi - lo) / 2) for lo, hi in ends])

    def regions(self) -> list[tuple[Cell | None, list[Leaf]]]:
        """The leaves by the cell of a coarse division that they lie in."""
        coarse = (REGIONS.bit_length() - 1) // len(self.ends)
        found: dict[Cell | None, list[Leaf]] = {}
        for leaf in self.leaves:
            region = leaf.cell
            if region is not None:
                up = max(0, region[0] - coarse)
                region = (region[0] - up, tuple(i >> up for i in region[1]))
            found.setdefault(region, []).append(leaf)
        return list(found.items())

    def prove(self, prover: Prover, leaf: Leaf, cell: Cell | None, pieces: int) -> Any:
        """A bound on a leaf or on a part of it, at most the claimed one; Refused if that is not found."""
        bound = self.bound if leaf.bound is None else LOOSE * leaf.bound
        try:
            if cell is None:
                start = exact(self.ends[0][0 if leaf.order < 0 else 1])
                found = tail_error(prover.stage, prover.function, start, leaf.order)
            else:
                spent = arb(self.spent)
                found = prover.error(leaf.kind, leaf.order, self.box(cell), bound - spent) + spent
            if found <= bound:  # False for nan
                return found
            reason = f"the bound found here is {float(found):.6g}"
        except (ArithmeticError, ValueError) as error:
            reason = str(error)
        if cell is not None and pieces >= 2 ** len(cell[1]):
            parts = itertools.product(*((2 * i, 2 * i + 1) for i in cell[1]))
            return most(self.prove(prover, leaf, (cell[0] + 1, part), pieces >> len(cell[1])) for part in parts)
        places = zip(self.variables, self.cell_ends(cell) if cell else [], strict=False)
        where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
        where = where or f"beyond the core on side {leaf.order}"
        raise Refused(f"{self.name}the {leaf.kind} leaf {where} is not re-proved to {bound:.6g}: {reason}")


@dataclass(frozen=True)
class Task:
    """The claim and the network as they were read; every process reduces the network for itself, once."""

    claim: Claim
    structure: Any
    tensors: dict[str, Tensor]

    def subjects(self) -> tuple[list[Subject], float | None]:
        """What leaves have to prove; and, of a deep program, the bound that follows."""
        claim = self.claim
        reach = [arb(max(abs(lo), abs(hi))) for lo, hi in claim.ends]
        arithmetic = Arithmetic(claim.dtype)
        reduction = Reduction(self.structure, self.tensors, reach, claim.is_staged, [] if claim.is_chain else None)
        if claim.dtype not in (reduction.dtype, "real"):
            raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {reduction.dtype}")
        function = parse(claim.expression, claim.variables)
        if len(function[1]) != reduction.num_outputs:
            raise Refused(f"the network has {reduction.num_outputs} output(s), the expression {len(function[1])}")

        def prover(stage: Stage, function: Function) -> Prover:
            return Prover(stage, [Average(head) for head in stage.heads], function, arithmetic)

        if not claim.is_staged:
            if claim.is_chain:
                whole: Prover = Chain.of(reduction, function, arithmetic, claim)
            else:
                whole = prover(reduction.stage(), function)
            return [Subject("", claim.variables, claim.ends, claim.bound, claim.truncation, claim.leaves, whole)], None
        found, composed = lines(claim, reduction, arithmetic)
        if not composed <= claim.bound:
            raise Refused(f"the errors of the stages add up to {float(composed):.9g}, the bound is {claim.bound:.9g}")
        return [
            Subject(
                f"stage {line.claim.name}, {line.claim.channel!r:.60}: ",
                ("t",),
                (line.claim.ends,),
                line.claim.bound,
                0.0,
                line.claim.leaves,
                prover(line.stage, line.function),
            )
            for line in found
        ], float(composed)


class Worker:
    """Proves leaves; one for each process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.subjects, self.composed = task.subjects()
        self.coarse: dict[tuple[int, Cell], Prover] = {}

    def jobs(self) -> list[tuple[int, Cell | None, list[Leaf]]]:
        return [(number, *region) for number, subject in enumerate(self.subjects) for region in subject.regions()]

    def prove_region(self, number: int, region: Cell | None, leaves: list[Leaf]) -> tuple[int, float]:
        subject = self.subjects[number]
        prover, pieces = subject.prover, PIECES[min(len(subject.ends), len(PIECES)) - 1]
        if region is not None:
            level, index = region
            up = level - level // 2  # keys are left out in two steps, of which the first serves many regions
            parent = (level - up, tuple(i >> up for i in index))
            if (number, parent) not in self.coarse:
                self.coarse[number, parent] = prover.within(subject.box(parent))
            prover = self.coarse[number, parent].within(subject.box(region))
        found = [subject.prove(prover, leaf, leaf.cell, pieces).upper() for leaf in leaves]
        p = self.task.claim.p
        if p is None:
            return len(leaves), float(most(found))
        adds = (subject.volume(leaf) * x ** arb(p) for leaf, x in zip(leaves, found, strict=True) if x != 0)
        return len(leaves), math.nextafter(float(sum(adds, arb(0)).upper()), math.inf)


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
        yield from (worker.prove_region(*job) for job in jobs)
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


def _work(number: int, region: Cell | None, leaves: list[Leaf]) -> tuple[int, float]:
    return _own[0].prove_region(number, region, leaves)


@contextmanager
def _precision() -> Iterator[None]:
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = PRECISION, MAX_SERIES
    try:
        yield
    finally:
        ctx.prec, ctx.cap = before
