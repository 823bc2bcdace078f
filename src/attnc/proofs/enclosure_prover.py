"""Programs of several stages, and single stages that select a cell of a grid, proved by enclosure leaves.

Cells are cut where the first stage changes from one flat part to another. If the last stage selects a cell of a grid,
f is compared with the values that can be selected, which are found axis by axis (`kinds.axis_keys`). In other chains
every stage is enclosed on a piece of a cell, over the enclosure of the stage before it (`kinds.enclosure`), from its
stored weights, rounding included. This proves any chain of attention layers and softmaxes. Soft ones take small cells.
"""

from __future__ import annotations

import dataclasses
import math

from attnc.ir.program import Program
from attnc.numerics.intervals import Interval
from attnc.proofs.cells.branching import branch_and_bound
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.cells.kind import Kind
from attnc.proofs.kinds.axis_keys import AxisKind, axis_keys, row_breaks
from attnc.proofs.kinds.enclosure import LEAK, EnclosureKind, StageEnclosure, axis_breaks
from attnc.proofs.proof import Proof, proof_by_leaves
from attnc.proofs.prover import ProofRequest, Prover, num_softmaxes, require_same_shapes
from attnc.proofs.stages.extraction import stage_chain
from attnc.targets.target import Target

MAX_DEEP_VARIABLES = 4  # cells of more variables are too many
LOOSE_ENCLOSURE = 1.5  # no bound that is closer than this multiple is sought, even for eps
CLOSE_NORM = 1.2  # the multiple of an L_p norm that was seen that is sought
LEAK_SHARE = 5e-4
"""The share of the goal that the rows which are left out on one axis may cost, `AXIS_FARTHEST` apart. Measured on the
corpus: bounds are at most 0.3 % larger than without this cost, and with a share of 2e-3 up to 1.2 % larger."""
MOST_ENCLOSED_CELLS = 50_000  # the most cells for an L_p norm, all of which become leaves


class EnclosureProver(Prover):
    """Proves chains of stages of up to four variables."""

    name = "enclosure"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        if target.box.d > MAX_DEEP_VARIABLES:
            return False
        if num_softmaxes(program) != 1:
            return True
        # A grid takes far fewer leaves axis by axis, and the check is faster.
        selects = request.has_theorem and request.p == math.inf
        return selects and target.expression is not None and target.box.d > 1

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove a bound. Raise ProgramError if stages cannot be enclosed.

        Cells are halved until the bound is at most eps, and at most LOOSE_ENCLOSURE times the error that was seen.
        """
        require_same_shapes(program, target)
        p, eps, observed, box = request.p, request.eps, request.observed, target.box
        stages = tuple(StageEnclosure.of(stage, is_first=i == 0) for i, stage in enumerate(stage_chain(program)))
        *before, last = stages
        goal = (1 + request.tolerance) * observed if eps <= observed else min(LOOSE_ENCLOSURE * observed, eps)
        spare = min(LEAK_SHARE * goal, 0.1 * (goal - observed)) / float(box.widths.prod()) ** (1 / p)
        leak = min(0.01, max(LEAK, spare / max(last.span, goal))) if goal > 0 else LEAK
        cuts = [axis_breaks(stages[0], box, axis) for axis in range(box.d)] if before else row_breaks(last, box.d, leak)
        heads = axis_keys(stages, Interval(box.lo[None], box.hi[None]), cuts, leak)
        kind: Kind = EnclosureKind(stages, target, tuple(cuts), leak, request.truncation)
        gap = None
        if heads is not None:
            kind = AxisKind(heads, target, request.truncation, is_single=not before)
            gap = kind.gap
        if p < math.inf:
            budget = dataclasses.replace(request, cells=min(request.cells, MOST_ENCLOSED_CELLS))
            proof = bound_integral([kind], box, p, goal=CLOSE_NORM * observed, budget=budget)
        else:
            level = max(1, round(math.log2(2 + min(map(len, cuts))) - 2))
            proof = branch_and_bound([kind], box, goal=goal, start_level=level, budget=request)
        return proof_by_leaves(proof, cuts=cuts, gap=gap)
