"""Gradients of deep programs: the propagation of errors of slopes from the heads to the outputs.

Theorem.  With the û_j = Ĉ·g(t̂) + d_j, G and σ_js of `error_flow`, let a prime be the derivative by one variable, and
          û_j′ = Ĉ·g′(t̂)·t̂′ + g(t̂)·Ĉ′ + d_j′ the derivative as computed. For a slope H of g′ between t and t̂
              û_j′ − u_j′ = d_j′ + Ĉ·g′(t̂)·(t̂′ − t′) + g(t̂)·(Ĉ′ − C′)
                            + (Ĉ·H·t′ + G·C′)·(t̂ − t) + g′(t)·t′·(Ĉ − C),
          and t, C are affine in u: so û_j′ − u_j′ = Σ_s α_js d_s + Σ_s β_js d_s′ over all heads s.
Proof.    u_j′ = C·g′(t)·t′ + g(t)·C′. The difference of the two, with Ĉ·g′(t̂)·t′ and g(t̂)·C′ added and subtracted, has
          (Ĉ·g′(t̂) − C·g′(t))·t′ = (Ĉ·H·(t̂ − t) + (Ĉ − C)·g′(t))·t′ and (g(t̂) − g(t))·C′ = G·(t̂ − t)·C′. ∎

A head as a function of t, in units of the carrier, has computed slopes within δ′ of g′, and averages within δ of g.
With the slopes a_km of its scores and V_km of its values by the channel m, an engine computes
              Σ_k d_k (a_k·û′) + Σ_k p_k (V_k·û′),   d_k = p_k (v_k − A),
where a_km = κ_k·w_m and V_km = ν_k·c_m up to a rest. So |d_j′| ≤ size·δ′·|t̂′| + δ·|Ĉ′| + Σ_m rest_m |û_m′|, and |Ĉ|
takes the place of size, up to rounding that does not scale with the carrier.

Rounding.  An engine propagates a vector, of tangents forwards or of cotangents backwards, from stage to stage. In a
stage the derivative of head j by channel m is a sum of products of stored and computed numbers, with absolute values of
at most reach_jm in all. In any order of products and sums, every product is rounded at most N times, with N the length
of all sums of all layers together. So the engine's result is that of exact arithmetic with other derivatives of the
stages, each off by at most γ_N·reach_jm, forwards and backwards. With û_m′ for these derivatives, a part of d_j′ is
γ_N·Σ_m reach_jm·|û_m′|. Leaves count N more roundings of all products along t, ε ≤ δ′ in all. The products through
scores by the channel m are κ_k·w_m times d_k, so they are off by ε·|w_m|·|û_m′|. So the sum is also at most
γ_N·Σ_m beside_jm·|û_m′| + δ′·(Σ_m |w_m|·|û_m′| − |t̂′|), where `beside` has all other products.
Products that overflow or underflow are those of `rounding.growth`.

Kinks.    Nothing is claimed where the exact t of a head lies in a strip [a, b] about a kink of g. Elsewhere t ≤ a or
t ≥ b, and t̂ is on the same side of the kink. So slopes of g′ and bounds of leaves count for these t alone, and on a
part of the box that meets strips each choice of sides is bounded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float, Int
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.margins import DIVIDED_ROOM, MAX_AXES
from attnc.proofs.rounding.growth import num_roundings, slope_underflow
from attnc.proofs.staged.error_flow import (
    Deviations,
    ErrorFlow,
    FlowStage,
    Ranges,
    Slopes,
    combined,
    divided,
    has_middles,
    products,
    repeated,
    repeated_intervals,
    scaled,
    summed,
)
from attnc.targets.box import Box

COEFFICIENT_SLACK = 2.0**-48
"""Largest distance of a coefficient from the float that stands for it, as a share of the float. Rational numbers are
within 2^−53; numbers such as π/3 within a few units more."""
PATH_ROUNDING_ROOM = 1.125
"""Factor on the rounding of products: prover and checker bound the sizes of products in their own ways."""
MOST_SIDES, ROWS_AT_ONCE = 2**8, 2**10
"""Largest number of choices of sides on a part of the box, and of rows that are bounded together. Parts with more
choices have the bound ∞, so they are halved. The checker takes 1024 choices: its ranges may be a little wider."""
REASONS = {
    "slopes": "of all heads against the slopes of their functions, times their effect on the output",
    "values": "the errors of the values at which these slopes are taken, times their effect on the output",
    "coefficients": "affine coefficients of the target, as they are stored",
    "rounding": "of the products in all stages, times their effect on the output",
}


@dataclass(frozen=True, eq=False)
class SlopeStage:
    """The heads of one stage. Columns are the variables, and then the heads of earlier stages."""

    arguments: Float[np.ndarray, "heads sources"]
    carriers: Float[np.ndarray, "heads sources"]
    apart: Float[np.ndarray, "heads sources"]
    reach: Float[np.ndarray, "heads sources"]
    beside: Float[np.ndarray, "heads sources"]
    unsure: Float[np.ndarray, " heads"]
    slopes: Slopes  # of the g′
    deviations: tuple[Deviations, ...]  # the δ′

    def __len__(self) -> int:
        return len(self.unsure)

    def with_deviations(self, deviations: Sequence[Deviations]) -> SlopeStage:
        return replace(self, deviations=tuple(deviations))


@dataclass(frozen=True, eq=False)
class SlopeOutputs:
    """The outputs as sums of weight·source, with the differences from the coefficients of the target."""

    weights: Float[np.ndarray, "outputs sources"]
    differs: Float[np.ndarray, "outputs sources"]


@dataclass(frozen=True, eq=False)
class ComposedSlopes:
    """|∂network/∂x_i − ∂f/∂x_i| ≤ bound, the sum of the terms. The box was halved along the axes in turn."""

    bound: float
    terms: tuple[Term, ...]
    axes: tuple[int, ...]
    num_chosen: int = 0  # the first axes, which were chosen; the others follow in turns


@dataclass(frozen=True)
class PathRounding:
    """Rounding of a sum of products: `share` of the sum of their absolute values, and `lost` for those that underflow.

    Both are ∞ if a product may overflow.
    """

    share: float
    lost: float


def path_rounding(program: Program, box: Box) -> PathRounding:
    """Bound the rounding of products in all layers of a program."""
    num, unit = num_roundings(program), UNIT_ROUNDOFF[str(program.dtype)]
    lost = slope_underflow(program, box)
    if not (lost < math.inf and num * unit < 0.125):
        return PathRounding(math.inf, math.inf)
    return PathRounding(float(up(PATH_ROUNDING_ROOM * gamma(num, unit), 4)), lost)


class SlopeFlow:
    """The errors of slopes on many boxes, each by one variable."""

    def __init__(
        self,
        flow: ErrorFlow,
        stages: Sequence[SlopeStage],
        t: Interval,
        d: int,
        rounding: PathRounding,
    ) -> None:
        """`t` are the ranges of arguments on the boxes of `flow`. All numbers are those by x_1, then those by x_2, …"""
        found = [_AtArguments.of(*each, t, flow.has_signs, d) for each in _parts(stages, flow)]
        flow, by = flow.repeated(d), np.repeat(np.eye(d), len(t), axis=0)
        boxes, count = flow.own.shape
        self.flow, self.first, self.rounding = flow, d, rounding
        G, C, g = flow.factors
        self.own, self.beside, self.rounded = np.zeros((3, boxes, count))
        ends, moves, carries = (Interval(*np.zeros((2, boxes, count))) for _ in range(3))
        inputs = by[:, :, None]
        tangents = Interval(inputs, inputs)  # of the variables and of all heads so far, (boxes, sources, 1)
        sizes = np.abs(inputs[:, :, 0])  # the largest |û_m′|
        forms = Interval(*np.zeros((2, boxes, 0, 3 * count)))  # the α, β and σ of all heads so far
        for (stage, part, rows), (H, jump, slope, deltas, of_ends) in zip(_parts(stages, flow), found, strict=True):
            own_C, own_G, own_g, steep = C[:, rows], G[:, rows], g[:, rows], flow.jumps[:, rows]
            moved, carried = (combined(w, tangents)[:, :, 0] for w in (stage.arguments, stage.carriers))
            wide = own_C * slope
            by_value, by_carrier = own_C * H * moved + own_G * carried, slope * moved
            at_t = combined(stage.arguments[:, d:], forms)
            slopes = at_t[:, :, : 2 * count] * wide[:, :, None]
            values = at_t[:, :, 2 * count :] * by_value[:, :, None]
            if part.carriers is not None:
                at_C = combined(stage.carriers[:, d:], forms)
                slopes = slopes + at_C[:, :, : 2 * count] * own_g[:, :, None]
                values = values + at_C[:, :, 2 * count :] * by_carrier[:, :, None]
            alpha, beta = slopes[:, :, :count] + values, slopes[:, :, count:]
            heads = np.arange(rows.start, rows.stop)
            for end in (beta.lo, beta.hi):
                end[:, heads - rows.start, heads] = 1.0
            added = _beside(_beside(alpha, beta, 2), flow.forms[:, rows], 2)
            forms = _beside(forms, added, 1)
            # |t̂′ − t′| without the errors of earlier slopes, from coefficients that are no floats; and |t̂′|, |Ĉ′|.
            true = tangents.mag[:, :, 0]
            unlike, unlike_C = (COEFFICIENT_SLACK * (true @ np.abs(x).T) for x in (stage.arguments, stage.carriers))
            off = up(sizes - true)
            size_t, size_C = (
                up(x.mag + off @ np.abs(weights).T, 8 + count)
                for x, weights in ((moved, stage.arguments), (carried, stage.carriers))
            )
            own = up(sizes @ stage.apart.T, 8 + count) + products(size_t, stage.unsure)
            slack = part.arguments.slack
            own += products(by_value.mag, slack) + products(products(own_C.mag, jump), moved.mag)
            own += products(steep, carried.mag) + products(wide.mag, unlike) + products(own_g.mag, unlike_C)
            if part.carriers is not None:
                own += products(by_carrier.mag, part.carriers.slack)
            beside, steepest = own.copy(), np.zeros(own.shape)
            for number in range(len(stage)):
                C_mag, of_slopes = own_C[:, number].mag, stage.deviations[number]
                largest, of_value = of_slopes.of(deltas[:, number], C_mag), flow.deltas[:, rows.start + number]
                steepest[:, number] = largest
                own[:, number] += products(largest, size_t[:, number]) + products(of_value, size_C[:, number])
                if not flow.has_signs:
                    continue
                ends_here = of_ends[:, number]
                unknown_t, unknown_C = (
                    np.maximum(up(x[:, number] - y[:, number].mag), 0.0)
                    for x, y in ((size_t, moved), (size_C, carried))
                )
                beside[:, number] += products(products(C_mag, ends_here.mag), unknown_t) + products(of_value, unknown_C)
                beside[:, number] += products(size_t[:, number], of_slopes.fixed)
                for array, part_of in ((ends, ends_here), (moves, moved[:, number]), (carries, carried[:, number])):
                    array.lo[:, rows.start + number], array.hi[:, rows.start + number] = part_of.lo, part_of.hi
            self.own[:, rows], self.beside[:, rows] = up(own, 16), up(beside, 16)
            whole, aside = (products(sizes @ x.T, rounding.share) for x in (stage.reach, stage.beside))
            spread = np.maximum(up(sizes @ np.abs(stage.arguments).T, 8 + sizes.shape[1]) - size_t, 0.0)
            self.rounded[:, rows] = up(np.minimum(whole, aside + products(steepest, up(spread))), 8 + sizes.shape[1])
            here = wide * moved + own_g * carried
            tangents = _beside(tangents, here[:, :, None], 1)
            by_values = products(alpha.mag, flow.own[:, None]).sum(axis=2)
            by_slopes = products(beta.mag, up(self.own + self.rounded)[:, None]).sum(axis=2)
            sizes = np.concatenate([sizes, up(here.mag + up(by_values + by_slopes, 4 + 2 * count), 2)], axis=1)
        self.forms, self.tangents, self.sizes = forms, tangents, sizes
        self.ends, self.moves, self.carries = ends, moves, carries

    def signed(self, outputs: SlopeOutputs) -> Float[np.ndarray, "boxes outputs"]:
        """Bound the errors of outputs by slopes and by values: of Σ α_s d_s + Σ β_s d_s′, where the signs are known

        d_s = Ĉ·D and d_s′ = Ĉ·D′·t̂′ + D·Ĉ′, with D = head − g and D′ its slope less g′. The rest is added.
        """
        count, (_, C, _) = self.own.shape[1], self.flow.factors
        effects = combined(outputs.weights[:, self.first :], self.forms[:, :, : 2 * count])
        alpha, beta = effects[:, :, :count], effects[:, :, count:]
        by_values = (alpha * C[:, None] + beta * self.carries[:, None]) * self.flow.ends[:, None]
        by_slopes = beta * (C * self.moves * self.ends)[:, None]
        rest = products(alpha.mag, self.flow.beside[:, None]) + products(beta.mag, self.beside[:, None])
        return up(summed(_beside(by_values, by_slopes, 2)) + up(rest.sum(axis=2), 4 + 2 * count))

    def at(self, outputs: SlopeOutputs) -> tuple[np.ndarray, ...]:
        """Return the errors of outputs by slopes, by values, by coefficients and by rounding, each (boxes, outputs)."""
        weights, count = outputs.weights[:, self.first :], self.own.shape[1]
        effects = combined(weights, self.forms[:, :, : 2 * count]).mag
        by_values = products(effects[:, :, :count], self.flow.own[:, None]).sum(axis=2)
        by_slopes = products(effects[:, :, count:], self.own[:, None]).sum(axis=2)
        rounded = products(effects[:, :, count:], self.rounded[:, None]).sum(axis=2)
        rounded += products(self.sizes @ np.abs(outputs.weights).T, self.rounding.share) + self.rounding.lost
        true = self.tangents.mag[:, :, 0]
        off = self.sizes @ outputs.differs.T + COEFFICIENT_SLACK * (true @ np.abs(outputs.weights).T)
        return up(by_slopes, count + 2), up(by_values, count + 2), up(off, 8 + count), up(rounded, 16 + 2 * count)


class _AtArguments(NamedTuple):
    """The numbers of a stage that depend on arguments alone, repeated for each variable."""

    H: Interval
    jump: Float[np.ndarray, "boxes heads"]
    slope: Interval
    deltas: Float[np.ndarray, "boxes heads"]  # the largest δ′
    ends: Interval  # of the computed slopes less g′, if their signs are known

    @classmethod
    def of(cls, stage: SlopeStage, part: FlowStage, rows: slice, t: Interval, has_signs: bool, d: int) -> _AtArguments:
        t = t[:, rows]
        H, jump, slope = stage.slopes.over(t)
        errors, deltas, (lo, hi) = part.arguments.error.tolist(), np.zeros(t.shape), np.zeros((2, *t.shape))
        for number, deviations in enumerate(stage.deviations):
            deltas[:, number] = deviations.largest(t[:, number], errors[number])
            if has_signs:
                found = deviations.ends(t[:, number], errors[number])
                lo[:, number], hi[:, number] = found.lo, found.hi
        H, slope, ends = (repeated_intervals(x, d) for x in (H, slope, Interval(lo, hi)))
        return cls(H, repeated(jump, d), slope, repeated(deltas, d), ends)


def _parts(stages: Sequence[SlopeStage], flow: ErrorFlow) -> list[tuple[SlopeStage, FlowStage, slice]]:
    return list(zip(stages, flow.stages, flow.rows, strict=True))


def _beside(first: Interval, second: Interval, axis: int) -> Interval:
    return Interval(*(np.concatenate(ends, axis=axis) for ends in ((first.lo, second.lo), (first.hi, second.hi))))


@dataclass(frozen=True)
class Sides:
    """The numbers of heads with one argument t, and the strips: intervals of t in which nothing is claimed."""

    heads: tuple[int, ...]
    strips: tuple[tuple[float, float], ...]

    @property
    def between(self) -> list[tuple[float, float]]:
        """The intervals of t before, between and after the strips."""
        ends = [-math.inf, *(end for strip in self.strips for end in strip), math.inf]
        return list(zip(ends[::2], ends[1::2], strict=True))


def by_sides(t: Interval, sides: Sequence[Sides]) -> tuple[Int[np.ndarray, " rows"], Interval]:
    """Return the ranges t of all heads, (boxes, heads), once for every choice of sides of the strips that a box meets.

    Also return the number of the box of every row. A box within a strip has no row.
    """
    rows = np.arange(len(t))
    for side in sides:
        first, kept = side.heads[0], list[tuple[np.ndarray, Interval]]()
        for lo, hi in side.between:
            meets = (t.lo[:, first] <= hi) & (t.hi[:, first] >= lo)
            part = Interval(t.lo[meets], t.hi[meets])
            for head in side.heads:
                part.lo[:, head] = np.maximum(part.lo[:, head], lo)
                part.hi[:, head] = np.maximum(part.lo[:, head], np.minimum(part.hi[:, head], hi))
            kept.append((rows[meets], part))
        rows, t = np.concatenate([some for some, _ in kept]), Interval.joined(*(part for _, part in kept))
    return rows, t


def num_choices(t: Interval, sides: Sequence[Sides]) -> Float[np.ndarray, " boxes"]:
    """Return the number of choices of sides in each box."""
    found = np.ones(len(t))
    for side in sides:
        lo, hi = t.lo[:, side.heads[0]], t.hi[:, side.heads[0]]
        found *= sum(((lo <= b) & (hi >= a)).astype(float) for a, b in side.between)
    return found


def composed_slopes(
    flow: Sequence[FlowStage],
    stages: Sequence[SlopeStage],
    outputs: SlopeOutputs,
    rounding: PathRounding,
    ranges: Ranges,
    box: Interval,
    known: Sequence[int] = (),
    sides: Sequence[Sides] = (),
) -> ComposedSlopes:
    """Bound the errors of all slopes at the outputs, over parts of the box. The axes `known` are halved first.

    On a part that meets strips about kinks, each choice of their sides is bounded by itself.
    """
    d, num_slopes = box.shape[1], len(outputs.weights) * box.shape[1]
    has_signs = any(has_middles(part.deviations) for part in flow) or any(has_middles(x.deviations) for x in stages)

    def errors(boxes: Interval) -> Float[np.ndarray, "boxes slopes terms"]:
        t, C = ranges(boxes)
        if not sides:
            return of_ranges(t, C)
        worst = np.zeros((len(boxes), num_slopes, 4))
        has_few = (num_choices(t, sides) <= MOST_SIDES) & ~np.isnan(t.lo + t.hi).any(axis=1)
        worst[~has_few] = math.inf
        kept = np.flatnonzero(has_few)
        rows, t = by_sides(t[kept], sides)
        if not len(rows):
            return worst
        rows = kept[rows]
        pieces = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(rows), ROWS_AT_ONCE)]
        found = np.concatenate([of_ranges(t[some], None if C is None else C[rows[some]]) for some in pieces])
        found = np.where(np.isnan(found), math.inf, found)
        for number in range(int(np.bincount(rows).max())):
            some = np.flatnonzero(_occurrence(rows) == number)
            place = rows[some]
            is_worse = ~(found[some].sum(axis=2) <= worst[place].sum(axis=2))
            worst[place] = np.where(is_worse[..., None], found[some], worst[place])
        return worst

    def of_ranges(t: Interval, C: Interval | None) -> Float[np.ndarray, "boxes slopes terms"]:
        n, slopes = len(t), SlopeFlow(ErrorFlow(flow, t, C, has_signs), stages, t, d, rounding)
        by_slopes, by_values, off, rounded = slopes.at(outputs)
        found = np.stack([by_slopes, by_values, off, rounded], axis=2)
        if has_signs:
            found = scaled(found, up(slopes.signed(outputs) + up(off + rounded), 2))
        return np.moveaxis(found.reshape(d, n, len(outputs.weights), -1), 0, 1).reshape(n, -1, found.shape[2])

    def largest(boxes: Interval) -> Float[np.ndarray, " boxes"]:
        found = up(errors(boxes).sum(axis=2), 8).max(axis=1)
        return np.where(np.isnan(found), np.inf, found)

    parts, found, axes = divided(box, largest, has_signs, known)
    num_chosen = len(axes)
    axes += tuple(number % d for number in range(MAX_AXES - len(axes)))
    worst = errors(parts[[int(np.argmax(found))]])[0]
    row = worst[int(np.argmax(worst.sum(axis=1)))]
    if not np.isfinite(row).all():
        return ComposedSlopes(math.inf, (), axes)
    sums = [float(up(value * (1 + DIVIDED_ROOM), 2)) for value in row.tolist()]
    names = ("slopes", "values", "coefficients", "rounding")
    terms = [Term(name, x, REASONS[name]) for name, x in zip(names, sums, strict=True) if x > 0]
    terms.sort(key=lambda term: -term.value)
    return ComposedSlopes(float(up(math.fsum(sums), 2)), tuple(terms), axes, num_chosen)


def _occurrence(rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """Return for each entry the number of equal entries before it."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    found = np.empty_like(rows)
    found[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return found


def require_close(slack: float, value: float, text: str) -> None:
    """Raise ProgramError if a coefficient is not within COEFFICIENT_SLACK of the float that stands for it."""
    if slack > COEFFICIENT_SLACK / 2 * abs(value):  # half of it is left to the rounding of this bound
        raise ProgramError(f"the coefficient {text} is not known closely enough to bound a gradient")
