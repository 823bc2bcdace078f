"""One head over a box: the moment Taylor model of its average, and the gaps between its scores.

Write x = c + t, |t_i| ≤ r_i, τ = t/r, and A(x) = Σ_k p_k(x) v_k(x), p = softmax(s), s_k(x) = c_k + a_k·x.

Theorem (Taylor).  Let w_k = e^{s_k(c)}, α_k = a_k − ā and u_k = v_k − v0 with any ā and v0, ρ_k = Σ_i |α_ki| r_i. Then
A − v0 = N/D with N = Σ w_k u_k e^{α_k·t}, D = Σ w_k e^{α_k·t}. As |e^y − Σ_{n≤m} y^n/n!| ≤ |y|^{m+1} e^{|y|}/(m+1)!,
    N = Σ_{|j|≤m} ν_j τ^j + R_N,  ν_j = Σ_k w_k u_k (α_k r)^j/j!,  |R_N| ≤ Σ_k w_k |u_k| ρ_k^{m+1} e^{ρ_k}/(m+1)!,
and D alike with δ_j and R_D, for u_k = 1. By Jensen's inequality D ≥ D₋ = δ_0 exp(−Σ_i |δ_{e_i}|/δ_0). For any
polynomial Q
    |A − v0 − Q| = |N − Q·D|/D ≤ (Σ_j |(ν − Q·δ)_j| + ‖Q‖₁·R_D + R_N)/D₋,
and long division of ν by δ gives a good Q, with the remainder ν − Q·δ. If values depend on x, that is
v_k(c + t) = v_k(c) + V_k·t, the moments of V_k times t are added to ν, and |u_k| + |V_k|·r replaces |u_k|.

Theorem (rounding).  On the box p_k ≤ share_k = w_k e^{ρ_k}/D₋. If computed weights are off by e^{±y_k} and, with
τ_k = e^{y_k} − 1, T ≥ Σ p_k τ_k, T < 1, then the average by computed weights is within Σ p_k τ_k |v_k − A|/(1 − T)
of A, and these weights are at most share_k (1 + τ_k)/(1 − T). No weights move an average by more than the largest
distance of two values; this is the only bound if T ≥ 1. The sum is convex in A: with the slopes of Q where values
depend on x, and |A − v0| ≤ a for the rest, it is largest at v0 ± a. A mean G = Σ p_k g_k over the box is near its value
G_0 at the centre: with the weights q_k = w_k/δ_0 there and z_k = α_k·t, |z_k| ≤ ρ_k,
    |G − G_0| = |Σ w_k (g_k − G_0)(e^{z_k} − 1)|/D
              ≤ (Σ_i |Σ_k q_k (g_k − G_0) α_ki r_i| + Σ q_k |g_k − G_0|(e^{ρ_k} − 1 − ρ_k))·δ_0/D₋.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from flint import arb, arb_mat

from attnc_checker.forms import Head, Key, Terms, dense
from attnc_checker.jets import Poly, above, add, norm, variable
from attnc_checker.moments import quotient
from attnc_checker.ranges import Box
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import INFINITE, Row, Vector, at, most, swing, total

FAR = 60
"""Keys whose scores are behind by more than this on a whole box are left out there. Each counts with weight e^−60."""

FEW = 32
"""Heads with at most this many keys are not searched for far keys: that takes as long as it saves."""
MOST_WINNERS = 64
"""The number of keys whose differences from all others are kept."""
TINY = arb(2) ** -30
"""Errors of weights below this number have one bound for all keys of a head."""

Models = dict[int, tuple[Poly, arb]]
"""For every output, a polynomial and a bound on the distance from it."""


@dataclass(frozen=True, eq=False)
class Average:
    """A head, or only its keys `kept`, in balls: rows of vectors. `dropped` bounds the effect of the other keys.

    Along the axis i, key k has the slope axes[i][places[k][i]].
    """

    head: Head
    kept: Sequence[int]
    dropped: dict[int, arb]
    scores: Row
    score_sizes: Row
    own: Row
    slack: Vector
    parts: Row
    query: list[Row]
    values: dict[int, Row]
    value_sizes: dict[int, Row]
    axes: list[list[arb]]
    places: list[tuple[int, ...]]

    @classmethod
    def of(cls, head: Head, inputs: Sequence[Key]) -> Self:
        def row(terms: Terms, among: Sequence[Key] = inputs) -> Row:
            return tuple(column.each(arb) for column in dense(terms, among))

        moving = {o: () if form.is_constant else inputs for o, form in head.values.items()}
        slopes = dense(head.scores.terms, inputs)[1:]
        numbers = [{x: n for n, x in enumerate(sorted(set(column)))} for column in slopes]
        return cls(
            head,
            range(head.num_keys),
            dict.fromkeys(head.values, arb(0)),
            row(head.scores.terms),
            row(head.scores.sizes),
            row(head.own),
            head.slack,
            tuple(column.each(arb) for column in head.parts),
            [tuple(map(arb, dense(terms, inputs))) for terms in head.query],
            {o: row(form.terms, moving[o]) for o, form in head.values.items()},
            {o: row(form.sizes, moving[o]) for o, form in head.values.items()},
            [[*map(arb, axis)] for axis in numbers],
            [tuple(map(dict.__getitem__, numbers, place)) for place in zip(*slopes, strict=True)],
        )

    def without_far(self, box: Box, arithmetic: Arithmetic) -> Self:
        """Return the head without keys that are far behind on the whole box, if there are many.

        Let the sum of their weights, as engines may keep them, be `mass` ≤ 1/16, and |v| ≤ V. They move A by at most
        2·mass·V, and its sums by less than 6·mass·V.
        """
        _, gaps, _ = self.gaps(box, arithmetic)
        near = [n for n, gap in enumerate(gaps) if not gap > FAR]
        mass = total((-gap).exp() + arithmetic.lost for gap in gaps if gap > FAR)
        if 4 * len(near) > 3 * len(gaps) or not 16 * mass <= 1:
            return self
        dropped = {o: x + 8 * mass * most(self.sizes(o, box)) for o, x in self.dropped.items()}
        return self._only(near, dropped)

    def _only(self, chosen: list[int], dropped: dict[int, arb]) -> Self:
        """Return the head with only the keys at these places of `kept`."""

        def row(columns: Row) -> Row:
            return tuple(Vector(map(column.__getitem__, chosen)) for column in columns)

        places = [self.places[n] for n in chosen]
        numbers = [{x: n for n, x in enumerate(sorted(set(column)))} for column in zip(*places, strict=True)]
        scores, score_sizes, own = map(row, (self.scores, self.score_sizes, self.own))
        (slack,) = row((self.slack,))
        return replace(
            self,
            kept=[self.kept[n] for n in chosen],
            dropped=dropped,
            scores=scores,
            score_sizes=score_sizes,
            own=own,
            slack=slack,
            parts=row(self.parts),
            values={o: row(rows) for o, rows in self.values.items()},
            value_sizes={o: row(rows) for o, rows in self.value_sizes.items()},
            axes=[[axis[x] for x in known] for axis, known in zip(self.axes, numbers, strict=True)],
            places=[tuple(map(dict.__getitem__, numbers, place)) for place in places],
        )

    def reach(self, box: Box) -> list[arb]:
        """Return the largest |x_i| on the box, as they count in sizes."""
        return [x.min(self.head.farthest) for x in box.reach]

    def sizes(self, o: int, box: Box) -> Vector:
        """Return the sizes of the values for output o."""
        found: Vector = at(self.value_sizes[o], self.reach(box))
        return found

    def score_errors(self, box: Box, arithmetic: Arithmetic, middles: Sequence[arb]) -> Vector:
        """Bound the errors of scores, up to a part that all keys share.

        An error e_j of the query adds e_j·(parts_kj − middle_j), for any middle_j. Every partial sum of n terms is
        at most (Σ|terms| + |s|)/2, and the last is s. So additions cost v((n − 2)(Σ|terms| + |s|)/2 + |s|). Here the
        terms are the rounded ones, and s includes all its errors.
        """
        reach, n, addends = self.reach(box), self.head.n, self.head.addends
        v, grown = arithmetic.unit(n), 1 + arithmetic.gamma(n)
        errors = at(self.own, reach) * (v * grown) + self.slack
        for query, column, middle in zip(self.query, self.parts, middles, strict=True):
            errors += abs(column - middle) * (v * at(query, reach))
        if addends < 2:
            return errors
        v, terms = arithmetic.unit(addends), at(self.score_sizes, reach) * grown
        score = abs(at(self.scores, box.centre)) + swing(self.scores, box.half) + errors + terms * arithmetic.gamma(n)
        return errors + ((terms + score) * (arb(addends - 2) / 2) + score) * v

    def gaps(self, box: Box, arithmetic: Arithmetic) -> tuple[int, Vector, Vector]:
        """Return (j, g, y): s_j is largest at the centre, and on the box computed p̂_k ≤ e^{−g_k} p̂_j are off by y."""
        scores = at(self.scores, box.centre)
        j = max(range(len(scores)), key=lambda k: scores[k].mid())
        swings, lead = at((arb(0), *self._slopes_apart(j)), box.half), scores[j] - scores
        overtaken = most(swings - lead)  # ≥ max s − s_j on the box
        off = Vector([self.largest.weight_error(self, box, arithmetic)] * len(scores))
        if not off[0] <= TINY:
            errors = self.score_errors(box, arithmetic, [column[j] for column in self.parts])
            off = arithmetic.weights(errors, lead + swings + overtaken)
        return j, lead - swings - (off + off[j]), off

    @cached_property
    def _slopes_apart(self) -> Callable[[int], Row]:
        """Return |a_k − a_j| for all keys k, as a function of j."""
        return lru_cache(MOST_WINNERS)(lambda j: tuple(abs(column - column[j]) for column in self.scores[1:]))

    @cached_property
    def largest(self) -> Largest:
        """The largest numbers over all keys."""
        return Largest.of(self)

    def model(self, box: Box, m: int, arithmetic: Arithmetic) -> Models:
        """Return (polynomial, error) for every output. The computed average is within `error` of the polynomial."""
        d, linear = len(box.centre), [variable(i, len(box.centre)) for i in range(len(box.centre))]
        scores = at(self.scores, box.centre)
        top = most(scores)
        w = (scores - top).each(arb.exp)
        means = [(w @ slopes / total(w)).mid() for slopes in self.scores[1:]]
        shifts = [  # α_i·r_i, for every slope
            [(x - mean) * r for x in axis] for axis, mean, r in zip(self.axes, means, box.half, strict=True)
        ]
        values = [w * column for rows in self.values.values() for column in rows]
        delta, *others = moments_of([w, *values], self.places, shifts, m)
        least = delta[0] * (-total(abs(delta[key]) for key in linear) / delta[0]).exp()
        places = zip(*self.places, strict=True)
        moves = [Vector(shift[n] for n in place) for shift, place in zip(shifts, places, strict=True)]
        rho = total(map(abs, moves)).each(arb.upper)
        grown = rho.each(arb.exp)
        share = w * grown / least
        tail = share * rho.each(lambda r: r ** (m + 1)) / math.factorial(m + 1)
        q, growth = w / delta[0], delta[0] / least
        bends, weighted = q * (grown - rho - 1), [q * move for move in moves]

        def mean_at_most(terms: Vector) -> arb:
            """Bound Σ p_k terms_k on the box, by the theorem on means."""
            mean = q @ terms
            if box.is_point:
                return mean
            pairs = zip(weighted, linear, strict=True)
            moved = total(abs(x @ terms - mean * delta[key] / delta[0]) for x, key in pairs)
            return mean + growth * (moved + bends @ abs(terms - mean))

        behind = most(scores + rho) - scores + rho  # ≥ max s − s_k on the box
        errors = self.score_errors(box, arithmetic, [q @ column for column in self.parts])
        tau = arithmetic.weights(errors, behind).each(arb.expm1)
        slack = 1 - mean_at_most(tau)
        is_known = bool(slack > 0)  # otherwise nothing is known about computed weights
        computed = share * (tau + 1) / slack if is_known else Vector([arb(1)] * len(tau))
        found = {}
        for o, rows in self.values.items():
            nu, *slopes = (others.pop(0) for _ in rows)
            for slope, key, c, r in zip(slopes, linear, box.centre, box.half, strict=False):
                nu = add(add(nu, slope, c), {key + j: x * r for j, x in slope.items()})
            v0 = (nu[0] / delta[0]).mid()
            Q, rest = quotient(add(nu, delta, -v0), delta, m, d)
            apart = at(rows, box.centre) - v0
            error = rest / least + norm(Q) * total(tail) + tail @ (abs(apart) + swing(rows, box.half))
            moving = [Q[key] for key in linear[: len(slopes)]]
            swings = total(abs(V * r - x) for V, r, x in zip(rows[1:], box.half, moving, strict=False))  # for v_k − Q
            left = norm(Q) - total(map(abs, moving)) + error
            hull, sized = most(apart + swings) + most(swings - apart), INFINITE
            sizes = self.sizes(o, box)
            if is_known:
                by_weights = most(mean_at_most(tau * (abs(apart - a) + swings)) for a in (left, -left)) / slack
                hull, sized = by_weights.min(hull), mean_at_most(sizes * (tau + 1)) / slack
            error += hull
            error += arithmetic.summation(self.head, o, computed, sizes, abs(v0) + norm(Q) + error, sized)
            found[o] = (add(Q, {0: v0}), error + self.dropped[o])
        return found


class Largest(NamedTuple):
    """The largest numbers over the keys of a head, as forms of x, and the largest differences."""

    own: Row
    slack: arb
    scores: Row
    sizes: dict[int, Row]
    values: dict[int, Row]

    @classmethod
    def of(cls, average: Average) -> Largest:
        def differences(rows: Row) -> Row:
            return tuple(most(column) + most(-column) for column in rows)

        sizes = {o: tuple(map(most, rows)) for o, rows in average.value_sizes.items()}
        values = {o: differences(rows) for o, rows in average.values.items()}
        return cls(tuple(map(most, average.own)), most(average.slack), differences(average.scores), sizes, values)

    def weight_error(self, average: Average, box: Box, arithmetic: Arithmetic) -> arb:
        """Bound the errors of all weights, or return ∞ if those of the query count by themselves."""
        head, n = average.head, average.head.n
        if head.query or head.addends:
            return INFINITE
        errors = at(self.own, average.reach(box)) * (arithmetic.unit(n) * (1 + arithmetic.gamma(n))) + self.slack
        (y,) = arithmetic.weights(Vector([errors]), Vector([at(self.scores, box.reach)]))
        return y

    def rounding(self, average: Average, o: int, box: Box, arithmetic: Arithmetic) -> arb:
        """Bound the rounding of the average by one bound for all keys."""
        reach, head, y = average.reach(box), average.head, self.weight_error(average, box, arithmetic)
        if not y < 0.5:
            return INFINITE
        tau, summed = y.expm1(), arithmetic.at_most(head, o, at(self.sizes[o], reach))
        return tau / (1 - tau) * at(self.values[o], box.reach) + summed


def moments_of(columns: list[Vector], places: Sequence[tuple[int, ...]], shifts: list[list[arb]], m: int) -> list[Poly]:
    """Return Σ_k g_k (α_k r)^j/j! for |j| ≤ m and every column g.

    Keys that differ only along the last axis are added up first, once for every power along it. Then follow keys that
    differ only along the axis before it, and so on.
    """
    d, names = len(shifts), [(c, 0) for c in range(len(columns))]
    sums: Sequence[tuple[tuple[int, ...], Sequence[arb]]] = sorted(
        zip(places, zip(*columns, strict=True), strict=True), key=lambda pair: pair[0]
    )
    for i in reversed(range(d)):
        powers = [_powers(x, m) for x in shifts[i]]
        names = [(c, key + n * variable(i, d)) for c, key in names for n in range(m + 1)]
        is_needed, added = [key < above(m, d) for _, key in names], []
        for place, group in itertools.groupby(sums, key=lambda pair: pair[0][:i]):
            numbers, rows = zip(*group, strict=True)
            product = arb_mat(rows).transpose() * arb_mat([powers[number[i]] for number in numbers])
            added.append((place, [*itertools.compress(product.entries(), is_needed)]))
        names, sums = [*itertools.compress(names, is_needed)], added
    found: list[Poly] = [{} for _ in columns]
    for (c, key), x in sorted(zip(names, sums[0][1], strict=True), key=lambda pair: pair[0]):
        found[c][key] = x
    return found


def _powers(x: arb, m: int) -> list[arb]:
    """Return x^n/n! for n ≤ m, by products, since Arb has no powers of balls around 0."""
    return [*itertools.accumulate(range(1, m + 1), lambda y, n: y * x / n, initial=arb(1))]
