"""Programs of several stages, and single stages that select a cell of a grid, proved by enclosure leaves.

Cells are cut where the first stage changes from one flat part to another. If the last stage selects a cell of a grid,
f is compared with the values that can be selected, which are found axis by axis (`kinds.axis_keys`). In other chains
every stage is enclosed on a piece of a cell, over the enclosure of the stage before it (`kinds.enclosure`), from its
stored weights, rounding included. This proves any chain of attention layers and softmaxes. Soft ones take small cells.
"""

from __future__ import annotations

import dataclasses
import math

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.ir.shapes import streams
from attnc.numerics.intervals import Interval
from attnc.proofs.cells.branching import branch_and_bound
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.cells.kind import Kind
from attnc.proofs.kinds.axis_keys import AxisKind, axis_keys
from attnc.proofs.kinds.enclosure import LEAK, EnclosureKind, StageEnclosure, axis_breaks
from attnc.proofs.proof import Proof, proof_by_leaves
from attnc.proofs.prover import ProofRequest, Prover, num_softmaxes, require_same_shapes
from attnc.proofs.stages.extraction import stage_chain
from attnc.targets.target import Target

MAX_DEEP_VARIABLES = 4  # cells of more variables are too many, unless the whole box is one
MOST_CHAIN_KEYS = 2**16
"""The most keys of a chain, counted for every query. Measured for `attention_softmax` in L_3: a chain of 198 tokens, or
39,204 keys, takes the checker 43 s, and one of 528 tokens has more keys than the checker accepts."""
LOOSE_ENCLOSURE = 1.5  # no bound that is closer than this multiple is sought, even for eps
CLOSE_NORM = 1.2  # the multiple of an L_p norm that was seen that is sought
LEAK_SHARE = 5e-4
"""The share of the goal that the rows which are left out on one axis may cost, `AXIS_FARTHEST` apart. Measured on the
corpus: bounds are at most 0.3 % larger than without this cost, and with a share of 2e-3 up to 1.2 % larger."""
MOST_ENCLOSED_CELLS = 50_000  # the most cells for an L_p norm, all of which become leaves


class EnclosureProver(Prover):
    """Proves chains of several stages."""

    name = "enclosure"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        selects = request.has_theorem and request.p == math.inf
        if num_softmaxes(program) == 1 or _num_keys(program) > MOST_CHAIN_KEYS:
            return False
        return target.box.d <= MAX_DEEP_VARIABLES or selects

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove a bound. Raise ProgramError if stages cannot be enclosed.

        Cells are halved until the bound is at most eps, and at most LOOSE_ENCLOSURE times the error that was seen.
        """
        require_same_shapes(program, target)
        p, observed, box, goal = request.p, request.observed, target.box, goal_of(request)
        stages = tuple(StageEnclosure.of(stage, is_first=i == 0) for i, stage in enumerate(stage_chain(program)))
        spare = min(LEAK_SHARE * goal, 0.1 * (goal - observed)) / float(box.widths.prod()) ** (1 / p)
        leak = min(0.01, max(LEAK, spare / max(stages[-1].span, goal))) if goal > 0 else LEAK
        cuts = [axis_breaks(stages[0], box, axis) for axis in range(box.d)]
        heads = axis_keys(stages, Interval(box.lo[None], box.hi[None]), cuts, leak)
        kind: Kind = EnclosureKind(stages, target, tuple(cuts), leak, request.truncation)
        gap = None
        if heads is not None:
            kind = AxisKind(heads, target, request.truncation)
            gap = kind.gap
        elif box.d > MAX_DEEP_VARIABLES:
            raise ProgramError(f"cells of {box.d} variables are too many for a chain that selects no cell of a grid")
        if p < math.inf:
            budget = dataclasses.replace(request, cells=min(request.cells, MOST_ENCLOSED_CELLS))
            proof = bound_integral([kind], box, p, goal=CLOSE_NORM * observed, budget=budget)
        else:
            level = max(1, round(math.log2(2 + min(map(len, cuts))) - 2)) if box.d <= MAX_DEEP_VARIABLES else 0
            proof = branch_and_bound([kind], box, goal=goal, start_level=level, budget=request)
        return proof_by_leaves(proof, cuts=cuts, gap=gap)


def _num_keys(program: Program) -> int:
    """Return the number of keys, counted anew for every query that is read."""
    steps = (step for stream in streams(program) for step in stream.steps)
    return sum(len(step.tokens) * sum(step.key_counts()) for step in steps)


def goal_of(request: ProofRequest) -> float:
    """The bound that is sought: eps, and at most LOOSE_ENCLOSURE times the error that was seen."""
    if request.eps <= request.observed:
        return (1 + request.tolerance) * request.observed
    return min(LOOSE_ENCLOSURE * request.observed, request.eps)
