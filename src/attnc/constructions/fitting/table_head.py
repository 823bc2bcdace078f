"""One head for a table: its error in its own arithmetic, and its program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.built import Built
from attnc.constructions.fitting.cell_head import CellHead, self_attention
from attnc.constructions.fitting.positions import Positions
from attnc.errors import BoundNotMet, InputError
from attnc.ir.reference import softmax
from attnc.ir.soft_head import SoftHead
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_TABLE_VALUE = 10.0
"""Largest ratio of the values of keys to those of the table: rounding grows with it."""
TABLE_SHARE = 0.95
"""The share of eps for a fit: the rest is for rounding."""
MAX_SCORES_CHECKED = 2 * 10**7
"""Largest number of scores computed for the error of a head; with more points a sample is taken."""
TABLE_SCORES_PER_BLOCK = 2**21
"""Scores computed at once: 16 MB in float64."""


@dataclass(frozen=True, eq=False)
class TableHead:
    """A soft head in y = scale·x + offset for a table; `exact` is its output at the table's points without rounding."""

    target: TableTarget
    dtype: str
    scale: Float[np.ndarray, " d"]
    offset: Float[np.ndarray, " d"]
    keys: SoftHead[np.ndarray]  # of y
    exact: Float[np.ndarray, "points outputs"]
    parameters: tuple[tuple[str, float | int | str], ...]

    @property
    def values(self) -> Float[np.ndarray, "keys outputs"]:
        return self.keys.values

    def __call__(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
        """The output in the head's own arithmetic, as the program computes it."""
        scale, offset, values = (part.astype(self.dtype) for part in (self.scale, self.offset, self.values))
        keys = np.column_stack([self.keys.slopes, self.keys.offsets]).astype(self.dtype).T
        found = np.empty((len(points), values.shape[1]))
        step = max(1, TABLE_SCORES_PER_BLOCK // len(values))
        for start in range(0, len(points), step):
            block = slice(start, start + step)
            y = points[block].astype(self.dtype) * scale + offset
            queries = np.column_stack([y, np.ones(len(y), self.dtype)])
            found[block] = softmax(queries @ keys) @ values
        return found

    @cached_property
    def error(self) -> float:
        """The largest error at the table's points, rounding included.

        For a large table rounding is measured on a sample, and counted twice. The certificate measures the error of the
        network at every point.
        """
        points, values = self.target.points, self.target.values
        count = max(64, MAX_SCORES_CHECKED // len(self.values))
        if count >= len(points):
            return float(np.abs(self(points) - values).max())
        sample = np.random.default_rng(0).choice(len(points), count, replace=False)
        rounding = np.abs(self(points[sample]) - self.exact[sample]).max()
        return float(np.abs(self.exact - values).max() + 2 * rounding)

    def build(self, name: str) -> Built:
        keys = self.keys.chosen(_neighbours_together(self.keys.slopes))
        cells = CellHead(self.target, self.dtype, self.scale, self.offset, keys, 1.0, Positions(1, 0.0))
        largest = ("largest_value", float(np.abs(self.values).max()))
        parameters = (("points", self.target.num_points), *self.parameters, largest)
        return Built(self_attention(cells), name, None, parameters=parameters)


def _neighbours_together(anchors: np.ndarray, per_block: int = 1024) -> np.ndarray:
    """An order in which keys that are close follow each other: engines leave out whole blocks that are far away."""
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


def as_table(target: Target, name: str) -> TableTarget:
    if not isinstance(target, TableTarget):
        raise InputError(f"{name} takes a table (attnc.TableTarget), and {target.describe()} is none")
    return target


def require_room(target: TableTarget, dtype: str) -> None:
    """Values and coordinates fit the arithmetic, with room for values MAX_TABLE_VALUE times as large and their sums."""
    limits = np.finfo(dtype)
    largest = float(np.abs(target.values).max())
    if not largest < float(limits.max) / 1e4:
        raise InputError(f"the {target.describe()} reaches {largest:.3g}, too much for {dtype}: scale the values")
    box = target.box
    with np.errstate(over="ignore"):
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


def middle_of_groups(
    f: Float[np.ndarray, "points outputs"], which: Int[np.ndarray, " points"], count: int
) -> Float[np.ndarray, "groups outputs"]:
    """The middle of the values of points that are equal in the program's dtype."""
    low, high = np.full((count, f.shape[1]), np.inf), np.full((count, f.shape[1]), -np.inf)
    np.minimum.at(low, which, f)
    np.maximum.at(high, which, f)
    return low / 2 + high / 2


def is_above_rounding(table: TableTarget, eps: float, dtype: str) -> bool:
    """Whether a sum over many keys can be this exact; one key alone can, where its value is held exactly."""
    return eps > 4 * UNIT_ROUNDOFF[dtype] * float(np.abs(table.values).max())


def accepted(heads: list[TableHead], name: str, eps: float) -> Built:
    """The last head, if it is close enough; otherwise a refusal that carries the best one."""
    if heads[-1].error <= eps:
        return heads[-1].build(name)
    best = min(heads, key=lambda head: head.error)
    target, error, dtype = best.target, best.error, best.dtype
    raise BoundNotMet(
        f"cannot bring the error at the points of the {target.describe()} to eps={eps:g} in {dtype}: the best is "
        f"{error:.3g}, with {len(best.values):,} anchors. {_why(target, dtype, error)} "
        f"Choose eps ≥ {1.05 * error:.2g}{', or float64' if dtype == 'float32' else ''}.",
        eps=eps,
        bound=None,
        build=lambda: best.build(name),
    )


def too_many(table: TableTarget, name: str, eps: float, limit: int, heads: list[TableHead]) -> BoundNotMet:
    """A key for every point is needed, and is not allowed."""
    return BoundNotMet(
        f"cannot bring the error at the points of the {table.describe()} to eps={eps:g}: no smooth fit does, and a key "
        f"for every point is {table.num_points:,} anchors, more than the {limit:,} that max_anchors and max_bytes "
        "allow. Choose a larger eps, or raise them.",
        eps=eps,
        bound=None,
        build=(lambda: min(heads, key=lambda head: head.error).build(name)) if heads else None,
    )


def _why(target: TableTarget, dtype: str, error: float) -> str:
    cast = target.points.astype(dtype)
    order = np.lexsort(cast.T[::-1])
    is_same = (cast[order][1:] == cast[order][:-1]).all(axis=1)
    if is_same.any():
        i = int(np.argmax(is_same))
        names = target.box.names
        pair = " and ".join(f"({_exactly(names, point)})" for point in target.points[order[i : i + 2]])
        return f"In {dtype} some of its points are one, such as {pair}."
    largest = float(np.abs(target.values).max())
    if error <= 16 * UNIT_ROUNDOFF[dtype] * largest:
        return f"Values as large as {largest:.3g} are held no better in {dtype}."
    return f"Some of its points are too close together for the scores of their keys to differ in {dtype}."


def _exactly(names: tuple[str, ...], point: np.ndarray) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in zip(names, point.tolist(), strict=True))
