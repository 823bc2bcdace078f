"""Any expression as a deep attention-only program whose size does not grow with the number of variables."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnc.constructions.beyond.compose_heads import (
    UnaryFit,
    fit_part,
    fit_unary,
    function_of_one,
    has_two_keys,
    is_exact,
    is_self_gate,
    proved_error,
)
from attnc.constructions.built import Built, Progress
from attnc.constructions.construction import (
    CONTINUOUS_FUNCTION,
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Estimate,
    Request,
    for_eps,
    is_plain,
    largest_error,
)
from attnc.constructions.fitting.circuit import Circuit, Wire, channel_of
from attnc.errors import BoundNotMet, InputError
from attnc.functions.registry import names_with_economical_gates
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Node, to_text
from attnc.targets.parts.lowering import Lowering
from attnc.targets.parts.part import (
    Combination,
    Derivation,
    HeadClaim,
    Multiply,
    Part,
    Source,
    T,
    Unary,
    function_of_t,
    in_order,
    operands_of,
)
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

if TYPE_CHECKING:
    from jaxtyping import Float


NAME = "compose"
MOST_FUSED = 72
"""Largest number of anchors of one head for a function of several operations; with more it is taken apart."""
MAX_SHARINGS = 8
"""Largest number of times that eps is shared anew after the errors of the fits are seen."""
ROUNDINGS_OF_HEADS = 4
"""Least eps, in roundings of max |f|, that a head can reach."""
COMPOSED_SHARE = 0.95
"""The share of eps that the errors of the heads may add up to: the rest is for rounding."""
MOST_EXCESS = 2.0
"""Largest ratio of a proved to an observed error that a finer fit can correct; a larger one is rounding."""


def compose(
    target: Target,
    *,
    eps: float,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> Built:
    """A deep program: affine maps for sums, a head for every function of one part and for every product.

    Weights.  A function of one part by soft anchors with solved values, or by a gate; a product u·g(w) by a head whose
              keys carry u and whose weights are those of g at w; u·v likewise, with g the identity.
    Errors.   err_out ≤ Lip(g)·err_in + δ_g, on the range of the argument enlarged by err_in. With λ_g the most that an
              error of g moves the output, eps is shared so that Σ λ_g δ_g = eps at the least number of anchors: keys
              grow with log 1/δ, so the shares λ_g δ_g are equal, and small for gates, whose size is fixed. In float64
              the δ_g that add up to eps are those that heads are proved to have. In float32, where these hold the
              rounding of weights, which no fit makes smaller, they are first those that samples show; where the
              certificate then misses eps, those that it proved (`Built.again`).
    Size.     Heads and layers are linear in the size of the expression, whatever the number of variables.
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    return _composition(target, request).build(dtype)


def _estimate(target: Target, request: Request) -> Estimate:
    """The cost of the composition; its heads are fitted for that, as they are few and quick."""
    found = _composition(target, request)
    return Estimate.of_built(found.build(request.dtype), found.error)


def _composition(target: Target, request: Request) -> Composition:
    if target.expression is None:
        raise InputError(
            f"compose takes an expression, not {target.describe()}: it composes the structure of an expression"
        )
    if not target.is_continuous:
        raise InputError(f"compose takes a continuous function, {target.describe()} may jump; use max_affine, norm=2")
    found = _plan(target, target.expression, request)
    if found.num_anchors > request.max_anchors:
        raise BoundNotMet(
            f"composing {target.describe()} to eps={request.eps:g} takes {found.num_anchors:,} anchors, the limit is "
            f"{request.max_anchors:,}; raise max_anchors or eps",
            eps=request.goal,
            bound=None,
        )
    return found


@dataclass(frozen=True, eq=False)
class Composition:
    """Parts with their fits, ready to be built."""

    target: Target
    fits: dict[int, FittedPart]
    ledger: Ledger
    error: float
    eps: float

    @property
    def num_anchors(self) -> int:
        return sum(each.fit.num_anchors for each in self.fits.values())

    def build(self, dtype: str) -> Built:
        circuit = Circuit(self.target.box.names)
        wires: dict[int, Wire] = {}
        heads: dict[str, HeadClaim] = {}
        for part in self.ledger.order:
            if id(part) not in self.ledger.absorbed:
                wire = wires[id(part)] = self._wire(circuit, part, wires)
                if isinstance(part, Unary | Multiply):
                    (signal,) = wire.terms
                    heads[channel_of(signal)] = self.ledger.claim(part)
        outputs = self.ledger.outputs
        program = circuit.build([wires[id(part)] for part in outputs], self.target.output_shape, dtype)

        def again(proved: Mapping[str, float]) -> Built:
            for channel, error in proved.items():
                key = id(self.ledger.fitted_part(heads[channel].part))
                self.ledger.excess[key] = min(MOST_EXCESS, max(1.0, error / max(self.fits[key].fit.error, 1e-300)))
            return _fitted(self.target, self.ledger, self.eps, None).build(dtype)

        parameters = (("composed error", self.error),)
        derivation = Derivation(tuple(outputs), heads)
        return Built(program, NAME, None, parameters=parameters, derivation=derivation, again=again)

    def _wire(self, circuit: Circuit, part: Part, wires: dict[int, Wire]) -> Wire:
        match part:
            case Source(index):
                return circuit.input(index)
            case Combination(terms, constant):
                total = Wire({}, constant.value)
                for inner, coefficient in terms:
                    total = total + wires[id(inner)] * coefficient.value
                return total
            case Unary(base, tree):
                return self.fits[id(part)].fit.apply(circuit, wires[id(base)], to_text(tree))
            case Multiply(left, right):
                factor = self.ledger.absorbed_factor(part)
                if factor is not None:
                    function, carrier = factor
                    fit, name = self.fits[id(function)].fit, to_text(function.tree)
                    return fit.gate(circuit, wires[id(function.base)], wires[id(carrier)], name)
                return self.fits[id(part)].fit.gate(circuit, wires[id(left)], wires[id(right)], "product")


def _plan(target: Target, expression: Expression, request: Request) -> Composition:
    eps, dtype = request.goal, request.dtype
    ranges = PartRanges(sub_boxes(target.box), expression.variables)

    @functools.cache
    def fits_in_one_head(lo: float, hi: float, tree: Node) -> bool:
        return fit_unary(function_of_one(tree), lo, hi, eps / 8, MOST_FUSED, dtype) is not None

    def can_fit(base: Part, tree: Node) -> bool:
        return has_two_keys(tree) or fits_in_one_head(*ranges(base), tree)

    lowering = Lowering(expression.variables, can_fit, names_with_economical_gates())
    outputs = tuple(lowering.lower(expression.outputs))
    ranges.require_bounded(in_order(outputs))
    ledger = Ledger(in_order(outputs), outputs, ranges, dtype)
    floor = ROUNDINGS_OF_HEADS * UNIT_ROUNDOFF[dtype] * max(ranges.size(part) for part in outputs)
    if ledger.heads and eps < floor:
        raise BoundNotMet(
            f"eps={eps:g} is below the resolution of {dtype} for {target.describe()} on {target.box}: the rounding "
            f"level is {floor:.2g}. Choose a larger eps" + (", or float64." if dtype == "float32" else "."),
            eps=eps,
            bound=None,
        )
    return _fitted(target, ledger, eps, request.progress)


def _fitted(target: Target, ledger: Ledger, eps: float, progress: Progress | None) -> Composition:
    """Fits whose proven errors add up to eps, as nearly as their sizes allow; if none are, those whose samples do."""
    unproved = None
    goal = within = COMPOSED_SHARE * eps
    best: Composition | None = None
    fits: dict[int, FittedPart] = {}
    for round_ in range(MAX_SHARINGS):
        if progress is not None:
            progress("composing", round_ / MAX_SHARINGS)
        fits = ledger.fit(goal, target, fits, eps)
        found, less = Composition(target, fits, ledger, ledger.total(fits), eps), 0.7
        if found.error <= within and (best is None or found.num_anchors <= best.num_anchors):
            best = found
        if best is not None and found.error <= within and (found.error > 0.5 * within or round_ > 2):
            found, less = replace(best, error=ledger.proved_total(best.fits)), 0.9  # hardly more
            if found.error <= within:
                return found
            unproved, best = best, None
        goal *= (
            less * within / found.error if found.error > within else min(4.0, 0.8 * within / max(found.error, 1e-300))
        )
    best = best or unproved
    if best is not None:
        return best
    raise BoundNotMet(
        f"cannot compose {target.describe()} on {target.box} to eps={eps:g}: the errors of its parts add up to "
        f"{found.error:.3g}. Choose a larger eps or a smaller box.",
        eps=eps,
        bound=None,
        build=lambda: found.build(ledger.dtype),
    )


SHARING_PASSES = 6
"""Passes in which shares and enlarged ranges are brought into agreement."""
GATE_SHARE = 0.02
"""The share of eps of a gate, whose two keys do not grow with 1/δ; a head whose keys do has the share 1."""
MODULUS_PIECES = 512
"""Pieces of a range on each of which the slope of a function is enclosed."""


class FittedPart(NamedTuple):
    """A fit, and the function that it approximates: tree(t) on [lo, hi]."""

    fit: UnaryFit
    tree: Node
    lo: float
    hi: float


class Ledger:
    """Shares eps over the heads, and adds up their errors.

    err_out ≤ ω_g(err_in) + δ_g for a function g of one part, with ω_g its modulus of continuity on the range of the
    argument enlarged by err_in; (|u| + e_u)(|v| + e_v) − |u||v| for a product; Σ |c| err for an affine combination.
    """

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
        """The function that the head of this part approximates."""
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
        for _ in range(SHARING_PASSES):  # λ depends on the errors through the enlarged ranges
            errors = self.forwards(deltas)
            costs = self.backwards(errors)
            for part in self.heads:
                key = id(part)
                size = self.ranges.size(part.left if isinstance(part, Multiply) else part)
                most = size or eps  # a part that is 0 everywhere need not be 0 to the last digit
                deltas[key] = min(most, eps * weights[key] / total / max(costs[key], 1e-300))
        return deltas

    def _weight(self, part: Part) -> float:
        if isinstance(part, Unary) and is_exact(part.tree):
            return 1e-9
        return GATE_SHARE if isinstance(part, Unary) and has_two_keys(part.tree) else 1.0

    def fit(self, eps: float, target: Target, before: Mapping[int, FittedPart], asked: float) -> dict[int, FittedPart]:
        """A fit for every head. `before`: those for another eps; `asked`: the eps that a refusal names."""
        deltas = self.shares(eps)
        errors = self.forwards(deltas)
        fits: dict[int, FittedPart] = {}
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
            fits[id(part)] = FittedPart(fitted, tree, lo, hi)
        return fits

    def total(self, fits: Mapping[int, FittedPart]) -> float:
        """The error of the worst output, with the errors that samples of the fits show, or such were proved to be."""
        return self._worst({key: each.fit.error * self.excess.get(key, 1.0) for key, each in fits.items()})

    def proved_total(self, fits: Mapping[int, FittedPart]) -> float:
        """The same, with the errors that the fits are proved to have. In float32 these hold the rounding of weights,
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
        edges = lo + (hi - lo) * (np.arange(MODULUS_PIECES + 1) / MODULUS_PIECES)
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


def _suits(target: Target, request: Request) -> bool:
    """For continuous functions, unless constants are given for Python code: then there is no expression."""
    return is_plain(target, request) and target.given is None


COMPOSE = Construction(NAME, for_eps(compose), (*CONTINUOUS_FUNCTION, largest_error), _suits, _estimate)
