"""Policies of one's own: which cached blocks are evicted, which rows are preempted."""

from kvcache_jax.conversations.conversations import Conversations
from kvcache_jax.conversations.turns import set_time, set_turns
from kvcache_jax.core.eviction_policy import BlockMetadata, InBatches, eviction_policy
from kvcache_jax.operations.preempt import RowMetadata, row_policy

__all__ = [
    "BlockMetadata",
    "Conversations",
    "InBatches",
    "RowMetadata",
    "eviction_policy",
    "row_policy",
    "set_time",
    "set_turns",
]
