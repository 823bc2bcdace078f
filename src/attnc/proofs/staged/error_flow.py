"""The propagation of errors from the heads to the outputs: with their signs, over many boxes at once, stage by stage.

Theorem.  Let a head compute û_j = F_j(û) + d_j where u_j = F_j(u) is exact, F_j = carrier·g(t), and |d_j| ≤ own_j. With
          t̂, Ĉ the argument and the carrier as computed, and g(t̂) − g(t) = G·(t̂ − t) for a slope G of g between them,
              û_j − u_j = d_j + Ĉ·G·(t̂ − t) + g(t)·(Ĉ − C),
          and t, C are affine in u: so û_j − u_j = Σ_s σ_js d_s, the sum over all heads s, with σ_jj = 1 and σ_js
          from those of earlier heads. Over a box each σ is in an interval, and |û_j − u_j| ≤ Σ_s |σ_js| own_s.
          Every σ_js is affine in each single G, so that the sum is convex in it, and largest at an end of its interval.

A head as a function of t, in units of the carrier, is within δ of g on cells of t. So |d_j| ≤ |Ĉ|·δ + the part that
does not scale with the carrier, where δ is the largest bound of the cells that t̂ can be in.

For example, max(u, v) = u + relu(v − u) has the error (1 − G)·d_u + G·d_v. So only the larger of the two errors counts.
Both would count if 1 − G and G were in [0, 1] independently. Therefore the few slopes that cost most are taken at both
ends. Errors that reach an output along several paths may cancel. If G may be infinite (√t at 0), |g(t̂) − g(t)| is at
most the width of the range of g there, which is added to own_j instead.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.numerics.arrays import Bool, Float
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval, halved
from attnc.numerics.limits import is_time_over
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, down, gamma, up
from attnc.proofs.margins import DIVIDED_ROOM, MAX_AXES, WHOLE_ROOM
from attnc.targets.expressions.tree import Node
from attnc.targets.parts.part import function_of_t

U = UNIT_ROUNDOFF["float64"]
SLOPE_PIECES, PIECES_AT_ENDS = 128, 24
"""Pieces of the range of t on which slopes are enclosed if the box is divided. SLOPE_PIECES pieces have equal widths.
PIECES_AT_ENDS more lie at each end, with widths that shrink to the error of t, because √t is steep there. The checker
has twice as many of both, so that its slopes are no wider. Measured on 9 compositions: with 64 equal pieces one bound
is 2.6 % larger, with 32 it is 4 % larger."""
BENT_HEADS = 3
"""Heads per box whose slopes are taken at both ends: each doubles the work, and the checker takes 3."""
WIDE_SLOPES = 0.25
"""Slopes are taken at both ends if their interval is as wide as this share of its larger end."""
LEAST_COST = 0.01
"""Slopes are taken at both ends if their width may cost this share of the error."""
CLOSE_TO_POINTS = 1.1
"""Parts of the box are halved until the bound is within this factor of the bound at single points."""
FAR_FROM_POINTS = 1.5
"""A bound above this multiple of the bound at single points may take MANY_PARTS, however slowly it shrinks."""
FIRST_PARTS, MOST_PARTS, MANY_PARTS = 32, 256, 1024
"""Numbers of parts of the box: the least before progress is judged, the usual limit, and the limit of a bound that is
still far from single points. The time of the checker grows with them."""
SIGNED_LIMITS = 1024, 2048, 1.05
"""The usual limit, the limit of a bound that is far from single points, and the factor within which parts are close to
them, if errors have signs. Errors of opposite signs cancel on narrow parts alone. Measured on two bumps in the plane:
with 512 parts bounds of gradients are 8 % larger, with 4096 they are 1 % smaller."""
WORTH_DOUBLING = 0.97
"""Stop unless doubling the parts lowers the bound by 3 %."""
WORST_PARTS = 0.8
"""Parts whose error is at least this share of the largest are halved together."""
POLLED = 16
"""The number of worst parts polled for the split axis."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """g(t̂) − g(t) ∈ G·(t̂ − t) ± jump for t in a piece of an interval and |t̂ − t| ≤ error.

    Where g is constant beyond `held`, t̂ is clipped to `held`. There is one row for each head.
    """

    edges: Float[np.ndarray, "heads edges"]
    G: Interval
    jumps: Float[np.ndarray, "heads pieces"]
    values: Interval  # of g at t and t̂
    change: Float[np.ndarray, " heads"]  # the largest |g(t̂) − g(t)|

    @classmethod
    def of(
        cls,
        tree: Node,
        lo: Float[np.ndarray, " heads"] | float,
        hi: Float[np.ndarray, " heads"] | float,
        error: Float[np.ndarray, " heads"] | float,
        held: tuple[float, float] | None = None,
        num_pieces: int = SLOPE_PIECES,
        skipped: Sequence[tuple[float, float]] = (),
    ) -> Slopes:
        """Enclose g(t̂) − g(t) by slopes, or by ranges where slopes are infinite, on `num_pieces` pieces or more.

        t is never in the interior of the intervals `skipped`. There nothing is known.
        """
        lo, hi, error = (np.atleast_1d(np.asarray(x, np.float64))[:, None] for x in (lo, hi, error))
        edges = _edges(lo, hi, error, num_pieces)
        for inner in ((math.nextafter(a, b), math.nextafter(b, a)) for a, b in skipped):
            ends = np.clip(np.broadcast_to(inner, (len(edges), 2)), lo, hi)
            edges = np.sort(np.concatenate([edges, ends], axis=1), axis=1)
        t = Interval(edges[:, :-1], edges[:, 1:])
        near, off = Interval(down(t.lo - error), up(t.hi + error)), np.broadcast_to(error, t.shape)
        if held is not None:
            # clip(t̂) − t = σ(t̂ − t) + (clip(t) − t), σ ∈ [0, 1].
            first, last = held
            at_lo, at_hi = (np.minimum(np.maximum(end, first), last) for end in (near.lo, near.hi))
            near = Interval(np.minimum(t.lo, at_lo), np.maximum(t.hi, at_hi))
            off = up(error + np.maximum(np.maximum(up(first - t.lo), up(t.hi - last)), 0.0))
            off = np.where((t.lo >= first) & (t.hi <= last), error, off)
        function = function_of_t(tree)
        cells = Interval(near.lo.reshape(-1, 1), near.hi.reshape(-1, 1))
        ranges, gradients = function.ranges_and_gradients(cells, violations="infinite")
        G, values = (Interval(x.lo.reshape(t.shape), x.hi.reshape(t.shape)) for x in (gradients, ranges))
        by_range = values.width
        is_skipped = np.zeros(t.shape, dtype=bool)
        for a, b in skipped:
            is_skipped |= (t.lo > a) & (t.hi < b)
        by_range = np.where(is_skipped, 0.0, by_range)
        with quiet():
            by_slope = np.where((off == 0) | is_skipped, 0.0, up(G.mag * off))
            is_steep = ~np.isfinite(by_slope)
            is_steep |= by_range <= np.where(is_steep, by_range, 0.0).max(axis=1)[:, None]  # up to the largest jump
            change = np.where(is_steep, by_range, np.minimum(by_slope, by_range))
            jumps = np.where(is_steep, change, products(G.mag, np.maximum(up(off - error), 0.0) * (off > error)))
        if held is not None:
            is_cut = (held[0] > lo - error) | (held[1] < hi + error)
            G = Interval(np.where(is_cut, np.minimum(G.lo, 0.0), G.lo), np.where(is_cut, np.maximum(G.hi, 0.0), G.hi))
        G = Interval(*(np.where(is_steep | (off == 0), 0.0, ends) for ends in (G.lo, G.hi)))  # exact: t̂ = t
        jumps = np.where(is_skipped, math.inf, jumps)
        return cls(edges, G, jumps, values, change.max(axis=1))

    @classmethod
    def stacked(cls, parts: Sequence[Slopes]) -> Slopes:
        """Stack the heads of all parts. The last piece counts several times where there are fewer pieces."""
        most = max(part.edges.shape[1] for part in parts)

        def wide(rows: np.ndarray, count: int) -> np.ndarray:
            return np.pad(rows, ((0, 0), (0, count - rows.shape[1])), mode="edge")

        edges = np.concatenate([wide(part.edges, most) for part in parts])
        jumps = np.concatenate([wide(part.jumps, most - 1) for part in parts])
        G, values = (
            Interval(*(np.concatenate([wide(getattr(x, end), most - 1) for x in each]) for end in ("lo", "hi")))
            for each in ([part.G for part in parts], [part.values for part in parts])
        )
        return cls(edges, G, jumps, values, np.concatenate([part.change for part in parts]))

    def over(self, t: Interval) -> tuple[Interval, Float[np.ndarray, "boxes heads"], Interval]:
        """Return G, jump and the values of g for t in each of these intervals, (boxes, heads)."""
        met = (self.edges[:, :-1] <= t.hi[..., None]) & (self.edges[:, 1:] >= t.lo[..., None])
        G, values = (
            Interval(
                np.where(met, of.lo, math.inf).min(axis=2, initial=math.inf),
                np.where(met, of.hi, -math.inf).max(axis=2, initial=-math.inf),
            )
            for of in (self.G, self.values)
        )
        return G, np.where(met, self.jumps, 0.0).max(axis=2), values


def _edges(lo: np.ndarray, hi: np.ndarray, error: np.ndarray, num_pieces: int) -> Float[np.ndarray, "heads edges"]:
    """Return the edges of pieces: equally spaced ones, and geometric ones towards both ends. Some may coincide."""
    if num_pieces == 1:
        return np.concatenate([lo, hi], axis=1)
    width = hi - lo
    steps = width * np.arange(num_pieces + 1) / num_pieces
    shares = np.where((error > 0) & (error < width), error / np.where(width > 0, width, 1.0), 1.0)
    near = width * shares ** (np.arange(1, PIECES_AT_ENDS + 1) / PIECES_AT_ENDS)
    edges = np.concatenate([lo, lo + steps, lo + near, hi - near, hi], axis=1)
    return np.sort(np.clip(edges, lo, hi), axis=1)


@dataclass(frozen=True, eq=False)
class Deviations:
    """For t in a cell, |carrier| ≤ size: a head is within min(|carrier|·δ + fixed, size·δ) + unsure of carrier·g(t).

    With middles, it is within fixed + unsure of carrier·(g(t) + [m − r, m + r]), r = δ − |m|.
    """

    edges: Interval  # of the cells
    deltas: Float[np.ndarray, " cells"]
    size: float
    fixed: float
    unsure: float
    middles: Float[np.ndarray, " cells"] | None = None

    def over(self, t: Interval, error: float, carrier: Float[np.ndarray, " boxes"] | float) -> np.ndarray:
        """Bound the deviation for t̂ within `error` of each of these intervals, and for carriers of this size."""
        return self.of(self.largest(t, error), carrier)

    def of(self, delta: Float[np.ndarray, " boxes"], carrier: Float[np.ndarray, " boxes"] | float) -> np.ndarray:
        """Bound the deviation where the largest δ is `delta`."""
        scaled = up(products(delta, np.minimum(carrier, self.size)) + self.fixed)
        return np.asarray(up(np.minimum(scaled, products(delta, self.size)) + self.unsure))

    def largest(self, t: Interval, error: float) -> Float[np.ndarray, " boxes"]:
        """Return the largest δ of the cells that t̂ can be in."""
        return np.where(self._met(t, error), self.deltas, 0.0).max(axis=1)

    def ends(self, t: Interval, error: float) -> Interval:
        """Return the hull of [m − r, m + r] over the cells that t̂ can be in."""
        met, middles = self._met(t, error), np.zeros_like(self.deltas) if self.middles is None else self.middles
        radii = up(self.deltas - np.abs(middles))
        lo, hi = np.where(met, down(middles - radii), math.inf), np.where(met, up(middles + radii), -math.inf)
        return Interval(lo.min(axis=1), hi.max(axis=1))

    def _met(self, t: Interval, error: float) -> Bool[np.ndarray, "boxes cells"]:
        return (self.edges.lo <= up(t.hi + error)[:, None]) & (self.edges.hi >= down(t.lo - error)[:, None])


def has_middles(deviations: Sequence[Deviations]) -> bool:
    """Whether the signs of some of these errors are known."""
    return any(each.middles is not None for each in deviations)


@dataclass(frozen=True, eq=False)
class Readings:
    """Affine combinations of earlier heads, one per row, and their errors.

    At exact values of the heads a row is off by `slack`, of which `casts` is the rounding of inputs. As computed it is
    off by `error`, for any signs of the errors of the heads.
    """

    weights: Float[np.ndarray, "rows heads"]
    slack: Float[np.ndarray, " rows"]
    casts: Float[np.ndarray, " rows"]
    error: Float[np.ndarray, " rows"]


@dataclass(frozen=True, eq=False)
class FlowStage:
    """The heads of one stage: carrier·g(argument), computed to within `own`, or to within `deviations` at a given t.

    A head without a carrier has a row of zeros in `carriers`. It is None if no head has a carrier.
    """

    arguments: Readings
    slopes: Slopes  # of the g
    own: Float[np.ndarray, " heads"]
    rounding: Float[np.ndarray, " heads"]  # the part of `own` that is rounding
    carriers: Readings | None = None
    deviations: tuple[Deviations, ...] = ()

    def __len__(self) -> int:
        return len(self.own)


class ErrorFlow:
    """The error that every head adds on every box, and the factors with which it arrives in later heads.

    t and C are the ranges of arguments and carriers, (boxes, heads). A head without a carrier has C = 1. C is None if
    no head has a carrier. `ends` and `beside` are those of all heads if the errors have signs, and 0 otherwise.
    """

    def __init__(
        self, stages: Sequence[FlowStage], t: Interval, C: Interval | None = None, has_signs: bool = False
    ) -> None:
        self.stages, count = stages, sum(map(len, stages))
        ends = np.cumsum([0, *map(len, stages)]).tolist()
        self.rows = [slice(*pair) for pair in itertools.pairwise(ends)]
        self.own, self.rounding, self.beside, self.jumps, self.deltas, *numbers = np.zeros((9, len(t), count))
        lows, highs = np.zeros((2, len(t), count))
        C = self._computed(Interval.point(np.ones(t.shape)) if C is None else C)
        for stage, rows in zip(stages, self.rows, strict=True):
            reads, carried = stage.arguments, stage.carriers
            G, jump, g = stage.slopes.over(t[:, rows])
            own, rounding = up(products(G.mag, reads.slack) + jump), products(G.mag, reads.casts)
            if carried is not None:
                size = C[:, rows].mag
                own = up(products(size, own) + products(g.mag, carried.slack))
                rounding = products(size, rounding) + products(g.mag, carried.casts)
            added = np.tile(stage.own, (len(t), 1))
            for number, found in enumerate(stage.deviations):
                column = rows.start + number
                self.deltas[:, column] = found.largest(t[:, column], float(reads.error[number]))
                added[:, number] = np.minimum(added[:, number], found.of(self.deltas[:, column], C[:, column].mag))
                if not has_signs:
                    continue
                ends = found.ends(t[:, column], float(reads.error[number]))
                lows[:, column], highs[:, column] = ends.lo, ends.hi
                self.beside[:, column] = up(own[:, number] + found.fixed + found.unsure, 2)
            self.own[:, rows], self.rounding[:, rows] = up(own + added), rounding + np.minimum(stage.rounding, added)
            for array, part in zip((self.jumps, *numbers), (jump, G.lo, G.hi, g.lo, g.hi), strict=True):
                array[:, rows] = part
        self.ends = Interval(lows, highs)  # of head − g, in units of the carrier
        self.has_signs = has_signs
        self.factors = Interval(*numbers[:2]), C, Interval(*numbers[2:])
        self.forms = self._forms_of(*self.factors)

    def repeated(self, times: int) -> ErrorFlow:
        """Return the same numbers for every box several times: for all boxes, and then for all boxes again."""
        found = copy.copy(self)
        for name in ("own", "rounding", "beside", "jumps", "deltas"):
            setattr(found, name, repeated(getattr(self, name), times))
        found.ends, found.forms = repeated_intervals(self.ends, times), repeated_intervals(self.forms, times)
        G, C, g = (repeated_intervals(x, times) for x in self.factors)
        found.factors = G, C, g
        return found

    def _computed(self, C: Interval) -> Interval:
        """Return the carriers as computed: their ranges, enlarged by their errors."""
        off = [np.zeros(len(stage)) if stage.carriers is None else stage.carriers.error for stage in self.stages]
        error = np.concatenate([np.zeros(0), *off])
        return Interval(np.where(error, down(C.lo - error), C.lo), np.where(error, up(C.hi + error), C.hi))

    def combined(self, weights: Float[np.ndarray, "rows heads"]) -> Interval:
        """Return the σ of combinations of heads, (boxes, rows, heads)."""
        return combined(weights, self.forms)

    def signed(self, outputs: Float[np.ndarray, "outputs heads"]) -> Float[np.ndarray, "boxes outputs"]:
        """Bound the errors of these combinations, Σ_s σ_s·Ĉ_s·(head − g)_s and the parts whose signs are not known."""
        found, (_, C, _) = self.combined(outputs), self.factors
        return up(summed(found * (self.ends * C)[:, None]) + products(found.mag, self.beside[:, None]).sum(axis=2), 64)

    def sizes(
        self, outputs: Float[np.ndarray, "outputs heads"], bent: Sequence[int] = ()
    ) -> Float[np.ndarray, "ends outputs boxes heads"]:
        """Return |σ| of these combinations, for all choices of ends for the slopes of some of the heads `bent`.

        |error| ≤ Σ_s |σ_s| own_s holds for at least one of these choices.
        """
        whole = np.moveaxis(self.combined(outputs).mag, 1, 0)
        kinks = self._kinks(whole.max(axis=0), bent)
        boxes = np.flatnonzero(kinks.any(axis=(0, 2)))
        if not len(boxes):
            return whole[None]
        ends = list(itertools.product((False, True), repeat=len(kinks)))
        at, (G, C, g) = np.tile(boxes, len(ends)), self.factors
        lo, hi = (np.tile(x[boxes], (len(ends), 1, 1)) for x in (G.lo, G.hi))
        for is_kink, at_high in zip(kinks[:, boxes], np.array(ends).T, strict=True):
            lo = np.where(is_kink & at_high[:, None, None], G.hi[boxes], lo)
            hi = np.where(is_kink & ~at_high[:, None, None], G.lo[boxes], hi)
        slopes = Interval(lo.reshape(len(at), -1), hi.reshape(len(at), -1))
        forms, found = self._forms_of(slopes, C[at], g[at]), np.tile(whole, (len(ends), 1, 1, 1))
        sizes = combined(outputs, forms).mag.reshape(len(ends), len(boxes), len(outputs), -1)
        found[:, :, boxes] = np.moveaxis(sizes, 2, 1)
        return found

    def _kinks(
        self, sizes: Float[np.ndarray, "boxes heads"], bent: Sequence[int]
    ) -> Bool[np.ndarray, "kinks boxes heads"]:
        """Choose the few of these heads per box whose slopes are taken at an end, because their widths cost most.

        `sizes` are the largest |σ| with which the error of each head arrives at an output.
        """
        costs, (G, C, _) = np.zeros(sizes.shape), self.factors
        least = LEAST_COST * products(sizes, self.own).sum(axis=1)
        is_wide = G.is_bounded & (G.width > WIDE_SLOPES * G.mag)
        read = [row for stage in self.stages for row in stage.arguments.weights]
        for number in bent:
            if is_wide[:, number].any():
                arrives = products(self.combined(read[number][None]).mag[:, 0], self.own).sum(axis=1)
                cost = products(products(sizes[:, number], products(G.width[:, number], arrives)), C.mag[:, number])
                costs[:, number] = np.where(is_wide[:, number] & (cost > least), cost, 0.0)
        most = min(BENT_HEADS, int((costs > 0).sum(axis=1).max(initial=0)))
        first = np.argsort(-costs, axis=1, kind="stable")[:, :most].T
        return (np.arange(sizes.shape[1]) == first[..., None]) & (costs > 0)

    def _forms_of(self, G: Interval, C: Interval, g: Interval) -> Interval:
        """Return the σ_js of every head j, (boxes, heads, heads)."""
        lo, hi = np.zeros((2, *G.shape, G.shape[1]))
        for stage, rows in zip(self.stages, self.rows, strict=True):
            before = Interval(lo[:, :, : rows.start], hi[:, :, : rows.start])
            form = combined(stage.arguments.weights, before) * G[:, rows, None]
            if stage.carriers is not None:
                form = form * C[:, rows, None] + combined(stage.carriers.weights, before) * g[:, rows, None]
            lo[:, rows, : rows.start], hi[:, rows, : rows.start] = form.lo, form.hi
            own = np.arange(rows.start, rows.stop)
            lo[:, own, own] = hi[:, own, own] = 1.0
        return Interval(lo, hi)


def repeated(array: np.ndarray, times: int) -> np.ndarray:
    """Return the array several times, along its first axis."""
    return np.concatenate([array] * times)


def repeated_intervals(given: Interval, times: int) -> Interval:
    """Return the intervals several times, along their first axis."""
    return Interval(repeated(given.lo, times), repeated(given.hi, times))


def bypassed(stages: Sequence[FlowStage], outputs: Float[np.ndarray, "outputs heads"]) -> list[int]:
    """Return the heads whose arguments have an error that also reaches an output along another path.

    For the other heads nothing is gained by taking slopes at their ends.
    """
    by_argument, by_carrier = list[set[int]](), list[set[int]]()
    for stage in stages:
        by_argument += [set(np.flatnonzero(row).tolist()) for row in stage.arguments.weights]
        carried = np.zeros((len(stage), 0)) if stage.carriers is None else stage.carriers.weights
        by_carrier += [set(np.flatnonzero(row).tolist()) for row in carried]
    ends = set(np.flatnonzero(outputs.any(axis=0)).tolist())

    def reached(found: set[int], without: int | None = None) -> set[int]:
        """Return all heads whose errors reach these heads, paths through the argument of `without` not counted."""
        found = set(found)
        for number in reversed(range(len(by_argument))):
            if number in found:
                found |= by_carrier[number] | (by_argument[number] if number != without else set())
        return found

    return [number for number, heads in enumerate(by_argument) if reached(heads) & reached(ends, number)]


def combined(weights: Float[np.ndarray, "rows heads"], forms: Interval) -> Interval:
    """Return Σ weight·form for each row of weights, with forms (boxes, heads, sources).

    Rows may leave out the last heads.
    """
    count = weights.shape[1]
    lo, hi = forms.lo[:, :count], forms.hi[:, :count]
    is_open = ~(np.isfinite(lo) & np.isfinite(hi))
    if is_open.any():
        lo, hi = np.where(is_open, 0.0, lo), np.where(is_open, 0.0, hi)
    positive, negative = np.maximum(weights, 0.0), np.minimum(weights, 0.0)
    size = np.abs(weights) @ np.maximum(np.abs(lo), np.abs(hi))
    slack = np.where(size == 0, 0.0, up(gamma(2 * count + 6, U) * size, 2 * count + 4))
    found = Interval(
        np.where(size == 0, 0.0, down(positive @ lo + negative @ hi - slack)),
        np.where(size == 0, 0.0, up(positive @ hi + negative @ lo + slack)),
    )
    return found.entire_where((weights != 0) @ is_open) if is_open.any() else found


def summed(parts: Interval) -> np.ndarray:
    """Return the largest absolute value of the sums of intervals over the last axis."""
    count = parts.shape[-1]
    size = gamma(count + 2, U) * parts.mag.sum(axis=-1)
    return np.asarray(up(np.maximum(parts.hi.sum(axis=-1), -parts.lo.sum(axis=-1)) + size, 4))


def scaled(found: np.ndarray, signed: Float[np.ndarray, "boxes outputs"]) -> np.ndarray:
    """Return the terms of errors, on the last axis, scaled so that they add up to the signed sum if that is smaller."""
    whole = found.sum(axis=-1)
    with quiet():
        share = np.where(signed < whole, up(signed / whole, 8 + 2 * found.shape[-1]), 1.0)
    return np.where(share[..., None] < 1, found * share[..., None], found)


def products(sizes: np.ndarray, errors: np.ndarray | float) -> np.ndarray:
    """Return sizes·errors rounded up, with 0·∞ = 0."""
    with quiet():
        return np.where((sizes == 0) | (np.asarray(errors) == 0), 0.0, up(sizes * errors))


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs as sums of weight·head and inputs, with the error of their stored coefficients, and their rounding."""

    weights: Float[np.ndarray, "outputs heads"]
    differs: Float[np.ndarray, " outputs"]
    rounding: Float[np.ndarray, " outputs"]


@dataclass(frozen=True, eq=False)
class Composed:
    """sup |f − program| ≤ bound, the sum of the terms. The box was halved along the axes in turn."""

    bound: float
    terms: tuple[Term, ...]
    axes: tuple[int, ...]
    num_chosen: int = 0  # the first axes, which were chosen; the others follow in turns


NOT_BOUNDED = Composed(math.inf, (Term("not bounded", math.inf, "the range of a part of the expression"),), ())
COEFFICIENTS, ROUNDING = "coefficients", "rounding"
TERM_REASONS = {
    COEFFICIENTS: "affine coefficients of the target, as they are stored",
    ROUNDING: "of the engine, in all stages",
}
"""The reasons of these two terms of the ledger. Every other term is the error of heads."""

Ranges = Callable[[Interval], tuple[Interval, Interval | None]]
"""A function of boxes (boxes, d) that returns the ranges of arguments and of carriers, (boxes, heads)."""


def composed_bound(
    stages: Sequence[FlowStage],
    names: Sequence[str],
    outputs: Outputs,
    ranges: Ranges,
    box: Interval,
    divides: bool,
    known: Sequence[int] = (),
) -> Composed:
    """Bound the errors of all heads at the outputs, over parts of the box if `divides`, or over the box as a whole.

    `names` are the terms of the ledger to which the errors of the heads belong. The axes `known` are halved first.
    """
    bent = bypassed(stages, outputs.weights) if divides else []
    constant, has_signs = up(outputs.differs + outputs.rounding), any(has_middles(x.deviations) for x in stages)

    def errors(boxes: Interval) -> Float[np.ndarray, "boxes outputs terms"]:
        """Return the error that every head adds, then those of coefficients and of rounding."""
        flow = ErrorFlow(stages, *ranges(boxes), has_signs)
        sizes = flow.sizes(outputs.weights, bent)
        found = np.zeros((*sizes.shape[:3], len(names) + 2))
        found[..., :-2] = products(sizes, np.maximum(up(flow.own - flow.rounding), 0.0))
        found[..., -2] = outputs.differs[:, None]
        found[..., -1] = up(products(sizes, flow.rounding).sum(axis=3) + outputs.rounding[:, None], len(names) + 2)
        largest = np.argmax(found.sum(axis=3), axis=0)
        found = np.moveaxis(np.take_along_axis(found, largest[None, :, :, None], axis=0)[0], 0, 1)
        return scaled(found, up(flow.signed(outputs.weights) + constant, 2)) if flow.has_signs else found

    def largest(boxes: Interval) -> Float[np.ndarray, " boxes"]:
        found = errors(boxes)
        return up(found.sum(axis=2), found.shape[2]).max(axis=1)

    parts, axes, num_chosen = box, tuple[int, ...](), 0
    if divides:
        parts, found, axes = divided(box, largest, has_signs, known)
        num_chosen = len(axes)
        axes += tuple(number % box.shape[1] for number in range(MAX_AXES - len(axes)))
        parts = parts[[int(np.argmax(found))]]
    worst = errors(parts)[0]
    if not np.isfinite(worst).all():
        return NOT_BOUNDED
    terms = _ledger(worst, names, DIVIDED_ROOM if divides else WHOLE_ROOM)
    if divides:
        terms = tuple(sorted(terms, key=lambda term: -term.value))
    return Composed(float(up(math.fsum(term.value for term in terms), 2)), terms, axes, num_chosen)


def _ledger(errors: Float[np.ndarray, "outputs terms"], names: Sequence[str], room: float) -> tuple[Term, ...]:
    """Return the terms of the worst output, in the order of the heads."""
    adds: dict[str, float] = {}
    worst = errors[int(np.argmax(errors.sum(axis=1)))].tolist()
    for name, value in zip((*names, COEFFICIENTS, ROUNDING), worst, strict=True):
        if value > 0:
            adds[name] = float(up(adds.get(name, 0.0) + up(value * (1 + room), 2)))
    reason = "the errors of these heads, times their effect on the output"
    return tuple(Term(name, value, TERM_REASONS.get(name, reason)) for name, value in (adds or {ROUNDING: 0.0}).items())


def divided(
    box: Interval,
    largest: Callable[[Interval], Float[np.ndarray, " boxes"]],
    has_signs: bool = False,
    known: Sequence[int] = (),
) -> tuple[Interval, Float[np.ndarray, " parts"], tuple[int, ...]]:
    """Halve parts of the box where `largest` is largest, as long as that makes it smaller.

    Return the parts, `largest` on each of them, and the axes. A part at depth k is halved along axes[k], so the axes
    are enough to make the same parts again. The first ones may be known.
    """
    parts, depth, axes = box, np.zeros(1, dtype=int), list(known)
    most, many, close = SIGNED_LIMITS if has_signs else (MOST_PARTS, MANY_PARTS, CLOSE_TO_POINTS)
    found, (seen,) = np.split(largest(Interval.joined(box, Interval.point(box.mid))), 2)
    before = (1, math.inf)
    while len(parts) < many and not is_time_over():
        is_far = FAR_FROM_POINTS * seen < found.max() < math.inf
        if len(parts) >= most and not is_far:
            break
        if len(parts) >= 2 * before[0] and len(parts) > FIRST_PARTS:
            if found.max() > WORTH_DOUBLING * before[1] and not is_far:
                break
            before = len(parts), float(found.max())
        points = Interval.point(parts[np.argsort(-found)[:POLLED]].mid)
        wide = (found > close * seen) & ((found >= WORST_PARTS * found.max()) | ~np.isfinite(found))
        if wide.any() and int(depth[wide].max()) == len(axes):
            if len(axes) == MAX_AXES:
                break
            deep = np.flatnonzero(wide & (depth == len(axes)))
            axes.append(_axis(parts[deep[np.argsort(-found[deep])[:POLLED]]], len(axes), largest))
        if not wide.any():
            break
        halves = halved(parts[wide], np.array(axes)[depth[wide]])
        parts, depth = Interval.joined(parts[~wide], halves), np.concatenate([depth[~wide], *[depth[wide] + 1] * 2])
        of_halves, at_points = np.split(largest(Interval.joined(halves, points)), [len(halves)])
        found, seen = np.concatenate([found[~wide], of_halves]), max(seen, float(at_points.max()))
    return parts, found, tuple(axes)


def _axis(parts: Interval, depth: int, largest: Callable[[Interval], Float[np.ndarray, " boxes"]]) -> int:
    """Return the axis without whose width the errors would be smallest, or the axes in turn if none would be finite."""
    d = parts.shape[1]
    lo, hi = np.tile(parts.lo, (d, 1, 1)), np.tile(parts.hi, (d, 1, 1))
    for axis in range(d):
        lo[axis, :, axis] = hi[axis, :, axis] = parts.mid[:, axis]
    found = largest(Interval(lo.reshape(-1, d), hi.reshape(-1, d))).reshape(d, -1)
    score = np.log(np.clip(found, 1e-300, 1e300)).sum(axis=1)
    return int(np.argmin(score)) if np.ptp(score) > 0 else depth % d
