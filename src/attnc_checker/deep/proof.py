"""Proofs of deep programs: with claims of their stages, each of which has leaves of its own, or by enclosure leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnc_checker.deep.chains import Chain, Links
from attnc_checker.deep.channels import Channels
from attnc_checker.deep.claims import read_stages
from attnc_checker.deep.composition import lines
from attnc_checker.expressions import Function
from attnc_checker.files import Refused
from attnc_checker.network import Reduction
from attnc_checker.norms import NormProof
from attnc_checker.program import Program
from attnc_checker.proving import Proof, Subject


class StagedProof(Proof):
    """What follows from the leaves of all stages is known beforehand."""

    at_once = 500  # each process goes through the stages for itself

    def read_leaves(self) -> Sequence[Any]:
        self.stages = read_stages(self.claim)
        return ()

    def reduction(self, program: Program, reach: list[Any]) -> Reduction:
        return Channels(program, reach)

    def divide(self, reduction: Any, function: Function) -> list[Subject]:
        found, self.composed = lines(self.claim, self.stages, reduction, self.arithmetic)
        claims = [(line.claim, self.prover(line.stage, line.function)) for line in found]
        return [Subject(claim, claim.leaves, claim.leaf_bounds, prover) for claim, prover in claims]

    def conclude(self, found: Iterable[float]) -> float:
        return float(self.composed)


class ChainProof(Proof):
    def reduction(self, program: Program, reach: list[Any]) -> Reduction:
        return Links(program, reach)

    def divide(self, reduction: Any, function: Function) -> list[Subject]:
        if not all(leaf.kind == "enclosure" for leaf in self.leaves):
            raise Refused("enclosure leaves are for all of a box, or for none of it")
        return [
            Subject(self.claim, self.leaves, self.bounds(), Chain.of(reduction, function, self.arithmetic, self.claim))
        ]


class ChainNormProof(NormProof, ChainProof):
    """Of an L_p norm."""
