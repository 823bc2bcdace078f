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
of A, and these weights are at most share_k (1 + τ_k)/(1 − T). The sum is convex in A: for |A − v0| ≤ a it is largest
at v0 ± a. A mean G = Σ p_k g_k over the box is near its value G_0 at the centre: with the weights q_k = w_k/δ_0 there
and z_k = α_k·t, |z_k| ≤ ρ_k,
    |G − G_0| = |Σ w_k (g_k − G_0)(e^{z_k} − 1)|/D
              ≤ (Σ_i |Σ_k q_k (g_k − G_0) α_ki r_i| + Σ q_k |g_k − G_0|(e^{ρ_k} − 1 − ρ_k))·δ_0/D₋.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb, arb_mat, arb_poly

from attnc_checker.jets import Poly, above, add, degree, factorial, monomials, norm, variable
from attnc_checker.network import Head, Row
from attnc_checker.rounding import Arithmetic, most

FEW = 64
"""Of more keys with moving values it is not asked how far apart each two are."""


@dataclass(frozen=True)
class Box:
    """centre ± half."""

    centre: list[Any]
    half: list[Any]

    @property
    def reach(self) -> list[Any]:
        return [(abs(c) + r).upper() for c, r in zip(self.centre, self.half, strict=True)]


def at(row: Row, x: Sequence[Any]) -> Any:
    """row[0] + Σ_i row[i+1]·x_i; a row may end early, where only zeros follow."""
    value = row[0]
    for a, b in zip(row[1:], x, strict=False):
        value = value + a * b
    return value


def swing(row: Row, half: Sequence[Any]) -> Any:
    """Σ_i |row[i+1]|·half_i."""
    return at((arb(0), *map(abs, row[1:])), half)


def minus(a: Row, b: Row) -> Row:
    return tuple(x - y for x, y in zip(a, b, strict=True))


class Rows(list[Row]):
    """Affine forms, one for each key."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(tuple(map(arb, row)) for row in rows)
        self.matrix = arb_mat([*map(list, self)])
        self.sizes = arb_mat([[arb(0), *map(abs, row[1:])] for row in self])

    def at(self, x: Sequence[Any]) -> list[Any]:
        return self._times(self.matrix, x)

    def swing(self, half: Sequence[Any]) -> list[Any]:
        return self._times(self.sizes, half)

    def _times(self, matrix: Any, x: Sequence[Any]) -> list[Any]:
        entries: list[Any] = (matrix * arb_mat(matrix.ncols(), 1, [arb(1), *x][: matrix.ncols()])).entries()
        return entries


def total(terms: Iterable[Any]) -> Any:
    return sum(terms, arb(0))


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return (arb_mat(1, len(a), list(a)) * arb_mat(len(b), 1, list(b)))[0, 0]


class Average:
    """A head, its numbers as balls. `dropped`: what keys that are left out may add, by output."""

    def __init__(self, head: Head, num_keys: int = 0, dropped: dict[int, Any] | None = None) -> None:
        self.head, self.num_keys = head, num_keys or len(head.scores)
        self.dropped = dropped or dict.fromkeys(head.values, arb(0))
        self.scores, self.score_sizes = Rows(head.scores), Rows(head.score_sizes)
        self.score_slack = head.score_slack or [arb(0)] * len(head.scores)
        self.values = {o: Rows(_short(rows)) for o, rows in head.values.items()}
        self.value_sizes = {o: Rows(_short(rows)) for o, rows in head.value_sizes.items()}

    def without_far(self, box: Box, arithmetic: Arithmetic, far: int) -> Average:
        """Without keys that are behind by more than `far` on all of the box, if those are the most.

        If their weights are `mass` together and |v| ≤ V, they move A by 2·mass·V, and its sums by less than 6·mass·V.
        """
        _, gaps, _ = self.gaps(box, arithmetic)
        kept = [k for k, gap in enumerate(gaps) if not gap > far]
        if 2 * len(kept) > len(gaps):
            return self
        mass, h = total((-gap).exp() for gap in gaps if gap > far), self.head
        scores, sizes = ([rows[k] for k in kept] for rows in (h.scores, h.score_sizes))
        values, value_sizes = ({o: [rows[k] for k in kept] for o, rows in t.items()} for t in (h.values, h.value_sizes))
        reach = box.reach
        largest = {o: most(rows.at(reach)) for o, rows in self.value_sizes.items()}
        dropped = {o: x + 8 * mass * largest[o] for o, x in self.dropped.items()}
        slack, fine = (
            [h.score_slack[k] for k in kept] if h.score_slack else [],
            h.roundings and h.roundings.of_keys(kept),
        )
        head = Head(scores, sizes, h.n_score, values, value_sizes, h.n_value, slack, fine, h.depth)
        return Average(head, self.num_keys, dropped)

    def _score_errors(self, box: Box, arithmetic: Arithmetic) -> list[Any]:
        gamma, reach = arithmetic.gamma(self.head.n_score), box.reach
        return [gamma * x + y for x, y in zip(self.score_sizes.at(reach), self.score_slack, strict=True)]

    def _relative_score_errors(self, box: Box, arithmetic: Arithmetic, q: list[Any]) -> list[Any]:
        """The same up to what all keys share, by weights q: an error e_j of the query adds e_j·(parts_kj − mean) only.

        Of the sum of n terms every partial sum is at most (Σ|terms| + |s|)/2, and the last is s. So additions cost
        v((n − 2)(Σ|terms| + |s|)/2 + |s|), where rounded terms, and s with its errors, stand for exact ones.
        """
        fine, reach = self.head.roundings, box.reach
        if fine is None:
            return self._score_errors(box, arithmetic)
        v, grown = arithmetic.u / (1 - fine.n * arithmetic.u), 1 + arithmetic.gamma(fine.n)
        known = [v * grown * x + y for x, y in zip(Rows(fine.own).at(reach), self.score_slack, strict=True)]
        for row, parts in zip(fine.query, zip(*fine.parts, strict=True), strict=True):
            error, column = v * at(row, reach), [*map(arb, parts)]
            mean = dot(q, column)
            known = [x + error * abs(y - mean) for x, y in zip(known, column, strict=True)]
        if fine.terms < 2:
            return known
        v, found = arithmetic.u / (1 - fine.terms * arithmetic.u), []
        forms = self.scores.at(box.centre), self.scores.swing(box.half), self.score_sizes.at(reach)
        for x, middle, swing_, size in zip(known, *forms, strict=True):
            score = abs(middle) + swing_ + x
            found.append(x + v * ((fine.terms - 2) * (grown * size + score) / 2 + score))
        return found

    def summation(self, o: int, box: Box, weights: list[Any], average: Any, arithmetic: Arithmetic) -> Any:
        sizes = self.value_sizes[o].at(box.reach)
        return arithmetic.summation(self.num_keys, self.head.n_value[o], weights, sizes, average, depth=self.head.depth)

    def gaps(self, box: Box, arithmetic: Arithmetic) -> tuple[int, list[Any], list[Any]]:
        """(j, g, y): s_j is largest at the centre; computed weights are p̂_k ≤ e^{−g_k} p̂_j on the box, and off by y."""
        scores = self.scores.at(box.centre)
        j = max(range(len(scores)), key=lambda k: scores[k].mid())
        swings = [swing(minus(row, self.scores[j]), box.half) for row in self.scores]
        lead = [scores[j] - s for s in scores]
        overtaken = most(y - x for x, y in zip(lead, swings, strict=True))  # ≥ max s − s_j on the box
        behind = [x + y + overtaken for x, y in zip(lead, swings, strict=True)]
        off = arithmetic.weights(self._score_errors(box, arithmetic), behind)
        return j, [x - y - z - off[j] for x, y, z in zip(lead, swings, off, strict=True)], off

    def model(self, box: Box, m: int, arithmetic: Arithmetic) -> dict[int, tuple[Poly, Any]]:
        """For every output (polynomial, error): the average as computed is within the error of the polynomial."""
        d, reach = len(box.centre), box.reach
        scores = self.scores.at(box.centre)
        top = most(scores)
        w = [(s - top).exp() for s in scores]
        means = [(dot(w, slopes) / total(w)).mid() for slopes in [*zip(*self.scores, strict=True)][1:]]
        shifts = [[(row[1 + i] - means[i]) * r for row in self.scores] for i, r in enumerate(box.half)]  # α_ki·r_i
        moments = _Moments(w, shifts, m)
        delta = moments.of([arb(1)] * len(w))
        least = delta[0] * (-total(abs(delta[variable(i, d)]) for i in range(d)) / delta[0]).exp()
        rho = [total(map(abs, column)).upper() for column in zip(*shifts, strict=True)]
        share = [x * r.exp() / least for x, r in zip(w, rho, strict=True)]
        tail = [x * r ** (m + 1) / math.factorial(m + 1) for x, r in zip(share, rho, strict=True)]
        q, growth = [x / delta[0] for x in w], delta[0] / least
        bends = [x * (r.expm1() - r) for x, r in zip(q, rho, strict=True)]

        def mean_at_most(terms: list[Any]) -> Any:
            """Σ p_k terms_k on the box, by the theorem on means."""
            mean = dot(q, terms)
            felt = [x * (t - mean) for x, t in zip(q, terms, strict=True)]
            moved = total(abs(dot(felt, shift)) for shift in shifts)
            return mean + growth * (moved + dot(bends, [abs(t - mean) for t in terms]))

        moved = 2 * most(rho)  # by which differences of scores may change on the box
        off_by = self._relative_score_errors(box, arithmetic, q)
        tau = [y.expm1() for y in arithmetic.weights(off_by, [top - s + moved for s in scores])]
        slack = 1 - mean_at_most(tau)
        if not slack > 0:
            raise ArithmeticError("rounding may change the weights of a head altogether")
        computed = [x * (1 + t) / slack for x, t in zip(share, tau, strict=True)]
        found = {}
        for o, rows in self.values.items():
            constants, *slopes = zip(*rows, strict=True)
            nu = moments.of(constants)
            for i, column in enumerate(slopes):
                slope = moments.of(column)
                nu = add(nu, slope, box.centre[i])
                nu = add(nu, {key + variable(i, d): x * box.half[i] for key, x in slope.items()})
            v0 = (nu[0] / delta[0]).mid()
            Q, rest = _quotient(add(nu, delta, -v0), delta, m, d)
            apart, swings = [x - v0 for x in rows.at(box.centre)], rows.swing(box.half)
            off = [abs(x) + y for x, y in zip(apart, swings, strict=True)]
            error = rest / least + norm(Q) * total(tail) + dot(tail, off)
            spread = norm(Q) + error  # ≥ |A − v0|
            ends = [
                [t * (abs(x - a) + y) for t, x, y in zip(tau, apart, swings, strict=True)] for a in (spread, -spread)
            ]
            error += self._apart(o, box, share, tau).min(most(map(mean_at_most, ends))) / slack
            known = abs(v0) + norm(Q) + error
            sizes = self.value_sizes[o].at(reach)
            sized = mean_at_most([x * (1 + t) for t, x in zip(tau, sizes, strict=True)]) / slack
            terms = (computed, sizes, known, sized, self.head.depth)
            error += arithmetic.summation(self.num_keys, self.head.n_value[o], *terms)
            found[o] = (add(Q, {0: v0}), error + self.dropped[o])
        return found

    def _apart(self, o: int, box: Box, share: list[Any], tau: list[Any]) -> Any:
        """Σ p_k τ_k |v_k − A| by |v_k − A| ≤ Σ_l p_l |v_k − v_l|, where values move and keys are few."""
        rows = self.values[o]
        if len(rows[0]) == 1 or len(rows) > FEW:
            return arb("inf")
        gaps = ([minus(row, other) for other in rows] for row in rows)
        sizes = ([abs(at(row, box.centre)) + swing(row, box.half) for row in line] for line in gaps)
        return dot([x * t for x, t in zip(share, tau, strict=True)], [dot(share, line) for line in sizes])


class _Moments:
    """Σ_k w_k g_k (α_k r)^j/j! for |j| ≤ m, of any g: powers along the first axis times those along the others."""

    def __init__(self, w: list[Any], shifts: list[list[Any]], m: int) -> None:
        d, first, others = len(shifts), [w], [[arb(1)] * len(w)]
        self.m, self.d, self.keys = m, d, monomials(tuple(range(1, d)), m, d)
        for _ in range(m):
            first.append([x * y for x, y in zip(first[-1], shifts[0], strict=True)])
        for _, parent, i in self.keys[1:]:
            others.append([x * y for x, y in zip(others[parent], shifts[i], strict=True)])
        self.first, self.others = first, arb_mat(others).transpose()

    def of(self, g: Sequence[Any]) -> Poly:
        table = arb_mat([[x * y for x, y in zip(row, g, strict=True)] for row in self.first]) * self.others
        powers = [n * variable(0, self.d) for n in range(self.m + 1)]
        keys = (n + key for n in powers for key, _, _ in self.keys)
        end, pairs = above(self.m, self.d), sorted(zip(keys, table.entries(), strict=True), key=lambda pair: pair[0])
        return {key: x / factorial(key, self.d) for key, x in pairs if key < end}


def _short(rows: list[Row]) -> list[Row]:
    """Constants only, if nothing else is there."""
    return rows if any(x != 0 for row in rows for x in row[1:]) else [row[:1] for row in rows]


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
