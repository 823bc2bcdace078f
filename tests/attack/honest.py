"""Honest networks: compile a random case, look for errors above its bound, and have the checker re-prove it.

A comparison is |f − y| ≤ bound for one output y of one engine at one point. It is decided by an enclosure of f in
float64 intervals, which includes the error of f itself, and in Arb where that enclosure is too wide or the error is
among the largest. So a comparison that passes is a proof for its point. On the tails of an infinite box y is also the
network in exact arithmetic, far beyond the reach of engines.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import attnc
from attack.grammar import Case
from attack.limits import TooLong, cpu_limit
from attnc.engines.grid import GridHead
from attnc.engines.numpy_engine import NumpyEngine, has_numba
from attnc.ir.program import Program
from attnc.proofs.certificate import Certificate
from attnc.targets.box import Box
from attnc.targets.target import Target
from attnc_checker import certificates, check
from constructions.errors import lp_error
from proofs.comparisons import ENGINES, Comparisons, Engine, adversarial_points, engines_of, errors_at, exactly

COMPILE_SECONDS = VERIFY_SECONDS = 60.0
"""The limits that compile and verify have to keep, in CPU seconds: other processes may be busy."""
ATTACK_SECONDS = 20.0
"""CPU seconds in which errors are looked for. Most networks take less than one."""
WORK = 2 * 10**7
"""Scores that the first sample of a network may cost one engine: about 0.2 s of exponentials."""
MOST_POINTS, FEWEST_POINTS = 8000, 300
ULPS = (64, 16, 4, 2, 1, 1)
"""The largest steps of the last rounds of the search uphill, in units in the last place."""
STARTS = 6
"""The number of worst points from which each engine is followed uphill, in every round."""
MOST_IN_ARB = 200_000
"""The largest number of parameters of a program that Arb evaluates: about a second for each point."""
FAR = 10.0 ** np.arange(-3, 9)
"""Distances from the core of an infinite box, in units of its width, at which its tails are compared."""
FAR_POINTS = 2000
"""Points on each tail at which engines are compared."""
NORM_ROOM = 1.01
"""A norm by quadrature may exceed the bound by this factor, because of its own error."""
RE_PROVABLE = ("proof", "staged proof")
POINTS_OF_NORM = {1: 40_001, 2: 301}
"""Points per axis of the quadrature of a norm, by the number of variables."""


@dataclass
class Outcome:
    """The result of one case. `failures` are defects: a kind and a message each."""

    kind: str
    case: str
    end: str = ""  # verified, refused, not re-provable, or failed
    refusal: str = ""
    construction: str = ""
    method: str = ""
    comparisons: dict[str, int] = field(default_factory=dict)
    in_arb: int = 0
    closest: float = 0.0
    compile_seconds: float = 0.0
    verify_seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)


class Attack:
    """The attack on one case, phase by phase."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.outcome = Outcome(case.kind, str(case))
        self.made = Comparisons()

    def run(self) -> dict[str, Any]:
        network = self._compiled()
        if network is not None:
            with self._phase("attack", ATTACK_SECONDS):
                self._compare(network)
            with self._phase("verify", VERIFY_SECONDS):
                self._verify(network)
        made, outcome = self.made, self.outcome
        outcome.comparisons, outcome.in_arb, outcome.closest = dict(made.seen), made.in_arb, made.closest
        outcome.end = "failed" if outcome.failures else outcome.end
        return asdict(outcome)

    def _fail(self, kind: str, message: str) -> None:
        self.outcome.failures.append((kind, message))

    @contextmanager
    def _phase(self, name: str, seconds: float) -> Iterator[None]:
        """Record a failure of this phase: an error above a bound, a traceback, or a limit of time."""
        try:
            with cpu_limit(seconds):
                yield
        except TooLong:
            if name != "attack":  # a search may end early
                self._fail(f"{name} too long", f"more than {seconds:g} CPU seconds")
        except AssertionError as error:
            self._fail("bound exceeded" if str(error) else f"{name} traceback", str(error) or traceback.format_exc())
        except Exception:
            self._fail(f"{name} traceback", traceback.format_exc())

    def _compiled(self) -> attnc.Network | None:
        started, network = time.process_time(), None
        with self._phase("compile", COMPILE_SECONDS):
            try:
                network = self.case.compile()
            except attnc.AttncError as error:
                self.outcome.end, self.outcome.refusal = "refused", type(error).__name__
                if "defect" in str(error):
                    self._fail("defect", str(error))
        self.outcome.compile_seconds = time.process_time() - started
        if network is None:
            return None
        claim = network.certificate
        self.outcome.construction, self.outcome.method = network.construction, claim.method
        if not (claim.error is not None and claim.error <= self.case.eps):
            self._fail("eps not met", f"{claim.error!r} > {self.case.eps!r}")
        if claim.bound is None and not claim.is_of_table:
            self._fail("nothing proved", f"{claim.method}, by {network.construction}")
        return network

    def _compare(self, network: attnc.Network) -> None:
        claims = [(network.program, network.certificate)]
        claims += [(network.program.astype(dtype), claim) for dtype, claim in network.also.items()]
        for program, claim in claims:
            if claim.bound is None:
                continue
            if claim.is_of_table:
                self._compare_table(program, claim)
            else:
                self._compare_function(program, claim)

    def _compare_table(self, program: Program, claim: Certificate) -> None:
        """Compare every row with every engine. Values of a table are exact."""
        table = self.case.meaning
        points = table.points
        assert claim.bound is not None
        for name, engine in all_engines(program).items():
            error = errors_at(engine, table, points)
            self.made.seen[name] += len(points)
            ratio = float(error.max()) / claim.bound if claim.bound else 0.0
            self.made.closest = max(self.made.closest, ratio)
            assert error.max() <= claim.bound, f"{name}: {error.max()!r} > {claim.bound!r} at a row of the table"

    def _compare_function(self, program: Program, claim: Certificate) -> None:
        target = self.case.meaning
        assert claim.bound is not None
        if claim.core is not None:
            self._compare_tails(program, claim, claim.core)
            target = on_core(target, claim.core)
        engines, bound = all_engines(program), claim.bound
        each = NumpyEngine(program).work_per_point
        count = int(np.clip(WORK // max(1, each), FEWEST_POINTS, MOST_POINTS))
        seed = int(self.rng.integers(2**32))
        points = adversarial_points(program, target, count, seed)
        critical = target.critical_points()[:count]
        beside = [np.nextafter(critical, side * math.inf) for side in (-1, 1)]
        points = np.clip(np.concatenate([points, critical, *beside]), target.box.lo, target.box.hi)
        points = np.concatenate(
            [points, *(self._to_the_last_ulp(run, target, points, program) for run in engines.values())]
        )
        bounds: float | np.ndarray = bound
        if claim.norm != "inf":
            self._compare_norm(engines["numpy"], target, claim)
            if not claim.num_leaves:  # a theorem about the norm is no bound at a point
                return
            bounds = leaf_bounds_at(claim, target.box, points)
        few = engines if program.num_parameters <= MOST_IN_ARB else {"numpy": engines["numpy"]}
        self.made.check(program, target, bounds, points, few)

    def _to_the_last_ulp(self, run: Engine, target: Target, points: np.ndarray, program: Program) -> np.ndarray:
        """Return points on the way up from the worst for this engine, a few units in the last place at a time."""
        best, found = points[np.argsort(-errors_at(run, target, points))[:STARTS]], []
        for most in ULPS:
            ulps = np.spacing(np.abs(best).astype(program.dtype)).astype(np.float64)
            steps = self.rng.integers(-2 * most, 2 * most + 1, (len(best), 16, target.box.d)) / 2
            near = np.clip(best[:, None] + steps * ulps[:, None], target.box.lo, target.box.hi)
            near = np.concatenate([best, near.reshape(-1, target.box.d)])
            found.append(near)
            best = near[np.argsort(-errors_at(run, target, near))[:STARTS]]
        return np.concatenate(found)

    def _compare_tails(self, program: Program, claim: Certificate, core: tuple[float, float]) -> None:
        """Compare exact arithmetic beyond the core; and every engine, as far as the certificate covers it there."""
        width, target = core[1] - core[0], self.case.meaning
        sides = [(-1, core[0])] if math.isinf(target.box.lo[0]) else []
        sides += [(1, core[1])] if math.isinf(target.box.hi[0]) else []
        assert claim.bound is not None
        for x in (end + side * width * far for side, end in sides for far in FAR):
            self.made.seen["exact"] += 1
            self.made.decide("exact, on a tail", target, claim.bound, np.array([x]), exactly(program, [x]))
        if claim.beyond is not None:
            points = np.concatenate([self._far_out(side, end, claim.beyond.reach) for side, end in sides])
            bounds = np.array([claim.bound_at(float(x)) for x in points[:, 0]])
            self.made.check(program, target, bounds, points, all_engines(program))

    def _far_out(self, side: int, end: float, reach: float) -> np.ndarray:
        """Return points from the end of the core to the reach of the certificate: as many in every octave."""
        far = np.exp(self.rng.uniform(math.log(1e-6), math.log(max(reach - side * end, 1e-6)), (FAR_POINTS, 1)))
        return np.clip(end + side * far, *((end, reach) if side > 0 else (-reach, end)))

    def _compare_norm(self, run: Engine, target: Target, claim: Certificate) -> None:
        per_axis = POINTS_OF_NORM.get(target.box.d)
        assert claim.bound is not None
        if per_axis is not None:
            found = lp_error(lambda points: run(*target.split(points)), target, float(claim.norm), per_axis)
            self.made.seen["norm"] += 1
            assert found <= NORM_ROOM * claim.bound, f"L_{claim.norm}: {found!r} > {claim.bound!r}, by quadrature"

    def _verify(self, network: attnc.Network) -> None:
        with tempfile.TemporaryDirectory() as folder:
            network.save(f"{folder}/net")
            started = time.process_time()
            verdicts = [check(f"{folder}/net", processes=1, name=name) for name in certificates(f"{folder}/net")]
            self.outcome.verify_seconds = time.process_time() - started
        claims = [network.certificate, *network.also.values()]
        are_proofs = [c.method in RE_PROVABLE or c.method.startswith("proof at the table's") for c in claims]
        self.outcome.end = "verified" if are_proofs[0] else "not re-provable"
        for verdict, claim, is_proof in zip(verdicts, claims, are_proofs, strict=True):
            if "broke off" in verdict.reason:
                self._fail("verify traceback", verdict.reason)
            elif is_proof and not verdict.proved:
                self._fail("verify refused", f"{claim.method}, {network.construction}: {verdict.reason}")
            elif not is_proof and verdict.proved:
                self._fail("verify accepted no proof", claim.method)


def all_engines(program: Program) -> dict[str, Engine]:
    """Return every engine, with compiled loops as one of their own where the program has some."""
    found: dict[str, Engine] = engines_of(program, ENGINES)
    numpy = found["numpy"]
    assert isinstance(numpy, NumpyEngine)
    has_grid = any(isinstance(head, GridHead) for stage in numpy._stages for head in stage.heads)
    has_loops = has_numba() and (has_grid or numpy._fused is not None)
    return found | ({"numba": functools.partial(NumpyEngine(program), is_compiled=True)} if has_loops else {})


def on_core(target: Target, core: tuple[float, float]) -> Target:
    """Return the same expression on the finite core of its box."""
    return attnc.as_target(target.text, Box.parse([core], target.box.names).as_dict())


def leaf_bounds_at(claim: Certificate, box: Box, points: np.ndarray) -> np.ndarray:
    """Return the bound of the leaf at each point, and the larger one at a border of leaves."""
    (lo, hi), found = claim.cells(box), np.zeros(len(points))
    room = 1e-12 * box.widths
    for start in range(0, len(points), 512):
        part = points[start : start + 512, None]
        inside = ((part >= lo - room) & (part <= hi + room)).all(axis=2)
        found[start : start + 512] = np.where(inside, claim.leaf_bounds, 0.0).max(axis=1)
    return found


def warm_up() -> None:
    """Import every engine and compile its loops, so that processes forked from this one need not."""
    import torch

    torch.set_num_threads(1)
    network = attnc.compile("sin(x)*y", [(-1, 1)] * 2, 1e-3, construction="spectral_grid")
    points = np.zeros((4, 2))
    for run in all_engines(network.program).values():
        run(points)
