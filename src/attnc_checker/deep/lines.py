"""A stage as a function of one variable t: scores κ_k·t + c_k, values ν_k times the carrier, up to what is
left over; stages that are alike are proved as one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import total
from attnc_checker.claims import StageClaim
from attnc_checker.expressions import Function, Reader
from attnc_checker.files import Refused
from attnc_checker.network import Head, Row, Stage
from attnc_checker.program import exact
from attnc_checker.rounding import most

MOST_SLACK = 0.25
"""Scores that are off by more are not those of the claimed input."""


@dataclass(frozen=True)
class Line:
    """A stage as a function of one variable t, and what it has to be."""

    claim: StageClaim
    stage: Stage
    function: Function


def along(stage: Stage, t: Row, unit: Row | None, reach: list[Any], size: Any, name: str) -> tuple[Stage, Any]:
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


def held(claim: StageClaim) -> Function:
    """g as leaves have to prove it: held at the ends of the interval on which it is defined."""
    reader = Reader(["t"])
    t = reader.variables["t"]
    if claim.held is not None:
        t = reader.add("clip", t, *(reader.add("constant", exact(end)) for end in claim.held))
    return reader.steps, reader.parse(claim.function, {"t": t})


def joined(one: Line, other: Line) -> Line:
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
