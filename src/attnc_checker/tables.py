"""Tables: the network is compared with every row at its point. Between the points nothing is claimed.

Most rows are decided in floats, with an a-priori bound of their rounding (`FloatGrid`). The others are proved in Arb.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flint import arb

from attnc_checker.averages import Average
from attnc_checker.claims import AtPoints, Claim
from attnc_checker.expressions import Function, Operation
from attnc_checker.leaves import Prover, affine_rounding
from attnc_checker.program import exact
from attnc_checker.proving import AT_ONCE, FINE, Proof, Subject
from attnc_checker.ranges import Box
from attnc_checker.vectors import most

BLOCK = 512
"""The number of rows that a process proves at a time, if floats can decide them: 5 to 50 ms."""
U = 2.0**-53
"""The unit roundoff of float64, the arithmetic of Python's floats."""
CONVERTED = 4 * U
"""Largest relative error of a ball of 128 bits that is converted to a float: Arb rounds down, which is 2u at most."""
LARGEST_LOG = 600.0
"""Largest |logarithm| of the weights of an axis before they are divided by their sum: e^600 is a normal number."""
MOST_KEPT = 4096
"""The number of coordinates per axis whose weights are kept. On a grid many rows share a coordinate."""
SECOND_ORDER = 1.001
"""The factor that covers products of rounding errors. `FloatGrid.of` refuses if their sum is above 2^-20."""


@dataclass(frozen=True)
class Table(Subject):
    """A point, and the values there, for every row. A job is a block of rows."""

    rows: Sequence[tuple[float, ...]] = ()
    block: int = 1
    floats: FloatGrid | None = None

    def found(self, n: int) -> float:
        """Return the bound that is found at the points of block n."""
        first = n * self.block
        rows = self.rows[first : min(len(self.rows), first + self.block)]
        if self.floats is None:
            return max(self._by_balls(number, row) for number, row in enumerate(rows, first))
        largest, floats, d = 0.0, self.floats, len(self.claim.ends)
        for number, row in enumerate(rows, first):
            error = floats.error(row[:d], row[d:])
            if error is None:
                largest = max(largest, self._by_balls(number, row))
            else:
                largest = max(largest, min(error, self.claim.bound))
        return largest

    def _by_balls(self, n: int, row: tuple[float, ...]) -> float:
        """Return the bound that is found in Arb's arithmetic at the point of row n."""
        d = len(self.claim.ends)
        point, values = row[:d], row[d:]
        shares = [
            (exact(x) - exact(lo)) / (exact(hi) - exact(lo)) for x, (lo, hi) in zip(point, self.claim.ends, strict=True)
        ]
        cell = FINE, tuple(min(2**FINE - 1, int((share * 2**FINE).floor())) for share in shares)
        prover, box = replace(self.near(cell), function=constants(values)), Box([*map(arb, point)], [arb(0)] * d)

        def name() -> str:
            where = ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.claim.variables, point, strict=True))
            return f"the row leaf {n}, {where},"

        return float(self.hold(name, self.claim.bound, 1, lambda room: prover.error("taylor", 1, box, room)))


def by_rows(claim: Claim, evidence: AtPoints, prover: Prover) -> Proof:
    rows = evidence.rows
    floats = FloatGrid.of(claim, prover)
    block = 1 if floats is None else BLOCK
    bounds = [claim.bound] * -(-len(rows) // block)
    table = Table(claim, (), bounds, prover, rows=rows, block=block, floats=floats)
    scope = f"at the table's {len(rows):,} points, and nowhere else"
    return Proof([table], scope=scope, at_once=AT_ONCE if block == 1 else 1, num_leaves=len(rows))


def constants(values: Sequence[float]) -> Function:
    """Return the function that has these values everywhere."""
    return Function({i: Operation("constant", (exact(x),)) for i, x in enumerate(values)}, range(len(values)))


@dataclass(frozen=True)
class FloatAxis:
    """The normalised weights of the keys of one axis, e^{a_k x + b_k} divided by their sum.

    `steps` is None, or the a_k grow by the same step h from key to key. Then the weights are E_k t^{k − m} with
    t = e^{h(x − c)}, and Arb computes one exponential for each x. With t off by a factor 1 ± CONVERTED, its J-th power
    by products is off by J(CONVERTED + 2u), and each weight by CONVERTED + u more. Else Arb computes them all.
    """

    slopes: list[arb]
    offsets: list[arb]
    steps: tuple[arb, arb, int, list[float]] | None  # h, c, m and E_k
    error: float  # of each normalised weight, relative
    kept: dict[float, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, slopes: list[arb], offsets: list[arb], lo: float, hi: float) -> FloatAxis:
        p, steps, power = len(slopes), None, CONVERTED
        if p > 1:
            h, middle, m = slopes[1] - slopes[0], (arb(lo) + arb(hi)) / 2, p // 2
            logs = [b + a * middle for a, b in zip(slopes, offsets, strict=True)]
            logs = [x - logs[m] for x in logs]
            reach = most([abs(h) * (m * (arb(hi) - arb(lo)) / 2), *map(abs, logs)])
            if all(a - slopes[0] - k * h == 0 for k, a in enumerate(slopes)) and reach < LARGEST_LOG:
                steps = h, middle, m, [float(x.exp()) for x in logs]
                power = (m + 1) * (CONVERTED + 2 * U) + CONVERTED + U
        return cls(slopes, offsets, steps, SECOND_ORDER * (2 * power + (p + 2) * U))

    def weights(self, x: float) -> list[float]:
        found = self.kept.get(x)
        if found is None:
            found = self._weights(x)
            if len(self.kept) < MOST_KEPT:
                self.kept[x] = found
        return found

    def _weights(self, x: float) -> list[float]:
        if self.steps is None:
            scores = [a * x + b for a, b in zip(self.slopes, self.offsets, strict=True)]
            top = max(score.mid() for score in scores)
            weights = [float((score - top).exp()) for score in scores]
        else:
            h, middle, m, weights = self.steps
            up = float((h * (arb(x) - middle)).exp())
            down, weights = 1.0 / up, weights.copy()
            power = inverse = 1.0
            for k in range(1, m + 1):
                inverse *= down
                weights[m - k] *= inverse
            for k in range(m + 1, len(weights)):
                power *= up
                weights[k] *= power
        whole = sum(weights)
        return [weight / whole for weight in weights]


@dataclass(frozen=True)
class FloatGrid:
    """A network of one head over a full grid of keys, whose scores are sums over the axes, in Python's floats.

    The output minus a number v is Σ_k Π_i p_i(x_i)_{k_i} (v_k − v). With relative errors e_i of the p_i, n keys in d
    variables, and |v_k − v| ≤ V, it is off by at most (Σ e_i + (d + n + 6)u)·V before second order: d products, n − 1
    sums, and the conversion of v_k − v. `residue` is the relative error of the weights if scores are not exactly sums.
    """

    axes: list[FloatAxis]
    values: list[tuple[float, list[float], float]]
    """For every output v, the v_k − v in the order of the grid, and the error up to which the claim holds in floats."""
    added: list[float]
    """For every output, the number that is added to an error in floats to bound that of any engine."""

    @classmethod
    def of(cls, claim: Claim, prover: Prover) -> FloatGrid | None:
        """Return the network in this form, or None if it has not this form or rounding leaves no room."""
        stage, arithmetic = prover.stage, prover.arithmetic
        if len(prover.heads) != 1 or any(form.terms for form in stage.affine):
            return None
        head = prover.heads[0]
        if head.own_axes is None or any(len(rows) > 1 for rows in head.values.values()):
            return None
        if set(head.values) != set(range(len(stage.affine))):
            return None
        residue = _residue(head, head.own_axes)
        axes = [
            FloatAxis.of(slopes, offsets, *ends)
            for slopes, offsets, ends in zip(head.axes, head.own_axes, claim.ends, strict=True)
        ]
        sizes, box = [*map(len, head.axes)], Box.between([(arb(lo), arb(hi)) for lo, hi in claim.ends])
        n, values, added = math.prod(sizes), [], []
        relative = SECOND_ORDER * (sum(axis.error for axis in axes) + (len(sizes) + n + 6) * U) + residue
        if not relative < 2.0**-20:
            return None
        places = [_flat(place, sizes) for place in head.places]
        for o in range(len(stage.affine)):
            (column,) = head.values[o]
            v = float((most(column) - most(-x for x in column)) / 2)
            flat = [0.0] * n
            for place, x in zip(places, column, strict=True):
                flat[place] = float(x - v)
            size = float(most(abs(x - v) for x in column)) * SECOND_ORDER
            rounding = head.largest.rounding(head, o, box, arithmetic) + affine_rounding(stage, o, box, arithmetic)
            lost = arb(relative) * size + arb(2) ** -900 * (1 + size)
            more = math.nextafter(float((rounding + claim.truncation + head.dropped[o] + lost).upper()), math.inf)
            room = math.nextafter(math.nextafter(claim.bound - more, -math.inf) * (1 - 8 * U), -math.inf)
            if not room > 0:
                return None
            values.append((v, flat, room))
            added.append(more)
        return cls(axes, values, added)

    def error(self, point: Sequence[float], row: Sequence[float]) -> float | None:
        """Return a bound on the error at a point, or None if floats do not decide whether the claim holds there.

        In `abs(out − (f − v))` the two differences round: each is off by a factor 1 ± u. The first error is covered by
        a term of 4u|f − v|, and the second by the factor 1 − 8u in `room`.
        """
        weights = self.axes[0].weights(point[0])
        for axis, x in zip(self.axes[1:], point[1:], strict=True):
            along = axis.weights(x)
            weights = [a * b for a in weights for b in along]
        largest = 0.0
        for (v, flat, room), more, f in zip(self.values, self.added, row, strict=True):
            apart = f - v
            off = abs(sum(map(operator.mul, weights, flat)) - apart) + 4 * U * abs(apart)
            if not off <= room:
                return None
            largest = max(largest, off + more)
        return largest * (1 + 8 * U)


def _residue(head: Average, own: list[list[arb]]) -> float:
    """Return a bound on |e^ρ − 1| over all keys, twice, where ρ is the part of a score that is no sum over the axes."""
    constants = head.scores[0]
    first = head.places.index((0,) * len(head.axes))
    apart = most(
        abs(c - constants[first] - sum((own[i][n] for i, n in enumerate(place)), arb(0)))
        for c, place in zip(constants, head.places, strict=True)
    )
    return math.nextafter(float((2 * apart.expm1() * 2).upper()), math.inf)


def _flat(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of a place of the grid. The last axis runs fastest."""
    number = 0
    for n, size in zip(place, sizes, strict=True):
        number = number * size + n
    return number
