"""The errors of a composition: forwards from part to part, backwards as what each may cost.

err_out ≤ ω_g(err_in) + δ_g for a function g of one part, with ω_g its modulus of continuity on the range of the
argument enlarged by err_in; (|u| + e_u)(|v| + e_v) − |u||v| for a product; Σ |c| err for an affine combination.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnc.constructions.composition.part_fit import (
    PartFit,
    fit_part,
    function_of_one,
    has_two_keys,
    is_exact,
    is_self_gate,
    proved_error,
)
from attnc.errors import BoundNotMet
from attnc.numerics.intervals import Interval
from attnc.targets.expressions.tree import Node, to_text
from attnc.targets.parts.part import (
    Combination,
    HeadClaim,
    Multiply,
    Part,
    Source,
    T,
    Unary,
    function_of_t,
    operands_of,
)
from attnc.targets.parts.part_ranges import PartRanges
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float

PASSES = 6
GATE_SHARE = 0.02
"""Of a gate, whose two keys do not grow with 1/δ, against 1 of a head whose keys do."""
PIECES = 512


class Fitted(NamedTuple):
    """A fit, and what it is for: tree(t) on [lo, hi]."""

    fit: PartFit
    tree: Node
    lo: float
    hi: float


class Ledger:
    """Shares eps over the heads, and adds up what they cost."""

    def __init__(self, order: Sequence[Part], outputs: Sequence[Part], ranges: PartRanges, dtype: str) -> None:
        self.order, self.outputs, self.ranges, self.dtype = order, outputs, ranges, dtype
        self.absorbed = _absorbed(order, outputs)
        self.heads = [part for part in order if isinstance(part, Unary) or self.is_plain_product(part)]
        self.excess: dict[int, float] = {}  # by which errors were proved to be larger than fits showed

    def is_plain_product(self, part: Part) -> bool:
        """A product neither of whose factors is computed by the head itself."""
        return isinstance(part, Multiply) and self.absorbed_factor(part) is None

    def absorbed_factor(self, part: Multiply) -> tuple[Unary, Part] | None:
        """(g(w), u) when the head's weights are those of g at w and its keys carry u."""
        for factor, carrier in ((part.left, part.right), (part.right, part.left)):
            if id(factor) in self.absorbed and isinstance(factor, Unary):
                return factor, carrier
        return None

    def fitted_part(self, part: Part) -> Part:
        """Whose fit the head of this part has."""
        factor = self.absorbed_factor(part) if isinstance(part, Multiply) else None
        return part if factor is None else factor[0]

    def claim(self, part: Unary | Multiply) -> HeadClaim:
        """What the head of this part is for."""
        if isinstance(part, Unary):
            return HeadClaim(part, part.base, part.tree)
        factor = self.absorbed_factor(part)
        if factor is None:
            return HeadClaim(part, part.left, T, part.right)
        return HeadClaim(part, factor[0].base, factor[0].tree, factor[1])

    def shares(self, eps: float) -> dict[int, float]:
        """δ of every head, so that Σ λδ = eps."""
        weights = {id(part): self._weight(part) for part in self.heads}
        total = sum(weights.values())
        deltas = {id(part): eps * weights[id(part)] / max(total, 1e-300) for part in self.heads}
        for _ in range(PASSES):  # λ depends on the errors through the enlarged ranges
            errors = self.forwards(deltas)
            costs = self.backwards(errors)
            for part in self.heads:
                key = id(part)
                size = self.ranges.size(part.left if isinstance(part, Multiply) else part)
                most = size or eps  # what is 0 all over, as relu of what is negative, need not be 0 to the last digit
                deltas[key] = min(most, eps * weights[key] / total / max(costs[key], 1e-300))
        return deltas

    def _weight(self, part: Part) -> float:
        if isinstance(part, Unary) and is_exact(part.tree):
            return 1e-9
        return GATE_SHARE if isinstance(part, Unary) and has_two_keys(part.tree) else 1.0

    def fit(self, eps: float, target: Target, before: Mapping[int, Fitted], asked: float) -> dict[int, Fitted]:
        """A fit for every head. `before`: those for another eps; `asked`: what is not met if there is none."""
        deltas = self.shares(eps)
        errors = self.forwards(deltas)
        fits: dict[int, Fitted] = {}
        for part in self.heads:
            argument, tree = (part.left, T) if isinstance(part, Multiply) else (part.base, part.tree)  # type: ignore[union-attr]
            lo, hi = self._enlarged(argument, errors[id(argument)], tree)
            delta = deltas[id(part)] / self.excess.get(id(part), 1.0)
            earlier = before[id(part)].fit if id(part) in before else None
            fitted = fit_part(tree, lo, hi, delta, self.dtype, earlier, id(part) not in self.absorbed)
            if fitted is None:
                raise BoundNotMet(
                    f"cannot compose {target.describe()} on {target.box}: {self.ranges.describe(part)} is too hard for "
                    f"one head, {to_text(tree)} for t in [{lo:.4g}, {hi:.4g}] to within {delta:.2g}. Choose "
                    "a larger eps or a smaller box.",
                    eps=asked,
                    bound=None,
                )
            fits[id(part)] = Fitted(fitted, tree, lo, hi)
        return fits

    def total(self, fits: Mapping[int, Fitted]) -> float:
        """The error of the worst output, with the errors that samples of the fits show, or such were proved to be."""
        return self._worst({key: each.fit.error * self.excess.get(key, 1.0) for key, each in fits.items()})

    def proved_total(self, fits: Mapping[int, Fitted]) -> float:
        """The same, with the errors that the fits are proved to have. In float32 these are what weights are rounded by,
        which no fit makes smaller: they are left to the certificate."""
        if self.dtype != "float64":
            return self.total(fits)
        return self._worst({key: proved_error(*each) for key, each in fits.items()})

    def _worst(self, deltas: Mapping[int, float]) -> float:
        errors = self.forwards(deltas)
        return max(errors[id(part)] for part in self.outputs)

    def forwards(self, deltas: Mapping[int, float]) -> dict[int, float]:
        """|computed − exact| of every part."""
        errors: dict[int, float] = {}
        for part in self.order:
            match part:
                case Source(_):
                    error = 0.0
                case Combination(terms, _):
                    error = math.fsum(c.size * errors[id(inner)] for inner, c in terms)
                case Unary(base, tree):
                    error = self._modulus(base, tree, errors[id(base)]) + deltas[id(part)]
                case Multiply(left, right):
                    factor = self.absorbed_factor(part)
                    if factor is None:
                        own, other = errors[id(left)] + deltas[id(part)], errors[id(right)]
                    else:
                        own, other = errors[id(factor[0])], errors[id(factor[1])]
                        left, right = factor
                    error = self.ranges.size(right) * own + (self.ranges.size(left) + own) * other
            errors[id(part)] = error
        return errors

    def backwards(self, errors: Mapping[int, float]) -> dict[int, float]:
        """λ of every head: how much an error of its function moves the output, at most."""
        costs: dict[int, float] = {id(part): 0.0 for part in self.order}
        for output in self.outputs:
            of_output = {id(part): 0.0 for part in self.order}
            of_output[id(output)] = 1.0
            for part in reversed(self.order):
                own = of_output[id(part)]
                match part:
                    case Combination(terms, _):
                        for inner, c in terms:
                            of_output[id(inner)] += own * c.size
                    case Unary(base, tree):
                        of_output[id(base)] += own * self._slope(base, tree, errors[id(base)])
                    case Multiply(left, right):
                        sizes = self.ranges.size(right) + errors[id(right)], self.ranges.size(left) + errors[id(left)]
                        of_output[id(left)] += own * sizes[0]
                        of_output[id(right)] += own * sizes[1]
                scale = self.ranges.size(part.right) if self.is_plain_product(part) else 1.0  # type: ignore[union-attr]
                costs[id(part)] = max(costs[id(part)], own * scale)
        return costs

    def _enlarged(self, base: Part, error: float, tree: Node) -> tuple[float, float]:
        """The range of the argument, with its error, where the function is defined there."""
        lo, hi = self.ranges(base)
        whole = function_of_t(tree).ranges(
            Interval(np.array([[lo - error]]), np.array([[hi + error]])), violations="infinite"
        )
        return (lo - error, hi + error) if np.isfinite(whole.hi).all() else (lo, hi)

    def _slope(self, base: Part, tree: Node, error: float) -> float:
        error = max(error, 1e-15 * self.ranges.size(base), 1e-300)
        return self._modulus(base, tree, error) / error

    def _modulus(self, base: Part, tree: Node, error: float) -> float:
        """max |g(t + s) − g(t)| over |s| ≤ error: by the slope where that is bounded."""
        if error == 0:
            return 0.0
        lo, hi = self.ranges(base)
        lo, hi = lo - error, hi + error
        edges = lo + (hi - lo) * (np.arange(PIECES + 1) / PIECES)
        pieces = Interval(edges[:-1, None], edges[1:, None])
        function = function_of_t(tree)
        slopes = function.ranges_and_gradients(pieces, violations="infinite")[1]
        steepest = float(max(np.abs(slopes.lo).max(), np.abs(slopes.hi).max()))
        if math.isfinite(steepest):
            return steepest * error
        return _sampled_modulus(function_of_one(tree), *self.ranges(base), error)


def _sampled_modulus(f: object, lo: float, hi: float, error: float) -> float:
    """For functions that are steep at an end (√t at 0): differences at points that crowd towards both ends."""
    assert callable(f)
    steps = np.concatenate([[0.0], np.geomspace(min(error, hi - lo) / 8, hi - lo, 2000)])
    starts: Float[np.ndarray, " points"] = np.clip(np.concatenate([lo + steps, hi - steps]), lo, hi)
    here, there = f(starts), f(np.clip(starts + error, lo, hi))
    return float(np.abs(there - here).max())


def _absorbed(order: Sequence[Part], outputs: Sequence[Part]) -> set[int]:
    """Functions that are used once, as a factor: the head of the product computes them."""
    uses: dict[int, int] = {}
    for used in (*outputs, *(operand for part in order for operand in operands_of(part))):
        uses[id(used)] = uses.get(id(used), 0) + 1
    absorbed: set[int] = set()
    depth: dict[int, int] = {}
    for part in order:
        below = max((depth[id(operand)] for operand in operands_of(part)), default=0)
        depth[id(part)] = below + isinstance(part, Unary | Multiply)
        if isinstance(part, Multiply):
            factors = [f for f in (part.left, part.right) if isinstance(f, Unary) and uses[id(f)] == 1]
            free = [f for f in factors if not is_self_gate(f.tree)]
            if free:  # the deeper one: its layer is the product's
                absorbed.add(id(max(free, key=lambda f: depth[id(f)])))
                depth[id(part)] = max(depth[id(f)] for f in (part.left, part.right)) + (len(factors) < 2)
    return absorbed
