"""A head of a stage as a function of one number t, an affine combination of the state; and how it rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.rounding import TINIEST, UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import Covering
from attnc.proofs.deep.rounded_leaves import rounded_leaves
from attnc.proofs.rounding.program import HeadRoundings, Roundings, ScoreRoundings
from attnc.proofs.rounding.stage import rounding_bounds
from attnc.proofs.stages.one_stage import OneStage

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, eq=False)
class StateForm:
    """T(u) = Σ weight_i·u_i + constant in floats; a part is within `slack` of T at the exact state u."""

    weights: Float[np.ndarray, " channels"]
    constant: float
    slack: float


def writes(head: HeadRoundings, column: int) -> bool:
    """By sizes: what cancels exactly still rounds. A size of 0 was rounded up to the least float."""
    parts = (head.value_sizes, *(() if head.value_size_slopes is None else (head.value_size_slopes,)))
    return any(bool((part[:, column] > TINIEST).any()) for part in parts)


def read_out_size(
    row: Float[np.ndarray, " channels"], offset: float, sizes: Float[np.ndarray, " channels"], dtype: np.dtype
) -> float:
    """Of row·u + offset, |u| ≤ sizes, all terms in absolute value: on that rounding is measured.

    Each product that may underflow adds the smallest normal number, to coefficients too, as engines fold these.
    """
    lost = float(np.finfo(dtype).smallest_normal) * np.count_nonzero(~np.isin(np.abs(row), (0.0, 1.0)))
    return float((np.abs(row) + lost * (row != 0)) @ sizes + abs(offset) + lost)


@dataclass(frozen=True, eq=False)
class Writer:
    """The head of a stage that writes one channel."""

    stage: OneStage
    roundings: Roundings
    number: int
    column: int

    @property
    def head(self) -> SoftHead[Enclosed]:
        return self.stage.heads[self.number]

    def require_alone(self, name: str) -> None:
        affine = (self.stage.linear, self.stage.constant)
        if any(part[self.column].any() for array in affine for part in (array.mid, array.radius)):
            raise ProgramError(f"{name} is not made by its head alone")

    def along(
        self, argument: StateForm, carrier: StateForm | None, sizes: Float[np.ndarray, " channels"]
    ) -> tuple[SoftHead[Enclosed], float]:
        """The head as a function of t = T(u) alone, and how far its values may be from what is claimed of them.

        Scores a_k·u + c_k are κ_k·T(u) + c_k − κ_k·constant, up to Σ_i |a_ki − κ_k weight_i|·|u_i|, which is put into
        the radius of an offset. Values are ν_k·carrier(u), or constants, or affine in t.
        """
        head, column = self.head, self.column
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

    def rounding(
        self,
        line: SoftHead[Enclosed],
        argument: StateForm,
        unsure: float,
        size: float,
        sizes: Float[np.ndarray, " channels"],
        proof: Covering,
    ) -> tuple[float, Covering]:
        """Of the stage in this channel, over all t and all states; and the proof by leaves on which it is found."""
        flat, peak = self.flat_roundings(argument, sizes)
        found, proof = line_rounding((line,), (flat,), self.roundings.dtype, unsure, size, peak, proof)
        reach = up(sizes * (1 + 2 * self.roundings.unit), 2)
        whole = self.roundings.sizes[self.column] + self.roundings.size_slopes[self.column] @ reach
        return float(up(found + gamma(self.roundings.count, self.roundings.unit) * whole, 4)), proof

    def fixed_size(self, carrier: StateForm, sizes: Float[np.ndarray, " channels"]) -> float:
        """What the sizes of values do not owe to the carrier, if that is one channel; all of them if it is not.

        Rounding is subadditive in these sizes, and no larger: a carrier that is only a part of its largest leaves that
        part of the rounding, and no more than this.
        """
        rounds, column = self.roundings.heads[self.number], self.column
        reach = up(sizes * (1 + 2 * self.roundings.unit), 2)
        (read,), elsewhere = np.nonzero(carrier.weights), reach.copy()
        if len(read) == 1 and carrier.constant == 0:
            elsewhere[read] = 0.0
        fixed = rounds.value_sizes[:, column]
        if rounds.value_size_slopes is not None:
            fixed = up(fixed + rounds.value_size_slopes[:, column] @ elsewhere, len(sizes) + 1)
        beside = self.roundings.sizes[column] + self.roundings.size_slopes[column] @ reach
        return float(up(fixed.max() + beside + rounds.underflow[column] * (1 + reach.sum()), len(sizes) + 8))

    def flat_roundings(self, argument: StateForm, sizes: Float[np.ndarray, " channels"]) -> tuple[HeadRoundings, float]:
        """Those of the head as one of t, and the largest number on the way, over all states.

        Where t = w·u_i + constant is of one channel, |u_i| ≤ (|t| + |constant|)/|w| in a cell; other channels are taken
        as large as they get (`_along`).
        """
        rounds, column = self.roundings.heads[self.number], self.column
        reach = up(sizes * (1 + 2 * self.roundings.unit), 2)[None]
        nothing = np.zeros(len(rounds.score_offsets))
        lost = up(rounds.score_underflow * (1 + reach.sum()) ** 2, 8)
        errors = np.concatenate([rounds.score_slopes, up(rounds.score_offsets + lost)[:, None]], axis=1)
        crude, fine = _along(errors, argument, reach[0]), rounds.scores
        if fine is not None:
            own = np.concatenate([fine.own[:, :-1], up(fine.own[:, -1:] + lost[:, None])], axis=1)
            query, own, added = (_along(rows, argument, reach[0]) for rows in (fine.query, own, fine.sizes))
            fine = ScoreRoundings(query, fine.keys, own, added, fine.num_terms)
        value_sizes = rounds.value_sizes[:, column]
        if rounds.value_size_slopes is not None:
            value_sizes = up(value_sizes + rounds.value_size_slopes[:, column] @ reach[0], len(sizes) + 1)
        spent = float(up(rounds.underflow[column] * (1 + reach.sum()), 4))
        flat = HeadRoundings(
            crude[:, :1],
            crude[:, 1],
            nothing,
            value_sizes[:, None],
            None,
            rounds.count,
            rounds.depth,
            np.array([spent]),
            fine,
        )
        return flat, float(up(self.roundings.peak * (1 + reach.sum()) ** 2, 8))


def _along(
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


def line_rounding(
    lines: tuple[SoftHead[Enclosed], ...],
    rounds: tuple[HeadRoundings, ...],
    dtype: str,
    unsure: float,
    size: float,
    peak: float,
    proof: Covering,
) -> tuple[float, Covering]:
    """Of heads as ones of t, their values times `size` and known to `unsure`, over all leaves of a proof."""
    heads = []
    for line in lines:
        scaled = None if line.carried is None else _times(size, line.carried, 0.0)
        heads.append(SoftHead(line.slopes, line.offsets, _times(size, line.values, unsure), scaled))
    stage = OneStage(tuple(heads), Enclosed(np.zeros(1), np.zeros(1)), Enclosed(np.zeros((1, 1)), np.zeros((1, 1))))
    underflow = max(float(head.underflow[0]) for head in rounds)
    own = Roundings(dtype, rounds, np.zeros(1), np.zeros((1, 1)), 0, underflow, peak)
    return rounded_leaves(lambda *cells: rounding_bounds(stage, own, *cells)[:, 0], proof)


def _times(size: float, values: Enclosed, unsure: float) -> Enclosed:
    """size·values, each known to `unsure` besides."""
    mid = size * values.mid
    return Enclosed(mid, up(size * values.radius + U * np.abs(mid) + unsure, 4))


def _divided(
    slopes: Float[np.ndarray, "keys channels"],
    radius: Float[np.ndarray, "keys channels"],
    offsets: Enclosed,
    affine: StateForm,
    sizes: Float[np.ndarray, " channels"],
    with_constant: bool = False,
) -> tuple[np.ndarray, Enclosed, np.ndarray]:
    """κ with slopes ≈ κ·weights, what is left of the offsets, and a bound of what differs, over all states.

    With `with_constant` the offsets are to be κ·constant, and what is left of them differs, too.
    """
    weights = affine.weights
    main = int(np.argmax(np.abs(weights) * sizes))
    with np.errstate(over="ignore"):
        if weights[main] != 0 and sizes[main] * abs(weights[main]) > 0:
            kappa = slopes[:, main] / weights[main]
        elif with_constant and affine.constant:
            kappa = offsets.mid / affine.constant
        else:
            kappa = np.zeros(len(slopes))
        if not np.isfinite(kappa).all() or not np.isfinite(np.abs(kappa).max(initial=0.0) * np.abs(weights).max()):
            raise ProgramError("scores or values are too large to be those of the combination that is claimed")
    products = kappa[:, None] * weights
    is_easy = np.isin(np.frexp(np.abs(weights))[0], (0.0, 0.5))  # a power of two: the product is exact
    rounding = np.where(is_easy, 0.0, 2 * U * np.abs(products)) + np.where(weights == 0, 0.0, TINIEST)
    gaps = np.abs(slopes - products)
    left = up(gaps * (1 + 4 * U) + rounding + radius, 2)
    differs = up(left @ sizes, len(sizes) + 1)
    shift = kappa * affine.constant
    mid = offsets.mid - shift
    loose = 0.0 if affine.constant == 0 else 2 * U * (np.abs(shift) + np.abs(mid)) + 2 * TINIEST
    kept = Enclosed(mid, np.asarray(up(offsets.radius + loose, 2)) if affine.constant else offsets.radius)
    if with_constant:
        differs = up(differs + np.abs(mid) + kept.radius, 2)
    return kappa, kept, differs
