"""Publication: full blocks become findable by their tokens, and equal ones become one.

The blocks to publish, those of all rows end to end, are worked off in batches. Within a batch all are looked
up at once. What depends on the order is settled then: of equal new blocks the first is published and the
others adopt it, and a block that cannot be published ends its row's chain.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_history, block_pool, companions, prefix_index
from kvcache_jax.config import CacheConfig
from kvcache_jax.content_hash import block_hashes, root_hash
from kvcache_jax.indexing import Update, add_at, first_true, get_at, num_true, quotient, read_first, set_at
from kvcache_jax.loops import run_if, skip_unless
from kvcache_jax.prefix_index import Content
from kvcache_jax.rows import check_distinct, first_failure, partial_tails
from kvcache_jax.state import BlockPool, Control, Counter, PrefixIndex, count_events
from kvcache_jax.status import Status

# A trip compares all pairs of so many blocks, also where one is new: more of them make the commit of a
# decoding step slower, fewer that of a prompt, which takes more trips.
_BATCH = 24


class _Pending(NamedTuple):
    """The blocks to publish of all rows of a call, end to end: row `i` has the places `[starts[i], ends[i])`.

    Attributes:
      seq_ids: i32[n], rows of the block table; anything for those that have none.
      num_published: i32[n], blocks before them.
      starts: i32[n].
      ends: i32[n].
      num_blocks: i32[], all of them.
    """

    seq_ids: jax.Array
    num_published: jax.Array
    starts: jax.Array
    ends: jax.Array
    num_blocks: jax.Array


class _Batch(NamedTuple):
    """Some of them, those of a row side by side and in order.

    Attributes:
      is_entry: bool[E].
      end: i32[], behind the last entry.
      row: i32[E], index in the call.
      seq_ids: i32[E], row of the block table.
      start: i32[E], the row's first entry.
      column: i32[E], of the block table.
      block_ids: i32[E]; nowhere where there is no entry.
      before: i32[E], the published block in front of the row's first entry, or nowhere.
    """

    is_entry: jax.Array
    end: jax.Array
    row: jax.Array
    seq_ids: jax.Array
    start: jax.Array
    column: jax.Array
    block_ids: jax.Array
    before: jax.Array


class _Verdict(NamedTuple):
    """What becomes of each block of a batch.

    Attributes:
      is_done: bool[E], it is published, or its contents are already: by `canonical`.
      is_new: bool[E], it is to be entered into the index itself.
      canonical: i32[E], the published block with these contents.
      content: Of each block, the canonical parent included.
      way: i32[E], place in the bucket for a new one.
    """

    is_done: jax.Array
    is_new: jax.Array
    canonical: jax.Array
    content: Content
    way: jax.Array


def commit_rows(
    control: Control, seq_ids: jax.Array | None, final_len: jax.Array, *, config: CacheConfig
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
        id_checks = (*check_distinct(control, rows), (is_idle, Status.SEQ_NOT_ACTIVE))
    status = first_failure(*id_checks, (final_len < 0, Status.BAD_LENGTH))
    num_full = quotient(jnp.maximum(jnp.minimum(final_len, context_len), 0), block_size)
    num_pending = jnp.where(status == Status.OK, jnp.maximum(num_full - num_published, 0), 0)
    ends = jnp.cumsum(num_pending, dtype=jnp.int32)
    pending = _Pending(rows, num_published, ends - num_pending, ends, jnp.sum(num_pending, dtype=jnp.int32))

    def publish_some(state):
        control, is_cut, is_shared, first = state
        batch = _batch_at(control, pending, first, is_cut, config)
        control, is_cut, shares_any = _publish_batch(control, batch, is_cut, config)
        return control, is_cut, is_shared | shares_any, first + batch.is_entry.shape[0]

    is_cut = jnp.zeros_like(num_full, bool)
    pools = tuple(block_pool.sweep_queue(pool, pending.num_blocks > 0) for pool in control.block_pools)
    state = dataclasses.replace(control, block_pools=pools), is_cut, is_cut.any(), pending.num_blocks & 0
    control, _, is_shared, _ = lax.while_loop(
        lambda state: state[3] < pending.num_blocks, publish_some, state
    )
    return skip_unless(is_shared, functools.partial(_note_published_tails, config=config), control), status


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
    """The pending blocks from place `first` i32[] on, but for rows whose chain ended, `is_cut` bool[n]."""
    pool = control.block_pools[config.indexed_group]
    size = min(_BATCH, is_cut.shape[0] * pool.max_blocks_per_seq)
    place = first + jnp.arange(size, dtype=jnp.int32)
    row = jnp.searchsorted(pending.ends, place, side="right", method="scan_unrolled").astype(jnp.int32)
    is_entry = (place < pending.num_blocks) & ~get_at(is_cut, row)
    seq_ids, row_start = get_at(pending.seq_ids, row), get_at(pending.starts, row)
    num_published = get_at(pending.num_published, row)
    column = num_published + place - row_start
    first_column = num_published + jnp.maximum(first - row_start, 0)
    block_ids = get_at(pool.block_table, (seq_ids, column), pool.num_blocks)
    return _Batch(
        is_entry=is_entry,
        end=jnp.minimum(pending.num_blocks - first, size),
        row=row,
        seq_ids=seq_ids,
        start=jnp.maximum(row_start - first, 0),
        column=column,
        block_ids=jnp.where(is_entry, block_ids, pool.num_blocks),
        before=get_at(pool.block_table, (seq_ids, first_column - 1), pool.num_blocks),
    )


def _publish_batch(
    control: Control, batch: _Batch, is_cut: jax.Array, config: CacheConfig
) -> tuple[Control, jax.Array, jax.Array]:
    """Publishes a batch; marks rows whose chain ended in `is_cut` bool[n].

    Returns:
      The control state, `is_cut`, and bool[], whether a block of these has several owners.
    """
    group_id = config.indexed_group
    pool, index = control.block_pools[group_id], control.prefix_index
    assert index is not None
    batch, table = read_first(batch, pool.block_table)
    pool = dataclasses.replace(pool, block_table=table)
    verdict = _judge(control, index, batch)

    assert pool.cached is not None
    new_ids = jnp.where(verdict.is_new, batch.block_ids, pool.num_blocks)
    done_rows = jnp.where(verdict.is_done, batch.seq_ids, control.max_seqs)
    index, (is_published, num_published) = prefix_index.insert(
        index,
        verdict.is_new,
        batch.block_ids,
        verdict.way,
        verdict.content,
        Update(pool.cached.is_published, new_ids, True),
        Update(control.num_published, done_rows, 1, "add"),
        end=batch.end,
    )
    pool = dataclasses.replace(pool, cached=dataclasses.replace(pool.cached, is_published=is_published))
    is_shared = verdict.is_done & (block_pool.ref_counts(pool, batch.block_ids) > 1)
    is_shared, ref_count = read_first(is_shared, pool.ref_count)
    pool = dataclasses.replace(pool, ref_count=ref_count)
    is_exchanged = verdict.is_done & (verdict.canonical != batch.block_ids)
    pool, num_adopted = _adopt(pool, is_exchanged, batch, verdict.canonical)

    if index.history is not None:
        index = _note_uses(control, index, batch, verdict, is_exchanged)
    cut_here = batch.is_entry & ~verdict.is_done
    control = dataclasses.replace(
        control,
        num_published=num_published,
        prefix_index=index,
        block_pools=(*control.block_pools[:group_id], pool, *control.block_pools[group_id + 1 :]),
        counters=count_events(control, {Counter.ADOPTIONS: num_adopted}),
    )
    if len(config.groups) > 1:
        control = _link_companions(control, batch, verdict, config)

    def cut(is_cut: jax.Array) -> jax.Array:
        return set_at(is_cut, jnp.where(cut_here, batch.row, is_cut.shape[0]), True)

    is_cut = skip_unless(cut_here.any(), cut, is_cut)
    return control, is_cut, is_shared.any()


def _link_companions(control: Control, batch: _Batch, verdict: _Verdict, config: CacheConfig) -> Control:
    """Row by row where rows have the same contents: what the first does not hold any more, the next may."""
    order = jnp.arange(batch.row.shape[0], dtype=jnp.int32)

    def link_some(state):
        control, is_left = state
        is_again = is_left & _stands_before(verdict.canonical, is_left)
        end = jnp.where(is_again.any(), first_true(is_again), order.shape[0])
        mask = is_left & (order < end)
        control = companions.link(control, mask, batch.seq_ids, batch.column, verdict.canonical, config)
        return control, is_left & ~mask

    return lax.while_loop(lambda state: state[1].any(), link_some, (control, verdict.is_done))[0]


def _note_uses(
    control: Control,
    index: PrefixIndex,
    batch: _Batch,
    verdict: _Verdict,
    is_exchanged: jax.Array,
) -> PrefixIndex:
    """Tells the eviction policy of what was published, and of what was adopted by other rows."""
    assert index.history is not None
    nowhere = index.parent.shape[0]
    priority = get_at(control.priority, batch.seq_ids)
    new_ids = jnp.where(verdict.is_new, batch.block_ids, nowhere)
    history = block_history.note_published(index.history, new_ids, control.clock, priority, batch.column)
    is_adopted = is_exchanged & ~_stands_before(batch.block_ids, is_exchanged)
    used_ids = jnp.where(is_adopted, verdict.canonical, nowhere)
    history = block_history.note_used(history, used_ids, control.clock)
    # Of several rows that adopt a block, the priority of the last one stays.
    is_last = ~_stands_before(used_ids[::-1], is_adopted[::-1])[::-1]
    history = block_history.note_priority(history, jnp.where(is_last, used_ids, nowhere), priority)
    return dataclasses.replace(index, history=history)


def _judge(control: Control, index: PrefixIndex, batch: _Batch) -> _Verdict:
    """Looks every block up."""
    nowhere, block_size = index.block_tokens.shape
    order = jnp.arange(batch.row.shape[0], dtype=jnp.int32)
    namespace = get_at(control.namespace, batch.seq_ids)
    tokens = get_at(index.block_tokens, batch.block_ids)

    is_root = batch.before == nowhere

    def from_root(base: jax.Array) -> jax.Array:
        return jnp.where(is_root[:, None], root_hash(control.hash_key, namespace), base)

    # While decoding, no block is the first one of its row.
    base = skip_unless((batch.is_entry & is_root).any(), from_root, get_at(index.block_hash, batch.before))
    added = block_hashes(control.hash_key, tokens, batch.column * block_size)
    up_to = jnp.cumsum(added, axis=0, dtype=jnp.uint32)
    hashes = base + up_to - get_at(up_to - added, batch.start)
    # Computed once: fused into the comparisons below, it would be computed for every pair.
    hashes, tokens, base = lax.optimization_barrier((hashes, tokens, base))

    buckets = prefix_index.bucket_of(index, hashes)
    in_bucket = index.buckets[buckets]
    found = jnp.where(batch.is_entry, prefix_index.candidates(index, in_bucket, hashes), nowhere)
    is_new = batch.is_entry & (found == nowhere)

    def content_of(canonical: jax.Array) -> Content:
        parent = jnp.where(order == batch.start, batch.before, jnp.roll(canonical, 1))
        return Content(tokens, hashes, parent, namespace)

    def settle(_: Any) -> _Verdict:
        first, second = hashes.T
        is_equal = (first[:, None] == first[None]) & (second[:, None] == second[None]) & is_new[None]
        leader = jnp.where(is_new, first_true(is_equal), order)
        follows = is_new & (leader != order)
        is_first = is_new & ~follows
        canonical = jnp.where(is_new, batch.block_ids[leader], found)
        content = content_of(canonical)
        goes_before = (order[:, None] > order[None]) & (buckets[:, None] == buckets[None]) & is_first[None]
        way, has_way = prefix_index.free_way(index, in_bucket, jnp.sum(goes_before, axis=1, dtype=jnp.int32))

        is_like_leader = (tokens == tokens[leader]).all(axis=-1) & (content.parent == content.parent[leader])
        is_like_leader &= (namespace == namespace[leader]).all(axis=-1)
        is_good = jnp.where(follows, is_like_leader, has_way)
        is_good = jnp.where(found < nowhere, prefix_index.matches(index, found, content), is_good)

        # A block is done if those before it in its row are, and its leader is.
        def spread(state):
            is_bad, _ = state
            last_bad = lax.cummax(jnp.where(is_bad, order, -1))
            spread_bad = (last_bad >= batch.start) | is_bad[leader]
            return spread_bad, (spread_bad != is_bad).any()

        is_bad = batch.is_entry & ~is_good
        is_bad, _ = lax.while_loop(lambda state: state[1], spread, (is_bad, is_bad.any()))
        is_done = batch.is_entry & ~is_bad
        return _Verdict(is_done, is_first & is_done, canonical, content, way)

    # While decoding, as a rule, all are new, and each has a bucket for itself, with room.
    way, has_way = prefix_index.free_way(index, in_bucket, batch.row & 0)
    own_bucket = jnp.where(is_new, buckets, -1 - order)
    meets_any = num_true(own_bucket[:, None] == own_bucket[None]) > order.shape[0]
    is_unusual = (batch.is_entry & ~(is_new & has_way)).any() | meets_any
    as_a_rule = _Verdict(is_new, is_new, batch.block_ids, content_of(batch.block_ids), way)
    return skip_unless(is_unusual, settle, as_a_rule)


def _stands_before(values: jax.Array, mask: jax.Array) -> jax.Array:
    """bool[E], whether an earlier masked entry has the same value."""
    order = jnp.arange(values.shape[0], dtype=jnp.int32)
    return ((values[:, None] == values[None]) & (order[:, None] > order[None]) & mask[None]).any(axis=1)


def _adopt(
    pool: BlockPool, is_exchanged: jax.Array, batch: _Batch, canonical: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """Puts the canonical blocks in the place of the masked ones, in every row that holds them; counts them.

    In every row: a fork that kept the private block would hold the children of a block that it does not hold,
    and that block could be evicted under them.
    """

    def exchange(state):
        pool, _ = state
        nowhere = pool.num_blocks
        # One private block may stand in several rows of the batch.
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

    num_exchanged = num_true(is_exchanged)
    return run_if(num_exchanged > 0, exchange, (pool, num_exchanged))
