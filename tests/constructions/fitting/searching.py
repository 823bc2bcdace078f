"""The partition that the constructions build from."""

from __future__ import annotations

from attnc.constructions.construction import Request
from attnc.constructions.fitting.adaptive_partition import AdaptivePartition, LeafSearch
from attnc.constructions.fitting.cell_head import self_attention
from attnc.targets.target import Target


def partition_of(target: Target, eps: float, **options) -> AdaptivePartition:
    """The search from which the constructions build is deterministic."""
    return LeafSearch(target, Request(eps, **options), "max_affine", self_attention).partition(eps)
