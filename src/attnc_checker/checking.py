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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flint import arb, ctx, fmpq

from attnc_checker.averages import Average, Box
from attnc_checker.chains import Chain
from attnc_checker.claims import Cell, Claim, Leaf, read_claim
from attnc_checker.composition import lines
from attnc_checker.expressions import Function, constants, parse
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
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import FLOATS, Program, exact
from attnc_checker.rounding import Arithmetic, most
from attnc_checker.tails import tail_error

MAIN, CERTIFICATE = "certificate.json", re.compile(r"certificate\.[A-Za-z0-9_-]+\.json")
PRECISION, MAX_SERIES = 128, 64
PIECES = (16, 16, 64)
"""A leaf that does not pass whole may be cut into so many, in one, two, three variables: what holds on all, holds."""
LOOSE = 1.01
"""Of an L_p norm a leaf may be found so much worse than it is stated to be: what is found is added up."""
FINE = 8
"""In d variables, keys are left out in cells up to the level FINE/d."""
AT_ONCE = 16
"""Leaves are proved so many at a time."""
FEW, FEW_IN_STAGES = 16, 500
"""Fewer leaves are not worth other processes, each of which goes through the stages for itself."""

ENGINE = "{dtype} evaluation in IEEE 754 arithmetic rounded to nearest: layer by layer or folded, sums in any order"
BLOCKS = "sums over up to 4096 keys are made of 8 terms each, then of 8 of these sums, and so on"
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
    narrowed: dict[Cell, Prover] = field(default_factory=dict)

    def cell_ends(self, cell: Cell) -> list[tuple[Any, Any]]:
        """Exact rationals, as the ends of the box are float64 numbers."""
        level, index = cell
        whole = [(exact(lo), (exact(hi) - exact(lo)) / 2**level) for lo, hi in self.ends]
        return [(lo + i * width, lo + (i + 1) * width) for (lo, width), i in zip(whole, index, strict=True)]

    def box(self, cell: Cell) -> Box:
        ends = self.cell_ends(cell)
        return Box([arb((lo + hi) / 2) for lo, hi in ends], [arb((hi - lo) / 2) for lo, hi in ends])

    def near(self, cell: Cell) -> Prover:
        """For parts of the cell: on the way to it keys that are far behind are left out, except in the finest cells."""
        if cell[0] > FINE // len(cell[1]):
            return self.near(_above(cell))
        if cell not in self.narrowed:
            wider = self.near(_above(cell)) if cell[0] else self.prover
            self.narrowed[cell] = wider.within(self.box(cell))
        return self.narrowed[cell]

    def prove(self, leaf: Leaf) -> Any:
        """A bound on |f − network| on the leaf, at most the claimed one; Refused if that is not found."""
        if leaf.cell is not None and leaf.row:
            return self._prove_row(leaf, leaf.cell)
        if leaf.cell is not None:
            return self._prove_cell(leaf, leaf.cell, PIECES[min(len(self.ends), len(PIECES)) - 1])
        start = exact(self.ends[0][0 if leaf.order < 0 else 1])
        found, reason = _attempt(lambda: tail_error(self.prover.stage, self.prover.function, start, leaf.order))
        return self._at_most(self.bound, found, reason, leaf, f"beyond the core on side {leaf.order}")

    def _prove_cell(self, leaf: Leaf, cell: Cell, pieces: int) -> Any:
        bound = self.bound if leaf.bound is None else LOOSE * leaf.bound
        box, room = self.box(cell), bound - arb(self.spent)
        found, reason = _attempt(lambda: self.near(cell).error(leaf.kind, leaf.order, box, room) + self.spent)
        if not found <= bound and pieces >= 2 ** len(cell[1]):
            parts = itertools.product(*((2 * i, 2 * i + 1) for i in cell[1]))
            return most(self._prove_cell(leaf, (cell[0] + 1, part), pieces >> len(cell[1])) for part in parts)
        places = zip(self.variables, self.cell_ends(cell), strict=True)
        where = ", ".join(f"{name} ∈ [{float(lo):.6g}, {float(hi):.6g}]" for name, (lo, hi) in places)
        return self._at_most(bound, found, reason, leaf, where)

    def _prove_row(self, leaf: Leaf, cell: Cell) -> Any:
        """At a point, which is a box of width 0, the function is what the table says."""
        point, values = leaf.row[: len(self.ends)], leaf.row[len(self.ends) :]
        prover = replace(self.near(cell), function=constants(values))
        box, room = Box([arb(x) for x in point], [arb(0) for _ in point]), self.bound - arb(self.spent)
        found, reason = _attempt(lambda: prover.error("taylor", 1, box, room) + self.spent)
        where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.variables, point, strict=True))
        return self._at_most(self.bound, found, reason, leaf, f"{leaf.order}, {where},")

    def _at_most(self, bound: float, found: Any, reason: str, leaf: Leaf, where: str) -> Any:
        if found <= bound:  # False for nan
            return found
        raise Refused(f"{self.name}the {leaf.kind} leaf {where} is not re-proved to {bound:.6g}: {reason}")

    def power_of_norm(self, leaf: Leaf, p: float) -> Any:
        """Above ∫|f − network|^p over the leaf."""
        sides = (hi - lo for lo, hi in self.cell_ends(leaf.cell or (0, ())))
        found = self.prove(leaf)
        return arb(math.prod(sides, start=fmpq(1))) * found ** arb(p) if found > 0 else arb(0)


def _above(cell: Cell) -> Cell:
    return cell[0] - 1, tuple(i >> 1 for i in cell[1])


def _attempt(prove: Callable[[], Any]) -> tuple[Any, str]:
    """The bound, and what to say of it."""
    try:
        found = prove()
        return found, f"the bound found here is {float(found):.6g}"
    except (ArithmeticError, ValueError) as error:
        return arb("nan"), str(error)


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
        program = Program(self.structure, self.tensors, len(reach))
        reduction = Reduction(program, reach, claim.is_staged, [] if claim.is_chain else None)
        if claim.dtype not in (reduction.dtype, "real"):
            raise Refused(f"the bound is claimed for {claim.dtype}, but the weights are {reduction.dtype}")
        row = claim.leaves[0].row if claim.leaves else ()
        function = constants(row[len(reach) :]) if row else parse(claim.expression, claim.variables)
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

    def jobs(self) -> list[tuple[int, tuple[Leaf, ...]]]:
        """Leaves that lie near each other, so that they leave out the same keys."""
        return [
            (number, subject.leaves[start : start + AT_ONCE])
            for number, subject in enumerate(self.subjects)
            for start in range(0, len(subject.leaves), AT_ONCE)
        ]

    def prove(self, number: int, leaves: tuple[Leaf, ...]) -> tuple[int, float]:
        """How many, and above the largest error; of an L_p norm, above the sum of their parts of its power."""
        subject, p = self.subjects[number], self.task.claim.p
        if p is None:
            return len(leaves), float(most(map(subject.prove, leaves)))
        whole = sum((subject.power_of_norm(leaf, p) for leaf in leaves), arb(0)).upper()
        return len(leaves), math.nextafter(float(whole), math.inf)


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
