"""Deep programs, stage by stage: what a certificate says of its stages is put together, and is the expression.

A stage claims that what attention writes into one channel is carrier·g(t), t and the carrier being affine combinations
of the variables and of the stages before it. In exact arithmetic its value is then a function of the variables: ranges
follow from interval arithmetic over many parts of the box, and that the outputs are the expression from normal forms.

Theorem.  Let û be the state as computed, |û_i − u_i| ≤ e_i and |û_i| ≤ R_i. With w_i the floats nearest to the
coefficients of t, T(û) = w_0 + Σ w_i û_i is within e = Σ |w_i| e_i + Σ |coefficient_i − w_i| |u_i| of t; so is the
carrier of its own e_C. If the heads' scores are κ_k·T(û) + c_k up to ε_k, and their values ν_k times the carrier up to
r_k, they are those of a stage of one variable T, which leaves prove to be within δ of g on [lo, hi] ⊇ [t ± e]. So with
own = (|carrier| + e_C)·δ + Σ_heads max r_k the stage writes û_j = Ĉ·g(T(û)) + d_j, |d_j| ≤ own, and
    û_j − u_j = d_j + Ĉ·G·(T(û) − t) + g(t)·(Ĉ − C),  G a slope of g between t and T(û).
Thus û_j − u_j = Σ_s σ_js d_s over the stages s, σ_jj = 1, and on a part of the box every σ lies in an interval: errors
that reach an output along several ways cancel where they do, and it is off by at most Σ_s |σ_s| own_s on every part.
Every σ is affine in each G, and the sum convex: it is largest at ends of their intervals, where those of max(u, v) =
u + relu(v − u) leave the error of u or that of v, and not both.
Errors ε_k of scores are counted like those of rounding. Where G may be infinite, as of √t at 0, what g changes by there
counts to own.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from flint import arb

from attnc_checker.averages import total
from attnc_checker.claims import StageClaim, StagedClaim
from attnc_checker.deep.forms import Forms, are_equal
from attnc_checker.deep.lines import Line, along, held, joined
from attnc_checker.deep.pieces import ZERO, Piece, pieces_of
from attnc_checker.expressions import Function, Reader, Step, evaluate, parse
from attnc_checker.files import BadFile, Refused
from attnc_checker.network import ONE as CONSTANT
from attnc_checker.network import Reduction, Terms, span
from attnc_checker.program import exact
from attnc_checker.ranges import Range, Ranges
from attnc_checker.rounding import Arithmetic, most

ONE = (arb(1), arb(1))
HALVINGS = 12
"""At most so often the box is halved, along its variables in turn, to find ranges: less if the claim needs no more."""
KINKS = 3
"""At most so many of the G are taken at both ends of their intervals."""
MOST_HALVINGS = 5000
"""At most so many parts of the box are halved to find how far its outputs are off."""


class Combination(NamedTuple):
    """w_0 + Σ w_i û_i with floats w, for an affine combination of exact numbers."""

    terms: Terms
    stages: Terms
    slack: Any  # what it is off by, but for the errors of stages
    off: Any  # with these


class Link(NamedTuple):
    """How a stage passes on errors: those of the argument by the slopes of g, those of the carrier by its values."""

    place: Any
    argument: Step
    t: Combination
    pieces: list[Piece]
    carrier: Step
    unit: Combination
    own: Any

    def around(self, t: Range) -> tuple[Range, Any, Range]:
        """Slopes, jump and values for all t of a range."""
        met = [piece for piece in self.pieces if not (piece.high < t[0] or t[1] < piece.low)]
        slopes, values = (
            (-most([-x for x, _ in of]), most([x for _, x in of]))
            for of in ([piece.slopes for piece in met], [piece.values for piece in met])
        )
        return slopes, most([piece.jump for piece in met]), values


def lines(claim: StagedClaim, reduction: Reduction, arithmetic: Arithmetic) -> tuple[list[Line], Any]:
    """What is left to prove of every stage, and above sup |f − network| if all of it is true."""
    walk, found = _Walk(claim, reduction, arithmetic), dict[str, Line]()
    for stage in claim.stages:
        line = walk.line(stage)
        found[stage.like or stage.name] = line if stage.like is None else joined(found[stage.like], line)
    return list(found.values()), walk.outputs()


class _Walk:
    """From stage to stage: `sizes` of the exact numbers that are known so far, and their `errors` as computed."""

    def __init__(self, claim: StagedClaim, reduction: Reduction, arithmetic: Arithmetic) -> None:
        self.claim, self.reduction, self.arithmetic = claim, reduction, arithmetic
        self._compose()
        sizes = {i: arb(max(abs(lo), abs(hi))) for i, (lo, hi) in enumerate(claim.ends)}
        errors = {i: arithmetic.cast_error(size) for i, size in sizes.items()}
        reduction.reach.update({i: size + errors[i] for i, size in sizes.items()})
        self.sizes, self.errors = {CONSTANT: arb(1), **sizes}, {CONSTANT: arb(0), **errors}
        self.links: list[Link] = []

    def _compose(self) -> None:
        """The claims as steps in the variables; their ranges; and that their outputs are the expression."""
        reader = Reader(self.claim.variables)
        names, same = dict(reader.variables), list[tuple[Step, Step]]()
        wanted = reader.parse(self.claim.expression)
        self.steps: list[tuple[Step, ...]] = []  # of every stage: value, argument, g, carrier

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

        for stage in self.claim.stages:
            if stage.name in names:
                raise Refused(f"two stages or variables are called {stage.name!r:.40}")
            argument = part(f"the input of stage {stage.name}", stage.argument, stage.argument_as)
            carrier = part(f"the carrier of stage {stage.name}", stage.unit, stage.carrier_as)
            g, *more = reader.parse(stage.function, {"t": argument})
            if more:
                raise Refused(f"the function of stage {stage.name!r:.40} has several outputs")
            names[stage.name] = reader.add("times", carrier, g)
            self.steps.append((names[stage.name], argument, g, carrier))
        outputs = [part("an output", text) for text in self.claim.outputs]
        if not are_equal((reader.steps, []), same):
            raise Refused("what is claimed to be known of an input or a carrier does not follow from the stages before")
        if len(wanted) != len(outputs) or not are_equal((reader.steps, []), list(zip(outputs, wanted, strict=True))):
            raise Refused(f"the stages put together are not known to be the expression {self.claim.expression:.60}")
        self.function = reader.steps, sorted({*wanted, *itertools.chain(*self.steps)})
        self.ranges = dict(zip(self.function[1], _ranges(self.function, self.claim), strict=True))

    def combination(self, text: str, terms: Terms | None = None) -> Combination:
        """Of the variables and of the stages so far: with the terms of the network, or the nearest floats."""
        names = [*self.claim.variables, *(stage.name for stage in self.claim.stages[: len(self.links)])]
        forms = Forms(expands=True, waves=False)
        (form,) = evaluate(parse(text, names), forms)
        coefficients = forms.linear(form, len(names))
        if coefficients is None or not all(x.is_finite() for x in coefficients):
            raise Refused(f"{text!r:.60} is no affine combination of variables and stages")
        wanted = dict(zip((CONSTANT, *self.reduction.inputs), coefficients, strict=True))
        if terms is None:
            terms = {key: exact(float(x.mid())) for key, x in wanted.items()}
        apart = {key: wanted.get(key, 0) - arb(terms.get(key, 0)) for key in wanted.keys() | terms.keys()}
        stages = {key: arb(w) for key, w in terms.items() if isinstance(key, tuple) and w != 0}
        casts = {key: w for key, w in terms.items() if not isinstance(key, tuple)}
        slack = span(apart, self.sizes) + span(casts, self.errors)
        return Combination(terms, stages, slack, slack + span(stages, self.errors))

    def line(self, claim: StageClaim) -> Line:
        """A stage as one of t; its own error becomes known to those after it."""
        value, argument, g, carrier = self.steps[len(self.links)]
        place, stage = self.reduction.stage_at(claim.stage, claim.channel)
        if place in self.errors:
            raise Refused(f"two stages are said to write {claim.channel!r:.60}")
        t, unit = self.combination(claim.argument), self.combination(claim.unit)
        low, high = self.ranges[argument]
        if not (claim.interval[0] <= low - t.off and high + t.off <= claim.interval[1]):
            found = f"[{float(low - t.off):.9g}, {float(high + t.off):.9g}]"
            raise Refused(f"the input of stage {claim.name} may leave the claimed interval: it may be in {found}")
        size = _size(self.ranges[carrier]) + unit.off
        unit_terms, reach = None if claim.carrier is None else unit.terms, self.reduction.reach
        line, unsure = along(stage, t.terms, unit_terms, reach, size, claim.name)
        # not in units of the carrier
        unsure += total(4 * len(head.keys) * self.arithmetic.lost for head in line.heads)
        pieces, own = pieces_of(claim, low, high, t.off, bool(self.claim.axes)), size * claim.bound + unsure
        self.links.append(Link(place, argument, t, pieces, carrier, unit, own))
        self.sizes[place] = _size(self.ranges[value])
        self.errors[place] = own + size * most([p.change for p in pieces]) + _size(self.ranges[g]) * unit.off
        self.reduction.reach[place] = self.sizes[place] + self.errors[place]
        return Line(claim, line, held(claim))

    def outputs(self) -> Any:
        """Above all errors. The box is halved along the claimed axes, one after the other, as far as it takes."""
        stage, wanted, halved = self.reduction.stage(), list[Combination](), itertools.count()
        if stage.heads:
            raise Refused("an output reads a softmax that no stage has proved")
        for form, text in zip(stage.affine, self.claim.outputs, strict=True):
            found = self.combination(text, form.terms)
            rounding = self.arithmetic.gamma(form.n) * span(form.sizes, self.reduction.reach)
            wanted.append(found._replace(slack=found.slack + rounding))

        def worst(part: list[Range], axes: tuple[int, ...]) -> Any:
            for kinks in (0, KINKS):
                found = self._error(part, wanted, kinks) + self.claim.truncation
                if found <= self.claim.bound:
                    return found
            if not axes or next(halved) == MOST_HALVINGS:
                raise Refused(
                    f"the errors of the stages add up to {float(found):.9g} on a part of the box, the bound is "
                    f"{self.claim.bound:.9g}"
                )
            return most(worst(half, axes[1:]) for half in _halves(part, axes[0]))

        return worst(_box(self.claim), self.claim.axes)

    def _error(self, part: list[Range], outputs: list[Combination], kinks: int) -> Any:
        """Above the errors of the outputs on a part of the box; nan if that is too wide for a range to be known."""
        rules = Ranges(part)
        values = dict(zip(self.function[1], evaluate(self.function, rules), strict=True))
        met = {link.place: link.around(values[link.argument]) for link in self.links}

        def felt(link: Link) -> float:
            (low, high), _, _ = met[link.place]
            return float((high - low) * _size(values[link.carrier]) * link.t.off)

        bent = [link.place for link in sorted(self.links, key=felt, reverse=True)[:kinks]]
        ends = itertools.product(*([(x, x) for x in met[place][0]] for place in bent))
        return most(self._off(rules, values, met, dict(zip(bent, chosen, strict=True)), outputs) for chosen in ends)

    def _off(self, rules: Ranges, values: Any, met: Any, chosen: dict[Any, Range], outputs: list[Combination]) -> Any:
        """The same, with the slopes that are chosen of some stages."""
        own: dict[Any, Any] = {}
        forms: dict[Any, dict[Any, Range]] = {}  # of every stage the σ_s

        def combined(*parts: tuple[Range, Combination]) -> dict[Any, Range]:
            """Σ factor·combination."""
            whole: dict[Any, Range] = {}
            for factor, combination in parts:
                found: dict[Any, Range] = {}
                for key, w in combination.stages.items():
                    for source, (low, high) in forms[key].items():
                        a, b = found.get(source, ZERO)
                        found[source] = (a + low * w, b + high * w) if w > 0 else (a + high * w, b + low * w)
                for source, x in found.items():
                    whole[source] = rules.plus(whole.get(source, ZERO), rules.times(x, factor))
            return whole

        for link in self.links:
            slopes, jump, g = met[link.place]
            low, high = values[link.carrier]
            C = (low - link.unit.off).lower(), (high + link.unit.off).upper()
            own[link.place] = link.own + _size(C) * (jump + _size(slopes) * link.t.slack) + _size(g) * link.unit.slack
            slopes = chosen.get(link.place, slopes)
            forms[link.place] = combined((rules.times(C, slopes), link.t), (g, link.unit)) | {link.place: ONE}
        found = [(combined((ONE, output)), output.slack) for output in outputs]
        return most([slack + total(_size(x) * own[source] for source, x in form.items()) for form, slack in found])


def _size(range_: Range) -> Any:
    return most([-range_[0], range_[1]])


def _ranges(function: Function, claim: StagedClaim) -> list[Range]:
    """Where the outputs lie, in exact arithmetic, over the box. Parts that bring nothing new are not halved."""
    halvings = min(HALVINGS, (claim.parts or 2**HALVINGS).bit_length() - 1) if len(claim.ends) <= HALVINGS else 0
    found: list[Range] = []

    def widen(part: list[Range], depth: int) -> None:
        here = evaluate(function, Ranges(part))
        if depth == halvings:
            found[:] = [(a.min(c), b.max(d)) for (a, b), (c, d) in zip(found or here, here, strict=True)]
        elif not found or not all(a <= c and d <= b for (a, b), (c, d) in zip(found, here, strict=True)):
            for half in _halves(part, depth % len(part)):
                widen(half, depth + 1)

    widen(_box(claim), 0)
    if not all(x.is_finite() for range_ in found for x in range_):
        raise Refused("the range of a stage is not known: a function may be undefined, or unbounded, on the box")
    return found


def _box(claim: StagedClaim) -> list[Range]:
    return [(arb(lo), arb(hi)) for lo, hi in claim.ends]


def _halves(part: list[Range], axis: int) -> list[list[Range]]:
    low, high = part[axis]
    middle = ((low + high) / 2).mid()
    return [[*part[:axis], half, *part[axis + 1 :]] for half in ((low, middle), (middle, high))]
