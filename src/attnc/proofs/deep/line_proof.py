"""Heads as a function of one number, proved against an expression of it on an interval."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

from attnc.ir.soft_head import Enclosed, SoftHead
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Covering, Leaf, branch_and_bound
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import Kind
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.kinds.taylor import MeanValueKind, TaylorKind
from attnc.proofs.stages.one_stage import OneStage
from attnc.proofs.taylor.ranges import SHARP
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.substituting import substitute
from attnc.targets.expressions.tree import Call, Node, Number
from attnc.targets.parts.part import T, function_of_t

ORDER = 10
START_LEVEL = 3
TOLERANCE = 0.05
FLOOR = 1e-14
"""Of the function and of the values that are averaged: below that, only rounding would be divided ever more finely."""

SPARE = 2.0**-13
"""By which bounds are stated larger than they are: here the largest |p| of a polynomial at an end of a cell is found
exactly. A checker that halves cells ten times, and each time leaves a dozen coefficients of 2^−20 of the bound aside,
finds it to within that."""


def prove_line(
    heads: tuple[SoftHead[Enclosed], ...],
    tree: Node,
    lo: float,
    hi: float,
    margin: float,
    seconds: float,
    least_level: int = 0,
    tolerance: float = TOLERANCE,
) -> tuple[Covering, Box, tuple[float, float] | None]:
    """|A(t) − g(t)| over [lo − margin, hi + margin], A what the heads say together; that interval, and the ends at
    which g is held if it has to be.

    Leaves are cells of `least_level` at least.
    """
    one = np.zeros(1)
    stage = OneStage(heads, Enclosed(one, one), Enclosed(one[:, None], one[:, None]))
    # Held at a ∈ [lo, lo + margin], b ∈ [hi − margin, hi], a t within the margin of s ∈ [lo, hi] is not taken farther.
    inner = max(lo, math.nextafter(lo + margin, -math.inf)), min(hi, math.nextafter(hi - margin, math.inf))
    lo, hi = math.nextafter(lo - margin, -math.inf), math.nextafter(hi + margin, math.inf)
    box = Box(("t",), np.array([lo]), np.array([hi]))
    is_held = not _is_defined(tree, lo, hi)
    if is_held:
        ends = tuple(Number(Fraction(end)) for end in inner)
        tree = substitute(tree, Call("clip", (T, *ends)))
    expression = function_of_t(tree)
    target = _Line(expression, box)
    samples = np.linspace(lo, hi, 257)[:, None]
    at_kinks = MeanValueKind(stage, expression, box)
    kinds: list[Kind] = [TaylorKind(stage, expression, ORDER), SelectionKind(stage, target), at_kinks]
    largest = (_largest_value(head, box) for head in heads)
    floor = FLOOR * max(float(np.abs(expression(samples)).max()), *largest)
    proof = branch_and_bound(kinds, box, tolerance=tolerance, floor=floor, start_level=START_LEVEL, time_budget=seconds)
    finer = _finer(proof, kinds[0], least_level)
    stated = dataclasses.replace(finer, leaf_bounds=up(finer.leaf_bounds * (1 + SPARE)))
    return stated, box, inner if is_held else None


def _finer(proof: Covering, kind: Kind, least_level: int) -> Covering:
    """The proof with wide leaves cut into cells of this level, each with a bound of its own, if that is smaller."""
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


class _Line(ExpressionTarget):
    """An expression of t whose domain was checked already."""

    def __init__(self, expression: object, box: Box) -> None:
        self.expression, self.box, self.text = expression, box, ""  # type: ignore[assignment]
        self.input_shapes, self.output_shape = ((1,),), ()


def _is_defined(tree: Node, lo: float, hi: float) -> bool:
    found = function_of_t(tree).ranges(Interval(np.array([[lo]]), np.array([[hi]])), violations="infinite")
    return bool(np.isfinite(found.lo).all() and np.isfinite(found.hi).all())
