"""Programs of several stages, proved by leaves: f against all that the stages, one after the other, can say on a cell.

A cell is cut where the first stage turns from one flat part to another (`deep.axis_breaks`): cuts are free to choose,
and need not be dyadic. Where the last stage selects a cell of a grid, f is held against the values that can be
selected, found axis by axis (`deep.axis_keys`); a single stage that selects is proved so, too. In other chains every
stage is enclosed on a piece X of a cell over the enclosure of the one before it (`deep.enclosures`), from its stored
weights, rounding included, and sup_X |f − network| ≤ the distance of the two enclosures. Any chain of attention layers
and softmaxes can be proved so; soft ones take small cells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Bounds, Kind, branch_and_bound
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.deep.axis_breaks import axis_breaks, cut_at
from attnc.proofs.deep.axis_keys import axis_keys, row_breaks
from attnc.proofs.deep.enclosures import LEAK, StageEnclosure
from attnc.proofs.leaves.deviations import cells_within, distance
from attnc.proofs.proven import Proven, proven, summed
from attnc.proofs.stages.extraction import stage_chain
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.target import Target

MAX_DEEP_VARIABLES = 4
CLOSE = 1.03
"""Times the error that was seen: what is sought where eps cannot be reached."""
LOOSE = 1.5
"""Times the same: a bound that is closer is not sought, even for eps."""
CLOSE_NORM = 1.2
MOST_SUMMED = 50_000
"""The same of an L_p norm, and the cells for it, all of which become leaves."""
SPARE = 1 + 2.0**-12
"""Of an L_p norm: leaves are stated so much worse than they are, as a checker divides near keys from others elsewhere,
and all leaves count."""
LEAK_SHARE = 5e-3
"""Keys of the last stage that cost less than this part of the goal, all together, are not looked at one by one."""
KIND = "enclosure"


def prove_deep(
    program: Program,
    target: Target,
    *,
    p: float = math.inf,
    observed: float = 0.0,
    eps: float = 0.0,
    truncation: float = 0.0,
    time_budget: float = 60.0,
    box_budget: int = 500_000,
    progress: Callable[[str, float], None] | None = None,
) -> Proven:
    """The largest error, or its L_p norm, over dyadic cells. ProgramError where stages cannot be enclosed.

    Cells are halved until the bound is at most eps and LOOSE times the error that was seen.
    """
    if target.num_outputs != int(np.prod(program.output_shape)) or target.input_shapes != program.input_shapes:
        raise ProgramError(
            f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.input_shapes} to "
            f"{target.output_shape}"
        )
    stages = [StageEnclosure.of(stage, is_first=i == 0) for i, stage in enumerate(stage_chain(program))]
    *before, last = stages
    goal = CLOSE * observed if eps <= observed else min(LOOSE * observed, eps)
    spare = min(LEAK_SHARE * goal, 0.1 * (goal - observed)) / float(target.box.widths.prod()) ** (1 / p)
    leak = min(0.01, max(LEAK, spare / max(last.span, goal))) if goal > 0 else LEAK
    if before:
        breaks = [axis_breaks(stages[0], target.box, axis) for axis in range(target.box.d)]
    else:
        breaks = row_breaks(last, target.box.d, leak)
    heads = axis_keys(stages, Interval(target.box.lo[None], target.box.hi[None]), breaks, leak)
    rounding = np.full(target.num_outputs, truncation)  # that of scores only makes leaks larger
    for head in heads or ():
        rounding[head.outputs] += head.rounding

    def bounds(centres: np.ndarray, radii: np.ndarray, _: Goal) -> Bounds:
        cells = cells_within(target.box, centres, radii)
        upper = np.zeros((len(centres), target.num_outputs))
        if heads is not None:
            for head in heads:
                upper[:, head.outputs] = up(head.bounds(target, cells) + truncation)
            upper = upper if p == math.inf else up(SPARE * upper)
            if before:
                return Bounds(upper, {KIND: upper})
            return Bounds(upper, {"selection": upper - rounding, "rounding": np.broadcast_to(rounding, upper.shape)})
        pieces, cell = cut_at(breaks, cells)
        state = pieces
        for stage in before:
            state = stage(state)
        state = last(state, leak)
        off = up(distance(target.enclosure(pieces), state) + truncation)
        np.maximum.at(upper, cell, off)
        return Bounds(upper, {KIND: upper})

    kinds = [Kind(KIND, 0, bounds)]
    start_level = max(1, round(math.log2(2 + min(map(len, breaks))) - 2))
    if p < math.inf:
        found = bound_integral(
            kinds,
            target.box,
            p,
            goal=CLOSE_NORM * observed,
            time_budget=time_budget,
            box_budget=min(box_budget, MOST_SUMMED),
            progress=progress,
        )
        proof = summed(found, found.terms, target.box)
    else:
        proof = proven(
            branch_and_bound(
                kinds,
                target.box,
                goal=goal,
                start_level=start_level,
                time_budget=time_budget,
                box_budget=box_budget,
                progress=progress,
            ),
            target.box,
            {},
        )
    return dataclasses.replace(proof, cuts=tuple(tuple(points.tolist()) for points in breaks))
