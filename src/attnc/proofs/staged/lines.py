"""The heads that write one channel, as a function of one number t, which is an affine combination of the state.

`Channel.line` derives that function, and the roundings of the heads along it, from the weights. `LineClaim` bounds
|A(t) − g(t)| on an interval by leaves.

Near the kink of a gate, rounding is large on a short interval only, while leaves may be wide there. So rounding is
bounded on parts of the leaves. The checker also bounds it on parts, 2^CHECKED_HALVINGS of each leaf. A leaf that takes
more parts here is stored as several leaves, each with at most that number of parts. So the checker finds every bound
that is found here on a part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.rounding import NEGLIGIBLE
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import is_time_over
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, down, gamma, up
from attnc.proofs.cells.branching import LARGEST_BATCH, MAX_LEVEL, Budget, CellBounds, Covering, branch_and_bound
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import SHARP, Kind
from attnc.proofs.kinds.rounded import NEGLIGIBLE_SHARE
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.kinds.taylor import TaylorKind
from attnc.proofs.margins import LEAF_ROOM
from attnc.proofs.rounding.program import HeadRoundings, Roundings, ScoreRoundings, roundings, sizes_at
from attnc.proofs.rounding.slopes import ALIGNED
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.stages.extraction import OneStage, ProgramStage, StateForm, stages
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Node, Number, substitute
from attnc.targets.parts.part import T, function_of_t

U = UNIT_ROUNDOFF["float64"]
MOST_SCORE_SLACK = 0.25
"""The largest part of a score that may depend on anything but t. The checker refuses a head above it."""
LINE_ORDER = 10
"""The order of Taylor leaves of one variable: a higher one makes fewer leaves, each of which takes longer."""
FIRST_LEVEL = 3
"""Branch and bound begins with 2^3 cells: fewer would be halved in any case."""
LOOSE_LEAVES, CLOSE_LEAVES = 0.05, 2e-3
"""The relative excess of a bound over the largest error that was seen, if the box is divided and if it is not. The
second is for theorems that count their anchors: they are 0.2 % sharp, and the proof must not miss the eps they meet."""
LEAST_GOAL = 1e-14
"""Bounds below this share of the function and of the values are rounding alone, which no halving makes smaller."""
MOST_CELLS = 2**13
"""The largest number of cells of a line. The checker takes 3 ms for one. Measured: no line of the corpus takes more
than 3,100, but a function that is all but 0 on an interval took 65,000, in search of a bound that is negligible."""
MOST_IDLE = 3
"""Number of idle halvings in a row after which cells are not halved again. Measured: with 1 two bounds in float32 are
0.5 % larger, with 6 there are twice as many leaves, and bounds are at most 0.1 % smaller."""
WORTH_HALVING = 0.8
"""A halving that leaves more than this share of the rounding is idle. Measured: with 0.6 nothing changes, with 0.95
there are 7 % more leaves, and no smaller bound."""
MORE_ROUNDINGS = 128
"""Roundings of a part of a value besides those of sums. The checker counts 64: twice as many are room for it."""
FIXED_SLOPES = 20.0
"""Rounding of slopes per slope of a score and per size of a value, if the value itself is 0: see `fixed_slopes`."""
FIXED_ROOM = 2.0
"""Factor on this rounding: prover and checker bound the sizes of values in their own ways."""
CHECKED_HALVINGS = 4
"""log₂ of the number of parts on which the checker bounds the rounding of a leaf of one variable."""

LineRounding = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function of (centres, radii) that returns the rounding of every cell."""


@dataclass(frozen=True, eq=False)
class HeadLine:
    """The heads of a channel as functions of t, in units of the carrier, and their roundings."""

    heads: tuple[SoftHead[Enclosed], ...]
    unsure: float  # the distance between the values and those of the claim, over all states
    roundings: tuple[HeadRoundings, ...]
    beside: float  # the rounding of the terms that are added to the heads
    peak: float  # the largest intermediate number
    dtype: str
    farthest: float  # in the sizes that roundings are relative to, |t| counts as at most this

    @property
    def value_bytes(self) -> bytes:
        """The values of all heads: channels with equal bytes may share their leaves."""
        parts = [part for head in self.heads for part in (head.values, head.carried) if part is not None]
        return b";".join((part.mid + 0.0).tobytes() for part in parts)  # + 0.0 turns −0 into 0

    def scaled(self, size: float) -> tuple[OneStage, Roundings]:
        """Return the heads as a stage with values multiplied by `size`, and its roundings."""
        heads = []
        for line in self.heads:
            scaled = None if line.carried is None else _times(size, line.carried, 0.0)
            heads.append(SoftHead(line.slopes, line.offsets, _times(size, line.values, self.unsure), scaled))
        underflow = max(float(head.underflow[0]) for head in self.roundings)
        own = Roundings(self.dtype, self.roundings, np.zeros((1, 2)), 0, underflow, self.peak, farthest=self.farthest)
        return OneStage.of_line(tuple(heads)), own

    def fixed_slopes(self, fixed: float) -> float:
        """Bound the rounding of slopes that does not scale with the carrier, where values have such parts `fixed`.

        Rounding is linear in the sizes of values. With sizes φ of values that are 0, the theorem of `rounding.slopes`
        has e_k ≤ φ, e_A ≤ 2.1·φ, D ≤ 4·φ, Ā ≤ 1.01·S and T ≤ 2.02·S: less than 20·φ·S in all, and twice φ for products
        that underflow. Weights that are lost add their number.
        """
        found = 0.0
        for head, own in zip(self.heads, self.roundings, strict=True):
            forms = own.scores.sizes if own.scores is not None else own.score_errors / UNIT_ROUNDOFF[self.dtype]
            steepest = max(float(forms[:, 0].max()), float((np.abs(head.slopes.mid) + head.slopes.radius).max()))
            lost = 4 * head.num_keys * (math.exp(NEGLIGIBLE[self.dtype]) + float(np.finfo(self.dtype).smallest_normal))
            found += (2 + FIXED_SLOPES * steepest) * fixed + lost
        return float(up(FIXED_ROOM * found, 8))

    def rounding(self, size: float, proof: Covering) -> tuple[float, Covering]:
        """Bound the rounding of the stage in this channel over all t and all states, with values multiplied by `size`.

        The second result is the proof by the leaves on which the rounding was bounded.
        """
        stage, own = self.scaled(size)
        enough = NEGLIGIBLE_SHARE * size * proof.bound
        found, proof = rounded_leaves(lambda *cells: rounding_bounds(stage, own, *cells)[:, 0], proof, enough)
        return float(up(found + self.beside, 4)), proof


SIZE_OF_SCORES, SIZE_OF_VALUES = 4.25, 2.125
"""|v_k − A| ≤ 2 max |v|, and twice that if slopes are centred, too. Values that carry the input may be centred once.
Both numbers leave room for computed weights, which add up to 1 + 2^−10 at most."""


@dataclass(frozen=True, eq=False)
class SlopeSizes:
    """The derivatives of the heads of a channel by the channels m of a state.

    They are those of carrier·A(t) up to `apart`_m and, along t, up to `unsure`. `reach`_m bounds the sum of the
    absolute values of all products in them, in any order of an engine. `beside`_m is its part without the products
    through scores that are, up to the share ALIGNED, no larger than those of the slopes along t.
    """

    apart: Float[np.ndarray, " channels"]
    reach: Float[np.ndarray, " channels"]
    beside: Float[np.ndarray, " channels"]
    unsure: float


@dataclass(frozen=True, eq=False)
class Channel:
    """A channel that attention writes: its name, the stage, and the numbers of the heads that write it.

    The absolute values of the channels that the stage reads are at most `sizes`.
    """

    name: str
    stage: OneStage
    roundings: Roundings
    numbers: tuple[int, ...]
    column: int
    sizes: Float[np.ndarray, " channels"]

    @property
    def heads(self) -> tuple[SoftHead[Enclosed], ...]:
        return tuple(self.stage.heads[number] for number in self.numbers)

    @property
    def source(self) -> int | None:
        """The channel of the state that is passed on as this one, with weight 1. None if it is not passed on.

        It is passed on unchanged, up to `passing`.
        """
        row, constant = self.stage.linear.mid[self.column], self.stage.constant
        (places,) = np.nonzero(row)
        is_passed = len(places) == 1 and row[places[0]] == 1 and constant.mid[self.column] == 0
        return int(places[0]) if is_passed and constant.radius[self.column] == 0 else None

    @property
    def passing(self) -> float:
        """The change of a channel that is passed on. It is 0 unless weights are intervals."""
        radius = self.stage.linear.radius[self.column]
        return float(up(radius @ self.sizes, len(radius) + 2)) if radius.any() else 0.0

    @property
    def _reach(self) -> Float[np.ndarray, " channels"]:
        """The sizes of the channels as engines compute with them."""
        return up(self.sizes * (1 + 2 * self.roundings.unit), 2)

    @property
    def _added_size(self) -> float:
        """The size of the terms that the stage adds to the heads."""
        return float(sizes_at(self.roundings.sizes, self._reach[None])[0, self.column])

    def line(self, argument: StateForm, carrier: StateForm | None) -> HeadLine:
        """Return the heads as functions of t = argument."""
        affine = (self.stage.linear[self.column], self.stage.constant[self.column])
        if any(part.mid.any() or part.radius.any() for part in affine):
            raise ProgramError(f"{self.name} is not written by its heads alone")
        heads, offs = zip(*(self._along(head, argument, carrier) for head in self.heads), strict=True)
        slack = max(float(head.offsets.radius.max()) for head in heads)
        if not slack <= MOST_SCORE_SLACK:
            raise ProgramError(
                f"the scores of {self.name} do not depend on the claimed combination of its inputs alone: the rest is "
                f"{slack:.3g}, and at most {MOST_SCORE_SLACK} is allowed"
            )
        rounds = tuple(self._flat_roundings(number, argument, carrier is None) for number in self.numbers)
        beside = float(up(gamma(self.roundings.count, self.roundings.unit) * self._added_size, 4))
        peak = float(up(self.roundings.peak * (1 + self._reach.sum()) ** self.roundings.degree, 8))
        unsure, farthest = float(up(sum(offs), len(offs))), _farthest(argument, self._reach)
        return HeadLine(heads, unsure, rounds, beside, peak, self.roundings.dtype, farthest)

    def fixed_size(self, carrier: StateForm) -> float:
        """Bound the rounding of the part φ of the sizes of values that does not scale with the carrier.

        That is all of them, unless the carrier is one channel. Rounding is subadditive in these sizes. So if the
        carrier is a fraction of its largest value, the rounding is at most that fraction, plus that of φ. A value
        rounds by γ_n φ at most, and sums over keys by γ_n φ more than that, whatever the weights: 3 γ_n φ in all.
        """
        reach, total, lost, n = self._reach, self._added_size, 0.0, self.roundings.count
        (read,), elsewhere = np.nonzero(carrier.weights), reach.copy()
        if len(read) == 1 and carrier.constant == 0:
            elsewhere[read] = 0.0
        for number in self.numbers:
            rounds = self.roundings.heads[number]
            fixed = sizes_at(rounds.value_sizes[:, self.column], elsewhere[None])
            total += float(fixed.max())
            lost += float(rounds.underflow[self.column] * (1 + reach.sum()))
            n += 4 * self.stage.heads[number].num_keys + 2 * rounds.count + MORE_ROUNDINGS
        share = 4 * float(gamma(n, self.roundings.unit)) if n * self.roundings.unit < 2.0**-5 else 1.0
        lost += 2 * n**2 * float(np.finfo(self.roundings.dtype).smallest_normal)
        return float(up(share * total + lost, len(reach) + 8 + 4 * len(self.numbers)))

    def slope_sizes(self, argument: StateForm, carrier: StateForm | None) -> SlopeSizes:
        """Bound the derivatives of the heads by the channels of the state, besides those through t and the carrier.

        A derivative is Σ_k d_k a_km + Σ_k p_k V_km with Σ_k |d_k| ≤ 2 max |v_k|. Engines may centre a and V, and the
        weights p_k add up to at most 1 + 2^−10. So the first sum is at most SIZE_OF_SCORES·max |v_k|·max |a_km|.
        """
        apart, reach, beside = np.zeros((3, len(self.sizes)))
        unsure = 0.0
        for number in self.numbers:
            head, rounds = self.stage.heads[number], self.roundings.heads[number]
            moves = Enclosed.exact(np.zeros_like(head.slopes.mid))
            if head.carried is not None:
                moves = Enclosed(head.carried.mid[:, self.column], head.carried.radius[:, self.column])
            kappa = ratios(head.slopes.mid, head.offsets.mid, argument, self.sizes)
            constants, along = head.values.mid[:, self.column], carrier or argument
            nu = ratios(moves.mid, constants, along, self.sizes, carrier is not None)
            largest = float(sizes_at(rounds.value_sizes[:, self.column], self._reach[None]).max())
            off = self._along(head, argument, carrier)[1]
            scores = np.abs(head.slopes.mid) + head.slopes.radius
            values = np.abs(moves.mid) + moves.radius
            forms = rounds.slope_sizes(self.roundings.unit)
            if forms.shape[1]:
                scores = np.maximum(scores, forms)
            if rounds.value_sizes.shape[2] > 1:
                values = np.maximum(values, rounds.value_sizes[:, self.column, :-1])
            of_scores, of_values = SIZE_OF_SCORES * (largest + off), SIZE_OF_VALUES
            apart += of_scores * _left(head.slopes, kappa, argument.weights).max(axis=0)
            apart += of_values * _left(moves, nu, along.weights).max(axis=0)
            along_t = np.abs(kappa)[:, None] * np.abs(argument.weights)
            excess = np.maximum(up(scores - along_t * (1 + ALIGNED), 4), 0.0)
            reach += of_scores * scores.max(axis=0) + of_values * values.max(axis=0)
            beside += of_scores * excess.max(axis=0) + of_values * values.max(axis=0)
            unsure += SIZE_OF_SCORES * off * float(np.abs(kappa).max(initial=0.0))
        if self.roundings.sizes.shape[1] > 1:  # terms beside the heads, which cancel exactly, still round
            reach += self.roundings.sizes[self.column, :-1]
            beside += self.roundings.sizes[self.column, :-1]
        return SlopeSizes(up(apart, 16), up(reach, 16), up(beside, 16), float(up(unsure, 16)))

    def _along(
        self, head: SoftHead[Enclosed], argument: StateForm, carrier: StateForm | None
    ) -> tuple[SoftHead[Enclosed], float]:
        """Return a head as a function of t = T(u) alone, and the distance of its values from the claimed ones.

        Scores a_k·u + c_k are κ_k·T(u) + c_k − κ_k·constant, up to Σ_i |a_ki − κ_k weight_i|·|u_i|, which is added to
        the radius of the offset. Values are ν_k·carrier(u), or constants, or affine in t.
        """
        kappa, offsets, differs = _divided(head.slopes, head.offsets, argument, self.sizes)
        values, off = head.values.mid[:, self.column], head.values.radius[:, self.column]
        constants, moves, gates = Enclosed.exact(values), Enclosed.exact(np.zeros_like(head.slopes.mid)), None
        if head.carried is not None:
            moves = Enclosed.exact(head.carried.mid[:, self.column])
            off = up(off + head.carried.radius[:, self.column] @ self.sizes, 4)
        if carrier is not None:
            values, _, unsure = _divided(moves, constants, carrier, self.sizes, with_constant=True)
            off = up(off + unsure, 2)
        elif moves.mid.any():
            nu, kept, unsure = _divided(moves, constants, argument, self.sizes)
            off = up(off + unsure + kept.radius, 2)
            values, gates = kept.mid, Enclosed.exact(nu[:, None, None])
        offsets = Enclosed(offsets.mid, up(offsets.radius + differs))
        line = SoftHead(Enclosed.exact(kappa[:, None]), offsets, Enclosed.exact(values[:, None]), gates)
        return line, float(up(off.max(initial=0.0)))

    def _flat_roundings(self, number: int, argument: StateForm, values_along: bool) -> HeadRoundings:
        """Return the roundings of a head as a function of t, over all states.

        If t = w·u_i + constant reads one channel, |u_i| ≤ (|t| + |constant|)/|w| in a cell, and at most its largest
        size (`_farthest`). The other channels count with their largest sizes (`_sizes_along`), and so do all channels
        for values that depend on a carrier. The checker uses the same sizes.
        """
        rounds, reach, n = self.roundings.heads[number], self._reach, 1 + self._reach.sum()
        lost = up(rounds.score_underflow * n, 8)

        def with_lost(rows: Float[np.ndarray, "keys forms"]) -> np.ndarray:
            return np.concatenate([rows[:, :-1], up(rows[:, -1] + lost)[:, None]], axis=1)

        fine = rounds.scores
        if fine is not None:
            forms = fine.query, with_lost(fine.own), fine.sizes
            query, own, added = (_sizes_along(rows, argument, reach) for rows in forms)
            fine = ScoreRoundings(query, fine.keys, own, added, fine.num_terms)
        crude = _sizes_along(with_lost(rounds.score_errors), argument, reach)
        values = rounds.value_sizes[:, self.column]
        sizes = _sizes_along(values if values_along else sizes_at(values, reach[None]).T, argument, reach)
        spent = up(rounds.underflow[[self.column]] * n, 4)
        return HeadRoundings(
            crude, np.zeros(len(lost)), sizes[:, None], rounds.count, rounds.depth, spent, fine, rounds.fewest
        )


def channels_of(
    part: ProgramStage, sizes: Float[np.ndarray, " channels"], claimed: Mapping[str, object] | None = None
) -> dict[int, Channel]:
    """Return every output of a stage as a channel, with the heads that write it, for states with |u| ≤ sizes.

    If all values that heads write into a channel in `claimed` are 0, its heads are those whose W_O has an entry for it.
    """
    found = {}
    all_rounds = roundings(part, casts_input=False)
    for (stage, outputs), rounds in zip(stages(part), all_rounds, strict=True):
        for column, output in enumerate(outputs.tolist()):
            name = part.outputs[output]
            # Sizes decide, as terms that cancel exactly still round. A size of 0 was rounded up to the least float.
            writes = [(head.value_sizes[:, column] > TINIEST).any() for head in rounds.heads]
            numbers = np.flatnonzero(writes).tolist()
            if not numbers and claimed is not None and name in claimed:
                numbers = part.silent_writers(name, len(stage.heads))
            found[output] = Channel(name, stage, rounds, tuple(numbers), column, sizes)
    return found


def joined(lines: Sequence[HeadLine]) -> HeadLine:
    """Join lines with equal values: the radii of the scores and the roundings cover all of them."""
    if len(lines) == 1:
        return lines[0]
    heads = tuple(map(_joined_head, zip(*(line.heads for line in lines), strict=True)))
    rounds = tuple(map(_joined_roundings, zip(*(line.roundings for line in lines), strict=True)))
    unsure, beside, peak, farthest = map(float, _largest(lines, "unsure", "beside", "peak", "farthest"))
    return HeadLine(heads, unsure, rounds, beside, peak, lines[0].dtype, farthest)


def _joined_head(lines: Sequence[SoftHead[Enclosed]]) -> SoftHead[Enclosed]:
    kappas = np.array([line.slopes.mid for line in lines])
    offsets = np.array([line.offsets.mid for line in lines])
    radii = np.array([line.offsets.radius for line in lines])
    return SoftHead(
        Enclosed(kappas[0], up(np.abs(kappas - kappas[0]).max(axis=0))),
        Enclosed(offsets[0], up((np.abs(offsets - offsets[0]) + radii).max(axis=0), 2)),
        lines[0].values,
        lines[0].carried,
    )


def _joined_roundings(found: Sequence[HeadRoundings]) -> HeadRoundings:
    """Return the largest roundings of all, key by key. Detailed roundings are kept only if the keys are the same."""
    fine = [flat.scores for flat in found if flat.scores is not None]
    scores = None
    if len(fine) == len(found) and all(np.array_equal(each.keys, fine[0].keys) for each in fine):
        query, own, sizes = _largest(fine, "query", "own", "sizes")
        scores = ScoreRoundings(query, fine[0].keys, own, sizes, max(each.num_terms for each in fine))
    errors, tiny, values, spent = _largest(found, "score_errors", "score_underflow", "value_sizes", "underflow")
    count, depth = (int(largest) for largest in _largest(found, "count", "depth"))
    return HeadRoundings(errors, tiny, values, count, depth, spent, scores, min(flat.fewest for flat in found))


def _largest(records: Sequence[Any], *names: str) -> list[np.ndarray]:
    """Return, for each of these fields, the entrywise maximum over all records."""
    return [np.max([getattr(record, name) for record in records], axis=0) for name in names]


def ratios(
    slopes: Float[np.ndarray, "keys channels"],
    offsets: Float[np.ndarray, " keys"],
    form: StateForm,
    sizes: Float[np.ndarray, " channels"],
    with_constant: bool = False,
) -> Float[np.ndarray, " keys"]:
    """Return κ with slopes ≈ κ·weights, read off the channel that changes the form most.

    If no channel changes it, κ is 0, or with `with_constant` the ratio of the offsets to the constant.
    """
    weights = form.weights
    main = int(np.argmax(np.abs(weights) * sizes))
    with quiet():
        if weights[main] != 0 and sizes[main] * abs(weights[main]) > 0:
            kappa = slopes[:, main] / weights[main]
        elif with_constant and form.constant:
            kappa = offsets / form.constant
        else:
            kappa = np.zeros(len(slopes))
        if not np.isfinite(kappa).all() or not np.isfinite(np.abs(kappa).max(initial=0.0) * np.abs(weights).max()):
            raise ProgramError("scores or values are too large to be those of the combination that is claimed")
    return kappa


def _farthest(argument: StateForm, reach: Float[np.ndarray, " channels"]) -> float:
    """Return the |t| at which (|t| + |constant|)/|w| is the reach of the one channel that t = w·u_i + constant reads.

    If t reads several channels, or this |t| would be negative, the size of u_i is its reach for all t: return 0.
    """
    (read,) = np.nonzero(argument.weights)
    if len(read) != 1:
        return 0.0
    return max(0.0, float(up(np.abs(argument.weights[read[0]]) * reach[read[0]]) - np.abs(argument.constant)))


def _sizes_along(
    rows: Float[np.ndarray, "rows forms"], argument: StateForm, reach: Float[np.ndarray, " channels"]
) -> Float[np.ndarray, "rows two"]:
    """Return forms of (|t|, 1) that are at least as large, on every state, as these forms of (|u|, 1) or constants."""
    if rows.shape[1] == 1:
        return np.pad(rows, ((0, 0), (1, 0)))
    slopes, elsewhere = np.zeros(len(rows)), reach.copy()
    if _farthest(argument, reach) > 0:
        (place,) = np.flatnonzero(argument.weights)
        slopes = up(rows[:, place] / abs(argument.weights[place]), 2)
        elsewhere[place] = 0.0
    constants = rows[:, :-1] @ elsewhere + rows[:, -1] + slopes * np.abs(argument.constant)
    return np.stack([slopes, up(constants, len(reach) + 4)], axis=1)


def _times(size: float, values: Enclosed, unsure: float) -> Enclosed:
    """Return size·values, with `unsure` added to the radii."""
    mid = size * values.mid
    return Enclosed(mid, up(size * values.radius + U * np.abs(mid) + unsure, 4))


def _left(
    slopes: Enclosed, kappa: Float[np.ndarray, " keys"], weights: Float[np.ndarray, " channels"]
) -> Float[np.ndarray, "keys channels"]:
    """Bound |slopes − κ·weights|, for every key and every channel."""
    products = kappa[:, None] * weights
    is_easy = np.isin(np.frexp(np.abs(weights))[0], (0.0, 0.5))  # a power of two: the product is exact
    rounding = np.where(is_easy, 0.0, 2 * U * np.abs(products)) + np.where(weights == 0, 0.0, TINIEST)
    return up(np.abs(slopes.mid - products) * (1 + 4 * U) + rounding + slopes.radius, 2)


def _divided(
    slopes: Enclosed,
    offsets: Enclosed,
    form: StateForm,
    sizes: Float[np.ndarray, " channels"],
    with_constant: bool = False,
) -> tuple[np.ndarray, Enclosed, np.ndarray]:
    """Return κ with slopes ≈ κ·weights, the rest of the offsets, and a bound of the rest of the slopes on all states.

    With `with_constant` the offsets should be κ·constant, and their rest is added to that bound.
    """
    kappa = ratios(slopes.mid, offsets.mid, form, sizes, with_constant)
    differs, kept = up(_left(slopes, kappa, form.weights) @ sizes, len(sizes) + 1), offsets
    if form.constant:
        shift = kappa * form.constant
        mid = offsets.mid - shift
        kept = Enclosed(mid, up(offsets.radius + 2 * U * (np.abs(shift) + np.abs(mid)) + 2 * TINIEST, 2))
    if with_constant:
        differs = up(differs + np.abs(kept.mid) + kept.radius, 2)
    return kappa, kept, differs


@dataclass(frozen=True, eq=False)
class LineClaim:
    """The claim that the sum of heads, A(t), is near g(t) on an interval, and the kinds of leaves that may prove it.

    `held` has the ends beyond which g is constant, if any. Bounds below `floor` are rounding alone.
    """

    stage: OneStage
    expression: Expression
    box: Box
    held: tuple[float, float] | None
    kinds: tuple[Kind, ...]
    floor: float

    @classmethod
    def of(
        cls,
        heads: tuple[SoftHead[Enclosed], ...],
        tree: Node,
        lo: float,
        hi: float,
        margin: float,
        limit: float = math.inf,
    ) -> LineClaim:
        """Make the claim for t in [lo − margin, hi + margin].

        g is made constant beyond `limit` or, if it is not defined on the whole interval, near its ends.
        """
        stage = OneStage.of_line(heads)
        # With a ∈ [lo, lo + margin] and b ∈ [hi − margin, hi]: if |t − s| ≤ margin for an s ∈ [lo, hi], then
        # |clip(t, a, b) − s| ≤ margin.
        inner = max(lo, math.nextafter(lo + margin, -math.inf)), min(hi, math.nextafter(hi - margin, math.inf))
        lo, hi = math.nextafter(lo - margin, -math.inf), math.nextafter(hi + margin, math.inf)
        box = Box(("t",), np.array([lo]), np.array([hi]))
        held = (lo, limit) if limit < math.inf else None if _is_defined(tree, lo, hi) else inner
        expression = held_at(tree, held)
        target = _LineTarget(expression, box)
        samples = np.linspace(lo, hi, 2**FIRST_LEVEL + 1)[:, None]
        at_kinks = TaylorKind.at_kinks(stage, expression, box)
        kinds = (TaylorKind.of(stage, expression, LINE_ORDER), SelectionKind(stage, target), at_kinks)
        carried = [0.0 if head.carried is None else np.abs(head.carried.mid[..., 0]) * box.magnitude for head in heads]
        values = [np.abs(head.values.mid) + moving for head, moving in zip(heads, carried, strict=True)]
        floor = LEAST_GOAL * max(float(np.abs(array).max()) for array in (expression(samples), *values))
        return cls(stage, expression, box, held, kinds, floor)

    def proof(self, least_level: int, tolerance: float) -> Covering:
        """Bound |A(t) − g(t)|, by leaves of at least the level `least_level`."""
        proof = branch_and_bound(
            self.kinds,
            self.box,
            tolerance=tolerance,
            floor=self.floor,
            start_level=FIRST_LEVEL,
            budget=Budget(MOST_CELLS),
        )
        finer = at_least(proof, least_level)
        cells = dataclasses.replace(finer, upper=up(finer.upper * (1 + LEAF_ROOM)))
        return dataclasses.replace(proof, cells=cells, complete=proof.complete or not is_time_over())

    def covering(self, level: np.ndarray, index: np.ndarray, kind: np.ndarray, upper: np.ndarray) -> Covering:
        """Return a covering with these cells, kinds and bounds. Nothing is proved here."""
        cells = CellBounds(level, index[:, None], upper[:, None], kind, np.zeros(len(level)), {})
        return Covering(self.box, self.kinds, cells, complete=True)

    def differences(self, points: Float[np.ndarray, "points 1"]) -> Float[np.ndarray, " points"]:
        """Return A − g at points, up to rounding."""
        return np.asarray(self.stage.values(points)[:, 0] - self.expression(points)[:, 0])


def held_at(tree: Node, held: tuple[float, float] | None) -> Expression:
    """Return a function of t, constant beyond the ends `held`."""
    if held is not None:
        tree = substitute(tree, Call("clip", (T, *(Number(Fraction(end)) for end in held))))
    return function_of_t(tree)


def at_least(proof: Covering, least_level: int) -> CellBounds:
    """Cut wide leaves into cells of this level. Each gets a bound by the first kind, if that is smaller."""
    depth, kind = np.maximum(0, least_level - proof.cells.level), proof.kinds[0]
    finer, rows = proof.cells.cut(depth), np.flatnonzero(np.repeat(depth, 1 << depth))
    if len(rows):
        finer.improve(rows, 0, kind, kind.bounds(*cell_boxes(proof.box, least_level, finer.index[rows]), SHARP))
    return finer


class _LineTarget(ExpressionTarget):
    """An expression of t. Its domain has been checked already."""

    def __init__(self, expression: object, box: Box) -> None:
        self.expression, self.box, self.text = expression, box, ""  # type: ignore[assignment]
        self.input_shapes, self.output_shape = ((1,),), ()


def _is_defined(tree: Node, lo: float, hi: float) -> bool:
    found = function_of_t(tree).ranges(Interval(np.array([[lo]]), np.array([[hi]])), violations="infinite")
    return bool(np.isfinite(found.lo).all() and np.isfinite(found.hi).all())


def rounded_leaves(bounds: LineRounding, proof: Covering, enough: float = 0.0) -> tuple[float, Covering]:
    """Return the largest bound of a cell, and the proof by leaves of at most 2^CHECKED_HALVINGS of these cells each.

    Cells are halved where the bound is largest, as long as that makes it smaller, and it is above `enough`.
    """
    known, idle = proof.cells, 0
    level, index, depth = known.level, known.index, np.zeros_like(known.level)  # the depth of a cell below its leaf
    upper = bounds(*cell_boxes(proof.box, level, index))
    while idle < MOST_IDLE and len(level) < LARGEST_BATCH:
        largest = upper.max()
        if largest <= enough:
            break
        wide = (upper > largest / 2) & (level < MAX_LEVEL)
        new = np.tile(level[wide] + 1, 2), np.concatenate([2 * index[wide], 2 * index[wide] + 1])
        found = bounds(*cell_boxes(proof.box, *new)) if wide.any() else upper[:0]
        level, index = np.concatenate([level[~wide], new[0]]), np.concatenate([index[~wide], new[1]])
        upper, depth = (
            np.concatenate([upper[~wide], found]),
            np.concatenate([depth[~wide], np.tile(depth[wide] + 1, 2)]),
        )
        idle = 0 if upper.max() < WORTH_HALVING * largest else idle + 1
    halved = {
        (deep - above, i >> above)
        for deep, i, below in zip(level.tolist(), index[:, 0].tolist(), depth.tolist(), strict=True)
        for above in range(CHECKED_HALVINGS + 1, below + 1)
    }
    while any(cuts := [cell in halved for cell in zip(known.level.tolist(), known.index[:, 0].tolist(), strict=True)]):
        known = known.cut(np.array(cuts, np.int64))
    return float(upper.max()), dataclasses.replace(proof, cells=known)


def leaf_intervals(proof: Covering) -> Interval:
    """Return the intervals of the leaves of a line, in their order."""
    centres, radii = cell_boxes(proof.box, proof.cells.level, proof.cells.index)
    return Interval(down(centres - radii)[:, 0], up(centres + radii)[:, 0])
