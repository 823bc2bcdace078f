"""How large a program may become."""

from __future__ import annotations

from attnc.constructions.built import Built
from attnc.constructions.partition.positions import num_positions
from attnc.errors import BoundNotMet
from attnc.targets.target import Target

MAX_ANCHORS = 2_000_000
MAX_BYTES = 2**30
"""Unless other limits are given: (head, key) pairs, and bytes of the program and of what it is made from."""


def bytes_per_anchor(target: Target) -> int:
    """Stored (an index of 8 bytes and a value of 8 per non-zero), folded, and the copies made on the way."""
    numbers = target.box.d + 1 + target.num_outputs // num_positions(target) + (num_positions(target) > 1)
    return 64 * numbers


def beyond_limits(target: Target, eps: float, needed: int, limit: int, best: Built, change: str) -> BoundNotMet:
    """eps needs more anchors than allowed; `best` is what the limit allows, `change` what would need fewer."""
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
