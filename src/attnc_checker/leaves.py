"""The leaves of a proof: how far the network, as computed, may be from the function on a box.

taylor     The function by its Taylor polynomial of degree m with Lagrange's remainder, every head by its moment Taylor
           model of degree m.
mean       The same with the function's value at the centre and its slopes over the box, where kinks are allowed.
selection  Every head by the gaps between its scores: p_k ≤ e^{−g_k} p_j on the box, which bounds
           A − v_j = Σ_k p_k (v_k − v_j). Keys far behind hardly count, and the near ones may weigh anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flint import arb

from attnc_checker.averages import Average, Box, at, minus, swing, total
from attnc_checker.expressions import Function
from attnc_checker.jets import Poly, add, largest, models, variable
from attnc_checker.network import Row, Stage
from attnc_checker.rounding import Arithmetic, most

MEAN_ORDER = 3
FAR = 100
"""Keys that are behind by more on all of a region are left out there: e^−100 is counted for each."""


@dataclass(frozen=True)
class Prover:
    stage: Stage
    heads: list[Average]
    function: Function
    arithmetic: Arithmetic

    def within(self, region: Box) -> Prover:
        """The same, for boxes in this region only."""
        return replace(self, heads=[head.without_far(region, self.arithmetic, FAR) for head in self.heads])

    def error(self, kind: str, order: int, box: Box, limit: Any) -> Any:
        """Above sup |f − network| over all outputs; ArithmeticError or ValueError if there is no bound.

        Differences are examined more closely if that may bring them down to the limit.
        """
        m, m_heads = (order, order) if kind == "taylor" else (0, MEAN_ORDER)
        modelled = [] if kind == "selection" else [head.model(box, m_heads, self.arithmetic) for head in self.heads]
        gaps = [head.gaps(box, self.arithmetic) for head in self.heads] if kind == "selection" else []
        errors = []
        for o, f in enumerate(models(self.function, box.centre, box.half, m)):
            left = add(f, _linear(self.stage.affine[o], box), -1)  # what the heads must give
            error = self.arithmetic.gamma(self.stage.n_affine[o]) * at(self.stage.affine_sizes[o], box.reach)
            for model in modelled:
                if o in model:
                    left, error = add(left, model[o][0], -1), error + model[o][1]
            for head, (j, gap) in zip(self.heads, gaps, strict=kind == "selection"):
                if o in head.values:
                    weights = [(-g).exp() for g in gap]
                    left = add(left, _linear(head.values[o][j], box), -1)
                    low, high = _range([minus(row, head.values[o][j]) for row in head.values[o]], weights, box)
                    left = add(left, {0: low.union(high)}, -1)
                    computed = [w.min(arb(1)) for w in weights]
                    error += head.summation(o, box, computed, arb("inf"), self.arithmetic) + head.dropped[o]
            errors.append(largest(left, limit - error, len(box.centre)) + error)
        return most(errors)


def _linear(row: Row, box: Box) -> Poly:
    """row[0] + Σ_i row[i+1]·x_i as a polynomial in τ."""
    d, row = len(box.centre), tuple(map(arb, row))
    return {0: at(row, box.centre)} | {variable(i, d): x * box.half[i] for i, x in enumerate(row[1:])}


def _range(rows: list[Row], weights: list[Any], box: Box) -> tuple[Any, Any]:
    """Below and above Σ_k p_k d_k(x) on the box, where Σ p = 1, p_k ≤ weights_k·p_j and d_j = 0."""
    middles, swings = [at(row, box.centre) for row in rows], [swing(row, box.half) for row in rows]
    lows = [y - x for x, y in zip(middles, swings, strict=True)]
    highs = [y + x for x, y in zip(middles, swings, strict=True)]
    return -_largest_mean(lows, weights), _largest_mean(highs, weights)


def _largest_mean(values: list[Any], weights: list[Any]) -> Any:
    """Above Σ_k p_k d_k. For every μ ≥ 0,

    Σ p_k d_k − μ = Σ p_k (d_k − μ) ≤ p_j (Σ_k weights_k max(0, d_k − μ) − μ),

    and the bracket vanishes for μ the mean of the largest d_k by these weights, with 0 by weight 1 among them.
    """
    numerator, denominator = arb(0), arb(1)
    for d, w in sorted(zip(values, weights, strict=True), key=lambda pair: -pair[0].mid()):
        if not d * denominator > numerator:
            break
        numerator, denominator = numerator + w * d, denominator + w
    mu = (numerator / denominator).mid()
    excess = total(w * (d - mu).nonnegative_part() for d, w in zip(values, weights, strict=True)) - mu
    return mu + excess.nonnegative_part()
