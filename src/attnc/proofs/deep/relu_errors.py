"""The errors of the units of a ReLU network as affine forms, carried to its outputs: see `relu_prover`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.deep.head_lines import StateForm, read_out_size
from attnc.proofs.stages.extraction import ReadOut
from attnc.targets.linear import affine_text, exact_text

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, eq=False)
class Units:
    """Units h ≥ 0 of a layer as the state holds them: v = gain·h + shift, and ĥ is within `error` of h."""

    names: tuple[str, ...]  # of v
    gain: Float[np.ndarray, " units"]
    shift: Float[np.ndarray, " units"]
    largest: Float[np.ndarray, " units"]  # |h| at most
    error: Float[np.ndarray, " units"]
    own: Float[np.ndarray, " units"]  # the part of the error that is of the unit itself
    rounding: Float[np.ndarray, " units"]  # the part of `own` that is rounding

    @property
    def sizes(self) -> Float[np.ndarray, " units"]:
        """|v̂| at most."""
        return up(np.abs(self.gain) * up(self.largest + self.error) * (1 + 8 * U) + np.abs(self.shift), 4)

    def text(self, W: Float[np.ndarray, " units"], b: float) -> str:
        """W·h + b in the names of v, exactly."""
        units = [
            name if gain == 1 and shift == 0 else f"({name} - {exact_text(shift)})/({exact_text(gain)})"
            for name, gain, shift in zip(self.names, self.gain.tolist(), self.shift.tolist(), strict=True)
        ]
        return affine_text(W, [unit.replace("- -", "+ ") for unit in units], b)

    def form(self, W: Float[np.ndarray, " units"], b: float) -> StateForm:
        """W·h + b as a combination of v."""
        weights = W / self.gain
        moved = weights * self.shift
        constant = float(b - moved.sum())
        n = len(W) + 8
        slack = 8 * U * (np.abs(weights) @ self.sizes) + gamma(n, U) * (np.abs(moved).sum() + abs(b))
        return StateForm(weights, constant, float(up(slack * (1 + n * U), 4)))


def layer_term(number: int) -> str:
    """The name that a hidden layer has in the ledger, counted from 1."""
    return f"hidden layer {number}"


def unit_slopes(pre: Interval, error: np.ndarray, limits: np.ndarray) -> Interval:
    """σ of every unit on every part of the box: 0 or 1 where z, with its error, is on one side."""
    is_on = (pre.lo - error >= 0) & (pre.hi + error <= limits)
    is_off = pre.hi + error <= 0
    return Interval(np.where(is_on, 1.0, 0.0), np.where(is_off, 0.0, 1.0))


def sensitivities_of(weights: Sequence[np.ndarray], slopes: Sequence[Interval], boxes: int) -> list[np.ndarray]:
    """|∂ output / ∂ unit| at most, (boxes, outputs, units), for the inputs and every hidden layer."""
    last = np.broadcast_to(weights[-1], (boxes, *weights[-1].shape))
    lo, hi = last, last
    found = [np.maximum(np.abs(lo), np.abs(hi))]
    for W, slope in zip(reversed(weights[:-1]), reversed(slopes), strict=True):
        on, off = slope.lo[:, None], slope.hi[:, None]
        lo, hi = np.minimum(lo * on, lo * off), np.maximum(hi * on, hi * off)
        positive, negative = np.maximum(W, 0.0), np.minimum(W, 0.0)
        size = np.maximum(np.abs(lo), np.abs(hi)) @ np.abs(W)
        slack = gamma(2 * len(W) + 4, U) * size * (1 + 2.0**-40)
        lo, hi = lo @ positive + hi @ negative - slack, hi @ positive + lo @ negative + slack
        found.append(up(np.maximum(np.abs(lo), np.abs(hi)), 2))
    return found[::-1]


def error_terms(
    sensitivities: Sequence[np.ndarray], units: Sequence[Units], slacks: Sequence[np.ndarray], read_out: np.ndarray
) -> tuple[Term, ...]:
    """What every layer costs, on the part of the box where all of them together cost most."""
    parts = []
    for number, (moved, known) in enumerate(zip(sensitivities, units, strict=True)):
        slack = slacks[number - 1] if number else 0.0
        terms = known.own.size + 4
        parts.append(up(moved @ up(known.own - known.rounding + slack), terms))
        parts.append(up(moved @ known.rounding, terms))
    whole = np.sum(parts, axis=0) + read_out
    worst = np.unravel_index(int(np.argmax(whole)), whole.shape)
    found, rounding = [], float(read_out[worst[1]])
    for number in range(len(units)):
        if number:
            reason = "of its units, as far as they move the output"
            found.append(Term(layer_term(number), float(parts[2 * number][worst]), reason))
        else:
            rounding += float(parts[0][worst])
        rounding += float(parts[2 * number + 1][worst])
    return (*found, Term("rounding", float(up(rounding, 8)), "of the engine, in all layers"))


def read_out_error(read: ReadOut, known: Units, W: np.ndarray, b: np.ndarray) -> Float[np.ndarray, " outputs"]:
    """What the stored read-out differs by from W·h + b, and rounds."""
    found, sizes, unit = [], known.sizes, UNIT_ROUNDOFF[str(read.dtype)]
    for row, offset, wanted, wanted_offset in zip(read.rows, read.constants, W, b, strict=True):
        form = known.form(wanted, float(wanted_offset))
        differs = np.abs(row - form.weights) @ sizes + abs(offset - form.constant) + form.slack
        size = read_out_size(row, float(offset), sizes, read.dtype)
        found.append(up(differs * (1 + 4 * len(row) * U) + gamma(len(row) + 2, unit) * size, 8))
    return np.array(found)
