"""How errors travel through the parts of an expression: with their signs, over many boxes at once.

Theorem.  Let a head compute û_j = F_j(û) + d_j where u_j = F_j(u) is exact, F_j = carrier·g(t), and |d_j| ≤ own_j. With
          t̂, Ĉ the argument and the carrier as computed, and g(t̂) − g(t) = G·(t̂ − t) for a slope G of g between them,
              û_j − u_j = d_j + Ĉ·G·(t̂ − t) + g(t)·(Ĉ − C),
          and t, C are affine in u: so û_j − u_j = Σ_s σ_js d_s, the sum over all heads s, with σ_jj = 1 and σ_js
          from those of earlier heads. Over a box each σ is in an interval, and |û_j − u_j| ≤ Σ_s |σ_js| own_s.
          Every σ_js is affine in each single G, so that the sum is convex in it, and largest at an end of its interval.

A head as a function of t, in units of the carrier, is within δ of g on cells of t: so |d_j| ≤ |Ĉ|·δ + what does not
scale with the carrier, δ the largest of those cells that t̂ can be in.

So of max(u, v) = u + relu(v − u), with the error (1 − G)·d_u + G·d_v, the larger one counts, not both, as they would
with 1 − G and G in [0, 1] each for itself: the few slopes that cost most are taken at both ends. And errors that reach
an output along several ways cancel where they do. Where G may be infinite (√t at 0), |g(t̂) − g(t)| is at most the width
of the range of g there, and is counted to own_j instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import down, up
from attnc.targets.expressions.tree import Node
from attnc.targets.parts.part import Part, function_of_t
from attnc.targets.parts.part_ranges import PartRanges

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

PIECES, NEAR_ENDS = 128, 24
JUMPS = 1.25
"""By which jumps are taken larger: near a singularity the slopes that a checker finds are not quite the same."""
KINKS, WIDE, WORTH = 3, 0.25, 0.01
"""So many slopes are taken at both ends, if their interval is as wide as this part of the largest one, and may cost so
much of the error."""
Terms = Sequence[tuple[Part, float]]
"""Σ weight·part."""
Factors = tuple[Interval, Interval | None, Interval]
"""Of a head on every box: G, Ĉ, g(t)."""


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
class Deviations:
    """A head is within |carrier|·δ + fixed of carrier·g(t) for t in a cell, where |carrier| ≤ size; and within size·δ.

    `unsure` is added in any case.
    """

    edges: Interval  # of the cells
    deltas: Float[np.ndarray, " cells"]
    size: float
    fixed: float
    unsure: float

    def over(self, t: Interval, error: float, carrier: Float[np.ndarray, " boxes"] | float) -> np.ndarray:
        """For t̂ within an error of each of these intervals, and carriers that are as large."""
        met = (self.edges.lo <= up(t.hi + error)[:, None]) & (self.edges.hi >= down(t.lo - error)[:, None])
        delta = np.where(met, self.deltas, 0.0).max(axis=1)
        scaled = up(products(delta, np.minimum(carrier, self.size)) + self.fixed)
        return np.asarray(up(np.minimum(scaled, products(delta, self.size)) + self.unsure))


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
    """A head: carrier·g(argument), computed to within `own` wherever the argument may be; or to `deviations`."""

    part: Part
    argument: Affine
    slopes: Slopes  # of g
    carrier: Affine | None
    own: float
    rounding: float = 0.0  # the part of `own` that is
    deviations: Deviations | None = None


class ErrorFlow:
    """What every head adds on every box, and as what it arrives in later ones."""

    def __init__(self, ranges: PartRanges, links: Sequence[Link]) -> None:
        ranges.find([affine.part for link in links for affine in (link.argument, link.carrier) if affine])
        self.own, self.rounding = np.zeros((2, len(ranges.boxes), len(links)))
        self._links, self._factors = links, list[Factors]()
        for number, link in enumerate(links):
            t = ranges.over(link.argument.part)
            G, jump, g = link.slopes.over(t)
            own, C = up(products(G.mag, link.argument.slack) + jump), None
            rounding = products(G.mag, link.argument.rounding)
            if link.carrier is not None:
                off = link.carrier.error
                C = ranges.over(link.carrier.part) + Interval(np.asarray(-off), np.asarray(off))
                own = up(products(C.mag, own) + products(g.mag, link.carrier.slack))
                rounding = products(C.mag, rounding) + products(g.mag, link.carrier.rounding)
            added = np.full(len(t), link.own)
            if link.deviations is not None:
                size = 1.0 if C is None else C.mag
                added = np.minimum(added, link.deviations.over(t, link.argument.error, size))
            self.own[:, number] = up(own + added)
            self.rounding[:, number] = rounding + np.minimum(link.rounding, added)
            self._factors.append((G, C, g))
        self._forms = _forms(links, self._factors)

    def combined(self, heads: Terms) -> Interval:
        """(boxes, heads): the σ of a combination."""
        return _combined(heads, self._forms, self.own.shape)

    def sizes(self, outputs: Sequence[Terms]) -> Float[np.ndarray, "ends outputs boxes heads"]:
        """|σ| of these combinations with some slopes at their ends: |error| ≤ Σ_s |σ_s| own_s for one of these."""
        whole = np.stack([self.combined(heads).mag for heads in outputs])
        kinks = self._kinks(whole.max(axis=0), _bypassed(self._links, outputs))
        boxes = np.flatnonzero(kinks.any(axis=(0, 1)))
        if not len(boxes):
            return whole[None]
        ends = list(itertools.product((False, True), repeat=len(kinks)))
        at = np.tile(boxes, len(ends))
        factors: list[Factors] = []
        for number, (G, C, g) in enumerate(self._factors):
            lo, hi = np.tile(G.lo[boxes], (len(ends), 1)), np.tile(G.hi[boxes], (len(ends), 1))
            for is_kink, at_high in zip(kinks[:, number, boxes], np.array(ends).T, strict=True):
                lo = np.where(is_kink & at_high[:, None], G.hi[boxes], lo)
                hi = np.where(is_kink & ~at_high[:, None], G.lo[boxes], hi)
            factors.append((Interval(lo.ravel(), hi.ravel()), None if C is None else C[at], g[at]))
        forms, found = _forms(self._links, factors), np.tile(whole, (len(ends), 1, 1, 1))
        for number, heads in enumerate(outputs):
            sizes = _combined(heads, forms, (len(at), len(factors))).mag
            found[:, number, boxes] = sizes.reshape(len(ends), len(boxes), -1)
        return found

    def _kinks(
        self, sizes: Float[np.ndarray, "boxes heads"], numbers: Sequence[int]
    ) -> Bool[np.ndarray, "kinks heads boxes"]:
        """For each box those of these heads whose slopes are to be at an end: whose widths cost most.

        `sizes` are how far their errors move the worst output.
        """
        costs = np.zeros(sizes.T.shape)
        least = WORTH * products(sizes, self.own).sum(axis=1)
        for number in numbers:
            link, (G, C, _) = self._links[number], self._factors[number]
            is_wide = G.is_bounded & (G.width > WIDE * G.mag)
            if is_wide.any():
                arrives = products(self.combined(link.argument.heads).mag, self.own).sum(axis=1)
                cost = products(sizes[:, number], products(G.width, arrives))
                cost = cost if C is None else products(cost, C.mag)
                costs[number] = np.where(is_wide & (cost > least), cost, 0.0)
        first = np.argsort(-costs, axis=0, kind="stable")[: min(KINKS, int((costs > 0).sum(axis=0).max(initial=0)))]
        return (np.arange(len(costs))[:, None] == first[:, None]) & (costs > 0)


def _bypassed(links: Sequence[Link], outputs: Sequence[Terms]) -> list[int]:
    """The heads whose arguments have an error that reaches an output along another way as well: others gain nothing."""
    numbers = {id(link.part): number for number, link in enumerate(links)}
    ends = {numbers[id(part)] for heads in outputs for part, _ in heads}
    by_argument = [{numbers[id(part)] for part, _ in link.argument.heads} for link in links]
    by_carrier = [{numbers[id(part)] for part, _ in link.carrier.heads} if link.carrier else set() for link in links]

    def reached(found: set[int], without: int | None = None) -> set[int]:
        """All heads whose errors reach these, but for the argument of one."""
        found = set(found)
        for number in reversed(range(len(links))):
            if number in found:
                found |= by_carrier[number] | (by_argument[number] if number != without else set())
        return found

    return [number for number, heads in enumerate(by_argument) if reached(heads) & reached(ends, number)]


def _forms(links: Sequence[Link], factors: Sequence[Factors]) -> dict[int, Interval]:
    """The σ_js of every head j."""
    forms: dict[int, Interval] = {}
    for number, (link, (G, C, g)) in enumerate(zip(links, factors, strict=True)):
        shape = len(G), len(links)
        form = _combined(link.argument.heads, forms, shape) * G[:, None]
        if link.carrier is not None and C is not None:
            form = form * C[:, None] + _combined(link.carrier.heads, forms, shape) * g[:, None]
        sigma = np.stack([form.lo, form.hi])
        sigma[:, :, number] = 1.0
        forms[id(link.part)] = Interval(*sigma)
    return forms


def _combined(heads: Terms, forms: dict[int, Interval], shape: tuple[int, ...]) -> Interval:
    total = Interval.point(np.zeros(shape))
    for part, weight in heads:
        total = total + forms[id(part)] * weight
    return total


def products(sizes: np.ndarray, errors: np.ndarray | float) -> np.ndarray:
    """What is not moved costs nothing: 0·∞ = 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where((sizes == 0) | (np.asarray(errors) == 0), 0.0, up(sizes * errors))


def _column(t: Interval) -> Interval:
    return Interval(t.lo[:, None], t.hi[:, None])
