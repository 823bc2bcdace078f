"""One axis of a grid of anchors: its softmax over a window of anchors, and what that leaves out.

Weights on one axis are ∝ exp(a_k·t + c_k), k < p, with slopes a_k in ascending order. Neighbours k and k+1 are level
at the edge e_k = −(c_{k+1} − c_k)/(a_{k+1} − a_k). Where edges ascend, anchor m is on top for t between e_{m−1} and
e_m, and

    (a_k t + c_k) − (a_m t + c_m) = Σ_{j=m}^{k−1} (a_{j+1} − a_j)(t − e_j)      for k > m, and alike for k < m.

With gaps of slopes ≥ Δ, gaps of edges ≥ h and t ≤ e_m + σ, the n-th anchor beyond m is behind by at least
Δ(n−1)(nh/2 − σ) − Δ_max σ: a Gaussian tail, summed in `_Tail`. So a group of a few anchors that are on top next to each
other share a window of w anchors more on either side, and whatever lies outside it weighs less than the tail. Edges
that are not equally spaced (to h/128) get one window, the whole axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.rounding import LIBM_ULPS, UNIT_ROUNDOFF, up

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TAIL = 1e-13
"""What all windows of a head may leave out: Σ|weight in the window − weight|, over the axes together."""
POWERS = 3e-13
"""Weights are made of powers only if Σ|weight − exact weight| is at most this for that, over the axes together."""
LARGEST_EXPONENT = 200.0
"""The largest |log E^j|, over the axes together: unnormalised weights are far from over- and underflow."""
FAR = 40.0
"""Powers go on beyond the lattice to where the end anchor is ahead by this much; farther points stand still there."""

GROUPS_PER_BLOCK = 2**14
"""Of a table that is made: its arrays in between are ten times as large."""
FLOOR = -50.0
"""Exponentials below e^FLOOR of the largest count as that: none of their products underflows."""

U = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, eq=False)
class Axis:
    """Points t, y = (t − origin)·inverse cut to [first, last], belong to group ⌊y⌋, whose window is `starts[group]`.

    Anchors stand at positions front … front + p − 1 of `padded`; the other positions have no weight. With a `table` the
    weight of place j in a window is table[group, j]·E^j, E = exp(kappa·(y − ⌊y⌋ − ½)); without one it is
    exp(slopes·t + offsets), less the largest. `error` bounds Σ|weight − exact weight|, both normalised.
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
) -> Axis:
    """The axis with these ascending slopes, one of `num_axes` of a grid, which makes errors larger by `growth`."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is no lattice
        edges = -np.diff(offsets) / np.diff(slopes)
    lattice = _Lattice.of(slopes, edges, TAIL / (2 * num_axes * growth))
    if lattice is None:
        width = len(slopes)
        error = float(up(2 * width * math.exp(FLOOR), 4))
        return Axis(slopes, offsets, 0, width, 0.0, 0.0, 0, 1, np.zeros(1, np.int64), None, 0.0, error)
    direct = lattice.axis(offsets)
    return lattice.with_powers(direct, offsets, num_axes, growth) or direct


def _padded(slopes: np.ndarray, offsets: np.ndarray, front: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Places without an anchor are as low as an anchor can be: cut to the floor, they weigh nothing."""
    a, c = np.zeros(size), np.full(size, -np.finfo(np.float64).max / 4)
    a[front : front + len(slopes)], c[front : front + len(slopes)] = slopes, offsets
    return a, c


@dataclass(frozen=True, eq=False)
class _Lattice:
    """Edges h apart, to within h/128. Groups are counted from `origin`, the edge nearest 0: there t − origin costs no
    more than a relative rounding of t, and of h."""

    slopes: Float[np.ndarray, " p"]
    edges: Float[np.ndarray, " p_minus_1"]
    h: float
    w: int
    group: int
    tail: float

    @classmethod
    def of(cls, slopes: np.ndarray, edges: np.ndarray, tail: float) -> _Lattice | None:
        p = len(slopes)
        if p < 3 or not np.isfinite(edges).all():
            return None
        h = float(edges[-1] - edges[0]) / (p - 2)
        # 32 roundings: of edges, and of (t − origin)/h for t next to an edge.
        misfit = np.abs(edges - (edges[0] + h * np.arange(p - 1))).max() + 32 * U * np.abs(edges).max()
        if not (h > 0 and misfit <= h / 128 and math.isfinite(4 / h)):
            return None
        gaps = np.diff(slopes)
        # Edges counted from the origin are off by its misfit and their own.
        tails = _Tail(float(gaps.min()), float(gaps.max()), h - 2 * misfit, 2 * misfit)
        if not (tails.most * h < 1e300 and tails(p) <= tail):
            return None
        w = tails.reach(tail)
        group = 4 if w >= 4 else 2
        return cls(slopes, edges, h, w, group, tails(w)) if 2 * w + group < p else None

    def axis(self, offsets: Float[np.ndarray, " p"]) -> Axis:
        p, width = len(self.slopes), 2 * self.w + self.group
        middle = int(np.abs(self.edges).argmin())  # between anchors `middle` and `middle` + 1
        before, after = -(-(middle + 1) // self.group), (p - middle - 2) // self.group + 1
        front = self.w + before * self.group - (middle + 1)
        starts = self.group * np.arange(before + after)
        padded = _padded(self.slopes, offsets, front, int(starts[-1]) + width)
        inverse = 1 / (self.group * self.h)
        error = float(up(2 * self.tail + 2 * width * math.exp(FLOOR), 8))
        return Axis(*padded, front, width, float(self.edges[middle]), inverse, -before, after, starts, None, 0.0, error)

    def with_powers(self, axis: Axis, offsets: Float[np.ndarray, " p"], num_axes: int, growth: float) -> Axis | None:
        """The axis with a table, if slopes are equally spaced and the powers accurate and in range.

        E is off by a factor e^{±ε}, ε = 2·LIBM_ULPS·u + 3u·kappa/2; so E^j, once normalised, by (width/2)·ε and its own
        roundings. Slopes that miss the spacing by ρ_k are off by ρ_k times half a group. That t and the middle of its
        group are rounded is a relative rounding of t, and 2u of a group. With weights off by factors e^{±θ} the sum of
        |changes| is at most 2·tanh(θ/2) ≤ θ.
        """
        p, width, step = len(self.slopes), axis.width, self.group * self.h
        spacing = float(self.slopes[-1] - self.slopes[0]) / (p - 1)
        kappa = spacing * step
        reach = kappa / 2 * (width - 1)
        sizes = (np.abs(part).max() for part in (self.slopes, offsets, self.edges))
        if reach > LARGEST_EXPONENT / num_axes or max(sizes) > 1e100:  # products of halves stay in range
            return None
        high, low = _halves(np.float64(spacing))
        k = np.arange(float(p))
        off = exact_sum(self.slopes, -self.slopes[0] * np.ones(p), -high * k, -low * k)
        theta = width / 2 * (2 * LIBM_ULPS + 3 * kappa / 2 + 3 * kappa) * U + (width + 2 * LIBM_ULPS + 4) * U
        theta += float(np.ptp(off)) / 2 * (step / 2) * (1 + 1e-9)
        if self.edges[0] > 0 or self.edges[-1] < 0:  # between 0 and the lattice, t − origin is larger than t
            theta += 8 * U * FAR * width
        theta += 2 * width * math.exp(FLOOR) + 4 * math.exp(-FAR)
        if theta > POWERS / (num_axes * growth):
            return None
        beyond = math.ceil(FAR / kappa) + 1
        groups = np.arange(axis.first - beyond, axis.last + beyond)
        starts = axis.starts[np.clip(groups - axis.first, 0, axis.num_groups - 1)]
        middles, first = axis.origin + (groups + 0.5) * step, starts - axis.front
        blocks = [slice(i, i + GROUPS_PER_BLOCK) for i in range(0, len(groups), GROUPS_PER_BLOCK)]
        table = [self._table(offsets, middles[b], first[b], width, 2 * reach - FLOOR) for b in blocks]
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
        """exp(score − the largest) at t of the anchors from starts on; 0 below e^−depth, and where no anchor is."""
        places = starts[:, None] + np.arange(width)
        is_anchor = (places >= 0) & (places < len(offsets))
        places = np.clip(places, 0, len(offsets) - 1)
        product, rest = exact_product(self.slopes[places], t[:, None])
        parts = (product, offsets[places], rest)
        top = np.where(is_anchor, product + offsets[places], -np.inf).argmax(axis=1)[:, None]
        exponents = exact_sum(*parts, *(-np.take_along_axis(part, top, axis=1) for part in parts))
        is_kept = is_anchor & (exponents > -depth)
        return np.where(is_kept, np.exp(np.where(is_kept, exponents, 0.0)), 0.0)


@dataclass(frozen=True)
class _Tail:
    """The weight of all anchors more than w places beyond either end of a group, relative to the top weight."""

    least: float  # Δ
    most: float  # Δ_max
    h: float
    sigma: float

    def __call__(self, w: int) -> float:
        n, least = w + 1, self.least * (1 - 1e-12)
        exponent = self.most * self.sigma - least * (n - 1) * (n * self.h / 2 - self.sigma)
        ratio = math.exp(-least * (n * self.h - self.sigma))  # of one term to the next, and smaller for later ones
        return float(up(2 * math.exp(min(700.0, max(-700.0, exponent))) / (1 - ratio), 64)) if ratio < 1 else math.inf

    def reach(self, tail: float) -> int:
        """The smallest w whose tail is at most this."""
        w = math.ceil(math.sqrt(math.log(4 / tail) / (self.least * self.h / 2))) + 1
        while self(w) > tail:
            w *= 2
        while w > 1 and self(w - 1) <= tail:
            w -= 1
        return w


def exact_sum(*terms: np.ndarray) -> np.ndarray:
    """The sum as if made in twice the precision: the error of every addition is kept and added at the end (Knuth)."""
    total, rest = np.asarray(terms[0]), np.zeros(())
    for term in terms[1:]:
        s = total + term
        z = s - total
        rest = rest + ((total - (s - z)) + (term - z))
        total = s
    return np.asarray(total + rest)


def exact_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fl(ab) and its error (Dekker)."""
    product = np.asarray(a * b)
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: np.ndarray | np.float64) -> tuple[np.ndarray, np.ndarray]:
    """a as a sum of two floats of at most 26 bits (Veltkamp)."""
    shifted = a * (2.0**27 + 1)
    high = np.asarray(shifted - (shifted - a))
    return high, np.asarray(a - high)
