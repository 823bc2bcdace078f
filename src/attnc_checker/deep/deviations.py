"""The error that a stage itself adds to carrier·g(t), by the place of t and the size of the carrier there.

Leaves prove that in units of the carrier, |carrier| ≤ size, the stage is within δ of g, rounding included. With a
smaller carrier the values v_k = ν_k·carrier are smaller. For given weights the rounding of their sum is linear in the
sizes |v_k|, except for the parts of the sizes that do not depend on the carrier. These parts φ cancel, so weights do
not matter: a value rounds by γ_n φ, a sum over keys by γ_n φ more than that, 3 γ_n φ in all: `fixed`. Without a carrier
there are none. The carrier is w·u for an input u, and leaves measure rounding at the largest |u|, its reach.
If size > |w|·reach, that is too little by the factor growth = size/(|w|·reach). So the stage is off by
min(size·δ, growth·|carrier|·δ + fixed) + unsure, δ the largest bound of the leaves that hold t.

A leaf may state a middle m: the stage less g is within r = δ − |m| of it, in units of the carrier, rounding included.
So with a smaller carrier the stage is within fixed + unsure of carrier·(g + [m − growth·r, m + growth·r]).
"""

from __future__ import annotations

import bisect
import math

from flint import arb

from attnc_checker.deep.claims import StageClaim
from attnc_checker.program import exact
from attnc_checker.ranges import Range


class Deviations:
    def __init__(self, claim: StageClaim, size: arb, growth: arb, fixed: arb, unsure: arb) -> None:
        self.size, self.growth, self.fixed, self.unsure = size, growth.max(arb(1)), fixed, unsure
        low, high = map(exact, claim.interval)
        leaves = [(*leaf.cell, bound) for leaf, bound in zip(claim.leaves, claim.leaf_bounds, strict=True) if leaf.cell]
        middles = claim.leaf_middles or (0.0,) * len(leaves)
        starts = sorted(
            (low + (high - low) * index[0] / 2**level, level, bound, middle)
            for (level, index, bound), middle in zip(leaves, middles, strict=True)
        )
        self.lows = [arb(start).lower() for start, *_ in starts]
        self.highs = [arb(start + (high - low) / 2**level).upper() for start, level, *_ in starts]
        self.bounds = [bound for *_, bound, _ in starts] or [claim.bound]
        self.has_signs = bool(claim.leaf_middles)
        self.ends = [self._around(arb(m), arb(bound)) for *_, bound, m in starts] or [
            self._around(arb(0), arb(claim.bound))
        ]

    def _around(self, middle: arb, bound: arb) -> tuple[float, float]:
        """Return the ends of the stage less g on a leaf, as floats."""
        radius = self.growth * (bound - abs(middle)).max(arb(0))
        return math.nextafter(float((middle - radius).lower()), -math.inf), math.nextafter(
            float((middle + radius).upper()), math.inf
        )

    def over(self, t: Range, off: arb, carrier: arb) -> arb:
        """Return the error for all t of a range and up to `off` beyond it. If that is nan, all leaves count."""
        delta = self.largest(t, off)
        return (self.size * delta).min(self.growth * carrier * delta + self.fixed) + self.unsure

    def largest(self, t: Range, off: arb) -> arb:
        """Return the largest δ of the leaves that meet the range."""
        return arb(max(self.bounds[self._met(t, off)], default=max(self.bounds)))

    def between(self, t: Range, off: arb) -> Range:
        """Return the ends of the stage less g, in units of the carrier, on the leaves that meet the range."""
        lows, highs = zip(*(self.ends[self._met(t, off)] or self.ends), strict=True)
        return arb(min(lows)), arb(max(highs))

    def _met(self, t: Range, off: arb) -> slice:
        first = bisect.bisect_left(self.highs, (t[0] - off).lower())
        return slice(first, bisect.bisect_right(self.lows, (t[1] + off).upper()))
