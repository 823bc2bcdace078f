"""One head over a box: the moment Taylor model of its average, and the gaps between its scores.

Write x = c + t, |t_i| ≤ r_i, τ = t/r, and A(x) = Σ_k p_k(x) v_k(x), p = softmax(s), s_k(x) = c_k + a_k·x.

Theorem (Taylor).  Let w_k = e^{s_k(c)}, α_k = a_k − ā and u_k = v_k − v0 with any ā and v0, ρ_k = Σ_i |α_ki| r_i. Then
A − v0 = N/D with N = Σ w_k u_k e^{α_k·t}, D = Σ w_k e^{α_k·t}. As |e^y − Σ_{n≤m} y^n/n!| ≤ |y|^{m+1} e^{|y|}/(m+1)!,
    N = Σ_{|j|≤m} ν_j τ^j + R_N,  ν_j = Σ_k w_k u_k (α_k r)^j/j!,  |R_N| ≤ Σ_k w_k |u_k| ρ_k^{m+1} e^{ρ_k}/(m+1)!,
and D alike with δ_j and R_D, for u_k = 1. By Jensen's inequality D ≥ D₋ = δ_0 exp(−Σ_i |δ_{e_i}|/δ_0). For any
polynomial Q
    |A − v0 − Q| = |N − Q·D|/D ≤ (Σ_j |(ν − Q·δ)_j| + ‖Q‖₁·R_D + R_N)/D₋,
and long division of ν by δ gives a good Q, with ν − Q·δ left over. If values move, v_k(c + t) = v_k(c) + V_k·t, the
moments of V_k times t are added to ν, and |u_k| + |V_k|·r stands for |u_k|.

Theorem (rounding).  On the box p_k ≤ share_k = w_k e^{ρ_k}/D₋. If computed weights are off by e^{±y_k} and, with
τ_k = e^{y_k} − 1, T ≥ Σ p_k τ_k, T < 1, then the average by computed weights is within Σ p_k τ_k |v_k − A|/(1 − T)
of A, and these weights are at most share_k (1 + τ_k)/(1 − T). The sum is convex in A: with the slopes of Q where values
move, and for what is left |A − v0| ≤ a, it is largest at v0 ± a. A mean G = Σ p_k g_k over the box is near its value
G_0 at the centre: with the weights q_k = w_k/δ_0 there and z_k = α_k·t, |z_k| ≤ ρ_k,
    |G − G_0| = |Σ w_k (g_k − G_0)(e^{z_k} − 1)|/D
              ≤ (Σ_i |Σ_k q_k (g_k − G_0) α_ki r_i| + Σ q_k |g_k − G_0|(e^{ρ_k} − 1 − ρ_k))·δ_0/D₋.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb, arb_mat, arb_poly

from attnc_checker.jets import Poly, above, add, degree, factorial, monomials, norm, variable
from attnc_checker.network import Head, Row, dense
from attnc_checker.rounding import Arithmetic, most

FAR = 100
"""Keys that are behind by more on all of a box are left out there: e^−100 is counted for each."""
FAR_PART = 2**-14
"""Or by less, if they may add only so much of what is to be proved."""


@dataclass(frozen=True)
class Box:
    """centre ± half."""

    centre: list[Any]
    half: list[Any]

    @property
    def reach(self) -> list[Any]:
        return [(abs(c) + r).upper() for c, r in zip(self.centre, self.half, strict=True)]


def total(terms: Iterable[Any]) -> Any:
    return sum(terms, arb(0))


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return (arb_mat(1, len(a), list(a)) * arb_mat(len(b), 1, list(b)))[0, 0]


def at(row: Row, x: Sequence[Any]) -> Any:
    """row[0] + Σ_i row[i+1]·x_i; a row may end early, where only zeros follow."""
    return row[0] + total(map(operator.mul, row[1:], x))


def swing(row: Row, half: Sequence[Any]) -> Any:
    """Σ_i |row[i+1]|·half_i."""
    return at((arb(0), *map(abs, row[1:])), half)


def minus(a: Row, b: Row) -> Row:
    return tuple(x - y for x, y in zip(a, b, strict=True))


class Rows(list[Row]):
    """Affine forms, one for each key."""

    def __init__(self, rows: Iterable[Row]) -> None:
        super().__init__(rows)
        self.matrix, self.columns = arb_mat([*map(list, self)]), [*zip(*self, strict=True)]

    def at(self, x: Sequence[Any]) -> list[Any]:
        width = self.matrix.ncols()
        entries: list[Any] = (self.matrix * arb_mat(width, 1, [arb(1), *x][:width])).entries()
        return entries

    def swings(self, half: Sequence[Any], j: int | None = None) -> list[Any]:
        """By how much each changes over a box, or by how much against row j."""
        found = [arb(0)] * len(self)
        for column, r in zip(self.columns[1:], half, strict=False):
            base = 0 if j is None else column[j]
            found = [y + abs(x - base) * r for x, y in zip(column, found, strict=True)]
        return found


class Average:
    """A head, its numbers as balls: those of the query, and of every key (score, its sizes, what it is off by on its
    own, slack and parts, and for every output value and sizes). `dropped`: what left out keys may add, by output."""

    def __init__(self, head: Head, query: list[Row], keys: list[tuple[Row, ...]], dropped: dict[int, Any]) -> None:
        self.head, self.query, self.keys, self.dropped = head, query, keys, dropped
        self.scores, self.score_sizes, self.own, self.parts, *others = map(Rows, zip(*keys, strict=True))
        self.values, self.value_sizes = (dict(zip(dropped, others[i::2], strict=True)) for i in (0, 1))

    @classmethod
    def of(cls, head: Head, inputs: Sequence[Any]) -> Average:
        def balls(terms: Any, among: Sequence[Any] = inputs) -> Row:
            return tuple(map(arb, dense(terms, among)))

        moving = {o: inputs if any(not key.values[o].is_constant for key in head.keys) else () for o in head.outputs}
        keys = [
            (
                *(balls(terms) for terms in (key.score.terms, key.score.sizes, key.own)),
                (key.slack, *map(arb, key.parts)),
                *(balls(terms, among) for o, among in moving.items() for terms in key.values[o][:2]),
            )
            for key in head.keys
        ]
        return cls(head, [*map(balls, head.query)], keys, dict.fromkeys(moving, arb(0)))

    def without_far(self, box: Box, arithmetic: Arithmetic, limit: Any = None) -> Average:
        """Without keys that are far behind on all of the box, if those are many.

        If their weights, with what engines may leave of each, are `mass` ≤ 1/16 together and |v| ≤ V, they move A by
        2·mass·V, and its sums by less than 6·mass·V.
        """
        _, gaps, _ = self.gaps(box, arithmetic)
        largest = {o: most(rows.at(box.reach)) for o, rows in self.value_sizes.items()}
        far = arb(FAR)
        if limit is not None and limit > 0:
            far = far.min((1 + 8 * len(gaps) * most(largest.values()) / (FAR_PART * limit)).log())
        kept = [k for k, gap in enumerate(gaps) if not gap > far]
        mass = total((-gap).exp() + arithmetic.lost for gap in gaps if gap > far)
        if 4 * len(kept) > 3 * len(gaps) or not 16 * mass <= 1:
            return self
        dropped = {o: x + 8 * mass * largest[o] for o, x in self.dropped.items()}
        return Average(self.head, self.query, [self.keys[k] for k in kept], dropped)

    def _score_errors(self, box: Box, arithmetic: Arithmetic, mean: Callable[[Sequence[Any]], Any]) -> list[Any]:
        """Up to what all keys share: an error e_j of the query adds e_j·(parts_kj − mean), whatever is called mean.

        Of the sum of n terms every partial sum is at most (Σ|terms| + |s|)/2, and the last is s. So additions cost
        v((n − 2)(Σ|terms| + |s|)/2 + |s|), where rounded terms, and s with its errors, stand for exact ones.
        """
        reach, n, (slack, *parts) = box.reach, self.head.n, self.parts.columns
        v, grown, addends = arithmetic.u / (1 - n * arithmetic.u), 1 + arithmetic.gamma(n), self.head.addends
        errors = [v * grown * x + y for x, y in zip(self.own.at(reach), slack, strict=True)]
        for query, column in zip(self.query, parts, strict=True):
            error, middle = v * at(query, reach), mean(column)
            errors = [x + error * abs(y - middle) for x, y in zip(errors, column, strict=True)]
        if addends < 2:
            return errors
        v, found = arithmetic.u / (1 - addends * arithmetic.u), []
        forms = self.scores.at(box.centre), self.scores.swings(box.half), self.score_sizes.at(reach)
        for x, middle, swing_, size in zip(errors, *forms, strict=True):
            score = abs(middle) + swing_ + x
            found.append(x + v * ((addends - 2) * (grown * size + score) / 2 + score))
        return found

    def summation(self, o: int, arithmetic: Arithmetic, weights: list[Any], sizes: list[Any], *known: Any) -> Any:
        """What sums add to the average; `known` of it: |average|, and the average of sizes."""
        n = max(key.values[o].n for key in self.head.keys)
        return arithmetic.summation(len(self.head.keys), n, self.head.depth, weights, sizes, *known)

    def gaps(self, box: Box, arithmetic: Arithmetic) -> tuple[int, list[Any], list[Any]]:
        """(j, g, y): s_j is largest at the centre; computed weights are p̂_k ≤ e^{−g_k} p̂_j on the box, and off by y."""
        scores = self.scores.at(box.centre)
        j = max(range(len(scores)), key=lambda k: scores[k].mid())
        swings, lead = self.scores.swings(box.half, j), [scores[j] - s for s in scores]
        overtaken = most(y - x for x, y in zip(lead, swings, strict=True))  # ≥ max s − s_j on the box
        behind = [x + y + overtaken for x, y in zip(lead, swings, strict=True)]
        off = arithmetic.weights(self._score_errors(box, arithmetic, lambda column: column[j]), behind)
        return j, [x - y - z - off[j] for x, y, z in zip(lead, swings, off, strict=True)], off

    def model(self, box: Box, m: int, arithmetic: Arithmetic) -> dict[int, tuple[Poly, Any]]:
        """For every output (polynomial, error): the average as computed is within the error of the polynomial."""
        d, linear = len(box.centre), [variable(i, len(box.centre)) for i in range(len(box.centre))]
        scores = self.scores.at(box.centre)
        top = most(scores)
        w = [(s - top).exp() for s in scores]
        means = [(dot(w, slopes) / total(w)).mid() for slopes in self.scores.columns[1:]]
        shifts = [  # α_ki·r_i
            [(x - mean) * r for x in slopes]
            for slopes, mean, r in zip(self.scores.columns[1:], means, box.half, strict=True)
        ]
        columns = {o: rows.columns for o, rows in self.values.items()}
        delta, *others = _moments(w, shifts, m, [[arb(1)] * len(w), *itertools.chain(*columns.values())])
        least = delta[0] * (-total(abs(delta[key]) for key in linear) / delta[0]).exp()
        rho = [total(map(abs, column)).upper() for column in zip(*shifts, strict=True)]
        grown = [r.exp() for r in rho]
        share = [x * y / least for x, y in zip(w, grown, strict=True)]
        tail = [x * r ** (m + 1) / math.factorial(m + 1) for x, r in zip(share, rho, strict=True)]
        q, growth = [x / delta[0] for x in w], delta[0] / least
        bends = [x * (y - 1 - r) for x, y, r in zip(q, grown, rho, strict=True)]
        moving = arb_mat([q, *([*map(operator.mul, q, shift)] for shift in shifts)]).transpose()

        def mean_at_most(terms: list[Any]) -> Any:
            """Σ p_k terms_k on the box, by the theorem on means."""
            mean, *slopes = (arb_mat([terms]) * moving).entries()
            moved = total(abs(x - mean * delta[key] / delta[0]) for x, key in zip(slopes, linear, strict=True))
            return mean + growth * (moved + dot(bends, [abs(x - mean) for x in terms]))

        moved = 2 * most(rho)  # by which differences of scores may change on the box
        off_by = self._score_errors(box, arithmetic, lambda column: dot(q, column))
        tau = [y.expm1() for y in arithmetic.weights(off_by, [top - s + moved for s in scores])]
        slack = 1 - mean_at_most(tau)
        if not slack > 0:
            raise ArithmeticError("rounding may change the weights of a head altogether")
        computed = [x * (1 + t) / slack for x, t in zip(share, tau, strict=True)]
        found = {}
        for o, rows in self.values.items():
            nu, *slopes = (others.pop(0) for _ in columns[o])
            for slope, key, c, r in zip(slopes, linear, box.centre, box.half, strict=False):
                nu = add(add(nu, slope, c), {key + j: x * r for j, x in slope.items()})
            v0 = (nu[0] / delta[0]).mid()
            Q, rest = _quotient(add(nu, delta, -v0), delta, m, d)
            apart, swings = [x - v0 for x in rows.at(box.centre)], rows.swings(box.half)
            off = [abs(x) + y for x, y in zip(apart, swings, strict=True)]
            error = rest / least + norm(Q) * total(tail) + dot(tail, off)
            swings = [arb(0)] * len(w)  # of v_k − Q
            for column, key, r in zip(rows.columns[1:], linear, box.half, strict=False):
                swings = [y + abs(V * r - Q[key]) for y, V in zip(swings, column, strict=True)]
            left = norm({key: x for key, x in Q.items() if key not in linear[: len(slopes)]}) + error
            ends = ([t * (abs(x - a) + y) for t, x, y in zip(tau, apart, swings, strict=True)] for a in (left, -left))
            error += most(map(mean_at_most, ends)) / slack
            sizes = self.value_sizes[o].at(box.reach)
            sized = mean_at_most([x * (1 + t) for t, x in zip(tau, sizes, strict=True)]) / slack
            error += self.summation(o, arithmetic, computed, sizes, abs(v0) + norm(Q) + error, sized)
            found[o] = (add(Q, {0: v0}), error + self.dropped[o])
        return found


def _moments(w: list[Any], shifts: list[list[Any]], m: int, columns: list[Sequence[Any]]) -> list[Poly]:
    """Σ_k w_k g_k (α_k r)^j/j! for |j| ≤ m, of every column g: powers along the first axis times those along others."""
    d, powers, others = len(shifts), [], [[arb(1)] * len(w)]
    keys = monomials(tuple(range(1, d)), m, d)
    for _, parent, i in keys[1:]:
        others.append([*map(operator.mul, others[parent], shifts[i])])
    for g in columns:
        powers.append([*map(operator.mul, w, g)])
        for _ in range(m):
            powers.append([*map(operator.mul, powers[-1], shifts[0])])
    table, end, found = (arb_mat(powers) * arb_mat(others).transpose()).tolist(), above(m, d), []
    while table:
        rows, table = table[: m + 1], table[m + 1 :]
        pairs = (
            (n * variable(0, d) + key, x)
            for n, row in enumerate(rows)
            for (key, _, _), x in zip(keys, row, strict=True)
        )
        found.append({key: x / factorial(key, d) for key, x in sorted(pairs) if key < end})
    return found


def _quotient(nu: Poly, delta: Poly, m: int, d: int) -> tuple[Poly, Any]:
    """Q, its coefficients exact numbers, by long division up to degree m; and above Σ_j |(ν − Q·δ)_j|."""
    quotient, left, end = {}, dict(nu), above(m, d)
    for key, _, _ in monomials(tuple(range(d)), m, d):
        q = quotient[key] = (left[key] / delta[0]).mid()
        for j, x in delta.items():  # sorted by degree
            if key + j >= end:
                break
            left[key + j] = left[key + j] - q * x
    numerator, Q, denominator = (_packed(p, 2 * m + 2, d) for p in (nu, quotient, delta))
    return quotient, total(map(abs, (numerator - Q * denominator).coeffs()))


def _packed(p: Poly, base: int, d: int) -> Any:
    """As a polynomial in one variable t, τ_i = t^{base^i}: no two monomials of degrees below the base meet."""
    places = {sum(degree(key, i) * base**i for i in range(d)): x for key, x in p.items()}
    return arb_poly([places.get(n, 0) for n in range(max(places) + 1)])
