"""Deep programs, stage by stage: composed, the claims about the stages of a certificate are the expression.

A stage claims that attention writes carrier·g(t) into one channel, where t and the carrier are affine combinations of
the variables and of the stages before it. In exact arithmetic its value is then a function of the variables. Interval
arithmetic over parts of the box gives its range. Normal forms show that the outputs are the expression.

Theorem.  Let û be the state as computed, |û_i − u_i| ≤ e_i and |û_i| ≤ R_i. With w_i the floats nearest to the
coefficients of t, T(û) = w_0 + Σ w_i û_i is within e = Σ |w_i| e_i + Σ |coefficient_i − w_i| |u_i| of t. In the same
way the carrier has an error e_C. If the heads' scores are κ_k·T(û) + c_k up to ε_k, and their values ν_k times the
carrier up to r_k, they are those of a stage of one variable T. Leaves prove that this stage is within δ of g on
[lo, hi] ⊇ [t ± e]. So with own = (|carrier| + e_C)·δ + Σ_heads max r_k the stage writes û_j = Ĉ·g(T(û)) + d_j,
|d_j| ≤ own (on a part of the box maybe less: see `deviations`), and
    û_j − u_j = d_j + Ĉ·G·(T(û) − t) + g(t)·(Ĉ − C),  G a slope of g between t and T(û).
Thus û_j − u_j = Σ_s σ_js d_s over the stages s, σ_jj = 1. On a part of the box every σ lies in an interval, so errors
that reach an output along several paths may cancel. The output is off by at most Σ_s |σ_s| own_s on every part.
Every σ is affine in each G, and the sum is convex, so it is largest at ends of their intervals. At these ends
max(u, v) = u + relu(v − u) has either the error of u or that of v, and not both.
Errors ε_k of scores are counted like rounding. If G may be infinite, as for √t at 0, the change of g there is added to
own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from flint import arb

from attnc_checker.claims import Claim
from attnc_checker.deep.claims import StageClaim, Stages
from attnc_checker.deep.deviations import Deviations
from attnc_checker.deep.lines import Line, along, held, joined, stage_at
from attnc_checker.deep.normal_forms import Forms, are_equal
from attnc_checker.deep.pieces import ZERO, Piece, Pieces
from attnc_checker.expressions import Reader, Step, evaluate
from attnc_checker.files import BadFile, Refused, require
from attnc_checker.forms import ONE as CONSTANT
from attnc_checker.forms import SMALLEST, Key, Terms, span
from attnc_checker.leaves import Prover
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import exact
from attnc_checker.proving import Proof, Subject
from attnc_checker.ranges import Range, Ranges
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import INFINITE, most, total

ONE = (arb(1), arb(1))
ANYWHERE, NOWHERE = (-(arb(2) ** 1025), arb(2) ** 1025), (INFINITE, -INFINITE)
HALVINGS, HALVINGS_OF_A_CLAIM = 12, 24
"""Largest numbers of halvings of the box, along its variables in turn, to find a range, or to prove a claimed range."""
KINKS = 3
"""Largest number of slopes G that are taken at both ends of their intervals. attnc uses the same number. Each doubles
the work."""
AT_ONCE_STAGED = 500
"""The number of leaves per process. A process walks through all stages when it starts. In the corpus this takes up to
3 s, and 500 leaves take 1 s."""
FURTHER = 64
"""Roundings of a part of a value besides those of sums."""
MOST_HALVINGS = 20_000
"""Largest total number of halved parts of the box, so that a check ends. The corpus needs at most 240."""


class Combination(NamedTuple):
    """w_0 + Σ w_i û_i with floats w, for an affine combination of exact numbers."""

    terms: Terms
    stages: Terms
    slack: arb  # its largest error at exact values of the stages
    off: arb  # its largest error with the errors of the stages
    differs: Terms  # the distances of the w_i from the coefficients


Effects = dict[Key, dict[Key, Range]]
"""For every stage, by source: the factors with which errors of earlier stages arrive in it."""


class Link(NamedTuple):
    """The propagation of errors by a stage: of its argument by slopes of g, of its carrier by values of g."""

    place: Key
    argument: Step
    t: Combination
    pieces: Pieces
    carrier: Step
    unit: Combination
    own: Deviations
    claim: StageClaim
    ends: Range  # of the argument
    whole: Stage  # as it reads the state
    line: Stage  # as it reads t


def staged_walk(claim: Claim, stages: Stages, reduction: Reduction, arithmetic: Arithmetic) -> tuple[Proof, Walk]:
    """Return the proof by the leaves of every stage, and the walk through all stages.

    The bound that follows is computed before the leaves are proved.
    """
    walk, lines = Walk(claim, stages, reduction, arithmetic), dict[str, Line]()
    for stage in stages.stages:
        line = walk.line(stage)
        lines[stage.like or stage.name] = line if stage.like is None else joined(lines[stage.like], line)
    bound = float(walk.outputs())
    subjects = [
        Subject(
            one.claim,
            one.claim.leaves,
            one.claim.leaf_bounds,
            Prover.of(one.stage, one.function, arithmetic),
            middles=one.claim.leaf_middles,
        )
        for one in lines.values()
    ]
    return Proof(subjects, lambda found: bound, at_once=AT_ONCE_STAGED), walk


class Walk:
    """A walk from stage to stage. It keeps `sizes` of the exact numbers so far, and `errors` of the computed ones."""

    def __init__(self, claim: Claim, stages: Stages, reduction: Reduction, arithmetic: Arithmetic) -> None:
        self.claim, self.reduction, self.arithmetic = claim, reduction, arithmetic
        self.stages, self.texts, self.axes = stages
        self.halved = itertools.count()  # counts the parts of the box that are halved
        self._compose()
        sizes: Terms = {i: arb(max(abs(lo), abs(hi))) for i, (lo, hi) in enumerate(claim.ends)}
        errors = {i: arithmetic.cast_error(size) + reduction.program.flush for i, size in sizes.items()}
        reduction.reach.update({i: size + errors[i] for i, size in sizes.items()})
        self.sizes: Terms = {CONSTANT: arb(1), **sizes}
        self.errors: Terms = {CONSTANT: arb(0), **errors}
        self.links: list[Link] = []

    def _compose(self) -> None:
        """Write the claims as steps in the variables. Raise Refused unless their outputs are the expression."""
        self.reader = reader = Reader(self.claim.variables)
        self.names = [*self.claim.variables, *(stage.name for stage in self.stages)]
        self.flat = Reader(self.names)  # the values of stages are variables, too
        names, same = dict(reader.variables), list[tuple[Step, Step]]()
        wanted = reader.parse(self.claim.expression)
        self.steps: list[tuple[Step, Step]] = []  # argument and carrier of every stage

        def part(owner: str, text: str, known: str | None = None) -> Step:
            try:
                (step,) = reader.parse(text, names)
                if known is None:
                    return step
                (as_known,) = reader.parse(known)
            except (BadFile, ValueError) as error:
                raise Refused(f"{owner} is no combination of variables and of stages before it: {error}") from None
            same.append((step, as_known))
            return as_known

        for stage in self.stages:
            argument = part(f"the input of stage {stage.name}", stage.argument, stage.argument_as)
            carrier = part(f"the carrier of stage {stage.name}", stage.unit, stage.carrier_as)
            g, *more = reader.parse(stage.function, {"t": argument})
            require(not more, f"the function of stage {stage.name!r:.40} has several outputs")
            names[stage.name] = reader.add("times", carrier, g)
            self.steps.append((argument, carrier))
        outputs = [part("an output", text) for text in self.texts]
        if not are_equal(reader, same):
            raise Refused("the stated form of an input or a carrier does not follow from the stages before it")
        if len(wanted) != len(outputs) or not are_equal(reader, zip(outputs, wanted, strict=True)):
            raise Refused(f"the stages put together are not known to be the expression {self.claim.expression:.60}")
        if not all(end.is_finite() for step in wanted for end in self._range(step, ANYWHERE)):
            raise Refused("the range of the expression is not known: it may be undefined, or unbounded, on the box")
        self.function = reader.function(sorted({*itertools.chain(*self.steps)}))

    def _range(self, step: Step, enough: Range) -> Range:
        """Return a range of the step on the box. An end that lies within `enough` is not refined."""
        return self._end(step, -1, enough[0]), self._end(step, 1, enough[1])

    def _end(self, step: Step, side: int, enough: arb) -> arb:
        """Return one end of the range. The part that reaches farthest is halved along variables that the step reads.

        This stops when no part reaches beyond `enough`, or when the farthest part is small.
        """
        function, numbers = self.reader.function([step]), itertools.count()
        axes = [x for rule, given in function.steps.values() if rule == "variable" for x in given if isinstance(x, int)]
        pending: list[tuple[arb, int, int, list[Range]]] = []

        def add(part: list[Range], left: int) -> None:
            end = evaluate(function, Ranges(part))[0][side > 0]
            heapq.heappush(pending, (-side * end if end.is_finite() else -INFINITE, left, next(numbers), part))

        halvings = (HALVINGS_OF_A_CLAIM if enough.is_finite() else HALVINGS) if axes else 0
        add(box_of(self.claim), halvings)
        while True:
            farthest, left, _, part = heapq.heappop(pending)
            if -farthest <= side * enough or left == 0 or next(self.halved) >= MOST_HALVINGS:
                return -side * farthest
            for half in halves(part, axes[(halvings - left) % len(axes)]):
                add(half, left - 1)

    def combination(self, text: str, terms: Terms | None = None) -> Combination:
        """Read a combination of variables and earlier stages, with the terms of the network or the nearest floats."""
        names, forms = self.names[: len(self.claim.variables) + len(self.links)], Forms(expands=True)
        known = {name: self.flat.add("variable", i) for i, name in enumerate(names)}
        (form,) = evaluate(self.flat.function(self.flat.parse(text, known)), forms)
        coefficients = forms.linear(form, len(names))
        if coefficients is None or not all(x.is_finite() for x in coefficients):
            raise Refused(f"{text!r:.60} is no affine combination of variables and stages")
        wanted = dict(zip((CONSTANT, *self.reduction.inputs), coefficients, strict=True))
        if terms is None:
            terms = {key: exact(float(x.mid())) for key, x in wanted.items()}
        apart = {key: wanted.get(key, 0) - arb(terms.get(key, 0)) for key in wanted.keys() | terms.keys()}
        stages: Terms = {key: arb(w) for key, w in terms.items() if isinstance(key, tuple) and w != 0}
        casts: Terms = {key: w for key, w in terms.items() if not isinstance(key, tuple)}
        slack = span(apart, self.sizes) + span(casts, self.errors)
        differs = {key: abs(x) for key, x in apart.items()}
        return Combination(terms, stages, slack, slack + span(stages, self.errors), differs)

    def line(self, claim: StageClaim) -> Line:
        """Return the stage as a function of t, and record its error for later stages."""
        argument, carrier = self.steps[len(self.links)]
        place, stage = stage_at(self.reduction, claim.stage, claim.channel)
        require(place not in self.errors, f"two stages claim to write {claim.channel!r:.60}")
        t, unit = self.combination(claim.argument), self.combination(claim.unit)
        inner = (claim.interval[0] + t.off).upper(), (claim.interval[1] - t.off).lower()
        low, high = self._range(argument, inner)
        if not inner[0] <= low <= high <= inner[1]:
            found = f"[{float(low - t.off):.9g}, {float(high + t.off):.9g}]"
            raise Refused(f"the input of stage {claim.name} may leave the claimed interval: it may be in {found}")
        exact_size = size_of(self._range(carrier, NOWHERE))
        size = (exact_size + unit.off).max(arb(claim.carrier_size or 0))
        unit_terms, reach = None if claim.carrier is None else unit.terms, self.reduction.reach
        line, unsure, fixed = along(stage, t.terms, unit_terms, reach, size, claim.name)
        unsure += self.reduction.program.flush + arb(claim.noise or 0)
        fixed = arb(0) if claim.carrier is None else self._rounding_of(fixed, line)
        pieces, own = Pieces(claim, low, high, t.off, bool(self.axes)), size * claim.bound + unsure
        deviations = Deviations(claim, size, size / span(unit.terms, reach), fixed, unsure)
        self.links.append(Link(place, argument, t, pieces, carrier, unit, deviations, claim, (low, high), stage, line))
        whole = pieces.around()
        g = size_of(whole.values)
        self.sizes[place], self.errors[place] = exact_size * g, own + size * whole.change + g * unit.off
        self.reduction.reach[place] = self.sizes[place] + self.errors[place]
        if not self.reduction.reach[place].is_finite():
            raise Refused("the range of a stage is not known: a function may be undefined, or unbounded, on the box")
        return Line(claim, line, held(claim))

    def _rounding_of(self, fixed: arb, line: Stage) -> arb:
        """Bound the rounding of parts of values of this size that cancel exactly, in values and in sums over keys."""
        n = line.affine[0].n + sum(
            3 * head.num_keys + head.values[0].n + head.n + head.addends + FURTHER for head in line.heads
        )
        gamma = self.arithmetic.gamma(n)
        if self.arithmetic.u == 0 or not gamma < arb(1) / 8:
            return fixed
        return 3 * gamma * fixed + n**2 * SMALLEST[self.arithmetic.name]

    @property
    def has_signs(self) -> bool:
        """Whether the signs of the errors of some stages are known."""
        return any(link.own.has_signs for link in self.links)

    def wanted(self) -> list[Combination]:
        """Return the outputs as combinations of the stages. Their slack includes rounding."""
        stage, wanted = self.reduction.stage(), list[Combination]()
        require(not stage.heads, "an output reads a softmax that no stage has proved")
        for form, text in zip(stage.affine, self.texts, strict=True):
            found = self.combination(text, form.terms)
            rounding = self.arithmetic.gamma(form.n) * span(form.sizes, self.reduction.reach)
            wanted.append(found._replace(slack=found.slack + rounding))
        return wanted

    def outputs(self) -> arb:
        """Bound the errors of all outputs. The box is halved along the claimed axes in turn as far as needed."""
        wanted = self.wanted()

        def error(part: list[Range]) -> arb:
            found = self._error(part, wanted, self.claim.bound - arb(self.claim.truncation))
            return found + self.claim.truncation

        return self.largest(error, self.claim.bound, self.axes, "the errors of the stages add up to")

    def largest(self, error: Callable[[list[Range]], arb], bound: float, axes: tuple[int, ...], what: str) -> arb:
        """Return the largest error on all parts of the box, which is halved along these axes as far as needed."""

        def worst(part: list[Range], axes: tuple[int, ...]) -> arb:
            found = error(part)
            if found <= bound:
                return found
            if not axes or next(self.halved) >= MOST_HALVINGS:
                raise Refused(f"{what} {float(found):.9g} on a part of the box, the bound is {bound:.9g}")
            return most(worst(half, axes[1:]) for half in halves(part, axes[0]))

        return worst(box_of(self.claim), axes)

    def on(self, part: list[Range]) -> tuple[Ranges, dict[int, Range], dict[Key, Piece]]:
        """Return the ranges of all steps on a part of the box, and the pieces of all functions there."""
        rules = Ranges(part)
        values = dict(zip(self.function.outputs, evaluate(self.function, rules), strict=True))
        return rules, values, {link.place: link.pieces.around(values[link.argument]) for link in self.links}

    def _error(self, part: list[Range], outputs: list[Combination], limit: arb) -> arb:
        """Bound the errors on a part of the box. Above the limit it may be any number, and nan if a range is nan."""
        rules, values, met = self.on(part)

        def effect(link: Link) -> float:
            low, high = met[link.place].slopes
            return float((high - low) * size_of(values[link.carrier]) * link.t.off)

        whole = self._off(rules, values, met, outputs)
        if whole <= limit:
            return whole
        if self.has_signs:
            signed = self._signed(rules, values, met, outputs)
            if signed <= limit:
                return signed
        worst, bent = arb(0), [link.place for link in sorted(self.links, key=effect, reverse=True)[:KINKS]]
        for ends in itertools.product(*(sorted(met[place].slopes, key=abs, reverse=True) for place in bent)):
            chosen = {place: met[place]._replace(slopes=(x, x)) for place, x in zip(bent, ends, strict=True)}
            found = self._off(rules, values, met | chosen, outputs)
            if not found <= limit:
                return found
            worst = worst.max(found)
        return worst

    def _off(self, rules: Ranges, values: dict[int, Range], met: dict[Key, Piece], outputs: list[Combination]) -> arb:
        """Bound the errors of the outputs for these slopes."""
        own, forms = self.flow(rules, values, met)
        found = [(combined(rules, (ONE, output, forms)), output.slack) for output in outputs]
        return most([slack + total(size_of(x) * own[source] for source, x in form.items()) for form, slack in found])

    def _signed(
        self, rules: Ranges, values: dict[int, Range], met: dict[Key, Piece], outputs: list[Combination]
    ) -> arb:
        """Bound the same errors as sums of errors with signs: of Σ_s σ_s·Ĉ_s·(stage − g)_s, and of the rest."""
        _, forms = self.flow(rules, values, met)
        ends, beside = self.ends(rules, values, met)
        found = list[arb]()
        for output in outputs:
            form = combined(rules, (ONE, output, forms))
            parts = [rules.times(x, ends[source]) for source, x in form.items()]
            rest = total(size_of(x) * beside[source] for source, x in form.items())
            found.append(size_of(added_up(parts)) + rest + output.slack)
        return most(found)

    def ends(
        self, rules: Ranges, values: dict[int, Range], met: dict[Key, Piece]
    ) -> tuple[dict[Key, Range], dict[Key, arb]]:
        """Return Ĉ·(stage − g) for every stage, and the rest of the error that it adds itself."""
        ends: dict[Key, Range] = {}
        beside: dict[Key, arb] = {}
        for link in self.links:
            _, _, slopes, jump, g, _ = met[link.place]
            C, own = computed(values[link.carrier], link.unit), link.own
            ends[link.place] = rules.times(C, own.between(values[link.argument], link.t.off))
            beside[link.place] = size_of(C) * (jump + size_of(slopes) * link.t.slack) + size_of(g) * link.unit.slack
            beside[link.place] += own.fixed + own.unsure
        return ends, beside

    def flow(self, rules: Ranges, values: dict[int, Range], met: dict[Key, Piece]) -> tuple[dict[Key, arb], Effects]:
        """Return the error that every stage adds itself, and the σ_s of every stage."""
        own: dict[Key, arb] = {}
        forms: Effects = {}
        for link in self.links:
            _, _, slopes, jump, g, _ = met[link.place]
            C = computed(values[link.carrier], link.unit)
            own[link.place] = (
                link.own.over(values[link.argument], link.t.off, size_of(C)) + size_of(g) * link.unit.slack
            )
            own[link.place] += size_of(C) * (jump + size_of(slopes) * link.t.slack)
            forms[link.place] = combined(rules, (rules.times(C, slopes), link.t, forms), (g, link.unit, forms))
            forms[link.place][link.place] = ONE
        return own, forms


def computed(carrier: Range, unit: Combination) -> Range:
    """Return the range of a carrier as computed."""
    return (carrier[0] - unit.off).lower(), (carrier[1] + unit.off).upper()


def combined(rules: Ranges, *parts: tuple[Range, Combination, Effects]) -> dict[Key, Range]:
    """Return Σ factor·combination of effects, by their sources."""
    whole: dict[Key, Range] = {}
    for factor, combination, effects in parts:
        found: dict[Key, Range] = {}
        for key, w in combination.stages.items():
            for source, (low, high) in effects[key].items():
                a, b = found.get(source, ZERO)
                found[source] = (a + low * w, b + high * w) if w > 0 else (a + high * w, b + low * w)
        for source, x in found.items():
            whole[source] = rules.plus(whole.get(source, ZERO), rules.times(x, factor))
    return whole


def added_up(parts: list[Range]) -> Range:
    """Return the sum of ranges."""
    return total(low for low, _ in parts), total(high for _, high in parts)


def size_of(range_: Range) -> arb:
    return most([-range_[0], range_[1]])


def box_of(claim: Claim) -> list[Range]:
    return [(arb(lo), arb(hi)) for lo, hi in claim.ends]


def halves(part: list[Range], axis: int) -> list[list[Range]]:
    low, high = part[axis]
    middle = ((low + high) / 2).mid()
    return [[*part[:axis], half, *part[axis + 1 :]] for half in ((low, middle), (middle, high))]
