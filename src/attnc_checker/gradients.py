"""The leaves of a proof about gradients: bounds of |∂f/∂x_i − ∂network/∂x_i| on a box, for the computed gradient.

Theorem (slopes).  With the ν, δ, Q, e of `averages`, x = c + rτ and ∂_i = ∂/∂τ_i, let |∂_i N − ∂_i ν| ≤ R_Ni and
|∂_i D − ∂_i δ| ≤ R_Di. For P = ∂_i Q and S_i = ‖∂_i δ‖₁ + R_Di
    |∂_i A − P| ≤ (‖∂_i(ν − Q·δ)‖₁ + R_Ni + ‖Q‖₁ R_Di + e·S_i + ‖P‖₁ R_D)/D₋.
For A·D = v0·D + N gives ∂_i A·D = ∂_i N − (A − v0) ∂_i D, and ∂_i ν − Q ∂_i δ − P δ = ∂_i(ν − Q·δ). The latter has no
terms of degree < m. With z_ki = α_ki r_i, e^y less its series up to degree n is at most e^ρ ρ^{n+1}/(n+1)!, so that
    R_Ni = Σ w_k e^{ρ_k} (|z_ki| (|u_k| + |V_k|·r) ρ_k^m/m! + |V_ki| r_i ρ_k^{m+1}/(m+1)!),
    R_Di = Σ w_k e^{ρ_k} |z_ki| ρ_k^m/m!.
Far keys, with w_k e^{ρ_k} below a small number, are left out of ν and δ, with 1 for ρ^m/m! and ρ^{m+1}/(m+1)!.

Theorem (rounding).  Engines compute d_k = p_k (u_k − A) and Σ d_k a_ki + Σ p_k V_ki, a_ki or a_ki less its mean, with
any order of products and sums, and the weights of the value. They may also centre v and every V_i by their own means.
Let |u_k − A| ≤ D_k, |a_ki − ā_i| ≤ α_ki, and S_ki the sizes of a_ki. With q the computed weights,
    cov_q(u, a) − cov_p(u, a) = (E_q − E_p)[(u − A)(a − ā)] − (A_q − A)(ā_q − ā),
so that with s = 1 − T it is at most Σ p_k τ_k (D_k α_ki + Σ p D α)/s + ΔA·Δa_i, where ΔA = Σ p τ D/s and
Δa_i = Σ p τ α_i/s. For b = 0 or the computed mean, Σ q_k (u_k + e_k − Â)(a_k − b) is
    cov_q + (A_q − Â)(ā_q − b) + Σ q_k e_k (a_k − b).
With C_k = p_k(1 + τ_k)/s, Ā_i = Σ C_k S_ki, T_ki = S_ki + Ā_i, rounding adds at most
    e_A·Ā_i + Σ C_k e_k T_ki + γ_n Σ C_k (D_k + ΔA + e_A + e_k) T_ki,
and twice the terms of the keys with C_k ≤ u/8, if the others count in n by their number. A product that underflows,
and a weight that is lost, count as in `rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flint import arb

from attnc_checker.averages import Average, moments_of
from attnc_checker.cells import EXCLUDED, TAYLOR
from attnc_checker.claims import Claim, GradientClaim
from attnc_checker.derivatives import Kinks
from attnc_checker.derivatives import gradient as derivatives
from attnc_checker.expressions import Function, evaluate
from attnc_checker.files import require
from attnc_checker.forms import SMALLEST, dense
from attnc_checker.jets import BITS, Poly, add, by_degree, degree, norm, variable
from attnc_checker.leaves import Prover, difference
from attnc_checker.moments import quotient
from attnc_checker.network import Reduction, Stage
from attnc_checker.overflow import lost
from attnc_checker.proving import Proof, Subject
from attnc_checker.ranges import Box, Range
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import INFINITE, Vector, at, most, swing, total

FURTHER = 16
"""Roundings of a term besides those of its factors and of the sum over keys: two differences, the division by the sum
of weights, three products, the sum of both parts, and some to spare."""
FAR_WEIGHT = arb(2) ** -40
"""Largest weight on a box, relative to the largest one of all, of a key that is left out where its series diverges."""
ALIGNED = arb(2) ** -9
"""The share by which products through the scores of a deep program may exceed those of a head along t alone."""
OVERFLOW = {"float64": arb(2) ** 1000, "float32": arb(2) ** 120, "real": INFINITE}
"""No product may reach this size."""


class Slope(NamedTuple):
    """The slope of a head along one variable: a polynomial in τ, and the error of the computed slope."""

    poly: Poly
    error: arb


@dataclass(frozen=True, eq=False)
class GradientProver(Prover):
    """Bounds the errors of all partial derivatives. `function` has the outputs ∂f_o/∂x_i, ordered by o, then by i."""

    averages: Sequence[Average]
    excluded: Sequence[Range]  # intervals of the one variable
    lost: arb  # by products that underflow, anywhere in the network
    further: int = 0  # roundings of every product of slopes in other layers, for a stage of a deep program

    @classmethod
    def outside(
        cls, excluded: Sequence[Range], stage: Stage, function: Function, arithmetic: Arithmetic, lost: arb
    ) -> GradientProver:
        averages = [Average.of(head, stage.inputs) for head in stage.heads]
        return cls(stage, [], function, arithmetic, averages, excluded, lost)

    def error(self, kind: str, order: int, box: Box, limit: arb) -> arb:
        """Return an upper bound on the errors of all slopes. Raise ArithmeticError or ValueError if there is none."""
        if kind == EXCLUDED:
            ((low, high),) = box.sides
            if any(lo <= low and high <= hi for lo, hi in self.excluded):
                return arb(0)
            raise ValueError("it lies in no excluded neighbourhood of a kink")
        if kind != TAYLOR or box.is_point:
            raise ValueError("a gradient is proved by Taylor models alone")
        d = len(box.centre)
        slopes = [slopes_of(average, box, order, self.arithmetic, self.further) for average in self.averages]
        functions, errors = self._functions(box, order - 1), []
        for number, f in enumerate(functions):
            o, i = divmod(number, d)
            form = self.stage.affine[o]
            terms, sizes = dense(form.terms, self.stage.inputs), dense(form.sizes, self.stage.inputs)
            other: Poly = {0: arb(terms[1 + i])}
            error = self.arithmetic.gamma(form.n + FURTHER) * sizes[1 + i] + self.lost
            for found in slopes:
                if o in found:
                    other, error = add(other, found[o][i].poly), error + found[o][i].error
            errors.append(difference(f, other, limit - error, box) + error)
        return most(errors)


def slopes_of(average: Average, box: Box, m: int, arithmetic: Arithmetic, further: int = 0) -> dict[int, list[Slope]]:
    """Return the slopes of a head along all variables, for every output that reads it.

    `further` are the roundings of every product of slopes in other layers.
    """
    d, linear = len(box.centre), [variable(i, len(box.centre)) for i in range(len(box.centre))]
    scores = at(average.scores, box.centre)
    top = most(scores)
    w = (scores - top).each(arb.exp)
    means = [(w @ slopes / total(w)).mid() for slopes in average.scores[1:]]
    shifts = [[(x - mean) * r for x in axis] for axis, mean, r in zip(average.axes, means, box.half, strict=True)]
    values = [w * column for rows in average.values.values() for column in rows]
    places = [*zip(*average.places, strict=True)]
    moves = [Vector(shift[n] for n in place) for shift, place in zip(shifts, places, strict=True)]
    z = [abs(move).each(arb.upper) for move in moves]
    rho = total(z).each(arb.upper)
    is_far = [bool(x * y.exp() < FAR_WEIGHT and y > m) for x, y in zip(w, rho, strict=True)]
    near = [Vector(arb(0) if no else x for no, x in zip(is_far, column, strict=True)) for column in [w, *values]]
    delta, *others = moments_of(near, average.places, shifts, m)
    least = delta[0] * (-total(abs(delta[key]) for key in linear) / delta[0]).exp()
    share = w * rho.each(arb.exp) / least

    def rest_of(n: int) -> Vector:
        """Bound |e^y less its series up to degree n − 1| by e^ρ times this, and |e^y| itself for far keys."""
        found = rho.each(lambda x: x**n / math.factorial(n))
        return Vector(arb(1) if no else x for no, x in zip(is_far, found, strict=True))

    power, beyond = rest_of(m), rest_of(m + 1)
    tail = share @ beyond
    tails = [share @ (x * power) for x in z]
    of_delta = [norm(differentiated(delta, i, d)) / least + tails[i] for i in range(d)]
    weights = _Weights.of(average, box, arithmetic, share, scores, rho, means)
    found: dict[int, list[Slope]] = {}
    for o, rows in average.values.items():
        nu, *slopes = (others.pop(0) for _ in rows)
        for slope, key, c, r in zip(slopes, linear, box.centre, box.half, strict=False):
            nu = add(add(nu, slope, c), {key + j: x * r for j, x in slope.items()})
        v0 = (nu[0] / delta[0]).mid()
        nu = add(nu, delta, -v0)
        Q, rest = quotient(nu, delta, m, d)
        apart, moved = at(rows, box.centre) - v0, swing(rows, box.half)
        size = abs(apart) + moved
        error = rest / least + norm(Q) * tail + (share * beyond) @ size
        left = _rest_by_degree(nu, Q, delta, m, d) / least
        distance = size + (norm(Q) + error)
        found[o] = []
        for i in range(d):
            rounding = weights.rounding(o, i, distance, further)
            if len(average.axes[i]) == 1 and (len(rows) == 1 or all(x == 0 for x in rows[1 + i])):
                found[o].append(Slope({}, rounding))  # equal slopes cancel
                continue
            P = differentiated(Q, i, d)
            gate = abs(rows[1 + i]) * box.half[i] if len(rows) > 1 else 0 * size
            of_nu = (share * z[i] * power) @ size + (share * beyond) @ gate
            off = left + of_nu + norm(Q) * tails[i] + error * of_delta[i] + norm(P) * tail
            found[o].append(Slope({key: x / box.half[i] for key, x in P.items()}, off / box.half[i] + rounding))
    return found


def differentiated(p: Poly, i: int, d: int) -> Poly:
    """Return ∂p/∂τ_i."""
    step = variable(i, d)
    return {key - step: x * degree(key, i) for key, x in p.items() if degree(key, i)} or {0: arb(0)}


def _rest_by_degree(nu: Poly, Q: Poly, delta: Poly, m: int, d: int) -> arb:
    """Bound ‖∂_i(ν − Q·δ)‖₁ for every i. There are no terms up to degree m. One of degree n counts n times at most."""
    a, b = by_degree(Q, m, d), by_degree(delta, m, d)
    found = total(a[s] * b[t] * (s + t) for s in range(m + 1) for t in range(max(0, m + 1 - s), m + 1))
    return found + (m + 1) * norm({key: x for key, x in nu.items() if key >> BITS * d > m})


@dataclass(frozen=True, eq=False)
class _Weights:
    """The weights of a head over a box, exact and computed: p_k ≤ share_k, off by τ_k."""

    average: Average
    box: Box
    arithmetic: Arithmetic
    share: Vector
    tau: Vector
    slack: arb
    alpha: list[Vector]

    @classmethod
    def of(
        cls,
        average: Average,
        box: Box,
        arithmetic: Arithmetic,
        share: Vector,
        scores: Vector,
        rho: Vector,
        means: Sequence[arb],
    ) -> _Weights:
        share = share.each(lambda x: x.upper().min(arb(1)))
        behind = most(scores + rho) - scores + rho
        errors = average.score_errors(box, arithmetic, [share @ column / total(share) for column in average.parts])
        tau = arithmetic.weights(errors, behind).each(arb.expm1)
        slack = 1 - (share @ tau).min(most(tau))
        apart = [abs(slopes - mean) for slopes, mean in zip(average.scores[1:], means, strict=True)]
        alpha = [x + share @ x for x in apart]  # about the mean slope anywhere on the box
        return cls(average, box, arithmetic, share, tau, slack, alpha)

    def rounding(self, o: int, i: int, distance: Vector, further: int) -> arb:
        """Bound the rounding of the slope along x_i. Values are at most `distance` from the average."""
        arithmetic, average, head = self.arithmetic, self.average, self.average.head
        if arithmetic.u == 0:
            return arb(0)
        if not self.slack > 0.5:
            return INFINITE
        p, tau, s, alpha = self.share, self.tau, self.slack, self.alpha[i]
        computed = (p * (tau + 1) / s).each(lambda x: x.upper().min(arb(1)))
        reach = average.reach(self.box)
        score_size = average.score_sizes[1 + i]
        mean_size = computed @ score_size
        reached = score_size + mean_size
        sizes = average.sizes(o, self.box)
        far = Vector(x if x < arithmetic.u / 8 else arb(0) for x in computed)
        near = sum(not x < arithmetic.u / 8 for x in computed)
        if not head.num_keys * arithmetic.u <= arb(1) / 8:
            far, near = 0 * computed, head.num_keys
        n = 2 * near + head.values[o].n + head.n + head.addends + FURTHER + 2 * len(reach)
        gamma = arithmetic.gamma(n)
        of_products = (1 + ALIGNED) * arithmetic.gamma(n + further) if further else gamma
        mean_value = computed @ sizes
        e_k, e_A = sizes * gamma, gamma * mean_value + 2 * (far @ (sizes + mean_value))
        off = p * tau
        dA = off @ distance / s
        weights = off @ (distance * alpha + p @ (distance * alpha)) / s + dA * (off @ alpha) / s
        rows = average.values[o]
        whole = (distance + dA).max(2 * self._split(o)) + e_k + e_A
        counted = computed * of_products + far * 2
        sums = e_A * mean_size + computed @ (e_k * reached) + counted @ (whole * reached)
        gates = 0 * sizes
        if len(rows) > 1:
            gates = abs(rows[1 + i])
            weights += off @ (gates + p @ gates) / s
            sums += counted @ average.value_sizes[o][1 + i]
        largest = most(whole) * most(reached)
        if not largest < OVERFLOW[arithmetic.name]:
            return INFINITE
        lost = 4 * (head.num_keys + head.silent) * (arithmetic.lost + SMALLEST[arithmetic.name])
        return weights + sums + lost * (1 + largest + most(gates) + most(sizes))

    def _split(self, o: int) -> Vector:
        """Bound |v_k − E[v]| + Σ_i |x_i| |V_ki − E[V_i]|: the sizes of terms, if each column is centred by itself."""
        rows, reach = self.average.values[o], self.average.reach(self.box)
        found = 0 * rows[0]
        for column, factor in zip(rows, (arb(1), *reach), strict=False):
            middle = (self.share @ column / total(self.share)).mid()
            apart = abs(column - middle)
            found += (apart + self.share @ apart) * factor
        return found


def with_gradient(
    proof: Proof,
    claim: Claim,
    gradient: GradientClaim,
    reduction: Reduction,
    function: Function,
    arithmetic: Arithmetic,
) -> Proof:
    """Return the proof of a claim, with the leaves of the claim about gradients. These do not count in its bound."""
    stage = reduction.stage()
    slopes = derivatives(function, claim.variables)
    for _, lo, hi in gradient.excluded:
        rules = Kinks([(arb(lo), arb(hi))])
        evaluate(slopes, rules)
        require(rules.are_met, f"the function has no kink in the excluded interval [{lo:g}, {hi:g}]")
    intervals = [(arb(lo), arb(hi)) for _, lo, hi in gradient.excluded]
    underflow = lost(reduction.program, reduction.reach) if arithmetic.u != 0 else arb(0)
    prover = GradientProver.outside(intervals, stage, slopes, arithmetic, underflow)
    about = replace(claim, bound=gradient.bound, truncation=0.0, title="of gradients, ")
    subject = Subject(about, gradient.leaves, [gradient.bound] * len(gradient.leaves), prover)
    count, conclude = len(proof.jobs), proof.conclude
    return replace(proof, subjects=[*proof.subjects, subject], conclude=lambda found: conclude(found[:count]))
