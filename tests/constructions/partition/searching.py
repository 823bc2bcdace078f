"""The partition that the constructions build from."""

from __future__ import annotations

from attnc.constructions.partition.adaptive import Search
from attnc.constructions.partition.of_leaves import AdaptivePartition
from attnc.constructions.partition.request import Request
from attnc.targets.target import Target


def partition_of(target: Target, eps: float, **options) -> AdaptivePartition:
    """What the constructions build from: the search is deterministic."""
    return Search(target, Request(eps, **options)).partition(eps)
