"""Output positions: a score bonus separates them in one head, and the stored values undo the leak between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnc.constructions.fitting.selection import CellSelection, average_error, round_up, underflow
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound, Term
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.target import Target


@dataclass(frozen=True)
class Positions:
    """n output positions, separated by a score bonus of M; a = e^M − 1.

    The weights of a query at position i over the positions of the keys are row i of C = (aI + 11ᵀ)/(a + n). So the
    stored values C⁻¹f return f exactly, for every M > 0.
    """

    n: int
    M: float

    @property
    def a(self) -> float:
        return math.expm1(self.M)

    @property
    def margin(self) -> float:
        return self.M if self.n > 1 else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The channels of the positions; none for a single position."""
        return tuple(f"position.{i}" for i in range(self.n)) if self.n > 1 else ()

    def stored(self, values: Float[np.ndarray, "cells outputs"]) -> Float[np.ndarray, "keys outputs_per_position"]:
        """The values C⁻¹f = ((a+n) f_i − Σ f)/a of the keys (j, i), ordered by cell j and then by position i."""
        f = values.reshape(len(values), self.n, -1)
        if self.n > 1:
            f = f + (self.n * f - f.sum(axis=1, keepdims=True)) / self.a
        return f.reshape(len(values) * self.n, -1)

    def bound(
        self,
        variation: Sequence[Term],
        leak: Term,
        values: Float[np.ndarray, "cells outputs"],
        selection: CellSelection,
        dtype: str,
        volume: float = 1.0,
    ) -> Bound:
        """The ledger: the variation, and, times `volume`, the leak of the selection and the errors of the values."""
        constants = (leak, *self._value_terms(values, selection, dtype))
        return Bound((*variation, *(Term(t.name, round_up(t.value * volume), t.reason) for t in constants)))

    def _value_terms(self, values: np.ndarray, selection: CellSelection, dtype: str) -> Iterator[Term]:
        """The errors of the stored values: the part of the leak between positions that remains, and rounding."""
        stored, delta, near = self.stored(values), selection.delta, selection.near
        largest = float(np.abs(stored).max(initial=0.0))
        cast = float(np.abs(stored - stored.astype(dtype)).max(initial=0.0))
        average = average_error(len(stored), near, selection.leak, UNIT_ROUNDOFF[dtype])
        rounding = average * largest + cast + underflow(len(stored), dtype)
        if self.n > 1:
            by_position = values.reshape(len(values), self.n, -1)
            off, undone = self._residue(by_position, stored.reshape(by_position.shape))
            rounding += undone
            wrong = math.expm1(2 * delta) if delta < 300 else math.inf
            yield Term("position", wrong * off, "weights of other positions, not undone")
        reason = f"{dtype} sums over {len(stored):,} keys in any order, {near} of them near"
        yield Term("rounding", rounding, reason)

    def _residue(self, f: np.ndarray, stored: np.ndarray) -> tuple[float, float]:
        """Return (max Σ_i' C_ii'|stored_i' − f_i|, the rounding of `stored`).

        Without absolute values the sum is 0. If the weights are off by factors e^{±2δ}, the error is at most e^{2δ} − 1
        times the first figure.
        """
        own = float(np.abs(stored - f).max())
        elsewhere = float(max(stored.max() - f.min(), f.max() - stored.min()))
        off = (self.a + 1) / (self.a + self.n) * own + (self.n - 1) / (self.a + self.n) * elsewhere
        return off, 4 * UNIT_ROUNDOFF["float64"] * self.n * float(np.abs(f).max()) * (1 + 1 / self.a)


def num_positions(target: Target) -> int:
    """The number of tokens of the output: n for the shape (n, k), one for (k,) and ()."""
    return target.output_shape[0] if len(target.output_shape) == 2 else 1


def bytes_per_anchor(target: Target) -> int:
    """Bytes per anchor. A non-zero number takes 16 (index and value), and is copied, folded, and copied again."""
    numbers = target.box.d + 1 + target.num_outputs // num_positions(target) + (num_positions(target) > 1)
    return 64 * numbers
