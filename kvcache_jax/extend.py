"""Reserving slots for new tokens: the rows that `demand` lets grow take their blocks and copies."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_pool, eviction
from kvcache_jax.config import CacheConfig, LayerGroup, SlidingWindow
from kvcache_jax.demand import Demand, NewTokens, decide, demand_of, needs_block
from kvcache_jax.indexing import add_at, first_true, get_at, num_true, rank_true, read_first, run_if, set_at
from kvcache_jax.rows import check_seq_ids, first_failure, is_repeated, num_blocks_for
from kvcache_jax.state import AttentionPlan, BlockCopies, BlockPool, Control, Counter, Step, count_events
from kvcache_jax.status import Status


class Wish(NamedTuple):
    """What a call of `extend` asks for, before anything is granted.

    Attributes:
      seq_ids: i32[n], `max_seqs` for ids that name no row.
      context_len: i32[n], tokens before the call.
      status: i32[n], OK unless something but blocks stands against it.
      wants: bool[n], the row is to grow.
      demands: Per group.
    """

    seq_ids: jax.Array
    context_len: jax.Array
    status: jax.Array
    wants: jax.Array
    demands: list[Demand]


def wish_of(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> Wish:
    """`seq_ids` None stands for all rows, of which none is out of range or repeated."""
    id_checks = ()
    if seq_ids is None:
        seq_ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
    else:
        is_row = (seq_ids >= 0) & (seq_ids < control.max_seqs)
        repeated = is_repeated(seq_ids, is_row & (num_new > 0), control.max_seqs)
        id_checks = (*check_seq_ids(control, seq_ids), (repeated, Status.DUPLICATE_SEQ_ID))
        seq_ids = jnp.where(is_row, seq_ids, control.max_seqs)
    context_len = get_at(control.context_len, seq_ids, 0)
    is_active = get_at(control.is_active, seq_ids, False)
    ends_outside = tokens.is_packed & (tokens.starts[1:] > tokens.row.shape[0])
    is_too_long = (num_new > max_new) | ends_outside | (num_new > config.max_seq_len - context_len)
    status = first_failure(
        *id_checks,
        (num_new < 0, Status.BAD_LENGTH),
        ((num_new > 0) & ~is_active, Status.SEQ_NOT_ACTIVE),
        ((num_new > 0) & is_too_long, Status.TOO_LONG),
    )
    wants = (status == Status.OK) & (num_new > 0)
    wanted_len = jnp.where(wants, num_new, 0)
    demands = [
        demand_of(pool, group, seq_ids, context_len, wanted_len, tokens)
        for pool, group in zip(control.block_pools, config.groups, strict=True)
    ]
    return Wish(seq_ids, context_len, status, wants, demands)


def extend_control(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> tuple[Control, Step, tuple[BlockCopies, ...]]:
    """Reserves the slots; the caller carries out the copies before anything is written."""
    seq_ids, context_len, status, wants, demands = wish_of(control, seq_ids, num_new, tokens, max_new, config)
    control, grows, copies_tail = decide(control, demands, seq_ids, wants, config)
    status = jnp.where(wants & ~grows, jnp.int32(Status.OUT_OF_BLOCKS), status)
    query_len = jnp.where(grows, num_new, 0)
    new_len = context_len + query_len
    rows = jnp.where(grows, seq_ids, control.max_seqs)

    token_rows = tokens.spread(rows, control.max_seqs)
    positions = tokens.spread(context_len, 0) + tokens.offset
    is_token = tokens.offset < tokens.spread(query_len, 0)
    clock = control.clock + grows.any().astype(jnp.uint32)
    pools = [
        _drop_out_of_reach(pool, group, rows, demand.first_kept)
        for pool, group, demand in zip(control.block_pools, config.groups, demands, strict=True)
    ]
    control = dataclasses.replace(control, clock=clock, block_pools=tuple(pools))
    needs = [
        jnp.sum(jnp.where(grows, demand.num_blocks, 0) + copies_tail[g].astype(jnp.int32), dtype=jnp.int32)
        for g, demand in enumerate(demands)
    ]
    control = _make_room(control, needs, demands, copies_tail, config)
    pools, slots, plans, copies = [], [], [], []
    for g, (pool, group, demand) in enumerate(zip(control.block_pools, config.groups, demands, strict=True)):
        columns = positions // group.block_size
        opens_block = is_token & needs_block(pool, group, token_rows, positions)
        opens_block, table = read_first(opens_block, pool.block_table)
        pool = dataclasses.replace(pool, block_table=table)
        pool, copies_made = _take_copies(
            pool, rows, context_len // group.block_size, demand.tail, copies_tail[g]
        )
        pool, ids = block_pool.take(pool, opens_block)
        pool = _put(pool, jnp.where(opens_block, token_rows, control.max_seqs), columns, ids)
        block_ids = get_at(pool.block_table, (token_rows, columns), pool.num_blocks)
        slot = block_ids * group.block_size + positions % group.block_size
        slots.append(jnp.where(is_token, slot, pool.num_blocks * group.block_size).reshape(tokens.shape))
        plans.append(_plan(group, context_len, new_len, query_len))
        pools.append(pool)
        copies.append(copies_made)

    num_copies = sum((copied.num_copies for copied in copies), start=jnp.int32(0))
    control = dataclasses.replace(
        control,
        context_len=set_at(control.context_len, rows, new_len),
        last_used=set_at(control.last_used, rows, clock),
        num_uses=add_at(control.num_uses, rows, 1),
        counters=count_events(control, {Counter.COPIES: num_copies}),
        block_pools=tuple(pools),
    )
    step = Step(
        status=status,
        seq_ids=seq_ids,
        query_len=query_len,
        context_len=new_len,
        positions=positions.reshape(tokens.shape),
        slots=tuple(slots),
        plans=tuple(plans),
        cu_query_lens=tokens.starts if tokens.is_packed else None,
    )
    return control, step, tuple(copies)


def record_tokens(
    control: Control, tokens: jax.Array, step: Step, copies: tuple[BlockCopies, ...], config: CacheConfig
) -> Control:
    """Notes which tokens the blocks of the indexed group hold; copied blocks hold those of the original."""
    index, group_id = control.prefix_index, config.indexed_group
    assert index is not None
    src, dst, num_copies = copies[group_id]

    def copy_block(i: jax.Array, block_tokens: jax.Array) -> jax.Array:
        return set_at(block_tokens, dst[i], block_tokens[src[i]])

    block_tokens = lax.fori_loop(0, num_copies, copy_block, index.block_tokens)
    # Entries per trip: fewer wait for one place after the other, more make a longer kernel to compile.
    by_slot = set_at(block_tokens.reshape(-1), step.slots[group_id], tokens, unroll=8)
    index = dataclasses.replace(index, block_tokens=by_slot.reshape(block_tokens.shape))
    return dataclasses.replace(control, prefix_index=index)


def _make_room(
    control: Control,
    needs: list[jax.Array],
    demands: list[Demand],
    copies_tail: jax.Array,
    config: CacheConfig,
) -> Control:
    """Releases the last blocks that are to be copied, and evicts until each group has what it `needs`."""

    def release_tails(pools: tuple[BlockPool, ...]) -> tuple[BlockPool, ...]:
        return tuple(
            block_pool.release_repeated(pool, jnp.where(copies, demand.tail, pool.num_blocks))
            for pool, demand, copies in zip(pools, demands, copies_tail, strict=True)
        )

    def evict(trip: jax.Array, control: Control) -> Control:
        pools = run_if(trip > 0, release_tails, control.block_pools)
        most = [jnp.minimum(n, block_pool.num_available(pool)) for n, pool in zip(needs, pools, strict=True)]
        return eviction.make_room(dataclasses.replace(control, block_pools=pools), most, config)

    def release_and_evict(control: Control) -> Control:
        # What else is cached goes first, whatever the policy: a row's own block is no victim of its copy.
        return lax.fori_loop(0, 1 + copies_any.astype(jnp.int32), evict, control)

    copies_any = copies_tail.any()
    if control.prefix_index is None:
        pools = run_if(copies_any, release_tails, control.block_pools)
        return dataclasses.replace(control, block_pools=pools)
    lacks = [n > pool.num_free for n, pool in zip(needs, control.block_pools, strict=True)]
    return run_if(copies_any | jnp.stack(lacks).any(), release_and_evict, control)


def _drop_out_of_reach(
    pool: BlockPool, group: LayerGroup, rows: jax.Array, first_kept: jax.Array
) -> BlockPool:
    """Gives back the blocks between the sinks and `first_kept`, one column of every row at a time.

    What a row holds behind its sinks is contiguous, so the walk down from `first_kept` ends at the
    first empty column: no trip where nothing left the window, one or two while decoding.
    """
    if not isinstance(group.kind, SlidingWindow):
        return pool
    nowhere = pool.num_blocks

    def entries_at(pool: BlockPool, distance: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = first_kept - distance
        is_droppable = (rows < pool.block_table.shape[0]) & (columns >= group.num_sink_blocks)
        entries = get_at(pool.block_table, (rows, columns), nowhere)
        return jnp.where(is_droppable, entries, nowhere), columns

    def drop_column(state):
        pool, distance = state
        entries, columns = entries_at(pool, distance)
        pool = block_pool.release_repeated(pool, entries)
        held_rows = jnp.where(entries < nowhere, rows, pool.block_table.shape[0])
        table = set_at(pool.block_table, (held_rows, columns), nowhere)
        return dataclasses.replace(pool, block_table=table), distance + 1

    def is_left(state):
        return (entries_at(*state)[0] < nowhere).any()

    return lax.while_loop(is_left, drop_column, (pool, jnp.int32(1)))[0]


def _take_copies(
    pool: BlockPool, rows: jax.Array, columns: jax.Array, tail: jax.Array, mask: jax.Array
) -> tuple[BlockPool, BlockCopies]:
    """Gives each masked row a block in the place of its last one, `tail` i32[n] in `columns` i32[n]."""

    def put_copies(state):
        pool, src, dst = state
        # Released by its rows, and evicted for the blocks that are taken now: it may be among them.
        was_evicted = mask & (block_pool.ref_counts(pool, tail) == 0) & ~block_pool.is_published(pool, tail)
        was_evicted, ref_count = read_first(was_evicted, pool.ref_count)
        pool = dataclasses.replace(pool, ref_count=ref_count)
        pool, new = block_pool.take(pool, mask)
        new = run_if(was_evicted.any(), lambda new: _left_to_last_reader(new, tail, mask), new)
        pool = _put(pool, jnp.where(mask, rows, pool.block_table.shape[0]), columns, new)
        rank, _ = rank_true(mask)
        place = jnp.where(mask, rank, tail.shape[0])
        return pool, set_at(src, place, tail), set_at(dst, place, new)

    num_copies = num_true(mask)
    nowhere = jnp.maximum(tail, pool.num_blocks)  # all of them; a constant would lose the mesh of `tail`
    pool, src, dst = run_if(num_copies > 0, put_copies, (pool, nowhere, nowhere))
    return pool, BlockCopies(src=src, dst=dst, num_copies=num_copies)


def _left_to_last_reader(new: jax.Array, tail: jax.Array, mask: jax.Array) -> jax.Array:
    """`new` i32[n] in another order: a block that is also copied goes to the last masked row that copies it.

    So no copy overwrites what a later one reads.
    """

    def swap(i: jax.Array, new: jax.Array) -> jax.Array:
        is_it = (new == tail[i]) & mask & mask[i]
        other = jnp.where(is_it.any(), first_true(is_it), i)
        return set_at(set_at(new, other, new[i]), i, new[other])

    return lax.fori_loop(0, new.shape[0], swap, new)


def _put(pool: BlockPool, rows: jax.Array, columns: jax.Array, block_ids: jax.Array) -> BlockPool:
    """Enters blocks into the table; rows that are nowhere are skipped."""
    table = set_at(pool.block_table, (rows, columns), block_ids)
    return dataclasses.replace(pool, block_table=table)


def _plan(
    group: LayerGroup, context_len: jax.Array, new_len: jax.Array, query_len: jax.Array
) -> AttentionPlan:
    num_sink_blocks, window = group.num_sink_blocks, 0
    first_column = jnp.zeros_like(context_len)
    if isinstance(group.kind, SlidingWindow):
        window = group.kind.window
        first_len = jnp.maximum(context_len + 1 - window, 0)
        first_column = jnp.maximum(first_len // group.block_size, num_sink_blocks)
    end_column = num_blocks_for(new_len, group.block_size)
    num_columns = jnp.minimum(num_sink_blocks, end_column) + jnp.maximum(end_column - first_column, 0)
    return AttentionPlan(first_column=first_column, num_columns=jnp.where(query_len > 0, num_columns, 0))
