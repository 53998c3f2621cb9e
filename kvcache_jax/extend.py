"""Reserving slots for new tokens: which rows can grow, which blocks they take, which they must copy.

The definition is sequential: `n` rows grow one after the other, each giving back the blocks that left
its window, then taking what it needs or failing. Almost always every row fits and no tail is shared;
then all rows proceed at once. Otherwise `_walk` decides row by row, and the same vectorised update
carries out the decisions.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax import block_pool
from kvcache_jax.block_pool import num_true
from kvcache_jax.config import CacheConfig, LayerGroup, SlidingWindow
from kvcache_jax.rows import check_seq_ids, first_failure, is_repeated, num_blocks_for
from kvcache_jax.state import AttentionPlan, BlockCopies, BlockPool, Control, Counter, Step, count_events
from kvcache_jax.status import Status


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens as the caller laid them out, flat.

    Attributes:
      row: i32[tokens], index of the token's row in the call, `n` for padding.
      offset: i32[tokens], place among the row's new tokens.
      starts: i32[n + 1], the row's tokens are `[starts[i], starts[i + 1])`.
      shape: Shape of the caller's token arrays.
      is_packed: Whether rows lie end to end.
    """

    row: jax.Array
    offset: jax.Array
    starts: jax.Array
    shape: tuple[int, ...]
    is_packed: bool


class Demand(NamedTuple):
    """What the rows of one call ask of one layer group.

    Attributes:
      num_blocks: i32[n], blocks per row, copies not counted.
      tail: i32[n], the partly filled block that the row's first new token goes into, or nowhere.
      first_kept: i32[n], first table column behind the sinks that stays in reach.
    """

    num_blocks: jax.Array
    tail: jax.Array
    first_kept: jax.Array


def padded_tokens(num_rows: int, max_new: int) -> NewTokens:
    """Tokens in `[num_rows, max_new]` arrays."""
    order = jnp.arange(num_rows * max_new, dtype=jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * max_new
    return NewTokens(order // max_new, order % max_new, starts, (num_rows, max_new), is_packed=False)


def packed_tokens(num_new: jax.Array, num_tokens: int) -> NewTokens:
    """Tokens end to end in `[num_tokens]` arrays, `num_new[i]` of row `i`."""
    ends = jnp.cumsum(jnp.clip(num_new, 0, num_tokens + 1), dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    order = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(ends, order, side="right").astype(jnp.int32)
    return NewTokens(row, order - starts[row], starts, (num_tokens,), is_packed=True)


def extend_control(
    control: Control,
    seq_ids: jax.Array,
    num_new: jax.Array,
    tokens: NewTokens,
    max_new: int,
    config: CacheConfig,
) -> tuple[Control, Step, tuple[BlockCopies, ...]]:
    """Reserves the slots; the caller carries out the copies before anything is written."""
    checks = check_seq_ids(control, seq_ids)
    is_row = (seq_ids >= 0) & (seq_ids < control.max_seqs)
    seq_ids = jnp.where(is_row, seq_ids, control.max_seqs)
    context_len = control.context_len.at[seq_ids].get(mode="fill", fill_value=0)
    no_room = tokens.is_packed & (tokens.starts[1:] > tokens.row.shape[0])
    status = first_failure(
        *checks,
        (num_new < 0, Status.BAD_LENGTH),
        (is_repeated(seq_ids, is_row & (num_new > 0), control.max_seqs), Status.DUPLICATE_SEQ_ID),
        ((num_new > 0) & ~control.is_active.at[seq_ids].get(mode="clip"), Status.SEQ_NOT_ACTIVE),
        ((num_new > max_new) | no_room, Status.TOO_LONG),
        ((num_new > 0) & (num_new > config.max_seq_len - context_len), Status.TOO_LONG),
    )
    wants = (status == Status.OK) & (num_new > 0)
    demands, needs_block = zip(
        *(
            _demand(pool, group, seq_ids, context_len, jnp.where(wants, num_new, 0), tokens)
            for pool, group in zip(control.block_pools, config.groups, strict=True)
        ),
        strict=True,
    )
    grows, copies_tail = _decide(control, list(demands), seq_ids, wants, config)
    status = jnp.where(wants & ~grows, jnp.int32(Status.OUT_OF_BLOCKS), status)
    query_len = jnp.where(grows, num_new, 0)
    new_len = context_len + query_len

    rows = jnp.where(grows, seq_ids, control.max_seqs)
    token_grows = grows.at[tokens.row].get(mode="fill", fill_value=False)
    token_rows = rows.at[tokens.row].get(mode="fill", fill_value=control.max_seqs)
    positions = context_len.at[tokens.row].get(mode="fill", fill_value=0) + tokens.offset
    is_token = token_grows & (tokens.offset < query_len.at[tokens.row].get(mode="fill", fill_value=0))

    pools, slots, plans, copies = [], [], [], []
    for g, (pool, group, demand) in enumerate(zip(control.block_pools, config.groups, demands, strict=True)):
        pool = _drop_out_of_reach(pool, group, rows, demand.first_kept)
        pool, ids = block_pool.take(pool, needs_block[g] & token_grows)
        columns = positions // group.block_size
        table = pool.block_table.at[
            jnp.where(ids < pool.num_blocks, token_rows, control.max_seqs), columns
        ].set(ids, mode="drop")
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


def _demand(
    pool: BlockPool,
    group: LayerGroup,
    seq_ids: jax.Array,
    context_len: jax.Array,
    num_new: jax.Array,
    tokens: NewTokens,
) -> tuple[Demand, jax.Array]:
    """The group's demand, and bool[tokens]: the token opens a block that its row does not hold yet."""
    block_size = group.block_size
    token_rows = seq_ids.at[tokens.row].get(mode="fill", fill_value=pool.block_table.shape[0])
    positions = context_len.at[tokens.row].get(mode="fill", fill_value=0) + tokens.offset
    is_new = tokens.offset < num_new.at[tokens.row].get(mode="fill", fill_value=0)
    # Past the table's width nothing is new, so the fill value is never taken for "no block".
    held = pool.block_table.at[token_rows, positions // block_size].get(mode="fill", fill_value=0)
    needs_block = is_new & (positions % block_size == 0) & (held == pool.num_blocks)
    if tokens.is_packed:
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needs_block, dtype=jnp.int32)])
        num_blocks = jnp.diff(before.at[tokens.starts].get(mode="clip"))
    else:
        num_blocks = jnp.sum(needs_block.reshape(tokens.shape), axis=1, dtype=jnp.int32)
    has_tail = (num_new > 0) & (context_len % block_size > 0)
    tail = pool.block_table.at[seq_ids, context_len // block_size].get(
        mode="fill", fill_value=pool.num_blocks
    )
    tail = jnp.where(has_tail, tail, pool.num_blocks)
    return Demand(num_blocks, tail, first_kept_column(group, context_len)), needs_block


def first_kept_column(group: LayerGroup, context_len: jax.Array) -> jax.Array:
    """First column behind the sinks that rows of `context_len` tokens still need, rollback included."""
    if not isinstance(group.kind, SlidingWindow):
        return jnp.zeros_like(context_len)
    first_len = context_len + 1 - group.kind.window - group.kind.max_rollback
    return jnp.maximum(jnp.maximum(first_len, 0) // group.block_size, group.num_sink_blocks)


def _decide(
    control: Control, demands: list[Demand], seq_ids: jax.Array, wants: jax.Array, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """Which rows grow, bool[n], and where their tail must be copied first, bool[groups, n]."""
    fits, is_shared = jnp.bool_(True), jnp.bool_(False)
    for pool, demand in zip(control.block_pools, demands, strict=True):
        fits &= jnp.sum(demand.num_blocks, dtype=jnp.int32) <= block_pool.num_available(pool)
        is_shared |= (block_pool.ref_counts(pool, demand.tail) > 1).any()
    nothing_to_copy = jnp.zeros((len(demands), *wants.shape), bool)
    return lax.cond(
        fits & ~is_shared,
        lambda: (wants, nothing_to_copy),
        lambda: _walk(control, demands, seq_ids, wants, config),
    )


def _walk(
    control: Control, demands: list[Demand], seq_ids: jax.Array, wants: jax.Array, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """`_decide` one row after the other.

    Only owners and free counts are followed: a block taken here is neither shared nor given back
    in the same call, so its id does not matter.
    """

    def walk_row(state, row):
        seq_id, wants_row, row_demands = row
        grows, after, copies = wants_row, [], []
        for (ref_count, num_free), pool, group, demand in zip(
            state, control.block_pools, config.groups, row_demands, strict=True
        ):
            dropped = jnp.int32(0)
            if isinstance(group.kind, SlidingWindow):
                entries = pool.block_table.at[seq_id].get(mode="fill", fill_value=pool.num_blocks)
                columns = jnp.arange(pool.max_blocks_per_seq, dtype=jnp.int32)
                leaves = (columns >= group.num_sink_blocks) & (columns < demand.first_kept)
                leaving = jnp.where(leaves, entries, pool.num_blocks)
                dropped = num_true(ref_count.at[leaving].get(mode="fill", fill_value=0) == 1)
            else:
                leaving = jnp.full(0, pool.num_blocks, jnp.int32)
            copies_tail = ref_count.at[demand.tail].get(mode="fill", fill_value=0) > 1
            need = demand.num_blocks + copies_tail.astype(jnp.int32)
            grows &= need <= num_free + dropped
            let_go = jnp.append(leaving, jnp.where(copies_tail, demand.tail, pool.num_blocks))
            after.append((let_go, num_free + dropped - need))
            copies.append(copies_tail)
        state = tuple(
            (
                ref_count.at[jnp.where(grows, let_go, ref_count.shape[0])].add(-1, mode="drop"),
                jnp.where(grows, left, num_free),
            )
            for (ref_count, num_free), (let_go, left) in zip(state, after, strict=True)
        )
        return state, (grows, jnp.stack(copies) & grows)

    state = tuple((pool.ref_count, block_pool.num_available(pool)) for pool in control.block_pools)
    _, (grows, copies) = lax.scan(walk_row, state, (seq_ids, wants, demands))
    return grows, copies.T


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
    place = jnp.where(copies_tail, block_pool.rank_true(copies_tail), tail.shape[0])
    return pool, BlockCopies(
        src=unused.at[place].set(tail, mode="drop"),
        dst=unused.at[place].set(dst, mode="drop"),
        num_copies=num_true(copies_tail),
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
