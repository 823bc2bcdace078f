"""A lattice whose spacing follows the function, axis by axis, and a convex function whose chords tell cells apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.errors import InputError
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NUM_LINES = 48


@dataclass(frozen=True, eq=False)
class Profile:
    """How much f changes on each piece of one axis: the most that is seen on any of a few lines along it."""

    ends: Float[np.ndarray, " pieces_and_one"]
    changes: Float[np.ndarray, " pieces"]

    @property
    def total(self) -> float:
        return float(self.changes.sum())

    def edges(self, count: int, uniform: float) -> Float[np.ndarray, " edges"]:
        """At most `count` intervals with equal shares of the change; the part `uniform` of it is shared by length."""
        lengths = np.diff(self.ends)
        share = uniform * lengths / lengths.sum() + (1 - uniform) * self.changes / (self.total or 1.0)
        reached = np.concatenate([[0.0], np.cumsum(share)])
        edges = np.interp(np.linspace(0, reached[-1], count + 1), reached, self.ends)
        edges[0], edges[-1] = self.ends[0], self.ends[-1]
        return np.unique(edges)


def profile(target: Target, axis: int, change: float) -> Profile:
    """Pieces on which f changes by at most `change` on each line, or by a small part of the whole change.

    Lines guide, and prove nothing.
    """
    box = target.box
    num_lines, most_pieces = (1, 2**16) if box.d == 1 else (NUM_LINES, 2**9)
    rng = np.random.default_rng(0)
    places = np.stack([rng.permutation(num_lines) for _ in range(box.d)], axis=1)  # a Latin square: no gaps on any axis
    lines = box.lo + (places + 0.5) / num_lines * box.widths
    ends = np.linspace(box.lo[axis], box.hi[axis], 65)
    changes = _changes(target, axis, lines, ends[:-1], ends[1:])
    for _ in range(50):
        large = changes > max(change, float(changes.sum()) / most_pieces)
        if not large.any() or len(changes) > 4 * most_pieces:
            break
        where, lo, hi = np.flatnonzero(large), ends[:-1][large], ends[1:][large]
        middles = lo / 2 + hi / 2
        changes[where] = _changes(target, axis, lines, lo, middles)
        changes = np.insert(changes, where + 1, _changes(target, axis, lines, middles, hi))
        ends = np.insert(ends, where + 1, middles)
    return Profile(ends, changes)


def _changes(target: Target, axis: int, lines: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    low = np.repeat(lines, len(lo), axis=0)
    high = low.copy()
    low[:, axis], high[:, axis] = np.tile(lo, len(lines)), np.tile(hi, len(lines))
    found = target.enclosure(Interval(low, np.maximum(low, high)))
    widths = np.minimum((found.hi - found.lo).max(axis=1), 1e100)
    return np.asarray(widths.reshape(len(lines), len(lo)).max(axis=0))


@dataclass(frozen=True, eq=False)
class Axis:
    """Edges in y = scale·x + offset, and φ: convex, linear between edges, bent by 1/(narrower neighbour) at each.

    So a cell is the unit of length everywhere: neighbours' chords differ by t/width at distance t from their border.
    """

    scale: float
    offset: float
    edges: Float[np.ndarray, " count_and_one"]

    @classmethod
    def make(cls, x_edges: Float[np.ndarray, " edges"], dtype: str) -> Axis:
        """y = 0 is where cells are narrowest, and scores must be told apart most finely; scale is a power of 2."""
        widths = np.diff(x_edges)
        exponent = -round(math.log2(float(widths.min())))
        if abs(exponent) > math.log2(float(np.finfo(dtype).max)) / 2:
            raise InputError(
                f"cells {widths.min():.3g} wide are too small or too large for {dtype}: rescale the variables"
            )
        scale = 2.0**exponent
        narrowest = int(np.argmin(widths)) if widths.min() < 0.25 * np.median(widths) else len(widths) // 2
        offset = float(np.asarray(-x_edges[narrowest] * scale, dtype))
        edges = np.unique(x_edges * scale + offset)
        # More than `Lattice.query_error`: every y that can be computed lies inside.
        slack = 8 * UNIT_ROUNDOFF[dtype] * (scale * float(np.abs(x_edges).max()) + abs(offset))
        edges[0] -= slack
        edges[-1] += slack
        return cls(scale, offset, edges)

    @property
    def count(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def slopes(self) -> Float[np.ndarray, " count"]:
        """Of φ on each cell; 0 at y = 0, as any affine function may be taken off all scores."""
        widths = np.diff(self.edges)
        bends = 1 / np.minimum(widths[:-1], widths[1:])
        slopes = np.concatenate([[0.0], np.cumsum(bends)])
        return slopes - slopes[self._origin]

    @cached_property
    def phi(self) -> Float[np.ndarray, " count_and_one"]:
        """At the edges."""
        phi = np.concatenate([[0.0], np.cumsum(self.slopes * np.diff(self.edges))])
        return phi - phi[self._origin]

    @property
    def _origin(self) -> int:
        return int(np.clip(np.searchsorted(self.edges, 0.0, "right") - 1, 0, self.count - 1))

    @cached_property
    def phi_error(self) -> float:
        """The stored values of φ are this close to a convex function: they are sums of `count` products."""
        return 8 * self.count * UNIT_ROUNDOFF["float64"] * float(np.ptp(self.phi))

    def chords(self, lo: Int[np.ndarray, " n"], hi: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Slope and value at 0 of the chord of φ over edges lo … hi."""
        slope = (self.phi[hi] - self.phi[lo]) / (self.edges[hi] - self.edges[lo])
        return slope, self.phi[lo] - slope * self.edges[lo]

    def sag(self, lo: Int[np.ndarray, " n"], hi: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """How far φ hangs below that chord, at most: down to where the tangents at its ends meet."""
        slope, _ = self.chords(lo, hi)
        left, right = slope - self.slopes[lo], self.slopes[hi - 1] - slope
        with np.errstate(invalid="ignore", divide="ignore"):
            sag = left * right / (left + right) * (self.edges[hi] - self.edges[lo])
        return np.maximum(np.nan_to_num(sag, posinf=0.0, neginf=0.0), 0.0) * (1 + 2.0**-20)

    def reach(self, lo: np.ndarray, hi: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Edges on either side beyond which φ is more than `depth` above the chord over lo … hi: by bisection.

        φ minus the chord is convex and 0 at lo and hi, so it grows outward from there.
        """
        slope, at_0 = self.chords(lo, hi)
        ends = []
        for inner, outer in ((lo, np.zeros_like(lo)), (hi, np.full_like(hi, self.count))):
            for _ in range(self.count.bit_length() + 1):
                middle = np.where(np.abs(outer - inner) <= 1, outer, (inner + outer) // 2)
                is_far = self.phi[middle] - (slope * self.edges[middle] + at_0) > depth
                inner, outer = np.where(is_far, inner, middle), np.where(is_far, middle, outer)
            ends.append(outer)
        return ends[0], ends[1]


@dataclass(frozen=True, eq=False)
class Lattice:
    """A graded axis for every variable of a box."""

    box: Box
    axes: tuple[Axis, ...]
    dtype: str

    @classmethod
    def make(cls, box: Box, profiles: list[Profile], counts: list[int], dtype: str) -> Lattice:
        """About so many cells an axis. In two dimensions and more 5 % are evenly spread, so that none is very long."""
        uniform = 1e-3 if box.d == 1 else 0.05
        axes = (Axis.make(p.edges(count, uniform), dtype) for p, count in zip(profiles, counts, strict=True))
        return cls(box, tuple(axes), dtype)

    @cached_property
    def counts(self) -> Int[np.ndarray, " d"]:
        return np.array([axis.count for axis in self.axes])

    @cached_property
    def scale(self) -> Float[np.ndarray, " d"]:
        return np.array([axis.scale for axis in self.axes])

    @cached_property
    def offset(self) -> Float[np.ndarray, " d"]:
        return np.array([axis.offset for axis in self.axes])

    @cached_property
    def size(self) -> Float[np.ndarray, " d"]:
        """scale·|x| + |offset|, at most."""
        return np.asarray(up(self.scale * self.box.magnitude + np.abs(self.offset), 2))

    @cached_property
    def query_error(self) -> Float[np.ndarray, " d"]:
        """|computed y − (scale·x + offset)|: casting x, one product and one sum are three roundings, one to spare."""
        return np.asarray(up(gamma(4, UNIT_ROUNDOFF[self.dtype]) * self.size))

    def ys(self, index: Int[np.ndarray, "cells d"]) -> Float[np.ndarray, "cells d"]:
        return np.stack([axis.edges[index[:, i]] for i, axis in enumerate(self.axes)], axis=1)

    def preimage(self, lo: Float[np.ndarray, "cells d"], hi: Float[np.ndarray, "cells d"]) -> Interval:
        """All x of the box whose computed y can lie in [lo, hi]."""
        y = Interval(-up(self.query_error - lo), up(hi + self.query_error))
        x = (y - Interval.point(self.offset)) / Interval.point(self.scale)
        return Interval(np.clip(x.lo, self.box.lo, self.box.hi), np.clip(x.hi, self.box.lo, self.box.hi))
