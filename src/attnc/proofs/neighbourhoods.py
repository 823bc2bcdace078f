"""Neighbourhoods of kinks, in which no slopes of a network can follow those of f: nothing is claimed there.

At a kink the slope of f jumps. The gate x·σ(βx), which stands for relu(x), has the slopes [−0.0998, 1.0998] for every
β. In one variable, the smallest neighbourhood is excluded beyond which samples meet a limit. A head of a composition is
a function of one number t, and its neighbourhoods are intervals of t: strips of the box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from attnc.numerics.arrays import Bool, Float
from attnc.numerics.intervals import Interval, halved
from attnc.proofs.proof import Excluded
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import points_at_kinks
from attnc.targets.expressions.tree import Call, Node, Number, Sum, is_constant, walk
from attnc.targets.expressions.zeros import zeros

OCTAVES, PER_OCTAVE = 40, 8
"""Number of octaves of distances from a kink, from the width of the box down, and of distances in each."""
BAND_ROOM = 1.25
"""Neighbourhoods are wider by this factor than samples need, so that cells can be proved up to their ends."""
MOST_EXCLUDED = 2.0**-6
"""Largest half-width of an excluded interval, as a share of the range. If more is needed, the network is too coarse.
The checker accepts a width of a 16th of a box of one variable."""
MOST_OF_BOX = 2.0**-5
"""Largest share of the box that a strip may take up. The checker accepts a 16th."""
ALL_OF_BOX = 2.0**-2
"""Largest sum of the shares of all neighbourhoods. The checker accepts a half."""
CLOSE_SHARE, SHARE_HALVINGS = 2.0**-8, 12
"""The share of a part of the box is not halved further if it is at most the first, or after this number of halvings.
The checker uses the same numbers."""
HALVINGS = (6, 4, 3)  # of a box along each of 1, 2 and 3 variables, to look for kinks

Bands = tuple[tuple[float, float], ...]
"""Disjoint intervals in ascending order."""


def kinks(derivatives: Expression, box: Box) -> list[Node]:
    """Return the expressions that vanish at kinks, the arguments of `sign` in the derivatives, if they may in the box.

    Their ranges over a few parts of the box decide.
    """
    signs = (node for node in walk(derivatives.outputs) if isinstance(node, Call) and node.name == "sign")
    trees = [tree for (tree,) in (node.arguments for node in signs) if not is_constant(tree)]
    parts = Interval(box.lo[None], box.hi[None])
    for axis in range(box.d):
        for _ in range(HALVINGS[box.d - 1]):
            parts = halved(parts, np.full(len(parts), axis))

    def may_vanish(tree: Node) -> bool:
        ranges = Expression("", (tree,), derivatives.variables, False, ()).ranges(parts, violations="infinite")
        return bool(((ranges.lo <= 0) & (ranges.hi >= 0)).any())

    return [tree for tree in trees if may_vanish(tree)]


def neighbourhoods(
    derivatives: Expression, box: Box, errors: Callable[[np.ndarray], np.ndarray], limit: float
) -> Bands:
    """Return the neighbourhoods of the kinks of a function of one variable.

    Each is the smallest one, up to BAND_ROOM, beyond which the errors of samples on both sides are within the limit.
    """
    lo, hi, name = float(box.lo[0]), float(box.hi[0]), box.names[0]
    places = sorted({x for tree in kinks(derivatives, box) for x, _ in zeros(tree, name, lo, hi)})
    steps = _distances()
    found: list[tuple[float, float]] = []
    for kink in places:
        distances = steps[steps <= MOST_EXCLUDED] * (hi - lo)
        points = kink + np.concatenate([distances, -distances])
        is_inside = (points >= lo) & (points <= hi)
        seen = np.where(is_inside, errors(np.clip(points, lo, hi)[:, None]), 0.0).reshape(2, -1).max(axis=0)
        bad = np.flatnonzero(seen > limit)
        half = float(distances[bad[0]]) * 2.0 ** (1 / PER_OCTAVE) if len(bad) else float(distances[-1])
        found.append(_aligned(kink, min(BAND_ROOM * half, MOST_EXCLUDED * (hi - lo)), lo, hi))
    return merged(found)


def merged(found: Sequence[tuple[float, float]]) -> Bands:
    """Return the union of intervals as disjoint ones."""
    kept: list[tuple[float, float]] = []
    for lo, hi in sorted(found):
        if kept and lo <= kept[-1][1]:
            kept[-1] = kept[-1][0], max(hi, kept[-1][1])
        else:
            kept.append((lo, hi))
    return tuple(kept)


def beside(bands: Bands, box: Box) -> Float[np.ndarray, "points d"]:
    """Return points outside of the intervals of one variable, at distances in a geometric progression from their ends.

    There are none without intervals.
    """
    distances = box.widths[0] * _distances()
    points = np.array([end + side * distances for band in bands for side, end in zip((-1, 1), band, strict=True)])
    return np.clip(points.reshape(-1, 1), box.lo, box.hi) if bands else np.zeros((0, box.d))


def beside_strips(excluded: Sequence[Excluded], box: Box) -> Float[np.ndarray, "points d"]:
    """Return points of a box at the ends of strips, on both sides, and at several distances from them."""
    found = [np.zeros((0, box.d))]
    for band in excluded:
        (tree,) = band.expression(box.names).outputs
        for end in (band.lo, band.hi):
            apart = Call("abs", (Sum((tree, Number(Fraction(-end)))),))
            found.append(points_at_kinks(Expression("", (apart,), box.names, False, ()), box))
    return np.concatenate(found)


def is_excluded(
    excluded: Sequence[Excluded], box: Box, points: Float[np.ndarray, "points d"]
) -> Bool[np.ndarray, " points"]:
    """Return whether each of these points lies in one of the neighbourhoods."""
    found = np.zeros(len(points), dtype=bool)
    for band in excluded:
        found |= band.contains(points, box.names)
    return found


def share_of(band: Excluded, box: Box) -> float:
    """Bound the share of a box that a strip takes up.

    On a part on which |∂_i argument| ≥ m, a line along x_i meets the strip on a length of at most (hi − lo)/m.
    """
    argument, parts = band.expression(box.names), Interval(box.lo[None], box.hi[None])
    kept, least_share = 0.0, 1.0
    for depth in range(SHARE_HALVINGS + 1):
        if not len(parts):
            break
        ranges, slopes = argument.ranges_and_gradients(parts, violations="infinite")
        t, by_axis = ranges[:, 0], slopes[:, 0]
        least = np.maximum(np.maximum(by_axis.lo, -by_axis.hi), 0.0) * parts.width
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num(((band.hi - band.lo) / least).min(axis=1), nan=1.0).clip(0.0, 1.0)
        shares = np.where((t.hi < band.lo) | (t.lo > band.hi), 0.0, shares)
        least_share = min(least_share, kept + float(shares.sum()) * 0.5**depth)
        is_kept = (shares <= CLOSE_SHARE) | ((t.lo >= band.lo) & (t.hi <= band.hi))
        kept += float(shares[is_kept].sum()) * 0.5**depth
        parts = parts[~is_kept]
        parts = halved(parts, np.full(len(parts), depth % box.d))
    return least_share


def _aligned(kink: float, half: float, lo: float, hi: float) -> tuple[float, float]:
    """Return ends about kink ± half that are a little beyond ends of cells, so that no cell need straddle one."""
    parts = 2.0 ** math.ceil(math.log2(8 * (hi - lo) / half))
    first, last = math.floor((kink - half - lo) / (hi - lo) * parts), math.ceil((kink + half - lo) / (hi - lo) * parts)
    slack = 2.0**-46 * max(abs(lo), abs(hi))
    return (
        lo if first <= 0 else lo + (hi - lo) * (first / parts) - slack,
        hi if last >= parts else lo + (hi - lo) * (last / parts) + slack,
    )


def _distances() -> Float[np.ndarray, " distances"]:
    return np.asarray(2.0 ** (-np.arange(OCTAVES * PER_OCTAVE) / PER_OCTAVE))
