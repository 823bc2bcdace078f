"""Scores s_k(x) = a_k·x + c_k at points, to within a unit roundoff of their distance from the largest.

Scores of hundreds cancel to differences of a few: the relative error of a weight is the absolute error of its score.
So the leading halves of a, x and c are multiplied and added exactly, and the rest, 2²⁵ times smaller, is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.jet_balls import U, above
from attnc.numerics.rounding import up
from attnc.proofs.taylor.polynomials import gamma

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

NEGLIGIBLE = 50.0
"""A key behind by more than this is left out of the sums, and its leak counted: e⁻⁵⁰ is 2·10⁻²²."""


@dataclass(frozen=True, eq=False)
class Gaps:
    """s_k(x) − reference(x) is within u·|gap| + slack of the gap; the reference is near the largest score at x."""

    gaps: Float[np.ndarray, "boxes keys"]
    slack: float


def score_gaps(
    slopes: Float[np.ndarray, "keys d"], offsets: Float[np.ndarray, " keys"], points: Float[np.ndarray, "boxes d"]
) -> Gaps:
    """How far every score is behind the largest, at every point.

    The leading parts a′, x′, c′ are multiples of powers of two q_a, q_x, q, with q_a·q_x = q on every axis, such that
    every partial sum of a′·x′ + c′ is a multiple of q below 2⁵³q: computed exactly, in any order. What remains,
    (a − a′)·x + a′·(x − x′) + (c − c′), is computed with an error of γ_{2d+3} times the sum of its absolute values; of
    slopes of 1e10 it may itself be hundreds. So the reference is the score, as computed, of the key that leads: both
    parts are taken relative to its own, the second with one more rounding.
    """
    d = slopes.shape[1]
    bits = (52 - int(d + 1).bit_length()) // 2  # d + 1 terms below 2^(2·bits)·q, and the roundings of a′ and x′
    slope_unit = _unit(np.abs(slopes).max(axis=0), bits)
    q = max(
        float((slope_unit * _unit(np.abs(points).max(axis=0), bits)).max()),
        float(_unit(np.abs(offsets).max(), 2 * bits)),
    )
    point_unit = q / slope_unit
    a, x, c = _leading(slopes, slope_unit), _leading(points, point_unit), _leading(offsets, np.asarray(q))
    leading = x @ a.T + c
    rest = np.concatenate([points, points - x], axis=1) @ np.concatenate([slopes - a, a], axis=1).T + (offsets - c)
    first = np.argmax(leading + rest, axis=1)[:, None]
    leading -= np.take_along_axis(leading, first, 1)
    rest -= np.take_along_axis(rest, first, 1)
    size = np.abs(points).max(axis=0) @ slope_unit + np.abs(a).max(axis=0) @ point_unit + q
    return Gaps(leading + rest, float(above(gamma(2 * d + 4) * size)))


def _unit(size: np.ndarray, bits: int) -> np.ndarray:
    """A power of two of which `size` is at most 2^bits times as large."""
    exponent = np.frexp(np.where((size > 0) & np.isfinite(size), size, 1.0))[1]
    return np.ldexp(1.0, np.maximum(exponent - bits, -400))


def _leading(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.rint(x / unit) * unit


@dataclass(frozen=True, eq=False)
class Hull:
    """The smallest box around boxes."""

    centre: Float[np.ndarray, " d"]
    reach: Float[np.ndarray, " d"]

    @classmethod
    def of(cls, centres: Float[np.ndarray, "boxes d"], radii: Float[np.ndarray, "boxes d"]) -> Hull:
        lo, hi = -up(radii - centres).max(axis=0), up(centres + radii).max(axis=0)
        centre = 0.5 * lo + 0.5 * hi
        return cls(centre, up(np.maximum(hi - centre, centre - lo)))

    def along(self, axes: Int[np.ndarray, " axes"]) -> Hull:
        """On some of the axes."""
        return Hull(self.centre[axes], self.reach[axes])

    @property
    def magnitude(self) -> Float[np.ndarray, " d"]:
        return up(np.abs(self.centre) + self.reach)


def leaks(
    slopes: Float[np.ndarray, "keys d"],
    offsets: Float[np.ndarray, " keys"],
    unsure: Float[np.ndarray, " keys"],
    hull: Hull,
) -> Float[np.ndarray, " keys"]:
    """Upper bounds of log(w_k/w_*) over the hull, where * is the key that leads at its centre (and has 0).

    Each score is known to within `unsure`.
    """
    scores = slopes @ hull.centre + offsets
    error = gamma(slopes.shape[1] + 1) * (np.abs(slopes) @ np.abs(hull.centre) + np.abs(offsets)) + unsure
    first = int(np.argmax(scores))
    lag = scores - scores[first]
    lag = up(lag + above(np.abs(slopes - slopes[first]) @ hull.reach + error + error[first] + U * np.abs(lag)))
    lag[first] = 0.0
    return np.where(np.isnan(lag), np.inf, lag)


def is_near(lag: Float[np.ndarray, " keys"]) -> Bool[np.ndarray, " keys"]:
    return np.asarray(lag > -NEGLIGIBLE)
