"""Proofs in shards: a proof is divided, and each part is proved by itself, anywhere, in any order."""

from attnc.sharding.running import NUM_SHARDS, merge_shards, prove_all, proved_on, shard_files, write_shard
from attnc.sharding.tasks import STEM, why_not_in_shards

__all__ = [
    "NUM_SHARDS",
    "STEM",
    "merge_shards",
    "prove_all",
    "proved_on",
    "shard_files",
    "why_not_in_shards",
    "write_shard",
]
