"""How errors travel through the parts of an expression: with their signs, over many boxes at once.

Theorem.  Let a head compute û_j = F_j(û) + d_j where u_j = F_j(u) is exact, F_j = carrier·g(t), and |d_j| ≤ own_j. With
          t̂, Ĉ the argument and the carrier as computed, and g(t̂) − g(t) = G·(t̂ − t) for a slope G of g between them,
              û_j − u_j = d_j + Ĉ·G·(t̂ − t) + g(t)·(Ĉ − C),
          and t, C are affine in u: so û_j − u_j = Σ_s σ_js d_s, the sum over all heads s, with σ_jj = 1 and σ_js
          from those of earlier heads. Over a box each σ is in an interval, and |û_j − u_j| ≤ Σ_s |σ_js| own_s.

So errors that reach a part along several ways cancel where they do. Where G may be infinite (√t at 0), |g(t̂) − g(t)| is
at most the width of the range of g there, and is counted to own_j instead.
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
Terms = Sequence[tuple[Part, float]]
"""Σ weight·part."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """g(t̂) − g(t) ∈ G·(t̂ − t) ± jump for t in a piece of an interval and |t̂ − t| ≤ error, t̂ held where g is."""

    edges: Float[np.ndarray, " edges"]
    G: Interval
    jumps: Float[np.ndarray, " pieces"]
    values: Interval  # of g on each piece
    change: float  # |g(t̂) − g(t)| at most

    @classmethod
    def of(cls, tree: Node, lo: float, hi: float, error: float, held: tuple[float, float] | None = None) -> Slopes:
        """By slopes, or by ranges where these are steep: pieces are geometric towards the ends, where √t may begin."""
        width = max(hi - lo, error)
        steps = np.geomspace(max(error, 1e-9 * width), width, NEAR_ENDS) if width > 0 else np.zeros(1)
        edges = np.concatenate([[lo, hi], lo + steps, hi - steps, np.linspace(lo, hi, PIECES + 1)])
        edges = np.unique(np.clip(edges, lo, hi))
        edges = np.concatenate([edges, [hi]]) if len(edges) == 1 else edges
        t = Interval(edges[:-1], edges[1:])
        near, off = Interval(down(t.lo - error), up(t.hi + error)), np.full(len(t), error)
        if held is not None:
            # clip(t̂) − t = σ(t̂ − t) + (clip(t) − t), σ ∈ [0, 1].
            first, last = held
            near = Interval(np.minimum(t.lo, np.maximum(near.lo, first)), np.maximum(t.hi, np.minimum(near.hi, last)))
            off = up(error + np.maximum(np.maximum(up(first - t.lo), up(t.hi - last)), 0.0))
        function = function_of_t(tree)
        values = function.ranges(_column(t), violations="infinite")[:, 0]
        ranges, gradients = function.ranges_and_gradients(_column(near), violations="infinite")
        G, width_of_range = gradients[:, 0, 0], ranges[:, 0].width
        with np.errstate(invalid="ignore", over="ignore"):
            by_slope = np.where(off == 0, 0.0, up(G.mag * off))
            is_steep = ~(by_slope <= width_of_range)
            jumps = np.where(is_steep, width_of_range, up(np.where(off > error, G.mag * (off - error), 0.0), 2))
        if held is not None:
            G = G.hull(Interval.point(np.zeros(len(t))))
        G = Interval(np.where(is_steep, 0.0, G.lo), np.where(is_steep, 0.0, G.hi))
        return cls(edges, G, jumps, values, float(np.where(is_steep, width_of_range, by_slope).max()))

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
    """A part as a combination of others, and a constant; with these weights it is off by `slack` at most."""

    part: Part
    terms: Terms
    slack: float = 0.0


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
    """The errors of parts on every box. Sources are the inputs that are not exact, and the heads as they are added."""

    def __init__(self, ranges: PartRanges, inputs: Sequence[tuple[Part, float]], num_heads: int) -> None:
        self.ranges, self._count = ranges, 0
        self.own = np.zeros((len(ranges.boxes), sum(own > 0 for _, own in inputs) + num_heads))
        exact = Interval.point(np.zeros(self.own.shape))
        self._forms = {id(part): exact for part, _ in inputs}
        for part, own in inputs:
            if own > 0:
                self._add(part, np.zeros((2, *self.own.shape)), np.full(len(ranges.boxes), own))

    def add(self, link: Link) -> None:
        """A head, of parts that are known."""
        G, jump, g = link.slopes.over(self.ranges.over(link.argument.part))
        passed = self.combined(link.argument.terms) * G[:, None]
        own = up(G.mag * link.argument.slack + jump, 2)
        if link.carrier is not None:
            carrier = self.combined(link.carrier.terms)
            off = up(self.error(carrier) + link.carrier.slack)
            C = self.ranges.over(link.carrier.part) + Interval(-off, off)
            passed = passed * C[:, None] + carrier * g[:, None]
            own = up(products(C.mag, own) + products(g.mag, link.carrier.slack))
        self._add(link.part, np.stack([passed.lo, passed.hi]), up(own + link.own))

    def _add(self, part: Part, sigma: Float[np.ndarray, "2 boxes sources"], own: Float[np.ndarray, " boxes"]) -> None:
        self.own[:, self._count], sigma[:, :, self._count] = own, 1.0
        self._count += 1
        self._forms[id(part)] = Interval(*sigma)

    def combined(self, terms: Terms) -> Interval:
        """(boxes, sources): the σ of a combination."""
        total = Interval.point(np.zeros(self.own.shape))
        for part, weight in terms:
            total = total + self._forms[id(part)] * weight
        return total

    def error(self, form: Interval) -> Float[np.ndarray, " boxes"]:
        """Σ_s |σ_s| own_s."""
        return up(products(form.mag, self.own).sum(axis=1), self.own.shape[1] + 1)


def products(sizes: np.ndarray, errors: np.ndarray | float) -> np.ndarray:
    """What is not moved costs nothing: 0·∞ = 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where((sizes == 0) | (np.asarray(errors) == 0), 0.0, up(sizes * errors))


def _column(t: Interval) -> Interval:
    return Interval(t.lo[:, None], t.hi[:, None])
