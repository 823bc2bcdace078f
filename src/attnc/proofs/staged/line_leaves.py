"""Leaves for a function of one number t: |A(t) − g(t)| on an interval, and the rounding of A over these leaves.

The values of a gate cross where its weights are least sure. Leaves may be wide there, while rounding is large on small
cells only: it is bounded on parts of the leaves. The checker bounds it on parts, too, 2^CHECKED_HALVINGS of each leaf.
A leaf that took more parts here is stored as several leaves, each with no more parts than that. So every bound that is
found here on a part is found again by the checker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import down, up
from attnc.proofs.cells.branching import MAX_LEVEL, Budget, Covering, Leaf, branch_and_bound
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import SHARP, Kind
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.kinds.taylor import MeanValueKind, TaylorKind
from attnc.proofs.margins import LEAF_ROOM
from attnc.proofs.stages.one_stage import OneStage
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.substituting import substitute
from attnc.targets.expressions.tree import Call, Node, Number
from attnc.targets.parts.part import T, function_of_t

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LINE_ORDER = 10
"""The order of Taylor leaves of one variable: a higher one makes fewer leaves, each of which takes longer."""
FIRST_LEVEL = 3
"""Branch and bound begins with 2^3 cells: fewer would be halved in any case."""
LOOSE_LEAVES, CLOSE_LEAVES = 0.05, 2e-3
"""How far above the largest error that was seen a bound may be, relatively. 5 % is cheap. Theorems that count their
anchors are 0.2 % sharp, and a proof of such a network must not miss the eps that they met."""
LEAST_GOAL = 1e-14
"""Bounds below this share of the function and of the values are rounding alone, which no halving makes smaller."""
SAMPLES = 257
"""Points at which the size of the function is looked at, ends included."""
MOST_IDLE = 3
"""Halvings in a row that may fail to lower the rounding before cells are halved no more."""
MOST_ROUNDING_CELLS = 4096
"""The largest number of cells on which rounding is bounded; the value is not tuned."""
WORTH_HALVING = 0.8
"""A halving that leaves more than this share of the rounding counts as idle."""
CHECKED_HALVINGS = 4
"""log₂ of the number of parts on which the checker bounds the rounding of a leaf of one variable."""

CellBounds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(centres, radii) → a bound for every cell."""


def prove_line(
    heads: tuple[SoftHead[Enclosed], ...],
    tree: Node,
    lo: float,
    hi: float,
    margin: float,
    seconds: float,
    *,
    least_level: int = 0,
    tolerance: float = LOOSE_LEAVES,
    limit: float = math.inf,
) -> tuple[Covering, Box, tuple[float, float] | None]:
    """Prove |A(t) − g(t)| over [lo − margin, hi + margin], A being the sum of the heads.

    Returns the leaves, that interval, and the ends at which g is held: it is held at `limit`, or where it is not
    defined on the whole interval. Leaves are cells of `least_level` at least.
    """
    one = np.zeros(1)
    stage = OneStage(heads, Enclosed(one, one), Enclosed(one[:, None], one[:, None]))
    # Held at a ∈ [lo, lo + margin], b ∈ [hi − margin, hi], a t within the margin of s ∈ [lo, hi] is not taken farther.
    inner = max(lo, math.nextafter(lo + margin, -math.inf)), min(hi, math.nextafter(hi - margin, math.inf))
    lo, hi = math.nextafter(lo - margin, -math.inf), math.nextafter(hi + margin, math.inf)
    box = Box(("t",), np.array([lo]), np.array([hi]))
    held = (lo, limit) if limit < math.inf else None if _is_defined(tree, lo, hi) else inner
    if held is not None:
        tree = substitute(tree, Call("clip", (T, *(Number(Fraction(end)) for end in held))))
    expression = function_of_t(tree)
    target = _LineTarget(expression, box)
    samples = np.linspace(lo, hi, SAMPLES)[:, None]
    at_kinks = MeanValueKind(stage, expression, box)
    kinds: list[Kind] = [TaylorKind(stage, expression, LINE_ORDER), SelectionKind(stage, target), at_kinks]
    largest = (_largest_value(head, box) for head in heads)
    floor = LEAST_GOAL * max(float(np.abs(expression(samples)).max()), *largest)
    budget = Budget(seconds=seconds)
    proof = branch_and_bound(kinds, box, tolerance=tolerance, floor=floor, start_level=FIRST_LEVEL, budget=budget)
    finer = _finer(proof, kinds[0], least_level)
    return dataclasses.replace(finer, leaf_bounds=up(finer.leaf_bounds * (1 + LEAF_ROOM))), box, held


def _finer(proof: Covering, kind: Kind, least_level: int) -> Covering:
    """Cut wide leaves into cells of this level, each with a bound of its own where that is smaller."""
    depths = [max(0, least_level - leaf.level) for leaf in proof.leaves]
    owner = np.repeat(np.arange(len(depths)), [2**depth for depth in depths])
    leaves, upper = list[Leaf](), proof.leaf_bounds[owner]
    for leaf, depth in zip(proof.leaves, depths, strict=True):
        index = range(leaf.index[0] << depth, leaf.index[0] + 1 << depth)
        leaves += [dataclasses.replace(leaf, level=leaf.level + depth, index=(i,)) for i in index]
    rows = np.flatnonzero(np.array(depths)[owner])
    if len(rows):
        cells = cell_boxes(proof.box, least_level, np.array([leaves[row].index for row in rows.tolist()]))
        found = kind.bounds(*cells, SHARP).upper
        for row in rows[(found < upper[rows]).all(axis=1)].tolist():
            leaves[row] = dataclasses.replace(leaves[row], kind=kind.name, order=kind.order)
        upper[rows] = np.minimum(upper[rows], found)
    return dataclasses.replace(proof, leaves=tuple(leaves), leaf_bounds=upper, terms={"head": upper})


def _largest_value(head: SoftHead[Enclosed], box: Box) -> float:
    values = np.abs(head.values.mid)
    if head.carried is not None:
        values = values + np.abs(head.carried.mid[..., 0]) * float(box.magnitude[0])
    return float(values.max())


class _LineTarget(ExpressionTarget):
    """An expression of t whose domain was checked already."""

    def __init__(self, expression: object, box: Box) -> None:
        self.expression, self.box, self.text = expression, box, ""  # type: ignore[assignment]
        self.input_shapes, self.output_shape = ((1,),), ()


def _is_defined(tree: Node, lo: float, hi: float) -> bool:
    found = function_of_t(tree).ranges(Interval(np.array([[lo]]), np.array([[hi]])), violations="infinite")
    return bool(np.isfinite(found.lo).all() and np.isfinite(found.hi).all())


def rounded_leaves(bounds: CellBounds, proof: Covering) -> tuple[float, Covering]:
    """The largest bound of any cell, and the proof by leaves that each hold at most 2^CHECKED_HALVINGS of these cells.

    Cells are halved where the bound is largest, as long as that makes it smaller.
    """
    level = np.array([leaf.level for leaf in proof.leaves])
    index = np.array([leaf.index[0] for leaf in proof.leaves], dtype=np.int64)
    upper, owner, idle = bounds(*_boxes(proof.box, level, index)), np.arange(len(level)), 0
    while idle < MOST_IDLE and len(level) < MOST_ROUNDING_CELLS:
        largest = upper.max()
        wide = (upper > largest / 2) & (level < MAX_LEVEL)
        new = np.tile(level[wide] + 1, 2), np.concatenate([2 * index[wide], 2 * index[wide] + 1])
        found = bounds(*_boxes(proof.box, *new)) if wide.any() else upper[:0]
        level, index = np.concatenate([level[~wide], new[0]]), np.concatenate([index[~wide], new[1]])
        upper, owner = np.concatenate([upper[~wide], found]), np.concatenate([owner[~wide], np.tile(owner[wide], 2)])
        idle = 0 if upper.max() < WORTH_HALVING * largest else idle + 1
    return float(upper.max()), _halved_leaves(proof, owner, level, index)


def leaf_intervals(proof: Covering) -> Interval:
    """The leaves of a line, in their order."""
    level = np.array([leaf.level for leaf in proof.leaves])
    centres, radii = _boxes(proof.box, level, np.array([leaf.index[0] for leaf in proof.leaves], dtype=np.int64))
    return Interval(down(centres - radii)[:, 0], up(centres + radii)[:, 0])


def _boxes(
    box: Box, level: Int[np.ndarray, " cells"], index: Int[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, "cells 1"], Float[np.ndarray, "cells 1"]]:
    """Centres and radii of cells of several levels."""
    found = np.empty((2, len(level), 1))
    for each in np.unique(level).tolist():
        rows = level == each
        found[:, rows] = cell_boxes(box, each, index[rows][:, None])
    return found[0], found[1]


def _halved_leaves(proof: Covering, owner: np.ndarray, level: np.ndarray, index: np.ndarray) -> Covering:
    """Halve leaves until no cell is more than CHECKED_HALVINGS levels below its leaf."""
    halved = {
        (deep - above, i >> above)
        for leaf, deep, i in zip(owner.tolist(), level.tolist(), index.tolist(), strict=True)
        for above in range(CHECKED_HALVINGS + 1, deep - proof.leaves[leaf].level + 1)
    }
    leaves, numbers = list[Leaf](), list[int]()
    for number, leaf in enumerate(proof.leaves):
        pending = [(leaf.level, leaf.index[0])]
        while pending:
            cell = pending.pop()
            if cell in halved:
                pending += [(cell[0] + 1, 2 * cell[1] + side) for side in (1, 0)]
            else:
                leaves.append(dataclasses.replace(leaf, level=cell[0], index=(cell[1],)))
                numbers.append(number)
    terms = {name: term[numbers] for name, term in proof.terms.items()}
    return dataclasses.replace(proof, leaves=tuple(leaves), leaf_bounds=proof.leaf_bounds[numbers], terms=terms)
