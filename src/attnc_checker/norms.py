"""L_p norms: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p} with a bound b_C at every point of the cell C."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from flint import arb, fmpq

from attnc_checker.claims import ByLeaves, Claim
from attnc_checker.files import Refused
from attnc_checker.proving import Job, Proof

LOOSE = 1.01
"""The factor by which the bound found on a leaf may exceed the stated one: the bounds that are found are added up."""


class NormProof(Proof):
    """The leaves of another proof, each with a bound of its own."""

    def __init__(self, claim: Claim, evidence: ByLeaves, by_leaves: Proof) -> None:
        (subject,) = by_leaves.subjects
        if evidence.bounds is None or len(evidence.bounds) != len(evidence.leaves):
            raise Refused(f"with the norm {claim.norm} every leaf needs a bound of its own")
        self.p, self.bound = arb(claim.norm), claim.bound
        self.scope = f"in the norm L_{claim.norm} over the box"
        self.subjects = [replace(subject, bounds=evidence.bounds)]

    def prove(self, job: Job) -> float:
        """A bound of ∫|f − network|^p over the leaf, in units of bound^p: powers of small bounds would underflow."""
        (subject,), n = self.subjects, job[1]
        leaf = subject.leaves[n]
        assert leaf.cell is not None  # norms are of bounded boxes, which have no tails
        volume = math.prod((hi - lo for lo, hi in subject.sides(leaf.cell)), start=fmpq(1))
        found = subject.prove(leaf, subject.bounds[n], LOOSE).upper()
        power = arb(volume) * (found / self.bound) ** self.p if found > 0 else arb(0)
        return math.nextafter(float(power.upper()), math.inf)

    def conclude(self, found: Iterable[float]) -> float:
        norm = self.bound * sum(map(arb, found), arb(0)) ** (1 / self.p)
        if not norm <= self.bound:
            raise Refused(f"the leaves add up to the norm {float(norm):.9g}, the bound is {self.bound:.9g}")
        return float(norm)
