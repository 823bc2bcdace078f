"""Programs proved head by head: by a derivation of an expression, or by the definitions of a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.bound import Term
from attnc.numerics.rounding import up
from attnc.proofs.clip_prover import prove_clips
from attnc.proofs.deep.like_units import UnitsProof
from attnc.proofs.proof import HeadProof, Leaves, Proof, Stages
from attnc.proofs.prover import ProofRequest, Prover
from attnc.proofs.relu_prover import prove_relu
from attnc.proofs.staged import prove_staged
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.target import Target

TRUNCATION = "anchors that the engine leaves out of a grid, and the like"


class StagedProver(Prover):
    """Every head against a function of one number, and the errors of all heads carried to the outputs."""

    name = "head by head"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        is_derived = request.derivation is not None and target.expression is not None
        return request.p == math.inf and (is_derived or isinstance(target, ReLUNetwork | TruncatedLinear))

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        found = _proof(program, target, request)
        if not request.truncation:
            return found
        terms = (*found.terms, Term("truncation", request.truncation, TRUNCATION))
        return Proof(float(up(found.bound + request.truncation)), terms, found.evidence, found.complete)


def _proof(program: Program, target: Target, request: ProofRequest) -> Proof:
    seconds, progress = request.seconds, request.progress
    if isinstance(target, ReLUNetwork):
        network = prove_relu(program, target, time_budget=seconds, progress=progress)
    elif isinstance(target, TruncatedLinear):
        network = prove_clips(program, target, time_budget=seconds, progress=progress)
    elif request.derivation is None:
        raise ProgramError(f"no derivation of {target.describe()} states a function for every head")
    else:
        found = prove_staged(program, target, request.derivation, time_budget=seconds, progress=progress)  # type: ignore[arg-type]
        heads = tuple(
            HeadProof(
                stage=head.stage,
                channel=head.channel,
                interval=(head.lo, head.hi),
                bound=head.delta,
                held=head.held,
                leaves=Leaves(head.proof.leaves, head.deltas),
                **head.claim,
            )
            for head in found.heads
        )
        return Proof(found.bound, found.terms, Stages(heads, found.outputs, found.axes), found.complete)
    units = tuple(_unit(group, unit) for group in network.units for unit in group.units)
    return Proof(network.bound, network.terms, Stages(units, network.outputs), network.complete)


def _unit(group: UnitsProof, unit: Mapping[str, Any]) -> HeadProof:
    is_first = unit is group.units[0]
    return HeadProof(
        function=group.function,
        interval=(float(group.proof.box.lo[0]), float(group.proof.box.hi[0])),
        bound=group.bound,
        held=group.held,
        like=None if is_first else group.units[0]["name"],
        leaves=Leaves(group.proof.leaves, np.zeros(0)) if is_first else None,
        **unit,
    )
