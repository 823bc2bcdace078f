"""Selection leaves: the error on a box where the temperature is hard, from the values of the keys that can win there.

Theorem.  Let X be a box, g > 0, and let X_k ⊆ X contain {x ∈ X : s_k(x) ≥ s_j(x) − g for all j}. For every x ∈ X
          |f(x) − A(x)| ≤ max_k sup_{X_k} |f − v_k| + leak·sup_{x,k} |f(x) − v_k|,
          leak = (number of near keys)·e^{−g} + Σ over the others of e^{max over X of s_k − s_j}, for any j.
Proof.    f − A = Σ p_k(f − v_k). Where x ∈ X_k the factor is at most the first term, and the p_k sum to 1. Where
          x ∉ X_k, some s_j(x) > s_k(x) + g, so p_k ≤ e^{−g}; a key that is behind all over X has p_k ≤ e^{s_k − s_j}.

The X_k are boxes: each half-space s_k − s_j ≥ −g cuts every axis. The bound does not depend on how near keys share the
weight. So with g + 2δ in place of g in the half-spaces, it also holds for the weights of scores that are off by δ.
For several heads, the hulls of the values of their near keys are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnc.errors import InputError
from attnc.numerics.arrays import Bool, Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.cells.intervals import affine_range, cells_within, distance, interval
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.cells.near_keys import NearPairs, NearValues
from attnc.proofs.kinds.affine import mean_value_distance
from attnc.proofs.rounding.program import Roundings
from attnc.proofs.rounding.stage import score_errors
from attnc.proofs.stages.extraction import OneStage
from attnc.targets.target import Target

CELL_LEAK_SHARE = 2e-3
"""The part of a bound that the leak may add. It sets g, and g sets the reach of a key beyond its own cell. Measured on
12 cases: with twice as much one proof has 57 % more leaves, with ten times as much one bound is 2 % larger and one
proof has 28 times as many leaves. With half, one bound is 0.9 % larger."""
MOST_WINNERS = 2**6
"""On a box with more near keys only the hull of their values is used. It is a power of two, as boxes are grouped by
powers of two. Measured on 12 cases: with 32 one proof has 43 % more leaves, with 128 one has 14 % fewer."""
SIZE_OCTAVES = 8
"""Boxes with scores within this number of octaves are bounded together: the errors of their scores are those of the
largest. With fewer octaves there are more, smaller batches."""
CUTS_PER_BLOCK = 2**18  # pairs of keys whose half-spaces are cut at a time: 2 MB for each variable


@dataclass(frozen=True, eq=False)
class SelectionKind(Kind):
    """f against the values of the keys that can win on the cell.

    With `roundings` the bounds also hold for the weights that engines compute.
    """

    stage: OneStage
    target: Target
    roundings: Roundings | None = None
    outputs: Int[np.ndarray, " outputs"] | None = None  # the outputs of the target that the stage makes; None: all
    name = "selection"

    @property
    def covers_computed_weights(self) -> bool:
        return self.roundings is not None

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        upper = np.empty((len(centres), len(self.stage.constant.mid)))
        for rows in self._alike(np.abs(centres) + radii):
            upper[rows] = self.over(centres[rows], radii[rows], self._errors(centres[rows], radii[rows]))
        return Bounds(upper)

    def least(self, centres: Float[np.ndarray, "cells d"]) -> Float[np.ndarray, " cells"]:
        """Return |f − stage| at each centre, with the value of the best key for each head, which wins there.

        It holds up to rounding, for targets that are expressions.
        """
        stage, expression = self.stage, self.target.expression
        if expression is None:
            return np.zeros(len(centres))
        outputs = slice(None) if self.outputs is None else self.outputs
        values = centres @ stage.linear.mid.T + stage.constant.mid
        for head in stage.heads:
            best = np.argmax(centres @ head.slopes.mid.T + head.offsets.mid, axis=1)
            values = values + head.values.mid[best]
            if head.carried is not None:
                values = values + np.einsum("koi,ki->ko", head.carried.mid[best], centres)
        with quiet():
            return np.asarray(np.nan_to_num(np.abs(expression(centres)[:, outputs] - values).max(axis=1), posinf=0.0))

    def ranges(self, centres: np.ndarray, radii: np.ndarray) -> Interval:
        """Return the ranges (boxes, outputs) of the heads together, for the weights of near keys in any proportion."""
        errors = self._errors(centres, radii).tolist()
        heads = zip(self.stage.heads, errors, strict=True)
        nothing = Interval.point(np.zeros((len(centres), len(self.stage.constant.mid))))
        return sum((NearValues(head, centres, radii, error).hulls() for head, error in heads), nothing)

    def _errors(self, centres: np.ndarray, radii: np.ndarray) -> Float[np.ndarray, " heads"]:
        if self.roundings is None:
            return np.zeros(len(self.stage.heads))
        return score_errors(self.roundings, centres, radii)

    def _alike(self, reach: Float[np.ndarray, "boxes d"]) -> Iterator[Int[np.ndarray, " boxes"]]:
        """Yield boxes with scores of about the same size: the errors of all are taken to be those of the largest."""
        sizes = [
            np.abs(head.offsets.mid).max() + reach @ np.abs(head.slopes.mid).max(axis=0) for head in self.stage.heads
        ]
        octaves = np.frexp(np.max(sizes, axis=0, initial=0.0))[1] // SIZE_OCTAVES
        for group in np.unique(octaves):
            yield np.flatnonzero(octaves == group)

    def over(
        self,
        centres: Float[np.ndarray, "boxes d"],
        radii: Float[np.ndarray, "boxes d"],
        errors: Float[np.ndarray, " heads"],
    ) -> Float[np.ndarray, "boxes outputs"]:
        """Return upper bounds of |f − stage| over the boxes centre ± radius, for scores that are off by these errors.

        With the errors of `rounding.stage.score_errors` they cover the weights that engines compute. The boxes lie in
        the target's box.
        """
        stage, target = self.stage, self.target
        outputs = np.arange(target.num_outputs) if self.outputs is None else self.outputs
        if len(outputs) != len(stage.constant.mid):
            raise InputError(
                f"the stage has {len(stage.constant.mid)} outputs, but {len(outputs)} outputs of the target were given"
            )
        if not len(centres):
            return np.zeros((0, len(stage.constant.mid)))
        heads = [NearValues(head, centres, radii, float(e)) for head, e in zip(stage.heads, errors, strict=True)]
        cells = cells_within(target.box, centres, radii)
        own = affine_range(interval(stage.constant), interval(stage.linear)[None], cells)
        if len(heads) == 1:
            return _Winners(heads[0], stage, target, outputs, cells, own).bounds()
        return distance(target.enclosure(cells)[:, outputs], sum((head.hulls() for head in heads), own))


@dataclass(frozen=True, eq=False)
class _Winners:
    """One head: the value of each near key is compared with f where the key can win, and not elsewhere."""

    selection: NearValues
    stage: OneStage
    target: Target
    outputs: Int[np.ndarray, " outputs"]
    cells: Interval
    own: Interval  # constant + linear·x over the boxes

    def bounds(self) -> Float[np.ndarray, "boxes outputs"]:
        selection = self.selection
        values = self.target.enclosure(self.cells)[:, self.outputs]
        bounds = np.empty(values.shape)
        everything = selection.all_values
        for batch in selection.pairs():
            own = self.own[batch.boxes]
            whole = distance(values[batch.boxes], own + selection.hull(batch))
            farthest = distance(values[batch.boxes], own + everything)
            gaps = self._gaps(batch, whole, farthest)
            is_near = batch.lead > -gaps[batch.row] - selection.unsure
            with quiet():
                leads = np.where(is_near, -gaps[batch.row], batch.lead + selection.unsure)
                leaks = up(np.exp(np.minimum(leads, 0.0)), LIBM_ULPS)
            leak = np.bincount(batch.row, leaks, len(batch.boxes)) * (1 + 2.0**-52 * len(leaks)) + selection.rest
            best = np.minimum(whole, self._won(batch, is_near, gaps, whole))
            bounds[batch.boxes] = up(best + up(up(leak)[:, None] * farthest))
        return bounds

    def _gaps(self, batch: NearPairs, whole: np.ndarray, farthest: np.ndarray) -> Float[np.ndarray, " boxes"]:
        """Return g for each box, chosen so that the leak is about CELL_LEAK_SHARE of the rest of the bound."""
        counts = np.bincount(batch.row, minlength=len(batch.boxes))
        with quiet():
            share = CELL_LEAK_SHARE * whole.max(axis=1) / farthest.max(axis=1)
            gaps = np.log(counts / share)
        return np.clip(np.nan_to_num(gaps, nan=self.selection.gap), 1.0, self.selection.gap)

    def _won(
        self, batch: NearPairs, is_near: Bool[np.ndarray, " pairs"], gaps: np.ndarray, whole: np.ndarray
    ) -> Float[np.ndarray, "boxes outputs"]:
        """Return max_k sup_{X_k} |f − v_k|, or the bound by hulls where there are too many near keys."""
        row, key = batch.row[is_near], batch.key[is_near]
        counts = np.bincount(row, minlength=len(batch.boxes))
        found = np.where((counts <= MOST_WINNERS)[:, None], -np.inf, whole)
        for size in (2**n for n in range(MOST_WINNERS.bit_length())):
            rows = np.flatnonzero((counts <= size) & (counts > size // 2))
            step = max(1, CUTS_PER_BLOCK // (size * size))
            for some in (rows[start : start + step] for start in range(0, len(rows), step)):
                first, last = np.searchsorted(row, some), np.searchsorted(row, some, "right")
                keys = key[np.minimum(first[:, None] + np.arange(size), last[:, None] - 1)]  # the last fills up
                lo, hi = self._where_winning(batch.boxes[some], keys, gaps[some])
                wins = (lo <= hi).all(axis=2)
                off = self._deviation(Interval(lo[wins], hi[wins]), keys[wins])
                np.maximum.at(found, some[np.nonzero(wins)[0]], off)
        return found

    def _where_winning(
        self, boxes: np.ndarray, keys: np.ndarray, gaps: np.ndarray
    ) -> tuple[Float[np.ndarray, "rows size d"], Float[np.ndarray, "rows size d"]]:
        """Return X_k for every key of every row.

        With y = x − c, the half-space (s_k − s_j)(c) + Σ (a_k − a_j)_i y_i ≥ −g cuts axis i at
        |y_i| = (g + (s_k − s_j)(c) + Σ_{l≠i} |a_k − a_j|_l r_l) / |a_k − a_j|_i, on the side where the sum falls.
        """
        scores = self.selection
        at_centre, slopes = scores.at(boxes[:, None], keys), scores.slopes[keys]
        steps = slopes[:, :, None] - slopes[:, None]
        centres, radii = scores.centres[boxes], scores.radii[boxes]
        room = at_centre[:, :, None] - at_centre[:, None] + (gaps + self.selection.unsure)[:, None, None]
        room = room + (np.abs(steps) @ radii[:, None, :, None])[..., 0]
        with quiet():
            reach = room[..., None] / steps  # less r: the room includes the part |step|·r of this axis itself
        below = np.min(reach, axis=2, where=steps > 0, initial=np.inf)
        above = -np.max(reach, axis=2, where=steps < 0, initial=-np.inf)
        below, above = up(up(below, 2) - radii[:, None]), up(up(above, 2) - radii[:, None])  # −below ≤ y_i ≤ above
        lo = np.maximum(self.cells.lo[boxes][:, None], -up(below - centres[:, None]))
        hi = np.minimum(self.cells.hi[boxes][:, None], up(centres[:, None] + above))
        is_behind = np.any(room < 0, axis=2)  # everywhere on the box
        return lo, np.where(is_behind[:, :, None], -np.inf, hi)

    def _deviation(self, cells: Interval, keys: Int[np.ndarray, " cells"]) -> Float[np.ndarray, "cells outputs"]:
        """Bound |f(x) − values − slopes·x| over the cells, with the value and the slope of one key for each cell.

        The bound is the distance of the two ranges. Where gradients G of an expression are known, it is at most the
        mean value form |f(c) − values − slopes·c| + Σ_i |G_i − slopes_i|·reach_i, in which equal slopes cancel.
        """
        selection, linear, target = self.selection, self.stage.linear, self.target
        values = selection.constants[keys] + interval(self.stage.constant)
        slopes = None if selection.carried is None else selection.carried[keys]
        if linear.mid.any() or linear.radius.any():
            own = Interval.point(np.zeros((len(keys), 1, 1))) + interval(linear)[None]
            slopes = own if slopes is None else slopes + own
        by_range = target.enclosure(cells)[:, self.outputs]
        if slopes is None:
            return distance(by_range, values)
        bounds = distance(by_range, affine_range(values, slopes, cells))
        if target.expression is None:
            return bounds
        form = mean_value_distance(target.expression, cells, cells.mid, values, slopes, self.outputs)
        return np.minimum(bounds, form)
