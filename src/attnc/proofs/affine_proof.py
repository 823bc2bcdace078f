"""Programs without attention: an affine map against an expression that is one, on all of its box, infinite or not.

With G the gradients of f over the box and x_0 a point of it,

    |f − Wx − b| ≤ |f(x_0) − Wx_0 − b| + Σ_i |G_i − W_i|·|x_i − x_0i|.

Where G is W itself, as it is for an affine expression, the second part is 0 however wide the box.
"""

from __future__ import annotations

import numpy as np

from attnc.errors import ProgramError
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF, gamma, up
from attnc.proofs.cells.branching import Leaf
from attnc.proofs.leaves.deviations import affine_range, distance
from attnc.proofs.proven import Proven
from attnc.targets.expression_target import ExpressionTarget

REACH = 16.0
"""Of an infinite range: where rounding is counted. Beyond it rounding grows with |x|."""


def prove_affine(program: Program, target: ExpressionTarget) -> Proven:
    """ProgramError where there is more than one affine map, or where the expression is none."""
    layer = program.layers[0]
    if len(program.all_layers) != 1 or not isinstance(layer, Affine) or program.input_shapes != ((target.box.d,),):
        raise ProgramError("the program is not one affine map of the variables")
    core, d = target.box.core(REACH), target.box.d
    weight = layer.weight.matrix(2).toarray().astype(np.float64)
    constant = layer.constant.matrix(1).toarray().astype(np.float64).ravel()
    middle = np.clip(0.0, core.lo, core.hi)[None]
    slopes = target.expression.ranges_and_gradients(Interval(target.box.lo[None], target.box.hi[None]))[1]
    steepness = (slopes - Interval.point(weight)[None]).mag[0]
    if not np.isfinite(steepness).all():
        raise ProgramError(f"{target.describe()} is not known to be affine")
    reach = np.maximum(target.box.hi - middle, middle - target.box.lo)[0]
    with np.errstate(invalid="ignore"):
        change = np.where(steepness > 0, up(steepness * up(reach)), 0.0)
    at_middle = Interval.point(middle)
    wanted = target.expression.ranges(at_middle)
    found = affine_range(Interval.point(constant[None]), Interval.point(weight[None]), at_middle)
    gap = _gap(wanted, found)[0]
    off = np.where((gap > 0) | change.any(axis=1), up(gap + up(change.sum(axis=1), d)), 0.0)
    rounding = _rounding(weight, constant, core.magnitude, str(program.dtype))
    if not np.isfinite(off + rounding).all():
        raise ProgramError(f"{target.describe()} is not the affine map of the program on all of {target.box}")
    largest = max(float(core.magnitude.max()), *(np.abs(weight) @ core.magnitude + np.abs(constant)))
    if not largest < float(np.finfo(program.dtype).max) / 8:
        raise ProgramError(f"the affine map may overflow in {program.dtype} on {target.box}")
    worst = int(np.argmax(off + rounding))
    bound = float(up(off[worst] + rounding[worst])) if off[worst] + rounding[worst] > 0 else 0.0
    terms = (
        Term("approximation", float(off[worst]), "the affine map against the expression, on all of the box"),
        Term("rounding", float(rounding[worst]), "of the engine: products and their sum"),
    )
    sides = [side for side, end in ((-1, target.box.lo[0]), (1, target.box.hi[0])) if np.isinf(end)]
    leaf = Leaf("taylor", 1, 0, (0,) * d)  # f is its own Taylor polynomial
    return Proven(bound, terms, (leaf,), np.array([bound]), core, {side: float(off.max()) for side in sides}, True)


def _gap(one: Interval, other: Interval) -> np.ndarray:
    """The largest distance of members, 0 where both are one and the same number."""
    is_same = (one.lo == one.hi) & (other.lo == other.hi) & (one.lo == other.lo)
    return np.where(is_same, 0.0, distance(one, other))


def _rounding(weight: np.ndarray, constant: np.ndarray, sizes: np.ndarray, dtype: str) -> np.ndarray:
    """Of every output: none where one variable is passed on, times a power of two from 1 on, in the dtype that it comes
    in. Smaller ones may underflow."""
    unit, roundings, least = UNIT_ROUNDOFF[dtype], weight.shape[1] + 2, float(np.finfo(dtype).smallest_normal)
    is_passed_on = (np.count_nonzero(weight, axis=1) <= 1) & (constant == 0)
    is_doubled = (weight == 0) | ((np.frexp(np.abs(weight))[0] == 0.5) & (np.abs(weight) >= 1))
    is_passed_on &= is_doubled.all(axis=1) & (dtype == "float64")
    lost = roundings * least
    whole = up((np.abs(weight) + lost) @ sizes + np.abs(constant) + lost, roundings + 2)
    return np.where(is_passed_on, 0.0, up(gamma(roundings, unit) * whole))
