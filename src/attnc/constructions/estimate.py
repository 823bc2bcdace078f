"""What a construction would cost, before it is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A row of `attnc plan`. `error` is what is expected, not a bound; `why_not` says why a construction cannot serve."""

    name: str
    anchors: int = 0
    heads: int = 0
    layers: int = 0
    parameters: int = 0
    multiply_adds: int = 0
    error: float | None = None
    why_not: str | None = None

    @classmethod
    def one_layer(cls, name: str, anchors: int, d: int, outputs: int, error: float, heads: int = 1) -> Estimate:
        """A key is d slopes, an offset and the values: as many numbers, and as many multiply-adds for a query."""
        each = d + 1 + outputs
        return cls(
            name, anchors, heads, 1, anchors * each + 3 * d + heads * (2 * (d + 1) + 2 * outputs), anchors * each, error
        )
