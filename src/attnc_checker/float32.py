"""Sharper bounds on rounding in float32 than one count for all terms: in scores, and in sums over keys."""

from __future__ import annotations

from dataclasses import replace

from flint import arb

from attnc_checker.forms import ONE, SMALLEST, UNLIMITED, ZERO, Form, Head, combined, rounds, stacked, times

EIGHT_ROUNDINGS = arb(2) ** -26
"""Eight roundings of float64, in roundings of float32."""


def finer(head: Head, q: dict[int, Form], projected: list[dict[int, Form]], num_tokens: int) -> Head:
    """Separate the roundings of scores in float32 by their origin: the query, products and keys, and sums.

    `q` and `projected` are the forms of the query and of the keys. The head sees some of `num_tokens` tokens.
    EIGHT_ROUNDINGS of each cover engines that compute parts in float64.
    """
    head = replace(head, depth=_depth_of_sums(num_tokens))
    if not all(b.is_constant for key in projected for b in key.values()):
        return head
    read = {j: [forms.get(j, ZERO) for forms in projected] for j in q if any(j in forms for forms in projected)}
    parts = {j: stacked(forms) for j, forms in read.items()}
    counts = {j: b.n + any(b.sizes and rounds(q[j], b) for b in read[j]) for j, b in parts.items()}
    _, own = combined((0, (counts[j] + EIGHT_ROUNDINGS) * b.sizes[ONE], q[j]) for j, b in parts.items())
    own = {key: own.get(key, head.slack) + len(parts) * SMALLEST["float32"] for key in (ONE, *own)}
    n = max((q[j].n + counts[j] for j in parts), default=0)
    query = tuple(times(q[j].n + EIGHT_ROUNDINGS, q[j].sizes) for j in parts)
    numbers = tuple(b.terms[ONE] for b in parts.values())
    return replace(head, own=own, n=n + 2, query=query, parts=numbers, addends=len(parts))


def _depth_of_sums(keys: int) -> int:
    """Return the depth of sums. Engines sum 8 keys, even hidden ones, then 8 of these sums, and so on, up to 4096."""
    depth = 0 if keys <= 4096 else UNLIMITED
    while keys > 1:
        depth, keys = depth + min(8, keys) - 1, -(-keys // 8)
    return depth
