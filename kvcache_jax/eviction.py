"""Eviction: cached blocks give up their contents, so that their places can be handed out."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_pool, prefix_index
from kvcache_jax.config import CacheConfig
from kvcache_jax.state import BlockPool, Control, Counter, PrefixIndex, count_events

_ENTRIES_PER_TRIP = 128


def make_room(control: Control, needs: Sequence[jax.Array], config: CacheConfig) -> Control:
    """Evicts until each group has `needs[group]` i32[] free blocks; the caller has checked that it can."""
    if control.prefix_index is None:
        return control
    group_id = config.indexed_group
    pool = control.block_pools[group_id]
    return evict(control, jnp.maximum(needs[group_id] - pool.num_free, 0), config)


def evict(control: Control, num_blocks: jax.Array, config: CacheConfig) -> Control:
    """Evicts the `num_blocks` i32[] least recently used cached blocks; there are as many."""
    group_id = config.indexed_group
    pool, index = control.block_pools[group_id], control.prefix_index
    assert index is not None and pool.cached is not None

    def evict_some(state):
        pool, index, left = state
        pool, index, num_evicted = _evict_from_front(pool, index, left)
        return pool, index, left - num_evicted

    pool, index, _ = lax.while_loop(lambda state: state[2] > 0, evict_some, (pool, index, num_blocks))
    pools = (*control.block_pools[:group_id], pool, *control.block_pools[group_id + 1 :])
    return dataclasses.replace(
        control,
        block_pools=pools,
        prefix_index=index,
        counters=count_events(control, {Counter.EVICTIONS: num_blocks}),
    )


def _evict_from_front(
    pool: BlockPool, index: PrefixIndex, most: jax.Array
) -> tuple[BlockPool, PrefixIndex, jax.Array]:
    """Evicts up to `most` of the blocks in the next entries of the queue; returns also how many."""
    cached = pool.cached
    assert cached is not None
    order = jnp.arange(_ENTRIES_PER_TRIP, dtype=jnp.uint32)
    block_ids, is_cached = block_pool.queue_entries(cached, pool.ref_count, cached.head + order)
    rank, num_found = block_pool.rank_true(is_cached)
    is_victim = is_cached & (rank < most)
    num_evicted = jnp.minimum(num_found, most)
    # Up to and without the first cached block that stays.
    stays = is_cached & ~is_victim
    num_passed = jnp.where(stays.any(), jnp.argmax(stays).astype(jnp.uint32), jnp.uint32(_ENTRIES_PER_TRIP))
    victims = jnp.where(is_victim, block_ids, pool.num_blocks)
    index = prefix_index.remove(index, block_ids, is_victim)
    cached = dataclasses.replace(
        cached,
        is_published=cached.is_published.at[victims].set(False, mode="drop"),
        num_cached=cached.num_cached - num_evicted,
        head=cached.head + jnp.minimum(num_passed, cached.tail - cached.head),
    )
    pool = dataclasses.replace(pool, cached=cached)
    return block_pool.put_on_free_stack(pool, block_ids, is_victim), index, num_evicted
