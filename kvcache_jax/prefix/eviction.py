"""Eviction: cached blocks give up their contents, so that their places can be handed out.

Under `lru`, and in groups that are not indexed, the queue of releases has the victims in its front. Other
policies have a key per block, and those without a published successor compete: a block whose last successor
went competes from then on.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import first_true, get_at, num_true, rank_true, set_at
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.single_kernel import single_kernel
from kvcache_jax.core.state import BlockPool, Control, Counter, count_events
from kvcache_jax.prefix import block_metadata, group_links, prefix_index, victim_heap

# Of the queue, all looked at where one block is wanted, as in a decoding step: more make that slower. Fewer
# make more trips for a prompt, and past stale entries.
_ENTRIES_PER_TRIP = 32


def make_room(
    control: Control, needs: Sequence[jax.Array], config: CacheConfig, last: jax.Array | None = None
) -> Control:
    """Evicts until each group has `needs[group]` i32[] free blocks; the caller has checked that it can.

    Blocks `last` i32[n] of the indexed group are evicted when no other is left. Nothing was released after
    them: in a queue they stand at the end already.
    """
    if control.prefix_index is None:
        return control
    others = [g for g in range(len(config.groups)) if g != config.indexed_group]
    for group_id in (config.indexed_group, *others):
        num_free = control.block_pools[group_id].num_free
        control = evict(control, group_id, jnp.maximum(needs[group_id] - num_free, 0), config, last)
    return control


def evict(
    control: Control,
    group_id: int,
    num_blocks: jax.Array,
    config: CacheConfig,
    last: jax.Array | None = None,
) -> Control:
    """Evicts the `num_blocks` i32[] least valuable cached blocks of a group; there are as many.

    `last` is as in `make_room`.
    """
    assert control.prefix_index is not None
    has_keys = group_id == config.indexed_group and control.prefix_index.history is not None

    def evict_some(state):
        control, left = state
        if has_keys:
            return _evict_by_key(control, group_id, left, config, last), jnp.zeros_like(left)
        control, num_evicted = _evict_from_front(control, group_id, left, config)
        return control, left - num_evicted

    control, _ = lax.while_loop(lambda state: state[1] > 0, evict_some, (control, num_blocks))
    counters = count_events(control, {Counter.EVICTIONS: num_blocks})
    return dataclasses.replace(control, counters=counters)


def _evict_from_front(
    control: Control, group_id: int, most: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Evicts up to `most` of the blocks in the next entries of the queue; returns also how many."""
    pool, index = control.block_pools[group_id], control.prefix_index
    assert pool.cached is not None and index is not None
    cached = pool.cached
    order = jnp.arange(_ENTRIES_PER_TRIP, dtype=jnp.uint32)
    block_ids, is_cached = block_pool.queue_entries(cached, pool.ref_count, cached.head + order)
    rank, num_found = rank_true(is_cached)
    is_victim = is_cached & (rank < most)
    # Up to and without the first cached block that stays.
    stays = is_cached & ~is_victim
    num_passed = jnp.where(stays.any(), first_true(stays).astype(jnp.uint32), jnp.uint32(_ENTRIES_PER_TRIP))
    head = cached.head + jnp.minimum(num_passed, cached.tail - cached.head)
    pool = dataclasses.replace(pool, cached=dataclasses.replace(cached, head=head))
    control = unpublish(control, group_id, jnp.where(is_victim, block_ids, pool.num_blocks), pool, config)
    return control, jnp.minimum(num_found, most)


def _evict_by_key(
    control: Control, group_id: int, num_blocks: jax.Array, config: CacheConfig, last: jax.Array | None
) -> Control:
    """Evicts `num_blocks` of the blocks with the lowest keys; there are as many cached ones."""
    pool, index = control.block_pools[group_id], control.prefix_index
    assert pool.cached is not None and index is not None and index.history is not None
    is_candidate = pool.cached.is_published & (pool.ref_count == 0) & (index.history.num_children == 0)
    tier = jnp.full_like(pool.ref_count, victim_heap.FIRST)
    if last is not None:
        tier = set_at(tier, last, victim_heap.LAST)
    tier = jnp.where(is_candidate, tier, tier + victim_heap.OUT)
    keys, recency = block_metadata.keys_of(index.history, pool.cached, control.clock, config)
    start = victim_heap.start(victim_heap.Worth(tier, keys, recency))
    # Read before the loop writes what they are computed from.
    start, control = lax.optimization_barrier((start, control))

    def evict_batch(state):
        control, now, left = state
        pool = control.block_pools[group_id]
        now, block_ids = victim_heap.take(now, left, config.eviction_batch, pool.num_blocks)
        control = unpublish(control, group_id, block_ids, pool, config)
        index = control.prefix_index
        assert index is not None and index.history is not None
        parents = get_at(index.parent, block_ids, pool.num_blocks)
        competes = get_at(index.history.num_children, parents, 1) == 0
        competes &= block_pool.ref_counts(pool, parents) == 0
        now = victim_heap.enter(now, jnp.where(competes, parents, -1))
        return control, now, left - num_true(block_ids < pool.num_blocks)

    def evict_all(state, num_blocks):
        return lax.while_loop(lambda state: state[2] > 0, evict_batch, (*state, num_blocks))[:2]

    return single_kernel(evict_all, (control, start), num_blocks)[0]


def unpublish(
    control: Control, group_id: int, block_ids: jax.Array, pool: BlockPool, config: CacheConfig
) -> Control:
    """Makes cached blocks i32[n] of `pool`, which differ, free and unfindable; nowhere is skipped."""
    index = control.prefix_index
    assert index is not None
    if group_id == config.indexed_group:
        index = prefix_index.remove(index, block_ids)
    else:
        index = group_links.unlink(index, group_id, block_ids)
    pools = list(control.block_pools)
    pools[group_id] = block_pool.withdraw(pool, block_ids)
    control = dataclasses.replace(control, block_pools=tuple(pools), prefix_index=index)
    if group_id == config.indexed_group:
        control = group_links.drop_companions(control, block_ids)
    return control
