"""Metadata of published blocks, for eviction policies.

`lru` keeps no `BlockHistory`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import add_at, set_at
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.eviction_policy import BlockMetadata, eviction_keys
from kvcache_jax.core.state import BlockHistory, CachedBlocks, Control

_MAX = jnp.iinfo(jnp.int32).max


def note_published(
    history: BlockHistory, block_ids: jax.Array, clock: jax.Array, priority: jax.Array, depth: jax.Array
) -> BlockHistory:
    """Starts the records of blocks i32[n], nowhere is skipped; `priority` and `depth` are i32[n]."""
    history = _put(history, block_ids, num_hits=jnp.zeros_like(block_ids), depth=depth)
    return _put(history, block_ids, published_at=clock, last_used_at=clock, priority=priority)


def note_used(history: BlockHistory, block_ids: jax.Array, clock: jax.Array) -> BlockHistory:
    """Counts one more use of each block in i32[n], which may repeat; nowhere is skipped."""
    history = _put(history, block_ids, last_used_at=clock)
    if history.num_hits is None:
        return history
    return dataclasses.replace(history, num_hits=add_at(history.num_hits, block_ids, 1))


def note_priority(history: BlockHistory, block_ids: jax.Array, priority: jax.Array) -> BlockHistory:
    """Sets the priority, i32[] or i32[n], of blocks i32[n], which differ; nowhere is skipped."""
    return _put(history, block_ids, priority=priority)


def add_children(history: BlockHistory | None, parents: jax.Array, change: int) -> BlockHistory | None:
    """Adds `change` to the number of children of each block in i32[n], which may repeat."""
    if history is None:
        return None
    num_children = add_at(history.num_children, parents, change)
    return dataclasses.replace(history, num_children=num_children)


def _put(history: BlockHistory, block_ids: jax.Array, **values: jax.Array) -> BlockHistory:
    """Sets entries of those fields that are kept."""
    kept = {name: field for name in values if (field := getattr(history, name)) is not None}
    updated = {name: set_at(field, block_ids, values[name]) for name, field in kept.items()}
    return dataclasses.replace(history, **updated)


def keys_of(
    history: BlockHistory, cached: CachedBlocks, control: Control, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """Computes the policy's key and the recency of each block, i32[num_blocks] both."""

    def ticks_since(moment: jax.Array | None) -> jax.Array | None:
        if moment is None:
            return None
        return jnp.minimum(control.clock - moment, jnp.uint32(_MAX)).astype(jnp.int32)

    recency = (cached.queued_at - cached.head).astype(jnp.int32)
    blocks = BlockMetadata(
        recency=recency,
        num_hits=history.num_hits,
        age=ticks_since(history.published_at),
        idle=ticks_since(history.last_used_at),
        priority=history.priority,
        depth=history.depth,
    )
    return eviction_keys(config.eviction.policy, blocks, control.extras), recency
