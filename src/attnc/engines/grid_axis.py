"""One axis of a grid of anchors: its softmax over a window of anchors, and the weight of the anchors left out.

Weights on one axis are ∝ exp(a_k·t + c_k), k < p, with slopes a_k in ascending order. Neighbours k and k+1 have
equal scores at the edge e_k = −(c_{k+1} − c_k)/(a_{k+1} − a_k). Where edges ascend, anchor m has the largest
score for t between e_{m−1} and e_m, and

    (a_k t + c_k) − (a_m t + c_m) = Σ_{j=m}^{k−1} (a_{j+1} − a_j)(t − e_j)      for k > m, and likewise for k < m.

With gaps of slopes ≥ Δ, gaps of edges ≥ h and t ≤ e_m + σ, the score of the n-th anchor beyond m is lower by at least
Δ(n−1)(nh/2 − σ) − Δ_max σ. This is a Gaussian tail, summed in `_Tail`. So a group of a few neighbouring anchors shares
one window, which has w more anchors on either side. All anchors outside it weigh less than the tail. If the edges are
not equally spaced (to h/128), the whole axis is one window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from attnc.numerics.arrays import Float, Int
from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, compensated_sum, halves, product_and_error, up

TAIL = 1e-13
"""Largest Σ|weight in the window − weight| over all axes of a head. It is a tenth of the truncation that a grid may
have."""
POWERS = 3e-13
"""Largest Σ|weight − exact weight| over all axes that powers in place of exponentials may cause. Together with the
tails it stays below the truncation that a grid may have."""
LARGEST_POWER_LOG = 200.0
"""Largest |log E^j| over all axes. Weights before normalisation are then far from overflow and underflow."""
BEYOND_ENDS = 40.0
"""Tables extend beyond the lattice until the score of the end anchor leads by this much. Farther points are treated as
if they were there, which changes their weights by e⁻⁴⁰."""
GROUPS_PER_BLOCK = 2**14
"""Number of groups of a table that are made together. The temporary arrays are ten times as large as the table."""
LEAST_EXPONENT = -50.0
"""Smallest exponent relative to the largest. Smaller ones are raised to it, so that no product of such weights
underflows."""

U = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, eq=False)
class WindowedAxis:
    """One axis: a point t belongs to group ⌊y⌋, where y is (t − origin)·inverse clipped to [first, last].

    The window of a group begins at `starts[group]` and has `width` places. Anchors are at the places front … front + p
    − 1 of `padded`. The other places have no weight. With a `table` the weight of place j in a window is table[group,
    j]·E^j, E = exp(kappa·(y − ⌊y⌋ − ½)). Without a table it is exp(slopes·t + offsets) divided by the largest such
    number. `error` bounds Σ|weight − exact weight|, both normalised.
    """

    slopes: Float[np.ndarray, " padded"]
    offsets: Float[np.ndarray, " padded"]
    front: int
    width: int
    origin: float
    inverse: float
    first: int
    last: int
    starts: Int[np.ndarray, " groups"]
    table: Float[np.ndarray, "groups width"] | None
    kappa: float
    error: float

    @property
    def padded(self) -> int:
        return len(self.slopes)

    @property
    def num_groups(self) -> int:
        return self.last - self.first


def make_axis(
    slopes: Float[np.ndarray, " p"], offsets: Float[np.ndarray, " p"], num_axes: int, growth: float = 1.0
) -> WindowedAxis:
    """Return the axis with these ascending slopes, one of `num_axes` of a grid that multiplies errors by `growth`."""
    with np.errstate(over="ignore", invalid="ignore"):  # edges that are not finite do not count as even
        edges = -np.diff(offsets) / np.diff(slopes)
    even = _EvenEdges.of(slopes, edges, TAIL / (2 * num_axes * growth))
    if even is None:
        width = len(slopes)
        error = float(up(2 * width * math.exp(LEAST_EXPONENT), 4))
        return WindowedAxis(slopes, offsets, 0, width, 0.0, 0.0, 0, 1, np.zeros(1, np.int64), None, 0.0, error)
    direct = even.axis(offsets)
    return even.with_powers(direct, offsets, num_axes, growth) or direct


@dataclass(frozen=True, eq=False)
class _EvenEdges:
    """Edges that are h apart, to within h/128.

    Groups are counted from the edge nearest 0. There t − origin costs no more than a relative rounding of t and of h.
    """

    slopes: Float[np.ndarray, " p"]
    edges: Float[np.ndarray, " p_minus_1"]
    h: float
    w: int
    group: int
    tail: float

    @classmethod
    def of(cls, slopes: np.ndarray, edges: np.ndarray, tail: float) -> _EvenEdges | None:
        p = len(slopes)
        if p < 3 or not np.isfinite(edges).all():
            return None
        h = float(edges[-1] - edges[0]) / (p - 2)
        # There are fewer than 32 roundings in the edges and in (t − origin)/h for t next to an edge.
        misfit = np.abs(edges - (edges[0] + h * np.arange(p - 1))).max() + 32 * U * np.abs(edges).max()
        if not (h > 0 and misfit <= h / 128 and math.isfinite(4 / h)):
            return None
        gaps = np.diff(slopes)
        # The error of an edge counted from the origin is the misfit of the origin plus its own.
        tails = _Tail(float(gaps.min()), float(gaps.max()), h - 2 * misfit, 2 * misfit)
        if not (tails.most * h < 1e300 and tails(p) <= tail):
            return None
        w = tails.reach(tail)
        group = 4 if w >= 4 else 2
        return cls(slopes, edges, h, w, group, tails(w)) if 2 * w + group < p else None

    def axis(self, offsets: Float[np.ndarray, " p"]) -> WindowedAxis:
        p, width = len(self.slopes), 2 * self.w + self.group
        middle = int(np.abs(self.edges).argmin())  # between anchors `middle` and `middle` + 1
        before, after = -(-(middle + 1) // self.group), (p - middle - 2) // self.group + 1
        front = self.w + before * self.group - (middle + 1)
        starts = self.group * np.arange(before + after)
        # Places without an anchor have the lowest offset, so that they weigh nothing.
        around = (front, int(starts[-1]) + width - front - p)
        slopes = np.pad(self.slopes, around)
        offsets = np.pad(offsets, around, constant_values=-np.finfo(np.float64).max / 4)
        inverse = 1 / (self.group * self.h)
        error = float(up(2 * self.tail + 2 * width * math.exp(LEAST_EXPONENT), 8))
        return WindowedAxis(
            slopes, offsets, front, width, float(self.edges[middle]), inverse, -before, after, starts, None, 0.0, error
        )

    def with_powers(
        self, axis: WindowedAxis, offsets: Float[np.ndarray, " p"], num_axes: int, growth: float
    ) -> WindowedAxis | None:
        """Return the axis with a table.

        Return None unless slopes are equally spaced, and powers are accurate and in range.

        E has a relative error e^{±ε}, ε = 2·LIBM_ULPS·u + 3u·kappa/2. So the error of E^j, once normalised, is
        (width/2)·ε plus its own roundings. Slopes that miss the spacing by ρ_k change a score by at most ρ_k times half
        a group. The rounding of t and of the middle of its group is a relative rounding of t, and 2u of a group. If
        weights change by factors e^{±θ}, the sum of |changes| is at most 2·tanh(θ/2) ≤ θ.
        """
        p, width, step = len(self.slopes), axis.width, self.group * self.h
        spacing = float(self.slopes[-1] - self.slopes[0]) / (p - 1)
        kappa = spacing * step
        reach = kappa / 2 * (width - 1)
        sizes = (np.abs(part).max() for part in (self.slopes, offsets, self.edges))
        if reach > LARGEST_POWER_LOG / num_axes or max(sizes) > 1e100:  # products of halves stay in range
            return None
        high, low = halves(np.asarray(spacing))
        k = np.arange(float(p))
        off, _ = compensated_sum(self.slopes, -self.slopes[0] * np.ones(p), -high * k, -low * k)
        theta = width / 2 * (2 * LIBM_ULPS + 3 * kappa / 2 + 3 * kappa) * U + (width + 2 * LIBM_ULPS + 4) * U
        theta += float(np.ptp(off)) / 2 * (step / 2) * (1 + 1e-9)
        if self.edges[0] > 0 or self.edges[-1] < 0:  # between 0 and the lattice, t − origin is larger than t
            theta += 8 * U * BEYOND_ENDS * width
        theta += 2 * width * math.exp(LEAST_EXPONENT) + 4 * math.exp(-BEYOND_ENDS)
        if theta > POWERS / (num_axes * growth):
            return None
        beyond = math.ceil(BEYOND_ENDS / kappa) + 1
        groups = np.arange(axis.first - beyond, axis.last + beyond)
        starts = axis.starts[np.clip(groups - axis.first, 0, axis.num_groups - 1)]
        middles, first = axis.origin + (groups + 0.5) * step, starts - axis.front
        blocks = [slice(i, i + GROUPS_PER_BLOCK) for i in range(0, len(groups), GROUPS_PER_BLOCK)]
        table = [self._table(offsets, middles[b], first[b], width, 2 * reach - LEAST_EXPONENT) for b in blocks]
        error = float(up(axis.error + theta, 8))
        return replace(
            axis,
            first=int(groups[0]),
            last=int(groups[-1]) + 1,
            starts=starts,
            table=np.concatenate(table),
            kappa=kappa,
            error=error,
        )

    def _table(
        self, offsets: np.ndarray, t: np.ndarray, starts: np.ndarray, width: int, depth: float
    ) -> Float[np.ndarray, "groups width"]:
        """Return exp(score − largest) at t of the anchors from `starts` on; 0 below e^−depth or without an anchor."""
        places = starts[:, None] + np.arange(width)
        is_anchor = (places >= 0) & (places < len(offsets))
        places = np.clip(places, 0, len(offsets) - 1)
        product, rest = product_and_error(self.slopes[places], t[:, None])
        parts = (product, offsets[places], rest)
        top = np.where(is_anchor, product + offsets[places], -np.inf).argmax(axis=1)[:, None]
        exponents, _ = compensated_sum(*parts, *(-np.take_along_axis(part, top, axis=1) for part in parts))
        is_kept = is_anchor & (exponents > -depth)
        return np.where(is_kept, np.exp(np.where(is_kept, exponents, 0.0)), 0.0)


@dataclass(frozen=True)
class _Tail:
    """A bound of the weight of all anchors more than w places beyond either end of a group, relative to the top one."""

    least: float  # Δ
    most: float  # Δ_max
    h: float
    sigma: float

    def __call__(self, w: int) -> float:
        n, least = w + 1, self.least * (1 - 1e-12)
        exponent = self.most * self.sigma - least * (n - 1) * (n * self.h / 2 - self.sigma)
        ratio = math.exp(-least * (n * self.h - self.sigma))  # of one term to the next; later ones are smaller
        return float(up(2 * math.exp(min(700.0, max(-700.0, exponent))) / (1 - ratio), 64)) if ratio < 1 else math.inf

    def reach(self, tail: float) -> int:
        """Return the smallest w whose tail is at most `tail`."""
        w = math.ceil(math.sqrt(math.log(4 / tail) / (self.least * self.h / 2))) + 1
        while self(w) > tail:
            w *= 2
        while w > 1 and self(w - 1) <= tail:
            w -= 1
        return w
