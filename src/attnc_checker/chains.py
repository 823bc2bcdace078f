"""Deep programs without claims of their stages: links, each enclosed over the enclosure of those before it, and a head.

A head says a convex combination of its values, in which p_k ≤ e^{−g_k} p_j as in selection leaves, rounding included.
So on a box of all that a link reads, what it writes, as any engine computes it, lies in a ball; the box of the next
link is made of these balls.

The last head is taken apart. Let the variables fall into blocks that no link mixes, and the keys be all combinations
k = (m_1, …, m_n) of rows, one of every block, s_k = Σ_b s_{m_b}; with a single block any keys are. Weights are products
then, p_k = Π_b p_{m_b}. In a box of the variables of a block let X_m hold the points at which row m is needed: the
others have together a weight of at most ℓ_b, everywhere. As f − A = Σ_k p_k (f − v_k), on the box of all variables
    |f − A| ≤ max_k sup{|f − v_k| : x_b ∈ X_{m_b} for all b} + Σ_b ℓ_b·sup |f − v_k|.
Weights of scores that are off by y are off by e^{2y}.

A leaf is cut where the certificate says, and the box of a link in halves along what changes its scores most: parts are
made here, one beside the other, so that they are the whole wherever they are cut.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from flint import arb, fmpq

from attnc_checker.averages import Average, Box, at, swing, total
from attnc_checker.claims import Claim
from attnc_checker.expressions import Function, evaluate
from attnc_checker.files import Refused
from attnc_checker.leaves import Prover, affine_rounding, selected
from attnc_checker.network import Head, Link, Reduction, Row, Stage
from attnc_checker.ranges import Ranges
from attnc_checker.rounding import Arithmetic, most

CUTS = 4
"""The box of a link is halved along at most so many inputs, once along each, """
WIDE = 4.0
"""if that is by how much scores change against each other over it, from its centre."""
LEAK = 2e-3
"""What ℓ·sup |f − v_k| may be of the bound, about: that sets ℓ."""
FLAT = arb(2) ** -20
"""Of all that a link may write: what moves less is not looked at more closely."""
HUGE = arb(2) ** 1000


@dataclass(frozen=True)
class Chain(Prover):
    """Proves enclosure leaves. Its own stage has constants alone: f is held against the values of the last heads."""

    links: list[_Enclosure]
    keys: dict[int, _Keys]  # of every output
    rounding: list[Any]  # of its sums, and of its constant
    cuts: tuple[tuple[float, ...], ...]
    reach: dict[Any, Any]
    moved: Any  # what casting makes of 1

    @classmethod
    def of(cls, reduction: Reduction, function: Function, arithmetic: Arithmetic, claim: Claim) -> Chain:
        stage = reduction.stage()  # after which its inputs and its chain are known
        links, d = [_Enclosure(link) for link in reduction.chain or []], reduction.program.d
        owners: dict[Any, frozenset[int]] = {i: frozenset([i]) for i in range(d)}
        for link in links:
            owners[link.place] = frozenset().union(*(owners[key] for key in link.reads))
        owners = {key: owners[key] for key in reduction.inputs}
        reach = [reduction.reach[key] for key in owners]
        keys: dict[int, _Keys] = {}
        for head in stage.heads:
            keys |= dict.fromkeys(head.values, _Keys(head, owners, reach, arithmetic, claim.bound))
        rows = [*stage.affine, *(row for head in stage.heads for rows in head.values.values() for row in rows)]
        if sum(len(head.values) for head in stage.heads) != len(stage.affine) or any(
            x != 0 for r in rows for x in r[1:]
        ):
            raise Refused("an output of the last stage is more than one head with constant values")
        rounding = [
            keys[o].rounding[o] + arithmetic.gamma(n) * at(row, reach)
            for o, (n, row) in enumerate(zip(stage.n_affine, stage.affine_sizes, strict=True))
        ]
        constants = replace(stage, heads=[], affine=[row[: 1 + d] for row in stage.affine])
        cast = arithmetic.u if reduction.dtype != "float64" else arb(0)  # points are float64 numbers
        return cls(
            constants,
            [],
            function,
            arithmetic,
            links,
            keys,
            rounding,
            claim.cuts,
            reduction.reach,
            1 + cast * arb(0, 1),
        )

    def within(self, region: Box) -> Chain:
        return self

    def error(self, kind: str, order: int, box: Box, limit: Any) -> Any:
        """Above sup |f − network| over all outputs."""
        return most(self._off(o, box, limit) for o in self.keys)

    def _off(self, o: int, box: Box, limit: Any) -> Any:
        keys, values = self.keys[o], self.keys[o].values[o]
        winners = self.winners(keys, [(c - r, c + r) for c, r in zip(box.centre, box.half, strict=True)])
        farthest = most(self._distance_at_once(o, value, box, HUGE) for value in keys.extremes[o])
        error = keys.growth * (keys.spare + total(leak for _, leak in winners)) * farthest + self.rounding[o]
        found = []
        for rows in itertools.product(*(wins for wins, _ in winners)):
            where = {i: side for (wins, _), m in zip(winners, rows, strict=True) for i, side in wins[m].items()}
            sides = [where[i] for i in range(len(where))]
            part = Box([(lo + hi) / 2 for lo, hi in sides], [(hi - lo) / 2 for lo, hi in sides])
            found.append(self.distance(o, values[keys.combined[rows]], part, limit - error))
        return most(found) + error

    def _distance_at_once(self, o: int, row: Row, box: Box, limit: Any) -> Any:
        """By the range of f first: of a constant it is often enough."""
        ends = [((c - r).lower(), (c + r).upper()) for c, r in zip(box.centre, box.half, strict=True)]
        found, value = arb("inf"), row[0] + self.stage.affine[o][0]
        with contextlib.suppress(ArithmeticError, ValueError):
            low, high = evaluate(self.function, Ranges(ends))[o]
            found = (high - value).max(value - low)
        return found if found <= limit else super()._distance_at_once(o, row, box, limit)

    def winners(self, keys: _Keys, sides: list[tuple[Any, Any]]) -> list[tuple[dict[int, Any], Any]]:
        """Of every block ({row m: {variable: the ends of X_m}}, ℓ), of a box of these sides."""
        found = []
        for b, block in enumerate(keys.blocks):
            place = (b, *(end.mid().man_exp() + end.rad().man_exp() for i in block for end in sides[i]))
            if place not in keys.known:
                keys.known[place] = self._block_winners(keys, b, {i: sides[i] for i in block})
            found.append(keys.known[place])
        return found

    def _block_winners(self, keys: _Keys, b: int, sides: dict[int, tuple[Any, Any]]) -> tuple[dict[int, Any], Any]:
        wins: dict[int, dict[int, tuple[Any, Any]]] = {}
        leaks = [arb(0)]
        for parts in itertools.product(*(self._cut(i, *side) for i, side in sides.items())):
            part = dict(zip(sides, parts, strict=True))
            state = self._state(part)
            for balls in _halves([state[key] for key in keys.inputs[b]], keys.spreads[b]):
                rows, leak = keys.rows_and_leak(b, balls)
                leaks.append(leak)
                for m in rows:
                    known = wins.get(m, part)
                    wins[m] = {i: (lo.min(known[i][0]), hi.max(known[i][1])) for i, (lo, hi) in part.items()}
        return wins, most(leaks)

    def _cut(self, i: int, lo: Any, hi: Any) -> list[tuple[Any, Any]]:
        return [*itertools.pairwise([lo, *(x for x in map(arb, sorted(self.cuts[i])) if lo < x < hi), hi])]

    def _state(self, part: dict[int, tuple[Any, Any]]) -> dict[Any, Any]:
        """All that links make of these variables alone."""
        state: dict[Any, Any] = {i: self.moved * lo.union(hi) for i, (lo, hi) in part.items()}
        for link in self.links:
            if all(key in state for key in link.reads):
                flat = len(link.reads) == 1 and link.reads[0] in part and self._flat(link, *part[link.reads[0]])
                state[link.place] = flat or link([state[key] for key in link.reads], self.arithmetic)
                if not abs(state[link.place]) <= self.reach[link.place]:
                    raise Refused("what a stage writes is not known well enough to exclude an overflow")
        return state

    def _flat(self, link: _Enclosure, lo: Any, hi: Any) -> Any:
        """What a link makes of more than these ends, where that hardly moves: found by halving all of the axis."""
        b = self.reach[link.reads[0]]
        a = -b
        while hi <= b and lo >= a:
            node = (a.man_exp(), b.man_exp())
            if node not in link.known:
                link.known[node] = link([self.moved * a.union(b)], self.arithmetic)
            if link.known[node].rad() <= FLAT * self.reach[link.place]:
                return link.known[node]
            middle = (a + b) / 2
            a, b = (a, middle) if hi <= middle else (middle, b)
        return None


class _Keys:
    """The last head by the rows of its blocks, of which it must have all combinations; or with one block of all."""

    def __init__(
        self, head: Head, owners: dict[Any, frozenset[int]], reach: list[Any], arithmetic: Arithmetic, bound: float
    ) -> None:
        self.head = head
        self.known: dict[Any, tuple[dict[int, Any], Any]] = {}
        d = sum(isinstance(key, int) for key in owners)
        self.blocks = [[i] for i in range(d)]
        groups = self._divided(owners)
        if math.prod(map(len, self.rows)) != len(groups) or any(len(owner) > 1 for owner in owners.values()):
            self.blocks = [[*range(d)]]
            groups = self._divided(owners)
        c = [row[0] for row in head.scores]
        self.combined = {rows: max(same, key=lambda k: c[k]) for rows, same in groups.items()}
        self.spare = most(
            total((arb(c[k] - c[j])).exp() for k in groups[rows] if k != j) for rows, j in self.combined.items()
        )
        zero = (0,) * len(self.blocks)
        lines = [
            [
                c[self.combined[*zero[:b], m, *zero[b + 1 :]]] - (c[self.combined[zero]] if b else 0)
                for m in range(len(rows))
            ]
            for b, rows in enumerate(self.rows)
        ]
        off = max(
            abs(c[k] - sum(line[m] for line, m in zip(lines, rows, strict=True))) for rows, k in self.combined.items()
        )
        self.offsets = [[*map(arb, line)] for line in lines]
        columns = [[*zip(*rows, strict=True)] for rows in self.rows]
        self.spreads = [[arb(max(column) - min(column)) for column in block] for block in columns]
        self.slopes = [[{i: arb(x) for i, x in enumerate(row) if x != 0} for row in rows] for rows in self.rows]
        sizes, n = most(at(row, reach) for row in head.score_sizes), len(c)
        slack = most([arb(0), *head.score_slack])
        (y,) = arithmetic.weights([arithmetic.gamma(head.n_score) * sizes + slack], [2 * sizes])
        self.growth = (2 * (y + arb(off))).exp()
        self.rounding = {
            o: arithmetic.summation(n, head.n_value[o], [arb(1)] * n, [at(row, reach) for row in rows], arb("inf"))
            for o, rows in head.value_sizes.items()
        }
        self.values = {o: [row[:1] for row in rows] for o, rows in head.values.items()}
        self.extremes = {o: (min(rows), max(rows)) for o, rows in self.values.items()}
        span = max(high - low for (low,), (high,) in self.extremes.values())
        self.leak = arb(LEAK) * bound / (arb(span) + bound)

    def _divided(self, owners: dict[Any, frozenset[int]]) -> dict[tuple[int, ...], list[int]]:
        """The keys of every combination of rows. What depends on nothing goes with the first block."""
        block_of = {i: b for b, block in enumerate(self.blocks) for i in block}
        numbers = [block_of[min(owner, default=0)] for owner in owners.values()]
        self.inputs = [
            [key for key, b in zip(owners, numbers, strict=True) if b == own] for own in range(len(self.blocks))
        ]
        rows: list[dict[Row, int]] = [{} for _ in self.blocks]
        groups: dict[tuple[int, ...], list[int]] = {}
        for k, (_, *row) in enumerate(self.head.scores):
            parts = [tuple(x for x, b in zip(row, numbers, strict=True) if b == own) for own in range(len(rows))]
            place = tuple(known.setdefault(part, len(known)) for known, part in zip(rows, parts, strict=True))
            groups.setdefault(place, []).append(k)
        self.rows = [[*known] for known in rows]
        return groups

    def rows_and_leak(self, b: int, balls: list[Any]) -> tuple[set[int], Any]:
        """The fewest rows of a block but for which weights add up to at most `leak`, and what the others have.

        p_m ≤ e^{s_m − s_j}, j the row that leads at the centre.
        """
        middles, radii = [ball.mid() for ball in balls], [ball.rad() for ball in balls]
        scores = [
            x + total(a * middles[i] for i, a in row.items())
            for x, row in zip(self.offsets[b], self.slopes[b], strict=True)
        ]
        j = max(range(len(scores)), key=lambda m: scores[m].mid())
        best, weights = self.slopes[b][j], []
        for m, (score, row) in enumerate(zip(scores, self.slopes[b], strict=True)):
            swing = total(abs(row.get(i, 0) - best.get(i, 0)) * radii[i] for i in row.keys() | best.keys())
            weights.append(((score - scores[j] + swing).exp(), m))
        weights.sort(key=lambda pair: pair[0].mid())
        left_out, leak = 0, arb(0)
        while leak + weights[left_out][0] <= self.leak:
            left_out, leak = left_out + 1, leak + weights[left_out][0]
        return {m for _, m in weights[left_out:]}, leak


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
        self.known: dict[Any, Any] = {}

    def __call__(self, balls: list[Any], arithmetic: Arithmetic) -> Any:
        return reduce(arb.union, (self._at_once(_box(half), arithmetic) for half in _halves(balls, self.spreads)))

    def _at_once(self, box: Box, arithmetic: Arithmetic) -> Any:
        (row,) = self.stage.affine
        said, error = _over(row, box), affine_rounding(self.stage, 0, box, arithmetic)
        for head in self.heads:
            winner, apart, rounding = selected(head, 0, head.gaps(box, arithmetic), box, arithmetic)
            said, error = said + _over(winner, box) + apart, error + rounding
        return said + error * arb(0, 1)


def _halves(balls: list[Any], spreads: list[Any], done: frozenset[int] = frozenset()) -> Iterator[list[Any]]:
    """The box, cut in halves along what changes scores most."""
    changes = {i: x * balls[i].rad() for i, x in enumerate(spreads) if i not in done}
    axis = max(changes, key=lambda i: changes[i].mid(), default=None)
    if len(done) == CUTS or axis is None or not changes[axis] > WIDE:
        yield balls
        return
    for end in (balls[axis].lower(), balls[axis].upper()):
        half = [*balls[:axis], balls[axis].mid().union(end), *balls[axis + 1 :]]
        yield from _halves(half, spreads, done | {axis})


def _box(balls: Any) -> Box:
    return Box([ball.mid() for ball in balls], [ball.rad() for ball in balls])


def _over(row: Row, box: Box) -> Any:
    """Where an affine form lies on a box."""
    row = tuple(map(arb, row))
    return at(row, box.centre) + swing(row, box.half) * arb(0, 1)
