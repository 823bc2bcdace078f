"""Taylor leaves: sup |f − stage| over small boxes, from the Taylor polynomials of both sides.

Theorem.  On {c + rτ : τ ∈ [−1, 1]^d} let f = T_f ± R_f, and each head A = v0 + N/D with |N − ν| ≤ R_N, |D − δ| ≤ R_D,
          D ≥ D_lo for polynomials ν, δ of degree m (`taylor.moments`). For every polynomial Q of degree m
              |A − v0 − Q| ≤ (Σ_{|j|≤2m} |(ν − Q·δ)_j| + R_N + ‖Q‖₁ R_D)/D_lo,
          and sup |f − stage| ≤ max |T_f − b − B·x − Σ_h (v0 + Q)| + R_f + the sum of these over the heads.
Proof.    A − v0 − Q = (N − Q·D)/D, and N − Q·D = (ν − Q·δ) + (N − ν) − Q·(D − δ).
Q is the series quotient ν/δ as it is stored, so that the first sum is of rounding and of terms of degree > m.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from attnc.errors import InputError
from attnc.numerics.jet_balls import above
from attnc.numerics.jet_tables import embedding, num_monomials
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.grid_moments import GridMoments
from attnc.proofs.taylor.moments import KeyMoments, Moments
from attnc.proofs.taylor.polynomials import Layout, gamma, layout, quotient, residual
from attnc.proofs.taylor.ranges import SHARP, Goal, largest
from attnc.targets.expressions.taylor import Taylor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_BATCH = 2**22  # coefficients at a time: 32 MB
_CHUNK = 2**19  # numbers in the sums over keys: 4 MB, which stay in the cache


@dataclass(frozen=True, eq=False)
class TaylorBounds:
    """|f − stage| ≤ polynomial + remainder on the box, and ≥ seen − remainder somewhere in it; shapes (boxes, outputs).

    `polynomial` bounds the difference of the Taylor polynomials, the remainder is all else; `rounding`, a part of it,
    is about what smaller boxes would not remove.
    """

    polynomial: Float[np.ndarray, "boxes outputs"]
    remainder: Float[np.ndarray, "boxes outputs"]
    rounding: Float[np.ndarray, "boxes outputs"]
    seen: Float[np.ndarray, "boxes outputs"]

    @property
    def upper(self) -> Float[np.ndarray, "boxes outputs"]:
        total = above(self.polynomial + self.remainder)
        return np.where(np.isnan(total), np.inf, total)


def taylor_enclosures(
    stage: OneStage, f: Taylor, centres: np.ndarray, radii: np.ndarray, order: int, goal: Goal = SHARP
) -> TaylorBounds:
    """Upper bounds of |f − stage| over every box {c + rτ}, for every output, with their parts; ∞ where there is none.

    Bounds are made no sharper than the goal asks for. Boxes that are neighbours should stand next to each other.
    """
    boxes, outputs, count = f.mid.shape
    expected = (len(stage.constant.mid), num_monomials(centres.shape[1], order))
    if (outputs, count) != expected or order < 1:
        raise InputError(
            f"the Taylor polynomials have {outputs} outputs and {count} coefficients; the stage, with order {order} in "
            f"{centres.shape[1]} variables, needs {expected[0]} and {expected[1]}, and an order of 1 at least."
        )
    batch = max(64, _BATCH // (count * outputs))
    known = np.isfinite(f.remainder).any(axis=1)
    polynomial, remainder = np.full((2, boxes, outputs), np.inf)
    rounding, seen = np.zeros((2, boxes, outputs))
    some = np.flatnonzero(known)
    with np.errstate(all="ignore"):
        for start in range(0, len(some), batch):
            rows = some[start : start + batch]
            part = Taylor(f.mid[rows], f.radius[rows], f.remainder[rows])
            found = _enclosures(stage, part, centres[rows], radii[rows], order, goal)
            polynomial[rows], remainder[rows] = found.polynomial, found.remainder
            rounding[rows], seen[rows] = found.rounding, found.seen
    return TaylorBounds(polynomial, remainder, rounding, seen)


def _enclosures(
    stage: OneStage, f: Taylor, centres: np.ndarray, radii: np.ndarray, order: int, goal: Goal
) -> TaylorBounds:
    boxes, outputs, _ = f.mid.shape
    d = centres.shape[1]
    space = layout(d, order)
    difference = np.ascontiguousarray(f.mid.transpose(2, 1, 0))
    size = np.abs(difference).sum(axis=0)  # of all that is added up, for its rounding
    b, slopes = stage.constant, stage.linear
    reach = np.abs(centres) + radii
    rounding = f.radius.sum(axis=2).T + b.radius[:, None] + slopes.radius @ reach.T
    remainder = f.remainder.T
    size += np.abs(b.mid)[:, None] + np.abs(slopes.mid) @ reach.T
    difference[0] -= b.mid[:, None] + slopes.mid @ centres.T
    if order and slopes.mid.any():
        difference[space.degree(1)] -= slopes.mid.T[:, :, None] * radii.T[:, None]

    for head in prepared(stage):
        model = head_model(head, centres, radii, order)
        difference[embedding(tuple(model.axes.tolist()), order, d)] -= model.quotient
        difference[0] -= model.shift
        size += model.size
        remainder = remainder + (model.error - model.rounding)
        rounding = rounding + model.rounding
    # A coefficient is a sum of d products and of fewer than 2H + 3 terms.
    rounding = rounding + gamma(d + 2 * len(stage.heads) + 4) * size
    remainder = above(remainder + rounding)

    flat = difference.reshape(space.count, outputs * boxes)
    polynomial, seen = largest(space, flat, remainder.ravel(), goal)
    return TaylorBounds(polynomial.reshape(outputs, boxes).T, remainder.T, rounding.T, seen.reshape(outputs, boxes).T)


@dataclass(frozen=True, eq=False)
class HeadModel:
    """|A − shift − Q| ≤ error on the cube; Q in the variables `axes`, size = |shift| + ‖Q‖₁; `rounding` ≤ error."""

    axes: np.ndarray
    shift: Float[np.ndarray, "outputs boxes"]
    quotient: Float[np.ndarray, "count outputs boxes"]
    error: Float[np.ndarray, "outputs boxes"]
    rounding: Float[np.ndarray, "outputs boxes"]
    size: Float[np.ndarray, "outputs boxes"]


class Sums(Protocol):
    """A head whose moments can be summed: all keys, or a tensor grid of them."""

    @property
    def axes(self) -> Int[np.ndarray, " active"]: ...

    def numbers(self, space: Layout) -> int: ...

    def moments(self, space: Layout, centres: np.ndarray, radii: np.ndarray) -> Moments: ...


@functools.lru_cache(maxsize=4)
def prepared(stage: OneStage) -> tuple[Sums, ...]:
    """The keys of every head, as a tensor grid where they form one."""
    return tuple(GridMoments.of(keys) or keys for keys in map(KeyMoments.of, stage.heads))


def head_model(head: Sums, centres: np.ndarray, radii: np.ndarray, order: int) -> HeadModel:
    """The Taylor model of one head on every box, in chunks of boxes that stay in the cache."""
    space = layout(len(head.axes), order)
    chunk = max(1, _CHUNK // head.numbers(space))
    with np.errstate(all="ignore"):
        starts = range(0, len(centres), chunk)
        m = Moments.joined([head.moments(space, centres[i : i + chunk], radii[i : i + chunk]) for i in starts])
        q = quotient(space, m.nu, m.delta)
        norm = above(np.abs(q).sum(axis=0))
        error = (residual(space, q, m.delta) + m.nu_error + norm * m.delta_error) / m.least
        error = np.where((m.least > 0) & (error >= 0), above(error), np.inf)
        rounding = np.where(error < np.inf, np.minimum(m.rounding / m.least, error), 0.0)
    return HeadModel(head.axes, m.shift, np.where(np.isfinite(q), q, 0.0), error, rounding, np.abs(m.shift) + norm)
