"""Which construction builds: the one that was named, or the cheapest of the plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from attnc import planning
from attnc.constructions.built import Built, Progress
from attnc.constructions.estimate import Wanted
from attnc.errors import BoundNotMet, InputError
from attnc.planning import CONSTRUCTIONS
from attnc.targets.target import Target


def cheapest_builder(
    target: Target,
    wanted: Wanted,
    options: dict[str, Any],
    criterion: str,
    given_up: set[str],
    progress: Progress | None,
) -> Callable[[], Built]:
    """The cheapest construction that the plan finds, of those that know the options and were not given up."""
    names = tuple(name for name in planning.candidates(target, wanted) if name not in given_up)
    if not names:
        raise BoundNotMet("every construction was tried", eps=wanted.eps, bound=None)
    if options or len(names) == 1:
        name = names[-1] if len(names) == 1 else "max_affine"
        unknown = [option for option in options if option not in inspect.signature(CONSTRUCTIONS[name]).parameters]
        if unknown:
            given = f"{unknown[0]}={options[unknown[0]]!r}"
            if len(names) == 1:
                raise InputError(f"{given} is not an option of {name}")
            others = " or ".join(f"construction={other!r}" for other in _taking(unknown[0]))
            raise InputError(f"{given} is for constructions that take it: state {others}")
        return named_builder(name, target, wanted, options, progress)
    rows = planning.plan(target, wanted, names, only_cheapest=criterion == "multiply_adds")
    able = planning.cheapest(rows, criterion)
    if not able:
        found = f"no construction brings {target.describe()} on {target.box} to eps={wanted.eps:g}"
        raise BoundNotMet(
            f"{found}:\n{planning.table(rows)}",
            eps=wanted.eps,
            bound=None,
        )

    def build() -> Built:
        for number, row in enumerate(able, 1):
            try:
                return (row.build or named_builder(row.name, target, wanted, {}, progress))()
            except BoundNotMet:
                if number == len(able):  # otherwise: what was expected did not come true; the next cheapest
                    raise
        raise AssertionError("able is not empty")

    return build


def named_builder(
    name: str, target: Target, wanted: Wanted, options: dict[str, Any], progress: Progress | None
) -> Callable[[], Built]:
    """The construction of this name, with everything but its target bound."""
    return functools.partial(
        _with_options(name, options),
        target,
        eps=wanted.eps,
        dtype=wanted.dtype,
        max_anchors=wanted.max_anchors,
        max_bytes=wanted.max_bytes,
        progress=progress,
    )


def _with_options(name: str, options: dict[str, Any]) -> Callable[..., Built]:
    """The construction, with the options that it knows; others are refused by name."""
    known = inspect.signature(CONSTRUCTIONS[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise InputError(
                f"{option}={value!r} is not an option of {name}; these take it: {', '.join(_taking(option))}"
            )
    return functools.partial(CONSTRUCTIONS[name], **options)


def _taking(option: str) -> list[str]:
    """The constructions that know an option."""
    return [name for name, build in CONSTRUCTIONS.items() if option in inspect.signature(build).parameters]
