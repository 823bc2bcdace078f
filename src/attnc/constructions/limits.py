"""How large a program may become."""

from __future__ import annotations

from attnc.constructions.partition.positions import num_positions
from attnc.targets.target import Target

MAX_ANCHORS = 2_000_000
MAX_BYTES = 2**30
"""Unless other limits are given: (head, key) pairs, and bytes of the program and of what it is made from."""


def bytes_per_anchor(target: Target) -> int:
    """Stored (an index of 8 bytes and a value of 8 per non-zero), folded, and the copies made on the way."""
    numbers = target.box.d + 1 + target.num_outputs // num_positions(target) + (num_positions(target) > 1)
    return 64 * numbers
