"""Any expression as a deep attention-only program, of a size that does not grow with the number of variables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from attnc.constructions.built import Built, Progress
from attnc.constructions.circuit import Circuit, Wire, channel_of
from attnc.constructions.composition.ledger import Fitted, Ledger
from attnc.constructions.composition.part_fit import function_of_one, has_two_keys
from attnc.constructions.composition.unary_fit import fit_unary
from attnc.constructions.estimate import Estimate, Wanted
from attnc.constructions.limits import MAX_ANCHORS, MAX_BYTES
from attnc.errors import BoundNotMet, InputError
from attnc.functions.registry import names_with_economical_gates
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Node, to_text
from attnc.targets.parts.lowering import Lowering
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Multiply, Part, Source, Unary, in_order
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

NAME = "compose"
MOST_FUSED = 72
"""Anchors up to which a longer function of one part is one head; beyond, it is taken apart."""
ROUNDS = 8
ROUNDINGS = 4
"""An eps below this many roundings of max |f| is out of reach of any head."""
MARGIN = 0.95
"""What the errors may add up to, as a part of eps: the rest is for rounding."""
MOST_EXCESS = 2.0
"""A proof that finds more than that of an error found rounding, which no fit makes smaller."""


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
    return _composition(target, Wanted(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes), progress).build(dtype)


def estimate_compose(target: Target, wanted: Wanted) -> Estimate:
    """What the composition costs; its heads are fitted for that, as they are few and quick."""
    found = _composition(target, wanted, None)
    return Estimate.of_built(found.build(wanted.dtype), found.error)


def _composition(target: Target, wanted: Wanted, progress: Progress | None) -> Composition:
    if not isinstance(target, ExpressionTarget):
        raise InputError(f"compose takes an expression, not {target.describe()}: its structure is what is composed")
    if not target.is_continuous:
        raise InputError(f"compose takes a continuous function, {target.describe()} may jump; use max_affine, norm=2")
    found = _plan(target, wanted.eps, wanted.dtype, progress)
    if found.num_anchors > wanted.max_anchors:
        raise BoundNotMet(
            f"composing {target.describe()} to eps={wanted.eps:g} takes {found.num_anchors:,} anchors, the limit is "
            f"{wanted.max_anchors:,}; raise max_anchors or eps",
            eps=wanted.eps,
            bound=None,
        )
    return found


@dataclass(frozen=True, eq=False)
class Composition:
    """Parts with their fits, ready to be built."""

    target: ExpressionTarget
    fits: dict[int, Fitted]
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


def _plan(target: ExpressionTarget, eps: float, dtype: str, progress: Progress | None) -> Composition:
    ranges = PartRanges(sub_boxes(target.box), target.expression.variables)

    @functools.cache
    def fits_in_one_head(lo: float, hi: float, tree: Node) -> bool:
        return fit_unary(function_of_one(tree), lo, hi, eps / 8, MOST_FUSED, dtype) is not None

    def can_fit(base: Part, tree: Node) -> bool:
        return has_two_keys(tree) or fits_in_one_head(*ranges(base), tree)

    lowering = Lowering(target.expression.variables, can_fit, names_with_economical_gates())
    outputs = tuple(lowering.lower(target.expression.outputs))
    ranges.require_bounded(in_order(outputs))
    ledger = Ledger(in_order(outputs), outputs, ranges, dtype)
    floor = ROUNDINGS * UNIT_ROUNDOFF[dtype] * max(ranges.size(part) for part in outputs)
    if ledger.heads and eps < floor:
        raise BoundNotMet(
            f"eps={eps:g} is below what {dtype} holds for {target.describe()} on {target.box}: the rounding level is "
            f"{floor:.2g}. Choose a larger eps" + (", or float64." if dtype == "float32" else "."),
            eps=eps,
            bound=None,
        )
    return _fitted(target, ledger, eps, progress)


def _fitted(target: ExpressionTarget, ledger: Ledger, eps: float, progress: Progress | None) -> Composition:
    """Fits whose proven errors add up to eps, as nearly as their sizes allow; if none are, those whose samples do."""
    unproved = None
    goal = within = MARGIN * eps
    best: Composition | None = None
    fits: dict[int, Fitted] = {}
    for round_ in range(ROUNDS):
        if progress is not None:
            progress("composing", round_ / ROUNDS)
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
