"""The error that a stage itself adds to carrier·g(t), by the place of t and the size of the carrier there.

Leaves prove that in units of the carrier, |carrier| ≤ size, the stage is within δ of g, rounding included. With a
smaller carrier the values v_k = ν_k·carrier are smaller. For given weights the rounding of their sum is linear in the
sizes |v_k|, except for the parts of the sizes that do not depend on the carrier. Rounding of these parts is at most
their own size: `fixed`. The carrier is w·u for an input u, and leaves measure rounding at the largest |u|, its reach.
If size > |w|·reach, that is too little by the factor growth = size/(|w|·reach). So the stage is off by
min(size·δ, growth·|carrier|·δ + fixed) + unsure, δ the largest bound of the leaves that hold t.
"""

from __future__ import annotations

import bisect

from flint import arb

from attnc_checker.deep.claims import StageClaim
from attnc_checker.program import exact
from attnc_checker.ranges import Range


class Deviations:
    def __init__(self, claim: StageClaim, size: arb, growth: arb, fixed: arb, unsure: arb) -> None:
        self.size, self.growth, self.fixed, self.unsure = size, growth.max(arb(1)), fixed, unsure
        low, high = map(exact, claim.interval)
        leaves = [(*leaf.cell, bound) for leaf, bound in zip(claim.leaves, claim.leaf_bounds, strict=True) if leaf.cell]
        starts = sorted((low + (high - low) * index[0] / 2**level, level, bound) for level, index, bound in leaves)
        self.lows = [arb(start).lower() for start, _, _ in starts]
        self.highs = [arb(start + (high - low) / 2**level).upper() for start, level, _ in starts]
        self.bounds = [bound for _, _, bound in starts] or [claim.bound]

    def over(self, t: Range, off: arb, carrier: arb) -> arb:
        """Return the error for all t of a range and up to `off` beyond it. If that is nan, all leaves count."""
        delta = self.largest(t, off)
        return (self.size * delta).min(self.growth * carrier * delta + self.fixed) + self.unsure

    def largest(self, t: Range, off: arb) -> arb:
        """Return the largest δ of the leaves that meet the range."""
        first = bisect.bisect_left(self.highs, (t[0] - off).lower())
        last = bisect.bisect_right(self.lows, (t[1] + off).upper())
        return arb(max(self.bounds[first:last], default=max(self.bounds)))
