"""Blocks change hands: take, share, release. Pure functions on one group's `BlockPool`.

A block is in exactly one of three states: free (on the stack), referenced, or cached (published and
without owner). The block table itself is edited by the callers, in the same step as the counts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.loops import run_if
from kvcache_jax.arrays.masked_updates import (
    Update,
    add_at,
    count_down,
    get_at,
    num_true,
    rank_true,
    read_first,
    remainder,
    set_at,
    update_all,
)
from kvcache_jax.core.state import BlockPool, CachedBlocks

# Of the queue, looked at per trip of a sweep: more make the trips' arrays longer, and the last trip looks
# further past the end; fewer make more trips, each with a cost of its own.
_ENTRIES_PER_SWEEP = 1024
# Blocks per trip: more make a longer kernel to compile.
_WIPED_PER_TRIP = 16


def num_available(pool: BlockPool) -> jax.Array:
    """i32[], blocks that can be handed out: free ones, and cached ones once they are evicted."""
    return pool.num_free if pool.cached is None else pool.num_free + pool.cached.num_cached


def num_used(pool: BlockPool) -> jax.Array:
    """i32[], referenced blocks."""
    return pool.num_blocks - num_available(pool)


def utilization(pool: BlockPool) -> jax.Array:
    """f32[], share of the blocks that is referenced, 0 to 1."""
    used = num_used(pool)
    # XLA would multiply by the inverse of a constant, and so have 9 of 10 blocks be more than 0.9.
    num_blocks = jnp.maximum(used, pool.num_blocks)
    return used.astype(jnp.float32) / num_blocks.astype(jnp.float32)


def ref_counts(pool: BlockPool, block_ids: jax.Array) -> jax.Array:
    """i32 like `block_ids`: owners of each block, 0 for nowhere."""
    return get_at(pool.ref_count, block_ids, 0)


def has_no_owner(ref_count: jax.Array, block_ids: jax.Array) -> jax.Array:
    """Bool like `block_ids`; False for nowhere."""
    return get_at(ref_count, block_ids, 1) == 0


def is_published(pool: BlockPool, block_ids: jax.Array) -> jax.Array:
    """Bool like `block_ids`; False for nowhere."""
    if pool.cached is None:
        return jnp.zeros(block_ids.shape, bool)
    return get_at(pool.cached.is_published, block_ids, False)


def take(
    pool: BlockPool, mask: jax.Array, rows: jax.Array, columns: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """Hands out one block per true entry, each with one owner, and enters it into the table.

    Args:
      pool: Holds at least as many free blocks; the caller has checked, and evicted.
      mask: bool[n], where a block is wanted.
      rows: i32[n] or i32[], the block's row in the table.
      columns: i32[n], its column.

    Returns:
      The pool, and i32[n] block ids, nowhere where `mask` is false.
    """
    rank, num_taken = rank_true(mask)
    ids = jnp.where(mask, get_at(pool.free_stack, pool.num_free - 1 - rank), pool.num_blocks)
    rows = jnp.where(mask, rows, pool.block_table.shape[0])
    ref_count, table = update_all(
        Update(pool.ref_count, ids, 1), Update(pool.block_table, (rows, columns), ids)
    )
    return _taken(pool, num_taken, ref_count, table), ids


def take_wiped(
    pool: BlockPool, mask: jax.Array, rows: jax.Array, columns: jax.Array, contents: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """`take` that also sets the blocks' `contents` i32[num_blocks, ...] to 0, and returns these.

    That is of no use by itself. But who writes there next, here and there among other places, would wait for
    one line of memory after the other; this asks for all of them at once.
    """
    rank, num_taken = rank_true(mask)
    order = jnp.arange(mask.shape[0], dtype=jnp.int32)
    taken = get_at(pool.free_stack, pool.num_free - 1 - order)
    taken, free_stack = read_first(jnp.where(order < num_taken, taken, pool.num_blocks), pool.free_stack)
    ref_count, contents = update_all(
        Update(pool.ref_count, taken, 1), Update(contents, taken, 0), per_trip=_WIPED_PER_TRIP, end=num_taken
    )
    rows = jnp.where(mask, rows, pool.block_table.shape[0])
    table = set_at(pool.block_table, (rows, columns), get_at(taken, rank))
    pool = dataclasses.replace(pool, free_stack=free_stack)
    return _taken(pool, num_taken, ref_count, table), contents


def _taken(pool: BlockPool, num_taken: jax.Array, ref_count: jax.Array, table: jax.Array) -> BlockPool:
    num_free = pool.num_free - num_taken
    return _note_peak(dataclasses.replace(pool, ref_count=ref_count, block_table=table, num_free=num_free))


def share(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Adds one owner to each referenced block of `block_ids` (any shape, nowhere is skipped)."""
    return dataclasses.replace(pool, ref_count=add_at(pool.ref_count, block_ids, 1))


def reuse(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """`share` for i32[n] blocks that differ and may be cached: those are referenced again."""
    assert pool.cached is not None
    is_cached = has_no_owner(pool.ref_count, block_ids)
    is_cached, ref_count = read_first(is_cached, pool.ref_count)
    num_revived = num_true(is_cached)
    cached = dataclasses.replace(pool.cached, num_cached=pool.cached.num_cached - num_revived)
    pool = share(dataclasses.replace(pool, ref_count=ref_count, cached=cached), block_ids)
    return sweep_queue(_note_peak(pool), num_revived > 0)


def release(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Takes one owner from each block of `block_ids`; those without owner are cached or free again.

    Args:
      pool: Counts at least one owner per occurrence.
      block_ids: i32[...], nowhere is skipped. Of blocks that get cached, the one that first loses its last
        owner will be evicted first: pass a row's last block first.
    """
    block_ids = block_ids.reshape(-1)
    ref_count, is_last = count_down(pool.ref_count, block_ids)
    return _put_back(dataclasses.replace(pool, ref_count=ref_count), block_ids, is_last)


def put_on_free_stack(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> BlockPool:
    """Makes the masked blocks, which differ and have no owner, free."""
    push, num_freed = _push(pool, block_ids, mask)
    [free_stack] = update_all(push)
    return dataclasses.replace(pool, free_stack=free_stack, num_free=pool.num_free + num_freed)


def _push(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> tuple[Update, jax.Array]:
    """The update of the free stack by the masked blocks, and i32[] how many these are."""
    rank, num_freed = rank_true(mask)
    place = jnp.where(mask, pool.num_free + rank, pool.num_blocks)
    return Update(pool.free_stack, place, block_ids), num_freed


def mark_published(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """The blocks stay when their last owner goes; nowhere is skipped."""
    assert pool.cached is not None
    is_published = set_at(pool.cached.is_published, block_ids, True)
    return dataclasses.replace(pool, cached=dataclasses.replace(pool.cached, is_published=is_published))


def withdraw(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """The published blocks `block_ids` i32[n], which differ, are so no longer, and without owner free."""
    assert pool.cached is not None
    is_cached = has_no_owner(pool.ref_count, block_ids)
    push, num_freed = _push(pool, block_ids, is_cached)
    free_stack, is_published = update_all(push, Update(pool.cached.is_published, block_ids, False))
    cached = dataclasses.replace(
        pool.cached, is_published=is_published, num_cached=pool.cached.num_cached - num_freed
    )
    return dataclasses.replace(pool, free_stack=free_stack, num_free=pool.num_free + num_freed, cached=cached)


def _put_back(pool: BlockPool, block_ids: jax.Array, mask: jax.Array) -> BlockPool:
    """Makes the masked blocks, which differ and lost their last owner, cached or free."""
    if pool.cached is None:
        return put_on_free_stack(pool, block_ids, mask)
    stays = mask & is_published(pool, block_ids)
    rank, num_added = rank_true(stays)
    added = num_added.astype(jnp.uint32)
    cached, length = pool.cached, pool.cached.queue.shape[0]  # with room for all, see `sweep_queue`
    position = cached.tail + rank.astype(jnp.uint32)
    place = jnp.where(stays, remainder(position, length).astype(jnp.int32), length)
    push, num_freed = _push(pool, block_ids, mask & ~stays)
    free_stack, queue, queued_at = update_all(
        push,
        Update(cached.queue, place, block_ids),
        Update(cached.queued_at, jnp.where(stays, block_ids, pool.num_blocks), position),
    )
    cached = dataclasses.replace(
        cached,
        num_cached=cached.num_cached + num_added,
        queue=queue,
        queued_at=queued_at,
        tail=cached.tail + added,
    )
    return dataclasses.replace(pool, free_stack=free_stack, num_free=pool.num_free + num_freed, cached=cached)


def queue_entries(
    cached: CachedBlocks, ref_count: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the queue holds at `positions u32[n]`: i32[n] block ids, and bool[n] which of them are cached."""
    place = remainder(positions, cached.queue.shape[0]).astype(jnp.int32)
    block_ids = cached.queue[place]
    is_entry = positions - cached.head < cached.tail - cached.head
    is_entry &= get_at(cached.queued_at, block_ids, 0) == positions
    is_cached = get_at(cached.is_published, block_ids, False)
    is_cached &= has_no_owner(ref_count, block_ids)
    return block_ids, is_entry & is_cached


def sweep_queue(pool: BlockPool, is_due: jax.Array) -> BlockPool:
    """Rids the queue of stale entries where `is_due` bool[] and it might lack room for all referenced blocks.

    Due when blocks that have an owner are published, or published ones get an owner again: every one of these
    is appended by its release, which does not look whether there is room.
    """
    assert pool.cached is not None
    num_entries = pool.cached.tail - pool.cached.head
    is_full = num_entries + num_used(pool).astype(jnp.uint32) > pool.cached.queue.shape[0]
    cached = run_if(is_due & is_full, lambda cached: _swept(cached, pool.ref_count), pool.cached)
    cached, ref_count = read_first(cached, pool.ref_count)
    return dataclasses.replace(pool, ref_count=ref_count, cached=cached)


def _swept(cached: CachedBlocks, ref_count: jax.Array) -> CachedBlocks:
    """The queue without its stale entries: the others move up towards the front, in place."""
    length = cached.queue.shape[0]
    order = jnp.arange(min(_ENTRIES_PER_SWEEP, length), dtype=jnp.uint32)

    def sweep_some(state):
        queue, queued_at, end, position = state
        now = dataclasses.replace(cached, queue=queue, queued_at=queued_at)
        found = queue_entries(now, ref_count, position + order)
        (block_ids, is_kept), queue, queued_at = lax.optimization_barrier((found, queue, queued_at))
        rank, num_kept = rank_true(is_kept)
        positions = end + rank.astype(jnp.uint32)
        places = jnp.where(is_kept, remainder(positions, length).astype(jnp.int32), length)
        moved = jnp.where(is_kept, block_ids, ref_count.shape[0])
        queue, queued_at = update_all(Update(queue, places, block_ids), Update(queued_at, moved, positions))
        return queue, queued_at, end + num_kept.astype(jnp.uint32), position + jnp.uint32(order.size)

    def is_left(state):
        return state[3] - cached.head < cached.tail - cached.head

    state = cached.queue, cached.queued_at, cached.head, cached.head
    queue, queued_at, end, _ = lax.while_loop(is_left, sweep_some, state)
    return dataclasses.replace(cached, queue=queue, queued_at=queued_at, tail=end)


def _note_peak(pool: BlockPool) -> BlockPool:
    return dataclasses.replace(pool, peak_used=jnp.maximum(pool.peak_used, num_used(pool)))
