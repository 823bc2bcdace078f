"""How errors travel through the parts of an expression: with their signs, over many boxes at once.

Theorem.  Let a head compute û_j = F_j(û) + d_j where u_j = F_j(u) is exact, F_j = carrier·g(t), and |d_j| ≤ own_j. With
          t̂, Ĉ the argument and the carrier as computed, and g(t̂) − g(t) = G·(t̂ − t) for a slope G of g between them,
              û_j − u_j = d_j + Ĉ·G·(t̂ − t) + g(t)·(Ĉ − C),
          and t, C are affine in u: so û_j − u_j = Σ_s σ_js d_s, the sum over all heads s, with σ_jj = 1 and σ_js
          from those of earlier heads. Over a box each σ is in an interval, and |û_j − u_j| ≤ Σ_s |σ_js| own_s.

So errors that reach an output along several ways cancel where they do. Where G may be infinite (√t at 0), |g(t̂) − g(t)|
is at most the width of the range of g there, and is counted to own_j instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import down, up
from attnc.targets.part_ranges import PartRanges
from attnc.targets.parts import Part, function_of_t
from attnc.targets.tree import Node

if TYPE_CHECKING:
    from jaxtyping import Float

PIECES, NEAR_ENDS = 128, 24
JUMPS = 1.25
"""By which jumps are taken larger: near a singularity the slopes that a checker finds are not quite the same."""
Terms = Sequence[tuple[Part, float]]
"""Σ weight·part."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """g(t̂) − g(t) ∈ G·(t̂ − t) ± jump for t in a piece of an interval and |t̂ − t| ≤ error, t̂ held where g is."""

    edges: Float[np.ndarray, " edges"]
    G: Interval
    jumps: Float[np.ndarray, " pieces"]
    values: Interval  # of g at t and t̂
    change: float  # |g(t̂) − g(t)| at most

    @classmethod
    def of(cls, tree: Node, lo: float, hi: float, error: float, held: tuple[float, float] | None = None) -> Slopes:
        """By slopes, or by ranges where these are steep: pieces are geometric towards the ends, where √t may begin."""
        width = hi - lo
        steps = width * np.arange(PIECES + 1) / PIECES
        if 0 < error < width:
            steps = np.concatenate([steps, width * (error / width) ** (np.arange(1, NEAR_ENDS + 1) / NEAR_ENDS)])
        edges = np.unique(np.clip(np.concatenate([[lo, hi], lo + steps, hi - steps]), lo, hi))
        edges = np.concatenate([edges, [hi]]) if len(edges) == 1 else edges
        t = Interval(edges[:-1], edges[1:])
        near, off = Interval(down(t.lo - error), up(t.hi + error)), np.full(len(t), error)
        if held is not None:
            # clip(t̂) − t = σ(t̂ − t) + (clip(t) − t), σ ∈ [0, 1].
            first, last = held
            at_lo, at_hi = (np.minimum(np.maximum(end, first), last) for end in (near.lo, near.hi))
            near = Interval(np.minimum(t.lo, at_lo), np.maximum(t.hi, at_hi))
            off = up(error + np.maximum(np.maximum(up(first - t.lo), up(t.hi - last)), 0.0))
        function = function_of_t(tree)
        ranges, gradients = function.ranges_and_gradients(_column(near), violations="infinite")
        G, values = gradients[:, 0, 0], ranges[:, 0]
        by_range = values.width
        with np.errstate(invalid="ignore", over="ignore"):
            by_slope = np.where(off == 0, 0.0, up(G.mag * off))
            is_steep = ~np.isfinite(by_slope)
            is_steep |= by_range <= np.where(is_steep, by_range, 0.0).max()  # which costs nothing more
            change = np.where(is_steep, JUMPS * by_range, np.minimum(by_slope, by_range))
            jumps = np.where(is_steep, change, products(G.mag, np.maximum(up(off - error), 0.0) * (off > error)))
        if held is not None and (held[0] > lo - error or held[1] < hi + error):
            G = G.hull(Interval.point(np.zeros(len(t))))
        G = Interval(*(np.where(is_steep | (off == 0), 0.0, ends) for ends in (G.lo, G.hi)))  # exact: t̂ = t
        return cls(edges, G, jumps, values, float(change.max()))

    def over(self, t: Interval) -> tuple[Interval, Float[np.ndarray, " boxes"], Interval]:
        """G, jump and the values of g for t in each of these intervals."""
        met = (self.edges[:-1] <= t.hi[:, None]) & (self.edges[1:] >= t.lo[:, None])
        G, values = (
            Interval(
                np.where(met, of.lo, math.inf).min(axis=1, initial=math.inf),
                np.where(met, of.hi, -math.inf).max(axis=1, initial=-math.inf),
            )
            for of in (self.G, self.values)
        )
        return G, np.where(met, self.jumps, 0.0).max(axis=1), values


@dataclass(frozen=True, eq=False)
class Affine:
    """A part as a combination of inputs, heads and a constant.

    With these weights of heads it is off by `slack` at exact values of them, `rounding` of that being the inputs'; and
    by `error` as computed, whatever the signs of errors.
    """

    part: Part
    heads: Terms
    slack: float = 0.0
    error: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True, eq=False)
class Link:
    """A head: carrier·g(argument), computed to within `own` wherever the argument may be."""

    part: Part
    argument: Affine
    slopes: Slopes  # of g
    carrier: Affine | None
    own: float
    rounding: float = 0.0  # the part of `own` that is


class ErrorFlow:
    """What every head adds on every box, and as what it arrives in later ones."""

    def __init__(self, ranges: PartRanges, links: Sequence[Link]) -> None:
        ranges.find([affine.part for link in links for affine in (link.argument, link.carrier) if affine])
        self.own, self.rounding = np.zeros((2, len(ranges.boxes), len(links)))
        self._forms: dict[int, Interval] = {}
        for number, link in enumerate(links):
            G, jump, g = link.slopes.over(ranges.over(link.argument.part))
            form = self.combined(link.argument.heads) * G[:, None]
            own = up(products(G.mag, link.argument.slack) + jump)
            rounding = products(G.mag, link.argument.rounding)
            if link.carrier is not None:
                off = link.carrier.error
                C = ranges.over(link.carrier.part) + Interval(np.asarray(-off), np.asarray(off))
                form = form * C[:, None] + self.combined(link.carrier.heads) * g[:, None]
                own = up(products(C.mag, own) + products(g.mag, link.carrier.slack))
                rounding = products(C.mag, rounding) + products(g.mag, link.carrier.rounding)
            self.own[:, number], self.rounding[:, number] = up(own + link.own), rounding + link.rounding
            sigma = np.stack([form.lo, form.hi])
            sigma[:, :, number] = 1.0
            self._forms[id(link.part)] = Interval(*sigma)

    def combined(self, heads: Terms) -> Interval:
        """(boxes, heads): the σ of a combination."""
        total = Interval.point(np.zeros(self.own.shape))
        for part, weight in heads:
            total = total + self._forms[id(part)] * weight
        return total


def products(sizes: np.ndarray, errors: np.ndarray | float) -> np.ndarray:
    """What is not moved costs nothing: 0·∞ = 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where((sizes == 0) | (np.asarray(errors) == 0), 0.0, up(sizes * errors))


def _column(t: Interval) -> Interval:
    return Interval(t.lo[:, None], t.hi[:, None])
