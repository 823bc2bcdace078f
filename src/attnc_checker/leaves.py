"""The leaves of a proof: bounds on the distance of the computed network from the function on a box.

taylor     The function has a Taylor model of degree m + 1, and every head its moment Taylor model of degree m.
selection  The gaps between the scores of a head give p_k ≤ e^{−g_k} p_j, which bounds A − v_j = Σ_k p_k (v_k − v_j).
           For a single head, f − A = Σ_k p_k (f − v_k) is also bounded by the places where its keys can win. Let the
           box X_k hold all points of the box at which s_k ≥ s_l − g for all l. Outside X_k key k has a weight of at
           most e^{−g}, so
               |f − A| ≤ max_k sup_{X_k} |f − v_k| + Σ_k min(e^{−g}, e^{−g_k}) sup |f − v_k|,
           where keys with g_k > g need no X_k. This holds for any weights of near keys, so that errors of scores only
           widen the X_k and shrink the gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from flint import arb

from attnc_checker.averages import FAR, FEW, TINY, Average, Models
from attnc_checker.cells import SELECTION
from attnc_checker.expressions import Function
from attnc_checker.forms import dense
from attnc_checker.jets import Model, Poly, add, largest, models, norm, over, variable
from attnc_checker.network import Stage
from attnc_checker.quick import QuickAverage
from attnc_checker.ranges import Box, hull
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import INFINITE, Row, Vector, at, minus, most, row_of, swing

RANGE_ORDER = 4
"""The order of the Taylor polynomials by which a function is compared with a value. Measured on ten certificates: with
2 and with 8 the same ones are proved, in 0.98 and 1.07 times the time."""
ENOUGH = arb(2) ** -20
"""In quick models, remainders of functions below this share of the limit are small enough."""
CROWD = 100
"""With more near keys than this, the parts of the box where each can win are not computed: the time grows with the
square of their number. attnc has 64. Measured on ten certificates: with 25 and with 50 the same ones are proved."""
LEAF_LEAK, LARGEST_LEAK = 2e-4, 2e-3
"""g is chosen so that the leak is about the first share of the claimed bound or, if that is not enough, the second
share of the largest |f − v_k|. Beside a jump a key of the other side may be behind by less than the first g."""


@dataclass(frozen=True)
class Prover:
    stage: Stage
    heads: list[QuickAverage]
    function: Function
    arithmetic: Arithmetic
    middle: arb = field(default_factory=lambda: arb(0), kw_only=True)  # it is added to all outputs of the function

    @classmethod
    def of(cls, stage: Stage, function: Function, arithmetic: Arithmetic) -> Prover:
        return cls(stage, [QuickAverage.of(head, stage.inputs) for head in stage.heads], function, arithmetic)

    @property
    def has_many_keys(self) -> bool:
        return any(len(head.kept) > FEW for head in self.heads)

    def within(self, region: Box) -> Prover:
        """Return a prover for boxes in this region only, which is faster."""
        return replace(self, heads=[head.without_far(region, self.arithmetic) for head in self.heads])

    def error(self, kind: str, order: int, box: Box, limit: arb) -> arb:
        """Return an upper bound on sup |f − network| over all outputs. Raise ArithmeticError or ValueError if none.

        Bounds on differences are refined if that may bring them down to the limit.
        """
        if kind == SELECTION:
            averages = [selected(head, box, self.arithmetic) for head in self.heads]
            return self._apart(self._functions(box, 0), averages, box, limit, by_places=True)
        quick = [head.quick_model(box, order, self.arithmetic, limit) for head in self.heads]
        if any(quick):
            averages = [
                each or head.model(box, order, self.arithmetic) for each, head in zip(quick, self.heads, strict=True)
            ]
            found = self._apart(self._functions(box, order, ENOUGH * limit), averages, box, limit)
            if found <= limit:
                return found
        averages = [head.model(box, order, self.arithmetic) for head in self.heads]
        return self._apart(self._functions(box, order), averages, box, limit)

    def _functions(self, box: Box, order: int, enough: arb | int = 0) -> list[Model]:
        """Return the models of the function on a box, with `middle` added."""
        found = models(self.function, box, order, enough)
        if self.middle == 0:
            return found
        shifted = [(add(f.poly, {0: self.middle}), f.range) for f in found]
        return [Model(poly, ((lo + self.middle).lower(), (hi + self.middle).upper())) for poly, (lo, hi) in shifted]

    def _apart(
        self, functions: list[Model], averages: list[Models], box: Box, limit: arb, by_places: bool = False
    ) -> arb:
        """Return an upper bound on sup |f − network| over all outputs, by models of f and of the averages."""
        errors = []
        for o, f in enumerate(functions):
            other, error = self._output(o, averages, box)
            found = difference(f, other, limit - error, box)
            if by_places and not found + error <= limit:
                found = found.min(self._by_places(o, add(f.poly, linear(self._affine(o), box), -1), box, limit - error))
            errors.append(found + error)
        return most(errors)

    def _output(self, o: int, averages: list[Models], box: Box) -> tuple[Poly, arb]:
        """Return a polynomial and a bound on the distance of the computed output from it."""
        other, error = linear(self._affine(o), box), affine_rounding(self.stage, o, box, self.arithmetic)
        for average in averages:
            if o in average:
                other, error = add(other, average[o][0]), error + average[o][1]
        return other, error

    def differences(self, order: int, box: Box, limit: arb) -> list[tuple[Poly, arb]] | None:
        """Return f − network for every output as a polynomial and a bound on the rest, or None if that is not quick."""
        quick = [head.quick_model(box, order, self.arithmetic, limit) for head in self.heads]
        averages = [each for each in quick if each is not None]
        if len(averages) < len(self.heads):
            return None
        outputs = (self._output(o, averages, box) for o in range(len(self.stage.affine)))
        functions = self._functions(box, order, ENOUGH * limit)
        return [(add(f.poly, other, -1), error) for f, (other, error) in zip(functions, outputs, strict=True)]

    def _affine(self, o: int) -> Row:
        """Return the row b, B of output o."""
        return tuple(dense(self.stage.affine[o].terms, self.stage.inputs))

    def _by_places(self, o: int, f: Poly, box: Box, limit: arb) -> arb:
        """Return an upper bound on |f − A| of a single head, by the places where its keys can win."""
        reading = [head for head in self.heads if o in head.values]
        if len(reading) != 1:
            return INFINITE
        (head,) = reading
        _, g, _ = head.gaps(box, self.arithmetic)
        off = Vector(norm(add(f, linear(row, box), -1)) for row in zip(*head.values[o], strict=True))
        if most(off) <= limit:
            return most(off)
        found, num_near = most(off), sum(not x > FAR for x in g)
        for leak in (LEAF_LEAK * limit, LARGEST_LEAK * most(off)):
            gap = arb(FAR).min((1 + num_near * most(off) / leak).log()) if leak > 0 else arb(FAR)
            found = found.min(self._with_gap(o, head, box, gap, off, limit))
            if found <= limit:
                break
        return found

    def _with_gap(self, o: int, head: Average, box: Box, gap: arb, off: Vector, limit: arb) -> arb:
        """Return the bound by the places where keys win for g = gap. On the box |f − v_k| ≤ off_k."""
        _, g, y = head.gaps(box, self.arithmetic)
        near = {k for k, x in enumerate(g) if not x > gap}
        if len(near) > CROWD:
            return INFINITE
        leak = Vector((-gap if k in near else -x).exp() for k, x in enumerate(g)) @ off
        worst = arb(0)
        for k in near:
            leads = [minus(row_of(head.scores, k), row_of(head.scores, other)) for other in near]
            part = _where_winning(leads, [gap + y[k] + y[other] for other in near], box)
            if part is not None:
                worst = worst.max(self.distance(o, row_of(head.values[o], k), part, limit - leak))
        return worst + leak

    def distance(self, o: int, row: Row, box: Box, limit: arb) -> arb:
        """Bound |f − b − B·x − v − V·x| on the box. The bound is refined if that may bring it down to the limit."""
        f = self._functions(box, RANGE_ORDER)[o]
        return difference(f, add(linear(self._affine(o), box), linear(row, box)), limit, box)


def difference(f: Model, other: Poly, limit: arb, box: Box) -> arb:
    """Bound |f − other| on the box by the range of f, which is better near a kink, and by its polynomial.

    The bound is refined if that may bring it down to the limit.
    """
    d = len(box.centre)
    apart = abs(hull(f.range) - over(other, d)).upper()
    return apart if apart <= limit else apart.min(largest(add(f.poly, other, -1), limit, d))


def affine_rounding(stage: Stage, o: int, box: Box, arithmetic: Arithmetic) -> arb:
    form = stage.affine[o]
    return arithmetic.gamma(form.n) * at(dense(form.sizes, stage.inputs), box.reach)


def selected(head: Average, box: Box, arithmetic: Arithmetic) -> dict[int, tuple[Poly, arb]]:
    """Return (polynomial, error) for every output, as `Average.model`: the value that wins at the centre ± a ball."""
    (j, g, _), found = head.gaps(box, arithmetic), {}
    weights = (-g).each(arb.exp)
    for o, rows in head.values.items():
        lead = minus(rows, row_of(rows, j))
        middles, swings = at(lead, box.centre), swing(lead, box.half)
        apart = (-_largest_mean(swings - middles, weights)).union(_largest_mean(middles + swings, weights))
        rounding = arithmetic.at_most(head.head, o, at(head.largest.sizes[o], head.reach(box)))
        if not rounding <= TINY * apart.rad():
            rounding = arithmetic.summation(head.head, o, weights.each(arb(1).min), head.sizes(o, box))
        found[o] = (add(linear(row_of(rows, j), box), {0: apart}), rounding + head.dropped[o])
    return found


def linear(row: Row, box: Box) -> Poly:
    """Return row[0] + Σ_i row[i+1]·x_i as a polynomial in τ."""
    d, row = len(box.centre), tuple(map(arb, row))
    return {0: at(row, box.centre)} | {variable(i, d): x * box.half[i] for i, x in enumerate(row[1:])}


def _where_winning(leads: list[Row], slacks: list[arb], box: Box) -> Box | None:
    """Return a box around the points of the box at which lead_l ≥ −slack_l for all l, or None if there are none.

    With y = x − c, lead(c) + Σ_i D_i y_i ≥ −slack cuts axis i: D_i y_i ≥ −(slack + lead(c) + Σ_{n≠i} |D_n| r_n). Cuts
    are rounded to float64 numbers, so that the other ends of the box stay where they are: a jump may be there.
    """
    lows, highs = [-r for r in box.half], list(box.half)
    for row, slack in zip(leads, slacks, strict=True):
        room = slack + at(row, box.centre) + swing(row, box.half)
        if room < 0:
            return None
        for i, (D, r) in enumerate(zip(row[1:], box.half, strict=True)):
            if D > 0:
                lows[i] = lows[i].max(_nearby(r - room / D, -math.inf))
            elif D < 0:
                highs[i] = highs[i].min(_nearby(room / -D - r, math.inf))
    ends = [(low.lower(), high.upper()) for low, high in zip(lows, highs, strict=True)]
    if any(low > high for low, high in ends):
        return None
    part = Box.between(ends)
    return Box([c + y for c, y in zip(box.centre, part.centre, strict=True)], part.half)


def _nearby(x: arb, side: float) -> arb:
    """Return a float64 number beside x, towards −∞ or ∞."""
    return arb(math.nextafter(float(x.lower() if side < 0 else x.upper()), side))


def _largest_mean(values: Vector, weights: Vector) -> arb:
    """Return an upper bound on Σ_k p_k d_k, where Σ p = 1, p_k ≤ weights_k·p_j and d_j = 0.

    For every μ ≥ 0, Σ p_k d_k − μ = Σ p_k (d_k − μ) ≤ p_j (Σ_k weights_k max(0, d_k − μ) − μ).

    The bracket vanishes if μ is the mean of the largest d_k by these weights, together with 0 of weight 1.
    """
    numerator, denominator = arb(0), arb(1)
    for d, w in sorted(zip(values, weights, strict=True), key=lambda pair: -pair[0].mid()):
        if not d * denominator > numerator:
            break
        numerator, denominator = numerator + w * d, denominator + w
    mu = (numerator / denominator).mid()
    excess = weights @ (values - mu).each(arb.nonnegative_part) - mu
    return (mu + excess.nonnegative_part()).min(most(values).nonnegative_part())
