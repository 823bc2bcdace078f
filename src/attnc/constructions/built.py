"""The result of a construction, and the refusals that constructions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnc.errors import BoundNotMet
from attnc.ir.program import Program
from attnc.numerics.bound import Bound
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

Progress = Callable[[str, float], None]
"""A callback that gets the current step and the fraction of it that is done."""


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
    again: Callable[[Mapping[str, float]], Built] | None = None
    """Builds again with the proved errors of the heads, given by the channels that the heads write."""


def require(built: Built, eps: float | None, target: Target) -> Built:
    """Return the network, or raise BoundNotMet if its bound is above eps: then rounding is the limit."""
    bound = built.bound
    if eps is None or bound is None or bound.value <= eps:
        return built
    dtype = str(built.program.dtype)
    raise BoundNotMet(
        f"cannot bring the bound to eps={eps:g} for {target.describe()} on {target.box} with {built.construction}: "
        f"it is {bound.value:.3g} = {bound}. Rounding in {dtype} limits the bound here; choose a larger "
        f"eps{', float64' if dtype == 'float32' else ''}, or a box closer to 0.",
        eps=eps,
        bound=bound.value,
        worst_box=built.worst_box,
        build=lambda: built,
    )


def beyond_limits(target: Target, eps: float, needed: int, limit: int, best: Built, change: str) -> BoundNotMet:
    """The refusal where eps needs more anchors than allowed.

    `best` is the largest network within the limit, and `change` is a change of the request that needs fewer anchors.
    """
    assert best.bound is not None
    return BoundNotMet(
        f"cannot bring the bound to eps={eps:g} for {target.describe()} with {best.construction}: it needs {needed:,} "
        f"anchors, more than max_anchors or max_bytes allow ({limit:,}); these have a bound of {best.bound.value:.3g}. "
        f"Choose {change}, or raise max_anchors and max_bytes.",
        eps=eps,
        bound=best.bound.value,
        worst_box=target.box.as_dict(),
        build=lambda: best,
    )
