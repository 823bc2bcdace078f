"""The heads that write one channel as a function of one number t, an affine combination of the state; and how they
round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import Covering
from attnc.proofs.rounding.program import HeadRoundings, Roundings, ScoreRoundings, roundings
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.staged.line_leaves import rounded_leaves
from attnc.proofs.stages.extraction import ProgramStage, stages
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
MOST_SCORE_SLACK = 0.25
"""The largest part of a score, in natural units, that may not depend on t. The checker refuses a head above it."""


@dataclass(frozen=True, eq=False)
class StateForm:
    """T(u) = Σ weight_i·u_i + constant in floats. The exact combination is within `slack` of T at the exact state u."""

    weights: Float[np.ndarray, " channels"]
    constant: float
    slack: float


@dataclass(frozen=True, eq=False)
class HeadLine:
    """The heads of a channel as functions of t, in units of the carrier, and their roundings."""

    heads: tuple[SoftHead[Enclosed], ...]
    unsure: float  # the distance between the values and those that the claim states, over all states
    roundings: tuple[HeadRoundings, ...]
    beside: float  # the rounding of the terms that are added to the heads
    peak: float  # the largest number on the way
    dtype: str

    @property
    def score_rounding(self) -> float:
        """The largest rounding of a score at t = 0."""
        return max(float(head.score_offsets.max()) for head in self.roundings)

    @property
    def value_bytes(self) -> bytes:
        """The values of all heads: channels with equal bytes may share their leaves."""
        parts = [part for head in self.heads for part in (head.values, head.carried) if part is not None]
        return b";".join((part.mid + 0.0).tobytes() for part in parts)  # + 0.0 turns −0 into 0

    def rounding(self, size: float, proof: Covering) -> tuple[float, Covering]:
        """The rounding of the stage in this channel over all t and all states, values being times `size`.

        The second result is the proof by the leaves on which the rounding was bounded.
        """
        heads = []
        for line in self.heads:
            scaled = None if line.carried is None else _times(size, line.carried, 0.0)
            heads.append(SoftHead(line.slopes, line.offsets, _times(size, line.values, self.unsure), scaled))
        stage = OneStage(tuple(heads), Enclosed(np.zeros(1), np.zeros(1)), Enclosed(np.zeros((1, 1)), np.zeros((1, 1))))
        underflow = max(float(head.underflow[0]) for head in self.roundings)
        own = Roundings(self.dtype, self.roundings, np.zeros(1), np.zeros((1, 1)), 0, underflow, self.peak)
        found, proof = rounded_leaves(lambda *cells: rounding_bounds(stage, own, *cells)[:, 0], proof)
        return float(up(found + self.beside, 4)), proof


@dataclass(frozen=True, eq=False)
class Channel:
    """A channel that attention writes: its name, the stage, and the numbers of the heads that write it."""

    name: str
    stage: OneStage
    roundings: Roundings
    numbers: tuple[int, ...]
    column: int

    @property
    def heads(self) -> tuple[SoftHead[Enclosed], ...]:
        return tuple(self.stage.heads[number] for number in self.numbers)

    @property
    def is_alone(self) -> bool:
        """Whether the heads alone make the channel: the stage adds nothing to them."""
        affine = (self.stage.linear, self.stage.constant)
        return not any(part[self.column].any() for array in affine for part in (array.mid, array.radius))

    @property
    def source(self) -> int | None:
        """The channel of the state that is passed on unchanged, if the stage does that."""
        row = self.stage.linear.mid[self.column]
        (places,) = np.nonzero(row)
        off = (self.stage.linear.radius, self.stage.constant.mid, self.stage.constant.radius)
        is_exact = len(places) == 1 and row[places[0]] == 1 and not any(part[self.column].any() for part in off)
        return int(places[0]) if is_exact else None

    def values(self, head: SoftHead[Enclosed]) -> tuple[Float[np.ndarray, " keys"], bool]:
        """The constant values of a head in this channel, and whether values move with the state besides."""
        moves = head.carried is not None and bool(head.carried.mid[:, self.column].any())
        return head.values.mid[:, self.column], moves

    def line(self, argument: StateForm, carrier: StateForm | None, sizes: Float[np.ndarray, " channels"]) -> HeadLine:
        """The heads as functions of t = argument, for states with |u| ≤ sizes."""
        if not self.is_alone:
            raise ProgramError(f"{self.name} is not made by its heads alone")
        heads, offs = zip(*(self._along(head, argument, carrier, sizes) for head in self.heads), strict=True)
        slack = max(float(head.offsets.radius.max()) for head in heads)
        if not slack <= MOST_SCORE_SLACK:
            raise ProgramError(
                f"the scores of {self.name} do not depend on the claimed combination of its inputs alone: they differ "
                f"by {slack:.3g}, at most {MOST_SCORE_SLACK} is allowed"
            )
        rounds = tuple(self._flat_roundings(number, argument, sizes) for number in self.numbers)
        reach = self._reach(sizes)
        whole = self.roundings.sizes[self.column] + self.roundings.size_slopes[self.column] @ reach
        beside = float(up(gamma(self.roundings.count, self.roundings.unit) * whole, len(reach) + 4))
        peak = float(up(self.roundings.peak * (1 + reach.sum()) ** 2, 8))
        return HeadLine(heads, float(up(sum(offs), len(offs))), rounds, beside, peak, self.roundings.dtype)

    def fixed_size(self, carrier: StateForm, sizes: Float[np.ndarray, " channels"]) -> float:
        """The part of the sizes of values that does not scale with the carrier, if the carrier is one channel.

        Otherwise it is all of them. Rounding is subadditive in these sizes, and no larger than they are: a carrier that
        is a fraction of its largest value leaves that fraction of the rounding, and this at most.
        """
        reach, column = self._reach(sizes), self.column
        (read,), elsewhere = np.nonzero(carrier.weights), reach.copy()
        if len(read) == 1 and carrier.constant == 0:
            elsewhere[read] = 0.0
        total = self.roundings.sizes[column] + self.roundings.size_slopes[column] @ reach
        for number in self.numbers:
            rounds = self.roundings.heads[number]
            fixed = rounds.value_sizes[:, column]
            if rounds.value_size_slopes is not None:
                fixed = up(fixed + rounds.value_size_slopes[:, column] @ elsewhere, len(sizes) + 1)
            total += fixed.max() + rounds.underflow[column] * (1 + reach.sum())
        return float(up(total, len(sizes) + 8 + 4 * len(self.numbers)))

    def _reach(self, sizes: Float[np.ndarray, " channels"]) -> Float[np.ndarray, " channels"]:
        return up(sizes * (1 + 2 * self.roundings.unit), 2)

    def _along(
        self,
        head: SoftHead[Enclosed],
        argument: StateForm,
        carrier: StateForm | None,
        sizes: Float[np.ndarray, " channels"],
    ) -> tuple[SoftHead[Enclosed], float]:
        """A head as a function of t = T(u) alone, and how far its values may be from those that are claimed.

        Scores a_k·u + c_k are κ_k·T(u) + c_k − κ_k·constant, up to Σ_i |a_ki − κ_k weight_i|·|u_i|, which is put into
        the radius of an offset. Values are ν_k·carrier(u), or constants, or affine in t.
        """
        column = self.column
        kappa, offsets, differs = _divided(head.slopes.mid, head.slopes.radius, head.offsets, argument, sizes)
        values, zeros = head.values.mid[:, column], np.zeros(len(kappa))
        constants, off = Enclosed(values, zeros), head.values.radius[:, column]
        moves, gates = np.zeros_like(head.slopes.mid), None
        if head.carried is not None:
            moves = head.carried.mid[:, column]
            off = up(off + head.carried.radius[:, column] @ sizes, 4)
        if carrier is not None:
            values, _, unsure = _divided(moves, np.zeros_like(moves), constants, carrier, sizes, True)
            off = up(off + unsure, 2)
        elif moves.any():
            nu, kept, unsure = _divided(moves, np.zeros_like(moves), constants, argument, sizes)
            off = up(off + unsure + kept.radius, 2)
            values, gates = kept.mid, Enclosed(nu[:, None, None], np.zeros((len(nu), 1, 1)))
        line = SoftHead(
            Enclosed(kappa[:, None], zeros[:, None]),
            Enclosed(offsets.mid, up(offsets.radius + differs)),
            Enclosed(values[:, None], zeros[:, None]),
            gates,
        )
        return line, float(up(off.max(initial=0.0)))

    def _flat_roundings(self, number: int, argument: StateForm, sizes: Float[np.ndarray, " channels"]) -> HeadRoundings:
        """The roundings of a head as a function of t, over all states.

        Where t = w·u_i + constant reads one channel, |u_i| ≤ (|t| + |constant|)/|w| in a cell. The other channels are
        taken as large as they get (`_sizes_along`).
        """
        rounds, column, reach = self.roundings.heads[number], self.column, self._reach(sizes)
        nothing = np.zeros(len(rounds.score_offsets))
        lost = up(rounds.score_underflow * (1 + reach.sum()) ** 2, 8)
        errors = np.concatenate([rounds.score_slopes, up(rounds.score_offsets + lost)[:, None]], axis=1)
        crude, fine = _sizes_along(errors, argument, reach), rounds.scores
        if fine is not None:
            own = np.concatenate([fine.own[:, :-1], up(fine.own[:, -1:] + lost[:, None])], axis=1)
            query, own, added = (_sizes_along(rows, argument, reach) for rows in (fine.query, own, fine.sizes))
            fine = ScoreRoundings(query, fine.keys, own, added, fine.num_terms)
        value_sizes = rounds.value_sizes[:, column]
        if rounds.value_size_slopes is not None:
            value_sizes = up(value_sizes + rounds.value_size_slopes[:, column] @ reach, len(sizes) + 1)
        spent = np.array([float(up(rounds.underflow[column] * (1 + reach.sum()), 4))])
        counts = rounds.count, rounds.depth
        return HeadRoundings(crude[:, :1], crude[:, 1], nothing, value_sizes[:, None], None, *counts, spent, fine)


def channels_of(part: ProgramStage, claimed: Mapping[str, object] | None = None) -> dict[int, Channel]:
    """Every output of a stage as a channel, with the heads that write it.

    A channel in `claimed` that no head writes with a value other than 0 gets the heads whose W_O has an entry for it.
    """
    found = {}
    all_rounds = roundings(part, casts_input=False)
    for (stage, outputs), rounds in zip(stages(part), all_rounds, strict=True):
        for column, output in enumerate(outputs.tolist()):
            name = part.outputs[output]
            numbers = [number for number, head in enumerate(rounds.heads) if _writes(head, column)]
            if not numbers and claimed is not None and name in claimed:
                numbers = part.silent_writers(name, len(stage.heads))
            found[output] = Channel(name, stage, rounds, tuple(numbers), column)
    return found


def joined(lines: Sequence[HeadLine]) -> HeadLine:
    """Lines with equal values as one: its scores and its roundings have room for all of them."""
    if len(lines) == 1:
        return lines[0]
    heads = tuple(map(_joined_head, zip(*(line.heads for line in lines), strict=True)))
    rounds = tuple(map(_joined_roundings, zip(*(line.roundings for line in lines), strict=True)))
    unsure, beside, peak = (max(sizes) for sizes in zip(*((x.unsure, x.beside, x.peak) for x in lines), strict=True))
    return HeadLine(heads, unsure, rounds, beside, peak, lines[0].dtype)


def _joined_head(lines: Sequence[SoftHead[Enclosed]]) -> SoftHead[Enclosed]:
    kappas = np.array([line.slopes.mid[:, 0] for line in lines])
    offsets = np.array([line.offsets.mid for line in lines])
    radii = np.array([line.offsets.radius for line in lines])
    off = up(np.abs(kappas - kappas[0]).max(axis=0))
    return SoftHead(
        Enclosed(kappas[0][:, None], off[:, None]),
        Enclosed(offsets[0], up((np.abs(offsets - offsets[0]) + radii).max(axis=0), 2)),
        lines[0].values,
        lines[0].carried,
    )


def _joined_roundings(found: Sequence[HeadRoundings]) -> HeadRoundings:
    """The largest roundings of all, key by key; in detail only where the keys are the same."""
    fine = [flat.scores for flat in found if flat.scores is not None]
    scores = None
    if len(fine) == len(found) and all(np.array_equal(each.keys, fine[0].keys) for each in fine):
        query, own, sizes = (
            np.max([getattr(each, name) for each in fine], axis=0) for name in ("query", "own", "sizes")
        )
        scores = ScoreRoundings(query, fine[0].keys, own, sizes, max(each.num_terms for each in fine))
    return HeadRoundings(
        np.max([flat.score_slopes for flat in found], axis=0),
        np.max([flat.score_offsets for flat in found], axis=0),
        np.max([flat.score_underflow for flat in found], axis=0),
        np.max([flat.value_sizes for flat in found], axis=0),
        None,
        max(flat.count for flat in found),
        max(flat.depth for flat in found),
        np.max([flat.underflow for flat in found], axis=0),
        scores,
    )


def read_out_size(
    row: Float[np.ndarray, " channels"], offset: float, sizes: Float[np.ndarray, " channels"], dtype: np.dtype
) -> float:
    """The sum of the absolute values of the terms of row·u + offset for |u| ≤ sizes: rounding is measured on it.

    Each product that may underflow adds the smallest normal number, to coefficients too, as engines fold these.
    """
    lost = float(np.finfo(dtype).smallest_normal) * np.count_nonzero(~np.isin(np.abs(row), (0.0, 1.0)))
    return float((np.abs(row) + lost * (row != 0)) @ sizes + abs(offset) + lost)


def ratios(
    slopes: Float[np.ndarray, "keys channels"],
    offsets: Float[np.ndarray, " keys"],
    form: StateForm,
    sizes: Float[np.ndarray, " channels"],
    with_constant: bool = False,
) -> Float[np.ndarray, " keys"]:
    """κ with slopes ≈ κ·weights, read off the channel that moves the form most.

    If none moves it, κ is 0, or with `with_constant` the ratio of the offsets to the constant.
    """
    weights = form.weights
    main = int(np.argmax(np.abs(weights) * sizes))
    with np.errstate(over="ignore"):
        if weights[main] != 0 and sizes[main] * abs(weights[main]) > 0:
            kappa = slopes[:, main] / weights[main]
        elif with_constant and form.constant:
            kappa = offsets / form.constant
        else:
            kappa = np.zeros(len(slopes))
        if not np.isfinite(kappa).all() or not np.isfinite(np.abs(kappa).max(initial=0.0) * np.abs(weights).max()):
            raise ProgramError("scores or values are too large to be those of the combination that is claimed")
    return kappa


def _writes(head: HeadRoundings, column: int) -> bool:
    """Whether a head writes a column, judged by sizes: terms that cancel exactly still round.

    A size of 0 was rounded up to the least float.
    """
    parts = (head.value_sizes, *(() if head.value_size_slopes is None else (head.value_size_slopes,)))
    return any(bool((part[:, column] > TINIEST).any()) for part in parts)


def _sizes_along(
    rows: Float[np.ndarray, "rows forms"], argument: StateForm, reach: Float[np.ndarray, " channels"]
) -> Float[np.ndarray, "rows two"]:
    """Forms of (|u|, 1) as forms of (|t|, 1) that are no smaller on any state."""
    slopes, elsewhere = np.zeros(len(rows)), reach.copy()
    (read,) = np.nonzero(argument.weights)
    if len(read) == 1:
        (place,) = read
        slopes = up(rows[:, place] / abs(argument.weights[place]), 2)
        elsewhere[place] = 0.0
    constants = rows[:, :-1] @ elsewhere + rows[:, -1] + slopes * abs(argument.constant)
    return np.stack([slopes, up(constants, len(reach) + 4)], axis=1)


def _times(size: float, values: Enclosed, unsure: float) -> Enclosed:
    """size·values, each known to `unsure` besides."""
    mid = size * values.mid
    return Enclosed(mid, up(size * values.radius + U * np.abs(mid) + unsure, 4))


def _divided(
    slopes: Float[np.ndarray, "keys channels"],
    radius: Float[np.ndarray, "keys channels"],
    offsets: Enclosed,
    form: StateForm,
    sizes: Float[np.ndarray, " channels"],
    with_constant: bool = False,
) -> tuple[np.ndarray, Enclosed, np.ndarray]:
    """κ with slopes ≈ κ·weights, the rest of the offsets, and a bound of the rest of the slopes over all states.

    With `with_constant` the offsets are to be κ·constant, and their rest counts to that bound, too.
    """
    weights, kappa = form.weights, ratios(slopes, offsets.mid, form, sizes, with_constant)
    products = kappa[:, None] * weights
    is_easy = np.isin(np.frexp(np.abs(weights))[0], (0.0, 0.5))  # a power of two: the product is exact
    rounding = np.where(is_easy, 0.0, 2 * U * np.abs(products)) + np.where(weights == 0, 0.0, TINIEST)
    gaps = np.abs(slopes - products)
    left = up(gaps * (1 + 4 * U) + rounding + radius, 2)
    differs = up(left @ sizes, len(sizes) + 1)
    shift = kappa * form.constant
    mid = offsets.mid - shift
    loose = 0.0 if form.constant == 0 else 2 * U * (np.abs(shift) + np.abs(mid)) + 2 * TINIEST
    kept = Enclosed(mid, np.asarray(up(offsets.radius + loose, 2)) if form.constant else offsets.radius)
    if with_constant:
        differs = up(differs + np.abs(mid) + kept.radius, 2)
    return kappa, kept, differs
