"""A stage as a function of one variable t: scores κ_k·t + c_k and values ν_k times the carrier, up to a remainder.

Stages with the same heads are proved together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flint import arb

from attnc_checker.deep.claims import StageClaim
from attnc_checker.expressions import Function, Reader
from attnc_checker.files import Refused, require
from attnc_checker.forms import ONE, Form, Head, Key, Terms, span
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import exact
from attnc_checker.vectors import Vector, most

T = 0
"""The only input of a line."""
TOKEN = re.compile("[0-9]{0,7}")
MOST_SLACK = 0.25
"""Largest deviation of scores from those of the claimed input. At this limit weights may be off by e^0.5, 65 %, which
no useful bound allows. The corpus has at most 2.3·10^−6."""


@dataclass(frozen=True)
class Line:
    """A stage as a function of one variable t, and the function that is claimed for it."""

    claim: StageClaim
    stage: Stage
    function: Function


def stage_at(reduction: Reduction, layer: str, channel: str) -> tuple[tuple[int, int, int], Stage]:
    """Return the place of a channel and the stage that writes it. A channel of a later token is "channel@token"."""
    program, (name, _, token) = reduction.program, channel.partition("@")
    found = [i for i, known in enumerate(program.names) if known == layer]
    is_there = len(found) == 1 and name in program.channels[found[0]] and TOKEN.fullmatch(token)
    if not is_there or int(token or 0) >= program.main.shapes[found[0] + 1][0]:
        raise Refused(f"there is no channel {channel!r:.60} of a layer {layer!r:.60}")
    place = (found[0] + 1, int(token or 0), program.channels[found[0]].index(name))
    written = reduction.written(*place)
    if written is None:
        raise Refused(f"no head writes into {channel!r:.60}")
    return place, reduction.stage_of([written])


def along(stage: Stage, t: Terms, unit: Terms | None, reach: Terms, units: arb, name: str) -> tuple[Stage, arb, arb]:
    """Return the stage as a function of t, in units of the carrier, with |carrier| ≤ units.

    Also return the largest error of its values and, if the carrier is one input, the part of their sizes that does not
    depend on the carrier.
    """
    t, moving = moving_terms(t)
    require(not stage.affine[0].terms, f"stage {name} is not made by its heads alone")
    carried = {key: x for key, x in (unit or {}).items() if x != 0}
    scales = carried if len(carried) == 1 and ONE not in carried else {}
    reach = reach | {key: reach[key].min(units / abs(arb(x))) for key, x in scales.items()}
    shift, followed, farthest = abs(arb(t.get(ONE, 0))), dict[Key, arb](), arb(0)
    if len(moving) == 1:  # t = w_0 + w·u, so |u| ≤ (|t| + |w_0|)/|w|, which is the reach of u at |t| = farthest
        ((key, w),) = moving.items()
        farthest = (abs(arb(w)) * reach[key] - shift).upper().max(farthest)
        followed = {key: abs(arb(w))} if farthest > 0 else {}

    def split(terms: Terms, by: Terms, among: Terms) -> tuple[Vector, Terms]:
        return divided(terms, by, among, reach, name)

    def line(form: Form, scale: arb | int = 1) -> tuple[Form, Vector]:
        """Return the form as a function of t, and its largest error for each key."""
        ratio, rest = split(form.terms, t, moving)
        constant = rest[ONE]
        rest[ONE] = 0 * constant
        return Form({ONE: constant, T: ratio}, sizes(form.sizes, scale), form.n), span(rest, reach)

    def sizes(of: Terms, scale: arb | int = 1) -> Terms:
        """Return sizes in |t| ≤ farthest. Inputs that t does not follow count with their reach."""
        slope = sum((of[key] / w for key, w in followed.items() if key in of), 0 * of.get(ONE, arb(0)))
        constant = span({key: x for key, x in of.items() if key not in followed}, reach)
        return {ONE: (constant + slope * shift) / scale, T: slope / scale}

    def value(form: Form) -> tuple[Form, Vector]:
        if unit is None:
            return line(form, units)
        ratio, rest = split(form.terms, unit, unit)
        largest = span(form.sizes, reach) / units  # also where t, of which the carrier may be a part, is small
        return Form({ONE: ratio}, {ONE: largest, T: 0 * largest}, form.n), span(rest, reach)

    heads, unsure, fixed = [], arb(0), span(stage.affine[0].sizes, reach)
    for head in stage.heads:
        scores, slack = line(head.scores)
        if not (most_slack := most(slack)) <= MOST_SLACK:
            raise Refused(f"the scores of stage {name} do not depend on its input alone: {float(most_slack):.3g} more")
        values, off = value(head.values[0])
        unsure += most(off)  # every head adds its own
        fixed += most(span({key: x for key, x in head.values[0].sizes.items() if key not in scales}, reach))
        head = replace(head, scores=scores, values={0: values}, slack=slack, farthest=farthest)
        heads.append(replace(head, own=sizes(head.own), query=tuple(map(sizes, head.query))))
    affine = Form({}, {ONE: span(stage.affine[0].sizes, reach) / units}, stage.affine[0].n)
    return Stage(heads, [affine], [T]), unsure, fixed


def moving_terms(t: Terms) -> tuple[Terms, Terms]:
    """Return the terms that are not 0, and those of them that are not the constant."""
    t = {key: x for key, x in t.items() if x != 0}
    return t, {key: x for key, x in t.items() if key != ONE}


def divided(terms: Terms, by: Terms, among: Terms, reach: Terms, name: str) -> tuple[Vector, Terms]:
    """Return (ratio, rest) with terms = ratio·by + rest. rest is 0 in the largest of `among`, if there is any."""
    if not among:
        return 0 * terms[ONE], dict(terms)
    pivot = max(among, key=lambda key: (abs(arb(among[key])) * reach[key]).mid())
    require(by[pivot] != 0, f"the carrier of stage {name} is 0")
    ratio = terms.get(pivot, 0 * terms[ONE]) / by[pivot]
    rest = {key: terms.get(key, 0 * terms[ONE]) - ratio * by.get(key, 0) for key in terms.keys() | by.keys()}
    return ratio, rest


def held(claim: StageClaim) -> Function:
    """Return the function that the leaves prove: g, made constant beyond the ends `held` of the claim."""
    reader = Reader(["t"])
    t = reader.variables["t"]
    if claim.held is not None:
        t = reader.add("clip", t, *(reader.add("constant", exact(end)) for end in claim.held))
    return reader.function(reader.parse(claim.function, {"t": t}))


def joined(one: Line, other: Line) -> Line:
    """Return the heads of a stage, widened so that they also cover the heads of another stage like it."""
    reach: Terms = {ONE: arb(1), T: most(map(arb, map(abs, one.claim.interval)))}
    heads = []
    unlike = f"stage {other.claim.name} is not like {one.claim.name}"
    require(len(one.stage.heads) == len(other.stage.heads), f"{unlike}: it has other heads")

    def largest(a: Terms, b: Terms) -> Terms:
        return {key: x.max(b[key]) for key, x in a.items()}

    def wider(a: Form, b: Form) -> Form:
        return Form(a.terms, largest(a.sizes, b.sizes), max(a.n, b.n))

    for a, b in zip(one.stage.heads, other.stage.heads, strict=True):
        have_same = (a.values[0].terms, a.parts) == (b.values[0].terms, b.parts)
        require(have_same, f"{unlike}: its keys have other values")
        apart = span({key: x - b.scores.terms[key] for key, x in a.scores.terms.items()}, reach)
        slack = a.slack.max(b.slack + apart)
        require(most(slack) <= MOST_SLACK, f"{unlike}: its keys have other scores")
        counts = (max(a.n, b.n), max(a.depth, b.depth), max(a.addends, b.addends))
        query, values = tuple(map(largest, a.query, b.query)), {0: wider(a.values[0], b.values[0])}
        own, farthest = largest(a.own, b.own), a.farthest.max(b.farthest)
        silent = max(a.silent, b.silent)
        heads.append(Head(wider(a.scores, b.scores), values, own, slack, *counts, query, a.parts, farthest, silent))
    affine = [*map(wider, one.stage.affine, other.stage.affine)]
    return replace(one, stage=Stage(heads, affine, [T]))
