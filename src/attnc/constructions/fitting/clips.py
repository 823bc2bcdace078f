"""The layer that the first paper is built on: one attention head truncates many numbers at once.

Tokens carry a number y, a constant 1, an anchor L and L². Query (y, 1), key β(2L, −L²), value L: the weights are
∝ exp(−β(y − L)²), and the head returns clip(y) to the range of the anchors, in units of their spacing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from attnc.constructions.fitting.selection import mean_distance, mean_error, round_up, score_error, underflow
from attnc.errors import InputError
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Attention, Head
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma

BEST_BETA = 2.72
"""The β, in units of the spacing, with the smallest error: 0.062 of a spacing, where hard selection has 0.5."""


@dataclass(frozen=True)
class ClipLayer:
    """clip(y, −radius, radius), radius = (num_anchors − 1)/2, for every token that carries y, on all of R."""

    num_anchors: int
    beta: float = BEST_BETA
    dtype: str = "float64"

    channels = ("y", "one", "anchor", "anchor.square")
    output = "clip"
    num_heads = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise InputError(f"beta must be a finite number > 0, found {self.beta}")

    @property
    def radius(self) -> float:
        return (self.num_anchors - 1) / 2

    @property
    def num_keys(self) -> int:
        """Tokens that must exist to carry the anchors."""
        return self.num_anchors

    def place(self, builder: AffineBuilder, queries: Any) -> None:
        """Anchors into the first tokens, a one beside every number."""
        L = np.arange(self.num_anchors) - self.radius
        builder.set(np.arange(self.num_anchors), "anchor", L)
        builder.set(np.arange(self.num_anchors), "anchor.square", L * L)
        builder.set(queries, "one", 1.0)

    def attention(self, name: str, num_tokens: int) -> Attention:
        """Tokens beyond the anchors have key 0, a score of 0 like an anchor at 0: they may not exist."""
        assert num_tokens == self.num_keys
        scores = ("linear", "square")
        W_Q = projection(self.channels, scores, {("y", "linear"): 1.0, ("one", "square"): 1.0}, self.dtype)
        keys = {("anchor", "linear"): 2 * self.beta, ("anchor.square", "square"): -self.beta}
        W_K = projection(self.channels, scores, keys, self.dtype)
        W_V = projection(self.channels, (self.output,), {("anchor", self.output): 1.0}, self.dtype)
        return Attention(name, (Head(W_Q, W_K, W_V, np.ones((1, 1), self.dtype)),), (self.output,))

    @cached_property
    def error(self) -> float:
        """|out − clip(y)| for the y that the head computes with, in units of the spacing, before rounding of sums.

        Scores are taken at |y| ≤ radius + ½: a y farther beyond an end puts every other anchor further behind, by
        2r per step, which outweighs the rounding of a larger score (relative γ·radius < ½).
        """
        u = UNIT_ROUNDOFF[self.dtype]
        require_fine(self.radius, u)
        size = self.beta * (2 * self.radius * (self.radius + 0.5) + self.radius**2)
        return mean_error(self.beta, self.num_anchors, score_error(2, size, u))

    def leak(self, query_error: float) -> float:
        """One head has no other to disagree with; an error of y passes through clip once, and is counted there."""
        return 0.0

    @cached_property
    def rounding(self) -> float:
        """Rounding of the sums over keys, relative to the largest value, in units of the spacing."""
        sums = gamma(2 * self.num_anchors + 16, UNIT_ROUNDOFF[self.dtype]) * self.radius
        return round_up(sums + underflow(self.num_anchors, self.dtype))


def require_fine(radius: float, u: float) -> None:
    """γ·radius < ½: see `ClipLayer.error`."""
    if gamma(8, u) * radius >= 0.5:
        raise InputError(f"{2 * radius + 1:,.0f} anchors are more than this arithmetic (unit {u:.1g}) tells apart")


@dataclass(frozen=True)
class HeadedClipLayer:
    """clip(y, −radius, radius), radius = (N−1)/2, by H heads of n keys with s sentinels per side (arXiv 2504.15956).

    The anchors 0 … N−1, N = (n−2s)·H, are dealt out in blocks of q = n−2s. Head h sees its block and s sentinels per
    side, which stand where the neighbours' anchors do. In coordinates centred on its block every head has the same keys
    l = −(n−1)/2 … (n−1)/2, so tokens carry l and l² once, and W_Q shifts y to the head. Sentinels have value 0: a head
    is silent where another one holds y, and at a seam two heads share the value as one softmax would. The outer
    sentinels of the first and last head carry the ends of the range.
    """

    num_tokens: int
    num_heads: int
    sentinels: int = 1
    given_beta: float | None = None
    dtype: str = "float64"

    channels: tuple[str, ...] = field(
        default=("y", "one", "anchor", "anchor.square", "own", "own.anchor", "first", "last"), init=False
    )
    output = "clip"

    def __post_init__(self) -> None:
        for name, value, least in (("num_heads", self.num_heads, 1), ("sentinels", self.sentinels, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number ≥ {least}, found {value!r}")
        if not isinstance(self.num_tokens, int) or self.num_tokens < 2 * self.sentinels + 1:
            raise InputError(
                f"num_tokens must be at least {2 * self.sentinels + 1}: {self.sentinels} sentinel(s) per side and one "
                f"anchor; found {self.num_tokens}"
            )
        if self.num_anchors < 2:
            raise InputError("one head of one anchor has no range: use more heads or more tokens")
        if self.given_beta is not None and not (math.isfinite(self.given_beta) and self.given_beta > 0):
            raise InputError(f"beta must be a finite number > 0, found {self.given_beta}")

    @property
    def per_head(self) -> int:
        return self.num_tokens - 2 * self.sentinels

    @property
    def num_anchors(self) -> int:
        return self.per_head * self.num_heads

    @property
    def num_keys(self) -> int:
        return self.num_tokens

    @property
    def radius(self) -> float:
        return (self.num_anchors - 1) / 2

    @property
    def beta(self) -> float:
        """The given one; or soft if that leaves the seams quiet; or just hard enough that the leak is 1e-4 spacings."""
        if self.given_beta is not None:
            return self.given_beta
        if self.num_heads == 1:
            return BEST_BETA
        quiet = math.log(1e4 * (2 * self.sentinels + 4) * self.num_anchors) / ((self.sentinels + 1) ** 2 // 2)
        return max(BEST_BETA, quiet)

    def place(self, builder: AffineBuilder, queries: Any) -> None:
        n, s = self.num_tokens, self.sentinels
        tokens, l = np.arange(n), np.arange(n) - (n - 1) / 2  # noqa: E741  (the proof's letter)
        own = tokens[s : n - s]
        builder.set(tokens, "anchor", l)
        builder.set(tokens, "anchor.square", l * l)
        builder.set(own, "own", 1.0)
        builder.set(own, "own.anchor", l[own])
        builder.set(tokens[:s], "first", 1.0)
        builder.set(tokens[n - s :], "last", 1.0)
        builder.set(queries, "one", 1.0)

    def attention(self, name: str, num_tokens: int) -> Attention:
        assert num_tokens == self.num_keys
        return Attention(name, tuple(self._head(h) for h in range(self.num_heads)), (self.output,))

    def _head(self, h: int) -> Head:
        centre = h * self.per_head + (self.per_head - 1) / 2 - self.radius
        scores = ("linear", "square")
        queries = {("y", "linear"): 1.0, ("one", "linear"): -centre, ("one", "square"): 1.0}
        keys = {("anchor", "linear"): 2 * self.beta, ("anchor.square", "square"): -self.beta}
        values = {("own.anchor", self.output): 1.0, ("own", self.output): centre}
        if h == 0:
            values["first", self.output] = -self.radius
        if h == self.num_heads - 1:
            values["last", self.output] = self.radius
        return Head(
            projection(self.channels, scores, queries, self.dtype),
            projection(self.channels, scores, keys, self.dtype),
            projection(self.channels, (self.output,), values, self.dtype),
            np.ones((1, 1), self.dtype),
        )

    @cached_property
    def _delta(self) -> float:
        """Score error of one head, in its own coordinates."""
        local = (self.num_tokens - 1) / 2
        require_fine(self.radius, UNIT_ROUNDOFF[self.dtype])
        size = self.beta * (2 * local * (local + 1) + local**2)
        return score_error(2, size, UNIT_ROUNDOFF[self.dtype])

    @cached_property
    def error(self) -> float:
        """As for one softmax over all N anchors and the outer sentinels, which carry the ends of the range.

        An outer sentinel stands beyond its end but has the end's value: for |y| ≤ radius that is nearer to y than the
        sentinel's own place, beyond it the value is the end itself.
        """
        return mean_error(self.beta, self.num_anchors + 2 * self.sentinels, self._delta) + self._ends

    @cached_property
    def _ends(self) -> float:
        """The change from placing the outer sentinels at the ends: Σ of their weights × their distance."""
        n = np.arange(1, min(self.num_anchors, 2 + int(math.sqrt(750 / self.beta))) + 1, dtype=np.float64)
        return round_up(float((n * np.exp(2 * self._delta - self.beta * n * n)).sum()))

    def leak(self, query_error: float) -> float:
        """Residual output of inactive heads, and of two heads that disagree about a seam.

        S (see `silence`) and 2(e^{2δ} − 1) of the largest value. And each head rounds y − its centre by itself: its
        output has slope 2β·Cov(l, value) ≤ 2β·κ·radius. No more than 2s + 3 heads have y in or beside their window; of
        the others, the j-th has own weight e^{−2βsj} and a slope of n times that, so all of them n/(e^{2βs} − 1).
        """
        if self.num_heads == 1:
            return 0.0
        s, beta, delta = self.sentinels, self.beta, self._delta
        if delta > 1:  # heads may disagree about anything
            return round_up(2.0 * (self.num_heads + 1) * self.radius)
        quiet = silence(beta, s, delta, self.num_heads) + 2 * math.expm1(2 * delta)
        speaking = min(self.num_heads, (2 * s + 3) * (1 + self.num_tokens / math.expm1(min(700.0, 2 * beta * s))))
        slope = 2 * beta * max(1.0, mean_distance(beta, self.num_tokens, delta))
        return round_up((quiet + query_error * speaking * slope) * self.radius)

    @cached_property
    def rounding(self) -> float:
        terms = 2 * self.num_tokens + self.num_heads + 16
        sums = (
            gamma(terms, UNIT_ROUNDOFF[self.dtype])
            * (1 + silence(self.beta, self.sentinels, self._delta, self.num_heads))
            * 2
            * self.radius
        )
        return round_up(sums + underflow(self.num_tokens * self.num_heads, self.dtype))


def silence(beta: float, s: int, delta: float, num_heads: int) -> float:
    """S ≥ Σ_h Σ_{g own to h} |w^h_g − w_g|, w^h the weights within head h's window, w those over all anchors.

    |w^h_g − w_g| = w^h_g·(weight outside the window) so the sum over g is (own_h/W_h)·(outside_h/W). Let t be the
    distance of y beyond the last own anchor of h, k the nearest whole number to it.
      t < ½:        own ≤ W_h, and the nearest key outside is s+1 steps on: e^{−βs(s+1)} per side.
      k = 1 … s:    own/W_h ≤ e^{−β(k² + 2kσ)}, outside/W ≤ e^{−β((s+1−k)² − 2(s+1−k)σ)} with |σ| ≤ ½: the exponents
                    add up to at least ⌊(s+1)²/2⌋; at most one head for each k and side.
      t > s + ½:    the last sentinel is nearer than any own anchor by t² − (t−s)² = s(2t − s) ≥ s(s+1), and by 2s
                    more for each head further on.
    Keys behind the first in each sum add a geometric series of ratio e^{−2β}; score errors cost e^{4δ}. And whatever
    β is, each head's own weights sum to at most 1, as do all w_g: S ≤ num_heads + 1.
    """
    with np.errstate(over="ignore"):
        series = 1 / (-math.expm1(-2 * beta)) ** 2
        near = math.exp(-beta * s * (s + 1))
        seam = s * math.exp(-beta * ((s + 1) ** 2 // 2))
        beyond = near / -math.expm1(-2 * beta * s)
    return min(num_heads + 1.0, round_up(2 * (near + seam + beyond) * series * math.exp(min(700.0, 4 * delta))))
