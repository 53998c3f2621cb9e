"""Eviction: cached blocks give up their contents, so that their places can be handed out.

Under `lru` the queue of releases has the victims in its front. Other policies have a key per block, and those
without a published successor compete: a block whose last successor went competes from then on.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_history, block_pool, prefix_index
from kvcache_jax.block_pool import num_true
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
    """Evicts the `num_blocks` i32[] least valuable cached blocks; there are as many."""
    group_id = config.indexed_group
    pool, index = control.block_pools[group_id], control.prefix_index
    assert index is not None and pool.cached is not None

    def evict_some(state):
        pool, index, left = state
        if index.history is not None:
            return *_evict_by_key(pool, index, left, control.clock, config), jnp.int32(0)
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
    # Up to and without the first cached block that stays.
    stays = is_cached & ~is_victim
    num_passed = jnp.where(stays.any(), jnp.argmax(stays).astype(jnp.uint32), jnp.uint32(_ENTRIES_PER_TRIP))
    cached = dataclasses.replace(
        cached, head=cached.head + jnp.minimum(num_passed, cached.tail - cached.head)
    )
    pool, index = _give_up(dataclasses.replace(pool, cached=cached), index, block_ids, is_victim)
    return pool, index, jnp.minimum(num_found, most)


def _evict_by_key(
    pool: BlockPool, index: PrefixIndex, num_blocks: jax.Array, clock: jax.Array, config: CacheConfig
) -> tuple[BlockPool, PrefixIndex]:
    """Evicts `num_blocks` of the blocks with the lowest keys; there are as many cached ones."""
    cached, history = pool.cached, index.history
    assert cached is not None and history is not None
    is_candidate = cached.is_published & (pool.ref_count == 0) & (history.num_children == 0)
    keys, recency = block_history.keys_of(history, cached, clock, config)
    (keys, recency, is_candidate), cached, history = lax.optimization_barrier(
        ((keys, recency, is_candidate), cached, history)
    )
    pool, index = dataclasses.replace(pool, cached=cached), dataclasses.replace(index, history=history)

    def evict_batch(state):
        pool, index, is_candidate, left = state
        block_ids, is_victim = block_history.least_valuable(
            keys, recency, is_candidate, left, config.eviction_batch
        )
        pool, index = _give_up(pool, index, block_ids, is_victim)
        assert index.history is not None
        parents = jnp.where(is_victim, index.parent.at[block_ids].get(mode="clip"), pool.num_blocks)
        competes = index.history.num_children.at[parents].get(mode="fill", fill_value=1) == 0
        competes &= block_pool.ref_counts(pool, parents) == 0
        is_candidate = is_candidate.at[block_ids].set(False, mode="drop")
        is_candidate = is_candidate.at[jnp.where(competes, parents, pool.num_blocks)].set(True, mode="drop")
        return pool, index, is_candidate, left - num_true(is_victim)

    state = pool, index, is_candidate, num_blocks
    return lax.while_loop(lambda state: state[3] > 0, evict_batch, state)[:2]


def _give_up(
    pool: BlockPool, index: PrefixIndex, block_ids: jax.Array, is_victim: jax.Array
) -> tuple[BlockPool, PrefixIndex]:
    """Makes the masked ones of the cached blocks i32[n], which differ, free."""
    cached = pool.cached
    assert cached is not None
    index = prefix_index.remove(index, block_ids, is_victim)
    victims = jnp.where(is_victim, block_ids, pool.num_blocks)
    cached = dataclasses.replace(
        cached,
        is_published=cached.is_published.at[victims].set(False, mode="drop"),
        num_cached=cached.num_cached - num_true(is_victim),
    )
    pool = dataclasses.replace(pool, cached=cached)
    return block_pool.put_on_free_stack(pool, block_ids, is_victim), index
