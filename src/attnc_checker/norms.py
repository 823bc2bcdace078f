"""L_p norms: ‖f − network‖_p ≤ (Σ vol(C)·b_C^p)^{1/p} with a bound b_C at every point of the cell C."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flint import arb, fmpq

from attnc_checker.claims import Claim
from attnc_checker.files import Refused, Tensor, field
from attnc_checker.proving import Job, Proof

NORM = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")
LOOSE = 1.01
"""A leaf may be found so much worse than it is stated to be: what is found is added up."""


class NormProof(Proof):
    """Leaves have bounds of their own: about what is to be found."""

    def __init__(self, claim: Claim, structure: Any, tensors: dict[str, Tensor]) -> None:
        if not isinstance(claim.norm, str) or not NORM.fullmatch(claim.norm) or not float(claim.norm) >= 1:
            raise Refused(f"the norm is {claim.norm!r:.40}: neither 'inf' nor a number from 1 on")
        self.p = arb(claim.norm)
        self.scope = f"in the norm L_{claim.norm} over the box"
        super().__init__(claim, structure, tensors)

    def bounds(self) -> Sequence[float]:
        bounds: tuple[float, ...] | None = field(self.claim.data, "leaf_bounds", tuple[float, ...] | None)
        if bounds is None or len(bounds) != len(self.leaves):
            raise Refused(f"with the norm {self.claim.norm} every leaf needs a bound of its own")
        return bounds

    def prove(self, job: Job) -> float:
        """Above ∫|f − network|^p over the leaf."""
        (subject,), n = self.subjects, job[1]
        volume = math.prod((hi - lo for lo, hi in subject.sides(self.leaves[n].cell)), start=fmpq(1))
        found = subject.prove(self.leaves[n], subject.bounds[n], LOOSE).upper()
        power = arb(volume) * found**self.p if found > 0 else arb(0)
        return math.nextafter(float(power.upper()), math.inf)

    def conclude(self, found: Iterable[float]) -> float:
        norm = sum(map(arb, found), arb(0)) ** (1 / self.p)
        if not norm <= self.claim.bound:
            raise Refused(f"the leaves add up to the norm {float(norm):.9g}, the bound is {self.claim.bound:.9g}")
        return float(norm)
