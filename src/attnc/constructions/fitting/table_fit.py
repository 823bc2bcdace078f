"""The fit of a table by one head: its error at the table's points, and the program or the refusal.

A `TableSearch` tries heads with fewer keys than points first, and then heads with a key for every point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnc.constructions.built import Built
from attnc.constructions.construction import Construction, Request, finite_box, for_eps, made_for, of_kind
from attnc.constructions.fitting.axis import KeysOnAxis
from attnc.constructions.fitting.selection import allowed_anchors
from attnc.constructions.fitting.stored_head import StoredHead, check_max_value
from attnc.errors import BoundNotMet, InputError
from attnc.numerics.arrays import Float, Int
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

TABLE_SHARE = 0.95
"""The share of eps for a fit. The rest is for rounding, which is part of the error of the head. Measured
with six tables: with 0.9 one takes 54 anchors instead of 38; 0.975 changes nothing."""
MAX_SCORES_CHECKED = 2 * 10**7
"""Largest number of scores computed for the error of a head. With more, a sample of points is taken.
Measured with twelve tables of up to 22,500 points: half and twice as many give the same heads."""


NO_ROWS = np.zeros(0, np.int64)
NO_POINTS = np.zeros((0, 1))
"""A table needs no points to find its largest value."""


@dataclass(frozen=True, eq=False)
class TableFit:
    """A head for a table, with its largest error at the table's points before rounding."""

    target: TableTarget
    head: StoredHead
    fitted: float
    exact_at: Callable[[Int[np.ndarray, " rows"]], Float[np.ndarray, "rows outputs"]]
    """Its output at chosen rows without rounding."""
    parameters: tuple[tuple[str, float | int | str], ...]
    worst_rows: Int[np.ndarray, " rows"]  # some of those with the largest errors
    axes: Sequence[KeysOnAxis] = ()  # if its keys are a grid, the keys of every axis

    @property
    def values(self) -> Float[np.ndarray, "keys outputs"]:
        return self.head.keys.values

    @cached_property
    def error(self) -> float:
        """The largest error at the table's points, rounding included.

        For a large table rounding is measured on a sample and doubled. The certificate measures the error of the
        network at every point.
        """
        count, num_points = max(64, MAX_SCORES_CHECKED // len(self.values)), self.target.num_points
        if count >= num_points:
            points, values = self.target.rows_at(np.arange(num_points))
            return float(np.abs(self.head(points) - values).max())
        sample = np.random.default_rng(0).choice(num_points, count, replace=False)
        rounding = np.abs(self.head(self.target.rows_at(sample)[0]) - self.exact_at(sample)).max()
        return float(self.fitted + 2 * rounding)

    def build(self, name: str) -> Built:
        keys = self.head.keys.chosen(_neighbours_together(self.head.keys.slopes))
        largest = ("largest_value", float(np.abs(self.values).max()))
        parameters = (("points", self.target.num_points), *self.parameters, largest)
        return Built(replace(self.head, keys=keys).program(self.target), name, None, parameters=parameters)


def _neighbours_together(anchors: np.ndarray, per_block: int = 1024) -> np.ndarray:
    """Return an order in which close keys are in the same block, so that engines can skip blocks that are far away."""
    order = np.arange(len(anchors))
    num_blocks, d = -(-len(anchors) // per_block), anchors.shape[1]
    if num_blocks < 4:
        return order
    pieces = [order]
    for axis in range(d):
        strips = max(1, round((num_blocks / len(pieces)) ** (1 / (d - axis))))
        pieces = [
            part
            for piece in pieces
            for part in np.array_split(piece[np.argsort(anchors[piece, axis], kind="stable")], strips)
        ]
    return np.concatenate(pieces)


class TableSearch(ABC):
    """The search for a head that is within eps of the table at all of its points."""

    def __init__(self, name: str, table: TableTarget, request: Request, max_value: float) -> None:
        check_max_value(max_value)
        require_room(table, request.dtype)
        self.name, self.table, self.request, self.max_value = name, table, request, max_value
        self.eps, self.dtype, self.limit = request.goal, request.dtype, allowed_anchors(table, request)
        lo, hi = table.values.min(axis=0), table.values.max(axis=0)
        self.middle = lo / 2 + hi / 2
        self.largest_f = float(np.maximum(np.abs(lo), np.abs(hi)).max())
        # An output that hardly varies may still have values as large as eps.
        self.sizes = np.maximum(hi / 2 - lo / 2, self.eps)

    @abstractmethod
    def smooth(self) -> Iterator[TableFit]:
        """Yield heads with fewer keys than points, or none if the table is too rough for them."""

    @abstractmethod
    def at_points(self) -> Iterator[TableFit]:
        """Yield heads with a key for every point, ever closer to the table."""

    def alternative(self) -> tuple[tuple[str, float | int | str], ...]:
        """Return the error of a head with fewer keys than points, to be stated beside a key for every point."""
        return ()

    def fit(
        self,
        head: StoredHead,
        fitted: float,
        exact_at: Callable[[np.ndarray], np.ndarray],
        *parameters: tuple[str, float | int | str],
        worst_rows: Int[np.ndarray, " rows"] = NO_ROWS,
        axes: Sequence[KeysOnAxis] = (),
    ) -> TableFit:
        """Return a fit of the table, from a fit of its values minus their middle."""
        moved = replace(head, keys=replace(head.keys, values=head.keys.values + self.middle))
        return TableFit(
            self.table, moved, fitted, lambda rows: exact_at(rows) + self.middle, parameters, worst_rows, axes
        )

    def build(self) -> Built:
        """Return the program of the first head within eps, or raise a refusal that carries the best one."""
        # A sum over many keys is exact to a few roundings; one key alone can be exact, if its value is.
        can_sum = self.eps > 4 * UNIT_ROUNDOFF[self.dtype] * self.largest_f
        tried: list[TableFit] = []
        for heads in (self.smooth() if can_sum else (), self._allowed_at_points(tried)):
            for fit in heads:
                if fit.error <= self.eps:
                    more = self.alternative() if len(fit.values) >= self.table.num_points else ()
                    return replace(fit, parameters=(*fit.parameters, *more)).build(self.name)
                tried.append(fit)
        best = min(tried, key=lambda fit: fit.error)
        error, dtype = best.error, self.dtype
        raise BoundNotMet(
            f"cannot bring the error at the points of the {self.table.describe()} to eps={self.eps:g} in {dtype}: the "
            f"best is {error:.3g}, with {len(best.values):,} anchors. {_why(self.table, dtype, error)} "
            f"Choose eps ≥ {1.05 * error:.2g}{', or float64' if dtype == 'float32' else ''}. A proof counts "
            "rounding at its worst, and may need a larger eps.",
            eps=self.eps,
            build=lambda: best.build(self.name),
        )

    def _allowed_at_points(self, tried: list[TableFit]) -> Iterator[TableFit]:
        if self.table.num_points <= self.limit:
            yield from self.at_points()
            return
        raise BoundNotMet(
            f"cannot bring the error at the points of the {self.table.describe()} to eps={self.eps:g}: no smooth fit "
            f"does, and a key for every point is {self.table.num_points:,} anchors, more than the {self.limit:,} that "
            "max_anchors and max_bytes allow. Choose a larger eps, or raise them.",
            eps=self.eps,
            build=(lambda: min(tried, key=lambda fit: fit.error).build(self.name)) if tried else None,
        )


def table_construction(theorem: Callable[..., Built], is_gridded: bool) -> Construction:
    """Return the construction of a theorem for tables. `auto` considers it for gridded tables, or for the others."""
    is_table = made_for("TableTarget")

    def suits(target: Target, request: Request) -> bool:
        if is_table(target, request) is not None:
            return False
        return (of_kind(theorem.__name__, target, TableTarget).grid is not None) == is_gridded

    return Construction(theorem.__name__, for_eps(theorem), (finite_box, is_table), suits)


def require_room(target: TableTarget, dtype: str) -> None:
    """Raise InputError unless the dtype holds the coordinates, and values ten times as large and their sums."""
    limits, largest = np.finfo(dtype), target.largest_value(NO_POINTS)
    if not largest < float(limits.max) / 1e4:
        raise InputError(f"the {target.describe()} reaches {largest:.3g}, too much for {dtype}: scale the values")
    box = target.box
    with quiet():
        is_held = box.magnitude / box.widths * target.num_points < float(limits.max) / 1e4
        is_held &= (box.magnitude < float(limits.max) / 1e4) & (box.widths > float(limits.smallest_normal) * 1e4)
    if not is_held.all():
        raise InputError(f"{box} is too wide or too narrow for {dtype}: scale the inputs")
    is_one = box.lo.astype(dtype) == box.hi.astype(dtype)
    if is_one.any():
        i = int(np.argmax(is_one))
        ends = f"from {float(box.lo[i])!r} to {float(box.hi[i])!r}"
        raise InputError(
            f"in {dtype} all values of {box.names[i]}, {ends}, are one number: move them towards 0, or use float64"
        )


def _why(target: TableTarget, dtype: str, error: float) -> str:
    """Return the reason why no head is closer."""
    cast = target.points.astype(dtype)
    order = np.lexsort(cast.T[::-1])
    is_same = (cast[order][1:] == cast[order][:-1]).all(axis=1)
    if is_same.any():
        i = int(np.argmax(is_same))
        points = [zip(target.box.names, point.tolist(), strict=True) for point in target.points[order[i : i + 2]]]
        pair = " and ".join(f"({', '.join(f'{name} = {value!r}' for name, value in point)})" for point in points)
        return f"In {dtype} some of its points are equal, such as {pair}."
    largest = target.largest_value(NO_POINTS)
    if error <= 16 * UNIT_ROUNDOFF[dtype] * largest:
        return f"The rounding of values as large as {largest:.3g} in {dtype} is of this size."
    return f"Some of its points are too close together for the scores of their keys to differ in {dtype}."
