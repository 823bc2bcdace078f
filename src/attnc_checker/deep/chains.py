"""Deep programs without claims about their stages: a chain of links, each enclosed over earlier ones, and a last head.

A head makes a convex combination of its values, with p_k ≤ e^{−g_k} p_j as in selection leaves, rounding included. So
on a box of its inputs the output of a link, in any engine, lies in a ball. These balls are the box of the next link.

The last head of an output is analysed axis by axis. Each link may depend on only one variable x_i. The keys must be
all combinations k = (m_1, …, m_d) of rows, one for each variable, with s_k = Σ_i s_{m_i}. Then weights are products.
Let X_m hold the points of an interval of x_i at which row m may be less than a gap g behind the best row. At every
point, all other rows have together a weight of at most ℓ_i. As f − A = Σ_k p_k (f − v_k), on a box
    |f − A| ≤ max_k sup{|f − v_k| : x_i ∈ X_{m_i} for all i} + Σ_i ℓ_i·sup |f − v_k|.
If scores are off by y, weights are off by e^{2y}.

An interval is cut at the points in the certificate, and the box of a link is halved along the inputs that change its
scores most. The parts are made here, side by side, so they cover the whole for any cuts. The certificate also states g:
with the same g, prover and checker leave out the same rows. Any g is sound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from flint import arb, fmpq

from attnc_checker.averages import Average
from attnc_checker.claims import ByLeaves, Claim
from attnc_checker.expressions import Function
from attnc_checker.files import BadFile, Refused, require
from attnc_checker.forms import ONE, Form, Key, Terms, dense, span
from attnc_checker.jets import add, over
from attnc_checker.leaves import Prover, affine_rounding, linear, selected
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import AffineLayer, Program
from attnc_checker.ranges import Box, Range
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Row, Vector, at, minus, most, row_of, swing, total

CUTS = 4
"""Largest number of inputs along which the box of a link, or of the last head, is cut, once along each. attnc uses the
same number."""
WIDE = 4.0
"""The box of a link is halved along an input if differences of scores change by more than this from its centre."""
CHAIN_LEAK = 2e-3
"""If no gap is stated, a row that is left out adds at most about this part of the bound."""
FLAT = arb(2) ** -20
"""A link whose output changes by less than this share of its reach over an interval is not refined there. The box of
the last head is not cut along an input that changes scores by less than this."""
HUGE = arb(2) ** 1000
"""A limit above every distance, for calls that need the largest distance itself."""

Cut = Callable[[Box, int], Iterable[Box]]
"""Cuts a box along one of its inputs."""
Winners = tuple[dict[int, Range], arb]
"""For an interval: {row m: the ends of X_m}, and ℓ."""


class Links(Reduction):
    """The reduction of a deep program. An entry that attention wrote is an input of later attention.

    Its link has to prove its reach.
    """

    def __init__(self, program: Program, reach: list[arb]) -> None:
        super().__init__(program, reach, is_deep=True)
        self.links: list[tuple[Key, Stage]] = []

    def written(self, i: int, token: int, feature: int) -> Form | None:
        found = super().written(i, token, feature)
        if found is not None and not all(isinstance(later, AffineLayer) for later in self.main.layers[i:]):
            stage = self.stage_of([found])
            self.links.append(((i, token, feature), stage))
            heads = (most(span(head.values[0].sizes, self.reach)) for head in stage.heads)
            self.reach[i, token, feature] = 2 * (span(stage.affine[0].sizes, self.reach) + total(heads)).upper()
        return found


@dataclass(frozen=True)
class Chain(Prover):
    """Proves enclosure leaves. Its own stage has only constants: f is compared with the values of the last heads."""

    outputs: list[_Output]

    @classmethod
    def through(
        cls, reduction: Links, function: Function, arithmetic: Arithmetic, claim: Claim, evidence: ByLeaves
    ) -> Chain:
        stage, d = reduction.stage(), len(claim.ends)
        stated = evidence.cuts or ((),) * d
        require(len(stated) == d, f"the certificate: cuts has {len(stated)} lists, not one for every variable", BadFile)
        ways = [_Way(i, [*map(arb, sorted(cuts))], reduction.reach, arithmetic) for i, cuts in enumerate(stated)]
        owners: dict[Key, int] = {i: i for i in range(len(ways))}
        for link in (_Enclosure(*link) for link in reduction.links):
            read = {owners[key] for key in link.reads}
            require(len(read) <= 1, "two variables meet in one link before the last head")
            owners[link.place] = min(read, default=0)
            ways[owners[link.place]].links.append(link)
        outputs = [_Output(stage, o, ways, owners, claim.bound, evidence.gap) for o in range(len(stage.affine))]
        return cls(replace(stage, heads=[], inputs=[]), [], function, arithmetic, outputs)

    def error(self, kind: str, order: int, box: Box, limit: arb) -> arb:
        """Return an upper bound on sup |f − network| over all outputs."""
        return most(self._off(o, output, box, output.winners(box), limit) for o, output in enumerate(self.outputs))

    def _off(self, o: int, output: _Output, box: Box, winners: list[Winners], limit: arb) -> arb:
        farthest = most(self.distance(o, value, box, HUGE) for value in output.extremes)
        error = output.growth * total(leak for _, leak in winners) * farthest + output.rounding
        found = []
        for rows in itertools.product(*(wins for wins, _ in winners)):
            part = Box.between([wins[m] for (wins, _), m in zip(winners, rows, strict=True)])
            found.append(self.distance(o, output.values[rows], part, limit - error))
        return most(found) + error


@dataclass(frozen=True, eq=False)
class _Way:
    """The variable i, and the links that depend only on it."""

    i: int
    cuts: list[arb]
    reach: Terms
    arithmetic: Arithmetic
    links: list[_Enclosure] = field(default_factory=list)

    @property
    def places(self) -> list[Key]:
        return [self.i, *(link.place for link in self.links)]

    def _cast(self, ball: arb) -> arb:
        return ball + self.arithmetic.cast_error(abs(ball)) * arb(0, 1)

    def states(self, lo: arb, hi: arb) -> Iterator[tuple[arb, arb, list[arb]]]:
        """Yield parts of an interval, with the balls at all places there."""
        for a, b in itertools.pairwise([lo, *(x for x in self.cuts if lo < x < hi), hi]):
            state: dict[Key, arb] = {self.i: self._cast(a.union(b))}
            for link in self.links:
                flat = self._flat(link, a, b) if link.reads == [self.i] else None
                state[link.place] = flat or link([state[key] for key in link.reads], self.arithmetic)
                is_bounded = abs(state[link.place]) <= self.reach[link.place]
                require(is_bounded, "the output of a stage is not bounded well enough to exclude an overflow")
            yield a, b, list(state.values())

    def _flat(self, link: _Enclosure, lo: arb, hi: arb) -> arb | None:
        """Return the output of a link on a dyadic interval around these ends, if it hardly changes there."""
        a, b = -self.reach[self.i], self.reach[self.i]
        while a <= lo and hi <= b:
            node = (a.man_exp(), b.man_exp())
            if node not in link.known:
                link.known[node] = link([self._cast(a.union(b))], self.arithmetic)
            if link.known[node].rad() <= FLAT * self.reach[link.place]:
                return link.known[node]
            middle = (a + b) / 2
            a, b = (a, middle) if hi <= middle else (middle, b)
        return None


class _Output:
    """The head of an output, by rows: the scores of the rows of each variable, and the values of their combinations."""

    def __init__(
        self, stage: Stage, o: int, ways: list[_Way], owners: dict[Key, int], bound: float, gap: float | None
    ) -> None:
        """`owners` has, for each input of the stage, the number of its way."""
        heads, affine = [head for head in stage.heads if o in head.values], stage.affine[o]
        forms = [affine, *(head.values[o] for head in heads)]
        if len(heads) != 1 or any(form.terms.keys() - {ONE} for form in forms):
            raise Refused("an output of the last stage is more than one head with constant values")
        (head,) = heads
        (values,), (constants, *slopes) = dense(head.values[o].terms, ()), dense(head.scores.terms, stage.inputs)
        self.ways, self.values, c = ways, dict[tuple[int, ...], Row](), dict[tuple[int, ...], fmpq]()
        rows: list[dict[frozenset[tuple[Key, fmpq]], int]] = [{} for _ in ways]
        for k, (x, value) in enumerate(zip(constants, values, strict=True)):
            read = [(key, column[k]) for key, column in zip(stage.inputs, slopes, strict=True) if column[k] != 0]
            parts = (frozenset((key, slope) for key, slope in read if owners[key] == way.i) for way in ways)
            place = tuple(known.setdefault(part, len(known)) for known, part in zip(rows, parts, strict=True))
            c[place], self.values[place] = x, (value,)
        are_all = head.num_keys == len(c) == math.prod(map(len, rows))
        require(are_all, "the keys of the last head are not all combinations of rows for the variables")
        first = (0,) * len(ways)
        lines = [[c[*first[:i], m, *first[i + 1 :]] - c[first] for m in range(len(row))] for i, row in enumerate(rows)]
        off = max(abs(x - c[first] - sum(map(list.__getitem__, lines, place))) for place, x in c.items())
        self.rows = [
            (Vector(map(arb, line)), *(Vector(arb(dict(part).get(place, 0)) for part in row) for place in way.places))
            for way, line, row in zip(ways, lines, rows, strict=True)
        ]
        self.spreads = [_spreads([table]) for table in self.rows]
        reach, arithmetic = ways[0].reach, ways[0].arithmetic
        sizes = span(head.scores.sizes, reach)
        y = most(arithmetic.weights(sizes * arithmetic.gamma(head.scores.n), 2 * sizes))
        self.growth = (2 * (y + arb(off))).exp()
        ones, value_sizes = Vector([arb(1)] * len(c)), span(head.values[o].sizes, reach)
        self.rounding = arithmetic.summation(head, o, ones, value_sizes)
        self.rounding += arithmetic.gamma(affine.n) * span(affine.sizes, reach)
        self.extremes = (min(self.values.values()), max(self.values.values()))
        spread = _spread([value for (value,) in self.extremes])
        self.gap = arb(gap) if gap is not None else ((spread + bound) / (CHAIN_LEAK * arb(bound))).log()
        self.known: dict[Hashable, Winners] = {}

    def winners(self, box: Box) -> list[Winners]:
        found = []
        for way, side in zip(self.ways, box.sides, strict=True):
            place = (way.i, *(end.man_exp() for end in side))
            if place not in self.known:
                self.known[place] = self._winners(way, *side)
            found.append(self.known[place])
        return found

    def _winners(self, way: _Way, lo: arb, hi: arb) -> Winners:
        wins: dict[int, Range] = {}
        leaks, rows = [arb(0)], self.rows[way.i]
        for a, b, state in way.states(lo, hi):
            for box in _parts(state, self.spreads[way.i], FLAT, partial(_sides_of_meeting, rows)):
                needed, leak = self._needed(rows, box)
                leaks.append(leak)
                wins |= {m: (wins.get(m, (a, b))[0], b) for m in needed}
        return wins, most(leaks)

    def _needed(self, rows: Row, box: Box) -> tuple[list[int], arb]:
        """Return the rows that may be less than the gap behind the row j, and the sum of the weights of all others.

        p_m ≤ e^{s_m − s_j}, with j the row of the largest score at the centre.
        """
        leads = minus(rows, row_of(rows, _best(at(rows, box.centre))))
        above = at(leads, box.centre) + swing(leads, box.half)
        needed = [m for m, x in enumerate(above) if not x < -self.gap]
        return needed, total(x.exp() for x in above if x < -self.gap)


class _Enclosure:
    """A link, as a function of the inputs that it reads."""

    def __init__(self, place: Key, stage: Stage) -> None:
        forms = [*stage.affine, *(form for head in stage.heads for form in (head.scores, *head.values.values()))]
        read = {key for form in forms for key in form.sizes}
        self.place, self.reads = place, [key for key in stage.inputs if key in read]
        self.stage, self.heads = (
            replace(stage, inputs=self.reads),
            [Average.of(head, self.reads) for head in stage.heads],
        )
        self.spreads, self.known = _spreads([head.scores for head in self.heads]), dict[Hashable, arb]()

    def __call__(self, balls: list[arb], arithmetic: Arithmetic) -> arb:
        return reduce(arb.union, (self._at_once(box, arithmetic) for box in _parts(balls, self.spreads, WIDE, _halves)))

    def _at_once(self, box: Box, arithmetic: Arithmetic) -> arb:
        row = dense(self.stage.affine[0].terms, self.reads)
        whole, error = linear(row, box), affine_rounding(self.stage, 0, box, arithmetic)
        for head in self.heads:
            poly, rounding = selected(head, box, arithmetic)[0]
            whole, error = add(whole, poly), error + rounding
        return over(whole, len(self.reads)) + error * arb(0, 1)


def _parts(balls: list[arb], spreads: list[arb], least: arb | float, cut: Cut) -> list[Box]:
    """Return the box of these balls, cut along the inputs that change scores most and by more than `least`."""
    parts = [Box([ball.mid() for ball in balls], [ball.rad() for ball in balls])]
    changes = {i: x * ball.rad() for i, (x, ball) in enumerate(zip(spreads, balls, strict=True))}
    for i in sorted(changes, key=lambda i: changes[i].mid(), reverse=True)[:CUTS]:
        if changes[i] > least:
            parts = [part for whole in parts for part in cut(whole, i)]
    return parts


def _halves(box: Box, i: int) -> Iterable[Box]:
    return box.cut(i, box.centre[i].mid())


def _sides_of_meeting(rows: Row, box: Box, i: int) -> Iterable[Box]:
    """Cut a box where the best row at one end of an input meets the best row at the other end.

    On each side, one of the two stays ahead of the other, however wide the box is.
    """
    scores, slopes, half = at(rows, box.centre), rows[i + 1], box.half[i]
    first, last = (_best(scores + slopes * (side * half)) for side in (-1, 1))
    away = (scores[last] - scores[first]) / (slopes[first] - slopes[last]) if first != last else half
    return box.cut(i, (box.centre[i] + away).mid()) if abs(away) < half else [box]


def _best(scores: Vector) -> int:
    return max(range(len(scores)), key=lambda m: scores[m].mid())


def _spreads(tables: list[Row]) -> list[arb]:
    """Return the largest difference of two slopes of scores, for every input."""
    columns = zip(*(rows[1:] for rows in tables), strict=True)
    return [most(map(_spread, same)) for same in columns]


def _spread(numbers: Sequence[arb | fmpq]) -> arb:
    return arb(max(numbers)) - arb(min(numbers))
