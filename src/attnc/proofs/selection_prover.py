"""Programs that select, against any target that is known over cells: sequences, two inputs, code with a constant.

One attention layer, any number of query tokens, cross-attention included: the outputs of each query are proved by
selection leaves of their own, on the same cells. Of the target nothing is used but its enclosures over cells; of a
function given as code these are its values and the Lipschitz constant that was given with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Bounds, Kind, branch_and_bound
from attnc.proofs.deep.enclosures import rounding_of_sums
from attnc.proofs.leaves.selection import selection_bounds
from attnc.proofs.proven import Proven, proven
from attnc.proofs.rounding.program import roundings
from attnc.proofs.rounding.stage import rounding_bounds, score_errors
from attnc.proofs.stages.extraction import stages
from attnc.proofs.taylor.ranges import Goal
from attnc.targets.target import Target

MAX_SELECTING_VARIABLES = 4
CLOSE = 1.03
"""Times the error that was seen: what is sought where eps is closer than that."""
SMALL = 0.01
"""Of the goal: a rounding of sums below it is not made sharper."""


def prove_selection(
    program: Program,
    target: Target,
    *,
    observed: float = 0.0,
    eps: float = 0.0,
    truncation: float = 0.0,
    time_budget: float = 60.0,
    box_budget: int = 500_000,
    progress: Callable[[str, float], None] | None = None,
) -> Proven:
    """Branch and bound over dyadic cells, to eps. ProgramError where the program is not one attention stage."""
    num_outputs = math.prod(program.output_shape)
    if target.num_outputs != num_outputs or target.input_shapes != program.input_shapes:
        raise ProgramError(
            f"the program maps {program.input_shapes} to {program.output_shape}, the target {target.input_shapes} to "
            f"{target.output_shape}"
        )
    goal = max(eps, CLOSE * observed)
    parts = [(*part, rounds) for part, rounds in zip(stages(program), roundings(program), strict=True)]

    def bounds(centres: np.ndarray, radii: np.ndarray, _: Goal) -> Bounds:
        upper, rounding = np.zeros((2, len(centres), num_outputs))
        for stage, outputs, rounds in parts:
            errors = score_errors(rounds, centres, radii)
            upper[:, outputs] = selection_bounds(stage, target, centres, radii, outputs=outputs, score_errors=errors)
            found = up(rounding_of_sums(rounds, up(np.abs(centres) + radii)) + truncation)
            if not found.max() <= SMALL * goal:
                found = rounding_bounds(stage, rounds, centres, radii, truncation=truncation, for_any_weights=True)
            rounding[:, outputs] = found
        return Bounds(up(upper + rounding), {"selection": upper, "rounding": rounding}, 0.0, rounding)

    proof = branch_and_bound(
        [Kind("selection", 0, bounds)],
        target.box,
        goal=goal,
        time_budget=time_budget,
        box_budget=box_budget,
        progress=progress,
    )
    return proven(proof, target.box, {})
