"""The operation `commit`: publishes full blocks, found by their tokens, and merges equal ones.

The blocks to publish, of all rows end to end, are worked off in batches. A batch is looked up at once:
of equal new blocks the first is published and the others adopt it, and a block that cannot be published ends
its row's chain.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcache_jax.arrays.masked_updates import (
    add_at,
    first_true,
    get_at,
    num_true,
    quotient,
    read_first,
    run_if,
    run_of,
    set_at,
)
from kvcache_jax.arrays.number_checks import static_flag
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.backends import by_platform
from kvcache_jax.core.cache_checks import require_prefix_index, takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.counter import Counter, count_events
from kvcache_jax.core.state import BlockPool, Cache, Control, PrefixIndex
from kvcache_jax.core.status import Status, first_failure
from kvcache_jax.operations.rows import check_ids, partial_tails, prefix_len
from kvcache_jax.prefix import block_metadata, group_links, prefix_index, snapshots
from kvcache_jax.prefix.content_hash import block_hashes, root_hash
from kvcache_jax.prefix.prefix_index import Content

# Blocks per trip, of which all pairs are compared. A decoding step publishes about 16, so that more would
# cost CPUs something in each step; on a GPU the host waits for each trip.
_BATCH_ON_CPUS, _BATCH_ON_ACCELERATORS = 24, 512


@takes_one
@jax.named_scope("kvcache.commit")
def commit(
    cache: Cache,
    seq_ids: IntRows | None = None,
    *,
    final_len: IntRows | None = None,
    is_end: bool = True,
) -> tuple[Cache, jax.Array]:
    """Publishes rows' full blocks, so that later prompts that begin alike can reuse them.

    Call it after the keys and values of the tokens are written; steps made before are stale then, for a block
    whose contents are already published is released and the published one takes its place, in all rows.
    Work follows the new blocks: committing a row that has nothing to publish costs nothing.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows. Default: all rows, n = max_seqs, of which idle ones are SKIPPED.
      final_len: i32[n], tokens that will not be taken back, at most; such as without drafts. Default: all.
      is_end: Whether the rows are complete, so that the last states of recurrent layers are kept too; False
        after each step of a loop. See `Snapshots`.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, BAD_LENGTH, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError: the cache has no prefix caching.
    """
    require_prefix_index("commit", cache)
    if seq_ids is not None:
        seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = cache.max_seqs if seq_ids is None else seq_ids.shape[0]
    if final_len is None:
        final_len = np.full(num_rows, np.iinfo(np.int32).max, np.int32)
    final_len = arguments.int_column("final_len", final_len, num_rows)
    is_end = static_flag("is_end", is_end)
    control, status = _commit(cache.control, seq_ids, final_len, config=cache.config, is_end=is_end)
    return dataclasses.replace(cache, control=control), status


@functools.partial(jax.jit, static_argnames=("config", "is_end"))
def _commit(
    control: Control, seq_ids: jax.Array | None, final_len: jax.Array, config: CacheConfig, is_end: bool
) -> tuple[Control, jax.Array]:
    control, (seq_ids, final_len) = as_varied((control, (seq_ids, final_len)))
    return commit_rows(control, seq_ids, final_len, config=config, is_end=is_end)


class _Pending(NamedTuple):
    """The blocks to publish of all rows of a call, end to end: row `i` has `[starts[i], ends[i])`."""

    seq_ids: jax.Array  # i32[n], rows of the block table; anything for those that have none
    num_published: jax.Array  # i32[n], blocks before them
    starts: jax.Array  # i32[n]
    ends: jax.Array  # i32[n]
    num_blocks: jax.Array  # i32[], all of them


class _Batch(NamedTuple):
    """Pending blocks that are published together, a row's blocks side by side and in order."""

    is_entry: jax.Array  # bool[E]
    row: jax.Array  # i32[E], index in the call
    seq_ids: jax.Array  # i32[E], row of the block table
    start: jax.Array  # i32[E], the row's first entry
    column: jax.Array  # i32[E], of the block table
    block_ids: jax.Array  # i32[E]; nowhere where there is no entry
    before: jax.Array  # i32[E], the published block before the row's first entry, or nowhere


class _Found(NamedTuple):
    """The outcome for each block of a batch."""

    is_done: jax.Array  # bool[E], it is published, or its contents are already: by `canonical`
    is_new: jax.Array  # bool[E], it is to be entered into the index itself
    canonical: jax.Array  # i32[E], the published block with these contents
    content: Content  # of each block, the canonical parent included
    way: jax.Array  # i32[E], place in the bucket for a new one


def commit_rows(
    control: Control,
    seq_ids: jax.Array | None,
    final_len: jax.Array,
    *,
    config: CacheConfig,
    is_end: jax.Array | bool = True,
) -> tuple[Control, jax.Array]:
    """Publishes the full blocks of rows `seq_ids` i32[n], None for all rows, below `final_len` i32[n]."""
    block_size = config.groups[config.indexed_group].block_size
    if seq_ids is None:
        rows = jnp.arange(control.max_seqs, dtype=jnp.int32)
        context_len, num_published = control.context_len, control.num_published
        id_checks = ((~control.is_active, Status.SKIPPED),)
    else:
        rows = seq_ids
        context_len, num_published = get_at(control.context_len, rows), get_at(control.num_published, rows)
        is_idle = ~get_at(control.is_active, rows)
        id_checks = (*check_ids(control, rows), (is_idle, Status.SEQ_NOT_ACTIVE))
    status = first_failure(*id_checks, (final_len < 0, Status.BAD_LENGTH))
    context_len = prefix_len(control, rows, context_len, config)  # later tokens are not found by their text
    length = jnp.maximum(jnp.minimum(final_len, context_len), 0)
    num_full = quotient(length, block_size)
    num_pending = jnp.where(status == Status.OK, jnp.maximum(num_full - num_published, 0), 0)
    ends = jnp.cumsum(num_pending, dtype=jnp.int32)
    pending = _Pending(rows, num_published, ends - num_pending, ends, jnp.sum(num_pending, dtype=jnp.int32))

    def publish_some(state):
        control, is_cut, first = state
        # A block that is published here is queued at its last release, which does not check for room. Within
        # the loop, so that a step that publishes nothing waits for one loop and not for two.
        pools = tuple(
            block_pool.sweep_queue(pool, first == 0) if group.span.is_in_prefix else pool
            for pool, group in zip(control.block_pools, config.groups, strict=True)
        )
        control = dataclasses.replace(control, block_pools=pools)
        batch = _batch_at(control, pending, first, is_cut, config)
        control, is_cut = _publish_batch(control, batch, is_cut, config)
        return control, is_cut, first + batch.is_entry.shape[0]

    is_cut = jnp.zeros_like(num_full, bool)
    state = control, is_cut, pending.num_blocks & 0
    control, *_ = lax.while_loop(lambda state: state[2] < pending.num_blocks, publish_some, state)
    if control.marks is not None:
        rows = jnp.where(status == Status.OK, rows, control.max_seqs)
        control = snapshots.publish_states(control, rows, length, is_end, config)
    return _note_published_tails(control, config), status


def _note_published_tails(control: Control, config: CacheConfig) -> Control:
    """Counts published blocks in rows that hold a part of their tokens: another row may have filled them."""
    group, pool = config.groups[config.indexed_group], control.block_pools[config.indexed_group]
    tails = partial_tails(control, config, jnp.arange(control.max_seqs, dtype=jnp.int32))
    num_with_tail = quotient(control.context_len, group.block_size) + 1
    num_published = jnp.where(block_pool.is_published(pool, tails), num_with_tail, control.num_published)
    return dataclasses.replace(control, num_published=num_published)


def _batch_at(
    control: Control, pending: _Pending, first: jax.Array, is_cut: jax.Array, config: CacheConfig
) -> _Batch:
    """Selects the pending blocks from place `first` i32[] on, without rows whose chain ended (`is_cut`)."""
    pool = control.block_pools[config.indexed_group]
    size = by_platform(cpu=_BATCH_ON_CPUS, accelerator=_BATCH_ON_ACCELERATORS)
    size = min(size, is_cut.shape[0] * pool.max_blocks_per_seq)
    place = first + jnp.arange(size, dtype=jnp.int32)
    row = run_of(pending.ends, place)
    is_entry = (place < pending.num_blocks) & ~get_at(is_cut, row)
    seq_ids, row_start = get_at(pending.seq_ids, row), get_at(pending.starts, row)
    num_published = get_at(pending.num_published, row)
    column = num_published + place - row_start
    first_column = num_published + jnp.maximum(first - row_start, 0)
    block_ids = get_at(pool.block_table, (seq_ids, column), pool.num_blocks)
    return _Batch(
        is_entry=is_entry,
        row=row,
        seq_ids=seq_ids,
        start=jnp.maximum(row_start - first, 0),
        column=column,
        block_ids=jnp.where(is_entry, block_ids, pool.num_blocks),
        before=get_at(pool.block_table, (seq_ids, first_column - 1), pool.num_blocks),
    )


def _publish_batch(
    control: Control, batch: _Batch, is_cut: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array]:
    """Publishes a batch; marks rows whose chain ended in `is_cut` bool[n]."""
    group_id = config.indexed_group
    pool, index = control.block_pools[group_id], control.prefix_index
    assert index is not None
    batch, table = read_first(batch, pool.block_table)
    pool = dataclasses.replace(pool, block_table=table)
    found = _look_up(control, index, batch)

    index = prefix_index.insert(index, found.is_new, batch.block_ids, found.way, found.content)
    pool = block_pool.mark_published(pool, jnp.where(found.is_new, batch.block_ids, pool.num_blocks))
    done_rows = jnp.where(found.is_done, batch.seq_ids, control.max_seqs)
    is_exchanged = found.is_done & (found.canonical != batch.block_ids)
    pool, num_adopted = _adopt_if_any(pool, is_exchanged, batch, found.canonical)
    if index.history is not None:
        index = _note_uses(control, index, batch, found, is_exchanged)
    control = dataclasses.replace(
        control,
        num_published=add_at(control.num_published, done_rows, 1),
        prefix_index=index,
        block_pools=(*control.block_pools[:group_id], pool, *control.block_pools[group_id + 1 :]),
        counters=count_events(control.counters, {Counter.ADOPTIONS: num_adopted}),
    )
    new_ids = jnp.where(found.is_new, batch.block_ids, pool.num_blocks)
    control = config.hooks.note_published(config.keeper.publish(control, new_ids, config), new_ids)
    if len(config.groups) > 1:
        control = group_links.link(
            control, found.is_done, batch.seq_ids, batch.column, found.canonical, config
        )
    cut_rows = jnp.where(batch.is_entry & ~found.is_done, batch.row, is_cut.shape[0])
    return control, set_at(is_cut, cut_rows, True)


def _note_uses(
    control: Control,
    index: PrefixIndex,
    batch: _Batch,
    found: _Found,
    is_exchanged: jax.Array,
) -> PrefixIndex:
    """Informs the eviction policy of published blocks, and of blocks that other rows adopted."""
    assert index.history is not None
    nowhere = index.parent.shape[0]
    priority = get_at(control.priority, batch.seq_ids)
    new_ids = jnp.where(found.is_new, batch.block_ids, nowhere)
    history = block_metadata.note_published(index.history, new_ids, control.clock, priority, batch.column)
    is_adopted = is_exchanged & ~_stands_before(batch.block_ids, is_exchanged)
    used_ids = jnp.where(is_adopted, found.canonical, nowhere)
    history = block_metadata.note_used(history, used_ids, control.clock)
    # Of several rows that adopt a block, the priority of the last one stays.
    is_last = ~_stands_before(used_ids[::-1], is_adopted[::-1])[::-1]
    history = block_metadata.note_priority(history, jnp.where(is_last, used_ids, nowhere), priority)
    return dataclasses.replace(index, history=history)


def _look_up(control: Control, index: PrefixIndex, batch: _Batch) -> _Found:
    """Looks up every block of a batch, and settles which of equal ones is published."""
    nowhere, block_size = index.block_tokens.shape
    order = jnp.arange(batch.row.shape[0], dtype=jnp.int32)
    namespace = get_at(control.namespace, batch.seq_ids)
    tokens = get_at(index.block_tokens, batch.block_ids)
    root = root_hash(control.hash_key, namespace)
    base = jnp.where((batch.before == nowhere)[:, None], root, get_at(index.block_hash, batch.before))
    added = block_hashes(control.hash_key, tokens, batch.column * block_size)
    up_to = jnp.cumsum(added, axis=0, dtype=jnp.uint32)
    hashes = base + up_to - get_at(up_to - added, batch.start)
    # Computed once: fused into the comparisons below, the hashes would be computed for every pair.
    hashes, tokens = lax.optimization_barrier((hashes, tokens))

    buckets = prefix_index.bucket_of(index, hashes)
    in_bucket = index.buckets[buckets]
    published = jnp.where(batch.is_entry, prefix_index.candidates(index, in_bucket, hashes), nowhere)
    is_new = batch.is_entry & (published == nowhere)

    # Equal new blocks of one call become one: the first entry, the leader, is published, the others adopt it.
    first, second = hashes.T
    is_equal = (first[:, None] == first[None]) & (second[:, None] == second[None]) & is_new[None]
    leader = jnp.where(is_new, first_true(is_equal), order)
    is_first = is_new & (leader == order)
    canonical = jnp.where(is_new, batch.block_ids[leader], published)
    # A parent is the published block, never the row's equal one: that one is released, and its child would
    # then be found after a block of other contents.
    parent = jnp.where(order == batch.start, batch.before, jnp.roll(canonical, 1))
    content = Content(tokens, hashes, parent, namespace)
    # New blocks of one bucket take its empty places in order; one without a place ends its row's chain.
    goes_before = (order[:, None] > order[None]) & (buckets[:, None] == buckets[None]) & is_first[None]
    way, has_way = prefix_index.free_way(index, in_bucket, jnp.sum(goes_before, axis=1, dtype=jnp.int32))

    # Equal hashes only say where to look: the contents are compared. So a collision costs hits, and
    # never gives a row the keys and values of other tokens.
    is_like_leader = (tokens == tokens[leader]).all(axis=-1) & (parent == parent[leader])
    is_like_leader &= (namespace == namespace[leader]).all(axis=-1) & has_way[leader]
    is_good = jnp.where(is_new, is_like_leader, prefix_index.matches(index, published, content))

    def with_successors(is_bad: jax.Array) -> jax.Array:
        """Adds the entries after bad ones in their rows."""
        return lax.cummax(jnp.where(is_bad, order, -1)) >= batch.start

    # A block is done if all before it in its row are, and its leader is. Where a leader's chain is cut after
    # equal parents, the follower's is cut at the same place: so one look at leaders suffices.
    is_bad = with_successors(batch.is_entry & ~is_good)
    is_bad = with_successors(is_bad | (is_new & is_bad[leader]))
    is_done = batch.is_entry & ~is_bad
    return _Found(is_done, is_first & is_done, canonical, content, way)


def _stands_before(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Masks the entries of which an earlier masked one has the same value, bool[E]."""
    order = jnp.arange(values.shape[0], dtype=jnp.int32)
    return ((values[:, None] == values[None]) & (order[:, None] > order[None]) & mask[None]).any(axis=1)


def _adopt_if_any(
    pool: BlockPool, is_exchanged: jax.Array, batch: _Batch, canonical: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """Adopts as `_adopt`; on CPUs only where there is a block to exchange: a third of a batch's time.

    Not on accelerators: a GPU's host would wait for the answer in each batch.
    """
    if by_platform(cpu=False, accelerator=True):
        return _adopt(pool, is_exchanged, batch, canonical)
    none = num_true(is_exchanged) & 0
    return run_if(
        is_exchanged.any(), lambda state: _adopt(state[0], is_exchanged, batch, canonical), (pool, none)
    )


def _adopt(
    pool: BlockPool, is_exchanged: jax.Array, batch: _Batch, canonical: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """Replaces the masked blocks by the canonical ones, in every row that holds them; counts them.

    In every row: a fork that kept the private block would hold the children of a block that it does not hold,
    and that block could be evicted under them.
    """
    nowhere = pool.num_blocks
    # One private block may belong to several rows of the batch.
    mask = is_exchanged & ~_stands_before(batch.block_ids, is_exchanged)
    old = jnp.where(mask, batch.block_ids, nowhere)
    new = jnp.where(mask, canonical, nowhere)
    num_owners = get_at(pool.ref_count, old, 0)
    is_revived = block_pool.has_no_owner(pool.ref_count, new)
    is_revived &= ~_stands_before(new, is_revived)
    (num_owners, is_revived), ref_count = read_first((num_owners, is_revived), pool.ref_count)
    ref_count = set_at(add_at(ref_count, new, num_owners), old, 0)
    entries = pool.block_table.at[:, batch.column].get(mode="fill", fill_value=nowhere)
    is_held = mask[None] & (entries == old[None])
    holders = jnp.where(is_held, jnp.arange(entries.shape[0], dtype=jnp.int32)[:, None], entries.shape[0])
    holders, table = read_first(holders, pool.block_table)
    table = set_at(table, (holders, batch.column), jnp.broadcast_to(new, entries.shape))
    assert pool.cached is not None
    cached = dataclasses.replace(pool.cached, num_cached=pool.cached.num_cached - num_true(is_revived))
    pool = dataclasses.replace(pool, block_table=table, ref_count=ref_count, cached=cached)
    return block_pool.put_on_free_stack(pool, old, mask), num_true(mask)
