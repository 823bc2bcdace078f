"""Proofs of deep programs: with claims about their stages, each with leaves of its own, or by enclosure leaves."""

from __future__ import annotations

from collections.abc import Iterable

from attnc_checker.claims import ByLeaves, Claim
from attnc_checker.deep.chains import Chain, Links
from attnc_checker.deep.channels import Channels
from attnc_checker.deep.claims import Stages
from attnc_checker.deep.composition import lines
from attnc_checker.expressions import parse
from attnc_checker.files import Refused, Tensor
from attnc_checker.overflow import require_finite
from attnc_checker.proving import LeavesProof, Proof, Subject, prover_of, reach_of, stored_program
from attnc_checker.rounding import Arithmetic


class StagedProof(Proof):
    """The leaves of every stage. The bound that follows from them is computed before they are proved."""

    at_once = 500  # each process goes through the stages for itself

    def __init__(self, claim: Claim, evidence: Stages, structure: object, tensors: dict[str, Tensor]) -> None:
        outputs = parse(claim.expression, claim.variables).outputs
        program = stored_program(claim, structure, tensors, len(outputs))
        reduction, arithmetic = Channels(program, reach_of(claim)), Arithmetic(claim.dtype)
        found, self.composed = lines(claim, evidence, reduction, arithmetic)
        self.subjects = [
            Subject(
                line.claim, line.claim.leaves, line.claim.leaf_bounds, prover_of(line.stage, line.function, arithmetic)
            )
            for line in found
        ]
        require_finite(program, reduction.reach)

    def conclude(self, found: Iterable[float]) -> float:
        return float(self.composed)


class ChainProof(LeavesProof):
    """Enclosure leaves, for programs that select."""

    def __init__(self, claim: Claim, evidence: ByLeaves, structure: object, tensors: dict[str, Tensor]) -> None:
        if not all(leaf.kind == "enclosure" for leaf in evidence.leaves):
            raise Refused("enclosure leaves are for all of a box, or for none of it")
        function = parse(claim.expression, claim.variables)
        program = stored_program(claim, structure, tensors, len(function.outputs))
        reduction, arithmetic = Links(program, reach_of(claim)), Arithmetic(claim.dtype)
        chain = Chain.of(reduction, function, arithmetic, claim, evidence.cuts)
        self.subjects = [Subject(claim, evidence.leaves, [claim.bound] * len(evidence.leaves), chain)]
        require_finite(program, reduction.reach)
