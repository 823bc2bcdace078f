"""Programs without attention: an affine map against an affine expression, on its whole box, which may be infinite.

With G the gradients of f over the box and x_0 a point of it,

    |f − Wx − b| ≤ |f(x_0) − Wx_0 − b| + Σ_i |G_i − W_i|·|x_i − x_0i|.

If G = W, as for an affine expression, the second part is 0 on a box of any width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.numerics.arrays import Float, Int
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import Leaf
from attnc.proofs.cells.intervals import affine_range, cells_within, distance, is_same_number
from attnc.proofs.cells.kind import SHARP, Bounds, Goal, Kind
from attnc.proofs.proof import Beyond, Leaves, Proof
from attnc.proofs.prover import ProofRequest, Prover
from attnc.proofs.rounding.program import FAR_FROM_OVERFLOW
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import REACH
from attnc.targets.target import Target


@dataclass(frozen=True, eq=False)
class AffineKind(Kind):
    """An affine map against an expression, by the gradients of the expression over the cell. Radii may be infinite.

    The rounding of the map is included, for inputs up to `sizes`. A leaf is stored as a Taylor leaf of order 1, because
    an affine f is its own Taylor polynomial.
    """

    weight: Float[np.ndarray, "outputs d"]
    constant: Float[np.ndarray, " outputs"]
    dtype: str
    expression: Expression
    box: Box
    sizes: Float[np.ndarray, " d"]
    name = "taylor"
    order = 1

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        cells = cells_within(self.box, centres, radii)
        constant, weight = Interval.point(self.constant[None]), Interval.point(self.weight[None])
        off = mean_value_distance(self.expression, cells, centres, constant, weight)
        off = np.where(np.isnan(off), np.inf, off)  # nan: there is no bound
        rounding = np.broadcast_to(self.rounding(self.sizes), off.shape)
        upper = np.where(off + rounding == 0, 0.0, up(off + rounding))
        return Bounds(upper, {"approximation": off, "rounding": rounding})

    def rounding(self, sizes: Float[np.ndarray, " d"], ones: float = 1.0) -> Float[np.ndarray, " outputs"]:
        """Return the rounding of every output for inputs up to `sizes` and constants that count `ones` times.

        It is 0 where the output is one float64 variable times 1, 2, 4, …. Products with smaller powers may underflow.
        """
        size, roundings = np.abs(self.weight), self.weight.shape[1] + 2
        is_passed_on = (np.count_nonzero(self.weight, axis=1) <= 1) & (self.constant == 0)
        is_doubled = (self.weight == 0) | ((np.frexp(size)[0] == 0.5) & (size >= 1))
        is_passed_on &= is_doubled.all(axis=1) & (self.dtype == "float64")
        lost = roundings * float(np.finfo(self.dtype).smallest_normal)
        whole = up((size + lost) @ sizes + ones * (np.abs(self.constant) + lost), roundings + 2)
        return np.where(is_passed_on, 0.0, up(gamma(roundings, UNIT_ROUNDOFF[self.dtype]) * whole))

    def beyond(self) -> Beyond:
        """The rounding on the tails of one variable: relative to |x|, once constants count as part of the bound."""
        one = np.ones(self.weight.shape[1])
        largest = max(1.0, float((np.abs(self.weight) @ one + np.abs(self.constant)).max()))
        room = FAR_FROM_OVERFLOW * float(np.finfo(self.dtype).max) / largest
        return Beyond(float(self.rounding(one, 0.0).max()), 2.0 ** (math.floor(math.log2(room)) - 1))


class AffineProver(Prover):
    """Proves an affine map on the whole box, as one cell."""

    name = "affine"

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        return target.expression is not None and not program.num_attention_layers and request.p == math.inf

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove the map. Raise ProgramError if there is more than one map, or if the expression is not affine."""
        layer, box, dtype, expression = program.unrolled_layers[0], target.box, str(program.dtype), target.expression
        is_one = len(program.all_layers) == 1 and program.input_shapes == ((box.d,),)
        if not is_one or not isinstance(layer, Affine) or expression is None:
            raise ProgramError("the program is not one affine map of the variables of an expression")
        core = box.core(REACH)  # rounding is counted up to there, as in samples
        weight = layer.weight.matrix(2).toarray().astype(np.float64)
        constant = layer.constant.matrix(1).toarray().astype(np.float64).ravel()
        kind = AffineKind(weight, constant, dtype, expression, box, core.magnitude)
        middle = np.clip(0.0, core.lo, core.hi)[None]
        found = kind.bounds(middle, np.maximum(box.hi - middle, middle - box.lo), SHARP)
        if not np.isfinite(found.upper).all():
            raise ProgramError(f"{target.describe()} is not known to be the affine map of the program on all of {box}")
        largest = max(float(core.magnitude.max()), *(np.abs(weight) @ core.magnitude + np.abs(constant)))
        if not largest < float(np.finfo(dtype).max) / 8:
            raise ProgramError(f"the affine map may overflow in {dtype} on {box}")
        worst, bound = int(np.argmax(found.upper[0])), float(found.upper.max())
        reasons = {
            "approximation": "the affine map against the expression, on all of the box",
            "rounding": "of the engine: products and their sum",
        }
        terms = tuple(Term(name, float(term[0, worst]), reasons[name]) for name, term in found.terms.items())
        leaf = Leaf(kind.name, kind.order, 0, (0,) * box.d)
        ends = (float(core.lo[0]), float(core.hi[0])) if box.infinite_sides else None
        beyond = kind.beyond() if box.infinite_sides else None
        return Proof(bound, terms, Leaves((leaf,), np.array([bound]), ends, box.infinite_sides, beyond=beyond))


def mean_value_distance(
    expression: Expression,
    cells: Interval,
    centres: Float[np.ndarray, "cells d"],
    values: Interval,
    slopes: Interval,
    outputs: Int[np.ndarray, " outputs"] | slice = slice(None),
) -> Float[np.ndarray, "cells outputs"]:
    """Bound |f − values − slopes·x| over cells by the formula above, for some outputs of f: 0 if f is this map."""
    gradients = expression.ranges_and_gradients(cells, violations="infinite")[1][:, outputs]
    at_centre = Interval.point(centres)
    there = expression.ranges(at_centre, violations="infinite")[:, outputs]
    found = affine_range(values, slopes, at_centre)
    gap = np.where(is_same_number(there, found), 0.0, distance(there, found))
    steepness = (gradients - slopes).mag
    reach = np.maximum(cells.hi - centres, centres - cells.lo)[:, None]
    with quiet():
        change = np.where((steepness == 0) | (reach == 0), 0.0, up(steepness * up(reach)))
    is_same = (gap == 0) & (change == 0).all(axis=2)
    return np.where(is_same, 0.0, up(gap + up(change.sum(axis=2), cells.shape[1])))
