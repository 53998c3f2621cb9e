"""The arrays of a cache, and the figures that are made of them."""

from kvcache_jax.core.counter import Counter
from kvcache_jax.core.extras import Extra, HeldBlocks
from kvcache_jax.core.state import (
    AttentionPlan,
    BlockHistory,
    BlockPool,
    CachedBlocks,
    Control,
    GroupLinks,
    KVPool,
    PrefixIndex,
)
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.operations.stats import Stats

__all__ = [
    "AttentionPlan",
    "BlockHistory",
    "BlockPool",
    "CachedBlocks",
    "Control",
    "Counter",
    "Extra",
    "GroupLinks",
    "HeldBlocks",
    "KVPool",
    "LayerGroup",
    "PrefixIndex",
    "Stats",
]
