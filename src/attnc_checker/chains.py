"""Deep programs without claims of their stages: each is enclosed over the enclosure of those before it.

A head says a convex combination of its values, in which p_k ≤ e^{−g_k} p_j as in selection leaves, rounding included.
So on a box of all that a link reads, what it writes, as any engine computes it, lies in a ball; the box of the next
link is made of these balls. f is held against the balls of the outputs.

A leaf is cut where the certificate says, and a link's box in halves along what changes its scores most: parts are made
here, one beside the other, so that they are the whole wherever they are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import Average, Box, at, swing
from attnc_checker.claims import Claim
from attnc_checker.expressions import Function
from attnc_checker.files import Refused
from attnc_checker.leaves import Prover, affine_rounding, selected
from attnc_checker.network import Link, Reduction, Row, Stage
from attnc_checker.rounding import Arithmetic, most

CUTS = 4
"""The box of a link is halved along at most so many inputs, once along each, """
WIDE = 4.0
"""if that is by how much scores change against each other over it, from its centre."""
MANY = 100_000
"""Enclosures that are remembered: links that read one variable see the same ends again and again."""


@dataclass(frozen=True)
class Chain(Prover):
    """Proves enclosure leaves. Its own stage is nothing: f is held against what the last link says."""

    links: list[_Enclosure]
    last: _Enclosure
    cuts: tuple[tuple[float, ...], ...]
    reach: dict[Any, Any]
    moved: Any  # what casting makes of 1

    @classmethod
    def of(cls, reduction: Reduction, function: Function, arithmetic: Arithmetic, claim: Claim) -> Chain:
        stage = reduction.stage()  # after which its inputs and its chain are known
        last = _Enclosure(Link(None, reduction.inputs, stage))
        links = [_Enclosure(link) for link in reduction.chain or []]
        nothing = replace(stage, heads=[], affine=[(fmpq(0),) * (1 + reduction.program.d)] * reduction.num_outputs)
        cast = arithmetic.u if reduction.dtype != "float64" else arb(0)  # points are float64 numbers
        return cls(nothing, [], function, arithmetic, links, last, claim.cuts, reduction.reach, 1 + cast * arb(0, 1))

    def within(self, region: Box) -> Chain:
        return self

    def error(self, kind: str, order: int, box: Box, limit: Any) -> Any:
        """Above sup |f − network| over all outputs."""
        return most(
            self.distance(o, (said,), part, limit)
            for part in self._parts(box)
            for o, said in enumerate(self._outputs(part))
        )

    def _parts(self, box: Box) -> Iterator[Box]:
        sides = []
        for c, r, cuts in zip(box.centre, box.half, self.cuts, strict=True):
            points = [c - r, *(x for x in map(arb, cuts) if c - r < x < c + r), c + r]
            sides.append([((a + b) / 2, (b - a) / 2) for a, b in itertools.pairwise(points)])
        for part in itertools.product(*sides):
            yield Box([c for c, _ in part], [r for _, r in part])

    def _outputs(self, part: Box) -> list[Any]:
        state = {
            i: self.moved * (c + r * arb(0, 1)) for i, (c, r) in enumerate(zip(part.centre, part.half, strict=True))
        }
        for link in self.links:
            (state[link.place],) = link(state, self.arithmetic)
            if not abs(state[link.place]) <= self.reach[link.place]:
                raise Refused("what a stage writes is not known well enough to exclude an overflow")
        return self.last(state, self.arithmetic)


class _Enclosure:
    """A link, of those inputs alone that it reads."""

    def __init__(self, link: Link) -> None:
        stage = link.stage
        tables = [stage.affine_sizes, *(head.score_sizes for head in stage.heads)]
        tables += [rows for head in stage.heads for rows in head.value_sizes.values()]
        read = sorted({i for rows in tables for row in rows for i, x in enumerate(row[1:], 1) if x != 0})

        def narrow(rows: list[Row]) -> list[Row]:
            return [(row[0], *(row[i] if i < len(row) else fmpq(0) for i in read)) for row in rows]

        heads = [
            replace(
                head,
                scores=narrow(head.scores),
                score_sizes=narrow(head.score_sizes),
                values={o: narrow(rows) for o, rows in head.values.items()},
                value_sizes={o: narrow(rows) for o, rows in head.value_sizes.items()},
                roundings=None,
            )
            for head in stage.heads
        ]
        self.place, self.reads = link.place, [link.inputs[i - 1] for i in read]
        self.stage = Stage(heads, narrow(stage.affine), narrow(stage.affine_sizes), stage.n_affine)
        self.heads = [Average(head) for head in heads]
        columns = [[*zip(*head.scores, strict=True)][1:] for head in heads]
        self.spreads = [arb(max(max(column) - min(column) for column in same)) for same in zip(*columns, strict=True)]
        self.known: dict[Any, list[Any]] = {}

    def __call__(self, state: dict[Any, Any], arithmetic: Arithmetic) -> list[Any]:
        balls = [state[key] for key in self.reads]
        place = tuple((ball.mid().man_exp(), ball.rad().man_exp()) for ball in balls)
        if place not in self.known:
            if len(self.known) == MANY:
                self.known.clear()
            self.known[place] = self._halved(balls, arithmetic, CUTS, frozenset())
        return self.known[place]

    def _halved(self, balls: list[Any], arithmetic: Arithmetic, cuts: int, done: frozenset[int]) -> list[Any]:
        changes = {i: x * balls[i].rad() for i, x in enumerate(self.spreads) if i not in done}
        axis = max(changes, key=lambda i: changes[i].mid(), default=None)
        if not cuts or axis is None or not changes[axis] > WIDE:
            return self._at_once(_box(balls), arithmetic)
        middle, found = balls[axis].mid(), []
        for end in (balls[axis].lower(), balls[axis].upper()):
            half = [*balls[:axis], middle.union(end), *balls[axis + 1 :]]
            found.append(self._halved(half, arithmetic, cuts - 1, done | {axis}))
        return [a.union(b) for a, b in zip(*found, strict=True)]

    def _at_once(self, box: Box, arithmetic: Arithmetic) -> list[Any]:
        gaps, found = [head.gaps(box, arithmetic) for head in self.heads], []
        for o, row in enumerate(self.stage.affine):
            said, error = _over(row, box), affine_rounding(self.stage, o, box, arithmetic)
            for head, gap in zip(self.heads, gaps, strict=True):
                if o in head.values:
                    winner, apart, rounding = selected(head, o, gap, box, arithmetic)
                    said, error = said + _over(winner, box) + apart, error + rounding
            found.append(said + error * arb(0, 1))
        return found


def _box(balls: Any) -> Box:
    return Box([ball.mid() for ball in balls], [ball.rad() for ball in balls])


def _over(row: Row, box: Box) -> Any:
    """Where an affine form lies on a box."""
    row = tuple(map(arb, row))
    return at(row, box.centre) + swing(row, box.half) * arb(0, 1)
