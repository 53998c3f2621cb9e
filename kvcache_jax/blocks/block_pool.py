"""Ownership of blocks: take, share, release, as pure functions on one group's `BlockPool`.

A block is in exactly one of three states: free (on the stack), referenced, or cached (published and
without owner). The block table itself is edited by the callers, in the same step as the counts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import (
    add_at,
    count_down,
    first_of_equal,
    get_at,
    num_true,
    rank_true,
    read_first,
    remainder,
    set_at,
)
from kvcache_jax.core.state import BlockPool, CachedBlocks

# Entries of the queue per trip of a sweep: more make the last trip look further past the end.
_ENTRIES_PER_SWEEP = 1024


def num_available(pool: BlockPool) -> jax.Array:
    """Counts the blocks that can be handed out, i32[]: free ones, and cached ones once they are evicted."""
    return pool.num_free if pool.cached is None else pool.num_free + pool.cached.num_cached


def num_used(pool: BlockPool) -> jax.Array:
    """Counts referenced blocks, i32[]."""
    return pool.num_blocks - num_available(pool)


def utilization(pool: BlockPool, num_fewer: ArrayLike = 0) -> jax.Array:
    """Computes the share of referenced blocks, f32[...] from 0 to 1, without `num_fewer` i32[...] of them."""
    used = num_used(pool) - num_fewer
    # XLA would multiply by the inverse of a constant, and so have 9 of 10 blocks be more than 0.9.
    num_blocks = jnp.maximum(used, pool.num_blocks)
    return used.astype(jnp.float32) / num_blocks.astype(jnp.float32)


def ref_counts(pool: BlockPool, block_ids: jax.Array) -> jax.Array:
    """Counts the owners of each block, i32 like `block_ids`; 0 for nowhere."""
    return get_at(pool.ref_count, block_ids, 0)


def has_no_owner(ref_count: jax.Array, block_ids: jax.Array) -> jax.Array:
    """Masks the blocks without owner, bool like `block_ids`; False for nowhere."""
    return get_at(ref_count, block_ids, 1) == 0


def is_published(pool: BlockPool, block_ids: jax.Array) -> jax.Array:
    """Masks the published blocks, bool like `block_ids`; False for nowhere."""
    if pool.cached is None:
        return jnp.zeros(block_ids.shape, bool)
    return get_at(pool.cached.is_published, block_ids, False)


def take(pool: BlockPool, mask: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Assigns one block per true entry of bool[...], each with one owner.

    There must be as many free blocks: the caller has checked, and evicted. Returns also the block ids, i32
    like `mask`, nowhere where it is false.
    """
    rank, num_taken = rank_true(mask.reshape(-1))
    ids = get_at(pool.free_stack, pool.num_free - 1 - rank).reshape(mask.shape)
    # The next releases write onto the stack in these places.
    ids, free_stack = read_first(jnp.where(mask, ids, pool.num_blocks), pool.free_stack)
    pool = dataclasses.replace(
        pool,
        ref_count=set_at(pool.ref_count, ids, 1),
        free_stack=free_stack,
        num_free=pool.num_free - num_taken,
    )
    return _note_peak(pool), ids


def share(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Adds one owner to each referenced block of `block_ids` i32[...]; nowhere is skipped."""
    return dataclasses.replace(pool, ref_count=add_at(pool.ref_count, block_ids, 1))


def reuse(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Adds one owner to blocks i32[...], which may repeat and be cached: those are referenced again."""
    pool, is_revived = revive(pool, block_ids)
    return sweep_queue(pool, is_revived.any())


def revive(pool: BlockPool, block_ids: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Does what `reuse` does but to sweep the queue; masks the first entry of each cached block."""
    assert pool.cached is not None
    # An id that repeats leaves the cached blocks once, and gains an owner for each time.
    is_unowned = has_no_owner(pool.ref_count, block_ids)
    is_revived, ref_count = first_of_equal(pool.ref_count, is_unowned, block_ids, held=0)
    cached = dataclasses.replace(pool.cached, num_cached=pool.cached.num_cached - num_true(is_revived))
    pool = share(dataclasses.replace(pool, ref_count=ref_count, cached=cached), block_ids)
    return _note_peak(pool), is_revived


def release(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Takes one owner from each block of `block_ids` i32[...]; blocks without owner are cached or free again.

    Nowhere is skipped. Of blocks that become cached, the one that first loses its last owner is evicted
    first: pass a row's last block first.
    """
    block_ids = block_ids.reshape(-1)
    ref_count, is_last = count_down(pool.ref_count, block_ids)
    pool = dataclasses.replace(pool, ref_count=ref_count)
    if pool.cached is None:
        return put_on_free_stack(pool, block_ids, is_last)
    # A published block without owner stays findable; it is in the queue, not on the free stack.
    stays = is_last & is_published(pool, block_ids)
    pool = _append_to_queue(pool, block_ids, stays)
    return put_on_free_stack(pool, block_ids, is_last & ~stays)


def put_on_free_stack(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> BlockPool:
    """Makes the masked blocks of i32[n], which differ and have no owner, free."""
    rank, num_freed = rank_true(mask)
    place = jnp.where(mask, pool.num_free + rank, pool.num_blocks)
    free_stack = set_at(pool.free_stack, place, block_ids)
    return dataclasses.replace(pool, free_stack=free_stack, num_free=pool.num_free + num_freed)


def _append_to_queue(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> BlockPool:
    """Makes the masked blocks, which differ and lost their last owner, cached."""
    assert pool.cached is not None
    cached, length = pool.cached, pool.cached.queue.shape[0]  # with room for all, see `sweep_queue`
    rank, num_added = rank_true(mask)
    position = cached.tail + rank.astype(jnp.uint32)
    place = jnp.where(mask, remainder(position, length).astype(jnp.int32), length)
    if cached.released_at is not None:
        assert cached.num_released is not None
        moments = cached.num_released + rank.astype(jnp.uint32)
        cached = dataclasses.replace(
            cached,
            released_at=set_at(cached.released_at, jnp.where(mask, block_ids, pool.num_blocks), moments),
            num_released=cached.num_released + num_added.astype(jnp.uint32),
        )
    cached = dataclasses.replace(
        cached,
        num_cached=cached.num_cached + num_added,
        queue=set_at(cached.queue, place, block_ids),
        queued_at=set_at(cached.queued_at, jnp.where(mask, block_ids, pool.num_blocks), position),
        tail=cached.tail + num_added.astype(jnp.uint32),
    )
    return dataclasses.replace(pool, cached=cached)


def mark_published(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Marks blocks i32[...] to stay cached without owner; nowhere is skipped."""
    assert pool.cached is not None
    is_published = set_at(pool.cached.is_published, block_ids, True)
    return dataclasses.replace(pool, cached=dataclasses.replace(pool.cached, is_published=is_published))


def withdraw(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Makes published blocks i32[n], which differ, unpublished, and free where they have no owner."""
    assert pool.cached is not None
    is_cached = has_no_owner(pool.ref_count, block_ids)
    cached = dataclasses.replace(
        pool.cached,
        is_published=set_at(pool.cached.is_published, block_ids, False),
        num_cached=pool.cached.num_cached - num_true(is_cached),
    )
    return put_on_free_stack(dataclasses.replace(pool, cached=cached), block_ids, is_cached)


def queue_entries(
    cached: CachedBlocks, ref_count: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Reads the queue at `positions u32[n]`: i32[n] block ids, and bool[n] which of them are cached."""
    place = remainder(positions, cached.queue.shape[0]).astype(jnp.int32)
    block_ids = cached.queue[place]
    is_entry = positions - cached.head < cached.tail - cached.head
    # A block that was cached again has a later entry: all but the latest are stale.
    is_entry &= get_at(cached.queued_at, block_ids, 0) == positions
    is_cached = get_at(cached.is_published, block_ids, False)
    is_cached &= has_no_owner(ref_count, block_ids)
    return block_ids, is_entry & is_cached


def sweep_queue(pool: BlockPool, is_due: jax.Array) -> BlockPool:
    """Rids the queue of stale entries where `is_due` bool[] and it might lack room for all referenced blocks.

    Due when blocks that have an owner are published, or published ones get an owner again: every one of these
    is appended by its release, which does not look whether there is room. The entries that stay move up
    towards the front, in place.
    """
    assert pool.cached is not None
    cached, length = pool.cached, pool.cached.queue.shape[0]
    num_entries = cached.tail - cached.head
    is_due &= num_entries + num_used(pool).astype(jnp.uint32) > length
    order = jnp.arange(min(_ENTRIES_PER_SWEEP, length), dtype=jnp.uint32)

    def sweep_some(state):
        queue, queued_at, end, position = state
        now = dataclasses.replace(cached, queue=queue, queued_at=queued_at)
        found = queue_entries(now, pool.ref_count, position + order)
        (block_ids, is_kept), (queue, queued_at) = read_first(found, (queue, queued_at))
        rank, num_kept = rank_true(is_kept)
        positions = end + rank.astype(jnp.uint32)
        places = jnp.where(is_kept, remainder(positions, length).astype(jnp.int32), length)
        moved = jnp.where(is_kept, block_ids, pool.num_blocks)
        queue, queued_at = set_at(queue, places, block_ids), set_at(queued_at, moved, positions)
        return queue, queued_at, end + num_kept.astype(jnp.uint32), position + jnp.uint32(order.size)

    def is_left(state):
        return state[3] - cached.head < num_entries

    # Where no sweep is due the queue is its own result, and the first position is past its end.
    end = jnp.where(is_due, cached.head, cached.tail)
    state = cached.queue, cached.queued_at, end, end
    queue, queued_at, tail, _ = lax.while_loop(is_left, sweep_some, state)
    # The caller's writes to these arrays wait for the sweep, which reads them.
    (queue, tail), (ref_count, is_published) = read_first(
        (queue, tail), (pool.ref_count, cached.is_published)
    )
    cached = dataclasses.replace(
        cached, queue=queue, queued_at=queued_at, tail=tail, is_published=is_published
    )
    return dataclasses.replace(pool, ref_count=ref_count, cached=cached)


def _note_peak(pool: BlockPool) -> BlockPool:
    return dataclasses.replace(pool, peak_used=jnp.maximum(pool.peak_used, num_used(pool)))
