"""Eviction: cached blocks give up their contents, so that their places can be handed out.

Under `lru`, and in groups that are not indexed, the queue of releases has the victims in its front. Other
policies have a key per block, and those without a published successor compete: a block whose last successor
was evicted competes from then on.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import first_true, get_at, num_true, rank_true
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.backends import by_platform
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.snapshots import TOKENS_SAVED
from kvcache_jax.core.state import BlockPool, Control
from kvcache_jax.prefix import block_metadata, group_links, prefix_index, victim_heap

# Entries of the queue per trip, all looked at where one block is wanted. CPUs pay for each; on a GPU the host
# waits for each trip.
_ENTRIES_ON_CPUS, _ENTRIES_ON_ACCELERATORS = 32, 512


def make_room(control: Control, needs: Mapping[int, jax.Array], config: CacheConfig) -> Control:
    """Evicts until each group has `needs[group]` i32[] free blocks; the caller has checked that it can."""
    if control.prefix_index is None:
        return control
    # The indexed group goes first: blocks of other groups that are linked to its victims come free with
    # these, so that those groups evict less.
    for group_id in sorted(needs, key=lambda g: g != config.indexed_group):
        if not config.groups[group_id].span.is_in_prefix:  # nothing is cached there
            continue
        if group_id in config.snapshot_groups:
            control = _evict_states(control, group_id, needs[group_id], config)
            continue
        num_free = control.block_pools[group_id].num_free
        control = evict(control, group_id, jnp.maximum(needs[group_id] - num_free, 0), config)
    return control


def evict(control: Control, group_id: int, num_blocks: jax.Array, config: CacheConfig) -> Control:
    """Evicts the `num_blocks` i32[] least valuable cached blocks of a group, or as many as there are.

    Not of states, which give way to `make_room` alone.
    """
    cached = control.block_pools[group_id].cached
    assert control.prefix_index is not None and cached is not None
    # No more than there are, because the counter below counts them as evicted.
    num_blocks = jnp.minimum(num_blocks, cached.num_cached)
    evict_most = _evict_from_front
    if group_id == config.indexed_group and control.prefix_index.history is not None:
        evict_most = _evict_by_key

    def evict_some(state):
        control, left = state
        control, num_evicted = evict_most(control, group_id, left, config)
        return control, left - num_evicted

    control, _ = lax.while_loop(lambda state: state[1] > 0, evict_some, (control, num_blocks))
    counters = count_events(control.counters, {Counter.EVICTIONS: num_blocks})
    return dataclasses.replace(control, counters=counters)


def _evict_from_front(
    control: Control, group_id: int, most: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Evicts up to `most` of the blocks in the next entries of the queue.

    Returns their number too, i32[], or `most` where the queue has no more.
    """
    pool, index = control.block_pools[group_id], control.prefix_index
    assert pool.cached is not None and index is not None
    cached = pool.cached
    num_entries = by_platform(cpu=_ENTRIES_ON_CPUS, accelerator=_ENTRIES_ON_ACCELERATORS)
    order = jnp.arange(num_entries, dtype=jnp.uint32)
    block_ids, is_cached = block_pool.queue_entries(cached, pool.ref_count, cached.head + order)
    rank, num_found = rank_true(is_cached)
    is_victim = is_cached & (rank < most)
    # The head passes stale entries and victims, up to the first cached block that stays: before the head that
    # block would never be evicted.
    stays = is_cached & ~is_victim
    num_passed = jnp.where(stays.any(), first_true(stays).astype(jnp.uint32), jnp.uint32(num_entries))
    head = cached.head + jnp.minimum(num_passed, cached.tail - cached.head)
    pool = dataclasses.replace(pool, cached=dataclasses.replace(cached, head=head))
    victims = jnp.where(is_victim, block_ids, pool.num_blocks)
    control = config.keeper.evict(control, group_id, victims, config)
    control = unpublish(control, group_id, victims, pool, config)
    # At the end of the queue all counts as evicted, so that the loop ends.
    return control, jnp.where(head == cached.tail, most, jnp.minimum(num_found, most))


def _evict_states(control: Control, group_id: int, need: jax.Array, config: CacheConfig) -> Control:
    """Evicts states of the least value until `need` i32[] blocks are free; see `Snapshots.eviction`.

    A keeper keeps them as long as it and the pool have room, and then the least of both is forgotten.
    """
    keeper = config.keeper

    def is_short(control: Control) -> jax.Array:
        return keeper.num_free(control, group_id, config) < need

    def evict_one(state):
        control, num_evicted, _ = state
        pool = control.block_pools[group_id]
        victim, is_due = _least_state(control, group_id, config), is_short(control)
        control, is_forgotten = keeper.forget_state(control, group_id, victim, is_due, config)
        victim = jnp.where(is_forgotten, pool.num_blocks, victim)
        kept = jnp.where(is_due, pool.num_blocks, victim)
        control = keeper.evict(control, group_id, kept[None], config)
        control = unpublish(control, group_id, victim[None], pool, config)
        is_evicted = victim < pool.num_blocks
        return control, num_evicted + is_evicted.astype(jnp.int32), is_evicted | is_forgotten

    def is_left(state):
        control, _, goes_on = state
        return goes_on & ((control.block_pools[group_id].num_free < need) | is_short(control))

    none = need & 0
    control, num_evicted, _ = lax.while_loop(is_left, evict_one, (control, none, none == 0))
    counters = count_events(control.counters, {Counter.EVICTIONS: num_evicted})
    return dataclasses.replace(control, counters=counters)


def _least_state(control: Control, group_id: int, config: CacheConfig) -> jax.Array:
    """Finds the cached state of the least value, i32[], or nowhere.

    Of states released at equal times those that a prompt asked for stay: the ends of answers, of which there
    are many and few are continued, would push out the states at which prompts part.
    """
    pool, index = control.block_pools[group_id], control.prefix_index
    assert pool.cached is not None and index is not None
    links = index.group_links[group_id]
    assert links is not None and links.is_wanted is not None
    is_candidate = pool.cached.is_published & (pool.ref_count == 0)
    age = pool.cached.tail - pool.cached.queued_at  # at least 1, at most the length of the queue
    if config.snapshots.eviction == TOKENS_SAVED:
        num_saved = group_links.tokens_between(index, links, config).astype(jnp.float32)
        cost = age.astype(jnp.float32) / num_saved
    else:
        cost = jnp.where(links.is_wanted, age, age + jnp.uint32(2**31))
    victim = jnp.argmax(jnp.where(is_candidate, cost, 0)).astype(jnp.int32)
    return jnp.where(is_candidate.any(), victim, pool.num_blocks)


def _evict_by_key(
    control: Control, group_id: int, num_blocks: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Evicts `num_blocks` of the blocks with the lowest keys, or all that there are; returns `num_blocks`."""
    pool, index = control.block_pools[group_id], control.prefix_index
    assert pool.cached is not None and index is not None and index.history is not None
    # Children are evicted before parents, for a child is never found without its parent: only leaves compete.
    is_candidate = pool.cached.is_published & (pool.ref_count == 0) & (index.history.num_children == 0)
    keys, recency = block_metadata.keys_of(index.history, pool.cached, control, config)
    heap = victim_heap.start(is_candidate, keys, recency)
    # Read before the loop writes the arrays that they are computed from.
    heap, control = lax.optimization_barrier((heap, control))

    def evict_batch(state):
        control, heap, left = state
        pool = control.block_pools[group_id]
        order = jnp.arange(config.eviction.batch_size, dtype=jnp.int32)
        # Parents enter after the batch, so only a batch of one block is exact.
        heap, block_ids = lax.scan(
            lambda heap, n: victim_heap.pop(heap, left > n, pool.num_blocks), heap, order
        )
        control = config.keeper.evict(control, group_id, block_ids, config)
        control = unpublish(control, group_id, block_ids, pool, config)
        index = control.prefix_index
        assert index is not None and index.history is not None
        # A parent competes once its last child is evicted, unless a row holds it.
        parents = get_at(index.parent, block_ids, pool.num_blocks)
        competes = get_at(index.history.num_children, parents, 1) == 0
        competes &= block_pool.has_no_owner(pool.ref_count, parents)
        entering = jnp.where(competes, parents, heap.key.size)
        heap, _ = lax.scan(lambda heap, block_id: (victim_heap.push(heap, block_id), None), heap, entering)
        num_evicted = num_true(block_ids < pool.num_blocks)
        return control, heap, jnp.where(num_evicted > 0, left - num_evicted, 0)

    control, *_ = lax.while_loop(lambda state: state[2] > 0, evict_batch, (control, heap, num_blocks))
    return control, num_blocks


def unpublish(
    control: Control, group_id: int, block_ids: jax.Array, pool: BlockPool, config: CacheConfig
) -> Control:
    """Makes cached blocks i32[n] of `pool`, which differ, free and unfindable; nowhere is skipped."""
    index = control.prefix_index
    assert index is not None
    if group_id == config.indexed_group:
        # In the same step as the block becomes free, so that no lookup finds it with other contents.
        index = prefix_index.remove(index, block_ids)
    else:
        index = group_links.unlink(index, group_id, block_ids)
    pools = list(control.block_pools)
    pools[group_id] = block_pool.withdraw(pool, block_ids)
    control = dataclasses.replace(control, block_pools=tuple(pools), prefix_index=index)
    if group_id == config.indexed_group:
        control = group_links.drop_links(control, block_ids)
    return control
