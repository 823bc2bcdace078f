"""The layer that the first paper is built on: one attention head truncates many numbers at once.

Tokens carry a number y, a constant 1, an anchor L and L². Query (y, 1), key β(2L, −L²), value L: the weights are
∝ exp(−β(y − L)²), and the head returns clip(y) to the range of the anchors, in units of their spacing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.constructions.partition.selection import mean_error, round_up, score_error, underflow
from attnc.errors import InputError
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Attention, Head
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma

BEST_BETA = 2.72
"""The β (in units of the spacing) with the smallest error: 0.062 of a spacing, where hard selection has 0.5."""


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
