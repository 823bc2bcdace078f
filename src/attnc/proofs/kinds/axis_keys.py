"""Heads that select a cell of a grid: which keys can win where, axis by axis.

Let the inputs of a head be divided into groups z_1, …, z_d such that, through the stages before it, z_i depends on the
variable x_i alone. Let the keys be all combinations k = (m_1, …, m_d) of rows, s_k(z) = Σ_i s_{m_i}(z_i).

Theorem.  For intervals I_i of x_i let X_m ⊆ I_i, for each row m of axis i, be such that everywhere on I_i all rows with
          x_i ∉ X_m have together a weight of at most ℓ_i among those of the axis. On the cell ΠI_i
          |f − A| ≤ max_k sup{|f − v_k| : x_i ∈ X_{m_i} for all i} + Σ_i ℓ_i·sup |f − v_k|.
Proof.    f − A = Σ_k p_k (f − v_k), and weights are products, p_k = Π_i p_{m_i}. At x the keys with x_i ∈ X_{m_i} for
          all i are off by the first term at most; the others have together a weight of at most Σ_i ℓ_i.

If scores are off by δ, weights are off by the factor e^{2δ}. A grid of P^d cells costs d tables of P rows, each over a
few intervals between cuts. f is enclosed once for each key that can win in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.cells.intervals import cells_within, centred, distance, hull, interval
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.cells.near_keys import Scores
from attnc.proofs.kinds.enclosure import MOST_CUTS, QueryEnclosure, StageEnclosure, cut_at, cut_wide
from attnc.proofs.margins import AXIS_DISTANCE, STAGE_ROUNDING
from attnc.proofs.rounding.stage import rounding_of_sums, score_errors
from attnc.targets.target import Target

AXIS_PIECES = 256  # pieces of an axis whose rows are compared together; chosen, not measured


@dataclass(frozen=True, eq=False)
class RowWinners:
    """The rows that can win somewhere in an interval, the ends of their X_m, and ℓ."""

    rows: Int[np.ndarray, " rows"]
    lo: Float[np.ndarray, " rows"]
    hi: Float[np.ndarray, " rows"]
    leak: float


@dataclass(frozen=True, eq=False)
class AxisRows:
    """One variable: the parts of the stages that depend on it, and its rows of the last head."""

    axis: int
    parts: tuple[tuple[QueryEnclosure, ...], ...]
    states: tuple[Interval, ...]  # the states before each stage and after the last one, on the whole box
    inputs: Int[np.ndarray, " inputs"]
    rows: SoftHead[Enclosed]
    cuts: Float[np.ndarray, " cuts"]
    leak: float  # the largest weight that the rows that are left out may have together
    known: dict[tuple[float, float], RowWinners] = field(default_factory=dict)

    def winners(self, lo: Float[np.ndarray, " cells"], hi: Float[np.ndarray, " cells"]) -> list[RowWinners]:
        ends = list(zip(lo.tolist(), hi.tolist(), strict=True))
        new = [pair for pair in dict.fromkeys(ends) if pair not in self.known]
        if new:
            self._find(np.array(new))
        return [self.known[pair] for pair in ends]

    def _find(self, ends: Float[np.ndarray, "intervals two"]) -> None:
        pieces, owner = cut_at([self.cuts], Interval(ends[:, :1], ends[:, 1:]))
        can_win, leaks = self._rows_and_leaks(pieces)
        starts = np.searchsorted(owner, np.arange(len(ends) + 1))
        for (lo, hi), first, last in zip(ends.tolist(), starts[:-1], starts[1:], strict=True):
            wins = can_win[first:last]
            (rows,) = np.nonzero(wins.any(axis=0))
            begin = first + wins[:, rows].argmax(axis=0)
            end = last - 1 - wins[::-1, rows].argmax(axis=0)
            lows, highs = pieces.lo[begin, 0], pieces.hi[end, 0]
            self.known[lo, hi] = RowWinners(rows, lows, highs, float(leaks[first:last].max()))

    def _rows_and_leaks(self, pieces: Interval) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows can win on which pieces, (pieces, rows), and the weight of the others, (pieces,).

        As many rows as possible are left out, such that their weights sum to at most `leak`. On a piece
        p_m ≤ e^{s_m − s_j}, where j is the row that leads at its centre.
        """
        can_win, leaks = np.zeros((len(pieces), len(self.rows.offsets.mid)), bool), np.zeros(len(pieces))
        boxes, parent = cut_wide(self._reached(pieces), np.ptp(self.rows.slopes.mid, axis=0), MOST_CUTS)
        for start in range(0, len(boxes), AXIS_PIECES):
            scores = Scores(self.rows, *centred(boxes[start : start + AXIS_PIECES]))
            leads = scores.leads(np.arange(len(scores.centres)), np.arange(scores.num_keys)) + scores.slack
            with np.errstate(under="ignore"):
                weights = up(np.exp(np.minimum(leads, 0.0)), LIBM_ULPS)
            order = np.argsort(weights, axis=1)
            sums = np.cumsum(np.take_along_axis(weights, order, 1), axis=1) * (1 + 2.0**-50 * scores.num_keys)
            left_out = sums <= self.leak
            owners = parent[start : start + AXIS_PIECES]
            wins = np.empty_like(left_out)
            np.put_along_axis(wins, order, ~left_out, 1)
            np.logical_or.at(can_win, owners, wins)
            np.maximum.at(leaks, owners, np.max(sums, axis=1, where=left_out, initial=0.0))
        return can_win, leaks

    def _reached(self, pieces: Interval) -> Interval:
        """Enclose the inputs of the rows over pieces of the axis. Other variables may be anywhere in the box."""
        first, *after = self.states
        lo, hi = (np.repeat(end, len(pieces), axis=0) for end in (first.lo, first.hi))
        lo[:, self.axis], hi[:, self.axis] = pieces.lo[:, 0], pieces.hi[:, 0]
        for parts, whole in zip(self.parts, after, strict=True):
            state = Interval(lo, hi)
            lo, hi = (np.repeat(end, len(pieces), axis=0) for end in (whole.lo, whole.hi))
            for part in parts:
                found = part.enclosure(state)
                lo[:, part.outputs], hi[:, part.outputs] = found.lo, found.hi
        return Interval(lo[:, self.inputs], hi[:, self.inputs])


@dataclass(frozen=True, eq=False)
class AxisKeys:
    """The outputs of the program that one head over such keys makes."""

    outputs: Int[np.ndarray, " outputs"]
    axes: tuple[AxisRows, ...]
    keys: Int[np.ndarray, "*rows"]  # the number of the key of every combination of rows
    values: Interval  # (keys, outputs)
    spare_leak: float  # the weight of keys that repeat a combination of rows
    growth: float  # e^{2δ}
    rounding: Float[np.ndarray, " outputs"]

    def bounds(self, target: Target, cells: Interval) -> Float[np.ndarray, "cells outputs"]:
        """Return upper bounds of |f − computed outputs| on cells of the box."""
        winners = [axis.winners(cells.lo[:, i], cells.hi[:, i]) for i, axis in enumerate(self.axes)]
        counts = np.array([[len(found.rows) for found in axis] for axis in winners])
        per_cell = counts.prod(axis=0)
        starts = np.cumsum(per_cell) - per_cell
        cell = np.repeat(np.arange(len(cells)), per_cell)
        number = np.arange(len(cell)) - starts[cell]
        lo, hi = np.empty((2, len(cell), len(winners)))
        rows = []
        for i, found in enumerate(winners):
            firsts = np.cumsum(counts[i]) - counts[i]
            place = firsts[cell] + number % counts[i][cell]
            number = number // counts[i][cell]
            rows.append(np.concatenate([each.rows for each in found])[place])
            lo[:, i], hi[:, i] = (np.concatenate([getattr(each, end) for each in found])[place] for end in ("lo", "hi"))
        off = distance(target.enclosure(Interval(lo, hi))[:, self.outputs], self.values[self.keys[tuple(rows)]])
        leak = self.spare_leak + np.sum([[each.leak for each in found] for found in winners], axis=0)
        farthest = distance(target.enclosure(cells)[:, self.outputs], hull(self.values))
        leaking = up(up(leak * self.growth, len(winners) + 2)[:, None] * farthest)
        return up(up(AXIS_DISTANCE * np.maximum.reduceat(off, starts) + leaking) + self.rounding)


@dataclass(frozen=True, eq=False)
class AxisKind(Kind):
    """Enclosure leaves for heads that select a cell of a grid, all outputs together."""

    heads: tuple[AxisKeys, ...]
    target: Target
    truncation: float = 0.0
    is_single: bool = False  # the program is one stage; its ledger then has terms for selection and for rounding
    name = "enclosure"

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        cells = cells_within(self.target.box, centres, radii)
        upper = np.zeros((len(centres), self.target.num_outputs))
        rounding = np.full(self.target.num_outputs, self.truncation)  # the rounding of scores is in the leaks
        for head in self.heads:
            upper[:, head.outputs] = up(head.bounds(self.target, cells) + self.truncation)
            rounding[head.outputs] += head.rounding
        if not self.is_single:
            return Bounds(upper)
        return Bounds(upper, {"selection": upper - rounding, "rounding": np.broadcast_to(rounding, upper.shape)})


def axis_keys(
    stages: Sequence[StageEnclosure], box: Interval, cuts: Sequence[np.ndarray], leak: float
) -> tuple[AxisKeys, ...] | None:
    """Return the last of the stages as heads over combinations of rows, or None if it has other keys."""
    *before, last = stages
    states, owners = [box], np.arange(box.shape[1])
    ways: list[list[tuple[QueryEnclosure, ...]]] = [[] for _ in owners]
    for stage in before:
        states.append(stage(states[-1]))
        after = np.zeros(stage.num_outputs, np.int64)
        for part in stage.parts:
            read = np.unique(owners[part.reads])
            if len(read) > 1:
                return None
            after[part.outputs] = read[0] if len(read) else 0
        for axis, way in enumerate(ways):
            way.append(tuple(part for part in stage.parts if after[part.outputs[0]] == axis))
        owners = after
    found: list[AxisKeys] = []
    for part in last.parts:
        grid = _combinations(part, [np.flatnonzero(owners == axis) for axis in range(len(ways))])
        if grid is None:
            return None
        axes = tuple(
            AxisRows(axis, tuple(way), tuple(states), np.flatnonzero(owners == axis), rows, cuts[axis], leak)
            for axis, (way, rows) in enumerate(zip(ways, grid.rows, strict=True))
        )
        found.append(_keys(part, axes, grid, states[-1]))
    return tuple(found)


def row_breaks(stage: StageEnclosure, d: int, leak: float) -> list[Float[np.ndarray, " breaks"]]:
    """Return the points of each axis where one row of a program of one stage ceases to matter, or the next begins to.

    Scores of rows are affine in x_i. Between two neighbours, these points are the ends of the strip
    |(a_m − a_n)x + c_m − c_n| ≤ g, beyond which one of them is ahead by g. Raise ProgramError if keys are not
    combinations of rows, or if these strips overlap because the head is soft.
    """
    found = [np.zeros(0)] * d
    for part in stage.parts:
        grid = _combinations(part, list(np.arange(d)[:, None]))
        for axis, rows in enumerate([] if grid is None else grid.rows):
            slopes, offsets = rows.slopes.mid[:, 0], rows.offsets.mid  # slopes are ascending
            gap = math.log(100 * len(slopes) / leak) * np.array([[-1.0], [1.0]])
            strips = ((gap - np.diff(offsets)) / np.diff(slopes)).T.ravel()
            grid = grid if (np.diff(strips) > 0).all() else None
            found[axis] = np.union1d(found[axis], strips)
        if grid is None:
            raise ProgramError(
                "a stage is proved axis by axis if its keys combine rows of each axis, and it selects one"
            )
    return found


@dataclass(frozen=True, eq=False)
class _Combinations:
    """Keys that are combinations of rows: c_k = Σ_i c_{m_i} to within `inexact`, up to a constant.

    Where several keys combine the same rows, `keys` has one of them. The others weigh at most `spare_leak` times as
    much.
    """

    rows: tuple[SoftHead[Enclosed], ...]
    keys: Int[np.ndarray, "*rows"]
    inexact: float
    spare_leak: float


def _combinations(part: QueryEnclosure, groups: Sequence[Int[np.ndarray, " inputs"]]) -> _Combinations | None:
    stage = part.stage
    moves = stage.linear.mid.any() or stage.linear.radius.any()
    if len(stage.heads) != 1 or stage.heads[0].carried is not None or moves:
        return None
    (head,) = stage.heads
    grid = head.as_grid(groups)
    if grid is None:
        return None
    offsets, radius = head.offsets.mid, float(head.offsets.radius.max())
    others = up(np.exp(offsets - grid.offsets.ravel()[grid.places]), LIBM_ULPS)
    others[grid.keys] = 0.0
    spare = float(up(np.bincount(grid.places, others).max(), len(offsets))) * (1 + 4 * radius)
    split = grid.offsets_through_least()
    rows = tuple(
        SoftHead(
            Enclosed(slopes, np.broadcast_to(head.slopes.radius[:, group].max(axis=0), slopes.shape)),
            Enclosed.exact(line),
            Enclosed.exact(np.zeros((len(line), 0))),
        )
        for slopes, group, line in zip(grid.rows, groups, split.lines, strict=True)
    )
    return _Combinations(rows, grid.keys, float(np.abs(split.misfit).max()) + split.misfit_error + radius, spare)


def _keys(part: QueryEnclosure, axes: tuple[AxisRows, ...], grid: _Combinations, state: Interval) -> AxisKeys:
    (head,) = part.stage.heads
    centre, radius = centred(state)
    (error,) = score_errors(part.roundings, centre, radius)
    reach = up(np.abs(centre) + radius)
    largest = np.abs(head.offsets.mid).max() + float(reach[0] @ np.abs(head.slopes.mid).max(axis=0))
    # A score may be behind by twice the largest one. The rounding of that argument of the exponential is added.
    off_by = float(error) + grid.inexact + 4 * part.roundings.unit * largest
    growth = float(up(math.exp(2 * off_by), LIBM_ULPS + 4)) if off_by < 1 else math.inf
    values = interval(head.values) + interval(part.stage.constant)
    rounding = STAGE_ROUNDING * rounding_of_sums(part.roundings, reach)[0]
    return AxisKeys(part.outputs, axes, grid.keys, values, grid.spare_leak, growth, rounding)
