"""Heads that select a cell of a grid: which keys can win where, axis by axis.

Let the inputs of a head be divided into groups z_1, …, z_d such that, through the stages before it, z_i depends on the
variable x_i alone. Let the keys be all combinations k = (m_1, …, m_d) of rows, s_k(z) = Σ_i s_{m_i}(z_i).

Theorem.  For intervals I_i of x_i let X_m ⊆ I_i, for each row m of axis i, be such that everywhere on I_i all rows with
          x_i ∉ X_m have together a weight of at most ℓ_i among those of the axis. On the cell ΠI_i
          |f − A| ≤ max_k sup{|f − v_k| : x_i ∈ X_{m_i} for all i} + Σ_i ℓ_i·sup |f − v_k|.
Proof.    f − A = Σ_k p_k (f − v_k), and weights are products, p_k = Π_i p_{m_i}. At x the keys with x_i ∈ X_{m_i} for
          all i are off by the first term at most; the others have together a weight of at most Σ_i ℓ_i.

X_m holds the points at which row m may be less than a gap g behind the best row. The certificate states g, and the
checker leaves out rows by it. Its enclosures of the z_i are narrower than those here, or wider by a little: `room` in
scores. So a row is kept here if it may be less than g + room behind. Every row, kept or not, counts in ℓ_i with the
largest weight that the checker may leave out: e^{−g}, or e^{room} times its own largest weight if that is smaller.

If scores are off by δ, weights are off by the factor e^{2δ}. A grid of P^d cells costs d tables of P rows, each over a
few intervals between cuts. f is enclosed once for each key that can win in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.arrays import Bool, Float, Int
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LIBM_ULPS, up
from attnc.proofs.cells.branching import PROVING
from attnc.proofs.cells.intervals import cells_within, centred, distance, hull, interval
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.cells.near_keys import PAIRS_PER_BATCH, Scores
from attnc.proofs.kinds.enclosure import MOST_CUTS, QueryEnclosure, StageEnclosure, cut_at
from attnc.proofs.margins import AXIS_DISTANCE, AXIS_FARTHEST, AXIS_ROUNDING, STATE_ROOM
from attnc.proofs.rounding.stage import rounding_of_sums, score_errors
from attnc.targets.target import Target


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
    gap: float  # rows that are farther behind than this are left out
    known: dict[tuple[float, float], RowWinners] = field(default_factory=dict)

    @cached_property
    def room(self) -> float:
        """The amount by which a difference of scores may be larger for the checker, whose inputs may be wider."""
        if not self.parts:
            return 0.0
        whole = self.states[-1]
        reach = np.maximum(np.abs(whole.lo), np.abs(whole.hi))[0, self.inputs]
        return float(STATE_ROOM * (1 + reach @ np.ptp(self.rows.slopes.mid, axis=0)))

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

    def _rows_and_leaks(self, pieces: Interval) -> tuple[Bool[np.ndarray, "pieces rows"], Float[np.ndarray, " pieces"]]:
        """Return which rows may be less than gap + room behind the row that leads at the centre of a piece, and ℓ."""
        can_win, leaks = np.zeros((len(pieces), len(self.rows.offsets.mid)), bool), np.zeros(len(pieces))
        step = max(1, PAIRS_PER_BATCH // can_win.shape[1])
        for start in range(0, len(pieces), step):
            boxes, parent = cut_where_rows_meet(self._reached(pieces[start : start + step]), self.rows)
            scores = Scores(self.rows, *centred(boxes))
            leads = scores.leads(np.arange(len(boxes)), np.arange(scores.num_keys)) + scores.slack + self.room
            with quiet():
                weights = np.exp(np.minimum(leads, -self.gap))
            np.maximum.at(leaks, start + parent, weights.sum(axis=1))
            np.logical_or.at(can_win, start + parent, leads > -self.gap)
        return can_win, up(leaks * (1 + 2.0**-50 * can_win.shape[1]), LIBM_ULPS)

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


def cut_where_rows_meet(boxes: Interval, rows: SoftHead[Enclosed]) -> tuple[Interval, Int[np.ndarray, " pieces"]]:
    """Return parts of boxes, cut along the inputs that change scores most, and the number of the box of each part.

    The cut is where the best row at one end of an input meets the best row at the other end. It does not depend on the
    width of the box. So the checker, whose boxes are narrower, keeps no row that is left out here.
    """
    slopes, parent = rows.slopes.mid, np.arange(len(boxes))
    effects = np.ptp(slopes, axis=0) * (boxes.hi - boxes.lo)
    for _ in range(min(MOST_CUTS, slopes.shape[1])):
        numbers, axis = np.arange(len(boxes)), np.argmax(effects, axis=1)
        centres, radii = centred(boxes)
        scores, along = centres @ slopes.T + rows.offsets.mid, slopes[:, axis].T
        moves = along * radii[numbers, axis][:, None]
        first, last = np.argmax(scores - moves, axis=1), np.argmax(scores + moves, axis=1)
        behind, apart = (of[numbers, last] - of[numbers, first] for of in (scores, -along))
        with quiet():
            place = centres[numbers, axis] + behind / apart
        is_cut = (boxes.lo[numbers, axis] < place) & (place < boxes.hi[numbers, axis])
        effects[numbers, axis] = 0.0  # once along each input
        below, above = ((boxes.lo.copy(), boxes.hi.copy()) for _ in range(2))
        below[1][is_cut, axis[is_cut]] = above[0][is_cut, axis[is_cut]] = place[is_cut]
        boxes = Interval.joined(Interval(*below), Interval(*above)[is_cut])
        effects, parent = (np.concatenate([of, of[is_cut]]) for of in (effects, parent))
    return boxes, parent


@dataclass(frozen=True, eq=False)
class StripRows:
    """One variable of a single stage, whose rows have scores a_m x + c_m with ascending a_m.

    X_m = [lo_m, hi_m] holds the points at which row m is at most g behind the rows before and after it. A row beyond
    has at most e^{−g} times the weight of a neighbour, and the weights of all neighbours add up to 1 at most: all rows
    with x ∉ X_m have together a weight of at most 2e^{−g}.
    """

    lo: Float[np.ndarray, " rows"]
    hi: Float[np.ndarray, " rows"]
    gap: float
    leak: float  # 2e^{−g}, with the errors of computed scores

    @classmethod
    def of(
        cls,
        slopes: Float[np.ndarray, " rows"],
        offsets: Float[np.ndarray, " rows"],
        gap: float,
        moved: Float[np.ndarray, " rows_but_one"],
        leak: float,
    ) -> StripRows:
        """Make rows whose differences from the next row are off by `moved` besides."""
        steep, apart = (Interval.point(of[1:]) - Interval.point(of[:-1]) for of in (slopes, -offsets))
        if not (steep.lo > 0).all():
            raise ProgramError("two rows of an axis have nearly the same slope")
        inf, behind = np.array([np.inf]), Interval.point(up(gap + moved))
        lo, hi = ((apart - behind) / steep).lo, ((apart + behind) / steep).hi
        # If rows do not take turns in this order, as after a cast, intervals are made longer until both ends ascend.
        lo, hi = np.minimum.accumulate(np.concatenate([-inf, lo])[::-1])[::-1], np.concatenate([hi, inf])
        return cls(lo, np.maximum(np.maximum.accumulate(hi), lo), gap, leak)

    @property
    def most_at_once(self) -> int:
        """The largest number of rows that are needed at one point."""
        ends = np.concatenate([self.lo, np.nextafter(self.hi, np.inf)])
        steps = np.repeat([1, -1], len(self.lo))[np.argsort(ends, kind="stable")]
        return int(np.cumsum(steps).max())

    def winners(self, lo: Float[np.ndarray, " cells"], hi: Float[np.ndarray, " cells"]) -> list[RowWinners]:
        found = []
        for low, high in zip(lo.tolist(), hi.tolist(), strict=True):
            (rows,) = np.nonzero((self.lo <= high) & (self.hi >= low))
            ends = np.maximum(self.lo[rows], low), np.minimum(self.hi[rows], high)
            found.append(RowWinners(rows, *ends, self.leak))
        return found


@dataclass(frozen=True, eq=False)
class AxisKeys:
    """The outputs of the program that one head over such keys makes."""

    outputs: Int[np.ndarray, " outputs"]
    axes: Sequence[AxisRows | StripRows]
    keys: Int[np.ndarray, "*rows"]  # the number of the key of every combination of rows
    values: Interval  # (keys, outputs)
    spare_leak: float  # the weight of keys that repeat a combination of rows
    growth: float  # e^{2δ}
    rounding: Float[np.ndarray, " outputs"]

    def bounds(self, target: Target, cells: Interval) -> Float[np.ndarray, "cells outputs"]:
        """Return upper bounds of |f − computed outputs| on cells of the box."""
        winners = [axis.winners(cells.lo[:, i], cells.hi[:, i]) for i, axis in enumerate(self.axes)]
        counts = np.array([[len(found.rows) for found in axis] for axis in winners])
        firsts = np.cumsum(counts, axis=1) - counts
        joined = [
            [np.concatenate([getattr(each, name) for each in axis]) for name in ("rows", "lo", "hi")]
            for axis in winners
        ]
        per_cell = counts.prod(axis=0)
        ends = np.cumsum(per_cell)
        largest = np.zeros((len(cells), len(self.outputs)))
        for first in range(0, int(ends[-1]), PAIRS_PER_BATCH):
            check_time(PROVING)
            number = np.arange(first, min(first + PAIRS_PER_BATCH, int(ends[-1])))
            cell = np.searchsorted(ends, number, "right")
            number = number - (ends - per_cell)[cell]
            rows, lo, hi = [], *np.empty((2, len(cell), len(winners)))
            for i, (numbers, low, high) in enumerate(joined):
                place = firsts[i][cell] + number % counts[i][cell]
                number = number // counts[i][cell]
                rows.append(numbers[place])
                lo[:, i], hi[:, i] = low[place], high[place]
            off = distance(target.enclosure(Interval(lo, hi))[:, self.outputs], self.values[self.keys[tuple(rows)]])
            np.maximum.at(largest, cell, off)
        leak = self.spare_leak + np.sum([[each.leak for each in found] for found in winners], axis=0)
        farthest = distance(target.enclosure(cells)[:, self.outputs], hull(self.values))
        leaking = up(up(AXIS_FARTHEST * leak * self.growth, len(winners) + 3)[:, None] * farthest)
        return up(up(AXIS_DISTANCE * largest + leaking) + self.rounding)


@dataclass(frozen=True, eq=False)
class AxisKind(Kind):
    """Enclosure leaves for heads that select a cell of a grid, all outputs together."""

    heads: tuple[AxisKeys, ...]
    target: Target
    truncation: float = 0.0
    is_single: bool = False  # the program is one stage; its ledger then has terms for selection and for rounding
    name = "enclosure"

    @property
    def gap(self) -> float:
        return self.heads[0].axes[0].gap

    @property
    def fewest_rows(self) -> int:
        """The least number of rows of an axis."""
        return min(min(head.keys.shape) for head in self.heads)

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
    """Return the last of the stages as heads over combinations of rows, or None if it has other keys.

    On each axis the rows that are left out have together a weight of at most `leak`.
    """
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
    groups, grids = [np.flatnonzero(owners == axis) for axis in range(len(ways))], list[_Combinations]()
    for part in last.parts:
        grid = _combinations(part, groups)
        if grid is None:
            return None
        grids.append(grid)
    gap = math.log(max(len(rows.offsets.mid) for grid in grids for rows in grid.rows) / leak)
    found: list[AxisKeys] = []
    for part, grid in zip(last.parts, grids, strict=True):
        axes = tuple(
            AxisRows(axis, tuple(way), tuple(states), groups[axis], rows, cuts[axis], gap)
            for axis, (way, rows) in enumerate(zip(ways, grid.rows, strict=True))
        )
        found.append(_keys(part, axes, grid, states[-1]))
    return tuple(found)


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
    rounding = AXIS_ROUNDING * rounding_of_sums(part.roundings, reach)[0]
    return AxisKeys(part.outputs, axes, grid.keys, values, grid.spare_leak, growth, rounding)
