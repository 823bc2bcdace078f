"""One head as a function of one number, proved against an expression of it on an interval; and how steep that is."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

from attnc.certificates.branching import Bounds, Kind, Proof, branch_and_bound
from attnc.certificates.kinds import mean_value_kind, taylor_kind
from attnc.certificates.one_stage import Enclosed, OneStage, StageHead
from attnc.certificates.polynomial_ranges import Goal
from attnc.certificates.selection_leaves import selection_bounds
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import down, up
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.parts import T, function_of_t, substitute
from attnc.targets.tree import Call, Node, Number

ORDER = 10
START_LEVEL = 3
TOLERANCE = 0.05
PIECES = 256


def prove_line(
    head: StageHead, tree: Node, lo: float, hi: float, margin: float, seconds: float
) -> tuple[Proof, Box, tuple[float, float] | None]:
    """|A(t) − g(t)| over [lo − margin, hi + margin], that interval, and the ends at which g is held if it has to be."""
    one = np.zeros(1)
    stage = OneStage((head,), Enclosed(one, one), Enclosed(one[:, None], one[:, None]))
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
    at_kinks = dataclasses.replace(mean_value_kind(stage, expression, box), is_fallback=False)
    kinds = [taylor_kind(stage, expression, ORDER), _selection(stage, target), at_kinks]
    floor = 1e-14 * float(np.abs(expression(samples)).max())
    proof = branch_and_bound(kinds, box, tolerance=TOLERANCE, floor=floor, start_level=START_LEVEL, time_budget=seconds)
    return proof, box, inner if is_held else None


class _Line(ExpressionTarget):
    """An expression of t whose domain was checked already."""

    def __init__(self, expression: object, box: Box) -> None:
        self.expression, self.box, self.text = expression, box, ""  # type: ignore[assignment]
        self.input_shapes, self.output_shape = ((1,),), ()


def _selection(stage: OneStage, target: _Line) -> Kind:
    def bounds(centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        return Bounds(selection_bounds(stage, target, centres, radii))

    return Kind("selection", 0, bounds)


def _is_defined(tree: Node, lo: float, hi: float) -> bool:
    found = function_of_t(tree).ranges(Interval(np.array([[lo]]), np.array([[hi]])), violations="infinite")
    return bool(np.isfinite(found.lo).all() and np.isfinite(found.hi).all())


def modulus(tree: Node, lo: float, hi: float, error: float) -> float:
    """max |g(t) − g(s)| for s in [lo, hi] and |t − s| ≤ error, t where g is defined: by slopes, or by ranges.

    The slope of a piece serves where it is bounded. Where it is not (√t at 0), pieces that grow geometrically from the
    ends are short enough there for the range of g on them to be a bound itself.
    """
    if error == 0:
        return 0.0
    function = function_of_t(tree)
    width = max(hi - lo, error)
    steps = np.concatenate([[0.0], np.geomspace(error, width, PIECES)]) if error < width else np.array([0.0, width])
    edges = np.unique(np.clip(np.concatenate([lo + steps, hi - steps, np.linspace(lo, hi, PIECES)]), lo, hi))
    edges = np.concatenate([edges, [hi]]) if len(edges) == 1 else edges
    defined = _is_defined(tree, float(down(lo - error)), float(up(hi + error)))
    below, above = (-math.inf, math.inf) if defined else (lo, hi)
    first, last = down(edges[:-1] - error), up(edges[1:] + error)
    pieces = Interval(np.maximum(first, below)[:, None], np.minimum(last, above)[:, None])
    ranges, slopes = function.ranges_and_gradients(pieces, violations="infinite")
    steepest = np.maximum(np.abs(slopes.lo), np.abs(slopes.hi)).reshape(len(edges) - 1, -1).max(axis=1)
    by_slope = np.where(np.isfinite(steepest), up(steepest * error * (1 + 2.0**-40), 4), math.inf)
    with np.errstate(invalid="ignore"):
        by_range = np.nan_to_num(up((ranges.hi - ranges.lo).max(axis=1)), nan=math.inf)
    return float(np.minimum(by_slope, by_range).max())
