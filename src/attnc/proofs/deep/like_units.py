"""Units whose heads are, but for rounding, the same function of one number: proved at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.bound import Term
from attnc.numerics.rounding import UNIT_ROUNDOFF, up
from attnc.proofs.cells.branching import Covering
from attnc.proofs.rounding.program import HeadRoundings, ScoreRoundings

if TYPE_CHECKING:
    from jaxtyping import Float

U = UNIT_ROUNDOFF["float64"]
TOLERANCE = 2e-3
"""Of the least bound there is: as close as the theorem is, by which anchors were counted out."""
SPARE = 2.0**-22
"""By which errors of inputs are taken larger, relatively, and as a square ranges: no checker, whose roundings are other
ones, has to agree in the last digits."""
MORE_ROUNDING = 1.25
"""Rounding is claimed to be so much larger: a checker may count it in another way."""


@dataclass(frozen=True, eq=False)
class UnitsProof:
    """|A(t) − function(t)| ≤ bound for t in the proof's box, the function `held`: what the heads of these units are."""

    function: str
    held: tuple[float, float] | None
    bound: float  # rounding included
    proof: Covering
    units: tuple[Mapping[str, Any], ...]  # each with a t of its own

    def as_json(self) -> list[dict[str, Any]]:
        """The first unit with the leaves, and those that are like it."""
        first, *others = self.units
        claim = {
            "function": self.function,
            "carrier": None,
            "interval": [float(self.proof.box.lo[0]), float(self.proof.box.hi[0])],
            "held": None if self.held is None else list(self.held),
            "bound": self.bound,
            "leaves": [leaf.as_json() for leaf in self.proof.leaves],
        }
        return [{**first, **claim}, *({**unit, "like": first["name"]} for unit in others)]


@dataclass(frozen=True, eq=False)
class NetworkProof:
    """sup |target − program| ≤ bound: the deviations of all units, carried to the outputs."""

    bound: float
    terms: tuple[Term, ...]
    units: tuple[UnitsProof, ...]
    outputs: tuple[str, ...]  # in the names of the units

    @property
    def complete(self) -> bool:
        return all(units.proof.complete for units in self.units)

    def as_json(self) -> tuple[dict[str, Any], ...]:
        return tuple(unit for units in self.units for unit in units.as_json())


def joined_line(lines: Sequence[SoftHead[Enclosed]], gain: Float[np.ndarray, " units"]) -> SoftHead[Enclosed]:
    """A head of t = gain·z for every unit, whose lines are heads of z, with equal values: scores have room for all."""
    kappas = np.array([line.slopes.mid[:, 0] for line in lines]) / gain[:, None]
    offsets = np.array([line.offsets.mid for line in lines])
    radii = np.array([line.offsets.radius for line in lines])
    off = up(np.abs(kappas - kappas[0]).max(axis=0) + 4 * U * np.abs(kappas).max(axis=0), 2)
    return SoftHead(
        Enclosed(kappas[0][:, None], off[:, None]),
        Enclosed(offsets[0], up((np.abs(offsets - offsets[0]) + radii).max(axis=0), 2)),
        lines[0].values,
        lines[0].carried,
    )


def joined_roundings(found: Sequence[HeadRoundings], gain: Float[np.ndarray, " units"]) -> HeadRoundings:
    """The largest of all units, key by key."""
    slopes = [up(flat.score_slopes / each) for flat, each in zip(found, gain, strict=True)]
    return HeadRoundings(
        np.max(slopes, axis=0),
        np.max([flat.score_offsets for flat in found], axis=0),
        np.max([flat.score_underflow for flat in found], axis=0),
        np.max([flat.value_sizes for flat in found], axis=0),
        None,
        max(flat.count for flat in found),
        max(flat.depth for flat in found),
        np.max([flat.underflow for flat in found], axis=0),
        _joined_scores([flat.scores for flat in found], gain),
    )


def _joined_scores(found: Sequence[ScoreRoundings | None], gain: Float[np.ndarray, " units"]) -> ScoreRoundings | None:
    """Forms of (|z|, 1) as ones of (|t|, 1), if the keys of all units are the same."""
    known = [scores for scores in found if scores is not None]
    if len(known) < len(found) or not all(np.array_equal(scores.keys, known[0].keys) for scores in known):
        return None
    units = np.stack([gain, np.ones(len(gain))], axis=1)[:, None]
    query, own, sizes = (
        up(np.array([getattr(scores, name) for scores in known]) / units).max(axis=0)
        for name in ("query", "own", "sizes")
    )
    return ScoreRoundings(query, known[0].keys, own, sizes, max(scores.num_terms for scores in known))


def value_bytes(line: SoftHead[Enclosed]) -> bytes:
    """By which units are told apart."""
    parts = [line.values] if line.carried is None else [line.values, line.carried]
    return b";".join((part.mid + 0.0).tobytes() for part in parts)  # −0 is 0
