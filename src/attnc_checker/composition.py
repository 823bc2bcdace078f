"""Deep programs, stage by stage: what a certificate says of its stages is put together, and is the expression.

A stage claims that what attention writes into one channel is carrier·g(t), t and the carrier being affine combinations
of the variables and of the stages before it. In exact arithmetic its value is then a function of the variables: ranges
follow from interval arithmetic over many parts of the box, and that the outputs are the expression from normal forms.

Theorem.  Let û be the state as computed, |û_i − u_i| ≤ e_i and |û_i| ≤ R_i. With w_i the floats nearest to the
coefficients of t, T(û) = w_0 + Σ w_i û_i is within e = Σ |w_i| e_i + Σ |coefficient_i − w_i| |u_i| of t; so is the
carrier of its own e_C. If the heads' scores are κ_k·T(û) + c_k up to ε_k, and their values ν_k times the carrier up to
r_k, they are those of a stage of one variable T, which leaves prove to be within δ of g on [lo, hi] ⊇ [t ± e]. Then
    |computed − carrier·g(t)| ≤ (|carrier| + e_C)(δ + ω(e)) + |g|·e_C + Σ_heads max r_k,
ω(e) the most that g changes between t and t ± e. Errors ε_k of scores are counted like those of rounding.

Where slopes σ of g between t and t ± e are known, errors are linear forms in each other: with Δ_i = û_i − u_i,
    Δ = own + carrier·σ·Σ w_i Δ_i + g·Σ c_i Δ_i,   |own| ≤ (|carrier| + e_C)(δ + |σ|·slack) + |g|·slack_C + Σ max r_k,
c_i the coefficients of the carrier. Put into one another from the outputs down, they keep their signs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import total
from attnc_checker.claims import Claim, StageClaim
from attnc_checker.expressions import Function, Reader, evaluate, parse
from attnc_checker.files import BadFile, Refused
from attnc_checker.forms import Forms, are_equal
from attnc_checker.jets import Models, variable
from attnc_checker.network import Head, Reduction, Row, Stage
from attnc_checker.program import exact
from attnc_checker.ranges import Range, Ranges, hull
from attnc_checker.rounding import Arithmetic, most

PARTS = 4096
"""At most so many parts of the box, all alike, are looked at to find ranges: fewer if the claim needs no more."""
PIECES = 10_000
"""At most so many pieces of an interval, to find how much a function changes."""
MOST_SLACK = 0.25
"""Scores that are off by more are not those of the claimed input."""


@dataclass(frozen=True)
class Line:
    """A stage as a function of one variable t, and what it has to be."""

    claim: StageClaim
    stage: Stage
    function: Function


def lines(claim: Claim, reduction: Reduction, arithmetic: Arithmetic) -> tuple[list[Line], Any]:
    """What is left to prove of every stage, and above sup |f − network| if all of it is true."""
    walk, found = _Walk(claim, reduction, arithmetic), dict[str, Line]()
    for number, stage in enumerate(claim.stages):
        line = walk.line(number, stage)
        found[stage.like or stage.name] = line if stage.like is None else _joined(found[stage.like], line)
    return list(found.values()), walk.outputs()


class _Walk:
    def __init__(self, claim: Claim, reduction: Reduction, arithmetic: Arithmetic) -> None:
        self.claim, self.reduction, self.arithmetic = claim, reduction, arithmetic
        self.keys: dict[str, Any] = {name: i for i, name in enumerate(claim.variables)}
        self._compose()
        self.sizes = {i: arb(max(abs(lo), abs(hi))) for i, (lo, hi) in enumerate(claim.ends)}  # of exact values
        rounding = arithmetic.u if reduction.dtype != "float64" else arb(0)  # of points, which are float64 numbers
        self.errors = {i: rounding * size for i, size in self.sizes.items()}
        self.forms: list[tuple[Any, Any, dict[Any, Any]]] = []  # of every stage: its place, |own|, the factors of Δ_i
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
            (g,) = reader.parse(stage.function, {"t": argument})
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
        needed = sorted({*wanted, *(i for steps in self.steps for i in steps if i is not None)})
        self.ranges = dict(zip(needed, _ranges((reader.steps, needed), self.claim), strict=True))

    def _combination(self, text: str, count: int) -> tuple[list[Any], list[Any]]:
        """The coefficients of an affine combination of the variables and of the first `count` stages."""
        names = [*self.claim.variables, *(stage.name for stage in self.claim.stages[:count])]
        forms = Forms(expands=True, waves=False)
        (form,) = evaluate(parse(text, names), forms)
        coefficients = forms.linear(form, len(names))
        if coefficients is None or not all(x.is_finite() for x in coefficients):
            raise Refused(f"{text!r:.60} is no affine combination of variables and stages")
        return [self.keys[name] for name in names], coefficients

    def _floats(self, text: str, count: int, inputs: list[Any]) -> tuple[Row, Any, Any]:
        """The floats nearest to the coefficients; how far they at the exact state, and at the computed one, may be."""
        keys, coefficients = self._combination(text, count)
        near = [exact(float(x.mid())) for x in coefficients]
        slack, *slacks = (abs(x - arb(w)) for x, w in zip(coefficients, near, strict=True))
        slack += total(x * self.sizes[key] for key, x in zip(keys, slacks, strict=True))
        error = total(abs(arb(w)) * self.errors[key] for key, w in zip(keys, near[1:], strict=True))
        places = dict(zip(keys, near[1:], strict=True))
        return (near[0], *(places.get(key, fmpq(0)) for key in inputs)), slack, slack + error

    def line(self, number: int, claim: StageClaim) -> Line:
        """A stage as one of t; its own error becomes known to those after it."""
        value, argument, g, carrier = self.steps[number]
        place, stage = self.reduction.stage_at(claim.layer, claim.channel)
        if place in self.errors:
            raise Refused(f"two stages are said to write {claim.channel!r:.60}")
        inputs = self.reduction.inputs
        t, slack, error = self._floats(claim.argument, number, inputs)
        low, high = self.ranges[argument]
        if not (claim.ends[0] <= low - error and high + error <= claim.ends[1]):
            found = f"[{float(low - error):.9g}, {float(high + error):.9g}]"
            raise Refused(f"the input of stage {claim.name} may leave the claimed interval: it may be in {found}")
        unit, size, off, slack_C, holds = None, arb(1), arb(0), arb(0), (arb(1), arb(1))
        if carrier is not None and claim.carrier is not None:
            unit, slack_C, off = self._floats(claim.carrier, number, inputs)
            holds = self.ranges[carrier][0] - off, self.ranges[carrier][1] + off
            size = _size(holds)
        reach = [self.reduction.reach[key] for key in inputs]
        line, unsure = _along(stage, t, unit, reach, size, claim.name)
        unsure += total(
            4 * len(head.scores) * self.arithmetic.lost for head in line.heads
        )  # not in units of the carrier
        function = parse(claim.function, ["t"])
        slope = _slope(_held(claim), low - error, high + error)
        if claim.held is not None and not (claim.held[0] <= low and high <= claim.held[1]):
            error, slope = most([error, claim.held[0] - low, high - claim.held[1]]), arb("nan")
        if not _changes_at_most(claim, function, low, high, error):
            raise Refused(f"stage {claim.name} may pass on more of the error {float(error):.3g} of its input")
        largest, own, form = _size(self.ranges[g]), size * arb(claim.bound) + unsure, dict[Any, Any]()
        self.errors[place], self.sizes[place] = own + size * claim.passed + largest * off, _size(self.ranges[value])
        if slope.is_finite():
            moves, own = hull(holds) * slope, own + size * abs(slope) * slack + largest * slack_C
            rows = zip(inputs, t[1:], unit[1:] if unit else [fmpq(0)] * len(inputs), strict=True)
            form = {key: moves * w + hull(self.ranges[g]) * c for key, w, c in rows if w != 0 or c != 0}
        self.forms.append((place, own if form else self.errors[place], form))
        self.reduction.reach[place], self.keys[claim.name] = self.sizes[place] + self.errors[place], place
        return Line(claim, line, _held(claim))

    def outputs(self) -> Any:
        stage, errors = self.reduction.stage(), []
        inputs = self.reduction.inputs
        for o, text in enumerate(self.claim.outputs):
            keys, coefficients = self._combination(text, len(self.claim.stages))
            wanted = dict(zip(keys, coefficients[1:], strict=True))
            b, row = stage.affine[o][0], dict(zip(inputs, map(arb, stage.affine[o][1:]), strict=True))
            error = abs(b - coefficients[0]) + total(abs(x - wanted[key]) * self.sizes[key] for key, x in row.items())
            error += self._carried(row).min(total(abs(x) * self.errors[key] for key, x in row.items()))
            sizes = zip(stage.affine_sizes[o][1:], (self.reduction.reach[key] for key in inputs), strict=True)
            size = stage.affine_sizes[o][0] + total(x * r for x, r in sizes)
            errors.append(error + self.arithmetic.gamma(stage.n_affine[o]) * size)
        return most(errors) + self.claim.truncation

    def _carried(self, factors: dict[Any, Any]) -> Any:
        """Above |Σ factor·Δ|, stage by stage in terms of those before, and of the inputs."""
        factors, found = dict(factors), arb(0)
        for place, own, form in reversed(self.forms):
            factor = factors.pop(place, arb(0))
            found += abs(factor) * own
            for key, x in form.items():
                factors[key] = factors.get(key, arb(0)) + factor * x
        return found + total(abs(x) * self.errors[key] for key, x in factors.items())


def _joined(one: Line, other: Line) -> Line:
    """What holds of both: the heads of a stage, with room for those of one that is like it."""
    t, heads = most(map(arb, map(abs, one.claim.ends))), []
    if len(one.stage.heads) != len(other.stage.heads):
        raise Refused(f"stage {other.claim.name} is not like {one.claim.name}: it has other heads")

    def largest(a: Any, b: Any) -> Any:
        return [tuple(map(arb.max, *rows)) for rows in zip(a, b, strict=True)]

    for a, b in zip(one.stage.heads, other.stage.heads, strict=True):
        fine, others = a.roundings, b.roundings
        if a.values != b.values or (fine and fine.parts) != (others and others.parts):
            raise Refused(f"stage {other.claim.name} is not like {one.claim.name}: its keys have other values")
        rows = zip(a.scores, b.scores, a.score_slack, b.score_slack, strict=True)
        slack = [r.max(s + abs(arb(x[0] - y[0])) + abs(arb(x[1] - y[1])) * t) for x, y, r, s in rows]
        if not most(slack) <= MOST_SLACK:
            raise Refused(f"stage {other.claim.name} is not like {one.claim.name}: its keys have other scores")
        if fine and others:
            query, own = largest(fine.query, others.query), largest(fine.own, others.own)
            fine = replace(fine, query=query, own=own, n=max(fine.n, others.n), terms=max(fine.terms, others.terms))
        sizes, n = largest(a.score_sizes, b.score_sizes), max(a.n_score, b.n_score)
        value_sizes, n_value = {0: largest(a.value_sizes[0], b.value_sizes[0])}, {0: max(a.n_value[0], b.n_value[0])}
        heads.append(Head(a.scores, sizes, n, a.values, value_sizes, n_value, slack, fine))
    sizes = largest(one.stage.affine_sizes, other.stage.affine_sizes)
    n_affine = [*map(max, one.stage.n_affine, other.stage.n_affine)]
    return replace(one, stage=Stage(heads, one.stage.affine, sizes, n_affine))


def _size(range_: Range) -> Any:
    return most([-range_[0], range_[1]])


def _ranges(function: Function, claim: Claim) -> list[Range]:
    """Where the outputs lie, in exact arithmetic, over the box."""
    count = max(1, int(min(PARTS, claim.parts or PARTS) ** (1 / len(claim.ends))))
    ends = [[exact(lo) + (exact(hi) - exact(lo)) * i / count for i in range(count + 1)] for lo, hi in claim.ends]
    sides = [[(arb(a).lower(), arb(b).upper()) for a, b in itertools.pairwise(points)] for points in ends]
    found: list[Range] = []
    for part in itertools.product(*sides):
        here = evaluate(function, Ranges(part))
        found = [(a.min(c), b.max(d)) for (a, b), (c, d) in zip(found or here, here, strict=True)]
    if not all(x.is_finite() for range_ in found for x in range_):
        raise Refused("the range of a stage is not known: a function may be undefined, or unbounded, on the box")
    return found


def _held(claim: StageClaim) -> Function:
    """g as leaves have to prove it: held at the ends of the interval on which it is defined."""
    reader = Reader(["t"])
    t = reader.variables["t"]
    if claim.held is not None:
        t = reader.add("clip", t, *(reader.add("number", exact(end)) for end in claim.held))
    return reader.steps, reader.parse(claim.function, {"t": t})


def _changes_at_most(claim: StageClaim, function: Function, low: Any, high: Any, e: Any) -> bool:
    """Whether |g(s) − g(t)| ≤ passed for t in [low, high], |s − t| ≤ e, s not beyond where g is held."""
    if e == 0:
        return True
    first, last = arb("-inf"), arb("inf")
    if claim.held is not None:
        first, last = low.min(arb(claim.held[0])), high.max(arb(claim.held[1]))
    pending, seen = [(low, high)], 0
    while pending:
        a, b = pending.pop()
        seen += 1
        left, right = (a - e).max(first).lower(), (b + e).min(last).upper()
        if any(_change(function, left, right, e, m) <= claim.passed for m in (1, 0)):
            continue
        if seen > PIECES:
            return False
        middle = ((a + b) / 2).mid()
        pending += [(a, middle), (middle, b)]
    return True


def _change(function: Function, left: Any, right: Any, e: Any, m: int) -> Any:
    """Above |g(s) − g(t)| for s, t in [left, right], |s − t| ≤ e: by slopes, of order m + 1, or by the range."""
    half, linear = ((right - left) / 2).upper(), variable(0, 1)
    rules = Models([(left + right) / 2], [half], m)
    rules.ranges = Ranges([(left, right)])
    try:
        (model,) = evaluate(function, rules)
    except (ArithmeticError, ValueError):
        return arb("nan")
    zero, slope = arb(0), abs(model.wide.get(linear, arb(0)))
    if m:  # g′ = g′(c) + g″·(t − c), and wide has g″/2
        slope = slope.min(abs(model.point.get(linear, zero)) + 2 * abs(model.wide.get(2 * linear, zero)))
    by_range = model.range[1] - model.range[0]
    by_slope = slope * e / half
    return by_slope if by_slope <= by_range else by_range


def _slope(function: Function, left: Any, right: Any) -> Any:
    """Of all secants of g on [left, right]."""
    half = ((right - left) / 2).upper()
    rules = Models([(left + right) / 2], [half], 0)
    rules.ranges = Ranges([(left.lower(), right.upper())])
    try:
        (model,) = evaluate(function, rules)
    except (ArithmeticError, ValueError):
        return arb("nan")
    return model.wide.get(variable(0, 1), arb(0)) / half


def _along(stage: Stage, t: Row, unit: Row | None, reach: list[Any], size: Any, name: str) -> tuple[Stage, Any]:
    """A stage as one of t, in units of the carrier; and what its values may be off by."""
    main = max(range(1, len(t)), key=lambda i: (abs(arb(t[i])) * reach[i - 1]).mid())
    if t[main] == 0:
        raise Refused(f"the input of stage {name} is constant")
    if any(x != 0 for x in stage.affine[0]):
        raise Refused(f"stage {name} is not made by its heads alone")
    moving = [i for i in range(1, len(t)) if t[i] != 0]

    def left_over(row: Row, ratio: Any, by: Row) -> Any:
        return total(abs(arb(x - ratio * w)) * r for x, w, r in zip(row[1:], by[1:], reach, strict=True))

    def sizes(row: Row, scale: Any) -> Row:
        """|u_i| ≤ (|t| + |w_0|)/|w_i| if t reads u_i alone; other inputs are as large as they get."""
        constant, slope = row[0], arb(0)
        for i, (x, r) in enumerate(zip(row[1:], reach, strict=True), 1):
            if moving == [i]:
                slope = x / abs(arb(t[i]))
                constant += slope * abs(arb(t[0]))
            else:
                constant += x * r
        return constant / scale, slope / scale

    heads, unsure = [], arb(0)
    for head in stage.heads:
        kappa = [row[main] / t[main] for row in head.scores]
        slack = [left_over(row, k, t) for row, k in zip(head.scores, kappa, strict=True)]
        if not most(slack) <= MOST_SLACK:
            raise Refused(f"the scores of stage {name} do not depend on its input alone: {float(most(slack)):.3g} more")
        scores = [(row[0] - k * t[0], k) for row, k in zip(head.scores, kappa, strict=True)]
        values, worst = [], arb(0)
        for row in head.values[0]:
            if unit is None:
                nu = row[main] / t[main]
                values.append((row[0] - nu * t[0], nu))
                off = left_over(row, nu, t)
            else:
                pivot = max(range(len(unit)), key=lambda i: (abs(arb(unit[i])) * ([arb(1), *reach][i])).mid())
                nu = row[pivot] / unit[pivot]
                values.append((nu, fmpq(0)))
                off = abs(arb(row[0] - nu * unit[0])) + left_over(row, nu, unit)
            worst = worst.max(off)
        unsure += worst  # every head adds its own
        score_sizes = [sizes(row, 1) for row in head.score_sizes]
        value_sizes = [sizes(row, size) for row in head.value_sizes[0]]
        fine = head.roundings
        if fine is not None:
            query, own = ([sizes(row, 1) for row in rows] for rows in (fine.query, fine.own))
            fine = replace(fine, query=query, own=own)
        line = Head(
            scores, score_sizes, head.n_score, {0: values}, {0: value_sizes}, head.n_value, slack, fine, head.depth
        )
        heads.append(line)
    zero = (fmpq(0), fmpq(0))
    return Stage(heads, [zero], [sizes(stage.affine_sizes[0], size)], stage.n_affine), unsure
