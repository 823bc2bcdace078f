"""The prover: from stored weights and a target to a bound that holds on the whole box, rounding included.

It knows nothing of the construction: a wrong theorem yields a refused certificate, never a false one.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.proofs.cells.branching import branch_and_bound
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.proven import Proven, proven, summed
from attnc.proofs.rounding.program import roundings
from attnc.proofs.stages.extraction import stages
from attnc.proofs.subject import Subject
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.function_target import FunctionTarget
from attnc.targets.target import Target

MAX_VARIABLES = 3
TOLERANCE, LEAST_TOLERANCE = 0.03, 0.003
"""Of an error that was seen; less where eps is closer to it."""
BESIDE_ROUNDING = 0.01
"""The same where rounding takes up the tolerance."""
SELECTED = (1.0, 1.1, 1.2)
"""Times an error that was seen, in one, two, three variables: no smaller bound is sought where keys are selected, if
that is below eps. Leaves would be many times as many."""
FAR_BELOW = 1e-3
"""Of eps: in several variables, where leaves are many, no bound below that is sought."""
MOST_SUMMED = 100_000
"""Cells for an L_p norm, all of which become leaves."""
SUMMED, PART_OF_EPS = (1.05, 1.5, 2.0), 0.25
"""Times the norm that was seen, in one, two, three variables, or of eps: leaves close in on a norm slowly, and each is
to be checked."""
PEAK = 3.0
"""About what the largest error is, times the mean that an L_p norm is."""

Progress = Callable[[str, float], None]


def prove(
    program: Program,
    target: Target,
    *,
    p: float = math.inf,
    observed: float = 0.0,
    eps: float = 0.0,
    tolerance: float = TOLERANCE,
    truncation: float = 0.0,
    time_budget: float = 60.0,
    box_budget: int = 500_000,
    progress: Progress | None = None,
) -> Proven:
    """By dyadic cells, the largest error or its L_p norm. ProgramError where the program is not one attention stage.

    `observed` is an error that was seen: no bound can be below it, and none is sought that is much closer; nor one that
    is below what rounding costs, or, in several variables, far below `eps`. Where only values of the target are known,
    and how steep it can be, leaves are so many that none below `eps` is sought at all.
    """
    num_inputs, num_outputs = sum(map(math.prod, program.input_shapes)), math.prod(program.output_shape)
    if (num_inputs, num_outputs) != (target.box.d, target.num_outputs):
        raise ProgramError(
            f"the program has {num_inputs} inputs and {num_outputs} outputs, the target {target.box.d} and "
            f"{target.num_outputs}"
        )
    found = stages(program)
    if len(found) != 1:
        raise ProgramError(f"the outputs are read from {len(found)} query tokens; a proof is for one")
    subject = Subject(found[0][0], roundings(program)[0], _with_outputs(target, found[0][1]), truncation)
    subject.rounding_level = subject.sampled_rounding()
    floor = max(FAR_BELOW * eps if target.box.d > 1 else 0.0, subject.rounding_level)
    if observed > 0:
        tolerance = max(min(tolerance, BESIDE_ROUNDING), tolerance - subject.rounding_level / observed)
    if 0 < observed < eps:
        tolerance = min(tolerance, max(LEAST_TOLERANCE, 0.9 * ((eps - floor) / observed - 1)))
    least = eps if isinstance(target, FunctionTarget) else 0.0
    goal = max(least, (1 + tolerance) * observed + floor)
    if p < math.inf:
        goal = max(goal, min(eps, max(PART_OF_EPS * eps, SUMMED[target.box.d - 1] * observed)))
        return _integral(subject, p, goal, time_budget, min(box_budget, MOST_SUMMED), progress)
    tails = subject.cut_tails(goal)
    ways = subject.ways(goal)
    began, best = time.monotonic(), None
    for number, way in enumerate(ways):
        enough = min(eps, SELECTED[target.box.d - 1] * observed) if way.selects else 0.0
        proof = branch_and_bound(
            way.kinds,
            subject.target.box,
            observed=observed,
            tolerance=tolerance,
            floor=floor,
            goal=max(least, enough),
            time_budget=(time_budget - (time.monotonic() - began)) / (len(ways) - number),
            box_budget=box_budget,
            start_level=way.start_level,
            progress=progress,
        )
        best = proof if best is None or proof.bound < best.bound else best
        if best.complete:
            break
    assert best is not None
    return proven(best, subject.target.box, tails)


def _integral(
    subject: Subject, p: float, goal: float, time_budget: float, box_budget: int, progress: Progress | None
) -> Proven:
    box = subject.target.box
    way = subject.way_of_norm(PEAK * goal / math.prod(width ** (1 / p) for width in box.widths))
    budgets: dict[str, Any] = {"time_budget": time_budget, "box_budget": box_budget, "start_level": way.start_level}
    found = bound_integral(way.kinds, box, p, goal=goal, progress=progress, **budgets)
    return summed(found, subject.with_jumps(found), box)


def _with_outputs(target: Target, outputs: np.ndarray) -> Target:
    """The target with its outputs in the order of the stage's."""
    if np.array_equal(outputs, np.arange(target.num_outputs)):
        return target
    if not isinstance(target, ExpressionTarget):
        raise ProgramError(f"the stage makes the outputs in the order {outputs.tolist()}, not in the target's")
    chosen = copy.copy(target)
    trees = tuple(target.expression.outputs[i] for i in outputs)
    chosen.expression = dataclasses.replace(target.expression, outputs=trees)
    return chosen
