"""The layer on which arXiv 2504.15956 is built: one attention head truncates many numbers at once.

Tokens carry a number y, a constant 1, an anchor L and L². Query (y, 1), key β(2L, −L²), value L: the weights are
∝ exp(−β(y − L)²), and the head returns clip(y) to the range of the anchors, in units of their spacing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.constructions.fitting.selection import mean_distance, mean_error, round_up, score_error, underflow
from attnc.errors import InputError, positive_number
from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.layers import Attention, Head
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma

BEST_BETA = 2.72
"""The β, in units of the spacing, with the smallest error: 0.062 of a spacing, where hard selection has 0.5."""


@dataclass(frozen=True)
class ClipLayer:
    """clip(y, −radius, radius), radius = (N−1)/2, for every token that carries y, on all of R.

    One head without sentinels has a key for each of its N anchors. H heads of n keys have s sentinels per side
    (arXiv 2504.15956). The anchors 0 … N−1, N = (n−2s)·H, are divided into blocks of q = n−2s. Head h sees its block
    and s sentinels per side, at the places of the neighbours' anchors. In coordinates centred on its block every
    head has the same keys l = −(n−1)/2 … (n−1)/2, so tokens carry l and l² once, and W_Q shifts y to the head.
    Sentinels have value 0. So a head returns 0 where y is in another block, and at a seam between blocks two heads
    share the value as one softmax would. The outer sentinels of the first and last head carry the ends of the range.

    The tokens of the layer are exactly its n keys: any other token would be an anchor at 0. Errors are in spacings.
    """

    num_keys: int
    given_beta: float | None = None
    dtype: str = "float64"
    num_heads: int = 1
    sentinels: int = 0

    output = "clip"

    def __post_init__(self) -> None:
        if self.given_beta is not None:
            positive_number("beta", self.given_beta)

    @property
    def channels(self) -> tuple[str, ...]:
        shared = ("y", "one", "anchor", "anchor.square")
        return (*shared, "own", "own.anchor", "first", "last") if self.sentinels else shared

    @property
    def per_head(self) -> int:
        return self.num_keys - 2 * self.sentinels

    @property
    def num_anchors(self) -> int:
        return self.per_head * self.num_heads

    @property
    def radius(self) -> float:
        return (self.num_anchors - 1) / 2

    @property
    def beta(self) -> float:
        """The given β. By default BEST_BETA; for several heads more, if only that makes the leak 1e-4 spacings."""
        if self.given_beta is not None:
            return self.given_beta
        if self.num_heads == 1:
            return BEST_BETA
        quiet = math.log(1e4 * (2 * self.sentinels + 4) * self.num_anchors) / ((self.sentinels + 1) ** 2 // 2)
        return max(BEST_BETA, quiet)

    def place(self, builder: AffineBuilder, queries: Any) -> None:
        """Put the anchors into the first tokens, and a one beside every number y."""
        n, s = self.num_keys, self.sentinels
        tokens, l = np.arange(n), np.arange(n) - (n - 1) / 2  # noqa: E741  (the proof's letter)
        builder.set(tokens, "anchor", l)
        builder.set(tokens, "anchor.square", l * l)
        if s:
            builder.set(tokens[s:-s], "own", 1.0)
            builder.set(tokens[s:-s], "own.anchor", l[s:-s])
            builder.set(tokens[:s], "first", 1.0)
            builder.set(tokens[-s:], "last", 1.0)
        builder.set(queries, "one", 1.0)

    def attention(self, name: str) -> Attention:
        return Attention(name, tuple(self._head(h) for h in range(self.num_heads)), (self.output,))

    def _head(self, h: int) -> Head:
        centre = h * self.per_head + (self.per_head - 1) / 2 - self.radius
        queries = {("y", "linear"): 1.0, ("one", "square"): 1.0}
        keys = {("anchor", "linear"): 2 * self.beta, ("anchor.square", "square"): -self.beta}
        values = {"anchor": 1.0}
        if self.sentinels:
            queries["one", "linear"] = -centre
            values = {"own.anchor": 1.0, "own": centre}
        if self.sentinels and h == 0:
            values["first"] = -self.radius
        if self.sentinels and h == self.num_heads - 1:
            values["last"] = self.radius
        read = {(channel, self.output): value for channel, value in values.items()}
        return Attending(self.channels, self.channels, self.dtype).head(queries, keys, read)

    @cached_property
    def _delta(self) -> float:
        """The score error of one head, in its own coordinates.

        For one head it holds at |y| ≤ radius + ½, for several up to one spacing beyond their keys. For a y farther
        beyond an end, every other anchor is further behind, by 2r per step. This outweighs the rounding of a larger
        score (relative γ·radius < ½).
        """
        u, local = UNIT_ROUNDOFF[self.dtype], (self.num_keys - 1) / 2
        if gamma(8, u) * self.radius >= 0.5:
            raise InputError(f"{self.num_anchors:,} anchors are more than this arithmetic (unit {u:.1g}) tells apart")
        beyond = 1.0 if self.sentinels else 0.5
        return score_error(2, self.beta * (2 * local * (local + beyond) + local**2), u)

    @cached_property
    def error(self) -> float:
        """A bound on |out − clip(y)| for the y that the heads compute with, before rounding of sums.

        It is the bound for one softmax over all N anchors and the outer sentinels, which carry the ends of the range.
        An outer sentinel is beyond its end but has the end's value. For |y| ≤ radius that value is nearer to y than the
        sentinel's own place; beyond, the value is the end itself. Moving them to the ends costs weight × distance.
        """
        found = mean_error(self.beta, self.num_anchors + 2 * self.sentinels, self._delta)
        if not self.sentinels:
            return found
        n = np.arange(1, min(self.num_anchors, 2 + int(math.sqrt(750 / self.beta))) + 1, dtype=np.float64)
        return found + round_up(float((n * np.exp(2 * self._delta - self.beta * n * n)).sum()))

    @cached_property
    def _silence(self) -> float:
        return silence(self.beta, self.sentinels, self._delta, self.num_heads)

    def leak(self, query_error: float) -> float:
        """Residual output of inactive heads, and of two heads that disagree about a seam.

        It is S (see `silence`) plus 2(e^{2δ} − 1), times the largest value. Also, each head rounds y − its centre by
        itself, and its output has slope 2β·Cov(l, value) ≤ 2β·κ·radius. At most 2s + 3 heads have y in or beside their
        window. The j-th of the others has own weight e^{−2βsj} and a slope of n times that: in all n/(e^{2βs} − 1).
        A single head has no other to disagree with. An error of y passes through clip once, and is counted there.
        """
        if self.num_heads == 1:
            return 0.0
        s, beta, delta = self.sentinels, self.beta, self._delta
        if delta > 1:  # no useful bound on the disagreement of heads
            return round_up(2.0 * (self.num_heads + 1) * self.radius)
        quiet = self._silence + 2 * math.expm1(2 * delta)
        speaking = min(self.num_heads, (2 * s + 3) * (1 + self.num_keys / math.expm1(min(700.0, 2 * beta * s))))
        slope = 2 * beta * max(1.0, mean_distance(beta, self.num_keys, delta))
        return round_up((quiet + query_error * speaking * slope) * self.radius)

    @cached_property
    def rounding(self) -> float:
        """A bound on the rounding of the sums over keys and heads."""
        terms, u = 2 * self.num_keys + 16, UNIT_ROUNDOFF[self.dtype]
        if self.sentinels:
            sums = gamma(terms + self.num_heads, u) * (1 + self._silence) * 2 * self.radius
        else:
            sums = gamma(terms, u) * self.radius
        return round_up(sums + underflow(self.num_keys * self.num_heads, self.dtype))


def silence(beta: float, s: int, delta: float, num_heads: int) -> float:
    """Return S ≥ Σ_h Σ_{g own to h} |w^h_g − w_g|, w^h the weights within head h's window, w those over all anchors.

    |w^h_g − w_g| = w^h_g·(weight outside the window), so the sum over g is (own_h/W_h)·(outside_h/W). Let t be the
    distance of y beyond the last own anchor of h, and k the nearest whole number to t.
      t < ½:        own ≤ W_h, and the nearest key outside is s+1 steps on: e^{−βs(s+1)} per side.
      k = 1 … s:    own/W_h ≤ e^{−β(k² + 2kσ)}, outside/W ≤ e^{−β((s+1−k)² − 2(s+1−k)σ)} with |σ| ≤ ½: the exponents
                    add up to at least ⌊(s+1)²/2⌋; at most one head for each k and side.
      t > s + ½:    the last sentinel is nearer than any own anchor by t² − (t−s)² = s(2t − s) ≥ s(s+1), and by 2s
                    more for each head further on.
    Keys behind the first in each sum add a geometric series of ratio e^{−2β}. Score errors cost a factor e^{4δ}. For
    every β each head's own weights sum to at most 1, and so do all w_g. Hence S ≤ num_heads + 1.
    """
    with quiet():
        series = 1 / (-math.expm1(-2 * beta)) ** 2
        near = math.exp(-beta * s * (s + 1))
        seam = s * math.exp(-beta * ((s + 1) ** 2 // 2))
        beyond = near / -math.expm1(-2 * beta * s)
    return min(num_heads + 1.0, round_up(2 * (near + seam + beyond) * series * math.exp(min(700.0, 4 * delta))))
