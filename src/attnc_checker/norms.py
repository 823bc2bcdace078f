"""L_p norms: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p} with a bound b_C at every point of the cell C."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb, fmpq

from attnc_checker.claims import LARGEST_ERROR, ByLeaves, Claim
from attnc_checker.files import Refused
from attnc_checker.leaves import Prover
from attnc_checker.proving import Proof, Subject

LOOSE = 1.01
"""The factor by which the bound found on a leaf may exceed the stated one. The norm is summed from the found bounds."""


@dataclass(frozen=True, kw_only=True)
class Integral(Subject):
    """Leaves, each with a bound of its own."""

    p: arb

    def allows(self, n: int, found: float) -> bool:
        """Return whether this is a bound on an integral. Their sum is compared with the claim."""
        return 0 <= found < math.inf

    def found(self, n: int) -> float:
        """Bound ∫|f − network|^p over the leaf, in units of bound^p, since powers of small bounds would underflow."""
        leaf = self.leaves[n]
        assert leaf.cell is not None  # norms need bounded boxes, which have no tails
        volume = math.prod((hi - lo for lo, hi in self.sides(leaf.cell)), start=fmpq(1))
        found = self.prove(leaf, self.bounds[n], LOOSE).upper()
        power = arb(volume) * (found / self.claim.bound) ** self.p if found > 0 else arb(0)
        return math.nextafter(float(power.upper()), math.inf)


def by_leaves(claim: Claim, evidence: ByLeaves, prover: Prover) -> Proof:
    """Return the proof of a claim about the largest error or about an L_p norm."""
    if claim.norm == LARGEST_ERROR:
        subject = Subject(claim, evidence.leaves, [claim.bound] * len(evidence.leaves), prover, evidence.points)
        return Proof([subject], scope=claim.scope)
    if evidence.bounds is None or len(evidence.bounds) != len(evidence.leaves):
        raise Refused(f"with the norm {claim.norm} every leaf needs a bound of its own")
    p = arb(claim.norm)

    def conclude(found: list[float]) -> float:
        norm = claim.bound * sum(map(arb, found), arb(0)) ** (1 / p)
        if not norm <= claim.bound:
            raise Refused(f"the leaves add up to the norm {float(norm):.9g}, the bound is {claim.bound:.9g}")
        return float(norm)

    subject = Integral(claim, evidence.leaves, evidence.bounds, prover, evidence.points, p=p)
    return Proof([subject], conclude, f"in the norm L_{claim.norm} over the box")
