"""Reserving slots for new tokens: the rows that `demand` lets grow take their blocks and copies."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_pool
from kvcache_jax.config import CacheConfig, LayerGroup, SlidingWindow
from kvcache_jax.demand import NewTokens, decide, demand_of, needs_block
from kvcache_jax.rows import check_seq_ids, first_failure, is_repeated, num_blocks_for
from kvcache_jax.state import AttentionPlan, BlockCopies, BlockPool, Control, Counter, Step, count_events
from kvcache_jax.status import Status


def extend_control(
    control: Control,
    seq_ids: jax.Array | None,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> tuple[Control, Step, tuple[BlockCopies, ...]]:
    """Reserves the slots; the caller carries out the copies before anything is written.

    `seq_ids` None stands for all rows, of which none is out of range or repeated.
    """
    id_checks = ()
    if seq_ids is None:
        seq_ids = jnp.arange(control.max_seqs, dtype=jnp.int32)
    else:
        is_row = (seq_ids >= 0) & (seq_ids < control.max_seqs)
        repeated = is_repeated(seq_ids, is_row & (num_new > 0), control.max_seqs)
        id_checks = (*check_seq_ids(control, seq_ids), (repeated, Status.DUPLICATE_SEQ_ID))
        seq_ids = jnp.where(is_row, seq_ids, control.max_seqs)
    context_len = control.context_len.at[seq_ids].get(mode="fill", fill_value=0)
    is_active = control.is_active.at[seq_ids].get(mode="fill", fill_value=False)
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
    control, grows, copies_tail = decide(control, demands, seq_ids, wants, config)
    status = jnp.where(wants & ~grows, jnp.int32(Status.OUT_OF_BLOCKS), status)
    query_len = jnp.where(grows, num_new, 0)
    new_len = context_len + query_len
    rows = jnp.where(grows, seq_ids, control.max_seqs)

    token_rows = tokens.spread(rows, control.max_seqs)
    positions = tokens.spread(context_len, 0) + tokens.offset
    is_token = tokens.offset < tokens.spread(query_len, 0)
    pools, slots, plans, copies = [], [], [], []
    for g, (pool, group, demand) in enumerate(zip(control.block_pools, config.groups, demands, strict=True)):
        columns = positions // group.block_size
        pool = _drop_out_of_reach(pool, group, rows, demand.first_kept)
        opens_block = is_token & needs_block(pool, group, token_rows, positions)
        pool, ids = block_pool.take(pool, opens_block)
        table = pool.block_table.at[jnp.where(opens_block, token_rows, control.max_seqs), columns].set(
            ids, mode="drop"
        )
        pool = dataclasses.replace(pool, block_table=table)
        pool, copied = _take_copies(pool, rows, context_len // group.block_size, demand.tail, copies_tail[g])
        block_ids = pool.block_table.at[token_rows, columns].get(mode="fill", fill_value=pool.num_blocks)
        slot = block_ids * group.block_size + positions % group.block_size
        slots.append(jnp.where(is_token, slot, pool.num_blocks * group.block_size).reshape(tokens.shape))
        plans.append(_plan(group, context_len, new_len, query_len))
        pools.append(pool)
        copies.append(copied)

    clock = control.clock + grows.any().astype(jnp.uint32)
    num_copies = sum((copied.num_copies for copied in copies), start=jnp.int32(0))
    control = dataclasses.replace(
        control,
        context_len=control.context_len.at[rows].set(new_len, mode="drop"),
        last_used=control.last_used.at[rows].set(clock, mode="drop"),
        clock=clock,
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
        entries = pool.block_table.at[rows, columns].get(mode="fill", fill_value=nowhere)
        return jnp.where(is_droppable, entries, nowhere), columns

    def drop_column(state):
        pool, distance = state
        entries, columns = entries_at(pool, distance)
        pool = block_pool.release_repeated(pool, entries)
        held_rows = jnp.where(entries < nowhere, rows, pool.block_table.shape[0])
        table = pool.block_table.at[held_rows, columns].set(nowhere, mode="drop")
        return dataclasses.replace(pool, block_table=table), distance + 1

    def is_left(state):
        return (entries_at(*state)[0] < nowhere).any()

    return lax.while_loop(is_left, drop_column, (pool, jnp.int32(1)))[0]


def _take_copies(
    pool: BlockPool, rows: jax.Array, columns: jax.Array, tail: jax.Array, copies_tail: jax.Array
) -> tuple[BlockPool, BlockCopies]:
    """Gives each row that must copy its tail a block of its own in the tail's place.

    A loop of at most one trip, because `lax.cond` copies the big arrays that it passes through.
    """
    nowhere = pool.num_blocks

    def take_copies(state):
        pool, _, _ = state
        pool = block_pool.release_repeated(pool, jnp.where(copies_tail, tail, nowhere))
        pool, dst = block_pool.take(pool, copies_tail)
        table = pool.block_table.at[jnp.where(copies_tail, rows, pool.block_table.shape[0]), columns].set(
            dst, mode="drop"
        )
        return dataclasses.replace(pool, block_table=table), dst, jnp.bool_(False)

    unused = jnp.full_like(tail, nowhere)
    pool, dst, _ = lax.while_loop(lambda state: state[2], take_copies, (pool, unused, copies_tail.any()))
    rank, num_copies = block_pool.rank_true(copies_tail)
    place = jnp.where(copies_tail, rank, tail.shape[0])
    return pool, BlockCopies(
        src=unused.at[place].set(tail, mode="drop"),
        dst=unused.at[place].set(dst, mode="drop"),
        num_copies=num_copies,
    )


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
