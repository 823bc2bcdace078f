"""Partitions: one head with constant keys that are all combinations of rows, one row for each variable.

Such a head selects a cell of a grid. The score of the key k = (m_1, …, m_d) is Σ_i s_{m_i}(x_i), s_m(x) = a_m x + c_m,
so that weights are products. Let the rows of a variable have ascending slopes. X_m holds the points x at which row m is
at most g behind the rows before and after it: an interval, as s_{m+1} − s_m rises with x.

Theorem.  At every x the rows with x ∉ X_m have together a weight of at most 2e^{−g}. So, on a box,
              |f − A| ≤ max_k sup{|f − v_k| : x_i ∈ X_{m_i} for all i} + 2d·e^{−g}·sup |f − v_k|.
Proof.    A row m that is more than g behind the next one has p_m ≤ e^{−g} p_{m+1}. The sum of these p_{m+1} is at most
          1, and likewise for the rows before. As f − A = Σ_k p_k (f − v_k), keys with x_i ∈ X_{m_i} for all i add at
          most the first term, and all others have together a weight of at most 2d·e^{−g}.

If computed scores are off by y, and constants of keys are off by r from a sum over their rows, the weight of any set of
keys is off by a factor of at most e^{2(y+r)}. A larger g makes up for it. An error of the query is the same for all
keys. It only moves the point at which scores are taken, and with it the borders of X_m.

No form is made for each key: grids have up to 2^24 of them. Scores and values are linear in the stored numbers of a
token, and one key with the largest of these numbers has the sizes and roundings of all.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from flint import arb, fmpq

from attnc_checker.averages import Average
from attnc_checker.claims import Claim
from attnc_checker.expressions import Function, Smooth, Step, evaluate
from attnc_checker.files import require
from attnc_checker.float32 import finer
from attnc_checker.forms import ONE, Form, Head, combined, constant, dense, span, stacked
from attnc_checker.leaves import Prover
from attnc_checker.network import Reduction, Stage
from attnc_checker.program import AffineLayer, AttentionLayer, Program, exact
from attnc_checker.ranges import UNKNOWN, Box, Range, Ranges
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import Vector, at, most, total

LEFT_OUT = 5e-5
"""If no g is stated, it is chosen so that the keys that are left out add about this share of the bound. attnc leaves as
much room for them."""
MAX_KNOWN = 2**16
"""The ranges of a part of the expression are stored for at most this number of combinations. Each takes 300 bytes."""
FLOATED, SMALLEST_SLACK = 2.0**-48, 1e-300
"""Largest error of a distance in floats, in units of the sizes of its parts: a conversion from Arb and a product each
round by 2^-51, and three sums by 2^-53. The smallest number that is added makes up for underflow."""
MOST_WAITING = 2**12
"""The number of cells that wait for a comparison in Arb. Each takes 300 bytes."""
ANY_KEY = -1
"""The token of the key that stands for all keys."""

Row = tuple[float, ...]
"""The stored numbers of a token that make the scores of one variable."""


class Line(NamedTuple):
    """The score of a row as a function of one variable, and the numbers by which components of the query count."""

    slope: fmpq
    constant: fmpq
    parts: tuple[fmpq, ...]


class Keys(Reduction):
    """The reduction of a program with one head over constant keys. Its stage has one key, which stands for all."""

    def __init__(self, program: Program, reach: list[arb]) -> None:
        super().__init__(program, reach)
        self.columns: dict[int, array[float]] = {}  # the numbers of all keys in a channel, if scores or values read it
        self.scores: dict[int, Form] = {}  # channel → the form that a score adds per unit of its number
        self.parts: dict[int, dict[int, fmpq]] = {}  # channel → component of the query → its factor in that form
        self.query: list[int] = []  # the components of the query that scores read
        self.moving: list[bool] = []  # whether they depend on the input
        self.values: dict[int, dict[int, fmpq]] = {}  # output → channel → the value per unit of its number

    def _head(self, i: int, query: int, h: int, outputs: dict[int, Form]) -> Head:
        layer = self.main.layers[i - 1]
        require(isinstance(layer, AttentionLayer) and not self.columns, "a partition has one head")
        assert isinstance(layer, AttentionLayer)
        weights, stream = layer.heads[h], self.memory if layer.cross else self.main
        at = len(stream.layers) if layer.cross else i - 1
        made = stream.layers[at - 1] if at else None
        require(weights.mask is None and isinstance(made, AffineLayer), "the keys of a partition are constants")
        assert isinstance(made, AffineLayer)
        q = self._projected(self.main, i - 1, query, weights.W_Q)
        for j, form in q.items():
            for channel, weight in weights.W_K[j]:
                so_far = self.scores.get(channel, Form({}, {}))
                self.scores[channel] = Form(*combined([(fmpq(1), arb(1), so_far), (weight, abs(arb(weight)), form)]))
                self.parts.setdefault(channel, {})[j] = weight
        for o, form in outputs.items():
            self.values[o] = {}
            for e, column in enumerate(weights.W_V):
                for channel, weight in column:
                    per_unit = weight * form.terms.get((i, query, h, e), 0)
                    self.values[o][channel] = self.values[o].get(channel, fmpq(0)) + per_unit
        read = {channel for channel, _ in itertools.chain(*weights.W_K, *weights.W_V)}
        require(not any(channel in read for _, channel in made.rows), "the keys of a partition are constants")
        num_keys, place = stream.shapes[at][0], (stream is self.main, at, ANY_KEY)
        for channel in read:
            self.columns[channel] = made.constant.column(channel)
            self.known[*place, channel] = _largest(self.columns[channel])
        key, value = (self._projected(stream, at, ANY_KEY, W) for W in (weights.W_K, weights.W_V))
        score = self._sum([(q[j], b) for j, b in key.items() if j in q])
        said = {o: stacked([self._read_out(form, (i, query, h), value, num_keys)]) for o, form in outputs.items()}
        self.query = [j for j in q if j in key]
        self.moving = [not q[j].is_constant for j in self.query]
        head = Head.of([score], said)
        head = finer(head, q, [key], num_keys) if self.dtype == "float32" else head
        # The numbers of other keys have other signs, so that terms of the key that stands for all must not cancel.
        parts = tuple(Vector([key[j].sizes[ONE]]) for j in self.query) if head.parts else ()
        sizes = {key: x.each(arb.upper) for key, x in head.scores.sizes.items()}
        return replace(head, scores=head.scores._replace(terms=sizes), parts=parts)


def _largest(column: array[float]) -> Form:
    """Return a constant of at least the size of all numbers. Products with it round if those of any number do."""
    size = max(max(column), -min(column))
    return constant(exact(size) * (1 + fmpq(1, 2**60)))


@dataclass(frozen=True)
class Partition(Prover):
    """Proves enclosure leaves of a partition."""

    sides: list[list[Range]]  # the ends of X_m, for the rows of each variable
    near: int  # the largest number of keys with x_i ∈ X_{m_i} for all i at one point
    leak: arb  # the weight of all other keys, as engines compute it
    values: list[_Values]  # for each output

    @classmethod
    def over(
        cls, keys: Keys, function: Function, arithmetic: Arithmetic, claim: Claim, stated: float | None
    ) -> Partition:
        """`stated` is the gap g of the certificate. Any g is sound."""
        stage, d = keys.stage(), len(claim.ends)
        require(len(stage.heads) == 1, "a partition has one head")
        (head,) = stage.heads
        affine = [form.terms.keys() | form.sizes.keys() for form in stage.affine]
        has_all = head.values.keys() == set(range(len(stage.affine))) and all(each <= {ONE} for each in affine)
        require(has_all, "an output of a partition is more than its head with constant values")
        rows, place, off = _grid(keys, d)
        own, of_query = _score_errors(keys, head, arithmetic)
        unsure = 2 * (most(arithmetic.weights(Vector([own]), Vector([arithmetic.kept]))) + arb(off))
        values = [_Values.of(keys, head, o, stage, place, arithmetic) for o in range(len(stage.affine))]
        moved = most(value.high - value.low + 4 * value.size for value in values)  # by keys that are left out
        share = arb(LEFT_OUT) * claim.bound / (moved + claim.bound) if claim.bound > 0 else arb(LEFT_OUT)
        gap = (unsure + (2 * d / share).log()).upper() if stated is None else arb(stated)
        sides = [_where_near(lines, gap, of_query) for lines in rows]
        near, leak = math.prod(map(_most_at_once, sides)), (2 * d * (unsure - gap).exp()).upper()
        require(leak < arb(1) / 16, "the scores of the partition are too uncertain")
        constants = replace(stage, heads=[], inputs=[])
        return cls(constants, [], function, arithmetic, sides, near, leak, values)

    def within(self, region: Box) -> Partition:
        return self

    def error(self, kind: str, order: int, box: Box, limit: arb) -> arb:
        """Return an upper bound on sup |f − network| over all outputs, or a number above the limit if there is none."""
        sides = [_meeting(rows, side) for rows, side in zip(self.sides, box.sides, strict=True)]
        rooms, errors = list[arb](), list[arb]()
        for o, ((low, high), value) in enumerate(
            zip(evaluate(self.function, Ranges(box.sides)), self.values, strict=True)
        ):
            farthest = (high - value.low).max(value.high - low)
            errors.append(self.leak * farthest + value.rounding(self.arithmetic, self.near, self.leak))
            rooms.append(limit - errors[o])

        def refined(o: int, place: tuple[int, ...], row: tuple[fmpq]) -> arb:
            part = Box.between([side[n][1] for side, n in zip(sides, place, strict=True)])
            return self.distance(o, row, part, rooms[o])

        worst = [_Farthest(*each, partial(refined, o)) for o, each in enumerate(zip(self.values, rooms, strict=True))]
        for place, ranges in _Evaluation(self.function, [[ends for _, ends in rows] for rows in sides]).cells():
            rows = [side[n][0] for side, n in zip(sides, place, strict=True)]
            for o, ends in enumerate(ranges):
                if (above := worst[o].add(place, rows, ends)) is not None:
                    return above + errors[o]  # above the limit, or unknown: other cells need not be compared
        return most(map(operator.add, (each.settled() for each in worst), errors))


class _Farthest:
    """The largest |f − v_k| on the cells of a leaf, in one output.

    A float bound of it, with an a-priori bound of rounding, tells for most cells that another one is worse. Arb decides
    the others.
    """

    def __init__(self, value: _Values, room: arb, refined: Callable[[tuple[int, ...], tuple[fmpq]], arb]) -> None:
        self.value, self.room, self.refined = value, room, refined
        self.found, self.least, self.waiting = arb(0), 0.0, list[tuple[float, list[int], Range]]()
        self.sure = float(room) * (1 - 8 * FLOATED) if room > 0 else -math.inf

    def add(self, place: tuple[int, ...], rows: list[int], ends: Range) -> arb | None:
        """Compare f with the value of a cell. Return a number above the limit if there is no bound below it."""
        low, high = map(float, ends)
        v = self.value.nearly(rows)
        slack = FLOATED * (abs(low) + abs(high) + self.value.nearly_largest) + SMALLEST_SLACK
        bound = max(high - v, v - low) + slack
        if bound <= self.least:
            return None
        if bound <= self.sure:
            self.least = max(self.least, bound - 2 * slack)  # the cell has at least this distance
            self.waiting.append((bound, rows, ends))
            if len(self.waiting) >= MOST_WAITING:
                self.settled()
            return None
        found = self._distance(rows, ends)
        if not found <= self.room:
            found = self.refined(place, (self.value.own(rows),))
            if not found <= self.room:
                return found
        self._raise(found)
        return None

    def settled(self) -> arb:
        """Return the largest distance so far."""
        for bound, rows, ends in sorted(self.waiting, reverse=True, key=operator.itemgetter(0)):
            if bound <= float(self.found) * (1 - 8 * FLOATED):
                break
            self._raise(self._distance(rows, ends))
        self.waiting.clear()
        return self.found

    def _distance(self, rows: list[int], ends: Range) -> arb:
        v = self.value.at(rows)
        return (ends[1] - v).max(v - ends[0])

    def _raise(self, found: arb) -> None:
        if not found <= self.found:
            self.found = found.upper()


@dataclass(frozen=True)
class _Values:
    """The values of all cells in one output, with the constant of the output: factor·numbers + constant."""

    numbers: Sequence[float]
    strides: Sequence[int]
    factor: fmpq
    constant: fmpq
    low: arb
    high: arb
    size: arb  # the largest value, underflow included
    n: int
    lost: arb  # the rounding of the output's own constant, and of weights that are lost

    @classmethod
    def of(cls, keys: Keys, head: Head, o: int, stage: Stage, place: _Place, arithmetic: Arithmetic) -> _Values:
        read = {channel: factor for channel, factor in keys.values[o].items() if factor != 0}
        require(len(read) == 1, "an output of a partition reads one number of each key")
        ((channel, factor),) = read.items()
        column = keys.columns[channel]
        numbers = array("d", bytes(8 * len(column)))
        for n, x in zip(place.numbers, column, strict=True):
            numbers[n] = x
        own, form, size = (
            dense(stage.affine[o].terms, ())[0],
            stage.affine[o],
            span(head.values[o].sizes, keys.reach)[0],
        )
        ends = [arb(factor * exact(x) + own) for x in (min(numbers), max(numbers))]
        lost = arithmetic.gamma(form.n) * span(form.sizes, keys.reach) + 4 * len(column) * arithmetic.lost * size
        low, high = ends if factor > 0 else ends[::-1]
        return cls(numbers, place.strides, factor, own, low.lower(), high.upper(), size, head.values[o].n, lost)

    def own(self, rows: Sequence[int]) -> fmpq:
        """Return the value of a cell without the constant of the output."""
        x = self.numbers[sum(map(int.__mul__, rows, self.strides))]
        return self.factor * fmpq(*x.as_integer_ratio())

    def nearly(self, rows: Sequence[int]) -> float:
        """Return the value of a cell in floats."""
        factor, constant = self.floats
        return factor * self.numbers[sum(map(int.__mul__, rows, self.strides))] + constant

    @cached_property
    def floats(self) -> tuple[float, float]:
        return float(arb(self.factor)), float(arb(self.constant))

    @cached_property
    def nearly_largest(self) -> float:
        """At least the size of the parts of all values in floats, up to rounding."""
        factor, constant = self.floats
        return abs(factor) * max(max(self.numbers), -min(self.numbers)) + abs(constant)

    def at(self, rows: Sequence[int]) -> arb:
        return arb(self.own(rows) + self.constant)

    def rounding(self, arithmetic: Arithmetic, near: int, leak: arb) -> arb:
        if arithmetic.u == 0:
            return arb(0)
        require(len(self.numbers) * arithmetic.u <= arb(1) / 8, "the head has more keys than the theorem covers")
        far, none = leak * self.size, arb(0)
        by_far_keys = arithmetic.sums(near, self.n, leak, far, self.size + far, self.size + far)
        return by_far_keys.min(arithmetic.sums(len(self.numbers), self.n, none, none, self.size, self.size)) + self.lost


@dataclass(frozen=True)
class _Place:
    """The cell of every key: row m_i of variable i adds strides[i]·m_i to its number."""

    numbers: Sequence[int]
    strides: Sequence[int]


def _grid(keys: Keys, d: int) -> tuple[list[list[Line]], _Place, fmpq]:
    """Return the rows of every variable by ascending slopes, the cells of keys, and the largest misfit of a constant.

    Refuse unless keys are all combinations of rows, each once.
    """
    channels: list[list[int]] = [[] for _ in range(d)]
    shared: list[tuple[fmpq, array[float]]] = []  # of channels whose form is constant: this constant and the numbers
    for channel, form in keys.scores.items():
        moving = [key for key in form.sizes if key != ONE]
        require(len(moving) <= 1, "a number of the keys counts for several variables")
        if moving:
            (i,) = moving
            assert isinstance(i, int)
            channels[i].append(channel)
        else:
            shared.append((form.terms.get(ONE, fmpq(0)), keys.columns[channel]))
    count = len(next(iter(keys.columns.values())))
    numbers, strides, lines = array("q", bytes(8 * count)), list[int](), list[list[Line]]()
    for i in reversed(range(d)):
        columns = [keys.columns[channel] for channel in channels[i]]
        by_slope = sorted((_line(keys, channels[i], row, i), row) for row in set(_rows(columns, count)))
        slopes = {line.slope for line, _ in by_slope}
        require(len(slopes) == len(by_slope), "two rows of a variable have the same slope")
        strides.insert(0, math.prod(map(len, lines)))
        lines.insert(0, [line for line, _ in by_slope])
        number = {row: m * strides[0] for m, (_, row) in enumerate(by_slope)}
        numbers = array("q", map(int.__add__, numbers, map(number.__getitem__, _rows(columns, count))))
    key_at = array("q", [-1]) * count
    require(count == math.prod(map(len, lines)), "the keys of the last head are not all combinations of rows")
    for key, n in enumerate(numbers):
        key_at[n] = key
    require(min(key_at) >= 0, "the keys of the last head are not all combinations of rows")

    def constant_at(n: int) -> fmpq:
        read = ((factor, column[key_at[n]]) for factor, column in shared)  # too many numbers for the cache of `exact`
        return sum((factor * fmpq(*x.as_integer_ratio()) for factor, x in read), fmpq(0))

    first, along, rows = constant_at(0), list[list[fmpq]](), list[list[Line]]()
    for line, stride in zip(lines, strides, strict=True):
        along.append([constant_at(m * stride) - first for m in range(len(line))])
        rows.append([each._replace(constant=each.constant + x) for each, x in zip(line, along[-1], strict=True)])
    off = max(abs(constant_at(n) - x) for n, x in enumerate(_sums(first, along)))
    return rows, _Place(numbers, strides), off


def _rows(columns: list[array[float]], count: int) -> Iterator[Row]:
    """Yield the numbers of every key in these columns."""
    return zip(*columns, strict=True) if columns else itertools.repeat((), count)


def _sums(first: fmpq, along: list[list[fmpq]]) -> Iterator[fmpq]:
    """Yield first + Σ_i along[i][m_i] for all (m_1, …, m_d). The last m changes fastest."""
    if not along:
        yield first
        return
    for x in along[0]:
        yield from _sums(first + x, along[1:])


def _line(keys: Keys, channels: list[int], row: Row, i: int) -> Line:
    """Return the score that the numbers of a row make, as a function of the variable i."""
    numbers = [*map(exact, row)]

    def summed(factors: Iterable[fmpq]) -> fmpq:
        return sum(map(operator.mul, numbers, factors), fmpq(0))

    slope, own = (summed(keys.scores[channel].terms.get(key, fmpq(0)) for channel in channels) for key in (i, ONE))
    parts = (summed(keys.parts[channel].get(j, fmpq(0)) for channel in channels) for j in keys.query)
    return Line(slope, own, tuple(parts))


def _score_errors(keys: Keys, head: Head, arithmetic: Arithmetic) -> tuple[arb, list[arb]]:
    """Return the error of every score, and the errors of the components of the query that depend on the input.

    In float32 the latter are not in the former. Otherwise they are taken to be 0.
    """
    reach = [keys.reach[key] for key in keys.inputs]
    moves = [is_moving and bool(head.query) for is_moving in keys.moving]
    middles = [arb(part[0]) if moved else arb(0) for part, moved in zip(head.parts, moves, strict=False)]
    box = Box([arb(0)] * len(reach), reach)
    own = Average.of(head, keys.inputs).score_errors(box, arithmetic, middles)
    of_query = [arithmetic.unit(head.n) * at(dense(query, keys.inputs), reach) for query in head.query]
    errors = itertools.zip_longest(of_query, moves, fillvalue=arb(0))
    return most(own), [error if moved else arb(0) for error, moved in errors]


def _where_near(lines: list[Line], gap: arb, errors: list[arb]) -> list[Range]:
    """Return the ends of all X_m: s_{m+1} − s_m is −g at the lower end of X_{m+1} and g at the upper end of X_m.

    Errors of the query change a difference of two rows, and are added to g. If rows do not take turns in the order of
    their slopes, as after a cast to float32, the intervals are made longer until both their ends ascend.
    """
    lows, highs = [arb("-inf")], list[arb]()
    for a, b in itertools.pairwise(lines):
        steep, meet = arb(b.slope - a.slope), arb(a.constant - b.constant)
        moved = total(error * abs(arb(y - x)) for error, x, y in zip(errors, a.parts, b.parts, strict=True))
        highs.append(((meet + gap + moved) / steep).upper())
        lows.append(((meet - gap - moved) / steep).lower())
    lows = [*itertools.accumulate(reversed(lows), arb.min)][::-1]
    highs = [*itertools.accumulate([*highs, arb("inf")], arb.max)]
    return [(low, high.max(low)) for low, high in zip(lows, highs, strict=True)]


def _most_at_once(sides: list[Range]) -> int:
    """Return the largest number of intervals that hold one point: of those that end after one of them begins."""
    return max(m + 1 - bisect_left(sides, low, key=lambda side: side[1]) for m, (low, _) in enumerate(sides))


def _meeting(sides: list[Range], ends: Range) -> list[tuple[int, Range]]:
    """Return the rows that are needed in an interval, and the part of it where they are."""
    first = bisect_left(sides, ends[0], key=lambda side: side[1])
    last = bisect_right(sides, ends[1], key=lambda side: side[0])
    return [(m, (sides[m][0].max(ends[0]), sides[m][1].min(ends[1]))) for m in range(first, last)]


class _Evaluation:
    """The ranges of a function on all combinations of sides, one for each variable.

    A step of the expression is evaluated once for each combination of the sides of its own variables.
    """

    def __init__(self, function: Function, sides: list[list[Range]]) -> None:
        self.sides, self.outputs, self.done = sides, function.outputs, dict[int, Range]()
        self.rules = Ranges([UNKNOWN] * len(sides))
        self.by_depth: list[list[_Made]] = [[] for _ in range(len(sides) + 1)]
        read: dict[int, frozenset[int]] = {}
        for number, (rule, given) in function.steps.items():
            own = frozenset(x for x in given if rule == "variable" and isinstance(x, int))
            read[number] = own.union(*(read[x] for x in given if isinstance(x, Step)))
            needs, depth = sorted(read[number]), max(read[number], default=-1) + 1
            is_known = len(needs) < depth and math.prod(len(sides[i]) for i in needs) <= MAX_KNOWN
            self.by_depth[depth].append(
                _Made(number, getattr(self.rules, rule), given, needs, {} if is_known else None)
            )

    def cells(self, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], list[Range]]]:
        """Yield (place, ranges of the outputs), for all places that begin like this."""
        depth, done = len(place), self.done
        for number, rule, given, needs, known in self.by_depth[depth]:
            at = None if known is None else tuple(place[i] for i in needs)
            if known is None or at not in known:
                done[number] = rule(*(done[x] if isinstance(x, Step) else x for x in given))
            if known is not None:
                done[number] = known.setdefault(at, done[number])
        if depth == len(self.sides):
            yield place, [done[i] for i in self.outputs]
            return
        for n, side in enumerate(self.sides[depth]):
            self.rules.ends[depth] = side
            yield from self.cells((*place, n))


class _Made(NamedTuple):
    """A step, by the rule that makes it, and its ranges for the sides of the variables that it needs."""

    number: int
    rule: Callable[..., Range]
    given: tuple[Step | Smooth | int, ...]
    needs: list[int]
    known: dict[Any, Range] | None
