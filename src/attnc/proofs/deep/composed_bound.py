"""The errors of all heads at the outputs, over parts of the box that are halved where these are largest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import up
from attnc.targets.parts.dividing import divided
from attnc.targets.parts.error_flow import ErrorFlow, Link, Terms, products
from attnc.targets.parts.part_ranges import PartRanges

if TYPE_CHECKING:
    from jaxtyping import Float

MORE_AXES = 20
"""A checker may need some more parts."""
SPARE = 2.0**-6
"""By which the bound is taken larger: slopes and ranges that a checker finds are not quite the same."""


@dataclass(frozen=True, eq=False)
class Output:
    """Σ weight·head and inputs, of which the stored coefficients are off by `differs`; and what is rounded."""

    heads: Terms
    differs: float
    rounding: float


@dataclass(frozen=True, eq=False)
class Composed:
    """sup |f − program| ≤ bound, the sum of the terms."""

    bound: float
    terms: tuple[Term, ...]
    axes: tuple[int, ...]


NOT_BOUNDED = Composed(math.inf, (Term("not bounded", math.inf, "the range of a part of the expression"),), ())


def composed_bound(
    ranges: PartRanges, links: Sequence[Link], names: Sequence[str], outputs: Sequence[Output]
) -> Composed:
    """`names` are those of the terms of the heads."""

    def errors(boxes: Interval) -> Float[np.ndarray, "boxes outputs terms"]:
        """What every head adds, then coefficients and rounding."""
        flow = ErrorFlow(ranges.on(boxes), links)
        sizes = flow.sizes([output.heads for output in outputs])
        found = np.zeros((*sizes.shape[:3], len(links) + 2))
        found[..., :-2] = products(sizes, np.maximum(up(flow.own - flow.rounding), 0.0))
        found[..., -2] = np.array([output.differs for output in outputs])[:, None]
        rounding = np.array([output.rounding for output in outputs])[:, None]
        found[..., -1] = up(products(sizes, flow.rounding).sum(axis=3) + rounding, len(links) + 2)
        largest = np.argmax(found.sum(axis=3), axis=0)
        return np.moveaxis(np.take_along_axis(found, largest[None, :, :, None], axis=0)[0], 0, 1)

    def largest(boxes: Interval) -> Float[np.ndarray, " boxes"]:
        found = errors(boxes)
        return up(found.sum(axis=2), found.shape[2]).max(axis=1)

    whole = Interval(ranges.boxes.lo.min(axis=0)[None], ranges.boxes.hi.max(axis=0)[None])
    parts, found, axes = divided(whole, largest)
    axes += tuple(number % ranges.boxes.shape[1] for number in range(MORE_AXES))
    worst = parts[[int(np.argmax(found))]]
    if not np.isfinite(found).all():
        return NOT_BOUNDED
    terms = _ledger(errors(worst)[0], names)
    return Composed(float(up(math.fsum(term.value for term in terms), 2)), terms, axes)


def _ledger(errors: Float[np.ndarray, "outputs terms"], names: Sequence[str]) -> tuple[Term, ...]:
    """Of the worst output, the largest term first."""
    adds: dict[str, float] = {}
    for name, value in zip(
        (*names, "coefficients", "rounding"), errors[int(np.argmax(errors.sum(axis=1)))], strict=True
    ):
        if value > 0:
            adds[name] = float(up(adds.get(name, 0.0) + up(float(value) * (1 + SPARE), 2)))
    found = sorted(adds.items(), key=lambda item: -item[1])
    return tuple(Term(name, value, _reason(name)) for name, value in found or [("rounding", 0.0)])


def _reason(name: str) -> str:
    if name == "coefficients":
        return "affine coefficients of the expression, as they are stored"
    return "of the engine, in all stages" if name == "rounding" else "of this head, as far as it moves the output"
