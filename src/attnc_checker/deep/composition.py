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
Errors ε_k of scores are counted like those of rounding. Where G may be infinite, as of √t at 0, what g changes by there
counts to own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.averages import total
from attnc_checker.claims import Claim, StageClaim
from attnc_checker.deep.forms import Forms, are_equal
from attnc_checker.deep.lines import Line, along, held, joined
from attnc_checker.deep.pieces import ZERO, Piece, pieces_of
from attnc_checker.expressions import Function, Reader, evaluate, parse
from attnc_checker.files import BadFile, Refused
from attnc_checker.network import Reduction, Row
from attnc_checker.program import exact
from attnc_checker.ranges import Range, Ranges
from attnc_checker.rounding import Arithmetic, most

ONE = (arb(1), arb(1))
HALVINGS = 12
"""At most so often the box is halved, along its variables in turn, to find ranges: less if the claim needs no more."""
MOST_PARTS = 10_000
"""At most so many parts of the box, to find how far its outputs are off."""


class Link(NamedTuple):
    """How a stage passes on errors: those of the argument by the slopes of g, those of the carrier by its values."""

    place: Any
    argument: int
    t: dict[Any, Any]
    slack: Any
    pieces: list[Piece]
    carrier: int | None
    unit: dict[Any, Any]
    unit_slack: Any
    off: Any  # of the carrier
    own: Any

    def around(self, t: Range) -> tuple[Range, Any, Range]:
        """Slopes, jump and values for all t of a range."""
        met = [piece for piece in self.pieces if not (piece.high < t[0] or t[1] < piece.low)]
        slopes, values = (
            (-most([-x for x, _ in of]), most([x for _, x in of]))
            for of in ([piece.slopes for piece in met], [piece.values for piece in met])
        )
        return slopes, most([piece.jump for piece in met]), values


def lines(claim: Claim, reduction: Reduction, arithmetic: Arithmetic) -> tuple[list[Line], Any]:
    """What is left to prove of every stage, and above sup |f − network| if all of it is true."""
    walk, found = _Walk(claim, reduction, arithmetic), dict[str, Line]()
    for number, stage in enumerate(claim.stages):
        line = walk.line(number, stage)
        found[stage.like or stage.name] = line if stage.like is None else joined(found[stage.like], line)
    return list(found.values()), walk.outputs()


class _Walk:
    def __init__(self, claim: Claim, reduction: Reduction, arithmetic: Arithmetic) -> None:
        self.claim, self.reduction, self.arithmetic = claim, reduction, arithmetic
        self.keys: dict[str, Any] = {name: i for i, name in enumerate(claim.variables)}
        self._compose()
        self.sizes = {i: arb(max(abs(lo), abs(hi))) for i, (lo, hi) in enumerate(claim.ends)}  # of exact values
        self.errors = {i: arithmetic.cast_error(size) for i, size in self.sizes.items()}
        self.links: list[Link] = []
        reduction.reach.update({i: size + self.errors[i] for i, size in self.sizes.items()})

    def _compose(self) -> None:
        """The claims as steps in the variables; their ranges; and that their outputs are the expression."""
        reader = Reader(self.claim.variables)
        names, same = dict(reader.variables), list[tuple[int, int]]()
        wanted = reader.parse(self.claim.expression)
        self.steps: list[tuple[int, int, int, int | None]] = []  # of every stage: value, argument, g, carrier

        def part(owner: str, text: Any, known: Any) -> int:
            try:
                (step,) = reader.parse(text, names)
                if known is None:
                    return step
                (as_known,) = reader.parse(known)
                same.append((step, as_known))
                return as_known
            except (BadFile, ValueError) as error:
                raise Refused(f"{owner} is no combination of variables and of stages before it: {error}") from None

        for stage in self.claim.stages:
            if stage.name in names:
                raise Refused(f"two stages or variables are called {stage.name!r:.40}")
            argument = part(f"the input of stage {stage.name}", stage.argument, stage.argument_as)
            g, *more = reader.parse(stage.function, {"t": argument})
            if more:
                raise Refused(f"the function of stage {stage.name!r:.40} has several outputs")
            value, carrier = g, None
            if stage.carrier is not None:
                carrier = part(f"the carrier of stage {stage.name}", stage.carrier, stage.carrier_as)
                value = reader.add("*", carrier, g)
            names[stage.name] = value
            self.steps.append((value, argument, g, carrier))
        outputs = [part("an output", text, None) for text in self.claim.outputs]
        if not are_equal((reader.steps, []), same):
            raise Refused("what is claimed to be known of an input or a carrier does not follow from the stages before")
        if len(wanted) != len(outputs) or not are_equal((reader.steps, []), list(zip(outputs, wanted, strict=True))):
            raise Refused(f"the stages put together are not known to be the expression {self.claim.expression:.60}")
        self.function = reader.steps
        self.needed = sorted({*wanted, *(i for steps in self.steps for i in steps if i is not None)})
        self.ranges = dict(zip(self.needed, _ranges((self.function, self.needed), self.claim), strict=True))

    def _combination(self, text: str, count: int) -> tuple[list[Any], list[Any]]:
        """The coefficients of an affine combination of the variables and of the first `count` stages."""
        names = [*self.claim.variables, *(stage.name for stage in self.claim.stages[:count])]
        forms = Forms(expands=True, waves=False)
        (form,) = evaluate(parse(text, names), forms)
        coefficients = forms.linear(form, len(names))
        if coefficients is None or not all(x.is_finite() for x in coefficients):
            raise Refused(f"{text!r:.60} is no affine combination of variables and stages")
        return [self.keys[name] for name in names], coefficients

    def _floats(self, text: str, count: int) -> tuple[Row, dict[Any, Any], Any, Any]:
        """The floats nearest to the coefficients, over all inputs, and of stages alone; how far these at exact stages,
        and at those as computed, may be from the exact combination."""
        keys, coefficients = self._combination(text, count)
        near = [exact(float(x.mid())) for x in coefficients]
        slack, *slacks = (abs(x - arb(w)) for x, w in zip(coefficients, near, strict=True))
        slack += total(x * self.sizes[key] for key, x in zip(keys, slacks, strict=True))
        weights = dict(zip(keys, near[1:], strict=True))
        row = (near[0], *(weights.get(key, fmpq(0)) for key in self.reduction.inputs))
        stages, casts = self._split({key: arb(w) for key, w in weights.items()})
        return row, stages, slack + casts, slack + casts + total(abs(w) * self.errors[key] for key, w in stages.items())

    def _split(self, weights: dict[Any, Any]) -> tuple[dict[Any, Any], Any]:
        """The stages of a combination, and what its variables are off by."""
        d = len(self.claim.variables)
        casts = total(abs(w) * self.errors[key] for key, w in weights.items() if key in range(d))
        return {key: w for key, w in weights.items() if key not in range(d) and w != 0}, casts

    def line(self, number: int, claim: StageClaim) -> Line:
        """A stage as one of t; its own error becomes known to those after it."""
        value, argument, g, carrier = self.steps[number]
        place, stage = self.reduction.stage_at(claim.layer, claim.channel)
        if place in self.errors:
            raise Refused(f"two stages are said to write {claim.channel!r:.60}")
        t, weights, slack, error = self._floats(claim.argument, number)
        low, high = self.ranges[argument]
        if not (claim.ends[0] <= low - error and high + error <= claim.ends[1]):
            found = f"[{float(low - error):.9g}, {float(high + error):.9g}]"
            raise Refused(f"the input of stage {claim.name} may leave the claimed interval: it may be in {found}")
        unit, units, size, unit_slack, off = None, dict[Any, Any](), arb(1), arb(0), arb(0)
        if carrier is not None and claim.carrier is not None:
            unit, units, unit_slack, off = self._floats(claim.carrier, number)
            size = _size(self.ranges[carrier]) + off
        reach = [self.reduction.reach[key] for key in self.reduction.inputs]
        line, unsure = along(stage, t, unit, reach, size, claim.name)
        # not in units of the carrier
        unsure += total(4 * len(head.scores) * self.arithmetic.lost for head in line.heads)
        pieces, own = pieces_of(claim, low, high, error, bool(self.claim.axes)), size * claim.bound + unsure
        self.links.append(Link(place, argument, weights, slack, pieces, carrier, units, unit_slack, off, own))
        self.sizes[place] = _size(self.ranges[value])
        self.errors[place] = own + size * most([p.change for p in pieces]) + _size(self.ranges[g]) * off
        self.reduction.reach[place], self.keys[claim.name] = self.sizes[place] + self.errors[place], place
        return Line(claim, line, held(claim))

    def outputs(self) -> Any:
        """Above all errors. The box is halved along the claimed axes, one after the other, as far as it takes."""
        stage, wanted = self.reduction.stage(), []
        if stage.heads:
            raise Refused("an output reads a softmax that no stage has proved")
        inputs, reach = self.reduction.inputs, self.reduction.reach
        for o, text in enumerate(self.claim.outputs):
            keys, (constant, *coefficients) = self._combination(text, len(self.claim.stages))
            known = dict(zip(keys, coefficients, strict=True))
            b, *row = stage.affine[o]
            differs = total(abs(arb(x) - known[key]) * self.sizes[key] for key, x in zip(inputs, row, strict=True))
            first, *others = stage.affine_sizes[o]
            size = first + total(x * reach[key] for x, key in zip(others, inputs, strict=True))
            weights, casts = self._split({key: arb(x) for key, x in zip(inputs, row, strict=True)})
            wanted.append(
                (weights, abs(b - constant) + differs + casts + self.arithmetic.gamma(stage.n_affine[o]) * size)
            )
        pending, seen, worst = [(_box(self.claim), 0)], 0, arb(0)
        while pending:
            part, depth = pending.pop()
            seen, found = seen + 1, self._error(part, wanted) + self.claim.truncation
            if found <= self.claim.bound:
                worst = worst.max(found)
                continue
            if depth == len(self.claim.axes) or seen > MOST_PARTS:
                raise Refused(
                    f"the errors of the stages add up to {float(found):.9g} on a part of the box, the bound is "
                    f"{self.claim.bound:.9g}"
                )
            pending += [(half, depth + 1) for half in _halves(part, self.claim.axes[depth])]
        return worst

    def _error(self, part: list[Range], outputs: list[tuple[dict[Any, Any], Any]]) -> Any:
        """Above the errors of the outputs on a part of the box; nan if that is too wide for a range to be known."""
        rules, own = Ranges(part), dict[Any, Any]()
        values = dict(zip(self.needed, evaluate((self.function, self.needed), rules), strict=True))
        forms: dict[Any, dict[Any, Range]] = {}  # of every stage the σ_s

        def combined(weights: dict[Any, Any], factor: Range, sum_: dict[Any, Range]) -> dict[Any, Range]:
            """sum + factor·Σ weight·stage."""
            found: dict[Any, Range] = {}
            for key, w in weights.items():
                for source, (low, high) in forms[key].items():
                    a, b = found.get(source, ZERO)
                    found[source] = (a + low * w, b + high * w) if w > 0 else (a + high * w, b + low * w)
            for source, x in found.items():
                x = rules.times(x, factor)
                sum_[source] = rules.plus(sum_[source], x) if source in sum_ else x
            return sum_

        for link in self.links:
            slopes, jump, g = link.around(values[link.argument])
            C = ONE if link.carrier is None else _enlarged(values[link.carrier], link.off)
            form = combined(link.unit, g, combined(link.t, rules.times(C, slopes), {}))
            own[link.place] = link.own + _size(C) * (jump + _size(slopes) * link.slack) + _size(g) * link.unit_slack
            forms[link.place] = form | {link.place: ONE}
        found = [(combined(weights, ONE, {}), fixed) for weights, fixed in outputs]
        return most([fixed + total(_size(x) * own[source] for source, x in form.items()) for form, fixed in found])


def _enlarged(range_: Range, off: Any) -> Range:
    return (range_[0] - off).lower(), (range_[1] + off).upper()


def _size(range_: Range) -> Any:
    return most([-range_[0], range_[1]])


def _ranges(function: Function, claim: Claim) -> list[Range]:
    """Where the outputs lie, in exact arithmetic, over the box. Parts that bring nothing new are not halved."""
    pending, found, halvings = [(_box(claim), 0)], list[Range](), HALVINGS if len(claim.ends) <= HALVINGS else 0
    halvings = min(halvings, (claim.parts or 2**HALVINGS).bit_length() - 1)
    while pending:
        part, depth = pending.pop()
        here = evaluate(function, Ranges(part))
        if depth == halvings:
            found = [(a.min(c), b.max(d)) for (a, b), (c, d) in zip(found or here, here, strict=True)]
        elif not found or not all(a <= c and d <= b for (a, b), (c, d) in zip(found, here, strict=True)):
            pending += [(half, depth + 1) for half in _halves(part, depth % len(part))]
    if not all(x.is_finite() for range_ in found for x in range_):
        raise Refused("the range of a stage is not known: a function may be undefined, or unbounded, on the box")
    return found


def _box(claim: Claim) -> list[Range]:
    return [(arb(lo), arb(hi)) for lo, hi in claim.ends]


def _halves(part: list[Range], axis: int) -> list[list[Range]]:
    low, high = part[axis]
    middle = ((low + high) / 2).mid()
    return [[*part[:axis], half, *part[axis + 1 :]] for half in ((low, middle), (middle, high))]
