"""A quick moment Taylor model of a head whose slopes make a grid, for boxes on which rounding is negligible.

It is the theorem of `averages`, with simpler bounds. Rounding has one bound for all keys. For the remainders, with
ρ_i = |α_i| r_i, e^ρ ρ^{m+1}/(m+1)! is the sum of Π_i e^{ρ_i} ρ_i^{j_i}/j_i! over all |j| = m + 1. So R_D is a sum of
moments, with numbers g_k ≥ 0 in place of the weights, and by Cauchy and Schwarz Σ g_k |u_k| ≤ (Σ g_k · Σ g_k u_k²)^½.
No number is computed for each key of each box. If the bound of a leaf does not follow, the sharp model is used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cached_property, lru_cache

from flint import arb

from attnc_checker.averages import Average, Models
from attnc_checker.jets import add, norm, variable
from attnc_checker.moments import Axis, Grid, quotient
from attnc_checker.ranges import Box
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import at, most, total

NEGLIGIBLE = arb(2) ** -14
"""The share of the limit below which rounding is negligible. attnc leaves at least as much room for the checker."""
MAX_EMPTY, SMALL_GRID = 4, 64
"""Slopes make a grid if it has at most this many places for each key, or at most this many places in all."""
LITTLE = arb(2) ** -10
"""Scores count as sums over the axes if they differ from them by less. This affects only means, and any are sound."""
MOST_SHARED = 256
"""Number of sums over all axes but one that are kept for other boxes. In three variables each takes some 0.1 MB."""


class QuickAverage(Average):
    """A head with a quick model, if its slopes make a grid."""

    def quick_model(self, box: Box, m: int, arithmetic: Arithmetic, limit: arb) -> Models | None:
        """Return polynomials and errors as `model`, or None if slopes make no grid or rounding is not negligible."""
        roundings = {o: self.largest.rounding(self, o, box, arithmetic) for o in self.values}
        if not most(roundings.values()) <= NEGLIGIBLE * limit:
            return None
        found = (
            self._at_point(box) if box.is_point else None if self.grids is None else self._model(*self.grids, box, m)
        )
        return found and {o: (p, error + roundings[o] + self.dropped[o]) for o, (p, error) in found.items()}

    def _at_point(self, box: Box) -> Models:
        w = at(self.scores, box.centre).each(arb.exp)
        return {o: ({0: w @ at(rows, box.centre) / total(w)}, arb(0)) for o, rows in self.values.items()}

    def _model(self, sums: Grid, squares: Grid, box: Box, m: int) -> Models:
        d, axes, found = len(box.centre), self._axes_of(box, sums), {}
        linear = [variable(i, d) for i in range(d)]
        delta, *others = sums.moments(axes, m)
        least = delta[0] * (-total(abs(delta[key]) for key in linear) / delta[0]).exp()
        wide = squares.moments([axis.wide for axis in axes], m + 1, lowest=m + 1)
        tail, *tails = (total(p.values()) for p in wide)
        for o, rows in self.values.items():
            nu, *slopes = (others.pop(0) for _ in rows)
            for slope, key, c, r in zip(slopes, linear, box.centre, box.half, strict=False):
                nu = add(add(nu, slope, c), {key + j: x * r for j, x in slope.items()})
            v0 = (nu[0] / delta[0]).mid()
            Q, rest = quotient(add(nu, delta, -v0), delta, m, d)
            firsts, x = [tails.pop(0) for _ in rows], [arb(1), *box.centre]
            seconds = {(a, b): tails.pop(0) for a in range(len(rows)) for b in range(a, len(rows))}
            square = total(x[a] * x[b] * y * (1 + (a < b)) for (a, b), y in seconds.items())  # Σ g_k v_k(c)²
            square += v0 * (v0 * tail - 2 * total(map(operator.mul, x, firsts)))  # now Σ g_k u_k²
            swings = (r * _root(tail * seconds[i + 1, i + 1]) for i, r in enumerate(box.half[: len(slopes)]))
            error = (rest + norm(Q) * tail + _root(tail * square) + total(swings)) / least
            found[o] = (add(Q, {0: v0}), error)
        return found

    @cached_property
    def grids(self) -> tuple[Grid, Grid] | None:
        """Return e^{c_k} times (1, v_k, V_k), and times (1, v_k, V_k and their products), if slopes make a grid."""
        sizes = [*map(len, self.axes)]
        if math.prod(sizes) > max(MAX_EMPTY * len(self.places), SMALL_GRID):
            return None
        w, columns, squares = self.scores[0].each(arb.exp), [], []
        for rows in self.values.values():
            weighted = [w * column for column in rows]
            columns += weighted
            squares += [*weighted, *(x * column for n, x in enumerate(weighted) for column in rows[n:])]
        kept = MOST_SHARED if self.own_axes and len(sizes) > 1 else 1
        return Grid([w, *columns], self.places, sizes, kept), Grid([w, *squares], self.places, sizes, kept)

    @cached_property
    def own_axes(self) -> list[list[arb]] | None:
        """Return numbers for the slopes of each axis that add up to all c_k, up to a little, if the grid is full."""
        constants, first = dict(zip(self.places, self.scores[0], strict=True)), (0,) * len(self.axes)
        if not len(constants) == len(self.places) == math.prod(map(len, self.axes)):
            return None
        top = constants[first]
        found = [
            [constants[*first[:i], n, *first[i + 1 :]] - top for n in range(len(axis))]
            for i, axis in enumerate(self.axes)
        ]
        sums = (total(map(list.__getitem__, found, place)) for place in constants)
        return found if all(abs(x - top - y) < LITTLE for x, y in zip(constants.values(), sums, strict=True)) else None

    def _axes_of(self, box: Box, sums: Grid) -> list[Axis]:
        """Return the axes of a box. If weights are products over the axes, boxes with the same side share an axis."""
        d, places = len(box.centre), [*zip(range(len(box.centre)), box.centre, box.half, strict=True)]
        if self.own_axes:
            are_shared = d > 1 and all(x.is_exact() for x in (*box.centre, *box.half))
            return [(self._shared_axis if are_shared else self._axis)(i, c, r) for i, c, r in places]
        plain = [Axis([(x * c).exp() for x in self.axes[i]], self.axes[i]) for i, c, _ in places]
        whole, *_ = sums.moments(plain, 1)
        return [self._axis(i, c, r, (whole[variable(i, d)] / whole[0]).mid()) for i, c, r in places]

    @cached_property
    def _shared_axis(self) -> Callable[[int, arb, arb], Axis]:
        return lru_cache(MOST_SHARED)(self._axis)

    def _axis(self, i: int, c: arb, r: arb, mean: arb | None = None) -> Axis:
        """Return axis i for the side c ± r, with this mean of the slopes, or with that of the weights of the axis."""
        axis = self.axes[i]
        if mean is None:
            assert self.own_axes is not None
            own = [(x * c + y).exp() for x, y in zip(axis, self.own_axes[i], strict=True)]
            mean = (total(map(operator.mul, own, axis)) / total(own)).mid()
        return Axis([(x * c).exp() for x in axis], [(x - mean) * r for x in axis])


def _root(x: arb) -> arb:
    """Return an upper bound on √x of a number that is not negative."""
    return x.upper().max(arb(0)).sqrt().upper()
