"""Which construction builds: the one that was named, or the cheapest of the plan."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from attnc import planning
from attnc.constructions.built import Built, Progress
from attnc.constructions.estimate import Wanted
from attnc.constructions.gate.keys import OutOfReach
from attnc.errors import BoundNotMet, InputError
from attnc.planning import CONSTRUCTIONS
from attnc.targets.target import Target


def builders(
    target: Target,
    wanted: Wanted,
    construction: str,
    options: dict[str, Any],
    criterion: str,
    progress: Progress | None,
) -> Iterator[Callable[[], Built]]:
    """By the construction that was named; or by those of the plan that may serve and know the options, the cheapest
    first."""
    names = planning.candidates(target, wanted) if construction == "auto" else (construction,)
    if len(names) == 1 or options:
        name = names[0] if len(names) == 1 else "max_affine"
        yield named_builder(name, target, wanted, options, progress)
    else:
        for row in planning.cheapest_first(target, wanted, names, criterion):
            yield row.build or named_builder(row.name, target, wanted, {}, progress)


def named_builder(
    name: str, target: Target, wanted: Wanted, options: dict[str, Any], progress: Progress | None
) -> Callable[[], Built]:
    """The construction of this name, with everything but its target bound."""
    asked = planning.asked_of(name, target, wanted)
    construct = _with_options(name, options if asked.p == math.inf else {**options, "norm": asked.p})

    def build() -> Built:
        limits = {"max_anchors": asked.max_anchors, "max_bytes": asked.max_bytes}
        try:
            return construct(target, eps=asked.eps, dtype=asked.dtype, progress=progress, **limits)
        except OutOfReach as refusal:
            raise BoundNotMet(
                f"{name} cannot bring {target.describe()} on {target.box} to eps={wanted.eps:g}: {refusal}",
                eps=wanted.eps,
                bound=None,
                reach=wanted.eps * refusal.error / refusal.eps,
            ) from None

    return build


def _with_options(name: str, options: dict[str, Any]) -> Callable[..., Built]:
    """The construction, with the options that it knows; others are refused, with those that know them."""
    for option, value in options.items():
        knowing = [each for each, build in CONSTRUCTIONS.items() if option in inspect.signature(build).parameters]
        knowing += planning.SOFT if option == "norm" else ()
        if name not in knowing:
            others = " or ".join(f"construction={other!r}" for other in knowing)
            raise InputError(f"{option}={value!r} is not an option of {name}, but of {others}")
    return functools.partial(CONSTRUCTIONS[name], **options)
