"""The result of a construction, and the refusals that constructions share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from attnc.errors import BoundNotMet, InputError
from attnc.ir.program import Program
from attnc.numerics.bound import Bound
from attnc.numerics.limits import OutOfTime
from attnc.targets.box import show_intervals
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

S = TypeVar("S")
Progress = Callable[[str, float], None]
"""A callback that gets the current step and the fraction of it that is done."""
ROUNDING_SHARE = 0.3
"""Share of eps from which on the message names rounding as the limit: with a smaller share, more than two thirds of eps
are left for the approximation, and more anchors may help."""


@dataclass(frozen=True)
class Built:
    """The result of a construction: a program, the name of its theorem, and the theorem's bound for it.

    Attributes
    ----------
    program : Program
        The layers.
    construction : str
        The name of the construction.
    bound : Bound or None
        The bound of the theorem, a ledger of named terms; None for a fit, which only a prover bounds.
    worst_box : dict or None
        The place {name: (lo, hi)} where the bound is largest.
    parameters : tuple of (str, value)
        The sizes that were chosen.
    derivation : Derivation or None
        The part of the function that each channel holds, for a proof head by head.
    again : callable or None
        A function that builds the same with smaller errors of some heads.
    observed : float or None
        The error that the construction expects from samples of its fits; not a bound.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("x", {"x": (0, 1)})
    >>> built = attnc.constructions.max_affine(target, points_per_axis=4, beta=1024.0)
    >>> built.construction, dict(built.parameters)["points_per_axis"], built.bound.value < 0.14
    ('max_affine', '4', True)
    """

    program: Program
    construction: str
    bound: Bound | None
    worst_box: dict[str, tuple[float, float]] | None = None
    parameters: tuple[tuple[str, float | int | str], ...] = ()
    derivation: Derivation | None = None  # for a deep program: the function that every head computes
    again: Callable[[Mapping[str, float], float], Built] | None = None
    """Builds the network again from the proved errors of its heads, {channel that the head writes: error}, and of the
    whole network."""
    observed: float | None = None


def require(built: Built, eps: float | None, target: Target) -> Built:
    """Return the network, or raise BoundNotMet if its bound is above eps. The message names the largest term."""
    bound = built.bound
    if eps is None or bound is None or bound.value <= eps:
        return built
    dtype, terms = str(built.program.dtype), {term.name: term.value for term in bound.terms}
    advice = f"The {max(terms, key=lambda name: terms[name])} is the largest part. Choose a larger eps."
    if terms.get("rounding", 0.0) > ROUNDING_SHARE * eps:
        larger = f"a larger eps{', float64' if dtype == 'float32' else ''}, or a box closer to 0"
        advice = f"Rounding in {dtype} limits the bound here. Choose {larger}."
    raise BoundNotMet(
        f"cannot bring the bound to eps={eps:g} for {target.describe()} on {target.box} with {built.construction}: "
        f"it is {bound.value:.3g} = {bound}. {advice}",
        eps=eps,
        bound=bound.value,
        worst_box=built.worst_box,
        build=lambda: built,
    )


def require_resolution(target: Target, eps: float, dtype: str, level: float) -> None:
    """Raise BoundNotMet if eps is below the level of rounding."""
    if eps < level:
        raise BoundNotMet(
            f"eps={eps:g} is below the resolution of {dtype} for {target.describe()} on {target.box}: the rounding "
            f"level is {level:.2g}. Choose a larger eps{', or float64' if dtype == 'float32' else ''}.",
            eps=eps,
        )


def too_many_anchors(
    target: Target,
    eps: float,
    name: str,
    needed: str,
    limit: str,
    bound: float | None = None,
    worst_box: dict[str, tuple[float, float]] | None = None,
    build: Callable[[], Built] | None = None,
) -> BoundNotMet:
    """Return the refusal of an eps that needs more anchors than allowed.

    `bound` and `worst_box` belong to the largest network within the limit. `build` makes that network.
    """
    where = "" if worst_box is None else f", largest on {show_intervals(worst_box)}"
    within = "" if bound is None else f" Within the limit the bound is about {bound:.3g}{where}."
    least = "a larger eps" if bound is None else f"eps ≥ {round_above(bound):.2g}"
    return BoundNotMet(
        f"cannot bring the bound to eps={eps:g} for {target.describe()} on {target.box} with {name}: it needs "
        f"{needed}, and the limit is {limit}.{within} Choose {least}, a smaller box, or raise max_anchors and "
        "max_bytes.",
        eps=eps,
        bound=bound,
        worst_box=worst_box,
        build=build,
    )


def out_of_time(target: Target, eps: float, seconds: float, name: str, late: OutOfTime) -> BoundNotMet:
    """Return the refusal of a construction that was not finished in time."""
    return BoundNotMet(
        f"cannot bring {target.describe()} on {target.box} to eps={eps:g} within {seconds:g} s: the time ran out while "
        f"{late.step}, by {name}. Choose a larger eps or a smaller box. {more_time(seconds)}.",
        eps=eps,
    )


def more_time(seconds: float) -> str:
    """Return the advice to allow more time than these seconds."""
    return f"More time may help, too: seconds={4 * seconds:g} (--seconds {4 * seconds:g})"


def limited(
    target: Target, eps: float | None, needed: int, limit: int, build: Callable[[S], Built], size: S, smaller: S
) -> Built:
    """Return the network of the given size, if its anchors are within the limit and its bound is at most eps.

    Otherwise raise a refusal. With too many anchors, the refusal carries the network of the smaller size.
    """
    if needed <= limit:
        return require(build(size), eps, target)
    if eps is None:
        raise InputError(f"{needed:,} anchors are more than max_anchors or max_bytes allow ({limit:,})")
    best = build(smaller)
    assert best.bound is not None
    anchors, most = f"{needed:,} anchors", f"max_anchors and max_bytes ({limit:,})"
    raise too_many_anchors(target, eps, best.construction, anchors, most, best.bound.value, None, lambda: best)


LEAST_ADVISED = 1e-300
"""The smallest eps that messages advise. Float64 numbers below 2e-308 have fewer digits."""


def round_above(error: float) -> float:
    """Return an observed error plus 4 %, rounded up to two digits: an eps that a proof is likely to reach."""
    if error < LEAST_ADVISED:
        return LEAST_ADVISED
    digit = 10.0 ** (math.floor(math.log10(error)) - 1)
    return math.ceil(1.04 * error / digit) * digit
