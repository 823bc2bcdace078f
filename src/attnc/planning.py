"""Which constructions take a target, at which cost, and which one builds: the named one, or the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from attnc.constructions.built import Built
from attnc.constructions.catalogue import CATALOGUE
from attnc.constructions.construction import Construction, Estimate, Request
from attnc.errors import AttncError, BoundNotMet, InputError
from attnc.targets.target import Target

CRITERIA = ("multiply_adds", "anchors", "parameters", "layers")
"""The fields of an Estimate by which `auto` may compare constructions."""


def construction_named(name: str) -> Construction:
    """The construction of this name; InputError with all names if there is none."""
    for construction in CATALOGUE:
        if construction.name == name:
            return construction
    names = ", ".join(construction.name for construction in CATALOGUE)
    raise InputError(f"construction must be auto or one of {names}; found {name!r}")


def plan(target: Target, request: Request, constructions: Sequence[Construction] | None = None) -> list[Estimate]:
    """A row for every construction, with its cost or the reason why it cannot be used.

    An estimate does the work that its cost depends on: most constructions are fitted or built for it.
    """
    return [_row(construction, target, request) for construction in (constructions or CATALOGUE)]


def _row(construction: Construction, target: Target, request: Request) -> Estimate:
    reason = construction.why_not(target, request)
    if reason is None:
        try:
            with np.errstate(all="ignore"):  # a number that overflows is not finite, and is refused
                return construction.estimate(target, request)
        except AttncError as refusal:
            reason = str(refusal)
        except np.linalg.LinAlgError:
            reason = "the numbers are too large or too small for a fit: scale the function"
    return Estimate(construction.name, why_not=reason)


def cheapest(rows: Sequence[Estimate], criterion: str) -> list[Estimate]:
    """The rows without a reason against them, cheapest first; among equals the one with fewer layers."""
    if criterion not in CRITERIA:
        raise InputError(f"criterion must be one of {', '.join(CRITERIA)}; found {criterion!r}")
    able = [row for row in rows if row.why_not is None]
    return sorted(able, key=lambda row: (getattr(row, criterion), row.layers, row.multiply_adds, row.parameters))


def cheapest_first(
    target: Target, request: Request, constructions: Sequence[Construction], criterion: str
) -> Iterator[Estimate]:
    """The rows without a reason against them; BoundNotMet with the whole plan if there is none.

    By multiply-adds, each construction is first tried up to the anchors of the cheapest one before it: at a kink a grid
    has many anchors, and counting them takes long.
    """
    rows, able, left = dict[str, Estimate](), list[Estimate](), list(constructions)
    is_any = False
    while left or able:
        for construction in tuple(left):
            most = able[0].multiply_adds if able and criterion == "multiply_adds" else request.max_anchors
            capped = replace(request, max_anchors=max(1, min(most, request.max_anchors)))
            row = rows[construction.name] = _row(construction, target, capped)
            if row.why_not is None or capped == request:
                left.remove(construction)
            able = cheapest([*able, row], criterion)
        if able:
            is_any = True
            yield able.pop(0)
    if not is_any:
        raise BoundNotMet(
            f"no construction brings {target.describe()} on {target.box} to eps={request.eps:g}:\n"
            f"{table([*rows.values()])}",
            eps=request.goal,
            bound=None,
        )


def builders(target: Target, request: Request, name: str, criterion: str) -> Iterator[Callable[[], Built]]:
    """The build of the named construction; for "auto" the builds of those that suit the target, the cheapest first."""
    if name == "auto":
        suited = [construction for construction in CATALOGUE if construction.suits(target, request)]
        able = [construction for construction in suited if construction.options.issuperset(request.options)]
        if len(suited) > 1 and not request.centres and not request.heads:
            for row in cheapest_first(target, request, suited, criterion):
                yield row.build or named_builder(construction_named(row.name), target, request)
            return
        chosen = (able or suited)[0]
    else:
        chosen = construction_named(name)
    yield named_builder(chosen, target, request)


def named_builder(construction: Construction, target: Target, request: Request) -> Callable[[], Built]:
    """The build of one construction; InputError if an option was given that it does not take."""
    for option, value in request.options.items():
        if option not in construction.options:
            takers = [f"construction={each.name!r}" for each in CATALOGUE if option in each.options]
            raise InputError(
                f"{option}={value!r} is not an option of {construction.name}, but of {' or '.join(takers)}"
            )
    return lambda: construction.build(target, request)


def table(rows: Sequence[Estimate]) -> str:
    """The plan as text, for an error message."""
    lines = [f"{'construction':<24}{'anchors':>12}{'layers':>8}{'multiply-adds':>16}"]
    for row in rows:
        if row.why_not is None:
            lines.append(f"{row.name:<24}{row.anchors:>12,}{row.layers:>8}{row.multiply_adds:>16,}")
        else:
            lines.append(f"{row.name:<24}{row.why_not}")
    return "\n".join(lines)
