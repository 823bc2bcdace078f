"""The errors of all heads at the outputs, over parts of the box that are halved where these are largest.

A part at depth k is halved along axes[k]: so a checker that knows the axes makes the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.rounding import TINIEST, up
from attnc.targets.error_flow import ErrorFlow, Link, Terms, products
from attnc.targets.part_ranges import PartRanges, halved
from attnc.targets.parts import Part

if TYPE_CHECKING:
    from jaxtyping import Float

CLOSE = 1.1
"""Parts are halved until the bound is so close to what it is at single points."""
FEW, MOST_PARTS, MOST_AXES = 32, 256, 40
WORTH = 0.97
"""Of the bound: with twice as many parts it is to be this at most, or there will be no more of them."""
WORST = 0.8
"""Parts with so much of the largest error are halved together."""
ASKED = 16
"""So many parts say along which axis all of their depth are halved."""
SPARE = 2.0**-9
"""By which the bound is taken larger: slopes and ranges that a checker finds are not quite the same."""


@dataclass(frozen=True, eq=False)
class Output:
    """Σ weight·part, of which the stored coefficients are off by `differs`, and which is rounded."""

    terms: Terms
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
    ranges: PartRanges,
    inputs: Sequence[tuple[Part, float]],
    links: Sequence[Link],
    names: Sequence[str],
    outputs: Sequence[Output],
) -> Composed:
    """`names` are those of the terms of the heads."""
    rounded = np.array([*(own for _, own in inputs if own > 0), *(link.rounding for link in links)])

    def errors(boxes: Interval) -> Float[np.ndarray, "boxes outputs terms"]:
        """What every head adds, then coefficients and rounding."""
        flow = ErrorFlow(ranges.on(boxes), inputs, len(links))
        flow.ranges.find([affine.part for link in links for affine in (link.argument, link.carrier) if affine])
        for link in links:
            flow.add(link)
        found = np.zeros((len(boxes), len(outputs), len(links) + 2))
        for number, output in enumerate(outputs):
            sizes = flow.combined(output.terms).mag
            found[:, number, :-2] = products(sizes, up(flow.own - rounded))[:, -len(links) or len(rounded) :]
            found[:, number, -2] = output.differs
            found[:, number, -1] = up(products(sizes, rounded).sum(axis=1) + output.rounding, len(rounded) + 1)
        return found

    def largest(boxes: Interval) -> Float[np.ndarray, " boxes"]:
        found = errors(boxes)
        return up(found.sum(axis=2), found.shape[2]).max(axis=1)

    whole = Interval(ranges.boxes.lo.min(axis=0)[None], ranges.boxes.hi.max(axis=0)[None])
    parts, found, axes = _divided(whole, largest)
    worst = parts[[int(np.argmax(found))]]
    if not np.isfinite(found).all():
        return NOT_BOUNDED
    terms = _ledger(errors(worst)[0], names)
    return Composed(float(up(math.fsum(term.value for term in terms), 2)), terms, axes)


def _divided(
    box: Interval, largest: Callable[[Interval], Float[np.ndarray, " boxes"]]
) -> tuple[Interval, Float[np.ndarray, " parts"], tuple[int, ...]]:
    """Parts, what is largest on each of them, and the axes."""
    parts, found, depth = box, largest(box), np.zeros(1, dtype=int)
    axes: list[int] = []
    seen, before = 0.0, (1, math.inf)
    while len(parts) < MOST_PARTS:
        if len(parts) >= 2 * before[0] and len(parts) > FEW:
            if found.max() > WORTH * before[1]:
                break
            before = len(parts), float(found.max())
        seen = max(seen, float(largest(Interval.point(parts[np.argsort(-found)[:ASKED]].mid)).max()))
        wide = (found > CLOSE * seen) & ((found >= WORST * found.max()) | ~np.isfinite(found))
        if wide.any() and int(depth[wide].max()) == len(axes):
            if len(axes) == MOST_AXES:
                break
            deep = np.flatnonzero(wide & (depth == len(axes)))
            axes.append(_axis(parts[deep[np.argsort(-found[deep])[:ASKED]]], len(axes), largest))
        if not wide.any():
            break
        halves = halved(parts[wide], np.array(axes)[depth[wide]])
        below = np.tile(depth[wide] + 1, 2)
        lo, hi = (np.concatenate(ends) for ends in ((parts.lo[~wide], halves.lo), (parts.hi[~wide], halves.hi)))
        parts, depth = Interval(lo, hi), np.concatenate([depth[~wide], below])
        found = np.concatenate([found[~wide], largest(halves)])
    return parts, found, tuple(axes)


def _axis(parts: Interval, depth: int, largest: Callable[[Interval], Float[np.ndarray, " boxes"]]) -> int:
    """The axis without whose width the errors would be smallest; one after the other where none would be finite."""
    d = parts.shape[1]
    lo, hi = np.tile(parts.lo, (d, 1, 1)), np.tile(parts.hi, (d, 1, 1))
    for axis in range(d):
        lo[axis, :, axis] = hi[axis, :, axis] = parts.mid[:, axis]
    found = largest(Interval(lo.reshape(-1, d), hi.reshape(-1, d))).reshape(d, -1)
    score = np.log(np.clip(found, 1e-300, 1e300)).sum(axis=1)
    return int(np.argmin(score)) if np.ptp(score) > 0 else depth % d


def _ledger(errors: Float[np.ndarray, "outputs terms"], names: Sequence[str]) -> tuple[Term, ...]:
    """Of the worst output, the largest term first."""
    adds: dict[str, float] = {}
    for name, value in zip((*names, "coefficients", "rounding"), errors[int(np.argmax(errors.sum(axis=1)))], strict=True):
        adds[name] = float(up(adds.get(name, 0.0) + up(float(value) * (1 + SPARE), 2)))
    found = sorted(((name, value) for name, value in adds.items() if value > 4 * TINIEST), key=lambda item: -item[1])
    return tuple(Term(name, value, _reason(name)) for name, value in found or [("rounding", 0.0)])


def _reason(name: str) -> str:
    if name == "coefficients":
        return "affine coefficients of the expression, as they are stored"
    return "of the engine, in all stages" if name == "rounding" else "of this head, as far as it moves the output"
