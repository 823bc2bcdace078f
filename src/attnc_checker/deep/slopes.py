"""Gradients of deep programs: the slopes of every stage, and their errors at the outputs.

Theorem.  With the û_j, σ_js, d_s of `composition`, a prime for the derivative by one variable, and w, c the floats that
stand for the coefficients of t and of the carrier C, let
    û_j′ = Ĉ·g′(T)·Σ w_m û_m′ + g(T)·Σ c_m û_m′ + d_j′.
Since u_j′ = C·g′(t)·t′ + g(t)·C′, and g′(T) − g′(t) = H·(T − t) with a slope H of g′,
    û_j′ − u_j′ = d_j′ + Ĉ·g′(T)·(Σ w_m û_m′ − t′) + g(T)·(Σ c_m û_m′ − C′)
                  + (Ĉ·H·t′ + G·C′)·(T − t) + g′(t)·t′·(Ĉ − C).
So û_j′ − u_j′ = Σ_s α_js d_s + Σ_s β_js d_s′, and on a part of the box every α and every β lies in an interval.

Slopes of a stage.  Leaves prove that the computed slope along T is within δ′ of g′, in units of the carrier, and its
value within δ of g. An engine computes Σ_k d_k (a_k·û′) + Σ_k p_k (V_k·û′) with d_k = p_k (v_k − A), where
a_km = κ_k w_m and V_km = ν_k c_m up to a rest, and v_k is that of the line up to r_k. As Σ |d_k| ≤ 2 max |v_k|, and at
most twice that if slopes are centred,
    |d_j′| ≤ size·δ′·|Σ w_m û_m′| + δ·|Σ c_m û_m′| + Σ_m rest_m |û_m′| + 4 max r_k·max |κ_k|·|Σ w_m û_m′|.
With a smaller carrier, size·δ′ is growth·|Ĉ|·δ′ + fixed′, as for values (`deviations`): rounding is linear in the sizes
of values. Where values are 0 and their sizes are φ, the theorem of `gradients` has e_k ≤ φ, e_A ≤ 2.1 φ, D ≤ 4 φ,
Ā ≤ 1.01 S and T ≤ 2.02 S with S the largest size of a score's slope: less than 20 φ S in all, 2 φ for products that
underflow, and the number of lost weights.

Kinks.  Points at which the exact t of a stage lies in an excluded interval [a, b] are not claimed. Excluded leaves of
the stage lie in [a + e, b − e], |T − t| ≤ e. So T is in none of them at other points. There t ≤ a or t ≥ b, and the
theorem holds with pieces and leaves of these t alone. On a part of the box each choice of sides, for all
stages, is bounded by itself. Let [a, b] hold a kink of g. If |∂argument/∂x_i| ≥ m on a part, a line along x_i meets
the neighbourhood on a length of at most (b − a)/m. So parts of the box bound the share that it takes up.

Rounding.  An engine propagates one vector from stage to stage: of tangents, or backwards of cotangents. The derivative
of stage j by an entry m of the state is a sum of products of the stored and of the computed numbers above, with
absolute values of at most reach_jm in all. Whatever the order of products and sums, every product is rounded at most N
times, N the length of all sums in all layers together. So what the engine computes is the exact result for derivatives
of the stages that are off by at most γ_N·reach_jm, forwards and backwards. With û_m′ for these derivatives, d_j′ has a
further part of at most γ_N·Σ_m reach_jm |û_m′|. Leaves count N more roundings of all products along t, ε ≤ δ′ in all.
The products through scores by the entry m are κ_k w_m times d_k, and off by ε·|w_m|·|û_m′|. So the part is also at most
γ_N·Σ_m aside_jm |û_m′| + δ′·(Σ_m |w_m|·|û_m′| − |Σ w_m û_m′|), with all other products in `aside`.
Products that overflow or underflow are those of `overflow`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from flint import arb

from attnc_checker.averages import Average
from attnc_checker.cells import EXCLUDED
from attnc_checker.claims import ALL_EXCLUDED, LARGEST_EXCLUDED, Claim, Excluded, GradientClaim, SlopeClaim
from attnc_checker.deep.composition import (
    ONE,
    Combination,
    Effects,
    Link,
    Walk,
    added_up,
    box_of,
    combined,
    computed,
    halves,
    size_of,
)
from attnc_checker.deep.deviations import Deviations
from attnc_checker.deep.lines import T, divided, moving_terms
from attnc_checker.deep.normal_forms import are_equal
from attnc_checker.deep.pieces import ZERO, Piece, Pieces
from attnc_checker.derivatives import Kinks
from attnc_checker.derivatives import gradient as derivatives
from attnc_checker.expressions import Function, Step, evaluate, parse
from attnc_checker.files import BadFile, Refused, require
from attnc_checker.forms import ONE as CONSTANT
from attnc_checker.forms import SMALLEST, Key, Terms, span
from attnc_checker.gradients import ALIGNED, GradientProver
from attnc_checker.overflow import CENTRED, GATED, lost, num_roundings
from attnc_checker.proving import Proof, Subject
from attnc_checker.ranges import Range, Ranges
from attnc_checker.vectors import INFINITE, Vector, most, total

FIXED = 20
"""Rounding of slopes per slope of a score and per size of a value, if the value itself is 0."""
CLOSE_SHARE, SHARE_HALVINGS = 2.0**-8, 12
"""The share of a part that a neighbourhood takes up is not found more closely if it is at most the first, or after this
number of halvings."""
MOST_STEPS = 2**21
"""Largest number of steps of expressions that are evaluated for the shares of all neighbourhoods: 4 s. Further parts
count as excluded as a whole."""
MOST_SIDES = 1024
"""Largest number of choices of sides on a part of the box. Parts with more are halved. attnc takes fewer."""


class Slope(NamedTuple):
    """The contribution of the slopes of a stage: the pieces of g′, the δ′, and numbers for each entry of the state."""

    pieces: Pieces
    own: Deviations
    rest: Terms
    reach: Terms
    aside: Terms  # the part of `reach` without the products through scores along t
    unsure: arb
    excluded: tuple[tuple[float, float], ...]  # intervals of t


def with_slopes(proof: Proof, claim: Claim, gradient: GradientClaim, walk: Walk) -> Proof:
    """Return the proof of a claim with the leaves of all slopes. The bound of gradients is computed before."""
    names = [link.claim.name for link in walk.links]
    require([each.name for each in gradient.heads] == names, "the slopes that are proved are not those of all stages")
    slopes, subjects = list[Slope](), list[Subject]()
    strips = _Strips(walk, gradient.excluded)
    for link, stated in zip(walk.links, gradient.heads, strict=True):
        own, subject = _of_stage(walk, link, stated, strips)
        slopes.append(own)
        subjects.append(subject)
    strips.require_kinks()
    _Gradient(walk, slopes, gradient).prove()
    count, conclude = len(proof.jobs), proof.conclude
    return replace(proof, subjects=[*proof.subjects, *subjects], conclude=lambda found: conclude(found[:count]))


class _Strips:
    """The excluded neighbourhoods, each an interval of the argument of the stages whose kinks it holds."""

    def __init__(self, walk: Walk, excluded: Sequence[Excluded]) -> None:
        self.walk, self.found, self.steps_left = walk, list[tuple[Excluded, Step]](), MOST_STEPS
        self.with_kinks: set[Excluded] = set()
        whole = arb(0)
        for each in excluded:
            try:
                (step,) = walk.reader.parse(each.argument)
            except (BadFile, ValueError) as error:
                raise Refused(f"the argument of an excluded neighbourhood is no expression: {error}") from None
            is_read = any(are_equal(walk.reader, [(step, link.argument)]) for link in walk.links)
            require(is_read, f"no stage has a kink in the excluded neighbourhood {_named(each)}")
            share = self._share(step, each)
            whole += share
            is_small = bool(share <= LARGEST_EXCLUDED)
            require(is_small, f"the neighbourhood {_named(each)} may take up more than a 16th of the box")
            require(bool(whole <= ALL_EXCLUDED), "all excluded neighbourhoods may take up more than half of the box")
            self.found.append((each, step))

    def of(self, link: Link, slope: Function) -> tuple[tuple[float, float], ...]:
        """Return the intervals of the argument of a stage with the derivative `slope`, in ascending order."""
        own = [each for each, step in self.found if are_equal(self.walk.reader, [(step, link.argument)])]
        for each in own:
            rules = Kinks([(arb(each.lo), arb(each.hi))])
            evaluate(slope, rules)
            if rules.are_met:
                self.with_kinks.add(each)
        found = sorted((each.lo, each.hi) for each in own)
        require(all(a[1] < b[0] for a, b in itertools.pairwise(found)), "two excluded neighbourhoods overlap")
        return tuple(found)

    def require_kinks(self) -> None:
        for each, _ in self.found:
            require(each in self.with_kinks, f"no stage has a kink in the excluded neighbourhood {_named(each)}")

    def _share(self, step: Step, strip: Excluded) -> arb:
        """Bound the share of the box in which the step is in [lo, hi]."""
        function, width = self.walk.reader.function([step]), arb(strip.hi) - arb(strip.lo)
        try:
            slopes = derivatives(function, self.walk.claim.variables)
        except ValueError as error:
            raise Refused(f"the size of the neighbourhood {_named(strip)} is not known: {error}") from error
        d, num_steps = len(self.walk.claim.variables), len(function.steps) + len(slopes.steps)

        def share(part: list[Range], depth: int) -> arb:
            self.steps_left -= num_steps
            if self.steps_left < 0:
                return arb(1)
            ((low, high),) = evaluate(function, Ranges(part))
            if high < strip.lo or low > strip.hi:
                return arb(0)
            found = arb(1)
            for (a, b), (least, most_) in zip(part, evaluate(slopes, Ranges(part)), strict=True):
                steep = least.max(-most_) * (b - a)
                if steep > 0:
                    found = found.min((width / steep).upper())
            if depth == SHARE_HALVINGS or found <= CLOSE_SHARE or (low >= strip.lo and high <= strip.hi):
                return found
            return found.min(total(share(half, depth + 1) for half in halves(part, depth % d)) / 2)

        return share(box_of(self.walk.claim), 0)


def _named(strip: Excluded) -> str:
    return f"{strip.argument:.60} ∈ [{strip.lo:g}, {strip.hi:g}]"


def _of_stage(walk: Walk, link: Link, stated: SlopeClaim, strips: _Strips) -> tuple[Slope, Subject]:
    claim, (low, high) = link.claim, link.ends
    require(
        claim.held is None and not claim.noise, f"the slopes of stage {claim.name} are not claimed to be those of g"
    )
    try:
        slope = derivatives(parse(claim.function, ["t"]), ("t",))
    except ValueError as error:
        raise Refused(f"the function of stage {claim.name} has no derivative: {error}") from error
    about = replace(
        claim,
        name=f"{claim.name}, slopes",
        bound=stated.bound,
        leaves=stated.leaves,
        leaf_bounds=stated.leaf_bounds,
        leaf_middles=stated.leaf_middles,
    )
    averages = [Average.of(head, link.line.inputs) for head in link.line.heads]
    further = num_roundings(walk.reduction.program)
    is_excluded = [leaf.kind == EXCLUDED for leaf in stated.leaves]
    sides = strips.of(link, slope) if any(is_excluded) else ()
    inner = [(arb(lo) + link.t.off, arb(hi) - link.t.off) for lo, hi in sides]
    prover = GradientProver(link.line, [], slope, walk.arithmetic, averages, inner, arb(0), further)
    pieces, fixed = Pieces(claim, low, high, link.t.off, bool(walk.axes), slope, sides), arb(0)
    if claim.carrier is not None:
        for head in link.line.heads:
            lost = 4 * (head.num_keys + head.silent) * (walk.arithmetic.lost + SMALLEST[walk.arithmetic.name])
            fixed += (2 + FIXED * most(head.scores.sizes[T])) * link.own.fixed + lost
    known = tuple(math.inf if no else x for no, x in zip(is_excluded, stated.leaf_bounds, strict=True))
    own = Deviations(replace(about, leaf_bounds=known), link.own.size, link.own.growth, fixed, arb(0))
    subject = Subject(about, stated.leaves, stated.leaf_bounds, prover, middles=stated.leaf_middles)
    for leaf in itertools.compress(stated.leaves, is_excluded):
        assert leaf.cell is not None
        start, end = map(arb, subject.sides(leaf.cell)[0])
        is_inside = any(lo <= start and end <= hi for lo, hi in inner)
        text = f"the leaf t ∈ [{float(start):g}, {float(end):g}] of {about.name}"
        require(is_inside, f"{text} lies in no excluded neighbourhood of a kink")
    return Slope(pieces, own, *_numbers(walk, link), sides), subject


def _numbers(walk: Walk, link: Link) -> tuple[Terms, Terms, Terms, arb]:
    """Return the rest, the reach and its part aside of every entry of the state, and that of unsure values along t."""
    reach, name, has_carrier = walk.reduction.reach, link.claim.name, link.claim.carrier is not None
    t, moving = moving_terms(link.t.terms)
    rest, sizes, aside, unsure = dict[Key, arb](), dict[Key, arb](), dict[Key, arb](), arb(0)

    def add(to: Terms, factor: arb, terms: Terms) -> None:
        for key, column in terms.items():
            if key != CONSTANT:
                to[key] = to.get(key, arb(0)) + factor * most(map(arb, map(abs, column)))

    for head in link.whole.heads:
        values = head.values[0]
        kappa, of_scores = divided(head.scores.terms, t, moving, reach, name)
        by, among = (link.unit.terms, link.unit.terms) if has_carrier else (t, moving)
        _, of_values = divided(values.terms, by, among, reach, name)
        if not has_carrier:
            of_values = of_values | {CONSTANT: arb(0) * of_values[CONSTANT]}
        off = most(span(of_values, reach))
        largest = CENTRED * (most(span(values.sizes, reach)) + off)
        add(rest, largest, of_scores)
        add(rest, GATED, of_values)
        along = abs(Vector(map(arb, kappa)))
        excess = {
            key: (column - along * (abs(arb(t.get(key, 0))) * (1 + ALIGNED))).max(0 * along)
            for key, column in head.scores.sizes.items()
        }
        for to, scores in ((sizes, head.scores.sizes), (aside, excess)):
            add(to, largest, scores)
            add(to, GATED, values.sizes)
        unsure += CENTRED * off * most(map(arb, map(abs, kappa)))
    for key, x in link.whole.affine[0].sizes.items():  # terms beside the heads, which cancel exactly, still round
        if key != CONSTANT:
            for to in (sizes, aside):
                to[key] = to.get(key, arb(0)) + x
    return rest, sizes, aside, unsure


class _Gradient:
    """The bound of the errors of all partial derivatives."""

    def __init__(self, walk: Walk, slopes: list[Slope], claim: GradientClaim) -> None:
        self.walk, self.slopes, self.claim, self.wanted = walk, slopes, claim, walk.wanted()
        self.inputs = [key for key in walk.sizes if isinstance(key, int) and key != CONSTANT]
        forms = walk.reduction.stage().affine
        self.read = [{key: x for key, x in form.sizes.items() if key != CONSTANT} for form in forms]
        self.share = walk.arithmetic.gamma(num_roundings(walk.reduction.program))
        self.lost = lost(walk.reduction.program, walk.reduction.reach)

    def prove(self) -> None:
        for variable in self.inputs:
            self.walk.largest(
                partial(self._error, variable),
                self.claim.bound,
                self.claim.axes,
                "the errors of slopes add up to",
            )

    def _error(self, variable: int, part: list[Range]) -> arb:
        """Bound the errors of all outputs' slopes along a variable on a part of the box, outside of neighbourhoods."""
        rules, values, met = self.walk.on(part)
        found, sides = arb(0), self._sides(values)
        if sides is None:
            return INFINITE  # the part is halved
        for chosen in sides:
            own = values | chosen
            moved = {
                link.place: link.pieces.around(own[link.argument])
                for link in self.walk.links
                if link.argument in chosen
            }
            error = self._on_side(variable, rules, own, met | moved)
            if not error <= self.claim.bound:
                return error
            found = found.max(error)
        return found

    def _sides(self, values: dict[int, Range]) -> list[dict[int, Range]] | None:
        """Return the ranges of the arguments of kinks, for every choice of their sides that values may be on.

        Return None if there are too many choices.
        """
        strips = {
            link.argument: slope.excluded
            for link, slope in zip(self.walk.links, self.slopes, strict=True)
            if slope.excluded
        }
        choices, count = list[list[Range]](), 1
        for argument, intervals in strips.items():
            low, high = values[argument]
            ends = [-INFINITE, *map(arb, itertools.chain(*intervals)), INFINITE]
            between = [
                (low.max(a), high.min(b))
                for a, b in zip(ends[::2], ends[1::2], strict=True)
                if not (high < a or low > b)
            ]
            choices.append(between)
            count *= len(between)
        if count > MOST_SIDES:
            return None
        return [dict(zip(strips, sides, strict=True)) for sides in itertools.product(*choices)]

    def _on_side(
        self,
        variable: int,
        rules: Ranges,
        values: dict[int, Range],
        met: dict[Key, Piece],
    ) -> arb:
        """Bound the same errors for these ranges of arguments."""
        walk = self.walk
        own, sigma = walk.flow(rules, values, met)
        own_slopes: dict[Key, arb] = {}
        beside_slopes: dict[Key, arb] = {}
        moves: dict[Key, tuple[Range, Range]] = {}  # Ĉ·t′ and C′
        has_signs = walk.has_signs or any(each.own.has_signs for each in self.slopes)
        alpha: Effects = {}
        beta: Effects = {}
        true: dict[Key, Range] = {key: ONE if key == variable else ZERO for key in self.inputs}
        sizes: dict[Key, arb] = {key: size_of(x) for key, x in true.items()}

        def read(t: Combination) -> tuple[Range, arb, arb]:
            """Return Σ w_m u_m′, a bound of |Σ w_m û_m′|, and the error of Σ w_m u_m′ by the floats w."""
            found, off = ZERO, arb(0)
            for key, w in t.terms.items():
                if key != CONSTANT and w != 0:
                    low, high = (x * w for x in true[key])
                    found = rules.plus(found, (low, high) if w > 0 else (high, low))
                    off += abs(arb(w)) * (sizes[key] - size_of(true[key]))
            unlike = total(x * size_of(true[key]) for key, x in t.differs.items() if key != CONSTANT)
            return found, size_of(found) + off, unlike

        for link, slope in zip(walk.links, self.slopes, strict=True):
            _, _, G, jump, g, _ = met[link.place]
            bend: Piece = slope.pieces.around(values[link.argument])
            C = computed(values[link.carrier], link.unit)
            moved, size_t, unlike = read(link.t)
            carried, size_C, unlike_C = read(link.unit)
            wide = rules.times(C, bend.values)
            by_value = rules.plus(rules.times(rules.times(C, bend.slopes), moved), rules.times(G, carried))
            by_carrier = rules.times(bend.values, moved)
            alpha[link.place] = combined(
                rules,
                (wide, link.t, alpha),
                (g, link.unit, alpha),
                (by_value, link.t, sigma),
                (by_carrier, link.unit, sigma),
            )
            beta[link.place] = combined(rules, (wide, link.t, beta), (g, link.unit, beta)) | {link.place: ONE}
            t, off = values[link.argument], link.t.off
            by_slopes, by_values = slope.own.over(t, off, size_of(C)), link.own.largest(t, off)
            added = slope.unsure * size_t + total(x * sizes[key] for key, x in slope.rest.items())
            added += size_of(by_value) * link.t.slack + size_of(by_carrier) * link.unit.slack
            added += size_of(C) * bend.jump * size_of(moved) + jump * size_of(carried)
            added += size_of(wide) * unlike + size_of(g) * unlike_C
            whole, aside = (
                self.share * total(x * sizes[key] for key, x in y.items()) for y in (slope.reach, slope.aside)
            )
            spread = total(abs(arb(w)) * sizes[key] for key, w in link.t.terms.items() if key != CONSTANT) - size_t
            added += whole.min(aside + by_slopes * spread.max(arb(0)))
            own_slopes[link.place] = added + by_slopes * size_t + by_values * size_C
            if has_signs:
                unknown = by_slopes * (size_t - size_of(moved)) + slope.own.fixed * size_t
                beside_slopes[link.place] = added + unknown + by_values * (size_C - size_of(carried))
                moves[link.place] = rules.times(C, moved), carried
            true[link.place] = rules.plus(rules.times(wide, moved), rules.times(g, carried))
            sizes[link.place] = size_of(true[link.place]) + _total(alpha[link.place], own)
            sizes[link.place] += _total(beta[link.place], own_slopes)
        found, rounding = (
            [],
            [self.share * total(x * sizes[key] for key, x in read.items()) + self.lost for read in self.read],
        )
        for output, rounded in zip(self.wanted, rounding, strict=True):
            by_values = _total(combined(rules, (ONE, output, alpha)), own)
            by_slopes = _total(combined(rules, (ONE, output, beta)), own_slopes)
            differs = total(x * sizes[key] for key, x in output.differs.items() if key != CONSTANT)
            found.append(by_values + by_slopes + differs + rounded)
        if not has_signs or most(found) <= self.claim.bound:
            return most(found)
        _, beside = walk.ends(rules, values, met)
        for number, (output, rounded) in enumerate(zip(self.wanted, rounding, strict=True)):
            of_values, of_slopes = combined(rules, (ONE, output, alpha)), combined(rules, (ONE, output, beta))
            differs = total(x * sizes[key] for key, x in output.differs.items() if key != CONSTANT)
            rest = _total(of_values, beside) + _total(of_slopes, beside_slopes) + differs + rounded
            parts = list[Range]()
            for link, slope in zip(walk.links, self.slopes, strict=True):
                place, t, C = link.place, values[link.argument], computed(values[link.carrier], link.unit)
                by, (moved, carried) = of_slopes.get(place, ZERO), moves[place]
                effect = rules.plus(rules.times(of_values.get(place, ZERO), C), rules.times(by, carried))
                parts.append(rules.times(effect, link.own.between(t, link.t.off)))
                parts.append(rules.times(rules.times(by, moved), slope.own.between(t, link.t.off)))
            found[number] = found[number].min(size_of(added_up(parts)) + rest)
        return most(found)


def _total(effects: dict[Key, Range], own: dict[Key, arb]) -> arb:
    return total(size_of(x) * own[source] for source, x in effects.items())
