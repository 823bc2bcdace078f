"""The errors of a composition, as its proof will add them up: what heads may cost, and what they do cost.

A proof carries the errors of heads to the outputs as signed forms over parts of the box (`error_flow`). So does this
ledger, with the errors of fits in their places: what it finds is what will be proved, if the fits are what they seem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.constructions.part_fit import IDENTITY, PartFit, fit_part, has_two_keys, is_exact, is_self_gate
from attnc.errors import BoundNotMet
from attnc.numerics.intervals import Interval
from attnc.targets.dividing import divided
from attnc.targets.error_flow import Affine, ErrorFlow, Link, Slopes
from attnc.targets.part_ranges import PartRanges
from attnc.targets.parts import Combination, HeadClaim, Multiply, Part, Source, Unary, function_of_t, operands_of
from attnc.targets.target import Target
from attnc.targets.tree import Node, to_text

if TYPE_CHECKING:
    from jaxtyping import Float

PASSES = 3
MOST = 0.02
"""Of what a head computes: where its errors do not matter, they still are not to blur what comes after it."""
GATE_SHARE = 0.02
"""Of a gate, whose two keys do not grow with 1/δ, against 1 of a head whose keys do."""


@dataclass(frozen=True, eq=False)
class Head:
    """A head with the error that is asked of it, or that it has, in units of its carrier."""

    claim: HeadClaim
    link: Link
    size: float  # of the carrier
    interval: tuple[float, float]  # of its argument, with the error that this has

    @property
    def largest(self) -> float:
        """|g| on its interval."""
        return float(self.link.slopes.values.mag.max())


class Ledger:
    """Shares eps over the heads, and adds up what they cost."""

    def __init__(self, order: Sequence[Part], outputs: Sequence[Part], ranges: PartRanges, dtype: str) -> None:
        self.order, self.outputs, self.ranges, self.dtype = order, outputs, ranges, dtype
        self.absorbed = _absorbed(order, outputs)
        self.heads = [part for part in order if isinstance(part, Unary | Multiply) and id(part) not in self.absorbed]
        self.parts: Interval | None = None  # of the box, over which errors are added up
        self.costs: dict[int, tuple[float, float]] = {}  # of every head λ, and the largest δ
        self.room = 1.0
        self.excess: dict[int, float] = {}  # by which errors were proved to be larger than fits showed

    def absorbed_factor(self, part: Multiply) -> tuple[Unary, Part] | None:
        """(g(w), u) when the head's weights are those of g at w and its keys carry u."""
        for factor, carrier in ((part.left, part.right), (part.right, part.left)):
            if id(factor) in self.absorbed and isinstance(factor, Unary):
                return factor, carrier
        return None

    def claim(self, part: Unary | Multiply) -> HeadClaim:
        """What the head of this part is for."""
        if isinstance(part, Unary):
            return HeadClaim(part, part.base, part.tree)
        factor = self.absorbed_factor(part)
        if factor is None:
            return HeadClaim(part, part.left, IDENTITY, part.right)
        return HeadClaim(part, factor[0].base, factor[0].tree, factor[1])

    def fit(self, eps: float, target: Target) -> dict[int, PartFit]:
        """A fit for every head."""
        fits: dict[int, PartFit] = {}
        deltas = self._shares(eps)
        for head in self._heads(deltas):
            key, tree, (lo, hi) = id(head.claim.part), head.claim.tree, head.interval
            fitted = fit_part(tree, lo, hi, deltas[key] / self.excess.get(key, 1.0), self.dtype)
            if fitted is None:
                raise BoundNotMet(
                    f"cannot compose {target.describe()} on {target.box}: {self.ranges.describe(head.claim.part)} is "
                    f"too hard for one head, {to_text(tree)} for t in [{lo:.4g}, {hi:.4g}] to within "
                    f"{deltas[key]:.2g}. Choose a larger eps or a smaller box.",
                    eps=eps,
                    bound=None,
                )
            fits[key] = fitted
        return fits

    def total(self, fits: Mapping[int, PartFit]) -> float:
        """The error of the worst output, with the errors that the fits have, or were proved to have."""
        return self._added({key: fit.error * self.excess.get(key, 1.0) for key, fit in fits.items()})[0]

    def _shares(self, eps: float) -> dict[int, float]:
        """δ of every head, so that they add up to eps: λδ are alike, with λ the most that a δ moves an output.

        Keys grow with log 1/δ, but for gates, whose size is fixed.
        """
        weights = {id(part): _weight(self.claim(part).tree) for part in self.heads}
        whole = max(sum(weights.values()), 1e-300)
        if not self.costs:
            deltas = {key: eps * weight / whole for key, weight in weights.items()}
            for _ in range(PASSES):  # λ depends on the errors through the enlarged ranges
                found, moved, heads = self._added(deltas)
                for head, cost in zip(heads, moved.tolist(), strict=True):
                    key = id(head.claim.part)
                    self.costs[key] = max(cost * head.size, 1e-300), max(MOST * head.largest, 1e-300)
                    deltas[key] = min(eps * weights[key] / whole / self.costs[key][0], self.costs[key][1])
            found, _, _ = self._added(deltas)
            self.room = max(1.0, eps / max(found, 1e-300))  # not all λ are as large at one place
        eps *= self.room / whole
        return {key: min(eps * weight / self.costs[key][0], self.costs[key][1]) for key, weight in weights.items()}

    def _added(self, deltas: Mapping[int, float]) -> tuple[float, Float[np.ndarray, " heads"], list[Head]]:
        """What these errors of heads add up to at the worst output, and how much each is moved there at most."""
        heads = self._heads(deltas)
        links = [head.link for head in heads]

        def added(boxes: Interval) -> tuple[Float[np.ndarray, " boxes"], Float[np.ndarray, " heads"]]:
            flow = ErrorFlow(self.ranges.on(boxes), links)
            sizes = np.stack([flow.combined(self._read(part).heads).mag for part in self.outputs])
            return (sizes * flow.own).sum(axis=2).max(axis=0), sizes.max(axis=(0, 1))

        if self.parts is None:
            box = Interval(self.ranges.boxes.lo.min(axis=0)[None], self.ranges.boxes.hi.max(axis=0)[None])
            self.parts = divided(box, lambda boxes: added(boxes)[0])[0]
        errors, moved = added(self.parts)
        return float(errors.max()), moved, heads

    def _heads(self, deltas: Mapping[int, float]) -> list[Head]:
        """In their order; arguments are taken as far off as they can be, whatever the signs of errors."""
        errors: dict[int, float] = {}
        found: list[Head] = []
        for part in self.heads:
            claim = self.claim(part)
            argument, carrier = self._read(claim.argument, errors), None
            size, (lo, hi) = 1.0, self.ranges(claim.argument)
            if claim.carrier is not None:
                carrier = self._read(claim.carrier, errors)
                size = self.ranges.size(claim.carrier) + carrier.error
            wide = lo - argument.error, hi + argument.error
            held = None if _is_defined(claim.tree, *wide) else (lo, hi)
            slopes, own = Slopes.of(claim.tree, lo, hi, argument.error, held), size * deltas[id(part)]
            found.append(Head(claim, Link(part, argument, slopes, carrier, own), size, held or wide))
            errors[id(part)] = own + size * slopes.change
            errors[id(part)] += found[-1].largest * carrier.error if carrier is not None else 0.0
        return found

    def _read(self, part: Part, errors: Mapping[int, float] | None = None) -> Affine:
        """A part as a combination of inputs, which are exact, and of heads."""
        terms: list[tuple[Part, float]] = [(part, 1.0)]
        while any(isinstance(inner, Combination) for inner, _ in terms):
            nested = [(inner.terms, w) for inner, w in terms if isinstance(inner, Combination)]
            terms = [term for term in terms if not isinstance(term[0], Combination)]
            terms += [(inner, w * c.value) for combined, w in nested for inner, c in combined]
        heads = [(inner, w) for inner, w in terms if not isinstance(inner, Source)]
        return Affine(part, heads, error=sum(abs(w) * errors[id(inner)] for inner, w in heads) if errors else 0.0)


def _weight(tree: Node) -> float:
    return 1e-9 if is_exact(tree) else GATE_SHARE if has_two_keys(tree) else 1.0


def _is_defined(tree: Node, lo: float, hi: float) -> bool:
    found = function_of_t(tree).ranges(Interval(np.array([[lo]]), np.array([[hi]])), violations="infinite")
    return bool(found.is_bounded.all())


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
